"""A model cut into stages, one after the other; knows no worker.

A model that consists of `nn.Sequential`s down to the cuts is taken apart between their children. Of any other, the
forward passes of the modules inside of which a stage begins are traced (`torch.fx`), and cut; all other modules stay as
they are. What an early stage makes and a late one needs goes through those between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from torch import nn

from telegrad import checks
from telegrad.errors import UsageError
from telegrad.nn.tracing import can_open, hint_at_modes, put, record, shown

STAGES = "stages"  # the attribute of a pipeline
Shared = tuple[int, str, int, str]  # an early stage, the name of a parameter in it; a late one, and its name there


class Cut(NamedTuple):
    """The stages share their modules with the model."""

    stages: list[nn.Module]
    parts: list[list[str]]  # what each stage has of the model, by qualified names, which are the same in it
    ties: list[Shared]  # parameters that several stages have


_AT = "a list of the names of modules"


def cut(model: nn.Module, count: int, at: Sequence[str] | None = None, balance: Sequence[int] | None = None) -> Cut:
    """Cut into `count` stages, which begin `at` the modules of these names, or have so many children of a sequence.

    Raises:
        UsageError: the model cannot be cut so, or not at all.
    """
    if not isinstance(model, nn.Module):
        checks.wrong("model", "a module", model)
    if at is not None:
        at = [checks.text("at", name, _AT) for name in checks.several("at", at, _AT)]
    if balance is not None:
        balance = [checks.count("balance", each) for each in checks.several("balance", balance, "a list of numbers")]
    if at is not None and balance is not None:
        raise UsageError("say where a model is cut by `at` or by `balance`, not by both")
    if balance is not None:
        names = _counted(model, count, balance)
    elif at is not None:
        names = _known(model, count, at)
    else:
        names = _even(model, count)
    opened = {"", *(parent for name in names for parent in _parents(name))}
    _check_hooks(model, opened)
    chained = all(_is_sequence(model.get_submodule(name)) for name in opened)
    if not chained:
        hint_at_modes(model, opened)
    whole = _Chain(model, opened) if chained else record(model, opened, opened)
    made = whole.cut(_starts(names, whole.step_of))
    for stage, _ in made:
        stage.training = model.training
    stages, parts = [stage for stage, _ in made], [part for _, part in made]
    return Cut(stages, parts, _ties(stages))


def _parents(name: str) -> Iterator[str]:
    """The modules that a module is inside of, but for the whole."""
    while name := name.rpartition(".")[0]:
        yield name


def _is_sequence(module: nn.Module) -> bool:
    """It does nothing but call its children in turn."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _check_hooks(model: nn.Module, opened: Iterable[str]) -> None:
    for name in sorted(opened):
        module = model.get_submodule(name)
        hooks = (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
        if any(hooks):
            raise UsageError(
                f"{shown(model, name)} has hooks, which see it as a whole: it cannot be cut. Register hooks of the "
                "modules inside of it instead"
            )


def _ties(stages: Sequence[nn.Module]) -> list[Shared]:
    first: dict[nn.Parameter, tuple[int, str]] = {}
    found = []
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            early = first.setdefault(parameter, (number, name))
            if early[0] != number:
                found.append((*early, number, name))
    return found


# Where the stages begin


def _known(model: nn.Module, count: int, at: Sequence[str]) -> list[str]:
    if isinstance(at, str) or not all(isinstance(name, str) for name in at):
        raise UsageError(f"`at` is a list of the names of modules, such as ['layers.4', 'layers.8'], not {at!r}")
    if len(at) != count - 1:
        raise UsageError(
            f"`at` names the modules with which the stages begin, all but the first: for {count} workers {count - 1}, "
            f"not {len(at)}. A worker that shall have several stages is named several times"
        )
    for name in at:
        _check_name(model, name)
    return list(at)


def _check_name(model: nn.Module, name: str) -> None:
    module, path = model, ""
    for step in name.split("."):
        children = [f"{path}{child}" for child in module._modules]
        if f"{path}{step}" not in children:
            there = f"There are {', '.join(map(repr, children))}" if children else f"{path[:-1]!r} has no parts"
            raise UsageError(f"the model has no module {name!r} with which a stage could begin. {there}")
        module, path = module.get_submodule(step), f"{path}{step}."


def _counted(model: nn.Module, count: int, balance: Sequence[int]) -> list[str]:
    if not _is_sequence(model):
        raise UsageError(
            f"`balance` counts the children of an nn.Sequential, and {type(model).__name__} is none: say with `at` "
            "with which modules the stages begin"
        )
    children = list(model._modules)
    fits = len(balance) == count and sum(balance) == len(children)
    if not fits or not all(isinstance(each, int) and each > 0 for each in balance):
        raise UsageError(
            f"`balance` says how many of the {len(children)} children each of the {count} stages gets, at least one: "
            f"{list(balance)} does not"
        )
    return [children[start] for start in accumulate(balance[:-1])]


def _even(model: nn.Module, count: int) -> list[str]:
    """So that the stages have about as many parameters each."""
    if count == 1:
        return []
    found = _sizes(model, count)
    names, before = list(found), [0, *accumulate(found.values())]
    if len(names) < count:
        raise UsageError(
            f"the model cannot be cut by itself into {count} stages: of its parts that have parameters there are "
            f"{len(names)} {names}. Name fewer workers, or say with `at` with which modules the stages begin"
        )
    starts = [0]
    for stage in range(1, count):
        wanted = before[-1] * stage / count
        possible = range(starts[-1] + 1, len(names) - (count - stage) + 1)
        starts.append(min(possible, key=lambda start: abs(before[start] - wanted)))
    return [names[start] for start in starts[1:]]


def _sizes(model: nn.Module, count: int) -> dict[str, int]:
    """The modules in the order in which they are called, and how many numbers are trained in each.

    Those that have more than a stage shall have are opened, where they have parts and can be traced.
    """
    share = _size(model) / count
    large = {name for name, module in model.named_modules() if _size(module) > share and can_open(module)}
    called = record(model, {"", *large}, needed={""}).called
    sizes = {name: _size(model.get_submodule(name)) for name in called}
    return {name: size for name, size in sizes.items() if size}


def _size(module: nn.Module) -> int:
    own = {each for part in module.modules() for each in part._parameters.values() if each is not None}
    return sum(each.numel() for each in own)


def _starts(names: Sequence[str], step_of: Callable[[str], int | None]) -> list[int]:
    """How many steps of the forward pass come before each of these modules."""
    steps: dict[str, int] = {}
    for name in names:
        step = step_of(name)
        if step is None:
            raise UsageError(f"{name!r} is not called itself: let the stage begin with a module inside of it")
        steps[name] = step
    in_order = sorted(steps, key=steps.__getitem__)
    if in_order != list(steps):
        raise UsageError(f"stages follow one another as their modules are called: name these in the order {in_order}")
    if len(steps) < len(names) or len({0, *steps.values()}) <= len(names):
        raise UsageError(
            f"a stage would be empty: between two of {list(names)}, or before the first, the model computes nothing"
        )
    return list(steps.values())


class _Chain:
    """A sequence of modules, some of which may be sequences themselves."""

    def __init__(self, model: nn.Module, opened: set[str]) -> None:
        self._model = model
        self._links = list(_links(model, "", opened))

    def step_of(self, name: str) -> int | None:
        return next(at for at, link in enumerate(self._links) if link == name or link.startswith(f"{name}."))

    def cut(self, starts: Sequence[int]) -> list[tuple[nn.Module, list[str]]]:
        """The stages, and what of the model each has."""
        made: list[tuple[nn.Module, list[str]]] = []
        for start, end in pairwise([0, *starts, len(self._links)]):
            stage = nn.Sequential()
            for name in self._links[start:end]:
                put(stage, name, self._model.get_submodule(name), nn.Sequential)
            made.append((stage, self._links[start:end]))
        return made


def _links(module: nn.Module, name: str, opened: set[str]) -> Iterator[str]:
    """What is inside of the opened modules, in order."""
    if name not in opened:
        yield name
        return
    for child, part in module._modules.items():
        assert part is not None
        yield from _links(part, f"{name}.{child}" if name else child, opened)


# Names


def keep_names(pipeline: nn.Module, parts: Sequence[Sequence[str]]) -> None:
    """Have the state of a pipeline bear the names of the model whose parts its stages are."""
    pipeline.register_state_dict_post_hook(_name_as_whole)  # type: ignore[no-untyped-call]
    by_stages = partial(_name_by_stages, parts)
    pipeline.register_load_state_dict_pre_hook(by_stages)  # type: ignore[no-untyped-call]


def _name_as_whole(_: nn.Module, state: Any, prefix: str, *__: Any) -> None:
    """stages.1.layers.4.weight becomes layers.4.weight."""
    start = f"{prefix}{STAGES}."
    for names in (state, state._metadata):
        found = {name: names.pop(name) for name in list(names) if name.startswith(start)}
        own = {name.removeprefix(start).partition(".")[2]: value for name, value in found.items()}
        names.update({prefix + name: value for name, value in own.items() if name})


def _name_by_stages(parts: Sequence[Sequence[str]], _: nn.Module, state: Any, prefix: str, *__: Any) -> None:
    """The other way; what several stages use is for each of them."""
    found = {name.removeprefix(prefix): state.pop(name) for name in list(state) if name.startswith(prefix)}
    for name, value in found.items():
        holders = [
            number for number, part in enumerate(parts) if any(f"{name}.".startswith(f"{each}.") for each in part)
        ]
        starts = [f"{STAGES}.{number}." for number in holders] or [""]
        state.update({f"{prefix}{start}{name}": value for start in starts})
