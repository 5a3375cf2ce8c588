"""Intervals against textbook numbers and against their own promise; generators that don't share streams."""
import hashlib
from functools import partial

import numpy as np
import pytest
import torch

from klnb.stats import bootstrap, generator, interval, paired


def test_interval_of_five_numbers():
    # mean 3, sd √2.5, n = 5, t_{0.975, 4} = 2.7764 (table): half width 2.7764·√(2.5/5) = 1.96322
    mean, low, high = interval([1, 2, 3, 4, 5])
    assert mean == 3
    np.testing.assert_allclose([low, high], [3 - 1.96322, 3 + 1.96322], atol=1e-4)


def test_interval_works_along_an_axis():
    x = np.arange(24.0).reshape(2, 3, 4) ** 2
    for got, want in zip(interval(x, axis=1), interval(np.moveaxis(x, 1, 0))):
        np.testing.assert_array_equal(got, want)
    assert interval(x)[0].shape == (3, 4)
    assert interval(torch.ones(3, 2))[1].tolist() == [1, 1]


@pytest.mark.parametrize(
    "n, method, low, high", [(5, interval, 0.935, 0.965), (25, partial(bootstrap, draws=1000), 0.915, 0.955)]
)
def test_intervals_cover_what_they_say(n, method, low, high):
    # 2,000 sets of n normal runs. Coverage of t is .95 exactly, sd √(.95·.05/2000) = .0049: outside ±.015 by chance in
    # about 0.2%. A percentile bootstrap of 25 covers about .935. A normal instead of a t quantile would cover .878.
    x = np.random.default_rng(0).normal(size=(n, 2000))
    _, lo, hi = method(x)
    assert low < np.mean((lo < 0) & (hi > 0)) < high


def test_bootstrap_honours_its_seed_and_refuses_few_runs():
    x = np.random.default_rng(1).exponential(size=(30, 2))
    a, b, c = bootstrap(x, seed=1), bootstrap(x, seed=1), bootstrap(x, seed=2)
    np.testing.assert_array_equal(a[1], b[1])
    assert (a[1] != c[1]).all()
    with pytest.raises(ValueError, match="5 runs are too few"):
        bootstrap(x[:5])


def test_paired_removes_what_the_runs_share():
    # a − b is (1, 1, 2): mean 4/3, sd 1/√3, t_{0.975, 2} = 4.3027: half width 4.3027/3 = 1.43422
    seed_effect = np.array([0.0, 100.0, -50.0])
    got = paired(seed_effect + [1, 1, 2], seed_effect)
    assert got["n"] == 3
    low, high = 4 / 3 - 1.43422, 4 / 3 + 1.43422
    np.testing.assert_allclose([got["mean"], got["low"], got["high"]], [4 / 3, low, high], atol=1e-4)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: interval([1.0]), "at least 2 runs"),
        (lambda: interval(3.0), "at least 2 runs"),
        (lambda: interval([1.0, np.nan, np.inf]), "2 of 3 values are NaN or infinite"),
        (lambda: paired([1.0, 2.0], [1.0, 2.0, 3.0]), "same runs in the same order"),
    ],
)
def test_what_has_no_interval_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_generators_depend_on_seed_and_purpose_only():
    def draw(*key):
        return torch.rand(4, generator=generator(*key)).tolist()

    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = draw(0, "data")
    assert first == draw(0, "data")
    assert len({tuple(draw(s, p)) for s in (0, 1, -1, 2**70) for p in ("data", "rollout")}) == 8
    assert torch.equal(state, torch.get_rng_state())  # the global state is not touched
    # the streams must not change between versions, as figures depend on them
    assert generator(0, "data").initial_seed() == int(hashlib.sha256(b"data/0").hexdigest()[:16], 16) // 2
