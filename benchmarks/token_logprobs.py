"""Time and peak memory of `klnb.token_logprobs` against `log_softmax().gather()`, side by side.

    python benchmarks/token_logprobs.py            # [8, 256, 49152] float32, temperatures 1 and .7
    python benchmarks/token_logprobs.py --shape 2 256 49152 --repeats 3 --dtype bfloat16 --device cuda

Every cell is a process of its own: peak memory is what its resident set (on CUDA: the allocator) gained over the inputs
at its highest, forward and backward, which no earlier allocation can hide. Times are of forward and backward, the least
of the repeats. Ratios are ours over theirs, from this run; a busy machine moves them.
"""

import argparse
import json
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

from klnb.losses import token_logprobs, token_logprobs_from_hidden

HIDDEN = 64  # small: what is compared is the logits' share


def plain(logits, tokens, temperature):
    logits = logits if temperature == 1 else logits / temperature
    return logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def hidden_plain(hidden, weight, tokens, temperature):
    return plain(hidden @ weight.T, tokens, temperature)


WAYS = {
    "ours": token_logprobs,
    "log_softmax": plain,
    "ours, from hidden": token_logprobs_from_hidden,
    "log_softmax, from hidden": hidden_plain,
}


def peak_mib(device):
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    status = Path("/proc/self/status")
    if status.exists():  # Linux: ru_maxrss would start from the peak of the process that started this one
        return int(re.search(r"VmHWM:\s*(\d+) kB", status.read_text())[1]) / 2**10
    unit = 2**20 if sys.platform == "darwin" else 2**10  # ru_maxrss: bytes on macOS, else KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def measure(way, shape, temperature, dtype, device, repeats):
    """{"seconds", "mib"} of one way in this process, which should be new."""
    generator = torch.Generator().manual_seed(0)
    dtype, (b, t, v) = getattr(torch, dtype), shape
    tokens = torch.randint(v, (b, t), generator=generator).to(device)
    sizes = [(b, t, HIDDEN), (v, HIDDEN)] if "hidden" in way else [(b, t, v)]
    inputs = [torch.empty(size, dtype=dtype) for size in sizes]
    for x in inputs:  # in place: a temporary would hide our own peak under its own
        x.normal_(generator=generator)
    inputs = [x.to(device).requires_grad_() for x in inputs]
    # the thread pool and the kernels' own buffers are no part of the comparison
    WAYS[way](*[x[:1, :1] if x.ndim == 3 else x for x in inputs], tokens[:1, :1], temperature).sum()
    before, best = peak_mib(device), float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        WAYS[way](*inputs, tokens, temperature).sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
        for x in inputs:
            x.grad = None
    return {"seconds": best, "mib": peak_mib(device) - before}


def main(argv=None):
    parser = argparse.ArgumentParser(description="token_logprobs against log_softmax().gather()")
    parser.add_argument("--shape", type=int, nargs=3, default=(8, 256, 49152), metavar=("B", "T", "V"))
    parser.add_argument("--temperature", type=float, nargs="+", default=[1.0, 0.7])
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64", "bfloat16", "float16"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--one", choices=WAYS, help="measure this way only, here, and print JSON")
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(measure(args.one, args.shape, args.temperature[0], args.dtype, args.device, args.repeats)))
        return
    threads = torch.get_num_threads()
    print(f"{list(args.shape)} {args.dtype} on {args.device}, torch {torch.__version__}, {threads} threads")
    head = "ours ÷ log_softmax: time, memory"
    print(f"{'temperature':>11} {'way':>25} {'seconds':>8} {'MiB beyond inputs':>18}   {head}")
    for temperature in args.temperature:
        got = {}
        for way in WAYS:
            command = [sys.executable, __file__, "--one", way, "--temperature", str(temperature), "--dtype", args.dtype]
            command += ["--device", args.device, "--repeats", str(args.repeats), "--shape", *map(str, args.shape)]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            got[way] = json.loads(out.splitlines()[-1])
            row = f"{temperature:>11g} {way:>25} {got[way]['seconds']:>8.3f} {got[way]['mib']:>18.0f}"
            if way.startswith("log_softmax"):
                ours = got[way.replace("log_softmax", "ours")]
                row += f"   {ours['seconds'] / got[way]['seconds']:.2f}, {ours['mib'] / max(got[way]['mib'], 1):.2f}"
            print(row, flush=True)


if __name__ == "__main__":
    main()
