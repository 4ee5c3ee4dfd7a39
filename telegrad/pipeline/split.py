"""Cut a model into consecutive stages. This module uses no workers.

A model that consists of `nn.Sequential`s down to the cuts is cut between their children. For any other model, the
forward pass is recorded (`exporting`), and cut where modules begin. Values that an early stage makes and a late one
needs pass through the stages between. With an example of the inputs, the stages are compared with the model
(`comparison`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from torch import Tensor, nn

from telegrad.errors import UsageError
from telegrad.ext.feedback import checks
from telegrad.pipeline.comparison import copied, verify_stages
from telegrad.pipeline.exported import Inputs, build_stages, set_by_name
from telegrad.pipeline.exporting import CutPoint, RecordedProgram

# index of an early stage, a parameter's name in it; index of a late stage, the name there
Shared = tuple[int, str, int, str]


class SplitModel(NamedTuple):
    """The stages of a model, with which they share parameters and buffers."""

    stages: list[nn.Module]
    parts: list[list[str]]  # the model's parts in each stage, by qualified names, which do not change
    ties: list[Shared]  # parameters of several stages
    inputs: Inputs | None  # of the first stage, if the forward pass was recorded


_AT = "a list of the names of modules"


def split_model(
    model: nn.Module,
    count: int,
    at: Sequence[str] | None = None,
    balance: Sequence[int] | None = None,
    example: Any = None,
    check: bool = True,
    chunks: int = 1,
) -> SplitModel:
    """Cut a model into `count` stages, `at` the modules of these names, or by numbers of children of a sequence; raise
    UsageError if the model cannot be cut this way, or not at all."""
    if not isinstance(model, nn.Module):
        checks.raise_invalid("model", "a module", model)
    if at is not None:
        at = [checks.text("at", name, _AT) for name in checks.several("at", at, _AT)]
    if balance is not None:
        balance = [checks.count("balance", each) for each in checks.several("balance", balance, "a list of numbers")]
    if at is not None and balance is not None:
        raise UsageError("give either `at` or `balance` to say where a model is cut, not both")
    if balance is not None:
        at = _counted(model, count, balance)
    elif at is not None:
        _check_names(model, count, at)
    elif _is_sequence(model):
        at = _even_in_chain(model, count, example is None)
    opened = {"", *(parent for name in at or () for parent in _parents(name))}
    inputs = None
    if at is not None and all(_is_sequence(model.get_submodule(name)) for name in opened):
        made = _chained(model, opened, at)
    else:
        made, inputs = _exported(model, count, at, example)
    stages, parts = [stage for stage, _ in made], [part for _, part in made]
    _add_rest(model, stages, parts)
    if check and example is not None:
        verify_stages(model, stages, inputs, example, chunks)
    return SplitModel(stages, parts, _shared(stages, nn.Module.named_parameters), inputs)


def _chained(model: nn.Module, opened: set[str], names: Sequence[str]) -> list[tuple[nn.Module, list[str]]]:
    _check_hooks(model, opened, backward_only=False)
    links = list(_links(model, "", opened))
    starts = _starts(
        names, {name: at for at, link in reversed([*enumerate(links)]) for name in (link, *_parents(link))}
    )
    made: list[tuple[nn.Module, list[str]]] = []
    for start, end in pairwise([0, *starts, len(links)]):
        stage = nn.Sequential()
        for name in links[start:end]:
            set_by_name(stage, name, model.get_submodule(name), nn.Sequential)
        stage.training = model.training
        made.append((stage, links[start:end]))
    for early, name, late, _ in _shared([stage for stage, _ in made], nn.Module.named_buffers):
        raise UsageError(
            f"{name!r} is used by the stages {[early, late]}: each stage would have its own copy and "
            "not see the changes of another. Use it in one stage only"
        )
    return made


def _exported(
    model: nn.Module, count: int, names: Sequence[str] | None, example: Any
) -> tuple[list[tuple[nn.Module, list[str]]], Inputs]:
    _check_hooks(model, dict(model.named_modules()), backward_only=True)
    inputs = Inputs(model, example)
    # A copy is recorded, since the forward pass may change buffers and Python state. Both modes are recorded from it,
    # and names, not objects, connect the recordings with the model.
    twin = copied(model)
    programs = {mode: _recorded(twin.train(mode), inputs, names) for mode in (model.training, not model.training)}
    inputs.guards = [guard for program in programs.values() for guard in program.guards]
    if names is None:
        names = _even(*programs[model.training].cut_points(), count)
    # A module may have several names, and the recording has the one by which it was called.
    same: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        same.setdefault(module, []).append(name)
    pieces = {}
    for mode, program in programs.items():
        begun = {name: at for own, at in program.first_operation.items() for name in same[model.get_submodule(own)]}
        pieces[mode] = program.cut(_starts(names, begun))
    return build_stages(model, pieces, {mode: program.outputs for mode, program in programs.items()}), inputs


def _add_rest(model: nn.Module, stages: Sequence[nn.Module], parts: Sequence[list[str]]) -> None:
    """Add other names of the tensors that a stage has; to the last stage, the state that no operation uses."""
    known = {name for part in parts for name in part}
    homes = {each: at for at, stage in [*enumerate(stages)][::-1] for each in (*stage.parameters(), *stage.buffers())}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            whole = f"{path}.{name}".lstrip(".")
            is_state = tensor is not None and name not in module._non_persistent_buffers_set
            if is_state and known.isdisjoint((whole, *_parents(whole))):
                number = homes.get(tensor, len(stages) - 1)
                set_by_name(stages[number], whole, tensor, nn.Sequential, persistent=True)
                parts[number].append(whole)


def _recorded(model: nn.Module, inputs: Inputs, names: Sequence[str] | None) -> RecordedProgram:
    try:
        return RecordedProgram(model, inputs.named(inputs.leaves))
    except Exception as error:
        where = "" if names is None else f" at {', '.join(map(repr, names))}"
        mode, reason = "training" if model.training else "evaluation", str(error).partition("\n")[0]
        raise UsageError(
            f"{type(model).__name__} cannot be cut{where}, as torch.export cannot record its forward in {mode}: "
            f"{type(error).__name__}: {reason}\nControl flow must not depend on values of tensors (use torch.where), "
            "and outputs must be tensors, in containers that torch.utils._pytree knows. Otherwise build the "
            "stages by hand: Pipeline([RemoteModule('worker1', First), ...])"
        ) from error


def _parents(name: str) -> Iterator[str]:
    """Yield the modules that contain a module, except the whole model."""
    while name := name.rpartition(".")[0]:
        yield name


def _is_sequence(module: nn.Module) -> bool:
    """Return True if the module only calls its children in turn."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _check_hooks(model: nn.Module, names: Iterable[str], backward_only: bool) -> None:
    """Raise UsageError if hooks would be lost."""
    for name in sorted(names):
        module = model.get_submodule(name)
        of_forward = () if backward_only else (module._forward_hooks, module._forward_pre_hooks)
        if any((*of_forward, module._backward_hooks, module._backward_pre_hooks)):
            raise UsageError(
                f"{name!r} ({type(module).__name__}) has hooks, and is cut: nothing would call them. "
                "Remove them first, or build the stages by hand: Pipeline([RemoteModule('worker1', First), ...])"
            )
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise UsageError(
                f"the parameter {name!r} has hooks, which are not sent: register them on the worker of the stage, for "
                "example with rpc_sync(worker, register, (pipeline.stages[0].module_rref,))"
            )


def _shared(stages: Sequence[nn.Module], named: Callable[[nn.Module], Iterable[tuple[str, Tensor]]]) -> list[Shared]:
    """Return the tensors that several stages have."""
    first: dict[Tensor, tuple[int, str]] = {}
    found = []
    for number, stage in enumerate(stages):
        for name, tensor in named(stage):
            early = first.setdefault(tensor, (number, name))
            if early[0] != number:
                found.append((*early, number, name))
    return found


# The beginnings of the stages


def _check_names(model: nn.Module, count: int, at: Sequence[str]) -> None:
    if len(at) != count - 1:
        raise UsageError(
            f"`at` names the first module of each stage, except for the first stage: for {count} workers {count - 1}, "
            f"not {len(at)}. To give a worker several stages, name it several times"
        )
    for name in at:
        module, path = model, ""
        for step in name.split("."):
            if step not in module._modules:
                children = [f"{path}{child}" for child in module._modules]
                names = ", ".join(map(repr, children))
                there = f"There are {names}" if names else f"{path[:-1]!r} has no submodules"
                raise UsageError(f"the model has no module {name!r} with which a stage could begin. {there}")
            module, path = module.get_submodule(step), f"{path}{step}."


def _counted(model: nn.Module, count: int, balance: Sequence[int]) -> list[str]:
    if not _is_sequence(model):
        raise UsageError(
            f"`balance` counts the children of an nn.Sequential, and {type(model).__name__} is not one: name the "
            "modules at which the stages begin with `at`"
        )
    children = list(model._modules)
    if len(balance) != count or sum(balance) != len(children):
        raise UsageError(
            f"`balance` must distribute all {len(children)} children over the {count} stages, at least one for each: "
            f"{list(balance)} does not"
        )
    return [children[start] for start in accumulate(balance[:-1])]


def _even(levels: Sequence[CutPoint], total: int, count: int) -> list[str]:
    """Find places for similar numbers of parameters per stage, and few values between stages."""
    if len(levels) < count - 1:
        raise UsageError(
            f"the model cannot be cut automatically into {count} stages: after the first, stages can only begin with "
            f"{[level.name for level in levels]}. Name fewer workers, or name the modules at which the stages begin "
            "with `at`"
        )
    share, starts = total / count, [-1]
    for stage in range(1, count):
        possible = range(starts[-1] + 1, len(levels) - (count - stage) + 1)
        off = {at: abs(levels[at].before - share * stage) for at in possible}
        near = [at for at in possible if off[at] <= share / 4] or [min(possible, key=off.__getitem__)]
        starts.append(min(near, key=lambda at: (levels[at].crossing, levels[at].name.count("."), off[at])))
    return [levels[at].name for at in starts[1:]]


def _even_in_chain(model: nn.Module, count: int, must: bool) -> list[str] | None:
    """Find places as `_even` does, in a sequence. Return None if its modules are too large, unless it `must`."""
    share = _size(model) / count
    opened = {name for name, module in model.named_modules() if _is_sequence(module) and _size(module) > share} | {""}
    sizes = {name: _size(model.get_submodule(name)) for name in _links(model, "", opened)}
    if not must and max(sizes.values(), default=0) > 1.5 * share:
        return None
    pairs = zip(sizes, accumulate(sizes.values(), initial=0), strict=False)
    levels = [CutPoint(name, before, 1) for name, before in pairs if before and sizes[name]]
    return _even(levels, _size(model), count)


def _size(module: nn.Module) -> int:
    own = {each for part in module.modules() for each in part._parameters.values() if each is not None}
    return sum(each.numel() for each in own)


def _starts(names: Sequence[str], begun: Mapping[str, int]) -> list[int]:
    """Return the number of steps of the forward pass before each of these modules."""
    steps: dict[str, int] = {}
    for name in names:
        if name not in begun:
            raise UsageError(
                f"{name!r} is not called directly, or is called in torch.no_grad() or autocast: begin the stage "
                "with another"
            )
        steps[name] = begun[name]
    in_order = sorted(steps, key=steps.__getitem__)
    if in_order != list(steps):
        raise UsageError(
            f"stages must follow the order in which their modules are called: name them in the order {in_order}"
        )
    if len(steps) < len(names) or len({0, *steps.values()}) <= len(names):
        raise UsageError(
            f"a stage would be empty: the model computes nothing between two of {list(names)}, or before the first"
        )
    return list(steps.values())


def _links(module: nn.Module, name: str, opened: set[str]) -> Iterator[str]:
    """Yield the modules inside of the opened modules, in order."""
    if name not in opened:
        yield name
        return
    for child, part in module._modules.items():
        assert part is not None
        yield from _links(part, f"{name}.{child}" if name else child, opened)
