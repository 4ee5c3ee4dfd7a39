"""Write checkpoints in the background. The next save waits for them, and raises their errors.

The state is copied to host memory before. That memory is kept for the next save: new memory costs as much as the copy,
because the kernel clears each of its pages first. A device copies asynchronously only into page-locked memory.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from telegrad.errors import CheckpointFailed, WorkersFailed
from telegrad.ext.calls import Agent, Future
from telegrad.ext.feedback import Wait
from telegrad.ext.host import Thread
from telegrad.ext.values import first_line
from telegrad.ext.workers import current


class PendingSave(NamedTuple):
    path: str
    future: Future[str]
    over: threading.Event  # set before the future's callbacks run, since these may save again

    def text(self) -> str:
        return f"checkpoint.save: {self.path!r} is still being written in the background"


class Saves:
    """The saves of one worker, one at a time: of two into one folder, each would remove the other's files."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._turn = threading.RLock()  # held by the thread that saves; guards `_pending`
        self._pending: PendingSave | None = None  # `wait` reads it without the lock
        current.here().before_end.append(self.wait)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until no other thread saves, and for the save in the background; raise CheckpointFailed if that has
        failed, and its future was not asked for the error."""
        with ExitStack() as stack:
            with self._agent.waiting():
                stack.enter_context(self._turn)
            self.wait(0)
            save, self._pending = self._pending, None
            if save is not None:
                _check(save)
            yield

    def begin(self, path: str, complete: Callable[[], None]) -> Future[str]:
        """Call `complete()` on a new thread; return a future of the path."""
        save, worker = PendingSave(path, Future(), threading.Event()), current.here()
        save.future.about = f"checkpoint.save of {path!r}, in the background,"

        def run() -> None:
            current.enter(worker)
            try:
                complete()
            except BaseException as error:
                save.future.set_exception(error)  # type: ignore[arg-type]
            else:
                save.future.set_result(path)

        # Call torch's method: with that of `Future`, an error would count as seen.
        super(Future, save.future).add_done_callback(lambda _: save.over.set())
        thread = Thread(target=run, name="telegrad-checkpoint")
        self._pending = save  # before the thread starts: from now on a shutdown, or the next save, waits for this one
        try:
            thread.start()
        except BaseException:  # out of memory
            self._pending = None
            raise
        return save.future

    def wait(self, timeout: float) -> None:
        """Wait until the save in the background has ended, `timeout` seconds at most, 0 for no limit."""
        until = monotonic() + timeout if timeout else float("inf")
        save = self._pending
        if save is not None and not save.over.is_set():
            with Wait("checkpoint.save", save.text, worker=self._agent.name) as wait, self._agent.waiting():
                while not save.over.wait(min(wait.left, max(0.0, until - monotonic()))) and monotonic() < until:
                    wait.look()


def _check(save: PendingSave) -> None:
    failure = getattr(save.future, "failure", None)
    if failure is None or failure.seen:  # the program has asked the future, so it knows of the error
        return
    save.future.heed()
    try:
        save.future.value()
    except BaseException as error:
        first = next(iter(error.errors.values()), error) if isinstance(error, WorkersFailed) else error
        raise CheckpointFailed(
            f"nothing was saved, because the previous checkpoint, {save.path!r}, which was written in the background, "
            f"failed: {type(first).__name__}: {first_line(first)}. Fix the cause and save again"
        ) from error


# Copies of the state

Kind = tuple[torch.dtype, int, bool]  # type of elements, their number, True if the pages are locked


class HostMemoryPool:
    """The free memory for copies on one worker."""

    def __init__(self, _: Any) -> None:
        self._lock = threading.Lock()  # guards _free
        self._free: dict[Kind, list[Tensor]] = {}

    def take(self, kind: Kind) -> Tensor:
        with self._lock:
            free = self._free.get(kind)
            if free:
                return free.pop()
        dtype, count, locked = kind
        return torch.empty(count, dtype=dtype, device="cpu", pin_memory=locked)

    def put(self, used: list[tuple[Kind, Tensor]]) -> None:
        """Keep the memory of one save. Free all other memory here, which limits the total to one save."""
        by_kind: dict[Kind, list[Tensor]] = {}
        for kind, memory in used:
            by_kind.setdefault(kind, []).append(memory)
        with self._lock:
            self._free = by_kind


class Copies:
    """The copies of one save."""

    def __init__(self, shelf: HostMemoryPool, note: Callable[[], None]) -> None:
        """`note` is called for each tensor."""
        self._shelf = shelf
        self._note = note
        self._used: list[tuple[Kind, Tensor]] = []
        self._made: dict[tuple[Any, ...], Tensor] = {}  # of tensors that occur in one value several times
        self._devices: set[torch.device] = set()

    def of(self, value: Any) -> Any:
        """Return a copy of the current value."""
        # Only while the tensors of one value live: one that `state_dict` made for it alone is freed soon, and another
        # tensor may have its address then.
        self._made.clear()
        with torch.inference_mode(False), torch.no_grad():
            made = self._copy(value)
        # Copies from a device return before they are done.
        for device in self._devices:
            torch.accelerator.current_stream(device).synchronize()
        return made

    def give_back(self) -> None:
        """Return the memory, because the copies are no longer needed."""
        self._shelf.put(self._used)
        self._used = []

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(value)
        if type(value) is dict:
            return {key: self._copy(part) for key, part in value.items()}
        if type(value) in (list, tuple):
            return type(value)(map(self._copy, value))
        return copy.deepcopy(value)

    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        self._note()
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
            return tensor.detach().cpu().clone()
        # A tied weight occurs several times, and is copied once.
        place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.device
        key = *place, tensor.dtype, tensor.is_conj(), tensor.is_neg()
        made = self._made.get(key)
        if made is None:
            on_device = tensor.device.type != "cpu"
            kind = tensor.dtype, tensor.numel(), on_device
            memory = self._shelf.take(kind)
            self._used.append((kind, memory))
            made = self._made[key] = memory.view(tensor.shape)
            made.copy_(tensor, non_blocking=on_device)
            if on_device:
                self._devices.add(tensor.device)
        return made
