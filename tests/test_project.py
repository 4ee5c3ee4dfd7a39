"""The promises of the project's documents are kept."""

import pathlib
import re
import subprocess
import sys

import telegrad
from tests.cluster import PATIENCE

ROOT = pathlib.Path(__file__).parent.parent
PAPERS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]


def test_links_lead_to_existing_files() -> None:
    links = [(paper, link) for paper in PAPERS for link in re.findall(r"\]\(([^)#]+)", paper.read_text())]
    assert [(paper, link) for paper, link in links if "://" not in link and not (paper.parent / link).exists()] == []


def test_the_changelog_has_this_version() -> None:
    assert f"## {telegrad.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_citation_has_this_version() -> None:
    assert f"\nversion: {telegrad.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_news_have_names_that_a_release_includes() -> None:
    kinds = "|".join(re.findall(r'{ directory = "(\w+)"', (ROOT / "pyproject.toml").read_text()))
    names = {path.name for path in (ROOT / "news").iterdir()} - {"README.md"}
    assert [name for name in names if not re.fullmatch(rf"\+[a-z0-9-]+\.({kinds})\.md", name)] == []


def test_no_program_has_left_files_that_are_tracked() -> None:
    listed = subprocess.run(["git", "ls-files", "-s"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    tracked = [each.partition("\t") for each in listed.splitlines()]
    assert [path for mode, _, path in tracked if not mode.startswith("100")] == [], "links"
    folders = {path.partition("/")[0] for _, _, path in tracked if "/" in path}
    assert folders <= {".ci", ".github", "benchmarks", "docs", "examples", "news", "telegrad", "tests"}


def test_workflows_run_existing_sessions_and_targets() -> None:
    matrix, makefile = (ROOT / "noxfile.py").read_text(), (ROOT / "Makefile").read_text()
    targets = re.findall(r'"([\w-]+)"', re.search(r"TARGETS = \[(.*)\]", matrix).group(1))
    sessions = {*re.findall(r"^def (\w+)\(session: nox.Session", matrix, re.MULTILINE), *targets}
    workflows = "".join(path.read_text() for path in ROOT.glob(".github/workflows/*.yml"))
    wanted = set(re.findall(r"^ +session: ([a-z-]+[a-z])", workflows, re.MULTILINE))
    assert wanted
    assert wanted <= sessions
    run = {*targets, *re.findall(r'make\(session, "([\w-]+)"\)', matrix)}
    assert run <= {*re.findall(r"^([\w-]+):", makefile, re.MULTILINE)}


def test_parts_are_imported_at_their_first_use() -> None:
    program = """
import sys, telegrad
assert "torch" not in sys.modules
assert telegrad.rpc.rpc_sync and telegrad.nn.Pipeline and telegrad.optim and telegrad.autograd and telegrad.checkpoint
assert not hasattr(telegrad, "nothing")
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE)


def test_the_tests_that_the_threat_model_names_exist() -> None:
    named = set(re.findall(r"`((?:\w+/)?test_\w+\.py)`", (ROOT / "SECURITY.md").read_text()))
    assert len(named) > 8
    assert [each for each in named if not (ROOT / "tests" / each).is_file()] == []


FIGURES = {  # rows of the README's table: rows of the results
    "empty rpc_sync, one host; TCP": ["empty rpc_sync, p50 | host", "empty rpc_sync, p50 | tcp"],
    "rpc_async, 10000 in flight": ["rpc_async, 10000 in flight | host"],
    "remote, to_here, drop": ["remote, to_here, drop | host"],
    "64 MB to a worker of this host; over TCP": ["64 MB to | host", "64 MB to | tcp"],
    "16 MB over TCP": ["16 MB to | tcp"],
    "RemoteModule: forward, backward, step": ["RemoteModule forward, backward, step | host"],
    "parameter server, 1 trainer; 4": ["parameter server, 1 trainers | host", "parameter server, 4 trainers | host"],
    "program: reinforcement learning; drop-in": ["reinforcement | 1 thread | start to exit, s"],
    "program: parameter server; drop-in": ["parameter_server | 1 thread | start to exit, s"],
}


def test_the_figures_of_the_readme_are_those_of_the_results() -> None:
    readme = (ROOT / "README.md").read_text()
    rows: dict[str, list[str]] = {}
    for page, names in (("latest", 2), ("programs", 3)):
        for line in (ROOT / f"benchmarks/results/{page}.md").read_text().splitlines():
            cells = [cell.partition(" (")[0] for cell in line.strip("| ").split(" | ")]
            figures = cells[3:5] if page == "latest" else ["; ".join(cells[3:5]), *cells[5:6]]
            rows.setdefault(" | ".join(cells[:names]), figures)
    for label, of in FIGURES.items():
        wanted = " | ".join("; ".join(column) for column in zip(*map(rows.__getitem__, of), strict=True))
        assert re.search(rf"^\| {re.escape(label)}[^|]*\| \S+ \| {re.escape(wanted)} \|$", readme, re.M), (
            label,
            wanted,
        )
