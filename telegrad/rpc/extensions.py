"""What extensions add to each worker of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from telegrad.rpc.worker import Worker


class WorkerExtension:
    """An object beside each worker, from before it looks for its group until it has left.

    Subclass it, overwrite the methods that are needed, and pass the class to `register`. An exception that `__init__`
    or `on_start` raises ends the start of the worker.
    """

    def __init__(self, name: str) -> None:
        """Begin with a worker that is about to look for its group; `name` is its role if it has no name yet."""

    def on_start(self, worker: Worker, rank: int, size: int | None, place: str) -> None:
        """Called once the worker listens, before it joins the group of `size` workers that meets at `place`."""

    def on_join(self, worker: Worker) -> None:
        """Called once the worker is in its group, and has its name and rank there."""

    def on_leave(self, worker: Worker) -> None:
        """Called when the worker begins to wait for the others, before it leaves."""

    def close(self) -> None:
        """Called once the worker has left its group, or could not join it; perhaps twice."""

    def abandon(self) -> None:
        """Called in a forked child, in which the worker does not run: free what the child has inherited."""


E = TypeVar("E", bound=WorkerExtension)
_registered: list[type[WorkerExtension]] = []  # changed by imports only


def register(extension: type[WorkerExtension]) -> None:
    """Have each worker that starts later in this process get an object of this class."""
    if extension not in _registered:
        _registered.append(extension)


class WorkerExtensions:
    """The extensions of one worker."""

    def __init__(self, name: str) -> None:
        self._all: list[WorkerExtension] = []
        try:
            for kind in _registered:
                self._all.append(kind(name))
        except BaseException:
            self.close()
            raise

    def of_kind(self, kind: type[E]) -> E:
        """Return the extension of that class.

        Raises:
            LookupError: it was registered after the worker had started, or not at all.
        """
        for each in self._all:
            if isinstance(each, kind):
                return each
        raise LookupError(f"{kind.__name__} is no extension of this worker; register it before init_rpc")

    def on_start(self, worker: Worker, rank: int, size: int | None, place: str) -> None:
        for each in self._all:
            each.on_start(worker, rank, size, place)

    def on_join(self, worker: Worker) -> None:
        for each in self._all:
            each.on_join(worker)

    def on_leave(self, worker: Worker) -> None:
        for each in self._all:
            each.on_leave(worker)

    def close(self) -> None:
        for each in self._all:
            each.close()

    def abandon(self) -> None:
        for each in self._all:
            each.abandon()
