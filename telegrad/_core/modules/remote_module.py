"""A module on another worker, used like a local one."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from telegrad._core import checks
from telegrad._core.calls.call_names import not_compiled
from telegrad._core.calls.futures import Future
from telegrad._core.calls.settings import DEFAULT, check_timeout
from telegrad._core.membership.members import WorkerInfo
from telegrad._core.modules import module_host
from telegrad._core.modules.module_host import parse_place
from telegrad._core.pickling.reducers import REDUCERS
from telegrad._core.pickling.remote_text import fold, folded
from telegrad._core.references import Id
from telegrad._core.rpc.conversion import as_dict
from telegrad._core.rpc.remote_calls import rpc_async, rpc_sync
from telegrad._core.rpc.restorable import Restore, check_restore, ensure_present, make_restorable
from telegrad._core.rpc.rref import RRef
from telegrad._core.texts import Wait, hint, report_in_background
from telegrad._core.worker import current
from telegrad.autograd.contexts import entered_id
from telegrad.errors import UsageError

_apart: ContextVar[bool] = ContextVar("telegrad_modules_apart", default=False)


@contextlib.contextmanager
def without_remote_state() -> Iterator[None]:
    """In the block, exclude modules on other workers from the state of modules that contain their handles."""
    token = _apart.set(True)
    try:
        yield
    finally:
        _apart.reset(token)


@folded
class RemoteModule(nn.Module):
    """A handle of a module on another worker: `forward` runs there, and gradients flow back to the module.

    The module is created there by `module_cls(*args, **kwargs)`. The handle can be sent to other workers.

    For a module on an accelerator, arguments on accelerators are sent according to the device map; tensors that do not
    arrive on the module's device are moved there. Results and state are returned according to the map or, without a map
    to that worker, on the CPU.

    Operations on the handle as a whole apply to the module: `train`, `eval`, `to` and similar methods, `apply`,
    `requires_grad_`, `zero_grad`, `state_dict`, `load_state_dict`. Hooks of the handle run on the worker that calls it.

    Args:
        remote_device: a worker, with a device or without: `"trainer0"`, `"trainer0/cpu"`, `"ps0/cuda:0"`,
            `"rank:1/cpu"`; or a `WorkerInfo`.
        module_cls: a class of modules, or a function that creates one.
        args: its positional arguments.
        kwargs: its arguments by name.
        restore: recreate the module if its worker is lost. The next use of the handle, or `recover()`, then waits for a
            worker of the same name, creates the module there, and calls `restore(module)`. With `True` the module stays
            as it was created.

    Raises:
        UsageError: `remote_device` is no place for a module; `module_cls`, `args` or `kwargs` have a wrong type.
        ValueError: `module_cls` does not create a module.
        Exception: the exception raised by `module_cls` there.

    Example:
        >>> layer = telegrad.nn.RemoteModule("worker1", nn.Linear, (4, 2))
        >>> with torch.no_grad():
        ...     layer(torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """

    module_rref: RRef[Any]
    on: str  # name of the worker that has the module
    device: str  # the module's device on that worker
    is_device_map_set: bool  # this worker has a device map to it
    training: bool
    _signature: inspect.Signature | None = None
    _hints = True  # warn if gradients are lost
    _trains = True  # the module has parameters that require gradients
    _represented: Id | None = None  # the value that the other attributes describe
    _surplus = ""  # suffix of its name in a model that the names of its parts in that model do not have
    # Of a stage whose parameters are not in the order of the undivided model: its number, and the positions there.
    _order: tuple[int, Mapping[str, int] | None] = (0, None)

    def __init__(
        self,
        remote_device: str | WorkerInfo,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        restore: Restore = False,
    ) -> None:
        super().__init__()
        worker, device = parse_place(remote_device)
        there = device or torch.device("cpu")
        _check_maker(module_cls, args, kwargs)
        check_restore(restore)
        given = module_cls, there, tuple(args or ()), dict(kwargs or {})
        owner = f"rank {worker}" if isinstance(worker, int) else worker
        kind = getattr(module_cls, "__qualname__", module_cls)
        with report_in_background(
            Wait("RemoteModule", lambda: f"RemoteModule: {owner!r} creates a {kind}", lambda: [owner])
        ):
            self._represent(*rpc_sync(worker, module_host.make_reference, given))
        if restore is not False:
            self.module_rref = make_restorable(self.module_rref, module_host.make, given, {}, restore)
        self._signature = _signature_of(module_cls)

    @classmethod
    def init_from_module_rref(cls, remote_device: str | WorkerInfo, module_rref: RRef[Any]) -> Self:
        """Return a handle of an existing module.

        Args:
            remote_device: the worker that has the module; with a device, the module is moved to that device.
            module_rref: a reference to the module.

        Returns:
            The handle.

        Raises:
            UsageError: the module is on another worker.
        """
        worker, device = parse_place(remote_device)
        if not isinstance(module_rref, RRef):
            checks.raise_invalid("module_rref", "a reference to a module", module_rref)
        owner = module_rref.owner()
        if worker not in owner:
            place = checks.short_repr(worker)
            raise UsageError(f"remote_device: {module_rref!r} is not on worker {place}, but on {owner.name!r}: name it")
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._represent(module_rref, *rpc_sync(owner, module_host.adopt, (module_rref, device)))
        return made

    def _represent(self, module: RRef[nn.Module], kind: str, device: str, training: bool, trains: bool) -> None:
        self.module_rref = module
        self._represented = module._handle.id
        self.on = module.owner_name()
        self.device = device
        self.is_device_map_set = module._table.agent.maps_devices_to(self.on)
        # This goes into the dictionary, because `__setattr__` would refuse the name when a module was made again.
        self.__dict__["training"] = training
        self._trains = trains
        self._kind = kind

    def recover(self, timeout: float = DEFAULT) -> None:
        """Ensure that the module exists: if it was lost with its worker, wait for the worker and recreate the module.

        A recreated module has its previous device, the mode of this handle, and the parameters that `restore` sets.

        Args:
            timeout: seconds; 0 for no limit. The default is in the options.

        Raises:
            CannotRestore: it was made without `restore`.
            OwnerLost: its worker did not come back in time.
        """
        check_timeout(timeout)
        ensure_present(self.module_rref, timeout)
        if self._represented != self.module_rref._handle.id:  # it was recreated, now or by an earlier use
            mode = self.training
            there = self.module_rref, torch.device(self.device)
            self._represent(self.module_rref, *rpc_sync(self.module_rref.owner_name(), module_host.adopt, there))
            self.train(mode)

    # Calls

    @not_compiled
    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        except BaseException as error:
            fold(error)
            raise

    @property
    def forward(self) -> Callable[..., Any]:  # type: ignore[override]
        """Run the module on its worker and return its result; the arguments are those of the module's `forward`."""
        return self._bound(rpc_sync, self.module_rref._call)

    @property
    def forward_async(self) -> Callable[..., Future[Any]]:
        """As `forward`, but return a future."""
        return self._bound(rpc_async, self.module_rref._call_async)

    def _bound(self, run: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            loses = self._hints and gradients_are_lost(self._trains and self.training, args, kwargs)
            # A module on the CPU is called like any referenced value. For a module on an accelerator, the owner moves
            # arguments and results.
            if self.device == "cpu":
                value = call("", DEFAULT, args, kwargs, self)
            else:
                given = self.module_rref, self.device, self.is_device_map_set, args, kwargs
                value = run(self.module_rref.owner_name(), module_host.run_on_device, given)
            if loses:  # after the call, whose error matters more
                hint_at_context(f"{self._kind} on worker {self.on!r}")
            return value

        if self._signature is not None:
            forward.__signature__ = self._signature  # type: ignore[attr-defined]
        return forward

    @property
    def _telegrad_known_as(self) -> str:
        return f"RemoteModule({self._kind}).forward"

    def get_module_rref(self) -> RRef[Any]:
        """Return a reference to the module itself."""
        return self.module_rref

    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """Return references to the module's parameters, for `DistributedOptimizer`.

        Args:
            recurse: include the parameters of its parts.

        Returns:
            One reference for each.
        """
        checks.flag("recurse", recurse)
        parameters: list[RRef[nn.Parameter]] = self._there(module_host.parameters_of, recurse)
        return parameters

    # Operations on the whole module

    def train(self, mode: bool = True) -> Self:
        """Set the module's training mode."""
        checks.flag("mode", mode)
        self.__dict__["training"] = mode
        return self._have("train", mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Implement `to`, `cuda`, `double` and similar methods of this handle, or of a module that contains it."""
        self.device = self._there(module_host.apply_to_tensors, fn, recurse)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call `fn` with each part of the module, on its worker."""
        checks.function("fn", fn, "a function of a module")
        return self._have("apply", fn)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set whether the module's parameters record gradients."""
        checks.flag("requires_grad", requires_grad)
        self._trains = requires_grad
        return self._have("requires_grad_", requires_grad)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the `.grad` of the module's parameters; autograd contexts have separate gradients."""
        checks.flag("set_to_none", set_to_none)
        self._have("zero_grad", set_to_none)

    def _there(self, function: Callable[..., Any], *args: Any) -> Any:
        return rpc_sync(self.module_rref.owner_name(), function, (self.module_rref, *args))

    def _have(self, method: str, *args: Any) -> Self:
        self._there(module_host.call, method, args)
        return self

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return a copy of the module's state; for a handle inside another module, add it to that module's state."""
        checks.flag("keep_vars", keep_vars)
        checks.text("prefix", prefix, empty=True)
        if args or keep_vars:
            raise UsageError("a RemoteModule's state is a copy: keep_vars and positional arguments are not supported")
        # A checkpoint saves this module as a branch of its own, from its worker (module_tree.py).
        if destination is not None and _apart.get():
            return destination
        for before in self._state_dict_pre_hooks.values():
            before(self, prefix, keep_vars)
        state: Any = self._there(module_host.state_of, prefix, self.is_device_map_set)
        about = state._metadata
        if destination is None:
            destination = state
        else:
            destination.update(state)
            if hasattr(destination, "_metadata"):
                destination._metadata.update(about)
        for after in self._state_dict_hooks.values():
            changed = after(self, destination, prefix, about.get(prefix[:-1], {}))
            destination = destination if changed is None else changed
        return destination

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Implement `load_state_dict` of this handle, or of a module that contains it."""
        if _apart.get():
            return
        for before in self._load_state_dict_pre_hooks.values():
            before(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        own = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        assign = bool(local_metadata.get("assign_to_params_buffers", False))
        # torch gives the versions of all parts to the outermost module only, and to each other one its own.
        versions = getattr(state_dict, "_metadata", None) or {"": local_metadata}
        missing, unexpected, error = self._there(module_host.load, own, versions, assign)
        missing_keys.extend(prefix + name for name in missing)
        if strict:
            unexpected_keys.extend(prefix + name for name in unexpected)
        if error:
            error_msgs.append(f"on worker {self.on!r}: {error}")

    # Unsupported methods

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Not supported: see `remote_parameters`."""
        self._refuse("parameters", "Please use ``remote_parameters`` instead, or DistributedOptimizer.for_module")

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Not supported: see `remote_parameters` and `state_dict`."""
        self._refuse("named_parameters", "Use ``remote_parameters``, or ``state_dict`` for copies with their names")

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """Not supported: see `state_dict`."""
        self._refuse("buffers", "Use ``state_dict`` for copies")

    def named_buffers(self, *_: Any, **__: Any) -> Iterator[tuple[str, Tensor]]:
        """Not supported: see `state_dict`."""
        self._refuse("named_buffers", "Use ``state_dict`` for copies")

    def register_buffer(self, name: str, *_: Any, **__: Any) -> None:
        """Not supported: do it in the module's constructor."""
        self._refuse("register_buffer")

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Not supported: do it in the module's constructor."""
        self._refuse("register_parameter")

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Not supported: do it in the module's constructor."""
        self._refuse("add_module")

    def _refuse(self, method: str, instead: str = "") -> NoReturn:
        instead = (
            instead or f"Do it in the module's constructor, or call ``get_module_rref().rpc_sync().{method}(...)``"
        )
        raise UsageError(f"Method ``{method}`` not supported for RemoteModule. {instead}")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"RemoteModule has no attribute {name!r}. Methods of the module itself are called by "
                f"``get_module_rref().rpc_sync().{name}(...)``; for copies of its parameters, see ``state_dict()``"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        is_mode = name == "training"
        if type(self) is RemoteModule and "_kind" in self.__dict__ and (is_mode or isinstance(value, nn.Module)):
            there = "set it in a function that is called there with get_module_rref(), on its local_value()"
            raise UsageError(
                f"{name!r} would be set here, and not in the {self._kind} on worker {self.on!r}: "
                f"{'call train() or eval()' if is_mode else there}"
            )
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC. To save or "
            "copy the module, use its ``state_dict()``"
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise UsageError(
            "a RemoteModule cannot be copied, as copy.deepcopy and torch.optim.swa_utils.AveragedModel do: the "
            f"{self._kind} lives on worker {self.on!r}. Create the copy there, in a function that is called with "
            "get_module_rref() and uses its local_value(); or load_state_dict(module.state_dict()) into another one"
        )

    def extra_repr(self) -> str:
        """Return the module's type and place."""
        return f"{self._kind} on {self.on}/{self.device}"


def _reduce(pickler: Any, module: RemoteModule) -> Any:
    told = (module.module_rref, module._kind, module.device, module.training, module._trains)
    return _arrive, (type(module), told)


def _arrive(kind: type[RemoteModule], about: tuple[Any, ...]) -> RemoteModule:
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    made._represent(*about)
    return made


REDUCERS[RemoteModule] = _reduce


def _signature_of(module_cls: Any) -> inspect.Signature | None:
    try:
        signature = inspect.signature(module_cls.forward)
    except (AttributeError, TypeError, ValueError):
        return None
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _check_maker(module_cls: Any, args: Any, kwargs: Any) -> None:
    if isinstance(module_cls, nn.Module):
        raise UsageError(
            "RemoteModule takes a class or a function that creates the module there, not a module: write "
            f"RemoteModule(place, {type(module_cls).__name__}, args, kwargs). To use the state of an existing "
            "module: RemoteModule(...).load_state_dict(module.state_dict())"
        )
    if not callable(module_cls):
        raise UsageError(
            "RemoteModule takes a class, or a function that creates the module (module_cls), not "
            f"{checks.short_repr(module_cls)}"
        )
    if not isinstance(args, (tuple, list, type(None))):
        meant = "kwargs={...} for arguments by name" if isinstance(args, Mapping) else "(value,), with a comma"
        raise UsageError(f"the args of a RemoteModule must be a tuple, not {checks.short_repr(args)}: write {meant}")
    if kwargs is not None:
        as_dict(kwargs)


def gradients_are_lost(trains: bool, *inputs: Any) -> bool:
    """Return True if a module on another worker should get or pass on gradients, but no context is open.

    `trains`: it has parameters to be trained.
    """
    # The context in which this code was entered may have ended meanwhile.
    if not torch.is_grad_enabled():
        return False
    if (id_ := entered_id()) is not None and current.conductor().contexts.join(id_) is not None:
        return False
    return trains or any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(inputs))


def hint_at_context(what: str) -> None:
    """Warn that a module was called outside of a context, and loses its gradients."""
    hint(
        "no context",
        f"{what} was called outside of an autograd context: no gradients will flow through it, neither to its own "
        "parameters nor to earlier operations. Call it inside of `with telegrad.autograd.context() as context_id:`. "
        "If no gradients are wanted, call it inside of `with torch.no_grad():`, or after eval()",
    )
