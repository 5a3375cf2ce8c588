"""Does the choice of KL gradient matter in my run? Each estimator's gradient against R_seq on the user's own model."""

import warnings
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor
from tqdm import tqdm

from klnb.losses import ESTIMATORS, kl_loss, token_logprobs
from klnb.models import completion_logits
from klnb.stats import generator

COLUMNS = ["name", "cosine", "cosine_low", "cosine_high", "norm_ratio", "norm_ratio_low", "norm_ratio_high", "n"]


def compare(
    model,
    batch: dict,
    names: Sequence[str],
    *,
    params: Iterable[Tensor] | None = None,
    draws: int = 8,
    seed: int = 0,
) -> pd.DataFrame:
    """The alignment of each name's expected KL gradient with R_seq = ∇KL(π‖π_ref), from one batch of π's own samples.

    Raw cosines between two noisy gradients are too small, and too large between two that share samples. So the groups
    of the batch are dealt at random into `draws` disjoint blocks, and only products of different blocks are used:
    over all pairs of blocks a ≠ b, cosine = ⟨g_a, r_b⟩ / √(⟨g_a, g_b⟩⟨r_a, r_b⟩) and norm_ratio =
    √(⟨g_a, g_b⟩ / ⟨r_a, r_b⟩), whose products are unbiased for those of the expectations. r is rao-blackwell where
    ref_logits are given, else reward-to-go, with leave-one-out where group_size is.

    Args:
        model: a causal language model (transformers), in the mode to be measured; its gradients are left alone.
        batch: tokens [B, P+T] (left-padded prompts, then completions), prompt_mask [B, P], mask [B, T], ref_logp
            [B, T]; optional ref_logits [B, T, V] (divided by the temperature), group_size, temperature (1.0), barred
            (ids that the sampler could not draw). On-policy rows.
        names: of `klnb.ESTIMATORS`. params: the parameters to differentiate in (default: all that require it).
        draws: number of blocks, at least 3, at most the number of groups. seed: of the dealing.

    Returns: a DataFrame with the columns name, cosine, norm_ratio, their 95% limits (delete-one-block jackknife with
        Student's t; a limit may lie beyond ±1) and n, the number of blocks. NaN, with a warning, where ⟨g_a, g_b⟩ or
        ⟨r_a, r_b⟩ is not significantly above 0: the batch is then too small to tell (k1 has no expected gradient).
    Raises: ValueError for a missing key, an unknown name, a name that lacks its inputs or too few groups.
    """
    names = [names] if isinstance(names, str) else list(names)
    blocks, size = _deal(batch, names, draws, seed)
    params = [p for p in (model.parameters() if params is None else params) if p.requires_grad]
    target = "rao-blackwell" if "ref_logits" in batch else "reward-to-go"
    wanted = list(dict.fromkeys([target, *names]))

    # Two passes, so that one gradient a name is held and not one a block: first the sums, then each block's products
    # with the sums and with itself, from which every product over different blocks follows.
    total = {name: [torch.zeros_like(p, dtype=torch.float32) for p in params] for name in wanted}
    for rows in tqdm(blocks, desc="compare: sums"):
        for name, grad in _gradients(model, batch, rows, wanted, params, size):
            for t, g in zip(total[name], grad):
                t.add_(g)
    pairs = list(dict.fromkeys([(target, target), *((n, n) for n in names), *((n, target) for n in names)]))
    with_sums, own = {p: [] for p in (*pairs, *((b, a) for a, b in pairs))}, {p: [] for p in pairs}
    for rows in tqdm(blocks, desc="compare: products"):
        grads = {n: list(g) for n, g in _gradients(model, batch, rows, wanted, params, size)}
        for a, b in with_sums:
            with_sums[a, b].append(_dot(grads[a], total[b]))
        for a, b in pairs:
            own[a, b].append(_dot(grads[a], grads[b]))
    # U[a, b]: mean product of different blocks, with all blocks first and then with each left out (for the jackknife)
    means = {}
    for a, b in pairs:
        ab, ba, same = np.array(with_sums[a, b]), np.array(with_sums[b, a]), np.array(own[a, b])
        k = len(blocks)
        full = (ab.sum() - same.sum()) / (k * (k - 1))
        without = (ab.sum() - ab - ba + same - (same.sum() - same)) / ((k - 1) * (k - 2))
        means[a, b] = np.concatenate([[full], without])
    return pd.DataFrame([_row(name, target, means) for name in names], columns=COLUMNS)


def _deal(batch, names, draws, seed):
    """Row indices of each block: whole groups, dealt at random, as even as they go."""
    missing = [k for k in ("tokens", "prompt_mask", "mask", "ref_logp") if k not in batch]
    if missing:
        raise ValueError(f"batch: lacks {', '.join(missing)}")
    for name in names:
        if name not in ESTIMATORS:
            raise ValueError(f"names: expected some of {', '.join(ESTIMATORS)}, got {name!r}")
        if ESTIMATORS[name].needs_logits and "ref_logits" not in batch:
            raise ValueError(f"batch: {name!r} needs ref_logits, [B, T, V]")
    size = batch.get("group_size") or 1
    groups = len(batch["tokens"]) // size
    if groups * size != len(batch["tokens"]) or not 3 <= draws <= groups:
        raise ValueError(f"draws: expected 3 to the number of groups, got {draws} blocks for {groups} groups of {size}")
    order = torch.randperm(groups, generator=generator(seed, "compare"))
    rows = torch.arange(groups * size).view(groups, size)
    return [rows[part].flatten() for part in order.tensor_split(draws)], size


def _gradients(model, batch, rows, names, params, size):
    """Each name's gradient on these rows, float32, one after the other (one forward pass for all)."""
    part = {k: v[rows] for k, v in batch.items() if isinstance(v, Tensor)}
    width = part["prompt_mask"].shape[1]
    tokens, completion = part["tokens"][:, :width], part["tokens"][:, width:]
    sampler = {"temperature": batch.get("temperature", 1.0), "barred": batch.get("barred", ())}
    with torch.enable_grad():
        logits = completion_logits(model, tokens, part["prompt_mask"], completion, **sampler)
        logp = token_logprobs(logits, completion)
        for i, name in enumerate(names):
            more = {"group_size": size} if size > 1 and ESTIMATORS[name].baseline else {}
            if ESTIMATORS[name].needs_logits:
                more |= {"logits": logits, "ref_logits": part["ref_logits"]}
            loss = kl_loss(name, logp, part["ref_logp"], part["mask"], **more)
            grads = torch.autograd.grad(loss, params, retain_graph=i + 1 < len(names), materialize_grads=True)
            yield name, [g.float() for g in grads]


def _dot(a, b) -> float:
    return sum(float((x.double() * y.double()).sum()) for x, y in zip(a, b))


def _row(name, target, means):
    gg, rr, gr = means[name, name], means[target, target], means[name, target]
    k = len(gg) - 1

    def limits(x):
        half = stats.t.ppf(0.975, k - 1) * np.sqrt((k - 1) * np.mean((x[1:] - x[1:].mean()) ** 2))
        return [x[0], x[0] - half, x[0] + half]

    for what, product in ((name, gg), (target, rr)):
        if not limits(product)[1] > 0:
            warnings.warn(
                f"compare: the gradient of {what} is not significantly above its noise; give more rows", stacklevel=3
            )
            return [name, *[np.nan] * 6, k]
    # both are ratios of means: a left-out block may push a product below 0 where the whole does not, hence the clamp
    ratio = gg.clip(min=0) / rr.clip(min=np.finfo(float).tiny)
    cosine = gr / np.sqrt(np.maximum(gg * rr, np.finfo(float).tiny))
    return [name, *limits(cosine), *limits(np.sqrt(ratio)), k]
