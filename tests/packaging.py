"""Build the published files into `dist/`, and try them: `python -m tests.packaging`.

The same commit gives the same bytes, also if they are built from the sdist; the wheel works in an empty environment;
and `build/` has the list of the packages that are installed with it, for checks of known vulnerabilities.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv

from telegrad.version import VERSION

ROOT = pathlib.Path(__file__).parent.parent
DIST = ROOT / "dist"
PARTS_LIST = ROOT / "build" / "sbom.cdx.json"


def main() -> None:
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as made:
        folder = pathlib.Path(made)
        build(ROOT, DIST)
        with tarfile.open(DIST / f"telegrad-{VERSION}.tar.gz") as sdist:
            sdist.extractall(folder, filter="data")
        build(folder / f"telegrad-{VERSION}", folder / "again")
        compare(DIST, folder / "again")
        run(sys.executable, "-m", "twine", "check", "--strict", *map(str, DIST.iterdir()))
        python = install(folder / "empty")
        shutil.copy(ROOT / "examples" / "first_calls.py", folder)
        run(str(python), "first_calls.py", at=folder)
        list_parts(python)
    print(f"{', '.join(sorted(path.name for path in DIST.iterdir()))}: reproducible, and the wheel works")


def build(source: pathlib.Path, into: pathlib.Path) -> None:
    run(sys.executable, "-m", "build", "--outdir", str(into), str(source), SOURCE_DATE_EPOCH=time_of_commit())


def time_of_commit() -> str:
    said = os.environ.get("SOURCE_DATE_EPOCH")
    return said or subprocess.check_output(["git", "log", "-1", "--format=%ct"], cwd=ROOT, text=True).strip()


def compare(one: pathlib.Path, other: pathlib.Path) -> None:
    names = {path.name for path in one.iterdir()}
    differ = [name for name in names if (one / name).read_bytes() != (other / name).read_bytes()]
    if len(names) != 2 or differ:
        sys.exit(f"built twice, with other bytes: {differ or names}")


def install(environment: pathlib.Path) -> pathlib.Path:
    """Install the wheel and its dependencies in a new environment; return its interpreter."""
    venv.create(environment, with_pip=True)
    python = environment / ("Scripts" if os.name == "nt" else "bin") / "python"
    (wheel,) = DIST.glob("*.whl")
    run(str(python), "-m", "pip", "install", "-q", "-c", "constraints.txt", str(wheel))
    return python


def list_parts(python: pathlib.Path) -> None:
    PARTS_LIST.parent.mkdir(exist_ok=True)
    options = ["--pyproject", "pyproject.toml", "--output-reproducible", "--output-file", str(PARTS_LIST)]
    run(sys.executable, "-m", "cyclonedx_py", "environment", *options, str(python))


def run(*command: str, at: pathlib.Path = ROOT, **environment: str) -> None:
    subprocess.run(command, check=True, cwd=at, env={**os.environ, **environment})


if __name__ == "__main__":
    main()
