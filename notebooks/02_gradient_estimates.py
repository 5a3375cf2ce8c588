# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What each loss really differentiates
#
# **Claim.** Differentiated as losses, k1 has expected gradient zero and k3 that of the *swapped* divergence
# $\mathrm{KL}(\pi_{\mathrm{ref}}\,\|\,\pi)$; no number of samples mends that. k2, the biased value, has the right
# gradient at one position: it is the score-function estimator.
#
# This works through Eqs. 2 and 3 and Appendices A and B of Tang & Munos
# ([arXiv 2506.09477](https://arxiv.org/abs/2506.09477)) for one position: every gradient estimator's error and bias
# against the number of samples, with the closed form beside the samples. Runs in seconds.

# %%
import json

import matplotlib.pyplot as plt
import numpy as np
import torch

from klnb import figures as fg
from klnb.exact import expected_gradient, gradient, gradient_covariance
from klnb.losses import kl_loss
from klnb.paths import ROOT
from klnb.policies import Tabular
from klnb.stats import generator

# %% tags=["parameters"]
seed = 0
actions = 100  # size of the vocabulary
near = 0.3  # distance of the logits of π from those of π_ref: the standard deviation of their difference
far = 2.0
sizes = [2, 8, 32, 128, 512, 2048, 8192, 32768]  # samples per gradient
repeats = 2000  # gradients per size
pairs_drawn = 1000  # random pairs on which the leave-one-out baseline is judged
results = "results"
figures = "figures"

# %%
fg.style()
RESULTS, FIGURES = ROOT / results, ROOT / figures
SCALES = {"near": near, "far": far}
print(f"{seed=} {actions=} {near=} {far=} {sizes=} {repeats=} {pairs_drawn=}")

# %% [markdown]
# ## Two terms, of which a loss keeps one
#
# For any estimate $d(y)$ with $\mathbb{E}_\pi[d]=\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$, differentiate the sum
# $\sum_y\pi(y)\,d(y)$ by the product rule and use $\nabla\pi=\pi\nabla\log\pi$:
#
# $$
# \nabla\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})=\underbrace{\mathbb{E}_\pi[\nabla d]}_{\text{what autograd sees}}
# +\underbrace{\mathbb{E}_\pi[d\,\nabla\log\pi]}_{\text{how the samples move}} .
# $$
#
# The samples are data: autograd does not know that they came from $\pi$. So $d$ as a loss keeps the first term only.
# Write again $\ell=\log\pi-\log\pi_{\mathrm{ref}}$ and $r=e^{-\ell}$; $\nabla\ell=\nabla\log\pi$ as
# $\pi_{\mathrm{ref}}$ is frozen.
#
# - $\nabla k_1=\nabla\log\pi$, with expectation $\sum_y\nabla\pi(y)=\nabla 1=0$ (Eq. 2).
# - $\nabla k_2=\ell\,\nabla\log\pi$. That is the second term for $d=k_1$, whose first term has just vanished. So its
#   expectation is $\nabla\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$.
# - $\nabla k_3=(1-r)\,\nabla\log\pi$. Its expectation is $-\mathbb{E}_\pi[r\,\nabla\log\pi]=
#   -\mathbb{E}_{\pi_{\mathrm{ref}}}[\nabla\log\pi]=\nabla\mathrm{KL}(\pi_{\mathrm{ref}}\,\|\,\pi)$ (Eq. 3): the weight
#   $r$ turns samples of $\pi$ into samples of $\pi_{\mathrm{ref}}$, and $\log\pi$ is all of that divergence that
#   depends on $\pi$.
#
# By hand, for $\pi=(0.7,0.3)$ and
# $\pi_{\mathrm{ref}}=(0.5,0.5)$ with softmax logits $z$, where $\partial\log\pi(y)/\partial z_a=1[a=y]-\pi(a)$:
# the first component of $\mathbb{E}[\ell\,\nabla\log\pi]$ is $0.7\cdot0.3\,(\log1.4-\log0.6)=0.1779$, and that of
# $\nabla\mathrm{KL}(\pi_{\mathrm{ref}}\,\|\,\pi)=\pi-\pi_{\mathrm{ref}}$ is $0.2$.


# %%
def loss(name, group_size=None):
    """kl_loss in the form that klnb.exact takes."""
    return lambda logp, ref_logp, mask, behavior_logp: kl_loss(name, logp, ref_logp, mask, group_size=group_size)


two = [Tabular(torch.tensor([p]).double().log(), horizon=1) for p in ([0.7, 0.3], [0.5, 0.5])]
for name, expected in {"k1": 0.0, "k2": 0.1779, "k3": 0.2}.items():
    g = expected_gradient(loss(name), *two)[0]
    print(f"E[∇{name}] = ({g[0]:+.4f}, {g[1]:+.4f})")
    assert abs(g[0] - expected) < 5e-5 and abs(g.sum()) < 1e-15

# %% [markdown]
# ## One estimator with five names
#
# Adding the missing term to k3 gives a right way to use it:
# $\nabla k_3+k_3\nabla\log\pi=(1-r+r-1+\ell)\,\nabla\log\pi=\ell\,\nabla\log\pi$. At one position that is k2 again,
# *sample by sample*; so is the score function $\ell\,\nabla\log\pi$, for the token, the sequence or the reward-to-go.
# (For sequences they part: [chapter 5](05_sequences).) Check on a batch of log-probs:

# %%
logp, ref_logp = -torch.rand(2, 64, 1, dtype=torch.float64, generator=generator(seed, "02 log-probs")) * 5
logp.requires_grad_()
names = ["k2", "score", "sequence", "reward-to-go", "reward-to-go-k3"]
same = torch.stack([torch.autograd.grad(kl_loss(name, logp, ref_logp), logp)[0] for name in names])
print("largest difference between the five gradients:", f"{(same - same[0]).abs().max():.1e}")
assert (same - same[0]).abs().max() < 1e-13 * same.abs().max()

# %% [markdown]
# ## The estimators in closed form
#
# All gradients here have the form $\hat g=\frac1n\sum_i c_i\,s(y_i)$ with $s(y)=\nabla\log\pi(y)=e_y-\pi$ and a
# coefficient $c$: $1$, $\ell$ and $1-r$ for k1, k2 and k3. With a **leave-one-out** baseline, each sample's $\ell_i$
# is compared with the mean of some value $v$ (k1, or k3) over the *other* samples,
# $c_i=\ell_i-\frac{1}{n-1}\sum_{j\ne i}v_j$. The baseline does not depend on $y_i$ and $\mathbb{E}[s]=0$, so the
# expectation stays. For $v=\ell$ the estimator is the sample covariance of $\ell$ and $\nabla\log\pi$.


# %%
def policies(scale):
    """π and π_ref, one position: the pairs of chapter 1."""
    ref, direction = torch.randn(2, 1, actions, dtype=torch.float64, generator=generator(seed, "01 pair"))
    return Tabular(ref + scale * direction, horizon=1), Tabular(ref, horizon=1)


def probs_and_ratio(pi, ref):
    """π and ℓ, each [V]."""
    return pi.logits.softmax(1)[0], (pi.logits.log_softmax(1) - ref.logits.log_softmax(1))[0]


def coefficients(probs, ell):
    """name -> (c, v): coefficient of each action, and the value whose leave-one-out mean is the baseline."""
    k3 = torch.expm1(-ell) + ell
    return {"k1": (torch.ones_like(ell), None), "k2": (ell, None), "k3": (-torch.expm1(-ell), None),
            "reward-to-go": (ell, ell), "reward-to-go-k3": (ell, k3)}  # fmt: skip


def mean_gradient(weights, probs):
    """Σ_a weights(a)·(e_a − π) over the last axis."""
    return weights - weights.sum(-1, keepdim=True) * probs


# %% [markdown]
# Expectation and total variance (the trace of the covariance). Without a baseline the samples are independent, so it
# is $(\mathbb{E}[c^2\|s\|^2]-\|g\|^2)/n$ with $g=\mathbb{E}[c\,s]$. With one, $\hat g$ is a mean over ordered pairs of
# $(\ell_i-v_j)\,s_i$, the same as one over pairs of the symmetric
# $h_{ij}=\tfrac12[(\ell_i-v_j)s_i+(\ell_j-v_i)s_j]$: a U-statistic. Two pairs are correlated only if they share one
# sample or both, so with $h_1(i)=\mathbb{E}_j[h_{ij}]=\tfrac12[(\ell_i-\mathrm{KL})s_i+g]$
#
# $$
# \mathrm{Var}(\hat g)=\frac{4(n-2)\,\mathrm{Var}(h_1)+2\,\mathrm{Var}(h)}{n(n-1)}
# \;\approx\;\frac1n\mathrm{Var}\big((\ell-\mathrm{KL})\,s\big).
# $$
#
# Only $\mathrm{Var}(h)$ knows $v$: which value serves as the baseline matters for small groups alone.


# %%
def moments(name, probs, ell):
    """(expected gradient [V], function n -> total variance of the mean over n samples)."""
    c, v = coefficients(probs, ell)[name]
    g = mean_gradient(probs * c, probs)
    dot = torch.eye(actions).double() - probs[:, None] - probs[None, :] + probs @ probs  # s_i·s_j
    size = dot.diagonal()
    if v is None:
        one = ((probs * c**2 * size).sum() - g @ g).item()
        return g, lambda n: one / n
    var1 = ((probs * (c - probs @ c) ** 2 * size).sum() - g @ g) / 4
    a = c[:, None] - v[None, :]
    square = (a**2 * size[:, None] + a.T**2 * size[None, :] + 2 * a * a.T * dot) / 4
    var2 = probs @ square @ probs - g @ g
    return g, lambda n: ((4 * (n - 2) * var1 + 2 * var2) / (n * (n - 1))).item()


# %% [markdown]
# **Check** against the library: `klnb.exact` enumerates all batches of one sample (of two, where there is a baseline)
# and differentiates `kl_loss` on each. Expectation and variance must be the formulas', and the expectations must be
# the fields that the table names: zero, $\nabla\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$ (`R_seq`) and
# $\nabla\mathrm{KL}(\pi_{\mathrm{ref}}\,\|\,\pi)$ (`F_seq`), exactly.

# %%
FOLLOWS = {"k1": None, "k2": "R_seq", "k3": "F_seq", "reward-to-go": "R_seq", "reward-to-go-k3": "R_seq"}
exact = {}
for where, scale in SCALES.items():
    pi, ref = policies(scale)
    target = gradient(pi, ref, "R_seq")[0]
    for name, field in FOLLOWS.items():
        n = 2 if "reward" in name else 1
        g, var = exact[where, name] = moments(name, *probs_and_ratio(pi, ref))
        fn = loss(name, n if n > 1 else None)
        library = expected_gradient(fn, pi, ref, batch_size=n, stacked=True)[0]
        variance = gradient_covariance(fn, pi, ref, batch_size=n, stacked=True).trace()
        named = gradient(pi, ref, field)[0] if field else torch.zeros_like(g)
        assert max((g - library).norm(), (g - named).norm()) < 1e-12 * target.norm()
        assert abs(var(n) - variance) < 1e-10 * variance
print("closed form, library and named field agree for", ", ".join(FOLLOWS))

# %% [markdown]
# How far the gradient of the swapped divergence is from the one that was meant, and how far $\mathbb{E}[\nabla k_3]$
# is from the swapped one:

# %%
for where, scale in SCALES.items():
    pi, ref = policies(scale)
    right, swapped, k3 = gradient(pi, ref, "R_seq")[0], gradient(pi, ref, "F_seq")[0], exact[where, "k3"][0]
    cosine, length = (right @ swapped / (right.norm() * swapped.norm())).item(), (swapped.norm() / right.norm()).item()
    print(f"{where}: ‖E[∇k3] − ∇KL(π_ref‖π)‖/‖∇KL(π_ref‖π)‖ = {(k3 - swapped).norm() / swapped.norm():.1e}; "
          f"∇KL(π_ref‖π) against ∇KL(π‖π_ref): cosine {cosine:.3f}, length × {length:.2f}, "
          f"relative distance {(swapped - right).norm() / right.norm():.2f}")  # fmt: skip

# %% [markdown]
# ## The same from samples
#
# As in [chapter 1](01_value_estimates), a mean over $n$ samples needs only how often each action came up.


# %%
def sampled_gradients(rng, probs, c, v, n):
    """`repeats` independent mean gradients over n samples each, [repeats, V]."""
    counts = torch.from_numpy(rng.multinomial(n, probs.numpy(), size=repeats)).double()
    if v is not None:  # the mean of v over the other n − 1 samples, seen from a sample of each action
        c = c - ((counts @ v)[:, None] - v) / (n - 1)
    return mean_gradient(counts * c / n, probs)


# %%
rows, kls = [], {}
for where, scale in SCALES.items():
    pi, ref = policies(scale)
    probs, ell = probs_and_ratio(pi, ref)
    right, kls[where] = gradient(pi, ref, "R_seq")[0], (probs * ell).sum().item()
    for name, (c, v) in coefficients(probs, ell).items():
        rng = np.random.default_rng(generator(seed, f"02 samples {where} {name}").initial_seed())
        g, var = exact[where, name]
        for n in sizes:
            found = sampled_gradients(rng, probs, c, v, n)
            error = ((found - right) ** 2).sum(1)
            rows.append({"where": where, "name": name, "n": n, "mse": error.mean().item(), "se": error.std().item(),
                         "mse_exact": ((g - right) @ (g - right)).item() + var(n), "variance": var(n),
                         "bias": (found.mean(0) - right).norm().item(), "bias_exact": (g - right).norm().item(),
                         "right": right.norm().item()})  # fmt: skip

# %% [markdown]
# **Check.** Measured errors against $\|\mathbb{E}[\hat g]-\nabla\mathrm{KL}\|^2+\mathrm{Var}(\hat g)$, in standard
# errors. Far from $\pi_{\mathrm{ref}}$ a few rare actions carry the variance of k3, and the draws can miss them, so
# there a standard error from the sample means nothing; what uses k3 is left out there (its closed form was checked
# exactly above). Six standard errors: with a normal law for the mean, a false alarm in ten million runs.

# %%
kept = [r for r in rows if r["where"] == "near" or "k3" not in r["name"]]
z = np.array([(r["mse"] - r["mse_exact"]) / r["se"] * repeats**0.5 for r in kept])
print(f"{len(z)} measured errors, largest deviation {abs(z).max():.2f} standard errors")
assert abs(z).max() < 6
# the mean over all repeats leaves √(variance/repeats) of noise on average; its norm exceeds 3 times that very rarely
excess = [(r["bias"] - r["bias_exact"]) / (r["variance"] / repeats) ** 0.5 for r in rows]
print(f"largest excess of a measured bias over the exact one: {max(excess):.2f} times the noise")
assert max(excess) < 3

# %%
last = {(r["where"], r["name"]): r for r in rows if r["n"] == sizes[-1]}
gains, pairs = {}, {}
for w in SCALES:
    error = {name: last[w, name]["mse_exact"] for name in FOLLOWS}
    assert error["k1"] > last[w, "k1"]["right"] ** 2  # worse than a gradient of zero
    assert error["k3"] > 10 * max(error["k2"], error["reward-to-go"])
    gains[w] = last[w, "k2"]["variance"] / last[w, "reward-to-go"]["variance"]
    pairs[w] = exact[w, "reward-to-go"][1](2) / exact[w, "reward-to-go-k3"][1](2)
    print(f"{w}: a leave-one-out baseline divides the variance by {gains[w]:.3f} at n = {sizes[-1]}; in pairs, n = 2, "
          f"k3 in place of k1 as its value divides it by {pairs[w]:.3g}")  # fmt: skip
assert pairs["near"] > 1 > pairs["far"]

# %% [markdown]
# In groups of two the baseline is one other sample: a quiet one (k3 near $\pi_{\mathrm{ref}}$) helps and a noisy one
# (k3 far away) hurts. In large groups the choice makes no difference, both are then the KL itself.
#
# **A baseline does not always help**, and on the far pair here it does not. With a constant $b$ the variance is
# $\frac1n(\mathbb{E}[(\ell-b)^2\|s\|^2]-\|g\|^2)$, a parabola in $b$ with its lowest point at
# $b^\ast=\mathbb{E}[\ell\|s\|^2]/\mathbb{E}[\|s\|^2]$. So $b=\mathrm{KL}$ is better than none exactly where
# $b^\ast>\frac12\mathrm{KL}$, which fails where one action has most of the probability: there $\ell$ is large and
# $\|s\|$ small. How often, over random pairs:

# %%
share = []
for scale in (0.1, near, 1.0, far, 3.0):
    ref, direction = torch.randn(2, pairs_drawn, actions, dtype=torch.float64, generator=generator(seed, "02 pairs"))
    probs, ell = (ref + scale * direction).softmax(1), (ref + scale * direction).log_softmax(1) - ref.log_softmax(1)
    kl, size = (probs * ell).sum(1), 1 - 2 * probs + (probs**2).sum(1, keepdim=True)
    norm2 = (mean_gradient(probs * ell, probs) ** 2).sum(1)
    without, with_kl = [(probs * (ell - b[:, None]) ** 2 * size).sum(1) - norm2 for b in (0 * kl, kl)]
    best = (probs * ell * size).sum(1) / (probs * size).sum(1)
    assert torch.equal(best > kl / 2, with_kl < without)
    q = np.quantile(without / with_kl, [0.05, 0.5, 0.95])
    share.append({"scale": scale, "kl": kl.median().item(), "share": (with_kl < without).double().mean().item(),
                  "q05": q[0], "median": q[1], "q95": q[2]})  # fmt: skip
    print("logit distance {scale}, median KL {kl:.3f}: helps in {share:.1%} of the pairs; variance divided by "
          "{median:.3f} (5% to 95%: {q05:.2f} to {q95:.2f})".format(**share[-1]))  # fmt: skip
assert all(row["share"] > 0.5 and row["median"] > 1 for row in share)

# %% [markdown]
# ## The data, then the figure

# %%
data = {"kl": kls, "gradients": rows, "leave_one_out_gain": gains, "leave_one_out_share": share,
        "k3_baseline_gain_in_pairs": pairs}  # fmt: skip
RESULTS.mkdir(parents=True, exist_ok=True)
(RESULTS / "02_gradient_estimates.json").write_text(json.dumps(data, indent=1) + "\n")
LABELS = {"k1": "k1 as a loss", "k3": "k3 as a loss", "k2": "k2 as a loss = score function = k3 done right",
          "reward-to-go": "… with leave-one-out (k1)", "reward-to-go-k3": "… with leave-one-out (k3)"}  # fmt: skip


# %%
def panel(ax, where, quantity):
    """Relative error (squared) or relative bias: closed form as lines, samples as points."""
    power, x = (2 if quantity == "mse" else 1), np.geomspace(sizes[0], sizes[-1], 100)
    for (name, label), marker in zip(LABELS.items(), "oDsv^"):
        own = [r for r in data["gradients"] if r["where"] == where and r["name"] == name]
        g, var = exact[where, name]
        noise = np.array([var(n) for n in x])
        line = own[0]["bias_exact"] ** 2 + (noise if quantity == "mse" else noise / repeats)
        unit = own[0]["right"]
        ax.loglog(x, (line ** (power / 2)) / unit**power, **fg.look(name) | {"label": "_", "linestyle": "-"})
        ax.loglog([r["n"] for r in own], [r[quantity] / unit**power for r in own], marker, color=fg.COLORS[name],
                  markersize=5, markeredgecolor="white", markeredgewidth=0.6, label=label)  # fmt: skip
    ax.axhline(1, color="black", linewidth=0.8, linestyle=(0, (2, 2)), zorder=0)


# %%
caption = {
    "title": "k1 and k3 as losses keep a wrong gradient however many samples they get; k2 and the score function don't",
    "quantity": "top: mean squared distance of the sampled gradient from ∇KL(π‖π_ref), over its squared norm; bottom: "
                "distance of the mean of all sampled gradients from it, over its norm; against samples per gradient",
    "setting": f"{actions} actions, gradients in the logits; logits of π_ref N(0,1), those of π the same plus {near} "
               f"(near) or {far} (far) times N(0,1); KL(π‖π_ref) {kls['near']:.3g} and {kls['far']:.3g} nats; samples "
               "from π", "seeds": f"{seed} (one pair of policies)", "n": f"{repeats} gradients a point",
    "centre": "points: samples; lines: closed form (bottom: with the noise that a mean of all repeats keeps); dashed: "
              "a gradient of zero",
    "band": f"none; errors lie within {abs(z).max():.1f} standard errors of their lines (not tested: k3, far)",
    "scale": "tabular, one position", "device": "CPU", "dtype": "float64",
    "notebook": "notebooks/02_gradient_estimates.py",
    "alt": "Four log-log panels. The error of k1 flattens at 1 and that of k3 at its own bias, below 1; k2 and both "
           "leave-one-out variants fall as 1/n.",
}  # fmt: skip

# %%
fig, axes = plt.subplots(2, 2, figsize=(7, 6.2), sharex=True)
for ax, where in zip(axes.T, SCALES):
    panel(ax[0], where, "mse")
    panel(ax[1], where, "bias")
    ax[0].set_title(f"{where}: KL = {data['kl'][where]:.2g} nats")
    ax[1].set_xlabel("samples $n$ per gradient")
axes[0, 0].text(sizes[-1], 0.75, "gradient of zero", va="top", ha="right", fontsize=9)
axes[0, 0].set_ylabel("relative mean squared error")
axes[1, 0].set_ylabel("relative bias, measured")
handles, labels = axes[0, 0].get_legend_handles_labels()
fig.legend(handles, labels, loc="outside upper center", ncols=2, handletextpad=0.2)
fg.save(fig, "02_gradient_estimates", caption, FIGURES)

# %% [markdown]
# ## Summary
#
# - **k1 as a loss is noise.** Its error never falls below that of a gradient of zero.
# - **k3 as a loss follows $\nabla\mathrm{KL}(\pi_{\mathrm{ref}}\,\|\,\pi)$,** exactly. Near $\pi_{\mathrm{ref}}$ that
#   is nearly the right gradient; far from it, it is not, and its noise is by far the largest.
# - **k2 as a loss is the score function** at one position, sample by sample, and so is k3 with its missing term. A
#   leave-one-out baseline never changes the expectation, and lowers the variance on most pairs, not on all.
# - With all logits at hand the gradient at one position needs no samples at all (`rao-blackwell` in `kl_loss`).
#
# What these gradients do when they are followed: [next](03_minimizing_kl).
