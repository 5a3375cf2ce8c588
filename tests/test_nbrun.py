"""The runner: parameters, repeatable output, and what happens when a notebook fails."""
import json
import re
import subprocess
import sys

import jupytext
import pytest

from klnb import nbrun, paths

NOTEBOOK = """\
# %% [markdown]
# # Title with ünïcode

# %%
import os
import sys

import matplotlib.pyplot as plt
from tqdm import tqdm

from klnb import figures

# %% tags=["parameters"]
text = "ä"; seeds = [  # two on a line, one on three
    0, 1,
]  # the seeds
lr = 1  # a whole number may become a fraction
name = None

# %%
print(text, seeds, lr, name)
sys.stderr.write("a warning\\n")
for _ in tqdm(range(20)):
    print(os.getcwd(), object(), flush=True)

# %%
figures.style()
fig, ax = plt.subplots()
ax.plot(seeds)

# %%
if name == "fail":
    raise RuntimeError("the notebook's own error")
if name == "die":
    os._exit(3)
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "n.py").write_text(NOTEBOOK)
    return tmp_path / "n.py"


def command(script, *words):
    out = script.with_name("n.ipynb")
    words = [sys.executable, "-m", "klnb.nbrun", str(script), "-o", str(out), *words]
    return subprocess.run(words, capture_output=True, text=True, cwd=paths.ROOT), out


def test_values_go_in_place_of_the_literals():
    nb = jupytext.reads(NOTEBOOK, "py:percent")
    nbrun.parametrize(nb, {"text": "π", "seeds": [5, 6, 7], "lr": 0.5})
    assert nb.cells[2].source == (
        "text = 'π'; seeds = [5, 6, 7]  # the seeds\nlr = 0.5  # a whole number may become a fraction\nname = None"
    )
    same = jupytext.reads(NOTEBOOK, "py:percent")
    assert nbrun.parametrize(same, {"text": "ä", "seeds": [0, 1]}).cells[2].source in NOTEBOOK  # nothing to change


@pytest.mark.parametrize(
    "params, message",
    [
        ({"sedes": [1], "lr": 2}, "no such parameter: sedes; there are text, seeds, lr, name"),
        ({"lr": "1e-3"}, "lr is 1 in the notebook and cannot become '1e-3'"),
        ({"seeds": 3}, r"seeds is \[0, 1\] in the notebook and cannot become 3"),
    ],
)
def test_what_does_not_fit_is_refused(params, message):
    with pytest.raises(ValueError, match=message):
        nbrun.parametrize(jupytext.reads(NOTEBOOK, "py:percent"), params)


def test_two_runs_give_the_same_bytes(script):
    script.with_name("p.yaml").write_text("a: {lr: 1e-3, seeds: [3]}\n")
    words = ["--params", str(script.with_name("p.yaml")), "--section", "a", "--seeds", "[4, 5]", "--name", "null"]
    done, out = command(script, *words)
    assert done.returncode == 0, done.stderr
    assert "100%" in done.stderr  # the progress bar is for the terminal
    first = out.read_bytes()
    assert command(script, "--lr", "0.001", "--seeds", "[4, 5]", "--threads", "1")[0].returncode == 0
    assert out.read_bytes() == first
    cells = json.loads(first)["cells"]
    printed = {o["name"]: "".join(o["text"]) for o in cells[3]["outputs"]}
    assert printed["stdout"].startswith("ä [4, 5] 0.001 None\n")
    assert printed["stderr"] == "a warning\n"  # no bar
    assert [o["output_type"] for o in cells[4]["outputs"]] == ["execute_result", "display_data"]
    assert sorted(p.name for p in out.parent.iterdir()) == ["n.ipynb", "n.py", "p.yaml"]  # nothing left over


def test_a_failing_notebook_says_why_and_where(script):
    out = script.with_name("n.ipynb")
    out.write_text("old")
    done, out = command(script, "--name", "fail")
    partial = out.with_suffix(".failed.ipynb")
    assert done.returncode == 1
    assert "RuntimeError: the notebook's own error" in done.stderr
    assert f"The notebook so far: {partial}" in done.stderr
    assert "ä [0, 1]" in partial.read_text()
    assert out.read_text() == "old"  # a failed run replaces nothing


def test_a_kernel_that_dies_is_a_failure(script):
    done, out = command(script, "--name", "die")
    assert done.returncode == 1 and not out.exists()
    assert re.search(r"[Kk]ernel died", done.stderr)


@pytest.mark.parametrize(
    "words, status, message",
    [
        (["--sedes", "1"], 1, "no such parameter: sedes"),
        (["--seeds"], 2, "parameters come as --name value"),
        (["--section", "a"], 2, "--section needs --params"),
        (["--params", "nowhere.yaml", "--section", "a"], 1, "nowhere.yaml"),
        (["--params", "params.yaml", "--section", "nothing"], 1, "params.yaml has no section nothing"),
        (["--lr", "[1"], 1, "while parsing a flow sequence"),
    ],
)
def test_a_wrong_command_gets_one_line(words, status, message, script, capsys):
    with pytest.raises(SystemExit) as stop:
        nbrun.main([str(script), "-o", "x.ipynb", *words])
    text = str(stop.value) if status == 1 else capsys.readouterr().err
    assert message in text and "Traceback" not in text
    assert stop.value.code == 2 if status == 2 else text.count("\n") == 0


def test_help(capsys):
    with pytest.raises(SystemExit) as stop:
        nbrun.main(["--help"])
    assert stop.value.code == 0 and "--section" in capsys.readouterr().out
