"""Lends memory as tensors, and takes it back when the last of them is gone: here, and in forked children.

A weak reference reports the death of a tensor. Its callback may run at any moment in any thread, so it only changes a
dictionary or a deque.

A child has the tensors of its parent. Private memory is copied for it by the kernel. Memory that workers of a host
share is not: the worker that lent it must not write there until the child has ended, too. The parent cannot see when a
child drops a tensor, so it waits for the end of the child, which it learns by a pipe.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from telegrad._core.forks import in_child


class _Lease(weakref.ref[memoryview]):
    __slots__ = ("forks", "token")
    token: Any
    forks: tuple[_Fork, ...]  # of this process while the tensor was alive


class Lender:
    """Creates tensors over given memory and calls `ended(token)` when the last tensor over it is gone."""

    def __init__(self, ended: Callable[[Any], None]) -> None:
        self._ended = ended
        self._leases: dict[int, _Lease] = {}  # by id: hashing a reference hashes its referent, which may be gone

    def lend(self, base: memoryview, size: int, token: Any) -> Tensor:
        # Only the tensor's storage holds this slice, so the slice dies with the last tensor on that storage.
        buffer = base[:size]
        lease = _Lease(buffer, self._end)
        lease.token, lease.forks = token, ()
        self._leases[id(lease)] = lease
        with torch.inference_mode(False):
            return torch.frombuffer(buffer, dtype=torch.uint8)

    def _end(self, lease: _Lease) -> None:
        self._leases.pop(id(lease), None)
        self._ended(lease.token)


class SharedLender(Lender):
    """Lends memory that forked children share: it is in use until the last tensor in any of them is gone, too."""

    def __init__(self, ended: Callable[[Any], None]) -> None:
        super().__init__(ended)
        self._inherited: deque[_Lease] = deque()  # of tensors that are gone here, but perhaps not in a child
        _shared.add(self)

    def fork(self, fork: _Fork) -> None:
        # Other threads lend and end leases meanwhile: `list` copies the values in one step, and each tuple is replaced
        # as a whole.
        for lease in list(self._leases.values()):
            lease.forks = (*(each for each in lease.forks if each is not fork and not each.is_over()), fork)

    def _end(self, lease: _Lease) -> None:
        if lease.forks:
            self._leases.pop(id(lease), None)
            self._inherited.append(lease)
        else:
            super()._end(lease)

    def tick(self) -> None:
        """Take back the memory that no child has any more."""
        for _ in range(len(self._inherited)):
            try:
                lease = self._inherited.popleft()
            except IndexError:  # another thread does the same, and looks at the rest
                return
            lease.forks = tuple(fork for fork in lease.forks if not fork.is_over())
            self._end(lease)


class _Fork:
    """A fork of this process, and the processes that have its memory since then: the child, and children of that.

    They hold the writing end of a pipe, which the kernel closes once they have ended or execute another program.
    """

    def __init__(self) -> None:
        self._over = False
        self._reading = self._writing = -1
        with contextlib.suppress(OSError):  # no descriptors: it counts as never over
            self._reading, self._writing = os.pipe()
            os.set_blocking(self._reading, False)

    def only_read(self) -> None:
        """Close the end that the child holds, in the parent."""
        if self._writing >= 0:
            os.close(self._writing)

    def is_over(self) -> bool:
        if not self._over and self._reading >= 0:
            with contextlib.suppress(BlockingIOError):
                # Nothing is ever written: the read raises BlockingIOError while a process has the other end, then
                # returns no bytes.
                self._over = os.read(self._reading, 1) == b""
        return self._over

    # `close` is bound here, because at the end of the interpreter the module's names may be gone.
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self._reading >= 0:
            close(self._reading)


_shared: weakref.WeakSet[SharedLender] = weakref.WeakSet()
_forking: dict[int, _Fork] = {}  # by thread


# The pipe must exist before the fork, so that the child inherits its writing end. The leases get the fork before it
# happens, since another thread may drop a tensor right after it.
def _before_fork() -> None:
    if any(lender._leases for lender in list(_shared)):
        _forking[threading.get_ident()] = fork = _Fork()
        _note_fork(fork)


def _note_fork(fork: _Fork) -> None:
    for lender in list(_shared):
        lender.fork(fork)


def _after_fork() -> None:
    if (fork := _forking.pop(threading.get_ident(), None)) is not None:
        fork.only_read()
        _note_fork(fork)  # another thread may have received a tensor just before the fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork)


@in_child
def _forget_lenders() -> None:
    # In the child, nothing is given back: the blocks belong to the parent. The writing end stays open until the child
    # ends, as no code closes it.
    _shared.clear()
    _forking.clear()
