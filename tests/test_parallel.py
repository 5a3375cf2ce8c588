"""A batch in parts, over micro-batches or processes, weighted by sequences: the gradient of the whole, to 1e-12."""

import importlib.util
import json
import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from klnb.losses import ESTIMATORS, kl_loss

ROWS, WIDTH, VOCAB, GROUP = 12, 5, 7, 2
FORMS = [(n, off) for n, e in ESTIMATORS.items() for off in (False, True)[: 1 + e.off_policy]]


def data():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (ROWS, WIDTH, 1), generator=generator)
    features = torch.randn(ROWS, WIDTH, 4, dtype=torch.float64, generator=generator)
    ref_logits = torch.randn(ROWS, WIDTH, VOCAB, dtype=torch.float64, generator=generator)
    length = torch.randint(1, WIDTH + 1, (ROWS, 1), generator=generator)  # unequal, so a token mean would differ
    mask = torch.arange(WIDTH) < length
    weight = torch.randn(VOCAB, 4, dtype=torch.float64, generator=generator)
    behavior = torch.randn(VOCAB, 4, dtype=torch.float64, generator=generator) * 0.2 + weight
    return tokens, features, ref_logits, mask, weight, behavior


def loss_of_rows(name, off, weight, rows):
    """kl_loss of some rows of the batch, as a function of a model's weight."""
    tokens, features, ref_logits, mask, _, behavior = (x[rows] if len(x) == ROWS else x for x in data())

    def logp(logits):
        return logits.log_softmax(2).gather(2, tokens).squeeze(2)

    logits, more = features @ weight.T, {}
    if ESTIMATORS[name].baseline:
        more["group_size"] = GROUP
    if ESTIMATORS[name].needs_logits:
        more |= {"logits": logits, "ref_logits": ref_logits}
    if off:
        more["behavior_logp"] = logp(features @ behavior.T)
    return kl_loss(name, logp(logits), logp(ref_logits), mask, **more)


def gradient(name, off, parts):
    """Σ over parts of (sequences of the part ÷ sequences of the batch) · ∇loss."""
    weight = data()[4].requires_grad_()
    for rows in parts:
        (loss_of_rows(name, off, weight, rows) * (rows.stop - rows.start) / ROWS).backward()
    return weight.grad


def split(*sizes):
    ends = torch.tensor((0, *sizes)).cumsum(0).tolist()
    assert ends[-1] == ROWS
    return [slice(a, b) for a, b in zip(ends[:-1], ends[1:])]


def close(got, want):
    return float((got - want).norm()) <= 1e-12 * float(want.norm())


@pytest.mark.parametrize("name, off", FORMS)
def test_micro_batches(name, off):
    whole = gradient(name, off, split(ROWS))
    assert whole.norm() > 1e-3
    for sizes in ((6, 6), (2, 10), (4, 2, 6), (2,) * 6):
        assert close(gradient(name, off, split(*sizes)), whole)
    # what the weights are for: unequal parts of equal weight are another gradient
    weight = data()[4].requires_grad_()
    for rows in split(2, 10):
        (loss_of_rows(name, off, weight, rows) / 2).backward()
    assert not close(weight.grad, whole)


def test_a_split_inside_a_group_is_refused_or_wrong():
    with pytest.raises(ValueError, match="group_size: expected n >= 2 dividing B=3, got 2"):
        gradient("reward-to-go", False, split(3, 9))


def worker(rank, sizes, store, out):
    """One process: its rows in micro-batches of 2, then the sum over processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mine = split(*sizes)[rank]
    parts = [slice(a, a + 2) for a in range(mine.start, mine.stop, 2)]
    grads = {}
    for name, off in FORMS:
        grads[name, off] = gradient(name, off, parts)
        dist.all_reduce(grads[name, off])
    if rank == 0:
        torch.save(grads, out)
    dist.destroy_process_group()


def test_data_parallel(tmp_path):
    """Two processes over gloo with 4 and 8 of the 12 sequences."""
    mp.spawn(worker, ((4, 8), tmp_path / "store", tmp_path / "grads.pt"), nprocs=2)
    grads = torch.load(tmp_path / "grads.pt", weights_only=True)
    assert set(grads) == set(FORMS)
    for form, grad in grads.items():
        assert close(grad, gradient(*form, split(ROWS))), form


def test_example(capsys):
    """The ten lines of examples/microbatch.py do what they say, to float32 rounding."""
    path = Path(__file__).parents[1] / "examples" / "microbatch.py"
    spec = importlib.util.spec_from_file_location("microbatch_example", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    tokens, features, ref_logits, mask, weight, _ = data()

    weight.requires_grad_()
    ref_logp, grads = ref_logits.log_softmax(2).gather(2, tokens).squeeze(2), []
    for sizes in ([ROWS], [4, 2, 6]):
        weight.grad = None
        example.backward_in_parts(
            lambda rows: (features[rows] @ weight.T).log_softmax(2).gather(2, tokens[rows]).squeeze(2),
            ref_logp, mask, sizes, ROWS, group_size=GROUP,
        )  # fmt: skip
        grads.append(weight.grad)
    assert close(grads[1], grads[0]) and close(grads[0], gradient("reward-to-go", False, split(ROWS)))
    runpy.run_path(str(path), run_name="__main__")
    first, second = (json.loads(line.split("gradient ")[1]) for line in capsys.readouterr().out.splitlines())
    assert first == pytest.approx(second, rel=1e-5) and max(map(abs, first)) > 1e-3
