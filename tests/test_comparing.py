"""klnb.compare against the exact gradients of a tiny language model, whose completions are enumerated."""

from itertools import product

import pandas as pd
import pytest
import torch
import transformers

from klnb import compare
from klnb.comparing import COLUMNS
from klnb.losses import completion_mask, kl_loss, token_logprobs
from klnb.models import completion_logits, rollout
from klnb.stats import generator

V, T, EOS = 5, 3, 1
PROMPT = torch.tensor([[2, 3]])


def model(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(
            vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            initializer_range=0.5,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config).eval()


def score(net, completion):
    """Log-probs [B, T] and logits of completions of PROMPT."""
    prompt = PROMPT.expand(len(completion), -1)
    logits = completion_logits(net, prompt, torch.ones_like(prompt), completion)
    return token_logprobs(logits, completion), logits


@pytest.fixture(scope="module")
def policy():
    return model(0)


@pytest.fixture(scope="module")
def batch(policy):
    rows = 4096
    prompt = PROMPT.expand(rows, -1)
    completion, mask, _ = rollout(
        policy, prompt, torch.ones_like(prompt), T, eos=[EOS], generator=generator(0, "test compare")
    )
    with torch.no_grad():
        ref_logp, ref_logits = score(model(1), completion)
    return {"tokens": torch.cat([prompt, completion], 1), "prompt_mask": torch.ones_like(prompt), "mask": mask,
            "ref_logp": ref_logp, "ref_logits": ref_logits, "group_size": 4}  # fmt: skip


def exact(policy, name):
    """The expected gradient of a per-sequence loss, all V^T completions enumerated, as one vector."""
    tokens = torch.tensor(list(product(range(V), repeat=T)))
    mask = completion_mask(tokens, EOS)
    once = (mask.bool() | (tokens == EOS)).all(1)  # one filling of the positions after EOS
    tokens, mask = tokens[once], mask[once]
    logp, _ = score(policy, tokens)
    ref_logp, _ = score(model(1), tokens)
    weight = (logp * mask).sum(1).exp().detach()
    assert abs(float(weight.sum()) - 1) < 1e-5
    losses = [kl_loss(name, logp[i : i + 1], ref_logp[i : i + 1], mask[i : i + 1]) for i in range(len(tokens))]
    grads = torch.autograd.grad(torch.stack(losses) @ weight, list(policy.parameters()))
    return torch.cat([g.flatten().double() for g in grads])


def test_intervals_hold_the_exact_alignment_and_the_neighbours_lie_outside(policy, batch):
    # 95% intervals, widened to twice their half-width: about 4.6 standard errors with 15 degrees of freedom, a false
    # alarm with probability below 1e-3 for each of the four checks (fixed seed: it either happens always or never)
    table = compare(policy, batch, ["k2", "k3", "reward-to-go"], draws=16).set_index("name")
    assert list(table.reset_index().columns) == COLUMNS and (table.n == 16).all()
    right = exact(policy, "reward-to-go")
    for name in ("k2", "k3"):
        g = exact(policy, name)
        for column, want in (("cosine", float(g @ right / g.norm() / right.norm())),
                             ("norm_ratio", float(g.norm() / right.norm()))):  # fmt: skip
            row = table.loc[name]
            half = (row[f"{column}_high"] - row[f"{column}_low"]) / 2
            assert abs(row[column] - want) < 2 * half, (name, column, want)
            assert half < 0.1  # an interval that says something
    assert table.loc["reward-to-go", "cosine"] == pytest.approx(1, abs=0.1)
    # here the alignment is far from 1 for k3, and the interval says so
    assert table.loc["k3", "cosine_high"] < 0.9


def test_the_target_agrees_with_itself_exactly(policy, batch):
    table = compare(policy, batch, "rao-blackwell", draws=8)
    assert table.cosine[0] == pytest.approx(1, abs=1e-12) and table.norm_ratio[0] == pytest.approx(1, abs=1e-12)


def test_a_gradient_lost_in_noise_is_nan_with_a_warning(policy, batch):
    with pytest.warns(UserWarning, match="k1 is not significantly above its noise"):
        table = compare(policy, batch, ["k1"])
    assert table.iloc[0, 1:7].isna().all() and table.n[0] == 8


def test_same_seed_same_table_and_the_seed_matters(policy, batch):
    some = {k: v[:1024] if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    first, again, other = (compare(policy, some, ["k2"], seed=s) for s in (0, 0, 1))
    pd.testing.assert_frame_equal(first, again)
    assert not first.equals(other)


def test_params_chooses_the_subspace_and_gradients_are_left_alone(policy, batch):
    some = {k: v[:1024] if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    head = compare(policy, some, ["k2"], params=[policy.lm_head.weight])
    assert not head.equals(compare(policy, some, ["k2"]))
    assert all(p.grad is None for p in policy.parameters())


@pytest.mark.parametrize(
    "change, names, message",
    [
        ({"mask": None}, ["k2"], "batch: lacks mask"),
        ({}, ["k4"], "names: expected some of k1"),
        ({"ref_logits": None}, ["rao-blackwell"], "needs ref_logits"),
        ({"group_size": 2048}, ["k2"], "draws: expected 3 to the number of groups"),
    ],
)
def test_bad_input_is_named(policy, batch, change, names, message):
    broken = {k: v for k, v in (batch | change).items() if v is not None}
    with pytest.raises(ValueError, match=message):
        compare(policy, broken, names)
