"""Measure how much of the pure files their tests run: `python -m tests.covering`; fail if that is too little.

Each branch of state machines without threads and sockets can be reached, so each should be.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from tests.test_imports import PURE, ROOT

LEAST = 95.0  # percent of a file's statements and branches
HERE = pathlib.Path(__file__).parent
# Besides tests that have the name of their file.
ALSO = {"flow", "frames", "live", "maps", "records", "redis_replies", "redis_settings"}
ALSO |= {"quorum", "refusals", "roles", "surroundings", "watches", "why"}
WITHOUT = {"launchers", "dynamic"}  # which start processes, or take minutes


def tests() -> list[str]:
    """Return the simulations, and the tests of pure files in all folders."""
    names = {f"test_{name}" for name in {pathlib.Path(name).stem for name in PURE} | ALSO}
    found = (path for path in HERE.rglob("test_*.py") if path.stem in names or path.parent.name == "sim")
    return [str(path) for path in sorted(found) if path.stem.removeprefix("test_") not in WITHOUT]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        found = measure(pathlib.Path(folder))
    for name, percent in found.items():
        print(f"{percent:6.1f} {name}{'' if percent >= LEAST else f'   less than {LEAST:g}'}")
    return 0 if min(found.values()) >= LEAST else 1


def measure(folder: pathlib.Path) -> dict[str, float]:
    """Return the percentage of statements and branches that are run, for each pure file."""
    pytest = ["-m", "pytest", "-m", "not nightly and not cuda", "--timeout", "300", *tests()]
    _coverage(folder, "run", "--branch", f"--include={ROOT}/*", *pytest)
    _coverage(folder, "json", "-q", "-o", f"{folder}/report.json")
    files: dict[str, Any] = json.loads((folder / "report.json").read_text())["files"]
    percents = {pathlib.Path(path).resolve(): each["summary"]["percent_covered"] for path, each in files.items()}
    return {name: percents.get(ROOT / name, 0.0) for name in PURE}


def _coverage(folder: pathlib.Path, *arguments: str) -> None:
    """Run coverage without subprocesses, which pure files do not need."""
    options = [arguments[0], "--rcfile=", f"--data-file={folder}/data", *arguments[1:]]
    subprocess.run([sys.executable, "-m", "coverage", *options], check=True)


if __name__ == "__main__":
    sys.exit(main())
