"""kl_loss itself: values and gradients against hand-written formulas, bad input, extremes, masks, precision, syncs."""

import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from klnb.losses import ESTIMATORS, kl_loss

inf, nan = math.inf, math.nan
NAMES = list(ESTIMATORS)
OFF = [n for n in NAMES if ESTIMATORS[n].off_policy]
# every way to call each name: (name, off-policy, group size)
FORMS = [(n, False, None) for n in NAMES]
FORMS += [(n, False, 2) for n in NAMES if ESTIMATORS[n].baseline]
FORMS += [(n, True, g) for n in OFF for g in (None, 2)]
form = pytest.mark.parametrize("name, off, group", FORMS, ids=lambda x: str(x))


def oracle(name, logp, ref, mask, mu=None, group=None, logits=None, ref_logits=None, cap=inf):
    """Value (of k1, k2, k3, else None), gradient in logp and gradient in logits, in plain Python floats.

    Written from the definitions: for each row, the weight of ∇log π_t is found by loops over s and t.
    """
    rows, width = len(logp), len(logp[0])
    kept = [[t for t in range(width) if mask[b][t]] for b in range(rows)]

    def ell(b, t):
        return logp[b][t] - ref[b][t]

    def k3(b, t):
        return math.expm1(-ell(b, t)) + ell(b, t)

    def to_go(b, t):
        term = k3 if name == "reward-to-go-k3" else ell
        first = t + 1 if name == "rao-blackwell" else 0 if name == "sequence" else t
        return math.fsum(term(b, s) for s in kept[b] if s >= first)

    def ratio(b, t):
        last = width if name == "sequence" else t
        steps = [] if mu is None else [logp[b][s] - mu[b][s] for s in kept[b] if s <= last]
        return min(cap, math.exp(min(700, math.fsum(steps))))

    def weight(b, t):
        if name in ("k1", "k2", "k3", "score"):
            return 1.0 if name == "k1" else -math.expm1(-ell(b, t)) if name == "k3" else ell(b, t)
        others = [] if group is None else [o for o in range(b - b % group, b - b % group + group) if o != b]
        base = ratio(b, t) * math.fsum(to_go(o, t) for o in others) / max(len(others), 1)
        if name in ("sequence", "rao-blackwell"):
            return ratio(b, t) * to_go(b, t) - base
        ahead = [s for s in kept[b] if s >= t]
        if name == "reward-to-go":
            return math.fsum(ratio(b, s) * ell(b, s) for s in ahead) - base
        # the live ratio carries the score part, and a capped one, a constant, carries none
        score = math.fsum(ratio(b, s) * k3(b, s) for s in ahead if ratio(b, s) < cap)
        return ratio(b, t) * -math.expm1(-ell(b, t)) + score - base

    value, by_logp = None, [[weight(b, t) / rows if t in kept[b] else 0.0 for t in range(width)] for b in range(rows)]
    if name in ("k1", "k2", "k3"):
        term = {"k1": ell, "k2": lambda b, t: ell(b, t) ** 2 / 2, "k3": k3}[name]
        value = math.fsum(term(b, t) for b in range(rows) for t in kept[b]) / rows
    by_logits = None if logits is None else [[[0.0] * len(z) for z in row] for row in logits]
    if logits is not None:
        for b, t in [(row, t) for row in range(rows) for t in kept[row]]:
            p, q = ([math.exp(x - max(z[b][t])) for x in z[b][t]] for z in (logits, ref_logits))
            p, q = ([x / sum(z) for x in z] for z in (p, q))
            diff = [math.log(x / y) if x > 0 else 0.0 for x, y in zip(p, q, strict=True)]
            kl = math.fsum(x * d for x, d in zip(p, diff, strict=True))
            by_logits[b][t] = [x * (d - kl) / rows for x, d in zip(p, diff, strict=True)]
    return value, by_logp, by_logits


def draw(rows=4, width=5, vocab=6, seed=0, dtype=torch.float64, scale=1.0):
    """A batch with holes and unequal lengths in its mask; log-probs of sampled tokens, and logits to match."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return scale * torch.randn(*shape, dtype=torch.float64, generator=generator)

    logits, ref_logits, mu_logits = normal(rows, width, vocab), normal(rows, width, vocab), normal(rows, width, vocab)
    tokens = torch.randint(vocab, (rows, width, 1), generator=generator)
    at = [z.log_softmax(2).gather(2, tokens).squeeze(2) for z in (logits, ref_logits, mu_logits)]
    mask = torch.rand(rows, width, generator=generator) < 0.7
    mask[:, 0] |= ~mask.any(1)
    names = ("logp", "ref_logp", "behavior_logp", "logits", "ref_logits")
    return {"mask": mask, **{k: v.to(dtype) for k, v in zip(names, (*at, logits, ref_logits), strict=True)}}


def call(name, batch, off=False, group=None, **more):
    """kl_loss on a batch of `draw`; returns the value and the gradients in logp and logits."""
    live = {k: batch[k].detach().requires_grad_() for k in ("logp", "logits")}
    given = {"logp": live["logp"], "ref_logp": batch["ref_logp"], "mask": batch["mask"], "group_size": group}
    if off:
        given["behavior_logp"] = batch["behavior_logp"]
    if name == "rao-blackwell":
        given |= {"logits": live["logits"], "ref_logits": batch["ref_logits"]}
    given |= more
    loss = kl_loss(name, given.pop("logp"), given.pop("ref_logp"), given.pop("mask"), **given)
    loss.backward()
    return loss.detach(), live["logp"].grad, live["logits"].grad


def expected(name, batch, off=False, group=None, cap=inf):
    lists = {k: v.double().tolist() for k, v in batch.items()}
    more = {"logits": lists["logits"], "ref_logits": lists["ref_logits"]} if name == "rao-blackwell" else {}
    mu = lists["behavior_logp"] if off else None
    return oracle(name, lists["logp"], lists["ref_logp"], lists["mask"], mu, group, cap=cap, **more)


def check(got, want, rtol, floor=0.0):
    value, by_logp, by_logits = got
    if want[0] is not None:
        assert value.item() == pytest.approx(want[0], rel=rtol, abs=floor)
    for tensor, numbers in ((by_logp, want[1]), (by_logits, want[2])):
        if numbers is None:
            assert tensor is None
        else:
            numbers = torch.tensor(numbers, dtype=torch.float64)
            assert torch.isfinite(tensor).all()
            error = (tensor.double() - numbers).abs().max()
            assert error <= rtol * numbers.abs().max() + floor, (tensor, numbers)


# ---- values and gradients ----


@form
@pytest.mark.parametrize("seed", range(3))
def test_gradient_against_the_formulas(seed, name, off, group):
    batch = draw(seed=seed)
    check(call(name, batch, off, group), expected(name, batch, off, group), 1e-12)


def test_by_hand():
    """Two rows of two tokens; ℓ = (1, −.5) and (.25, masked); every number below from the table in kl_loss.

    k1: (1 − .5 + .25)/2 = .375. k2: (.5 + .125 + .03125)/2 = .328125. G = (.5, −.5) and (.25, 0).
    Groups of 2: the baseline of row 0 is (.25, 0) (row 1 has ended), of row 1 (.5, −.5).
    w = (2, 1) and (1, ·): Σ_{s≥0} w_{1:s} ℓ_s = 2 · 1 + 1 · (−.5) = 1.5, minus w_1 b_1 = 2 · .25.
    """
    logp = torch.tensor([[-1.0, -2.0], [-0.5, -9.0]], dtype=torch.float64)
    ref = torch.tensor([[-2.0, -1.5], [-0.75, -1.0]], dtype=torch.float64)
    mu = logp - torch.tensor([[math.log(2), -math.log(2)], [0.0, 0.0]], dtype=torch.float64)
    batch = {"logp": logp, "ref_logp": ref, "behavior_logp": mu, "mask": torch.tensor([[1, 1], [1, 0]])}
    batch |= {"logits": logp, "ref_logits": ref}
    assert call("k1", batch)[0].item() == 0.375 and call("k2", batch)[0].item() == 0.328125
    want_k3 = (math.exp(-1) + math.exp(0.5) - 1.5 + math.exp(-0.25) - 0.75) / 2
    assert call("k3", batch)[0].item() == pytest.approx(want_k3, rel=1e-12)
    for name, off, group, want in (
        ("k1", False, None, [[1, 1], [1, 0]]),
        ("k2", False, None, [[1, -0.5], [0.25, 0]]),
        ("score", False, None, [[1, -0.5], [0.25, 0]]),
        ("sequence", False, None, [[0.5, 0.5], [0.25, 0]]),
        ("sequence", False, 2, [[0.25, 0.25], [-0.25, 0]]),
        ("reward-to-go", False, None, [[0.5, -0.5], [0.25, 0]]),
        ("reward-to-go", False, 2, [[0.25, -0.5], [-0.25, 0]]),
        ("reward-to-go", True, None, [[1.5, -0.5], [0.25, 0]]),
        ("reward-to-go", True, 2, [[1.0, -0.5], [-0.25, 0]]),
        ("sequence", True, 2, [[0.25, 0.25], [-0.25, 0]]),  # w of the whole sequence is 2 · ½ = 1
    ):
        grad = call(name, batch, off, group)[1] * 2  # a mean over two sequences
        assert torch.allclose(grad, torch.tensor(want, dtype=torch.float64), rtol=1e-12), (name, off, group)


def test_a_sum_over_tokens_and_a_mean_over_sequences():
    """Twice the tokens at the same ℓ, twice the loss; twice the rows, the same."""
    logp = torch.full((2, 3), -1.0, dtype=torch.float64)
    for name, one in (("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 0.5)):
        for rows, width in ((1, 3), (2, 3), (4, 3), (2, 6)):
            x = torch.full((rows, width), -1.0, dtype=torch.float64, requires_grad=True)
            assert kl_loss(name, x, x.detach() - 0.5).item() == pytest.approx(one * width, rel=1e-12)
    full = kl_loss("k2", logp.requires_grad_(), logp.detach() - 1, torch.tensor([[1, 1, 1], [1, 0, 0]]))
    assert full.item() == (3 * 0.5 + 0.5) / 2  # not over 4 tokens


@form
def test_mask_types_and_default(name, off, group):
    batch = draw()
    want = call(name, batch, off, group)
    for dtype in (torch.int64, torch.uint8, torch.float32, torch.float64, torch.bfloat16):
        got = call(name, {**batch, "mask": batch["mask"].to(dtype)}, off, group)
        assert all(torch.equal(a, b) for a, b in zip(got, want) if a is not None)
    ones = {**batch, "mask": torch.ones_like(batch["mask"])}
    none = call(name, {**batch, "mask": None}, off, group)
    assert all(torch.equal(a, b) for a, b in zip(none, call(name, ones, off, group)) if a is not None)


@form
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype, name, off, group):
    """float64 stays; the others are worked and returned in float32, with gradients in the dtype of their inputs."""
    batch = draw(dtype=dtype)
    got, want = call(name, batch, off, group), expected(name, batch, off, group)
    assert got[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert got[1].dtype == dtype
    # one rounding to the output's dtype (eps/2 of the largest), and float32 work over the vocabulary
    rtol = 1e-12 if dtype == torch.float64 else max(torch.finfo(dtype).eps, 1e-5)
    check(got, want, rtol)
    exact = want[0]
    if exact is not None:  # the value does not go through the input's dtype
        assert got[0].item() == pytest.approx(exact, rel=1e-6)


@form
def test_shapes_that_are_small_or_odd(name, off, group):
    """T = 1; B = the group size (B = 1 without groups)."""
    for width in (1, 2):
        batch = draw(rows=group or 1, width=width)
        check(call(name, batch, off, group), expected(name, batch, off, group), 1e-12)


@pytest.mark.parametrize("name", [n for n in NAMES if ESTIMATORS[n].baseline])
@pytest.mark.parametrize("group", [2, 3, 6])
def test_group_sizes(group, name):
    batch = draw(rows=6)
    for off in (False, True)[: 1 + ESTIMATORS[name].off_policy]:
        check(call(name, batch, off, group), expected(name, batch, off, group), 1e-12)
    # adjacent rows make a group: regrouping the same rows is another loss
    order = torch.tensor([0, 2, 4, 1, 3, 5])
    moved = call(name, {k: v[order] for k, v in batch.items()}, False, group)[1]
    if group < 6:
        assert (moved[order.argsort()] - call(name, batch, False, group)[1]).abs().max() > 1e-3
    else:
        assert torch.allclose(moved[order.argsort()], call(name, batch, False, group)[1], rtol=1e-12)


@form
def test_layouts(name, off, group):
    """Transposed, strided and expanded tensors."""
    batch = draw(dtype=torch.float32)
    want = call(name, batch, off, group)
    strided = {k: torch.stack([v, v], -1)[..., 0] for k, v in batch.items()}
    turned = {k: v.transpose(0, 1).contiguous().transpose(0, 1) for k, v in batch.items()}
    for other in (strided, turned):
        assert not other["logp"].is_contiguous()
        got = call(name, other, off, group)
        assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(got, want) if a is not None)
    one = {k: v[:1].expand(4, *v.shape[1:]) for k, v in batch.items()}
    got, copied = call(name, one, off, group), call(name, {k: v.clone() for k, v in one.items()}, off, group)
    assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(got, copied) if a is not None)


@form
def test_only_the_policy_gets_a_gradient(name, off, group):
    batch = {k: v.clone().requires_grad_() if v.is_floating_point() else v for k, v in draw().items()}
    live = {"logits": batch["logits"], "ref_logits": batch["ref_logits"]} if name == "rao-blackwell" else {}
    mu = {"behavior_logp": batch["behavior_logp"]} if off else {}
    kl_loss(name, batch["logp"], batch["ref_logp"], batch["mask"], group_size=group, **live, **mu).backward()
    assert batch["logp"].grad is not None
    assert all(batch[k].grad is None for k in ("ref_logp", "behavior_logp", "ref_logits"))
    assert (batch["logits"].grad is not None) == (name == "rao-blackwell")


@form
def test_inputs_are_not_changed(name, off, group):
    batch = draw()
    before = {k: v.clone() for k, v in batch.items()}
    call(name, batch, off, group)
    assert all(torch.equal(batch[k], before[k]) for k in batch)


@form
def test_check_false_gives_the_same(name, off, group):
    batch = draw()
    got, want = call(name, batch, off, group, check=False), call(name, batch, off, group)
    assert all(torch.equal(a, b) for a, b in zip(got, want) if a is not None)


@form
def test_autocast_changes_nothing(name, off, group):
    batch = draw(dtype=torch.float32)
    want = call(name, batch, off, group)
    with torch.autocast("cpu", torch.bfloat16):
        got = call(name, batch, off, group)
    assert all(torch.equal(a, b) for a, b in zip(got, want) if a is not None)


@form
def test_data_made_in_inference_mode(name, off, group):
    """As rollouts often are; torch refuses to save such tensors for a backward pass."""
    batch = draw()
    with torch.inference_mode():
        made = {k: v.clone() for k, v in batch.items()}
    for key in ("logp", "logits"):
        made[key] = batch[key]
    got, want = call(name, made, off, group), call(name, batch, off, group)
    assert all(torch.equal(a, b) for a, b in zip(got, want) if a is not None)


@form
def test_through_checkpointing(name, off, group):
    batch = draw()
    want = call(name, batch, off, group)

    def inner(logp, logits):
        more = {"logits": logits, "ref_logits": batch["ref_logits"]} if name == "rao-blackwell" else {}
        mu = {"behavior_logp": batch["behavior_logp"]} if off else {}
        return kl_loss(name, logp, batch["ref_logp"], batch["mask"], group_size=group, **more, **mu)

    logp, logits = (batch[k].clone().requires_grad_() for k in ("logp", "logits"))
    torch.utils.checkpoint.checkpoint(inner, logp, logits, use_reentrant=False).backward()
    assert torch.equal(logp.grad, want[1])


# ---- masked positions ----


@form
@pytest.mark.parametrize("bad", [nan, inf, -inf, 1e9, -1e9])
def test_masked_positions_reach_nothing(bad, name, off, group):
    for dtype in (torch.float64, torch.float32):
        batch = draw(dtype=dtype)
        hole = ~batch["mask"]
        poisoned = {k: torch.where(hole[..., None] if v.ndim == 3 else hole, bad, v) for k, v in batch.items()}
        poisoned["mask"] = batch["mask"]
        want, got = call(name, batch, off, group), call(name, poisoned, off, group)
        assert all(torch.equal(a, b) for a, b in zip(got, want) if a is not None)
        assert (got[1][hole] == 0).all()
        if got[2] is not None:
            assert (got[2][hole] == 0).all()
        # one argument at a time as well: a NaN could hide another
        for key in ("logp", "ref_logp", "behavior_logp", "logits", "ref_logits"):
            got = call(name, {**batch, key: poisoned[key]}, off, group)
            assert all(torch.equal(a, b) for a, b in zip(got, want) if a is not None), key


def test_masked_positions_through_token_logprobs_and_a_model():
    """From logits that are NaN at padding, through the log-probs: the logits' gradient has no NaN."""
    from klnb.losses import token_logprobs

    batch = draw()
    tokens = torch.zeros(batch["mask"].shape, dtype=torch.int64)
    logits = torch.where(batch["mask"][..., None], batch["logits"], nan).requires_grad_()
    logp = token_logprobs(logits, tokens)
    kl_loss(
        "rao-blackwell", logp, batch["ref_logp"], batch["mask"], logits=logits, ref_logits=batch["ref_logits"]
    ).backward()
    assert logits.grad.isfinite().all() and (logits.grad[~batch["mask"]] == 0).all()


# ---- extremes ----

log_probs = st.floats(-80, 0, allow_nan=False, width=32)


@st.composite
def batches(draw_from, names=tuple(FORMS)):
    name, off, group = draw_from(st.sampled_from(names))
    rows = (group or 1) * draw_from(st.integers(1, 2))
    width = draw_from(st.integers(1, 4))
    vocab = 3
    dtype = draw_from(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))

    def table(elements):
        values = draw_from(st.lists(elements, min_size=rows * width, max_size=rows * width))
        return torch.tensor(values, dtype=torch.float64).reshape(rows, width).to(dtype)

    mask = table(st.booleans()).bool()
    mask[:, draw_from(st.integers(0, width - 1))] = True
    masked_junk = table(st.sampled_from([nan, inf, -inf, 1e9, 0.0]))
    batch = {k: torch.where(mask, table(log_probs), masked_junk) for k in ("logp", "ref_logp")}
    # prefixes of any log ratio from −320 up: those above 80 must be refused
    batch["behavior_logp"] = torch.where(mask, table(log_probs), masked_junk)
    for k in ("logits", "ref_logits"):
        flat = draw_from(
            st.lists(st.floats(-60, 60, width=32), min_size=rows * width * vocab, max_size=rows * width * vocab)
        )
        z = torch.tensor(flat, dtype=torch.float64).reshape(rows, width, vocab).to(dtype)
        batch[k] = torch.where(mask[..., None], z, masked_junk[..., None])
    batch["mask"] = mask.to(draw_from(st.sampled_from([torch.bool, torch.int64, torch.float32])))
    return name, off, group, batch


@settings(deadline=None, max_examples=400, derandomize=True)
@given(batches())
def test_the_right_number_or_a_clear_error(case):
    """Any log-probs in [−80, 0] (so |ℓ| ≤ 80), any mask, three dtypes, junk at masked positions.

    float32 results are compared where they fit float32. `derandomize`: the same 400 examples every time.
    """
    name, off, group, batch = case
    clean = {k: torch.where(batch["mask"].bool()[..., None] if v.ndim == 3 else batch["mask"].bool(), v, 0.0)
             for k, v in batch.items() if k != "mask"} | {"mask": batch["mask"]}  # fmt: skip
    steps = torch.where(batch["mask"].bool(), batch["logp"].double() - batch["behavior_logp"].double(), 0.0)
    top = steps.sum(1).max() if name == "sequence" else steps.cumsum(1).max()
    try:
        got = call(name, batch, off, group)
    except ValueError as error:
        assert off and top > 80 - 1e-9 and "behavior_logp: log π/μ of the prefix above 80" in str(error)
        return
    assert not off or top < 80 + 1e-9
    want = expected(name, clean, off, group)
    wide = batch["logp"].dtype == torch.float64
    biggest = max([abs(x) for row in want[1] for x in row] + [abs(want[0] or 0.0)])
    if not wide and biggest > 1e38:  # not representable: inf, never NaN
        assert not got[0].isnan() and not got[1].isnan().any()
        return
    rtol = 1e-11 if wide else 2e-5 if batch["logp"].dtype == torch.float32 else 8e-3
    check(got, want, rtol, floor=1e-9 * (1 if wide else 1e4) if name == "rao-blackwell" else 1e-300 if wide else 1e-44)


@form
@pytest.mark.parametrize("value", [-1e4, -1e30])
def test_far_log_ratios(value, name, off, group):
    """Beyond |ℓ| = 80 the k3 names raise; the others stay finite and right."""
    batch = draw(dtype=torch.float32)
    batch["mask"][1] = True
    for key, far in (("logp", "policy"), ("ref_logp", "reference")):
        moved = {**batch, key: batch[key].clone()}
        moved[key][1, 3] = value
        if "k3" in name:
            with pytest.raises(ValueError, match=r"\|ℓ\| above 80 overflows k3 \(row 1, token 3\)"):
                call(name, moved, off, group)
            continue
        got = call(name, moved, off, group)
        assert got[1].isfinite().all(), far
        check((got[0].nan_to_num(), *got[1:]), (None, *expected(name, moved, off, group)[1:]), 1e-5)


def test_k3_just_inside_the_limit():
    for ell in (80.0, -80.0):
        for dtype in (torch.float32, torch.float64):
            logp = torch.tensor([[min(0.0, ell)]], dtype=dtype, requires_grad=True)
            ref = torch.tensor([[min(0.0, -ell)]], dtype=dtype)
            loss = kl_loss("k3", logp, ref)
            loss.backward()
            assert loss.item() == pytest.approx(math.expm1(-ell) + ell, rel=1e-6)
            assert logp.grad.item() == pytest.approx(-math.expm1(-ell), rel=1e-6)


@pytest.mark.parametrize("ell", [1e-4, -1e-4])
def test_k3_in_float32_at_small_log_ratios(ell):
    """ℓ as the difference of float32 log-probs near −1e-4, where they resolve it: ℓ²/2 − ℓ³/6 to 5e-3."""
    logp = torch.tensor([[-2e-4 + ell]], dtype=torch.float32, requires_grad=True)
    ref = torch.tensor([[-2e-4]], dtype=torch.float32)
    for name in ("k3", "reward-to-go-k3"):
        logp.grad = None
        loss = kl_loss(name, logp, ref)
        loss.backward()
        if name == "k3":
            assert loss.item() == pytest.approx(ell**2 / 2 - ell**3 / 6, rel=5e-3)
            assert logp.grad.item() == pytest.approx(ell, rel=5e-3)
        else:  # ∇k3 + k3 ∇log π = ∇(ℓ log π) to first order
            assert logp.grad.item() == pytest.approx(ell, rel=5e-3)


# ---- prefix ratios ----


@pytest.mark.parametrize("target", [80.0, 30.0, 0.0, -30.0, -79.9])
def test_prefix_ratios_over_ten_thousand_tokens(target):
    """Float32 log-probs whose prefix ratio wanders between e^±70 and ends near e^target: 1e-5, against math.fsum.

    ℓ is 0 but at the last token, so that the last weight of reward-to-go is w_{1:T} ℓ_T.
    """
    n, generator = 10_000, torch.Generator().manual_seed(0)
    logp = -1 - torch.rand(1, n, generator=generator)
    walk = 0.3 * torch.randn(1, n, generator=generator, dtype=torch.float64).cumsum(1)
    walk = torch.where(torch.arange(n) < n - 100, walk.clamp(-70, 70), target - 0.1)
    steps = walk.diff(dim=1, prepend=torch.zeros(1, 1, dtype=torch.float64))
    logp -= steps.abs().max()  # room for any step: μ < 1
    mu = (logp.double() - steps).float()
    ref = logp.clone()
    ref[0, -1] -= 1
    log_w = math.fsum((logp.double() - mu.double())[0].tolist())
    assert abs(log_w - target) < 0.2
    logp.requires_grad_()
    kl_loss("reward-to-go", logp, ref, behavior_logp=mu).backward()
    ell = logp[0, -1].item() - ref[0, -1].item()
    assert logp.grad[0, -1].item() == pytest.approx(math.exp(log_w) * ell, rel=1e-5)
    for name in ("sequence", "reward-to-go-k3"):
        logp.grad = None
        kl_loss(name, logp, ref, behavior_logp=mu).backward()
        want = math.exp(log_w) * (ell if name == "sequence" else -math.expm1(-ell) + math.expm1(-ell) + ell)
        assert logp.grad[0, -1].item() == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("name", OFF)
def test_small_ratios_go_to_zero_silently(name):
    logp = torch.full((1, 3), -400.0, dtype=torch.float64, requires_grad=True)
    mu = torch.full((1, 3), -0.1, dtype=torch.float64)
    loss = kl_loss(name, logp, logp.detach() - 1, behavior_logp=mu)
    loss.backward()
    assert logp.grad[0, 2] == 0 and loss.isfinite() and logp.grad.isfinite().all()


@pytest.mark.parametrize("name", OFF)
def test_large_ratios_are_refused_by_row_and_token(name):
    logp = torch.full((2, 5), -0.1, dtype=torch.float32, requires_grad=True)
    mu = logp.detach().clone()
    mu[1, 1:4] = -30.1  # log w passes 80 at the third of these
    with pytest.raises(ValueError, match="behavior_logp: log π/μ of the prefix above 80") as error:
        kl_loss(name, logp, logp.detach(), behavior_logp=mu)
    assert ("(row 1, token 0)" if name == "sequence" else "(row 1, token 3)") in str(error.value)
    mask = torch.ones(2, 5)
    mask[1, 3:] = 0  # the ratio of what is left is 60
    assert kl_loss(name, logp, logp.detach() - 1, mask, behavior_logp=mu).isfinite()


@pytest.mark.parametrize("name", OFF)
@pytest.mark.parametrize("group", [None, 2])
@pytest.mark.parametrize("cap", [0.5, 1, 3.0])
def test_max_ratio_is_a_constant(cap, group, name):
    """Ratios above it are it, in value and gradient: a capped live ratio carries no score part."""
    batch = draw(scale=1.5, seed=3)
    got = call(name, batch, True, group, max_ratio=cap)
    check(got, expected(name, batch, True, group, cap=cap), 1e-12)
    plain = call(name, batch, True, group)
    assert (got[1] - plain[1]).abs().max() > 1e-2  # something was capped
    untouched = call(name, batch, True, group, max_ratio=1e30)
    assert all(torch.equal(a, b) for a, b in zip(untouched, plain) if a is not None)


@pytest.mark.parametrize("name", OFF)
def test_max_ratio_admits_any_ratio(name):
    logp = torch.full((1, 3), -0.1, dtype=torch.float32, requires_grad=True)
    mu = torch.full((1, 3), -5000.0)
    loss = kl_loss(name, logp, logp.detach() - 1, behavior_logp=mu, max_ratio=2.0)
    loss.backward()
    assert loss.isfinite() and logp.grad.isfinite().all()
    if name == "reward-to-go":
        assert logp.grad.tolist()[0] == pytest.approx([6, 4, 2], rel=1e-6)  # 2 · ℓ = 2, from each token on


# ---- the full vocabulary ----


def vocabulary(logits, ref_logits):
    logits = torch.tensor([[logits]], dtype=torch.float64, requires_grad=True)
    logp = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    ref_logits = torch.tensor([[ref_logits]], dtype=torch.float64)
    loss = kl_loss("rao-blackwell", logp, logp.detach() - 2, logits=logits, ref_logits=ref_logits)
    loss.backward()
    return loss.item(), logits.grad.flatten().tolist()


def test_tokens_barred_in_both_models():
    """0 log 0 = 0: as without the token. π = (¼, ¾), π_ref = (½, ½): KL = ¼ ln ½ + ¾ ln 1.5."""
    value, grad = vocabulary([0.0, math.log(3), -inf], [5.0, 5.0, -inf])
    kl = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert value == pytest.approx(kl, rel=1e-12)  # T = 1: G_{t+1} = 0
    assert grad == pytest.approx([0.25 * (math.log(0.5) - kl), 0.75 * (math.log(1.5) - kl), 0], rel=1e-11)


def test_tokens_barred_in_the_policy_only():
    value, grad = vocabulary([0.0, 0.0, -inf], [0.0, 0.0, 0.0])
    assert value == pytest.approx(math.log(1.5), rel=1e-12)
    assert grad == pytest.approx([0, 0, 0], abs=1e-15)


def test_tokens_barred_in_the_reference_only():
    with pytest.raises(ValueError, match=r"ref_logits: π > 0 where π_ref = 0.*\(row 0, token 0\)"):
        vocabulary([0.0, 0.0, 0.0], [0.0, 0.0, -inf])


@pytest.mark.parametrize("bad", [nan, inf])
def test_logits_that_are_no_numbers(bad):
    for pair in (([0.0, bad], [0.0, 0.0]), ([0.0, 0.0], [0.0, bad])):
        with pytest.raises(ValueError, match="logits, ref_logits: expected no NaN or .inf at unmasked positions"):
            vocabulary(*pair)
    with pytest.raises(ValueError, match="logits, ref_logits"):
        vocabulary([-inf, -inf], [0.0, 0.0])


# ---- bad input ----


def bad(name="k1", **change):
    batch = draw(rows=4, width=3)
    batch["logp"].requires_grad_()
    batch["logits"].requires_grad_()
    keep = {"logp", "ref_logp", "mask"} | ({"logits", "ref_logits"} if name == "rao-blackwell" else set())
    given = {k: v for k, v in batch.items() if k in keep}
    for k, v in change.items():
        given[k] = v(batch.get(k)) if callable(v) else v
    return kl_loss(name, given.pop("logp"), given.pop("ref_logp"), given.pop("mask"), **given)


def spoil(value, row=2, token=1):
    def put(x):
        x = x.detach().clone()
        x[row, token] = value
        return x.requires_grad_()

    return put


ones = torch.ones(4, 3)
BAD = [
    # an unknown name lists those that exist
    (
        {"name": "k4"},
        ValueError,
        "name: expected one of k1, k2, k3, score, sequence, reward-to-go, .*rao-blackwell, got 'k4'",
    ),
    ({"name": None}, ValueError, "name: expected one of"),
    ({"name": ["k1"]}, ValueError, "name: expected one of"),
    # shapes: never a silent broadcast
    ({"logp": lambda x: x[0]}, ValueError, r"logp: expected shape \[B, T\] with B, T >= 1, got \[3\]"),
    ({"logp": lambda x: x[:0]}, ValueError, r"logp: expected shape \[B, T\]"),
    ({"logp": lambda x: x[:, :0]}, ValueError, r"logp: expected shape \[B, T\]"),
    ({"logp": lambda x: x[None]}, ValueError, r"logp: expected shape \[B, T\]"),
    ({"ref_logp": lambda x: x[:1]}, ValueError, r"ref_logp: expected the shape of logp \[4, 3\], got \[1, 3\]"),
    ({"ref_logp": lambda x: x[:, :1]}, ValueError, "ref_logp: expected the shape of logp"),
    ({"ref_logp": lambda x: x[0]}, ValueError, "ref_logp: expected the shape of logp"),
    ({"ref_logp": torch.tensor(-1.0)}, ValueError, "ref_logp: expected the shape of logp"),
    ({"mask": torch.ones(4)}, ValueError, r"mask: expected the shape of logp \[4, 3\], got \[4\]"),
    ({"mask": torch.ones(3)}, ValueError, "mask: expected the shape of logp"),
    ({"mask": torch.ones(4, 1)}, ValueError, "mask: expected the shape of logp"),
    ({"name": "sequence", "behavior_logp": lambda x: x[:1]}, ValueError, "behavior_logp: expected the shape of logp"),
    ({"name": "rao-blackwell", "logits": lambda x: x[:1]}, ValueError, r"logits: expected shape \[4, 3\] \+ \[V\]"),
    ({"name": "rao-blackwell", "logits": lambda x: x[..., 0]}, ValueError, r"logits: expected shape \[4, 3\] \+ \[V\]"),
    ({"name": "rao-blackwell", "logits": lambda x: x[..., :0]}, ValueError, r"logits: expected shape"),
    ({"name": "rao-blackwell", "ref_logits": lambda x: x[..., :1]}, ValueError, r"ref_logits: expected shape \[4, 3\]"),
    # types
    ({"logp": lambda x: x.detach().long()}, TypeError, "logp: expected floating point, got torch.int64"),
    ({"ref_logp": lambda x: x.long()}, TypeError, "ref_logp: expected floating point, got torch.int64"),
    ({"logp": None}, TypeError, "logp: expected a tensor, got NoneType"),
    ({"ref_logp": None}, TypeError, "ref_logp: expected a tensor, got NoneType"),
    ({"ref_logp": -1.0}, TypeError, "ref_logp: expected a tensor, got float"),
    ({"mask": lambda x: x.tolist()}, TypeError, "mask: expected a tensor, got list"),
    ({"mask": ones.to(torch.complex64)}, TypeError, "mask"),
    ({"name": "sequence", "behavior_logp": lambda x: x.long()}, TypeError, "behavior_logp: expected floating point"),
    ({"name": "rao-blackwell", "ref_logits": lambda x: x.long()}, TypeError, "ref_logits: expected floating point"),
    ({"ref_logp": lambda x: x.to("meta")}, ValueError, "ref_logp: expected it on cpu like logp, got meta"),
    # values, by row and token
    ({"logp": spoil(1e-3)}, ValueError, r"logp: expected log-probabilities .*above 1e-4 \(row 2, token 1\)"),
    ({"ref_logp": spoil(0.2)}, ValueError, r"ref_logp: expected log-probabilities .*\(row 2, token 1\)"),
    ({"name": "sequence", "behavior_logp": spoil(0.2)}, ValueError, "behavior_logp: expected log-probabilities"),
    ({"mask": spoil(0.5)(ones)}, ValueError, r"mask: expected 0 or 1 everywhere \(row 2, token 1\)"),
    ({"mask": spoil(nan)(ones)}, ValueError, "mask: expected 0 or 1 everywhere"),
    ({"mask": torch.full((4, 3), 2)}, ValueError, "mask: expected 0 or 1 everywhere"),
    ({"mask": torch.full((4, 3), -1)}, ValueError, "mask: expected 0 or 1 everywhere"),
    (
        {"mask": spoil(0, slice(2, 3), slice(None))(ones)},
        ValueError,
        r"mask: expected at least one .* in each row \(row 2\)",
    ),
    # groups
    ({"name": "sequence", "group_size": 1}, ValueError, "group_size: expected n >= 2 dividing B=4, got 1"),
    ({"name": "sequence", "group_size": 0}, ValueError, "group_size: expected n >= 2"),
    ({"name": "sequence", "group_size": -2}, ValueError, "group_size: expected n >= 2"),
    ({"name": "sequence", "group_size": 3}, ValueError, "group_size: expected n >= 2 dividing B=4, got 3"),
    ({"name": "sequence", "group_size": 8}, ValueError, "group_size: expected n >= 2 dividing B=4, got 8"),
    ({"name": "sequence", "group_size": 2.0}, TypeError, "group_size: expected an int, got float"),
    ({"name": "sequence", "group_size": True}, TypeError, "group_size: expected an int, got bool"),
    # no gradient
    ({"logp": lambda x: x.detach()}, ValueError, "logp: carries no gradient"),
    ({"name": "rao-blackwell", "logits": lambda x: x.detach()}, ValueError, "logits: carries no gradient"),
    # max_ratio
    ({"name": "sequence", "max_ratio": 2.0}, ValueError, "max_ratio: .*without behavior_logp"),
    (
        {"name": "sequence", "max_ratio": 0, "behavior_logp": lambda x: x},
        ValueError,
        "max_ratio: expected a number above 0",
    ),
    ({"name": "sequence", "max_ratio": inf, "behavior_logp": lambda x: x}, ValueError, "max_ratio"),
    ({"name": "sequence", "max_ratio": nan, "behavior_logp": lambda x: x}, ValueError, "max_ratio"),
    ({"name": "sequence", "max_ratio": "2", "behavior_logp": lambda x: x}, ValueError, "max_ratio"),
]
BAD += [
    (
        {"name": "sequence", key: spoil(value)},
        ValueError,
        rf"{key}: expected (finite values|log-prob).*\(row 2, token 1\)",
    )
    for key in ("logp", "ref_logp", "behavior_logp")
    for value in (nan, inf, -inf)
]
# an argument that a name has no use for, or lacks
for _name, _e in ESTIMATORS.items():
    if not _e.off_policy:
        BAD.append(
            ({"name": _name, "behavior_logp": lambda x: x}, ValueError, f"behavior_logp: '{_name}' has no off-policy")
        )
        BAD.append(({"name": _name, "max_ratio": 2.0}, ValueError, "max_ratio"))
    if not _e.baseline:
        BAD.append(({"name": _name, "group_size": 2}, ValueError, f"group_size: '{_name}' takes no baseline"))
    for _arg in ("logits", "ref_logits"):
        change, verb = ({_arg: None}, "needs it") if _e.needs_logits else ({_arg: lambda x: x}, "has no use for it")
        BAD.append(({"name": _name, **change}, ValueError, f"{_arg}: '{_name}' {verb}"))


@pytest.mark.parametrize("change, error, message", BAD, ids=range(len(BAD)))
def test_bad_input(change, error, message):
    with pytest.raises(error, match=message):
        bad(**change)


def test_good_input_of_the_same_tests():
    for name in NAMES:
        assert bad(name).isfinite()
    assert bad("sequence", behavior_logp=lambda x: x, max_ratio=2).isfinite()
    assert bad("k1", logp=spoil(9e-5)).isfinite()  # rounding above 0 is no error


def test_under_no_grad():
    with torch.no_grad(), pytest.raises(ValueError, match="logp: carries no gradient"):
        bad("k2")
    with torch.inference_mode(), pytest.raises(ValueError, match="logp: carries no gradient"):
        bad("k2")


def test_errors_are_one_line():
    for change, error, _ in BAD:
        with pytest.raises(error) as caught:
            bad(**change)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 220


# ---- device synchronisation ----


class Reads(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts operations whose result decides a shape or a Python value: on a device each waits for it."""

    WAIT = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique", "_to_cpu", "item")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        boolean_index = name in ("index", "index_put", "index_put_") and any(
            x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
        )
        self.count += any(name == w or name.startswith(w + "_") for w in self.WAIT) or boolean_index
        return func(*args, **(kwargs or {}))


@form
def test_at_most_one_synchronisation(name, off, group):
    batch = draw()
    live = {k: batch[k].clone().requires_grad_() for k in ("logp", "logits")}
    more = {"logits": live["logits"], "ref_logits": batch["ref_logits"]} if name == "rao-blackwell" else {}
    more |= {"behavior_logp": batch["behavior_logp"]} if off else {}
    for checked, extra in ((True, {}), (False, {})) + (
        ((True, {"max_ratio": 2.0}), (False, {"max_ratio": 2.0})) if off else ()
    ):
        for mask in (batch["mask"], None):
            with Reads() as reads:
                kl_loss(
                    name, live["logp"], batch["ref_logp"], mask, group_size=group, check=checked, **more, **extra
                ).backward()
            assert reads.count == int(checked)


def test_the_counter_counts():
    with Reads() as reads:
        x = torch.tensor([1.0, 2.0])
        x.sum().item()
        bool((x > 0).all())
        x[x > 1]
        (x > 1).nonzero()
    assert reads.count >= 4


# ---- documentation ----


def test_docstring_says_what_every_name_gives():
    doc = inspect.getdoc(kl_loss)
    for name, e in ESTIMATORS.items():
        line = next(x for x in doc.splitlines() if x.split()[:1] == [name])
        assert ("0" if e.follows == "zero" else e.follows) in line
        assert e.formula and e.equation
    for word in (
        "expectation of its gradient",
        "mean over",
        "float64",
        "Raises",
        "max_ratio",
        "**Biased**",
        "behavior_logp",
    ):
        assert word in doc, word
