"""One worker's part in the saving of a checkpoint."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from telegrad.agent.futures import Future
from telegrad.checkpoint.copies import Copies, Shelf
from telegrad.checkpoint.folders import Files
from telegrad.checkpoint.state import Share, packed, pickled
from telegrad.nn.tree import Branch, state_of
from telegrad.optim.local import LocalOptimizer
from telegrad.rpc import RRef, current
from telegrad.rpc.functions import async_execution
from telegrad.rpc.stalls import StepCounter
from telegrad.threads import Thread


def writer_to(path: str, is_coordinator: bool) -> FileSystemWriter:
    # Copies that torch makes ahead are waited for on the current accelerator alone; there may be several.
    writer = FileSystemWriter(path, per_thread_copy_ahead=0)
    writer.fs = Files(current.here().attached(StepCounter).note)
    writer.set_up_storage_writer(is_coordinator)
    return writer


class Saver:
    """What of this worker belongs to a checkpoint."""

    def __init__(self, path: str, shares: list[Share], own: dict[str, Any], copies: bool) -> None:
        """With `copies`, what is saved is as it is now, whatever happens to it before it is written."""
        here = current.here()
        self._copies = Copies(here.attached(Shelf), here.attached(StepCounter).note) if copies else None
        state = {key: packed(value) for key, value in own.items()}
        for share in shares:
            state.setdefault(share.key, {}).update(self._part(share.branch))
        self._planner = DefaultSavePlanner()
        self._planner.set_up_planner(state, is_coordinator=False)
        self._writer = writer_to(path, False)

    def _part(self, branch: Branch) -> dict[str, Any]:
        value = branch.root.local_value()
        is_optimizer = isinstance(value, LocalOptimizer)
        part = value.state() if is_optimizer else state_of(branch)
        if self._copies is not None:
            part = self._copies.of(part)
        if is_optimizer:
            return {"state": {name: packed(each) for name, each in part.items()}}
        return {name: pickled(each) for name, each in part.items()}

    def plan(self) -> SavePlan:
        return self._writer.prepare_local_plan(self._planner.create_local_plan())

    def write(self, plan: SavePlan) -> list[WriteResult]:
        try:
            return self._writer.write_data(self._planner.finish_plan(plan), self._planner).wait()
        finally:
            if self._copies is not None:
                self._copies.give_back()


def begin(path: str, shares: list[Share], own: dict[str, Any], copies: bool) -> tuple[RRef[Saver], SavePlan]:
    saver = Saver(path, shares, own, copies)
    return RRef(saver), saver.plan()


@async_execution
def write_beside(saver: RRef[Saver], plan: SavePlan) -> Future[list[WriteResult]]:
    """Write on a thread of its own, so that no call of the training has to wait for a thread."""
    part = saver.local_value()
    future: Future[list[WriteResult]] = Future()

    def run() -> None:
        try:
            results = part.write(plan)
        except BaseException as error:
            future.set_exception(error)  # type: ignore[arg-type]
        else:
            future.set_result(results)

    Thread(target=run, name="telegrad-checkpoint").start()
    return future
