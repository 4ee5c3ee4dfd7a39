"""Check the commands that pages show: the program exists, and its parser knows the options."""

import argparse
import contextlib
import importlib.util
import io
import re
import shlex

from telegrad.insight import command as insight
from telegrad.launch import supervisor as supervision
from telegrad.launch import worker_command
from tests.docs.blocks import ROOT

# Only the commands that these start are checked; the launchers may not be installed.
LAUNCHERS = {"kubectl", "mpiexec", "mpirun", "sbatch", "srun", "ssh", "for", "do", "done", "sh"}
OTHERS = {"(umask", "apt-get", "cat", "cd", "cp", "export", "git", "mv", "nox", "openssl", "pre-commit"}
INSIGHT = ("why", "top", "dashboard", "trace", "dump")


def fault_of(words: list[str]) -> str:
    """Return the fault of a command, or ""."""
    if words[0] in OTHERS:
        return ""
    for number, word in enumerate(words):
        if " " in word and number and words[number - 1] != "-k":
            return fault_of(shlex.split(word, comments=True))  # a command for a shell, or for another host
        program = word.rpartition("/")[2]
        if program in KNOWN:
            return KNOWN[program](_until_the_shells(words[number + 1 :]))
    if words[0] in LAUNCHERS:
        return _missing(words)
    return f"nobody knows {words[0]}"


def _until_the_shells(words: list[str]) -> list[str]:
    """Return the words before those for the shell or for MPI."""
    for end in ("&", "&&", ":", "|", ">", ">>"):
        if end in words:
            words = words[: words.index(end)]
    return words


def _missing(words: list[str]) -> str:
    """Return the message for the first word that names a missing file of this project, or ""."""
    for word in words:
        if re.match(r"(examples|tests|docs|benchmarks)/", word) and not (ROOT / word.partition("::")[0]).exists():
            return f"there is no {word}"
    return ""


def _python(words: list[str]) -> str:
    if words[:2] == ["-m", "telegrad"]:
        return _telegrad(words[2:])
    if words[:2] == ["-m", "pytest"]:
        return _missing(words)
    if words[:1] == ["-m"]:
        return "" if importlib.util.find_spec(words[1]) else f"there is no module {words[1]}"
    return _missing(words)


def _telegrad(words: list[str]) -> str:
    words = [re.sub(r"\$\w+", "0", word) for word in words]
    if words[:1] == ["run"]:
        options, command = supervision._split(words[1:])
        return _parsed(supervision._parser(), options) or (fault_of(command) if command else "")
    if words[:1] == ["worker"]:
        return _parsed(worker_command._parser(), words[1:])
    if words[0] in INSIGHT:
        return _parsed(insight._parser(), words)
    known = words[0] in ("--version", "--help", "-m") or words[0].endswith(".py")
    return "" if known else f"telegrad has no command {words[0]}"


def _torchrun(words: list[str]) -> str:
    from torch.distributed.run import get_args_parser

    return _parsed(get_args_parser(), words)


def _parsed(parser: argparse.ArgumentParser, words: list[str]) -> str:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            parser.parse_args(words)
    except SystemExit as end:
        return said.getvalue().strip() if end.code else ""
    return ""


def _make(words: list[str]) -> str:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return "".join(f"make has no target {word}" for word in words if word not in targets and "=" not in word)


def _pip(words: list[str]) -> str:
    known = set(re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    asked = {extra for word in words for extras in re.findall(r"\[(.+)\]", word) for extra in extras.split(",")}
    return "".join(f"there is no extra {extra}" for extra in sorted(asked - known))


KNOWN = {
    "python": _python,
    "telegrad": _telegrad,
    "torchrun": _torchrun,
    "pytest": _missing,
    "make": _make,
    "pip": _pip,
}
