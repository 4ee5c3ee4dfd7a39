"""Brings the tensors of a version into a module or a state dict, or refuses to before anything is changed.

A target may share memory where what was published does not: a layer that is used under two names, a buffer that is a
view of a weight. It is loaded if the published tensors agree on what that memory is to hold. Otherwise there is no
right answer, and it is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from telegrad.errors import InvalidArgument, TelegradError
from telegrad.weights.layout import View
from telegrad.weights.rounding import named
from telegrad.weights.spans import LINE, SMALL, Span, flagged, flags_of, groups, looks, move, padding
from telegrad.wire.strides import extent, repeats

SHOWN = 5  # names in a message
PLAIN = (Tensor, nn.Parameter)  # types whose values are in their own memory

Source = View | Tensor
Pair = tuple[str, Source, Tensor]  # name, what was published, where it goes

_can_cast = cache(torch.can_cast)


def own_state(module: nn.Module) -> dict[str, Tensor] | None:
    """Return the parameters and buffers that are the state of a module; None where its state is more than these."""
    live: set[int] = set()
    kinds = set()
    for each in module.modules():
        if each._load_state_dict_pre_hooks or each._load_state_dict_post_hooks:
            return None
        kinds.add(type(each))
        live.update(map(id, each._parameters.values()), map(id, each._buffers.values()))
    if any(map(_has_own_rule, kinds)):
        return None
    state: dict[str, Tensor] = module.state_dict(keep_vars=True)
    return state if live.issuperset(map(id, state.values())) else None


def _has_own_rule(kind: type[nn.Module]) -> bool:
    """Whether a class outside of torch has a way of its own to load its state."""
    rules = (kind._load_from_state_dict, kind.load_state_dict)
    return any(not (rule.__module__ or "").startswith("torch.nn.") for rule in rules)


def tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a state dict, also of dictionaries inside of it, by their names.

    Raises:
        InvalidArgument: two of them have one name.
    """
    if {*map(type, state.values())} <= {Tensor, nn.Parameter} and {*map(type, state)} <= {str}:
        return {**state}
    counts = Counter(name for name, _ in named(state))
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise InvalidArgument(f"two tensors have one name: {_listed(twice)}")
    return dict(named(state))


def _paired(number: int, theirs: Mapping[str, Source], mine: Mapping[str, Tensor]) -> list[Pair]:
    """Pair the tensors of a version with those that they are copied to.

    Raises:
        InvalidArgument: names, shapes or types do not fit.
    """
    pairs: list[Pair] = []
    shapes, types = [], []
    for name, value in mine.items():
        source = theirs.get(name)
        if source is None:
            continue
        pairs.append((name, source, value))
        if value.is_meta or is_lazy(value):
            kind = "on the meta device" if value.is_meta else "of a lazy module"
            raise InvalidArgument(f"{name!r} here has no memory, since it is {kind}: give it some before loading")
        if type(value) not in PLAIN and type(value).__torch_dispatch__ != Tensor.__torch_dispatch__:
            raise InvalidArgument(
                f"{name!r} here is a {type(value).__name__}, which is made of other tensors: load into these, or read "
                "its part by a ShardedSubscriber"
            )
        if value.shape != source.shape:
            shapes.append(f"{name} ({tuple(value.shape)} here, {tuple(source.shape)} there)")
        if value.dtype != source.dtype and not _can_cast(source.dtype, value.dtype):
            types.append(f"{name} ({value.dtype} here, {source.dtype} there)")
    faults = {
        "not in it": mine.keys() - theirs.keys(),
        "only in it": theirs.keys() - mine.keys(),
        "of another shape in it": shapes,
        "of a type in it that cannot be converted without a loss": types,
    }
    said = [f"{what}: {_listed(sorted(names))}" for what, names in faults.items() if names]
    if said:
        raise InvalidArgument(f"version {number} does not fit: {'; '.join(said)}")
    return pairs


class Plan(NamedTuple):
    """How a version comes into some tensors, and all versions of its layout into tensors that look the same."""

    names: list[str]
    looks: Any
    small: list[tuple[int, int, int]]  # which tensor takes which bytes of the version
    others: list[tuple[int, Source]]
    lasts: bool  # also for other values


def load(
    memory: Tensor | None,
    number: int,
    theirs: Mapping[str, Source],
    mine: Mapping[str, Tensor],
    plan: Plan | None = None,
) -> Plan | None:
    """Copy what was published into other tensors.

    Args:
        memory: of the version.
        number: of the version.
        theirs: its tensors.
        mine: those to copy them to.
        plan: what this function returned for another version of the same layout.

    Raises:
        InvalidArgument: names, shapes or types do not fit, or some of the tensors share memory, and what was published
            does not agree on what it is to hold.
    """
    names, tensors = [*mine], [*mine.values()]
    seen = looks(tensors)
    if plan is None or seen is None or not (plan.lasts and plan.names == names and plan.looks == seen):
        plan = Plan(names, seen, [], [], False)
        pairs = _paired(number, theirs, mine)
        dropped, lasts = _agreed(memory, pairs)
        for each, (name, source, tensor) in enumerate(pairs):
            lasts = lasts and isinstance(source, View)
            if name in dropped:
                continue
            if isinstance(source, View) and 0 < source.plain <= SMALL and _takes_bytes(source, tensor):
                plan.small.append((each, source.start, source.plain))
            else:
                plan.others.append((each, source))
        plan = plan._replace(lasts=lasts)
    if memory is not None:
        move(memory, [(tensors[each], 0, at, size) for each, at, size in plan.small], False)
    torch.autograd.graph.increment_version([tensors[each] for each, *_ in plan.small])
    for each, source in plan.others:
        _write(tensors[each], _seen(memory, source))
    return plan


def _takes_bytes(source: View, tensor: Tensor) -> bool:
    return (
        type(tensor) in PLAIN
        and tensor.dtype == source.dtype
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    )


def load_by_its_rules(
    memory: Tensor | None, number: int, state: Any, theirs: Mapping[str, Source], module: nn.Module
) -> None:
    """Have a module load a state by itself.

    Raises:
        InvalidArgument: the module refuses it; it may have taken some of it. Or some of its tensors share memory, and
            what was published does not agree on what that is to hold; then nothing was changed.
    """
    mine = {
        name: value
        for name, value in tensors_of(module.state_dict()).items()
        if name in theirs and not is_lazy(value) and value.shape == theirs[name].shape and not value.is_meta
    }
    _agreed(memory, [(name, theirs[name], value) for name, value in mine.items()])
    try:
        module.load_state_dict(state)
    except TelegradError:
        raise
    except RuntimeError as error:
        raise InvalidArgument(f"version {number} does not fit: {error}") from error


def swap(
    memory: Tensor | None, number: int, theirs: Mapping[str, Source], mine: Mapping[str, Tensor], module: nn.Module
) -> None:
    """Have the tensors of a module's state lie in the memory of what was published.

    Raises:
        InvalidArgument: names, shapes, types or devices do not fit, or the tensors share memory in another way than
            those of the version do. Nothing was changed.
    """
    pairs = _paired(number, theirs, mine)
    hidden = [each for each in (*module.parameters(), *module.buffers()) if id(each) not in {*map(id, mine.values())}]
    seen = [_seen(memory, source) for _, source, _ in pairs]
    both = [(name, value, new) for (name, _, value), new in zip(pairs, seen, strict=True)]
    others = [name for name, value, new in both if value.dtype != new.dtype]
    away = [name for name, value, new in both if value.device != new.device]
    targets = [*(value for _, value, _ in both), *hidden]
    apart = []
    for group in groups(targets):
        numbers = [span.number for span in group]
        if max(numbers) >= len(both) or not all(_alike(both[each], both[numbers[0]]) for each in numbers):
            apart += [both[each][0] if each < len(both) else "a tensor outside of its state" for each in numbers]
    for names, fault, hint in (
        (others, "a module whose tensors are of other types", "converts them"),
        (away, "a module that is elsewhere than on the host", "copies it there"),
        (apart, "a module whose tensors share memory in another way", "copies it, where that is possible"),
    ):
        if names:
            raise InvalidArgument(
                f"version {number} cannot be swapped into {fault}: {_listed(names)}. load_into {hint}"
            )
    for _, value, new in both:
        value.data = new


def _alike(one: tuple[str, Tensor, Tensor], first: tuple[str, Tensor, Tensor]) -> bool:
    """Whether two tensors lie to each other as the two that take their places do."""
    (_, tensor, new), (_, other, other_new) = one, first
    if tensor is other:
        return bool(_place(new) == _place(other_new))
    return (
        tensor.data_ptr() - other.data_ptr() == new.data_ptr() - other_new.data_ptr()
        and tensor.stride() == new.stride()
        and other.stride() == other_new.stride()
    )


def _place(tensor: Tensor) -> Any:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, flags_of(tensor)


def _seen(memory: Tensor | None, source: Source) -> Tensor:
    if isinstance(source, Tensor):
        return source
    assert memory is not None
    return source.of(memory)


def _write(tensor: Tensor, values: Tensor) -> None:
    """Copy values into a tensor, also into one that `expand` has made; they agree where it repeats."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        for dimension, step in enumerate(tensor.stride()) if type(tensor) in PLAIN else ():
            if step == 0 and tensor.shape[dimension] > 1:
                tensor, values = tensor.narrow(dimension, 0, 1), values.narrow(dimension, 0, 1)
        tensor.copy_(values)


def _agreed(memory: Tensor | None, pairs: Sequence[Pair]) -> tuple[set[str], bool]:
    """The names whose memory is written as another one, with the same; and whether that is so for all values."""
    plain = [pair for pair in pairs if type(pair[2]) in PLAIN]
    found = groups([tensor for _, _, tensor in plain])
    shared = {span.number for group in found for span in group}
    for number, (_, _, tensor) in enumerate(plain):
        if not tensor.is_contiguous() and number not in shared and repeats(tensor.shape, tensor.stride()):
            found.append([Span("", tensor.data_ptr(), 0, number)])
    dropped: set[str] = set()
    lasts = True
    for group in found:
        (_, first, tensor), *rest = members = [plain[span.number] for span in group]
        place = _place(tensor)
        if rest and isinstance(first, View) and all(each[1] == first and _place(each[2]) == place for each in rest):
            dropped.update(name for name, *_ in rest)
        else:
            _try_out(memory, group, members)
            lasts = False
    return dropped, lasts


def _try_out(memory: Tensor | None, group: Sequence[Span], members: Sequence[Pair]) -> None:
    """Write to a copy of the memory of a group, and look whether each tensor shows its own values afterwards."""
    pad = padding(group, [tensor.itemsize for _, _, tensor in members])
    starts = [span.start - group[0].start + pad for span in group]
    with torch.inference_mode(False), torch.no_grad():
        size = max(
            start + extent(tensor.shape, tensor.stride()) * tensor.itemsize
            for start, (_, _, tensor) in zip(starts, members, strict=True)
        )
        scratch = torch.zeros(-(-size // LINE) * LINE, dtype=torch.uint8, device=members[0][2].device)
        shown = []
        for start, (_, source, tensor) in zip(starts, members, strict=True):
            row = scratch.view(tensor.dtype)
            view = row.as_strided(tensor.shape, tensor.stride(), start // tensor.itemsize)
            shown.append((flagged(view, flags_of(tensor)), _seen(memory, source)))
        try:
            for view, values in shown:
                _write(view, values)
            agree = all(_same_bits(view, values.to(view.device, view.dtype)) for view, values in shown)
        except RuntimeError:  # torch does not write to elements that lie at one place
            agree = False
    if not agree:
        raise InvalidArgument(
            f"{_listed([name for name, _, _ in members])} share memory here, and were published with values that no "
            "memory can hold at once: nothing was loaded"
        )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    rows = []
    for each in (one, other):
        row = each.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)  # strides of 1, too
        rows.append(row.view(-1).view(torch.uint8))
    return torch.equal(*rows)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + f" and {len(names) - SHOWN} more" * (len(names) > SHOWN)
