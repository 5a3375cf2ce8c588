"""Does an answer equal the gold one? math-verify in worker processes, each question under a hard time limit.

math-verify evaluates what a language model wrote: it can hang inside one C call (9^{9^{9^{9}}}), where no Python
signal arrives. So a worker sets a watchdog that needs no Python (faulthandler's) and that ends the process; the parent
sees the pipe close, scores 0 and starts another. A worker also ends when its parent does, has 2 GB of memory at most
(Linux), is out of reach of ctrl-C and never imports torch. This file is both the parent's side and, run as a script,
the worker.
"""

import faulthandler
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue


def _work():
    """The worker: [limit, gold, answer] a line in; "1" or "0" (equal or not) or "error" (in math-verify) a line out."""
    replies, sys.stdout = sys.stdout, open(os.devnull, "w")  # ANTLR prints to stdout
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    from math_verify import parse, verify

    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        limit, *texts = json.loads(line)
        faulthandler.dump_traceback_later(limit, exit=True, file=sys.stdout)
        try:  # None: math-verify's own limits are off, they cannot interrupt what hangs
            gold, answer = (parse(rf"\boxed{{{text}}}", parsing_timeout=None) for text in texts)
            reply = str(int(verify(gold, answer, timeout_seconds=None)))
        except Exception:
            reply = "error"
        faulthandler.cancel_dump_traceback_later()
        print(reply, file=replies, flush=True)


class Verifier:
    """Workers that compare answers, started when first needed and ended by `close()`.

    timeout: seconds for one comparison, wall clock. `counts` says how many were asked, and how many of them got a 0
    because they ran out of time ("timeout") or brought math-verify or its process down ("error").
    """

    def __init__(self, timeout: float | int = 5.0, workers: int = 2):
        if not timeout > 0 or workers < 1:
            raise ValueError(f"expected timeout > 0 and workers >= 1, got {timeout} and {workers}")
        self.timeout, self.size = timeout, workers
        self.counts = {"asked": 0, "timeout": 0, "error": 0}
        self.pool, self.idle = ThreadPoolExecutor(workers), SimpleQueue()  # a thread for each worker, which it waits on
        for _ in range(workers):
            self.idle.put(None)

    def __call__(self, golds: list[str], answers: list[str]) -> list[bool]:
        """Whether each answer (LaTeX, as it stands in the box) equals its gold answer."""
        replies = list(self.pool.map(self._ask, golds, answers))
        self.counts["asked"] += len(replies)
        for kind in ("timeout", "error"):
            self.counts[kind] += replies.count(kind)
        return [reply == "1" for reply in replies]

    def _ask(self, gold, answer):
        worker = self.idle.get()
        try:
            if worker is None or worker.poll() is not None:  # none yet, or it died while idle
                _end(worker)
                worker = _start()
            start, reply = time.monotonic(), ""
            with suppress(BrokenPipeError):
                worker.stdin.write(json.dumps([self.timeout, gold, answer]) + "\n")
                worker.stdin.flush()
                reply = worker.stdout.readline().strip()
            if not reply:  # the process is gone
                reply = "timeout" if time.monotonic() - start >= self.timeout else "error"
                worker = _end(worker)
            return reply
        finally:
            self.idle.put(worker)

    def close(self):
        """End the workers, when each has given its answer; the next call starts new ones."""
        for worker in [self.idle.get() for _ in range(self.size)]:
            _end(worker)
            self.idle.put(None)


def _start():
    worker = subprocess.Popen(
        [sys.executable, "-P", os.path.abspath(__file__)], encoding="utf-8", start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    if worker.stdout.readline().strip() != "ready":
        _end(worker)
        raise RuntimeError("a math-verify worker did not start: is math-verify installed?")
    return worker


def _end(worker):
    if worker is not None:
        worker.kill()
        worker.communicate()  # waits for it and closes the pipes


if __name__ == "__main__":
    _work()
