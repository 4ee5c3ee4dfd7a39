"""Start the workers of `telegrad.local` as forks of one process that has imported torch, once for all of them.

An import of torch takes more than a second of processor time, and its memory is shared by the forks. Only a process
that has never computed anything can be forked safely, and the program may have computed, so a process of its own is
started: the starter. It receives the arguments and the descriptors of each worker by a socket, and reports the number
and the exit code of each process by a pipe. It ends with the last worker, or as soon as the socket is closed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence

from telegrad.ext.host import SAFE_PATH, forks, name_process, new_session_options, signal_at_parents_end

POSSIBLE = sys.platform == "linux" and hasattr(socket, "AF_UNIX")
LONGEST = 1 << 16  # bytes of the arguments of a worker
_NUMBER = struct.Struct("<i")


class Starter:
    """The process that forks workers, for the process of `telegrad.local`."""

    def __init__(self, workers: int, stdout: int, stderr: int, environment: Mapping[str, str]) -> None:
        self.socket, given = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(60)  # it has room for about 200 workers, until the process has imported torch
        try:
            self.process = subprocess.Popen(
                [sys.executable, *SAFE_PATH, "-m", "telegrad", "worker", "--forks", str(workers)],
                stdin=given.fileno(),
                stdout=stdout,
                stderr=stderr,
                env=environment,
                **new_session_options(),
            )
        except BaseException:
            self.socket.close()
            raise
        finally:
            given.close()

    def close(self, patience: float) -> None:
        """End the process, whose workers have ended."""
        self.socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        self.process.kill()  # does nothing if it has ended
        self.process.wait()


class ForkedProcess:
    """A worker that a starter forks, with the methods of `subprocess.Popen` that `telegrad.local` uses. One thread
    calls `wait` without a limit, and sets the fields, which other threads read."""

    def __init__(self, starter: Starter, arguments: Sequence[str], stdout: int, stderr: int) -> None:
        self.pid = 0  # until it has been forked
        self.returncode: int | None = None
        self.reason = ""  # of an end with the starter, for messages
        self._starter = starter
        self._over = threading.Event()
        given, end = os.pipe()
        self.stdin = os.fdopen(end, "wb")
        self._reports, reports = os.pipe()
        # If the starter has ended already, `wait` finds that out.
        with contextlib.suppress(OSError):
            socket.send_fds(starter.socket, [json.dumps(arguments).encode()], [given, stdout, stderr, reports])
        os.close(given)
        os.close(reports)

    def wait(self, timeout: float | None = None) -> int:
        if timeout is None:
            self._follow()
        elif not self._over.wait(timeout):
            raise subprocess.TimeoutExpired("telegrad worker", timeout)
        assert self.returncode is not None
        return self.returncode

    def _follow(self) -> None:
        with os.fdopen(self._reports, "rb", buffering=0) as reports:
            if pid := reports.read(_NUMBER.size):
                (self.pid,) = _NUMBER.unpack(pid)
            code = reports.read(_NUMBER.size)
        if code:
            (self.returncode,) = _NUMBER.unpack(code)
        else:
            self.returncode = self._starter.process.wait()
            self.reason = ", as the process that had started it" if self.pid else ""
            self._signal(signal.SIGKILL)
        self._over.set()

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            self._signal(number)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid or self._starter.process.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# In the starter


def fork_workers(count: int, orders: socket.socket) -> list[str]:
    """Fork a process for each worker, and return there, with the worker's arguments. This process ends with them."""
    signal_at_parents_end(signal.SIGCONT)  # a stopped process would not notice that the program has ended
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, the kernel keeps no exit code
    import torch  # noqa: F401

    import telegrad.rpc  # noqa: F401

    # The collector would write to all objects, and so copy the memory that the workers share.
    gc.freeze()
    reports: dict[int, int] = {}  # by the numbers of processes
    for _ in range(count):
        arguments, given, *_ = socket.recv_fds(orders, LONGEST, 4)
        if not arguments:
            os._exit(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns of threads, which NumPy's libraries end before a fork
            pid = os.fork()
        if not pid:
            for inherited in reports.values():
                os.close(inherited)
            orders.close()
            signal.signal(signal.SIGCHLD, handler)
            return _become_worker(arguments, given)
        *_, reports[pid] = given
        for descriptor in given[:3]:
            os.close(descriptor)
        os.write(reports[pid], _NUMBER.pack(pid))
    threading.Thread(target=_end_with_program, args=(orders,), daemon=True).start()
    while reports:
        pid, status = os.wait()
        if (report := reports.pop(pid, -1)) < 0:  # a process that the imports have started
            continue
        with contextlib.suppress(BrokenPipeError):
            os.write(report, _NUMBER.pack(os.waitstatus_to_exitcode(status)))
        os.close(report)
    os._exit(0)


def _become_worker(arguments: bytes, given: list[int]) -> list[str]:
    os.setsid()
    for number, descriptor in enumerate(given):
        if number < 3:
            os.dup2(descriptor, number)
        os.close(descriptor)
    forks.process.depth, forks.process.origin = 0, None  # not a child of a worker
    # Else all workers would draw the same numbers. The generator of `random` is seeded by Python.
    sys.modules["torch"].default_generator.seed()
    if generator := sys.modules.get("numpy.random"):
        generator.seed()
    own: list[str] = json.loads(arguments)
    name_process(own[0])
    return own


def _end_with_program(orders: socket.socket) -> None:
    # The kernel then resumes stopped workers (`signal_at_parents_end`), which find their inputs closed.
    orders.recv(1)
    os._exit(0)
