"""`torch.distributed.nn.api.remote_module`."""

from __future__ import annotations

import functools
import inspect
import itertools
import linecache
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from telegrad._core.calls.futures import Future
from telegrad._core.calls.settings import DEFAULT
from telegrad._core.modules import module_host, remote_module
from telegrad._core.modules.module_host import parse_place
from telegrad._core.pickling.reducers import REDUCERS
from telegrad.compat.rpc.calls import rpc_async
from telegrad.rpc import RRef, WorkerInfo

__all__ = ["RemoteModule"]

# The attributes of a handle, in torch's order; `forward` and `forward_async` come last.
_REMOTE_MODULE_PICKLED_ATTRIBUTES = (
    *vars(nn.Module()),
    *("module_rref", "on", "device", "is_device_map_set", "is_scriptable", "_kind"),
)
_REFUSED = (
    *("apply", "cuda", "ipu", "xpu", "cpu", "type", "float", "double", "half", "bfloat16", "to", "requires_grad_"),
    *("register_backward_hook", "register_forward_pre_hook", "register_forward_hook", "state_dict", "load_state_dict"),
    *("children", "named_children", "modules", "named_modules", "zero_grad", "share_memory", "extra_repr"),
    *("named_parameters", "buffers", "named_buffers", "register_buffer", "register_parameter", "add_module"),
)
_NOT_SUPPORTED = "Method ``{}`` not supported for RemoteModule. {}"


class RemoteModule(remote_module.RemoteModule):
    """A handle of a module on another worker, with the interface of `torch.distributed.nn`.

    Like torch's, it refuses many methods of modules; `telegrad.nn.RemoteModule` has most of them.
    """

    forward: Callable[..., Any]
    forward_async: Callable[..., Future[Any]]
    is_scriptable: bool
    _hints = False

    def __init__(
        self,
        remote_device: str | WorkerInfo,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        _module_interface_cls: Any = None,
    ) -> None:
        super().__init__(remote_device, module_cls, args, kwargs)
        self._make_scriptable(_module_interface_cls)

    @classmethod
    def init_from_module_rref(
        cls, remote_device: str | WorkerInfo, module_rref: RRef[nn.Module], _module_interface_cls: Any = None
    ) -> RemoteModule:
        """Return a handle of an existing module. Calls run on the module's owner, whatever worker is named."""
        _, device = parse_place(remote_device)
        place = module_rref.owner_name() + (f"/{device}" if device is not None else "")
        made = super().init_from_module_rref(place, module_rref)
        made._make_scriptable(_module_interface_cls)
        return made

    def _make_scriptable(self, interface: Any) -> None:
        self.is_scriptable = interface is not None
        if interface is not None:
            self.__dict__["_interface"] = interface

    def _represent(self, module: RRef[nn.Module], kind: str, device: str, training: bool, trains: bool) -> None:
        super()._represent(module, kind, device, training, trains)
        # PyTorch's tests compare the names of these members with `_REMOTE_MODULE_PICKLED_ATTRIBUTES`, in order.
        members = vars(self)
        del members["_trains"], members["_represented"]
        members["is_scriptable"] = False
        members["_kind"] = members.pop("_kind")  # keep torch's order
        members["forward_async"] = partial(run_async, module, device, self.is_device_map_set)
        members["forward"] = partial(run, module, device, self.is_device_map_set)

    def __prepare_scriptable__(self) -> nn.Module:
        """Return the module that `torch.jit.script` compiles, whose `forward` has the signature of the interface."""
        if not self.is_scriptable:
            raise TypeError("to be scripted, a RemoteModule needs the interface of its module: _module_interface_cls")
        number = next(_numbers)
        held = torch.tensor(number, device="cpu")
        _callables[number] = self.forward
        weakref.finalize(held, _callables.pop, number)
        made: nn.Module = _script_class(vars(self)["_interface"])(held)
        return made

    def parameters(self, recurse: bool = True) -> NoReturn:
        raise ValueError(_NOT_SUPPORTED.format("parameters", "Please use ``remote_parameters`` instead."))


def _refusing(method: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        instead = f"telegrad.nn.RemoteModule may have it; see docs/migration.md of Telegrad on ``{method}``"
        raise ValueError(_NOT_SUPPORTED.format(method, instead))

    return refuse


for _method in _REFUSED:
    setattr(RemoteModule, _method, _refusing(_method))


_RemoteModule = RemoteModule


def run(module: RRef[nn.Module], device: str, has_map: bool, *args: Any, **kwargs: Any) -> Any:
    return run_async(module, device, has_map, *args, **kwargs).wait()


def run_async(module: RRef[nn.Module], device: str, has_map: bool, *args: Any, **kwargs: Any) -> Future[Any]:
    if device == "cpu":
        return module._call_async("", DEFAULT, args, kwargs, "RemoteModule.forward")
    return rpc_async(module.owner(), module_host.run_on_device, (module, device, has_map, args, kwargs))


REDUCERS[RemoteModule] = REDUCERS[remote_module.RemoteModule]


# In TorchScript: a script module that calls back to Python, with the types of its interface


_SOURCE = """\
@torch.jit.ignore
def call(handle_number: torch.Tensor, {parameters}) -> returned:
    return callables[int(handle_number)]({names})


class ScriptedRemoteModule(torch.nn.Module):
    def __init__(self, handle_number: torch.Tensor) -> None:
        super().__init__()
        self.handle_number = handle_number

    def forward(self, {parameters}) -> returned:
        return call(self.handle_number, {names})

    @torch.jit.export
    def forward_async(self, {parameters}) -> torch.jit.Future[returned]:
        return torch.jit.fork(self.forward, {names})

    @torch.jit.export
    def __getstate__(self) -> int:
        raise RuntimeError(
            "RemoteModule can only be pickled when using RPC. Passing a script RemoteModule over RPC is not supported."
        )
        return 0

    @torch.jit.export
    def __setstate__(self, state: int) -> None:
        pass
"""

# The callables of script modules, by the number that each module has. A script module cannot hold a Python function, so
# its `call`, which stays in Python, looks the function up here. The number is a tensor, which ends with the module: of
# the attributes that a script module may have, Python only sees the end of tensors. Script modules refuse to be copied.
_callables: dict[int, Callable[..., Any]] = {}
_numbers = itertools.count()


@functools.cache  # torch never frees what it has compiled, so there is one class for each interface
def _script_class(interface: Any) -> Any:
    signature = inspect.signature(interface.forward, eval_str=True)
    parameters = list(signature.parameters.values())[1:]
    scope: dict[str, Any] = {
        "__name__": __name__,
        "torch": torch,
        "callables": _callables,
        "returned": signature.return_annotation,
    }
    texts = []
    for each in parameters:
        scope[f"type_{each.name}"] = each.annotation
        default = "" if each.default is each.empty else f" = {each.default!r}"
        texts.append(f"{each.name}: type_{each.name}{default}")
    source = _SOURCE.format(parameters=", ".join(texts), names=", ".join(each.name for each in parameters))
    name = f"<telegrad.compat.remote_module {next(_numbers)}>"
    # torch.jit.script reads the source of a function from the file of its code. There is no such file, so the lines are
    # put where the standard library caches the lines of files.
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    exec(compile(source, name, "exec", dont_inherit=True), scope)
    return scope["ScriptedRemoteModule"]
