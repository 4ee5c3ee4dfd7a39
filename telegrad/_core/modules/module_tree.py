"""The parts of a model that is spread over workers: modules and parameters, and their owners."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from telegrad._core.calls.call_names import known_as
from telegrad._core.calls.settings import DEFAULT
from telegrad._core.modules.remote_module import RemoteModule, without_remote_state
from telegrad._core.rpc.joint_calls import call_all
from telegrad._core.rpc.remote_calls import rpc_async
from telegrad._core.rpc.restorable import ensure_present
from telegrad._core.rpc.rref import RRef
from telegrad.errors import UsageError

T = TypeVar("T")

Model = nn.Module | RRef[Any]


class Recoverable:
    """A module of an extension with parts on other workers, which it recreates after a loss."""

    def recover(self, timeout: float = DEFAULT) -> None:
        """Recreate lost parts, within `timeout` seconds for each."""
        raise NotImplementedError

    def _telegrad_update_replicas(self) -> None:
        """Give the parts that have a replica of another part's weight its present value; most modules have none."""


# The attributes that each module has, such as its parameters and hooks. References are looked for in all others.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class RemotePart(NamedTuple):
    """A module, or a separate parameter, that is entirely on one worker."""

    name: str  # in the model; empty for the whole model
    root: RRef[Any]
    # In the order of the model's parameters. Each step down adds the number of the module that has the part, 0 for its
    # own parameters and 1 for its references, and a number among these.
    place: tuple[int, ...] = ()
    is_spread: bool = False  # it contains a Recoverable
    positions: Mapping[str, int] | None = None  # of its parameters in the whole model, where the module's are others


def branches(model: Model) -> list[RemotePart]:
    """Return all branches of a model: its own modules, and those of others to which its modules hold references.

    References are followed from worker to worker if they are attributes of a module, or in lists, tuples and
    dictionaries that are attributes. References to other objects than modules and parameters are ignored.
    """
    if isinstance(model, RemoteModule):
        model = model.module_rref
    elif isinstance(model, nn.Module):
        model = RRef(model)
    elif not isinstance(model, RRef):
        raise UsageError(f"a model must be an nn.Module, RemoteModule or RRef to a module, not {type(model).__name__}")
    visited = _walk([RemotePart("", model)], _look)
    found = [branch._replace(is_spread=is_spread) for branch, is_spread in visited if is_spread is not None]
    if not found:
        raise UsageError(f"the model {model!r} is not a module and does not refer to one")
    return found


def update_replicas(parts: Iterable[RemotePart]) -> None:
    """Update replicas of tied weights, so that the state of each part can then be read at its owner alone."""
    call_all(
        by_owner(part for part in parts if part.is_spread),
        lambda owner, own: rpc_async(owner, _update_replicas, ([part.root for part in own],)),
    )


@known_as("updating replicas of tied weights")
def _update_replicas(roots: list[RRef[nn.Module]]) -> None:
    for module in (each for root in roots for each in root.local_value().modules()):
        if isinstance(module, Recoverable):
            module._telegrad_update_replicas()


def by_owner(parts: Iterable[RemotePart]) -> dict[str, list[RemotePart]]:
    found: dict[str, list[RemotePart]] = {}
    for part in parts:
        found.setdefault(part.root.owner_name(), []).append(part)
    return found


def restore_model(model: Model, timeout: float) -> None:
    """Restore all lost parts of a model, from worker to worker, including the parts of recreated parts; raise
    CannotRestore if a part was made without `restore`, OwnerLost if its worker did not come back in time."""
    if isinstance(model, nn.Module):
        wave = _restore_parts(model, "", timeout)
    else:
        ensure_present(model, timeout)
        wave = [RemotePart("", model)]
    _walk(wave, _restore_behind, timeout, timeout=timeout)


def _walk(
    wave: list[RemotePart], visit: Callable[..., tuple[T, list[RemotePart]]], *args: Any, timeout: float = DEFAULT
) -> list[tuple[RemotePart, T]]:
    """Call `visit(branch, *args)` at the owners of these branches and of all that it returns; return the values."""
    found: list[tuple[RemotePart, T]] = []
    seen = {branch.root._handle.id for branch in wave}
    while wave:
        # `call_all` names these in errors. The number makes them unique: two branches may have one name.
        named = {
            f"{branch.name or 'the model'} on {branch.root.owner_name()}, {number} of {len(wave)}": branch
            for number, branch in enumerate(wave, 1)
        }
        visited = call_all(
            named, lambda _, branch: rpc_async(branch.root.owner(), visit, (branch, *args), timeout=timeout)
        )
        wave = []
        for branch, (value, further) in zip(named.values(), visited.values(), strict=True):
            found.append((branch, value))
            # Two modules may refer to one part, and parts may refer to each other. Each is visited once.
            fresh = [each for each in further if each.root._handle.id not in seen]
            seen |= {each.root._handle.id for each in fresh}
            wave += fresh
    return found


@known_as("looking for the parts of a model")
def _look(branch: RemotePart) -> tuple[bool | None, list[RemotePart]]:
    """Return for a part of a model whether it is spread, else None; and the branches to which the value leads."""
    value = branch.root.local_value()
    if isinstance(value, RRef):
        return None, [branch._replace(root=value)]
    if isinstance(value, nn.Module):
        is_spread = any(isinstance(each, Recoverable) for each in value.modules())
        return is_spread, list(references_of(value, branch.name, branch.place))
    return False if isinstance(value, nn.Parameter) else None, []


@known_as("telegrad.recover")
def _restore_behind(branch: RemotePart, timeout: float) -> tuple[None, list[RemotePart]]:
    """Restore the parts to which a value of this worker leads; return them."""
    value = branch.root.local_value()
    if isinstance(value, RRef):
        ensure_present(value, timeout)
        return None, [RemotePart(branch.name, value)]
    return None, _restore_parts(value, branch.name, timeout) if isinstance(value, nn.Module) else []


def _restore_parts(module: nn.Module, name: str, timeout: float) -> list[RemotePart]:
    for part in module.modules():
        if isinstance(part, Recoverable | RemoteModule):
            part.recover(timeout)
    found = list(references_of(module, name))
    for each in found:
        ensure_present(each.root, timeout)
    return found


def references_of(module: nn.Module, prefix: str = "", place: tuple[int, ...] = ()) -> Iterator[RemotePart]:
    """Yield the branches to which a module of this worker, or one of its parts, leads."""
    for number, (name, part) in enumerate(module.named_modules()):
        path = joined(prefix, name)
        if isinstance(part, RemoteModule):
            stage, positions = part._order
            path = path.removesuffix(part._surplus).removesuffix(".")
            yield RemotePart(path, part.module_rref, (*place, number - stage, 1, 0), False, positions)
        else:
            found = [
                each
                for attribute, value in vars(part).items()
                if attribute not in _OF_EVERY_MODULE
                for each in _references_in(value, joined(path, attribute))
            ]
            yield from (each._replace(place=(*place, number, 1, index)) for index, each in enumerate(found))


def _references_in(value: Any, path: str) -> Iterator[RemotePart]:
    if isinstance(value, RRef | RemoteModule):
        yield RemotePart(path, value if isinstance(value, RRef) else value.module_rref)
        return
    items = enumerate(value) if isinstance(value, list | tuple) else value.items() if isinstance(value, dict) else ()
    for key, each in items:
        yield from _references_in(each, joined(path, str(key)))


def joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def parameters_of(branch: RemotePart) -> list[tuple[str, Tensor]]:
    """Return the parameters of a branch of this worker, with their names in the model."""
    value = branch.root.local_value()
    if isinstance(value, nn.Module):
        return [(joined(branch.name, name), parameter) for name, parameter in value.named_parameters()]
    if isinstance(value, Tensor):
        return [(branch.name, value)]
    raise UsageError(f"{branch.root!r} refers to neither a parameter nor a module, but to {type(value).__name__}")


def places_of(branch: RemotePart) -> dict[int, tuple[int, ...]]:
    """Return the place in the model of each parameter of a branch of this worker, by `id`."""
    value = branch.root.local_value()
    if not isinstance(value, nn.Module):
        return {id(value): branch.place}
    if branch.positions:
        return {id(own): (*branch.place, branch.positions.get(name, 0)) for name, own in value.named_parameters()}
    return {
        id(parameter): (*branch.place, number, 0, index)
        for number, part in reversed([*enumerate(value.modules())])  # the first of several is kept
        for index, parameter in enumerate(part._parameters.values())
    }


def state_of(branch: RemotePart) -> dict[str, Any]:
    """Return the state of a branch of this worker, with the names in the model; without parts on other workers."""
    value = branch.root.local_value()
    if isinstance(value, Tensor):
        return {branch.name: value.detach()}
    with without_remote_state():
        return {joined(branch.name, name): part for name, part in value.state_dict().items()}
