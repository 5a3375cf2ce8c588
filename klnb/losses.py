"""KL terms as losses: what to differentiate so that the gradient is the one that was meant.

`kl_loss` has eight names. Each docstring line and each entry of `ESTIMATORS` says which field the expected gradient
is. All losses are **summed over tokens and averaged over sequences**; nothing else is offered, because only a sum (or
a constant divisor) keeps the identities: a mean over each sequence's own length turns k1 as a loss into ∇E[1/length],
a push on length, and a mean over the tokens of a batch is a ratio estimator, biased at O(1/N).
"""

import math
from dataclasses import dataclass
from typing import no_type_check  # for functions that check their own input and say what is wrong

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from klnb.estimators import k1, k2, k3

MAX_LOG = 80.0  # largest |ℓ| for k3 and largest log prefix ratio: e^80 still fits in float32
CHUNK_ELEMENTS = {"cpu": 2**20}  # token_logprobs works on slices of so many logits (else 2**22): 4 MiB in float32


@dataclass(frozen=True)
class Estimator:
    """What is known of one `kl_loss` name; the fields are those of the module `klnb`."""

    name: str
    follows: str  # on-policy expected gradient: "zero", "R_tok", "F_tok" or "R_seq"
    formula: str  # loss per sequence, sg = detached
    equation: str  # where it comes from; a bare number or section is that of arXiv 2506.09477
    unbiased: bool  # for R_seq, on-policy
    off_policy: bool = False  # takes behavior_logp, and is then unbiased for R_seq off-policy
    baseline: bool = False  # takes group_size
    needs_logits: bool = False


_ALL = {"unbiased": True, "off_policy": True, "baseline": True}
_TABLE = (
    Estimator("k1", "zero", "Σ ℓ_t", "Eq. 2", False),
    Estimator("k2", "R_tok", "Σ ℓ_t²/2", "§4.1", False),
    Estimator("k3", "F_tok", "Σ (e^(−ℓ_t) − 1 + ℓ_t)", "Eq. 3, App. A and App. D", False),
    Estimator("score", "R_tok", "Σ sg(ℓ_t) log π_t", "§4.1", False),
    Estimator("sequence", "R_seq", "sg(Σ ℓ − b) Σ log π_t", "App. B", **_ALL),
    Estimator("reward-to-go", "R_seq", "Σ sg(G_t − b_t) log π_t", "§4.2", **_ALL),
    Estimator("reward-to-go-k3", "R_seq", "Σ [k3_t + sg(Σ_{s≥t} k3_s − b_t) log π_t]",
              "∇KL = E[∇d] + E[d ∇log π] with d = k3", **_ALL),
    Estimator("rao-blackwell", "R_seq", "Σ [KL_t(full vocabulary) + sg(G_{t+1} − b_{t+1}) log π_t]",
              "arXiv 2504.10637", unbiased=True, baseline=True, needs_logits=True),
)  # fmt: skip
ESTIMATORS = {e.name: e for e in _TABLE}


@no_type_check
def kl_loss(
    name: str,
    logp: Float[Tensor, "B T"],
    ref_logp: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"] | Int[Tensor, "B T"] | Float[Tensor, "B T"] | None = None,
    *,
    behavior_logp: Float[Tensor, "B T"] | None = None,
    group_size: int | None = None,
    logits: Float[Tensor, "B T V"] | None = None,
    ref_logits: Float[Tensor, "B T V"] | None = None,
    max_ratio: float | None = None,
    check: bool = True,
) -> Float[Tensor, ""]:
    """A scalar to add (times β) to a loss that is minimised; the table says which field its gradient estimates:
    ∇KL(π‖π_ref) for the last four names.

    Rows are completions sampled from π (on-policy) or, with `behavior_logp`, from μ. With ℓ_t = logp − ref_logp,
    G_t = Σ_{s≥t} ℓ_s, sg = detach, and b_t the leave-one-out baseline (0 without `group_size`), the loss of a sequence
    and the **expectation of its gradient**, on-policy, are

        k1               Σ ℓ_t                                             0
        k2               Σ ℓ_t²/2                                          R_tok
        k3               Σ (e^(−ℓ_t) − 1 + ℓ_t)                            F_tok
        score            Σ sg(ℓ_t) logp_t                                  R_tok, equal to k2 sample by sample
        sequence         sg(Σℓ − b_1) Σ logp_t                             R_seq = ∇KL(π‖π_ref)
        reward-to-go     Σ sg(G_t − b_t) logp_t                            R_seq
        reward-to-go-k3  Σ [k3_t + sg(Σ_{s≥t} k3_s − b_t) logp_t]          R_seq
        rao-blackwell    Σ [KL_t(logits‖ref_logits) + sg(G_{t+1} − b_{t+1}) logp_t]   R_seq

    and off-policy, with prefix ratios w_{1:t} = Π_{s≤t} π/μ, still R_seq:

        sequence         sg(w_{1:T} (Σℓ − b_1)) Σ logp_t
        reward-to-go     Σ sg(Σ_{s≥t} w_{1:s} ℓ_s − w_{1:t} b_t) logp_t
        reward-to-go-k3  Σ [w_{1:t} k3_t − sg(w_{1:t} b_t) logp_t], w differentiated

    The fields are defined in the module `klnb`. Sources: arXiv 2506.09477, as listed per name in `ESTIMATORS`.

    Args:
        name: one of `ESTIMATORS`.
        logp: [B, T] log π(y_t | x, y_<t) of the sampled tokens, in nats, with a gradient.
        ref_logp: [B, T] the same under the frozen π_ref; detached here.
        mask: [B, T] of bool, int or float 0/1: 1 up to and including the first EOS (`completion_mask`). Default ones.
            What masked positions hold (NaN, ±inf, anything) reaches neither value nor gradient.
        behavior_logp: [B, T] the same under μ, the sampler's *true* distribution: top-p or top-k sampling, where
            μ = 0 < π, breaks it. Detached here.
        group_size: n ≥ 2 rows per prompt, adjacent. Then b_t is the mean over the group's other rows of their
            unweighted reward-to-go at t (of ℓ; of k3 for reward-to-go-k3), 0 where they have ended. No expectation
            changes.
        logits, ref_logits: [B, T, V], for rao-blackwell: the distributions that token t was drawn from, already divided
            by the temperature. `logits` with a gradient; `ref_logits` detached here.
        max_ratio: every ratio above it is replaced by this constant, in value and gradient. **Biased**: the gradient is
            then that of no divergence, by as much as the capped rows weigh.
        check: False skips validation (and its one device synchronisation) and promises nothing on bad input.

    Returns: 0-d tensor: the sum over tokens, averaged over the B sequences. float64 in float64 out; float32, bfloat16
        and float16 come back as float32 ([B, T] terms are worked in float64, vocabulary terms in float32). The value is
        the Monte Carlo estimate for k1, k2, k3; for the others a surrogate, of which only the gradient has meaning.

    Raises: ValueError or TypeError naming the argument, for shapes that differ, integer log-probs, log-probs above 1e-4
        or not finite at unmasked positions, a mask that is not 0/1 or has an empty row, a group_size below 2 or not
        dividing B, an argument that the name has no use for, a logp without gradient, |ℓ| > 80 for the k3 names, a log
        ratio above 80 without max_ratio, and π > 0 where π_ref = 0 in the logits.
    """
    _check_names(name, behavior_logp, group_size, logits, ref_logits, max_ratio)
    if check:
        _check_static(logp, ref_logp, mask, behavior_logp, group_size, logits, ref_logits)
    mask = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask
    flags = []  # (where it holds, message): computed on the device and read all at once
    keep = _check_values(flags, logp, ref_logp, mask, behavior_logp)
    out_dtype = logp.dtype if logp.dtype == torch.float64 else torch.float32

    # `where` and not a product: 0 · NaN is NaN, and the gradient of `where` is exactly 0 at masked positions
    lp = torch.where(keep, logp.double(), 0.0)
    log_ratio = lp - torch.where(keep, ref_logp.detach().double(), 0.0)
    if "k3" in name:
        flags.append((log_ratio.detach().abs() > MAX_LOG, f"logp - ref_logp: |ℓ| above {MAX_LOG:g} overflows k3"))
    ratio = None  # w_{1:t}, live
    if behavior_logp is not None:
        steps = lp - torch.where(keep, behavior_logp.detach().double(), 0.0)
        log_w = steps.sum(1, keepdim=True).expand_as(steps) if name == "sequence" else steps.cumsum(1)
        ratio = _ratio(log_w, max_ratio, keep, flags)

    if name in ("k1", "k2", "k3"):
        terms = {"k1": k1, "k2": k2, "k3": k3}[name](log_ratio)
    elif name == "score":
        terms = log_ratio.detach() * lp
    elif name == "rao-blackwell":
        kl = _full_kl(logits, ref_logits.detach(), keep, out_dtype, flags if check else None).double()
        future = _reward_to_go(log_ratio.detach()) - log_ratio.detach()  # G_{t+1}
        terms = kl + (future - _others_mean(future, group_size)) * lp
    else:
        terms = _score_terms(name, lp, log_ratio, ratio, group_size)
    if check:
        _raise_first(flags)
    return (torch.where(keep, terms, 0.0).sum() / len(logp)).to(out_dtype)


def _score_terms(name, lp, log_ratio, ratio, group_size):
    """The terms [B, T] of sequence, reward-to-go and reward-to-go-k3; `ratio` is w_{1:t} live, or None on-policy."""
    d = k3(log_ratio) if name == "reward-to-go-k3" else log_ratio.detach()
    to_go = _reward_to_go(d.detach())
    base = _others_mean(to_go, group_size)
    w = 1.0 if ratio is None else ratio.detach()
    if name == "sequence":
        return w * (to_go[:, :1] - base[:, :1]) * lp
    if name == "reward-to-go":
        return (_reward_to_go(w * d) - w * base) * lp
    if ratio is None:
        return d + (to_go - base) * lp
    return ratio * d - w * base * lp  # the live w carries the score-function part


def _reward_to_go(x: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Σ_{s≥t} x_s."""
    return x.flip(1).cumsum(1).flip(1)


def _others_mean(to_go: Float[Tensor, "B T"], group_size: int | None) -> Float[Tensor, "B T"]:
    """b_t: the mean over the other rows of the group. Rows that have ended count as 0, their reward-to-go."""
    if group_size is None:
        return torch.zeros_like(to_go)
    groups = to_go.unflatten(0, (-1, group_size))
    return ((groups.sum(1, keepdim=True) - groups) / (group_size - 1)).flatten(0, 1)


def _ratio(log_w, max_ratio, keep, flags):
    """w_{1:t} = e^{log w}, capped as a constant by max_ratio; without it, log w above 80 is an error."""
    if max_ratio is None:
        flags.append(((log_w.detach() > MAX_LOG) & keep, f"behavior_logp: log π/μ of the prefix above {MAX_LOG:g}; "
                      "the rows are too far off-policy, or pass max_ratio (biased)"))  # fmt: skip
        return log_w.exp()
    over = log_w.detach() > math.log(max_ratio)
    return torch.where(over, max_ratio, torch.where(over, 0.0, log_w).exp())


def _full_kl(logits, ref_logits, keep, dtype, flags) -> Float[Tensor, "B T"]:
    """KL(π(·|y_<t)‖π_ref(·|y_<t)) over the vocabulary, from the policy's own distribution; 0 at masked positions."""
    keep = keep.unsqueeze(2)
    logp = torch.where(keep, logits.to(dtype), 0.0).log_softmax(2)
    ref = torch.where(keep, ref_logits.to(dtype), 0.0).log_softmax(2)
    at = logp.detach()
    diff = torch.where(at == -torch.inf, 0.0, at - ref)  # 0 log 0 = 0; detached, as Σ π ∇diff = Σ π ∇log π = 0
    if flags is not None:  # over the vocabulary this costs
        flags.append(((diff == torch.inf).any(2), "ref_logits: π > 0 where π_ref = 0, an infinite KL(π‖π_ref); bar the "
                      "same tokens in both models"))  # fmt: skip
        flags.append((diff.isnan().any(2), "logits, ref_logits: expected no NaN or +inf at unmasked positions"))
    return (logp.exp() * diff).sum(2)


def _raise_first(flags):
    """ValueError for the first condition that holds somewhere; synchronises once."""
    code = int(sum(bad.any().long() << i for i, (bad, _) in enumerate(flags)).item())
    for i, (bad, message) in enumerate(flags):
        if code >> i & 1:
            where = bad.nonzero()[0].tolist()
            raise ValueError(f"{message} (row {where[0]}" + (f", token {where[1]})" if len(where) > 1 else ")"))


def _check_names(name, behavior_logp, group_size, logits, ref_logits, max_ratio):
    if name not in list(ESTIMATORS):
        raise ValueError(f"name: expected one of {', '.join(ESTIMATORS)}, got {name!r}")
    e = ESTIMATORS[name]
    if behavior_logp is not None and not e.off_policy:
        raise ValueError(f"behavior_logp: {name!r} has no off-policy form; use " + _names(lambda e: e.off_policy))
    if group_size is not None and not e.baseline:
        raise ValueError(f"group_size: {name!r} takes no baseline; those that do are " + _names(lambda e: e.baseline))
    for arg, value in (("logits", logits), ("ref_logits", ref_logits)):
        if (value is not None) != e.needs_logits:
            raise ValueError(f"{arg}: {name!r} " + ("needs it, [B, T, V]" if e.needs_logits else "has no use for it"))
    if max_ratio is not None:
        if behavior_logp is None:
            raise ValueError("max_ratio: it caps π/μ and means nothing without behavior_logp")
        if not isinstance(max_ratio, (int, float)) or not 0 < max_ratio <= math.exp(MAX_LOG):
            raise ValueError(f"max_ratio: expected a number above 0 and at most e^{MAX_LOG:g}, got {max_ratio!r}")


def _names(which):
    return ", ".join(e.name for e in _TABLE if which(e))


def _check_static(logp, ref_logp, mask, behavior_logp, group_size, logits, ref_logits):
    """What can be said without reading a value from the device."""
    given = {"logp": logp, "ref_logp": ref_logp, "mask": mask, "behavior_logp": behavior_logp, "logits": logits,
             "ref_logits": ref_logits}  # fmt: skip
    for arg, x in given.items():
        if x is None and arg not in ("logp", "ref_logp"):
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{arg}: expected a tensor, got {type(x).__name__}")
        if x.is_complex() or (arg != "mask" and not x.is_floating_point()):
            raise TypeError(f"{arg}: expected floating point, got {x.dtype}")
        if arg == "logp" and (x.ndim != 2 or 0 in x.shape):
            raise ValueError(f"logp: expected shape [B, T] with B, T >= 1, got {list(x.shape)}")
        if "logits" in arg:
            if x.ndim != 3 or x.shape[:2] != logp.shape or x.shape != logits.shape or x.shape[2] == 0:
                raise ValueError(f"{arg}: expected shape {list(logp.shape)} + [V], got {list(x.shape)}")
        elif x.shape != logp.shape:
            raise ValueError(f"{arg}: expected the shape of logp {list(logp.shape)}, got {list(x.shape)}")
        if x.device != logp.device:
            raise ValueError(f"{arg}: expected it on {logp.device} like logp, got {x.device}")
    for arg in ("logp", "logits"):
        if given[arg] is not None and not (torch.is_grad_enabled() and given[arg].requires_grad):
            raise ValueError(f"{arg}: carries no gradient (detached or under no_grad); this loss would train nothing")
    if group_size is not None:
        if not isinstance(group_size, int) or isinstance(group_size, bool):
            raise TypeError(f"group_size: expected an int, got {type(group_size).__name__}")
        if group_size < 2 or len(logp) % group_size:
            raise ValueError(f"group_size: expected n >= 2 dividing B={len(logp)}, got {group_size}")


def _check_values(flags, logp, ref_logp, mask, behavior_logp):
    """Queue the checks of values; returns the mask as bool."""
    keep = mask != 0  # a new tensor: one made in inference mode cannot be saved for the backward pass
    flags.append((~((mask == 0) | (mask == 1)), "mask: expected 0 or 1 everywhere"))
    flags.append((~keep.any(1), "mask: expected at least one unmasked token in each row"))
    for arg, x in (("logp", logp), ("ref_logp", ref_logp), ("behavior_logp", behavior_logp)):
        if x is not None:
            x = x.detach()
            flags.append((~torch.isfinite(x) & keep, f"{arg}: expected finite values at unmasked positions"))
            flags.append(((x > 1e-4) & keep, f"{arg}: expected log-probabilities (at most 0), got a value above 1e-4"))
    return keep


@no_type_check
def completion_mask(tokens: Int[Tensor, "B T"], eos_id) -> Float[Tensor, "B T"]:
    """1 up to and including the first EOS of each completion, 0 after it; all ones where no EOS was drawn.

    Taken from the position of the first EOS and never from the pad id, which often equals EOS.

    Args: tokens [B, T], integer, completions only; eos_id, an int or several (Llama and Qwen have more than one).
    Returns: float32 [B, T]. Raises: TypeError for tokens or ids that are not integers, ValueError for another shape or
        an empty list of ids.
    """
    _check_integers("tokens", tokens)
    if tokens.ndim != 2:
        raise ValueError(f"tokens: expected shape [B, T], got {list(tokens.shape)}")
    try:
        ids = torch.as_tensor(eos_id, device=tokens.device).reshape(-1)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"eos_id: expected an int or a list of them, got {eos_id!r}") from None
    if ids.numel() == 0:
        raise ValueError("eos_id: expected an int or at least one id")
    _check_integers("eos_id", ids)
    is_eos = torch.isin(tokens, ids).long()
    return (is_eos.cumsum(1) == is_eos).float()  # no EOS before this position


@no_type_check
def token_logprobs(
    logits: Float[Tensor, "B T V"], tokens: Int[Tensor, "B T"], temperature: float = 1.0
) -> Float[Tensor, "B T"]:
    """log-prob of each token under softmax(logits / temperature), in little more memory than its gradient needs.

    `logits[b, t]` is the distribution that `tokens[b, t]` was drawn from: already shifted, so not the logits *at* the
    token. The same temperature as the sampler's, which divides logits and not log-probs.

    Equal to `(logits / temperature).log_softmax(-1).gather(...)`, and so is its gradient, 1[v = y] − π(v) over
    temperature, whose expectation over tokens drawn from this distribution is 0. Logits are worked in slices, so that
    only the gradient itself is ever of full size; where the incoming gradient is 0 (masked), so is theirs, whatever
    they hold.

    Args: logits [B, T, V] floating point, −inf for barred tokens; tokens [B, T] integers in 0..V−1 (padding too);
        temperature > 0. Returns: [B, T], float64 for float64 logits, else float32. Once differentiable.
    Raises: TypeError for logits that are not floating point or tokens that are not integers; ValueError for shapes that
        differ, an id outside the vocabulary, or a temperature that is not a finite number above 0.
    """
    _check_tokens({"logits": logits}, tokens, temperature)
    if logits.ndim < 2 or tokens.shape != logits.shape[:-1]:
        raise ValueError(f"tokens: expected shape {list(logits.shape[:-1])} like logits, got {list(tokens.shape)}")
    _check_ids(tokens, logits.shape[-1])
    return _TokenLogProbs.apply(logits, tokens.to(torch.int64, copy=True), float(temperature))


def _check_tokens(given, tokens, temperature):
    for arg, x in given.items():
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"{arg}: expected a floating-point tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    _check_integers("tokens", tokens)
    if isinstance(temperature, str) or temperature is None or not 0 < temperature < math.inf:
        raise ValueError(f"temperature: expected a finite number above 0, got {temperature!r}")


def _check_integers(arg, x):
    if not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"{arg}: expected an integer tensor, got {getattr(x, 'dtype', type(x).__name__)}")


def _check_ids(tokens, vocab):
    if bool(((tokens < 0) | (tokens >= vocab)).any()):
        raise ValueError(f"tokens: expected ids in 0..{vocab - 1}; padding needs a valid id too")


class _TokenLogProbs(torch.autograd.Function):
    """Saves the logits it was given and one log-normaliser a token; the backward fills a single buffer, in slices."""

    @staticmethod
    def forward(ctx, logits, tokens, temperature):
        x = _blocks(logits)
        norm = torch.empty(x.shape[:2], dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        for at in _slices(x):
            part = x[at].to(norm.dtype)
            norm[at] = (part if temperature == 1 else part / temperature).logsumexp(1)
        ctx.save_for_backward(logits, tokens, norm)
        ctx.temperature = temperature
        chosen = x.gather(2, tokens.reshape(*x.shape[:2], 1)).squeeze(2)
        return (chosen.to(norm.dtype) / temperature - norm).view(tokens.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        logits, tokens, norm = ctx.saved_tensors
        x, out = _blocks(logits), torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        index, scale = (v.reshape(*x.shape[:2], 1) for v in (tokens, grad / ctx.temperature))
        buffer, zero, live = out.view(x.shape), norm.new_zeros(()), scale != 0
        norm = torch.where(live, norm.unsqueeze(2), torch.inf)  # no incoming gradient, none out, even from NaN
        for at in _slices(x):
            part = buffer[at] if out.dtype == norm.dtype else torch.empty_like(x[at], dtype=norm.dtype)
            torch.where(live[at], x[at].to(norm.dtype), zero, out=part)
            part = part if ctx.temperature == 1 else part.div_(ctx.temperature)
            part.sub_(norm[at]).exp_().mul_(-scale[at]).scatter_add_(1, index[at], scale[at])
            if part.dtype != out.dtype:
                buffer[at] = part
        return out, None, None


def _blocks(x):
    """[..., V] as a view [n, m, V]: no copy even of the usual logits[:, :-1]."""
    return x.view(1, -1, x.shape[-1]) if x.is_contiguous() else x.unsqueeze(0).flatten(0, -3)


def _slices(x):
    step = max(1, CHUNK_ELEMENTS.get(x.device.type, 2**22) // x.shape[2])
    return [(b, slice(i, i + step)) for b in range(len(x)) for i in range(0, x.shape[1], step)]


@no_type_check
def token_logprobs_from_hidden(
    hidden: Float[Tensor, "B T H"],
    weight: Float[Tensor, "V H"],
    tokens: Int[Tensor, "B T"],
    temperature: float = 1.0,
    bias: Float[Tensor, " V"] | None = None,
    chunk: int = 1024,
) -> Float[Tensor, "B T"]:
    """`token_logprobs` of `hidden @ weight.T + bias`, never holding more than `chunk` tokens' logits at once.

    `hidden[b, t]` is the final hidden state from which token t was drawn (already shifted). The logits of a chunk are
    computed again in the backward pass, so the memory is that of one chunk in both directions. Gradients reach hidden,
    weight and bias and are those of `token_logprobs`.

    Args: hidden [B, T, H], weight [V, H] (`lm_head.weight`), tokens [B, T], temperature > 0, bias [V] or None, chunk in
        tokens, ≥ 1. Returns: [B, T], float64 for float64 input, else float32.
    Raises: as `token_logprobs`, and ValueError for a bias or a chunk that does not fit.
    """
    _check_tokens({"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias}), tokens, temperature)
    if hidden.ndim != 3 or weight.ndim != 2 or hidden.shape[2] != weight.shape[1]:
        got = f"{list(hidden.shape)} and {list(weight.shape)}"
        raise ValueError(f"hidden, weight: expected [B, T, H] and [V, H], got {got}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias: expected shape {list(weight.shape[:1])}, got {list(bias.shape)}")
    if tokens.shape != hidden.shape[:2]:
        raise ValueError(f"tokens: expected shape {list(hidden.shape[:2])} like hidden, got {list(tokens.shape)}")
    if not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"chunk: expected a number of tokens, at least 1, got {chunk!r}")
    _check_ids(tokens, len(weight))

    def part(h, y):
        return _TokenLogProbs.apply(torch.nn.functional.linear(h, weight, bias), y, float(temperature))

    y = tokens.to(torch.int64, copy=True).flatten()
    pairs = zip(hidden.flatten(0, 1).split(chunk), y.split(chunk), strict=True)
    out = [checkpoint(part, *pair, use_reentrant=False, preserve_rng_state=False) for pair in pairs]
    return torch.cat(out).view(tokens.shape)
