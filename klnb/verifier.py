"""Does an answer equal the gold one? math-verify in worker processes, each question under a hard time limit.

math-verify evaluates what a language model wrote: it can hang inside one C call (9^{9^{9^{9}}}), where no Python
signal arrives. So a worker sets a watchdog that needs no Python (faulthandler's) and that ends the process; the parent
sees the pipe close, scores 0 and starts another. A worker also ends when its parent does, has 2 GB of memory at most
(Linux), ignores ctrl-C (the parent handles it) and never imports torch. This file is both the parent's side and, run as
a script, the worker.
"""

import faulthandler
import json
import os
import selectors
import subprocess
import sys
import time

MEMORY = 2 << 30


def _work():
    """The worker: a line [limit, gold, answer] in, a line "1" or "0" (equal or not) or "x" (math-verify failed) out."""
    replies, sys.stdout = sys.stdout, open(os.devnull, "w")  # ANTLR prints to stdout
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    from math_verify import parse, verify

    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        limit, *texts = json.loads(line)
        faulthandler.dump_traceback_later(limit, exit=True, file=sys.stdout)
        try:  # None: math-verify's own limits are off, they cannot interrupt what hangs
            gold, answer = (parse(rf"\boxed{{{text}}}", parsing_timeout=None) for text in texts)
            reply = str(int(verify(gold, answer, timeout_seconds=None)))
        except Exception:
            reply = "x"
        faulthandler.cancel_dump_traceback_later()
        print(reply, file=replies, flush=True)


class Verifier:
    """Workers that compare answers; started on first use, closed by `close()`, at exit or on any exception.

    timeout: seconds for one comparison, wall clock. `counts` says how many were asked, and how many of them got a 0
    because they ran out of time ("timeout") or brought math-verify or its process down ("error").
    Not for use from several threads at once.
    """

    def __init__(self, timeout: float | int = 5.0, workers: int = 2):
        if not timeout > 0 or workers < 1:
            raise ValueError(f"expected timeout > 0 and workers >= 1, got {timeout} and {workers}")
        self.timeout, self.size, self.workers = timeout, workers, []
        self.counts = {"asked": 0, "timeout": 0, "error": 0}

    def __call__(self, golds: list[str], answers: list[str]) -> list[bool]:
        """Whether each answer (LaTeX, as it stands in the box) equals its gold answer."""
        results, todo = [False] * len(golds), list(range(len(golds)))[::-1]
        self.counts["asked"] += len(golds)
        try:
            with selectors.DefaultSelector() as selector:
                while len(self.workers) < min(self.size, len(golds)):
                    self.workers.append(self._start())
                busy = sum(self._next(selector, worker, todo, golds, answers) for worker in self.workers)
                while busy:
                    for key, _ in selector.select():
                        worker, reply = key.data[0], key.fileobj.readline().strip()
                        selector.unregister(key.fileobj)
                        if not reply:  # the process is gone
                            late = time.monotonic() - key.data[2] >= self.timeout
                            self.counts["timeout" if late else "error"] += 1
                            worker = self._replace(worker)
                        self.counts["error"] += reply == "x"
                        results[key.data[1]] = reply == "1"
                        busy += self._next(selector, worker, todo, golds, answers) - 1
        except BaseException:  # also ctrl-C: an answer left in a pipe would be taken for the next one's
            self.close()
            raise
        return results

    def _next(self, selector, worker, todo, golds, answers) -> bool:
        """Give a free worker the next question, if any is left."""
        if not todo:
            return False
        if worker.poll() is not None:  # ended while idle (say, for memory)
            worker = self._replace(worker)
        i = todo.pop()
        worker.stdin.write(json.dumps([self.timeout, golds[i], answers[i]]) + "\n")
        worker.stdin.flush()
        selector.register(worker.stdout, selectors.EVENT_READ, (worker, i, time.monotonic()))
        return True

    def _start(self):
        worker = subprocess.Popen(
            [sys.executable, "-P", os.path.abspath(__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            start_new_session=True,
            env=os.environ | {"PYTHONIOENCODING": "utf-8"},
        )
        if worker.stdout.readline().strip() != "ready":
            _end(worker)
            raise RuntimeError("a math-verify worker did not start: is math-verify installed?")
        return worker

    def _replace(self, worker):
        self.workers.remove(worker)
        _end(worker)
        self.workers.append(self._start())
        return self.workers[-1]

    def close(self):
        """End the workers; the next call starts new ones."""
        while self.workers:
            _end(self.workers.pop())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _end(worker):
    worker.kill()
    worker.stdout.close()
    try:
        worker.stdin.close()
    except BrokenPipeError:
        pass
    worker.wait()


if __name__ == "__main__":
    _work()
