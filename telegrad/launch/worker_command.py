"""`python -m telegrad worker`: the program of a worker without its own. It joins a group and serves calls.

`telegrad.local` starts its workers as forks of one process that has imported torch, once for all of them. An import of
torch takes more than a second of processor time, and its memory is shared by the forks. Only a process that has never
computed anything can be forked safely, and the program may have computed, so a process of its own is started, by this
command: the starter. It receives the arguments and the descriptors of each worker by a socket, and reports the number
and the exit code of each process by a pipe. It ends with the last worker, or as soon as the socket is closed.
"""

import argparse
import atexit
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
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from telegrad.ext.feedback import checks
from telegrad.ext.host import (
    SAFE_PATH,
    end_threads,
    forks,
    name_process,
    new_session_options,
    renewed,
    signal_at_parents_end,
)
from telegrad.ext.joining import launchers

ENDED, WRONG, JOINED_NOT, LOST, INTERRUPTED = 0, 2, 3, 4, 130
# Seconds for a worker to leave normally after its parent has ended. `launch/local.py` waits longer than this before it
# sends a signal.
GRACE = 1.0
# Seconds to detect the end of the parent, which may be why the group has ended or has not formed. The connections to
# the parent and the input pipe are closed at about the same time, and two threads read them.
MOMENT = 0.1
CAN_FORK = sys.platform == "linux" and hasattr(socket, "AF_UNIX")
LONGEST = 1 << 16  # bytes of the arguments of a worker
_NUMBER = struct.Struct("<i")

_parent_ended = renewed(threading.Event())

EPILOG = f"""\
exit codes:
  {ENDED}    the group has ended normally
  {WRONG}    wrong arguments, or wrong settings in the environment
  {JOINED_NOT}    the worker could not join
  {LOST}    a worker of a group of fixed size, or a required one, was lost or left early; the others of a
       dynamic group declared this worker lost; or the parent has ended
  {INTERRUPTED}  Ctrl-C

The key of the group is read from TELEGRAD_KEY, from the file that TELEGRAD_KEY_FILE names, or from this user's own key
file. Functions that are called by name are imported from the current folder,
among others.
"""


class Parser(argparse.ArgumentParser):
    def _get_values(self, action: argparse.Action, words: list[str]) -> Any:
        # argparse of Python before 3.12.5 removes `--` also where it is the value of an option, as in `--role=--`.
        is_value = words == ["--"] and bool(action.option_strings)
        return self._get_value(action, "--") if is_value else super()._get_values(action, words)


def main(arguments: list[str]) -> int:
    """Run the worker; return the exit code."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.forks:
        given = parser.parse_args(_fork_workers(given.forks, socket.socket(fileno=_take_input())))
    if given.name is None and not given.role and launchers.NAME not in os.environ:
        parser.error("give the worker's name, or its --role")
    try:  # the options whose parameters have other names
        checks.count("--threads", given.threads)
        checks.seconds("--timeout", given.timeout)
    except ValueError as error:
        parser.error(str(error))
    key = _key_from_parent() if given.key_from_parent else None
    # Before the import of torch, which takes seconds: the worker must end also if its parent ends meanwhile.
    if given.with_parent:
        if hasattr(signal, "SIGCONT"):
            # Otherwise a stopped process would stay. SIGKILL is wrong: the signal is also sent when the thread that
            # started this process ends.
            signal_at_parents_end(signal.SIGCONT)
        threading.Thread(target=_end_with_parent, args=(_take_input(),), name="telegrad-parent", daemon=True).start()
    # Not at the top of the file, since `--help` needs no torch. Before the modules below, since the compatibility mode
    # takes effect with the import of torch.
    import torch  # noqa: F401

    # torch's objects stay until the end. Without this, the collector would scan them at the exit of the interpreter,
    # which took 0.3 s of processor time.
    gc.freeze()
    from telegrad import errors, rpc

    if given.main:
        _adopt(given.main, given.name)
    try:
        options = rpc.TelegradOptions(
            init_method=given.init_method or (f"tcp://{given.master}" if given.master else "env://"),
            rpc_timeout=given.timeout,
            num_worker_threads=given.threads,
            address=given.address,
            key=key,
        )
        rpc.init_rpc(
            given.name,
            rank=given.rank,
            world_size=given.world_size,
            rpc_backend_options=options,
            role=given.role,
            min_workers=given.min_workers,
            max_workers=given.max_workers,
        )
    except errors.TelegradError as error:
        if given.with_parent and _parent_ended.wait(MOMENT):  # the parent's end is the reason
            return JOINED_NOT
        doing, code = ("start", WRONG) if isinstance(error, errors.UsageError) else ("join", JOINED_NOT)
        return _say(f"worker {given.name or given.role!r} could not {doing}: {error}", code)
    except KeyboardInterrupt:
        return INTERRUPTED
    return _serve(given)


def _serve(given: argparse.Namespace) -> int:
    """Serve the calls of the others until the group ends; return the exit code."""
    from telegrad import errors, rpc
    from telegrad.ext.workers import current

    name, agent = rpc.get_worker_info().name, current.joined().agent
    if given.with_parent:  # its end explains losses of workers
        agent.word_losses(lambda who, why: "" if _parent_ended.wait(MOMENT) else why)
    code = ENDED
    try:
        if given.require:
            rpc.wait_for_workers(given.require, given.timeout)
        rpc.serve(require=given.require or True)
    except errors.TelegradError as error:
        explained = given.with_parent and _parent_ended.wait(MOMENT)
        code = LOST if explained else _say(f"worker {name!r} has ended: {error}", LOST)
    except KeyboardInterrupt:
        code = INTERRUPTED
    # A call still runs, or is in flight: the end of the interpreter could abort the process.
    if not agent.idle:
        _end_at_once(code)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m telegrad worker",
        description="Start one worker of a group. It serves the calls of the others until the group ends.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("name", nargs="?", help="the worker's name (default: its role and a number); after `--` if it begins with -")
    add("--role", default="", help="its role: workers of one role are a group of their own")
    add("--rank", type=int, default=-1, help="its rank (default: from the launcher, or a free one)")
    add("--world-size", type=int, help="the group's size (default: from the launcher, or a dynamic group)")
    add("--min-workers", type=int, help="the smallest number of workers of an elastic group")
    add("--max-workers", type=int, help="the largest number of workers of an elastic group")
    add("--master", metavar="HOST:PORT", help="where rank 0 serves the store (default: MASTER_ADDR and MASTER_PORT)")
    add("--init-method", metavar="URL", help="another place to meet, such as file:///PATH or etcd://HOST:2379")
    add("--address", help="the address of this host at which the others reach it")
    add("--threads", type=int, default=16, help="calls that run at once (16)")
    add("--timeout", type=float, default=60.0, help="seconds per call, and to join the group (60)")
    require = "end when worker NAME is lost; repeatable (default in a group of fixed size: any worker)"
    add("--require", metavar="NAME", action="append", help=require)
    add("--with-parent", action="store_true", help="end when standard input is closed")
    add("--key-from-parent", action="store_true", help=argparse.SUPPRESS)  # the first line of the input
    add("--forks", type=int, help=argparse.SUPPRESS)  # be the starter of so many workers
    add("--main", help=argparse.SUPPRESS)  # the driver's program
    return parser


def _adopt(program: str, name: str) -> None:
    """Import the driver's program. If it raises, print the traceback without frames of this package, and exit."""
    from telegrad.ext.calls import fold
    from telegrad.ext.joining import main_program

    try:
        main_program.adopt(program, name)
    except (Exception, SystemExit) as error:
        fold(error)
        traceback.print_exception(error)
        sys.exit(error.code if isinstance(error, SystemExit) else 1)


def _key_from_parent() -> bytes:
    """Return the first line of the standard input, and leave the rest unread."""
    # Byte by byte, without a buffer: `sys.stdin` would read more than the line, and `_end_with_parent` reads the rest.
    line = b""
    while (byte := os.read(0, 1)) not in (b"", b"\n"):
        line += byte
    return line


def _take_input() -> int:
    """Return the pipe from the parent, and make the standard input empty: a function that reads it must not wait."""
    # The input is a pipe whose writing end is closed, so a read returns at once. `os.dup` and `os.pipe` make
    # descriptors that child processes do not inherit, `os.dup2` one that they do.
    pipe, (empty, end) = os.dup(0), os.pipe()
    os.dup2(empty, 0)
    os.close(empty)
    os.close(end)
    return pipe


def _end_with_parent(pipe: int) -> None:
    """End this process when the parent ends, which closes its end of the input pipe in any case."""
    while os.read(pipe, 1 << 10):
        pass
    # First, because `over` wakes the main thread, which looks at this to find the reason.
    _parent_ended.set()
    # Not by an import, which would wait for the main thread if that is importing torch. Without the module, or without
    # a worker in it, this process has not joined.
    worker = getattr(sys.modules.get("telegrad._core.worker.current"), "worker", None)
    if worker is not None:
        worker.leaving.over()
    time.sleep(GRACE)
    os._exit(LOST)


def _end_at_once(code: int) -> NoReturn:
    """End this process without the end of the interpreter, while a call still runs. A thread that returns to an ended
    interpreter is stopped by Python; in C++ code of torch, as in a backward pass, that aborts the process."""
    # Functions of `atexit` still run, as at a normal end; they may print, so the streams are flushed after them. Errors
    # are those of streams that the program has replaced, or whose reader has gone.
    atexit.unregister(end_threads)
    atexit._run_exitfuncs()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _say(text: str, code: int) -> int:
    print(f"telegrad: {text}", file=sys.stderr)
    return code


# The starter


def _fork_workers(count: int, orders: socket.socket) -> list[str]:
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
    name_process(own[-1])
    return own


def _end_with_program(orders: socket.socket) -> None:
    # The kernel then resumes stopped workers (`signal_at_parents_end`), which find their inputs closed.
    orders.recv(1)
    os._exit(0)


# The processes of the starter, for that of `telegrad.local`


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
