"""A version as a reader sees it.

Copy the tensors of a version into a module or a state dict, or refuse before anything is changed.

A target may share memory where the published tensors do not: a layer that is used under two names, or a buffer that is
a view of a weight. It is loaded if the published tensors agree on the content of that memory. Otherwise no result would
be correct, and the target is refused.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from telegrad.errors import InvalidArgument, TelegradError
from telegrad.ext.calls import folded
from telegrad.ext.feedback import checks
from telegrad.ext.values import repeats
from telegrad.weights.tree_layout import PLAIN, Copies, Copy, Layout, TensorView, groups_of, looks, named, place_of

_MODULE = "a module, or its state dict"
SHOWN = 5  # names in an error message
SMALL = 1 << 19  # bytes: to wake torch's threads would take as long as to copy them
_SAVING = frozenset({"state_dict", "_save_to_state_dict", "get_extra_state"})

Pair = tuple[str, Tensor, Tensor]  # name, published tensor, target

_can_cast = cache(torch.can_cast)


@folded
class Version:
    """One whole version, from a subscriber. Its memory is kept while the version or one of its tensors exists.

    Other processes on this host read the same memory, so the tensors must not be written to. `number` counts from 1.

    Example:
        >>> publisher = telegrad.weights.Publisher("scale", {"scale": torch.ones(1)})
        >>> number = publisher.publish()
        >>> version = telegrad.weights.Subscriber("driver", "scale").newest()
        >>> version.number, version.state
        (1, {'scale': tensor([1.])})
        >>> publisher.close()
    """

    _layout: Layout | None

    def __init__(self, number: int, layout: Layout, memory: Tensor, unwritten: Tensor | None = None) -> None:
        """`unwritten` has the same bytes, while nothing was written to `memory`, and is faster to read."""
        self.number = number
        self._layout = layout
        self._memory = memory
        # If the memory was lent by another worker, this is a mapping for reading that stays for later loans of the
        # block. `memory` is mapped anew for each version, and to map its pages takes about as long as to copy them.
        self._unwritten = unwritten
        self._found: list[Tensor] = []
        self._state: Any = None

    @property
    def state(self) -> Any:
        """The published tree, with tensors in place of the publisher's."""
        if self._state is None:
            assert self._layout is not None
            self._unwritten = None  # the user may write to the tensors
            self._state = self._layout.tree(self._tensors())
        return self._state

    def load_into(self, module: nn.Module | Mapping[str, Any]) -> None:
        """Copy the tensors into those of a module, or of a state dict.

        Args:
            module: a module, or its state dict.

        If a module's state is more than its parameters and buffers (hooks, an extra state, or its own way to load), the
        whole state is loaded by `load_state_dict`.

        Raises:
            InvalidArgument: names, shapes or types do not match, or tensors of the module share memory that cannot hold
                the published values; the message names them, and nothing was copied.
        """
        check_module(module)
        own = _own_state(module) if isinstance(module, nn.Module) else tensors_of(module)
        if own is not None:
            self._load(own)
        else:
            assert isinstance(module, nn.Module)
            tensors, names = self._sources()
            theirs = {name: tensors[number] for name, number in names.items()}
            _load_by_load_state_dict(self.number, self.state, theirs, module)

    def swap_into(self, module: nn.Module) -> None:
        """Make the parameters and buffers of a module use this version's memory, without a copy.

        The module must not write to them. A write would change them for this process only.

        Args:
            module: a module that only reads its tensors.

        Raises:
            InvalidArgument: names, shapes or types do not match, or the module's tensors share memory in a different
                way than those of the version; the message names them, and nothing was changed.
        """
        check_module(module, swaps=True)
        own = _own_state(module)
        if own is None:
            raise InvalidArgument(
                f"version {self.number} cannot be swapped into {type(module).__name__}, whose state has more than "
                "its parameters and buffers: use load_into"
            )
        tensors, names = self._sources()
        self._unwritten = None
        _swap(self.number, {name: tensors[number] for name, number in names.items()}, own, module)

    def _load(self, mine: Mapping[str, Tensor]) -> None:
        """Copy the tensors into `mine`. The layout keeps the plan, if that is valid for any version."""
        targets, layout = [*mine.values()], self._layout
        seen = [*mine], looks(targets)
        plan: Plan | None = layout.checked if layout is not None else None
        # The plan of the last load fits each version of the layout, as long as the targets have the same names and
        # looks, addresses included. Then the tensors are not checked one by one, as below.
        if plan is not None and seen[1] is not None and plan[:2] == seen:
            # Read once: another thread may look at the state of this version now.
            memory = self._memory if (unwritten := self._unwritten) is None else unwritten
            plan.at_once.run(targets, memory, loads=True)
            for place, number in plan.others:
                _write(targets[place], self._tensors()[number])
            return
        sources, names = self._sources()
        pairs = _paired(self.number, {name: sources[number] for name, number in names.items()}, mine)
        again, lasts = _find_repeated(pairs)
        at_once: list[tuple[int, int]] = []
        others: list[tuple[int, int]] = []
        for place, (name, source, target) in enumerate(pairs):
            if name not in again:
                flags = target.is_inference(), target.is_conj(), target.is_neg(), source.is_conj(), source.is_neg()
                is_usual = type(target) in PLAIN and not any(flags) and 0 not in target.stride()
                (at_once if is_usual else others).append((place, names[name]))
        # Keep the plan only if the checks do not depend on the values of this version (`lasts`), and if the sources are
        # in the order of the layout's views.
        if layout is not None and lasts and sources is self._found:
            copies = [Copy(place, None, layout.views[number]) for place, number in at_once]
            layout.checked = Plan(*seen, Copies(copies, targets, SMALL), others)
        if at_once:
            with torch.no_grad():
                into, of = zip(*((targets[place], sources[number]) for place, number in at_once), strict=True)
                torch._foreach_copy_(into, of)
        for place, number in others:
            _write(targets[place], sources[number])

    def _tensors(self) -> list[Tensor]:
        if not self._found:
            assert self._layout is not None
            self._found = self._layout.tensors(self._memory)
        return self._found

    def _sources(self) -> tuple[list[Tensor], Mapping[str, int]]:
        """Return the tensors, and their indices by name; raise InvalidArgument unless a state dict names them all."""
        layout = self._layout
        if layout is not None and not layout.names:
            layout.names.append(_names_of(layout))
        if layout is not None and layout.names[0] is not None:
            return self._tensors(), layout.names[0]
        if not isinstance(self.state, Mapping):
            raise InvalidArgument(f"version {self.number} is not a state dict, but of type {type(self.state).__name__}")
        found = tensors_of(self.state)
        if layout is not None and len({*map(id, found.values())}) < len(layout.views):
            raise InvalidArgument(
                f"version {self.number} has tensors inside containers other than dictionaries, lists and tuples, "
                "which have no names: use its state"
            )
        return [*found.values()], {name: number for number, name in enumerate(found)}

    def __repr__(self) -> str:
        return f"<Version {self.number}: {self._memory.numel()} bytes>"


def check_module(module: Any, swaps: bool = False) -> None:
    """Raise InvalidArgument for a value that tensors cannot be loaded into, or swapped into."""
    if not isinstance(module, nn.Module):
        checks.raise_invalid("module", "a module", module) if swaps else checks.mapping("module", module, _MODULE)


def _names_of(layout: Layout) -> dict[str, int] | None:
    """Return the indices of a state dict's tensors by name. Return None if the names depend on the tree itself."""
    try:
        tree = layout.tree(layout.views)  # type: ignore[arg-type]
    except TelegradError:  # a tensor subclass is not represented by a view
        return None
    if not isinstance(tree, Mapping):
        return None
    numbers = {id(view): number for number, view in enumerate(layout.views)}
    found = [(name, numbers[id(view)]) for name, view in named(tree, kind=TensorView)]
    names = dict(found)
    return names if len(names) == len(found) and len({*names.values()}) == len(layout.views) else None


# Loading


def _own_state(module: nn.Module) -> dict[str, Tensor] | None:
    """Return the parameters and buffers that are the state of a module, or None if its state contains more."""
    state: dict[str, Tensor] = {}
    # In the usual case this is what `state_dict` returns, found by one walk over the modules. Each way in which a
    # module or class can extend or load its state is checked: hooks and own methods of loading need `load_state_dict`,
    # hooks and own methods of saving need `state_dict`.
    kinds: set[Any] = set()
    is_plain = True  # `state_dict` would return the same
    for path, each in module.named_modules(remove_duplicate=False):
        if each._load_state_dict_pre_hooks or each._load_state_dict_post_hooks:
            return None
        kinds.add(type(each))
        is_plain = is_plain and not (each._state_dict_hooks or each._state_dict_pre_hooks)
        is_plain = is_plain and _SAVING.isdisjoint(vars(each))
        prefix = f"{path}." if path else ""
        for name, value in (*each._parameters.items(), *each._buffers.items()):
            if value is not None and name not in each._non_persistent_buffers_set:
                state[prefix + name] = value
    rules = [rule for kind in kinds for rule in (kind._load_from_state_dict, kind.load_state_dict)]
    if not all((rule.__module__ or "").startswith("torch.nn.") for rule in rules):  # a class loads its state itself
        return None
    if not is_plain or any(getattr(kind, name) is not getattr(nn.Module, name) for kind in kinds for name in _SAVING):
        state = module.state_dict(keep_vars=True)
        # A hook may have put copies into the state. To write to these would not change the module.
        live = {*map(id, module.parameters()), *map(id, module.buffers())}
        return state if live.issuperset(map(id, state.values())) else None
    return state


def tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a state dict, with nested ones, by name; raise InvalidArgument if two have one name."""
    if {*map(type, state.values())} <= {Tensor, nn.Parameter} and {*map(type, state)} <= {str}:
        return {**state}
    counts = Counter(name for name, _ in named(state))
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise InvalidArgument(f"two tensors have one name: {_listed(twice)}")
    return dict(named(state))


def _paired(number: int, theirs: Mapping[str, Tensor], mine: Mapping[str, Tensor]) -> list[Pair]:
    """Pair the tensors of a version with their targets. Raise InvalidArgument if names, shapes or types differ."""
    pairs: list[Pair] = []
    shapes, types = [], []
    for name, value in mine.items():
        source = theirs.get(name)
        if source is None:
            continue
        pairs.append((name, source, value))
        if value.is_meta or is_lazy(value):
            kind = "on the meta device" if value.is_meta else "of a lazy module"
            raise InvalidArgument(f"{name!r} here has no memory, because it is {kind}: allocate it before loading")
        if type(value) not in PLAIN and type(value).__torch_dispatch__ != Tensor.__torch_dispatch__:
            raise InvalidArgument(
                f"{name!r} here is a {type(value).__name__}, which consists of other tensors: load into these, or read "
                "its part with a ShardedSubscriber"
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
    """How to copy any version of one layout into targets with these names and looks."""

    names: list[str]
    looks: Any
    at_once: Copies
    others: list[tuple[int, int]]  # indices of a target and of its source


def _load_by_load_state_dict(number: int, state: Any, theirs: Mapping[str, Tensor], module: nn.Module) -> None:
    """Load a state by a module's own `load_state_dict`, which may refuse it after loading a part."""
    mine = tensors_of(module.state_dict())
    _find_repeated(
        [
            (name, theirs[name], value)
            for name, value in mine.items()
            if name in theirs and not is_lazy(value) and value.shape == theirs[name].shape and not value.is_meta
        ]
    )
    try:
        module.load_state_dict(state)
    except TelegradError:
        raise
    except RuntimeError as error:
        raise InvalidArgument(f"version {number} does not fit: {error}") from error


def _swap(number: int, theirs: Mapping[str, Tensor], mine: Mapping[str, Tensor], module: nn.Module) -> None:
    pairs = _paired(number, theirs, mine)
    known = {*map(id, mine.values())}
    # Tensors outside of the state, such as buffers that are not persistent. A hidden tensor that shares memory with a
    # swapped one would keep the old memory, and no longer share it.
    hidden = [each for each in (*module.parameters(), *module.buffers()) if id(each) not in known]
    apart: list[str] = []
    sharing = groups_of([*(value for _, _, value in pairs), *hidden]) + groups_of([new for _, new, _ in pairs])
    for group in sharing:
        inside = [pairs[each] for each in group if each < len(pairs)]
        if len(inside) < len(group) or not all(_lie_alike(pair, inside[0]) for pair in inside):
            apart += [pairs[each][0] if each < len(pairs) else "a tensor outside of its state" for each in group]
    others = [name for name, new, value in pairs if value.dtype != new.dtype]
    away = [name for name, new, value in pairs if value.device != new.device]
    for names, fault, hint in (
        (others, "whose tensors have other types", "converts them"),
        (away, "that is not in host memory", "copies it there"),
        (apart, "whose tensors share memory in another way", "copies it, where that is possible"),
    ):
        if names:
            raise InvalidArgument(
                f"version {number} cannot be swapped into a module {fault}: {_listed(names)}. load_into {hint}"
            )
    for _, new, value in pairs:
        value.data = new


def _lie_alike(one: Pair, first: Pair) -> bool:
    """Return True if two tensors have the same relative position in memory as their replacements."""
    (_, new, tensor), (_, other_new, other) = one, first
    if tensor is other:
        return bool(place_of(new) == place_of(other_new))
    relation = tensor.data_ptr() - other.data_ptr(), tensor.stride(), other.stride()
    return relation == (new.data_ptr() - other_new.data_ptr(), new.stride(), other_new.stride())


def _write(tensor: Tensor, values: Tensor) -> None:
    """Copy values into a tensor, including one made by `expand`, whose repeated values agree."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        for dimension, step in enumerate(tensor.stride()) if type(tensor) in PLAIN else ():
            if step == 0 and tensor.shape[dimension] > 1:
                tensor, values = tensor.narrow(dimension, 0, 1), values.narrow(dimension, 0, 1)
        tensor.copy_(values)


def _find_repeated(pairs: Sequence[Pair]) -> tuple[set[str], bool]:
    """Return the names of tensors that other names cover, and True if this holds for any values; raise InvalidArgument
    if tensors share memory, and the published tensors do not agree on its content."""
    plain = [pair for pair in pairs if type(pair[2]) in PLAIN]
    groups = groups_of([tensor for _, _, tensor in plain])
    shared = {number for group in groups for number in group}
    groups += [
        [number]
        for number, (_, _, tensor) in enumerate(plain)
        if number not in shared and not tensor.is_contiguous() and repeats(tensor.shape, tensor.stride())
    ]
    again: set[str] = set()
    lasts = True
    for group in groups:
        members = [plain[number] for number in group]
        if len(group) > 1 and len({(place_of(source), place_of(tensor)) for _, source, tensor in members}) == 1:
            again.update(name for name, *_ in members[1:])
        else:
            _try_out(members)
            lasts = False
    return again, lasts


def _try_out(members: Sequence[Pair]) -> None:
    """Write to tensors that share memory, check that each then has its own values, and undo the writes; raise
    InvalidArgument if a tensor has other values, or torch refuses to write to it, since its elements overlap."""
    pairs = [(tensor.data, source) for _, source, tensor in members]  # autograd does not count changes of `.data`
    before = [(tensor, tensor.clone()) for tensor, _ in pairs]
    try:
        for tensor, source in pairs:
            _write(tensor, source)
        agree = all(_same_bits(tensor, source.to(tensor.device, tensor.dtype)) for tensor, source in pairs)
    except RuntimeError:
        agree = False
    for tensor, values in before:
        # torch refused to write to this tensor above, too, so it needs no undo.
        with suppress(RuntimeError):
            _write(tensor, values)
    if not agree:
        raise InvalidArgument(
            f"{_listed([name for name, *_ in members])} share memory here, but were published with "
            "different values: nothing was loaded"
        )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    rows = []
    for each in (one, other):
        # also normalizes strides of dimensions of size 1
        row = each.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        rows.append(row.view(-1).view(torch.uint8))
    return torch.equal(*rows)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + f" and {len(names) - SHOWN} more" * (len(names) > SHOWN)
