# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Stale rollouts: which correction is right, and what it costs
#
# **Once the policy has moved away from the one that sampled, no per-token ratio gives the gradient of
# KL($\pi\,\|\,\pi_{\mathrm{ref}}$); the product of ratios over the prefix does, and with a few hundred rollouts of
# these small policies it is affordable while KL($\pi\,\|\,\mu$) of a whole sequence stays below about a nat.**
#
# The paper's identities are on-policy (arXiv 2506.09477; §6 treats one off-policy objective), while training code
# takes several updates on the same rollouts. Its review asked what remains of them there. This notebook is the answer
# in full: every common loss and fix with its exact expected gradient, the staleness at which the difference matters,
# exactly and with samples, and the price of the correction. Runs in about half a minute.
#
# Signs and words: $\pi$ is trained, $\pi_{\mathrm{ref}}$ is frozen, $\mu$ is the *behavior policy* that sampled the
# rollouts ($\mu=\pi$ is on-policy). $\ell_t=\log\pi_t-\log\pi_{\mathrm{ref},t}$ and $G_t=\sum_{s\ge t}\ell_s$;
# $w_t=\pi_t/\mu_t$ is the token ratio, $w_{1:t}=\prod_{s\le t}w_s$ the prefix ratio, $w_{1:T}$ the sequence ratio;
# $D_t$ and $\bar D_t$ are KL($\pi\,\|\,\pi_{\mathrm{ref}}$) and KL($\pi_{\mathrm{ref}}\,\|\,\pi$) of the next token
# after $y_{<t}$. A ratio in a loss is *live* if it is differentiated and *detached* if it is a constant.
#
# | field | is | prefixes |
# |---|---|---|
# | $R_{\mathrm{seq}}$ | $\nabla\mathrm{KL}(\pi\,\Vert\,\pi_{\mathrm{ref}})$ over sequences: the target | |
# | $R_{\mathrm{tok}}$ | $\sum_t\mathbb{E}[\nabla D_t]$ | from $\pi$, held fixed |
# | $F_{\mathrm{tok}}$ | $\sum_t\mathbb{E}[\nabla\bar D_t]$ | from $\pi$, held fixed |
# | $R_{\mathrm{tok}}^\mu$, $F_{\mathrm{tok}}^\mu$ | the same | from $\mu$ |

# %%
import json

import matplotlib.pyplot as plt
import numpy as np
import torch

from klnb import exact, paths, policies
from klnb import figures as figs
from klnb.estimators import k2, k3
from klnb.losses import kl_loss
from klnb.stats import generator, interval

# %% tags=["parameters"]
seed = 0
vocab = 3  # tokens in the vocabulary
pairs = 8  # random (reference, behavior, policy) triples behind the table of fields
staleness = 0.7  # there: standard deviation of policy logits minus behavior logits
clip = 0.2  # PPO's clip range
updates = 16  # inner updates on the same rollouts
step = 0.5  # their step size
beta = 0.1  # their KL coefficient
sweep_pairs = 12
rollouts = 256  # completions in the sampled sweep
runs = 40  # seeds of the sampled sweep
ess_vocab = 8
ess_length = 400
ess_staleness = [0.03, 0.06, 0.12, 0.25]
ess_rollouts = 1024
growth_staleness = [0.2, 0.5, 1.0]
price_staleness = [0.1, 0.2, 0.4, 0.7, 1.0, 1.4, 2.0, 2.8]
price_rollouts = [32, 256]
price_horizon = 6
price_pairs = 10
cap = 5.0  # max_ratio of the capped estimator
top_ps = [0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0]
buffer_pairs = 6
buffer_steps = 120
buffer_staleness = 0.3  # where descent starts: logits of π minus those of μ
results = "results"
figures = "figures"

# %%
figs.style()
figure_dir, result_dir = paths.ROOT / figures, paths.ROOT / results
base = {"device": "cpu", "dtype": "float64", "notebook": "notebooks/06_off_policy.py"}
print(f"seed {seed}, V = {vocab}, {updates} inner updates of {step}, {runs} runs of {rollouts} rollouts")

# %%
data = {}


def keep(**items):
    """Results go to the data file first; the figures are drawn from what is in it."""
    data.update(items)
    result_dir.mkdir(parents=True, exist_ok=True)
    (result_dir / "06_off_policy.json").write_text(json.dumps(data) + "\n")


def triple(purpose, i, horizon, stale, kind="full", ref_kind=None, size=None):
    """Policy, reference, behavior: N(0, 1) logits for the last two, the policy's are the behavior's + N(0, stale²)."""
    g = generator(seed, f"06 {purpose} {i}")
    mu = policies.random(size or vocab, horizon, kind, generator=g)
    ref = policies.random(size or vocab, horizon, ref_kind or kind, generator=g)
    moved = torch.randn(mu.logits.shape, dtype=torch.float64, generator=g)
    return mu.at(mu.logits + stale * moved), ref, mu


# %% [markdown]
# ## 1. The rule: differentiate $\mathbb{E}_\mu[w\,d]$
#
# Let $d$ be any unbiased estimate of the divergence. A mean over $\pi$ is a mean over $\mu$ with the sequence ratio
# as weight, $\mathrm{KL}=\mathbb{E}_\pi[d]=\mathbb{E}_\mu[w_{1:T}\,d]$, where $\mu>0$ wherever $\pi>0$. In this form
# the law of the samples no longer depends on the parameters, so the gradient can be taken inside:
#
# $$\nabla\mathrm{KL}=\mathbb{E}_\mu\big[w_{1:T}\nabla d+d\,\nabla w_{1:T}\big]
# =\mathbb{E}_\mu\big[w_{1:T}\,(\nabla d+d\,\nabla\log\pi(y))\big].$$
#
# *Autograd of $w\,d$ with a live ratio is right as it stands*; off-policy this is simpler than on-policy, where the
# second term has to be put in by hand. Leaving the ratio out, or detaching it, leaves something else:
#
# | loss | its expected gradient under $\mu$ |
# |---|---|
# | $w_{1:T}\,d$, live | $\nabla\mathrm{KL}$ |
# | $w_{1:T}\,d$, detached | $\mathbb{E}_\pi[\nabla d]$, the first term only, as on-policy |
# | $d$ | $\mathbb{E}_\mu[\nabla d]$: neither |
#
# The last line for $d=\sum_t\ell_t$ ($k_1$ as a loss):
# $\mathbb{E}_\mu[\nabla\log\pi(y)]=\nabla\,\mathbb{E}_\mu[\log\pi]=-\nabla\mathrm{KL}(\mu\,\|\,\pi)$. The loss that
# does nothing on-policy is not inert once rollouts are stale: minimising it pushes $\pi$ *away from its own
# rollouts*, without limit, and $\pi_{\mathrm{ref}}$ does not appear.
#
# ## 2. Which ratio
#
# A token ratio mends the law of one token only:
#
# $$\mathbb{E}_\mu[w_t\,f(y_{\le t})]=\mathbb{E}_{y_{<t}\sim\mu}\,\mathbb{E}_{y_t\sim\pi}[f(y_{\le t})].$$
#
# The prefix stays from $\mu$. With $f=\nabla k(\ell_t)$ for a detached ratio, and
# $\nabla\mathbb{E}_{y_t\sim\pi}[k(\ell_t)]$ for a live one:
#
# | | $k_1$ | $k_2$ | $k_3$ |
# |---|---|---|---|
# | detached $w_t$ | $0$ | $R_{\mathrm{tok}}^\mu$ | $F_{\mathrm{tok}}^\mu$ |
# | live $w_t$ | $R_{\mathrm{tok}}^\mu$ | none of these: $\mathbb{E}_\pi[k_2]\ne D_t$ | $R_{\mathrm{tok}}^\mu$ |
#
# A prefix ratio is just enough for a term that looks at tokens up to $s$:
# $\mathbb{E}_\mu[w_{1:s}d_s]=\mathbb{E}_\pi[d_s]$. Summed, with live ratios and $d=k_1$ or $k_3$,
# $\nabla\mathbb{E}_\mu[\sum_sw_{1:s}d_s]=R_{\mathrm{seq}}$. To write it with $\log\pi_t$ (for $d=\ell$):
# $\nabla w_{1:s}=w_{1:s}\sum_{t\le s}\nabla\log\pi_t$ and $\mathbb{E}_\mu[w_{1:s}\nabla\ell_s]=0$, so, exchanging the
# sums,
#
# $$R_{\mathrm{seq}}=\mathbb{E}_\mu\Big[\sum_t\nabla\log\pi_t\sum_{s\ge t}w_{1:s}\,\ell_s\Big],$$
#
# with the whole weight detached. Each log-ratio carries the ratio of *its own* prefix, and tokens after $s$ add no
# noise to it. A leave-one-out baseline $b_t$ comes in as $-w_{1:t}b_t\log\pi_t$, since
# $\mathbb{E}_\mu[w_{1:t}\nabla\log\pi_t\mid\text{others}]=0$; without its weight the mean is not 0.
#
# ## 3. What PPO code does with the KL
#
# The usual place of the KL is the reward, computed once when the rollouts are made: the penalty is
# $c_t=\log\mu_t-\log\pi_{\mathrm{ref},t}$, frozen. The loss is $\sum_tw_tC_t$ with the cost-to-go
# $C_t=\sum_{s\ge t}c_s$, or, clipped, $\sum_t\max(w_tC_t,\mathrm{clip}(w_t,1-\epsilon,1+\epsilon)\,C_t)$. Suppose
# even that the ratio were the exact one, $w_{1:T}$ live on $\sum_tc_t$. Then, as $c=\ell-\log(\pi/\mu)$,
#
# $$\nabla\,\mathbb{E}_\pi\Big[\log\frac{\mu(y)}{\pi_{\mathrm{ref}}(y)}\Big]
# =\nabla\big[\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})-\mathrm{KL}(\pi\,\|\,\mu)\big].$$
#
# The second term is a *reward for leaving $\mu$*. It is zero to first order at $\pi=\mu$, so the first update on
# fresh rollouts is right, and it grows with each further one. The objective is linear in $\pi$: it has no entropy
# term, and on the same rollouts its optimum is a single sequence. The token ratio adds the error of §2 and the clip
# switches terms off one by one.


# %%
def to_go(x):
    return x.flip(1).cumsum(1).flip(1)


def clipped(p, q, m, b):
    cost, w = to_go(b - q), (p - b).exp()
    return torch.maximum(w * cost, w.clamp(1 - clip, 1 + clip) * cost).sum(1).mean()


def right(name, **kw):
    """The off-policy form of kl_loss."""
    return lambda p, q, m, b: kl_loss(name, p, q, m, behavior_logp=b, **kw)


def unweighted_baseline(p, q, m, b):
    """Reward-to-go with prefix ratios and a leave-one-out baseline (groups of 2) whose weight was forgotten."""
    others = to_go((p - q).detach()).unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
    return right("reward-to-go")(p, q, m, b) - (others * p).sum(1).mean()


# %%
LOSSES = {
    "no ratio: k1": lambda p, q, m, b: (p - q).sum(1).mean(),
    "no ratio: k2": lambda p, q, m, b: k2(p - q).sum(1).mean(),
    "no ratio: k3": lambda p, q, m, b: k3(p - q).sum(1).mean(),
    "no ratio: reward-to-go": lambda p, q, m, b: (to_go(p - q).detach() * p).sum(1).mean(),
    "no ratio: ½ℓ² of the sequence": lambda p, q, m, b: k2((p - q).sum(1)).mean(),
    "token, detached: k1": lambda p, q, m, b: ((p - b).exp().detach() * (p - q)).sum(1).mean(),
    "token, detached: k2": lambda p, q, m, b: ((p - b).exp().detach() * k2(p - q)).sum(1).mean(),
    "token, detached: k3": lambda p, q, m, b: ((p - b).exp().detach() * k3(p - q)).sum(1).mean(),
    "token, live: k1": lambda p, q, m, b: ((p - b).exp() * (p - q)).sum(1).mean(),
    "token, live: k2": lambda p, q, m, b: ((p - b).exp() * k2(p - q)).sum(1).mean(),
    "token, live: k3": lambda p, q, m, b: ((p - b).exp() * k3(p - q)).sum(1).mean(),
    "token, detached: reward-to-go": lambda p, q, m, b: (((p - b).exp() * to_go(p - q)).detach() * p).sum(1).mean(),
}

# %%
LOSSES |= {
    "frozen KL: no ratio": lambda p, q, m, b: (to_go(b - q) * p).sum(1).mean(),
    "frozen KL: token": lambda p, q, m, b: ((p - b).exp() * to_go(b - q)).sum(1).mean(),
    "frozen KL: token, clipped": clipped,
    "frozen KL: sequence, live": lambda p, q, m, b: ((p - b).sum(1).exp() * (b - q).sum(1)).mean(),
    "sequence, detached: k2": lambda p, q, m, b: ((p - b).sum(1).exp().detach() * k2(p - q).sum(1)).mean(),
    "sequence, detached: k3": lambda p, q, m, b: ((p - b).sum(1).exp().detach() * k3(p - q).sum(1)).mean(),
    "sequence, live: k1": lambda p, q, m, b: ((p - b).sum(1).exp() * (p - q).sum(1)).mean(),
    "prefix, capped: reward-to-go": right("reward-to-go", max_ratio=cap),
    "prefix, baseline unweighted": unweighted_baseline,
    "prefix: reward-to-go": right("reward-to-go"),
    "prefix: with leave-one-out": right("reward-to-go", group_size=2),
    "prefix, live: k3": right("reward-to-go-k3"),
}

# %%
GREEN, BLUE = figs.COLORS["reward-to-go"], figs.COLORS["R_tok"]
LOOKS = {  # colour of the estimator; a dashed line for its form without the right ratio
    "no ratio: k1": (figs.COLORS["k1"], ":", "k1, no ratio"),
    "no ratio: k2": (figs.COLORS["k2"], "-", "k2, no ratio"),
    "no ratio: k3": (figs.COLORS["k3"], "-", "k3, no ratio"),
    "no ratio: reward-to-go": (GREEN, "--", "no ratio"),
    "no ratio: ½ℓ² of the sequence": (figs.COLORS["score"], "-", "½ℓ² of sequence"),
    "token, live: k1": (BLUE, "--", "token ratio"),
    "token, detached: reward-to-go": (BLUE, "-.", "token ratio"),
    "frozen KL: token, clipped": (figs.COLORS["behavior"], "-", "frozen, clipped"),
    "prefix: reward-to-go": (GREEN, "-", "prefix ratio"),
    "prefix, capped: reward-to-go": (GREEN, ":", "prefix, capped"),
    "prefix, live: k3": (figs.COLORS["reward-to-go-k3"], "-", "prefix ratio, k3"),
    "sequence": (figs.COLORS["sequence"], "-.", "sequence ratio"),
}


# %%
def draw(ax, x, y, name, **changes):
    color, line, text = LOOKS[name]
    ax.plot(x, y, **{"color": color, "linestyle": line, "label": text} | changes)


GROUPS_OF_TWO = ("prefix, baseline unweighted", "prefix: with leave-one-out")

# %% [markdown]
# ### The table of fields
#
# For each loss the exact expected gradient under $\mu$, and its distance from each field, relative to that field,
# pooled over random triples of full-history policies. Where the derivations above say "equal", the cell asserts
# equality to rounding.

# %%
COLUMNS = ("R_seq", "R_tok", "R_tok_mu", "F_tok", "F_tok_mu", "away", "frozen")


def fields(policy, ref, mu):
    """The columns: fields, −∇KL(μ‖π) ("away") and R_seq − ∇KL(π‖μ) ("frozen")."""
    out = {f: exact.gradient(policy, ref, f, mu) for f in COLUMNS[:5]}
    out["away"] = -exact.gradient(policy, mu, "F_seq")
    return out | {"frozen": out["R_seq"] - exact.gradient(policy, mu, "R_seq")}


squares = {name: np.zeros(len(COLUMNS) + 1) for name in LOSSES}  # Σ‖g − f‖², last Σ‖g‖²
sizes = np.zeros(len(COLUMNS))
for i in range(pairs):
    policy, ref, mu = triple("fields", i, 3, staleness)
    f = fields(policy, ref, mu)
    sizes += [float(f[c].square().sum()) for c in COLUMNS]
    for name, loss in LOSSES.items():
        g = exact.expected_gradient(loss, policy, ref, mu, batch_size=1 + (name in GROUPS_OF_TWO), stacked=True)
        squares[name] += [*(float((g - f[c]).square().sum()) for c in COLUMNS), float(g.square().sum())]

# %%
away = {name: np.sqrt(np.append(v[:-1] / sizes, v[-1] / sizes[0])) for name, v in squares.items()}
FOLLOWS = {
    "no ratio: k1": "away", "token, detached: k2": "R_tok_mu", "token, detached: k3": "F_tok_mu",
    "token, live: k1": "R_tok_mu", "token, live: k3": "R_tok_mu", "frozen KL: sequence, live": "frozen",
    "sequence, detached: k2": "R_tok", "sequence, detached: k3": "F_tok", "sequence, live: k1": "R_seq",
    "prefix: reward-to-go": "R_seq", "prefix: with leave-one-out": "R_seq", "prefix, live: k3": "R_seq",
}  # fmt: skip
keep(fields={name: v.tolist() for name, v in away.items()})
assert away["token, detached: k1"][-1] < 1e-12
for name in set(LOSSES) - {"token, detached: k1"}:
    for c, d in zip(COLUMNS, away[name]):
        assert d < 1e-12 if FOLLOWS.get(name) == c else d > 1e-3, (name, c, d)
print(
    f"{len(FOLLOWS) + 1} of {len(LOSSES)} losses follow a field exactly, {list(FOLLOWS.values()).count('R_seq')} R_seq"
)

# %%
HEADS = [r"$R_{\mathrm{seq}}$", r"$R_{\mathrm{tok}}$", r"$R_{\mathrm{tok}}^{\mu}$", r"$F_{\mathrm{tok}}$",
         r"$F_{\mathrm{tok}}^{\mu}$", r"$-\nabla$KL$(\mu\|\pi)$", "$R_{\\mathrm{seq}}-$\n$\\nabla$KL$(\\pi\\|\\mu)$",
         "size"]  # fmt: skip
PAINT = {"R_seq": "R_seq", "R_tok": "R_tok", "R_tok_mu": "R_tok", "F_tok": "F_tok", "F_tok_mu": "F_tok"}


def draw_cell(ax, x, y, value, column):
    """Grey by closeness; an exact match in the colour of its field."""
    exactly = value < 1e-12
    shade = 1 - 0.45 * np.exp(-3 * value)
    color = figs.COLORS[PAINT.get(column, "policy")] if exactly else str(shade)
    color = "white" if column == "size" and not exactly else color
    ax.add_patch(plt.Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=color, edgecolor="white"))
    text = "0" if exactly else f"{value:.2f}" if value < 9.995 else f"{value:.0f}"
    ax.text(x, y, text, ha="center", va="center", fontsize=8.5, color="white" if exactly else "black",
            weight="bold" if exactly else "normal")  # fmt: skip


# %%
caption = base | {
    "title": "Which loss follows which field on stale rollouts",
    "quantity": "Distance of the exact expected gradient from each field, √(Σ‖g − f‖²/Σ‖f‖²) over the triples; "
    "coloured 0: equal to rounding (< 1e-12). Last column: size of the gradient beside that of R_seq",
    "setting": f"V = {vocab}, T = 3, full-history tables with N(0, 1) logits for π_ref and μ; logits of π are those "
    f"of μ + N(0, {staleness}²); PPO clip ±{clip}; capped: prefix ratios above {cap:g} replaced by it; baselines "
    "with groups of 2",
    "seeds": f"{seed}, triples 0 to {pairs - 1}", "n": f"{pairs} triples, pooled", "centre": "the exact pooled value",
    "band": "none: nothing is sampled", "scale": "tabular, enumerated",
    "alt": "A table of losses against gradient fields. Only the sequence ratio, live, and the prefix ratios have a 0 "
    "in the column of R_seq; token ratios have theirs under the token-level fields; the clipped frozen KL has none",
}  # fmt: skip

# %%
fig, ax = plt.subplots(figsize=(figs.WIDTH, 7.4))
for y, values in enumerate(data["fields"].values()):
    for x, value in enumerate(values):
        draw_cell(ax, x, y, value, [*COLUMNS, "size"][x])
kinds = [name.split(",")[0].split(":")[0] for name in data["fields"]]
for y in range(1, len(kinds)):
    if kinds[y] != kinds[y - 1]:
        ax.axhline(y - 0.5, color="black", linewidth=0.8)
ax.set(xlim=(-0.5, len(HEADS) - 0.5), ylim=(len(kinds) - 0.5, -0.5))
ax.set_yticks(range(len(kinds)), data["fields"])
ax.set_xticks(range(len(HEADS)), HEADS, fontsize=8)
ax.tick_params(length=0, labelbottom=False, labeltop=True)
ax.grid(False)
ax.spines[:].set_visible(False)
figs.save(fig, "06_fields", caption, figure_dir)

# %% [markdown]
# Read the column of $R_{\mathrm{seq}}$: only the sequence ratio, live, and the prefix ratios have a zero in it.
# Everything with token ratios belongs to $R_{\mathrm{tok}}^\mu$ or $F_{\mathrm{tok}}^\mu$ at best. PPO's frozen,
# clipped KL matches no column at all. A baseline without its weight undoes the correction that it was added to.

# %% [markdown]
# ## 4. Staleness sweep
#
# $\mu$ is the policy at rollout. $\pi$ then takes inner updates on what was sampled: exact ascent on
# $\mathbb{E}_\pi[R]-\beta\,\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$ for a random reward per sequence. All losses are
# evaluated at the same policies, so nothing but their own error differs. First exactly, as expectations over *fresh*
# rollouts from $\mu$.

# %%
SWEEP = (
    "no ratio: k1", "no ratio: k2", "no ratio: k3", "no ratio: reward-to-go", "token, live: k1",
    "frozen KL: token, clipped", "prefix: reward-to-go",
)  # fmt: skip


# %%
def ascend(policy, ref, reward):
    """One exact update of the policy."""
    z = policy.logits.clone().requires_grad_()
    tokens, _ = policies.sequences(policy.vocab, policy.horizon)
    value = (policy.at(z).token_logprobs(tokens).sum(1).exp() * reward).sum()
    grad = torch.autograd.grad(value, z)[0] - beta * exact.gradient(policy, ref, "R_seq")
    return policy.at(policy.logits + step * grad)


# %%
checks = sorted({0, 1, 2, *range(0, updates + 1, max(1, updates // 8))})
sweep = {name: np.zeros((sweep_pairs, len(checks))) for name in SWEEP}
moved = np.zeros((sweep_pairs, len(checks)))  # KL(π‖μ)
for i in range(sweep_pairs):
    policy, ref, mu = triple("sweep", i, 4, 0.0)
    reward = 3 * torch.randn(vocab**4, dtype=torch.float64, generator=generator(seed, f"06 reward {i}"))
    for j in range(updates + 1):
        if j in checks:
            R = exact.gradient(policy, ref, "R_seq")
            moved[i, checks.index(j)] = exact.kl(policy, mu)
            for name in SWEEP:
                g = exact.expected_gradient(LOSSES[name], policy, ref, mu, stacked=True)
                sweep[name][i, checks.index(j)] = (g - R).norm() / R.norm()
        policy = ascend(policy, ref, reward)

# %%
keep(sweep={"updates": checks, "kl": moved.tolist(), **{n: v.tolist() for n, v in sweep.items()}})
print("KL(π‖μ) after the updates, median:", dict(zip(checks, np.median(moved, 0).round(3).tolist())))
for name in SWEEP:
    print(f"{name:28s}", dict(zip(checks, np.median(sweep[name], 0).round(2).tolist())))
assert sweep["prefix: reward-to-go"].max() < 1e-11
first = {name: v[:, checks.index(0)] for name, v in sweep.items()}
assert max(first[name].max() for name in ("no ratio: reward-to-go", "frozen KL: token, clipped")) < 1e-11  # fresh
for name in ("no ratio: k1", "no ratio: reward-to-go", "frozen KL: token, clipped", "no ratio: k2"):
    assert np.median(sweep[name][:, -1]) > np.median(sweep[name][:, 0]) + 0.1, name

# %% [markdown]
# On fresh rollouts ($0$ updates) reward-to-go without a ratio and the frozen KL are exactly right: staleness alone
# undoes them, and soon. For $k_2$ and $k_3$ the off-policy error comes on top of the on-policy one. The live token
# ratio removes only part of it, as its prefixes stay stale.
#
# ### With samples, and with the samples that the policy was fitted to
#
# In training the inner updates are computed *from the rollouts that the KL gradient is then estimated on*. That is a
# second kind of error, which no ratio removes: $\pi$ depends on the samples, so even the prefix-corrected mean is not
# exactly $R_{\mathrm{seq}}$. Each run draws rollouts, takes its updates on them, and estimates the gradient twice: on
# those (reused) and on other rollouts from the same $\mu$ (fresh). What is reported is
# $\langle\hat g,R_{\mathrm{seq}}\rangle/\|R_{\mathrm{seq}}\|^2$, the share of the true gradient along its own
# direction: 1 is right.


# %%
def estimate(loss, policy, ref, mu, tokens):
    """The gradient of a loss on given rollouts, in the logits."""
    z = policy.logits.clone().requires_grad_()
    p, q, b = (x.token_logprobs(tokens) for x in (policy.at(z), ref, mu))
    return torch.autograd.grad(loss(p, q, torch.ones_like(q), b), z)[0]


def improve(policy, ref, mu, tokens, reward):
    """One update from rollouts: the same objective as `ascend`, with sequence ratios and no baseline."""
    index = (tokens * vocab ** torch.arange(tokens.shape[1] - 1, -1, -1)).sum(1)  # lexicographic, as sequences()

    def loss(p, q, m, b):
        return beta * right("reward-to-go")(p, q, m, b) - ((p - b).sum(1).exp() * reward[index]).mean()

    return policy.at(policy.logits - step * estimate(loss, policy, ref, mu, tokens))


# %%
SAMPLED = ("no ratio: reward-to-go", "frozen KL: token, clipped", "prefix: reward-to-go")
_, ref, mu = triple("sweep", 0, 4, 0.0)
reward = 3 * torch.randn(vocab**4, dtype=torch.float64, generator=generator(seed, "06 reward 0"))
shares = {(name, how): np.zeros((runs, len(checks))) for name in SAMPLED for how in ("fresh", "reused", "exact")}

# %%
for r in range(runs):
    g = generator(seed, f"06 run {r}")
    old, fresh = mu.sample(rollouts, g)[0], mu.sample(rollouts, g)[0]
    policy = mu
    for j in range(updates + 1):
        R = exact.gradient(policy, ref, "R_seq")
        for name in SAMPLED if j in checks else ():
            g_exact = exact.expected_gradient(LOSSES[name], policy, ref, mu, stacked=True)
            shares[name, "exact"][r, checks.index(j)] = (g_exact * R).sum() / R.square().sum()
        for name, tokens, how in [(n, t, h) for n in SAMPLED for t, h in ((old, "reused"), (fresh, "fresh"))]:
            if j in checks:
                ghat = estimate(LOSSES[name], policy, ref, mu, tokens)
                shares[name, how][r, checks.index(j)] = (ghat * R).sum() / R.square().sum()
        policy = improve(policy, ref, mu, old, reward)

# %%
keep(sampled={f"{name} | {how}": v.tolist() for (name, how), v in shares.items() if how != "exact"})
last = {}
for name, how in [(n, h) for n in SAMPLED for h in ("fresh", "reused")]:
    mean, low, high = (x[-1] for x in interval(shares[name, how]))
    last[name, how] = low, high
    print(
        f"{name:28s}{how:8s}share along R_seq after {updates} updates: {mean:.2f}, 95% interval {low:.2f} to {high:.2f}"
    )

# %%
for name in SAMPLED:  # fresh rollouts have the exact expectation as their mean; 3.7: one false alarm in 150 (30 tests)
    off = shares[name, "fresh"] - shares[name, "exact"]
    z = np.abs(off.mean(0)) / (off.std(0, ddof=1) / np.sqrt(runs) + 1e-15)
    print(f"{name}: sampled mean on fresh rollouts against the exact expectation, largest |z| {z.max():.1f}")
    assert z.max() < 3.7
at = [checks.index(j) for j in checks if j >= updates // 2]
assert abs(shares["prefix: reward-to-go", "fresh"][:, at].mean() - 1) < 0.15
assert last["frozen KL: token, clipped", "reused"][1] < 0.8
gap = interval((shares["prefix: reward-to-go", "reused"] - shares["prefix: reward-to-go", "fresh"])[:, at].mean(1))
print(
    f"reused minus fresh, prefix ratio, second half of the updates, paired: {gap[0]:.3f} ({gap[1]:.3f} to {gap[2]:.3f})"
)

# %%
caption = base | {
    "title": "How fast each KL gradient goes wrong as rollouts go stale",
    "quantity": "Left: ‖E[g] − R_seq‖/‖R_seq‖, exact, over fresh rollouts from μ. Right: ⟨ĝ, R_seq⟩/‖R_seq‖² of "
    "sampled gradients, on other rollouts from μ (lines) and on those that the policy was updated on (circles); 1 is "
    "right",
    "setting": f"V = {vocab}, T = 4, full-history tables, N(0, 1) logits of μ and π_ref; no ratio, prefix ratio: "
    f"reward-to-go; token ratio: live, on k1; rewards N(0, 3²) per sequence, updates of size {step} with β = "
    f"{beta:g}; left exact updates, right updates and gradients from {rollouts} rollouts (first triple)",
    "seeds": f"{seed}; triples 0 to {sweep_pairs - 1}, runs 0 to {runs - 1}",
    "n": f"left {sweep_pairs} triples, right {runs} runs",
    "centre": "left median over triples, right mean over runs", "scale": "tabular",
    "band": "left none (exact values), right 95% Student-t interval of the mean over runs",
    "alt": "Left: the prefix ratio stays at 0; reward-to-go without ratio and the frozen clipped KL start at 0 and "
    "rise within a few updates; k1, k2 and k3 end above 1. Right: the prefix ratio stays near 1; the "
    "other two fall below it, and without a ratio the share climbs past 1 at the end",
}  # fmt: skip


# %%
def draw_sampled(ax):
    """Shares along R_seq with their intervals."""
    ax.axhline(1, color="black", linewidth=0.8)
    for name in SAMPLED:
        color = LOOKS[name][0]
        mean, low, high = interval(data["sampled"][f"{name} | fresh"])
        ax.fill_between(checks, low, high, color=color, alpha=0.15, linewidth=0)
        draw(ax, checks, mean, name)
        mean, low, high = interval(data["sampled"][f"{name} | reused"])
        ax.errorbar(np.array(checks) + 0.25, mean, (mean - low, high - mean), color=color, fmt="o", markersize=3.5,
                    linewidth=0.8, markerfacecolor="white", label="_reused")  # fmt: skip
    ax.set(xlabel="inner updates since rollout", ylabel=r"share of $R_{\mathrm{seq}}$ recovered", ylim=(0, 2.2))


# %%
fig, (left, right_ax) = plt.subplots(1, 2, figsize=(figs.WIDTH, 3.7))
for name in SWEEP:
    draw(left, checks, np.median(data["sweep"][name], axis=0), name)
left.set(xlabel="inner updates since rollout", ylabel=r"relative distance from $R_{\mathrm{seq}}$", ylim=(-0.05, 2.4))
draw_sampled(right_ax)
left.set_title("exact")
right_ax.set_title("sampled")
figs.label_ends(left, gap=0.065)
figs.label_ends(right_ax, gap=0.065)
figs.save(fig, "06_staleness", caption, figure_dir)

# %% [markdown]
# On fresh rollouts the samples agree with the exact expectations. Reuse adds a bias of its own, visible for the
# prefix ratio once the policy is far from $\mu$; beside the errors of the uncorrected forms it is small.
#
# ## 5. The squared regulariser, and what a fixed buffer is minimised to
#
# The paper's §6 proposes $\frac12\mathbb{E}_\mu[\ell(y)^2]$ off-policy. For a fixed $\mu$ this is an honest
# objective: the samples do not depend on the parameters, so autograd gives its gradient,
# $\mathbb{E}_\mu[\ell(y)\nabla\log\pi(y)]$. Where $\mu>0$ everywhere, and for a full-history policy, it is zero only at
# $\pi=\pi_{\mathrm{ref}}$. At
# $\mu=\pi$ its gradient *is* $R_{\mathrm{seq}}$ (it is $k_2$ of the whole sequence). Away from $\mu$ it is neither KL
# nor proportional to it: it weighs squared log-ratios by how often $\mu$ visits. Token by token,
# $\frac12\mathbb{E}_\mu[\sum_t\ell_t^2]$ is an honest objective too; at $\mu=\pi$ its gradient is $R_{\mathrm{tok}}$.
#
# Which of the losses can be run to their end on one buffer? Each is followed exactly from a $\pi$ a little off $\mu$
# (at $\pi=\mu$ itself $k_1$ rests, on a maximum), with a bigram policy against a full-history reference, so that
# different objectives have different optima.

# %%
BUFFER = (
    "no ratio: k1", "no ratio: k2", "no ratio: k3", "no ratio: ½ℓ² of the sequence", "token, live: k1",
    "frozen KL: token, clipped", "prefix: reward-to-go",
)  # fmt: skip

# %%
tracks = {name: np.zeros((buffer_pairs, buffer_steps + 1)) for name in BUFFER}
for i in range(buffer_pairs):
    start, ref, mu = triple("buffer", i, 4, buffer_staleness, "bigram", "full")
    for name in BUFFER:
        policy = start
        for k in range(buffer_steps + 1):
            tracks[name][i, k] = exact.kl(policy, ref)
            g = exact.expected_gradient(LOSSES[name], policy, ref, mu, stacked=True)
            policy = policy.at(policy.logits - step * g)

# %%
keep(buffer={name: v.tolist() for name, v in tracks.items()})
for name, v in tracks.items():
    print(f"{name:30s}KL(π‖π_ref) median {np.median(v[:, 0]):.2f} at the start, {np.median(v[:, -1]):.2f} at the end, "
          f"{np.median(v[:, -1] / tracks['prefix: reward-to-go'][:, -1]):.2f} times the prefix ratio's")  # fmt: skip
lowest = tracks["prefix: reward-to-go"][:, -1]
assert all((v[:, -1] >= lowest - 1e-9).all() for v in tracks.values())
assert (tracks["no ratio: k1"][:, -1] > tracks["no ratio: k1"][:, 0]).all()
two = exact.expected_gradient(LOSSES["no ratio: ½ℓ² of the sequence"], start, ref, stacked=True)
assert (two - exact.gradient(start, ref, "R_seq")).norm() < 1e-12  # on-policy it is R_seq

# %% [markdown]
# With a full-history policy five of these seven losses rest at $\pi=\pi_{\mathrm{ref}}$, whatever $\mu$ is; $k_1$ and
# the frozen, clipped KL do not.

# %%
_, ref, mu = triple("rest", 0, 3, 0.0)
for name in BUFFER:
    size = exact.expected_gradient(LOSSES[name], ref, ref, mu, stacked=True).norm()
    print(f"{name:30s}‖gradient‖ at π = π_ref under another μ: {size:.2g}")
    assert size > 0.01 if name in ("no ratio: k1", "frozen KL: token, clipped") else size < 1e-12, name

# %% [markdown]
# ## 6. When the sampler is not what its log-probs say: top-p
#
# All corrections need $\mu>0$ wherever $\pi>0$. Nucleus (top-p) and top-k sampling break it: the tokens that were cut
# off have $\mu=0<\pi$. Whatever the recorded log-probs, a mean over $\mu$ cannot see them:
#
# $$\mathbb{E}_\mu[w\,f]=\mathbb{E}_\pi\big[f\cdot 1\{\mu(y)>0\}\big].$$
#
# Two common treatments, for a policy that has not moved at all: take $\mu$ for $\pi$ ("on-policy"), or record the
# true, renormalised $\mu$ and use prefix ratios.


# %%
def nucleus(policy, p):
    """The policy's top-p sampler: the smallest set of tokens whose probability reaches p, renormalised."""
    probs, order = policy.logits.softmax(1).sort(dim=1, descending=True)
    keep_token = torch.zeros_like(probs).scatter(1, order, (probs.cumsum(1) - probs < p).double())
    return policy.at(torch.where(keep_token > 0, policy.logits, -torch.inf))


cut = {how: np.zeros((pairs, len(top_ps))) for how in ("taken for π", "prefix ratio")}
for i, (k, p) in [(i, kp) for i in range(pairs) for kp in enumerate(top_ps)]:
    policy, ref, _ = triple("top-p", i, 3, 0.0, size=6)
    R, mu = exact.gradient(policy, ref, "R_seq"), nucleus(policy, p)
    for how, name in (("taken for π", "no ratio: reward-to-go"), ("prefix ratio", "prefix: reward-to-go")):
        g = exact.expected_gradient(LOSSES[name], policy, ref, mu, stacked=True)
        cut[how][i, k] = (g - R).norm() / R.norm()

# %%
keep(top_p={"p": top_ps, **{how: v.tolist() for how, v in cut.items()}})
for how, v in cut.items():
    print(f"{how:14s}", "relative distance from R_seq, median:", dict(zip(top_ps, np.median(v, 0).round(2).tolist())))
    assert np.median(v[:, top_ps.index(1.0)]) < 1e-11 and np.median(v[:, top_ps.index(0.9)]) > 0.05

# %%
caption = base | {
    "title": "One buffer followed to the end, and a sampler that cuts off tokens",
    "quantity": "Left: KL(π‖π_ref) along exact descent on each loss with rollouts from one fixed μ. Right: ‖E[g] − "
    "R_seq‖/‖R_seq‖ of reward-to-go for rollouts drawn with top-p from π itself",
    "setting": f"Left V = {vocab}, T = 4, bigram policy from logits of μ + N(0, {buffer_staleness}²), full-history "
    f"π_ref, steps of {step}, log scale; right V = 6, T = 3, full-history tables; all logits N(0, 1)",
    "seeds": f"{seed}; left triples 0 to {buffer_pairs - 1}, right 0 to {pairs - 1}",
    "n": f"left {buffer_pairs} triples, right {pairs}", "centre": "median over triples",
    "band": "left none; right quartiles over triples; each value is exact", "scale": "tabular, enumerated",
    "alt": "Left: k1 without a ratio climbs and stays high, the others fall and level off, lowest with the prefix "
    "ratio. Right: the error of both treatments of top-p grows as p falls below 1, to a good part of the gradient",
}  # fmt: skip

# %%
fig, (left, right_ax) = plt.subplots(1, 2, figsize=(figs.WIDTH, 3.7), width_ratios=(1.2, 1))
for name in BUFFER:
    draw(left, range(buffer_steps + 1), np.median(data["buffer"][name], axis=0), name)
left.set(yscale="log", xlabel="steps on one buffer", ylabel=r"KL$(\pi\,\|\,\pi_{\mathrm{ref}})$, nats")
left.set_xticks(range(0, buffer_steps + 1, 30))
left.set_yticks((0.7, 1, 2, 4, 6), labels=("0.7", "1", "2", "4", "6"))
left.minorticks_off()
for how, key in (("taken for π", "behavior"), ("prefix ratio", "reward-to-go")):
    low, middle, high = np.quantile(data["top_p"][how], (0.25, 0.5, 0.75), axis=0)
    right_ax.fill_between(top_ps, low, high, color=figs.COLORS[key], alpha=0.15, linewidth=0)
    right_ax.plot(top_ps, middle, color=figs.COLORS[key], label=f"top-p, {how}")
right_ax.set(xlabel="p of top-p sampling", ylabel=r"relative distance from $R_{\mathrm{seq}}$", ylim=(-0.03, None))
right_ax.legend()
figs.label_ends(left, gap=0.065)
figs.save(fig, "06_buffer", caption, figure_dir)

# %% [markdown]
# $k_1$ drives the policy away from its rollouts, to one that is sure of what $\mu$ hardly drew. The frozen, clipped
# KL chatters where the clip switches its terms on and off. The token-level and squared objectives do settle, each at
# the optimum of its own; with the capacity to reach $\pi_{\mathrm{ref}}$ they would share it. Under top-p neither
# treatment is right at any $p<1$: sample from the full distribution when the KL is estimated from the same rollouts,
# or bar the same tokens in *all* of $\pi$, $\mu$ and $\pi_{\mathrm{ref}}$.
#
# ## 7. What the correction costs
#
# Ratios multiply, and with them the spread of the weights. With $N$ rollouts the effective sample size is
# $N/\mathbb{E}_\mu[w_{1:T}^2]$ (as $\mathbb{E}_\mu[w_{1:T}]=1$). For the log-ratio summed over many tokens, roughly
# normal with mean $\kappa=\mathrm{KL}(\pi\,\|\,\mu)$ under $\pi$, normalisation makes its variance $2\kappa$, and so
#
# $$\mathbb{E}_\mu[w^2]=\mathbb{E}_\pi[w]\approx e^{\kappa+\frac12 2\kappa}=e^{2\kappa},
# \qquad \frac{\mathrm{ESS}}{N}\approx e^{-2\,\mathrm{KL}(\pi\|\mu)} .$$
#
# The KL of the *whole sequence* is what counts: the tokens' KL times the length. For bigram policies
# $\mathbb{E}_\mu[w_{1:t}^2]$ is exact at any length, a product of matrices with entries $\pi^2/\mu$, which the cell
# compares with sampled rollouts.


# %%
def long_run(policy, mu):
    """Exact KL(π‖μ) and E_μ[w²] of the first t tokens, t = 1..T, of bigram policies."""
    logp, logb = policy.logits.log_softmax(1), mu.logits.log_softmax(1)
    second, step_kl = (2 * logp - logb).exp(), (logp.exp() * (logp - logb)).sum(1)
    weight, law, kl = second[0], logp[0].exp(), step_kl[0]
    out = [(float(kl), float(weight.sum()))]
    for _ in range(policy.horizon - 1):
        kl = kl + law @ step_kl[1:]
        law, weight = law @ logp[1:].exp(), weight @ second[1:]
        out.append((float(kl), float(weight.sum())))
    return np.array(out).T


# %%
exact_ess, sampled_ess = {}, {}
for s in ess_staleness:
    policy, _, mu = triple("length", 0, ess_length, s, "bigram", size=ess_vocab)
    kl, second = long_run(policy, mu)
    exact_ess[s] = {"kl": kl.tolist(), "share": (1 / second).tolist()}
    tokens, _ = mu.sample(ess_rollouts, generator(seed, f"06 rollouts {s}"))
    log_w = (policy.token_logprobs(tokens) - mu.token_logprobs(tokens)).cumsum(1)
    sampled_ess[s] = (log_w.exp().sum(0).square() / (2 * log_w).exp().sum(0) / ess_rollouts).tolist()

# %%
small, _, mu = triple("length", 0, 5, ess_staleness[-1], "bigram")  # the matrix product against enumeration
weights, _ = exact.gradients(lambda p, q, m, b: (p - b).sum(1).mean(), small, mu, mu, stacked=True)
tokens, _ = policies.sequences(vocab, 5)
w = (small.token_logprobs(tokens) - mu.token_logprobs(tokens)).sum(1).exp()
kl, second = long_run(small, mu)
assert abs(float(weights @ w.square()) / second[-1] - 1) < 1e-10
assert abs(float(exact.kl(small, mu)) / kl[-1] - 1) < 1e-10

# %%
keep(ess={"exact": {str(s): v for s, v in exact_ess.items()}, "sampled": {str(s): v for s, v in sampled_ess.items()}})
for s, v in exact_ess.items():
    kl, share = np.array(v["kl"]), np.array(v["share"])
    t = np.searchsorted(-share, -0.5)
    reached = f"half the sample is left after {t} tokens, KL(π‖μ) {kl[t]:.2f}" if t < len(kl) else "never below half"
    print(f"staleness {s}: KL(π‖μ) per token {kl[-1] / len(kl):.2g}; {reached}")
    inside = (kl < 0.5) & (kl > 0.01)
    assert np.abs(np.log(share[inside]) / (-2 * kl[inside]) - 1).max(initial=0) < 0.35  # the rule of thumb
    close = share > 0.2
    assert np.abs(np.array(sampled_ess[s])[close] / share[close] - 1).max() < 0.35

# %% [markdown]
# A term $w_{1:s}\ell_s$ pays for its own prefix only, so the gradient's variance grows less than the weights of whole
# sequences say. Exactly, as a multiple of the variance of on-policy reward-to-go at the same $\pi$:


# %%
def spread(loss, policy, ref, mu):
    """Trace of the covariance of the gradient on one completion, and its mean [D]."""
    weights, grads = exact.gradients(loss, policy, ref, mu, stacked=True)
    mean = weights @ grads.flatten(1)
    return float(weights @ (grads.flatten(1) - mean).square().sum(1)), mean


LOSSES["sequence"] = right("sequence")
shape = len(growth_staleness), price_pairs, price_horizon
growth = {name: np.zeros(shape) for name in ("prefix: reward-to-go", "sequence")}
for j, i, T in np.ndindex(shape):
    policy, ref, mu = triple("growth", i, T + 1, growth_staleness[j], "bigram")
    plain, _ = spread(LOSSES["no ratio: reward-to-go"], policy, ref, policy)
    for name in growth:
        growth[name][j, i, T] = spread(LOSSES[name], policy, ref, mu)[0] / plain

# %%
keep(growth={name: v.tolist() for name, v in growth.items()})
for j, s in enumerate(growth_staleness):
    a, b = (np.median(growth[name][j, :, -1]) for name in growth)
    print(
        f"staleness {s}, T = {price_horizon}: variance over on-policy {a:.2f} with prefix ratios, {b:.2f} sequence "
        "ratio"
    )
    assert b > a
assert (np.diff(np.median(growth["prefix: reward-to-go"][:, :, -1], axis=1)) > 0).all()

# %%
caption = base | {
    "title": "The price of the correction: weights multiply",
    "quantity": "Left: effective sample size over N, 1/E_μ[w²], of sequence weights against KL(π‖μ) of the tokens so "
    "far. Right: variance (trace) of the gradient as a multiple of on-policy reward-to-go's at the same π, by horizon",
    "setting": f"Bigram policies, N(0, 1) logits, those of π are μ's + N(0, s²); left V = {ess_vocab}, up to "
    f"{ess_length} tokens, lines exact (they cover each other), dots from {ess_rollouts} rollouts; right V = "
    f"{vocab}, exact, log scale",
    "seeds": f"{seed}; right triples 0 to {price_pairs - 1}",
    "n": f"left 1 pair a line, right {price_pairs} triples a point",
    "centre": "left the exact value, right median over triples",
    "band": "none: heavy tails, see the data file for every triple", "scale": "tabular",
    "alt": "Left: all staleness levels fall on one curve, exp(−2 KL); half the sample is left at a KL of a third of "
    "a nat. Right: the variance with prefix ratios grows with horizon and staleness, less than with the sequence ratio",
}  # fmt: skip


# %%
def draw_ess(ax):
    """Effective sample size against KL(π‖μ), exact and sampled, and the rule of thumb."""
    for s, tint in zip(data["ess"]["exact"], ("#8fd3bf", "#4db896", GREEN, "#00543d")):
        v = {k: np.array(y) for k, y in data["ess"]["exact"][s].items()}
        dots = np.unique(np.geomspace(1, len(v["kl"]), 14).astype(int)) - 1
        ax.plot(v["kl"], v["share"], color=tint, label=f"{v['kl'][-1] / len(v['kl']):.1g} nats a token")
        ax.plot(v["kl"][dots], np.array(data["ess"]["sampled"][s])[dots], "o", color=tint, markersize=4)
    x = np.linspace(0, 4, 100)
    ax.plot(x, np.exp(-2 * x), color="black", linewidth=1, linestyle="--", label=r"$e^{-2\,\mathrm{KL}}$")
    ax.set(xlim=(0, 3), ylim=(0, 1.03), ylabel="effective share of the sample")
    ax.set_xlabel(r"KL$(\pi\,\|\,\mu)$ of the sequence, nats")
    ax.legend()


# %%
fig, (left, right_ax) = plt.subplots(1, 2, figsize=(figs.WIDTH, 3.6))
draw_ess(left)
for name, (j, s) in [(n, s) for n in growth for s in enumerate(growth_staleness)]:
    reach, middle = range(1, price_horizon + 1), np.median(data["growth"][name][j], axis=0)
    draw(right_ax, reach, middle, name, label="_", linewidth=1 + 0.5 * j)
    if name != "sequence":
        right_ax.text(price_horizon + 0.1, middle[-1], f"s = {s:g}", color=GREEN, fontsize=9, va="center")
for name in growth:
    draw(right_ax, [], [], name)
right_ax.set(yscale="log", xlabel="horizon T", xticks=reach, ylabel="variance over on-policy")
right_ax.set_xlim(0.8, price_horizon + 1)
right_ax.set_yticks((0.5, 1, 2, 5, 10, 20), labels=("0.5", "1", "2", "5", "10", "20"))
right_ax.minorticks_off()
right_ax.legend(title="thicker: staler", alignment="left")
figs.save(fig, "06_effective_sample", caption, figure_dir)

# %% [markdown]
# ### Bias against variance
#
# The uncorrected forms have a bias that no number of rollouts removes, the corrected ones a variance that it does.
# The exact root mean squared error with $N$ rollouts, $\sqrt{\mathrm{bias}^2+\mathrm{variance}/N}$ relative to
# $\|R_{\mathrm{seq}}\|$, shows which matters. "Capped" is `max_ratio`: ratios above it are replaced by it, a
# compromise that is biased by design.

# %%
PRICE = (
    "no ratio: reward-to-go", "token, detached: reward-to-go", "sequence", "prefix: reward-to-go",
    "prefix, capped: reward-to-go", "prefix, live: k3",
)  # fmt: skip
errors = {name: np.zeros((2, len(price_staleness), price_pairs)) for name in PRICE}  # bias², variance, over ‖R_seq‖²
behind = np.zeros((len(price_staleness), price_pairs))
for (j, s), i in [(s, i) for s in enumerate(price_staleness) for i in range(price_pairs)]:
    policy, ref, mu = triple("price", i, price_horizon, s, "bigram")
    R, behind[j, i] = exact.gradient(policy, ref, "R_seq"), exact.kl(policy, mu)
    for name in PRICE:
        variance, mean = spread(LOSSES[name], policy, ref, mu)
        errors[name][:, j, i] = (mean - R.flatten()).square().sum() / R.square().sum(), variance / R.square().sum()

# %%
keep(price={"kl": behind.tolist(), **{name: v.tolist() for name, v in errors.items()}})
for name in ("prefix: reward-to-go", "prefix, live: k3", "sequence"):
    assert errors[name][0].max() < 1e-18, name  # no bias


# %%
def rms(name, N):
    """Median relative error with N rollouts, per staleness."""
    return np.median(np.sqrt(errors[name][0] + errors[name][1] / N), axis=1)


# %%
few, many = price_rollouts
apart = np.median(behind, axis=1)
usual = ("no ratio: reward-to-go", "token, detached: reward-to-go", "sequence")
assert all((rms("prefix: reward-to-go", many) < 1.02 * rms(n, many))[apart < 1.6].all() for n in usual)
for n in ("token, detached: reward-to-go", "prefix, capped: reward-to-go"):
    assert (rms(n, few) < rms("prefix: reward-to-go", few))[(apart > 0.4) & (apart < 2.5)].all(), n
assert np.median(errors["no ratio: reward-to-go"][0][apart > 0.8]) > 0.8**2


def breakeven(name):
    """From how many rollouts on the prefix ratio has the smaller error, per staleness and triple."""
    return np.maximum(errors["prefix: reward-to-go"][1] - errors[name][1], 0) / errors[name][0]


for j, s in enumerate(price_staleness):
    none, token = (np.median(breakeven(n)[j]) for n in ("no ratio: reward-to-go", "token, detached: reward-to-go"))
    print(f"staleness {s}, KL(π‖μ) {np.median(behind[j]):.3f}: the prefix ratio has less error than no ratio from "
          f"N = {none:.0f} on, than the token ratio from {token:.0f} on (medians)")  # fmt: skip

# %%
caption = base | {
    "title": "When the right estimator is affordable",
    "quantity": "Relative root mean squared error of the KL gradient with N rollouts, √(bias² + variance/N)/‖R_seq‖, "
    "exact, against KL(π‖μ) of the sequence; all but k3 are forms of reward-to-go",
    "setting": f"V = {vocab}, T = {price_horizon}, bigram tables with N(0, 1) logits for μ and π_ref, logits of π "
    f"those of μ + N(0, s²), s from {price_staleness[0]} to {price_staleness[-1]}; capped at {cap:g}; log axes",
    "seeds": f"{seed}, triples 0 to {price_pairs - 1}", "n": f"{price_pairs} triples a point",
    "centre": "median over triples", "band": "quartiles over triples, for the prefix ratio and no ratio only",
    "scale": "tabular, enumerated",
    "alt": "Two panels, few and more rollouts. Without a ratio the error is a bias that soon exceeds the gradient "
    "itself. With more rollouts the prefix ratio is lowest up to a nat or more; with few, the token ratio or the "
    "capped prefix ratio is lower",
}  # fmt: skip

# %%
fig, axes = plt.subplots(1, 2, figsize=(figs.WIDTH, 3.9), sharey=True)
x = np.median(data["price"]["kl"], axis=1)
for (ax, N), name in [(a, n) for a in zip(axes, price_rollouts) for n in PRICE]:
    bias, variance = np.array(data["price"][name])
    low, middle, high = np.quantile(np.sqrt(bias + variance / N), (0.25, 0.5, 0.75), axis=1)
    if name in ("prefix: reward-to-go", "no ratio: reward-to-go"):
        ax.fill_between(x, low, high, color=LOOKS[name][0], alpha=0.13, linewidth=0)
    draw(ax, x, middle, name)
    ax.set(xscale="log", yscale="log", title=f"{N} rollouts", xlabel=r"KL$(\pi\,\|\,\mu)$ of the sequence, nats")
axes[0].set(ylabel="relative RMS error of the gradient", ylim=(0.12, 10))
axes[0].set_yticks((0.2, 0.5, 1, 2, 5, 10), labels=("0.2", "0.5", "1", "2", "5", "10"))
axes[0].minorticks_off(), axes[1].minorticks_off()
axes[0].legend()
figs.save(fig, "06_price", caption, figure_dir)

# %% [markdown]
# Leaving the ratio out costs a bias as large as the gradient itself at about one nat. With a few hundred rollouts the
# prefix ratios have the least error over the whole useful range. With a few dozen, their noise outweighs the token
# ratio's bias from a few tenths of a nat on, and a cap helps. $k_3$ with live prefix ratios is a little less noisy at
# this distance from $\pi_{\mathrm{ref}}$; see its [crossover](05_sequences).
#
# ## Summary
#
# - Differentiate $\mathbb{E}_\mu[w\,d]$, not $\mathbb{E}_\mu[d]$. Live ratios over the sequence or, better, over each
#   term's own prefix give $R_{\mathrm{seq}}$; token ratios give $R_{\mathrm{tok}}^\mu$ or $F_{\mathrm{tok}}^\mu$ at
#   best.
# - $k_1$ without a ratio is not inert off-policy: it is $-\nabla\mathrm{KL}(\mu\,\|\,\pi)$.
# - The KL in PPO's reward, frozen at rollout, is right for the first update and then rewards leaving $\mu$; with
#   token ratios and clipping it follows no divergence.
# - Whole-sequence weights cost a factor of about $e^{2\,\mathrm{KL}(\pi\|\mu)}$ in samples, prefix ratios less. Log
#   KL($\pi\,\|\,\mu$) per sequence and refresh the rollouts before it nears one nat (a few tenths with a few dozen
#   rollouts); beyond, a capped ratio trades some bias for much variance.
# - No ratio repairs a sampler that cut tokens off.
#
# Next: [07_distillation](07_distillation), the same losses on language models.
