"""Record the latest events of this process's workers, and what it logs; write the events and a worker's state to a
file: when one of its calls times out, when it loses a peer, and on SIGUSR2.

`TELEGRAD_DUMPS` names the folder, or is `off`; the default is a private folder of this user. Old files are removed. On
SIGUSR2, unless the program uses that signal, the stacks of all threads are written as well. That works even while a
thread holds the interpreter.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import logging
import os
import pathlib
import re
import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any

from telegrad.ext.events import BACKWARD_PASS, CALLED, STEPPED, Event
from telegrad.ext.events import events as instruments
from telegrad.ext.host import (
    Folder,
    Thread,
    error_text,
    forks,
    in_child,
    interrupts,
    open_folder,
    private_folder,
    renewed,
)
from telegrad.reporting import LogLine

LAST = 10_000  # number of events kept
VARIABLE = "TELEGRAD_DUMPS"
PAUSE = 60.0  # minimum seconds between two automatic dumps of one worker
KEPT = 32  # maximum number of files of this user in the folder
LARGEST = 16 << 20  # bytes of one file; the oldest events are dropped from a larger one
ALL = 64 << 20  # bytes of this user's files in the folder; the newest is always kept
LINES = 50  # log lines kept
LONGEST_LINE = 300  # characters
# A password or a key in a log line: after its name, in a URL, or a key of a group.
SECRET = re.compile(
    r"""((?:token|passw(?:or)?d|secret|api_?key|credential)s?["']?\s*[=:]\s*["']?|bearer\s+|tgk1-)[^\s"'&,;]+"""
    r"""|(://[^/\s:@]*:)[^\s/@]+(?=@)""",
    re.IGNORECASE,
)
OURS = re.compile(r"[0-9]{8}-[0-9]{6}-[\w-]+\.json")  # the names of these files

log = logging.getLogger("telegrad")


def write(worker: str, reason: str, content: dict[str, Any]) -> pathlib.Path | None:
    """Write a new file that only this user can read, and remove old files of this user. Return None if dumps are off;
    raise OSError if the file cannot be written."""
    named = os.environ.get(VARIABLE, "")
    if named == "off":
        return None
    text = _text({"reason": reason, **content})
    who = re.sub(r"[^\w-]", "_", worker, flags=re.ASCII)[:128]
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{who}-{os.getpid()}-{secrets.token_hex(8)}.json"
    with open_folder(named) if named else private_folder("dumps") as folder:
        try:
            with folder.create(name) as file:
                file.write(text)
        except OSError:
            folder.remove(name)  # an incomplete file is useless
            raise
        _remove_old(folder, name)
        return folder.path / name


def _text(content: dict[str, Any]) -> bytes:
    text = json.dumps(content).encode()
    while len(text) > LARGEST and content.get("events"):
        events = content["events"]
        content = {**content, "events": events[(len(events) + 1) // 2 :]}
        text = json.dumps(content).encode()
    return text


def _remove_old(folder: Folder, newest: str) -> None:
    own = [(name, found) for name in folder.names() if OURS.fullmatch(name) and (found := folder.own_file(name))]
    own.sort(key=lambda each: (each[0] == newest, each[1].st_mtime_ns), reverse=True)
    used = 0
    for number, (name, found) in enumerate(own):
        used += found.st_size
        if number >= KEPT or (used > ALL and name != newest):
            folder.remove(name)


class Dumper:
    def __init__(self, worker: str, tell: Callable[[], dict[str, Any]]) -> None:
        """`tell` returns the content of a dump."""
        self.worker = worker
        self._tell = tell
        self._next = 0.0  # earliest time of the next automatic dump
        self.failure = ""  # why the last dump could not be written
        instruments.alarms.append(self._alarmed)

    def write(self, reason: str) -> pathlib.Path | None:
        """Write a dump now; return None if dumps are off, or if it failed, which is logged."""
        try:
            path = write(self.worker, reason, self._tell())
        except OSError as error:
            level = logging.INFO if self.failure else logging.WARNING  # warn only once
            self.failure = (
                f"the state of worker {self.worker!r}, for `telegrad why`, could not be written: {error_text(error)}. "
                f"The variable {VARIABLE} can name another folder, or be off"
            )
            log.log(level, "telegrad: %s", self.failure)
            return None
        if path is not None:
            log.info("telegrad: %s; the state of worker %r is in %s", reason, self.worker, path)
        return path

    def close(self) -> None:
        with contextlib.suppress(ValueError):
            instruments.alarms.remove(self._alarmed)

    def _alarmed(self, reason: str) -> None:
        # Any thread may raise an alarm, also the one that serves calls, so a thread of its own writes the file. `_next`
        # has no lock: two threads at the same moment write two files.
        now = monotonic()
        if now >= self._next:
            self._next = now + PAUSE
            with contextlib.suppress(RuntimeError):  # no memory for a thread
                Thread(target=self.write, args=(reason,), name="telegrad-dump").start()


class Signalled:
    """Handle SIGUSR2, unless the program uses it: write stacks to a file, and call `act` on a new thread."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act: Callable[[], object] | None = act  # None: closed
        self._depth = forks.process.depth
        self.file = -1  # the descriptor of that file; -1: none
        if not hasattr(signal, "SIGUSR2") or not hasattr(os, "memfd_create"):
            return
        found = signal.getsignal(signal.SIGUSR2)
        if found is not signal.SIG_DFL and not _is_left_over(found):
            return
        # Two handlers: that of faulthandler runs in C at once, also while a thread holds the interpreter, and then
        # chains to the one that was installed before it, which is Python's. So Python's is set first. On another thread
        # than the main one Python refuses to set a handler. Then the default action is still installed, and chaining to
        # it would end the process.
        chain = False
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGUSR2, self._came)
            chain = True
        # Other processes open this file by its descriptor in /proc, which the name of the debug server's socket has.
        # They send the signal only if the descriptor is a file of this name (`stacks_of` in `insight/seen_groups.py`).
        self.file = os.memfd_create("stacks-of-telegrad", os.MFD_CLOEXEC)
        faulthandler.register(signal.SIGUSR2, file=self.file, all_threads=True, chain=chain)
        interrupts.replaced[signal.SIGUSR2] = self._release

    def _came(self, *_: object) -> None:
        act = self._act
        if act is not None and self._depth == forks.process.depth:  # else this is a forked child without a worker
            Thread(target=act, name="telegrad-dump").start()

    def _release(self) -> None:
        """Stop writing stacks. Other processes send the signal only if the file exists."""
        faulthandler.unregister(signal.SIGUSR2)
        os.close(self.file)
        self.file = -1

    def close(self) -> None:
        """Leave a handler that does nothing, unless the program has set its own meanwhile."""
        # Not the default action, which ends the process: another process may have seen the file just before it is
        # closed, and send the signal just after that. Only a worker that joined on another thread than the main one has
        # no handler to leave.
        self._act = None
        # If the program sets a handler, `interrupts` calls `_release` on the main thread. The thread that removes the
        # entry is the one that releases the file, so it is released once.
        if self.file >= 0 and interrupts.replaced.pop(signal.SIGUSR2, None) is not None:
            self._release()


def _is_left_over(handler: Any) -> bool:
    """Return True if a worker set this handler that has left, or from which this process was forked."""
    owner = getattr(handler, "__self__", None)
    return isinstance(owner, Signalled) and (owner._act is None or owner._depth != forks.process.depth)


class Recorder:
    """The recorder of all workers of a process; most processes have one worker."""

    def __init__(self) -> None:
        # The bound method `append` itself is the listener. Without others, an event costs one call of a C function,
        # which is atomic in the interpreter. `events.remove` finds it again, since two bound methods of one deque are
        # equal. Readers copy the ring in one step, because a deque must not change while it is iterated over.
        self._ring: deque[Event] = deque(maxlen=LAST)
        self._lock = renewed(threading.Lock())  # guards _users
        self._users = 0

    def begin(self) -> None:
        """Start recording for one more worker."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                instruments.add(self._ring.append)

    def end(self) -> None:
        """Stop recording for one worker; recorded events stay."""
        with self._lock:
            self._users -= 1
            if not self._users:
                instruments.remove(self._ring.append)

    def forget(self) -> None:
        """Drop the parent's events in a forked child, which has none of its workers."""
        self._users = 0
        self._ring.clear()
        instruments.remove(self._ring.append)

    def events(self, after: float = 0.0) -> list[Event]:
        """Return the events that ended after that time of `perf_counter`, in the order in which they ended."""
        return [event for event in self._ring.copy() if event[2] > after]

    def last_own(self) -> float:
        """Return the end of the last event that this worker itself began; 0 if none is recorded."""
        own = (CALLED, BACKWARD_PASS, STEPPED)
        return next((event[2] for event in reversed(self._ring.copy()) if event[0] in own), 0.0)


class RecordedLog:
    """The latest warnings and errors that this process has logged since the first query of a worker's state.

    A handler would change what the program prints: then `basicConfig` does nothing, and warnings without a handler do
    not appear. So this wraps the factory of records, and keeps no record, since that would keep its arguments alive.
    """

    def __init__(self) -> None:
        self._ring: deque[tuple[int, float, str, str, str]] = deque(maxlen=LINES)
        self._lock = renewed(threading.Lock())  # guards _make
        self._make: Callable[..., logging.LogRecord] | None = None  # the program's own factory
        self._numbers = itertools.count(1)

    def lines(self, now: float) -> list[LogLine]:
        """Return the latest lines, oldest first; those before the first call were not recorded."""
        with self._lock:
            # In this order: `_noted` reads `_make` without the lock as soon as it is installed.
            if self._make is None:
                self._make = logging.getLogRecordFactory()
                logging.setLogRecordFactory(self._noted)
        return [
            LogLine(number=number, age=max(0.0, now - when), level=level, logger=name, text=text)
            for number, when, level, name, text in self._ring.copy()
        ]

    def _noted(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        assert self._make is not None
        record = self._make(*args, **kwargs)
        with contextlib.suppress(Exception):  # such as a text that cannot be formatted, which its handler reports
            if record.levelno >= logging.WARNING:
                # Cut before the search, which would take long in a text of megabytes, and again after it. The first cut
                # leaves more, so that it does not cut a secret that is shown.
                text = SECRET.sub(r"\1\2***", record.getMessage()[: 2 * LONGEST_LINE])
                if len(text) > LONGEST_LINE:
                    text = f"{text[:LONGEST_LINE]}..."
                self._ring.append((next(self._numbers), record.created, record.levelname, record.name, text))
        return record


recorder = Recorder()
log_lines = RecordedLog()
in_child(recorder.forget)
