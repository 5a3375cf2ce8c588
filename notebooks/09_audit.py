# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What the KL terms of RL libraries follow
#
# **Claim.** The KL terms that libraries offer under similar names follow different fields, mixtures of them, or
# nothing, on the policy's own samples; and none of them follows
# $\nabla\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$ of sequences when rollouts are reused.
#
# What Tang & Munos ([arXiv 2506.09477](https://arxiv.org/abs/2506.09477)) say of estimators, asked of code: this
# chapter puts each library's term through `klnb.audit`, which anyone can run on a loss of their own. Runs in under a
# minute.

# %%
import json
import re
import runpy

import matplotlib.pyplot as plt
import pandas as pd
from IPython.display import display

from klnb import figures as fg
from klnb.auditing import audit
from klnb.estimators import k1, k2, k3
from klnb.losses import kl_loss
from klnb.paths import PUBLISHED, ROOT

# %% tags=["parameters"]
packages = False  # run the libraries' own code here; needs the environment of `make test-audit`
only = []  # names of libraries; empty: all
results = "results"
figures = "figures"

# %%
fg.style()
RESULTS, FIGURES = ROOT / results, ROOT / figures
libraries = runpy.run_path(str(ROOT / "examples/audit_libraries.py"))
TERMS, label, row, run = (libraries[name] for name in ("TERMS", "label", "row", "run"))
terms = [t for t in TERMS if not only or t.library in only]
print(f"{packages=} {only=}: {len(terms)} KL terms of {len({t.library for t in terms})} libraries")

# %% [markdown]
# ## What an audit does
#
# A loss gets `logp`, `ref_logp`, `mask` and `behavior_logp` of a batch of sampled rows, and returns a scalar. `audit`
# calls it on every batch of small enumerated policies, so that the expectation of its gradient is exact, and looks for
# the known fields in it:
#
# - $R_{\mathrm{seq}}=\nabla\mathrm{KL}(\pi\,\|\,\pi_{\mathrm{ref}})$ over sequences, and the swapped
#   $F_{\mathrm{seq}}=\nabla\mathrm{KL}(\pi_{\mathrm{ref}}\,\|\,\pi)$;
# - $R_{\mathrm{tok}}$, $F_{\mathrm{tok}}$, the same per token with the prefixes held fixed: in general the gradient of
#   nothing ([chapter 5](05_sequences)); and $R_{\mathrm{tok}}^{\mu}$, $F_{\mathrm{tok}}^{\mu}$ with prefixes from the
#   sampler $\mu$;
# - what KL terms turn into by mistake: $\nabla\mathbb{E}[\mathrm{length}]$, $\nabla\mathbb{E}[1/\mathrm{length}]$,
#   $\nabla\mathrm{KL}(\pi\,\|\,\mu)$ and $\nabla\mathrm{KL}(\mu\,\|\,\pi)$.
#
# k3 summed over tokens, for example, as many trainers have it:


# %%
def k3_as_a_loss(logp, ref_logp, mask, behavior_logp):
    return (k3(logp - ref_logp) * mask).sum(1).mean()


report = audit(k3_as_a_loss, off_policy=True)
display(report)

# %% [markdown]
# The pairs of policies are *near* ($|\ell|\le 1$) and *far* ($|\ell|$ up to 25), so that a clamp shows; sequences have
# a fixed or a variable length; batches are padded to their longest row and to the horizon, so that a mean that counts
# padding shows. Three more losses that look harmless:

# %%
MISTAKES = {
    "k1, mean over each row's own tokens": lambda p, q, mask, b: ((k1(p - q) * mask).sum(1) / mask.sum(1)).mean(),
    "k2, value clamped at 10": lambda p, q, mask, b: (k2(p - q).clamp(max=10) * mask).sum(1).mean(),
    "k3, mean over all positions": lambda p, q, mask, b: (k3(p - q) * mask).mean(),
}
for name, fn in MISTAKES.items():
    seen = audit(fn)
    print(f"{name}: {seen.verdict}\n  " + "\n  ".join(seen.notes) + "\n")

# %% [markdown]
# And one that does what was meant, on stale rollouts too:


# %%
def reward_to_go(logp, ref_logp, mask, behavior_logp):
    return kl_loss("reward-to-go", logp, ref_logp, mask, behavior_logp=behavior_logp)


display(audit(reward_to_go, expect="R_seq", off_policy=True))

# %% [markdown]
# ## The libraries
#
# The libraries that a CPU environment can import are audited by calling their own loss functions ("package"); for the
# others the formula is re-expressed from the published description: **a formula, not the package's code**. All are
# summed over tokens and averaged over rows unless the row says so, and the reward is left out: only the KL term is
# audited.
#
# Without the libraries installed, their rows are marked as not run and show the published result of a run with them
# (`make publish-audit`).

# %%
published = json.loads((PUBLISHED / "audit.json").read_text())
stored = {(r["library"], r["option"]): r for r in published["rows"]}
rows = []
for term in terms:
    if term.source == "formula" or packages:
        rows.append(row(term, run(term)) | {"run": "here"})
    else:
        rows.append(stored[term.library, term.option] | {"run": "not run here; published"})
RESULTS.mkdir(parents=True, exist_ok=True)
text = json.dumps(rows, indent=1, ensure_ascii=False)
_ = (RESULTS / "09_audit.json").write_text(text + "\n")

# %%
SOURCE = {"package": "package", "formula": "formula, not the package's code"}
table = pd.DataFrame(rows)
table["source"] = table["source"].map(SOURCE) + table["run"].map({"here": ""}).fillna("; " + table["run"])
with pd.option_context("display.max_colwidth", None, "display.max_rows", None):
    display(table[["library", "version", "option", "on_policy", "off_policy", "source"]])
versions = ", ".join(f"{n} {v}" for n, v in published["provenance"]["versions"].items())
print(f"published rows: made on {published['provenance']['date']} with {versions}")

# %% [markdown]
# A comma and "far" mark what changes with length, padding or distance. In words, what else the audit saw:

# %%
for r in rows:
    if r["notes"]:
        print(f"{r['library']}, {r['option']}\n  " + "\n  ".join(r["notes"]))

# %% [markdown]
# ## The claims
#
# Each term follows what a reading of its formula says (`on` and `off` of the entries in `examples/audit_libraries.py`).
# None is $R_{\mathrm{seq}}$ off-policy, as none applies the ratio of the whole prefix.

# %%
for term, r in zip(terms, rows):
    assert (r["on_policy"], r["off_policy"]) == (term.on, term.off), (term, r)
assert not any(r["off_policy"] == "R_seq" for r in rows)
on = pd.Series([r["on_policy"].split(" at ")[0].split(",")[0].split(";")[0] for r in rows])
print(on.value_counts().sort_index().to_string())
always = sum(r["on_policy"] == "R_seq" for r in rows)
print(f"{always} of {len(rows)} follow R_seq on-policy in every case, none off-policy")
if not only:
    assert {"zero", "none", "R_tok", "F_tok", "R_seq"} <= set(on)

# %% [markdown]
# ## The figure
#
# One line per KL term; the colour is the field it follows near $\pi_{\mathrm{ref}}$ at fixed length.

# %%
SHORT = {
    "R_tok_mu": r"$R_{\mathrm{tok}}^{\mu}$", "F_tok_mu": r"$F_{\mathrm{tok}}^{\mu}$", "R_seq": fg.LABELS["R_seq"],
    "R_tok": fg.LABELS["R_tok"], "F_tok": fg.LABELS["F_tok"], " at fixed length": "", " else": "",
    "∇E[1/length]": "∇E[1/len]", "∇E[length]": "∇E[len]", "padding counted": "counts padding",
}  # fmt: skip
GREY = {"zero": "#333333", "none": "#bbbbbb"}


def shorten(text):
    for long, short in SHORT.items():
        text = text.replace(long, short)
    return text


# %%
def paint(ax, x, y, text):
    """A dot in the colour of the field that is named first, hollow for a mixture, and the text."""
    field = re.split(r"[ ,;]", text.lstrip("−"))[0].removesuffix("_mu")
    color = GREY.get(field) or fg.COLORS.get(field, fg.COLORS["behavior"])
    mixed = re.search(" [+−] ", text.split(",")[0])
    ax.plot(x, y, "o", color=color, markersize=6.5, markerfacecolor="white" if mixed else color, markeredgewidth=1.5)
    ax.text(x + 0.05, y, shorten(text), va="center", fontsize=8)


brief = re.compile(r" \((?!default|k\d|live|ratio).*?\)|use_kl_loss, |use_|_kl(?==)")
mark = {"package": "●", "formula": "○"}
names = [f"{r['library']}: {brief.sub('', r['option'])} {mark[r['source']]}" for r in rows]
breaks = [y - 0.5 for y in range(1, len(rows)) if rows[y]["library"] != rows[y - 1]["library"]]
counts = {s: sum(r["source"] == s for r in rows) for s in mark}

# %%
fig, ax = plt.subplots(figsize=(fg.WIDTH, 0.9 + 0.27 * len(rows)))
for y, r in enumerate(rows):
    paint(ax, 0, y, r["on_policy"])
    paint(ax, 0.9, y, r["off_policy"])
ax.set_yticks(range(len(rows)), names, fontsize=8)
ax.set_xticks([0, 0.9], ["on-policy", "off-policy"])
ax.xaxis.tick_top()
ax.set(xlim=(-0.06, 1.85), ylim=(len(rows) - 0.5, -0.5))
ax.grid(False)
ax.hlines(breaks, -0.06, 1.85, lw=0.5, color="#999999")
ax.tick_params(length=0)
ax.spines[["left", "bottom"]].set_visible(False)
fg.save(
    fig,
    "09_audit",
    {
        "title": "What the KL terms of RL libraries follow",
        "quantity": "the field that explains the expected gradient of each term, on the policy's own samples and on "
        "those of another policy; after a semicolon: far from π_ref; after a comma: where lengths vary or batches are "
        "padded; a hollow dot: a mixture",
        "setting": f"exact enumeration of small policies, near (|ℓ| ≤ 1) and far (|ℓ| ≤ 25); ● the package's own code "
        f"({counts['package']} terms), ○ a formula from its description, not its code ({counts['formula']}); "
        "relative residual below 1e-6, where a package computes in float32 below 1e-4",
        "seeds": "none: the pairs of policies are fixed",
        "n": f"{len(rows)} KL terms",
        "centre": "exact, no sampling",
        "band": "none",
        "scale": "exact",
        "device": "cpu",
        "dtype": "float64",
        "notebook": "notebooks/09_audit.py",
        "alt": f"A list of {len(rows)} KL terms with two columns of coloured dots. On-policy {always} of them follow "
        "R_seq in every case; off-policy none does.",
    },
    FIGURES,
)

# %% [markdown]
# ## In a test
#
# What holds a trainer to what it says is one call, `audit(kl_term, expect="R_seq", off_policy=True)`: it raises where
# the term follows anything else. *What to set* has the test. Here on a right term, and on the same divided by the
# length:

# %%
def kl_term(logp, ref_logp, mask, behavior_logp):
    return kl_loss("reward-to-go", logp, ref_logp, mask, behavior_logp=behavior_logp)


assert audit(kl_term, expect="R_seq", off_policy=True).holds
divided = audit(lambda *a: kl_term(*a) / a[2].sum())
assert any("own length" in note for note in divided.notes)
print(label(divided, "on-policy"))

# %% [markdown]
# ## Summary
#
# - The same words ("KL loss", "k3", "unbiased") stand for different gradients in different libraries, and an option can
#   switch between them.
# - A term in the reward with undiscounted returns is $R_{\mathrm{seq}}$ on-policy if it is not clamped, centred over
#   tokens or divided by a standard deviation; a per-token loss never is.
# - Reused rollouts break all of them: they need prefix ratios ([chapter 6](06_off_policy)).
# - *What to set* lists, per library, the options and the test line that holds them there. `klnb audit
#   package.module:function` does the same for your own loss.
