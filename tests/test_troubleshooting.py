"""Every exception is documented, and the package raises or logs each message of docs/troubleshooting.md."""

import ast
import functools
import pathlib
import re
from collections.abc import Iterator

import telegrad
from telegrad import errors

PAGE = (pathlib.Path(__file__).parent.parent / "docs" / "troubleshooting.md").read_text()
MESSAGES = sorted(set(re.findall(r"^\| `([^`]+)`", PAGE, re.MULTILINE)))


@functools.cache
def templates() -> str:
    """Return all texts of the package, with marks in place of values."""
    return "\n".join(_templates())


def _templates() -> Iterator[str]:
    for path in pathlib.Path(telegrad.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                yield "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.sub(r"%[srdg]|%\.\df", "\0", node.value)


def pattern_of(message: str) -> str:
    """Return a pattern for the message, with marks in place of names and numbers."""
    parts = re.split(r"((?<!\w)'[^']*'|\b\d+\b|\b[A-Z]+_[A-Z]+\b)", message)
    return "".join(f"(?:{re.escape(part)}|\0)" if number % 2 else re.escape(part) for number, part in enumerate(parts))


def test_the_messages_exist() -> None:
    assert [message for message in MESSAGES if not re.search(pattern_of(message), templates())] == []


def test_a_message_that_does_not_exist_is_found() -> None:
    assert not re.search(pattern_of("the worker 'x' has gone fishing"), templates())
    assert len(MESSAGES) > 50


CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
DOCS = pathlib.Path(telegrad.__file__).parents[1] / "docs"
TABLE = DOCS.joinpath("rpc.md").read_text().partition("## Errors")[2]


def parents(tree: str) -> dict[str, str | None]:
    """Return the parent of each name in the tree."""
    above: list[tuple[int, str]] = []
    found: dict[str, str | None] = {}
    for line in tree.splitlines():
        name = line.lstrip(" │├└─").partition(" ")[0]
        if not name or not hasattr(errors, name):
            continue
        depth = line.index(name)
        above = [entry for entry in above if entry[0] < depth]
        found[name] = above[-1][1] if above else None
        above.append((depth, name))
    return found


def test_each_exception_is_exported_and_documented() -> None:
    assert [kind for kind in CLASSES if not kind.__doc__ or f"`{kind.__name__}`" not in TABLE] == []


def test_the_tree_shows_the_base_classes() -> None:
    tree = parents(DOCS.joinpath("reference", "errors.rst").read_text().partition("none\n")[2])
    assert set(tree) == {kind.__name__ for kind in CLASSES}
    for name, parent in tree.items():
        assert parent is None or parent in {base.__name__ for base in getattr(errors, name).__bases__}


def test_all_exceptions_are_exported() -> None:
    assert errors.__all__ == sorted(kind.__name__ for kind in CLASSES)
