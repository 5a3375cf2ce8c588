"""Several processes that share one run: each has its part of every batch, gradients and metrics are those of all."""
import os


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
