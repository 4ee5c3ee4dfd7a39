"""One way to run a program: Telegrad itself, Telegrad in the place of torch.distributed.rpc, or that itself."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
from time import perf_counter

from benchmarks.measuring import Row
from benchmarks.processes import Failed

FOLDER = pathlib.Path(__file__).parent
_REPORTED = re.compile(r"^step ([0-9.]+) ms$", re.MULTILINE)


class ProgramSide:
    """Runs whole programs, each in a session of its own, with some threads per process."""

    def __init__(self, library: str, threads: int, drop_in: bool = False) -> None:
        self._command = [sys.executable, "-W", "ignore", *(["-m", "telegrad"] if drop_in else [])]
        self._environment = os.environ | {"LIBRARY": library, "OMP_NUM_THREADS": str(threads)}
        self.steps: list[float] = []  # milliseconds, of each run

    def measure(self, row: Row) -> float:
        """Seconds from start to exit.

        Raises:
            Failed: it crashed, hung or did not tell how long a step took.
        """
        start = perf_counter()
        said = self._run([*self._command, str(FOLDER / f"{row.name}.py")], row.patience)
        seconds = perf_counter() - start
        found = _REPORTED.search(said)
        if found is None:
            raise Failed(f"said nothing of its steps: {said[-200:]!r}")
        self.steps.append(float(found[1]))
        return seconds

    def _run(self, command: list[str], patience: float) -> str:
        with subprocess.Popen(
            command,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                said, errors = process.communicate(timeout=patience)
            except subprocess.TimeoutExpired:
                raise Failed(f"hung: no end within {patience:g} s") from None
            finally:
                with contextlib.suppress(ProcessLookupError):  # its workers, too
                    os.killpg(process.pid, signal.SIGKILL)
        if process.returncode:
            print(errors, file=sys.stderr)
            raise Failed(f"ended with status {process.returncode}")
        return said

    def close(self) -> None:
        """Nothing is left of it between two runs."""

    kill = close
