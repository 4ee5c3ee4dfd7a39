"""One optimizer for parameters on several workers: it keeps the hyperparameters, the workers do the rest."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer

from telegrad._core import checks
from telegrad._core.calls.call_names import known_as
from telegrad._core.calls.compiling import not_compiled
from telegrad._core.calls.deadlines import DEFAULT, check_timeout
from telegrad._core.calls.futures import Future
from telegrad._core.hints import hint
from telegrad._core.modules.module_tree import Branch, Model, branches
from telegrad._core.modules.remote_module import RemoteModule
from telegrad._core.rpc.api import rpc_async
from telegrad._core.rpc.joint_calls import together
from telegrad._core.rpc.references import RRef
from telegrad._core.rpc.restorable import revive
from telegrad._core.worker import current
from telegrad.autograd.engine.record import Inside
from telegrad.errors import ContextEnded, InvalidArgument, TelegradError, UsageError
from telegrad.optim.local import Hyperparameters, LocalOptimizer, agreed, ask, changed, check_maker, hyperparameters
from telegrad.optim.norms import check_norms
from telegrad.optim.riding import Clipped, Done, StepRide, Whole, has_hooks_before, may_ride
from telegrad.optim.untraced import import_tracer, may_import

if TYPE_CHECKING:
    from typing import Self

_GROUP = "a dictionary with references under 'params'"
_GROUPS = "the list of dictionaries under 'param_groups' of a state"


class DistributedOptimizer(Optimizer):
    """Runs an optimizer on each worker that owns some of the parameters, with the gradients of an autograd context.

    It is a `torch.optim.Optimizer` itself: schedulers of `torch.optim.lr_scheduler` work on it, and changes to
    `param_groups` reach the owners with the next `step`. Several may share parameters: their steps take turns.

    Args:
        optimizer_class: any optimizer that needs no closure; called on each owner with its parameters, `args` and
            `kwargs`.
        params_rref: references to parameters, or to modules for all of theirs; or parameter groups, dictionaries with
            such under `"params"`. `for_module` finds those of a model.
        *args: for `optimizer_class`.
        hogwild: a step does not spoil the backward passes of other contexts that have used the parameters already; they
            go on with the parameters as they are then, as asynchronous training does. Without, they fail, as local
            autograd does when a tensor that it needs was changed.
        **kwargs: for `optimizer_class`.

    Raises:
        UsageError: `optimizer_class` needs a closure, or there is no parameter.
        Exception: what `optimizer_class` raises on an owner; WorkersFailed where it does so on several.

    Example:
        >>> from telegrad import autograd, optim
        >>> layer = telegrad.nn.RemoteModule("worker1", nn.Linear, (4, 1))
        >>> optimizer = optim.DistributedOptimizer.for_module(torch.optim.SGD, layer, lr=0.1)
        >>> with autograd.context() as context_id:
        ...     autograd.backward(context_id, layer(torch.ones(8, 4)).mean())
        ...     optimizer.step(context_id)
    """

    def __init__(
        self,
        optimizer_class: Callable[..., Optimizer],
        params_rref: Iterable[RRef[Any]] | Iterable[dict[str, Any]],
        *args: Any,
        hogwild: bool = False,
        **kwargs: Any,
    ) -> None:
        check_maker(optimizer_class)
        checks.flag("hogwild", hogwild)
        self._maker = (optimizer_class, args, kwargs, hogwild)
        self.locals: dict[str, RRef[LocalOptimizer]] = {}  # by their workers
        self._rider = secrets.randbits(63)  # under which passes know the owners' shares
        self._rides: WeakSet[StepRide] = WeakSet()
        self._keeps = False  # owners may have kept gradients for the next step
        self._done: dict[int, Done] = {}  # by contexts, for the call of `step` that follows; each use is atomic
        self._names: dict[str, set[str]] = {}  # of the parameters of each worker
        self._sent: list[Hyperparameters] = []  # what the owners have, by group
        self._members: list[list[Branch]] = []  # of each group
        self._model: Model | None = None  # whose branches the first group has
        super().__init__(_checked(params_rref), {})
        self.defaults: dict[str, Any] = {**self._sent[0]}

    @classmethod
    def for_module(
        cls,
        optimizer_class: Callable[..., Optimizer],
        module: Model,
        *args: Any,
        hogwild: bool = False,
        **kwargs: Any,
    ) -> Self:
        """An optimizer of all parameters of a model: of its own modules, and of those on other workers.

        What its modules hold as attributes belongs to it, too: `RemoteModule`s and references to modules and
        parameters, from worker to worker.

        Args:
            optimizer_class: any optimizer that needs no closure.
            module: an `nn.Module`, a `RemoteModule`, a `Pipeline` or a reference to a module.
            *args: for `optimizer_class`.
            hogwild: as for the class.
            **kwargs: for `optimizer_class`.

        Returns:
            The optimizer.
        """
        group = {"params": [*branches(module)]}
        made = cls(optimizer_class, [group], *args, hogwild=hogwild, **kwargs)
        made._model = module
        return made

    @not_compiled
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take on more parameters, with hyperparameters of their own."""
        checks.mapping("param_group", param_group, _GROUP)
        if "params" not in param_group:
            checks.wrong("param_group", _GROUP, param_group)
        members = self._branches(param_group["params"])
        names, options = self._share_out(len(self._sent), members, hyperparameters(param_group))
        self._sent.append(copy.deepcopy(options))
        self._members.append(members)
        self.param_groups.append({"params": [branch.root for branch in members], "param_names": names, **options})

    def _share_out(
        self, number: int, members: list[Branch], options: Hyperparameters
    ) -> tuple[list[str], Hyperparameters]:
        """Have the owners take on a group; the names of its parameters, and the options with the defaults."""
        by_worker: dict[str, list[Branch]] = {}
        for branch in members:
            by_worker.setdefault(branch.root.owner_name(), []).append(branch)
        if may_import(self._maker[0]):  # which takes seconds, and is not what a timeout is for
            together(
                by_worker,
                lambda worker, _: rpc_async(worker, import_tracer, timeout=0),
                "DistributedOptimizer: importing what torch compiles with",
            )
        added = together(by_worker, lambda worker, own: self._add(worker, number, own, options))
        names: list[str] = []
        for worker, (local, own_names, settled) in added.items():
            if not own_names:
                continue  # and no share, which each step would call
            self.locals[worker] = local
            self._names.setdefault(worker, set()).update(own_names)
            names += own_names
            options = settled
        if not names:
            raise UsageError(
                "there is no parameter to optimize: the modules have none, or this optimizer has all of them already"
            )
        return names, options

    def recover(self, timeout: float = DEFAULT) -> None:
        """Go on after workers were lost and have come back: all owners begin anew, with the hyperparameters of now.

        The model is to be recovered before, and the state loaded behind it: `telegrad.recover` does all of it. Steps
        that are still under way for what has failed change nothing any more.

        Args:
            timeout: seconds for each; 0 for no limit, left out that of the options.

        Raises:
            CannotRestore: a parameter is lost, and nothing says how to make it anew.
        """
        check_timeout(timeout)
        for future in [*self._retiring()]:
            with suppress(TelegradError):  # it is a dead one's, or has just died
                future.wait()
        if self._model is not None:
            self._members[0] = branches(self._model)
        for branch in {each.root._handle.id: each for members in self._members for each in members}.values():
            revive(branch.root, timeout)
        self._rider = secrets.randbits(63)
        self.locals, self._names, self._keeps = {}, {}, False
        for number, (members, group) in enumerate(zip(self._members, self.param_groups, strict=True)):
            names, options = self._share_out(number, members, hyperparameters(group))
            self._sent[number] = copy.deepcopy(options)
            group.update(params=[branch.root for branch in members], param_names=names)

    def _retiring(self) -> Iterator[Future[Any]]:
        for local in self.locals.values():
            with suppress(TelegradError):
                yield ask(local, "retire")

    def _branches(self, params: Any) -> list[Branch]:
        """The members of a group; those that come without a name are called by their position among all."""
        several = [params] if isinstance(params, RRef) else checks.several("params", params, "a list of references")
        first = sum(len(group["params"]) for group in self.param_groups)
        return [
            each if isinstance(each, Branch) else Branch(str(position), _reference(each))
            for position, each in enumerate(several, first)
        ]

    def _add(self, worker: str, number: int, own: list[Branch], options: Hyperparameters) -> Future[Any]:
        return rpc_async(worker, _add_group, (self.locals.get(worker), self._rider, self._maker, number, own, options))

    # Stepping

    @not_compiled
    def step(self, context_id: int) -> None:  # type: ignore[override]
        """Have all owners apply the gradients of a context, all at once; parameters without one stay as they are.

        Args:
            context_id: what `with context() as context_id` gives.

        Raises:
            ContextEnded: there is no such context.
            Exception: what the optimizer raised on a worker; WorkersFailed where it did so on several. The others have
                stepped.
        """
        checks.context_id(context_id, "step")
        done = self._done.get(context_id, Done())
        changes = self._sending(self._changes()) if done.changes is None else done.changes
        self._on_all("step", context_id, changes, done.factor, done=done.counts)
        self._keeps = False
        for number, new in changes.items():
            self._sent[number].update(new)

    def _telegrad_ride(self, context_id: int) -> StepRide:
        """For `backward(..., step=self)`: a step that the owners take by themselves, where nobody could tell.

        Not where a hook, or the method of a subclass, may do something before; nor with changes of
        hyperparameters where another such is under way: the owners might take them over in another order.
        """
        whole, changes = self._whole(), self._changes()
        plain = type(self).step is DistributedOptimizer.step and not has_hooks_before(self)
        if not plain or (changes and (self._rides or not may_ride(changes))):
            return StepRide(whole, context_id, None)
        return StepRide(whole, context_id, self._sending(changes))

    def _whole(self) -> Whole:
        return Whole(self._rider, self.locals, self._finish, self._rides)

    def _finish(self, context_id: int, done: Done) -> None:
        """Take a step, of which a pass has done a part."""
        self._done[context_id] = done
        try:
            self.step(context_id)
        finally:
            del self._done[context_id]

    def clipped(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Clipped:
        """For `backward(..., step=optimizer.clipped(1.0))`: gradients are clipped first, as `clip_grad_norm_` does.

        Args:
            max_norm: the largest norm over all workers.
            norm_type: which norm.
            error_if_nonfinite: raise where the norm is infinite or not a number.

        Returns:
            What `backward` takes, again and again; its `norm` is the one that the gradients had.
        """
        check_norms(max_norm, norm_type, error_if_nonfinite)
        return Clipped(self._whole, max_norm, norm_type, error_if_nonfinite)

    @not_compiled
    def accumulate(self, context_id: int) -> None:
        """Keep the gradients of a context: they are added to those of the context of the next step or clipping.

        Args:
            context_id: what `with context() as context_id` gives.
        """
        checks.context_id(context_id, "accumulate")
        self._keeps = True
        self._on_all("accumulate", context_id)

    def _on_all(self, method: str, context_id: int, *args: Any, done: Mapping[str, Future[Any]] = {}) -> None:
        checks.context_id(context_id, method)
        contexts = current.conductor().contexts
        if contexts.has_ended(context_id):  # the owners may not have heard of it yet
            raise ContextEnded(
                f"the autograd context with id: {context_id} has ended, and its gradients with it: "
                f"call {method}() inside of its `with` block"
            )
        # The calls are no part of the context, unless owners that have kept something may have to join it.
        with nullcontext() if self._keeps else Inside(None):
            counts = together(
                self.locals, lambda worker, local: done.get(worker) or ask(local, method, context_id, *args)
            ).values()
        if contexts.get(context_id) is None and all(count is None for count in counts):
            raise ContextEnded(
                f"no owner of these parameters knows an autograd context with id: {context_id}. It has ended, or they "
                "took no part in it; call this inside of its `with` block"
            )
        if not any(counts):
            hint(
                "no gradients",
                f"none of the parameters has a gradient in this context, so {method}() did nothing: run "
                "telegrad.autograd.backward(context_id, loss) before; loss.backward() does not cross workers",
            )

    def _changes(self) -> dict[int, Hyperparameters]:
        """Return a copy of the values that changed in the groups since the last step, by the groups' numbers."""
        pairs = enumerate(zip(self.param_groups, self._sent, strict=True))
        return {number: new for number, (group, sent) in pairs if (new := changed(group, sent))}

    def _sending(self, changes: dict[int, Hyperparameters]) -> dict[int, Hyperparameters]:
        """Until these have come to all owners, it is not known what they have."""
        for number, new in changes.items():
            for name in new:
                self._sent[number].pop(name, None)
        return changes

    def zero_grad(self, set_to_none: bool = True) -> NoReturn:
        """Not supported: gradients belong to the context and go with it."""
        raise UsageError(
            "DistributedOptimizer has no gradients to set to zero: they belong to the autograd context and go with it. "
            "Use a new context for each step"
        )

    # Its state

    def state_dict(self) -> dict[str, Any]:
        """A copy of the whole state, by the names of the parameters; of the same form on any number of workers."""
        has_map = current.agent().maps_devices_to
        states = together(self.locals, lambda worker, local: ask(local, "state", has_map(worker)))
        return {
            "state": {name: state for own in states.values() for name, state in own.items()},
            "param_groups": self.state_groups(),
        }

    def state_groups(self) -> list[dict[str, Any]]:
        """The parameter groups as a state has them: with names, and what the owners' optimizers keep in them.

        Raises:
            UsageError: the owners of a group keep different values.
        """
        has_map = current.agent().maps_devices_to
        kept = together(self.locals, lambda worker, local: ask(local, "kept", has_map(worker)))
        changes = self._changes()
        return [
            {
                **hyperparameters(group),
                **agreed(number, kept, changes.get(number, ())),
                "params": [*group["param_names"]],
            }
            for number, group in enumerate(self.param_groups)
        ]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state from `state_dict`, wherever the parameters are now.

        Raises:
            UsageError: it is of other parameters.
        """
        wanted = "a dictionary that state_dict() gave"
        checks.mapping("state_dict", state_dict, wanted)
        if not {"param_groups", "state"} <= state_dict.keys():
            checks.wrong("state_dict", wanted, state_dict)
        state = checks.mapping("state_dict['state']", state_dict["state"], "a dictionary by the names of parameters")
        self.load_groups(state_dict["param_groups"])
        shares = {
            worker: {name: state[name] for name in names if name in state} for worker, names in self._names.items()
        }
        together(shares, lambda worker, own: ask(self.locals[worker], "load", own))

    def load_groups(self, groups: list[dict[str, Any]]) -> None:
        """Take over the hyperparameters of a state; the owners hear of them with the next step.

        Args:
            groups: the `"param_groups"` of a state.

        Raises:
            UsageError: it is of other parameters.
        """
        for group in checks.several("groups", groups, _GROUPS):
            if not isinstance(group, Mapping) or "params" not in group:
                checks.wrong("groups", _GROUPS, group)
        if [set(group["params"]) for group in groups] != [set(group["param_names"]) for group in self.param_groups]:
            ours = {name for group in self.param_groups for name in group["param_names"]}
            theirs = {name for group in groups for name in group["params"]}
            differ = sorted(ours ^ theirs)
            raise UsageError(
                "this state is of other parameters, or of others in each group"
                + (f"; of one side only: {', '.join(differ[:5])}{' ...' * (len(differ) > 5)}" if differ else "")
            )
        for own, group in zip(self.param_groups, groups, strict=True):
            own.update(hyperparameters(group))
        self._sending(dict(enumerate(map(hyperparameters, groups))))  # owners may have changed what they were given

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> NoReturn:
        """Not supported, as are the hooks of loading: the state is on the workers."""
        raise UsageError(
            "DistributedOptimizer calls no hooks of its state: change what state_dict() gives, or what is loaded"
        )

    register_state_dict_post_hook = register_state_dict_pre_hook
    register_load_state_dict_pre_hook = register_load_state_dict_post_hook = register_state_dict_pre_hook

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            "a DistributedOptimizer cannot be sent or copied: wrap it in an RRef to use it from elsewhere, or save its "
            "state_dict()"
        )


def _checked(params: Any) -> Any:
    """What `torch.optim.Optimizer` can take for parameters or for their groups."""
    for_all = "Write DistributedOptimizer.for_module(optimizer_class, model) for all parameters of a model"
    if isinstance(params, nn.Module):
        raise UsageError(f"DistributedOptimizer takes references to parameters, not {type(params).__name__}. {for_all}")
    if isinstance(params, RRef | dict):
        return [params]
    several = checks.several("params_rref", params, "a list of references to parameters or modules")
    if not several:
        raise InvalidArgument(
            f"there is no parameter to optimize: the list of references (params_rref) is empty. {for_all}"
        )
    return several


def _reference(given: Any) -> RRef[Any]:
    if isinstance(given, RRef):
        return given
    if isinstance(given, RemoteModule):
        return given.get_module_rref()
    if isinstance(given, (list, tuple)):
        raise UsageError("DistributedOptimizer takes one list of references, not a list of lists: use [*these, *those]")
    raise UsageError(
        f"DistributedOptimizer takes references to parameters (params_rref), not {checks.shown(given)}. Wrap one of "
        "this worker in an RRef, or give the whole model to DistributedOptimizer.for_module"
    )


@known_as("DistributedOptimizer()")
def _add_group(
    local: RRef[LocalOptimizer] | None,
    rider: int,
    maker: Any,
    number: int,
    own: list[Branch],
    options: Hyperparameters,
) -> tuple[RRef[LocalOptimizer], list[str], Hyperparameters]:
    """On an owner: another group of its parameters, the first of which makes its optimizer."""
    if local is None:
        local = RRef(LocalOptimizer(*maker))
        current.conductor().riders[rider] = local.local_value()
    return (local, *local.local_value().add_group(number, own, options))
