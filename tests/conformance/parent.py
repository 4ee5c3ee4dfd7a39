"""The warm parent of all ranks: `python -m tests.conformance.parent FD [WAY] [--reference]`, started by the runner.

It imports torch once, reads names of tests from the connection FD and answers with their results. It forks, so it must
have no second thread. Output of tests goes to its standard output and error. Ranks that are not forked from it (spawn:
a new interpreter each, which takes seconds; forkserver: forked from a process that has imported only torch) import this
file, too, and prepare themselves.
"""

import functools
import gc
import importlib
import multiprocessing
import os
import re
import sys
import tempfile
import threading
import traceback
import types
import unittest
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

from tests.conformance.results import FAILED, NOT_APPLICABLE, PASSED, Result

READY = "ready"
REFERENCE = "--reference"  # an argument that ranks inherit, like the way to start
WAYS = ("fork", "forkserver", "spawn")
WARM = ["torch", "torch.testing._internal.common_distributed", "telegrad.compat"]  # shared by ranks of a fork server
RAISED = re.compile(r"^ +\S.*\n([A-Za-z_][\w.]*(?::\s+.*)?)$", re.MULTILINE)  # the error behind the frames
LOST = re.compile(r"telegrad\.errors\.(PeerLost|PeerUnreachable|OwnerLost)|Connection (reset|closed) by peer")


def main() -> None:
    connection, reference = Connection(int(sys.argv[1])), REFERENCE in sys.argv
    os.register_at_fork(after_in_child=connection.close)  # else the runner would not notice the end of this process
    _prepare(reference)
    if "forkserver" in sys.argv:
        multiprocessing.set_forkserver_preload(WARM)
        forkserver.ensure_running()  # before the folder for temporary files changes, where it keeps its socket
    connection.send(READY)
    while True:
        try:
            test = connection.recv()
        except EOFError:
            return
        connection.send(_run(test, reference))


def _prepare(reference: bool) -> None:
    compat = importlib.import_module("telegrad.compat")
    compat.uninstall()  # a spawned rank inherits the mode, but needs torch's own modules first
    importlib.import_module("torch")
    if reference:
        return
    torchs_own = _modules()
    compat.install()
    importlib.import_module("tests.conformance.native").forbid([*torchs_own, *_modules()])


def _modules() -> list[types.ModuleType]:
    return [module for module in sys.modules.values() if isinstance(module, types.ModuleType)]


def _run(test: str, reference: bool) -> Result:
    name, method = test.split(".")
    suite = _suite(name, reference)
    if isinstance(suite, str):
        return Result(test, FAILED, 0.0, suite)
    gc.freeze()  # else a collection in a rank would copy all shared pages
    assert threading.active_count() == 1, "a forked rank would inherit locks that nobody releases"
    usual = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as tempfile.tempdir:
        start, outcome = perf_counter(), unittest.TestResult()
        unittest.TestSuite([suite(method)]).run(outcome)
        seconds = perf_counter() - start
    tempfile.tempdir = usual
    if outcome.wasSuccessful():
        reasons = [reason for _, reason in outcome.skipped]
        return Result(test, NOT_APPLICABLE if reasons else PASSED, seconds, "".join(reasons))
    return Result(test, FAILED, seconds, _told("\n".join(text for _, text in outcome.errors + outcome.failures)))


@functools.cache
def _suite(name: str, reference: bool) -> Any:
    """Return the class, or the error of its import: a second import would find half-made modules."""
    try:
        return importlib.import_module("tests.conformance.suites").make(name, reference=reference)
    except Exception:
        return _told(traceback.format_exc())


def _told(text: str) -> str:
    """Log an error; return it as one line."""
    print(text, file=sys.stderr)
    return last_line(text.strip())


def last_line(text: str) -> str:
    """Return the last error; of several ranks, prefer a failed assertion, and avoid errors about lost ranks."""
    raised = [" ".join(found.split()) for found in RAISED.findall(text)] or text.split("\n")
    return min(reversed(raised), key=lambda line: (bool(LOST.search(line)), not line.startswith("AssertionError")))


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    _prepare(REFERENCE in sys.argv)
