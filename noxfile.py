"""The matrix: `nox -l` lists it, `nox -s 'tests-3.12(torch="newest")'` runs one cell of it.

Each session makes an environment and has the Makefile use it, so that a command stands in one place alone.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterable
from typing import Any

import nox

ROOT = pathlib.Path(__file__).parent
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
OLDEST, NEWEST = "oldest", "newest"
TARGETS = ["lint", "docs", "docs-links", "conformance", "package", "nightly", "chaos"]

nox.options.sessions = ["lint"]
nox.options.default_venv_backend = "venv"
PYPROJECT: dict[str, Any] = nox.project.load_toml("pyproject.toml")
PROJECT: dict[str, Any] = PYPROJECT["project"]
EXTRAS = [
    "examples",
    "insight",
    "prometheus",
    "opentelemetry",
    "redis",
]  # of the tests, as in the Makefile


@nox.session(python=[*PYTHONS, "3.14t"])
@nox.parametrize("torch", [OLDEST, NEWEST])
def tests(session: nox.Session, torch: str) -> None:
    """All tests but the nightly ones, with the oldest torch that is promised and with the newest there is."""
    pins = [line for line in pinned() if not line.startswith("torch==")]
    install(session, pins + [line for line in lowest() if torch == OLDEST and line.startswith("torch==")])
    make(session, "test-only")


@nox.session(python=PYTHONS[0])
def floor(session: nox.Session) -> None:
    """The same tests with the lowest version of each dependency that pyproject.toml allows."""
    install(session, lowest())
    make(session, "test-only")


def install(session: nox.Session, constraints: Iterable[str]) -> None:
    """This project, as developers have it."""
    file = pathlib.Path(session.create_tmp()) / "constraints.txt"
    file.write_text("\n".join(constraints))
    session.install("pip>=25.1")
    session.install("-c", str(file), "-e", f".[{','.join(EXTRAS)}]", "--group", "dev")


def make(session: nox.Session, target: str) -> None:
    """With the session's environment in the place of the Makefile's own."""
    place = pathlib.Path(session.virtualenv.location)
    (place / ".installed").touch()  # so it is taken as it is
    programs = pathlib.Path(session.bin).as_posix()
    session.run("make", target, f"VENV={place.as_posix()}", f"BIN={programs}", external=True)


def pinned() -> list[str]:
    """constraints.txt, without what it says to people."""
    return [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]


def lowest() -> list[str]:
    """Each dependency at the version from which on it may be."""
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *PYPROJECT["dependency-groups"]["dev"]]
    wanted += [each for extra in EXTRAS for each in extras[extra]]
    found = [re.match(r"([\w.-]+)(?:\[.*?\])?>=([\d.]+)", each) for each in wanted]
    return [f"{each[1]}=={each[2]}" for each in found if each]


@nox.session(python=PYTHONS)
def portable(session: nox.Session) -> None:
    """The tests that need nothing of Linux or macOS."""
    install(session, [line for line in pinned() if not line.startswith("torch==")])
    make(session, "portable")


def session_of(target: str) -> None:
    @nox.session(name=target, python=PYTHONS[1])
    def run(session: nox.Session) -> None:
        install(session, pinned())
        make(session, target)


for each in TARGETS:
    session_of(each)
