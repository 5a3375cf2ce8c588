import math
from collections import Counter

import brute
import pytest
import torch
from pairs import CASES

from klnb import policies


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    "table, want", [("full", 1 + 3 + 9 + 27), ("bigram", 1 + 3), ("free", 4)], ids=lambda x: str(x)
)
def test_number_of_rows(table, want):
    assert policies.table_rows(3, 4, table) == want
    assert policies.random(3, 4, table, generator=rng()).logits.shape == (want, 3)


@pytest.mark.parametrize("case", CASES[:8], ids=lambda c: c.id)
def test_sequences_and_log_probs_against_plain_loops(case):
    p = brute.Policy(case.policy)
    tokens, mask = policies.sequences(3, 3, case.eos)
    logp, all_logp = case.policy.token_logprobs(tokens), case.policy.log_probs(tokens)
    seen = []
    for i in range(len(tokens)):
        length = int(mask[i].sum())
        y = tuple(tokens[i, :length].tolist())
        seen.append(y)
        assert mask[i].tolist() == [1.0] * length + [0.0] * (3 - length)
        assert all(token == case.eos for token in tokens[i, length:])
        for t in range(length):
            assert logp[i, t].item() == pytest.approx(math.log(p.probs(y[:t])[y[t]]), rel=1e-12)
            assert all_logp[i, t].exp().tolist() == pytest.approx(p.probs(y[:t]), rel=1e-12)
            assert case.policy.rows(tokens)[i, t] == brute.row_of(y[:t], 3, case.policy.table)
    assert seen == sorted(seen) and seen == sorted(p.sequences())
    assert sum(map(p.prob, seen)) == pytest.approx(1, rel=1e-12)
    assert logp.isfinite().all()  # padding too


def test_counts_of_sequences():
    """T = 3, V = 3 with EOS: 1 of length 1, 2 of length 2, 2·2·3 of length 3; without: 27. EOS may be any token."""
    assert len(policies.sequences(3, 3)[0]) == 27
    for eos in range(3):
        assert sorted(policies.sequences(3, 3, eos)[1].sum(1).tolist()) == [1] + [2] * 2 + [3] * 12
    assert policies.sequences(2, 1, 0)[0].tolist() == [[0], [1]]


@pytest.mark.parametrize("table", policies.TABLES)
@pytest.mark.parametrize("eos", [None, 0])
def test_sampling_frequencies(table, eos):
    """20,000 draws: each of ≤ 27 frequencies within 5 standard errors; false alarm below 27 · 6e-7 = 2e-5 a table."""
    policy, n = policies.random(3, 3, table, eos, 1.0, rng(3)), 20_000
    p = brute.Policy(policy)
    tokens, mask = policy.sample(n, rng(4))
    assert tokens.shape == mask.shape == (n, 3) and mask.dtype == torch.float64
    counts = Counter(tuple(row[: int(m)]) for row, m in zip(tokens.tolist(), mask.sum(1).tolist(), strict=True))
    for y in p.sequences():
        assert abs(counts[y] / n - p.prob(y)) < 5 * math.sqrt(p.prob(y) * (1 - p.prob(y)) / n)
    if eos is not None:
        assert (tokens[mask == 0] == eos).all() and (mask == 0).any()
    again, _ = policy.sample(n, rng(4))
    assert torch.equal(tokens, again)


def test_no_global_random_state():
    state = torch.random.get_rng_state()
    policies.random(3, 3, generator=rng()).sample(10, rng())
    assert torch.equal(state, torch.random.get_rng_state())
    with pytest.raises(ValueError, match="generator: expected a torch.Generator"):
        policies.random(3, 3)


def test_random_scale():
    """4 · 340 normal numbers of sd 2: the sample sd is within 10% of it but for one seed in 10^7 (it has se 1.9%)."""
    logits = policies.random(4, 5, scale=2.0, generator=rng()).logits
    assert logits.dtype == torch.float64 and logits.std().item() == pytest.approx(2, rel=0.1)


def test_logits_are_kept_with_their_gradient():
    logits = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    policy = policies.Tabular(logits, "bigram", horizon=5)
    assert policy.logits is logits
    tokens = torch.tensor([[0, 2, 2, 1, 0]])
    policy.token_logprobs(tokens).sum().backward()
    # rows read: start, 0, 2, 2, 1 → draws 0, 2, 2, 1, 0 at uniform π: 1[v = y] − 1/3 a draw
    want = torch.full((4, 3), -1 / 3, dtype=torch.float64) * torch.tensor([1, 1, 1, 2])[:, None]
    for row, token in ((0, 0), (1, 2), (3, 2), (3, 1), (2, 0)):
        want[row, token] += 1
    assert torch.allclose(logits.grad, want, rtol=1e-12)
    assert repr(policy) == "Tabular(bigram, V=3, T=5, eos=None)"


@pytest.mark.parametrize(
    "logits, more, error, message",
    [
        (torch.zeros(1, 3), {}, TypeError, "logits: expected a float64 tensor, got torch.float32"),
        (torch.zeros(3).double(), {}, ValueError, r"logits: expected shape \[rows, V\] with V >= 2, got \[3\]"),
        (torch.zeros(1, 1).double(), {}, ValueError, "logits: expected shape"),
        (torch.zeros(2, 3).double(), {}, ValueError, "logits: a full table with V=3, T=1 has 1 rows, got 2"),
        (
            torch.zeros(1, 3).double(),
            {"table": "trigram"},
            ValueError,
            "table: expected one of full, bigram, free, got",
        ),
        (torch.zeros(1, 3).double(), {"horizon": 0}, ValueError, "horizon: expected at least 1, got 0"),
        (torch.zeros(1, 3).double(), {"eos": 3}, ValueError, "eos: expected a token below 3 or None, got 3"),
        (torch.zeros(1, 3).double(), {"eos": -1}, ValueError, "eos"),
    ],
)
def test_bad_input(logits, more, error, message):
    with pytest.raises(error, match=message):
        policies.Tabular(logits, **{"table": "full", "horizon": 1, **more})


def test_bad_input_that_is_no_tensor():
    with pytest.raises(TypeError, match="logits"):
        policies.Tabular([[0.0, 1.0]], "full", horizon=1)
