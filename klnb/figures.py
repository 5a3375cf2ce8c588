"""One look for all figures, and one way to save them: a PNG and a caption, the same bytes every time."""
import json

from klnb import stats
from klnb.paths import write

# Each name has one colour everywhere. A field has the colour of an estimator that follows it. The eight estimators
# stay apart under the three kinds of colour blindness (a test measures this); line styles are a second way to tell.
COLORS = {
    "k1": "#333333", "k2": "#0072b2", "k3": "#d55e00", "score": "#56b4e9", "sequence": "#cc79a7",
    "reward-to-go": "#009e73", "reward-to-go-k3": "#e69f00", "rao-blackwell": "#7818d8",
    "R_seq": "#009e73", "F_seq": "#b8860b", "R_tok": "#0072b2", "F_tok": "#d55e00",
    "policy": "#333333", "ref": "#999999", "behavior": "#cc79a7",
}  # fmt: skip
LABELS = {
    "k1": "k1 as a loss", "k2": "k2 as a loss", "k3": "k3 as a loss", "score": "per-token score function",
    "sequence": "whole-sequence score", "reward-to-go": "reward-to-go",
    "reward-to-go-k3": "reward-to-go of k3", "rao-blackwell": "Rao–Blackwell",
    "R_seq": r"$R_{\mathrm{seq}}$", "F_seq": r"$F_{\mathrm{seq}}$", "R_tok": r"$R_{\mathrm{tok}}$",
    "F_tok": r"$F_{\mathrm{tok}}$", "policy": r"$\pi$", "ref": r"$\pi_{\mathrm{ref}}$", "behavior": r"$\mu$",
}  # fmt: skip
LINES = {"k1": ":", "score": "--", "sequence": "-.", "reward-to-go-k3": (0, (5, 1, 1, 1, 1, 1)), "rao-blackwell": "--"}
WIDTH = 7.0  # inches; the tutorial shows figures 700 pixels wide, where 10 points are then 14 pixels
CAPTION_FIELDS = (
    "title", "quantity", "setting", "seeds", "n", "centre", "band", "scale", "device", "dtype", "notebook", "alt",
)  # fmt: skip
_RC = {
    "font.family": "DejaVu Sans", "mathtext.fontset": "dejavusans",  # ship inside matplotlib: the same on every machine
    "font.size": 10, "axes.titlesize": 11, "legend.fontsize": 9, "xtick.labelsize": 9, "ytick.labelsize": 9,
    "figure.figsize": (WIDTH, 3.6), "figure.dpi": 100, "savefig.dpi": 200,
    "figure.facecolor": "white", "savefig.facecolor": "white",  # never transparent: pages may be dark
    "figure.constrained_layout.use": True, "figure.constrained_layout.h_pad": 0.1,
    "figure.constrained_layout.w_pad": 0.1,
    "axes.grid": True, "grid.alpha": 0.4, "grid.linewidth": 0.6, "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "lines.linewidth": 1.8,
}  # fmt: skip


def style():
    """Forget a matplotlibrc of the user's and set ours; in a notebook, sharp inline figures without version stamps."""
    import matplotlib.style

    matplotlib.style.use(["default", _RC])
    from IPython import get_ipython

    if get_ipython() is not None:
        from matplotlib_inline.backend_inline import set_matplotlib_formats

        set_matplotlib_formats("retina", metadata={"Software": None})


def look(name):
    """Keywords for ax.plot: the colour, line style and label of an estimator, field or policy."""
    return {"color": COLORS[name], "linestyle": LINES.get(name, "-"), "label": LABELS[name]}


def curve(ax, x, runs, name, **changes):
    """Draw runs [n, len(x)] as their mean with its 95% Student-t band; below 20 runs also each run as a thin line. One
    run has no band."""
    kw = look(name) | changes
    if len(runs) == 1:
        return ax.plot(x, runs[0], **kw)[0]
    mean, low, high = stats.interval(runs)
    if len(runs) < 20:
        for run in runs:
            ax.plot(x, run, color=kw["color"], linewidth=0.5, alpha=0.5)
    ax.fill_between(x, low, high, color=kw["color"], alpha=0.2, linewidth=0)
    return ax.plot(x, mean, **kw)[0]


def label_ends(ax, gap=0.055):
    """Write each labelled line's label at its right end, in its colour, at least `gap` axes heights apart.

    For use instead of a legend, last, when the limits of the axes are final.
    """
    ends = []
    for line in (line for line in ax.get_lines() if not line.get_label().startswith("_")):
        y = ax.transAxes.inverted().transform(ax.transData.transform(line.get_xydata()[-1]))[1]
        ends.append([min(max(y, 0), 1), line])
    ends.sort(key=lambda end: end[0])
    for low, high in zip(ends, ends[1:]):
        high[0] = max(high[0], low[0] + gap)
    for y, line in ends:
        ax.text(1.01, y, line.get_label(), color=line.get_color(), transform=ax.transAxes, va="center", fontsize=9)


def save(fig, stem, caption: dict, root):
    """Write <root>/<stem>.png and <stem>.json, its caption. Neither is ever left half written.

    caption: all of CAPTION_FIELDS and nothing else, each a text or a number, filled from the run's own data.
    ValueError for a missing, unknown or empty field, or a figure that is too wide to read at 700 pixels.
    """
    missing = [f for f in CAPTION_FIELDS if str(caption.get(f, "")).strip() == ""]
    unknown = sorted(set(caption) - set(CAPTION_FIELDS))
    wrong = [f for f, v in caption.items() if not isinstance(v, (str, int, float))]
    if missing or unknown or wrong:
        raise ValueError(f"caption of {stem}: missing {missing}, unknown {unknown}, neither text nor number {wrong}")
    if fig.get_figwidth() > WIDTH + 1e-9:
        raise ValueError(f"{stem} is {fig.get_figwidth()} inches wide: above {WIDTH} its text is too small to read")
    root.mkdir(parents=True, exist_ok=True)
    bare = {"format": "png", "metadata": {"Software": None}}  # matplotlib's version would be in the file
    write(root / f"{stem}.png", lambda tmp: fig.savefig(tmp, **bare))
    text = json.dumps({f: caption[f] for f in CAPTION_FIELDS}, indent=2, ensure_ascii=False) + "\n"
    write(root / f"{stem}.json", lambda tmp: tmp.write_text(text))
