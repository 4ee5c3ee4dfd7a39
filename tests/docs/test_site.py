"""The site of the pages: checks of its sources, and nightly ones of the built site, which need Sphinx and a browser."""

import collections
import html.parser
import pathlib
import re
import runpy
import urllib.parse
from collections.abc import Iterator
from typing import Any

import pytest

from tests import surface
from tests.docs.blocks import blocks_of

DOCS = pathlib.Path(__file__).parents[2] / "docs"
TABLE = re.compile(r"^(?::::\{toctree\}\n(?P<md>(?:.*\n)*?):::|\.\. toctree::\n(?P<rst>(?:\n| +.*\n)*))", re.MULTILINE)
DIRECTIVE = re.compile(r"(?m)^\.\. (?:py:data|auto(?!module)\w+|(?P<module>automodule|currentmodule)):: ([\w.]+)")
PHONE = 390  # pixels
COLUMNS = 72  # of code, which a page shows without scrolling


def test_every_page_is_in_one_table_of_contents() -> None:
    told = collections.Counter({"index": 1})
    todo = ["index"]
    while todo:
        for page in contents(todo.pop()):
            told[page] += 1
            todo += [page] if told[page] == 1 else []
    pages = {name_of(path) for ending in ("md", "rst") for path in DOCS.rglob(f"*.{ending}")}
    assert sorted(pages ^ told.keys()) == []
    assert [page for page, times in told.items() if times > 1] == []


def contents(page: str) -> Iterator[str]:
    """Yield the pages in a page's tables of contents."""
    path = file_of(page)
    for table in TABLE.finditer(path.read_text()):
        for entry in map(str.strip, (table["md"] or table["rst"]).splitlines()):
            if entry and not entry.startswith(":"):
                folder = DOCS if entry.startswith("/") else path.parent
                found = (folder / entry.lstrip("/")).relative_to(DOCS)
                yield from globbed(found, page) if "*" in entry else [str(found)]


def globbed(pattern: pathlib.Path, page: str) -> Iterator[str]:
    yield from (name for path in DOCS.glob(f"{pattern}.md") if (name := name_of(path)) != page)


def name_of(path: pathlib.Path) -> str:
    return str(path.relative_to(DOCS).with_suffix(""))


def file_of(page: str) -> pathlib.Path:
    path = DOCS / f"{page}.md"
    return path if path.exists() else path.with_suffix(".rst")


def test_each_line_of_code_is_shown_without_scrolling() -> None:
    blocks = [block for page in [DOCS.parent / "README.md", *DOCS.rglob("*.md")] for block in blocks_of(page)]
    code = [block for block in blocks if block.language not in ("text", "json")]
    lines = [(block, *each) for block in code for each in enumerate(block.text.splitlines(), block.line)]
    assert [block._replace(line=number).name for block, number, line in lines if len(line) > COLUMNS] == []


def test_the_pictures_are_up_to_date() -> None:
    pictures = runpy.run_path(str(DOCS / "diagrams/draw.py"))["PICTURES"]
    drawn = {f"{name}.svg": picture() for name, picture in pictures.items()}
    shown = {path.name: path.read_text() for path in DOCS.glob("diagrams/*.svg")}
    assert shown == drawn, "python docs/diagrams/draw.py"


def test_the_reference_has_each_public_name_once() -> None:
    told: collections.Counter[str] = collections.Counter()
    for page in DOCS.glob("reference/*.rst"):
        module = ""
        for directive in DIRECTIVE.finditer(page.read_text()):
            name = directive[2]
            if directive["module"] == "automodule":
                told.update(f"{name}.{each}" for each in surface.exported(name))
            elif directive["module"]:
                module = name
            else:
                told[name if name.startswith("telegrad.") else f"{module}.{name}"] += 1
    assert [name for name, times in told.items() if times > 1] == []
    assert sorted(public() - told.keys()) == []


def public() -> set[str]:
    found = {f"{module}.{name}" for module, name in surface.HANDED_OUT}
    for module in surface.MODULES:
        names = {f"{module}.{name}" for name in surface.exported(module) if not name.startswith("__")}
        found |= {name for name in names if not surface.path_of(name).exists()}  # names of modules
    return found


def test_the_list_has_all_existing_versions(tmp_path: pathlib.Path) -> None:
    for version in ("0.9.0", "0.10.0", "0.2.1"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "index.html").touch()
    (tmp_path / "doctrees").mkdir()
    runpy.run_path(str(DOCS / "build.py"))["list_versions"](tmp_path)
    assert (tmp_path / "versions.js").read_text() == 'const VERSIONS = ["0.10.0", "0.9.0", "0.2.1"];\n'
    assert "url=0.10.0/index.html" in (tmp_path / "index.html").read_text()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Build the pages; return the folder of this version."""
    for package in ("sphinx", "myst_parser", "pydata_sphinx_theme", "sphinx_copybutton"):
        pytest.importorskip(package, reason="needs what makes the site: pip install --group docs")
    build = runpy.run_path(str(DOCS / "build.py"))
    folder: pathlib.Path = tmp_path_factory.mktemp("site") / "docs"
    assert build["build"](folder) == 0
    return folder / build["VERSION"]


class Page(html.parser.HTMLParser):
    """The links of a page, the files that it loads, and its anchors."""

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.places: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.places |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        self.loads += [values["src"]] if "src" in values else []
        self.loads += [values["href"]] if tag == "link" and "href" in values else []


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_links_lead_to_existing_places_and_nothing_is_loaded_from_elsewhere(site: pathlib.Path) -> None:
    pages = {path: Page(path) for path in site.rglob("*.html") if "_static" not in path.parts}
    wrong = []
    for path, page in pages.items():
        wrong += [f"{path.name} loads {each}" for each in page.loads if "//" in each]
        for link in page.links:
            target, place = urllib.parse.urldefrag(link)
            if "//" in target or target.startswith("mailto:"):
                continue
            file = (path.parent / urllib.parse.unquote(target.partition("?")[0])).resolve() if target else path
            if not file.exists() or (place and file in pages and place not in pages[file].places):
                wrong.append(f"{path.name} leads to {link}")
    assert wrong == []


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_pages_fit_the_width_of_a_phone(site: pathlib.Path, browser: Any) -> None:
    wrong: list[Any] = []
    page = browser.new_page(viewport={"width": PHONE, "height": 800})
    page.on("console", lambda said: wrong.append((page.url, said.text)) if said.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append((page.url, str(error))))
    page.on("request", lambda asked: None if asked.url.startswith("file:") else wrong.append(asked.url))
    for path in sorted(site.rglob("*.html")):
        if "_static" not in path.parts:
            page.goto(path.as_uri())
            width = page.evaluate("document.documentElement.scrollWidth")
            wrong += [(path.name, width)] if width > PHONE else []
    assert wrong == []


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("look", ["light", "dark"])
def test_pages_and_pictures_follow_the_color_scheme_of_the_system(site: pathlib.Path, browser: Any, look: str) -> None:
    page = browser.new_page(color_scheme=look)
    page.goto((site / "architecture.html").as_uri())
    assert page.evaluate("document.documentElement.dataset.theme") == look
    assert page.evaluate("getComputedStyle(document.querySelector('.bd-article img')).colorScheme") == look


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_search_finds_a_function(site: pathlib.Path, browser: Any) -> None:
    page = browser.new_page()
    page.goto(f"{(site / 'search.html').as_uri()}?q=rendezvous_again")
    page.locator("#search-results li a[href*='reference/joining.html']").first.wait_for()


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_list_of_versions_leads_to_another_version(site: pathlib.Path, browser: Any) -> None:
    older = site.parent / "0.0.9"
    older.mkdir()
    (older / "index.html").write_text("the older pages")
    runpy.run_path(str(DOCS / "build.py"))["list_versions"](site.parent)
    page = browser.new_page(viewport={"width": 1200, "height": 800})
    page.goto((site / "rpc.html").as_uri())
    page.locator("select.versions").first.select_option("0.0.9")
    page.get_by_text("the older pages").wait_for()
