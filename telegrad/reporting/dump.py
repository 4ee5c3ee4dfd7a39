"""Writes what a worker can tell to a file: when a call of it runs out of time, when it loses another, on SIGUSR2.

`TELEGRAD_DUMPS` names the folder, or says `off`; without, it is a private one of this user.
The newest files stay. On SIGUSR2, where the program has no use of its own for that, the stacks of all threads are
written as well, which works even where the interpreter is held by one of them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import pathlib
import re
import secrets
import signal
import threading
import time
from collections.abc import Callable
from time import monotonic
from typing import Any

from telegrad.ext.events import events as instruments
from telegrad.ext.files import Folder, open_folder, private_folder
from telegrad.ext.processes import Background, Thread, forks, interrupts, said

VARIABLE = "TELEGRAD_DUMPS"
PAUSE = 60.0  # seconds between two files of one worker that nobody has asked for
KEPT = 32  # files of this user in the folder
LARGEST = 16 << 20  # bytes of one file; the oldest events are left out of a larger one
ALL = 64 << 20  # bytes of this user's files in the folder; the newest stays
OURS = re.compile(r"[0-9]{8}-[0-9]{6}-[\w-]+\.json")  # the names of these files, among others in the folder

log = logging.getLogger("telegrad")


def write(worker: str, reason: str, content: dict[str, Any]) -> pathlib.Path | None:
    """Write a new file, which only this user can read, and remove old ones of this user; return None where none are
    wanted.

    Raises:
        OSError: it cannot be written.
    """
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
            folder.remove(name)  # a part of it is of no use
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
    """Sees to one worker's files."""

    def __init__(self, worker: str, tell: Callable[[], dict[str, Any]]) -> None:
        """`tell` gives what is to be written."""
        self.worker = worker
        self._tell = tell
        self._wanted = threading.Semaphore(0)
        self._reason = ""  # of the next file; whoever wants it stores it first
        self._next = 0.0  # when another may be written that nobody has asked for
        self._closed = False
        self.failure = ""  # why the last one could not be written
        self._thread = Background("telegrad-dump", self._main)
        self._alarm = self._alarmed
        instruments.alarms.append(self._alarm)

    def want(self, reason: str) -> None:
        """Have a file written soon, by another thread."""
        self._reason = reason
        with contextlib.suppress(RuntimeError):
            self._thread.want()
        self._wanted.release()

    def write(self, reason: str) -> pathlib.Path | None:
        """Write one now; None where none are wanted, or none can be, which is told to the log."""
        try:
            path = write(self.worker, reason, self._tell())
        except OSError as error:
            level = logging.INFO if self.failure else logging.WARNING  # once is enough
            self.failure = f"what worker {self.worker!r} was at could not be written ({VARIABLE}): {said(error)}"
            log.log(level, "telegrad: %s", self.failure)
            return None
        if path is not None:
            log.info("telegrad: %s; what worker %r was at is in %s", reason, self.worker, path)
        return path

    def close(self) -> None:
        with contextlib.suppress(ValueError):
            instruments.alarms.remove(self._alarm)
        self._closed = True
        self._wanted.release()

    def _alarmed(self, reason: str) -> None:
        now = monotonic()
        if now >= self._next:
            self._next = now + PAUSE
            self.want(reason)

    def _main(self) -> None:
        while self._wanted.acquire() and not self._closed:
            self.write(self._reason)


class Signalled:
    """SIGUSR2: stacks to a file of the process, and `act` called on a thread of its own; where nobody uses it."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._depth = forks.depth
        self.file = -1  # the descriptor of that file; -1: there is none
        if not hasattr(signal, "SIGUSR2") or not hasattr(os, "memfd_create"):
            return
        found = signal.getsignal(signal.SIGUSR2)
        if found is not signal.SIG_DFL and not _is_inherited(found):
            return
        chain = False  # what the signal does otherwise is to end the process
        with contextlib.suppress(ValueError):  # this is not the main thread: the stacks have to do
            signal.signal(signal.SIGUSR2, self._came)
            chain = True
        self.file = os.memfd_create("stacks-of-telegrad", os.MFD_CLOEXEC)
        faulthandler.register(signal.SIGUSR2, file=self.file, all_threads=True, chain=chain)
        interrupts.replaced[signal.SIGUSR2] = self._release

    def _came(self, *_: object) -> None:
        if self._depth == forks.depth:  # else this is a forked child that is no worker
            Thread(target=self._act, name="telegrad-dump").start()

    def _release(self) -> None:
        """Write no stacks any more. Without the file, no other process sends the signal."""
        faulthandler.unregister(signal.SIGUSR2)
        os.close(self.file)
        self.file = -1

    def close(self) -> None:
        """As it was before, unless the program has set a handler of its own meanwhile."""
        if self.file >= 0 and interrupts.replaced.pop(signal.SIGUSR2, None) is not None:
            self._release()  # before the signal ends the process again
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def _is_inherited(handler: Any) -> bool:
    """Return True if this process was forked from a worker that has set this handler."""
    owner = getattr(handler, "__self__", None)
    return isinstance(owner, Signalled) and owner._depth != forks.depth
