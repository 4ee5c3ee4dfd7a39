"""Processes of this host: how they start and end, their state as the kernel reports it, their memory and open files.

The memory is that of the machine, or less if a container limits it. The size of /dev/shm does not count: files of
`memfd_create` are not in it, and count as memory of the process. Each connection and each shared memory file needs a
file descriptor. Errors for lack of either are recognized here.
"""

import contextlib
import ctypes
import gc
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from errno import EMFILE, ENFILE, ENOMEM
from pathlib import Path, PurePosixPath
from typing import Any

from telegrad.errors import TelegradError

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]

# Before `-m`, which otherwise searches the current folder for modules first, where other users may have planted some.
SAFE_PATH = ["-P"]

_AT_PARENTS_END, _NAME = 1, 15  # PR_SET_PDEATHSIG, PR_SET_NAME
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def signal_at_parents_end(number: int) -> None:
    """Make Linux send a signal to this process when the thread that started it has ended."""
    if _prctl is not None:
        _prctl(_AT_PARENTS_END, number)


def name_process(name: str) -> None:
    """Have `ps -o comm` and `top` show the first 15 bytes of a name for this process, on Linux."""
    if _prctl is not None:
        _prctl(_NAME, name.encode())


def processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def shared_cores(workers: int) -> dict[str, str]:
    """Return thread-count variables for `workers` processes that share this host."""
    threads = max(1, processors() // max(1, workers))
    return {"OMP_NUM_THREADS": str(threads)}


def new_session_options() -> dict[str, Any]:
    """Return Popen arguments that keep Ctrl-C in a terminal or notebook from reaching the new process."""
    if os.name == "nt":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}  # type: ignore[attr-defined]
    return {"start_new_session": True}


def describe_exit(code: int) -> str:
    """Return how a process has ended, as text for people."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"


def quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the folder of telegrad


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Delay garbage collection to the end of the `with`."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            # The two calls move all objects to the oldest generation, so that the next collection does not traverse the
            # new ones. Not if the program has frozen objects itself: `unfreeze` would return those to the collector.
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


STOPPED = "Tt"  # process states: stopped by a signal, or by a debugger


def state_of(pid: int) -> tuple[str, int] | None:
    """Return the state of a process and the CPU ticks that it has used, or None if it does not exist."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The second field is the name of the program in parentheses. It may contain spaces and parentheses, so
            # split what follows the last one. The first field there is the state, the 12th and 13th are user and system
            # time.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields[0].decode(), int(fields[11]) + int(fields[12])


class Stops:
    """Detects a stopped process. Running for less than the time between two checks may go unnoticed."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._used = -1  # ticks, if it was stopped at the last check

    def look(self) -> bool:
        """Return True if the process is stopped and has not run since an earlier check that found it stopped."""
        # The ticks show whether a process that is stopped at two checks has run in between. If so, it is not counted as
        # stopped until the next check.
        found = state_of(self._pid) if self._pid else None
        before = self._used
        self._used = found[1] if found is not None and found[0] in STOPPED else -1
        return self._used >= 0 and before in (-1, self._used)


def stopped(pid: int) -> str:
    return f"its process is stopped (SIGSTOP, or a debugger); kill -CONT {pid} lets it continue"


GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
UNKNOWN = 8 << 30  # bytes assumed if the system reports no size
TO_JOIN = 16  # descriptors to join and for the first call that shares memory: 8 and 7 on Linux
PER_WORKER = 2  # at least so many more for each other worker that it calls and is called by
MOST_LENT = 4096  # memory files of one worker at most
FOLDER = "/proc/self/fd"
LOOK = 5.0  # seconds between two measurements of the heap
GROWN = 1 << 29  # bytes since the last trim, for a busy process
GROWN_AND_IDLE = 1 << 26  # the same, for a process whose size changed between two measurements by at most
CHANGED = 1 << 22  # bytes
# Parts of the texts of errors without a type of their own: from torch's allocators, and from OpenSSL.
_TEXTS = ("can't allocate memory", "not enough memory", "out of memory", "malloc failure")
_NO_THREAD = "can't start new thread"  # also raised if there is no memory for its stack


# Memory


def usable_memory() -> int:
    """Return the bytes of memory that this process may use."""
    return min([_of_machine(), *_group_limits()])


def private_memory(size: int) -> mmap.mmap:
    """Return new memory, of which a forked child gets its own copy. Python's default would share it."""
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, size)


def _of_machine() -> int:
    # Windows has no sysconf, and other systems may lack these names
    with contextlib.suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return UNKNOWN


def _group_limits() -> Iterator[int]:
    """Yield the limits of the control groups of this process and of all their ancestors."""
    with contextlib.suppress(OSError, ValueError):
        for line in OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            # Version 2 of control groups has one line without controllers, version 1 a line for each hierarchy.
            if controllers not in ("", "memory") and "memory" not in controllers.split(","):
                continue
            root, name = (GROUPS / "memory", "memory.limit_in_bytes") if controllers else (GROUPS, "memory.max")
            # Each ancestor limits the process, too. The last one, `.`, is the root of the mount. In a container, that
            # may be the group of the container, whose path on the host is not visible.
            own = PurePosixPath(path.lstrip("/"))
            for group in (own, *own.parents):
                with contextlib.suppress(OSError, ValueError):  # "max", or a file that the container does not show
                    yield int((root / group / name).read_text())


def out_of_memory(error: BaseException | None) -> bool:
    """Return True for an error that means that this process, or its device, has no memory left."""
    if isinstance(error, OSError):
        return error.errno == ENOMEM
    if isinstance(error, RuntimeError | ValueError) and not isinstance(error, TelegradError):
        return any(text in str(error) for text in _TEXTS)
    return isinstance(error, MemoryError)


def advice(error: BaseException, otherwise: str) -> str:
    """Return the advice for a value that could not be rebuilt: `otherwise`, unless the cause is lack of memory."""
    return "the process that received it has no memory left" if out_of_memory(error) else otherwise


def trimmer() -> Callable[[int], int] | None:
    """Return glibc's `malloc_trim`, or None with another allocator or where the size of a process cannot be read."""
    if sys.platform != "linux":
        return None
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found


def own_bytes() -> int:
    # Shared pages are not counted: memory files of tensors are not in the heap of the C allocator.
    with open("/proc/self/statm") as file:
        _, resident, shared, *_ = file.read().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGESIZE")


_malloc_trim = trimmer()


def wake_ups() -> int:
    """Return how often this thread has gone to sleep, and was woken; 0 on macOS and Windows, which do not count it."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw if hasattr(resource, "RUSAGE_THREAD") else 0


class Heap:
    """Trims the heap of this process. Use it from one thread at a time.

    The C allocator keeps freed memory. A worker that returns large results allocates and frees them on different
    threads, between small objects that stay. glibc returns only memory that is free at the end of its heap. It kept 3.8
    GB after 400 results of 10 MB, of which 0.3 GB were in use at a time. `malloc_trim` returns every free page; that
    takes about 15 ms for 500 MB, during which other threads may wait for memory. Therefore it is called rarely, after
    the process has grown by a large amount.
    """

    def __init__(self, trim: Callable[[int], int] | None = _malloc_trim, size: Callable[[], int] = own_bytes) -> None:
        self._trim, self._size = trim, size
        self._least = self._last = 0  # bytes of the process: the least since the last trim, and at the last measurement
        self._due = 0.0

    def tick(self, now: float) -> None:
        """Trim the heap if the process has grown. Call it regularly."""
        if self._trim is None or now < self._due:
            return
        self._due = now + LOOK
        with contextlib.suppress(OSError):  # no descriptor is free to read the size
            size, last = self._size(), self._last
            limit = GROWN_AND_IDLE if abs(size - last) < CHANGED else GROWN
            if self._least and size - self._least > limit:
                self._trim(0)
                size = self._least = self._size()
            self._least = min(self._least or size, size)
            self._last = size


# Open files


def out_of_files(error: BaseException | None) -> bool:
    """Return True for an error that means that this process or this host has no descriptor left."""
    return isinstance(error, OSError) and error.errno in (EMFILE, ENFILE)


def error_text(error: BaseException) -> str:
    """Return the text of an error, with advice if the error means that no descriptor is left."""
    if not out_of_files(error):
        return str(error)
    if isinstance(error, OSError) and error.errno == ENFILE:
        return f"{error}: this host has reached its limit of open files (`sysctl fs.file-max`): raise it"
    limit = f"at most {_file_limit()} files" if _file_limit() else "no more files"
    return (
        f"{error}: this process may open {limit} (`ulimit -n`). A worker needs {TO_JOIN} descriptors beyond those of "
        f"its program, {PER_WORKER} for each other worker on its host and 8 for each on another one: raise the limit "
        "by `ulimit -n 4096` before the program starts"
    )


class translate_error(contextlib.AbstractContextManager[None]):  # noqa: N801 - used as a function
    """Replace an error that means that no memory, thread or descriptor is left by a `kind`, "`what`: ..."."""

    # A class: the frame of a generator would be in the error's traceback, and refer to the error, since Python 3.12.

    def __init__(self, what: str, kind: type[TelegradError]) -> None:
        self._what, self._kind = what, kind

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if not isinstance(error, Exception):
            return
        # No variable has the cause of the error: it would be in a frame of its traceback, a reference cycle.
        if out_of_files(error) or out_of_files(error.__cause__):
            lack = error_text(error if out_of_files(error) else error.__cause__ or error)
        else:
            has_no_thread = isinstance(error, RuntimeError) and str(error) == _NO_THREAD
            if not (has_no_thread or out_of_memory(error)):
                return
            limits = ", or has reached its limit of threads" * has_no_thread
            lack = f"this process has no memory left{limits} ({str(error) or type(error).__name__})"
        raise self._kind(f"{self._what}: {lack}") from error


def check_open_files(others: int = 0) -> None:
    """Raise OSError if fewer descriptors are left than `others` and those to join: torch would then hang or exit."""
    try:
        used = len(os.listdir(FOLDER)) - 1  # without the descriptor of this listing
    except FileNotFoundError:
        used = 3  # assume stdin, stdout and stderr if the system does not tell
    if _file_limit() and _file_limit() - used < TO_JOIN + others:
        raise OSError(EMFILE, os.strerror(EMFILE))


def files_to_lend() -> int:
    """Return how many memory files a worker may have: these use half of the descriptors, two each."""
    limit = _file_limit()
    return min(MOST_LENT, limit // 4) if limit else MOST_LENT


def _file_limit() -> int:
    """Return the number of files that this process may open; 0 if there is no limit or it cannot be read."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if resource is not None else 0
    return 0 if limit < 0 else limit


# Objects


def instances(*classes: type) -> list[Any]:
    """Return all objects of these classes and of their subclasses.

    `gc.get_objects()` takes a fifth of the time, but also refers to each tuple that another thread is filling at that
    moment. CPython refuses to resize a tuple with a second reference: that thread's `tuple(...)` would fail with a
    SystemError. `gc.get_referrers` returns only objects that refer to the classes.
    """
    family: set[type] = set()
    ahead = list(classes)
    while ahead:
        found = ahead.pop()
        if found not in family:
            family.add(found)
            ahead += type.__subclasses__(found)
    return [each for each in gc.get_referrers(*family) if type(each) in family]
