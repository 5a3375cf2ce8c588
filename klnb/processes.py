"""Work in several processes that leave nothing behind when it is cut: no half files, no processes that live on."""
import os
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context

import psutil


def end_with_parent(parent=None):
    """From now on this process ends when its parent does: a second run may soon write the same files.

    The parent of a process that torchrun started is torchrun, which outlives its own: that one is watched too.
    """
    parent = parent or os.getppid()
    launcher = psutil.Process(parent) if "TORCHELASTIC_RUN_ID" in os.environ else None
    above = launcher and launcher.ppid()

    def watch():
        while os.getppid() == parent and (launcher is None or launcher.ppid() == above):
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def in_processes(work, jobs: dict, processes: int, title: str):
    """{name: work(*arguments, bar)} for {name: arguments}, in one-thread processes, with a progress bar."""
    import torch
    from tqdm import tqdm

    torch.set_num_threads(1)
    bars = {name: partial(tqdm, desc=f"{title} {name}", unit="step") for name in jobs}
    if min(processes, len(jobs)) == 1:
        return {name: work(*arguments, bars[name]) for name, arguments in jobs.items()}
    few = len(jobs) <= processes  # then each shows its steps, else one bar counts them
    # a fork has torch loaded already, but CUDA does not survive one
    method = "fork" if sys.platform == "linux" and not torch.cuda.is_available() else "spawn"
    with ProcessPoolExecutor(processes, get_context(method), _worker, (os.getpid(),)) as pool:
        futures = {n: pool.submit(work, *arguments, bars[n] if few else iter) for n, arguments in jobs.items()}
        try:
            for future in tqdm(as_completed(futures.values()), title, len(futures), unit="run", disable=few):
                future.result()
            return {name: future.result() for name, future in futures.items()}
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _worker(parent):
    import torch

    torch.set_num_threads(1)
    end_with_parent(parent)
