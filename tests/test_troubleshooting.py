"""The package raises or logs each message that docs/troubleshooting.md lists."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

import telegrad

PAGE = (pathlib.Path(__file__).parent.parent / "docs" / "troubleshooting.md").read_text()
MESSAGES = sorted(set(re.findall(r"^\| `([^`]+)`", PAGE, re.MULTILINE)))


def templates() -> Iterator[str]:
    """Yield all texts of the package, with a mark where something is filled in."""
    for path in pathlib.Path(telegrad.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                yield "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.sub(r"%[srdg]|%\.\df", "\0", node.value)


ALL = "\n".join(templates())


def pattern_of(message: str) -> str:
    """Return a pattern of the message, with marks in the place of names and numbers."""
    parts = re.split(r"((?<!\w)'[^']*'|\b\d+\b|\b[A-Z]+_[A-Z]+\b)", message)
    return "".join(f"(?:{re.escape(part)}|\0)" if number % 2 else re.escape(part) for number, part in enumerate(parts))


@pytest.mark.parametrize("message", MESSAGES)
def test_the_message_exists(message: str) -> None:
    assert re.search(pattern_of(message), ALL)


def test_a_message_that_does_not_exist_is_found() -> None:
    assert not re.search(pattern_of("the worker 'x' has gone fishing"), ALL)
    assert len(MESSAGES) > 50
