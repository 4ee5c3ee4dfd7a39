"""Load a checkpoint: each worker reads the values that it owns. `telegrad.recover` does so after losses."""

import contextlib
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from math import inf
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, Metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from telegrad import errors
from telegrad.checkpoint.folders import CONTENTS, Files, Path
from telegrad.checkpoint.state import NO_LIMIT, OwnerState, folder_of, has_method, kind_of, shares_of, unpacked
from telegrad.errors import CheckpointFailed, UsageError
from telegrad.ext.calls import StepCounter, call_all, folded, known_as
from telegrad.ext.feedback import Wait, checks
from telegrad.ext.host import UnsafePath, raised_by_handler, reason
from telegrad.ext.modules import LocalOptimizer, RemotePart, joined, restore_model, state_of, without_remote_state
from telegrad.ext.values import first_line
from telegrad.ext.workers import current
from telegrad.optim import DistributedOptimizer
from telegrad.rpc import RRef, get_worker_info, rpc_async

T = TypeVar("T")

_ALIKE = (
    "nothing was loaded. Tensors are written in place: give a module or tensor of the saved form, or None instead of a "
    "tensor to get that of the checkpoint"
)


@folded
def load(state: dict[str, Any], checkpoint_id: Path) -> None:
    """Load a checkpoint of `save` into a state of the same form, for any distribution of its parts over workers.

    Args:
        state: models, optimizers, objects with `load_state_dict` and tensors are changed in place, also tensors in
            dictionaries, lists and tuples. Plain values in it are replaced.
        checkpoint_id: the folder, which all workers must see under that path.

    Raises:
        UsageError: the folder contains no complete checkpoint, or one of a different state: a tensor of a model or in
            `state` has another shape or type or is missing, or an optimizer has other parameters or hyperparameters.
            Nothing was loaded.
        CallTimeout: an owner made no progress for `rpc_timeout`.
        CheckpointFailed: files are missing or damaged. Other parts may have been loaded.
        WorkersFailed: several workers could not read the checkpoint.

    Example:
        >>> from telegrad import checkpoint
        >>> layer = telegrad.nn.RemoteModule("worker1", nn.Linear, (4, 1))
        >>> saved = checkpoint.save({"model": layer, "epoch": 3}, "saved").wait()
        >>> state = {"model": layer, "epoch": 0}
        >>> checkpoint.load(state, saved)
        >>> state["epoch"]
        3
    """
    path = folder_of("load", state, checkpoint_id)
    get_worker_info()  # raises NotInitialized outside of a group
    shares, own = shares_of(state)
    metadata = _contents(path)
    writes: list[tuple[Tensor, Tensor]] = []
    found = {key: _find(path, metadata, (key,)) for key in own}
    for key in own:
        if not has_method(state[key], "load_state_dict"):
            found[key] = _with_own(key, state[key], found[key], writes)
    for key, value in state.items():
        if isinstance(value, DistributedOptimizer):
            found[key] = _find(path, metadata, (key, "param_groups"))
            with _intact(path):
                value._check_groups(found[key])
    # Two rounds: all owners compare before any of them loads. So a state that does not fit changes nothing on any
    # worker.
    begun = _ask(path, _begin, {worker: (path, theirs) for worker, theirs in shares.items()}, "comparing with")
    for loader in begun.values():
        if isinstance(loader, str):
            raise UsageError(loader)
    _ask(path, _load, {worker: (loader,) for worker, loader in begun.items()}, "reading")
    # The driver's own tensors and objects are last: an owner that fails leaves them unchanged.
    for tensor, values in writes:
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.copy_(values)
    for key, value in state.items():
        if isinstance(value, DistributedOptimizer):
            value.load_groups(found[key])
        elif has_method(value, "load_state_dict") and key in own:
            value.load_state_dict(found[key])
        elif key in own:
            state[key] = found[key]


def _ask(path: str, function: Callable[..., T], args: Mapping[str, tuple[Any, ...]], doing: str) -> dict[str, T]:
    """Call all owners with their arguments, which have failed only if they make no progress."""
    return call_all(
        args,
        lambda worker, its: rpc_async(worker, function, its, timeout=NO_LIMIT),
        f"checkpoint.load: {doing} {path!r}",
        limit=current.agent().timeout,
    )


def _with_own(name: str, own: Any, found: Any, writes: list[tuple[Tensor, Tensor]]) -> Any:
    """Return a value of the checkpoint with the tensors of `own` in place of its own; list these pairs in `writes`.
    Raise UsageError if a tensor of `own` cannot be written, or the checkpoint has no such tensor."""
    if isinstance(own, Tensor):
        _check_target(name, own, found)
        writes.append((own, found))
        return own
    if not _has_tensors(own):
        return found
    if isinstance(own, Mapping) and isinstance(found, MutableMapping):
        for key, part in own.items():
            if key in found:
                found[key] = _with_own(f"{name}.{key}", part, found[key], writes)
            elif _has_tensors(part):
                raise UsageError(f"the checkpoint has no {name}.{key}: {_ALIKE}")
        return found
    if isinstance(own, list | tuple) and isinstance(found, list | tuple) and len(own) == len(found):
        pairs = enumerate(zip(own, found, strict=True))
        parts = [_with_own(f"{name}.{number}", *pair, writes) for number, pair in pairs]
        return getattr(type(found), "_make", type(found))(parts)
    raise UsageError(_unlike(name, own, found))


def _has_tensors(value: Any) -> bool:
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, Tensor) or any(map(_has_tensors, parts))


def _check_target(name: str, own: Tensor, found: Any, where: str = "in the state") -> None:
    if kind_of(own) or not _fits(own, found):
        raise UsageError(_unlike(name, own, found, where))
    # Sorted by stride, a dimension whose stride is within the reach of the smaller ones leads to elements that these
    # have reached already.
    reach = 0
    for step, size in sorted(zip(own.stride(), own.shape, strict=True)):
        if size > 1 and step <= reach and own.numel():
            raise UsageError(f"elements of {name} {where} share memory: give a tensor without overlaps, as by clone()")
        reach += step * (size - 1)


def _fits(own: Any, found: Any) -> bool:
    """Return True if a tensor has the shape and type of a value of the checkpoint, or of one that is not read yet."""
    if isinstance(own, Tensor) and isinstance(found, TensorStorageMetadata):
        return (own.dtype, own.shape) == (found.properties.dtype, found.size)
    return isinstance(own, Tensor) and _described(own) == _described(found)


def _unlike(name: str, own: Any, found: Any, where: str = "in the state") -> str:
    return f"{name} {where} is {_described(own)}, and {_described(found)} in the checkpoint: {_ALIKE}"


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        kind = type(value).__name__ if is_traceable_wrapper_subclass(value) else "tensor"  # such as a DTensor
        return kind_of(value) or f"a {value.dtype} {kind} of shape {tuple(value.shape)}"
    if isinstance(value, TensorStorageMetadata):
        return f"a {value.properties.dtype} tensor of shape {tuple(value.size)}"
    if isinstance(value, BytesStorageMetadata):  # of a value that is not read yet
        return "no tensor"
    return f"of type {type(value).__name__}" + (f" and length {len(value)}" if isinstance(value, list | tuple) else "")


# Called on each worker


class _Loader:
    """The parts of the state on a worker, which fit the checkpoint."""

    def __init__(self, path: str, metadata: Metadata, shares: list[OwnerState]) -> None:
        """Raise UsageError if a part does not fit. No value is read."""
        self._path, self._metadata, self._saved = path, metadata, metadata.state_dict_metadata
        self._where = f"on worker {get_worker_info().name!r}"
        self._targets = [(*share, self._checked(*share)) for share in shares]

    def _checked(self, key: str, branch: RemotePart) -> dict[str, Any]:
        """Check a part. Return the targets that the values of a model are read into."""
        value = branch.root.local_value()
        of_optimizer = isinstance(value, LocalOptimizer)
        state = {} if of_optimizer else {joined(key, name): part for name, part in state_of(branch).items()}
        with _intact(self._path):
            if of_optimizer:
                self._check_optimizer(f"{key}.state", value)
            if missing := sorted(state.keys() - self._saved.keys()):
                names = ", ".join(missing[:5]) + " ..." * (len(missing) > 5)
                raise UsageError(f"the checkpoint in {self._path!r} has no {names} ({self._where}): nothing was loaded")
            for name, part in state.items():
                if isinstance(part, Tensor) and not f".{name}".endswith("._extra_state"):  # modules replace it
                    _check_target(name, part, self._saved[name], self._where)
                elif not _fits(part, self._saved[name]):
                    state[name] = _target(self._saved[name])
        return state

    def _check_optimizer(self, prefix: str, local: LocalOptimizer) -> None:
        """Compare shapes only: the state is replaced, and converted to the types of the parameters."""
        shapes = {name: parameter.shape for name, parameter in zip(local.names, local.parameters, strict=True)}
        for name, state in local.state().items():
            for part, own in state.items():
                found = self._saved.get(f"{prefix}.{name}.{part}")
                has_shape = isinstance(own, Tensor) and own.shape == shapes[name]  # other parts may change theirs
                if has_shape and isinstance(found, TensorStorageMetadata) and found.size != own.shape:
                    raise UsageError(_unlike(f"{prefix}.{name}.{part}", own, found, self._where))

    def load(self) -> None:
        for key, branch, flat in self._targets:
            value = branch.root.local_value()
            if isinstance(value, LocalOptimizer):
                value.load(_find(self._path, self._metadata, (key, "state"), only=set(value.names)))
                continue
            _read(self._path, self._metadata, flat)
            if isinstance(value, nn.Module):
                place = joined(key, branch.name)
                loaded = {name.removeprefix(place and f"{place}."): unpacked(part) for name, part in flat.items()}
                # Modules on other workers, of which this one has handles, are loaded by their owners.
                with without_remote_state():
                    value.load_state_dict(loaded)


@known_as("checkpoint.load")
def _begin(path: str, shares: list[OwnerState]) -> RRef[_Loader] | str:
    """Compare the parts of this worker with the checkpoint. Return a loader, or a text about the differences."""
    metadata = _contents(path)  # only once: for a large model, unpickling takes long
    try:
        return RRef(_Loader(path, metadata, shares))
    except UsageError as error:
        # Not raised: the program gets one UsageError, and not a WorkersFailed, if several owners differ.
        return str(error)


@known_as("checkpoint.load")
def _load(loader: RRef[_Loader]) -> None:
    loader.local_value().load()


def _find(path: str, metadata: Metadata, start: tuple[str, ...], only: set[str] | None = None) -> Any:
    """Return the values of a checkpoint below a place in the state. With `only`, restrict the names below it."""
    with _intact(path):
        depth = len(start)
        ways = {
            name: way[depth:]
            for name, way in metadata.planner_data.items()
            if way[:depth] == start and (only is None or way[depth] in only)
        }
        if not ways and only is None:
            raise UsageError(f"the checkpoint in {path!r} has no {'.'.join(start)}: nothing was loaded")
        flat = {name: _target(metadata.state_dict_metadata[name]) for name in ways}
        _read(path, metadata, flat)
        if () in ways.values():  # a value, not a dictionary
            return unpacked(next(iter(flat.values())))
        found: Any = {}
        for name, way in ways.items():
            inner = found
            for step in way[:-1]:
                inner = inner.setdefault(step, {})
            inner[way[-1]] = flat[name]
        return unpacked(_with_lists(found))


def _target(about: Any) -> Tensor | None:
    if not isinstance(about, TensorStorageMetadata):
        return None
    return torch.empty(about.size, dtype=about.properties.dtype, device="cpu")


def _with_lists(value: Any) -> Any:
    """Turn dictionaries whose keys are positions back into lists."""
    if not isinstance(value, dict):
        return value
    parts = {key: _with_lists(part) for key, part in value.items()}
    if parts and all(isinstance(key, int) for key in parts):
        return [parts[position] for position in sorted(parts)]
    return parts


def _reader(path: str) -> FileSystemReader:
    reader = FileSystemReader(path)
    reader.fs = Files(current.here().attached(StepCounter).note)
    return reader


def _contents(path: str) -> Metadata:
    with _intact(path, CONTENTS):
        try:
            found = _reader(path).read_metadata()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UsageError(f"there is no complete checkpoint in {path!r}: {error}") from error
        except UnsafePath as error:
            raise UsageError(f"the checkpoint in {path!r} cannot be read: {reason(error)}") from None
        if not all(isinstance(each, dict) for each in (found.state_dict_metadata, found.planner_data)):
            raise TypeError("it does not list the contents")
    return found


def _read(path: str, metadata: Metadata, flat: dict[str, Any]) -> None:
    """Fill `flat` from a checkpoint that has all its names: its tensors in place, its other values by replacement."""
    with _intact(path):
        reader = _reader(path)
        reader.set_up_storage_reader(metadata, True)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(flat, metadata, True)
        plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
        (plan,) = reader.prepare_global_plan(plans)
        reader.read_data(planner.finish_plan(plan), planner).wait()


@contextlib.contextmanager
def _intact(path: str, file: str = "") -> Iterator[None]:
    """Raise CheckpointFailed for each error of the body, which only interprets a checkpoint, but for UsageErrors."""
    try:
        yield
    except (UsageError, CheckpointFailed):
        raise
    except Exception as error:  # unpickling an invalid file may raise any error
        # A damaged table of contents may ask for any amount of memory.
        if raised_by_handler(error) or isinstance(error, OSError if file else MemoryError | torch.OutOfMemoryError):
            raise
        cause: BaseException = error
        if isinstance(error, pickle.UnpicklingError) and error.__context__ is not None:
            cause = error.__context__  # without torch's advice to load the file without its checks
        text = first_line(cause).partition(". Please use ")[0]
        damaged = f"damaged: {type(cause).__name__}{text and f': {text}'}."
        raise CheckpointFailed(
            f"the file {file} in {path!r} does not belong to a checkpoint, or is {damaged} Load another checkpoint"
            if file
            else f"files of the checkpoint in {path!r} are missing or {damaged} Other parts may have been loaded "
            "already: load another checkpoint"
        ) from None


# Continuing after losses

PAUSE = 0.05  # seconds before the next attempt
LEAST = 1.0  # minimum seconds for an attempt

_OF_A_LOSS = (
    *(errors.PeerError, errors.RRefError, errors.UnknownWorker),
    *(errors.CallTimeout, errors.CallCancelled, errors.ContextEnded),
)


@folded
def recover(
    state: dict[str, Any], checkpoint_id: Path | None, timeout: float = 60.0, after: BaseException | None = None
) -> None:
    """See `telegrad.recover`."""
    checks.seconds("timeout", timeout)
    if after is not None and not isinstance(after, BaseException):
        checks.raise_invalid("after", "the exception that ended a step", after)
    if after is not None and not _may_end(after):
        raise after
    if checkpoint_id is None:
        told = "recover: there is no checkpoint to continue from; save one before the first step"
        raise UsageError(told) from after
    folder_of("load", state, checkpoint_id)
    until = time.monotonic() + timeout if timeout else inf
    text = "recover: restoring all parts"
    with Wait("recover", lambda: text, worker=get_worker_info().name) as wait:
        while True:
            left = max(until - time.monotonic(), LEAST) if timeout else 0
            try:
                # In this order: the optimizers are made again for the restored parameters, and the checkpoint is loaded
                # into both.
                for value in state.values():
                    if isinstance(value, nn.Module | RRef):
                        restore_model(value, left)
                for value in state.values():
                    if isinstance(value, DistributedOptimizer):
                        value.recover(left)
                load(state, checkpoint_id)
                return
            except (*_OF_A_LOSS, errors.WorkersFailed) as error:
                if time.monotonic() > until or not _may_end(error):
                    raise
                text = f"recover: {str(error).partition('. ')[0]}"  # without its advice for callers of functions
            wait.look()
            time.sleep(PAUSE)


def _may_end(error: BaseException) -> bool:
    """Return True if only workers were lost, and these may come back."""
    if isinstance(error, errors.CheckpointFailed) and error.__cause__ is not None:
        return _may_end(error.__cause__)
    several = error.errors.values() if isinstance(error, errors.WorkersFailed) else [error]
    lasting = errors.CannotRestore, errors.GenerationOver
    return all(isinstance(each, _OF_A_LOSS) and not isinstance(each, lasting) for each in several)
