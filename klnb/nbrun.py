"""Run a percent-script notebook with parameters and write a clean, repeatable .ipynb.

python -m klnb.nbrun notebooks/01_x.py -o build/nb/01_x.ipynb --params params.yaml --section 01_x --seeds "[0, 1]"

Parameters are the names that the notebook's cell tagged "parameters" sets. Each --section takes its entries from the
--params file, and each --name value after them sets one, read as YAML. The values stand in that cell of the result.
A failing cell ends the run with status 1; the notebook up to there lies beside the output as NAME.failed.ipynb.
"""
import sys

# jsonschema would build a grammar with this package when it is imported: 1.4 s for nothing
sys.modules.setdefault("rfc3987_syntax", None)

import argparse  # noqa: E402
import ast  # noqa: E402
import os  # noqa: E402
import re  # noqa: E402
import tempfile  # noqa: E402
from itertools import groupby  # noqa: E402
from pathlib import Path  # noqa: E402

from klnb.paths import ROOT, write  # noqa: E402
from klnb.processes import end_with_parent  # noqa: E402

_BAR = re.compile(r"^.*\d+%\|.*\|.*$\n?|^.*\b\d+it \[.*\]\s*$\n?", re.M)  # a tqdm bar
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def parameters(nb):
    """The cell tagged parameters and its assignments {name: ast node of the literal}. ValueError if it isn't so."""
    cells = [c for c in nb.cells if "parameters" in c.metadata.get("tags", [])]
    if len(cells) != 1:
        raise ValueError(f"{len(cells)} cells are tagged parameters; there must be one")
    found = {}
    for node in ast.parse(cells[0].source).body:
        if not (isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)):
            raise ValueError(f"the parameters cell may only hold `name = literal`, not: {ast.unparse(node)}")
        try:
            ast.literal_eval(node.value)
        except ValueError:
            raise ValueError(f"parameter {node.targets[0].id} is not a literal: {ast.unparse(node.value)}") from None
        found[node.targets[0].id] = node.value
    return cells[0], found


def parametrize(nb, params):
    """Put values in place of the literals in the parameters cell; comments stay. ValueError for what doesn't fit."""
    cell, found = parameters(nb)
    unknown = sorted(set(params) - set(found))
    if unknown:
        raise ValueError(f"no such parameter: {', '.join(unknown)}; there are {', '.join(found)}")
    lines = [line.encode() for line in cell.source.split("\n")]  # ast counts columns in bytes
    for name, node in reversed(found.items()):
        default, value = ast.literal_eval(node), params.get(name, ast.literal_eval(node))
        kinds = {type(default), type(value)}
        if len(kinds) > 1 and type(None) not in kinds and kinds not in ({int, float}, {list, tuple}):
            raise ValueError(f"parameter {name} is {default!r} in the notebook and cannot become {value!r}")
        if value != default:
            last = lines[node.end_lineno - 1][node.end_col_offset :]
            text = lines[node.lineno - 1][: node.col_offset] + repr(value).encode() + last
            lines[node.lineno - 1 : node.end_lineno] = [text]
    cell.source = b"\n".join(lines).decode()
    return nb


def clean(nb):
    """Drop all that differs between two runs of the same notebook, on this machine or another."""
    for key in ("papermill", "jupytext"):
        nb.metadata.pop(key, None)
    if "language_info" in nb.metadata:
        nb.metadata["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
    for i, cell in enumerate(nb.cells):
        cell["id"] = f"cell-{i:03d}"
        for key in ("papermill", "execution", "lines_to_next_cell"):
            cell.metadata.pop(key, None)
        if not cell.metadata.get("tags", True):
            del cell.metadata["tags"]
        if cell.cell_type == "code":
            cell.outputs = _outputs(cell.outputs)
    return nb


def _outputs(outputs):
    """Join the pieces of a stream, show what a terminal would have left, drop progress bars, addresses, local paths."""
    merged = []
    for _, group in groupby(outputs, lambda out: out.output_type == "stream"):
        # pieces of stdout and stderr alternate as chance has it: one of each, stdout first
        for out in sorted(group, key=lambda out: out.get("name") == "stderr"):
            if merged and "name" in out and merged[-1].get("name") == out.name:
                merged[-1]["text"] += out["text"]
            else:
                merged.append(out)
    for out in merged:
        if out.output_type == "stream":
            text = "\n".join(line.rstrip("\r").rsplit("\r", 1)[-1] for line in out["text"].split("\n"))
            text = _BAR.sub("", text) if out.name == "stderr" else text
            out["text"] = _ADDRESS.sub("", text.replace(sys.prefix, "$VENV").replace(str(ROOT), "."))
        elif "text/plain" in out.get("data", {}):
            out["data"]["text/plain"] = _ADDRESS.sub("", out["data"]["text/plain"])
    return [o for o in merged if o.output_type != "stream" or o["text"].strip()]


def run(script, out, params, threads=None):
    """Execute `script` with `params` and write `out`; the exit status. ValueError for a parameter that doesn't fit."""
    import jupytext
    import nbformat
    import papermill
    from traitlets.config import Config

    for name in ("JUPYTER_PATH", "MPLBACKEND"):
        os.environ.pop(name, None)
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # this environment's kernel before one in the home folder
    os.environ["PYTHONPATH"] = str(ROOT)  # the package of this checkout, whichever one is installed
    os.environ["PYTHONHASHSEED"] = "0"
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", "10")  # a bar is a line there
    nb = parametrize(jupytext.read(script), params)
    out = Path(out).resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(".failed.ipynb")
    partial.unlink(missing_ok=True)
    # Sockets in a folder of their own: no ports to race for, and no warning about TCP without encryption.
    # Without "ip" they would be kernel-ipc-1.. in the current folder, and two runs at once would share them.
    with tempfile.TemporaryDirectory(prefix="nb-") as sockets:
        os.environ["IPYTHONDIR"] = sockets  # no startup files of the user's
        km = {"transport": "tcp"} if os.name == "nt" else {"transport": "ipc", "ip": f"{sockets}/k"}
        options = {"config": Config({"KernelManager": km}), "stderr_file": sys.stderr}  # stderr: progress bars, live
        options |= {"cwd": str(Path(script).resolve().parent), "kernel_name": "python3", "language": "python"}
        try:
            nb = papermill.execute_notebook(nb, str(partial), progress_bar=False, **options)
        except (Exception, KeyboardInterrupt) as e:
            what = "interrupted" if isinstance(e, KeyboardInterrupt) else _ANSI.sub("", str(e)).strip()
            print(f"\n{what}\n{script} stopped here.", file=sys.stderr)
            if partial.exists():
                print(f"The notebook so far: {partial}", file=sys.stderr)
            return 130 if isinstance(e, KeyboardInterrupt) else 1
    partial.unlink()
    write(out, lambda tmp: nbformat.write(clean(nb), tmp))
    return 0


def main(argv=None):
    """The command line; returns the exit status."""
    from ruamel.yaml import YAML, YAMLError  # YAML 1.2 as in DVC: 1e-3 is a number

    yaml = YAML(typ="safe", pure=True)
    raw = argparse.RawDescriptionHelpFormatter
    ap = argparse.ArgumentParser("python -m klnb.nbrun", description=__doc__, formatter_class=raw, allow_abbrev=False)
    ap.add_argument("script", help="the notebook, a .py file in percent format")
    ap.add_argument("-o", "--output", required=True, help="the executed notebook to write, .ipynb")
    ap.add_argument("--params", metavar="FILE", help="a YAML file of sections")
    ap.add_argument("--section", action="append", default=[], help="a section of that file; may be repeated")
    ap.add_argument("--threads", type=int, help="threads of the kernel's maths; another count may round otherwise")
    args, rest = ap.parse_known_args(argv)
    if len(rest) % 2 or not all(k.startswith("--") for k in rest[::2]):
        ap.error(f"parameters come as --name value: {' '.join(rest)}")
    if bool(args.section) != bool(args.params):
        ap.error("--section needs --params, and --params a --section")
    if "DVC_STAGE" in os.environ:
        end_with_parent()
    try:
        sections = yaml.load(Path(args.params).read_text()) if args.params else {}
        params = {}
        for name in args.section:
            if not isinstance(sections.get(name), dict):
                raise ValueError(f"{args.params} has no section {name}")
            params |= sections[name]
        params |= {k[2:].replace("-", "_"): yaml.load(v) for k, v in zip(rest[::2], rest[1::2])}
        return run(args.script, args.output, params, args.threads)
    except (ValueError, OSError, YAMLError) as e:
        raise SystemExit(f"{args.script}: {' '.join(str(e).split())}") from None


if __name__ == "__main__":
    sys.exit(main())
