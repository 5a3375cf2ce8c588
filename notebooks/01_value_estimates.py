# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Three estimates of one number
#
# **Claim.** From samples of the policy, k1 and k3 are unbiased estimates of $\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$
# and k2 is not: its error stops falling at its own squared bias. Of the two unbiased ones, k3 has less variance near
# $\pi_{\mathrm{ref}}$ and more, without bound, where $\pi_{\mathrm{ref}}$ likes what $\pi$ hardly draws.
#
# This reproduces Figure 1 of Tang & Munos, *On a few pitfalls in KL divergence gradient estimation for RL*
# ([arXiv 2506.09477](https://arxiv.org/abs/2506.09477)), with every expectation in closed form beside the samples. It
# is about *values* only; that a good value makes no good gradient is the subject of the next chapter. Runs in seconds.

# %%
import json

import matplotlib.pyplot as plt
import numpy as np
import torch

from klnb import figures as fg
from klnb.estimators import k1, k2, k3
from klnb.paths import ROOT
from klnb.stats import generator

# %% tags=["parameters"]
seed = 0
actions = 100  # size of the vocabulary
near = 0.3  # distance of the logits of π from those of π_ref: the standard deviation of their difference
far = 2.0
sizes = [1, 4, 16, 64, 256, 1024, 4096, 16384, 65536]  # samples per estimate
repeats = 2000  # estimates per size
pairs = 200  # random pairs for the last figure
results = "results"
figures = "figures"

# %%
fg.style()
RESULTS, FIGURES = ROOT / results, ROOT / figures
ESTIMATES = {"k1": k1, "k2": k2, "k3": k3}
SCALES = {"near": near, "far": far}
print(f"{seed=} {actions=} {near=} {far=} {sizes=} {repeats=} {pairs=}")

# %% [markdown]
# ## The three estimates
#
# Write $\ell=\log\pi(y)-\log\pi_{\mathrm{ref}}(y)$ for the log-ratio of a sampled action $y\sim\pi$, and
# $r=e^{-\ell}=\pi_{\mathrm{ref}}(y)/\pi(y)$. Then
#
# $$
# k_1=\ell,\qquad k_2=\tfrac12\ell^2,\qquad k_3=r-1+\ell .
# $$
#
# - $\mathbb{E}_\pi[k_1]=\sum_y\pi(y)\,\ell(y)=\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$ by definition.
# - $\mathbb{E}_\pi[r]=\sum_y\pi(y)\,\pi_{\mathrm{ref}}(y)/\pi(y)=1$ where $\pi>0$ wherever $\pi_{\mathrm{ref}}>0$, so
#   $\mathbb{E}_\pi[k_3]=\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$ as well: k3 is k1 plus a term of mean zero.
# - $k_3=e^{-\ell}-1+\ell=\tfrac12\ell^2-\tfrac16\ell^3+\dots$, so k2 is the first term of a series whose sum is
#   unbiased. Its bias is $\mathbb{E}[k_2]-\mathrm{KL}=\tfrac16\mathbb{E}[\ell^3]-\tfrac1{24}\mathbb{E}[\ell^4]+\dots$,
#   small near $\pi_{\mathrm{ref}}$ and of either sign.
#
# Two actions, worked by hand: $\pi=(0.7,0.3)$, $\pi_{\mathrm{ref}}=(0.5,0.5)$ give
# $\mathrm{KL}=0.7\log1.4+0.3\log0.6=0.0823$ and
# $\mathbb{E}[k_2]=\tfrac12(0.7\log^2 1.4+0.3\log^2 0.6)=0.0788$.


# %%
def expectation(probs, x):
    """E over the last axis."""
    return (probs * x).sum(-1)


pi, ref = torch.tensor([0.7, 0.3]).double(), torch.tensor([0.5, 0.5]).double()
by_hand = {name: float(expectation(pi, k((pi / ref).log()))) for name, k in ESTIMATES.items()}
print(", ".join(f"E[{name}] = {value:.4f}" for name, value in by_hand.items()))
assert abs(by_hand["k1"] - 0.0823) < 5e-5 and abs(by_hand["k3"] - by_hand["k1"]) < 1e-15
assert abs(by_hand["k2"] - 0.0788) < 5e-5

# %% [markdown]
# ## Two policies, near and far
#
# The reference has independent $N(0,1)$ logits; the policy's logits are those plus *near* or *far* times one more
# $N(0,1)$ vector, the same for both.


# %%
def pair(scale, purpose="pair", count=1):
    """log π and log π_ref, [count, actions]: one reference and one direction, whatever the scale."""
    g = generator(seed, f"01 {purpose}")
    ref, direction = torch.randn(2, count, actions, dtype=torch.float64, generator=g)
    return (ref + scale * direction).log_softmax(-1), ref.log_softmax(-1)


def log_ratio(logp, ref_logp):
    return logp.exp(), logp - ref_logp


for where, scale in SCALES.items():
    probs, ell = log_ratio(*pair(scale))
    kl = expectation(probs, ell).item()
    print(f"{where}: KL(π‖π_ref) = {kl:.4f} nats, log-ratios from {ell.min():.2f} to {ell.max():.2f}")

# %% [markdown]
# ## Error of a mean over $n$ samples
#
# The mean $\hat k$ of $n$ independent samples has the bias $b$ of one sample and $1/n$ of its variance $\sigma^2$:
#
# $$
# \mathbb{E}\big[(\hat k-\mathrm{KL})^2\big]=b^2+\frac{\sigma^2}{n}.
# $$
#
# To say how far a measured error may lie from this line we also need the variance of $(\hat k-\mathrm{KL})^2$. With
# $e=\hat k-\mathbb{E}\hat k$, whose central moments are $m_2=\sigma^2/n$, $m_3=\mu_3/n^2$ and
# $m_4=\mu_4/n^3+3\sigma^4(n-1)/n^3$ ($\mu_3$, $\mu_4$ those of one sample),
# $\mathrm{Var}[(e+b)^2]=m_4+4b\,m_3+4b^2m_2-m_2^2$.


# %%
def error_of_mean(probs, x, target, n):
    """Mean and variance of (mean of n samples of x − target)²."""
    mean = expectation(probs, x)
    mu2, mu3, mu4 = (expectation(probs, (x - mean[..., None]) ** k) for k in (2, 3, 4))
    b, m2, m3, m4 = mean - target, mu2 / n, mu3 / n**2, (mu4 + 3 * mu2**2 * (n - 1)) / n**3
    return (b**2 + m2).item(), (m4 + 4 * b * m3 + 4 * b**2 * m2 - m2**2).item()


# %% [markdown]
# A mean over $n$ samples depends only on how often each action came up. So one multinomial draw of counts replaces
# $n$ draws of actions, exactly, and no loop over samples is needed.


# %%
def squared_errors(rng, probs, x, target, n):
    """(mean of n samples − target)², [repeats]: fresh samples in each repeat."""
    counts = torch.from_numpy(rng.multinomial(n, probs.numpy(), size=repeats))
    return (counts.double() @ x / n - target) ** 2


# %%
rows = []
for where, scale in SCALES.items():
    probs, ell = (x[0] for x in log_ratio(*pair(scale)))
    kl = expectation(probs, ell)
    for name, k in ESTIMATES.items():
        rng = np.random.default_rng(generator(seed, f"01 samples {where} {name}").initial_seed())
        for n in sizes:
            exact, spread = error_of_mean(probs, k(ell), kl, n)
            mse = squared_errors(rng, probs, k(ell), kl, n).mean().item()
            bias = (expectation(probs, k(ell)) - kl).item()
            rows.append({"where": where, "kl": kl.item(), "name": name, "n": n, "mse": mse, "exact": exact,
                         "bias": bias, "se": (spread / repeats) ** 0.5})  # fmt: skip

# %% [markdown]
# **Check.** The biases are exact: zero for k1 and k3, not for k2. And every measured error lies within five standard
# errors of the formula (with a normal law for the mean of the repeats, a false alarm once in 30,000 runs of the
# notebook).

# %%
z = np.array([(r["mse"] - r["exact"]) / r["se"] for r in rows])
print(f"{len(z)} measured errors, largest deviation {abs(z).max():.2f} standard errors")
assert abs(z).max() < 5
for where in SCALES:
    one = {r["name"]: r for r in rows if r["where"] == where and r["n"] == sizes[-1]}
    assert max(abs(one["k1"]["bias"]), abs(one["k3"]["bias"])) < 1e-12 < one["k2"]["bias"] ** 2
    share = one["k2"]["bias"] ** 2 / one["k2"]["exact"]
    print(f"{where}: bias of k2 {one['k2']['bias']:+.5f} = {one['k2']['bias'] / one['k2']['kl']:+.1%} of the KL; "
          f"its square is {share:.1%} of k2's error at n = {sizes[-1]}")  # fmt: skip
    assert share > 0.5

# %% [markdown]
# ## When k3 beats k1
#
# k3 is k1 plus $r-1$, a *control variate*: its mean is zero and near $\pi_{\mathrm{ref}}$ it nearly cancels $\ell$.
# Since $\mathbb{E}_\pi[r\,\ell]=-\mathrm{KL}(\pi_{\mathrm{ref}}\,\|\,\pi)$,
#
# $$
# \mathrm{Cov}(r,\ell)=\mathbb{E}[r\ell]-\mathbb{E}[\ell]=-J,\qquad
# J=\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})+\mathrm{KL}(\pi_{\mathrm{ref}}\,\|\,\pi),
# $$
#
# and with $\chi^2=\mathrm{Var}(r)=\sum_y\pi_{\mathrm{ref}}^2/\pi-1$,
#
# $$
# \mathrm{Var}(k_3)=\mathrm{Var}(k_1)+\chi^2-2J .
# $$
#
# So k3 is the better of the two **exactly where $\chi^2<2J$**. Near $\pi_{\mathrm{ref}}$, $\chi^2\approx J$ and it
# wins. $\chi^2$ grows with the ratio $r$ itself and $J$ with its log, so k3 loses, without bound, once
# $\pi_{\mathrm{ref}}$ likes something that $\pi$ hardly draws. Random pairs far apart have such an action; a policy
# that only adds what $\pi_{\mathrm{ref}}$ lacks does not.


# %%
def variances(probs, ell):
    """Var(k1), Var(k3), χ², J, each [count]."""
    kl, r = expectation(probs, ell), (-ell).exp()
    var = [expectation(probs, (k(ell) - kl[:, None]) ** 2) for k in (k1, k3)]
    return *var, expectation(probs, r**2) - 1, kl - expectation(probs, r * ell)


for where, scale in SCALES.items():
    var1, var3, chi2, jeffreys = (x.item() for x in variances(*log_ratio(*pair(scale))))
    assert abs(var3 - (var1 + chi2 - 2 * jeffreys)) < 1e-10 * (var1 + var3)
    print(f"{where}: Var(k1) {var1:.4f}, Var(k3) {var3:.4f}, χ² {chi2:.3f}, 2J {2 * jeffreys:.3f}")
    assert (var3 < var1) == (chi2 < 2 * jeffreys) == (where == "near")

# %% [markdown]
# Over many random pairs, the ratio of the two variances against the KL:

# %%
grid = np.geomspace(0.1, 3.0, 25)
ratios, kls = [], []
for scale in grid:
    probs, ell = log_ratio(*pair(scale, "crossover", pairs))
    var1, var3, _, _ = variances(probs, ell)
    ratios.append((var3 / var1).numpy())
    kls.append(expectation(probs, ell).numpy())
low, middle, high = np.quantile(ratios, [0.05, 0.5, 0.95], axis=1)
kl_middle = np.median(kls, axis=1)
crossing = float(np.exp(np.interp(0, np.log(middle), np.log(kl_middle))))
for i in (0, -1):
    print(f"median of Var(k3)/Var(k1) at a KL of {kl_middle[i]:.4f}: {middle[i]:.4g}")
print(f"equal at a KL of {crossing:.2f}")
assert middle[0] < 0.1 and middle[-1] > 10

# %% [markdown]
# ## The data, then the figures

# %%
data = {
    "errors": rows,
    "crossover": {"kl": kl_middle.tolist(), "q05": low.tolist(), "median": middle.tolist(), "q95": high.tolist(),
                  "kl_at_1": crossing},
}  # fmt: skip
RESULTS.mkdir(parents=True, exist_ok=True)
(RESULTS / "01_value_estimates.json").write_text(json.dumps(data, indent=1) + "\n")
facts = {"device": "CPU", "dtype": "float64", "scale": "tabular, one position",
         "notebook": "notebooks/01_value_estimates.py"}  # fmt: skip


# %%
def panel(ax, where):
    """Closed form as lines, samples as points, one colour per estimate."""
    x = np.geomspace(sizes[0], sizes[-1], 200)
    for name, marker in zip(ESTIMATES, "osD"):
        own = [r for r in data["errors"] if r["where"] == where and r["name"] == name]
        line = own[0]["bias"] ** 2 + (own[0]["exact"] - own[0]["bias"] ** 2) * own[0]["n"] / x
        ax.loglog(x, line, **fg.look(name) | {"linestyle": "-", "label": name})
        ax.loglog([r["n"] for r in own], [r["mse"] for r in own], marker, color=fg.COLORS[name], markersize=5,
                  markeredgecolor="white", markeredgewidth=0.6)  # fmt: skip
    ax.set_xlabel("samples $n$ per estimate")
    ax.set_title(f"{where}: KL = {own[0]['kl']:.2g} nats")


def floor(ax, where, x, side):
    """The error that k2 keeps however many samples it gets."""
    bias = next(r["bias"] for r in data["errors"] if r["where"] == where and r["name"] == "k2")
    ax.axhline(bias**2, color=fg.COLORS["k2"], linewidth=0.9, linestyle=(0, (2, 2)))
    ax.text(x, bias**2 / 1.3, "squared bias of k2", color=fg.COLORS["k2"], va="top", ha=side, fontsize=9)


# %%
kls_shown = ", ".join(f"{w} {next(r['kl'] for r in rows if r['where'] == w):.3g}" for w in SCALES)
caption = facts | {
    "title": "k1 and k3 keep improving with more samples; k2 stops at its squared bias",
    "quantity": "mean squared error of the estimate of KL(π‖π_ref), nats², against samples per estimate; log-log",
    "setting": f"{actions} actions; logits of π_ref N(0,1), those of π the same plus {near} (near) or {far} (far) "
               f"times N(0,1); KL(π‖π_ref) {kls_shown} nats; samples from π",
    "seeds": f"{seed} (one pair of policies)", "n": f"{repeats} estimates a point",
    "centre": "points: mean over the estimates; lines: closed form, squared bias + variance/n; dashed: squared bias",
    "band": f"none; every point lies within {abs(z).max():.1f} standard errors of its line (far and at small n, that "
            "of k3 is large: rare actions carry its variance)",
    "alt": "Two log-log panels. Lines of k1 and k3 fall as 1/n throughout; k2 flattens at its squared bias, late in "
           "the near panel and at once in the far one. Near, k3 lies far below k1; far away, above it.",
}  # fmt: skip

# %%
fig, axes = plt.subplots(1, 2, figsize=(7, 3.6))
for ax, where, x, side in zip(axes, SCALES, (sizes[0], sizes[-1]), ("left", "right")):
    panel(ax, where)
    floor(ax, where, x, side)
    fg.label_ends(ax)
axes[0].set_ylabel("mean squared error, nats²")
fg.save(fig, "01_value_estimates", caption, FIGURES)

# %% [markdown]
# Near $\pi_{\mathrm{ref}}$ k2 and k3 are almost the same number, far less noisy than k1, and k2's bias is too small to
# matter at any affordable $n$. Far away k2 is wrong from the first sample on and k3 is the noisiest of the three. Its
# measured points at small $n$ lie *under* the line: the actions that carry its variance, rare under $\pi$ and common
# under $\pi_{\mathrm{ref}}$, mostly did not come up. In practice that makes k3 look better than it is: a log of k3
# seldom shows its own noise.

# %%
caption = facts | {
    "title": "k3 is the less noisy estimate near π_ref and the noisier one far from it",
    "quantity": "variance of k3 over variance of k1 for one sample from π, against KL(π‖π_ref); log-log",
    "setting": f"{actions} actions; logits of π_ref N(0,1), those of π the same plus {grid[0]:g} to {grid[-1]:g} times "
               "N(0,1); closed form",
    "seeds": seed, "n": f"{pairs} pairs of policies at each distance", "centre": "median over pairs",
    "band": "5% to 95% of the pairs (their range, not an interval of the median)",
    "alt": f"The ratio rises from {middle[0]:.2g} to {middle[-1]:.2g} and crosses 1 at a KL of {crossing:.2f} nats.",
}  # fmt: skip

# %%
fig, ax = plt.subplots(figsize=(7, 3.2))
cross, color = data["crossover"], fg.COLORS["k3"]
ax.fill_between(cross["kl"], cross["q05"], cross["q95"], color=color, alpha=0.2, linewidth=0)
ax.loglog(cross["kl"], cross["median"], color=color)
ax.axhline(1, color=fg.COLORS["k1"], linewidth=0.9)
ax.plot(cross["kl_at_1"], 1, "o", color=fg.COLORS["k1"], markersize=6)
ax.annotate(f"equal at {cross['kl_at_1']:.2f} nats", (cross["kl_at_1"], 1), (-8, 10), ha="right",
            textcoords="offset points")  # fmt: skip
ax.text(cross["kl"][0], 1.35, "k3 noisier than k1", va="bottom", fontsize=9)
ax.text(cross["kl"][0], 0.75, "k3 less noisy", va="top", fontsize=9)
ax.set(xlabel=r"$\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$, nats (median of the pairs)", ylabel="Var(k3) / Var(k1)")
fg.save(fig, "01_crossover", caption, FIGURES)

# %% [markdown]
# ## Summary
#
# - k1 and k3 estimate $\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$ without bias; k2 does not, and more samples do not
#   help.
# - $\mathrm{Var}(k_3)=\mathrm{Var}(k_1)+\chi^2-2J$: k3 is the better *value* exactly where $\chi^2<2J$, near
#   $\pi_{\mathrm{ref}}$ for one.
# - A KL that a log shows as negative is k1 on few samples (each $\ell$ can be negative), or log-probs that are not
#   those of the sampler. k3 is never negative, whichever distribution the samples came from, which hides that fault.
#
# All of this is about reading a KL off a log. As *losses* the ranking is another: [next](02_gradient_estimates), the
# biased k2 turns out to have the right gradient at one position and the unbiased k1 and k3 don't.
