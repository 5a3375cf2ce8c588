# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Following each gradient
#
# **Claim.** Started away from $\pi_{\mathrm{ref}}$ and told to go there, k1 as a loss wanders off, and k2 and the score
# function arrive. k3 as a loss, on few samples of the policy, ends in between in
# $\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$: in many runs one rare sample throws the policy into a corner that it does
# not leave. Without noise k3 arrives too, as its own divergence has the same minimum.
#
# After the tabular experiments of Tang & Munos ([arXiv 2506.09477](https://arxiv.org/abs/2506.09477), App. C: step
# size 1); policies and sample counts are our choice. New are intervals over seeds, both divergences, and the
# noise-free path beside the sampled ones. Runs in seconds.

# %%
import json

import matplotlib.pyplot as plt
import numpy as np
import torch

from klnb import figures as fg
from klnb.paths import ROOT
from klnb.stats import bootstrap, generator, paired

# %% tags=["parameters"]
seeds = 40  # runs: seeds 0, 1, ...; each has its own start, reference and samples
actions = 100  # size of the vocabulary
scale = 1.5  # standard deviation of the logits of the start and of π_ref, drawn independently
samples = [4, 32]  # per gradient
steps = 1000
step_size = 1.0
results = "results"
figures = "figures"

# %%
fg.style()
RESULTS, FIGURES = ROOT / results, ROOT / figures
NAMES = ["k1", "k2", "k3", "reward-to-go"]  # the last one with a leave-one-out baseline
RECORD = np.unique(np.geomspace(1, steps, 60).astype(int))  # steps at which both divergences are kept, and 0
print(f"{seeds=} {actions=} {scale=} {samples=} {steps=} {step_size=}")


# %% [markdown]
# ## The experiment
#
# The policy is a softmax of 100 logits. In each step $n$ actions are drawn from it, and the logits move by $-\eta$
# times the mean of $c(y_i)\,\nabla\log\pi(y_i)$, with the coefficients of [chapter 2](02_gradient_estimates): $1$,
# $\ell$, $1-e^{-\ell}$, and $\ell$ minus the mean $\ell$ of the other samples. All seeds and estimators run at once as
# one batch. For a given seed all estimators share start, reference and random numbers (the same uniform draws, each
# turned into actions by the policy's own cumulative probabilities), so that they can be compared in pairs.


# %%
def draw(purpose, *shape):
    """Standard normal numbers, [seeds, *shape], from one generator a seed."""
    return torch.stack([torch.randn(*shape, dtype=torch.float64, generator=generator(s, f"03 {purpose}"))
                        for s in range(seeds)])  # fmt: skip


def coefficients(ell):
    """c of each sample, [names, seeds, n], from the log-ratios of the same shape."""
    n = ell.shape[-1]
    others = (ell[3].sum(-1, keepdim=True) - ell[3]) / (n - 1)
    return torch.stack([torch.ones_like(ell[0]), ell[1], -torch.expm1(-ell[2]), ell[3] - others])


# %% [markdown]
# The gradient $\frac1n\sum_i c_i(e_{y_i}-\pi)$, from samples and in expectation:


# %%
def sampled_gradient(logp, ell, uniform):
    """Mean over n samples, [names, seeds, V]."""
    probs = logp.exp()
    total = probs.cumsum(-1)
    y = torch.searchsorted(total / total[..., -1:], uniform.expand(len(NAMES), *uniform.shape).contiguous())
    c = coefficients(ell.gather(-1, y.clamp_max(actions - 1))) / uniform.shape[-1]
    return torch.zeros_like(probs).scatter_add_(-1, y, c) - c.sum(-1, keepdim=True) * probs


def exact_gradient(logp, ell):
    """Its expectation: closed form."""
    weights = logp.exp() * torch.stack([torch.ones_like(ell[0]), ell[1], -torch.expm1(-ell[2]), ell[3]])
    return weights - weights.sum(-1, keepdim=True) * logp.exp()


# %%
def divergences(logp, ref_logp):
    """KL(π‖π_ref) and KL(π_ref‖π), [2, names, seeds]."""
    ell = logp - ref_logp
    return torch.stack([(logp.exp() * ell).sum(-1), -(ref_logp.exp() * ell).sum(-1)])


# %%
def descend(start, ref_logp, n=None):
    """(divergences [2, names, seeds, records], final log π); n samples a step, or the exact gradient."""
    z, kept = start.expand(len(NAMES), *start.shape).clone(), []
    streams = [generator(s, f"03 samples {n}") for s in range(seeds)]
    for step in range(steps + 1):
        logp = z.log_softmax(-1)
        if step in RECORD:
            kept.append(divergences(logp, ref_logp))
        if n is None:
            z = z - step_size * exact_gradient(logp, logp - ref_logp)
        else:
            uniform = torch.stack([torch.rand(n, dtype=torch.float64, generator=g) for g in streams])
            z = z - step_size * sampled_gradient(logp, logp - ref_logp, uniform)
    return torch.stack(kept, -1), logp


# %%
start, ref_logp = scale * draw("start", actions), (scale * draw("reference", actions)).log_softmax(-1)
RUNS = {f"{n} samples a step": n for n in samples} | {"no noise": None}
kl, final = {}, {}
for label, n in RUNS.items():
    kl[label], final[label] = descend(start, ref_logp, n)
    end = kl[label][0, :, :, -1].mean(1).tolist()
    print(f"{label}: mean KL(π‖π_ref) after {steps} steps: " + ", ".join(f"{m} {x:.3f}" for m, x in zip(NAMES, end)))
first = divergences(start.log_softmax(-1), ref_logp)
print("at the start: KL(π‖π_ref) {:.3f}, KL(π_ref‖π) {:.3f}".format(*first.mean(1)))

# %% [markdown]
# ## What happened, in numbers
#
# Paired over seeds: differences of the final $\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$, their mean and 95%
# Student-t interval. A claim holds where the interval leaves out 0.

# %%
few, many = (f"{n} samples a step" for n in samples)
CLAIMS = [("k1 ends above its start", (few, "k1"), "start"), ("k1 ends above k3", (few, "k1"), (few, "k3")),
          ("k3 ends above k2", (few, "k3"), (few, "k2")), ("k2 ends below its start", "start", (few, "k2")),
          ("leave-one-out ends below its start", "start", (few, "reward-to-go")),
          ("k2 ends above k3, no noise", ("no noise", "k2"), ("no noise", "k3"))]  # fmt: skip


# %%
def last(where):
    """Final KL(π‖π_ref) of each seed."""
    return first[0].numpy() if where == "start" else kl[where[0]][0, NAMES.index(where[1]), :, -1].numpy()


claims = {claim: paired(last(above), last(below)) for claim, above, below in CLAIMS}
for claim, difference in claims.items():
    print("{claim}: by {mean:.4g} [{low:.4g}, {high:.4g}], n = {n}".format(claim=claim, **difference))
    assert difference["low"] > 0, claim

# %% [markdown]
# The last line is a departure from what one might expect of the wrong divergence: **without noise k3 arrives
# too, and sooner**, by $\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$ itself. A full table can reach $\pi_{\mathrm{ref}}$,
# where both divergences are zero, and along the way
# $\nabla\mathrm{KL}(\pi_{\mathrm{ref}}\,\|\,\pi)=\pi-\pi_{\mathrm{ref}}$ does not fade where $\pi$ is small, while each
# component of $\nabla\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$ carries a factor $\pi$. What keeps sampled k3 from
# arriving is its noise.

# %% [markdown]
# ## Why k3 gets stuck on few samples
#
# Its coefficient is $1-r$ with $r=\pi_{\mathrm{ref}}/\pi$, without bound: an action that is rare under $\pi$ and common
# under $\pi_{\mathrm{ref}}$ comes up seldom and then moves its own logit by $+\eta\,(r-1)/n$, far beyond where
# $\pi_{\mathrm{ref}}$ is. With nearly all probability on that one action $a$, every sample is $a$, and
# $\nabla\log\pi(a)=e_a-\pi\approx0$: no gradient leads away. There
# $\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})=-\log\pi_{\mathrm{ref}}(a)$. Check: runs whose largest probability exceeds
# 0.99. In $\mathrm{KL}(\pi_{\mathrm{ref}}\,\|\,\pi)$ a corner can cost far more, so that few runs make up k3's mean in
# the lower row of the figure, and its difference from k1, printed last, is undecided.

# %%
stuck = {}
for label, logp in final.items():
    top = logp.exp().max(-1)
    held = top.values > 0.99
    stuck[label] = held.double().mean(1).tolist()
    print(f"{label}: share of runs in a corner: " + ", ".join(f"{m} {x:.1%}" for m, x in zip(NAMES, stuck[label])))
    corner = -ref_logp.expand_as(logp).gather(-1, top.indices[..., None])[..., 0]
    assert ((divergences(logp, ref_logp)[0] - corner).abs() * held).max() < 0.2
ends = {name: kl[few][1, NAMES.index(name), :, -1].numpy() for name in ("k1", "k3")}
print("KL(π_ref‖π), {few}: k3 ends above k1 by {mean:.3g} [{low:.3g}, {high:.3g}], n = {n}; of k3's runs the median is "
      "{median:.3g}, the largest {max:.3g}".format(few=few, **paired(ends["k3"], ends["k1"]),
                                                   median=np.median(ends["k3"]), max=ends["k3"].max()))
assert stuck[few][2] > stuck[many][2] >= stuck["no noise"][2] == 0 == max(stuck[few][1], stuck[few][3])

# %% [markdown]
# ## Why k1 does worse than nothing
#
# Its expected gradient is zero, so to first order the KL stays; but each step is noise, $\Delta z=-\frac\eta
# n\sum_i(e_{y_i}-\pi)$, with covariance $\frac{\eta^2}{n}F$, $F=\mathrm{diag}(\pi)-\pi\pi^\top$, and the KL is curved.
# At $\pi=\pi_{\mathrm{ref}}$ its Hessian in the logits is $F$ as well, so
#
# $$
# \mathbb{E}[\mathrm{KL}]\approx\frac{\eta^2}{2n}\mathrm{tr}(F^2)>0
# $$
#
# after one step: k1 as a loss *leaves* $\pi_{\mathrm{ref}}$. Check for $n=1$, where the expectation over the one sample
# is a finite sum, with a small step for which second order is enough:

# %%
probs, eta = ref_logp.exp(), 0.01
moved = (ref_logp[:, None] - eta * (torch.eye(actions).double() - probs[:, None])).log_softmax(-1)  # [seeds, y, V]
kl_after = (probs * (moved.exp() * (moved - ref_logp[:, None])).sum(-1)).sum(-1)
fisher = torch.diag_embed(probs) - probs[:, :, None] * probs[:, None, :]
predicted = eta**2 / 2 * (fisher @ fisher).diagonal(dim1=1, dim2=2).sum(-1)
ratio = kl_after / predicted
print(f"E[KL] after one step over its prediction: {ratio.min():.4f} to {ratio.max():.4f}")
assert ((ratio - 1).abs() < 0.02).all()

# %% [markdown]
# ## The data, then the figure

# %%
bands = {}
for label in RUNS:
    for d, divergence in enumerate(("target", "swapped")):
        for i, name in enumerate(NAMES):
            mean, low, high = bootstrap(kl[label][d, i].numpy(), draws=2000)
            bands[f"{label}/{divergence}/{name}"] = {"mean": mean.tolist(), "low": low.tolist(), "high": high.tolist()}
data = {"steps": RECORD.tolist(), "seeds": seeds, "bands": bands,
        "stuck": {label: dict(zip(NAMES, shares)) for label, shares in stuck.items()},
        "claims": {c: {k: float(v) for k, v in d.items()} for c, d in claims.items()},
        "start": first.mean(1).tolist()}  # fmt: skip
RESULTS.mkdir(parents=True, exist_ok=True)
_ = (RESULTS / "03_minimizing_kl.json").write_text(json.dumps(data, indent=1) + "\n")

# %%
caption = {
    "title": "k1 as a loss wanders off, k2 and the score function arrive, k3 depends on its noise",
    "quantity": "KL(π‖π_ref) (top) and KL(π_ref‖π) (bottom), exact, nats, over steps of gradient descent on the logits",
    "setting": f"{actions} actions; logits of start and π_ref independent N(0, {scale:g}²); step size {step_size:g}; "
               f"{' or '.join(map(str, samples))} samples from π a step, or the exact gradient; at one position "
               "the score function is k2",
    "seeds": f"0 to {seeds - 1}", "n": f"{seeds} runs", "centre": "mean over runs",
    "band": "95% percentile bootstrap interval of the mean",
    "scale": "tabular, one position", "device": "CPU", "dtype": "float64",
    "notebook": "notebooks/03_minimizing_kl.py",
    "alt": "Six panels. k2 and leave-one-out fall steadily everywhere. k1 rises where there is noise and stays flat "
           "where there is none. k3 rises in the end with few samples; with many it falls in KL(π‖π_ref), while "
           "runs in a corner lift its mean KL(π_ref‖π); without noise it falls fastest.",
}  # fmt: skip


# %%
LABELS = {"k1": "k1 as a loss", "k2": "k2 = score function", "k3": "k3 as a loss",
          "reward-to-go": "score, leave-one-out"}  # fmt: skip


def panel(ax, label, divergence):
    for name in NAMES if RUNS[label] else NAMES[:3]:
        band, look = data["bands"][f"{label}/{divergence}/{name}"], fg.look(name) | {"label": LABELS[name]}
        ax.fill_between(data["steps"], band["low"], band["high"], color=look["color"], alpha=0.2, linewidth=0)
        ax.loglog(data["steps"], band["mean"], **look)
    ax.axhline(data["start"][divergence == "swapped"], color="black", linewidth=0.8, linestyle=(0, (2, 2)), zorder=0)
    ax.set_xlim(1, steps)


# %%
fig, axes = plt.subplots(2, 3, figsize=(7, 5.4), sharex=True, sharey="row")
for column, label in zip(axes.T, RUNS):
    panel(column[0], label, "target")
    panel(column[1], label, "swapped")
    column[0].set_title(label)
    column[1].set_xlabel("step")
axes[0, 0].set_ylabel(r"$\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$, nats")
axes[1, 0].set_ylabel(r"$\mathrm{KL}(\pi_{\mathrm{ref}}\,\|\,\pi)$, nats")
axes[1, 2].text(1.2, data["start"][1] * 1.3, "start", va="bottom", fontsize=9)
handles, labels = axes[0, 0].get_legend_handles_labels()
fig.legend(handles, labels, loc="outside upper center", ncols=4, columnspacing=1.2, handlelength=1.6)
fg.save(fig, "03_minimizing_kl", caption, FIGURES)

# %% [markdown]
# ## Summary
#
# - **k1 as a loss** never goes down. It is a random walk, and on average the walk leaves $\pi_{\mathrm{ref}}$.
# - **k2, the score function, leave-one-out** arrive, with few samples as with many.
# - **k3 as a loss** on few samples ends between k1 and k2 in $\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$; in
#   $\mathrm{KL}(\pi_{\mathrm{ref}}\,\|\,\pi)$, the divergence that it follows, it is not seen to do better than k1. The
#   reason is not that its minimum lies elsewhere but that its tail drives runs into corners: with more samples a run in
#   a corner is rare, and without noise k3 arrives sooner than the others.
#
# That both divergences share their minimum is special: nothing else was asked of the policy, and it could reach
# $\pi_{\mathrm{ref}}$. With a reward they have [different optima](04_regularized_reward), and with sequences and a
# policy of limited capacity [different fixed points](05_sequences).
