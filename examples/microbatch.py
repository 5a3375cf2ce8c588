"""Micro-batches and data parallel: the gradient of the whole batch, from parts of any size.

Split between groups (never inside one: its rows are each other's baseline) and weight each part by its sequences.
"""

import torch

from klnb.losses import kl_loss


def backward_in_parts(logp_of, ref_logp, mask, sizes, total, **options):
    """Accumulate the gradient of kl_loss over `total` sequences from parts of `sizes` rows, one graph at a time.

    logp_of(rows) runs the policy on a slice of the batch; `total` counts the rows of all processes. Then sum (do not
    average) the gradients over processes: all_reduce, or multiply the loss by their number under DDP.
    """
    start = 0
    for size in sizes:
        rows = slice(start, start + size)
        loss = kl_loss("reward-to-go", logp_of(rows), ref_logp[rows], mask[rows], **options)
        (loss * size / total).backward()
        start += size


if __name__ == "__main__":
    generator = torch.Generator().manual_seed(0)
    features, ref_logp = (torch.randn(12, 5, 3, generator=generator), -torch.rand(12, 5, generator=generator))
    mask, weight = torch.ones(12, 5), torch.zeros(3, requires_grad=True)
    for sizes in ([12], [4, 2, 6]):
        weight.grad = None
        backward_in_parts(
            lambda rows: torch.nn.functional.logsigmoid(features[rows] @ weight),
            ref_logp,
            mask,
            sizes,
            12,
            group_size=2,
        )
        print(f"parts of {sizes} rows: gradient {weight.grad.tolist()}")
