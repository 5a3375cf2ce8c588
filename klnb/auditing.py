"""Which divergence does a KL term follow? The exact expected gradient of anyone's loss, named.

`audit` calls a loss on every batch of small enumerated policies (float64: no sampling, no noise) and explains the
expected gradient by the fields of the module `klnb` and by what KL terms turn into by mistake: pushes on length, pulls
to the sampler. Put it into a trainer's tests:

    from klnb import audit
    from my_trainer import kl_term              # kl_term(logp, ref_logp, mask, behavior_logp) -> scalar

    def test_kl_term_follows_the_kl():
        audit(kl_term, expect="R_seq", off_policy=True)
"""

import html
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, wraps
from itertools import combinations, product

import torch
from torch import Tensor

from klnb import exact, policies

LENGTH, INVERSE, TO_MU, FROM_MU = "∇E[length]", "∇E[1/length]", "∇KL(π‖μ)", "∇KL(μ‖π)"
EXPECT = (*exact.FIELDS, "zero")
WORDS = {
    "R_seq": "sequence-level KL(π‖π_ref): the gradient of the target",
    "F_seq": "sequence-level KL(π_ref‖π): the gradient of the swapped divergence",
    "R_tok": "token-level KL(π‖π_ref) with prefixes frozen: a partial gradient",
    "F_tok": "token-level KL(π_ref‖π) with prefixes frozen: a partial gradient, swapped",
    "R_tok_mu": "token-level KL(π‖π_ref) on the sampler's prefixes: a partial gradient",
    "F_tok_mu": "token-level KL(π_ref‖π) on the sampler's prefixes: a partial gradient, swapped",
    "zero": "zero: on average it does nothing",
} | {f: f"{f}: a push on length, whatever π_ref says" for f in (LENGTH, INVERSE)}
WORDS |= {f: f"{f}: about the sampler, whatever π_ref says" for f in (TO_MU, FROM_MU)}
MEANT = {"R_seq": "reward-to-go", "R_tok": "k2", "F_tok": "k3"}
ZERO = 1e-9  # of the RMS per-sample gradient: what float64 leaves of a sum that cancels
HORIZON = 3
LENGTHS = ((("fixed", "none"),), (("variable", "longest row"), ("variable", "T")))
REACH = {"near": 1.0, "far": 25.0}  # the largest |ℓ| of a pair
SHAPES = {  # the slope in logp of one token's loss as a function of ℓ
    "k1": lambda x: 1.0, "k2": lambda x: x, "k3": lambda x: -math.expm1(-x),
    "a live ratio times k1": lambda x: x + 1, "a live ratio times k2": lambda x: x + x * x / 2,
}  # fmt: skip


class AuditError(AssertionError):
    """The loss does not follow the field it was expected to; `.report` says what it follows."""

    def __init__(self, report):
        super().__init__(f"expected {report.expect}, found {report.verdict}\n\n{report}")
        self.report = report


@dataclass(frozen=True)
class AuditReport:
    """What a KL term follows. `str()` is the text, a notebook shows a table, `to_dict()` is what JSON can hold.

    verdict: one line in words. rows: one dict per case, with keys policy ("on-policy", "off-policy"), pairs ("near",
    "far"), length ("fixed", "variable"), padding ("none", "longest row", "T"), follows, text, coefficients {field:
    number}, residual (relative to ‖g‖), with an expectation also coefficient, holds. notes: what else was seen.
    advice: what to write instead. expect, holds: the expectation and whether every case meets it (None without one).
    """

    verdict: str
    rows: tuple
    notes: tuple
    advice: str
    expect: str | None
    holds: bool | None
    off_policy: bool
    batch_size: int
    rtol: float

    def to_dict(self) -> dict:
        """Everything, as plain dicts, lists, texts and numbers."""
        return {**vars(self), "rows": [dict(r) for r in self.rows], "notes": list(self.notes)}

    def _lines(self):
        head = ["policy", "pairs", "length", "padded to", "follows", "residual"]
        table = [head] + [[*list(r.values())[:4], r["text"], f"{r['residual']:.1g}"] for r in self.rows]
        notes = list(self.notes)
        if self.expect:
            c = [r["coefficient"] for r in self.rows]
            spread = "" if self.expect == "zero" else f", coefficient from {min(c):.4g} to {max(c):.4g}"
            notes.append(f"expected {self.expect}: {f'holds{spread}' if self.holds else 'does NOT hold'}")
        return table, [*notes, f"advice: {self.advice}"]

    def __str__(self):
        table, notes = self._lines()
        width = [max(map(len, column)) for column in zip(*table)]
        body = ["  " + "  ".join(x.ljust(w) for x, w in zip(line, width)).rstrip() for line in table]
        return "\n".join([self.verdict, *body, *notes])

    def _repr_html_(self):
        table, notes = self._lines()
        rows = ("<tr>" + "".join(f"<td>{html.escape(x)}</td>" for x in line) + "</tr>" for line in table)
        head = f"<thead>{next(rows).replace('td>', 'th>')}</thead>"
        body, end = f"<tbody>{''.join(rows)}</tbody>", "<br>".join(map(html.escape, notes))
        return f"<p><b>{html.escape(self.verdict)}</b></p><table>{head}{body}</table><p>{end}</p>"


def audit(
    fn: Callable, *, expect: str | None = None, off_policy: bool = False, batch_size: int = 1, rtol: float = 1e-6
) -> AuditReport:
    """Name the divergence that a KL loss follows: the expectation of its gradient, exactly, on small policies.

    Args:
        fn: fn(logp, ref_logp, mask, behavior_logp) -> scalar loss to minimise, on [batch_size, T] float64 tensors, all
            log-probs of the sampled tokens in nats; by name it may also take `logits`, `ref_logits` [batch_size, T, V].
            behavior_logp is logp.detach() on-policy. Padding holds finite log-probs that depend on the policy.
        expect: R_seq, F_seq, R_tok, F_tok, R_tok_mu, F_tok_mu (see `klnb`) or "zero". It holds when in every case the
            gradient g and the field f have c = ⟨g,f⟩/⟨f,f⟩ > 0 and ‖g − c f‖ ≤ rtol‖g‖; c may differ between cases.
            R_tok keeps π's prefixes off-policy too; R_tok_mu is R_tok on-policy.
        off_policy: also audit rows sampled from another policy μ.
        batch_size: 1 to 3 independent rows; above 1 for losses that couple rows (baselines, batch means).
        rtol: how well a field must explain the gradient. Losses computed in float32 need about 1e-4; the bound for zero
            is then rtol/1000.

    Cases: near (|ℓ| ≤ 1) and far (up to 25) pairs of policies, at least 4 each, full and bigram tables, of fixed length
    and with EOS, padded to the longest row and to T. Zero means below 1e-9 of the RMS per-sample gradient.

    Returns: AuditReport. Raises: AuditError if `expect` does not hold; ValueError for a loss that is detached, not a
        scalar, not finite or different at each call, another signature, or an unknown option.
    """
    _check(fn, expect, batch_size)
    rows, seen = [], {}
    for case, chains, fields in _cases(off_policy, batch_size):
        try:
            g, per_token, rms = _measure(fn, chains, batch_size, case[3] == "longest row", twice=not rows)
        except ValueError as e:
            raise ValueError(f"{e} ({', '.join(case[:3])} length)") from e
        rows.append(dict(zip(("policy", "pairs", "length", "padding"), case)) | _explain(g, rms, fields, rtol))
        seen[case] = g, _kind(_explain(per_token, rms, fields, rtol))  # weighted by tokens: undoes a mean over them
        if expect:
            f = fields.get(expect, fields.get(expect.removesuffix("_mu"), torch.zeros_like(g)))
            c = 0.0 if expect == "zero" else float(g @ f / (f @ f))
            holds = rows[-1]["follows"] == "zero" if expect == "zero" else c > 0 and _residual(g, c * f) <= rtol
            rows[-1] |= {"coefficient": _round(c), "holds": holds}
    holds = all(r["holds"] for r in rows) if expect else None
    notes = _notes(rows, seen, batch_size) + _probe_notes(fn, batch_size)
    advice = _advice(rows, expect, holds, off_policy)
    report = AuditReport(_verdict(rows), tuple(rows), notes, advice, expect, holds, off_policy, batch_size, rtol)
    if holds is False:
        raise AuditError(report)
    return report


def audit_reward(
    fn: Callable, *, returns: str = "penalty", discount: float = 1.0, ratio: str | None = None,
    expect: str | None = None, off_policy: bool = False, batch_size: int = 1, rtol: float = 1e-6,
) -> AuditReport:  # fmt: skip
    """Audit a KL term that acts through the reward: as `audit`, of the policy-gradient loss that the term enters.

    Args:
        fn: fn(logp, ref_logp, mask, behavior_logp) -> [batch_size, T], inputs detached; `logits` etc. as in `audit`.
        returns: "penalty", per-token costs p_t: the loss is Σ_t logp_t Σ_{s≥t} discount^{s−t} p_s; "advantage", A_t: it
            is −Σ_t logp_t A_t. Masked, summed over tokens, mean over rows.
        discount: of later penalties; 1 for R_seq, 0 for R_tok.
        ratio: off-policy, multiply term t by sg(w_t) ("token") or sg(w_{1:T}) ("sequence"), unclipped.

    The others, the result and the errors are those of `audit`; ValueError also if fn returns another shape.
    """
    if returns not in ("penalty", "advantage"):
        raise ValueError(f"returns: expected 'penalty' or 'advantage', got {returns!r}")
    if ratio not in (None, "token", "sequence"):
        raise ValueError(f"ratio: expected None, 'token' or 'sequence', got {ratio!r}")
    _check(fn, expect, batch_size)

    @wraps(fn)  # for its signature
    def loss(logp, ref_logp, mask, behavior_logp, **logits):
        detached = logp.detach()
        signal = fn(detached, ref_logp, mask, behavior_logp, **{k: v.detach() for k, v in logits.items()})
        if not isinstance(signal, Tensor) or signal.shape != logp.shape:
            got = f"shape {list(signal.shape)}" if isinstance(signal, Tensor) else type(signal).__name__
            raise ValueError(f"reward: expected a tensor of shape {list(logp.shape)}, got {got}")
        signal = torch.where(mask > 0, signal.detach().double(), 0.0)
        if returns == "penalty":
            t = torch.arange(logp.shape[1])
            ahead = t[:, None] - t  # s − t, later token s by row
            signal = signal @ torch.where(ahead >= 0, float(discount) ** ahead.clamp(min=0).double(), 0.0)
        step = torch.where(mask > 0, detached - behavior_logp, 0.0)
        weight = {None: 1.0, "token": step.exp(), "sequence": step.sum(1, keepdim=True).exp()}[ratio]
        sign = 1 if returns == "penalty" else -1
        return sign * torch.where(mask > 0, weight * signal * logp, 0.0).sum() / len(logp)

    return audit(loss, expect=expect, off_policy=off_policy, batch_size=batch_size, rtol=rtol)


def _extra(fn):
    return [n for n in ("logits", "ref_logits") if n in inspect.signature(fn).parameters]


def _check(fn, expect, batch_size):
    if expect is not None and expect not in EXPECT:
        raise ValueError(f"expect: expected one of {', '.join(EXPECT)}, got {expect!r}")
    if batch_size not in (1, 2, 3):
        raise ValueError(f"batch_size: expected 1, 2 or 3 (all batches are enumerated), got {batch_size!r}")
    try:
        inspect.signature(fn).bind(1, 2, 3, 4, **dict.fromkeys(_extra(fn)))
    except TypeError as e:
        raise ValueError(f"fn: expected a function fn(logp, ref_logp, mask, behavior_logp), got {fn!r}: {e}") from None


def _pair(vocab, table, eos, reach, generator):
    """π, π_ref whose largest |ℓ| is `reach`, both at equal distance from a random table, and μ near π."""

    random = [policies.random(vocab, HORIZON, table, eos, generator=generator) for _ in range(3)]
    centre, direction, drift = (p.logits for p in random)
    direction *= torch.rand(len(direction), 1, dtype=torch.float64, generator=generator)  # some positions stay mild
    tokens, mask = policies.sequences(vocab, HORIZON, eos)
    low, high = 0.0, 1000.0
    for _ in range(40):
        mid = (low + high) / 2
        pair = [random[0].at(centre + step * direction) for step in (mid, -mid)]
        gap = (mask * (pair[0].token_logprobs(tokens) - pair[1].token_logprobs(tokens))).abs().max()
        low, high = (mid, high) if gap < reach else (low, mid)
    return *pair, pair[0].at(pair[0].logits + 0.7 * drift)


def _fields(policy, ref, mu):
    """The fields that may explain a gradient here, by name."""
    out = {f: exact.gradient(policy, ref, f) for f in ("R_seq", "R_tok", "F_tok", "F_seq")}
    if policy.eos is not None:
        out |= {LENGTH: exact.length_gradient(policy), INVERSE: exact.length_gradient(policy, inverse=True)}
    if mu is not None:
        out |= {f: exact.gradient(policy, ref, f, mu) for f in ("R_tok_mu", "F_tok_mu")}
        out |= {TO_MU: exact.gradient(policy, mu, "R_seq"), FROM_MU: exact.gradient(policy, mu, "F_seq")}
    return out


@lru_cache
def _cases(off_policy, batch_size):
    """All cases: (names, [(π, π_ref, μ or None)], {field: its values on all pairs, one after another})."""
    cases, regimes = [], ("on-policy", "off-policy") if off_policy else ("on-policy",)
    vocab = 3 if batch_size == 1 else 2  # all batches are enumerated: 8 sequences make 512 batches of 3
    for regime, (near, reach), eos in product(regimes, REACH.items(), (None, vocab - 1)):
        generator = torch.Generator().manual_seed(2506_09477)  # the same pairs for both regimes
        # sequences with EOS are few and mostly short: it takes more pairs before no chance mixture of fields fits
        tables = ("full", "bigram") * (2 if eos is None else 3 if vocab == 3 else 6)
        chains = [_pair(vocab, table, eos, reach, generator) for table in tables]
        chains = [(p, r, m if regime == "off-policy" else None) for p, r, m in chains]
        each = [_fields(*c) for c in chains]
        values = {f: torch.cat([e[f].flatten() for e in each]) for f in each[0]}
        for length, padding in LENGTHS[eos is not None]:
            cases.append(((regime, near, length, padding), chains, values))
    return cases


def _measure(fn, chains, batch_size, trim, twice):
    """Over all pairs: the expected gradient, E[tokens · gradient], and the RMS of the gradient of a batch.

    With `twice`, the first pair is measured again, and ValueError says so if the loss is not a function of its input.
    """
    out, square = [], 0.0
    for policy, ref, mu in chains:
        weights, grads = exact.gradients(fn, policy, ref, mu, batch_size, trim=trim)
        if not torch.isfinite(grads).all():
            raise ValueError("loss: finite, but its gradient is NaN or infinite (an inf behind a clamp or a mask?)")
        if twice and not out and not torch.equal(grads, exact.gradients(fn, policy, ref, mu, batch_size, trim=trim)[1]):
            raise ValueError("loss: two calls on the same input differ; no random numbers and no state, please")
        lengths = policies.sequences(policy.vocab, policy.horizon, policy.eos)[1].sum(1).tolist()
        tokens = torch.tensor([sum(x) for x in product(lengths, repeat=batch_size)], dtype=torch.float64)
        out.append(torch.stack([weights, weights * tokens]) @ grads.flatten(1))
        square += float(weights @ grads.flatten(1).square().sum(1))
    return *torch.cat(out, 1), square**0.5


def _explain(g, rms, fields, rtol):
    """The fewest fields that make up g to rtol, else zero, else none with the least-squares combination."""
    whole, residual = _fit(g, fields, fields) if g.norm() > 0 else ({}, 0.0)
    if whole and residual <= rtol:
        for names in (n for size in range(1, len(fields) + 1) for n in combinations(fields, size)):
            coefficients, residual = _fit(g, fields, names)
            if residual <= rtol:
                text = " + ".join(f"{c:.4g}·{n}" for n, c in coefficients.items()).replace("+ -", "− ")
                follows = names[0] if len(names) == 1 else text
                return {"follows": follows, "text": text, "coefficients": coefficients, "residual": _round(residual, 2)}
    if g.norm() <= max(ZERO, rtol / 1000) * rms:
        return {"follows": "zero", "text": "zero", "coefficients": {}, "residual": 0.0}
    close = {n: float(g @ f / g.norm() / f.norm()) for n, f in fields.items()}
    best = max(close, key=lambda n: abs(close[n]))
    text = f"none of them (closest: {best}, cosine {close[best]:.3f})"
    return {"follows": "none", "text": text, "coefficients": whole, "residual": _round(residual, 2)}


def _fit(g, fields, names):
    """Least squares of g over the named fields: {name: coefficient} and ‖g − fit‖/‖g‖."""
    columns = torch.stack([fields[n] for n in names], 1)
    scale = columns.norm(dim=0)
    c = torch.linalg.lstsq(columns / scale, g[:, None], driver="gelsd", rcond=1e-13).solution[:, 0] / scale
    return dict(zip(names, map(_round, c.tolist()))), _residual(g, columns @ c)


def _residual(g, fit):
    return float((g - fit).norm() / g.norm()) if g.norm() > 0 else 1.0


def _round(x, digits=6):
    """Rounded, so that the report is the same on any machine: below 1e-9 is what float64 leaves."""
    return float(f"{x:.{digits}g}") if abs(x) > 1e-9 else 0.0


def _kind(row):
    """Which fields, with which signs."""
    if row["follows"] in ("zero", "none"):
        return (row["follows"],)
    return tuple(n if c > 0 else f"−{n}" for n, c in row["coefficients"].items())


def _words(row):
    kind = _kind(row)
    if len(kind) > 1 or kind == ("none",):
        return f"a mixture, {row['text']}" if len(kind) > 1 else row["text"]
    return f"the NEGATIVE of {WORDS[kind[0][1:]]}" if kind[0][0] == "−" else WORDS[kind[0]]


def _verdict(rows):
    """One phrase where all cases agree, else one for each group of cases; off-policy apart if it differs."""
    texts = {}
    for regime in dict.fromkeys(r["policy"] for r in rows):
        mine = [r for r in rows if r["policy"] == regime]
        groups = [[r for r in mine if _kind(r) == k] for k in dict.fromkeys(map(_kind, mine))]
        texts[regime] = "; ".join(_words(g[0]) + (f" [{_where(g, mine)}]" if len(groups) > 1 else "") for g in groups)
    first, *rest = dict.fromkeys(texts.values())
    return "; off-policy: ".join([first, *rest])


def _where(group, rows):
    """The shortest words that pick a group of cases out of all rows."""
    named = {"near": "near π_ref", "far": "far from π_ref", "fixed": "fixed length", "variable": "variable length",
             "none": "no padding", "longest row": "padded to the longest row", "T": "padded to T"}  # fmt: skip
    for keys in (("pairs",), ("length",), ("padding",), ("pairs", "length"), ("length", "padding")):
        wanted = {tuple(r[k] for k in keys): None for r in group}
        if [r for r in rows if tuple(r[k] for k in keys) in wanted] == group:
            return " or ".join(", ".join(named[x] for x in w) for w in wanted)
    return " or ".join(", ".join(named[r[k]] for k in ("pairs", "length", "padding")) for r in group)


def _notes(rows, seen, batch_size):
    """What is seen beside the fields, by its usual name."""
    notes, at = [], {tuple(r[k] for k in ("policy", "pairs", "length", "padding")): r for r in rows}
    if any(_kind(r)[0][1:] in exact.FIELDS and len(_kind(r)) == 1 for r in rows):
        notes.append("sign flip: the coefficient is negative, so minimising this loss pushes π away from π_ref")
    for p in dict.fromkeys(r["policy"] for r in rows):
        cases = [(p, "near", *x) for x in LENGTHS[0] + LENGTHS[1]]
        (fixed, own, full), (_, a, b) = (at[c] for c in cases), (seen[c][0] for c in cases)
        known = _kind(fixed) != ("none",)
        if _kind(own) != _kind(full) or (own["coefficients"] and _residual(a, b) > 1e-6):
            if known and _kind(full) == _kind(fixed):
                notes.append(f"{p}: a mean that counts padding: its size depends on how far the batch is padded")
            elif known and _kind(own) == _kind(fixed):
                notes.append(f"{p}: padding reaches the gradient: the mask is not applied, or too late")
            else:
                notes.append(f"{p}: the gradient depends on the padding: a mean counts it, or the mask is not applied")
        elif known and _kind(own) != _kind(fixed) and seen[cases[1]][1] == _kind(fixed):
            what = "each sequence's own length" if batch_size == 1 else "all tokens of the batch"
            notes.append(f"{p}: a mean over {what}: with the sum instead it would follow {fixed['follows']}")
        if {LENGTH, INVERSE} & {k.removeprefix("−") for r in rows if r["policy"] == p for k in _kind(r)}:
            notes.append(f"{p}: a push on length, which has nothing to do with π_ref")
        if any(_kind(at[c]) != _kind(at[p, "far", *c[2:]]) for c in cases):
            notes.append(f"{p}: far from π_ref it follows something else than near it: a clamp, cap or clip")
    if any(r["follows"] == "none" and r["residual"] < 3e-5 for r in rows):
        notes.append("explained to the precision of float32, not of float64: pass rtol=1e-4 if it is computed so")
    return tuple(notes)


def _probe_notes(fn, batch_size):
    """One token on its own: where does a clamp cut in, and is there a live ratio?"""
    if batch_size > 1 or _extra(fn):
        return ()
    logp, notes = torch.full((1, 1), -30.0, dtype=torch.float64), []  # π_ref's log-prob stays below 0 at ℓ = −25

    def at(x):
        """The value and the slope at ℓ = x."""
        live = logp.clone().requires_grad_()
        with torch.enable_grad():
            loss = fn(live, logp - x, torch.ones_like(logp), logp.clone())
            slope = torch.autograd.grad(loss, live, materialize_grads=True)[0]
        return float(loss.detach()), float(slope)

    points, h = (-0.5, -0.3, 0.2, 0.4), 1e-4
    near = [at(x) for x in points]
    for name, shape in SHAPES.items():
        scale = near[0][1] / shape(points[0])

        def fits(x, slope, shape=shape, scale=scale):
            return abs(slope - scale * shape(x)) <= 1e-6 * abs(scale * shape(x)) + 1e-9 * abs(scale)

        if scale == 0 or not all(fits(x, slope) for x, (_, slope) in zip(points, near)):
            continue
        ends = []
        for word, sign in (("below", -1), ("above", 1)):
            outer = next((sign * k for k in range(1, 26) if not fits(sign * k, at(sign * k)[1])), None)
            if outer is not None:  # bisect between the last point that fits and the first that does not
                inner = outer - sign
                for _ in range(12):
                    middle = (inner + outer) / 2
                    inner, outer = (middle, outer) if fits(middle, at(middle)[1]) else (inner, middle)
                ends.append(f"{word} ℓ = {outer:.2f}")
        if ends:
            notes.append(f"a clamp: the gradient of one token is that of {name}, but not {' and '.join(ends)}")
    own = [(at(x + h)[0] - at(x - h)[0]) / (2 * h) for x in points]
    if all(v and abs(slope - d - v) < 1e-4 * abs(v) for (v, slope), d in zip(near, own)):
        notes.append("a live ratio, or its like: the gradient is that of the value times π/μ or exp(x − x.detach())")
    return tuple(notes)


def _advice(rows, expect, holds, off_policy):
    """The `kl_loss` name that does what was meant (∇KL(π‖π_ref) of sequences, if nothing else was said)."""
    goal = (expect or "R_seq").removesuffix("_mu")
    if holds or {_kind(r) for r in rows} == {(goal,)}:
        return "nothing to change" + ("" if off_policy else "; audit with off_policy=True if rollouts are reused")
    if goal not in MEANT:
        return "leave the term out" if goal == "zero" else "no kl_loss name follows F_seq; reward-to-go follows R_seq"
    more = ", behavior_logp=behavior_logp" if off_policy and goal == "R_seq" else ""
    end = "; off-policy no kl_loss name follows it" if off_policy and goal != "R_seq" else ""
    call = f'klnb.kl_loss("{MEANT[goal]}", logp, ref_logp, mask{more})'
    return f"for {WORDS[goal].split(':')[0]} use {call}: summed over tokens, mean over sequences{end}"
