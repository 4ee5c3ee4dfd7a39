"""The owner of a `RemoteModule`: its place, as users write it, and functions that run there for the handles."""

import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from telegrad._core.calls.call_names import known_as, runs_as
from telegrad._core.checks import short_repr
from telegrad._core.membership.members import WorkerInfo
from telegrad._core.rpc.conversion import target
from telegrad._core.rpc.rref import RRef
from telegrad.errors import InvalidArgument, UsageError

RANK = "rank:"


def parse_place(given: str | WorkerInfo) -> tuple[str | int, torch.device | None]:
    """Return the worker, by its name or rank, and the device there, if one is named; raise UsageError otherwise."""

    def advice(why: object) -> str:
        return (
            f"remote_device: {short_repr(given)} is not a place for a module: {why}. Write 'worker' or "
            "'worker/device', such as 'trainer0/cpu'"
        )

    if isinstance(given, int):
        raise UsageError(advice(f"for the worker of that rank write '{RANK}{short_repr(given)}'"))
    if not isinstance(given, str | WorkerInfo):
        raise InvalidArgument(advice("it is neither a name nor a WorkerInfo"))
    worker, slash, device = (given if isinstance(given, str) else str(target(given, "remote_device"))).partition("/")
    if slash and worker and not device:
        raise UsageError(advice("no device follows the slash"))
    if not slash:
        with contextlib.suppress(RuntimeError):
            torch.device(worker)
            worker = ""  # `worker` is the name of a device
    if not worker:
        raise UsageError(advice("it does not name a worker"))
    try:
        number = int(worker.removeprefix(RANK)) if worker.startswith(RANK) else worker
        return number, torch.device(device) if device else None
    except (RuntimeError, ValueError) as error:
        raise UsageError(advice(error)) from error


@known_as("RemoteModule()")
def make(module_cls: Callable[..., Any], device: torch.device, args: Any, kwargs: Any) -> nn.Module:
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, but it returns an instance "
            f"of {type(module)}"
        )
    return module.to(device)


@known_as("RemoteModule()")
def make_reference(module_cls: Callable[..., Any], device: torch.device, args: Any, kwargs: Any) -> tuple[Any, ...]:
    module = make(module_cls, device, args, kwargs)
    return RRef(module), *describe(module, str(device))


for _maker in (make, make_reference):
    runs_as(_maker, lambda module_cls, *_: f"RemoteModule({getattr(module_cls, '__qualname__', module_cls)})")


@known_as("RemoteModule.init_from_module_rref")
def adopt(reference: RRef[nn.Module], device: torch.device | None) -> tuple[Any, ...]:
    module = reference.local_value()
    if not isinstance(module, nn.Module):
        raise ValueError(f"{reference!r} is a reference to an instance of {type(module)}, not of <class nn.Module>")
    if device is not None:
        module.to(device)
    return describe(module, str(device or device_of(module) or "cpu"))


def describe(module: nn.Module, device: str) -> tuple[Any, ...]:
    """Return the arguments of `RemoteModule._represent` after the reference."""
    trains = any(parameter.requires_grad for parameter in module.parameters())
    return type(module).__name__, device, module.training, trains


def device_of(module: nn.Module) -> torch.device | None:
    """Return the device of a module's tensors; None if it has no tensors."""
    held = next(itertools.chain(module.parameters(), module.buffers()), None)
    return None if held is None else held.device


@known_as("RemoteModule.forward")
def run_on_device(module: RRef[nn.Module], device: str, has_map: bool, args: Any, kwargs: Any) -> Any:
    """Run a module on an accelerator, for a caller with or without a device map to this worker."""
    args, kwargs = moved(device, (args, kwargs))
    result = module.local_value()(*args, **kwargs)
    return result if has_map else on_host(result)


def moved(device: str | torch.device, value: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)


def on_host(value: Any) -> Any:
    """Return a value with CPU copies of its tensors on accelerators."""
    return tree_map_only(Tensor, lambda tensor: tensor if tensor.is_meta else tensor.cpu(), value)


@known_as("RemoteModule.state_dict")
def state_of(module: RRef[nn.Module], prefix: str, has_map: bool) -> dict[str, Any]:
    state: dict[str, Any] = module.local_value().state_dict(prefix=prefix)
    if not has_map:
        for name, value in state.items():
            state[name] = on_host(value)
    return state


@known_as("RemoteModule.remote_parameters")
def parameters_of(module: RRef[nn.Module], recurse: bool) -> list[RRef[nn.Parameter]]:
    return [RRef(parameter) for parameter in module.local_value().parameters(recurse)]


@known_as("RemoteModule.to")
def apply_to_tensors(module: RRef[nn.Module], fn: Callable[[Tensor], Tensor], recurse: bool) -> str:
    there = module.local_value()._apply(fn, recurse)  # type: ignore[no-untyped-call]
    # A module without tensors does not show where `fn` moves them, so `fn` is applied to an empty one.
    return str(device_of(there) or fn(torch.empty(0, device="cpu")).device)


@known_as("a method of a RemoteModule")
def call(module: RRef[nn.Module], method: str, args: Any) -> None:
    """Call a method that returns the module itself, which must not be sent."""
    getattr(module.local_value(), method)(*args)


runs_as(call, lambda module, method, _: f"{type(module.local_value()).__qualname__}.{method}")


@known_as("RemoteModule.load_state_dict")
def load(
    module: RRef[nn.Module], state_dict: dict[str, Any], versions: dict[str, Any], assign: bool
) -> tuple[list[str], list[str], str]:
    """Load a state; return missing names, unexpected names, and an error text.

    `versions`: the metadata that `state_dict` has added for the module and its parts, by name. A part without metadata
    has its present version.
    """
    state: Any = OrderedDict(state_dict)
    if "version" in versions.get("", {}):
        parts = module.local_value().named_modules()
        state._metadata = {name: {"version": part._version} for name, part in parts} | versions
    try:
        # The load is not strict: the handle adds the names to those of the other parts of its model, and torch raises
        # one error for all.
        missing, unexpected = module.local_value().load_state_dict(state, strict=False, assign=assign)
    except RuntimeError as error:  # e.g. a wrong shape
        return [], [], str(error)
    return missing, unexpected, ""
