"""Put the tutorial's source together in build/site/src: pages, executed notebooks, figures, and what klnb says itself.

Reads only what the pipeline made (build/nb/*.ipynb, figures/*) and this folder; `make site` then builds it with Sphinx.
Chapters are the notebooks that dvc.yaml makes; one whose output is missing is an error, never an empty page.
"""
import ast
import importlib
import inspect
import json
import re
import shutil
import sys
from pathlib import Path
from statistics import median

import nbformat

from klnb.paths import BUILD, FIGURES, PUBLISHED, RESULTS, ROOT

SITE = ROOT / "site"
SRC = BUILD / "site" / "src"
LONG = 15  # lines; longer code cells are folded
EXPERIMENTS = ("models", "tasks", "training", "stats", "figures", "nbrun", "paths")
INTERFACE = ("exact", "policies")


def chapters(text=None):
    """The names NN_name of the notebooks that dvc.yaml writes to build/nb/NN_name.ipynb, in order."""
    text = (ROOT / "dvc.yaml").read_text() if text is None else text
    lines = [line for line in text.split("\n") if not line.lstrip().startswith("#")]
    found = re.findall(r"^\s*- build/nb/(\d\d_\w+)\.ipynb:?\s*$", "\n".join(lines), re.M)
    return sorted(set(found))


def saved(source):
    """The stems that a cell saves: the constant second arguments of its calls of save()."""
    stems = []
    for node in ast.walk(ast.parse(re.sub(r"^\s*[%!].*$", "", source, flags=re.M))):
        name = isinstance(node, ast.Call) and (getattr(node.func, "attr", None) or getattr(node.func, "id", None))
        if name == "save" and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            stems.append(node.args[1].value)
    return stems


_SUB = re.compile(
    r"(?<![A-Za-z0-9_])([πμℓρΣEwGmby]|k[123]|KL|R|F)_(ref|seq|tok_mu|tok|mu|[tsT1πμ](?![A-Za-z0-9_])|\{[^{}]*\})"
)
_SUP = re.compile(r"(?<!\w)e\^\(((?:[^()]|\([^()]*\))*)\)")
_LITERAL = re.compile(r"(^```.*?^```|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]+\$|<[A-Za-z/][^>\n]*>|\]\([^)\n]*\))", re.S | re.M)


def typeset(text):
    """π_ref, y_<t, Σ_{s≥t} and e^(−ℓ) in Markdown with real subscripts and superscripts; code and maths stay."""

    def sub(m):
        return f"{m[1]}<sub>{m[2].strip('{}').replace('tok_mu', 'tok,μ').replace('<t', '&lt;t')}</sub>"

    parts = _LITERAL.split(text)
    for i in range(0, len(parts), 2):
        parts[i] = _SUB.sub(sub, re.sub(r"\by_<t", "y<sub>&lt;t</sub>", parts[i]))  # E_{y_<t}: from the inside out
        parts[i] = _SUP.sub(r"e<sup>\1</sup>", parts[i])
    return "".join(parts)


def _plain(text):
    """One line of text in which nothing is markup but $maths$."""
    return re.sub(r"([\\`*<>\[\]{}])", r"\\\1", " ".join(str(text).split()))


def _caption(text):
    """The same with subscripts."""
    return typeset(re.sub(r"([\\`*\[\]])", r"\\\1", " ".join(str(text).split())).replace(" < ", " &lt; "))


def figure(stem, up="../"):
    """The figure with alt text, caption and the link to its notebook, as MyST; `up` leads to the site's root."""
    c = json.loads((FIGURES / f"{stem}.json").read_text())
    name, alt = Path(c["notebook"]).stem, _plain(c["alt"])
    c = {k: _caption(v).rstrip(".") for k, v in c.items()}
    made = f"{{download}}`{name}.py <{up}notebooks/{name}.py>`"
    details = (
        f"Setting: {c['setting']}. Seeds: {c['seeds']}; n = {c['n']}. Centre: {c['centre']}; band: {c['band']}. "
        f"Scale {c['scale']}, on {c['device']} in {c['dtype']}. Made by {made}."
    )
    return (
        f"::::{{figure}} {up}figures/{stem}.png\n:alt: {alt}\n:width: 100%\n\n"
        f"**{c['title']}.** {c['quantity'][0].upper()}{c['quantity'][1:]}.\n\n{{.details}}\n{details}\n::::\n"
    )


def folded(source):
    """Is this code that a reader may skip: long, only imports, or for drawing?"""
    body = ast.parse(re.sub(r"^\s*[%!].*$", "", source, flags=re.M)).body
    imports = all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in body)
    draws = re.search(r"\b(fig|plt)\.|\.(plot|imshow|scatter|fill_between|bar|set_\w+|axhline)\(|\"alt\":", source)
    return imports or bool(draws) or len([line for line in source.split("\n") if line.strip()]) > LONG


def chapter(nb, name, names):
    """An executed notebook as a page: figures with captions, long code folded, links to chapters and to its source."""
    cells = []
    for cell in nb.cells:
        tags = set(cell.metadata.get("tags", []))
        if cell.cell_type == "code":
            stems = saved(cell.source)
            if stems or folded(cell.source):
                tags.add("hide-input")
            if ".write_text(" in cell.source.rstrip().split("\n")[-1]:  # it shows how many bytes it wrote
                cell.outputs = [o for o in cell.outputs if o.output_type != "execute_result"]
            for out in cell.outputs:
                if "text/markdown" in out.get("data", {}):
                    text = _bars("".join(out["data"]["text/markdown"]))
                    out["data"]["text/markdown"] = typeset(_TO_NOTEBOOK.sub(_link(names), text))
            if stems:  # the saved file, with its caption, in place of the copy that the cell shows
                cell.outputs = [o for o in cell.outputs if "image/png" not in o.get("data", {})]
            for out in cell.outputs:
                if "image/png" in out.get("data", {}):
                    print(f"{name}: a cell shows an image that it does not save, so it has no caption", file=sys.stderr)
                    raise SystemExit(1)
            cell.metadata["tags"] = sorted(tags)
            last = cells[-1] if cells else cell
            if "hide-input" in tags & set(last.metadata.get("tags", [])) and not last.get("outputs"):
                cell.source = f"{last.source}\n\n{cell.source}"  # one fold for what stands together
                cells.pop()
            cells.append(cell)
            cells += [nbformat.v4.new_markdown_cell(figure(stem), id=f"figure-{stem}") for stem in stems]
        else:
            cell.source = _TO_NOTEBOOK.sub(_link(names), _bars(cell.source))
            cells.append(cell)
    cells[0].source = re.sub(r"^# (?!\d)", f"# {int(name[:2])} · ", cells[0].source)
    source, executed = f"../notebooks/{name}.py", f"../executed/{name}.ipynb"
    made = (
        f"{{.made-by}}\nThis page is an executed notebook. Its source: {{download}}`notebooks/{name}.py <{source}>`; "
        f"with outputs: {{download}}`{name}.ipynb <{executed}>`."
    )
    cells.insert(1, nbformat.v4.new_markdown_cell(made, id="made-by"))
    nb.cells = cells
    return nb


def _bars(text):
    """In a table's row Markdown takes \\| for a plain bar, and KL(π‖π_ref) would lose one of its two: \\Vert stays."""
    row = re.compile(r"^\|.*\|$", re.M)
    return row.sub(lambda m: re.sub(r"\$[^$]+\$", lambda f: f[0].replace("\\|", "\\Vert "), m[0]), text)


def link(number, names):
    """A link to the chapter with this number, from a page at the site's root; its bare number if it is not there."""
    name = next((n for n in names if n.startswith(number)), None)
    return f"[chapter {int(number)}](chapters/{name}.ipynb)" if name else f"chapter {int(number)}"


_TO_NOTEBOOK = re.compile(r"\[([^\]]+)\]\((?:\./)?(?:notebooks/)?(\d\d_\w+)(?:\.py|\.ipynb)?\)")


def _link(names):
    """What a link to another notebook becomes: a link if it is a chapter of this site, else its text."""
    return lambda m: f"[{m[1]}]({m[2]}.ipynb)" if m[2] in names else m[1]


def _members(module):
    """Public functions and classes that a module defines, in the order of its source."""
    own = [
        (obj.__code__.co_firstlineno if inspect.isfunction(obj) else inspect.getsourcelines(obj)[1], name, obj)
        for name, obj in vars(module).items()
        if not name.startswith("_") and name != "main" and getattr(obj, "__module__", None) == module.__name__
        and (inspect.isfunction(obj) or inspect.isclass(obj))
    ]  # fmt: skip
    return [(name, obj) for _, name, obj in sorted(own)]


def _directive(path, obj):
    if inspect.isclass(obj):
        return f"```{{eval-rst}}\n.. autoclass:: {path}\n   :members:\n   :undoc-members:\n```"
    return f"```{{eval-rst}}\n.. autofunction:: {path}\n```" if callable(obj) else ""


def api(kind, preview=False):
    """Headings and autodoc directives of the public interface, or of the modules that the experiments use."""
    import klnb

    blocks = []
    for name in klnb.__all__ if kind == "public" else ():
        try:
            blocks.append(_directive(f"klnb.{name}", getattr(klnb, name)))
        except ModuleNotFoundError as e:
            if not (preview and e.name.startswith("klnb.")):
                raise
    for m in INTERFACE if kind == "public" else EXPERIMENTS:
        if preview and not (ROOT / "klnb" / f"{m}.py").exists():
            continue
        module = importlib.import_module(f"klnb.{m}")
        blocks.append(f"## klnb.{m}\n\n{' '.join((module.__doc__ or '').split('.')[0].split())}.")
        blocks += [_directive(f"klnb.{m}.{name}", obj) for name, obj in _members(module)]
    return "\n\n".join(b for b in blocks if b)


def estimators():
    """klnb.ESTIMATORS as a Markdown table; the README has the same (a test compares)."""
    from klnb import ESTIMATORS

    rows = ["| name | loss per sequence | expected gradient, on-policy | off-policy | leave-one-out | needs logits |"]
    rows += ["|---|---|---|---|---|---|"]
    for e in ESTIMATORS.values():
        follows = {"zero": "0", "R_seq": "**R_seq** = ∇KL(π‖π_ref)"}.get(e.follows, e.follows)
        yes = ["yes" if v else "–" for v in (e.off_policy, e.baseline, e.needs_logits)]
        rows.append(f"| `{e.name}` | {e.formula} | {follows} | {' | '.join(yes)} |")
    return "\n".join(rows)


def _luminance(rgb):
    lin = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in rgb)]
    return 0.2126 * lin[0] + 0.7152 * lin[1] + 0.0722 * lin[2]


def on_dark(color, background="#14181e", contrast=4.5):
    """The colour, mixed with white until it stands out from a dark page."""
    rgb = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    floor = _luminance([int(background[i : i + 2], 16) for i in (1, 3, 5)])
    for step in range(101):
        mixed = [round(v + (255 - v) * step / 100) for v in rgb]
        if (_luminance(mixed) + 0.05) / (floor + 0.05) >= contrast:
            return "#" + "".join(f"{v:02x}" for v in mixed)
    raise ValueError(color)


def colors():
    """klnb.figures.COLORS as CSS variables, with variants for dark pages."""
    from klnb.figures import COLORS

    light = "\n".join(f"  --klnb-{k.replace('_', '-')}: {v};" for k, v in COLORS.items())
    dark = "\n".join(f"  --klnb-{k.replace('_', '-')}: {on_dark(v)};" for k, v in COLORS.items())
    return f"html {{\n{light}\n}}\nhtml[data-theme=\"dark\"] {{\n{dark}\n}}\n"


def facts():
    """Numbers that pages quote, computed here, exactly: {{name}} in a page."""
    import torch

    from klnb import exact, policies

    def position(*p):
        return policies.Tabular(torch.tensor([p], dtype=torch.float64).log(), horizon=1)

    def number(x):
        return f"{float(x):+.4f}".replace("+0.", "+.").replace("-0.", "−.")

    policy, ref = position(0.7, 0.3), position(0.5, 0.5)
    target, swapped = (exact.gradient(policy, ref, f)[0] for f in ("R_seq", "F_seq"))
    return {
        "fact_kl": number(exact.kl(policy, ref)).lstrip("+"),
        "fact_target": f"({number(target[0])}, {number(target[1])})",
        "fact_swapped": f"({number(swapped[0])}, {number(swapped[1])})",
    }


# chapter, what, and how to read it from the chapter's results
_EXPECTED = (
    ("01_value_estimates", "k1 and k3 are equally noisy estimates at KL(π‖π_ref) = {:.2f} nats",
     lambda r: [r["crossover"]["kl_at_1"]]),
    ("02_gradient_estimates", "near and far policies: KL(π‖π_ref) = {:.3f} and {:.2f} nats",
     lambda r: [r["kl"]["near"], r["kl"]["far"]]),
    ("03_minimizing_kl", "4 samples a step: k1 ends {mean:.2f} nats above its start [{low:.2f}, {high:.2f}]",
     lambda r: r["claims"]["k1 ends above its start"]),
    ("03_minimizing_kl", "4 samples a step: k2 ends {mean:.2f} nats below its start [{low:.2f}, {high:.2f}]",
     lambda r: r["claims"]["k2 ends below its start"]),
    ("04_regularized_reward", "at KL(π‖π_ref) = 1 nat the target optima earn {target:.2f}, the swapped {swapped:.2f}",
     lambda r: r["reward_at_1_nat"]),
    ("05_sequences", "curl of R_tok and of F_tok, full-history tables (0 for a gradient): {:.2f} and {:.2f}",
     lambda r: [r["cases"][f]["full history"] for f in ("R_tok", "F_tok")]),
    ("06_off_policy", "after {} inner updates, reward-to-go without a ratio is off by {:.0%} of R_seq (median)",
     lambda r: [r["sweep"]["updates"][-1], median(pair[-1] for pair in r["sweep"]["no ratio: reward-to-go"])]),
    ("07_distillation", "k1 as a loss ends {mean:.0f} nats above its start [{low:.0f}, {high:.0f}]",
     lambda r: r["claims"]["target KL: k1 above its start"]),
    ("07_distillation", "reward-to-go ends {mean:.1f} nats below k3 as a loss [{low:.1f}, {high:.1f}]",
     lambda r: r["claims"]["target KL: reward-to-go below k3"]),
    ("07_distillation", "KL of k2 minus that of reward-to-go at the end: {mean:+.2f} nats [{low:+.2f}, {high:+.2f}]",
     lambda r: r["claims"]["target KL: reward-to-go below k2"]),
    ("09_audit", "{} of {} KL terms of libraries follow R_seq on-policy in every case, {} off-policy",
     lambda r: [sum(t["on_policy"] == "R_seq" for t in r), len(r), sum(t["off_policy"] == "R_seq" for t in r)]),
)  # fmt: skip


def expected(names):
    """A table of numbers that a run should reproduce, read from the results of this one."""
    rows = [f"| any | π = (.7, .3), π_ref = (.5, .5): KL(π‖π_ref) = {facts()['fact_kl']} nats |"]
    for name, text, read in _EXPECTED:
        if name in names:
            values = read(json.loads((RESULTS / f"{name}.json").read_text()))
            text = text.format(**values) if isinstance(values, dict) else text.format(*values)
            rows.append(f"| {link(name[:2], names)} | {text} |")
    return "\n".join(["| chapter | a number to expect |", "|---|---|", *rows])


def what_to_set():
    """Tables of library options by the field that they follow on-policy, from the published audit."""
    published = json.loads((PUBLISHED / "audit.json").read_text())
    head = "| library | option | on-policy | off-policy | a test, on-policy | how |\n|---|---|---|---|---|---|"
    tables = {"R_seq": [head], "R_tok": [head], "F_tok": [head], "other": [head]}
    for r in published["rows"]:
        steady = r["on_policy"].split(";")[0]  # what it follows near π_ref, whatever the lengths and the padding
        run = "run" if r["source"] == "package" else "formula"
        holds = r["on_policy"] in ("R_seq", "R_tok", "F_tok", "zero")
        line = f'`expect="{r["on_policy"]}"`' if holds else "–"
        cells = (f"{r['library']} {r['version']}", r["option"], r["on_policy"], r["off_policy"], line, run)
        tables.get(steady, tables["other"]).append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    versions = {n: v for n, v in published["provenance"]["versions"].items() if n != "torch"}
    found = {f"set:{field}": "\n".join(lines) for field, lines in tables.items()}
    return found | {"set:versions": ", ".join(f"{n} {v}" for n, v in versions.items())}


def hero():
    """The overview's first figure, for the front page."""
    stems = sorted(f.stem for f in FIGURES.glob("00_*.json"))
    return figure(stems[0], "") if stems else ""


def main(preview=False):
    """Write build/site/src. With preview, leave out chapters that have not been executed yet."""
    names = chapters()
    missing = [n for n in names if not (BUILD / "nb" / f"{n}.ipynb").exists()]
    if missing and not preview:
        raise SystemExit(f"not executed yet: {', '.join(missing)}; make figures runs them")
    names = [n for n in names if n not in missing]
    shutil.rmtree(SRC, ignore_errors=True)
    shutil.copytree(SITE, SRC, ignore=shutil.ignore_patterns("__pycache__", "*.py", "*.txt"))
    shutil.copytree(FIGURES, SRC / "figures", dirs_exist_ok=True)
    shutil.copytree(ROOT / "examples", SRC / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("chapters", "notebooks", "executed"):
        (SRC / folder).mkdir()
    for name in names:
        file = BUILD / "nb" / f"{name}.ipynb"
        shutil.copyfile(file, SRC / "executed" / file.name)
        shutil.copyfile(ROOT / "notebooks" / f"{name}.py", SRC / "notebooks" / f"{name}.py")
        nbformat.write(chapter(nbformat.read(file, 4), name, names), SRC / "chapters" / file.name)
    (SRC / "_static" / "colors.css").write_text(colors())
    replace = {f"api-{kind}": api(kind, preview) for kind in ("public", "experiments")}
    replace |= {"estimators": estimators(), "hero": hero(), "expected": expected(names)} | facts() | what_to_set()
    for page in SRC.glob("*.md"):
        text = page.read_text()
        for key, value in replace.items():
            text = text.replace(f"<<{key}>>", value)
        text = re.sub(r"<<ch:(\d\d)>>", lambda m: link(m[1], names), text)
        if left := re.findall(r"<<[\w:-]+>>", text):
            raise SystemExit(f"{page.name}: unknown {', '.join(left)}")
        page.write_text(typeset(text))


if __name__ == "__main__":
    main(preview="--preview" in sys.argv[1:])
