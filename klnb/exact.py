"""The oracle: KL, gradient fields and expectations of losses over sequences, by enumeration in float64.

Nothing here samples. Policies are `klnb.policies.Tabular`; gradients are in the logits of `policy` and have the shape
of its table. Costs grow as V^T: meant for V, T of about 2 to 6.
"""

import inspect
from itertools import product
from typing import no_type_check

import torch
from jaxtyping import Float
from torch import Tensor

from klnb import policies

FIELDS = ("R_seq", "F_seq", "R_tok", "F_tok", "R_tok_mu", "F_tok_mu")


def _check(policy, **others):
    for arg, other in others.items():
        if other is None:
            continue
        have, want = (other.vocab, other.horizon, other.eos), (policy.vocab, policy.horizon, policy.eos)
        if have != want:
            raise ValueError(f"{arg}: expected V, T, eos = {want} like policy, got {have}")


def _sequence_logp(policy, tokens, mask):
    """log π(y) over whole sequences, [N]; padding adds nothing, whatever it holds."""
    return torch.where(mask > 0, policy.token_logprobs(tokens), 0.0).sum(1)


def _cross(p: Tensor, logp: Tensor, logq: Tensor) -> Tensor:
    """p (log p − log q) with 0 log 0 = 0, and +inf where p > 0 = q."""
    return torch.where(p > 0, p * (torch.where(p > 0, logp, 0.0) - torch.where(p > 0, logq, 0.0)), 0.0)


def kl(policy: policies.Tabular, ref: policies.Tabular) -> Float[Tensor, ""]:
    """KL(π‖π_ref) over whole sequences, in nats, 0-d float64; +inf where π > 0 = π_ref.

    Differentiable in `policy.logits` (and `ref.logits`) where they require a gradient: the gradient is R_seq. For the
    swapped KL(π_ref‖π) call `kl(ref, policy)`. Raises: ValueError for policies of different V, T or eos.
    """
    _check(policy, ref=ref)
    tokens, mask = policies.sequences(policy.vocab, policy.horizon, policy.eos)
    logp, logq = _sequence_logp(policy, tokens, mask), _sequence_logp(ref, tokens, mask)
    return _cross(logp.exp(), logp, logq).sum()


def _field(logits, policy, ref, field, behavior, create_graph=False):
    """The field at `logits`, [rows, V]; with create_graph, itself differentiable in them (prefix weights included)."""
    if field not in FIELDS:
        raise ValueError(f"field: expected one of {', '.join(FIELDS)}, got {field!r}")
    if field.endswith("_mu") and behavior is None:
        raise ValueError(f"behavior: {field} takes its prefixes from μ, so give the policy that sampled")
    _check(policy, ref=ref, behavior=behavior)
    tokens, mask = policies.sequences(policy.vocab, policy.horizon, policy.eos)
    live = logits + 0  # the fields differentiate the objective in `live`, and weights in `logits` are held fixed
    if field == "R_seq":
        objective = kl(policy.at(live), ref)
    elif field == "F_seq":
        objective = kl(ref, policy.at(live))
    else:
        sampler = behavior if field.endswith("_mu") else policy.at(logits)
        weight = _sequence_logp(sampler, tokens, mask).exp().unsqueeze(1) * mask
        reach = (weight > 0).unsqueeze(2)  # elsewhere nothing counts, not even an infinite KL: 0 · inf is NaN
        logp, logq = (torch.where(reach, x.log_probs(tokens), 0.0) for x in (policy.at(live), ref))
        step = _cross(logp.exp(), logp, logq) if field[0] == "R" else _cross(logq.exp(), logq, logp)
        objective = (weight * step.sum(2)).sum()
    if not torch.isfinite(objective):
        raise ValueError(f"field: {field} does not exist here: its divergence is infinite (a token is barred)")
    return torch.autograd.grad(objective, live, create_graph=create_graph)[0]


def gradient(
    policy: policies.Tabular, ref: policies.Tabular, field: str, behavior: policies.Tabular | None = None
) -> Float[Tensor, "rows V"]:
    """One gradient field, exactly, in `policy.logits`.

    R_seq = ∇KL(π‖π_ref) and F_seq = ∇KL(π_ref‖π), over whole sequences. With KL_t(a‖b) = KL(a(·|y_<t)‖b(·|y_<t)) and
    prefixes held fixed, R_tok = Σ_t E_{y_<t~π}[∇KL_t(π‖π_ref)] and F_tok = Σ_t E_{y_<t~π}[∇KL_t(π_ref‖π)]
    (paper, §4.1); R_tok_mu and F_tok_mu are the same with prefixes from `behavior`.

    Returns: float64 [rows, V], detached. Raises: ValueError for an unknown field, a *_mu field without behavior,
        policies of different V, T or eos, or an infinite divergence.
    """
    with torch.enable_grad():
        return _field(policy.logits.detach().requires_grad_(), policy, ref, field, behavior)


def jacobian(
    policy: policies.Tabular, ref: policies.Tabular, field: str, behavior: policies.Tabular | None = None
) -> Float[Tensor, "D D"]:
    """J[i, j] = ∂field_i/∂logits_j at `policy`, both flattened row by row (D = rows·V).

    A field is the gradient of some function only if J is symmetric everywhere. Arguments and errors as `gradient`.
    """
    logits = policy.logits.detach()
    with torch.enable_grad():
        rows = torch.autograd.functional.jacobian(
            lambda z: _field(z, policy, ref, field, behavior, create_graph=True), logits, vectorize=True
        )
    return rows.reshape(logits.numel(), logits.numel())


def curl(policy, ref, field: str, behavior=None) -> float:
    """‖J − Jᵀ‖/‖J‖ (Frobenius) of a field's Jacobian: 0 for the gradient of a function, at most 2."""
    j = jacobian(policy, ref, field, behavior)
    return float((j - j.T).norm() / j.norm())


def length_gradient(policy: policies.Tabular, inverse: bool = False) -> Float[Tensor, "rows V"]:
    """∇E_π[length], or ∇E_π[1/length] with `inverse`, in `policy.logits`: what a push on length looks like."""
    tokens, mask = policies.sequences(policy.vocab, policy.horizon, policy.eos)
    logits = policy.logits.detach().requires_grad_()
    with torch.enable_grad():
        length = mask.sum(1)
        mean = (_sequence_logp(policy.at(logits), tokens, mask).exp() * (1 / length if inverse else length)).sum()
        return torch.autograd.grad(mean, logits)[0]


def expected_gradient(
    loss_fn,
    policy: policies.Tabular,
    ref: policies.Tabular,
    behavior: policies.Tabular | None = None,
    batch_size: int = 1,
    *,
    stacked: bool = False,
    trim: bool = False,
) -> Float[Tensor, "rows V"]:
    """The exact expectation of the gradient of a loss, over batches of independent rows from μ (`behavior`, else π).

    Args:
        loss_fn: fn(logp, ref_logp, mask, behavior_logp) -> scalar, on [batch_size, T] float64 tensors; it may also take
            `logits` and `ref_logits` ([batch_size, T, V]) by name. behavior_logp is logp.detach() on-policy. Padding
            positions (mask 0) hold finite log-probs that depend on the policy, so that a leak shows.
        batch_size: rows that the loss sees together; all batches are enumerated, N^batch_size of them.
        stacked: promise that the loss of several batches stacked along the rows is the mean of their losses (true of
            kl_loss with group_size=batch_size): one call in place of one per batch.
        trim: pad each batch to its own longest row instead of to T.

    Returns: float64 [rows, V] in policy.logits.
    Raises: ValueError for a loss that is detached, not a scalar or not finite.
    """
    weights, grads = gradients(loss_fn, policy, ref, behavior, batch_size, stacked=stacked, trim=trim)
    return (weights @ grads.flatten(1)).view_as(policy.logits)


def gradient_covariance(
    loss_fn, policy, ref, behavior=None, batch_size: int = 1, *, stacked: bool = False, trim: bool = False
) -> Float[Tensor, "D D"]:
    """The covariance of the gradient of a loss over batches, [D, D] with D = rows·V; its trace is the total variance.

    Arguments and errors as `expected_gradient`.
    """
    weights, grads = gradients(loss_fn, policy, ref, behavior, batch_size, stacked=stacked, trim=trim)
    centred = grads.flatten(1) - weights @ grads.flatten(1)
    return centred.T @ (weights[:, None] * centred)


def gradients(
    loss_fn, policy, ref, behavior=None, batch_size: int = 1, *, stacked: bool = False, trim: bool = False
) -> tuple[Float[Tensor, " M"], Float[Tensor, "M rows V"]]:
    """The probability of each of the M batches of positive probability and the gradient of the loss on it."""
    _check(policy, ref=ref, behavior=behavior)
    tokens, mask = policies.sequences(policy.vocab, policy.horizon, policy.eos)
    sampler, wanted = behavior or policy, inspect.signature(loss_fn).parameters
    with torch.no_grad():
        prob = _sequence_logp(sampler, tokens, mask).exp()
        tokens, mask, prob = tokens[prob > 0], mask[prob > 0], prob[prob > 0]
        rows, ref_logits = policy.rows(tokens), ref.logits[ref.rows(tokens)]
        ref_logp, mu_logp = _chosen(ref_logits, tokens), _chosen(sampler.logits[sampler.rows(tokens)], tokens)
    batches, out = torch.tensor(list(product(range(len(tokens)), repeat=batch_size))), []  # [M, B]
    for some in [batches] if stacked else batches.split(1):
        batch, table_of = some.flatten(), torch.arange(len(some)).repeat_interleave(batch_size)[:, None]
        at = batch, slice(int(mask[batch].sum(1).max()) if trim else None)
        tables = policy.logits.detach().repeat(len(some), 1, 1).requires_grad_()  # one for each batch
        with torch.enable_grad():
            logits = tables[table_of, rows[at]]
            logp = _chosen(logits, tokens[at])
            more = {"logits": logits, "ref_logits": ref_logits[at]}
            more = {k: v for k, v in more.items() if k in wanted}
            own = logp.detach() if behavior is None else mu_logp[at]
            loss = loss_fn(logp, ref_logp[at], mask[at], own, **more)
            check_loss(loss)
            out.append(len(some) * torch.autograd.grad(loss, tables)[0])  # stacked, each is a share of the mean
    return prob[batches].prod(1), torch.cat(out)


def _chosen(logits, tokens):
    """Log-probs [B, T] of tokens under logits [B, T, V]: in one way for all policies, so that equal ones agree to the
    bit."""
    return logits.gather(2, tokens.unsqueeze(2)).squeeze(2) - logits.logsumexp(2)


def check_loss(loss):
    """ValueError unless `loss` is a finite scalar tensor with a gradient."""
    if not isinstance(loss, Tensor) or loss.ndim:
        got = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"loss: expected a scalar tensor, got {got}")
    if not loss.requires_grad:
        raise ValueError("loss: carries no gradient (detached, or computed under no_grad), so it would train nothing")
    if not torch.isfinite(loss):
        raise ValueError(f"loss: expected a finite value, got {loss.item()}")


@no_type_check  # it checks its own input and says what is wrong
def optimum(
    reward: Float[Tensor, " V"], ref: Float[Tensor, " V"] | policies.Tabular, beta: float, which: str = "target"
) -> Float[Tensor, " V"]:
    """The policy that maximises E_π[R] − β·KL at one position (or over listed sequences), float64 [V].

    which = "target": of KL(π‖π_ref), π ∝ π_ref e^{R/β}. which = "swapped": of KL(π_ref‖π), π = β π_ref/(λ − R) with
    λ > max R the root of Σπ = 1, found by bisection.

    Args: reward [V]; ref, probabilities [V] that sum to 1, or a Tabular of one position; beta > 0.
    Raises: ValueError for other shapes, a ref that is no distribution, beta <= 0 or another `which`.
    """
    ref = ref.logits.detach().softmax(1).flatten() if isinstance(ref, policies.Tabular) else ref.detach().double()
    reward = reward.detach().double()
    if reward.ndim != 1 or ref.shape != reward.shape:
        raise ValueError(f"reward, ref: expected the same [V], got {list(reward.shape)} and {list(ref.shape)}")
    if bool((ref < 0).any()) or abs(float(ref.sum()) - 1) > 1e-6:
        raise ValueError("ref: expected probabilities that sum to 1")
    if not beta > 0:
        raise ValueError(f"beta: expected a number above 0, got {beta}")
    if which == "target":
        return (ref.log() + reward / beta).softmax(0)
    if which != "swapped":
        raise ValueError(f"which: expected 'target' or 'swapped', got {which!r}")
    support = ref > 0
    gap = torch.where(support, reward[support].max() - reward, 0.0)  # λ − R = gap + u with u = λ − max R
    low, high = float(beta * ref[support & (gap == 0)].max()), float(beta)  # Σπ ≥ 1 at low, ≤ 1 at high
    while (mid := (low + high) / 2) not in (low, high):
        low, high = (mid, high) if float((beta * ref / (gap + mid)).sum()) > 1 else (low, mid)
    policy = beta * ref / (gap + high)
    return policy / policy.sum()
