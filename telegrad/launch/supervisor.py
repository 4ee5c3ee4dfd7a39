"""`python -m telegrad run`: one thread that starts processes as `policy` says, reads their output, and handles signals
and exits.

There is only one thread, which makes it safe to run code in the child before exec. Its end is also the end of all
children. The store is served by a separate process (`storekeeper`), because it needs torch, whose import takes seconds.

`_turn` waits in one `select` for the output of workers, for signals, for the storekeeper and for the next time of the
policy. Reads from the pipes do not block.
"""

import argparse
import contextlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from time import monotonic
from typing import IO, Any

from telegrad.compat import child_environment
from telegrad.errors import UsageError
from telegrad.ext.feedback import format_duration
from telegrad.ext.host import (
    SAFE_PATH,
    create_once,
    describe_exit,
    family_of,
    is_address,
    listening_address,
    loopback,
    new_session_options,
    shared_cores,
    socket_address,
)
from telegrad.ext.joining import FILE, FILE_VARIABLE, given_keys, launchers, new_key, user_keys
from telegrad.launch.children import STREAMS, Child, LineBuffer, Output
from telegrad.launch.policy import (
    POLICIES,
    Action,
    EndServing,
    Log,
    Policy,
    RunConfig,
    SendSignal,
    StartProcess,
    WorkerSlot,
    read,
)
from telegrad.launch.worker_command import Parser

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FORWARDED = signal.SIGUSR2  # makes a worker write its state to a file
STATUS = signal.SIGUSR1
LAST_WORDS = 1.0  # seconds for the storekeeper to end
# Maximum number of reads from the pipe of an ended worker, which is 1 MiB: by default Linux lets a pipe hold no more
# (fs.pipe-max-size). Further output comes from another process that has the pipe open, and never ends if that process
# prints without end.
MOST_PIECES = 16
CROWD = 1024  # connections that wait until the store is served
# Variables of a launcher that has started this process, such as torchrun. They describe this process and not its
# workers, so the workers do not inherit them.
_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "TORCHELASTIC_USE_AGENT_STORE")
PIECE = 1 << 16  # bytes
WRONG = 2  # the exit code for wrong arguments, or an address that cannot be used
DEFAULT = "worker"  # the role of options before the first --role

USAGE = "python -m telegrad run [FILE] [options] [--role NAME [options of that role]]... [-- COMMAND ...]"
EPILOG = """\
Options change a role of the file, or add one: `telegrad run roles.toml --role actor --count 8`.

signals:
  SIGINT, SIGTERM, SIGHUP  are sent on to all workers except serving ones, which end after the others. A worker that
                           has not ended after --grace seconds is killed. A second signal kills all at once
  SIGUSR1                  prints the state of each worker
  SIGUSR2                  is sent on to all workers, which write their state to a file

exit codes:
  0      all workers except serving ones ended with 0
  2      invalid arguments, or an invalid file
  127    a command could not be started
  130    Ctrl-C; 143 SIGTERM, 129 SIGHUP
  other  that of the worker whose failure ended the group; 128 plus its number for a signal
"""

Source = tuple[str, str]  # a process and one of its streams


class Supervisor:
    def __init__(self, plan: RunConfig, host: str, port: int, node: int, output: Output) -> None:
        """On the first host, listen at the store's address; raise OSError if this process cannot listen there."""
        self._seats = {slot.name: slot for slot in plan.slots(node)}
        self._policy = Policy(self._seats.values(), plan.grace)
        self._output = output
        self._children: dict[str, Child] = {}
        self._selector = selectors.DefaultSelector()
        self._lines: dict[Source, LineBuffer] = {}
        self._signals: deque[int] = deque()
        self._host = host
        self._listener: socket.socket | None = None
        if node == 0:
            address = host if is_address(host) else listening_address(host)
            self._listener = socket.create_server(
                socket_address(address, port), family=family_of(address), backlog=CROWD
            )
        self._port = self._listener.getsockname()[1] if self._listener is not None else port
        self._key_folder = _key_for_children(is_alone=not port)
        self._key = {FILE_VARIABLE: os.path.join(self._key_folder, FILE)} if self._key_folder else {}
        self._ready = self._has_served = False  # this storekeeper; this or an earlier one
        self._is_over = False  # the storekeeper was told that the group has ended
        self._storekeeper: subprocess.Popen[bytes]  # set by `_begin_storekeeper`, as are these two
        self._to_storekeeper: IO[bytes]
        self._from_storekeeper: IO[bytes]

    def run(self) -> int:
        """Run until all workers have ended; return the exit code."""
        try:
            with self._hears_signals():
                self._begin_storekeeper()
                counts = Counter(slot.role.name for slot in self._seats.values())
                roles = ", ".join(f"{count} {role}" for role, count in counts.items())
                place = launchers.place(self._host, self._port)
                self._output.say(f"starting {roles}; the group meets at {place}, its logs are in {self._output.folder}")
                self._policy.begin(monotonic())
                while (code := self._policy.code) is None:
                    self._turn()
            self._part_from_storekeeper()
        finally:
            if self._key_folder:
                shutil.rmtree(self._key_folder, ignore_errors=True)
        if failed := self._policy.failed:
            path, last = self._output.path(failed), self._output.last_lines(failed)
            said = f" Its last lines:{last}" if last else ""
            self._output.say(f"{failed} ended the group; {path} has its whole output.{said}")
        return code

    # Events

    def _turn(self) -> None:
        due = min([self._policy.due, *(lines.due for lines in self._lines.values())])
        for key, _ in self._selector.select(max(0.0, due - monotonic()) if due < inf else None):
            if isinstance(key.data, tuple):
                self._read(key.data)
            elif key.data == "signals":
                os.read(key.fd, PIECE)
            else:
                self._hear_storekeeper()
        # Signals before ends: if workers were signalled together with this process, their ends are then part of the end
        # of the group, and no failures that are to be restarted.
        self._heed_signals()
        for name, child in list(self._children.items()):
            if (code := child.process.poll()) is not None:
                # First, so that the rest of the output is shown before the log says that the worker has ended.
                self._bury(name, child)
                self._do(self._policy.ended(name, code, monotonic()))
        now = monotonic()
        self._do(self._policy.look(now))
        for (name, stream), lines in self._lines.items():
            self._output.lines(name, stream, lines.look(now))

    def _heed_signals(self) -> None:
        while self._signals:
            number = self._signals.popleft()
            if number in ENDING:
                self._do(self._policy.signalled(number, monotonic()))
            elif number == STATUS:
                self._output.say(self._status())
            elif number == FORWARDED:
                # Not to the process group: SIGUSR2 ends a process that does not handle it, as most children of workers.
                for child in self._children.values():
                    child.process.send_signal(number)

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, StartProcess):
                self._start(self._seats[action.name], action.restarts)
            elif isinstance(action, SendSignal):
                if action.name in self._children:
                    self._children[action.name].signal(action.number)
            elif isinstance(action, EndServing):
                self._is_over = True
                self._tell_storekeeper("over")
            elif isinstance(action, Log):
                self._output.say(action.text)

    def _status(self) -> str:
        lines = []
        for one in self._policy.slots.values():
            process = f", process {self._children[one.name].pid}" if one.name in self._children else ""
            lasts = format_duration(monotonic() - one.since)
            lines.append(f"{one.name} {one.state} for {lasts}, restarts: {max(0, one.starts - 1)}{process}")
        return "\n".join(lines)

    # Workers

    def _start(self, slot: WorkerSlot, restarts: int) -> None:
        command = [slot.filled_in(word) for word in slot.role.command]
        try:
            child = Child(command, self._environment(slot, restarts), (*ENDING, STATUS, FORWARDED))
        except (OSError, ValueError, subprocess.SubprocessError) as error:  # ValueError: "=" or "\0" where none may be
            self._do(self._policy.could_not_start(slot.name, str(error), monotonic()))
            return
        # If this process is killed before the storekeeper knows the process group, the kernel still kills the worker
        # itself on Linux (`_before`).
        self._tell_storekeeper(f"+{child.pid}")
        self._children[slot.name] = child
        for stream, pipe in child.pipes.items():
            self._lines[slot.name, stream] = LineBuffer()
            self._selector.register(pipe, selectors.EVENT_READ, (slot.name, stream))
        if restarts:
            self._output.raw(slot.name, f"--- restarted: {time.strftime('%H:%M:%S')}, restarts: {restarts}\n".encode())

    def _environment(self, slot: WorkerSlot, restarts: int) -> Mapping[str, str]:
        inherited = {key: value for key, value in os.environ.items() if key not in _FOREIGN}
        own = {key: slot.filled_in(value) for key, value in slot.role.env.items()}
        named_so = launchers.variables(slot.name, slot.role.name, restarts, self._host, self._port)
        # Later variables take precedence. The worker's own name and place replace inherited ones, which this process
        # has if it is itself a worker of a `telegrad run`. The role's `env` can replace all.
        given = {**shared_cores(len(self._seats)), "PYTHONUNBUFFERED": "1", **inherited, **self._key}
        return child_environment({**given, **named_so, **own})

    def _read(self, source: Source) -> bool:
        """Read a stream; return True if it had data. At its end, stop watching it."""
        name, stream = source
        pipe = self._children[name].pipes[stream]
        data = _available(pipe)
        if data:
            self._output.raw(name, data)
            self._output.lines(name, stream, self._lines[source].feed(data, monotonic()))
        elif data is not None:
            self._selector.unregister(pipe)
            del self._children[name].pipes[stream]
        return bool(data)

    def _bury(self, name: str, child: Child) -> None:
        """Handle the end of a process: read the rest of its output from the pipes."""
        # Its remaining children might print without end, and must not outlive the worker.
        child.signal(signal.SIGKILL)
        for stream in STREAMS:
            for _ in range(MOST_PIECES):
                if stream not in child.pipes or not self._read((name, stream)):
                    break
            if stream in child.pipes:
                self._selector.unregister(child.pipes[stream])
            self._output.lines(name, stream, self._lines.pop((name, stream)).flush())
        child.close()
        del self._children[name]
        self._tell_storekeeper(f"-{child.pid}")

    # The storekeeper

    def _begin_storekeeper(self) -> None:
        """Start the storekeeper, for the first time or again."""
        self._ready = False
        listener = self._listener
        self._storekeeper = process = subprocess.Popen(
            [
                *(sys.executable, *SAFE_PATH, "-m", "telegrad.launch.storekeeper"),
                *([str(listener.fileno()), self._host] if listener is not None else []),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[listener.fileno()] if listener is not None else [],
            env=child_environment({**os.environ, **self._key}),
            **new_session_options(),
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._to_storekeeper, self._from_storekeeper = process.stdin, process.stdout
        os.set_blocking(process.stdout.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, "storekeeper")
        # A restarted storekeeper knows nothing of the run. It serves a new store on the same listening socket.
        if self._key_folder:
            self._tell_storekeeper(f"key {self._key_folder}")
        for child in self._children.values():
            self._tell_storekeeper(f"+{child.pid}")
        if self._is_over:
            self._tell_storekeeper("over")

    def _tell_storekeeper(self, word: str) -> None:
        with contextlib.suppress(OSError):  # it was killed
            self._to_storekeeper.write(f"{word}\n".encode())
            self._to_storekeeper.flush()

    def _hear_storekeeper(self) -> None:
        data = _available(self._from_storekeeper.fileno())
        if data:
            self._ready = self._has_served = True
        elif data is not None:
            self._selector.unregister(self._from_storekeeper)
            self._from_storekeeper.close()
            how = describe_exit(code := self._storekeeper.wait())
            # A storekeeper that has served the store is restarted, as after a SIGKILL, and so is one that is killed
            # while it replaces another. If the first one fails before that, for example because torch is not installed,
            # a second one would fail as well.
            if self._ready or (self._has_served and code < 0):
                self._output.say(f"the process that kept the group's store ended with {how}; it is restarted")
                self._begin_storekeeper()
            else:
                self._do(self._policy.abort(f"the group's store could not be served ({how})", monotonic()))

    def _part_from_storekeeper(self) -> None:
        with contextlib.suppress(OSError):
            self._to_storekeeper.close()
        # A storekeeper that does not serve the store yet has nothing to close, and may be in the import of torch.
        if self._ready:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._storekeeper.wait(LAST_WORDS)
        self._storekeeper.kill()
        self._storekeeper.wait()
        self._from_storekeeper.close()
        if self._listener is not None:
            self._listener.close()

    # Signals

    @contextlib.contextmanager
    def _hears_signals(self) -> Iterator[None]:
        """Make signals wake `select`. Signals that the parent process made this one ignore stay ignored."""
        # A handler only records its signal; `_heed_signals` acts, between two events of the policy. A signal that
        # arrives after `_heed_signals` and before `select` is not missed: the interpreter writes a byte to the socket
        # as soon as a signal arrives, and `select` then returns at once. SIGCHLD has a handler for the same reason.
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.setblocking(False)
            self._selector.register(ours, selectors.EVENT_READ, "signals")
            waker = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
            wanted = {*ENDING, STATUS, FORWARDED, signal.SIGCHLD}
            wanted -= {each for each in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(each) == signal.SIG_IGN}
            before = {each: signal.signal(each, lambda caught, _: self._signals.append(caught)) for each in wanted}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)
                signal.set_wakeup_fd(waker)
                self._selector.close()


def _key_for_children(is_alone: bool) -> str:
    """Return a private folder with a new key for all child processes; "" if each finds the group's key itself. An
    environment variable is unsafe, because programs print their environment. A pipe does not suffice, because the
    children of workers need the key as well. Raise UsageError if there is no key, and this host is not alone, or if the
    given key cannot be used; OSError if there is no folder for temporary files."""
    if given_keys() is not None:
        return ""
    try:
        user_keys()
    except UsageError:
        if not is_alone:
            raise
        folder = tempfile.mkdtemp(prefix="telegrad-")  # of mode 0700
        create_once(os.path.join(folder, FILE), new_key() + b"\n")
        return folder
    return ""


def _available(pipe: int) -> bytes | None:
    """Return the available data; b"" at the end of the pipe, None if there is none now."""
    try:
        return os.read(pipe, PIECE)
    except BlockingIOError:
        return None


# The command line


def main(arguments: list[str]) -> int:
    options, command = _split(arguments)
    given = _parser().parse_args(options)
    if command:
        given.roles.setdefault(given.last, {})["command"] = command
    if given.file and given.file.endswith(".py"):
        return _wrong(
            f"{given.file} is a script, but FILE describes workers (TOML). `telegrad run -- python {given.file}` "
            "starts a worker with that command, with --count 4 four. A script that calls telegrad.local starts its own "
            f"workers: python {given.file}"
        )
    try:
        options_of_run = {key: getattr(given, key) for key in ("logs", "grace") if getattr(given, key) is not None}
        plan = read(Path(given.file).read_text() if given.file else "", {**given.roles, **options_of_run})
    except (UsageError, OSError, UnicodeDecodeError) as error:
        return _wrong(f"{given.file or 'options'}: {error}")
    try:
        host, port = _place(given.master)
        if given.node < 0 or not plan.slots(given.node):
            raise UsageError(f"no role runs on node {given.node}")
        if given.node and not port:
            raise UsageError("--node needs the --master of node 0")
        output = Output(plan.logs)
        supervisor = Supervisor(plan, host, port, given.node, output)
    except (UsageError, OSError) as error:
        return _wrong(str(error))
    try:
        return supervisor.run()
    finally:
        output.close()


def _wrong(text: str) -> int:
    print(f"telegrad run: {text}", file=sys.stderr)
    return WRONG


class _OfRole(argparse.Action):
    """An option of the role that was named last."""

    def __call__(self, parser: argparse.ArgumentParser, given: argparse.Namespace, value: Any, _: Any = None) -> None:
        if self.dest == "role":
            given.last = value
            given.roles.setdefault(value, {})
            return
        table = given.roles.setdefault(given.last, {})
        if self.dest == "env":
            key, equals, text = value.partition("=")
            if not equals:
                parser.error(f"--env {value}: write NAME=VALUE")
            table.setdefault("env", {})[key] = text
        else:
            table[self.dest] = value if self.nargs is None else True


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m telegrad run",
        usage=USAGE,
        description="Run workers on this host, and restart them when they fail. See docs/supervision.md.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(roles={}, last=DEFAULT)
    parser.add_argument("file", nargs="?", metavar="FILE", help="such as roles.toml")
    parser.add_argument("--logs", metavar="FOLDER", help="gets a new folder with a file for each worker (logs)")
    parser.add_argument("--grace", type=float, metavar="SECONDS", help="time for workers to end, once asked to (10)")
    parser.add_argument("--master", metavar="HOST:PORT", help="where the group meets (a free port, for this host only)")
    parser.add_argument(
        "--node", type=int, default=0, metavar="N", help="which of several hosts this is (0: keeps the store)"
    )
    role = parser.add_argument_group("a role", "Options of the last named role, else of a role named `worker`.")
    own: dict[str, Any] = {"action": _OfRole, "default": argparse.SUPPRESS}
    role.add_argument("--role", metavar="NAME", **own, help="its workers are NAME0, NAME1, ...")
    role.add_argument("--command", **own, help="their command; may also follow --; without one, they serve")
    role.add_argument("--count", type=int, **own, help="how many there are (1)")
    role.add_argument("--env", metavar="NAME=VALUE", **own, help="a variable; {name} and {number} are the worker's")
    role.add_argument("--restarts", type=int, metavar="N", **own, help="how often each may be restarted (3) ...")
    role.add_argument("--within", type=float, metavar="SECONDS", **own, help="... within this time (300)")
    role.add_argument("--on-failure", choices=POLICIES, **own, help="restart it, all of its role, or end the group")
    role.add_argument("--serves", nargs=0, **own, help="they serve until the workers of other roles have ended")
    return parser


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before `--`, and those after it."""
    at = list(arguments).index("--") if "--" in arguments else len(arguments)
    return list(arguments[:at]), list(arguments[at + 1 :])


def _place(master: str | None) -> tuple[str, int]:
    if master is None:
        return loopback(), 0
    host, _, port = master.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"--master {master}: write HOST:PORT")
    return host.strip("[]"), int(port)
