"""Every code block of every page is run, parsed or checked, and has the output that the page shows."""

import ast
import doctest
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest
from _pytest.mark import ParameterSet

from telegrad.launch import policy
from tests.cluster import PATIENCE, free_port, processes
from tests.docs.blocks import (
    PAGES,
    ROOT,
    Block,
    Run,
    blocks_of,
    commands_of,
    indented,
    inline_commands,
    modules_of,
    places_of_given,
    programs_of,
    runs_of,
)
from tests.docs.commands import fault_of
from tests.docs.running import Outcome, perform

LANGUAGES = {"python", "sh", "text", "toml", "json"}
# Pages with programs of several processes, or that are killed, have tests of their own.
ELSEWHERE = {
    "docs/clusters.md": "tests/group/test_launched.py",
    "docs/elastic.md": "tests/test_elastic_page.py",
    "docs/notebook.md": "tests/test_notebook.py",
    "docs/running.md": "tests/test_running.py",
    "docs/security.md": "tests/test_security_page.py",
}
TUTORIALS = {*ROOT.glob("docs/tutorials/*.md")}
AS_USERS_DO = {ROOT / "docs" / "extensions.md", *TUTORIALS}  # also with unforked workers
LOSING = [ROOT / f"docs/tutorials/{name}.md" for name in ("federated", "parameter-server")]  # lose workers on purpose
WAITING = ROOT / "docs/tutorials/elastic-training.md"  # this page waits for workers that it has killed
SILENT = {ROOT / "README.md", *TUTORIALS} - {*LOSING, WAITING}
LOSS = re.compile(r"^(.*telegrad: worker '\w+' was lost: ).*\n", re.MULTILINE)
FEW = 20  # the limit for blocks with a reason not to be run
FIGURE = re.compile(r"-?\d+(?:[.,]\d+)*(?:e-?\d+)?")
LINE = re.compile(r"print\(.*\) +# (.+)$")


def path_of(page: pathlib.Path) -> str:
    return str(page.relative_to(ROOT))


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
RUNNING = [page for page in PAGES if programs_of(page) and path_of(page) not in ELSEWHERE]


def of_languages(*languages: str) -> list[ParameterSet]:
    return [pytest.param(block, id=block.name) for block in BLOCKS if block.language in languages and not block.excuse]


@pytest.mark.timeout(4 * PATIENCE)
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.nightly if page in TUTORIALS else ()) for page in RUNNING],
    ids=path_of,
)
def test_the_programs_run(page: pathlib.Path) -> None:
    for run in runs_of(page):
        outcome = outcome_of(page, run)
        assert outcome.error == "", outcome.error + outcome.said + outcome.out
        assert outcome.said == "" or page not in SILENT
        losses = LOSS.findall(outcome.said)  # each process logs each loss once
        assert len(set(losses)) == len(outcome.said.splitlines()) or page not in LOSING, outcome.said
        assert list(wrong_comments(page, outcome)) == [], outcome.out
        for block in run.shown:
            assert shows(block, outcome.out), f"{block.name} shows\n{block.text}\nbut it prints\n{outcome.out}"


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [page for page in RUNNING if page in AS_USERS_DO], ids=path_of)
def test_pages_run_as_users_run_them(page: pathlib.Path, tmp_path: pathlib.Path) -> None:
    for name, cells in programs_of(page).items():
        (tmp_path / name).write_text("\n".join(cell.text for cell in cells))
    for run in runs_of(page):
        command = [sys.executable, *(["-m", "telegrad"] if run.installs else []), run.file, *run.arguments]
        environment = {**os.environ, "MASTER_PORT": str(free_port())}
        ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180)
        assert ended.returncode == 0, ended.stderr
        assert [block.text for block in run.shown if not shows(block, ended.stdout)] == [], ended.stdout


def outcome_of(page: pathlib.Path, run: Run) -> Outcome:
    with tempfile.TemporaryDirectory() as folder, processes(1) as (process,):
        cells, modules = programs_of(page)[run.file], modules_of(page)
        return process.run(
            perform, cells, modules, run.file, run.arguments, run.installs, folder, patience=3 * PATIENCE
        )


def shows(block: Block, out: str) -> bool:
    """Return True if the output contains the block; `...` stands for omitted text, and figures may differ."""
    if block.figures:
        return said(FIGURE.sub("0", block.text), FIGURE.sub("0", out))
    return said(block.text, out)


def said(shown: str, out: str) -> bool:
    shown = shown.replace("\n...\n", "...\n")  # a line of dots may stand for no lines
    return doctest.OutputChecker().check_output(shown, out, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)


def wrong_comments(page: pathlib.Path, outcome: Outcome) -> Iterator[str]:
    """Yield the comments behind a `print` that differ from its output."""
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if shows := LINE.search(line):
            for text in outcome.printed.get((str(page), number), []):
                if not said(shows[1], text):
                    yield f"line {number} says {shows[1]}, but prints {text}"


def test_the_commands_exist() -> None:
    blocks = [block for block in BLOCKS if block.language == "sh"]
    commands = [(block.name, words) for block in blocks for words in commands_of(block)]
    commands += [(path_of(page), words) for page in PAGES for words in inline_commands(page)]
    assert [(place, fault) for place, words in commands if (fault := fault_of(words))] == []


def test_unknown_commands_are_found() -> None:
    wrong = ["telegrad worker a --master", "python -m telegrad wory", "make tests", "pip install 'telegrad[insights]'"]
    assert all(fault_of(line.split()) for line in [*wrong, "python -m tests.nothing", "srun telegrad run --rolls x"])


@pytest.mark.parametrize("block", of_languages("toml", "json"))
def test_the_tables_are_read(block: Block) -> None:
    assert json.loads(block.text) if block.language == "json" else policy.read(block.text, {}).roles


def test_blocks_have_languages() -> None:
    assert [block.name for block in BLOCKS if block.language not in LANGUAGES] == []
    assert [f"{path_of(page)}:{line}" for page in PAGES for line in indented(page)] == []


def test_few_blocks_are_excused() -> None:
    assert len([block for block in BLOCKS if block.excuse]) <= FEW


def test_every_program_is_run() -> None:
    for page in RUNNING:
        assert {run.file for run in runs_of(page)} == programs_of(page).keys() - modules_of(page), path_of(page)


def test_every_output_belongs_to_a_program() -> None:
    shown = {block for page in PAGES for run in runs_of(page) for block in run.shown}
    texts = [block for block in BLOCKS if block.language == "text" and not block.excuse]
    assert [block.name for block in texts if block not in shown] == []


def test_given_cells_belong_to_exactly_one_block() -> None:
    for page in PAGES:
        texts = [block.text for block in blocks_of(page) if block.language == "python"]
        assert [words for words in places_of_given(page) if words and sum(words in text for text in texts) != 1] == []


def test_other_tests_cover_the_excluded_pages() -> None:
    for page, test in ELSEWHERE.items():
        assert pathlib.Path(page).name in (ROOT / test).read_text()
    assert all(ast.parse(block.text) for block in BLOCKS if block.language == "python")
