"""The random policies that the exact tests run on, and how they compare gradients."""

from functools import lru_cache

import torch

from klnb import exact, policies

RTOL = 1e-9


class Case:
    """A policy π, a reference, a behavior policy μ (other random tables), and their fields."""

    def __init__(self, seed, scale, table, ref_table, eos, vocab=3, horizon=3):
        generator = torch.Generator().manual_seed(seed)
        self.policy = policies.random(vocab, horizon, table, eos, scale, generator)
        self.ref = policies.random(vocab, horizon, ref_table, eos, scale, generator)
        self.behavior = policies.random(vocab, horizon, "full", eos, scale, generator)
        self.eos, self.scale = eos, scale
        self.id = f"{table}-{ref_table}-scale{scale:g}-{'fixed' if eos is None else 'eos'}"

    @lru_cache  # noqa: B019  (a handful of cases, kept for the whole run anyway)
    def field(self, name):
        return exact.gradient(self.policy, self.ref, name, self.behavior if name.endswith("_mu") else None)

    @property
    def size(self):
        """The scale against which a true zero is judged."""
        return float(self.field("R_seq").norm() + self.field("F_seq").norm())

    def expect(self, loss_fn, off_policy=False, batch_size=1, stacked=True, **more):
        behavior = self.behavior if off_policy else None
        return exact.expected_gradient(loss_fn, self.policy, self.ref, behavior, batch_size, stacked=stacked, **more)


# 24 pairs: four combinations of tables (the policy's, the reference's) × three scales × fixed and variable length.
# The seeds are fixed, so nothing here can fail by chance.
TABLES = (("full", "full"), ("bigram", "full"), ("free", "full"), ("full", "bigram"))
CASES = [
    Case(seed, scale, table, ref_table, eos)
    for seed, (scale, (table, ref_table), eos) in enumerate(
        (s, t, e) for s in (0.3, 1.0, 3.0) for t in TABLES for e in (None, 2)
    )
]


def distance(got, want):
    """‖got − want‖/‖want‖."""
    return float((got - want).norm() / want.norm())


def same(got, want, zero_scale=None):
    """Equal at rtol 1e-9; where the truth is zero, below 1e-9 of `zero_scale`."""
    scale = float(want.norm()) if zero_scale is None else zero_scale
    return float((got - want).norm()) <= RTOL * scale
