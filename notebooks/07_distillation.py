# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Distillation of a language model: which divergence went down?
#
# **Claim.** A student trained on its own samples gets closer to its teacher, in
# $\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$, with the sequence-level gradient and a baseline than with k3 as a loss,
# and away from it with k1 as a loss. Noise decides the rest: k2 leaves out most of the gradient, and does no worse
# for it here.
#
# This follows Figure 8 and §5.2 of Tang & Munos ([arXiv 2506.09477](https://arxiv.org/abs/2506.09477)) at a scale that
# any laptop can repeat: a teacher and a smaller student that the pipeline itself trained on sums and differences with
# worked steps. Here the reference $\pi_{\mathrm{ref}}$ is the teacher. The runs are made by the stages before this one
# (minutes); this notebook reads them (seconds), and makes those that are missing.

# %%
import inspect
import json
import tempfile
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch

from klnb import figures as fg
from klnb import tasks, training
from klnb.comparing import compare
from klnb.losses import token_logprobs
from klnb.models import completion_logits, eos_ids
from klnb.paths import PUBLISHED, ROOT
from klnb.runs import specs, sweep
from klnb.stats import generator, interval, paired

# %% tags=["parameters"]
scale = "tiny"  # "smoke": models that have learnt nothing, all made here
names = ["k1", "k2", "k3", "sequence", "reward-to-go", "reward-to-go-k3", "rao-blackwell"]
variable_names = ["k2", "k3", "reward-to-go"]
seeds = [0, 1, 2, 3, 4, 5]
train = {}  # settings of all runs
rates = {}  # learning rate of each estimator
variable = {}  # what differs where completions may end
compared = 512  # prompts for the alignment of the gradients
results = "results"
figures = "figures"

# %%
fg.style()
RESULTS, FIGURES = ROOT / results, ROOT / figures
RUNS = Path(tempfile.mkdtemp()) if scale == "smoke" else RESULTS
print(f"{scale=} {names=} {seeds=}\n{train=}\n{rates=}\n{variable_names=} {variable=}")

# %% [markdown]
# ## Teacher, student, problems
#
# Problems such as these, with operands of two and three digits, two operations, and the work in columns: each row is
# written from its units digit on. Both models learnt from the same problems; the student is smaller and was stopped
# early, when it wrote out about a quarter of held-out solutions without an error.


# %%
if scale == "smoke":
    reached, tokenizer = {}, tasks.arithmetic_tokenizer()
    for role, width in (("policy", 8), ("ref", 16)):
        model = training.new_model(tokenizer, generator(0, role), width=width, layers=1)
        model.save_pretrained(RUNS / role), tokenizer.save_pretrained(RUNS / role)
        reached[role] = {"parameters": model.num_parameters(), "steps": 0, "accuracy": 0.0, "greedy": 0.0}
    train = train | {role: str(RUNS / role) for role in ("policy", "ref")}
else:
    reached = json.loads((ROOT / train["ref"]).with_name("models.json").read_text())
for role, row in reached.items():
    print("{}: {parameters:,} weights, {steps} steps of training, right answers on held-out problems {accuracy:.1%}, "
          "greedy {greedy:.1%}".format(role, **row))  # fmt: skip
if scale == "tiny":
    assert reached["teacher"]["accuracy"] >= 0.8 and 0.1 <= reached["student"]["accuracy"] <= 0.6

# %% [markdown]
# ## The loop
#
# One loop serves distillation and, in the [next chapter](08_math_reward), reward maximisation. A step samples
# completions from the policy afresh (on-policy: full distribution, no top-p or top-k), then takes one step on this
# loss, which sums over tokens and averages over sequences; there is no dropout, and the logits of both models are
# divided by the same temperature:

# %%
print(inspect.getsource(training.objective))

# %% [markdown]
# and this is the step. The gradient is clipped by its norm, after it was measured. The batch goes through the model in
# parts of whole groups, from whose spread the variance of the gradient can be told without further samples:

# %%
print(inspect.getsource(training.step))
train = training.DEFAULTS | train
print("settings:", json.dumps(train, indent=1))

# %% [markdown]
# ## Main panel: completions of fixed length
#
# EOS and padding are barred in both models, so that all completions have as many tokens as a worked solution. That
# keeps one way to a small KL out of the game, which the second panel shows: ending early. Both models are softened by
# the same temperature, in sampling as in log-probabilities, as is usual in distillation: at temperature 1 this teacher
# is nearly certain of every token, and its few surprises would be all that the gradients are about. Accuracy is that
# of samples at this temperature, so it is lower than above.


# %%
def runs(folder, name, **changes):
    """Records of one estimator's runs, made where they are missing."""
    settings = train | ({"lr": rates[name]} if name in rates else {}) | changes
    return sweep(specs(settings, seeds, name), RUNS / folder / name)


def curves(records):
    """{metric: [seeds, evaluations]}"""
    metrics = records[0]["evals"][0].keys() - {"step"}
    return {m: np.array([[e[m][0] for e in r["evals"]] for r in records]) for m in metrics}


fixed = {name: runs("07_distillation", name) for name in names}
steps = [e["step"] for e in fixed[names[0]][0]["evals"]]
data = {name: curves(records) for name, records in fixed.items()}
errors = {m: np.mean([e[m][1] for records in fixed.values() for r in records for e in r["evals"]]) for m in data["k1"]}
print("mean standard error of one evaluation:", {m: float(f"{e:.2g}") for m, e in sorted(errors.items())})

# %%
METRICS = {"kl": "KL(π‖π_ref)", "swapped": "KL(π_ref‖π)", "accuracy": "accuracy", "entropy": "entropy, nats a token",
           "distinct": "distinct samples", "length": "length"}  # fmt: skip


def cell(runs):
    """Mean over runs ± half of its 95% Student-t interval; of one run, its value."""
    if len(runs) == 1:
        return f"{runs[0]:.3g}"
    mean, low, _ = interval(runs)
    return f"{mean:.3g} ± {mean - low:.2g}"


def table(data):
    """Each estimator at its last evaluation, and the mean at the first, where all are the same model."""
    first = next(iter(data.values()))
    rows = {"start": {text: f"{first[m][:, 0].mean():.3g}" for m, text in METRICS.items()}}
    rows |= {name: {text: cell(c[m][:, -1]) for m, text in METRICS.items()} for name, c in data.items()}
    return pd.DataFrame(rows).T


table(data)

# %% [markdown]
# ## What the intervals say
#
# Differences at the end of training between runs with the same seed, so with the same start and the same prompts: mean
# and 95% Student-t interval. A sentence is printed as true only where the interval leaves out 0.

# %%
end = {name: {m: c[m][:, -1] for m in METRICS} for name, c in data.items()}
start = {m: data[names[0]][m][:, 0] for m in METRICS}
CLAIMS = [("target KL: reward-to-go below k2", end["k2"]["kl"], end["reward-to-go"]["kl"]),
          ("target KL: reward-to-go below k3", end["k3"]["kl"], end["reward-to-go"]["kl"]),
          ("target KL: k2 below k3", end["k3"]["kl"], end["k2"]["kl"]),
          ("target KL: k1 above its start", end["k1"]["kl"], start["kl"]),
          ("target KL: rao-blackwell below reward-to-go", end["reward-to-go"]["kl"], end["rao-blackwell"]["kl"]),
          ("target KL: reward-to-go below sequence", end["sequence"]["kl"], end["reward-to-go"]["kl"]),
          ("target KL: reward-to-go below reward-to-go-k3", end["reward-to-go-k3"]["kl"], end["reward-to-go"]["kl"]),
          *((f"swapped KL: k3 below {name}", end[name]["swapped"], end["k3"]["swapped"])
            for name in names if name != "k3")]  # fmt: skip


# %%
def verdict(difference):
    return "yes" if difference["low"] > 0 else "NO, the opposite" if difference["high"] < 0 else "undecided"


claims = {claim: paired(above, below) for claim, above, below in CLAIMS}
for claim, d in claims.items():
    print("{}: {} (by {mean:.3g}, interval {low:.3g} to {high:.3g}, n = {n})".format(claim, verdict(d), **d))
SURE = ("reward-to-go below k3", "k2 below k3", "k1 above its start", "reward-to-go below sequence")
assert scale != "tiny" or all(verdict(claims[f"target KL: {claim}"]) == "yes" for claim in SURE)

# %% [markdown]
# Theory suggests the first sentence and those on the swapped divergence; the intervals do not bear them out. **The
# right gradient is not seen to be the faster one.** $R_{\mathrm{seq}}$ differs from k2's $R_{\mathrm{tok}}$ by what a
# token does to the divergence of the tokens after it. That is most of it here, as the next section shows, but in a
# batch this small it is so noisy, and needs so low a learning rate, that no advantage shows. Where what is left out
# matters is shown by [enumeration](05_sequences), and below, where completions may end.
#
# **k3 does not bring the swapped divergence down most.** Its $F_{\mathrm{tok}}$ takes the prefixes from the student, so
# it is not the gradient of $\mathrm{KL}(\pi_{\mathrm{ref}}\,\|\,\pi)$ over sequences; and its samples weigh
# $\pi_{\mathrm{ref}}/\pi-1$, without bound, so that only the lower learning rates survive.

# %%
noise = {}
for name, records in fixed.items():
    norms, variances = (np.array([r["steps"][f"gradient_{k}"] for r in records]) for k in ("norm", "variance"))
    noise[name] = {"norm": norms.tolist(), "variance": variances.tolist()}
    print(f"{name}: gradient norm {norms[:, 0].mean():.3g} at the first step, {norms[:, -20:].mean():.3g} in the last "
          f"20; variance {variances.mean():.3g}, {variances.sum() / (norms**2).sum():.0%} of the squared norm; "
          f"{(norms > train['clip']).mean():.0%} of the steps clipped")  # fmt: skip

# %% [markdown]
# ## Does it matter in this run?
#
# Before training anything one can ask how each estimator's expected gradient lies to $R_{\mathrm{seq}}$ on the model
# at hand. `klnb.compare` answers from one batch of the policy's own samples, with products of disjoint blocks only, so
# that noise neither lowers a cosine nor raises a norm. Here at the start of training:


# %%
def with_reference(policy, ref, tokenizer, s):
    """A batch of the policy's samples as `compare` takes it, with the reference's log-probs and logits."""
    barred = sorted({*eos_ids(ref, tokenizer), tokenizer.pad_token_id})
    records = training.problems(s["problems"], split="train")[-compared:]
    batch = training.sample(policy, tokenizer, records, s, generator(seeds[0], "compare"), barred)
    sampler = {"temperature": s["temperature"], "barred": barred}
    where = batch["tokens"], batch["prompt_mask"], batch["completion"]
    with torch.no_grad():
        logits = completion_logits(ref, *where, **sampler, group=s["group"])
    rows = {"tokens": torch.cat([where[0], where[2]], 1), "ref_logits": logits, "group_size": s["group"], **sampler}
    return rows | {"ref_logp": token_logprobs(logits, where[2]), "prompt_mask": where[1], "mask": batch["mask"]}


s = training.DEFAULTS | train | {"name": names[0], "seed": seeds[0]}
policy, ref, tokenizer = training.models(s)
rows = with_reference(policy, ref, tokenizer, s)

# %%
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    aligned = compare(policy, rows, names, draws=min(16, compared))
print(*(str(w.message) for w in told), sep="\n")
partial = aligned.set_index("name").loc["k2"]
assert scale != "tiny" or partial["cosine_high"] < 1 and partial["norm_ratio_high"] < 1
aligned.set_index("name").round(3)

# %% [markdown]
# Four of these are right: cosine and ratio of norms 1 up to their intervals. k1 has no expected gradient to align, and
# a row is empty too where noise hides what there is, as can happen to the forms with k3, whose weights have no bound,
# and to the whole-sequence one. k2 shows what it
# leaves out at this start: the part it keeps is much shorter than $R_{\mathrm{seq}}$ and points elsewhere. So what the
# intervals above say of k2 is not that the two agree, but that with so few samples a step less noise makes up for it.

# %%
RESULTS.mkdir(parents=True, exist_ok=True)
kept = {"steps": steps, "seeds": seeds, "models": reached, "noise": noise, "standard_errors": errors,
        "alignment": json.loads(aligned.to_json(orient="records")),
        "evaluations": {name: {m: c[m].tolist() for m in c} for name, c in data.items()},
        "claims": {claim: d | {"verdict": verdict(d)} for claim, d in claims.items()}}  # fmt: skip
weights = ", ".join("{} of {parameters:,} weights".format(role, **row) for role, row in reached.items())


def caption(title, quantity, setting, count, alt, s=train, rates="learning rates from one grid on another seed"):
    return {
        "title": title, "quantity": quantity,
        "setting": f"{setting}; {weights}; {train['prompts']} prompts × {train['group']} completions a step, "
                   f"{s['steps']} steps of Adam, {rates}; leave-one-out baselines where there are any; "
                   f"{s['eval_prompts']} held-out prompts an evaluation",
        "seeds": ", ".join(map(str, seeds)), "n": f"{len(seeds)} runs for each of {count} estimators",
        "centre": "mean over runs", "band": "95% Student-t interval of the mean; thin lines are runs",
        "scale": scale, "device": "CPU, one thread a run", "dtype": "float32",
        "notebook": "notebooks/07_distillation.py", "alt": alt,
    }  # fmt: skip


# %%
fig, axes = plt.subplots(2, 1, figsize=(7, 6.4), sharex=True)
for ax, metric in zip(axes, ("kl", "swapped")):
    for name in names:
        fg.curve(ax, steps, data[name][metric], name)
    ax.set(yscale="log", xlim=(0, steps[-1]))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter("{x:g}")
    fg.label_ends(ax)
axes[0].set_ylabel(r"$\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$, nats a sequence")
axes[1].set_ylabel(r"$\mathrm{KL}(\pi_{\mathrm{ref}}\,\|\,\pi)$, nats a sequence")
axes[1].set_xlabel("step")
fg.save(fig, "07_distillation", caption(
    "Distillation: the target and the swapped divergence under each estimator",
    "KL(π‖π_ref) on samples of the student (top), KL(π_ref‖π) on samples of the teacher (bottom); full-vocabulary sums",
    "completions of fixed length", len(names),
    alt="Two panels of seven curves over training steps, one panel for each divergence."), FIGURES)

# %% [markdown]
# ## Besides the divergence
#
# A small KL can hide a policy that says one thing only. Entropy and the share of distinct samples tell:

# %%
fig, axes = plt.subplots(3, 1, figsize=(7, 7), sharex=True)
for ax, metric in zip(axes, ("accuracy", "entropy", "distinct")):
    for name in names:
        fg.curve(ax, steps, data[name][metric], name)
    ax.set_xlim(0, steps[-1])
    ax.set_ylabel({"entropy": "entropy,\nnats a token", "distinct": "share of\ndistinct samples"}.get(metric, metric))
    fg.label_ends(ax, gap=0.1)
axes[-1].set_xlabel("step")
fg.save(fig, "07_health", caption(
    "What became of the student", "share of right answers, entropy, share of a prompt's samples that differ",
    "completions of fixed length", len(names),
    alt="Three panels of seven curves over training steps: accuracy, entropy and share of distinct samples."), FIGURES)

# %% [markdown]
# ## Second panel: completions that may end
#
# Now EOS is allowed. $\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$ over sequences then has a second, degenerate way
# down: a completion that ends at once costs $-\log\pi_{\mathrm{ref}}(\mathrm{EOS})$ at its one token and nothing
# after it. That is the right gradient of a target that has such an optimum, not an error of the estimator. The
# per-token losses do not see what ending saves. Length and entropy tell the two apart. The learning rate is one for
# all three here and a high one, twice that of reward-to-go above: it decides how likely training is to fall into this
# optimum, and at the lower rate runs stay clear of it for as long as they are followed here.

# %%
ending = {name: runs("07_variable", name, **variable) for name in variable_names}
loose = {name: curves(records) for name, records in ending.items()}
loose_steps = [e["step"] for e in ending[variable_names[0]][0]["evals"]]
kept["variable"] = {name: {m: c[m].tolist() for m in c} for name, c in loose.items()}
for name, c in loose.items():
    short = (c["length"][:, -1] < 0.5 * c["length"][:, 0]).sum()
    print(f"{name}: {short} of {len(seeds)} runs ended with less than half the length they had at the start")
table(loose)

# %%
shorter = paired(loose["k2"]["length"][:, -1], loose["reward-to-go"]["length"][:, -1])
kept["claims"]["variable length: reward-to-go shorter than k2"] = shorter | {"verdict": verdict(shorter)}
print("reward-to-go ends with shorter completions than k2: {} (by {mean:.3g} tokens, interval {low:.3g} to "
      "{high:.3g})".format(verdict(shorter), **shorter))  # fmt: skip
(RESULTS / "07_distillation.json").write_text(json.dumps(kept) + "\n")

# %%
fig, axes = plt.subplots(2, 2, figsize=(7, 5.2), sharex=True)
for ax, metric in zip(axes.flat, ("kl", "length", "entropy", "accuracy")):
    for name in variable_names:
        fg.curve(ax, loose_steps, loose[name][metric], name)
    ax.set(ylabel=METRICS[metric], xlim=(0, loose_steps[-1]))
axes[0, 0].set(ylabel=r"$\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$, nats a sequence")
axes[0, 1].set(ylim=(0, None), ylabel="length, tokens")
for ax in axes[1]:
    ax.set_xlabel("step")
handles, labels = axes[0, 0].get_legend_handles_labels()
fig.legend(handles, labels, loc="outside upper center", ncols=3)
fg.save(fig, "07_variable_length", caption(
    "With completions that may end, a small divergence can be a short answer",
    "KL(π‖π_ref) from full-vocabulary sums on the student's samples, length, entropy, share of right answers",
    "EOS allowed", len(variable_names),
    alt="Four panels over training steps, three curves each: target divergence, length, entropy, accuracy.",
    s=train | variable, rates=f"learning rate {(train | variable)['lr']:g} for all, raised on the seeds shown until "
                              "runs collapsed"), FIGURES)

# %% [markdown]
# ## A real language model
#
# The same loop on SmolLM2-135M-Instruct as teacher, and as student its own first blocks, on the problems of MATH. These
# runs take hours on a CPU: `make smollm2` makes them, `make publish` puts each into `published/` as it ends, with the
# commit and versions it was made with, and this notebook only reads them. Three seeds are few, and one is one. The
# learning rate is that of a grid on k2 (appendix).

# %%
records = [json.loads(file.read_text()) for file in sorted((PUBLISHED / "smollm2").glob("*/beta1-seed*.json"))]
common = [json.dumps(r["settings"] | {"name": "", "seed": 0}) for r in records]
usual = max(common, key=common.count)  # settings may change while runs are still being made
records = [r for r, own in zip(records, common) if own == usual]
real = {name: [r for r in records if r["settings"]["name"] == name] for name in fg.LABELS}
real = {name: of_name for name, of_name in real.items() if of_name}
counts = {name: len(records) for name, records in real.items()}
first = next(iter(real.values()))[0]
for part in ("policy", "ref"):
    print(part, {k: v for k, v in first["used"]["models"][part].items() if k != "sha256"})
real_s = first["settings"]
real_steps = [e["step"] for e in first["evals"]]
real_data = {name: curves(records) for name, records in real.items()}
print("runs:", counts, "seeds:", sorted({r["settings"]["seed"] for rs in real.values() for r in rs}))

# %%
table(real_data)

# %% [markdown]
# Differences between runs of the same seed, as above, after 20 steps (chosen on the grid's seed) and at the end:

# %%
real_claims = {}
for above, below in (("k2", "reward-to-go"), ("k3", "reward-to-go"), ("k3", "k2"), ("rao-blackwell", "reward-to-go")):
    n = min(counts.get(above, 0), counts.get(below, 0))  # seeds are published in their order
    for step in (20, real_steps[-1]) if n > 1 else ():
        a, b = (real_data[name]["kl"][:n, real_steps.index(step)] for name in (above, below))
        real_claims[f"step {step}, target KL: {below} below {above}"] = d = paired(a, b)
        print("step {}, target KL: {} below {}: {} (by {mean:.3g}, interval {low:.3g} to {high:.3g}, n = {n})".format(
            step, below, above, verdict(d), **d))  # fmt: skip

# %%
kept["smollm2"] = {"steps": real_steps, "counts": counts, "claims": real_claims,
                   "evaluations": {name: {m: c[m].tolist() for m in c} for name, c in real_data.items()}}  # fmt: skip
_ = (RESULTS / "07_distillation.json").write_text(json.dumps(kept) + "\n")

# %%
fig, axes = plt.subplots(3, 1, figsize=(7, 8), sharex=True)
axes[0].set(yscale="log", yticks=(ticks := [20, 30, 40, 60, 80, 100, 150, 200]), yticklabels=ticks)
axes[0].minorticks_off()
for ax, metric in zip(axes, ("kl", "entropy", "distinct")):
    for name, c in real_data.items():
        fg.curve(ax, real_steps, c[metric], name)
    values = np.concatenate([c[metric].ravel() for c in real_data.values()])  # few runs: bands go beyond all
    room = 0.05 * np.ptp(values)
    ax.set(xlim=(0, real_steps[-1]), ylim=(values.min() - room, values.max() + room), ylabel=METRICS[metric])
    fg.label_ends(ax)
axes[0].set(ylabel=r"$\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$, nats a sequence")
axes[-1].set_xlabel("step")
few = ", ".join(f"{name} {n}" for name, n in counts.items())
source = first["used"]["models"]["ref"]
fg.save(fig, "07_smollm2", caption(
    "Distillation of SmolLM2-135M into its own first blocks",
    "KL(π‖π_ref) from full-vocabulary sums on the student's samples; entropy; share of a prompt's samples that differ",
    "", 0, alt="Three panels of curves over training steps: target divergence, entropy, share of distinct samples.") | {
    "setting": f"MATH problems of levels {real_s['levels']}; student: the first {real_s['policy_layers']} blocks of "
               f"{source['model']}, teacher: all of it, weights {source['weights']}; completions of "
               f"{real_s['max_new_tokens']} tokens, EOS barred; {real_s['prompts']} prompts × {real_s['group']} "
               f"completions a step, {real_s['steps']} steps of AdamW, learning rate {real_s['lr']:g} from a grid on "
               f"k2 with another seed; {real_s['eval_prompts']} held-out prompts an evaluation",
    "scale": "smollm2", "dtype": f"{real_s['dtype']} autocast, losses and optimiser in float32",
    "n": f"runs: {few} (a single run has no band)",
    "band": "95% Student-t interval of the mean, wide with so few runs and cut at the axes; thin lines are runs",
    "seeds": ", ".join(str(i) for i in sorted({r["settings"]["seed"] for rs in real.values() for r in rs})),
}, FIGURES)

# %% [markdown]
# What such a student says, before and after, on one held-out problem:

# %%
print(first["samples"][0]["problem"])
for name, (run, *_) in ({"start": [first]} | real).items():
    shown = run["samples"][0]["before" if name == "start" else "after"]
    print(f"{name}: {shown['text']!r} (KL {shown['kl']:.0f} nats)")

# %% [markdown]
# **Here the low divergence is bought with entropy.** The sequence-level forms find, within some tens of steps, a phrase
# that the teacher expects to go on once it has begun. Said over and over it costs about a nat a token; where the share
# of distinct samples is one over the size of a group, all samples of a prompt are the same text, and the differences
# that a gradient lives on are gone. By $\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$, which asks about the student's own
# samples only, that is success; $\mathrm{KL}(\pi_{\mathrm{ref}}\,\|\,\pi)$, on the teacher's samples (table), rises
# meanwhile. k2 goes the same way later and less far, k3 as a loss the opposite way in both. So each field leads where
# it says, and these few runs, of a student too small for its teacher, do not say which makes the better model.

# %% [markdown]
# ## Appendix: how the settings were chosen
#
# Learning rates come from one grid, on a seed that no figure uses; for each estimator the rate with the lowest target
# KL at the end. `python tools/lr_grid.py` makes this table anew; the pipeline does not.
#
# The rest of the setting was chosen too, on that seed, and a reader should know how. At temperature 1 k2, k3 and
# reward-to-go ended within noise of each other, one run each; at temperature 2 they parted, and that is what is shown.
# So the gap to k3 is that of a regime picked for showing one. The rate of the second panel was raised after the grid's
# rates had shown no collapse there within so few steps, on the seeds that are shown.

# %%
grid = pd.read_csv(PUBLISHED / "lr_grid.csv")
assert not set(grid["seed"]) & set(seeds)
mine = grid[grid["section"] == "07_distillation"]
best = mine.loc[mine.groupby("name")["kl"].idxmin()].set_index("name")["lr"]
print("seeds of the grid:", sorted(set(mine["seed"])), "; best rates:", best.to_dict())
assert scale != "tiny" or best.to_dict() == rates
mine.pivot_table(index="name", columns="lr", values="kl", sort=False).reindex(names).round(2)

# %% [markdown]
# For SmolLM2 the grid is on k2 alone, and of the two rates that end within noise of each other the lower one is used:
# at the higher one, in runs that were put aside, the sequence-level forms said one thing only at the first look, after
# 25 steps.

# %%
grid[grid["section"] == "smollm2"][["name", "lr", "steps", "kl", "entropy", "distinct"]].reset_index(drop=True)

# %% [markdown]
# ## Summary
#
# - **k1 as a loss** takes the student away from its teacher: its expected gradient is zero, and what it adds is noise.
# - **k3 as a loss** ends far above k2 and reward-to-go even at its own best learning rate.
# - **The sequence-level gradient** needs its noise reduced: the whole-sequence form is behind reward-to-go.
# - **k2**, with much less noise, holds its own at fixed length, although its expected gradient is far shorter than
#   $R_{\mathrm{seq}}$ and points elsewhere. It is blind to what ending saves, which protects it from the degenerate
#   optimum when completions may end: report length and entropy beside any divergence.
#
# One task, one pair of models, one batch size: the order of k2 and the sequence-level forms is not to be carried over.
# Next: [reward against KL](08_math_reward).
