import math

import brute
import pytest
import torch
from pairs import CASES, Case, distance, same

from klnb import exact, policies
from klnb.losses import kl_loss


def softmax_policy(*probs, horizon=1):
    return policies.Tabular(torch.tensor([probs], dtype=torch.float64).log(), "full", horizon=horizon)


# π = (.7, .3), π_ref = (.5, .5), by hand:
#   KL(π‖π_ref) = .7 ln 1.4 + .3 ln .6 = .235531 − .153248 = .0822829
#   ∇ in logit 1: Σ_v π_v ℓ_v (1[v=1] − π_1) = π_1 (ℓ_1 − KL) = .7 (.3364722 − .0822829) = .1779325
#   swapped: π_1 − π_ref,1 = .2
FIXTURE = softmax_policy(0.7, 0.3), softmax_policy(0.5, 0.5)


def test_fixture_by_hand():
    policy, ref = FIXTURE
    assert exact.kl(policy, ref).item() == pytest.approx(0.0822828785, rel=1e-8)
    assert exact.kl(ref, policy).item() == pytest.approx(
        0.5 * math.log(0.5 / 0.7) + 0.5 * math.log(0.5 / 0.3), rel=1e-12
    )
    for field in ("R_seq", "R_tok"):
        assert exact.gradient(policy, ref, field).tolist()[0] == pytest.approx([0.1779325507, -0.1779325507], rel=1e-8)
    for field in ("F_seq", "F_tok"):
        assert exact.gradient(policy, ref, field).tolist()[0] == pytest.approx([0.2, -0.2], rel=1e-12)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_kl_and_fields_against_plain_loops(case):
    p, q, mu = brute.Policy(case.policy), brute.Policy(case.ref), brute.Policy(case.behavior)
    assert exact.kl(case.policy, case.ref).item() == pytest.approx(brute.kl(p, q), rel=1e-11)
    assert exact.kl(case.ref, case.policy).item() == pytest.approx(brute.kl(q, p), rel=1e-11)
    for name in exact.FIELDS:
        assert same(case.field(name), brute.field(p, q, name, mu)), name


@pytest.mark.parametrize("case", CASES[:3], ids=lambda c: c.id)
def test_sequence_fields_are_slopes_of_the_divergences(case):
    """By central differences, which know nothing of autograd: O(step²) = 1e-10 relative to curvature."""
    step, logits = 1e-5, case.policy.logits

    def slope(divergence):
        out = torch.zeros_like(logits)
        for i in range(logits.numel()):
            values = []
            for sign in (1, -1):
                moved = logits.clone()
                moved.view(-1)[i] += sign * step
                moved = policies.Tabular(moved, case.policy.table, horizon=case.policy.horizon, eos=case.eos)
                values.append(divergence(brute.Policy(moved)))
            out.view(-1)[i] = (values[0] - values[1]) / (2 * step)
        return out

    ref = brute.Policy(case.ref)
    assert distance(case.field("R_seq"), slope(lambda p: brute.kl(p, ref))) < 1e-7
    assert distance(case.field("F_seq"), slope(lambda p: brute.kl(ref, p))) < 1e-7


def test_kl_is_differentiable_and_gives_r_seq():
    case = CASES[1]
    logits = case.policy.logits.clone().requires_grad_()
    exact.kl(policies.Tabular(logits, case.policy.table, horizon=3, eos=case.eos), case.ref).backward()
    assert same(logits.grad, case.field("R_seq"))


def test_fields_need_no_grad_mode_and_return_detached():
    with torch.no_grad():
        g = exact.gradient(*FIXTURE, "R_tok")
        exact.curl(*FIXTURE, "R_tok")
        exact.length_gradient(FIXTURE[0])
    assert not g.requires_grad
    assert FIXTURE[0].logits.grad is None


def test_barred_tokens():
    """0 log 0 = 0; π > 0 = π_ref is an infinite KL, and an infinite divergence has no gradient."""
    inf = math.inf
    policy = policies.Tabular(torch.tensor([[0.3, -0.2, -inf]], dtype=torch.float64), horizon=1)
    ref = policies.Tabular(torch.tensor([[0.0, 0.0, -inf]], dtype=torch.float64), horizon=1)
    a, b = math.exp(0.3) / (math.exp(0.3) + math.exp(-0.2)), math.exp(-0.2) / (math.exp(0.3) + math.exp(-0.2))
    value = a * math.log(2 * a) + b * math.log(2 * b)  # the third token adds nothing
    assert exact.kl(policy, ref).item() == pytest.approx(value, rel=1e-12)
    want = [a * (math.log(2 * a) - value), b * (math.log(2 * b) - value), 0.0]
    for name in ("R_seq", "R_tok"):
        assert exact.gradient(policy, ref, name).tolist()[0] == pytest.approx(want, rel=1e-11)
    for name in ("F_seq", "F_tok"):
        assert exact.gradient(policy, ref, name).tolist()[0] == pytest.approx([a - 0.5, b - 0.5, 0.0], rel=1e-11)
    full = policies.Tabular(torch.zeros(1, 3, dtype=torch.float64), horizon=1)
    assert exact.kl(full, ref) == inf
    assert exact.kl(ref, full).item() == pytest.approx(math.log(1.5), rel=1e-12)  # 2 · ½ ln(½ ÷ ⅓)
    with pytest.raises(ValueError, match="field: R_seq does not exist here"):
        exact.gradient(full, ref, "R_seq")
    assert exact.gradient(ref, full, "R_seq").isfinite().all()


def test_prefixes_that_are_never_reached_count_for_nothing():
    """Token 2 is barred first in both; after it, the reference bars what the policy does not. All fields as if not."""

    def pair(ref_after):
        inf = math.inf
        p = [[0.0, 0.3, -inf], [0.0, 0.1, 0.2], [0.3, 0.0, 0.5], [0.0, 0.0, 0.0]]
        q = [[0.5, 0.0, -inf], [0.0, 0.4, 0.0], [0.1, 0.0, 0.0], [0.0, 0.0, ref_after]]
        return [policies.Tabular(torch.tensor(x, dtype=torch.float64), horizon=2) for x in (p, q)]

    for field in exact.FIELDS:
        got, want = (
            exact.gradient(*both, field, both[0] if field.endswith("_mu") else None)
            for both in (pair(-math.inf), pair(0.0))
        )
        assert torch.equal(got, want) and got.norm() > 0.1 and (got[3] == 0).all()
    assert exact.curl(*pair(-math.inf), "R_tok") > 0.01


@pytest.mark.parametrize("case", CASES[:4] + CASES[16:18], ids=lambda c: c.id)
def test_expected_gradient_of_every_name_against_plain_loops(case):
    """The gradient of one sample of each name, written out by hand, averaged by the naive enumerator."""
    p, q, mu = brute.Policy(case.policy), brute.Policy(case.ref), brute.Policy(case.behavior)

    def logs(y):
        ell = [math.log(p.probs(y[:t])[y[t]] / q.probs(y[:t])[y[t]]) for t in range(len(y))]
        w = [p.prob(y[: t + 1]) / mu.prob(y[: t + 1]) for t in range(len(y))]
        k3 = [math.exp(-e) - 1 + e for e in ell]
        return ell, w, k3

    on = {
        "k1": lambda e, w, k: [1.0 for _ in e],
        "k2": lambda e, w, k: e,
        "k3": lambda e, w, k: [1 - math.exp(-x) for x in e],
        "score": lambda e, w, k: e,
        "sequence": lambda e, w, k: [sum(e)] * len(e),
        "reward-to-go": lambda e, w, k: [sum(e[t:]) for t in range(len(e))],
        "reward-to-go-k3": lambda e, w, k: [1 - math.exp(-e[t]) + sum(k[t:]) for t in range(len(e))],
    }
    off = {
        "sequence": lambda e, w, k: [w[-1] * sum(e)] * len(e),
        "reward-to-go": lambda e, w, k: [sum(w[s] * e[s] for s in range(t, len(e))) for t in range(len(e))],
        # ∇ Σ_s w_{1:s} k3_s: w_{1:s} moves with every log π_t, t ≤ s, and k3_t with its own
        "reward-to-go-k3": lambda e, w, k: [
            w[t] * (1 - math.exp(-e[t])) + sum(w[s] * k[s] for s in range(t, len(e))) for t in range(len(e))
        ],
    }
    for forms, behavior in ((on, None), (off, mu)):
        for name, form in forms.items():
            want = brute.expected(p, lambda y, form=form: enumerate(form(*logs(y))), behavior)

            def loss(logp, ref_logp, mask, behavior_logp, name=name, off=behavior is not None):
                return kl_loss(name, logp, ref_logp, mask, behavior_logp=behavior_logp if off else None)

            got = case.expect(loss, off_policy=behavior is not None)
            assert same(got, want, case.size if name == "k1" else None), name


@pytest.mark.parametrize("off_policy", [False, True])
def test_batches_against_autograd_through_the_policy(off_policy):
    """Groups of two, one at a time and straight through `Tabular`, weighted by hand."""
    case = CASES[11]  # full table against bigram, scale 1, eos

    def loss(logp, ref_logp, mask, behavior_logp, logits, ref_logits):
        a = kl_loss("reward-to-go", logp, ref_logp, mask, group_size=2)
        return (
            a
            + kl_loss("rao-blackwell", logp, ref_logp, mask, logits=logits, ref_logits=ref_logits) * behavior_logp[0, 0]
        )

    tokens, mask = policies.sequences(3, 3, case.eos)
    sampler = brute.Policy(case.behavior if off_policy else case.policy)
    prob = [sampler.prob(tuple(y[: int(m.sum())].tolist())) for y, m in zip(tokens, mask)]
    want, second, count = 0.0, 0.0, 0
    logits = case.policy.logits.clone().requires_grad_()
    live = policies.Tabular(logits, case.policy.table, horizon=3, eos=case.eos)
    behavior = case.behavior if off_policy else case.policy
    for i in range(len(tokens)):
        for j in range(len(tokens)):
            y, m = tokens[[i, j]], mask[[i, j]]
            value = loss(
                live.token_logprobs(y), case.ref.token_logprobs(y), m, behavior.token_logprobs(y),
                logits=logits[live.rows(y)], ref_logits=case.ref.log_probs(y),
            )  # fmt: skip
            (g,) = torch.autograd.grad(value, logits)
            want = want + prob[i] * prob[j] * g
            second = second + prob[i] * prob[j] * torch.outer(g.flatten(), g.flatten())
            count += 1
    assert count == 15**2  # 1 of length 1, 2 of length 2, 2·2·3 of length 3
    # behavior_logp[0, 0] makes the loss no function that stacks, so one call per batch
    got = case.expect(loss, off_policy, batch_size=2, stacked=False)
    assert same(got, want)
    assert same(case.expect(loss, off_policy, batch_size=2, stacked=False, trim=True), want)
    cov = exact.gradient_covariance(loss, case.policy, case.ref, behavior if off_policy else None, 2)
    assert same(cov, second - torch.outer(want.flatten(), want.flatten()))
    assert torch.linalg.eigvalsh(cov).min() > -1e-12 * cov.norm()


def test_stacked_and_single_calls_agree():
    case = CASES[9]
    for n in (1, 2):

        def loss(logp, ref_logp, mask, behavior_logp, n=n):
            return kl_loss("reward-to-go-k3", logp, ref_logp, mask, group_size=None if n == 1 else n)

        single = exact.gradients(loss, case.policy, case.ref, None, n)
        stacked = exact.gradients(loss, case.policy, case.ref, None, n, stacked=True)
        assert torch.equal(single[0], stacked[0])
        assert torch.allclose(single[1], stacked[1], rtol=1e-11, atol=1e-13)
        assert single[0].sum().item() == pytest.approx(1, rel=1e-12)


def test_trim_cuts_batches_to_their_longest_row():
    case, seen = CASES[1], set()

    def loss(logp, ref_logp, mask, behavior_logp):
        seen.add((logp.shape[1], int(mask.sum(1).max())))
        return kl_loss("k2", logp, ref_logp, mask)

    full = exact.expected_gradient(loss, case.policy, case.ref)
    assert seen == {(3, 1), (3, 2), (3, 3)}
    seen.clear()
    assert same(exact.expected_gradient(loss, case.policy, case.ref, trim=True), full)
    assert seen == {(1, 1), (2, 2), (3, 3)}


def test_padding_holds_log_probs_that_depend_on_the_policy():
    case = CASES[1]

    def leak(logp, ref_logp, mask, behavior_logp):
        assert (logp.isfinite() & ref_logp.isfinite() & behavior_logp.isfinite()).all()
        return (logp - ref_logp).square().sum(1).mean() / 2

    def honest(logp, ref_logp, mask, behavior_logp):
        return ((logp - ref_logp).square() * mask).sum(1).mean() / 2

    assert distance(case.expect(leak), case.expect(honest)) > 1e-2


def test_on_policy_behavior_logp_is_the_policys_own_and_detached():
    case = CASES[0]

    def loss(logp, ref_logp, mask, behavior_logp):
        assert torch.equal(behavior_logp, logp.detach()) and not behavior_logp.requires_grad
        assert not ref_logp.requires_grad
        return logp.sum()

    case.expect(loss)


def test_length_gradient_against_plain_loops():
    case = CASES[9]
    p = brute.Policy(case.policy)
    for inverse in (False, True):
        want = brute.expected(p, lambda y, i=inverse: [(t, 1 / len(y) if i else len(y)) for t in range(len(y))])
        assert same(exact.length_gradient(case.policy, inverse=inverse), want)
    fixed = CASES[8]
    assert exact.length_gradient(fixed.policy).norm() < 1e-12  # the length never changes


def test_jacobian_against_differences():
    case, step = CASES[2], 1e-5
    for name in ("R_tok", "F_tok", "R_seq", "R_tok_mu"):
        mu = case.behavior if name.endswith("_mu") else None
        want = torch.zeros(case.policy.logits.numel(), case.policy.logits.numel(), dtype=torch.float64)
        for j in range(len(want)):
            up, down = case.policy.logits.clone(), case.policy.logits.clone()
            up.view(-1)[j] += step
            down.view(-1)[j] -= step
            at = [policies.Tabular(z, case.policy.table, horizon=3, eos=case.eos) for z in (up, down)]
            grads = [brute.field(brute.Policy(p), brute.Policy(case.ref), name, mu and brute.Policy(mu)) for p in at]
            want[:, j] = ((grads[0] - grads[1]) / (2 * step)).flatten()
        assert distance(exact.jacobian(case.policy, case.ref, name, mu), want) < 1e-7, name


def test_bad_input():
    policy, ref = CASES[0].policy, CASES[0].ref
    with pytest.raises(ValueError, match="field: expected one of R_seq, .*got 'kl'"):
        exact.gradient(policy, ref, "kl")
    for name in ("R_tok_mu", "F_tok_mu"):
        with pytest.raises(ValueError, match=f"behavior: {name} takes its prefixes from μ"):
            exact.gradient(policy, ref, name)
        with pytest.raises(ValueError, match="behavior"):
            exact.jacobian(policy, ref, name)
    other = Case(0, 1.0, "full", "full", 2)
    for call in (
        lambda: exact.kl(policy, other.ref),
        lambda: exact.gradient(policy, other.ref, "R_seq"),
        lambda: exact.expected_gradient(lambda a, b, c, d: a.sum(), policy, other.ref),
    ):
        with pytest.raises(ValueError, match=r"ref: expected V, T, eos = \(3, 3, None\) like policy, got \(3, 3, 2\)"):
            call()
    with pytest.raises(ValueError, match="behavior: expected V, T, eos"):
        exact.gradient(policy, ref, "R_tok_mu", other.behavior)


@pytest.mark.parametrize(
    "fn, message",
    [
        (lambda logp, *_: logp.detach().sum(), "loss: carries no gradient"),
        (lambda logp, *_: logp.sum(1), r"loss: expected a scalar tensor, got shape \[1\]"),
        (lambda logp, *_: 1.0, "loss: expected a scalar tensor, got float"),
        (lambda logp, *_: logp.sum() * math.nan, "loss: expected a finite value, got nan"),
        (lambda logp, *_: logp.sum() + math.inf, "loss: expected a finite value, got inf"),
    ],
)
def test_bad_losses(fn, message):
    case = CASES[0]
    with pytest.raises(ValueError, match=message):
        exact.expected_gradient(fn, case.policy, case.ref)


# ---- optima, one position ----


def random_rewards(seed, n=5):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, dtype=torch.float64, generator=g), torch.randn(n, dtype=torch.float64, generator=g).softmax(0)


@pytest.mark.parametrize("beta", [0.01, 0.3, 1.0, 20.0])
@pytest.mark.parametrize("seed", range(5))
def test_optima_are_stationary_and_best(beta, seed):
    """∇(E[R] − βKL) vanishes there, in logits; and no move of probability improves it (both objectives are concave)."""
    reward, ref = random_rewards(seed)
    for which in ("target", "swapped"):
        best = exact.optimum(reward, ref, beta, which)
        assert best.sum().item() == pytest.approx(1, rel=1e-12) and (best > 0).all()

        def objective(p, which=which):
            kl = (p * (p / ref).log()).sum() if which == "target" else (ref * (ref / p).log()).sum()
            return (reward * p).sum() - beta * kl

        logits = best.log().requires_grad_()
        (grad,) = torch.autograd.grad(objective(logits.softmax(0)), logits)
        assert grad.abs().max() < 1e-9 * (reward.abs().max() + beta)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(20):
            other = torch.randn(5, dtype=torch.float64, generator=generator).softmax(0)
            assert objective(0.9 * best + 0.1 * other) <= objective(best) + 1e-12


def test_optimum_by_hand():
    """R = (1, 0), π_ref = (½, ½), β = 1.

    Target: odds e, so π_1 = e/(1 + e). Swapped: ½/(λ−1) + ½/λ = 1 ⟺ λ² − 2λ + ½ = 0 ⟺ λ = 1 + 1/√2, so
    π_1 = ½√2 = .7071.
    """
    reward, ref = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert exact.optimum(reward, ref, 1.0)[0].item() == pytest.approx(math.e / (1 + math.e), rel=1e-14)
    assert exact.optimum(reward, ref, 1.0, "swapped")[0].item() == pytest.approx(math.sqrt(0.5), rel=1e-13)


def test_optimum_extremes():
    reward, ref = torch.tensor([2.0, 2.0, -1.0, 9.0]).double(), torch.tensor([0.2, 0.3, 0.5, 0.0]).double()
    for which in ("target", "swapped"):
        best = exact.optimum(reward, ref, 1e-9, which)  # all mass on the best of the support, shared as π_ref does
        assert best.tolist() == pytest.approx([0.4, 0.6, 0.0, 0.0], abs=1e-8)
        assert exact.optimum(reward, ref, 1e9, which).tolist() == pytest.approx(ref.tolist(), abs=1e-8)
        assert best[3] == 0
    one = softmax_policy(0.25, 0.75)
    assert exact.optimum(torch.zeros(2).double(), one, 1.0).tolist() == pytest.approx([0.25, 0.75], rel=1e-12)


def test_optimum_bad_input():
    reward, ref = random_rewards(0)
    with pytest.raises(ValueError, match="reward, ref: expected the same"):
        exact.optimum(reward[:3], ref, 1.0)
    with pytest.raises(ValueError, match="reward, ref"):
        exact.optimum(reward[None], ref[None], 1.0)
    with pytest.raises(ValueError, match="ref: expected probabilities"):
        exact.optimum(reward, ref * 2, 1.0)
    with pytest.raises(ValueError, match="beta: expected a number above 0, got 0"):
        exact.optimum(reward, ref, 0)
    with pytest.raises(ValueError, match="which: expected 'target' or 'swapped', got 'reverse'"):
        exact.optimum(reward, ref, 1.0, "reverse")
