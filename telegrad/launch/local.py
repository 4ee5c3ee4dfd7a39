"""`telegrad.local`: workers on this host that end with the program that starts them.

The standard input of each worker is a pipe from this process. The kernel closes it when this process ends for any
reason, also by SIGKILL, and the worker then ends itself (`worker_command.py`). Three threads serve each worker: two
forward its output, and one waits for the end of its process.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import locale
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import methodcaller
from time import monotonic, sleep
from typing import Any, NoReturn, Self

from telegrad.compat import child_environment
from telegrad.errors import RendezvousError, UsageError
from telegrad.ext.feedback import (
    Wait,
    clear_line,
    count,
    flag,
    raise_invalid,
    report_in_background,
    seconds,
    short_repr,
)
from telegrad.ext.host import (
    SAFE_PATH,
    Thread,
    bracketed,
    check_open_files,
    describe_exit,
    family_of,
    in_child,
    install,
    interrupts,
    loopback,
    new_session_options,
    quoted,
    shared_cores,
    translate_error,
    uninterrupted,
)
from telegrad.ext.joining import Keyring, check_name, check_role, new_key, of_environment
from telegrad.ext.joining import main_program as programs
from telegrad.launch import worker_command
from telegrad.launch.children import LONGEST, STREAMS, LineBuffer
from telegrad.launch.worker_command import ForkedProcess, Starter

MOST = 10_000  # maximum workers on one host; each is a process
_WORKERS = (
    f'the number of workers, from 1 to {MOST}, a list of their names, or the number for each role ({{"actor": 4}})'
)
LAST_LINES = 20  # of a worker's output that could not be printed, in an error message
MOMENT = 0.05  # seconds after the end of its connections for a process to end
# Seconds for a worker to end by itself, and to read its last output. It must be longer than `worker_command.GRACE`,
# after which a worker whose input was closed ends itself. Only a worker whose interpreter is blocked, or that takes
# long to end, gets a signal.
GRACE = 5.0
FILES = 7  # descriptors of this process for each worker, with those that are open only during its start

log = logging.getLogger("telegrad")


class LocalGroup:
    """A group of this process and the workers that it started; made by `telegrad.local`."""

    def __init__(self, workers: int | Sequence[str] | Mapping[str, int], driver: str, rpc_timeout: float) -> None:
        install()
        seconds("rpc_timeout", rpc_timeout)
        of_environment()  # raise for an unusable key there, although this group makes its own key
        roles = _roles(workers, driver)
        programs.check_not_imported("telegrad.local")
        # A process that is in a group has imported this module. The import here would import torch, which takes
        # seconds, and `_join` does that while the workers start.
        if "telegrad._core.rpc.life" in sys.modules:
            from telegrad.ext.workers import check_free

            check_free()
        self.names: list[str] = list(roles)
        self.driver = driver
        self._lock = threading.Lock()  # guards _early, _store and _formed
        # Workers that ended before `_formed` was set, and their exit codes. No end is added after that.
        self._early: list[tuple[_Worker, int]] = []
        self._store: Any = None
        self._formed = self._closed = self._has_ended = False
        self._ending = threading.RLock()  # held by the thread that ends the processes of the workers
        self.key: bytes = new_key()
        self._workers: list[_Worker] = []
        self._starter: Starter | None = None
        main = programs.find("")
        programs.hosts = main.guarded
        # The socket of the store is bound before the workers start, since they are told its port. torch's store takes
        # it over once torch is imported. Until then the connections of workers wait in its queue.
        host = loopback()
        with (
            translate_error("telegrad.local", RendezvousError),
            socket.create_server((host, 0), family=family_of(host)) as listener,
        ):
            # With too few descriptors left torch's store would hang or end the process.
            check_open_files(FILES * len(roles))
            host, port = listener.getsockname()[:2]
            # No value is an argument of its own, and the name follows `--`: names may begin with "-", as options do.
            options = [f"--world-size={1 + len(roles)}", f"--master={bracketed(host)}:{port}"]
            options += [f"--timeout={rpc_timeout}", "--with-parent", "--key-from-parent"]
            options += [f"--main={programs.to_text(main)}"] if main.guarded else []
            # Before the first worker is started: any thread may fork a child while this one imports torch.
            _groups.add(self)
            try:
                for rank, (name, role) in enumerate(roles.items(), 1):
                    self._workers.append(_Worker(name, [f"--role={role}", f"--rank={rank}", *options], self))
                self._join(listener, rpc_timeout)
            except BaseException:
                self._end_workers()
                raise
        _wake_at_interrupts()
        atexit.register(self._at_exit)

    def _start(self, arguments: list[str], stdout: int, stderr: int) -> subprocess.Popen[bytes] | ForkedProcess:
        """Start the process of a worker; by a starter if there are several."""
        if not worker_command.CAN_FORK or len(self.names) == 1:
            return subprocess.Popen(
                [sys.executable, *SAFE_PATH, "-m", "telegrad", "worker", *arguments],
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
                env=_environment(len(self.names)),
                **new_session_options(),
            )
        if self._starter is None:  # its output during the import of torch is forwarded as the first worker's
            self._starter = Starter(len(self.names), stdout, stderr, _environment(len(self.names)))
        return ForkedProcess(self._starter, arguments, stdout, stderr)

    def _join(self, listener: socket.socket, rpc_timeout: float) -> None:
        """Join the group while the workers start, because the import of torch takes this process as long as them."""
        with self._wait(lambda: f"telegrad.local: starting {quoted(self.names)}"):
            from telegrad import rpc
            from telegrad.ext.joining import SealedStore
            from telegrad.ext.workers import RendezvousStore, current, enter_group, serve_on

        size, (host, port) = 1 + len(self.names), listener.getsockname()[:2]
        store = SealedStore(serve_on(listener)[0], Keyring([self.key]))
        # A worker may have ended before there was a store. Its thread (`_ended`) and this one take the same lock:
        # either that thread finds the store and calls the group off there, or this thread finds the worker in `_early`
        # and does it. Otherwise `enter_group` below would wait for the dead worker until its timeout. `_call_off` waits
        # for the answer of a store in this process while the lock is held.
        with self._lock:
            self._store = store
            if self._early:
                self._call_off()
        enter_group(
            self.driver,
            rpc.TelegradOptions(rpc_timeout=rpc_timeout),
            lambda timeout: RendezvousStore(
                store, host, 0, size, names=(self.driver, *self.names), location=f"{bracketed(host)}:{port}"
            ),
        )
        assert current.worker is not None
        self._worker = current.worker
        self._worker.group_ends = True
        # From here on `_ended` logs a loss instead of calling the group off. It reads `_agent` without the lock, after
        # it has seen `_formed` under it.
        with self._lock:
            self._agent, self._formed, self._store = self._worker.agent, True, None
        self._agent.word_losses(self._loss)
        # A worker may end between its join and the store to `_formed`. That does not make `enter_group` fail.
        for worker, code in self._early:
            self._ended(worker, code)

    def _call_off(self) -> None:
        """Make the start of the group fail because of the first worker that ended; call it with the lock held."""
        from telegrad.ext.joining import call_off

        worker, code = self._early[0]
        lines = "".join(f"\n    {line}" for line in worker.unprinted)
        above = f"What it printed is above, after [{worker.name}]" if worker.has_printed else "It printed nothing"
        said = f"Its last lines:{lines}" if lines else above
        why = f"worker {worker.name!r} ended with {worker.end(code)} before the group had formed. {said}"
        call_off(self._store, 1 + len(self.names), why)

    def _ended(self, worker: _Worker, code: int) -> None:
        # Called by the thread that waits for this worker, and by `_join` again for early ends.
        # `_closed` is stored before the first worker is asked to end, so an intended end is no loss.
        if self._closed:
            return
        with self._lock:
            if not self._formed:
                self._early.append((worker, code))
                # Only the first end is reported: workers that join fail once the group is called off, and end as well.
                if self._store is not None and len(self._early) == 1:
                    self._call_off()
                return
        if not self._agent.closed:
            why = f"worker {worker.name!r} ended with {worker.end(code)}"
            self._agent.warn_lost(self._agent.find(worker.name).identity, why)

    def _loss(self, who: Any, why: str) -> str:
        """Return how the process of a lost worker has ended; `why` if it goes on, "" if this process has ended it."""
        # The kernel closes the connections of a process before its parent can wait for it. So the agent reports the
        # loss a little before the exit code is known.
        if self._closed:
            return ""
        worker = self._workers[self.names.index(who.name)]
        with contextlib.suppress(subprocess.TimeoutExpired):
            end = worker.end(worker.process.wait(MOMENT))
            return f"worker {who.name!r} was lost: its process ended with {end}"
        return why

    def shutdown(self, graceful: bool = True) -> None:
        """End the group, and return once it has ended. A later call does nothing.

        Args:
            graceful: wait until no call is in flight; otherwise end the workers at once. That also ends the wait of
                another thread in this method.

        Raises:
            UsageError: a remote call, or a callback of one, calls it with `graceful`: it would wait for itself.
        """
        flag("graceful", graceful)
        if self._has_ended:
            return
        from telegrad.ext.calls import fold
        from telegrad.ext.workers import current

        if graceful and not self._agent.closed and self._agent.serves_here():
            raise UsageError(
                f"group.shutdown() was called on worker {self.driver!r} by a remote call or by a callback, and would "
                "wait for itself. Call it at the end of the main program; group.shutdown(graceful=False) ends the "
                "workers at once"
            )
        self._closed = True
        try:
            if not graceful:
                self._agent.begin_close()
                self._ask_to_end()  # before they lose this process, whose end is the reason then
            self._worker.shutdown(graceful, 0)  # returns at once if the program, or another thread, has left already
        except BaseException as error:
            fold(error)
            raise
        finally:
            current.leave(self._worker)
            self._end_workers()

    def _ask_to_end(self) -> None:
        for worker in self._workers:
            worker.begin_end()
        if self._starter is not None:
            # Before all are forked, it imports torch, or waits for workers that are not ordered any more. Later it may
            # have been stopped.
            forked = self._formed or sum(worker.process.pid > 0 for worker in self._workers) == len(self.names)
            self._starter.process.send_signal(signal.SIGCONT if forked else signal.SIGKILL)

    @uninterrupted
    def _end_workers(self) -> None:
        with self._ending:
            if not self._has_ended:
                self._end_processes()
                self._has_ended = True

    def _end_processes(self) -> None:
        self._closed = True
        programs.hosts = False
        atexit.unregister(self._at_exit)
        self._ask_to_end()
        with self._wait(lambda: f"{quoted(self._living())} still running") as wait:
            # All workers share the time of each step, so the end takes limited time whatever their number.
            for ask in (None, methodcaller("terminate"), methodcaller("kill")):
                until = monotonic() + GRACE
                if ask is not None:  # first the workers may end by themselves
                    for worker in self._workers:
                        ask(worker.process)
                for worker in self._workers:
                    worker.await_end(until, wait)
            until = monotonic() + GRACE
            for worker in self._workers:
                worker._watcher.join(max(0.0, until - monotonic()))
        if self._starter is not None:
            self._starter.close(GRACE)

    def _living(self) -> list[str]:
        # The thread that waits for the end of a process sets its `returncode`.
        return [worker.name for worker in self._workers if worker.process.returncode is None]

    def _wait(self, text: Callable[[], str]) -> AbstractContextManager[Wait]:
        return report_in_background(Wait("telegrad.local", text, self._living, worker=self.driver, level=logging.INFO))

    def _at_exit(self) -> None:
        self._agent.park_daemons()  # the others have ended
        # The interpreter sets `last_type` for an uncaught exception. As in `__exit__`, a program that has failed ends
        # its workers at once.
        self.shutdown(graceful=not hasattr(sys, "last_type"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.shutdown(graceful=kind is None)
        finally:
            if kind is not None:
                interrupts.run_deferred()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: int) -> str:
        return self.names[number]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            "the object that telegrad.local returned belongs to this process; send names of workers, or rpc.group()"
        )

    def __repr__(self) -> str:
        state = "ended" if self._closed else f"this process is {self.driver!r}"
        return f"<telegrad.local: {', '.join(self.names)}; {state}>"


# For forked children only. Weak, because a group that has ended needs nothing in a child.
_groups: weakref.WeakSet[LocalGroup] = weakref.WeakSet()


@in_child
def _disown_workers() -> None:
    """Close the inputs of the workers in a forked child, because they must not wait for its end."""
    # A worker reads the end of its input only when no process has the other end of the pipe. A child that outlives this
    # program would keep the workers alive. The child must not end the group at its exit either.
    for group in list(_groups):
        atexit.unregister(group._at_exit)
        group._closed = group._has_ended = True
        for worker in group._workers:
            worker.close_input()
        if group._starter is not None:
            group._starter.socket.close()


class _Worker:
    @uninterrupted
    def __init__(self, name: str, options: list[str], group: LocalGroup) -> None:
        self.name = name
        self.has_printed = False
        self.unprinted: deque[str] = deque(maxlen=LAST_LINES)
        # The end of the output cannot be the end of the pipe: processes that the worker has started inherit the pipe,
        # and may live on. So this process keeps the writing ends, too, and writes this mark there once the worker has
        # ended. It is random, so that no program prints it.
        self._mark = os.urandom(16).hex().encode()
        pipes: list[int] = []
        try:
            pipes += os.pipe()
            pipes += os.pipe()
            self.process = group._start([*options, "--", name], pipes[1], pipes[3])
        except BaseException:
            for end in pipes:
                os.close(end)
            raise
        # The key goes through the pipe: other programs can read arguments, and programs print their environment. The
        # pipe has room for the line, so the write does not wait for the worker. It fails if the worker has ended
        # already, which `_watch` reports.
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.write(group.key + b"\n")
            self.process.stdin.flush()
        self._pumps = [
            Thread(target=self._pump, args=(pipe, stream), name=f"telegrad-{name}-{stream}")
            for pipe, stream in zip(pipes[::2], STREAMS, strict=True)
        ]
        self._watcher = Thread(target=self._watch, args=(group, pipes[1::2]), name=f"telegrad-{name}")
        for thread in (*self._pumps, self._watcher):
            thread.start()

    def close_input(self) -> None:
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()

    def end(self, code: int) -> str:
        return describe_exit(code) + getattr(self.process, "reason", "")

    def begin_end(self) -> None:
        """Ask the process to end, and resume it if it is stopped."""
        self.close_input()
        # A stopped process would not read the end of its input. By default the signal has no effect on one that runs.
        if hasattr(signal, "SIGCONT"):
            self.process.send_signal(signal.SIGCONT)

    def await_end(self, until: float, wait: Wait) -> None:
        while self.process.returncode is None and (left := until - monotonic()) > 0:
            try:
                self.process.wait(min(left, wait.left))
            except subprocess.TimeoutExpired:
                wait.look()

    def _pump(self, pipe: int, stream: str) -> None:
        """Print what the process writes until it ends; nothing that its children write later."""
        lines, ended = LineBuffer(), False
        with os.fdopen(pipe, "rb", buffering=0) as output:
            while not ended:
                data = piece = output.read(LONGEST)
                # `returncode` is read after the output: `_watch` writes the mark after `wait` has set `returncode`, so
                # data that was read before cannot contain a part of the mark. If it is set, the mark is in the pipe or
                # follows at once, and reading up to it does not block for long. The mark may be split over two reads.
                ended = self.process.returncode is not None
                while ended and piece and self._mark not in data:
                    data += (piece := output.read(LONGEST))
                now = monotonic()
                self._print(stream, lines.feed(data.partition(self._mark)[0], now) + lines.look(now))
        self._print(stream, lines.flush())

    def _print(self, stream: str, lines: list[bytes]) -> None:
        encoding = locale.getpreferredencoding(False)
        for line in (each.decode(encoding, "replace") for each in lines):
            try:
                clear_line()
                out = getattr(sys, stream)
                out.write(f"[{self.name}] {line.rstrip()}\n")
                out.flush()
                self.has_printed = True
            # The stream belongs to the program, which may have closed it or replaced it by any object. This thread must
            # continue to read: the worker would block in a write once its pipe is full.
            except Exception:
                self.unprinted.append(line)

    def _watch(self, group: LocalGroup, pipes: list[int]) -> None:
        code = self.process.wait()
        for pipe in pipes:
            # An OSError means that no thread reads any more.
            with contextlib.suppress(OSError), os.fdopen(pipe, "wb", buffering=0) as output:
                # `write` returns None if the pipe is full and does not block. O_NONBLOCK belongs to the open file,
                # which this process shares with the worker and its children, and any of them may have set it.
                while output.write(self._mark) is None:
                    sleep(MOMENT)
        # The last output is printed, or in `unprinted`, before the end is reported: the error quotes it.
        for pump in self._pumps:
            pump.join(GRACE)
        # If no starter could fork this worker, the first one has its output, and is reported first.
        if not self.process.pid and self.name != group.names[0]:
            group._workers[0]._watcher.join()
        group._ended(self, code)


def _wake_at_interrupts() -> None:
    """Make interrupts wake the event loop of a Jupyter kernel: otherwise a cell that awaits a call would continue to
    wait. Adding a handler for any signal makes all signals wake a loop, so this adds one for the unused SIGURG."""
    if "ipykernel" in sys.modules:
        with contextlib.suppress(RuntimeError, NotImplementedError, AttributeError):  # no loop runs here; Windows
            asyncio.get_running_loop().add_signal_handler(signal.SIGURG, int)


def _roles(workers: int | Sequence[str] | Mapping[str, int], driver: str) -> dict[str, str]:
    """Return the roles of the workers, by name."""
    named: list[tuple[str, str]] = []
    if isinstance(workers, Mapping):
        for role, number in workers.items():
            if role == "":  # this would mean workers without a role
                raise_invalid("workers", _WORKERS, workers)
            check_role(role)
            count(f"workers: the number of {role}", number, 1, MOST)
        named = [(f"{role}{number}", role) for role, several in workers.items() for number in range(several)]
    elif isinstance(workers, Sequence) and not isinstance(workers, str | bytes | bytearray):
        named = [(name, "") for name in workers]
    elif isinstance(workers, int) and not isinstance(workers, bool) and workers <= MOST:
        named = [(f"worker{number}", "") for number in range(workers)]
    if not 1 <= len(named) <= MOST:
        raise_invalid("workers", _WORKERS, workers)
    names = [name for name, _ in named]
    for name in (driver, *names):
        check_name(name)
    if len({driver, *names}) <= len(names):
        raise UsageError(f"each worker needs a name of its own, and so does the driver: {short_repr([driver, *names])}")
    return dict(named)


def _environment(workers: int) -> dict[str, str]:
    """Return the workers' environment: they can import what this process can, and share its cores."""
    # An empty entry means the current folder of a process. The workers get the folder by name, as they might change
    # theirs.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return child_environment({**shared_cores(workers), **os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"})
