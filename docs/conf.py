"""How Sphinx makes the site of these pages: `make docs`. It needs no network, and each warning is an error."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer

DOCS = pathlib.Path(__file__).parent.resolve()
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

from telegrad.version import VERSION  # noqa: E402
from tests.surface import PROMISES, PROVISIONAL, Levels  # noqa: E402

project = "Telegrad"
author = "The Telegrad authors"
copyright = author  # noqa: A001
release = version = VERSION

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
highlight_language = "none"  # what is indented are commands and what they print; Python says that it is

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

default_role = "py:obj"  # `rpc_sync` in a docstring leads to it, where there is such a thing
autodoc_default_options = {
    "members": True,
    "member-order": "bysource",
    # Members of bases that users do not know are told, those of the libraries are not.
    "inherited-members": "Module,Optimizer,Future,OSError,AttributeError,BaseException,tuple,Enum",
}
autodoc_mock_imports = ["tensordict", "torchrl"]  # these pages need neither
autodoc_inherit_docstrings = False
autodoc_typehints_format = "short"
autoclass_content = "both"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"
napoleon_numpy_docstring = False

html_theme = "pydata_sphinx_theme"
html_title = "Telegrad"
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["versions.js"]
html_show_sourcelink = False
html_context = {"default_mode": "auto"}  # light or dark as the reader's system, until they choose
html_theme_options = {
    "navbar_align": "left",
    "header_links_before_dropdown": 6,
    "navbar_end": ["versions", "theme-switcher"],
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_toc_level": 2,
}

LEVELS = Levels.read(PROMISES.read_text())

# Papers that are no pages, and folders; and the pages that show them.
PAPERS = {
    ROOT / "README.md": DOCS / "project/readme.md",
    ROOT / "CHANGELOG.md": DOCS / "project/changelog.md",
    ROOT / "CONTRIBUTING.md": DOCS / "project/contributing.md",
    ROOT / "SECURITY.md": DOCS / "project/security.md",
    ROOT / "benchmarks/results/latest.md": DOCS / "project/benchmarks.md",
    ROOT / "benchmarks/results/programs.md": DOCS / "project/programs.md",
    DOCS / "decisions": DOCS / "explanations.md",
    DOCS / "tutorials": DOCS / "tutorials/index.md",
}


def relink(text: str, written_in: pathlib.Path, shown_in: pathlib.Path) -> str:
    """The text of a file of one folder, with its links as they must be on a page of another."""

    def there(link: re.Match[str]) -> str:
        target = (written_in / link["path"]).resolve()
        if not target.exists():
            return link[0]
        page = PAPERS.get(target, target)
        what = "path:" if page.suffix == ".md" and not page.is_relative_to(DOCS) else ""  # no page: a file to be loaded
        return f"]({what}{os.path.relpath(page, shown_in)}{link['rest'] or ''})"

    return re.sub(r"\]\((?P<path>[^)#:\s]+)(?P<rest>#[^)]*)?\)", there, text)


class CommandHelp(Directive):
    """What a command says of itself."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        said = subprocess.run(
            [sys.executable, "-m", "telegrad", *self.arguments, "--help"],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            env={**os.environ, "COLUMNS": "80"},
        ).stdout.strip()
        return [nodes.literal_block(said, said, language="none")]


def read(_: Sphinx, docname: str, source: list[str]) -> None:
    """Relink a page."""
    folder = (DOCS / docname).parent
    source[0] = relink(source[0], folder, folder)


def included(_: Sphinx, path: pathlib.Path, __: str, source: list[str]) -> None:
    """Relink a paper."""
    paper = (DOCS / path).resolve()
    source[0] = relink(source[0], paper.parent, PAPERS[paper].parent)


def with_its_level(_: Sphinx, what: str, name: str, __: object, ____: object, lines: list[str]) -> None:
    """Say so below the first line, where a name may still change."""
    module, ___, last = name.rpartition(".")
    if what in ("function", "class", "exception") and LEVELS.of(module, last) == PROVISIONAL:
        lines[1:1] = ["", "*Provisional*: its shape may change with a minor version (:doc:`/stability`).", ""]


def as_people_read_it(_: Sphinx, what: str, __: str, ___: object, ____: object, lines: list[str]) -> None:
    """Make of a docstring what Sphinx and napoleon take as people do."""
    text = "" if what == "module" else "\n".join(lines)  # what a module is about is told by the page that shows it
    text = re.sub(r"`[^`]+`(\w)?", lambda code: f"{code[0][:-1]}\\ {code[1]}" if code[1] else code[0], text)  # `RRef`s
    # What stands before a colon in the first line would be taken for a type; so that one is an escape of nothing.
    lines[:] = ["\\"] * (what in ("property", "attribute") and bool(text)) + text.split("\n")


def found_by_its_name(app: Sphinx, env: BuildEnvironment, node: pending_xref, shown: nodes.Node) -> nodes.Node | None:
    """`CallTimeout` in a docstring, where that name stands for one thing only, of whatever module."""
    name, domain = node["reftarget"], env.get_domain("py")
    if node.get("reftype") != "obj" or "." in name:
        return None
    found = [
        path
        for path, entry in domain.objects.items()
        if path.rpartition(".")[2] == name and entry.objtype in ("class", "exception", "function") and not entry.aliased
    ]
    if len(found) != 1:
        return None
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", found[0], node, shown)


def without_overloads(module: str) -> None:
    """Have Sphinx show the signatures that run, and not the many that only type checkers read."""
    source = ModuleAnalyzer.for_module(module)  # Sphinx asks for the same object later
    source.analyze()
    source.overloads.clear()


def setup(app: Sphinx) -> None:
    """Have Sphinx use all this."""
    without_overloads("telegrad._core.rpc.remote_calls")
    app.connect("source-read", read)
    app.connect("include-read", included)
    app.connect("autodoc-process-docstring", as_people_read_it, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", with_its_level, priority=450)
    app.connect("missing-reference", found_by_its_name)
    app.add_directive("command-help", CommandHelp)
