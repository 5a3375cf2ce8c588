# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Which divergence does your KL term minimise?
#
# **Claim.** On the policy's own samples the usual losses for "a KL penalty" have four different expected gradients.
# That of k1 is zero. k3 has, token by token, that of the swapped divergence $\mathrm{KL}(\pi_{\mathrm{ref}}\,\|\,\pi)$;
# k2 has the right one token by token; both are blind to what a token leads to. Reward-to-go has that of
# $\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$ over sequences, which is what a KL penalty in RL means.
#
# This chapter draws the four on a policy small enough to be seen whole, lists the estimators of `klnb.kl_loss`, says
# where to read about which symptom, and ends with what to use when. It is a companion to Tang & Munos,
# *On a few pitfalls in KL divergence gradient estimation for RL*
# ([arXiv 2506.09477](https://arxiv.org/abs/2506.09477)). Everything here is exact; it runs in seconds.

# %%
import json

import matplotlib.pyplot as plt
import numpy as np
import torch
from IPython.display import Markdown, display

from klnb import figures as fg
from klnb.exact import expected_gradient, gradient, optimum
from klnb.losses import ESTIMATORS, kl_loss
from klnb.paths import ROOT
from klnb.policies import Tabular

# %% tags=["parameters"]
reference = [0.1, 0.3, 0.6]  # π_ref of the first token: a, b, c
reward = [1.0, 0.8, 0.2]  # by first token
spike = 4.0  # after a, π_ref's logit of one second token; all other logits of the second token are 0, in π too
beta = 0.2
lattice = 8  # arrows along a side of the triangle
measured = "results"  # where the other chapters left their numbers
results = "results"
figures = "figures"

# %%
fg.style()
RESULTS, FIGURES = ROOT / results, ROOT / figures
NAMES = ["k1", "k2", "k3", "reward-to-go"]
ref, r = torch.tensor(reference, dtype=torch.float64), torch.tensor(reward, dtype=torch.float64)
cost = torch.tensor([np.log(np.exp(spike) + 2) - np.log(3) - spike / 3, 0.0, 0.0], dtype=torch.float64)
print(f"{reference=} {reward=} {beta=}; KL of the second token after a, b, c: {[round(x, 3) for x in cost.tolist()]}")

# %% [markdown]
# ## A policy that fits in a triangle
#
# Two tokens out of a, b, c. The policy chooses the first, $p=(p_a,p_b,p_c)$, a point in a triangle; its second token is
# uniform and not trained. The reference $\pi_{\mathrm{ref}}$ is uniform there too, except after a, where it is nearly
# sure of one token. So whoever says a first pays for it: the second token costs
# $C_a=\mathrm{KL}(\mathrm{uniform}\,\|\,\pi_{\mathrm{ref}}(\cdot\mid a))$, and $C_b=C_c=0$. With $q$ the first token of
# $\pi_{\mathrm{ref}}$,
#
# $$
# \mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})=\mathrm{KL}(p\,\|\,q)+\sum_a p_a C_a .
# $$
#
# In language models this is the common case: what comes after a token differs in how far it lies from the reference.
# The expected gradients in the logits of the first token, with
# $\partial p_a/\partial z_b=p_a(1[a=b]-p_b)$:
#
# | loss | expected gradient, component $a$ |
# |---|---|
# | k1 | $0$ |
# | k2 | $p_a(\ell_a-\sum_b p_b\ell_b)$, $\ell=\log(p/q)$: of $\mathrm{KL}(p\,\|\,q)$ alone |
# | k3 | $p_a-q_a$: of $\mathrm{KL}(q\,\|\,p)$ |
# | reward-to-go | as k2 with $\ell_a+C_a$ in place of $\ell_a$: of the whole KL |
#
# k2 and k3, summed over tokens, take the prefix of each token as given; that it was chosen, and at what later cost, is
# not in their gradient.


# %%
def field(name, p):
    """The expected gradient in the logits of the first token, for p [..., 3]."""
    if name in ("k1", "k3"):
        return torch.zeros_like(p) if name == "k1" else p - ref
    weights = p * ((p / ref).log() + (cost if name == "reward-to-go" else 0))
    return weights - weights.sum(-1, keepdim=True) * p


def two_tokens(first, after_a=0.0):
    """The two-token policy as a table: the start, then after a, b, c."""
    rows = torch.zeros(4, 3, dtype=torch.float64)
    rows[0], rows[1, 0] = first.log(), after_a
    return Tabular(rows, horizon=2)


# %% [markdown]
# **Check** against the library on a lattice of points: the exact expected gradient of each `kl_loss`, and the named
# fields of `klnb.exact`.

# %%
counts = [(i, j, lattice - i - j) for i in range(lattice + 1) for j in range(lattice + 1 - i)]
points = (torch.tensor(counts, dtype=torch.float64) + 1 / 3) / (lattice + 1)
FIELD = {"k1": None, "k2": "R_tok", "k3": "F_tok", "reward-to-go": "R_seq"}
worst = 0.0
for p in points:
    pi, pi_ref = two_tokens(p), two_tokens(ref, spike)
    for name, named in FIELD.items():
        by_loss = expected_gradient(lambda lp, ref_lp, *_, n=name: kl_loss(n, lp, ref_lp), pi, pi_ref, stacked=True)[0]
        by_name = gradient(pi, pi_ref, named)[0] if named else torch.zeros(3)
        worst = max(worst, *((g - field(name, p)).abs().max().item() for g in (by_loss, by_name)))
print(f"largest difference between formula, loss and field on {len(points)} points: {worst:.1e}")
assert worst < 1e-12

# %% [markdown]
# ## With a reward
#
# Now maximise the reward of the first token with each of these as the KL term, weight $\beta$. Where the total gradient
# is zero ([chapter 4](04_regularized_reward) derives it):
#
# - k2: $p\propto q\,e^{R/\beta}$, which is right for one token and forgets $C$;
# - k3: $p=\beta q/(\lambda-R)$, the optimum for the swapped divergence (here of whole sequences too, as the second
#   token's share of $\mathrm{KL}(\pi_{\mathrm{ref}}\,\|\,\pi)$ does not depend on $p$);
# - reward-to-go: $p\propto q\,e^{R/\beta-C}$, the optimum of
#   $\mathbb{E}[R]-\beta\,\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$;
# - k1: nowhere; the policy goes to the corner with the largest reward.


# %%
def ascend(steps=6000, step=0.5):
    """p along the noise-free ascents from π_ref, [points, names, 3]; ever fewer steps are kept."""
    z, kept = ref.log().expand(len(NAMES), 3), [ref.expand(len(NAMES), 3)]
    keep = set(np.unique(np.geomspace(1, steps, 120).astype(int)).tolist())
    for i in range(1, steps + 1):
        p = z.softmax(-1)
        kl = torch.stack([field(name, p[j]) for j, name in enumerate(NAMES)])
        z = z + step * (p * (r - (p @ r)[:, None]) - beta * kl)
        if i in keep:
            kept.append(z.softmax(-1))
    return torch.stack(kept)


# %%
ends = {"k1": torch.eye(3, dtype=torch.float64)[r.argmax()], "k2": optimum(r, ref, beta),
        "k3": optimum(r, ref, beta, "swapped"), "reward-to-go": (ref.log() + r / beta - cost).softmax(0)}  # fmt: skip
paths = dict(zip(NAMES, ascend().unbind(1)))

# %%
table = []
for name in NAMES:
    p = ends[name]
    kl = torch.where(p > 0, p * (p / ref).log(), 0.0).sum() + p @ cost
    table.append({"name": name, "p": p.tolist(), "reward": (p @ r).item(), "kl": kl.item(),
                  "objective": (p @ r - beta * kl).item(),
                  "missed": (paths[name][-1] - p).abs().max().item()})  # fmt: skip
    print("{name}: ends at {p}, E[R] {reward:.3f}, KL(π‖π_ref) {kl:.3f}, E[R] − β KL {objective:.3f}".format(
        **table[-1] | {"p": [round(x, 3) for x in p.tolist()]}))  # fmt: skip
assert all(row["missed"] < 1e-3 for row in table[1:]) and table[0]["missed"] < 0.01  # k1 never quite arrives
best = max(row["objective"] for row in table)
assert best == table[3]["objective"] > max(row["objective"] for row in table[:3]) + 0.05

# %% [markdown]
# ## The data, then the figure

# %%
data = {"names": NAMES, "points": points.tolist(), "field": {n: field(n, points).tolist() for n in NAMES},
        "paths": {n: x.tolist() for n, x in paths.items()}, "ends": table}  # fmt: skip
RESULTS.mkdir(parents=True, exist_ok=True)
(RESULTS / "00_overview.json").write_text(json.dumps(data, indent=1) + "\n")
CORNERS = np.array([[0.5, 3**0.5 / 2], [1, 0], [0, 0]])  # a on top, b right, c left


def plane(p):
    """Points of the triangle, [..., 2]."""
    return np.asarray(p) @ CORNERS


# %%
def triangle(ax):
    ax.fill(*CORNERS.T, color="#f7f7f5", zorder=0)
    ax.plot(*CORNERS[[0, 1, 2, 0]].T, color="#999999", linewidth=1, zorder=1, solid_joinstyle="round")
    ax.set_aspect("equal")
    ax.axis("off")


def velocity(name):
    """How p moves when its logits follow minus the field, in the plane, [points, 2]."""
    p, g = np.array(data["points"]), np.array(data["field"][name])
    return plane(-p * (g - (p * g).sum(-1, keepdims=True)))


# %%
fastest = max(np.linalg.norm(velocity(name), axis=1).max() for name in NAMES)


def arrows(ax, name):
    """Length: root of the speed, on one scale for all; a dot where nothing moves."""
    v, at = velocity(name), plane(data["points"])
    speed = np.linalg.norm(v, axis=1, keepdims=True)
    if speed.max() < 1e-12:
        ax.plot(*at.T, "o", color=fg.COLORS[name], markersize=2.6, markeredgewidth=0)
        return
    ax.quiver(*at.T, *(v / np.sqrt(speed * fastest)).T, color=fg.COLORS[name], angles="xy", scale_units="xy", scale=6.5,
              width=0.013, headwidth=3.6, headlength=3.8, headaxislength=3.4, pivot="mid", zorder=3)  # fmt: skip


# %%
def landscape(ax, k=150):
    """Contours of E[R] − β KL(π‖π_ref), the objective that was meant."""
    p = np.array([(i, j, k - i - j) for i in range(k + 1) for j in range(k + 1 - i)]) / k
    kl = (p * (np.log(np.maximum(p, 1e-300) / ref.numpy()) + cost.numpy())).sum(-1)
    value = p @ r.numpy() - beta * kl
    levels = table[3]["objective"] - np.array([0.4, 0.25, 0.15, 0.08, 0.03, 0.008])
    ax.tricontour(*plane(p).T, value, levels=levels, colors=fg.COLORS["reward-to-go"], linewidths=0.7, alpha=0.45)


# %%
def label(ax, name, text, dy=0.0):
    """A text right of the triangle, with a thin line from the end point."""
    x, y = plane(next(e["p"] for e in data["ends"] if e["name"] == name))
    edge = 1 - (y + dy) / 3**0.5 + 0.05
    ax.plot([x, edge], [y, y + dy], color=fg.COLORS[name], linewidth=0.8, zorder=4)
    ax.text(edge + 0.015, y + dy, text, color=fg.COLORS[name], va="center", fontsize=9, linespacing=1.1)


# %%
ENDS = {"k1": "k1: no restraint", "k3": "k3: the swapped\noptimum", "k2": "k2: each token\non its own",
        "reward-to-go": "reward-to-go:\nthe optimum"}  # fmt: skip


def start(ax, size):
    ax.plot(*plane(reference), "o", color="white", markeredgecolor="black", markersize=size, zorder=6)


# %%
def corners(ax):
    """What each token brings."""
    grey = {"fontsize": 9, "color": "#555555", "linespacing": 1.1}
    a, b, c = (f"{token}: reward {value:g}" for token, value in zip("abc", reward))
    ax.text(0.44, CORNERS[0, 1], f"{a},\nthen costs {cost[0]:.1f} nats", ha="right", va="center", **grey)
    ax.text(1.0, -0.03, b, ha="center", va="top", **grey)
    ax.text(0.0, -0.03, c, ha="center", va="top", **grey)
    x, y = plane(reference)
    ax.text(x - 0.03, y + 0.02, r"$\pi_{\mathrm{ref}}$", ha="right", va="bottom")


# %%
def big(ax):
    triangle(ax)
    landscape(ax)
    for e in data["ends"]:
        color = fg.COLORS[e["name"]]
        ax.plot(*plane(data["paths"][e["name"]]).T, color=color, linewidth=2.2, zorder=3)
        label(ax, e["name"], ENDS[e["name"]])
        ax.plot(*plane(e["p"]), "o", color=color, markersize=10, markeredgecolor="white", markeredgewidth=1.4, zorder=5)


# %%
ends_shown = "; ".join(f"{e['name']} ({', '.join(f'{x:.2f}' for x in e['p'])})" for e in table)
caption = {
    "title": "Where four KL losses point, and where each one ends with a reward",
    "quantity": "policies over the first of two tokens, a, b, c, as points of a triangle (a corner: all probability on "
                "one token). Left: ascent of E[R] − β·(KL term) from π_ref; contours: E[R] − β KL(π‖π_ref). Right: the "
                "KL term alone, minus its expected gradient in the logits, as motion of the policy (arrow length: root "
                "of the speed, one scale; dots: no motion)",
    "setting": f"π_ref of the first token {tuple(reference)}, rewards {tuple(reward)}, β = {beta}; after a the second "
               f"token costs {cost[0]:.2f} nats, after b and c none; ends (a, b, c): {ends_shown}",
    "seeds": "none, nothing is drawn", "n": "1 policy", "centre": "exact", "band": "none: exact",
    "scale": "tabular, two tokens", "device": "CPU", "dtype": "float64", "notebook": "notebooks/00_overview.py",
    "alt": "A large triangle with four paths from the reference: k1 runs into the corner of the largest reward, k3 and "
           "k2 end short of it at two places, reward-to-go ends on top of the contours of the true objective. Four "
           "small triangles: k1 has dots and no arrows, the others arrows towards the reference, those of reward-to-go "
           "more strongly away from token a.",
}  # fmt: skip

# %%
def small(ax, name):
    triangle(ax)
    arrows(ax, name)
    start(ax, 5)
    ax.text(0.5, -0.06, name, color=fg.COLORS[name], ha="center", va="top", fontsize=9)
    ax.set(xlim=(-0.03, 1.03), ylim=(-0.2, 0.9))


# %%
fig = plt.figure(figsize=(7, 3.8))
fig.set_layout_engine("none")  # the axes are placed by hand
left = fig.add_axes([0.0, 0.0, 0.6, 0.9])
big(left)
corners(left)
left.set(xlim=(-0.16, 1.32), ylim=(-0.11, 0.93))
start(left, 7)
for name, (x, y) in zip(NAMES, ((0.605, 0.45), (0.803, 0.45), (0.605, 0.0), (0.803, 0.0))):
    small(fig.add_axes([x, y, 0.195, 0.46]), name)
fig.text(0.29, 0.985, "with a reward: where training ends", ha="center", va="top", fontsize=11)
fig.text(0.8, 0.985, "the KL term alone: where it points", ha="center", va="top", fontsize=11)
fg.save(fig, "00_overview", caption, FIGURES)

# %% [markdown]
# Only reward-to-go ends on top of the contours. k1 never turns back. k2 cannot see that a is dear *later*; k3 holds
# on to c, which pays least, because $\pi_{\mathrm{ref}}$ has it, and of the three puts the most on a.
#
# ## The estimators of `kl_loss`
#
# Sums over the tokens of a sequence, means over sequences; sg = detached, $G_t=\sum_{s\ge t}\ell_s$, $b$ =
# leave-one-out baseline.

# %%
YES = {True: "yes", False: ""}
lines = ["| name | loss of a sequence | follows | source | baseline | off-policy | needs logits |", "|" + "---|" * 7]
for e in ESTIMATORS.values():
    lines.append(f"| `{e.name}` | {e.formula} | `{e.follows}` | {e.equation} | {YES[e.baseline]} | {YES[e.off_policy]} "
                 f"| {YES[e.needs_logits]} |")  # fmt: skip
display(Markdown("\n".join(lines)))
assert all(e.unbiased == (e.follows == "R_seq") for e in ESTIMATORS.values())

# %% [markdown]
# `R_seq` is $\nabla\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$ over sequences, the only one that a KL penalty means;
# `R_tok` and `F_tok` are token-level partial gradients of $\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$ and of
# $\mathrm{KL}(\pi_{\mathrm{ref}}\,\|\,\pi)$. Sources are those in [arXiv 2506.09477](https://arxiv.org/abs/2506.09477)
# unless named.
#
# ## From symptom to chapter
#
# - **"My KL loss does nothing"**: k1 as a loss, or a KL that was detached or computed under `no_grad`. Chapters
#   [2](02_gradient_estimates) and [3](03_minimizing_kl).
# - **"A larger β gave a larger KL"**: k1 as a loss: its noise grows with β and its mean stays zero.
#   [Chapter 4](04_regularized_reward).
# - **"KL went negative"**: k1 on few samples, or samples that are not from the policy whose log-probs are used (top-p,
#   another temperature, stale rollouts). Chapters [1](01_value_estimates) and [6](06_off_policy).
# - **"Answers got shorter"**: a sequence-level KL whose cheapest way out is to end at once.
#   [Chapter 7](07_distillation).
# - **"Answers got longer"**: k1 divided by each sequence's own length. [Chapter 5](05_sequences).
# - **"At the same KL my reward is lower than theirs"**: k3 as a loss has another optimum.
#   [Chapter 4](04_regularized_reward).
# - **"One rare token blew up the run"**: k3, as a loss or as a value, far from the reference. Chapters
#   [1](01_value_estimates) and [3](03_minimizing_kl).
# - **"Fine on-policy, wrong with several updates per batch"**: ratios missing, or per token instead of per prefix.
#   [Chapter 6](06_off_policy).
# - **"Which one does my code compute?"**: ask `klnb audit module:function`.
#
# ## Which one when
#
# From what the other chapters measured. (In the pipeline they run first; opened on its own, this chapter leaves the
# table out until they have.)

# %%
CHAPTERS = ["01_value_estimates", "02_gradient_estimates", "03_minimizing_kl", "04_regularized_reward", "05_sequences"]
files = {name[:2]: ROOT / measured / f"{name}.json" for name in CHAPTERS}
missing = [number for number, file in files.items() if not file.exists()]
numbers = {}
if not missing:
    d = {number: json.loads(file.read_text()) for number, file in files.items()}
    numbers["quiet"] = d["01"]["crossover"]["kl_at_1"]
    numbers["baseline"] = next(row["share"] for row in d["02"]["leave_one_out_share"] if row["scale"] == 1)
    numbers["few"], stuck = next(iter(d["03"]["stuck"].items()))
    numbers["stuck"] = stuck["k3"]
    numbers["tenth"] = d["04"]["low_kl"]["one position"]["tenth"]["F_tok"]
    numbers["weak"] = [d["04"]["weak_kl"][0][0][i] for i in (0, -1)]
    numbers["away"] = min(min(d["04"]["sequences"][which]["k3"]) for which in ("target", "swapped"))
    numbers["rb"] = np.mean(np.array(d["05"]["crossover"]["rao-blackwell"]) < 1)
    numbers["k3"] = [np.median(d["05"]["crossover"]["reward-to-go-k3"][i]) for i in (0, -1)]

# %%
ADVICE = """| case | use | because |
|---|---|---|
| to *read* a KL off a log | k1, averaged; k3 near the reference | k3 is quieter below {quiet:.2f} nats a position |
| one token per sample | `score` (= k2), or `sequence` with `group_size` | a baseline helps on {baseline:.0%} of pairs |
| sequences, on-policy | `reward-to-go` with `group_size` | k3 ended at least {away:.2f} from both optima |
| … full logits at hand | `rao-blackwell` | less variance than reward-to-go on {rb:.0%} of pairs |
| … sure to stay near the reference | `reward-to-go-k3` | variance × {k3[0]:.2f} near, × {k3[1]:.1f} far |
| a very low KL | any but k1 | k3 is within 10% of the right gradient below {tenth:.3f} nats |
| stale rollouts | `reward-to-go` with `behavior_logp` | exact at any staleness, on samples π was not fitted to |
| never | k1 as a loss | larger β, larger KL: {weak[0]:.1f} to {weak[1]:.1f} nats under a weak reward |
| not on few samples | k3 as a loss | {stuck:.0%} of runs ended in a corner ({few}) |"""
display(Markdown(ADVICE.format(**numbers) if numbers else f"Run chapters {', '.join(missing)} first."))

# %% [markdown]
# ## Summary
#
# A good *value* makes no good *gradient*: the samples move with the policy, and autograd does not see it. Of the usual
# losses one is inert (k1), one follows the other divergence token by token (k3), one the right one token by token (k2),
# and the sequence-level ones are right.
#
# Start with [the values](01_value_estimates), or go where your symptom points.
