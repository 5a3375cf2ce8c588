import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import klnb
from klnb.estimators import k1, k2, k3


def value_and_slope(fn, ell, dtype=torch.float64):
    x = torch.tensor(ell, dtype=dtype, requires_grad=True)
    y = fn(x)
    y.sum().backward()
    return y.detach(), x.grad


def test_by_hand():
    """ℓ = ln 2: k1 = .693147, k2 = .240227, k3 = ½ − 1 + ln 2 = .193147; slopes 1, ℓ, 1 − ½.

    ℓ = −ln 2: k3 = 2 − 1 − ln 2 = .306853, slope 1 − 2 = −1: steeper than at +ln 2, which the swapped sign would miss.
    """
    ell = [math.log(2), -math.log(2), 0.0]
    for fn, values, slopes in (
        (k1, [0.69314718, -0.69314718, 0], [1, 1, 1]),
        (k2, [0.24022651, 0.24022651, 0], [0.69314718, -0.69314718, 0]),
        (k3, [0.19314718, 0.30685282, 0], [0.5, -1, 0]),
    ):
        value, slope = value_and_slope(fn, ell)
        assert value.tolist() == pytest.approx(values, abs=1e-8)
        assert slope.tolist() == pytest.approx(slopes, abs=1e-8)


@settings(deadline=None, max_examples=200, derandomize=True)
@given(st.floats(-80, 80))
def test_float64_against_the_formulas(ell):
    """k3 against its series where e^(−ℓ) − 1 + ℓ would cancel, and never negative."""
    value, slope = value_and_slope(k3, [ell])
    want = math.exp(-ell) - 1 + ell if abs(ell) > 0.1 else sum((-ell) ** n / math.factorial(n) for n in range(2, 15))
    assert value.item() == pytest.approx(want, rel=1e-10, abs=1e-17) and value.item() >= -1e-17
    assert slope.item() == pytest.approx(-math.expm1(-ell), rel=1e-9, abs=1e-15)
    assert k2(torch.tensor(ell, dtype=torch.float64)).item() == pytest.approx(ell * ell / 2, rel=1e-15)


@pytest.mark.parametrize("ell", [1e-4, -1e-4, 1e-3, -3e-4])
def test_k3_in_float32_near_zero(ell):
    """ℓ²/2 − ℓ³/6: 5e-9 at 1e-4, where exp(−ℓ) − 1 + ℓ in float32 has an error of 6e-8."""
    want = ell**2 / 2 - ell**3 / 6
    value, slope = value_and_slope(k3, [ell], torch.float32)
    assert value.item() == pytest.approx(want, rel=5e-3)
    assert slope.item() == pytest.approx(-math.expm1(-ell), rel=5e-3)
    naive = torch.exp(-torch.tensor(ell)) - 1 + torch.tensor(ell)
    if abs(ell) < 5e-4:
        assert naive.item() != pytest.approx(want, rel=5e-3)  # so the test can fail


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0,), (2, 1, 4)])
def test_shapes_and_dtypes_are_kept(shape, dtype):
    for fn in (k1, k2, k3):
        out = fn(torch.full(shape, 0.5, dtype=dtype))
        assert out.shape == shape and out.dtype == dtype


def test_exported():
    assert (klnb.k1, klnb.k2, klnb.k3) == (k1, k2, k3)
    with pytest.raises(AttributeError, match="no attribute 'k4'"):
        _ = klnb.k4
