"""The tutorial, from executed notebooks: nothing is executed here, and nothing comes from a network.

`make site` first runs site/assemble.py, which puts pages, notebooks and figures together in build/site/src.
"""
import ast
import importlib.util
import inspect
import os
import re
import shutil
import textwrap
from pathlib import Path

_SRC = Path(__file__).resolve().parent.parent / "build/site/src"

project = "klnb"
author = copyright = "the klnb authors"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.mathjax"]
exclude_patterns = ["executed"]

nb_execution_mode = "off"
nb_merge_streams = True
nb_render_markdown_format = "myst"  # tables and formulas in displayed Markdown
nb_output_stderr = "remove-warn"  # with -W: no warning gets into the tutorial unseen
nb_code_prompt_show = "Show the code"
nb_code_prompt_hide = "Hide the code"
nb_number_source_lines = False
myst_enable_extensions = ["amsmath", "attrs_block", "attrs_inline", "colon_fence", "deflist", "dollarmath", "tasklist"]
myst_heading_anchors = 3

# MathJax 3.2.2 from the package sphinx-mathjax-offline (not used as an extension: it would copy all 24 MB)
mathjax_path = "mathjax/tex-chtml.js"
mathjax3_config = {"options": {"enableMenu": False}}
_MATHJAX = Path(importlib.util.find_spec("sphinx-mathjax-offline").origin).parent / "static" / "mathjax"

html_theme = "sphinx_book_theme"
html_title = "klnb"
html_static_path = [str(_SRC / "_static")]
html_css_files = ["colors.css", "custom.css"]
html_favicon = str(_SRC / "_static/favicon.svg")
html_js_files = ["custom.js"]
html_context = {"default_mode": "auto"}  # light or dark as the system is
html_show_search_summary = False  # it fetches pages, which a browser refuses from disk
html_show_sourcelink = False
html_show_copyright = False
html_copy_source = False
html_theme_options = {
    "navbar_persistent": [],  # pydata-sphinx-theme 0.20 would add a second search box in an empty top bar
    "use_download_button": False,
    "home_page_in_toc": True,
    "show_toc_level": 2,
}
if os.environ.get("GITHUB_REPOSITORY"):  # set by GitHub's runners: a link to the source, and buttons that run a chapter
    html_theme_options |= {
        "repository_url": "https://github.com/" + os.environ["GITHUB_REPOSITORY"],
        "use_repository_button": True,
    }

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature comes from the source, as it was written
python_maximum_signature_line_length = 78

# ---- docstrings: plain text with `code`, **bold**, indented blocks and sections, made into reStructuredText

_SECTION = re.compile(r"^(Args|Returns|Raises|Yields):\s*$")
_INLINE = re.compile(r"(^|(?<=[.;!?)] ))(Args|Returns|Raises|Value|Gradient[^:.]{0,40}|Sources?): ")
_ITEM = re.compile(r"^ {4}([A-Za-z_*][\w, *]*): (.*)$")


def _escape(text):
    """Text with `code` and **bold** kept and everything else taken literally."""
    out = []
    for part in re.split(r"(`[^`]+`|\*\*[^*]+\*\*|(?<!\w)\*\w[\w ]*\*(?!\w))", text):
        if part.startswith("`") and len(part) > 2:
            out.append(f"\\ ``{part.strip('`')}``\\ ")
        elif part.startswith("**") and len(part) > 4:
            out.append(f"\\ **{_escape(part[2:-2]).strip()}**\\ ")
        elif part.startswith("*") and len(part) > 2 and part.endswith("*"):
            out.append(f"\\ {part}\\ ")
        else:
            out.append(re.sub(r"([\\*_|`])", r"\\\1", part))
    return "".join(out)


def _paragraph(text):
    parts = _INLINE.split(text)  # text, gap, word, text, gap, word, text
    out = _escape(parts[0])
    for word, rest in zip(parts[2::3], parts[3::3], strict=True):
        out += f"\\ **{word}:** " + _escape(rest)
    return out


def to_rst(lines):
    """The lines of a docstring as reStructuredText."""
    out, i = [], 0
    while i < len(lines):
        line = lines[i]
        if not line.strip():
            out.append("")
            i += 1
        elif m := _SECTION.match(line):
            items, i = [], i + 1
            while i < len(lines) and (not lines[i].strip() or lines[i].startswith("    ")):
                if m2 := _ITEM.match(lines[i]):
                    items.append([m2[1], m2[2]])
                elif items and lines[i].strip():
                    items[-1][1] += " " + lines[i].strip()
                elif lines[i].strip():
                    items.append([None, lines[i].strip()])
                i += 1
            out += ["", f"**{m[1]}:**", ""]
            for name, text in items:
                names = ", ".join(f"``{n.strip()}``" for n in name.split(",")) + ": " if name else ""
                out += [f"- {names}{_escape(text)}"]
            out.append("")
        elif line.startswith("    "):
            block = []
            while i < len(lines) and (not lines[i].strip() or lines[i].startswith("    ")):
                block.append(lines[i])
                i += 1
            text = textwrap.dedent("\n".join(block)).strip("\n").split("\n")
            out += ["", ".. code-block:: text", "", *("   " + t for t in text), ""]
        else:
            text = [line.strip()]
            i += 1
            while i < len(lines) and lines[i].strip() and not _SECTION.match(lines[i]):
                if lines[i].startswith("    ") and text[-1].endswith((":", ",", "are")):
                    break
                text.append(lines[i].strip())
                i += 1
            out += [_paragraph(" ".join(text))]
    return out


def _docstring(app, what, name, obj, options, lines):
    if not "".join(lines).strip() or (inspect.isclass(obj) and not (obj.__doc__ or "").strip()):
        from sphinx.util import logging

        logging.getLogger(__name__).warning("undocumented public name: %s", name)  # an error under -W
    lines[:] = to_rst(list(lines))


def _skip(app, what, name, obj, skip, options):
    """The fields of a dataclass: its own docstring says what they are."""
    return True if what == "class" and not callable(obj) and not isinstance(obj, property) else None


def _signature(app, what, name, obj, options, signature, return_annotation):
    """The signature as the source has it: jaxtyping's shapes are strings that introspection would spell out."""
    if what not in ("function", "method", "class"):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(obj))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    if isinstance(tree, ast.ClassDef):
        if any("dataclass" in ast.unparse(d) for d in tree.decorator_list):
            return "", None
        tree = next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
        if tree is None:
            return "", None
    args = tree.args
    if args.args and args.args[0].arg in ("self", "cls"):
        del args.args[0]
    returns = ast.unparse(tree.returns) if tree.returns else None
    return f"({ast.unparse(args)})", returns


def _copy_mathjax(app, exception):
    if exception is None and app.builder.format == "html":
        for part in ("tex-chtml.js", "input/tex/extensions", "output/chtml/fonts/woff-v2"):
            src, dst = _MATHJAX / part, Path(app.outdir) / "_static" / "mathjax" / part
            if src.is_dir():
                shutil.copytree(src, dst, dirs_exist_ok=True)
            else:
                dst.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(src, dst)


def setup(app):
    app.connect("autodoc-process-docstring", _docstring)
    app.connect("autodoc-skip-member", _skip)
    app.connect("autodoc-process-signature", _signature)
    app.connect("build-finished", _copy_mathjax)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
