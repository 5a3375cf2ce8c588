"""token_logprobs, token_logprobs_from_hidden and completion_mask."""

import contextlib
import importlib.util
import io
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from klnb import losses
from klnb.losses import completion_mask, token_logprobs, token_logprobs_from_hidden

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "token_logprobs.py"


def draw(*shape, seed=0, scale=3.0, dtype=torch.float64):
    return (scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))).to(dtype)


def ids(*shape, below, seed=1):
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def plain(logits, tokens, temperature=1.0):
    return (logits / temperature).log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def grads(fn, inputs, weight):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = fn(*inputs)
    return out.detach(), torch.autograd.grad((out * weight.to(out.dtype)).sum(), inputs)


def test_by_hand():
    """logits (0, ln 3) at temperature 1: π = (¼, ¾); at temperature ½: (0, 2 ln 3), π = (1/10, 9/10).

    ∂ log π(0)/∂ logits = (1[v = 0] − π_v)/temperature = (¾, −¾) and 2 · (9/10, −9/10).
    """
    logits = torch.tensor([[[0.0, math.log(3)]]], dtype=torch.float64)
    zero = torch.zeros(1, 1, dtype=torch.int64)
    for temperature, prob, slope in ((1.0, 0.25, 0.75), (0.5, 0.1, 1.8)):
        value, (grad,) = grads(lambda x, t=temperature: token_logprobs(x, zero, t), [logits], torch.ones(1, 1))
        assert value.item() == pytest.approx(math.log(prob), rel=1e-12)
        assert grad.flatten().tolist() == pytest.approx([slope, -slope], rel=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 3])
@pytest.mark.parametrize("chunk", [1, 7, 20, 10**6])
def test_equals_log_softmax_and_gather(temperature, chunk, monkeypatch):
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", {"cpu": chunk})  # less than a row, between rows, all at once
    logits, tokens, weight = draw(3, 5, 11), ids(3, 5, below=11), draw(3, 5, seed=2)
    want = grads(lambda x: plain(x, tokens, temperature), [logits], weight)
    got = grads(lambda x: token_logprobs(x, tokens, temperature), [logits], weight)
    assert torch.allclose(got[0], want[0], rtol=1e-13, atol=1e-13)
    assert torch.allclose(got[1][0], want[1][0], rtol=1e-12, atol=1e-13)
    # the neighbouring mistakes: temperature on the log-probs, and on the wrong side
    if temperature != 1:
        for wrong in (plain(logits, tokens) / temperature, plain(logits * temperature, tokens)):
            assert (got[0] - wrong).abs().max() > 0.1


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    "dtype, value, grad", [("float32", 3e-6, 3e-6), ("bfloat16", 3e-6, 3e-3), ("float16", 3e-6, 6e-4)]
)
def test_half_precision_is_worked_in_float32(dtype, value, grad, temperature):
    """The value is that of the given logits in float32; the gradient, returned in the logits' dtype, is rounded once
    (half an ulp is 2e-3 in bfloat16, 2.4e-4 in float16) and not worked in it: dividing bfloat16 logits by a temperature
    in bfloat16 is 5% wrong.
    """
    dtype = getattr(torch, dtype)
    logits, tokens, weight = draw(4, 6, 500, scale=6).to(dtype), ids(4, 6, below=500), draw(4, 6, seed=2)
    exact = grads(lambda x: plain(x, tokens, temperature), [logits.double()], weight)
    got = grads(lambda x: token_logprobs(x, tokens, temperature), [logits], weight)
    assert got[0].dtype == torch.float32 and got[1][0].dtype == dtype
    assert (got[0] - exact[0]).abs().max() < value * exact[0].abs().max()
    assert (got[1][0].double() - exact[1][0]).norm() < grad * exact[1][0].norm()


def test_float64_stays():
    logits = draw(1, 2, 5).requires_grad_()
    out = token_logprobs(logits, ids(1, 2, below=5))
    assert out.dtype == torch.float64
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, ids(1, 2, below=5), 0.7), (logits,))


def test_layouts():
    """The usual shift logits[:, :-1], a transposed and an expanded tensor, int32 tokens: no different from a copy."""
    tokens, weight = ids(3, 4, below=6), draw(3, 4, seed=2)
    for make in (
        lambda base: base[:, :-1],
        lambda base: base[:, 1:].transpose(0, 1).contiguous().transpose(0, 1),
        lambda base: base[:1, :1].expand(3, 4, 6),
        lambda base: base[:, :-1].flip(2),
    ):
        base = draw(3, 5, 6)
        got = grads(lambda b, make=make: token_logprobs(make(b), tokens.int(), 0.7), [base], weight)
        want = grads(lambda b, make=make: plain(make(b), tokens, 0.7), [base], weight)
        assert torch.allclose(got[0], want[0], rtol=1e-12) and torch.allclose(
            got[1][0], want[1][0], rtol=1e-11, atol=1e-13
        )
    flipped = ids(4, 3, below=6).T  # tokens that are not contiguous
    assert torch.equal(token_logprobs(base[:, :-1], flipped), token_logprobs(base[:, :-1].clone(), flipped.clone()))


def test_shifted_logits_are_not_copied():
    base = draw(3, 5, 6)
    blocks = losses._blocks(base[:, :-1])
    assert blocks.data_ptr() == base.data_ptr() and blocks.shape == (3, 4, 6)


def test_barred_and_extreme_logits():
    """−inf bars a token: no NaN; a large common offset changes nothing; a token that is barred has log-prob −inf."""
    logits = torch.tensor([[[0.0, 1.0, -math.inf]], [[1e4, 1e4 + 1, -1e4]]], dtype=torch.float64)
    tokens = torch.tensor([[0], [1]])
    value, (grad,) = grads(lambda x: token_logprobs(x, tokens), [logits], torch.ones(2, 1))
    z = 1 + math.e
    assert value.flatten().tolist() == pytest.approx([-math.log(z), 1 - math.log(z)], rel=1e-11)
    assert grad[0, 0].tolist() == pytest.approx([1 - 1 / z, -math.e / z, 0], rel=1e-11)
    assert grad.isfinite().all()
    assert token_logprobs(logits, torch.full((2, 1), 2)).flatten().tolist()[0] == -math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e9])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rows_without_gradient_get_none_whatever_they_hold(bad, temperature):
    logits, tokens = draw(2, 3, 5), ids(2, 3, below=5)
    keep = torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=torch.bool)
    poisoned = torch.where(keep[:, :, None], logits, bad)

    def total(x):
        return torch.where(keep, token_logprobs(x, tokens, temperature), 0.0)

    clean, dirty = (grads(total, [x], torch.ones(2, 3)) for x in (logits, poisoned))
    assert torch.equal(clean[0], dirty[0]) and torch.equal(clean[1][0], dirty[1][0])
    assert (dirty[1][0][~keep] == 0).all()


def test_tokens_made_in_inference_mode():
    with torch.inference_mode():
        tokens = ids(2, 3, below=5)
    for call in (
        lambda x: token_logprobs(x, tokens),
        lambda x: token_logprobs_from_hidden(x, torch.eye(5, dtype=x.dtype), tokens),
    ):
        got = grads(call, [draw(2, 3, 5)], torch.ones(2, 3))
        want = grads(lambda x: plain(x, tokens.clone()), [draw(2, 3, 5)], torch.ones(2, 3))
        assert torch.allclose(got[0], want[0]) and torch.allclose(got[1][0], want[1][0])


def test_a_second_derivative_is_refused():
    logits = draw(1, 2, 5).requires_grad_()
    out = token_logprobs(logits, ids(1, 2, below=5))
    (grad,) = torch.autograd.grad(out.square().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


# ---- memory ----


@pytest.mark.parametrize("temperature", ["0.7"])
def test_memory(temperature):
    """[8, 256, 49152] float32, forward and backward, in a process of its own: ≤ 480 MiB beyond the inputs."""
    command = [sys.executable, str(BENCHMARK), "--one", "ours", "--repeats", "1", "--temperature", temperature]
    got = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    assert 384 <= got["mib"] <= 480  # the gradient alone is 384


def test_benchmark_prints_both_side_by_side(monkeypatch, capsys):
    """All of it at a tiny size, with calls in place of the cells' processes."""
    spec = importlib.util.spec_from_file_location("token_logprobs_benchmark", BENCHMARK)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)

    def here(command, **_):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            benchmark.main(command[2:])
        return subprocess.CompletedProcess(command, 0, stdout=out.getvalue())

    monkeypatch.setattr(benchmark.subprocess, "run", here)
    benchmark.main(["--shape", "1", "2", "64", "--repeats", "1", "--temperature", "0.7"])
    out = capsys.readouterr().out
    for way in benchmark.WAYS:
        assert f" {way} " in out


# ---- from hidden states ----


@pytest.mark.parametrize("chunk", [1, 4, 15, 1024])
@pytest.mark.parametrize("with_bias", [False, True])
def test_from_hidden(chunk, with_bias):
    hidden, weight, bias = draw(3, 5, 8), draw(11, 8, seed=3, scale=1), draw(11, seed=4)
    tokens, cotangent = ids(3, 5, below=11), draw(3, 5, seed=2)
    inputs = [hidden, weight] + [bias] * with_bias

    def direct(h, w, b=None):
        return plain(torch.nn.functional.linear(h, w, b), tokens, 0.7)

    def ours(h, w, b=None):
        return token_logprobs_from_hidden(h, w, tokens, 0.7, b, chunk)

    want, got = grads(direct, inputs, cotangent), grads(ours, inputs, cotangent)
    assert torch.allclose(got[0], want[0], rtol=1e-12, atol=1e-12)
    for a, b in zip(got[1], want[1], strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def test_from_hidden_float32_equal_to_1e_5():
    hidden, weight = draw(2, 9, 16, dtype=torch.float32), draw(300, 16, seed=3, scale=0.5, dtype=torch.float32)
    tokens, cotangent = ids(2, 9, below=300), draw(2, 9, seed=2)
    want = grads(lambda h, w: plain(h @ w.T, tokens), [hidden, weight], cotangent)
    got = grads(lambda h, w: token_logprobs_from_hidden(h, w, tokens, chunk=4), [hidden, weight], cotangent)
    assert (got[0] - want[0]).abs().max() < 1e-5 * want[0].abs().max()
    for a, b in zip(got[1], want[1], strict=True):
        assert (a - b).norm() < 1e-5 * b.norm()


def test_from_hidden_never_holds_all_logits():
    """The largest tensor that any operation returns, forward or backward, is one chunk's logits."""

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in torch.utils._pytree.tree_leaves(out):
                if isinstance(x, torch.Tensor):
                    self.numel = max(self.numel, x.numel())
            return out

    hidden, weight, tokens = draw(4, 8, 2).requires_grad_(), draw(50, 2).requires_grad_(), ids(4, 8, below=50)
    with Largest() as largest:
        token_logprobs_from_hidden(hidden, weight, tokens, chunk=4).sum().backward()
    assert largest.numel == 4 * 50


def test_from_hidden_gradients_reach_only_what_asks():
    hidden, weight, tokens = draw(1, 3, 4), draw(5, 4).requires_grad_(), ids(1, 3, below=5)
    token_logprobs_from_hidden(hidden, weight, tokens, chunk=2).sum().backward()  # a frozen body
    assert weight.grad.norm() > 0
    with torch.no_grad():
        assert not token_logprobs_from_hidden(hidden, weight, tokens).requires_grad


def test_from_hidden_under_autocast():
    hidden, weight, tokens = draw(2, 3, 16, dtype=torch.float32), draw(50, 16, dtype=torch.float32), ids(2, 3, below=50)
    with torch.autocast("cpu", torch.bfloat16):
        value, got = grads(
            lambda h, w: token_logprobs_from_hidden(h, w, tokens, chunk=2), [hidden, weight], torch.ones(2, 3)
        )
        reference = grads(lambda h, w: plain((h @ w.T).float(), tokens), [hidden, weight], torch.ones(2, 3))
    assert value.dtype == torch.float32
    assert torch.allclose(value, reference[0], rtol=1e-5)
    for a, b in zip(got, reference[1], strict=True):
        assert (a - b).norm() < 0.02 * b.norm()  # matmuls in bfloat16, in another order


# ---- bad input ----

GOOD = {"logits": draw(2, 3, 5), "tokens": ids(2, 3, below=5), "temperature": 1.0}


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"temperature": 0}, ValueError, "temperature: expected a finite number above 0, got 0"),
        ({"temperature": -1.0}, ValueError, "temperature"),
        ({"temperature": math.nan}, ValueError, "temperature"),
        ({"temperature": math.inf}, ValueError, "temperature"),
        ({"temperature": "1"}, ValueError, "temperature"),
        ({"temperature": None}, ValueError, "temperature"),
        ({"logits": GOOD["logits"].long()}, TypeError, "logits: expected a floating-point tensor, got torch.int64"),
        ({"logits": GOOD["logits"].tolist()}, TypeError, "logits: expected a floating-point tensor, got list"),
        ({"tokens": GOOD["tokens"].double()}, TypeError, "tokens: expected an integer tensor, got torch.float64"),
        ({"tokens": GOOD["tokens"] > 0}, TypeError, "tokens: expected an integer tensor, got torch.bool"),
        ({"tokens": [[0]]}, TypeError, "tokens: expected an integer tensor, got list"),
        ({"tokens": GOOD["tokens"][:1]}, ValueError, r"tokens: expected shape \[2, 3\] like logits, got \[1, 3\]"),
        ({"tokens": GOOD["tokens"][:, :2]}, ValueError, "tokens"),
        ({"tokens": GOOD["tokens"][0]}, ValueError, "tokens"),
        ({"logits": GOOD["logits"][0]}, ValueError, "logits|tokens"),
        ({"tokens": GOOD["tokens"] - 5}, ValueError, r"tokens: expected ids in 0..4; padding needs a valid id too"),
        ({"tokens": torch.full((2, 3), 5)}, ValueError, "tokens: expected ids in 0..4"),
        ({"tokens": torch.full((2, 3), -1)}, ValueError, "tokens: expected ids in 0..4"),
    ],
)
def test_bad_input(change, error, message):
    with pytest.raises(error, match=message):
        token_logprobs(**{**GOOD, **change})


HIDDEN = {"hidden": draw(2, 3, 4), "weight": draw(5, 4), "tokens": ids(2, 3, below=5)}


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"weight": draw(4, 5)}, ValueError, r"hidden, weight: expected \[B, T, H\] and \[V, H\]"),
        ({"hidden": draw(3, 4)}, ValueError, "hidden, weight"),
        ({"hidden": draw(2, 3, 4).long()}, TypeError, "hidden: expected a floating-point tensor"),
        ({"weight": None}, TypeError, "weight: expected a floating-point tensor, got NoneType"),
        ({"bias": draw(4)}, ValueError, r"bias: expected shape \[5\], got \[4\]"),
        ({"bias": [0.0]}, TypeError, "bias: expected a floating-point tensor"),
        ({"tokens": ids(2, 2, below=5)}, ValueError, r"tokens: expected shape \[2, 3\] like hidden"),
        ({"tokens": ids(2, 3, below=5) + 5}, ValueError, "tokens: expected ids in 0..4"),
        ({"tokens": None}, TypeError, "tokens: expected an integer tensor, got NoneType"),
        ({"chunk": 0}, ValueError, "chunk: expected a number of tokens, at least 1, got 0"),
        ({"chunk": 1.5}, ValueError, "chunk"),
        ({"temperature": 0.0}, ValueError, "temperature"),
    ],
)
def test_from_hidden_bad_input(change, error, message):
    with pytest.raises(error, match=message):
        token_logprobs_from_hidden(**{**HIDDEN, **change})


# ---- completion_mask ----


@settings(deadline=None, max_examples=100, derandomize=True)
@given(
    st.lists(st.lists(st.integers(0, 4), min_size=6, max_size=6), min_size=1, max_size=4),
    st.sets(st.integers(0, 9), min_size=1),
)
def test_completion_mask_ends_with_the_first_eos(rows, eos):
    mask = completion_mask(torch.tensor(rows), sorted(eos))
    assert mask.dtype == torch.float32
    for row, got in zip(rows, mask.tolist(), strict=True):
        first = next((t for t, token in enumerate(row) if token in eos), len(row) - 1)
        assert got == [1.0] * (first + 1) + [0.0] * (len(row) - first - 1)


def test_completion_mask_by_hand():
    tokens = torch.tensor([[5, 2, 2, 2], [2, 5, 5, 5], [5, 5, 5, 5], [5, 5, 5, 2], [7, 3, 2, 0]])
    want = [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]]  # the pad id may be the EOS
    for eos in (2, [2], torch.tensor(2), torch.tensor([2])):
        assert completion_mask(tokens, eos).tolist() == want
    assert completion_mask(tokens.int(), (3, 2)).tolist() == want[:4] + [[1, 1, 0, 0]]


@pytest.mark.parametrize(
    "tokens, eos, error, message",
    [
        ([[1]], 1, TypeError, "tokens: expected an integer tensor, got list"),
        (torch.ones(1, 2), 1, TypeError, "tokens: expected an integer tensor, got torch.float32"),
        (torch.ones(1, 2) > 0, 1, TypeError, "tokens"),
        (torch.tensor([1, 2]), 1, ValueError, r"tokens: expected shape \[B, T\], got \[2\]"),
        (torch.tensor([[1, 2]]), [], ValueError, "eos_id: expected an int or at least one id"),
        (torch.tensor([[1, 2]]), 1.0, TypeError, "eos_id"),
        (torch.tensor([[1, 2]]), True, TypeError, "eos_id"),
        (torch.tensor([[1, 2]]), None, TypeError, "eos_id: expected an int or a list of them, got None"),
        (torch.tensor([[1, 2]]), "</s>", TypeError, "eos_id"),
        (torch.tensor([[1, 2]]), [1, None], TypeError, "eos_id"),
    ],
)
def test_completion_mask_bad_input(tokens, eos, error, message):
    with pytest.raises(error, match=message):
        completion_mask(tokens, eos)
