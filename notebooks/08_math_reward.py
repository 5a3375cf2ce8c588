# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Reward against KL: what a regulariser buys
#
# **Claim.** A language model that maximises the reward of right answers pays for it in
# $\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$ to where it started. A KL term lowers the price, whichever estimator it
# has, but for k1 as a loss, which regularises nothing. Between estimators that share an expected gradient, noise makes
# the difference.
#
# This follows Figure 7 of Tang & Munos ([arXiv 2506.09477](https://arxiv.org/abs/2506.09477)). At scale `tiny` the
# policy is the larger model of the [chapter before](07_distillation), sampled at temperature 3: it knows how to add and
# makes slips, which a reward can teach it to avoid within few steps (pilot runs on a seed not shown chose this: the
# smaller model gained almost no reward in as many). The pipeline makes the runs in minutes on any CPU.
# At scale `math-demo` the same notebook takes two optimiser steps with SmolLM2-135M on MATH (`make math-demo`). This
# notebook reads runs (seconds), and makes those that are missing.

# %%
import inspect
import json
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from klnb import figures as fg
from klnb import tasks, training
from klnb.models import load
from klnb.paths import ROOT
from klnb.runs import specs, sweep
from klnb.stats import generator, interval, paired

# %% tags=["parameters"]
scale = "tiny"  # "smoke": a model that has learnt nothing; "math-demo": SmolLM2-135M on MATH, two steps
names = ["none", "k1", "k2", "k3", "sequence", "reward-to-go", "reward-to-go-k3", "rao-blackwell"]
seeds = [0, 1, 2, 3, 4]
betas = [0.0, 0.01, 0.03, 0.1, 0.3, 1.0]  # 0 goes with "none": no KL term
train = {}  # settings of all runs
data_dir = ""  # a folder with MATH's train.jsonl and test.jsonl, where train["task"] is "math"
results = "results"
figures = "figures"

# %%
fg.style()
RESULTS, FIGURES = ROOT / results, ROOT / figures
RUNS = Path(tempfile.mkdtemp()) if scale == "smoke" else RESULTS / "08_math_reward"
KL_NAMES = [name for name in names if name != "none"]
STRENGTHS = [beta for beta in betas if beta > 0]
if data_dir:
    train = train | {"data_dir": str(ROOT / data_dir)}
print(f"{scale=} {names=} {seeds=} {betas=}\n{train=}")

# %% [markdown]
# ## The objective
#
# $$
# \max_\pi\; \mathbb{E}_{y\sim\pi}[R(y)]-\beta\,\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}}),
# $$
#
# with $\pi_{\mathrm{ref}}$ the frozen policy that training starts from and $R=1$ for a right answer in the last
# `\boxed{}`, else 0. The gradient of the reward is the score function with the mean of the group's other rewards as
# baseline; nothing is divided by a standard deviation or a length. The KL term is `klnb.kl_loss` with a name off the
# shelf, and nothing else differs between runs. "none" leaves it out.

# %%
print(inspect.getsource(training.objective))

# %%
if scale == "smoke":
    tokenizer = tasks.arithmetic_tokenizer()
    model = training.new_model(tokenizer, generator(0, "student"), width=8, layers=1)
    model.save_pretrained(RUNS / "student"), tokenizer.save_pretrained(RUNS / "student")
    train = train | {role: str(RUNS / "student") for role in ("policy", "ref")}
runs = {name: sweep(specs(train, seeds, name, betas), RUNS / name) for name in names}
done = runs[names[0]][0]["settings"]
print(json.dumps({k: v for k, v in done.items() if k not in ("name", "beta", "seed")}, indent=1))

# %% [markdown]
# ## What the model says
#
# The same prompts before and after one of the runs, each with one sampled answer, its reward, its log-probability under
# the policy and the reference, and the estimate of the KL from this one sample,
# $\log\pi(y)-\log\pi_{\mathrm{ref}}(y)$.

# %%
shown = runs[names[-1]][-1]
print(f"{names[-1]}, β = {shown['settings']['beta']:g}, seed {shown['settings']['seed']}")
for row in shown["samples"][:: done["group"]]:
    print(f"\n{row['problem']}\n(answer: {row['answer']})")
    for when in ("before", "after"):
        s = row[when]
        print(f"--- {when} training: reward {s['accuracy']:g}, {s['length']:g} tokens, log π {s['logp']:.2f}, "
              f"log π_ref {s['ref_logp']:.2f}, KL estimate {s['logp'] - s['ref_logp']:+.3f}\n{s['text']}")  # fmt: skip

# %% [markdown]
# At scale `math-demo` every sample that a step trained on is kept as well: short problems of level 1 whose answer is 1
# or 2, with worked examples before each, chosen after broader sets had given a model of 135M parameters no reward at
# all, and after its own rewards had been seen. They show that the path works and measure nothing else.
# Log-probabilities and the three estimates of $\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$ are sums over a sample's
# tokens, in nats; at the first step the policy is the reference, and all three are 0.

# %%
sampled = pd.DataFrame(shown["rows"])
if len(sampled):
    print(f"{load(train['policy'])[0].provenance}\n\nthe first prompt:\n{sampled['prompt'][0]}\n")
    for i, of_step in sampled.groupby("step"):
        print(f"step {i}: mean reward {of_step['accuracy'].mean():.4f} of {len(of_step)} samples, "
              f"gradient norm {shown['steps']['gradient_norm'][i]:.3g}")  # fmt: skip
    print(f"samples that math-verify gave up on: {tasks.verifier().counts}")

# %%
pd.set_option("display.max_rows", 100, "display.max_colwidth", 100)
columns = ["step", "answer", "text", "accuracy", "length", "logp", "ref_logp", "k1", "k2", "k3"]
sampled[columns].rename(columns={"accuracy": "reward"}).round(3) if len(sampled) else None

# %%
METRICS = ("accuracy", "kl", "length", "entropy", "distinct")
ends = {(name, beta): {m: np.array([r["evals"][-1][m][0] for r in runs[name] if r["settings"]["beta"] == beta])
                       for m in METRICS} for name in names for beta in betas if (beta == 0) == (name == "none")}
start = {m: np.array([r["evals"][0][m][0] for r in runs[names[0]][: len(seeds)]]) for m in METRICS}
kept = {"start": {m: x.tolist() for m, x in start.items()}, "settings": done,
        "ends": [{"name": n, "beta": b, **{m: x.tolist() for m, x in e.items()}} for (n, b), e in ends.items()],
        "samples": shown["samples"], "steps": shown["steps"], "rows": shown["rows"]}  # fmt: skip
RESULTS.mkdir(parents=True, exist_ok=True)
(RESULTS / "08_math_reward.json").write_text(json.dumps(kept) + "\n")
pd.DataFrame({key: {m: x.mean() for m, x in e.items()} for key, e in ends.items()}).T.round(3)

# %% [markdown]
# ## What the intervals say
#
# Differences at the end of training between runs with the same seed: mean and 95% Student-t interval. (With fewer than
# two seeds there are none.) A star marks an interval that leaves out 0; of so many intervals one in twenty does by
# chance.


# %%
def differences(metric, other):
    """Table of estimator × β: its runs minus those of `other`, a function of β; kept in the data as well."""
    rows = {}
    for name in (n for n in KL_NAMES if len(seeds) > 1):
        for beta in STRENGTHS:
            d = paired(ends[name, beta][metric], other(beta)[metric])
            kept.setdefault("differences", []).append({"metric": metric, "name": name, "beta": beta, **d})
            star = "*" if d["low"] > 0 or d["high"] < 0 else ""
            rows.setdefault(name, {})[f"β = {beta:g}"] = "{mean:+.2g} [{low:.2g}, {high:.2g}]".format(**d) + star
    return pd.DataFrame(rows).T


# %%
free = ends.get(("none", 0.0))
if free and len(seeds) > 1:
    gain = paired(free["accuracy"], start["accuracy"])
    print("without a KL term the reward changes by {mean:+.3f} [{low:.3f}, {high:.3f}]".format(**gain))
    print("KL(π‖π_ref): with the KL term minus without one")
    display(differences("kl", lambda beta: free))  # noqa: F821
if scale == "tiny":
    at = max(STRENGTHS)
    changes = {name: paired(ends[name, at]["kl"], free["kl"]) for name in KL_NAMES}
    assert changes["k1"]["low"] > 0 and all(d["high"] < 0 for name, d in changes.items() if name != "k1")
    assert gain["low"] > 0

# %% [markdown]
# Against reward-to-go at the same $\beta$, first the KL, then the reward:

# %%
if "reward-to-go" in names and len(seeds) > 1:
    for metric in ("kl", "accuracy"):
        display(differences(metric, lambda beta: ends["reward-to-go", beta]).drop("reward-to-go"))  # noqa: F821
_ = (RESULTS / "08_math_reward.json").write_text(json.dumps(kept) + "\n")


# %%
def caption(title, quantity, setting, alt):
    return {
        "title": title, "quantity": quantity,
        "setting": f"{setting}; {done['prompts']} prompts × {done['group']} completions a step, {done['steps']} steps "
                   f"of Adam at {done['lr']:g}; β from {min(STRENGTHS):g} to {max(STRENGTHS):g}, and no KL term; "
                   f"{done['eval_prompts']} held-out prompts × {done['group']} fresh samples an evaluation",
        "seeds": ", ".join(map(str, seeds)), "n": f"{len(seeds)} runs for each estimator and β",
        "centre": "mean over runs", "band": "95% Student-t interval of the mean",
        "scale": scale, "device": done["device"], "dtype": done["dtype"], "notebook": "notebooks/08_math_reward.py",
        "alt": alt,
    }  # fmt: skip


def bars(ax, x, y, **look):
    """A point with its interval in both directions."""
    (x, *xs), (y, *ys) = interval(x), interval(y)
    ax.plot(xs, [y, y], color=look["color"], linewidth=0.8, alpha=0.6)
    ax.plot([x, x], ys, color=look["color"], linewidth=0.8, alpha=0.6)
    return x, y


# %% [markdown]
# ## The frontier
#
# Each line is one estimator, each point one $\beta$, from the weakest on the right to the strongest on the left. Up and
# to the left is better: more reward for less KL.

# %%
if len(seeds) > 1 and scale != "math-demo":
    fig, ax = plt.subplots(figsize=(7, 4.6))
    for name in KL_NAMES:
        points = [bars(ax, ends[name, b]["kl"], ends[name, b]["accuracy"], **fg.look(name)) for b in STRENGTHS]
        ax.plot(*zip(*points), marker="o", markersize=4, **fg.look(name))
    for text, point in {"start": start, "no KL term": free}.items():
        x, y = bars(ax, point["kl"], point["accuracy"], color="black")
        ax.plot(x, y, marker="*", color="black", markersize=9, linestyle="none", label="_")
        ax.annotate(text, (x, y), xytext=(6, -12), textcoords="offset points", fontsize=9)
    ax.set(xlabel=r"$\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$, nats a sequence", ylabel="reward (accuracy)")
    ax.set_xscale("symlog")
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set_xlim(left=-0.1)
    ax.legend(loc="lower left")
    fg.save(fig, "08_math_reward", caption(
        "Reward against KL, by estimator and weight", "reward and KL(π‖π_ref) (full-vocabulary sums on the policy's "
        "samples) at the end of training, on held-out prompts", "maximise reward − β·KL term",
        alt="Reward over divergence: one line of points per estimator, and two stars: start and no KL term."), FIGURES)

# %% [markdown]
# ## Low KL: what is left to tell the estimators apart
#
# All fields but zero agree to first order at $\pi_{\mathrm{ref}}$ ([sequences](05_sequences)). Below, differences from
# reward-to-go at the same $\beta$, paired by seed. At small $\beta$ there is little to tell the estimators apart by:
# the KL term hardly matters. At large $\beta$ they differ although the policy is close to $\pi_{\mathrm{ref}}$. The
# sequence-level forms share one field, so their differences are noise, which the KL term adds to each step; k2 and k3
# follow other fields, and these runs cannot tell field from noise.

# %%
if len(seeds) > 1 and scale != "math-demo":
    fig, axes = plt.subplots(2, 1, figsize=(7, 6), sharex=True)
    for ax, metric in zip(axes, ("kl", "accuracy")):
        for name in (n for n in KL_NAMES if n != "reward-to-go"):
            base = [ends["reward-to-go", b][metric] for b in STRENGTHS]
            fg.curve(ax, STRENGTHS, np.array([ends[name, b][metric] - x for b, x in zip(STRENGTHS, base)]).T, name)
        ax.axhline(0, color=fg.COLORS["reward-to-go"], linewidth=1.8)
        ax.set(xscale="log", xlim=(min(STRENGTHS), max(STRENGTHS)))
    axes[0].set_yscale("symlog", linthresh=1.0)  # k1 is far out
    axes[0].yaxis.set_major_formatter("{x:g}")
    for ax in axes:
        fg.label_ends(ax)
    axes[0].set_ylabel("difference in\n" + r"$\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$, nats")
    axes[1].set(ylabel="difference in reward", xlabel=r"weight $\beta$ of the KL term")
    fg.save(fig, "08_low_kl", caption(
        "What the choice of estimator changes, by the weight of the KL term",
        "difference from reward-to-go, same seed and β, in KL(π‖π_ref) (top) and in reward (bottom)",
        "maximise reward − β·KL term",
        alt="Two panels of curves over β: differences from reward-to-go in divergence and in reward."), FIGURES)

# %% [markdown]
# ## Summary
#
# - Without a KL term the reward rises and the policy drifts away; a KL term trades one for the other.
# - **k1 as a loss** pulls nothing back. Multiplied by a large $\beta$, its noise is all that remains: the policy ends
#   farther from $\pi_{\mathrm{ref}}$ than without a KL term, and the reward is gone.
# - The others lie on one frontier at small $\beta$. At large $\beta$ k2 and k3 as losses hold the policy closest, at
#   less reward than reward-to-go. The sequence-level forms, which share a field, differ by little, in the order of
#   their noise if at all: the intervals above say where that is certain.
# - Far from $\pi_{\mathrm{ref}}$ the bias shows: see [distillation](07_distillation), where k3 falls behind, and
#   [the exact optima](04_regularized_reward).
