"""Run tests in warm parents, several at a time; each test gets a temporary folder, a time limit and a log."""

import collections
import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterable
from multiprocessing import Pipe
from multiprocessing.connection import wait
from time import monotonic

from tests.conformance.native import MARK
from tests.conformance.parent import REFERENCE, last_line
from tests.conformance.results import FAILED, PASSED, Result

ROOT = pathlib.Path(__file__).parent.parent.parent
LOGS = pathlib.Path(".conformance")
LIMIT = 60.0  # seconds for one test
START = 60.0  # seconds for a parent to import torch, on a busy machine
GRACE = 40.0  # seconds after the limit for torch to ask and end hanging ranks
OTHER_GROUP = {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "RPC_INIT_WITH_TCP"}


class Parent:
    """A warm parent process, with everything that its tests leave behind."""

    def __init__(self, reference: bool, way: str, limit: float) -> None:
        self.is_sound, self._limit = True, limit
        self._test, self._begun = "", 0.0
        self._folder = tempfile.mkdtemp(prefix="conformance-")
        self._log = pathlib.Path(self._folder, "log")
        self._is_ready = False
        self.connection, theirs = Pipe()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "tests.conformance.parent", str(theirs.fileno()), way]
                + [REFERENCE] * reference,
                cwd=ROOT,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # allows killing all descendants at once
            )
        theirs.close()

    def _environment(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name not in OTHER_GROUP} | {
            "TMPDIR": self._folder,
            "OMP_NUM_THREADS": "1",  # a pool of threads must not exist before the fork
            "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",  # torch's command does not work here
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": f"{self._limit:.0f}",
        }

    def begin(self, test: str) -> None:
        """Begin a test.

        Raises:
            RuntimeError: the process did not start.
        """
        if not self._is_ready:
            self._wait_ready()
        os.truncate(self._log, 0)
        self._test = test
        self.connection.send(test)
        self._begun = monotonic()

    @property
    def deadline(self) -> float:
        return self._begun + self._limit + GRACE

    def _wait_ready(self) -> None:
        try:
            self._is_ready = self.connection.poll(START) and bool(self.connection.recv())
        except EOFError:
            pass
        if not self._is_ready:
            raise RuntimeError(f"the parent of the ranks did not start:\n{self._text()}")

    def finish(self, logs: pathlib.Path) -> Result:
        """Return the result of the test, and keep the log of a failed one."""
        result = self._result()
        kept = logs / f"{self._test}.log"
        if result.outcome == FAILED:
            logs.mkdir(parents=True, exist_ok=True)
            shutil.copy(self._log, kept)
        else:
            kept.unlink(missing_ok=True)
        return result

    def _result(self) -> Result:
        if not self.connection.poll():
            return self._lost(f"no end within {self._limit + GRACE:.0f} s")
        try:
            result: Result = self.connection.recv()
        except (EOFError, ConnectionError):
            return self._lost(f"the parent of the ranks died: {last_line(self._text())}")
        self.is_sound = result.seconds < self._limit
        if not self.is_sound:
            return result._replace(outcome=FAILED, why=f"no end within {self._limit:.0f} s")
        reached = [line for line in self._text().splitlines() if line.startswith(MARK)]
        return result._replace(outcome=FAILED, why=reached[0]) if reached and result.outcome == PASSED else result

    def _lost(self, why: str) -> Result:
        self.is_sound = False
        return Result(self._test, FAILED, monotonic() - self._begun, why)

    def _text(self) -> str:
        return self._log.read_text(errors="replace").strip()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def run(
    tests: Iterable[str],
    *,
    reference: bool = False,
    way: str = "fork",
    jobs: int = 2,
    limit: float = LIMIT,
    logs: pathlib.Path = LOGS,
) -> Generator[Result]:
    """Run the tests, `jobs` at a time, against Telegrad or against torch itself; yield results as they arrive."""
    waiting = collections.deque(tests)
    idle = [Parent(reference, way, limit) for _ in range(min(jobs, len(waiting)))]
    busy: list[Parent] = []
    try:
        while waiting or busy:
            while waiting and len(busy) < jobs:
                busy.append(idle.pop() if idle else Parent(reference, way, limit))
                busy[-1].begin(waiting.popleft())
            patience = min(parent.deadline for parent in busy) - monotonic()
            ready = wait([parent.connection for parent in busy], max(0.0, patience))
            for parent in [p for p in busy if p.connection in ready or p.deadline < monotonic()]:
                busy.remove(parent)
                idle.append(parent)
                yield parent.finish(logs)
                if not parent.is_sound:
                    idle.remove(parent)
                    parent.close()
    finally:
        for parent in idle + busy:
            parent.close()
