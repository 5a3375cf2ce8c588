"""What the tutorial and the README are made of. The built site itself is tested in a browser: `make test-site`."""
import importlib.util
import json
import re
import shutil
from types import SimpleNamespace

import nbformat
import pytest
import torch

import klnb
from klnb.paths import ROOT


def load(name):
    spec = importlib.util.spec_from_file_location(f"site_{name}", ROOT / "site" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


assemble, conf = load("assemble"), load("conf")


@pytest.mark.skipif(not shutil.which("chromium"), reason="no Chromium (Debian: apt-get install chromium)")
def test_browser_tests_have_their_own_command():
    """`make test-site` builds the site first, which needs executed notebooks; here it is only told of."""
    assert "test-site:" in (ROOT / "Makefile").read_text()


# ---- text


def test_subscripts_are_set_but_code_and_formulas_are_not():
    text = "KL(π‖π_ref), y_<t, Σ_{s≥t} ℓ_s, E_{y_<t}, e^(−ℓ_t), w_{1:t}, R_tok_mu; "
    literal = "`π_ref`, $\\pi_t$, [a](b_t), token_ratio"
    assert assemble.typeset(text + literal) == (
        "KL(π‖π<sub>ref</sub>), y<sub>&lt;t</sub>, Σ<sub>s≥t</sub> ℓ<sub>s</sub>, E<sub>y<sub>&lt;t</sub></sub>, "
        "e<sup>−ℓ<sub>t</sub></sup>, w<sub>1:t</sub>, R<sub>tok,μ</sub>; " + literal
    )


def test_chapters_are_the_executed_notebooks_of_the_pipeline():
    text = "  x:\n    outs:\n      - build/nb/07_a.ipynb\n      - build/nb/01_b.ipynb:\n      #- build/nb/02_c.ipynb\n"
    assert assemble.chapters(text) == ["01_b", "07_a"]
    executed = {p.stem for p in (ROOT / "notebooks").glob("[0-9][0-9]_*.py")}
    assert set(assemble.chapters()) <= executed


def test_a_page_folds_long_code_and_puts_captions_under_figures(tmp_path, monkeypatch):
    caption = dict.fromkeys(("quantity", "setting", "seeds", "n", "centre", "band", "scale", "device", "dtype"), "x")
    caption |= {"title": "T", "alt": "a long description", "notebook": "notebooks/01_x.py"}
    (tmp_path / "01_fig.json").write_text(json.dumps(caption))
    monkeypatch.setattr(assemble, "FIGURES", tmp_path)
    new = nbformat.v4
    image = new.new_output("display_data", data={"image/png": "AAAA"})
    nb = new.new_notebook(cells=[
        new.new_markdown_cell("# Title"),
        new.new_code_cell("import math\nfrom math import (\n    pi,\n)"),
        new.new_code_cell("x = 1"),
        new.new_code_cell("\n".join(f"x = {i}" for i in range(16))),
        new.new_code_cell('fg.save(fig, "01_fig", caption)', outputs=[image]),
        new.new_markdown_cell("to [next](02_y.py) and [later](09_z.ipynb)\n| $p\\|q$ |"),
    ])  # fmt: skip
    page = assemble.chapter(nb, "01_x", ["01_x", "02_y"])
    kinds = [c.cell_type + " folded" * ("hide-input" in c.metadata.get("tags", [])) for c in page.cells]
    # title, source link, imports, x = 1, the long cell and the drawing one under one fold, figure, text
    assert kinds == ["markdown", "markdown", "code folded", "code", "code folded", "markdown", "markdown"]
    assert page.cells[0].source == "# 1 · Title"
    assert page.cells[4].outputs == []
    assert ":alt: a long description" in page.cells[5].source and "**T.** X." in page.cells[5].source
    assert page.cells[6].source == "to [next](02_y.ipynb) and later\n| $p\\Vert q$ |"


def test_an_image_without_a_caption_stops_the_build():
    image = nbformat.v4.new_output("display_data", data={"image/png": "AAAA"})
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("fig", outputs=[image])])
    with pytest.raises(SystemExit):
        assemble.chapter(nb, "01_x", [])


def test_docstrings_become_restructured_text():
    doc = "One `a|b` and y_ and **bold** *word*.\n\nIs\n\n    k1  0\n    k2  R\n\n"
    doc += "Args:\n    x: [B, T]\n        more.\n\nRaises: ValueError."
    assert "\n".join(conf.to_rst(doc.split("\n"))) == (
        "One \\ ``a|b``\\  and y\\_ and \\ **bold**\\  \\ *word*\\ .\n\nIs\n\n"
        "\n.. code-block:: text\n\n   k1  0\n   k2  R\n\n"
        "\n**Args:**\n\n- ``x``: [B, T] more.\n\n\\ **Raises:** ValueError."
    )


def test_an_undocumented_public_name_is_a_warning(caplog):
    with caplog.at_level("WARNING"):
        conf._docstring(None, "function", "klnb.x", lambda: 0, {}, [])
    assert "undocumented public name: klnb.x" in caplog.text


def test_the_api_pages_name_everything_public():
    page = assemble.api("public")
    functions = [n for n in klnb.__all__ if callable(getattr(klnb, n))]
    assert all(f":: klnb.{n}\n" in page for n in functions) and len(functions) > 8


# ---- numbers and code that pages quote


def test_quoted_numbers():
    # one position, π = (.7, .3), π_ref = (.5, .5): .7 log 1.4 + .3 log .6 = .0823; π(ℓ − KL) and π − π_ref
    assert assemble.facts() == {
        "fact_kl": ".0823", "fact_target": "(+.1779, −.1779)", "fact_swapped": "(+.2000, −.2000)"
    }  # fmt: skip
    readme = (ROOT / "README.md").read_text()
    assert ".0823" in readme and "(+.1779, −.1779)" in readme


def code(page):
    return [b for b in re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M)]


@pytest.mark.parametrize("page", ["README.md", "site/trainer.md"])
def test_the_code_on_a_page_runs_and_is_right(page):
    g = torch.Generator().manual_seed(0)
    n, vocab = 2, 5
    names = {
        "tokens": torch.randint(vocab, (6, 4), generator=g), "eos_id": 0, "temperature": 0.7, "n": n, "beta": 0.1,
        "logits": torch.randn(6, 4, vocab, generator=g, requires_grad=True),
        "ref_logits": torch.randn(6, 4, vocab, generator=g), "policy_loss": torch.zeros(()), "total_rows": 6,
        "torch": torch,
    }  # fmt: skip
    blocks = code(page)
    exec(blocks[0], names)
    once = names["logits"].grad.clone()
    for block in blocks[1:]:
        if "micro_batches" in block:
            names["logits"].grad = None
            logp = klnb.token_logprobs(names["logits"], names["tokens"], 0.7)
            names["micro_batches"] = [
                SimpleNamespace(logp=logp[s], ref_logp=names["ref_logp"][s], mask=names["mask"][s])
                for s in (slice(0, 4), slice(4, 6))
            ]
            exec(block.replace(".backward()", ".backward(retain_graph=True)"), names)
            torch.testing.assert_close(names["logits"].grad, once)  # the same gradient as in one piece
        elif "audit" not in block:
            exec(block, names | {"old_logp": names["logp"].detach()})


def test_the_readme_has_the_table_of_estimators():
    assert assemble.estimators() in (ROOT / "README.md").read_text()


def test_the_readme_names_every_chapter():
    readme = (ROOT / "README.md").read_text()
    assert [name for name in assemble.chapters() if f"notebooks/{name}.py" not in readme] == []


PAGES = ["README.md", "CONTRIBUTING.md", *(f"site/{p.name}" for p in sorted((ROOT / "site").glob("*.md")))]


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_files_that_a_page_names_exist(page):
    text = (ROOT / page).read_text()
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M))
    commands = re.findall(r"(?:^|`)make ([a-z0-9-]+)", text, re.M)
    assert [c for c in commands if c not in targets] == []
    files = re.findall(r"`((?:notebooks|examples|tools|site|tests|published|klnb|scales)/[\w./]+\.\w+)`", text)
    files += re.findall(r"\]\(((?:notebooks|figures)/[\w./]+)\)", text)
    assert [f for f in files if not (ROOT / f).exists() and "NN_" not in f and "NAME" not in f] == []
    assert not re.search(r"(?i)(?<!\")\b(forward|reverse)\b(?!\")[ -]KL", text)
