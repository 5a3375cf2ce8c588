"""Several processes, for runs side by side or to share one run. When work is cut nothing is left behind: no half files,
no processes that live on."""
import os
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context


def end_with_parent(parent=None):
    """From now on this process ends when its parent does: a second run may soon write the same files."""
    parent = parent or os.getppid()

    def watch():
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def write(file, save):
    """save(temporary path), then the file is there whole."""
    tmp = file.with_name(f".{file.name}.{os.getpid()}")
    save(tmp)
    os.replace(tmp, file)


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


# One run, shared ------------------------------------------------------------------------------------------------------


def team() -> tuple[int, int]:
    """(index of this process, number of them): several, started by torchrun or `accelerate launch`, share each run."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0, 1
    import torch
    from accelerate import PartialState

    state = PartialState(cpu=not torch.cuda.is_available())
    return state.process_index, state.num_processes


def over_team(tensors, what="mean"):
    """The mean of each tensor over the processes, or (what="gather") the rows of all."""
    if team()[1] == 1:
        return tensors
    from accelerate import utils

    return [utils.reduce(x, "mean") if what == "mean" else utils.gather(x.contiguous()) for x in tensors]


def wait():
    """Until all processes are here."""
    if team()[1] > 1:
        from accelerate import PartialState

        PartialState().wait_for_everyone()


def mine(records) -> list:
    """This process's share."""
    index, number = team()
    if len(records) % number:
        raise ValueError(f"{len(records)} prompts do not divide among {number} processes: choose a multiple")
    return records[index * len(records) // number :][: len(records) // number]
