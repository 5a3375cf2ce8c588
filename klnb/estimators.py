"""The three Monte Carlo estimators of KL(π‖π_ref), per token, from tokens that the policy π sampled.

Each takes the log-ratio ℓ = log π(y) − log π_ref(y) of a sampled token y ~ π. As *values*, k1 and k3 are unbiased for
KL(π‖π_ref) and k2 is biased. As *losses* they are something else: differentiating an estimate keeps only the first
term of ∇KL = E[∇d] + E[d·∇log π] (d any unbiased estimate), and the expectation of what autograd returns is written
in each docstring. The names are those of J. Schulman's note "Approximating KL divergence" (2020).
"""

import torch
from jaxtyping import Float
from torch import Tensor


def k1(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """ℓ: the log-ratio itself.

    Value: E_π[k1] = KL(π‖π_ref), unbiased; negative for some tokens.
    Gradient of the returned value: E_π[∇k1] = E_π[∇log π] = 0. As a loss it does nothing on average (paper, Eq. 2).

    Args: log_ratio, any shape, floating point, nats, of tokens sampled from π. Returns: the same shape and dtype.
    """
    return log_ratio


def k2(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """ℓ²/2: half the squared log-ratio.

    Value: E_π[k2] ≠ KL(π‖π_ref): biased, close to it where π is close to π_ref.
    Gradient of the returned value: ∇k2 = ℓ∇log π token by token, so that E_π[∇k2] = ∇KL(π‖π_ref) for one position, and
    Σ_t k2 gives the token-level field R_tok for sequences (paper, §4.1).

    Args: log_ratio, any shape, floating point, nats, of tokens sampled from π. Returns: the same shape and dtype.
    """
    return log_ratio.square() / 2


def k3(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """e^(−ℓ) − 1 + ℓ, by expm1 so that it stays accurate where ℓ is small.

    Value: E_π[k3] = KL(π‖π_ref), unbiased where π > 0 wherever π_ref > 0, and never negative.
    Gradient of the returned value: ∇k3 = (1 − π_ref/π)∇log π, so that E_π[∇k3] = ∇KL(π_ref‖π), the *swapped*
    divergence, for one position (paper, Eq. 3 and App. A), and Σ_t k3 gives the field F_tok for sequences (App. D).

    Args: log_ratio, any shape, floating point, nats, of tokens sampled from π. Returns: the same shape and dtype.
    Overflows where −ℓ exceeds 88 (float32) or 709 (float64); `klnb.kl_loss` refuses |ℓ| > 80.
    """
    return torch.expm1(-log_ratio) + log_ratio
