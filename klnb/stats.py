"""Seeds and intervals. Everything random in this project starts from `generator(seed, purpose)`.

Which interval: Student's t below 20 runs (a percentile bootstrap of 5 covers 84% where it says 95%), t or bootstrap
from 20 on. Claims that one method beats another rest on `paired`, the difference on the same seed.
"""
import hashlib

import numpy as np
import torch
from scipy import stats


def generator(seed: int, purpose: str, device="cpu") -> torch.Generator:
    """A torch generator of its own for (seed, purpose): two purposes never share a stream, whatever their seeds.

    Any int is a seed. The torch seed is the first 63 bits of sha256("purpose/seed").
    """
    digest = hashlib.sha256(f"{purpose}/{int(seed)}".encode()).digest()
    return torch.Generator(device=device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def interval(x, axis=0):
    """Mean over runs and its 95% Student-t interval: (mean, low, high), each of x's shape without `axis`.

    x: array of runs, [runs, ...] by default, in any unit. The runs must be independent (seeds, not steps of one run).
    ValueError with fewer than 2 runs or where x is not finite (a diverged run has no mean: show it, don't average it).
    """
    x, n = _runs(x, axis)
    mean = x.mean(axis)
    half = stats.t.ppf(0.975, n - 1) * x.std(axis, ddof=1) / np.sqrt(n)
    return mean, mean - half, mean + half


def paired(a, b) -> dict:
    """The 95% Student-t interval of a − b over paired runs (same seed, data and start): mean, low, high, n.

    a, b: equal shapes [runs, ...]. The claim "a is below b" holds at this level where `high` < 0.
    """
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if a.shape != b.shape:
        raise ValueError(f"paired: a and b must be the same runs in the same order, got shapes {a.shape} and {b.shape}")
    mean, low, high = interval(a - b)
    return {"mean": mean, "low": low, "high": high, "n": len(a)}


def bootstrap(x, axis=0, draws=10_000, seed=0):
    """Mean over runs and its 95% percentile-bootstrap interval: (mean, low, high). From 20 runs on (ValueError below).

    For what is far from normal. x as in `interval`; the same seed gives the same interval.
    """
    x, n = _runs(x, axis)
    if n < 20:
        raise ValueError(f"bootstrap: {n} runs are too few for a percentile bootstrap; use interval (Student's t)")
    out = stats.bootstrap(
        (x,), np.mean, axis=axis, n_resamples=draws, batch=100, method="percentile", rng=np.random.default_rng(seed)
    ).confidence_interval
    return x.mean(axis), out.low, out.high


def _runs(x, axis):
    x = np.asarray(x, dtype=np.float64)
    if x.ndim == 0 or x.shape[axis] < 2:
        raise ValueError(f"an interval needs at least 2 runs along axis {axis}, got shape {x.shape}")
    if not np.isfinite(x).all():
        raise ValueError(f"{(~np.isfinite(x)).sum()} of {x.size} values are NaN or infinite: an interval needs numbers")
    return x, x.shape[axis]
