"""tools/repro.py on small pipelines: order, what is out of date, and what a killed run leaves behind."""
import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest
from dvc.repo import Repo

from klnb import paths

pytestmark = pytest.mark.filterwarnings("ignore:_NoneStep.value:DeprecationWarning")  # in DVC's use of pygtrie
spec = importlib.util.spec_from_file_location("repro", paths.ROOT / "tools/repro.py")
repro = importlib.util.module_from_spec(spec)
spec.loader.exec_module(repro)

PIPELINE = """\
stages:
  a: {cmd: mkdir -p runs && echo a > runs/a, outs: [runs/a]}
  b: {cmd: mkdir -p runs && echo b > runs/b, outs: [runs/b]}
  all: {cmd: cat runs/* > all, deps: [runs], outs: [all], meta: {alone: true}}
"""


@pytest.fixture
def repo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path / ".dvc/tmp/site"))
    (tmp_path / "dvc.yaml").write_text(PIPELINE)
    (tmp_path / "scales").mkdir()
    (tmp_path / "scales/dvc.yaml").write_text("stages: {big: {cmd: 'false', outs: [big]}}\n")
    Repo.init(no_scm=True).close()
    return tmp_path


def todo(root):
    with Repo(root) as repo:
        return repro.outdated(repo)


def test_what_is_outdated(repo):
    assert todo(repo) == {"a": (set(), False), "b": (set(), False), "all": ({"a", "b"}, True)}  # and not scales/
    with Repo(repo) as r:
        r.reproduce()
    assert todo(repo) == {}
    (repo / "dvc.yaml").write_text(PIPELINE.replace("echo b", "echo c"))
    assert todo(repo) == {"b": (set(), False), "all": ({"b"}, True)}


def test_prune_deletes_what_no_stage_makes(repo):
    with Repo(repo) as r:
        r.reproduce()
    (repo / "build/nb").mkdir(parents=True)
    for file in ("runs/old", "build/nb/old.ipynb", "mine", "published/scale/k2/run"):
        (repo / file).parent.mkdir(parents=True, exist_ok=True)
        (repo / file).write_text("x")
    (repo / "dvc.yaml").write_text(PIPELINE.replace("[runs]", "[runs, published/scale]"))
    with Repo(repo) as r:
        gone = repro.prune(r)
    assert sorted(str(f.relative_to(repo)) for f in gone) == ["build/nb/old.ipynb", "runs/old"]
    assert all((repo / file).exists() for file in ("mine", "runs/a", "published/scale/k2/run"))


def test_the_whole_run_resumes_after_a_failure_and_a_cut(repo):
    script = [sys.executable, paths.ROOT / "tools/repro.py", "--jobs", "2"]
    (repo / "dvc.yaml").write_text(PIPELINE.replace("echo b >", "exit 3 && echo b >"))
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 1 and "failed: b; what finished is kept" in done.stderr
    assert "failed to reproduce 'b': failed to run: mkdir" in done.stderr  # DVC's own error
    assert (repo / "runs/a").exists() and not (repo / "all").exists()
    stamp = (repo / "runs/a").stat().st_mtime_ns

    (repo / "dvc.yaml").write_text(PIPELINE)
    (repo / ".dvc/tmp/rwlock").write_text('{"write": {"/x": {"pid": ')  # as kill -9 in the middle of a write leaves it
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (repo / "all").read_text() == "a\nb\n"
    assert (repo / "runs/a").stat().st_mtime_ns == stamp  # what was finished didn't run again


@pytest.mark.parametrize("size", [5, 20, 28, 33, 60])  # the last is a whole file with less in it: nothing to mend
def test_a_lock_file_that_was_cut_off_is_dropped(size, repo, capsys):
    with Repo(repo) as r:
        r.reproduce()
    text = (repo / "dvc.lock").read_text()
    (repo / "dvc.lock").write_text(text[:size])
    repro.mend(repo)
    assert (repo / "dvc.lock").exists() == (size == 60) == ("was cut off" not in capsys.readouterr().out)
    assert set(todo(repo)) == {"a", "b", "all"}
    with Repo(repo) as r:
        r.reproduce()
    assert (repo / "dvc.lock").read_text() == text


def test_order_of_stages(tmp_path):
    # each stage writes its start and end; c comes after a and b, and d, e want to be alone
    log = tmp_path / "log"
    code = 'echo -n "$1"+ >> LOG; sleep 0.3; echo -n "$1"- >> LOG'.replace("LOG", str(log))
    stages = {"a": (set(), False), "b": (set(), False), "c": ({"a", "b"}, False), "d": (set(), True)}
    stages["e"] = ({"a"}, True)
    failed = repro.run_all(stages, 2, ["bash", "-c", code, "bash"])
    text = log.read_text()
    assert failed == [] and len(text) == 20
    assert text.index("c+") > max(text.index("a-"), text.index("b-"))
    assert "d+d-" in text and "e+e-" in text


def test_a_failure_starts_no_more_but_waits_for_what_runs():
    code = "import sys, time; n = sys.argv[1]; time.sleep(.5 * (n == 'slow')); sys.exit(n == 'bad')"
    stages = {"bad": (set(), False), "slow": (set(), False), "third": (set(), False), "after": ({"bad"}, False)}
    assert repro.run_all(stages, 2, [sys.executable, "-c", code]) == ["bad"]


def test_which_processes_count_as_a_run(tmp_path):
    def fake(words, cwd=tmp_path, age=0.0, status="running"):
        return SimpleNamespace(
            cmdline=lambda: words, cwd=lambda: str(cwd), create_time=lambda: age, pid=1, status=lambda: status
        )

    dvc = ["/x/.venv/bin/python", "/x/.venv/bin/dvc", "--quiet", "--wait-for-lock", "repro", "-s", "a"]
    assert repro._is_run(fake(dvc), tmp_path)
    assert repro._is_run(fake(["python", "-m", "dvc", "repro"]), tmp_path)
    assert repro._is_run(fake(["python", "tools/repro.py", "--jobs", "2"]), tmp_path)
    assert not repro._is_run(fake(["python", "tools/repro.py"], age=1e12), tmp_path)  # it waits for this one
    assert not repro._is_run(fake(dvc, cwd="/elsewhere"), tmp_path)
    assert not repro._is_run(fake(dvc, status="zombie"), tmp_path)
    assert not repro._is_run(fake([*dvc[:2], "daemon"]), tmp_path)
