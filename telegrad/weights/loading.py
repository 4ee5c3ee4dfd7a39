"""Brings the tensors of a version into a module or a state dict, or refuses to before anything is changed.

A target may share memory where what was published does not: a layer that is used under two names, a buffer that is a
view of a weight. It is loaded if the published tensors agree on what that memory is to hold. Otherwise there is no
right answer, and it is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from telegrad.errors import InvalidArgument, TelegradError
from telegrad.weights.arranging import SMALL
from telegrad.weights.layout import View
from telegrad.weights.rounding import named
from telegrad.weights.spans import Span, flagged, flags_of, groups, move, padding, repeats

SHOWN = 5  # names in a message

Source = View | Tensor
Pair = tuple[str, Source, Tensor]  # name, what was published, where it goes


def own_state(module: nn.Module) -> dict[str, Tensor] | None:
    """Return the parameters and buffers that are the state of a module; None where its state is more than these."""
    live: set[int] = set()
    for each in module.modules():
        if each._load_state_dict_pre_hooks or each._load_state_dict_post_hooks or _has_own_rule(type(each)):
            return None
        live.update(map(id, each._parameters.values()))
        live.update(map(id, each._buffers.values()))
    state: dict[str, Tensor] = module.state_dict(keep_vars=True)
    return state if live.issuperset(map(id, state.values())) else None


def load_by_its_rules(
    memory: Tensor | None, number: int, state: Any, theirs: Mapping[str, Source], module: nn.Module
) -> None:
    """Have a module load a state by itself.

    Raises:
        InvalidArgument: the module refuses it; it may have taken some of it. Or some of its tensors share memory, and
            what was published does not agree on what that is to hold; then nothing was changed.
    """
    mine = tensors_of(module.state_dict())
    _agreed(
        memory,
        [
            (name, theirs[name], value)
            for name, value in mine.items()
            if name in theirs and not is_lazy(value) and value.shape == theirs[name].shape and not value.is_meta
        ],
    )
    try:
        module.load_state_dict(state)
    except TelegradError:
        raise
    except RuntimeError as error:
        raise InvalidArgument(f"version {number} does not fit: {error}") from error


def tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a state dict, also in dictionaries inside of it, by their names.

    Raises:
        InvalidArgument: two of them have one name.
    """
    found = [*named(state)]
    tensors = dict(found)
    if len(tensors) < len(found):
        counts = Counter(name for name, _ in found)
        raise InvalidArgument(f"two tensors have one name: {_listed([name for name in counts if counts[name] > 1])}")
    return tensors


def hidden(module: nn.Module, state: Mapping[str, Tensor]) -> list[Tensor]:
    """The parameters and buffers of a module that are not in its state dict."""
    seen = {*map(id, state.values())}
    return [each for each in (*module.parameters(), *module.buffers()) if id(each) not in seen]


def _has_own_rule(kind: type[nn.Module]) -> bool:
    """Whether a class outside of torch has a way of its own to load its state."""
    rules = (kind._load_from_state_dict, kind.load_state_dict)
    return any(not (rule.__module__ or "").startswith("torch.nn.") for rule in rules)


def paired(number: int, theirs: Mapping[str, Source], mine: Mapping[str, Tensor]) -> list[Pair]:
    """Pair the tensors of a version with those that they are copied to.

    Raises:
        InvalidArgument: names, shapes or types do not fit.
    """
    both = [(name, theirs[name], value) for name, value in mine.items() if name in theirs]
    for name, _, value in both:
        if value.is_meta or is_lazy(value):
            kind = "is on the meta device" if value.is_meta else "of a lazy module"
            raise InvalidArgument(
                f"{name!r} here has no memory, since it {kind}: give it some (to_empty) before loading"
            )
        if _is_made_of_others(value):
            raise InvalidArgument(
                f"{name!r} here is a {type(value).__name__}, which is made of other tensors: load into these, or read "
                "its part by a ShardedSubscriber"
            )
    shapes = [
        f"{name} ({tuple(value.shape)} here, {tuple(source.shape)} there)"
        for name, source, value in both
        if value.shape != source.shape
    ]
    types = [
        f"{name} ({value.dtype} here, {source.dtype} there)"
        for name, source, value in both
        if not torch.can_cast(source.dtype, value.dtype)
    ]
    faults = [
        ("not in it", [*(mine.keys() - theirs.keys())]),
        ("only in it", [*(theirs.keys() - mine.keys())]),
        ("of another shape in it", shapes),
        ("of a type in it that cannot be converted without a loss", types),
    ]
    said = [f"{what}: {_listed(sorted(names))}" for what, names in faults if names]
    if said:
        raise InvalidArgument(f"version {number} does not fit: {'; '.join(said)}")
    return both


def pour(memory: Tensor | None, pairs: Sequence[Pair]) -> None:
    """Copy what was published into other tensors.

    Raises:
        InvalidArgument: some of these share memory, and what was published does not agree on what it is to hold.
    """
    pairs = _agreed(memory, pairs)
    small, others = [], []
    for name, source, tensor in pairs:
        size = source.nbytes
        if size <= SMALL and isinstance(source, View) and _takes_bytes(source, tensor):
            assert memory is not None
            move(tensor, 0, memory, source.start, size)
            small.append(tensor)
        else:
            others.append((name, source, tensor))
    torch.autograd.graph.increment_version(small)
    for _, source, tensor in others:
        _write(tensor, _seen(memory, source))


def _is_made_of_others(tensor: Tensor) -> bool:
    """Whether its values are not in memory of its own, as those of a DTensor."""
    return type(tensor).__torch_dispatch__ != Tensor.__torch_dispatch__


def _takes_bytes(source: View, tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.dtype == source.dtype
        and tensor.is_cpu
        and tensor.is_contiguous()
        and source.is_plain
        and not (flags_of(tensor) or tensor.is_inference())
        and tensor.nbytes == source.nbytes > 0
    )


def swap(memory: Tensor | None, number: int, pairs: Sequence[Pair], hidden: Sequence[Tensor]) -> None:
    """Have tensors lie in the memory of what was published.

    Raises:
        InvalidArgument: types or devices do not fit, or the tensors share memory in another way than those of the
            version do. Nothing was changed.
    """
    others = [name for name, source, value in pairs if value.dtype != source.dtype]
    if others:
        raise InvalidArgument(
            f"version {number} cannot be swapped into a module whose tensors are of other types: "
            f"{_listed(others)}. load_into converts them"
        )
    seen = [_seen(memory, source) for _, source, _ in pairs]
    away = [name for (name, _, value), new in zip(pairs, seen, strict=True) if value.device != new.device]
    if away:
        raise InvalidArgument(
            f"version {number} cannot be swapped into a module that is elsewhere than on the host: {_listed(away)}. "
            "load_into copies it there"
        )
    targets = [*(value for _, _, value in pairs), *hidden]
    for group in groups(targets):
        numbers = [span.number for span in group]
        first = numbers[0]
        if max(numbers) >= len(pairs) or not all(
            _alike(targets[each], seen[each], targets[first], seen[first]) for each in numbers
        ):
            names = [pairs[each][0] if each < len(pairs) else "a tensor outside of its state" for each in numbers]
            raise InvalidArgument(
                f"version {number} cannot be swapped in: {_listed(names)} share memory in the module, in another way "
                "than in the version. load_into copies it, where that is possible"
            )
    for (_, _, value), new in zip(pairs, seen, strict=True):
        value.data = new


def _alike(one: Tensor, new: Tensor, first: Tensor, first_new: Tensor) -> bool:
    """Whether two tensors lie to each other as the two that take their places do."""
    if one is first:
        return one.shape == new.shape and _place(new) == _place(first_new)
    return (
        one.data_ptr() - first.data_ptr() == new.data_ptr() - first_new.data_ptr()
        and one.stride() == new.stride()
        and first.stride() == first_new.stride()
    )


def _place(tensor: Tensor) -> Any:
    return tensor.data_ptr(), tensor.stride(), flags_of(tensor)


def _seen(memory: Tensor | None, source: Source) -> Tensor:
    if isinstance(source, Tensor):
        return source
    assert memory is not None
    return source.of(memory)


def _write(tensor: Tensor, values: Tensor) -> None:
    """Copy values into a tensor, also into one that `expand` has made; they agree where it repeats."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        for dimension, step in enumerate(tensor.stride()) if type(tensor) in (Tensor, nn.Parameter) else ():
            if step == 0 and tensor.shape[dimension] > 1:
                tensor, values = tensor.narrow(dimension, 0, 1), values.narrow(dimension, 0, 1)
        tensor.copy_(values)


def _agreed(memory: Tensor | None, pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs, each memory of the targets once where that is written twice with the same."""
    plain = [pair for pair in pairs if type(pair[2]) in (Tensor, nn.Parameter)]
    targets = [tensor for _, _, tensor in plain]
    together = groups(targets)
    joined = {span.number for group in together for span in group}
    alone = [
        [Span("", tensor.data_ptr(), 0, number)]
        for number, tensor in enumerate(targets)
        if number not in joined and not tensor.is_contiguous() and repeats(tensor.shape, tensor.stride())
    ]
    dropped: set[str] = set()
    for group in (*together, *alone):
        members = [plain[span.number] for span in group]
        (_, first, tensor), *rest = members
        if (
            rest
            and isinstance(first, View)
            and all(
                source == first
                and _place(other) == _place(tensor)
                and other.shape == tensor.shape
                and other.dtype == tensor.dtype
                for _, source, other in rest
            )
        ):
            dropped.update(name for name, _, _ in rest)
        else:
            _try_out(memory, group, members)
    return [pair for pair in pairs if pair[0] not in dropped]


def _try_out(memory: Tensor | None, group: Sequence[Span], members: Sequence[Pair]) -> None:
    """Write to a copy of the memory of a group, and look whether each tensor shows its own values afterwards."""
    pad = padding(group, [tensor.itemsize for _, _, tensor in members])
    size = max(
        span.start - group[0].start + pad + _length(tensor) for span, (_, _, tensor) in zip(group, members, strict=True)
    )
    with torch.inference_mode(False), torch.no_grad():
        scratch = torch.zeros(-(-size // 16) * 16, dtype=torch.uint8, device=members[0][2].device)
        shown = []
        for span, (_, source, tensor) in zip(group, members, strict=True):
            row = scratch.view(tensor.dtype)
            at = (span.start - group[0].start + pad) // tensor.itemsize
            view = flagged(row.as_strided(tensor.shape, tensor.stride(), at), flags_of(tensor))
            shown.append((view, _seen(memory, source)))
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


def _length(tensor: Tensor) -> int:
    spans = [(n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
    return (1 + sum(spans)) * tensor.itemsize


def _same_bits(one: Tensor, other: Tensor) -> bool:
    rows = []
    for each in (one, other):
        row = each.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)  # strides of 1, too
        rows.append(row.view(-1).view(torch.uint8))
    return torch.equal(*rows)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + f" and {len(names) - SHOWN} more" * (len(names) > SHOWN)
