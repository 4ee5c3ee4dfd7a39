"""Saves a model that is spread over workers, and what belongs to its training; all owners write and read at once.

The files are those of `torch.distributed.checkpoint`, which can read them, too, without any worker.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    Metadata,
    SavePlan,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from telegrad.errors import UsageError
from telegrad.nn.remote_module import apart
from telegrad.nn.tree import Branch, branches, joined, state_of
from telegrad.optim import DistributedOptimizer
from telegrad.optim.local import LocalOptimizer
from telegrad.rpc import RRef, get_worker_info, rpc_async
from telegrad.rpc.together import together

__all__ = ["load", "save"]

Path = str | os.PathLike[str]

CONTENTS = ".metadata"  # the file that makes a folder a checkpoint, written last
NO_LIMIT = 0  # seconds: a checkpoint takes as long as the disks need


class Share(NamedTuple):
    """Something of the state that lives on one worker: a module, a parameter, or a share of an optimizer."""

    key: str  # in the state
    branch: Branch


def save(state: Mapping[str, Any], checkpoint_id: Path) -> None:
    """Write a checkpoint into the folder `checkpoint_id`, which all workers must see under that path.

    The values of `state` are models (modules, `RemoteModule`s, references to modules), `DistributedOptimizer`s, other
    things with a `state_dict` (such as schedulers), or plain values. It is complete once this returns. An older
    checkpoint in the folder is given up as soon as this begins.

    Raises:
        UsageError: `state` is no dictionary by names.
        WorkersFailed: several workers could not write.
    """
    path = _folder("save", state, checkpoint_id)
    with contextlib.suppress(FileNotFoundError):
        os.remove(os.path.join(path, CONTENTS))  # half old and half new it would be no checkpoint
    shares, own = _shares(state)
    own |= {
        key: {"param_groups": value.state_groups()}
        for key, value in state.items()
        if isinstance(value, DistributedOptimizer)
    }
    here = get_worker_info().name
    begun = together(
        {here: [], **shares},
        lambda worker, theirs: rpc_async(
            worker, _begin, (path, theirs, own if worker == here else {}), timeout=NO_LIMIT
        ),
        f"checkpoint.save: gathering what belongs to {path!r}",
    )
    planner, writer = DefaultSavePlanner(), FileSystemWriter(path)
    planner.set_up_planner({}, is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([plan for _, plan in begun.values()])
    plans = writer.prepare_global_plan(plans)
    by_worker = dict(zip(begun, plans, strict=True))
    written = together(
        by_worker,
        lambda worker, plan: begun[worker][0].rpc_async(timeout=NO_LIMIT).write(plan),
        f"checkpoint.save: writing {path!r}",
        {worker: sum(item.tensor_storage_size() or 0 for item in plan.items) for worker, plan in by_worker.items()},
    )
    writer.finish(metadata, list(written.values()))


def load(state: dict[str, Any], checkpoint_id: Path) -> None:
    """Read a checkpoint that `save` wrote into a state of the same form, wherever its parts are now.

    Models, optimizers and what has a `load_state_dict` are changed in place; plain values are replaced in `state`.

    Raises:
        UsageError: there is no complete checkpoint there, or one of something else.
        WorkersFailed: several workers could not read it.
    """
    path = _folder("load", state, checkpoint_id)
    _contents(path)
    shares, own = _shares(state)
    together(
        shares,
        lambda worker, theirs: rpc_async(worker, _load_shares, (path, theirs), timeout=NO_LIMIT),
        f"checkpoint.load: reading {path!r}",
    )
    for key, value in state.items():
        if isinstance(value, DistributedOptimizer):
            value.load_groups(_find(path, (key, "param_groups")))
        elif key in own:
            found = _find(path, (key,))
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(found)
            else:
                state[key] = found


def _folder(function: str, state: Any, checkpoint_id: Any) -> str:
    """The folder's path; UsageError where the arguments are of other kinds."""
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        kind = "a dictionary with other keys" if isinstance(state, Mapping) else type(state).__name__
        raise UsageError(
            f"what belongs to a checkpoint is a dictionary by names, not {kind}: "
            f'write checkpoint.{function}({{"model": model}}, folder)'
        )
    if not isinstance(checkpoint_id, (str, os.PathLike)):
        raise UsageError(f"a checkpoint is in a folder: give its path, not {type(checkpoint_id).__name__}")
    return os.fspath(checkpoint_id)


def _shares(state: Mapping[str, Any]) -> tuple[dict[str, list[Share]], dict[str, Any]]:
    """What each worker has of the state; and what is this worker's own, as it is saved."""
    shares: list[Share] = []
    own: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, (nn.Module, RRef)):
            shares += [Share(key, branch) for branch in branches(value)]
        elif isinstance(value, DistributedOptimizer):
            shares += [Share(key, Branch("", local)) for local in value.locals.values()]
        else:
            own[key] = value.state_dict() if hasattr(value, "state_dict") else value
    by_worker: dict[str, list[Share]] = {}
    for share in shares:
        by_worker.setdefault(share.branch.root.owner_name(), []).append(share)
    return by_worker, own


# On each worker


class Saver:
    """One worker's part in the saving of a checkpoint."""

    def __init__(self, path: str, shares: list[Share], own: dict[str, Any]) -> None:
        state = dict(own)
        for share in shares:
            part = state.setdefault(share.key, {})
            value = share.branch.root.local_value()
            if isinstance(value, LocalOptimizer):
                part["state"] = value.state()
            else:
                part.update(state_of(share.branch))
        self._planner = DefaultSavePlanner()
        self._planner.set_up_planner(state, is_coordinator=False)
        # Copies that torch makes ahead are waited for on the current accelerator alone; there may be several.
        self._writer = FileSystemWriter(path, per_thread_copy_ahead=0)
        self._writer.set_up_storage_writer(False)

    def plan(self) -> SavePlan:
        return self._writer.prepare_local_plan(self._planner.create_local_plan())

    def write(self, plan: SavePlan) -> list[WriteResult]:
        return self._writer.write_data(self._planner.finish_plan(plan), self._planner).wait()


def _begin(path: str, shares: list[Share], own: dict[str, Any]) -> tuple[RRef[Saver], SavePlan]:
    saver = Saver(path, shares, own)
    return RRef(saver), saver.plan()


def _load_shares(path: str, shares: list[Share]) -> None:
    for key, branch in shares:
        value = branch.root.local_value()
        if isinstance(value, LocalOptimizer):
            value.load(_find(path, (key, "state"), only=set(value.names)))
        else:
            _load_model(path, key, branch)


def _load_model(path: str, key: str, branch: Branch) -> None:
    state = state_of(branch)
    flat = {joined(key, name): value for name, value in state.items()}
    _read(path, flat)
    value = branch.root.local_value()
    if isinstance(value, nn.Module):
        prefix = branch.name and f"{branch.name}."
        loaded = {name.removeprefix(prefix): flat[joined(key, name)] for name in state}
        with apart():
            value.load_state_dict(loaded)


def _find(path: str, start: tuple[str, ...], only: set[str] | None = None) -> Any:
    """What a checkpoint has at a place in the state, in whatever form; `only` of these names below it."""
    metadata = _contents(path)
    depth = len(start)
    ways = {
        name: way[depth:]
        for name, way in metadata.planner_data.items()
        if way[:depth] == start and (only is None or way[depth] in only)
    }
    if not ways and only is None:
        raise UsageError(f"the checkpoint in {path!r} has no {'.'.join(start)}")
    flat = {name: _target(metadata, name) for name in ways}
    _read(path, flat)
    if () in ways.values():  # a value, not a dictionary
        return next(iter(flat.values()))
    found: Any = {}
    for name, way in ways.items():
        inner = found
        for step in way[:-1]:
            inner = inner.setdefault(step, {})
        inner[way[-1]] = flat[name]
    return _with_lists(found)


def _target(metadata: Metadata, name: str) -> Tensor | None:
    about = metadata.state_dict_metadata[name]
    return torch.empty(about.size, dtype=about.properties.dtype) if isinstance(about, TensorStorageMetadata) else None


def _with_lists(value: Any) -> Any:
    """Dictionaries whose keys are positions were lists."""
    if not isinstance(value, dict):
        return value
    parts = {key: _with_lists(part) for key, part in value.items()}
    if parts and all(isinstance(key, int) for key in parts):
        return [parts[position] for position in sorted(parts)]
    return parts


def _contents(path: str) -> Metadata:
    try:
        return FileSystemReader(path).read_metadata()
    except FileNotFoundError as error:
        raise UsageError(f"there is no complete checkpoint in {path!r}: {error}") from error


def _read(path: str, flat: dict[str, Any]) -> None:
    """Fill `flat` from a checkpoint: its tensors in place, its other values anew.

    Raises:
        UsageError: there is no such checkpoint, or it has no value of such a name.
    """
    metadata = _contents(path)
    missing = sorted(flat.keys() - metadata.state_dict_metadata.keys())
    if missing:
        raise UsageError(f"the checkpoint in {path!r} has no {', '.join(missing[:5])}{' ...' * (len(missing) > 5)}")
    reader = FileSystemReader(path)
    reader.set_up_storage_reader(metadata, True)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(flat, metadata, True)
    plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    (plan,) = reader.prepare_global_plan(plans)
    reader.read_data(planner.finish_plan(plan), planner).wait()
