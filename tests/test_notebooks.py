"""Every notebook runs, in this process, at the small sizes that params.yaml lists under `smoke`."""
from fnmatch import fnmatch

import jupytext
import matplotlib.pyplot as plt
import pytest
from ruamel.yaml import YAML

from klnb import nbrun, paths

SMOKE = YAML(typ="safe", pure=True).load(paths.PARAMS.read_text())["smoke"] or {}
STAGES = YAML(typ="safe", pure=True).load((paths.ROOT / "dvc.yaml").read_text())["stages"]


def execute(script, params):
    """Run a notebook's cells in order; its final names."""
    cells = nbrun.parametrize(jupytext.read(script), params).cells
    names = {"__name__": "__main__", "display": print}
    for i, cell in enumerate(cells):
        if cell.cell_type == "code":
            exec(compile(cell.source, f"{script.name}, cell {i}", "exec"), names)
    return names


@pytest.mark.parametrize("name", SMOKE)
def test_smoke(name, tmp_path, monkeypatch):
    monkeypatch.chdir(paths.ROOT / "notebooks")  # as in JupyterLab and in the runner
    folders = {"figures": str(tmp_path / "figures"), "results": str(tmp_path / "results")}
    _, known = nbrun.parameters(jupytext.read(f"{name}.py"))
    execute(paths.ROOT / f"notebooks/{name}.py", {f: folders[f] for f in folders if f in known} | SMOKE[name])
    plt.close("all")
    # what it made is what its stage lists
    made = {str(f.relative_to(tmp_path)) for f in tmp_path.rglob("*") if f.is_file()}
    outs = [o for s in STAGES.values() if f"notebooks/{name}.py" in s["cmd"] for o in s["outs"]]
    outs = [next(iter(o)) if isinstance(o, dict) else o for o in outs]
    assert {o for o in outs if o.startswith("figures/")} == {f for f in made if f.startswith("figures/")}
    assert not [f for f in made if not any(fnmatch(f, o) or f.startswith(f"{o}/") for o in outs)]
