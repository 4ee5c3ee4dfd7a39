"""Save and load a model that is spread over workers, and other training state. All owners write and read concurrently.

The file format is that of `torch.distributed.checkpoint`, which can read the files without any worker.

To save, each owner writes its own part, and the driver writes the table of contents last.

The steps are those of `torch.distributed.checkpoint`, with calls in place of its collectives, so no process group is
needed: each owner makes a plan of its part (`Saver`), the driver joins the plans, each owner writes, and the driver
writes the metadata with the results of all.

With `wait=False` owners copy their parts to host memory before they plan, and a thread does the other steps. The next
save waits for it, and raises its errors. The memory of the copies is kept for the next save: new memory costs as much
as the copy, because the kernel clears each of its pages first. A device copies asynchronously only into page-locked
memory.
"""

import copy
import dataclasses
import os
import pickle
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from telegrad.checkpoint.folders import Files, Path, discard, keep_newest, latest, tidy
from telegrad.checkpoint.loading import load
from telegrad.checkpoint.state import (
    NO_LIMIT,
    OwnerState,
    cannot_save,
    check_names,
    check_tensors,
    folder_of,
    packed,
    pickled,
    shares_of,
)
from telegrad.errors import CannotEncode, CheckpointFailed, UsageError, WorkersFailed
from telegrad.ext.calls import Agent, Future, StepCounter, call_all, folded, known_as
from telegrad.ext.feedback import Wait, checks
from telegrad.ext.host import Thread
from telegrad.ext.modules import LocalOptimizer, RemotePart, state_of, update_replicas
from telegrad.ext.values import first_line
from telegrad.ext.workers import current
from telegrad.optim import DistributedOptimizer
from telegrad.rpc import RRef, get_worker_info, rpc_async
from telegrad.rpc.functions import async_execution

__all__ = ["latest", "load", "save"]

Kind = tuple[torch.dtype, int, bool]  # of memory: type of elements, their number, True if the pages are locked
Begun = dict[str, tuple["RRef[Saver]", SavePlan]]  # by worker


@folded
def save(state: Mapping[str, Any], checkpoint_id: Path, *, wait: bool = True, keep: int | None = None) -> Future[str]:
    """Write a checkpoint into a folder.

    The state may contain models (modules, `RemoteModule`s, references to modules), `DistributedOptimizer`s, other
    objects with a `state_dict` (such as schedulers) and plain values. An older checkpoint in the folder stays until
    this one is complete, and is replaced atomically.

    Args:
        state: the values to save, by names.
        checkpoint_id: the folder, which all workers must see under that path.
        wait: return when the checkpoint is complete. If False, return once all owners have copied their parts to host
            memory, and write in the background. The next `save`, and `rpc.shutdown()`, wait for that. Saves of several
            threads take turns.
        keep: the number of complete checkpoints to keep in the parent folder; older ones are removed. Each training
            needs its own parent folder. `latest(folder)` finds the newest.

    Returns:
        A `Future` of the path, done when the checkpoint is complete.

    Raises:
        UsageError: `state` is no dictionary with names as keys, contains itself, or a tensor that is not dense.
        CannotEncode: an entry cannot be pickled; with `wait=False` the future may raise it.
        OSError: a file cannot be written; with `wait=False` the future raises it.
        CallTimeout: an owner made no progress for `rpc_timeout`; with `wait=False` the future raises it.
        WorkersFailed: several workers could not write; with `wait=False` the future raises it.
        CheckpointFailed: an earlier save in the background failed, and its future was not asked for the error.

    Example:
        >>> from telegrad import checkpoint
        >>> layer = telegrad.nn.RemoteModule("worker1", nn.Linear, (4, 1))
        >>> future = checkpoint.save({"model": layer, "epoch": 3}, "runs/3", keep=2)
        >>> future.wait()
        'runs/3'
    """
    path = folder_of("save", state, checkpoint_id)
    checks.flag("wait", wait)
    if keep is not None:
        checks.count("keep", keep, what="a number of checkpoints to keep, or None for all")
    saves = current.here().attached(Saves)
    with saves.turn():
        complete = partial(_complete, path, _begin(state, path, copies=not wait), keep, wait)
        if not wait:
            return saves.begin(os.fsdecode(checkpoint_id), complete)
        complete()
    future: Future[str] = Future()
    future.set_result(os.fsdecode(checkpoint_id))
    return future


def _begin(state: Mapping[str, Any], path: str, copies: bool) -> Begun:
    shares, own = shares_of(state)
    # torch's planner may save the values of a replica in place of those of the tied weight.
    update_replicas(share.branch for theirs in shares.values() for share in theirs)
    for key, value in own.items():
        try:
            check_tensors(key, packed(value))
        except RecursionError:
            raise UsageError(f"{key!r} in the state contains itself, or is nested too deeply to be saved") from None
    own |= {
        key: {"param_groups": value.state_groups()}
        for key, value in state.items()
        if isinstance(value, DistributedOptimizer)
    }
    here = get_worker_info().name
    try:
        # The driver's own values are keyword arguments of the call to itself. So the error of a value that cannot be
        # pickled names its key, by which the entry is found below. The calls have no timeout, since disks take their
        # time: `limit` is that of each step.
        begun: Begun = call_all(
            {here: [], **shares},
            lambda worker, theirs: rpc_async(
                worker, _begin_share, (path, theirs, copies), own if worker == here else {}, timeout=NO_LIMIT
            ),
            f"checkpoint.save: gathering the state for {path!r}",
            limit=current.agent().timeout,
        )
    except CannotEncode as error:
        entry = next((key for key in own if str(error).startswith(f"argument {key!r}")), None)
        if entry is None or error.__cause__ is None:
            raise
        raise cannot_save(entry, error.__cause__) from None
    check_names(plan.planner_data for _, plan in begun.values())
    return begun


def _complete(path: str, begun: Begun, keep: int | None, waited_for: bool) -> None:
    planner, writer = DefaultSavePlanner(), _writer_to(path, True)
    planner.set_up_planner({}, is_coordinator=True)
    plans, metadata = planner.create_global_plan([plan for _, plan in begun.values()])
    # File names that no other save has: the files of an older checkpoint in the folder stay valid until its table of
    # contents is replaced.
    mark = secrets.token_hex(8)
    plans = [_marked(plan, mark) for plan in writer.prepare_global_plan(plans)]
    by_worker = dict(zip(begun, plans, strict=True))
    try:
        written: dict[str, list[WriteResult]] = call_all(
            by_worker,
            lambda worker, plan: rpc_async(worker, _write, (begun[worker][0], plan), timeout=NO_LIMIT),
            f"checkpoint.save: writing {path!r}" if waited_for else "",
            {worker: sum(item.tensor_storage_size() or 0 for item in plan.items) for worker, plan in by_worker.items()},
            current.agent().timeout,
        )
        _check_visible(path, written)
        writer.finish(metadata, list(written.values()))
    except Exception:
        discard(path, mark)
        raise
    # Only now: until the table of contents was replaced, the older checkpoint was the complete one.
    tidy(path, {result.storage_data.relative_path for results in written.values() for result in results})
    if keep is not None:
        keep_newest(path, keep)


def _check_visible(path: str, written: dict[str, list[WriteResult]]) -> None:
    """Raise UsageError if the files of an owner are not in this worker's folder."""
    there = set(os.listdir(path))
    for worker, results in written.items():
        if missing := {result.storage_data.relative_path for result in results} - there:
            raise UsageError(
                f"worker {worker!r} wrote {', '.join(sorted(missing))} into {path!r}, but this worker does not see it "
                "there, so nothing was saved: all workers must see the folder under the same path"
            )


def _marked(plan: SavePlan, mark: str) -> SavePlan:
    """Return the plan with file names that are unique to this save."""
    place: Any = plan.storage_data
    return dataclasses.replace(plan, storage_data=dataclasses.replace(place, prefix=f"{mark}{place.prefix}"))


# Saves in the background


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


# Called on each worker


class _Planner(DefaultSavePlanner):
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 - torch's name
        try:
            return super().transform_object(write_item, object)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise cannot_save(write_item.index.fqn, error) from None


class Saver:
    """The part of a checkpoint that a worker writes."""

    def __init__(self, path: str, shares: list[OwnerState], own: dict[str, Any], copies: bool) -> None:
        """With `copies`, save the current values, even if they change before they are written."""
        here = current.here()
        self._copies = Copies(here.attached(HostMemoryPool), here.attached(StepCounter).note) if copies else None
        state = {key: packed(value) for key, value in own.items()}
        for share in shares:
            state.setdefault(share.key, {}).update(self._part(*share))
        check_names(_planner_of({key: value}).mappings for key, value in state.items())
        self._planner = _planner_of(state)
        self._writer = _writer_to(path, False)
        self.plan = self._writer.prepare_local_plan(self._planner.create_local_plan())

    def _part(self, key: str, branch: RemotePart) -> dict[str, Any]:
        value = branch.root.local_value()
        is_optimizer = isinstance(value, LocalOptimizer)
        part = value.state() if is_optimizer else state_of(branch)
        wrapped = packed if is_optimizer else pickled
        for name, each in part.items():
            check_tensors(f"{key}.{name}", wrapped(each))
        if self._copies is not None:
            part = self._copies.of(part)
        found = {name: wrapped(each) for name, each in part.items()}
        return {"state": found} if is_optimizer else found

    def write(self, plan: SavePlan) -> list[WriteResult]:
        try:
            return self._writer.write_data(self._planner.finish_plan(plan), self._planner).wait()
        except (CannotEncode, OSError) as error:
            raise error.with_traceback(None) from None  # without the lines of torch
        finally:
            if self._copies is not None:
                self._copies.give_back()


def _planner_of(state: dict[str, Any]) -> _Planner:
    planner = _Planner()
    planner.set_up_planner(state, is_coordinator=False)
    return planner


def _writer_to(path: str, is_coordinator: bool) -> FileSystemWriter:
    # Torch waits for copies made ahead on the current accelerator only; there may be several.
    writer = FileSystemWriter(path, per_thread_copy_ahead=0)
    writer.fs = Files(current.here().attached(StepCounter).note)
    writer.set_up_storage_writer(is_coordinator)
    return writer


@known_as("checkpoint.save")
def _begin_share(path: str, shares: list[OwnerState], copies: bool, /, **own: Any) -> tuple[RRef[Saver], SavePlan]:
    saver = Saver(path, shares, own, copies)
    return RRef(saver), saver.plan


@known_as("checkpoint.save")
@async_execution
def _write(saver: RRef[Saver], plan: SavePlan) -> Future[list[WriteResult]]:
    """Write on a new thread: calls of the training must not wait for a thread."""
    future: Future[list[WriteResult]] = Future()

    def run() -> None:
        try:
            results = saver.local_value().write(plan)
        except BaseException as error:
            future.set_exception(error)  # type: ignore[arg-type]
        else:
            future.set_result(results)

    Thread(target=run, name="telegrad-checkpoint").start()
    return future
