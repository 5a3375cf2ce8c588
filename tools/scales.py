"""The expensive scales (scales/dvc.yaml): their cost, a short one in a given time, their runs as data in git.

python tools/scales.py plan --section smollm2 --data-dir path/to/math     a dry run: runs, memory, tokens, and time from
                                                                         two timed steps
python tools/scales.py short --section gpu_short --minutes 10 --data-dir ...   as many steps as fit, then publish
python tools/scales.py publish                          finished runs into published/, with what they were made with
"""
import argparse
import json
import resource
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch
import transformers
from huggingface_hub.utils import logging
from ruamel.yaml import YAML

from klnb import models, paths, training
from klnb import runs as sweeps
from klnb.paths import write
from klnb.processes import in_processes

SCALES = ("smollm2", "gpu_distillation", "gpu_math_reward", "gpu_short")
DIGITS = 6  # significant ones, of published numbers


# Runs -----------------------------------------------------------------------------------------------------------------


def runs_of(section: dict, changes: dict) -> dict:
    """{name/file: settings} of a section's runs, all names of a seed before the next seed."""
    found = {}
    for seed in section["seeds"]:
        for name in section["names"]:
            if seed in sweeps.seeds_of(section, name):
                made = sweeps.specs(section["train"] | changes, [seed], name, section.get("betas"))
                found |= {f"{name}/{file}": s for file, s in made.items()}
    return found


def done(run: str, s: dict, *folders: Path) -> bool:
    """Is this run finished in one of the folders?"""
    files = [f for f in (folder / run for folder in folders) if f.exists()]
    return any(sweeps.kept(json.loads(f.read_text())["settings"]) == sweeps.kept(s) for f in files)


def costliest(runs: dict) -> dict:
    """Of runs {name/file: settings} the settings of one that takes longest, which estimates are for."""
    return training.DEFAULTS | max(runs.values(), key=lambda s: s["name"] == "rao-blackwell")  # it needs the logits


def timed(s: dict) -> dict:
    """Seconds of a run's second and third step (the first is warm-up), of its last evaluation and of all but the three
    steps, and the peak of memory in bytes. On a CPU with one thread, as runs have; on CUDA of a second run, as the
    first one compiles."""
    torch.set_num_threads(1)
    at, cuda = [], s["device"].startswith("cuda") and torch.cuda.is_available()

    def clock(steps):
        for i in steps:
            at.append(time.monotonic())
            yield i

    if cuda:
        training.train(s | {"steps": 3, "eval_every": 3})
        torch.cuda.reset_peak_memory_stats()
    start = time.monotonic()
    training.train(s | {"steps": 3, "eval_every": 3}, bar=clock)
    end = time.monotonic()
    # of CUDA what is reserved: the memory of recorded graphs is not counted as allocated
    peak = torch.cuda.max_memory_reserved() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    step = (at[3] - at[1]) / 2
    return {"step": step, "evaluation": end - at[3], "rest": end - start - 3 * step, "memory": peak}


def empty(name: str, layers: int | None):
    """A model without weights, from its configuration alone."""
    place, _, commit = str(training._place(name)).partition("@")
    commit = commit or models.REVISIONS.get(place)
    if commit:  # on the hub: this file alone
        logging.set_verbosity_error()  # what it tries again; the error below says it in one line
        try:
            config = transformers.AutoConfig.from_pretrained(place, revision=commit)
        except OSError:
            raise OSError(f"cannot get {name} from the hub. {models.WAYS_OUT}") from None
    else:
        config = transformers.AutoConfig.from_pretrained(models._find(place, None)[0])
    config.num_hidden_layers = layers or config.num_hidden_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def memory(s: dict) -> dict:
    """Bytes that a run needs on its device, by what needs them; from the models' sizes."""
    policy, ref = empty(s["policy"], s["policy_layers"]), empty(s["ref"], s["ref_layers"])
    weights, of_ref = (sum(p.numel() for p in m.parameters()) for m in (policy, ref))
    c, half = policy.config, 2 if s["dtype"] == "bfloat16" else 4
    rows = s["prompts"] * s["group"]
    width = s["max_new_tokens"] + 640  # with the longest prompts of 1,000 characters
    heads = getattr(c, "num_key_value_heads", c.num_attention_heads) * c.hidden_size // c.num_attention_heads
    kept = c.num_hidden_layers * c.hidden_size * (1 if s["checkpointing"] else 16)
    vocabulary = rows // s["chunks"] * s["max_new_tokens"] * c.vocab_size
    return {
        "policy: weights, gradients twice, AdamW": 4 * 5 * weights,
        "policy: weights in bfloat16": (s["dtype"] == "bfloat16") * 2 * weights,
        "reference": of_ref * getattr(torch, s["ref_dtype"]).itemsize,
        # keys leave their rotation in float32, whatever the autocast
        "cache of the rollouts": (4 + half) * rows * width * c.num_hidden_layers * heads,
        "prompts of the rollouts, in one block": 3 * half * rows * 640 * c.intermediate_size,
        "activations of a part": half * rows // s["chunks"] * width * kept,
        "logits of a part, seven times": 7 * 4 * vocabulary,
    }


def plan(title: str, section: dict, changes: dict):
    """Print what the runs of a section would do and cost, from two timed steps."""
    runs = runs_of(section, changes)
    left = {r: s for r, s in runs.items() if not done(r, s, paths.PUBLISHED / title, paths.BUILD / "runs" / title)}
    s = costliest(left or runs)
    step = s["prompts"] * s["group"]
    print(f"{title}: {len(runs)} runs ({', '.join(section['names'])}; seeds {section['seeds']}), {len(left)} to do")
    print(f"a run: {s['steps']} steps of {s['prompts']} prompts x {s['group']} completions, at most "
          f"{s['max_new_tokens']} tokens each: {s['steps'] * step * s['max_new_tokens']:,} tokens; "
          f"{s['steps'] * step * s['max_new_tokens'] * len(left):,} in all", flush=True)  # fmt: skip
    print(f"learning rate {s['lr']:g}, gradients clipped at {s['clip']:g}, {s['dtype']}, on {s['device']}")
    try:
        parts = memory(s)
        for what, size in parts.items():
            print(f"  {size / 2**30:7.2f} GiB  {what}")
        print(f"  {sum(parts.values()) / 2**30:7.2f} GiB  in all, estimated", flush=True)
        if s["device"].startswith("cuda") and not torch.cuda.is_available():
            print("no CUDA GPU here, so no timed steps: run this on a machine that has one", flush=True)
            return
        took = timed(s)
    except (OSError, ValueError) as error:
        sys.exit(f"{title}: {error}")
    evaluations = 1 + -(-s["steps"] // s["eval_every"])
    each = s["steps"] * took["step"] + evaluations * took["evaluation"]
    print(f"two timed steps of {s['name']}: {took['step']:.2f} s each, an evaluation {took['evaluation']:.1f} s, "
          f"peak {took['memory'] / 2**30:.2f} GiB of memory")  # fmt: skip
    print(f"a run: {each / 60:.1f} minutes; what is left: {each * len(left) / 3600:.2f} hours, one run at a time")


def short(title: str, section: dict, changes: dict, minutes: float):
    """All runs of a section, with as many steps each as fit into the time; then publish them."""
    start = time.monotonic()
    runs = runs_of(section, changes | {"steps": 1})
    try:
        took = timed(costliest(runs))
        spent = time.monotonic() - start
        fixed = took["rest"] + took["evaluation"]  # loading, and three evaluations for the two there
        steps = int(((60 * minutes - spent) / len(runs) - fixed) / took["step"])
        if steps < 4:
            raise ValueError(f"{minutes:g} minutes are too few: {len(runs)} runs of at least 4 steps would take "
                             f"{(len(runs) * (fixed + 4 * took['step']) + spent) / 60:.1f}; give more MINUTES")
        print(f"{title}: {len(runs)} runs of {steps} steps, {took['step']:.2f} s a step", flush=True)
        runs = runs_of(section, changes | {"steps": steps, "eval_every": (steps + 1) // 2})
        folder = paths.BUILD / "runs" / title
        jobs = {}
        for run, s in runs.items():
            (folder / run).parent.mkdir(parents=True, exist_ok=True)
            jobs[run] = (s, folder / run)
        in_processes(sweeps.make, jobs, 1, title)
        publish()
    except (OSError, ValueError) as error:
        sys.exit(f"{title}: {error}")
    print(f"{(time.monotonic() - start) / 60:.1f} minutes")


# Publishing -----------------------------------------------------------------------------------------------------------


def publish(root: Path = paths.ROOT):
    """Copy finished runs of the scales to published/SCALE/NAME/, with the commit whose code made them; list them.

    Runs with other settings than the section's in params.yaml are not (gpu_short's steps are as they were then).
    ValueError, when all others are done, for runs whose code no commit has or with numbers that are not finite.
    """
    sections, wrong = YAML(typ="safe", pure=True).load((root / "params.yaml").read_text()), []
    for scale in SCALES:
        wanted = runs_of(sections[scale], {}) if scale in sections else {}
        for file in sorted((root / "build/runs" / scale).glob("*/beta*-seed*.json")):
            run = str(file.relative_to(root / "build/runs" / scale))
            target, record = root / "published" / scale / run, json.loads(file.read_text())
            if "commit" in record or done(run, record["settings"], root / "published" / scale):
                continue
            if scale != "gpu_short" and not (run in wanted and done(run, wanted[run], file.parent.parent)):
                print(f"{scale}/{run}: other settings than in params.yaml, left out")
                continue
            try:
                record["commit"] = commit_of(record["made"]["code"], root)
                record["made"]["parameters"] = sweeps.digest(record["settings"])
                text = json.dumps(_rounded(record), separators=(",", ":"), allow_nan=False) + "\n"
            except ValueError as error:
                wrong.append(f"{scale}/{run}: {error}")
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            write(target, lambda tmp, text=text: tmp.write_text(text))
            print("published", target.relative_to(root))
    if wrong:
        raise ValueError("; ".join(wrong))


def _rounded(x):
    if isinstance(x, dict):
        return {k: v if k == "settings" else _rounded(v) for k, v in x.items()}
    if isinstance(x, list):
        return [_rounded(v) for v in x]
    return float(f"{x:.{DIGITS}g}") if isinstance(x, float) else x


def commit_of(code: str, root: Path) -> str:
    """The newest commit whose training code has this hash. ValueError if there is none: commit the code first."""
    git = partial(subprocess.run, cwd=root, capture_output=True, text=True)
    log = git(["git", "log", "--format=%H", "--", *(f"klnb/{m}.py" for m in sweeps.CODE)]).stdout.split()
    for commit in log:
        shown = {m: git(["git", "show", f"{commit}:klnb/{m}.py"]) for m in sweeps.CODE}
        found = sweeps.code({m: p.stdout for m, p in shown.items()})
        if found == code and not any(p.returncode for p in shown.values()):
            return commit
    raise ValueError(f"no commit has the code that made this run (sha256 {code[:12]}...): commit it, then publish")


def main(argv=None):
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("what", choices=["plan", "short", "publish"])
    ap.add_argument("--section", default="smollm2", help="of params.yaml: " + ", ".join(SCALES))
    ap.add_argument("--params", type=Path, default=paths.PARAMS)
    ap.add_argument("--data-dir", help="the folder with MATH's train.jsonl and test.jsonl; else they come from the hub")
    ap.add_argument("--minutes", type=float, default=10.0, help="of short")
    args = ap.parse_args(argv)
    if args.what == "publish":
        try:
            return publish()
        except ValueError as error:
            sys.exit(str(error))
    sections = YAML(typ="safe", pure=True).load(args.params.read_text())
    if args.section not in sections:
        ap.error(f"no section {args.section} in {args.params.name}")
    changes = {"data_dir": args.data_dir} if args.data_dir else {}
    if args.what == "plan":
        plan(args.section, sections[args.section], changes)
    else:
        short(args.section, sections[args.section], changes, args.minutes)


if __name__ == "__main__":
    main()
