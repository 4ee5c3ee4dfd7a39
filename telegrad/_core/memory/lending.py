"""Lends memory as tensors, and takes it back when the last of them is gone: here, and in forked children.

A weak reference reports the death of a tensor. Its callback may run at any moment in any thread, so it only changes a
dictionary or a deque.

A child has the tensors of its parent. Private memory is copied for it by the kernel. Memory that workers of a host
share is not: the worker that lent it must not write there until the child has ended, too. The parent cannot see when a
child drops a tensor, so it waits for the end of the child, which it learns by a pipe.
"""

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
    forks: "set[_Fork]"  # of this process while the tensor was alive

    def drop_ended_forks(self) -> None:
        # Other threads add forks meanwhile, so the set is not replaced, and its copy is made in one step.
        self.forks.difference_update([fork for fork in self.forks.copy() if fork.is_over()])


class Lender:
    """Creates tensors over given memory and calls `ended(token)` when the last tensor over it is gone."""

    def __init__(self, ended: Callable[[Any], None]) -> None:
        self._ended = ended
        self._leases: dict[int, _Lease] = {}  # by id: hashing a reference hashes its referent, which may be gone

    def lend(self, base: memoryview, size: int, token: Any) -> Tensor:
        # Only the tensor's storage holds this slice, so the slice dies with the last tensor on that storage.
        buffer = base[:size]
        lease = _Lease(buffer, self._end)
        lease.token, lease.forks = token, set()
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
        _shared[id(self)] = self

    def fork(self, fork: "_Fork") -> None:
        for lease in list(self._leases.values()):  # other threads lend and end leases meanwhile
            lease.drop_ended_forks()
            lease.forks.add(fork)

    def _end(self, lease: _Lease) -> None:
        self._leases.pop(id(lease), None)
        lease.forks.update(_forking.copy().values())  # a child that is made just now may have the tensor
        self._keep(lease)

    def _keep(self, lease: _Lease) -> None:
        if lease.forks:
            self._inherited.append(lease)
        else:
            self._ended(lease.token)

    def tick(self) -> None:
        """Take back the memory that no child has any more."""
        for _ in range(len(self._inherited)):
            try:
                lease = self._inherited.popleft()
            except IndexError:  # another thread does the same, and looks at the rest
                return
            lease.drop_ended_forks()
            self._keep(lease)


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


_shared: weakref.WeakValueDictionary[int, SharedLender] = weakref.WeakValueDictionary()  # by id
_forking: dict[int, _Fork] = {}  # forks under way, by thread


# The pipe must exist before the fork, so that the child inherits its writing end. The leases get the fork afterwards,
# since other threads receive tensors until then. The lease of a tensor that ends in between gets it from `_forking`.
def _before_fork() -> None:
    if _shared:
        _forking[threading.get_ident()] = _Fork()


def _after_fork() -> None:
    if (fork := _forking.get(threading.get_ident())) is not None:
        fork.only_read()
        for reference in _shared.valuerefs():  # a list, made in one step: other threads add lenders meanwhile
            if (lender := reference()) is not None:
                lender.fork(fork)
        del _forking[threading.get_ident()]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork)


@in_child
def _forget_lenders() -> None:
    # In the child, nothing is given back: the blocks belong to the parent. The writing end stays open until the child
    # ends, as no code closes it.
    _shared.clear()
    _forking.clear()
