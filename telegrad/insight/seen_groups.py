"""Groups to inspect: that of this process, those of this user on this host, and those in dump files."""

import contextlib
import os
import pathlib
import re
import signal
import stat
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, Any

from telegrad.errors import UsageError
from telegrad.ext.events import Event
from telegrad.ext.feedback import safe
from telegrad.ext.host import STOPPED, open_regular, state_of, stopped
from telegrad.insight.history import GroupSnapshot
from telegrad.insight.phrases import several
from telegrad.reporting import (
    ACCOUNT,
    DUMP,
    FILE,
    GROUP,
    GROUP_EVENTS,
    LARGEST_FILE,
    Malformed,
    WorkerState,
    debug_server,
    decode,
)
from telegrad.reporting.debug_server import DebugAddress, ask_all
from telegrad.reporting.process_state import is_library

if TYPE_CHECKING:
    from telegrad.reporting.introspection import Introspection

AT_ONCE = 32  # silent processes that are inspected concurrently
MOST_LOOKED_AT = 256  # silent processes that are inspected, which takes half a second for each
PATIENCE = 1.0  # seconds for all workers of a group
SOON = 0.3  # the same, if they are asked again anyway
OF_ALL = 5.0  # the same, if one worker asks the others
MOST = 2 * LARGEST_FILE  # bytes of a file: the state alone may exceed LARGEST_FILE
WATCH = 0.1  # seconds over which CPU use is measured
WRITING = 0.5  # maximum seconds for a process to write its stacks
MOST_OF_STACKS = 1 << 18  # maximum bytes of stacks that are read
LONGEST_LINE = 1000  # characters; longer lines are skipped
_STACKS = "/memfd:stacks-of-telegrad (deleted)"
# Innermost files of waiting threads.
_WAITING = ("threading.py", "connection.py", "selectors.py", "socket.py", "queue.py")
_FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')


class OwnGroup:
    def __init__(self, introspection: Any) -> None:
        self._introspection: Introspection = introspection  # its type is not part of the interface

    def look(self) -> GroupSnapshot:
        accounts, silent = self._introspection.look()
        if not silent:
            return GroupSnapshot(accounts, silent)
        known = accounts[0].get("processes", {})  # this worker's own state is the first
        places = (place for place in debug_server.places() if place.worker in silent)
        here = {place.worker: place for place in places if known.get(place.worker) == place.own_pid}
        return _sight(accounts, silent | _states(here), here)

    def events(self, after: Mapping[str, float]) -> dict[str, list[Event]]:
        return self._introspection.events(after)


def group() -> OwnGroup:
    """Return the group of this process: `look()` queries all workers, `events()` returns their recorded events.

    Raises:
        NotInitialized: this process is in no group.

    Example:
        >>> accounts, silent = telegrad.insight.group().look()
        >>> sorted(account["worker"] for account in accounts)
        ['driver', 'worker0', 'worker1']
    """
    from telegrad.ext.workers import current  # not at the top: the commands inspect without torch
    from telegrad.reporting.introspection import introspection_of

    return OwnGroup(introspection_of(current.here()))


class HostGroup:
    """A group with workers on this host, inspected from outside."""

    def __init__(self, places: Iterable[DebugAddress], programs: Iterable[str] = ()) -> None:
        self._places = list(places)
        self._programs = sorted(programs)
        names = Counter(place.worker for place in self._places)
        # Workers without a name have that of their role until they join.
        self._names = {
            place: place.worker if names[place.worker] == 1 else f"{place.worker} ({place.own_pid})"
            for place in self._places
        }
        self._last: set[DebugAddress] = set()  # the places to ask last for events; replaced as a whole

    def __str__(self) -> str:
        """Return the program and the workers on this host, for users."""
        program = f"{', '.join(self._programs)}: " if self._programs else ""
        return program + several(sorted(place.worker for place in self._places))

    def is_called(self, name: str) -> bool:
        """Return True if that is the name of its program, or of one of its workers."""
        return name in self._programs or any(place.worker == name for place in self._places)

    def dump(self) -> dict[str, str]:
        """Have the workers of this host write dumps; return the file of each, or why there is none."""
        told = ask_all(self._places, DUMP, None, PATIENCE)
        silent = "nothing was written, because it did not answer: {}"
        return {
            self._names[place]: silent.format(said) if isinstance(said, Exception) else str(said)
            for place, said in told.items()
        }

    def look(self) -> GroupSnapshot:
        # The workers of this host are asked by their own sockets, which works also for workers that have not joined or
        # are declared lost. Only the other members are asked through those that know them.
        told = ask_all(self._places, ACCOUNT, None, PATIENCE)
        accounts: dict[str, WorkerState] = {}
        for place, each in told.items():
            if isinstance(each, dict):  # the worker may have got its own name since `_names` was made
                name = self._names[place] if each["worker"] == place.worker else each["worker"]
                accounts[name] = each | {"worker": name}  # type: ignore[assignment]
        quiet = {self._names[place]: place for place, each in told.items() if not isinstance(each, dict)}
        self._last = {place for place, each in told.items() if not isinstance(each, dict) or not each["members"]}
        silent = _states({name: place for name, place in quiet.items() if not isinstance(told[place], Malformed)})
        silent |= {name: str(told[place]) for name, place in quiet.items() if name not in silent}
        beyond = others_of(accounts.values()) - silent.keys()
        unanswered: dict[str, str] = {}
        for place, answer in told.items():
            known = beyond & answer["members"].keys() if isinstance(answer, dict) else set[str]()
            if not known:
                continue
            group = ask_all([place], GROUP, None, OF_ALL)[place]
            if isinstance(group, dict):
                others: list[WorkerState] = [each for each in group["accounts"] if each["worker"] in known]
                accounts |= {each["worker"]: each for each in others}
                silent = {name: why for name, why in group["silent"].items() if name in known} | silent
                beyond -= accounts.keys() | silent.keys()
            # It may have stopped since its first answer. Its group is not smaller because of that.
            else:
                unanswered |= dict.fromkeys(known, f"{place.worker} was asked about it, and gave no answer")
        silent |= {name: unanswered[name] for name in sorted(beyond & unanswered.keys())}
        ordered = sorted(accounts.values(), key=lambda each: (not each["members"], each["rank"], each["worker"]))
        return _sight(ordered, silent, [*self._names.values()])

    def events(self, after: Mapping[str, float]) -> dict[str, list[Event]]:
        # Any member can ask the whole group; a spare knows only itself, and a silent worker costs the whole OF_ALL.
        for place in sorted(self._places, key=lambda each: each in self._last):
            told = ask_all([place], GROUP_EVENTS, dict(after), OF_ALL)[place]
            if isinstance(told, dict):
                return told
        return {}


class DumpFiles:
    """Dump files, as a group; of several files of a worker, the newest is used."""

    def __init__(self, paths: Iterable[str | pathlib.Path]) -> None:
        """Raise UsageError if a file is not a dump."""
        self._told: dict[str, dict[str, Any]] = {}
        for path in map(pathlib.Path, paths):
            try:
                with open_regular(path) as file:
                    text = file.read(MOST + 1)
                if len(text) > MOST:
                    raise Malformed(f"it is larger than {MOST >> 20} MiB")
                content = decode(FILE, text)
            except OSError as error:
                raise UsageError(f"{path} cannot be read: {error.strerror}") from None
            except Malformed as error:
                raise UsageError(f"{path} is not a file that a worker wrote: {error}") from None
            account: WorkerState = content["account"]
            before = self._told.get(account["worker"])
            if before is None or before["account"]["time"] < account["time"]:
                self._told[account["worker"]] = content

    def look(self) -> GroupSnapshot:
        accounts = [content["account"] for content in self._told.values()]
        return GroupSnapshot(accounts, dict.fromkeys(sorted(others_of(accounts)), "none of the files is from it"))

    def events(self, after: Mapping[str, float]) -> dict[str, list[Event]]:
        return {
            name: [event for event in content["events"] if event[2] > after.get(name, 0.0)]
            for name, content in self._told.items()
        }


def groups_here() -> dict[str, HostGroup]:
    """Return all groups of this user on this host, by id; groups that are still forming, by store address."""
    # Root gets those of all users, each only in groups of its user. Silent workers that no member knows have group "".
    told = ask_all(debug_server.places(), ACCOUNT, None, SOON)
    found: dict[tuple[int, str], list[DebugAddress]] = {}
    known: dict[tuple[int, str], list[Any]] = {}  # answers of the other workers
    silent: list[DebugAddress] = []
    # A process that moves to the next generation has a worker there as well, which has not joined yet.
    members = {(each["host"], each["pid"]) for each in told.values() if isinstance(each, dict) and each["members"]}
    for place, account in told.items():
        if isinstance(account, dict):
            if not account["members"] and (account["host"], account["pid"]) in members:
                continue
            group = place.user, account["group"] or account["place"]
            found.setdefault(group, []).append(place)
            known.setdefault(group, []).append(account)
        else:
            silent.append(place)
    names = Counter((place.user, place.worker) for place in silent)
    for place in silent:
        name = _group_of(place, known, names[place.user, place.worker] == 1)
        found.setdefault((place.user, name), []).append(place)
    alike = Counter(name for _, name in found)
    return {
        name if alike[name] == 1 else f"{name}@{user}": HostGroup(
            places, {account["program"] for account in known.get((user, name), ())}
        )
        for (user, name), places in found.items()
    }


def others_of(accounts: Iterable[WorkerState]) -> set[str]:
    """Return the members known to these workers, except these workers."""
    accounts = list(accounts)
    return {name for account in accounts for name in account["members"]} - {account["worker"] for account in accounts}


def _sight(accounts: Sequence[WorkerState], silent: Mapping[str, str], here: Collection[str]) -> GroupSnapshot:
    """Drop silent workers that others declared lost, unless their processes are on this host."""
    gone = {name for account in accounts for name in account["gone"]}
    return GroupSnapshot(accounts, {name: why for name, why in silent.items() if name in here or name not in gone})


def _group_of(place: DebugAddress, known: Mapping[tuple[int, str], list[WorkerState]], alone: bool) -> str:
    """Return the group whose members know a silent worker; else "". `alone`: no other silent one has its name."""
    # Programs often give their workers the same names, so the name shows the group only if its members do not know the
    # process, as with TLS, which has no Unix sockets.
    found = set()
    for (user, name), accounts in known.items():
        processes = {account.get("processes", {}).get(place.worker) for account in accounts} - {None}
        hosts = [(each["members"].get(each["worker"]), each["members"].get(place.worker, "")) for each in accounts]
        misses = alone and place.worker in others_of(accounts) and any(own == host for own, host in hosts)
        if user == place.user and (place.own_pid in processes or (not processes and misses)):
            found.add(name)
    return found.pop() if len(found) == 1 else ""


def _states(silent: Mapping[str, DebugAddress]) -> dict[str, str]:
    """Return why workers do not answer, as far as visible; only the first MOST_LOOKED_AT are inspected."""
    if not silent:
        return {}
    looked = dict(islice(silent.items(), MOST_LOOKED_AT))
    with ThreadPoolExecutor(min(AT_ONCE, len(looked))) as pool:
        states = pool.map(lambda place: safe(inspect(place.pid, place.stacks)), looked.values())
        return dict.fromkeys(silent, "it did not answer in time") | dict(zip(looked, states, strict=True))


# Inspect a process of this host that does not answer


def inspect(pid: int, stacks: int) -> str:
    """Return the state of a process, within WATCH seconds. `stacks` is its descriptor for its stacks, or -1."""
    first = state_of(pid)
    if first is None:
        return "its process has ended"
    if first[0] in STOPPED:
        return stopped(pid)
    if first[0] == "Z":
        return "its process has ended, and its parent has not waited for it"
    where = _where(stacks_of(pid, stacks)) if stacks >= 0 else ""
    before, begun = _work_of(pid), time.monotonic()
    time.sleep(WATCH)
    later, took = _work_of(pid), time.monotonic() - begun
    if state_of(pid) is None:
        return "its process has ended"
    # The debug server has a thread of its own, which needs only the interpreter. So a process that runs and does not
    # answer has a thread that holds the interpreter: in a computation if it uses a processor or waits for one, else in
    # a blocking call in C. Threads that wait for the interpreter wake up every few milliseconds.
    most = max((later[each][0] - before[each][0] for each in later.keys() & before.keys()), default=took / 2) / took
    does = "is busy, and one of its threads holds" if most >= 0.8 else "has a thread that holds"
    if most < 0.5 and not any(runs for _, runs in later.values()):
        does = "sleeps, and one of its threads holds"
    return f"its process ({pid}) {does} the interpreter{where}"


def _work_of(pid: int) -> dict[str, tuple[float, bool]]:
    """Return the seconds that each thread of a process has run or waited for a processor, and whether it does now."""
    found = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/schedstat") as file, open(f"/proc/{pid}/task/{thread}/stat") as stat:
                ran, waited, _ = map(int, file.read().split())
                # The kernel adds a wait for a processor only when it ends.
                found[thread] = (ran + waited) / 1e9, stat.read().rpartition(")")[2].split()[0] == "R"
    return found


def _where(stacks: str) -> str:
    """Return the line of the user's program of a thread that does not wait, and so may hold the interpreter."""
    for thread in stacks.split("\n\n"):
        lines = (line for line in thread.splitlines() if len(line) <= LONGEST_LINE)
        frames = [match.groupdict() for line in lines if (match := _FRAME.search(line))]  # innermost first
        own = [frame for frame in frames if not is_library(frame["file"])]
        if own and not frames[0]["file"].endswith(_WAITING):
            return ", at {file}:{line} in {function}".format(**own[0])
    return ""


def stacks_of(pid: int, descriptor: int) -> str:
    """Make a process write its stacks, also while its interpreter is held; return them, or "" if it fails."""
    path = f"/proc/{pid}/fd/{descriptor}"
    try:
        found = os.stat(path)
        # The worker closes this file when Telegrad no longer handles the signal, and the descriptor may then be another
        # file. Without a handler the signal would end the process. `reporting/introspection.py` makes the file, with
        # this name.
        if os.readlink(path) != _STACKS or not stat.S_ISREG(found.st_mode):
            return ""
        before = found.st_size
        os.kill(pid, signal.SIGUSR2)
        # faulthandler does not tell when it has written all. The file is taken as complete once it has grown, and has
        # the same size 10 ms later.
        until = time.monotonic() + WRITING
        size, seen = before, -1
        while time.monotonic() < until and (size == before or size != seen):
            seen = size
            time.sleep(0.01)
            size = os.stat(path).st_size
        # O_NONBLOCK, because the descriptor may have become a FIFO since the check, whose opening would wait.
        with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            file.seek(before)
            return file.read(MOST_OF_STACKS).decode(errors="replace")
    except OSError:
        return ""
