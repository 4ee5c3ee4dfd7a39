"""The code blocks of a page, and the programs that they make.

A Python block whose first line is a comment with a file's name (`# train.py`) begins that file, and the Python blocks
behind it continue it. Blocks before any such line are one program without a name. A file that another one of the page
imports is a module: it lies beside the program, and is not run by itself. If blocks need given objects (a model, a
group of workers), `given/` has a file of the page's path: cells of Python, each under a line that says where it
belongs, `# before: words` or `# after: words` of a block, or `# at the end`.
"""

import pathlib
import re
import shlex
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent.parent
GIVEN = pathlib.Path(__file__).parent / "given"
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")})

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\{?[\w-]*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE
)
_MARKER = re.compile(r"<!-- not run: (.+) -->\n+\Z")
_INLINE = re.compile(r"(?<!`)`((?:python -m|telegrad|make|pip install|pytest|torchrun|\.venv/bin/\w+) [^`]+)`")
_FIGURES = re.compile(r"<!-- figures differ -->\n+\Z")
_FILE = re.compile(r"# ([\w.]+\.(?:py|toml))(?: .*)?\n")
_IMPORT = re.compile(r"^(?:import|from) (\w+)", re.MULTILINE)
_CELL = re.compile(r"^# (before: .+|after: .+|at the end)\n", re.MULTILINE)


class Block(NamedTuple):
    page: pathlib.Path
    line: int  # the line of the page where its text begins
    language: str
    text: str
    excuse: str  # why the block is not run, or ""
    figures: bool  # True if its figures differ from run to run

    @property
    def name(self) -> str:
        """Return the block's name in tests."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


class Cell(NamedTuple):
    """A piece of a Python program, with its file and line."""

    text: str
    path: pathlib.Path
    line: int


class Run(NamedTuple):
    """A program of a page, as one of the page's commands runs it."""

    file: str  # the file of the program, "" without a name
    arguments: list[str]
    installs: bool  # True for a program of torch.distributed.rpc that runs on Telegrad
    shown: list[Block]  # the blocks with its output


def blocks_of(page: pathlib.Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in _FENCE.finditer(text):
        if match["language"].startswith("{"):
            continue  # directives of the site: a list of pages, an include
        before = text[: match.start()]
        marker, figures = _MARKER.search(before), bool(_FIGURES.search(before))
        indent = re.compile(f"^{match['indent']}", re.MULTILINE)
        line, code = text.count("\n", 0, match.start("text")) + 1, indent.sub("", match["text"])
        found.append(Block(page, line, match["language"], code, marker[1] if marker else "", figures))
    return found


def indented(page: pathlib.Path) -> list[int]:
    """Return the lines that begin an indented block, which has no language."""
    text = _FENCE.sub(lambda match: "x\n" * match[0].count("\n") + "x", page.read_text())
    return [
        text.count("\n", 0, match.end()) + 1
        for match in re.finditer(r"(?:\A|[^\n]\n)\n(?=    \S)", text)
        if _is_code(text, match.end())
    ]


def _is_code(text: str, place: int) -> bool:
    """Return True unless an indented paragraph continues an item of a list."""
    before = [line for line in text[:place].splitlines() if line.strip() and not line.startswith("    ")]
    return not (before and re.match(r" {0,3}(?:[-*]|\d+\.) ", before[-1]))


def file_of(block: Block) -> str:
    named = _FILE.match(block.text)
    return named[1] if named else ""


def programs_of(page: pathlib.Path) -> dict[str, list[Cell]]:
    """Return the programs of a page by the names of their files, with the given cells."""
    programs: dict[str, list[Cell]] = {}
    name, given = "", _given(page)
    for block in blocks_of(page):
        if block.language != "python" or block.excuse:
            continue
        name = file_of(block) or name
        programs.setdefault(name, [])
        programs[name] += [cell for words, cell in given if words.startswith("before: ") and words[8:] in block.text]
        programs[name].append(Cell(block.text, page, block.line))
        programs[name] += [cell for words, cell in given if words.startswith("after: ") and words[7:] in block.text]
    if programs:
        programs[name] += [cell for words, cell in given if words == "at the end"]
    return programs


def modules_of(page: pathlib.Path) -> dict[str, str]:
    """Return the content of the files of a page that its other programs import."""
    texts = {name: "\n".join(cell.text for cell in cells) for name, cells in programs_of(page).items()}
    imported = {name for text in texts.values() for name in _IMPORT.findall(text)}
    return {name: text for name, text in texts.items() if name.removesuffix(".py") in imported}


def _given(page: pathlib.Path) -> list[tuple[str, Cell]]:
    path = (GIVEN / page.relative_to(ROOT)).with_suffix(".py")
    if not path.exists():
        return []
    text = path.read_text()
    marks = list(_CELL.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    return [
        (mark[1], Cell(text[mark.end() : end], path, text.count("\n", 0, mark.end()) + 1))
        for mark, end in zip(marks, ends, strict=True)
    ]


def places_of_given(page: pathlib.Path) -> list[str]:
    """Return the words that place given cells in a page."""
    return [words.partition(": ")[2] for words, _ in _given(page)]


def runs_of(page: pathlib.Path) -> list[Run]:
    """Return the runs of a page's programs in order, each with the outputs that the page shows after it."""
    programs = programs_of(page)
    found: list[Run] = [Run("", [], False, [])] if "" in programs else []
    for block in blocks_of(page):
        if block.excuse:
            continue
        if block.language == "sh":
            for words in commands_of(block):
                installs = words[:3] == ["python", "-m", "telegrad"]
                rest = words[3 if installs else 1 :]
                if words[0] == "python" and rest and rest[0] in programs:
                    found.append(Run(rest[0], rest[1:], installs, []))
        elif block.language == "text" and found:
            found[-1].shown.append(block)
    return found


def commands_of(block: Block) -> list[list[str]]:
    """Return the words of each command, without comments."""
    lines = block.text.replace("\\\n", " ").splitlines()
    found = [shlex.split(line, comments=True) for line in lines]
    return [words for words in found if words]


def inline_commands(page: pathlib.Path) -> list[list[str]]:
    """Return the commands inside of text that have arguments; others are names of programs."""
    commands = [shlex.split(text) for text in _INLINE.findall(page.read_text())]
    return [words for words in commands if len(words) > (3 if words[1] == "-m" else 2) and "..." not in words]
