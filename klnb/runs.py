"""Many runs of `klnb.training`: what is missing is made, in several processes, and survives a cut.

    python -m klnb.runs k2 --params params.yaml --section 07_distillation -o results/07_distillation/k2
"""

import argparse
import hashlib
import itertools
import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path

import torch
import transformers

from klnb.losses import ESTIMATORS
from klnb.paths import ROOT, write
from klnb.processes import end_with_parent, in_processes
from klnb.team import team, wait
from klnb.training import DEFAULTS, train

# a run is done again when one of these changes
CODE = ("estimators", "losses", "models", "stats", "tasks", "team", "training", "verifier")
SOURCE = {m: Path(__file__).with_name(f"{m}.py").read_text() for m in CODE}  # as it is now, at import: what will run


def specs(settings: dict, seeds, name: str, betas=None) -> dict:
    """{file name: settings of one run} of one estimator, for each beta and seed; "none" has beta 0 only, and alone."""
    betas = [b for b in betas or [1.0] if (b == 0) == (name == "none")]
    runs = [{"name": name, "beta": beta, "seed": seed} for beta, seed in itertools.product(betas, seeds)]
    return {f"beta{run['beta']:g}-seed{run['seed']}.json": settings | run for run in runs}


def seeds_of(section: dict, name: str) -> list[int]:
    """The seeds of an estimator in a section of params.yaml: its own under seeds_of, or the section's."""
    return section.get("seeds_of", {}).get(name, section["seeds"])


def key(s: dict) -> str:
    """Of a run: its settings, the code that makes it, the versions of what that uses, and the models' weights."""
    parts = [digest(kept(s)), torch.__version__, transformers.__version__, code()]
    weights = [ROOT / s[m] / "model.safetensors" for m in ("policy", "ref")]
    parts += [hashlib.sha256(w.read_bytes()).hexdigest() for w in weights if w.exists()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def kept(s: dict) -> dict:
    """The settings that a record keeps: all but where this machine has its data."""
    return {k: v for k, v in (DEFAULTS | s).items() if k != "data_dir"}


def digest(settings: dict) -> str:
    """sha256 of settings, in whatever order."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def code(source=SOURCE) -> str:
    """sha256 of the modules that a run depends on."""
    return hashlib.sha256("\0".join(source[m] for m in CODE).encode()).hexdigest()


def sweep(runs: dict, folder: Path, processes: int = 1, published: Path | None = None) -> list[dict]:
    """The records of the runs {file name: settings}, in their order; those that `folder` lacks are made.

    A file counts if its key fits. Each is written whole as its run ends; files of runs that are not asked for are
    deleted. Each process has one thread, so that the numbers do not depend on how many there are. With `published`, a
    folder of runs that cost hours, maybe on another machine: a file there or here counts if its settings fit, and says
    itself which code made it.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for file in [*folder.glob("beta*-seed*.json*"), *folder.glob(".beta*-seed*.json*")]:  # the latter: cut in a write
        if file.name.removesuffix(".checkpoint") not in runs and team()[0] == 0:
            file.unlink()
    wait()
    todo = {}
    for name, s in runs.items():
        for file in [folder / name, *([published / name] if published else [])]:
            record = json.loads(file.read_text()) if file.exists() else {"key": None, "settings": {}}
            if kept(record["settings"]) == kept(s) if published else record["key"] == key(s):
                if file.parent != folder and team()[0] == 0:
                    write(folder / name, partial(shutil.copyfile, file))
                    (folder / f"{name}.checkpoint").unlink(missing_ok=True)
                break
        else:
            todo[name] = s
    wait()  # all have looked before one writes
    if todo:
        processes = processes if team()[1] == 1 else 1  # these are several already
        in_processes(make, {name: (s, folder / name) for name, s in todo.items()}, processes, folder.name)
    wait()
    return [json.loads((folder / name).read_text()) for name in runs]


def make(s: dict, file: Path, bar=iter):
    """Do one run and write its file."""
    checkpoint = file.with_name(f"{file.name}.checkpoint")
    made = {"code": code(), "torch": torch.__version__, "transformers": transformers.__version__}
    own = key(s)
    run = train(s, checkpoint, iter if team()[0] else bar, own)
    record = {"key": own, "settings": kept(s), "made": made} | run
    if team()[0] == 0:
        write(file, lambda tmp: tmp.write_text(json.dumps(record) + "\n"))
        checkpoint.unlink(missing_ok=True)


def main(argv=None):
    from ruamel.yaml import YAML

    ap = argparse.ArgumentParser("python -m klnb.runs", description=__doc__, allow_abbrev=False,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    ap.add_argument("name", choices=[*ESTIMATORS, "none"], help="the estimator, or none")
    ap.add_argument("-o", "--output", required=True, type=Path, help="the folder to write, one file a run")
    ap.add_argument("--params", required=True, type=Path, help="a YAML file of sections")
    ap.add_argument("--section", required=True, help="a section of it, with seeds, settings, and maybe betas and rates")
    ap.add_argument("--settings", default="train", help="names of its settings, comma-separated, later ones win")
    ap.add_argument("--processes", type=int, default=2)
    ap.add_argument("--work", type=Path, help="the folder where runs are made and stay for the next time, if not the "
                                              "output: DVC deletes that before a stage runs")
    ap.add_argument("--published", type=Path, help="a folder whose finished runs count as done")
    ap.add_argument("--data-dir", help="the folder with MATH's train.jsonl and test.jsonl; else they come from the hub")
    args = ap.parse_args(argv)
    if "DVC_STAGE" in os.environ:
        end_with_parent()
    section = YAML(typ="safe", pure=True).load(args.params.read_text())[args.section]
    rate = {"lr": section["rates"][args.name]} if "rates" in section else {}
    settings = {k: v for part in args.settings.split(",") for k, v in (rate | section[part]).items()}
    settings |= {"data_dir": args.data_dir} if args.data_dir else {}
    runs = specs(settings, seeds_of(section, args.name), args.name, section.get("betas"))
    work = args.work or args.output
    try:
        sweep(runs, work, args.processes, args.published)
    except (ValueError, OSError) as error:
        sys.exit(f"{args.section}, {args.name}: {error}")
    if work != args.output and team()[0] == 0:
        shutil.rmtree(args.output, ignore_errors=True)
        shutil.copytree(work, args.output, ignore=shutil.ignore_patterns("*.checkpoint"))


if __name__ == "__main__":
    main()
