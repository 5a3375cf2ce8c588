# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A reward and a KL term
#
# **Claim.** With a reward, the choice of the KL loss decides where training ends. k2 and the score function settle at
# the optimum of $\mathbb{E}[R]-\beta\,\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$, k3 as a loss at that of
# $\mathbb{E}[R]-\beta\,\mathrm{KL}(\pi_{\mathrm{ref}}\,\|\,\pi)$, and k1 as a loss does not regularise at all: its KL
# does not depend on $\beta$, or even grows with it. At low KL the choice among all but k1 hardly matters, and this
# chapter says how low.
#
# A tabular counterpart of Figure 7 (reward maximisation) of Tang & Munos ([arXiv
# 2506.09477](https://arxiv.org/abs/2506.09477)), every end point against a closed form. It also makes a test that a
# review of the paper asked for: a long run under weak regularisation, in which k3 has to track the swapped optimum if
# the theory is right. Runs in well under a minute.

# %%
import json

import matplotlib.pyplot as plt
import numpy as np
import torch
from tqdm import tqdm

from klnb import figures as fg
from klnb.exact import expected_gradient, gradient, kl, optimum
from klnb.losses import kl_loss
from klnb.paths import ROOT
from klnb.policies import Tabular, random, sequences
from klnb.stats import bootstrap, generator, paired

# %% tags=["parameters"]
seeds = 20  # runs: seeds 0, 1, ...; each has its own reference, reward and samples
actions = 100  # size of the vocabulary
betas = [0.5, 0.7, 1.0, 1.4, 2.0, 3.2]
samples = 16  # per step
steps = 2000
weak = 0.1  # the reward is multiplied by this where k1's noise is measured against it
weak_steps = 300
long_beta = 0.3  # of the long run
long_steps = 5000
step_size = 1.0
horizon = 3  # of the sequences, with 3 tokens to choose from
sequence_beta = 0.3
sequence_steps = 1500
low_pairs = 20  # random pairs for the low-KL figure
results = "results"
figures = "figures"

# %%
fg.style()
RESULTS, FIGURES = ROOT / results, ROOT / figures
NAMES = ["k1", "k2", "k3", "reward-to-go"]  # the last one with a leave-one-out baseline on its KL too
LABELS = {"k1": "k1 as a loss", "k2": "k2 = score function", "k3": "k3 as a loss",
          "reward-to-go": "score, leave-one-out"}  # fmt: skip
print(f"{seeds=} {actions=} {betas=} {samples=} {steps=} {weak=} {weak_steps=} {long_beta=} {long_steps=} {step_size=}")
print(f"{horizon=} {sequence_beta=} {sequence_steps=} {low_pairs=}")

# %% [markdown]
# ## Where each one can rest
#
# One position, reward $R(a)$. Each sample's step is a coefficient times $\nabla\log\pi(a)=e_a-\pi$; the reward brings
# $-R(a)$ and the KL term $\beta c(a)$ with $c=1,\ \ell,\ 1-r$ for k1, k2 and k3 ([chapter 2](02_gradient_estimates)).
# The expected step $\sum_a\pi(a)\,[\beta c(a)-R(a)]\,(e_a-\pi)$ is zero at an interior $\pi$ **exactly if
# $\beta c(a)-R(a)$ is the same for all actions**, say $-\lambda$ (its $a$-th component is $\pi(a)$ times the
# difference from the mean). That gives
#
# - k2, score function: $\beta\ell=R-\lambda$, so $\pi=\pi_{\mathrm{ref}}\,e^{R/\beta}/Z$. This is the maximiser of
#   $\mathbb{E}[R]-\beta\,\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$: by Lagrange, $R-\beta(\ell+1)$ must be constant.
# - k3: $\beta(1-r)=R-\lambda$; with a new constant, $\pi=\beta\,\pi_{\mathrm{ref}}/(\lambda-R)$ with $\lambda>\max R$
#   such that it sums to 1. This is the maximiser of $\mathbb{E}[R]-\beta\,\mathrm{KL}(\pi_{\mathrm{ref}}\,\|\,\pi)$: by
#   Lagrange, $R+\beta\pi_{\mathrm{ref}}/\pi$ must be constant.
# - k1: $\beta-R$ is constant only if the reward is. There is no interior optimum; the expected step is that of the
#   reward alone.


# %%
def draw(purpose, *shape):
    """Standard normal numbers, [seeds, *shape], from one generator a seed."""
    return torch.stack([torch.randn(*shape, dtype=torch.float64, generator=generator(s, f"04 {purpose}"))
                        for s in range(seeds)])  # fmt: skip


ref_logp, reward = draw("reference", actions).log_softmax(-1), draw("reward", actions)


def optima(which, grid):
    """[len(grid), seeds, V] by klnb.exact."""
    found = [optimum(reward[s], ref_logp[s].exp(), b, which) for b in grid for s in range(seeds)]
    return torch.stack(found).unflatten(0, (len(grid), seeds))


# %% [markdown]
# **Check** with the library's losses: the exact expected gradient of $-\mathbb{E}[R]+\beta\cdot$`kl_loss` at both
# optima. It is zero where the list above says so, and nowhere else.


# %%
def total_gradient(name, probs, s, beta):
    """The expected gradient of −R log π + β kl_loss at π = probs [V], for the reference and reward of seed s."""
    policy, ref = Tabular(probs.log()[None], horizon=1), Tabular(ref_logp[s, None], horizon=1)
    kl_part = expected_gradient(lambda logp, ref_logp, *_: kl_loss(name, logp, ref_logp), policy, ref, stacked=True)
    return beta * kl_part[0] - probs * (reward[s] - probs @ reward[s])


size = {}
for name in NAMES:
    for which in ("target", "swapped"):
        g = total_gradient(name, optima(which, betas[:1])[0, 0], 0, betas[0])
        size[name, which] = g.norm().item()
        print(f"{name} at the {which} optimum: ‖E[gradient]‖ = {size[name, which]:.1e}")
rests = {key for key, value in size.items() if value < 1e-12}
assert rests == {("k2", "target"), ("reward-to-go", "target"), ("k3", "swapped")}
assert min(value for key, value in size.items() if key not in rests) > 1e-3

# %% [markdown]
# ## The experiment
#
# Training starts at $\pi_{\mathrm{ref}}$, as fine-tuning does. Each step draws $n$ actions; the reward enters by the
# score function with a leave-one-out baseline. All $\beta$, estimators and seeds run as one batch; for a given seed all
# share reference, reward and uniform random numbers.


# %%
def others(x):
    """Each sample's value minus the mean over the other samples of its group."""
    n = x.shape[-1]
    return (n * x - x.sum(-1, keepdim=True)) / (n - 1)


# %%
def step(z, beta, uniform, r):
    """One sampled step for logits [β, names, seeds, V], from uniform numbers [seeds, n]."""
    logp, n = z.log_softmax(-1), uniform.shape[-1]
    total = logp.exp().cumsum(-1)
    y = torch.searchsorted(total / total[..., -1:], uniform.expand(*z.shape[:2], -1, -1).contiguous())
    ell = (logp - ref_logp).gather(-1, y.clamp_max_(actions - 1))
    kl_part = torch.stack([torch.ones_like(ell[:, 0]), ell[:, 1], -torch.expm1(-ell[:, 2]), others(ell[:, 3])], 1)
    c = (beta[:, None, None, None] * kl_part - others(r.expand_as(z).gather(-1, y))) / n
    return z - step_size * (torch.zeros_like(z).scatter_add_(-1, y, c) - c.sum(-1, keepdim=True) * logp.exp())


# %%
def train(beta, count, keep, r=reward):
    """log π after the steps in keep, [keep, β, names, seeds, V]."""
    beta = torch.tensor(beta, dtype=torch.float64)
    z, kept = ref_logp.expand(len(beta), len(NAMES), seeds, actions).clone(), []
    streams = [generator(s, f"04 samples {count}") for s in range(seeds)]
    for i in tqdm(range(1, count + 1), desc="steps"):
        z = step(z, beta, torch.stack([torch.rand(samples, dtype=torch.float64, generator=g) for g in streams]), r)
        if i in keep:
            kept.append(z.log_softmax(-1))
    return torch.stack(kept)


# %%
def kl_to_ref(logp):
    return (logp.exp() * (logp - ref_logp)).sum(-1)


def distance(p, q):
    """Total variation: half the sum of absolute differences, 0 to 1."""
    return (p - q).abs().sum(-1) / 2


# %%
final = train(betas, steps, {steps})[0]
target, swapped = optima("target", betas), optima("swapped", betas)
off = {"target": distance(final.exp(), target[:, None]), "swapped": distance(final.exp(), swapped[:, None])}
for i, beta in enumerate(betas):
    pairs = [f"{m} ({off['target'][i, j].mean():.3f}, {off['swapped'][i, j].mean():.3f})" for j, m in enumerate(NAMES)]
    print(f"β = {beta}: optima {distance(target, swapped)[i].mean():.3f} apart; distance to (target, swapped):", *pairs)

# %% [markdown]
# Distances are total variation: the share of probability that would have to move. Each estimator must end nearer to the
# optimum of what it follows than to the other, by a paired interval over seeds, and within 0.1 of it on average.

# %%
OWN = {"k2": ("target", "swapped"), "k3": ("swapped", "target"), "reward-to-go": ("target", "swapped")}
for name, (own, other) in OWN.items():
    j = NAMES.index(name)
    for i, beta in enumerate(betas):
        nearer = paired(off[other][i, j].numpy(), off[own][i, j].numpy())
        # where the optima themselves nearly meet, sampling noise decides
        assert nearer["low"] > 0 or distance(target, swapped)[i].mean() < 0.05, (name, beta)
    print(f"{name}: farthest from its own optimum, on average {off[own][:, j].mean(1).max():.3f}")
    assert off[own][:, j].mean(1).max() < 0.1
quiet = off["target"][-1, NAMES.index("reward-to-go")].mean() / off["target"][-1, NAMES.index("k2")].mean()
print(f"at β = {betas[-1]} leave-one-out ends at {quiet:.3f} of the distance of k2 without it")
assert quiet < 0.5

# %% [markdown]
# The last number has a reason. At the target optimum $R-\beta\ell$ is the same for all actions, so a leave-one-out
# baseline on *both* terms makes every sampled gradient exactly zero there: no noise is left at the optimum. With a
# baseline on the reward alone, $\beta\ell\,\nabla\log\pi$ keeps shaking the policy, in proportion to $\beta$.

# %% [markdown]
# ## k1: no optimum, no effect of $\beta$
#
# With k1 the policy climbs the reward alone and ends in a corner. Not in that of the best action: sampled policy
# gradients commit early to a good action that $\pi_{\mathrm{ref}}$ finds likely.

# %%
best = reward.argmax(-1).expand(len(betas), -1)[..., None]
kl_end, gain_end = kl_to_ref(final), (final.exp() * reward).sum(-1)  # [β, names, seeds]
for i, beta in enumerate(betas):
    top, on_best = final[i, 0].exp().max(-1).values.mean(), final[:, 0].exp().gather(-1, best)[i].mean()
    print(f"k1, β = {beta}: KL(π‖π_ref) {kl_end[i, 0].mean():.2f}, reward {gain_end[i, 0].mean():.2f} of at most "
          f"{reward.max(-1).values.mean():.2f}, largest probability {top:.3f}, of the best {on_best:.2f}")  # fmt: skip
    assert top > 0.95
effect = paired(kl_end[-1, 0].numpy(), kl_end[0, 0].numpy())
print("k1: KL at the largest β minus at the smallest: {mean:.2f} [{low:.2f}, {high:.2f}], n = {n}".format(**effect))
assert abs(effect["mean"]) < 0.5 and (kl_end[:, 0].mean(1) > kl_end[:, 1].mean(1)).all()

# %% [markdown]
# Where the reward is weak against the KL term (late in training, or a sparse reward), $\beta$ does have an effect, the
# opposite of the one that was meant. Each step of k1 is noise of size $\beta$, and noise [drives the policy
# away](03_minimizing_kl): about $\beta^2\eta^2\,\mathrm{tr}(F^2)/2n$ nats a step near $\pi_{\mathrm{ref}}$. A short run
# with the reward scaled down:

# %%
weak_kl = kl_to_ref(train(betas, weak_steps, {weak_steps}, weak * reward)[0])
for j in (0, 1):
    print(f"{NAMES[j]}, reward × {weak}: KL(π‖π_ref) after {weak_steps} steps for β = {betas[0]} to {betas[-1]}: "
          + ", ".join(f"{x:.3f}" for x in weak_kl[:, j].mean(1)))  # fmt: skip
grows, falls = (paired(weak_kl[a, j].numpy(), weak_kl[b, j].numpy()) for a, b, j in ((-1, 0, 0), (0, -1, 1)))
print("largest minus smallest β, k1: {mean:+.3f} [{low:.3f}, {high:.3f}]".format(**grows))
assert grows["low"] > 0 and falls["low"] > 0

# %% [markdown]
# ## Reward against KL

# %%
grid = np.geomspace(betas[0] / 1.3, betas[-1] * 1.3, 30).tolist()
lines = {}
for which in ("target", "swapped"):
    p = optima(which, grid)
    lines[which] = {"beta": grid, "kl": kl_to_ref(p.log()).mean(1).tolist(),
                    "reward": (p * reward).sum(-1).mean(1).tolist()}  # fmt: skip


def spread(x):
    """mean, low, high over seeds (the last axis) of [β, names, seeds], by bootstrap."""
    return [a.T.tolist() for a in bootstrap(x.numpy(), axis=2)]


data = {"betas": betas, "names": NAMES, "kl": spread(kl_end), "reward": spread(gain_end), "optima": lines,
        "weak_kl": spread(weak_kl), "distance": {w: off[w].mean(-1).tolist() for w in off},
        "optima_apart": distance(target, swapped).mean(-1).tolist()}  # fmt: skip

# %%
at = [np.interp(1.0, lines[w]["kl"][::-1], lines[w]["reward"][::-1]) for w in ("target", "swapped")]
data["reward_at_1_nat"] = dict(zip(("target", "swapped"), at))
print(f"at KL(π‖π_ref) = 1 nat the target optima have reward {at[0]:.2f}, the swapped ones {at[1]:.2f}")
assert at[0] > at[1]

# %%
common = {"seeds": f"0 to {seeds - 1}", "device": "CPU", "dtype": "float64", "scale": "tabular, one position",
          "notebook": "notebooks/04_regularized_reward.py"}  # fmt: skip
caption = common | {
    "title": "Each KL loss settles at the optimum of what it follows; k1 does not regularise",
    "quantity": "left: expected reward against KL(π‖π_ref) in nats after training, both exact; right: KL(π‖π_ref) "
                "against β",
    "setting": f"{actions} actions; logits of π_ref and rewards N(0,1); start at π_ref; {steps} steps of size "
               f"{step_size:g}, {samples} samples from π each, leave-one-out baseline on the reward; β from {betas[0]} "
               f"to {betas[-1]}; dotted: k1 with the reward times {weak}, after {weak_steps} steps",
    "n": f"{seeds} runs", "centre": "points: mean over runs; lines: closed-form optima, mean over the same instances",
    "band": "95% percentile bootstrap interval of the mean (left: of both coordinates)",
    "alt": "Left, points of k2 and leave-one-out lie on the curve of target optima, those of k3 on the lower curve of "
           "swapped optima, k1 in one heap at high KL. Right, KL falls with β for all but k1, which is flat and, with "
           "a weak reward, rises.",
}  # fmt: skip


# %%
def points(ax, x, y, j, marker, size):
    """Means over seeds with their intervals; x is β or a [mean, low, high]."""
    name = NAMES[j]
    x = [np.array(x)] * 3 if np.ndim(x) == 1 else [np.array(v)[j] for v in x]
    y = [np.array(v)[j] for v in y]
    ax.errorbar(x[0], y[0], xerr=[x[0] - x[1], x[2] - x[0]], yerr=[y[0] - y[1], y[2] - y[0]], fmt=marker,
                markersize=size, color=fg.COLORS[name], elinewidth=1, markeredgecolor="white", markeredgewidth=0.6,
                label=LABELS[name])  # fmt: skip


# %%
def direct(axes):
    """Labels at the curves, and k1's run with a weak reward."""
    axes[0].text(2.0, 2.02, "target optima", color=fg.COLORS["R_seq"], ha="right", fontsize=9)
    axes[0].text(1.3, 1.1, "swapped optima", color=fg.COLORS["F_tok"], fontsize=9)
    axes[1].plot(betas, data["weak_kl"][0][0], linestyle=":", linewidth=1.4, color=fg.COLORS["k1"])
    axes[1].text(1.72, 1.6, "k1, weak reward", fontsize=9)
    axes[1].set_xticks(betas, betas)
    axes[1].set_xticks([], minor=True)


def curves(ax, x, y):
    for which, name in (("target", "R_seq"), ("swapped", "F_tok")):
        ax.plot(data["optima"][which][x], data["optima"][which][y], color=fg.COLORS[name], linewidth=1.2, zorder=0)


# %%
fig, axes = plt.subplots(1, 2, figsize=(7, 4.3))
for j, marker, size in ((0, "o", 5), (1, "s", 7.5), (2, "D", 5.5), (3, "v", 4.5)):
    points(axes[0], data["kl"], data["reward"], j, marker, size)
    points(axes[1], betas, data["kl"], j, marker, size)
curves(axes[0], "kl", "reward")
curves(axes[1], "beta", "kl")
axes[1].set(xscale="log", yscale="log")
direct(axes)
axes[0].set(xlabel=r"$\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$, nats", ylabel="expected reward")
axes[1].set(xlabel=r"$\beta$", ylabel=r"$\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$, nats")
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, columnspacing=1)
fg.save(fig, "04_reward_kl", caption, FIGURES)

# %% [markdown]
# Both curves are Pareto curves of their own objective; on the axes of the target one, the swapped optima lie below: the
# same KL buys less reward. The same $\beta$ is not the same pressure either: for k3 it leaves more KL (right panel).
#
# ## The long run
#
# If k3 as a loss really follows $\nabla\mathrm{KL}(\pi_{\mathrm{ref}}\,\|\,\pi)$, then under weak regularisation, where
# the two optima are far apart, a long run must approach the swapped one and stay away from the target. Distances over
# time:

# %%
keep = np.unique(np.geomspace(10, long_steps, 40).astype(int)).tolist()
path = train([long_beta], long_steps, set(keep))[:, 0].exp()  # [keep, names, seeds, V]
goal = {which: optima(which, [long_beta])[0] for which in ("target", "swapped")}
long = {which: distance(path, goal[which][None, None]) for which in goal}  # [keep, names, seeds]
for which in goal:
    print(f"distance to the {which} optimum after {long_steps} steps: "
          + ", ".join(f"{m} {x:.3f}" for m, x in zip(NAMES, long[which][-1].mean(1))))  # fmt: skip
apart = distance(goal["target"], goal["swapped"]).mean()
tracks = paired(long["target"][-1, 2].numpy(), long["swapped"][-1, 2].numpy())
print(f"the optima are {apart:.3f} apart; k3 is nearer to the swapped one by "
      "{mean:.3f} [{low:.3f}, {high:.3f}], n = {n}".format(**tracks))  # fmt: skip
assert tracks["low"] > 0 and long["swapped"][-1, 2].mean() < 0.1 and long["target"][-1, 3].mean() < 0.2

# %% [markdown]
# ## What changes for sequences
#
# Summed over the tokens of a sequence, k3 follows $F_{\mathrm{tok}}$, which takes its prefixes from $\pi$ and not from
# $\pi_{\mathrm{ref}}$: it is the gradient of neither divergence of whole sequences ([chapter 5](05_sequences)), and so
# there is no reason for it to end at either optimum. Nor does $R_{\mathrm{tok}}$, k2's field, belong to either. Without
# noise, on random policies over all sequences of a few tokens, a full table of logits and a random reward for each
# sequence:

# %%
tokens, _ = sequences(3, horizon)
tables = [random(3, horizon, generator=generator(s, "04 sequences")) for s in range(seeds)]
index = tables[0].rows(tokens)
seq_reward = torch.stack([torch.randn(len(tokens), dtype=torch.float64, generator=generator(s, "04 sequence reward"))
                          for s in range(seeds)])  # fmt: skip
seq_ref = torch.stack([t.logits for t in tables])


# %%
def token_logp(z):
    """log π of each token of each sequence, [..., sequences, T]."""
    return z.log_softmax(-1)[..., index, tokens]


def kl_terms(z):
    """Scalars whose gradients are R_tok (k2), F_tok (k3) and R_seq, for logits [3, seeds, rows, V]: one each."""
    logp = token_logp(z)
    ell, prob = logp - token_logp(seq_ref), logp.sum(-1).exp()
    k2, k3 = ell[0].square().sum(-1) / 2, (torch.expm1(-ell[1]) + ell[1]).sum(-1)
    return (prob[0].detach() * k2).sum() + (prob[1].detach() * k3).sum() + (prob[2] * ell[2].sum(-1)).sum()


# %% [markdown]
# **Check** against `klnb.exact` that these are the fields they claim to be; then train.

# %%
z = (seq_ref + torch.randn(3, *seq_ref.shape, dtype=torch.float64, generator=generator(0, "04 check"))).requires_grad_()
found = torch.autograd.grad(kl_terms(z), z)[0]
for i, field in enumerate(("R_tok", "F_tok", "R_seq")):
    named = gradient(Tabular(z[i, 0].detach(), horizon=horizon), tables[0], field)
    assert (found[i, 0] - named).norm() < 1e-12 * named.norm(), field
z = seq_ref.expand(3, *seq_ref.shape).clone()
for _ in tqdm(range(sequence_steps), desc="steps"):
    z.requires_grad_()
    loss = sequence_beta * kl_terms(z) - (token_logp(z).sum(-1).exp() * seq_reward).sum()
    z = z.detach() - 3 * torch.autograd.grad(loss, z)[0]  # no noise: a larger step only saves time

# %%
reached, prior = token_logp(z).sum(-1).exp(), token_logp(seq_ref).sum(-1).exp()
prior = prior / prior.sum(-1, keepdim=True)
seq = {}
for which in ("target", "swapped"):
    best = [optimum(r, p, sequence_beta, which) for r, p in zip(seq_reward, prior)]
    seq[which] = distance(reached, torch.stack(best))
SEQUENCE = {"k2": "k2 as a loss", "k3": "k3 as a loss", "reward-to-go": "reward-to-go"}
for i, name in enumerate(SEQUENCE):
    print(f"{name}: distance to the target optimum {seq['target'][i].min():.3f} to {seq['target'][i].max():.3f}, "
          f"to the swapped one {seq['swapped'][i].min():.3f} to {seq['swapped'][i].max():.3f}")
assert seq["target"][2].max() < 0.05 and min(seq["target"][1].min(), seq["swapped"][1].min()) > 0.05

# %%
data |= {"long": {"steps": keep, "beta": long_beta, **{w: [spread(long[w])[k] for k in range(3)] for w in long}},
         "sequences": {w: dict(zip(SEQUENCE, seq[w].tolist())) for w in seq}}  # fmt: skip
caption = common | {
    "title": "At one position k3 as a loss tracks the swapped optimum; for sequences it reaches neither",
    "quantity": "total variation distance from the policy to an optimum, 0 to 1; left over steps, right after training",
    "setting": f"left: as the figure before, β = {long_beta}; right: exact gradients without noise, sequences of "
               f"{horizon} tokens out of 3, full table with N(0,1) logits for π_ref, N(0,1) rewards, β = "
               f"{sequence_beta}, {sequence_steps} steps of size 3 from π_ref",
    "n": f"{seeds} runs; right, {seeds} instances", "centre": "left: mean over runs; right: one point an instance",
    "band": "left: 95% percentile bootstrap interval of the mean; right: none",
    "scale": "tabular, one position and enumerated sequences",
    "alt": "Left, the distance of k3 to the swapped optimum falls to nearly 0 while that to the target optimum stays "
           "large; leave-one-out approaches the target. Right, only reward-to-go always lies at distance 0 from the "
           "target optimum; k3 lies off both axes, k2 mostly so.",
}  # fmt: skip


# %%
def over_time(ax, name, which, **changes):
    mean, low, high = (np.array(x)[NAMES.index(name)] for x in data["long"][which])
    ax.fill_between(data["long"]["steps"], low, high, color=fg.COLORS[name], alpha=0.2, linewidth=0)
    ax.semilogx(data["long"]["steps"], mean, color=fg.COLORS[name], **changes)
    return mean


def left(ax):
    end = over_time(ax, "k3", "target", linestyle="--")[-1]
    over_time(ax, "k3", "swapped")
    over_time(ax, "reward-to-go", "target")
    ax.text(keep[-1], end + 0.03, "k3 to target", color=fg.COLORS["k3"], ha="right", fontsize=9)
    ax.text(110, 0.74, "k3 to swapped", color=fg.COLORS["k3"], fontsize=9)
    ax.text(11, 0.31, "leave-one-out\nto target", color=fg.COLORS["reward-to-go"], fontsize=9)
    ax.set(xlabel="step", ylabel="distance to the optimum", ylim=(0, 0.9), title="one position")


# %%
fig, axes = plt.subplots(1, 2, figsize=(7, 3.7))
left(axes[0])
for (name, label), marker in zip(SEQUENCE.items(), "sDv"):
    axes[1].plot(data["sequences"]["target"][name], data["sequences"]["swapped"][name], marker, color=fg.COLORS[name],
                 label=label, markersize=6, markeredgecolor="white", markeredgewidth=0.6, clip_on=False)  # fmt: skip
axes[1].set(xlabel="distance to the target optimum", ylabel="distance to the swapped optimum", title="sequences")
axes[1].set(xlim=(0, None), ylim=(0, None))
axes[1].legend(loc="best")
fg.save(fig, "04_long_run", caption, FIGURES)

# %% [markdown]
# ## When the choice hardly matters
#
# At $\pi_{\mathrm{ref}}$ all fields vanish, and with a logit distance $\delta$ from it they agree to first order: both
# divergences are $\frac12\Delta z^\top F\,\Delta z$ up to third order. So the choice changes the KL part of the update
# by $O(\delta)$ of its size, while the KL is $O(\delta^2)$. Relative distance of each field to the right one, on random
# pairs:

# %%
deltas = np.geomspace(0.02, 2, 14)
low = {"one position": {"F_tok": []}, "sequences": {"R_tok": [], "F_tok": []}}
low_kl = {where: [] for where in low}
base, way = torch.randn(2, low_pairs, actions, dtype=torch.float64, generator=generator(0, "04 low KL"))
for delta in deltas:
    logp, logq = (base + delta * way).log_softmax(-1), base.log_softmax(-1)
    right = logp.exp() * (logp - logq)
    low_kl["one position"].append(right.sum(-1).median().item())
    right = right - right.sum(-1, keepdim=True) * logp.exp()
    low["one position"]["F_tok"].append(((logp.exp() - logq.exp() - right).norm(dim=-1) / right.norm(dim=-1)).tolist())

# %%
refs = [random(3, horizon, generator=generator(s, "04 low KL reference")) for s in range(low_pairs)]
ways = [random(3, horizon, generator=generator(s, "04 low KL direction")).logits for s in range(low_pairs)]
for delta in deltas:
    pis = [Tabular(r.logits + delta * w, horizon=horizon) for r, w in zip(refs, ways)]
    fields = {f: torch.stack([gradient(p, r, f) for p, r in zip(pis, refs)]) for f in ("R_seq", "R_tok", "F_tok")}
    right = fields.pop("R_seq").flatten(1)
    for f, g in fields.items():
        low["sequences"][f].append(((g.flatten(1) - right).norm(dim=1) / right.norm(dim=1)).tolist())
    low_kl["sequences"].append(float(np.median([kl(p, r).item() for p, r in zip(pis, refs)])))

# %%
tenth = {}
for where, fields in low.items():
    for f, values in fields.items():
        middle = np.median(values, axis=1)
        tenth[where, f] = float(np.exp(np.interp(np.log(0.1), np.log(middle), np.log(low_kl[where]))))
        print(f"{where}, {f}: off by less than 10% below a KL of {tenth[where, f]:.4f} nats (median pair)")
        assert middle[0] < 0.1 < middle[-1]
        slope = np.polyfit(np.log(low_kl[where][:6]), np.log(middle[:6]), 1)[0]
        assert abs(slope - 0.5) < 0.05, slope  # relative distance ∝ √KL
data["low_kl"] = {w: {"kl": low_kl[w], **low[w], "tenth": {f: tenth[w, f] for f in low[w]}} for w in low}
RESULTS.mkdir(parents=True, exist_ok=True)
_ = (RESULTS / "04_regularized_reward.json").write_text(json.dumps(data, indent=1) + "\n")

# %%
caption = common | {
    "title": "The choice matters in the high-KL regime",
    "quantity": "distance of the expected gradient from ∇KL(π‖π_ref), over the norm of that, against KL(π‖π_ref)",
    "setting": f"π_ref with N(0,1) logits, π the same plus {deltas[0]:g} to {deltas[-1]:g} times N(0,1); left: "
               f"{actions} actions; right: sequences of {horizon} tokens out of 3, full tables, KL of whole sequences; "
               "closed form",
    "seeds": f"left 0; right 0 to {low_pairs - 1}", "n": f"{low_pairs} pairs at each distance",
    "centre": "median over pairs, at the median KL", "band": "5% to 95% of the pairs (their range)",
    "scale": "tabular, one position and enumerated sequences",
    "alt": "Two log-log panels. The relative distances rise with the square root of the KL; that of k1 is always 1. "
           "They cross 10% at " + ", ".join(f"{x:.2g} nats ({w}, {f})" for (w, f), x in tenth.items()) + ".",
}  # fmt: skip


# %%
def closeness(ax, where):
    x = data["low_kl"][where]["kl"]
    for f, name in (("R_tok", "k2"), ("F_tok", "k3")):
        if f in data["low_kl"][where]:
            low5, middle, high95 = np.quantile(data["low_kl"][where][f], [0.05, 0.5, 0.95], axis=1)
            ax.fill_between(x, low5, high95, color=fg.COLORS[name], alpha=0.2, linewidth=0)
            ax.loglog(x, middle, **fg.look(name))
            ax.plot(data["low_kl"][where]["tenth"][f], 0.1, "o", color=fg.COLORS[name], markersize=6)
    ax.axhline(1, **fg.look("k1"))
    ax.axhline(0.1, color="black", linewidth=0.8, linestyle=(0, (2, 2)), zorder=0)
    ax.set(xlabel=r"$\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$, nats", title=where)


# %%
fig, axes = plt.subplots(1, 2, figsize=(7, 3.5), sharey=True)
for ax, where in zip(axes, low):
    closeness(ax, where)
for (where, f), x in tenth.items():
    ax, name, place = axes[list(low).index(where)], *(("k2", (3, -14)) if f == "R_tok" else ("k3", (-30, 5)))
    ax.annotate(f"{x:.2g}", (x, 0.1), place, textcoords="offset points", fontsize=9, color=fg.COLORS[name])
axes[0].set_ylabel("relative distance\nto the right gradient")
axes[0].legend(*axes[1].get_legend_handles_labels(), loc="upper left", ncols=1, labelspacing=0.2)
axes[0].set_ylim(top=20)
fg.save(fig, "04_low_kl", caption, FIGURES)

# %% [markdown]
# At one position k2 is exact and has no curve. These numbers are for these policies; the law (relative distance
# proportional to $\sqrt{\mathrm{KL}}$) is general, and `klnb.compare` measures the distance on a model of your own.
#
# ## Summary
#
# - **At one position each loss settles where the theory says**: k2 and the score function at
#   $\pi_{\mathrm{ref}}e^{R/\beta}/Z$, k3 as a loss at $\beta\pi_{\mathrm{ref}}/(\lambda-R)$, tracked over a long run.
#   At equal KL k3's optimum has less reward, and at equal $\beta$ more KL.
# - **k1 as a loss does not regularise.** Its end does not depend on $\beta$; where the reward is weak, a larger $\beta$
#   gives a larger KL.
# - **A leave-one-out baseline on reward and KL together** makes the gradient noise vanish at the optimum.
# - **For sequences** k3 summed over tokens ends at neither optimum; k2 in most instances misses the target one;
#   reward-to-go ends at it.
# - **At low KL** the choice among all but k1 is immaterial; the figure says how low.
#
# Next: [what happens over sequences](05_sequences).
