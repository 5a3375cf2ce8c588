"""The repository agrees with itself: stages, notebooks, figures, pins. Each check is also shown to fail.

A check takes the root of a repository and returns a list of sentences, empty where all is well. It runs on this
repository and, broken on purpose, on a small one made in a temporary folder.
"""
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from fnmatch import fnmatch
from pathlib import Path

import jupytext
import pytest
from ruamel.yaml import YAML

from klnb import figures, nbrun, paths

HEADER = """# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---
"""
# Which klnb modules each one may import; anything else is a step backwards in the design's order
MAY_IMPORT = {
    "paths": "", "estimators": "", "policies": "", "stats": "", "verifier": "", "exact": "policies",
    "losses": "estimators", "figures": "paths stats", "processes": "", "nbrun": "paths processes",
    "auditing": "estimators exact policies",
    "models": "losses paths", "tasks": "paths stats verifier models",
    "team": "", "training": "estimators losses models paths processes stats tasks team",
    "runs": "losses paths processes team training",
    "comparing": "losses models stats", "cli": "auditing", "__init__": "",
}  # fmt: skip
ONLY_TORCH = ("estimators", "losses", "exact")  # outside klnb and the standard library
CODE_LINES = 2110


def yaml(file):
    return YAML(typ="safe", pure=True).load(file.read_text()) or {}


def stages(root):
    """{name: stage} of the pipeline and of the expensive scales; a foreach's or matrix's template counts as one."""
    found = {}
    for file in ("dvc.yaml", "scales/dvc.yaml"):
        if (root / file).exists():
            found |= {n: s.get("do", s) for n, s in (yaml(root / file).get("stages") or {}).items()}
    return found


def names(items):
    """Paths of a deps or outs list, whose entries are a path or {path: options}."""
    return [next(iter(i)) if isinstance(i, dict) else i for i in items or []]


def scripts(root):
    return sorted((root / "notebooks").glob("*.py"))


def tracked(root, *patterns):
    if not (root / ".git").exists():
        return []  # a ZIP of the repository, not a clone
    out = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=root, capture_output=True, text=True, check=True)
    return [root / f for f in out.stdout.split("\0") if f and (root / f).is_file()]


def imports(file):
    """Dotted names that a file imports anywhere in it: `from a import b` gives a and a.b."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{a.name}" for a in node.names)


def needed(root, file, seen=None):
    """The klnb modules that a file imports, directly or through others, as paths from root."""
    seen = set() if seen is None else seen
    for name in imports(file):
        path = name.replace(".", "/") + ".py"
        if name.startswith("klnb.") and (root / path).exists() and path not in seen:
            seen.add(path)
            needed(root, root / path, seen)
    return seen


# The checks ----------------------------------------------------------------------------------------------------------


def check_dependencies(root):
    """Each stage depends on what its command runs, on the klnb modules that imports, and on the pins."""
    for name, stage in stages(root).items():
        words = stage["cmd"].split()
        entries = [w for w in words if re.fullmatch(r"(notebooks|tools|klnb)/\w+\.py", w)]
        modules = [w.replace(".", "/") + ".py" for w in words if w.startswith("klnb.") and w != "klnb.nbrun"]
        want = {"requirements.txt", *entries, *modules}
        for file in entries + modules:
            want |= needed(root, root / file)
        have = {d for d in names(stage.get("deps")) if d.startswith(("klnb/", "notebooks/", "tools/", "requirements"))}
        if have != want:
            yield f"stage {name}: add to deps {sorted(want - have)}, remove {sorted(have - want)}"


def check_package_init_is_lazy(root):
    """klnb/__init__.py is in no stage's deps: it may load nothing, and stages may use nothing from it."""
    for node in ast.parse((root / "klnb/__init__.py").read_text()).body:
        for module in [getattr(node, "module", None), *(a.name for a in getattr(node, "names", []))]:
            if module and isinstance(node, (ast.Import, ast.ImportFrom)) and module.startswith("klnb"):
                yield f"klnb/__init__.py imports {module} at once"
    for file in [*scripts(root), *sorted((root / "klnb").glob("*.py"))]:
        for node in ast.walk(ast.parse(file.read_text())):
            used = [a.name for a in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            if isinstance(node, ast.Import) and "klnb" in used:
                yield f"{file.name}: import from the submodule (from klnb.losses import kl_loss), not klnb"
            if isinstance(node, ast.ImportFrom) and node.module == "klnb":
                for name in used:
                    if not (root / f"klnb/{name}.py").exists():
                        yield f"{file.name}: import {name} from its submodule, not from klnb"


def check_parameters(root):
    """A stage's params are its sections of params.yaml, each section fits its notebook, and none is left over."""
    sections, used = yaml(root / "params.yaml"), {"smoke"}
    for name, stage in stages(root).items():
        words = stage["cmd"].split()
        given = [words[i + 1] for i, w in enumerate(words) if w == "--section"]
        used |= {p.split(".")[0] for p in stage.get("params", []) if isinstance(p, str)}
        if "klnb.nbrun" in words and stage.get("params", []) != given:
            yield f"stage {name}: params are {stage.get('params', [])}, its command reads {given}"
        for section in given:
            notebook = next((w for w in words if w.startswith("notebooks/")), None)
            if notebook is None:  # a section that a tool or a module reads
                continue
            known = nbrun.parameters(jupytext.read(root / notebook))[1]
            unknown = sorted(set(sections.get(section, {"the section itself": 0})) - set(known))
            if unknown:
                yield f"params.yaml, {section}: {notebook} has no parameter {unknown}"
    mentions = {"dvc.yaml": r"\$\{(\w+)", "scales/dvc.yaml": r"\$\{(\w+)", "Makefile": r"--section (\w+)"}
    for file, mention in mentions.items():
        if (root / file).exists():
            used |= set(re.findall(mention, (root / file).read_text()))
    if left := sorted(set(sections) - used):
        yield f"params.yaml: no stage uses {left}"
    if set(sections.get("smoke") or {}) != {s.stem for s in scripts(root)}:
        yield f"params.yaml, smoke: needs exactly the notebooks {[s.stem for s in scripts(root)]}"


def check_stage_of_each_notebook(root):
    """Each notebook has a stage, which writes it to build/nb under its own name."""
    made = {w: (n, names(s.get("outs"))) for n, s in stages(root).items() for w in s["cmd"].split()}
    for script in scripts(root):
        name, outs = made.get(f"notebooks/{script.name}", ("", []))
        if not any(fnmatch(o, f"build/nb/{script.stem}*.ipynb") for o in outs):
            yield f"{script.name}: no stage writes build/nb/{script.stem}.ipynb"


def check_notebooks(root):
    """Header, order and size of cells as the design says."""
    for script in scripts(root):
        problems = []
        if not script.read_text().startswith(HEADER):
            problems.append("the header isn't what JupyterLab writes back")
        nb = jupytext.read(script)
        cells = nb.cells
        try:
            nbrun.parameters(nb)
        except ValueError as e:
            problems.append(str(e))
        if len(cells) < 5 or cells[0].cell_type != "markdown" or not cells[0].source.startswith("# "):
            problems.append("the first cell must be a text with the title")
        code = [c for c in cells if c.cell_type == "code"]
        if not code or not all(isinstance(n, (ast.Import, ast.ImportFrom)) for n in ast.parse(code[0].source).body):
            problems.append("the first code cell must hold all imports and nothing else")
        for cell in code[1:]:
            if any(isinstance(n, (ast.Import, ast.ImportFrom)) for n in ast.walk(ast.parse(cell.source))):
                problems.append(f"an import outside the first code cell: {cell.source[:60]!r}")
        if len(code) < 2 or "parameters" not in code[1].metadata.get("tags", []):
            problems.append("the second code cell must be the one tagged parameters")
        for cell in code[2:]:
            # a caption is text, however it is passed
            length = code_lines(cell.source) - sum(
                node.end_lineno - node.lineno + 1
                for node in ast.parse(cell.source).body
                if "alt=" in ast.unparse(node) or "'alt':" in ast.unparse(node)
            )
            if length > 15:
                problems.append(f"a cell of {length} lines (15 at most): {cell.source[:60]!r}")
            if cell.source.count("save(") > 1:
                problems.append(f"more than one figure saved in a cell: {cell.source[:60]!r}")
        if cells[-1].cell_type != "markdown" or "## Summary" not in cells[-1].source:
            problems.append("the last cell must be a text with a Summary")
        yield from (f"{script.name}: {p}" for p in problems)


def check_figures(root):
    """Each figure is a PNG with a complete caption, made by a stage; each stage's figures exist."""
    listed = [o for s in stages(root).values() for o in names(s.get("outs")) if o.startswith("figures/")]
    listed = [re.sub(r"\$\{[^}]*\}", "*", o) for o in listed]
    there = {str(f.relative_to(root)) for f in (root / "figures").glob("*")}
    for file in sorted(there):
        if not any(fnmatch(file, o) for o in listed):
            yield f"no stage lists {file}"
        other = {".png": ".json", ".json": ".png"}.get(Path(file).suffix, "")
        if str(Path(file).with_suffix(other)) not in there or not other:
            yield f"{file} must be a PNG or a caption, each beside the other"
        if file.endswith(".json"):
            caption = json.loads((root / file).read_text())
            for field in figures.CAPTION_FIELDS:
                if str(caption.get(field, "")).strip() == "":
                    yield f"{file}: the caption says nothing about {field}"
            if extra := sorted(set(caption) - set(figures.CAPTION_FIELDS)):
                yield f"{file}: unknown {extra}"
            if not (root / str(caption.get("notebook", "?"))).is_file():
                yield f"{file}: there is no notebook {caption.get('notebook')}"
    for out in listed:
        if not any(fnmatch(file, out) for file in there):
            yield f"{out} is listed in a stage but isn't there: run make figures"


def check_pins(root):
    """Exact versions only, of all that requirements.in asks for, from no particular place; conda reads them too."""
    pins = {}
    for line in (root / "requirements.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9][0-9A-Za-z.!]*)", line)
            if not match:
                yield f"requirements.txt: not an exact version: {line}"
            else:
                pins[match[1].lower().replace("_", "-")] = match[2]
    for line in (root / "requirements.in").read_text().splitlines():
        name = re.match(r"[A-Za-z0-9._-]*", line)[0].lower().replace("_", "-")
        if name and name not in pins:
            yield f"requirements.txt has no version of {name}"
    if pins.get("torch") != "2.13.0":
        yield "torch must be 2.13.0"
    if "-r requirements.txt" not in str(yaml(root / "environment.yml")):
        yield "environment.yml must read requirements.txt"


def check_git(root):
    """No executed notebook and no big file in git; words and addresses that the house rules leave out."""
    for file in tracked(root, "*.ipynb"):
        yield f"{file.relative_to(root)} is tracked: only percent scripts are notebooks in git"
    for file in tracked(root):
        if file.stat().st_size > 1_000_000:
            yield f"{file.relative_to(root)} is over 1 MB"
        if file.suffix not in (".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".in", ".json", ".cff", ""):
            continue
        for i, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
            if re.search(r"\b(forward|reverse)[- ]kl\b(?!\()", line, re.I):
                yield f"{file.relative_to(root)}:{i}: say KL of what, e.g. KL(π‖π_ref): {line.strip()[:80]}"
            if re.search(r"(extra-)?index[-]url|https?://\S*/simple[/]|/(root|home|Users)/\w", line):
                yield f"{file.relative_to(root)}:{i}: an index or a path of one machine: {line.strip()[:80]}"


def check_imports_go_one_way(root):
    """klnb's modules import only what is below them, and know neither DVC nor the notebooks."""
    for file in sorted((root / "klnb").glob("*.py")):
        if file.stem not in MAY_IMPORT:
            yield f"klnb/{file.name}: say in tests/test_pipeline.py what it may import"
            continue
        for name in imports(file):
            top, _, rest = name.partition(".")
            module = rest.split(".")[0]
            if top == "klnb" and (root / f"klnb/{module}.py").exists() and module not in MAY_IMPORT[file.stem].split():
                yield f"klnb/{file.name} may not import {name}"
            if top in ("dvc", "notebooks", "tests", "tools"):
                yield f"klnb/{file.name} may not import {name}"
            outside = top not in sys.stdlib_module_names and top not in ("klnb", "torch", "jaxtyping")
            if file.stem in ONLY_TORCH and outside:
                yield f"klnb/{file.name} may import torch and jaxtyping only, not {name}"


def check_randomness(root):
    """All randomness comes from generators; progress bars are plain ones."""
    bad = re.compile(
        r"torch\.(cuda\.)?manual_seed|torch\.seed\b|np\.random\.(?!default_rng|Generator)|\brandom\.(seed|random|choice)\("
        r"|set_seed\(|from tqdm\.auto|disable=None"
    )
    for file in [*sorted((root / "klnb").glob("*.py")), *scripts(root)]:
        for i, line in enumerate(file.read_text().splitlines(), 1):
            if bad.search(line):
                yield f"{file.name}:{i}: not in this project: {line.strip()[:80]}"


def check_size(root):
    """klnb is thin."""
    count = sum(code_lines(f.read_text()) for f in (root / "klnb").glob("*.py"))
    if count > CODE_LINES:
        yield f"klnb has {count} lines of code, more than {CODE_LINES}"


def code_lines(source):
    """Lines with code: not blank, not comment, not docstring."""
    skip = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skip:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


CHECKS = [f for n, f in list(globals().items()) if n.startswith("check_")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_this_repository(check):
    problems = list(check(paths.ROOT))
    assert not problems, "\n".join(problems)


# Each check fails on a repository that is broken in its way ---------------------------------------------------------

NOTEBOOK = HEADER + '''
# %% [markdown]
# # Title

# %%
from klnb import figures
from klnb.losses import kl_loss

# %% tags=["parameters"]
seed = 0
n = 3  # draws

# %%
print(seed, n)

# %% [markdown]
# ## Summary
'''
STAGE = """\
stages:
  01_x:
    cmd: python -m klnb.nbrun notebooks/01_x.py -o build/nb/01_x.ipynb --params params.yaml --section 01_x
    params:
      - 01_x
    deps:
      - notebooks/01_x.py
      - klnb/estimators.py
      - klnb/figures.py
      - klnb/losses.py
      - klnb/paths.py
      - klnb/stats.py
      - requirements.txt
    outs:
      - build/nb/01_x.ipynb
      - figures/01_x.png:
          cache: false
      - figures/01_x.json:
          cache: false
"""
FILES = {
    "notebooks/01_x.py": NOTEBOOK,
    "dvc.yaml": STAGE,
    "params.yaml": "01_x:\n  n: 5\nsmoke:\n  01_x: {}\n",
    "klnb/__init__.py": '"""Doc."""\n',
    "klnb/estimators.py": "import torch\n",
    "klnb/paths.py": "ROOT = 0\n",
    "klnb/stats.py": "import scipy\n",
    "klnb/losses.py": "from klnb.estimators import k1\n",
    "klnb/figures.py": "from klnb import paths, stats\n",
    "figures/01_x.png": "png",
    "figures/01_x.json": json.dumps({f: "x" for f in figures.CAPTION_FIELDS} | {"notebook": "notebooks/01_x.py"}),
    "requirements.in": "torch==2.13.0\nruamel.yaml\n",
    "requirements.txt": "# pins\ntorch==2.13.0\nruamel.yaml==0.18\n",
    "environment.yml": "dependencies:\n  - pip:\n      - -r requirements.txt\n",
    "README.md": "Tang and Munos call KL(π_ref‖π) the reverse one.\n",
}


@pytest.fixture
def small(tmp_path):
    """A repository in order, as `write(path, text)` of a change to it and its root."""
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)

    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
        subprocess.run(["git", "add", "-f", path], cwd=tmp_path, check=True)

    for path, text in FILES.items():
        write(path, text)
    return tmp_path, write


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_a_small_repository_in_order(check, small):
    assert list(check(small[0])) == []


def caption_without(field):
    return json.dumps({k: v for k, v in json.loads(FILES["figures/01_x.json"]).items() if k != field})


BROKEN = [
    (check_dependencies, "dvc.yaml", STAGE.replace("      - klnb/losses.py\n", ""), "add to deps .*klnb/losses.py"),
    (check_dependencies, "dvc.yaml", STAGE.replace("      - klnb/estimators.py\n", ""), "add to deps .*estimators"),
    (check_dependencies, "dvc.yaml", STAGE.replace("      - requirements.txt\n", ""), "add to deps .*requirements"),
    (check_dependencies, "dvc.yaml", STAGE.replace("      - notebooks/01_x.py\n", ""), "add to deps .*01_x.py"),
    (check_dependencies, "klnb/losses.py", "x = 1\n", "remove .*klnb/estimators.py"),
    (check_dependencies, "klnb/paths.py", "def f():\n    import klnb.exact\n", None),  # there is no such file: fine
    (check_package_init_is_lazy, "klnb/__init__.py", "from klnb.losses import kl_loss\n", "at once"),
    (check_package_init_is_lazy, "notebooks/01_x.py", NOTEBOOK + "\nimport klnb\n", "from the submodule"),
    (check_package_init_is_lazy, "notebooks/01_x.py", NOTEBOOK + "\nfrom klnb import kl_loss\n", "import kl_loss from"),
    (check_parameters, "dvc.yaml", STAGE.replace("      - 01_x\n", "      - smoke\n"), "its command reads"),
    (check_parameters, "params.yaml", "01_x:\n  m: 5\nsmoke:\n  01_x: {}\n", "no parameter .'m'"),
    (check_parameters, "params.yaml", "01_x:\n  n: 5\nold: {}\nsmoke:\n  01_x: {}\n", "no stage uses .'old'"),
    (check_parameters, "params.yaml", "01_x:\n  n: 5\nsmoke: {}\n", "smoke: needs exactly"),
    (check_stage_of_each_notebook, "notebooks/02_y.py", NOTEBOOK, "02_y.py: no stage"),
    (check_notebooks, "notebooks/01_x.py", NOTEBOOK.replace(' tags=["parameters"]', ""), "0 cells are tagged param"),
    (check_notebooks, "notebooks/01_x.py", NOTEBOOK.replace("n = 3", "n = 3 * seed"), "n is not a literal"),
    (check_notebooks, "notebooks/01_x.py", NOTEBOOK.replace("seed = 0", "print(0)"), "may only hold"),
    (check_notebooks, "notebooks/01_x.py", NOTEBOOK.replace("(ipykernel)", ""), "header"),
    (check_notebooks, "notebooks/01_x.py", NOTEBOOK.replace("# # Title", "# Title"), "title"),
    (check_notebooks, "notebooks/01_x.py", NOTEBOOK.replace("from klnb import figures", "x = 1"), "all imports"),
    (check_notebooks, "notebooks/01_x.py", NOTEBOOK.replace("print(", "import os\nprint("), "an import outside"),
    (check_notebooks, "notebooks/01_x.py", NOTEBOOK.replace("print(", "x = 1\n" * 15 + "print("), "16 lines"),
    (check_notebooks, "notebooks/01_x.py", NOTEBOOK.replace("print(", "f(\n" + "1,\n" * 15 + "alt=1)\nprint("), None),
    (check_notebooks, "notebooks/01_x.py", NOTEBOOK.replace("print(", "save()\nsave(\n"), "more than one figure"),
    (check_notebooks, "notebooks/01_x.py", NOTEBOOK.replace("Summary", "End"), "Summary"),
    (check_figures, "figures/02_y.png", "png", "no stage lists figures/02_y.png"),
    (check_figures, "dvc.yaml", STAGE.replace("01_x.png", "01_z.png"), "01_z.png is listed"),
    (check_pins, "requirements.txt", "torch==2.13.0+cpu\nruamel.yaml==0.18\n", "not an exact version"),
    (check_pins, "requirements.txt", "torch==2.13.0\nruamel.yaml>=0.18\n", "not an exact version"),
    (check_pins, "requirements.txt", "torch==2.13.0\nruamel.yaml==0.18\nx @ https://x/x.whl\n", "not an exact version"),
    (check_pins, "requirements.txt", "torch==2.12.0\nruamel.yaml==0.18\n", "torch must be"),
    (check_pins, "requirements.txt", "torch==2.13.0\n", "no version of ruamel.yaml"),
    (check_pins, "environment.yml", "dependencies: [python]\n", "must read requirements.txt"),
    (check_git, "build/nb/01_x.ipynb", "{}", "01_x.ipynb is tracked"),
    (check_git, "big.bin", "x" * 1_000_001, "over 1 MB"),
    (check_git, "README.md", "the reverse" + " KL is\n", "README.md:1: say KL of what"),
    (check_git, "README.md", "the Forward" + "-KL is\n", "README.md:1: say KL of what"),
    (check_git, "README.md", "pip install --extra-index" + "-url x\n", "an index"),
    (check_git, "README.md", "see /ro" + "ot/x\n", "one machine"),
    (check_imports_go_one_way, "klnb/estimators.py", "from klnb.losses import kl_loss\n", "may not import klnb.losses"),
    (check_imports_go_one_way, "klnb/losses.py", "def f():\n    import numpy\n", "torch and jaxtyping only"),
    (check_imports_go_one_way, "klnb/stats.py", "import dvc.api\n", "may not import dvc.api"),
    (check_imports_go_one_way, "klnb/new.py", "", "say in tests"),
    (check_randomness, "klnb/stats.py", "torch.manual" + "_seed(0)\n", "not in this project"),
    (check_randomness, "notebooks/01_x.py", NOTEBOOK + "np.random" + ".normal()\n", "not in this project"),
    (check_size, "klnb/stats.py", "x = 1\n" * CODE_LINES, f"{CODE_LINES + 4} lines of code"),
    (check_size, "klnb/stats.py", "# x = 1\n\n" * 1601, None),
    *[
        (check_figures, "figures/01_x.json", caption_without(field), f"says nothing about {field}")
        for field in figures.CAPTION_FIELDS
    ],
]


@pytest.mark.parametrize("check, path, text, message", BROKEN, ids=lambda x: getattr(x, "__name__", "")[6:] or None)
def test_a_broken_repository_is_found_out(check, path, text, message, small):
    root, write = small
    write(path, text)
    problems = "\n".join(check(root))
    if message is None:
        assert problems == ""
    else:
        assert re.search(message, problems), problems


def test_indirect_imports_inside_functions_count(small):
    root, write = small
    write("klnb/exact.py", "from klnb import policies\n")
    write("klnb/policies.py", "")
    write("klnb/stats.py", "def f():\n    from klnb.exact import kl\n")
    assert needed(root, root / "notebooks/01_x.py") >= {"klnb/exact.py", "klnb/policies.py"}


def test_code_lines_leave_out_comments_docstrings_and_blanks():
    source = '"""Doc\n\nmore"""\nx = 1  # why\n\n# a comment\ndef f():\n    """Doc."""\n    return """a\nb"""\n'
    assert code_lines(source) == 4
