"""Work shared over clones: two train half of the estimators each, a third draws the figures and trains nothing.

As the README has it, on the project's own code and stages of chapter 8: two settings, models that have learnt nothing.
An output with `persist: true` would keep its stage out of DVC's run cache, and so would a dvc.lock that names other
files for the same inputs; there is none here.
"""
import os
import shutil
import subprocess
import sys

import pytest
from ruamel.yaml import YAML

from klnb.paths import ROOT

yaml = YAML(typ="safe", pure=True)
NAMES = ["none", "reward-to-go"]  # what the notebook can't do without
CHAPTER = "08_math_reward"
RUNS = f"results/{CHAPTER}"
FILES = ["klnb/*.py", f"notebooks/{CHAPTER}.py", "tools/lm_models.py", "requirements.txt", ".gitignore", ".dvcignore",
         ".dvc/config", ".dvc/.gitignore"]  # fmt: skip


def small(root):
    """A git repository in root with FILES and, of dvc.yaml and params.yaml, what they need, at the smallest size."""
    for file in (f for pattern in FILES for f in ROOT.glob(pattern)):
        copy = root / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    stages = yaml.load((ROOT / "dvc.yaml").read_text())["stages"]
    stages = {name: stages[name] for name in ("lm_models", "08_runs", CHAPTER)}
    left_out = {f"{RUNS}/{name}" for name in params()[CHAPTER]["names"]} - {f"{RUNS}/{name}" for name in NAMES}
    stages[CHAPTER]["deps"] = [d for d in stages[CHAPTER]["deps"] if d not in left_out]
    sections = {name: params()[name] for name in ("lm_models", CHAPTER)}
    sections["lm_models"]["common"] |= {"problems": 20, "held": 4, "batch": 4}
    for role in ("teacher", "student"):
        sections["lm_models"][role] |= {"goal": 0.0, "cooldown": 0}
    short = {"steps": 1, "eval_every": 1, "prompts": 2, "group": 2, "eval_prompts": 2, "problems": 20}
    sections[CHAPTER] |= {"scale": "test", "names": NAMES, "seeds": [0, 1], "betas": [0.0, 0.1, 1.0]}
    sections[CHAPTER]["train"] |= short | {"max_new_tokens": 3}
    yaml.dump({"stages": stages}, root / "dvc.yaml")
    yaml.dump(sections, root / "params.yaml")
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "all"]):
        subprocess.run(["git", *words], cwd=root, check=True)


def params():
    return yaml.load((ROOT / "params.yaml").read_text())


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(clone, command): what the stages that `dvc command` ran there called, of lm_models, training and nbrun."""
    log = tmp_path / "log"
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin/python"  # what stages call
    python.write_text(f'#!/bin/sh\necho "$*" >> "{log}"\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("PATH", f"{python.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path / "site"))
    monkeypatch.setenv("DVC_NO_ANALYTICS", "1")
    for name in [name for name in os.environ if name.startswith("GIT_")]:  # in a git hook they name another repository
        monkeypatch.delenv(name)

    def run(clone, command):
        log.write_text("")
        words = [sys.executable, "-m", "dvc", *command.split()]
        done = subprocess.run(words, cwd=clone, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": clone})
        assert done.returncode == 0, done.stdout + done.stderr
        calls = [line.removeprefix("-m ").split() for line in log.read_text().splitlines()]
        return [" ".join(words[: 2 if words[0] == "klnb.runs" else 1]) for words in calls]

    return run


def contents(root):
    return {f.relative_to(root): (f.read_bytes(), f.stat().st_mtime_ns) for f in (root / RUNS).rglob("*.json")}


def test_two_clones_train_and_a_third_draws(tmp_path, run):
    small(tmp_path / "origin")
    a, b, c = (tmp_path / name for name in "abc")
    for clone in (a, b, c):
        subprocess.run(["git", "clone", "-q", tmp_path / "origin", clone], check=True)
    run(a, f"remote add --local -d shared {tmp_path / 'remote'}")
    for clone in (b, c):
        shutil.copy(a / ".dvc/config.local", clone / ".dvc")

    assert run(a, "repro 08_runs@none") == ["tools/lm_models.py", "klnb.runs none"]
    run(a, "push --run-cache")
    assert run(b, "repro --pull 08_runs@reward-to-go") == ["klnb.runs reward-to-go"]
    run(b, "push --run-cache")

    assert run(c, "repro --pull 08_runs") == []
    runs = contents(c)
    assert len(runs) == 6  # two seeds of no KL term, two of each weight of one
    assert {f: data for f, (data, _) in runs.items()} == {
        f: data for clone in (a, b) for f, (data, _) in contents(clone).items()
    }
    assert not (c / "figures").exists()
    assert run(c, "repro --pull") == ["klnb.nbrun"]
    assert (c / f"figures/{CHAPTER}.png").exists()
    assert contents(c) == runs  # the notebook would make runs that it misses
