"""Bring the pipeline up to date, several stages at a time: `python tools/repro.py --jobs 2`. `dvc repro` works too.

First it mends what kill -9 can leave behind and deletes files that no stage makes any more. Then each stage that is out
of date, or comes after one that is, runs as `dvc repro --single-item` once all before it are done. A stage with
`meta: {alone: true}` in dvc.yaml (it uses several processes itself) runs with no other beside it. A stage that fails
lets those already running finish and starts no more.
"""
import argparse
import os
import subprocess
import sys
import time
from graphlib import TopologicalSorter
from pathlib import Path

import psutil
from dvc.dvcfile import Lockfile
from dvc.exceptions import DvcException
from dvc.repo import Repo

DVC = [sys.executable, "-m", "dvc"]


def mend(root):
    """Wait for what an earlier run left going, and remove what kill -9 cut off in the middle of a write."""
    told = set()
    while others := {p.pid for p in psutil.process_iter() if _is_run(p, root)}:
        if others - told:
            print("waiting for a run that is still going on, PID", *sorted(others), flush=True)
            told |= others
        time.sleep(0.5)
    (root / ".dvc/tmp/rwlock").unlink(missing_ok=True)  # DVC trusts its process ids, even reused or those of zombies
    file = root / "dvc.lock"
    try:
        with Repo(root) as repo:
            Lockfile(repo, str(file)).load()
    except DvcException:
        print("dvc.lock was cut off: back to the one in git; DVC's cache knows what is done", flush=True)
        file.unlink()
        subprocess.run(["git", "checkout", "-q", "--", "dvc.lock"], cwd=root, check=False, stderr=subprocess.DEVNULL)


def _is_run(process, root):
    """Is this a `dvc repro` of this folder, or an older run of this script (older: else two would wait forever)?"""
    try:
        words = [Path(word).name for word in process.cmdline()]
        if process.status() == psutil.STATUS_ZOMBIE or Path(process.cwd()) != root:
            return False
        me = psutil.Process()
        age = (process.create_time(), process.pid) < (me.create_time(), me.pid)
        return ("dvc" in words[:3] and "repro" in words) or ("repro.py" in words[:2] and age)
    except psutil.Error:
        return False


def prune(repo):
    """Delete files that no stage makes from build/nb and from folders of results that stages read whole; list them.

    After `seeds: [0, 1]` becomes `seeds: [0]`, DVC leaves the old run's file where it is, and a stage that reads the
    folder would still use it.
    """
    outs = {Path(o.fs_path) for o in repo.index.outs}
    folders = {Path(d.fs_path) for s in repo.index.stages for d in s.deps if Path(d.fs_path).is_dir()}
    folders = {f for f in folders if Path(repo.root_dir) / "published" not in f.parents}  # data in git
    folders.add(Path(repo.root_dir) / "build/nb")
    gone = []
    for file in sorted({f for folder in folders for f in folder.rglob("*") if f.is_file()}):
        if file not in outs and not outs & set(file.parents) and not file.name.endswith(".failed.ipynb"):
            print("no stage makes", file.relative_to(repo.root_dir), "any more: deleted", flush=True)
            file.unlink()
            gone.append(file)
    return gone


def outdated(repo, file="dvc.yaml", only=""):
    """{stage name: (names of outdated stages that must run before it, alone)} for all that may have to run: those of
    one file (what runs on purpose only has its own), and of the stages called `only` if that is given."""
    graph = repo.index.graph  # edges from a stage to those that it needs
    graph = graph.subgraph(s for s in graph if s.path_in_repo == file and only in ("", s.name.split("@")[0]))
    changed = set(repo.status(file))
    stale = set()
    for stage in TopologicalSorter({s: list(graph.successors(s)) for s in graph}).static_order():
        if stage.addressing in changed or stale & set(graph.successors(stage)):
            stale.add(stage)
    return {
        s.addressing: ({p.addressing for p in graph.successors(s)} & {q.addressing for q in stale},
                       bool((s.meta or {}).get("alone")))
        for s in stale
    }  # fmt: skip


def run_all(todo, jobs, command):
    """Run `command + [name]` for every name in todo, as `outdated` gives it; the names that failed."""
    order = TopologicalSorter({name: before for name, (before, _) in todo.items()})
    order.prepare()
    ready, running, failed = [], {}, []
    try:
        while True:
            ready += sorted(order.get_ready())
            while ready and not failed and len(running) < jobs and not any(todo[n][1] for n in running):
                # what may run beside others goes first; a stage that wants to be alone waits until nothing else runs
                name = next((n for n in ready if not todo[n][1]), None if running else ready[0])
                if name is None:
                    break
                ready.remove(name)
                print("==", name, flush=True)
                running[name] = subprocess.Popen([*command, name], stdout=subprocess.DEVNULL)  # errors go to stderr
            if not running:
                return failed
            time.sleep(0.1)
            for name in [n for n, p in running.items() if p.poll() is not None]:
                if running.pop(name).returncode:
                    failed.append(name)
                else:
                    order.done(name)
    finally:  # ctrl-C reaches them too: let them end before this does
        for process in running.values():
            process.wait()


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--jobs", type=int, default=os.cpu_count(), help="stages at a time")
    ap.add_argument("--scale", default="", help="the stages of this name in scales/dvc.yaml, instead of dvc.yaml's")
    args = ap.parse_args()
    root = Path(Repo.find_root())
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # stages say `python`
    mend(root)
    with Repo(root) as repo:
        prune(repo)
        todo = outdated(repo, "scales/dvc.yaml", args.scale) if args.scale else outdated(repo)
    print(f"{len(todo)} stages to run" if todo else "every stage is up to date", flush=True)
    failed = run_all(todo, args.jobs, [*DVC, "--wait-for-lock", "repro", "--single-item"])
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; what finished is kept, run again to go on")
    # the last word on what is up to date is DVC's
    if todo and not args.scale and subprocess.run([*DVC, "repro"], stdout=subprocess.DEVNULL).returncode:
        sys.exit("dvc repro failed")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; what finished is kept, run again to go on")
