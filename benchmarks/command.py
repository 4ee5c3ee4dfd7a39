"""Shared code of the benchmark commands: options and exit."""

from __future__ import annotations

import argparse
import compileall
import importlib.util
import os
import pathlib
import platform
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from benchmarks.measuring import Row
from benchmarks.turns import QUICK_ROUNDS, ROUNDS

RESULTS = pathlib.Path(__file__).parent / "results"


class Chosen(NamedTuple):
    """The selected rows, the number of rounds, and the output folder, if any."""

    rows: list[Row]
    rounds: int
    folder: pathlib.Path | None


def choose(module: str, description: str | None, rows: list[Row], arguments: list[str] | None = None) -> Chosen:
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="measure only rows whose names contain one of these")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds instead of {ROUNDS}")
    parser.add_argument("--results", type=pathlib.Path, help="the folder to write to")
    usual = _threads(rows)
    if usual is not None:
        parser.add_argument(
            "--threads", type=int, default=usual, help=f"of each process in the rows of training; {usual} if not given"
        )
    given = parser.parse_args(arguments)
    chosen = [row for row in rows if not given.words or any(word in row.name for word in given.words)]
    if not chosen:
        parser.error(f"no row is called so; there are:\n  {chr(10).join(sorted({row.name for row in rows}))}")
    if usual is not None and given.threads < 1:
        parser.error("a process has at least one thread")
    chosen = [row._replace(threads=given.threads) if row.threads is not None else row for row in chosen]
    whole = not given.words and not given.quick and (usual is None or given.threads == usual)
    return Chosen(chosen, QUICK_ROUNDS if given.quick else ROUNDS, given.results or (RESULTS if whole else None))


def machine(rows: Sequence[Row] = ()) -> str:
    threads = _threads(rows)
    apart = "" if threads is None else f" ({threads} in each process of the rows of training)"
    return f"{platform.machine()}, {torch.get_num_threads()} threads{apart}, torch {torch.__version__}"


def _threads(rows: Sequence[Row]) -> int | None:
    """Return the thread count of the rows that set one; it is the same for all of these."""
    return next((row.threads for row in rows if row.threads is not None), None)


def _compile_package() -> None:
    """Compile the package, as pip does. Otherwise each worker compiles it if the bytecode cannot be written."""
    spec = importlib.util.find_spec("telegrad")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    compileall.compile_dir(spec.submodule_search_locations[0], quiet=2)


def run(main: Callable[[], int]) -> None:
    """Run `main` and exit. On Ctrl-C and SIGTERM, unwind the stack, which kills the workers."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # hides messages of torch's RPC at shutdown
    _compile_package()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
