"""Save and load a model that is spread over workers, and other training state. All owners write and read concurrently.

The file format is that of `torch.distributed.checkpoint`, which can read the files without any worker.

To save, each owner writes its own part, and the driver writes the table of contents last.

The steps are those of `torch.distributed.checkpoint`, with calls in place of its collectives, so no process group is
needed: each owner makes a plan of its part (`Saver`), the driver joins the plans, each owner writes, and the driver
writes the metadata with the results of all. With `wait=False` owners copy their parts before they plan.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import secrets
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from telegrad.checkpoint.background import Copies, HostMemoryPool, Saves
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
from telegrad.errors import CannotEncode, UsageError
from telegrad.ext.calls import Future, StepCounter, call_all, folded, known_as
from telegrad.ext.feedback import checks
from telegrad.ext.host import Thread
from telegrad.ext.modules import LocalOptimizer, RemotePart, state_of, update_replicas
from telegrad.ext.workers import current
from telegrad.optim import DistributedOptimizer
from telegrad.rpc import RRef, get_worker_info, rpc_async
from telegrad.rpc.functions import async_execution

__all__ = ["latest", "load", "save"]

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
