# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Sequences: what token-level losses follow
#
# **For sequences, every KL loss that is differentiated token by token drops the credit of a token for what follows
# it; what is left is not the gradient of KL($\pi\,\|\,\pi_{\mathrm{ref}}$), and in general not the gradient of
# anything.**
#
# Covers §4.1, §4.2, App. B and App. D of the paper (arXiv 2506.09477), with everything enumerated: no sampling,
# float64. It adds what the paper leaves open: the expectation of the token-level $k_3$ loss derived in full, a proof
# that it has no objective, the exact variance of each correct estimator, a correct way to use $k_3$ and where it
# stops paying, and what dividing by the length does. Runs in about half a minute.
#
# Signs and words: $\pi$ is trained, $\pi_{\mathrm{ref}}$ is frozen, $y=(y_1,\dots,y_T)\sim\pi$ is a sequence,
# $\pi_t=\pi(y_t\mid y_{<t})$, $\ell_t=\log\pi_t-\log\pi_{\mathrm{ref},t}$, and $G_t=\sum_{s\ge t}\ell_s$ is the
# reward-to-go of the log-ratio. $D_t$ and $\bar D_t$ are the divergences of the next token after a prefix,
# $\mathrm{KL}(\pi(\cdot\mid y_{<t})\,\|\,\pi_{\mathrm{ref}}(\cdot\mid y_{<t}))$ and
# $\mathrm{KL}(\pi_{\mathrm{ref}}(\cdot\mid y_{<t})\,\|\,\pi(\cdot\mid y_{<t}))$. The gradient fields are
#
# | field | is | prefixes |
# |---|---|---|
# | $R_{\mathrm{seq}}$ | $\nabla\mathrm{KL}(\pi\,\Vert\,\pi_{\mathrm{ref}})$ over sequences: the target | |
# | $F_{\mathrm{seq}}$ | $\nabla\mathrm{KL}(\pi_{\mathrm{ref}}\,\Vert\,\pi)$ over sequences: the swapped divergence | |
# | $R_{\mathrm{tok}}$ | $\sum_t\mathbb{E}_{y_{<t}}[\nabla D_t]$ | from $\pi$, held fixed |
# | $F_{\mathrm{tok}}$ | $\sum_t\mathbb{E}_{y_{<t}}[\nabla\bar D_t]$ | from $\pi$, held fixed |

# %%
import json

import matplotlib.pyplot as plt
import numpy as np
import torch

from klnb import exact, paths, policies
from klnb import figures as figs
from klnb.estimators import k1, k2, k3
from klnb.losses import kl_loss
from klnb.stats import generator

# %% tags=["parameters"]
seed = 0
vocab = 3  # tokens in the vocabulary
horizons = [1, 2, 3, 4, 5, 6, 7]  # lengths of the sequences in the error and variance curves
pairs = 20  # random (policy, reference) pairs behind each point of those curves
near = 0.3  # standard deviation of the logits of both policies: close to each other
far = 2.0  # and far apart
scales = [0.3, 1.0, 2.0, 3.0]  # the same, for the crossover
crossover_pairs = 100
group = 4  # completions per prompt for the leave-one-out baseline
curl_horizons = [1, 2, 3, 4]
curl_pairs = 12
loop_points = 240
instances = 12  # references for the fixed points
flow_vocab = 4
flow_step = 0.5
flow_steps = 1500
batch_sizes = [1, 2, 4, 8, 16, 32, 64, 128]
length_steps = 150
results = "results"
figures = "figures"

# %%
figs.style()
figure_dir, result_dir = paths.ROOT / figures, paths.ROOT / results
base = {"scale": "tabular, enumerated", "device": "cpu", "dtype": "float64", "notebook": "notebooks/05_sequences.py"}
print(f"seed {seed}, V = {vocab}, T = {horizons}, {pairs} pairs, logit scales {near} (near), {far} (far) and {scales}")


# %%
data = {}


def keep(**results):
    """Results go to the data file first; the figures are drawn from what is in it."""
    data.update(results)
    result_dir.mkdir(parents=True, exist_ok=True)
    (result_dir / "05_sequences.json").write_text(json.dumps(data) + "\n")


def pair(purpose, i, horizon, scale, table="full", ref_table=None, eos=None):
    """The i-th random policy and reference for a purpose: independent N(0, scale²) logits."""
    g = generator(seed, f"05 {purpose} {i} {scale}")
    policy = policies.random(vocab, horizon, table, eos, scale, g)
    return policy, policies.random(vocab, horizon, ref_table or table, eos, scale, g)


def distance(a, b):
    """‖a − b‖/‖b‖."""
    return float((a - b).norm() / b.norm())


# %% [markdown]
# ## 1. One identity behind everything
#
# Let $d(y)$ be any estimate whose mean over $y\sim\pi$ is the divergence, for every $\pi$. Write the mean as a sum,
# $\mathrm{KL}=\sum_y\pi(y)\,d(y)$. Both factors depend on the parameters, so the product rule has two terms, and with
# $\nabla\pi=\pi\,\nabla\log\pi$
#
# $$\nabla\mathrm{KL}=\underbrace{\mathbb{E}_\pi[\nabla d]}_{\text{what autograd sees}}
# +\underbrace{\mathbb{E}_\pi[\,d\,\nabla\log\pi(y)\,]}_{\text{what it does not}} .$$
#
# The samples enter a program as constants, so differentiating an estimate as a loss gives the first term only. Which
# share of the gradient that is depends on $d$, although all of these $d$ have the same mean:
#
# | $d(y)$ | $\mathbb{E}[\nabla d]$ | so the dropped term is |
# |---|---|---|
# | $\sum_t\ell_t$ ($k_1$) | $0$ | everything |
# | $\sum_t k_3(\ell_t)$ | $F_{\mathrm{tok}}$ (§3 below) | $R_{\mathrm{seq}}-F_{\mathrm{tok}}$ |
# | $k_3(\sum_t\ell_t)$, of the whole sequence | $F_{\mathrm{seq}}$ | $R_{\mathrm{seq}}-F_{\mathrm{seq}}$ |
# | $\sum_tD_t$, from the full vocabulary | $R_{\mathrm{tok}}$ | $R_{\mathrm{seq}}-R_{\mathrm{tok}}$ |
#
# $k_2$ is not in the table: its mean is not the KL. It follows $R_{\mathrm{tok}}$ for another reason, that
# $\nabla k_2=\ell\,\nabla\log\pi$ token by token; by the same step $k_2$ of the whole sequence follows
# $R_{\mathrm{seq}}$.
#
# The cell checks all of it on sequences that end with an EOS token, by enumeration.

# %%
policy, ref = pair("decomposition", 0, 4, 1.0, eos=0)
ESTIMATES = {
    "k1": lambda r, full, m: (k1(r) * m).sum(1),
    "k3": lambda r, full, m: (k3(r) * m).sum(1),
    "k3 of the sequence": lambda r, full, m: k3((r * m).sum(1)),
    "full vocabulary": lambda r, full, m: (full * m).sum(1),
}


def term(name, which):
    """E[∇d] or E[d ∇log π], exactly."""

    def loss(logp, ref_logp, mask, behavior_logp, logits, ref_logits):
        p, q = logits.log_softmax(2), ref_logits.log_softmax(2)
        d = ESTIMATES[name](logp - ref_logp, (p.exp() * (p - q)).sum(2), mask)
        return d.mean() if which == 1 else (d.detach() * (logp * mask).sum(1)).mean()

    return exact.expected_gradient(loss, policy, ref, stacked=True)


# %%
field = {f: exact.gradient(policy, ref, f) for f in ("R_seq", "F_seq", "R_tok", "F_tok")}
first = {
    "k1": 0 * field["R_seq"], "k3": field["F_tok"],
    "k3 of the sequence": field["F_seq"], "full vocabulary": field["R_tok"],
}  # fmt: skip
print(f"‖R_seq‖ = {field['R_seq'].norm():.4f}\n{'d':22s}‖E[∇d]‖  ‖E[d ∇log π]‖  ‖sum − R_seq‖/‖R_seq‖")
for name in ESTIMATES:
    a, b = term(name, 1), term(name, 2)
    print(f"{name:22s}{a.norm():8.4f}  {b.norm():14.4f}  {distance(a + b, field['R_seq']):.0e}")
    assert distance(a + b, field["R_seq"]) < 1e-12, name
    assert (a - first[name]).norm() < 1e-12 * field["R_seq"].norm(), name
whole_k2 = exact.expected_gradient(lambda p, q, m, b: k2(((p - q) * m).sum(1)).mean(), policy, ref, stacked=True)
assert distance(whole_k2, field["R_seq"]) < 1e-12

# %% [markdown]
# The two terms add up to $R_{\mathrm{seq}}$ whatever $d$ is, and they share it out very differently. None of these
# losses is wrong as an *estimate*; as a *loss* each keeps a part.
#
# ## 2. The terms that vanish, and the ones that don't
#
# Take $d=\sum_s\ell_s$. As $\mathbb{E}[\nabla d]=0$, the gradient is
#
# $$R_{\mathrm{seq}}=\mathbb{E}\Big[\sum_t\nabla\log\pi_t\sum_s\ell_s\Big]
# =\sum_t\sum_s\mathbb{E}[\nabla\log\pi_t\;\ell_s].$$
#
# For $s<t$, $\ell_s$ is a function of the prefix $y_{<t}$; given the prefix,
# $\mathbb{E}[\nabla\log\pi_t\mid y_{<t}]=\sum_v\nabla\pi(v\mid y_{<t})=\nabla 1=0$. So the terms below the diagonal
# vanish, and what remains is $\mathbb{E}\sum_t\nabla\log\pi_t\,G_t$: the cumulative estimator of the paper's §4.2.
# The diagonal $s=t$ alone is $R_{\mathrm{tok}}$, which is what $k_2$ or a per-token score function follows. The rest,
# $s>t$, is credit: token $t$ decides which contexts come later, and so what their log-ratios will be.

# %%
T = 5
policy, ref = pair("terms", 0, T, 1.0)


def cell_loss(t, s):
    return lambda logp, ref_logp, mask, behavior_logp: (logp[:, t] * (logp - ref_logp)[:, s].detach()).mean()


terms = torch.zeros(T, T, *policy.logits.shape, dtype=torch.float64)
for t, s in np.ndindex(T, T):
    terms[t, s] = exact.expected_gradient(cell_loss(t, s), policy, ref, stacked=True)
norms = terms.flatten(2).norm(dim=2)  # [t, s]
R_seq, R_tok = (exact.gradient(policy, ref, f) for f in ("R_seq", "R_tok"))
assert torch.tril(norms, -1).max() < 1e-13 * R_seq.norm()
assert distance(terms.sum((0, 1)), R_seq) < 1e-12 and distance(terms.diagonal().sum(2), R_tok) < 1e-12
keep(terms=norms.tolist())
print(f"largest s < t: {torch.tril(norms, -1).max():.0e}, smallest s ≥ t: {norms[norms > 1e-9].min():.3f}")

# %% [markdown]
# ## 3. The expectation of the token-level $k_3$ loss, in full
#
# The review of the paper asked for this derivation. The loss is $\sum_t k_3(\ell_t)$ with
# $k_3(\ell)=e^{-\ell}-1+\ell$ and $y\sim\pi$. One token of one sample gives
#
# $$\nabla k_3(\ell_t)=(1-e^{-\ell_t})\,\nabla\log\pi_t .$$
#
# Condition on the prefix; $y_t$ is drawn from $\pi(\cdot\mid y_{<t})$. The first part,
# $\mathbb{E}[\nabla\log\pi_t\mid y_{<t}]$, is zero as in §2. In the second, $e^{-\ell_t}=\pi_{\mathrm{ref}}/\pi$
# cancels the probability that $y_t$ was drawn with and puts $\pi_{\mathrm{ref}}$ in its place:
#
# $$-\sum_v\pi(v\mid y_{<t})\,\frac{\pi_{\mathrm{ref}}(v\mid y_{<t})}{\pi(v\mid y_{<t})}\,\nabla\log\pi(v\mid y_{<t})
# =-\mathbb{E}_{v\sim\pi_{\mathrm{ref}}(\cdot\mid y_{<t})}[\nabla\log\pi(v\mid y_{<t})]
# =\nabla\bar D_t .$$
#
# The prefix itself was drawn from $\pi$ and nothing has cancelled *its* probability. Averaging over it and summing,
#
# $$\mathbb{E}_\pi\Big[\nabla\sum_t k_3(\ell_t)\Big]
# =-\sum_t\mathbb{E}_{y_{<t}\sim\pi}\;
# \mathbb{E}_{v\sim\pi_{\mathrm{ref}}(\cdot\mid y_{<t})}[\nabla\log\pi(v\mid y_{<t})]
# =\sum_t\mathbb{E}_{y_{<t}\sim\pi}[\nabla\bar D_t]=F_{\mathrm{tok}} .$$
#
# It needs $\pi>0$ wherever $\pi_{\mathrm{ref}}>0$, or the cancellation misses tokens. Two things it is *not*:
#
# - not $F_{\mathrm{seq}}=-\mathbb{E}_{y\sim\pi_{\mathrm{ref}}}\sum_t\nabla\log\pi_t$: the prefixes come from the
#   policy and not from the reference. At one position there is no prefix and the two agree, which is why the
#   one-token analysis ("$k_3$ as a loss minimises the swapped KL") does not carry over to sequences as it stands;
# - not $\nabla\sum_t\mathbb{E}_{y_{<t}\sim\pi}[\bar D_t]$: that one would also differentiate the weight of each
#   prefix. §6 shows that no other objective can stand in for it.
#
# The check evaluates the last formula literally, as a sum over positions, prefixes and tokens.

# %%
policy, ref = pair("k3", 0, 4, 1.0)
tokens, _ = policies.sequences(vocab, 4)
z = policy.logits.clone().requires_grad_()
live = policies.Tabular(z, horizon=4)
prefix_weight = policy.token_logprobs(tokens).sum(1).exp()[:, None]  # Σ over continuations is the prefix's probability
inner = (ref.log_probs(tokens).exp() * live.log_probs(tokens)).sum(2)  # E_{v ~ π_ref}[log π(v | y_<t)]
by_hand = torch.autograd.grad(-(prefix_weight * inner).sum(), z)[0]
loss = exact.expected_gradient(lambda p, q, m, b: kl_loss("k3", p, q, m), policy, ref, stacked=True)
F_tok, F_seq, R_seq = (exact.gradient(policy, ref, f) for f in ("F_tok", "F_seq", "R_seq"))
assert distance(loss, by_hand) < 1e-12 and distance(F_tok, by_hand) < 1e-12
print(
    f"k3 as a loss: relative distance {distance(loss, F_tok):.0e} to F_tok, {distance(loss, F_seq):.2f} to F_seq, "
    f"{distance(loss, R_seq):.2f} to R_seq"
)
assert distance(loss, F_seq) > 0.1 and distance(loss, R_seq) > 0.1

# %% [markdown]
# ## 4. Error of each loss against the horizon
#
# The error is exact: the distance of the loss's *expected* gradient from $R_{\mathrm{seq}}$, relative to
# $\|R_{\mathrm{seq}}\|$. No number of samples removes it. Two kinds of policy: *full history* (a row of logits for
# each prefix: it remembers everything) and *bigram* (a row for each last token, used at every position: short memory,
# and parameters shared across positions as in a network).
#
# First, that each loss really has the expectation that its name in `klnb.ESTIMATORS` promises; then the curves.

# %%
NAMES = ("k1", "k2", "k3", "sequence", "reward-to-go", "reward-to-go-k3", "rao-blackwell")


def loss_of(name, group_size=None):
    if name == "rao-blackwell":
        return lambda logp, ref_logp, mask, behavior_logp, logits, ref_logits: kl_loss(
            name, logp, ref_logp, mask, group_size=group_size, logits=logits, ref_logits=ref_logits
        )
    return lambda logp, ref_logp, mask, behavior_logp: kl_loss(name, logp, ref_logp, mask, group_size=group_size)


def moments(name, policy, ref):
    """Probability of each sequence [M], gradient on it [M, D], mean gradient [D], variance (trace) of one sample."""
    weights, grads = exact.gradients(loss_of(name), policy, ref, stacked=True)
    grads = grads.flatten(1)
    mean = weights @ grads
    return weights, grads, mean, float(weights @ (grads - mean).square().sum(1))


# %%
RIGHT = NAMES[3:]
FIELD = {"k1": None, "k2": "R_tok", "k3": "F_tok"} | dict.fromkeys(RIGHT, "R_seq")
for table in ("full", "bigram"):
    for T in horizons[:4]:
        policy, ref = pair("horizon", 0, T, 1.0, table)
        size = exact.gradient(policy, ref, "R_seq").norm()
        for name in NAMES:
            want = exact.gradient(policy, ref, FIELD[name]) if FIELD[name] else torch.zeros_like(policy.logits)
            assert (moments(name, policy, ref)[2].view_as(want) - want).norm() < 1e-12 * size, (name, table, T)

error = {table: {name: np.zeros((pairs, len(horizons))) for name in ("k2", "k3")} for table in ("full", "bigram")}
for table, i, (h, T) in [(t, i, h) for t in error for i in range(pairs) for h in enumerate(horizons)]:
    policy, ref = pair("horizon", i, T, 1.0, table)
    R_seq = exact.gradient(policy, ref, "R_seq")
    for name in ("k2", "k3"):
        error[table][name][i, h] = distance(exact.gradient(policy, ref, FIELD[name]), R_seq)

# %%
keep(error={t: {n: v.tolist() for n, v in error[t].items()} for t in error})
for table in error:
    middle = {name: np.median(error[table][name], axis=0) for name in error[table]}
    for name in middle:
        print(f"{table}, {name}: medians by horizon", dict(zip(horizons, middle[name].round(2).tolist())))
        assert middle[name][[T > 1 for T in horizons]].min() > 0.1
    assert error[table]["k2"][:, [T == 1 for T in horizons]].max(initial=0) < 1e-12  # R_tok is R_seq at one position
    assert error[table]["k3"][:, [T == 1 for T in horizons]].min(initial=1) > 1e-3  # F_tok is not


# %%
def draw_terms(ax):
    """The table of norms of §2."""
    shown = np.where(np.tri(len(data["terms"]), k=-1) > 0, np.nan, np.array(data["terms"]))
    ax.imshow(shown, cmap="Greys", vmin=0, vmax=1.3 * np.nanmax(shown))
    for t, s in np.ndindex(shown.shape):
        dark = shown[t, s] > 0.6 * np.nanmax(shown)
        ax.text(s, t, "0" if s < t else f"{shown[t, s]:.2f}".lstrip("0"), ha="center", va="center", fontsize=9,
                  color="#666666" if s < t else "white" if dark else "black")  # fmt: skip
    ticks = {"ticks": range(len(shown)), "labels": range(1, len(shown) + 1)}
    ax.set_xticks(**ticks), ax.set_yticks(**ticks), ax.grid(False)
    ax.set(xlabel="log-ratio at s", ylabel="score at t")
    ax.set_title(r"norm of $\mathrm{E}[\nabla\log\pi_t\,\ell_s]$")


# %%
caption = base | {
    "title": "What token-level losses leave out",
    "quantity": "Left: norm of the expectation of score times log-ratio for each pair of positions, exactly 0 below "
    "the diagonal; the diagonal alone is R_tok. Right: ‖E[∇loss] − R_seq‖/‖R_seq‖ by horizon; k1 is 1 and the right "
    "forms of §5 are 0, exactly",
    "setting": f"V = {vocab}, fixed length, policy and reference with N(0, 1) logits; left full-history tables with "
    f"T = {len(data['terms'])}; right full-history (solid) and bigram tables (dashed)",
    "seeds": f"{seed}, pairs 0 to {pairs - 1}", "n": f"1 pair left, {pairs} pairs a point right",
    "centre": "median over pairs", "band": "quartiles over pairs, full-history tables only; each pair's value is exact",
    "alt": "A triangular table of norms with zeros below the diagonal, and error against horizon: k1 at 1, k3 around "
    "two thirds, k2 from 0 at one token to about a half, the right forms at 0",
}  # fmt: skip

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(figs.WIDTH, 3.5), width_ratios=(1, 1.35))
draw_terms(left)
for name, table in (("k2", "full"), ("k2", "bigram"), ("k3", "full"), ("k3", "bigram")):
    low, centre, high = np.quantile(data["error"][table][name], (0.25, 0.5, 0.75), axis=0)
    kw = figs.look(name) | {"label": f"{name}, {table}", "linestyle": "-" if table == "full" else "--"}
    if table == "full":
        right.fill_between(horizons, low, high, color=kw["color"], alpha=0.15, linewidth=0)
    right.plot(horizons, centre, **kw)
right.plot(horizons, np.ones(len(horizons)), **figs.look("k1") | {"label": "k1"})
right.plot(horizons, np.zeros(len(horizons)), **figs.look("reward-to-go") | {"label": "the forms of §5"})
right.set(xlabel="horizon T", xticks=horizons, ylim=(-0.04, None), ylabel=r"relative distance from $R_{\mathrm{seq}}$")
right.set_title("error of the expected gradient")
figs.label_ends(right)
figs.save(fig, "05_gradient_error", caption, figure_dir)

# %% [markdown]
# The error of $k_2$ is the missing upper triangle: nothing at $T=1$, a good part of the gradient a few tokens later.
# It then levels off in these tables, whose tokens influence the next few positions most; with the bigram's short
# memory it stays smaller. It depends on how far a choice reaches, not on the length as such. $k_3$ has the error of
# the swapped divergence from the first token on, and the same missing triangle on top.
#
# ## 5. Variance of the estimators that are right
#
# Five forms have expectation $R_{\mathrm{seq}}$. Per completion,
#
# | estimator | gradient of one completion |
# |---|---|
# | whole sequence (App. B) | $\sum_t\nabla\log\pi_t\cdot\sum_s\ell_s$ |
# | reward-to-go (§4.2) | $\sum_t\nabla\log\pi_t\;G_t$: the vanishing terms of §2 left out |
# | leave-one-out | $\sum_t\nabla\log\pi_t\,(G_t-b_t)$, $b_t$ the mean $G_t$ of the other completions of the prompt |
# | $k_3$ done right | $\sum_t[\nabla k_3(\ell_t)+\nabla\log\pi_t\sum_{s\ge t}k_3(\ell_s)]$: both terms of §1 |
# | Rao–Blackwell | $\sum_t[\nabla D_t+\nabla\log\pi_t\,G_{t+1}]$: both terms of §1, with $d=\sum_tD_t$ |
#
# **Leave-one-out, exactly, for any group.** Write $s_t=\nabla\log\pi_t$, $C_t$ for what the baseline averages ($G_t$,
# or $G_{t+1}$ for Rao–Blackwell) and $a$ for the gradient of a completion without baseline, so that completion $i$
# contributes $u_i=a_i-\sum_t b_{it}s_{it}$ with $b_{it}=\frac1{n-1}\sum_{j\ne i}C_{jt}$. As $b_i$ is independent of
# completion $i$ and $\mathbb{E}[s_t]=0$, the mean of $u_i$ is that of $a_i$: no bias. For the second moments,
# $\mathbb{E}[b_tb_{t'}]=\bar C_t\bar C_{t'}+\mathrm{Cov}(C_t,C_{t'})/(n-1)$, $\mathbb{E}[s_t\cdot s_{t'}]=0$ for
# $t\ne t'$, and in $\mathbb{E}[u_i\cdot u_j]$ only the parts of $b_i$ from $j$ and of $b_j$ from $i$ are left. With
# $M_{tt'}=\mathbb{E}[s_tC_{t'}]$ and $m=\mathbb{E}[a]$, the variance of the mean of $n$ completions, times $n$, is
#
# $$\mathbb{E}\Big\|a-\sum_t\bar C_ts_t\Big\|^2-\|m\|^2
# +\frac1{n-1}\Big(\sum_t\mathrm{Var}(C_t)\,\mathbb{E}\|s_t\|^2+\sum_{t,t'}M_{tt'}\cdot M_{t't}\Big).$$
#
# The first part is the variance with the exact means $\bar C_t$ as constant baselines; the rest is the price of
# estimating them from $n-1$ others. The next cell is this formula; it is then compared with a brute enumeration of
# groups of two and three.


# %%
def scores(policy, tokens):
    """s_t = ∇log π_t of each token, [sequences, T, D]: one-hot minus probabilities in the row it was drawn from."""
    rows = policy.rows(tokens)
    step = torch.nn.functional.one_hot(tokens, policy.vocab) - policy.logits.softmax(1)[rows]
    out = torch.zeros(*tokens.shape, *policy.logits.shape, dtype=torch.float64)
    return out.scatter_(2, rows[:, :, None, None].expand(-1, -1, 1, policy.vocab), step.unsqueeze(2)).flatten(2)


# %%
def leave_one_out(name, policy, ref, n):
    """Variance per completion (n times that of a group's mean) with the leave-one-out baseline: the formula above."""
    weights, grads, mean, _ = moments(name, policy, ref)
    tokens, _ = policies.sequences(policy.vocab, policy.horizon)
    score = scores(policy, tokens)
    ratio = policy.token_logprobs(tokens) - ref.token_logprobs(tokens)
    C = ratio.flip(1).cumsum(1).flip(1) - (ratio if name == "rao-blackwell" else 0)
    mean_C = weights @ C
    exact_mean = weights @ (grads - torch.einsum("t,mtd->md", mean_C, score)).square().sum(1) - mean.square().sum()
    M = torch.einsum("m,mtd,mu->tud", weights, score, C)
    spread = (weights @ (C - mean_C).square() * (weights @ score.square().sum(2))).sum()
    return float(exact_mean + (spread + (M * M.transpose(0, 1)).sum()) / (n - 1))


# %%
for name in ("reward-to-go", "rao-blackwell"):
    policy, ref = pair("leave-one-out", 0, 2, 1.0, "bigram")
    for n in (2, 3):
        brute = exact.gradient_covariance(loss_of(name, n), policy, ref, batch_size=n, stacked=True).trace() * n
        print(f"{name}, n = {n}: formula {leave_one_out(name, policy, ref, n):.6f}, all groups enumerated {brute:.6f}")
        assert abs(leave_one_out(name, policy, ref, n) / float(brute) - 1) < 1e-10

# %% [markdown]
# "Completions needed" below is the variance of one completion's gradient over $\|R_{\mathrm{seq}}\|^2$: with so many
# completions, noise and signal are of one size. (At $T=1$ Rao–Blackwell has no variance at all, so the curves start
# at 2.)

# %%
LOO = ("reward-to-go", "rao-blackwell")
CURVES = [*RIGHT, *(f"{name} + leave-one-out" for name in LOO)]
lengths = [T for T in horizons if T > 1]
noise = {place: {c: np.zeros((pairs, len(lengths))) for c in CURVES} for place in ("near", "far")}
for (place, scale), i, (h, T) in [
    (p, i, h) for p in (("near", near), ("far", far)) for i in range(pairs) for h in enumerate(lengths)
]:
    policy, ref = pair("horizon", i, T, scale, "bigram")
    signal = float(exact.gradient(policy, ref, "R_seq").square().sum())
    for name in RIGHT:
        noise[place][name][i, h] = moments(name, policy, ref)[3] / signal
    for name in LOO:
        noise[place][f"{name} + leave-one-out"][i, h] = leave_one_out(name, policy, ref, group) / signal

# %%
keep(noise={p: {c: v.tolist() for c, v in noise[p].items()} for p in noise})
less = {}  # share of all cases (pairs and horizons) in which the first has less variance than the second
for p in noise:
    print(f"{p}, medians at T = {lengths[-1]}:", {c: float(f"{np.median(v[:, -1]):.3g}") for c, v in noise[p].items()})
    for a, b in (("reward-to-go", "sequence"), ("reward-to-go-k3", "reward-to-go"), ("rao-blackwell", "reward-to-go"),
                 ("reward-to-go + leave-one-out", "reward-to-go"), (CURVES[-1], "rao-blackwell")):  # fmt: skip
        less[p, a] = np.mean(noise[p][a] < noise[p][b])
        print(f"  {a} below {b}: {less[p, a]:.0%}")
assert less["near", "reward-to-go-k3"] == 1 and less["far", "reward-to-go-k3"] < 0.5
assert min(less[p, "reward-to-go"] for p in noise) > 0.5
assert less["near", CURVES[-2]] < 0.2 and less["far", CURVES[-1]] > 0.7
assert less["near", "rao-blackwell"] > 0.8 and less["far", "rao-blackwell"] > 0.6
assert np.median(noise["far"][CURVES[-1]][:, -1]) == min(np.median(v[:, -1]) for v in noise["far"].values())

# %%
caption = base | {
    "title": "Variance of the right estimators against the horizon",
    "quantity": "Exact variance (trace) of the gradient of one completion over ‖R_seq‖²: the number of completions "
    f"whose mean has noise as large as the signal; leave-one-out with groups of {group}, n times the variance of the "
    "group's mean",
    "setting": f"V = {vocab}, bigram policy and reference, N(0, scale²) logits, fixed length; log scale",
    "seeds": f"{seed}, pairs 0 to {pairs - 1}", "n": f"{pairs} pairs a point", "centre": "median over pairs",
    "band": "quartiles over pairs, for whole sequence and k3 done right only (the others' would cover each other)",
    "alt": "Two panels of variance against horizon. Near the reference k3 done right is lowest; far from it, it is "
    "the highest or close to it, and Rao–Blackwell with leave-one-out is lowest",
}  # fmt: skip

# %%
TEXT = {"sequence": "whole sequence", "reward-to-go-k3": "k3 done right", "rao-blackwell": "Rao–Blackwell"}


def draw_noise(ax, place):
    """A median over pairs for each curve; quartiles for two of them."""
    for c in CURVES:
        name, loo = c.split(" + ")[0], "+" in c
        low, centre, high = np.quantile(data["noise"][place][c], (0.25, 0.5, 0.75), axis=0)
        text = TEXT.get(name, name) + (", leave-one-out" if loo else "")
        kw = figs.look(name) | {"label": text, "linestyle": (0, (1, 1.2)) if loo else "-"}
        if name in ("sequence", "reward-to-go-k3"):
            ax.fill_between(lengths, low, high, color=kw["color"], alpha=0.15, linewidth=0)
        ax.plot(lengths, centre, **kw)


# %%
fig, axes = plt.subplots(1, 2, figsize=(figs.WIDTH, 4.3), sharey=True)
for ax, place, scale in zip(axes, ("near", "far"), (near, far)):
    draw_noise(ax, place)
    ax.set(yscale="log", xlabel="horizon T", xticks=lengths, ylim=(1, 100), title=f"{place} (logit scale {scale})")
axes[0].set_ylabel("completions for noise = signal")
axes[0].set_yticks((1, 2, 5, 10, 20, 50, 100), labels=("1", "2", "5", "10", "20", "50", "100"))
axes[0].minorticks_off(), axes[1].minorticks_off()
handles, labels = axes[0].get_legend_handles_labels()
fig.legend(handles, labels, loc="outside lower center", ncols=2)
figs.save(fig, "05_variance", caption, figure_dir)

# %% [markdown]
# Three things to read. (1) Reward-to-go beats the whole sequence in nearly every case and costs nothing. (2) A
# baseline estimated from a few other completions pays only where the reward-to-go is large beside its own spread.
# Near $\pi_{\mathrm{ref}}$ the KL is of second order in the distance and the spread of $\ell$ of first order, so
# there is little mean to subtract and its estimate adds noise; far away it removes much of the variance. (3) $k_3$
# done right changes sides.
#
# ### The crossover of $k_3$
#
# Why it changes sides: $k_3\ge 0$ is of second order in $\ell$, so near $\pi_{\mathrm{ref}}$ both of its terms are
# small where $\ell$ itself still fluctuates at first order. But $e^{-\ell}=\pi_{\mathrm{ref}}/\pi$ has the second
# moment $\mathbb{E}_\pi[(\pi_{\mathrm{ref}}/\pi)^2]=\sum\pi_{\mathrm{ref}}^2/\pi$, which has no bound: one token that
# the reference likes and the policy almost never draws is enough.

# %%
ratio = {name: np.zeros((len(scales), crossover_pairs)) for name in ("reward-to-go-k3", "rao-blackwell")}
distances = np.zeros((len(scales), crossover_pairs))
for (j, scale), i in [(s, i) for s in enumerate(scales) for i in range(crossover_pairs)]:
    policy, ref = pair("crossover", i, 3, scale)
    distances[j, i] = exact.kl(policy, ref)
    plain = moments("reward-to-go", policy, ref)[3]
    for name in ratio:
        ratio[name][j, i] = moments(name, policy, ref)[3] / plain
keep(crossover={"kl": distances.tolist(), **{n: v.tolist() for n, v in ratio.items()}})

# %%
for j, scale in enumerate(scales):
    k, rb = ratio["reward-to-go-k3"][j], ratio["rao-blackwell"][j]
    print(f"scale {scale}: median KL {np.median(distances[j]):.2f}; variance over reward-to-go's: k3 done right median "
          f"{np.median(k):.2f}, 90% {np.quantile(k, 0.9):.3g}, less in {np.mean(k < 1):.0%}; Rao–Blackwell median "
          f"{np.median(rb):.2f}, less in {np.mean(rb < 1):.0%}")  # fmt: skip
    assert scale > 0.5 or np.median(k) < 0.6
    assert scale < 1.5 or np.median(k) > 1.5
assert (np.diff(np.median(ratio["reward-to-go-k3"], axis=1)) > 0).all()

# %%
caption = base | {
    "title": "A right way to use k3, and where it stops paying",
    "quantity": "Exact variance (trace) of one completion's gradient, divided by that of reward-to-go on the same pair",
    "setting": f"V = {vocab}, T = 3, full-history policy and reference, N(0, scale²) logits, scales {scales}; log axes",
    "seeds": f"{seed}, pairs 0 to {crossover_pairs - 1}", "n": f"{crossover_pairs} pairs a scale, each a dot",
    "centre": "circles: medians over the pairs of one scale, both coordinates (the tails are heavy)",
    "band": "none: every pair is shown",
    "alt": "Variance ratio against KL. k3 done right rises from about a half near the reference through 1 to ten and "
    "far more; Rao–Blackwell stays below 1 almost everywhere",
}  # fmt: skip

# %%
fig, ax = plt.subplots(figsize=(figs.WIDTH, 4.0))
ax.axhline(1, color="black", linewidth=1)
x = np.array(data["crossover"]["kl"])
for k, name in enumerate(ratio):
    y, color = np.array(data["crossover"][name]), figs.COLORS[name]
    ax.text(0.02, 0.93 - 0.07 * k, TEXT[name], color=color, transform=ax.transAxes)
    ax.scatter(x, y, s=7, color=color, alpha=0.4, linewidths=0)
    ax.plot(np.median(x, 1), np.median(y, 1), "o-", color=color, markeredgecolor="black", markersize=8)
for scale, place in zip(scales, np.median(x, 1)):
    ax.text(place, 0.13, f"scale {scale:g}" if scale == scales[0] else f"{scale:g}", ha="center", fontsize=9)
ax.set(xscale="log", yscale="log", xlabel=r"KL$(\pi\,\|\,\pi_{\mathrm{ref}})$, nats", ylim=(0.1, None))
ax.set_ylabel("variance relative to reward-to-go")
ax.text(0.045, 1.1, "more than reward-to-go above this line, less below", fontsize=9)
figs.save(fig, "05_crossover", caption, figure_dir)

# %% [markdown]
# So: correct everywhere, the better choice near $\pi_{\mathrm{ref}}$, a bad one far from it, with a heavy tail (the
# printed 90% quantiles). A policy in training does not announce which side it is on. Rao–Blackwell needs the full
# vocabulary's log-probs and is the safer way to less variance; it isn't less in every case, as the printed shares
# say.
#
# ## 6. $R_{\mathrm{tok}}$ and $F_{\mathrm{tok}}$ have no objective
#
# A smooth field is the gradient of some function only if its Jacobian $J_{ij}=\partial f_i/\partial\theta_j$ is
# symmetric. For a full-history table the proof that it isn't takes three lines.
#
# 1. Let $\theta_q$ be the logits after a prefix $q$ of at least one token. There the field is
#    $f_q=\pi(q)\,\nabla_{\theta_q}D_q$, with $\pi(q)$ the probability of reaching $q$ and $D_q$ the next token's
#    divergence there ($D_t$ or $\bar D_t$).
# 2. Let $\theta_p$ be the logits after the empty prefix. They change $\pi(q)$, so
#    $\partial f_q/\partial\theta_p=\nabla_{\theta_q}D_q\,(\nabla_{\theta_p}\pi(q))^\top\ne 0$ wherever
#    $\nabla_{\theta_q}D_q\neq0$.
# 3. But $f_p=\nabla_{\theta_p}D_p$ has nothing of $\theta_q$ in it: $\partial f_p/\partial\theta_q=0$. Not symmetric.
#
# $R_{\mathrm{seq}}$ escapes as $f_p$ then holds the credit for what follows $p$, which depends on $\theta_q$ in just
# the right way. Exceptions, in which there *is* an objective: $T=1$; policy and reference both independent of the
# prefix, at fixed length (then $R_{\mathrm{tok}}=R_{\mathrm{seq}}$, $F_{\mathrm{tok}}=F_{\mathrm{seq}}$); and a fixed
# buffer, where prefixes come from a $\mu$ that does not move and the field is the gradient of
# $\sum_t\mathbb{E}_{y_{<t}\sim\mu}[D]$. Near $\pi_{\mathrm{ref}}$, $\nabla D_q=O(\delta)$ while $J=O(1)$, so the curl
# fades in proportion to the distance $\delta$.
#
# Measured as $\|J-J^\top\|/\|J\|$, which is 0 for a gradient and at most 2.

# %%
curls = {f: [] for f in ("R_seq", "R_tok", "F_tok")}
for f, T in [(f, T) for f in curls for T in curl_horizons]:
    curls[f].append([exact.curl(*pair("curl", i, T, 1.0), f) for i in range(curl_pairs)])
keep(curl=curls)
for f in curls:
    print(f, "median by horizon:", {T: float(f"{np.median(c):.2g}") for T, c in zip(curl_horizons, curls[f])})
assert np.max(curls["R_seq"]) < 1e-14
for f in ("R_tok", "F_tok"):
    assert all(np.max(c) < 1e-14 if T == 1 else np.min(c) > 0.05 for T, c in zip(curl_horizons, curls[f]))
    assert (np.diff(np.median(curls[f], axis=1)) > 0).all()

# %%
mu = pair("curl mu", 0, 3, 1.0)[0]
CASES = {
    "one token": pair("curl", 0, 1, 1.0) + (None,),
    "both prefix-independent": pair("curl", 0, 3, 1.0, "free") + (None,),
    "fixed buffer": pair("curl", 0, 3, 1.0) + (mu,),
    "only the policy prefix-independent": pair("curl", 0, 3, 1.0, "free", "full") + (None,),
    "bigram": pair("curl", 0, 3, 1.0, "bigram") + (None,),
    "full history": pair("curl", 0, 3, 1.0) + (None,),
}

# %%
cases = {}
for f in ("R_tok", "F_tok"):
    cases[f] = {case: exact.curl(p, r, f if m is None else f"{f}_mu", m) for case, (p, r, m) in CASES.items()}
keep(cases=cases)
for f, by_case in data["cases"].items():
    for k, (case, c) in enumerate(by_case.items()):
        assert c < 1e-14 if k < 3 else c > 0.05, (f, case, c)

# %%
policy, ref = pair("curl", 0, 3, 1.0)
deltas = [1.0, 0.3, 0.1, 0.03, 0.01]
at = [policies.Tabular(ref.logits + d * policy.logits, horizon=3) for d in deltas]
keep(near={"delta": deltas, **{f: [exact.curl(p, ref, f) for p in at] for f in ("R_tok", "F_tok")}})
for f in ("R_tok", "F_tok"):
    assert abs(data["near"][f][-1] / data["near"][f][-3] * 10 - 1) < 0.1  # proportional to δ

# %% [markdown]
# What no objective means: walk once around a closed loop in parameter space and add up field · step. For a gradient
# this is the change of its objective, so it returns to 0. For $R_{\mathrm{tok}}$ it does not: in one of the two
# directions the way round is downhill on balance, and ends where it began.

# %%
policy, ref = pair("curl", 0, 2, 1.0)
J = exact.jacobian(policy, ref, "R_tok")
u, _, _ = torch.linalg.svd(J - J.T)  # the plane in which R_tok turns fastest
e1, e2 = u[:, 0], (J - J.T) @ u[:, 0]
e2 = e2 / e2.norm()
angle = torch.linspace(0, 2 * torch.pi, loop_points + 1, dtype=torch.float64)
path = policy.logits.flatten() + torch.cos(angle)[:, None] * e1 + torch.sin(angle)[:, None] * e2  # radius 1
loop = [policies.Tabular(z.view_as(policy.logits), horizon=2) for z in path]

# %%
work = {}
for f in ("R_seq", "R_tok", "F_tok"):
    g = torch.stack([exact.gradient(p, ref, f).flatten() for p in loop])
    steps = ((g[1:] + g[:-1]) / 2 * path.diff(dim=0)).sum(1)
    work[f] = [0.0, *steps.cumsum(0).tolist()]
    print(f"{f}: work around the loop {work[f][-1]:.1g}")
keep(loop={"angle": angle.tolist(), **work})
change = torch.stack([exact.kl(p, ref) for p in loop]) - exact.kl(loop[0], ref)
assert (torch.tensor(work["R_seq"]) - change).abs().max() < 1e-3 and abs(work["R_seq"][-1]) < 1e-10
assert min(abs(work[f][-1]) for f in ("R_tok", "F_tok")) > 0.05


# %%
def draw_exceptions(c, d):
    """Curl where there is an objective and where there isn't, and near the reference."""
    for f, mark in (("R_tok", "o"), ("F_tok", "s")):
        values = np.maximum(list(data["cases"][f].values()), 1e-17)
        c.plot(
            values, np.arange(len(values)) + (0.12 if f == "R_tok" else -0.12), mark, color=figs.COLORS[f], markersize=5
        )
        d.plot(data["near"]["delta"], data["near"][f], mark + "-", color=figs.COLORS[f], markersize=4)
    c.set_yticks(
        range(len(CASES)),
        [case.replace("only the policy ", "only the policy\n").replace("both ", "both\n") for case in CASES],
    )
    c.set(xscale="log", xlim=(1e-17, 10), xlabel="curl (1e−17: exactly 0)", title="exceptions")
    d.set(xscale="log", yscale="log", xlabel=r"distance $\delta$ of the logits from $\pi_{\mathrm{ref}}$",
          ylabel="curl", title=r"fades near $\pi_{\mathrm{ref}}$")  # fmt: skip


# %%
caption = base | {
    "title": "Token-level fields are not the gradient of anything",
    "quantity": "Top left: work ∮ field · dθ along a circle of radius 1 in the plane in which R_tok turns fastest. "
    "Elsewhere: ‖J − Jᵀ‖/‖J‖ of the field's Jacobian, 0 for a gradient",
    "setting": f"V = {vocab}, N(0, 1) logits; top left T = 2, {loop_points} steps; top right full-history tables; "
    "bottom T = 3 (but one token), bottom right policy logits = reference logits + δ · N(0, 1)",
    "seeds": f"{seed}, pairs 0 to {curl_pairs - 1}", "n": f"top right {curl_pairs} pairs a point, else 1 pair",
    "centre": "top right: median over pairs", "band": "top right: quartiles over pairs; all values exact, none sampled",
    "alt": "Four panels. The work of R_seq returns to 0 after a closed loop, that of R_tok and F_tok does not; the "
    "curl grows with the horizon; it is zero to rounding in three special cases; it is proportional to the distance "
    "from the reference",
}  # fmt: skip

# %%
fig, ((a, b), (c, d)) = plt.subplots(2, 2, figsize=(figs.WIDTH, 6.0))
for f in ("R_seq", "R_tok", "F_tok"):
    a.plot(np.array(data["loop"]["angle"]) / (2 * np.pi), data["loop"][f], **figs.look(f))
    low, mid, high = np.quantile(data["curl"][f], (0.25, 0.5, 0.75), axis=1)
    b.fill_between(curl_horizons, low, high, color=figs.COLORS[f], alpha=0.15, linewidth=0)
    b.plot(curl_horizons, mid, **figs.look(f), marker="o", markersize=4)
a.axhline(0, color="black", linewidth=0.8)
a.set(xlabel="share of the closed loop walked", ylabel="work of the field so far", title="around a loop")
b.set(xlabel="horizon T", xticks=curl_horizons, ylabel=r"curl  $\|J-J^T\|\,/\,\|J\|$", title="grows with the horizon")
draw_exceptions(c, d)
figs.label_ends(a)
figs.label_ends(b)
figs.save(fig, "05_curl", caption, figure_dir)

# %% [markdown]
# Both exceptions at one token and for prefix-independent policies are what one-token analyses see; language models
# are neither. A policy alone that ignores its prefix doesn't help, the reference must too.
#
# ## 7. Where a policy of limited capacity settles
#
# A full-history table can reach $\pi_{\mathrm{ref}}$, where all fields vanish. A bigram policy against a full-history
# reference cannot; there it matters what the field is. Each field is followed exactly: gradient descent on the logits
# from the uniform policy, all instances as one batch.


# %%
def divergences(z, rows, tokens, log_ref, field):
    """KL(π‖π_ref), KL(π_ref‖π) and what to differentiate for a field, for each instance."""
    index = tokens.expand(len(z), -1, -1).unsqueeze(3)
    logp = z.log_softmax(2)[:, rows]  # [instances, sequences, T, V]
    seq, seq_ref = (x.gather(3, index).squeeze(3).sum(2) for x in (logp, log_ref))
    target, swapped = (seq.exp() * (seq - seq_ref)).sum(1), (seq_ref.exp() * (seq_ref - seq)).sum(1)
    p, q = (logp, log_ref) if field[0] == "R" else (log_ref, logp)
    token = (seq.detach().exp() * (p.exp() * (p - q)).sum((2, 3))).sum(1)  # prefixes from π, held fixed
    return target, swapped, {"R_seq": target, "F_seq": swapped}.get(field, token)


# %%
def flow(rows, tokens, log_ref, field):
    """Descent along a field: KL(π‖π_ref), KL(π_ref‖π) [steps, instances], the last logits, the last field's norms."""
    z, track = torch.zeros(len(log_ref), int(rows.max()) + 1, log_ref.shape[-1], dtype=torch.float64), []
    for _ in range(flow_steps + 1):
        z = z.detach().requires_grad_()
        target, swapped, objective = divergences(z, rows, tokens, log_ref, field)
        grad = torch.autograd.grad(objective.sum(), z)[0]
        track.append((target.detach(), swapped.detach()))
        z = z - flow_step * grad
    return *(torch.stack(x) for x in zip(*track)), z.detach(), grad.flatten(1).norm(dim=1)


# %%
FIELDS = ("R_seq", "R_tok", "F_tok", "F_seq")
g = [generator(seed, f"05 fixed point {i}") for i in range(instances)]
refs = [policies.random(flow_vocab, 4, "full", scale=far, generator=x) for x in g]
tokens, _ = policies.sequences(flow_vocab, 4)
log_ref = torch.stack([r.log_probs(tokens) for r in refs])
bigram = policies.Tabular(torch.zeros(flow_vocab + 1, flow_vocab, dtype=torch.float64), "bigram", horizon=4)
runs = {f: flow(bigram.rows(tokens), tokens, log_ref, f) for f in FIELDS}
keep(flow={f: {"target": runs[f][0].T.tolist(), "swapped_end": runs[f][1][-1].tolist()} for f in FIELDS})
for f in FIELDS:  # the batched field is the oracle's
    end = policies.Tabular(runs[f][2][0], "bigram", horizon=4)
    assert abs(exact.gradient(end, refs[0], f).norm() - runs[f][3][0]) < 0.01 * (runs[f][3][0] + 0.1)

# %%
end = {f: runs[f][0][-1] for f in FIELDS}
print(f"{instances} instances, after {flow_steps} steps of {flow_step} from uniform logits")
for f in FIELDS:
    moved = (runs[f][0][-1] - runs[f][0][flow_steps // 2]).abs().max()
    print(
        f"{f}: KL(π‖π_ref) median {end[f].median():.3f}, {(end[f] / end['R_seq']).median():.2f} times R_seq's; "
        f"KL(π_ref‖π) median {runs[f][1][-1].median():.3f}; moved in the last half by at most {moved:.3f}; "
        f"‖field‖ ≤ {runs[f][3].max():.0e}"
    )
    assert f == "R_seq" or bool((end["R_seq"] < end[f]).all())  # lowest in every instance
    assert f == "F_seq" or bool((runs["F_seq"][1][-1] < runs[f][1][-1]).all())  # and F_seq in the swapped divergence
swaps = int((end["R_tok"] > end["F_tok"]).sum())
print(f"R_tok ends above F_tok in {swaps} of {instances}")

# %%
full = policies.random(3, 3, generator=generator(seed, "05 full table"))
tokens3, _ = policies.sequences(3, 3)
for f in ("R_seq", "R_tok", "F_tok"):
    track = flow(full.rows(tokens3), tokens3, full.log_probs(tokens3)[None], f)[0].flatten()
    print(f"full-history table under {f}: KL(π‖π_ref) from {track[0]:.2f} to {track[-1]:.0e}")
    assert track[-1] < 0.01 * track[0]


# %%
def draw_flow(left):
    """KL over descent: each reference thin, the median thick."""
    time = flow_step * np.arange(flow_steps + 1)
    for f in ("R_seq", "R_tok", "F_tok"):
        runs_f = np.array(data["flow"][f]["target"])
        left.plot(time[1:], runs_f[:, 1:].T, color=figs.COLORS[f], linewidth=0.5, alpha=0.5)
        left.plot(time[1:], np.median(runs_f, axis=0)[1:], **figs.look(f))
    left.set(xscale="log", yscale="log", xlabel="step size × steps")
    left.set_ylabel(r"KL$(\pi\,\|\,\pi_{\mathrm{ref}})$, nats")
    left.set_yticks((0.1, 0.2, 0.5, 1, 2, 5, 10), labels=("0.1", "0.2", "0.5", "1", "2", "5", "10"))
    left.minorticks_off()


# %%
caption = base | {
    "title": "Where a bigram policy settles under each field",
    "quantity": "KL(π‖π_ref) over sequences along exact gradient descent, and its end value over that of R_seq on "
    "the same reference",
    "setting": f"V = {flow_vocab}, T = 4, bigram policy from uniform logits, full-history references with N(0, "
    f"{far}²) logits, {flow_steps} steps of {flow_step}; log axes left",
    "seeds": f"{seed}, references 0 to {instances - 1}", "n": f"{instances} references",
    "centre": "thick: median over references",
    "band": "none: every reference is a thin line (left) or a dot joined by a grey line (right)",
    "alt": "KL falls and levels off under three fields, lowest under R_seq in every instance; the end values of "
    "R_tok and F_tok are up to several times higher",
}  # fmt: skip

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(figs.WIDTH, 3.6), width_ratios=(1.5, 1))
draw_flow(left)
figs.label_ends(left)
ends = np.array([np.array(data["flow"][f]["target"])[:, -1] for f in ("R_seq", "R_tok", "F_tok")])
right.plot(range(3), ends / ends[0], color="#999999", linewidth=0.7)
for k, f in enumerate(("R_seq", "R_tok", "F_tok")):
    right.plot(np.full(instances, k), ends[k] / ends[0], "o", color=figs.COLORS[f], markersize=5)
right.set_xticks(range(3), [figs.LABELS[f] for f in ("R_seq", "R_tok", "F_tok")])
right.set(yscale="log", xlim=(-0.3, 2.3))
right.set_ylabel(r"end KL$(\pi\,\|\,\pi_{\mathrm{ref}})$ over that of $R_{\mathrm{seq}}$")
right.set_yticks((1, 2, 4, 8), labels=("1", "2", "4", "8"))
right.minorticks_off()
figs.save(fig, "05_fixed_points", caption, figure_dir)

# %% [markdown]
# $R_{\mathrm{seq}}$ is lowest in each instance, as it must be where descent finds the minimum. The other two settle
# where *their* field vanishes, which is no minimum of anything. Nothing orders those two: the printed count is what
# happened here. And $F_{\mathrm{tok}}$ does not reach the least swapped divergence either: $F_{\mathrm{seq}}$ does.
#
# ## 8. Dividing by a length
#
# All of this holds for a *sum* over tokens, averaged over completions. Lengths vary once there is an EOS, and then
# two common divisors change the field.
#
# **Mean over each completion's own length $L(y)$.** For $k_1$ as a loss, with
# $\sum_t\nabla\log\pi_t=\nabla\log\pi(y)$,
#
# $$\mathbb{E}_\pi\Big[\frac{1}{L}\sum_t\nabla\ell_t\Big]
# =\mathbb{E}_\pi\Big[\frac{1}{L(y)}\nabla\log\pi(y)\Big]=\nabla\,\mathbb{E}_\pi[1/L].$$
#
# A loss that did nothing now pushes on length and on nothing else: descent lowers $\mathbb{E}[1/L]$, so answers get
# *longer*. The reference has dropped out altogether. In every other loss the same factor $1/L$ tilts the weights
# between short and long completions.
#
# **Mean over all tokens of a batch.** With per-completion gradients $g_i$, $\sum_ig_i/\sum_iL_i$ is a ratio of two
# means. As $N\to\infty$ it tends to $\mathbb{E}[g]/\mathbb{E}[L]$, the right direction at another scale. At finite
# $N$ numerator and denominator are correlated, and the bias is of order $1/N$. Exactly, with $S_{N-1}$ the sum of the
# others' lengths (independent of $y_1$, its distribution a convolution),
#
# $$\mathbb{E}\Big[\frac{\sum_ig_i}{\sum_iL_i}\Big]=N\,\mathbb{E}\Big[\frac{g_1}{L_1+S_{N-1}}\Big].$$

# %%
policy, ref = pair("length", 0, 5, 1.0, "full", eos=0)
_, mask = policies.sequences(vocab, 5, 0)
lengths_of = mask.sum(1).long()


def token_mean(name, n):
    """The exact expectation, [D], of the gradient of a loss divided by the tokens in a batch of n completions."""
    weights, grads, _, _ = moments(name, policy, ref)
    law = np.bincount(lengths_of, weights=weights)  # probability of each length
    others = np.ones(1)
    for _ in range(n - 1):
        others = np.convolve(others, law)
    inverse = torch.tensor([others @ (1 / (L + np.arange(len(others)))) for L in range(1, len(law))])
    return n * (weights * inverse[lengths_of - 1]) @ grads


# %%
def by_length(p, q, m, b):
    return (k1(p - q) * m).sum(1).div(m.sum(1)).mean()


push = exact.expected_gradient(by_length, policy, ref, stacked=True)
inverse_length = exact.length_gradient(policy, inverse=True)
print(f"k1 over its length: relative distance to ∇E[1/L] {distance(push, inverse_length):.0e}, norm {push.norm():.3f}")
assert distance(push, inverse_length) < 1e-12

# %%
mean_length = float(moments("k1", policy, ref)[0] @ lengths_of.double())
bias = {}
for name in ("k2", "k3", "reward-to-go"):
    limit = moments(name, policy, ref)[2] / mean_length
    bias[name] = [distance(token_mean(name, n), limit) for n in batch_sizes]
    print(f"{name}: relative bias of the token mean", dict(zip(batch_sizes, np.round(bias[name], 4).tolist())))
    if batch_sizes[-1] == 2 * batch_sizes[-2] >= 64:
        assert abs(bias[name][-2] / bias[name][-1] - 2) < 0.1  # order 1/N
keep(bias=bias)
brute = exact.expected_gradient(lambda p, q, m, b: (k2(p - q) * m).sum() / m.sum(), policy, ref, batch_size=2)
assert distance(token_mean("k2", 2), brute.flatten()) < 1e-12  # all batches of two, enumerated


# %%
def descend(loss):
    """E[L] along exact descent on a loss."""
    z, track = policy.logits.clone(), []
    for _ in range(length_steps + 1):
        now = policies.Tabular(z, horizon=5, eos=0)
        weights, grads = exact.gradients(loss, now, ref, stacked=True)
        track.append(float(weights @ mask.sum(1)))
        z = z - (weights @ grads.flatten(1)).view_as(z)
    return track


own = descend(by_length)
summed = descend(lambda p, q, m, b: (k1(p - q) * m).sum(1).mean())
keep(length={"divided by own length": own, "summed": summed})
print(f"E[L] from {own[0]:.3f} to {own[-1]:.3f} on k1 divided by own length, to {summed[-1]:.3f} on k1 summed")
assert own[-1] > own[0] + 0.5 and abs(summed[-1] - summed[0]) < 1e-9

# %%
caption = base | {
    "title": "What a division by length does",
    "quantity": "Left: mean length E[L] along descent on k1, summed and divided by each completion's length. Right: "
    "‖E[token mean] − field/E[L]‖/‖field/E[L]‖ by batch size",
    "setting": f"V = {vocab}, EOS is one of the tokens, at most 5 tokens, one full-history pair with N(0, 1) logits; "
    "exact expectations",
    "seeds": seed, "n": 1, "centre": "the exact value", "band": "none: nothing is sampled",
    "alt": "Mean length climbs towards the limit when k1 is divided by the length and stays constant when summed; "
    "the bias of a mean over the tokens of a batch falls as one over the batch size",
}  # fmt: skip

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(figs.WIDTH, 3.3))
for how, style in (("divided by own length", "-"), ("summed", ":")):
    left.plot(data["length"][how], color=figs.COLORS["k1"], linestyle=style)
    y = data["length"][how][-1]
    left.text(length_steps, y + 0.06, f"k1 {how}", ha="right", va="bottom", fontsize=9)
left.set(xlabel="exact gradient steps (size 1)", ylabel="mean length, tokens", ylim=(1, 5.4))
for name in ("k2", "k3", "reward-to-go"):
    right.plot(batch_sizes, data["bias"][name], **figs.look(name) | {"label": name})
right.plot(
    batch_sizes, data["bias"]["k2"][-1] * batch_sizes[-1] / np.array(batch_sizes), color="#777777", linewidth=0.8
)
right.text(8, data["bias"]["k2"][-1] * batch_sizes[-1] / 16, "∝ 1/N", color="#666666", ha="right", va="top", fontsize=9)
right.set(xscale="log", yscale="log", xlabel="completions in the batch N", ylabel="relative bias of the token mean")
figs.label_ends(right, gap=0.08)
figs.save(fig, "05_aggregation", caption, figure_dir)

# %% [markdown]
# ## Summary
#
# - Differentiating an unbiased estimate $d$ leaves out $\mathbb{E}[d\,\nabla\log\pi]$. With both terms every unbiased
#   $d$ is right, $k_3$ included.
# - Token-level $k_2$ follows $R_{\mathrm{tok}}$ and token-level $k_3$ follows $F_{\mathrm{tok}}$, at every horizon.
#   Both drop the credit of a token for what follows, and neither has an objective once $T\ge2$.
# - Of the right forms reward-to-go is the plain choice and Rao–Blackwell usually has less variance. A leave-one-out
#   baseline pays far from $\pi_{\mathrm{ref}}$ and costs a little near it; $k_3$ done right is the other way
#   round, with heavy tails.
# - With limited capacity the fields settle in different places; only $R_{\mathrm{seq}}$ settles lowest in
#   KL($\pi\,\|\,\pi_{\mathrm{ref}}$).
# - Sum over tokens. A mean over each completion's length turns $k_1$ into a push towards longer answers.
#
# Next: [06_off_policy](06_off_policy), what becomes of all this when the rollouts are stale.
