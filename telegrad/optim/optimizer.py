"""An optimizer for parameters on several workers. It keeps the hyperparameters; the owners of the parameters step."""

import copy
import pickle
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from threading import get_ident
from typing import Any, NoReturn, Self
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer

from telegrad._core import checks
from telegrad._core.calls.call_names import not_compiled
from telegrad._core.calls.settings import DEFAULT, check_timeout
from telegrad._core.membership.members import listed
from telegrad._core.modules.module_tree import Model, RemotePart, branches, by_owner
from telegrad._core.modules.remote_module import RemoteModule
from telegrad._core.pickling.remote_text import folded
from telegrad._core.rpc.joint_calls import call_all, call_owners
from telegrad._core.rpc.remote_calls import rpc_async
from telegrad._core.rpc.restorable import ensure_present
from telegrad._core.rpc.rref import RRef
from telegrad._core.texts import hint
from telegrad._core.worker import current
from telegrad.autograd.contexts import Inside
from telegrad.autograd.passes import FusedStep, StepResults
from telegrad.errors import ContextEnded, InvalidArgument, TelegradError, UsageError
from telegrad.optim.fused_step import NOTHING, Clipped, Done, already_stepped, check_norms, has_hooks_before, is_plain
from telegrad.optim.owner import (
    Hyperparameters,
    LocalOptimizer,
    add_group,
    agreed,
    ask,
    changed,
    check_maker,
    check_new,
    hyperparameters,
    import_tracer,
    may_import,
    user_name,
)

_FOR_ALL = "Write DistributedOptimizer.for_module(optimizer_class, model) for all parameters of a model"
_GROUP = "a dictionary with references under 'params'"
_GROUPS = "the list of dictionaries under 'param_groups' of a state"


@folded
class DistributedOptimizer(Optimizer):
    """Run an optimizer on each worker that owns some of the parameters, with the gradients of an autograd context.

    This class is a `torch.optim.Optimizer`: schedulers of `torch.optim.lr_scheduler` work on it, and changes of
    `param_groups` reach the owners with the next `step`. Optimizers that share parameters step one after another.

    Args:
        optimizer_class: any optimizer that needs no closure. Each owner calls it with its parameters, `args` and
            `kwargs`.
        params_rref: references to parameters, or to modules for all of their parameters. Or parameter groups:
            dictionaries with these under `"params"`. `for_module` finds the references of a model.
        *args: for `optimizer_class`.
        hogwild: a step does not break backward passes of other contexts that have already used the parameters. They use
            the changed parameters, as asynchronous training does. By default they fail, as local autograd does after a
            change of a tensor that it needs.
        **kwargs: for `optimizer_class`.

    Raises:
        UsageError: `optimizer_class` needs a closure, there is no parameter, or a parameter is given twice.
        Exception: the error of `optimizer_class` on an owner; WorkersFailed if several owners failed.

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
        self.locals: dict[str, RRef[LocalOptimizer]] = {}  # by worker
        self._step_id = secrets.randbits(63)  # the number by which passes find the owners' parts
        self._pending_steps: WeakSet[_PendingStep] = WeakSet()  # after a failed pass, until garbage collection
        self._keeps = False  # owners may have kept gradients for the next step
        # By thread and context id, for the call of `step` that follows. Each use of this and the next is atomic.
        self._done: dict[tuple[int, int], Done] = {}
        self._stepped: set[int] = set()  # ids of contexts that may go on, with passes that have stepped
        self._names: dict[str, set[str]] = {}  # of the parameters of each worker
        self._sent: list[Hyperparameters] = []  # the hyperparameters at the owners, by group
        self._members: list[list[RemotePart]] = []  # of each group
        self._model: Model | None = None  # the model that the first group was made from
        if isinstance(params_rref, nn.Module):
            raise UsageError(
                f"DistributedOptimizer takes references to parameters, not {type(params_rref).__name__}. {_FOR_ALL}"
            )
        several = [params_rref] if isinstance(params_rref, RRef | dict) else params_rref
        several = checks.several("params_rref", several, "a list of references to parameters or modules")
        if not several:
            raise InvalidArgument(
                f"there is no parameter to optimize: the list of references (params_rref) is empty. {_FOR_ALL}"
            )
        # torch's constructor calls `add_param_group`, which makes the parts at the owners. Only the owners know the
        # defaults.
        super().__init__(several, {})
        self.defaults: dict[str, Any] = {**self._sent[0]}

    @classmethod
    def for_module(
        cls, optimizer_class: Callable[..., Optimizer], module: Model, *args: Any, hogwild: bool = False, **kwargs: Any
    ) -> Self:
        """Create an optimizer for all parameters of a model, on this and other workers.

        The parameters of `RemoteModule`s and references that modules hold as attributes are included, recursively
        across workers.

        Args:
            optimizer_class: any optimizer that needs no closure.
            module: an `nn.Module`, a `RemoteModule`, a `Pipeline` or a reference to a module.
            *args: for `optimizer_class`.
            hogwild: as for the class.
            **kwargs: for `optimizer_class`.

        Returns:
            The optimizer.
        """
        made = cls(optimizer_class, [{"params": [*branches(module)]}], *args, hogwild=hogwild, **kwargs)
        made._model = module
        return made

    @not_compiled
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters with its own hyperparameters; raise InvalidArgument if it has one of another."""
        if "params" not in checks.mapping("param_group", param_group, _GROUP):
            checks.raise_invalid("param_group", _GROUP, param_group)
        params = param_group["params"]
        several = [params] if isinstance(params, RRef) else checks.several("params", params, "a list of references")
        first = sum(len(group["params"]) for group in self.param_groups)
        members = [  # members without a name are named by their position among all
            each if isinstance(each, RemotePart) else RemotePart(str(position), _reference(each), (position,))
            for position, each in enumerate(several, first)
        ]
        if not all(isinstance(each, RemotePart) for each in several):  # before any owner adds a part of the group
            call_all(
                by_owner(members), lambda worker, own: rpc_async(worker, check_new, (self.locals.get(worker), own))
            )
        names, options = self._share_out(len(self._sent), members, hyperparameters(param_group))
        self._sent.append(copy.deepcopy(options))
        self._members.append(members)
        self.param_groups.append({"params": [branch.root for branch in members], "param_names": names, **options})

    def _share_out(
        self, number: int, members: list[RemotePart], options: Hyperparameters
    ) -> tuple[list[str], Hyperparameters]:
        """Add a group at the owners. Return the names of its parameters, and the options with the defaults."""
        by_worker = by_owner(members)
        if may_import(self._maker[0]):  # the import takes seconds, which must not count against a timeout
            call_all(
                by_worker,
                lambda worker, _: rpc_async(worker, import_tracer, timeout=0),
                "DistributedOptimizer: importing torch's compiler",
            )
        added = call_all(
            by_worker,
            lambda worker, own: rpc_async(
                worker, add_group, (self.locals.get(worker), self._step_id, self._maker, number, own, options)
            ),
        )
        placed: list[tuple[tuple[int, ...], str]] = []
        for worker, (local, own, settled) in added.items():
            if not own:
                continue  # do not keep an empty part, which each step would call
            self.locals[worker] = local
            self._names.setdefault(worker, set()).update(name for _, name in own)
            placed += own
            options = settled
        if not placed:
            raise UsageError("there is no parameter to optimize: the modules have none")
        return [name for _, name in sorted(placed)], options  # torch's optimizers load states by position

    def recover(self, timeout: float = DEFAULT) -> None:
        """Continue after workers were lost and restarted: all owners start again, with the current hyperparameters.

        Recover the model before, and load the optimizer's state afterwards: `telegrad.recover` does all of this.
        Pending steps of the failed batch no longer change anything.

        Args:
            timeout: seconds for each owner; 0 for no limit, default: the timeout in the options.

        Raises:
            CannotRestore: a parameter is lost, and there is no record of how to make it again.
        """
        check_timeout(timeout)
        # This comes before anything is made again. A step of the failed batch may still be under way to an owner that
        # is alive, and would change the restored parameters.
        with suppress(TelegradError):  # of owners that are dead, or die now
            call_all(self.locals, lambda _, local: ask(local, "retire"))
        if self._model is not None:
            self._members[0] = branches(self._model)
        for branch in {each.root._handle.id: each for members in self._members for each in members}.values():
            ensure_present(branch.root, timeout)
        # Because of the new number, passes that are still under way do not find the new parts.
        self._step_id = secrets.randbits(63)
        self.locals, self._names, self._keeps = {}, {}, False
        for number, (members, group) in enumerate(zip(self._members, self.param_groups, strict=True)):
            names, options = self._share_out(number, members, hyperparameters(group))
            self._sent[number] = copy.deepcopy(options)
            group.update(params=[branch.root for branch in members], param_names=names)

    # Stepping

    @not_compiled
    def step(self, context_id: int) -> None:  # type: ignore[override]
        """Make all owners apply the gradients of a context concurrently. Parameters without a gradient do not change.

        Args:
            context_id: the id from `with context() as context_id`.

        Raises:
            ContextEnded: the context does not exist.
            UsageError: a pass of the context has stepped already, `backward(..., step=optimizer)`.
            Exception: the optimizer's error on an owner; WorkersFailed if several failed. The others have stepped.
        """
        checks.context_id(context_id, "step")
        done = self._done.get((get_ident(), context_id), NOTHING)
        if done is NOTHING and context_id in self._stepped:
            raise already_stepped()
        # The values are forgotten before they are sent. If the step fails at some owner, it is unknown which owners
        # have them, and the next step sends them to all again.
        changes = self._sending(self._changes()) if done.changes is None else done.changes
        self._on_all("step", context_id, changes, done.factor, done=done)
        self._keeps = False
        for number, new in changes.items():
            self._sent[number].update(new)

    def _telegrad_fused(self, context_id: int) -> FusedStep:
        """For `backward(..., step=self)`: return a step that the owners take during the pass, if it is equivalent.

        An optimizer with a hook or an overridden method that may run before the step gets a step after the pass. So do
        changes of hyperparameters while another such step is pending: owners might apply them in another order.
        """
        changes = self._changes()
        plain = type(self).step is DistributedOptimizer.step and not has_hooks_before(self)
        if not plain or (changes and (self._pending_steps or not is_plain(changes))):
            # 0 is the number of no part. So no owner steps during the pass, and the whole step follows it.
            return FusedStep(0, b"", lambda _: self._finish(context_id, Done()))
        fused, request = _PendingStep(), pickle.dumps(("step", self._sending(changes)), 5)
        self._pending_steps.add(fused)

        def end(stepped: StepResults) -> None:
            try:
                self._finish(context_id, Done(stepped, changes))
            finally:
                self._pending_steps.discard(fused)

        return FusedStep(self._step_id, request, end)

    def _finish(self, context_id: int, done: Done) -> None:
        """Take a step that a pass has partly done."""
        # Ids of ended contexts are dropped here, so that the set does not grow: such a context cannot step again.
        self._stepped -= {each for each in self._stepped.copy() if current.conductor().contexts.has_ended(each)}
        self._stepped.add(context_id)
        # The step goes through `step`, so that overridden methods, hooks and schedulers see it like any other. `_done`
        # has the results of the pass so far.
        self._done[get_ident(), context_id] = done
        try:
            self.step(context_id)
        finally:
            del self._done[get_ident(), context_id]

    def clipped(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Clipped:
        """For `backward(..., step=optimizer.clipped(1.0))`: clip gradients as `clip_grad_norm_` does, then step.

        Args:
            max_norm: the largest norm over all workers.
            norm_type: the order of the norm.
            error_if_nonfinite: raise if the norm is infinite or not a number.

        Returns:
            A reusable `step` argument for `backward`. Its `norm` is the norm of the last gradients before clipping.
        """
        check_norms(max_norm, norm_type, error_if_nonfinite)
        return Clipped(self, max_norm, norm_type, error_if_nonfinite)

    @not_compiled
    def accumulate(self, context_id: int) -> None:
        """Keep the gradients of a context: the next step or clipping adds them to those of its context.

        Args:
            context_id: the id from `with context() as context_id`.
        """
        checks.context_id(context_id, "accumulate")
        self._keeps = True
        self._on_all("accumulate", context_id)

    def _on_all(self, method: str, context_id: int, *args: Any, done: Done = NOTHING) -> None:
        contexts = current.conductor().contexts
        if contexts.has_ended(context_id):  # the owners may not know this yet
            text = f"the autograd context with id: {context_id} has ended: call {method}() inside its `with` block"
            raise contexts.error_of(context_id, text)
        # The calls do not join the context, unless owners with kept gradients may have to join it.
        with nullcontext() if self._keeps else Inside(None):
            outcomes = call_owners(self.locals, method, (context_id, *args), user_name(method), done.stepped).values()
        context = contexts.get(context_id)
        # An owner may know nothing of the context, because no pass has reached it. That is an error only if no worker
        # does.
        if context is None and not any(knows for knows, _ in outcomes):
            raise ContextEnded(
                f"no owner of these parameters knows an autograd context with id: {context_id}. It has ended, or they "
                "took no part in it; call this inside its `with` block"
            )
        found = {found for _, found in outcomes}
        if True not in found and found != {None}:  # None: all parameters of the owner are frozen
            cause = (
                "probably the loss does not depend on them, or they were used outside of the context"
                if context is not None and context.accumulated
                else "this worker has run no backward pass in it. Run telegrad.autograd.backward(context_id, loss) "
                "first; loss.backward() does not cross workers"
            )
            text = f"none of the parameters has a gradient in this context, so {method}() did nothing: {cause}"
            hint("no gradients", text)

    def _changes(self) -> dict[int, Hyperparameters]:
        """Return a copy of the values that changed in the groups since the last step, by group number."""
        groups = enumerate(self.param_groups)
        return {number: new for number, group in groups if (new := changed(group, self._sent[number]))}

    def _sending(self, changes: dict[int, Hyperparameters]) -> dict[int, Hyperparameters]:
        """Forget the owners' values of these names until all owners have received the changes."""
        for number, new in changes.items():
            for name in new:
                self._sent[number].pop(name, None)
        return changes

    def zero_grad(self, set_to_none: bool = True) -> NoReturn:
        """Not supported: gradients belong to the context and go with it."""
        raise UsageError(
            "DistributedOptimizer has no gradients to set to zero: they belong to the autograd context and end with "
            "it. Use a new context for each step"
        )

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, by names in the order of the parameters, for any distribution of them."""
        has_map = current.agent().maps_devices_to
        states = call_all(self.locals, lambda worker, local: ask(local, "state", has_map(worker)))
        state = {name: state for own in states.values() for name, state in own.items()}
        return {"state": state, "param_groups": self.state_groups()}

    def state_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups as in `state_dict`: with names, and with the values in the owners' optimizers.

        Raises:
            UsageError: the owners of a group have different values.
        """
        has_map = current.agent().maps_devices_to
        kept = call_all(self.locals, lambda worker, local: ask(local, "kept", has_map(worker)))
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
        """Load a state from `state_dict`, for any distribution of the parameters.

        Raises:
            UsageError: the state is for other parameters, or of an optimizer with other hyperparameters.
        """
        wanted = "a dictionary that state_dict() gave"
        if not {"param_groups", "state"} <= checks.mapping("state_dict", state_dict, wanted).keys():
            checks.raise_invalid("state_dict", wanted, state_dict)
        state = checks.mapping("state_dict['state']", state_dict["state"], "a dictionary by the names of parameters")
        self.load_groups(state_dict["param_groups"], state)
        shares = {
            worker: {name: state[name] for name in names if name in state} for worker, names in self._names.items()
        }
        call_all(shares, lambda worker, own: ask(self.locals[worker], "load", own))

    def load_groups(self, groups: list[dict[str, Any]], state: Iterable[str] = ()) -> None:
        """Load the hyperparameters of a state. The owners get them with the next step.

        Args:
            groups: the `"param_groups"` of a state.
            state: the names in its `"state"`.

        Raises:
            UsageError: the groups are for other parameters, or of an optimizer with other hyperparameters.
        """
        self._check_groups(groups, state)
        for own, group in zip(self.param_groups, groups, strict=True):
            own.update(hyperparameters(group))
        self._sending(dict(enumerate(map(hyperparameters, groups))))  # owners may have changed the sent values

    def _check_groups(self, groups: list[dict[str, Any]], state: Iterable[str] = ()) -> None:
        for group in checks.several("groups", groups, _GROUPS):
            if not isinstance(group, Mapping) or not checks.is_iterable(group.get("params")):
                checks.raise_invalid("groups", _GROUPS, group)
        ours = {name for group in self.param_groups for name in group["param_names"]}
        theirs = {name for group in groups for name in group["params"]}.union(checks.several("state", state, "names"))
        named = [set(group["param_names"]) for group in self.param_groups]
        if theirs != ours or [set(group["params"]) for group in groups] != named:
            sides = (("the state", theirs - ours), ("the optimizer", ours - theirs))
            only = [f"; only {side} has {listed(sorted(map(str, more)))}" for side, more in sides if more]
            raise UsageError(
                f"this state has other parameters{''.join(only) or ' in a group'}"
                + ". A state of torch's optimizers has positions: write names" * (int in map(type, theirs))
            )
        for number, (own, group) in enumerate(zip(self.param_groups, groups, strict=True)):
            # Names on one side only are allowed: schedulers and newer versions of torch add some.
            if (lacks := self.defaults.keys() - group.keys()) and (more := hyperparameters(group).keys() - own.keys()):
                owners = ", ".join(each for each, names in self._names.items() if names & {*group["params"]})
                raise UsageError(
                    f"this state is of another optimizer than {checks.short_repr(self._maker[0])} on {owners}: in "
                    f"group {number}, only the state has {sorted(more)}, and only the optimizer {sorted(lacks)}"
                )

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> NoReturn:
        """Not supported, like the hooks for loading: the state is on the workers."""
        raise UsageError(
            "DistributedOptimizer does not support state hooks: change the result of state_dict(), or what is loaded"
        )

    register_state_dict_post_hook: Any = register_state_dict_pre_hook
    register_load_state_dict_pre_hook: Any = register_state_dict_pre_hook
    register_load_state_dict_post_hook: Any = register_state_dict_pre_hook

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError("a DistributedOptimizer cannot be sent or copied: wrap it in an RRef, or save state_dict()")


class _PendingStep:
    """Represents a pending step that is fused with a pass."""


def _reference(given: Any) -> RRef[Any]:
    if isinstance(given, RRef):
        return given
    if isinstance(given, RemoteModule):
        return given.get_module_rref()
    if isinstance(given, (list, tuple)):
        raise UsageError("DistributedOptimizer takes one list of references, not a list of lists: use [*these, *those]")
    raise UsageError(
        f"DistributedOptimizer takes references to parameters (params_rref), not {checks.short_repr(given)}. Wrap "
        "one of this worker in an RRef, or give the whole model to DistributedOptimizer.for_module"
    )
