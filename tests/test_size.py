"""The package keeps within a budget of lines, files and words, whose numbers may only decrease.

A newcomer must be able to understand the core; an addition shows its costs here.
"""

from __future__ import annotations

import ast
import pathlib
import re

import telegrad

PACKAGE = pathlib.Path(telegrad.__file__).parent
ROOT = PACKAGE.parent
CORE = ("_core", "autograd", "rpc", "nn", "optim")
MOST = {
    "lines of the package": 62_025,
    "lines of the core": 38_673,
    "lines of the tests": 87_461,
    "files of the package": 230,
    "words of the glossary": 80,
    "global statements": 5,
    "sleeps in tests": 31,
}


def lines_of(folder: pathlib.Path) -> int:
    """Count lines but for comments, since a limit must not be a reason to leave one out."""
    return sum(
        not line.lstrip().startswith("#") for path in folder.rglob("*.py") for line in path.read_text().splitlines()
    )


def statements(folder: pathlib.Path, kind: type[ast.AST]) -> int:
    return sum(
        isinstance(node, kind) for path in folder.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))
    )


def test_the_budget_is_kept() -> None:
    tests = ROOT / "tests"
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    found = {
        "lines of the package": lines_of(PACKAGE),
        "lines of the core": sum(lines_of(PACKAGE / folder) for folder in CORE),
        "lines of the tests": lines_of(tests),
        "files of the package": len(list(PACKAGE.rglob("*.py"))),
        "words of the glossary": len(re.findall(r"^\| (?!---|word |term )[^|]+\|", glossary, re.M)),
        "global statements": statements(PACKAGE, ast.Global),
        "sleeps in tests": sum(len(re.findall(r"\bsleep\(", path.read_text())) for path in tests.rglob("*.py")),
    }
    assert {what: count for what, count in found.items() if count > MOST[what]} == {}
