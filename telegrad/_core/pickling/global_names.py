"""The globals of the main program: those that a function or class reads, that workers lack, and that were sent.

Workers that import the driver's program have the globals that its source binds outside of the guard. All others exist
only in the driver: the code under the guard, or a function that the driver called, has created them.

Three questions are answered here. Which globals does a function need? `lookups_from` reads bytecode, and follows
objects to all program code that the function may reach. Which of them do workers lack? `lacks` compares these names
with the places in the source that bind them. Did a global change since it was sent? `SentGlobals` has a version for
each name, which grows when the name is bound to another object. A change within an object has no event, so `_state_of`
compares a checksum. `SentGlobals` also finds the globals that share objects, which must arrive together.
"""

import array
import ctypes
import dis
import functools
import logging
import sys
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from telegrad._core.forks import renewed
from telegrad._core.pickling import main_program as programs
from telegrad._core.pickling.main_program import (
    ATOMS,
    GUARD,
    MAIN,
    MOST,
    NO_DATA,
    SPAWNED_MAIN,
    attributes_of,
    is_plain,
    source_of,
)
from telegrad.errors import CannotEncode

MAINS = (MAIN, SPAWNED_MAIN)
_CACHED = 4096
# LOAD_NAME is in bodies of classes. LOAD_FROM_DICT_OR_GLOBALS, since Python 3.12, is in annotation scopes within these.
_READS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_WRITES = {"STORE_GLOBAL", "DELETE_GLOBAL"}


class Lookups(NamedTuple):
    """Names of globals that code accesses."""

    read: frozenset[str]
    written: frozenset[str]


@functools.lru_cache(_CACHED)
def lookups_of(code: CodeType) -> Lookups:
    """Return the globals that the code, including functions and classes defined in it, reads and writes."""
    read, written = set(), set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in _READS:
            read.add(instruction.argval)
        elif instruction.opname in _WRITES:
            written.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = lookups_of(constant)
            read |= inner.read
            written |= inner.written
    return Lookups(frozenset(read), frozenset(written))


def lookups_from(thing: Any, names: dict[str, Any]) -> Lookups:
    """Return the globals that a function or class of the program, and all program code that it uses, read and write."""
    read: set[str] = set()
    written: set[str] = set()
    seen: set[int] = set()
    # The walk is over objects, since bytecode has only names: a default, a closure, a decorated function, a `partial`
    # or a base class may lead to further code of the program. Functions of other modules are not searched for globals,
    # because workers import these modules. Objects are known by id, since many cannot be hashed.
    todo = [thing]
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, FunctionType):
            todo += [getattr(each, "__wrapped__", None), *(each.__defaults__ or ()), *dict(closed_over(each)).values()]
            if each.__module__ in MAINS:
                found = lookups_of(each.__code__)
                written |= found.written
                read |= found.read
                todo += [names[name] for name in found.read if name in names]
        elif isinstance(each, type):
            if each.__module__ in MAINS:
                todo += [*vars(each).values(), *each.__bases__]
        elif isinstance(each, MethodType | staticmethod | classmethod):
            todo.append(each.__func__)
        elif isinstance(each, property):
            todo += [each.fget, each.fset, each.fdel]
        elif isinstance(each, functools.partial):
            todo += [each.func, *each.args, *each.keywords.values()]
        elif type(each).__module__ in MAINS:  # code may call methods of this object
            todo.append(type(each))
        elif hasattr(each, "__wrapped__"):
            todo.append(each.__wrapped__)
    return Lookups(frozenset(read), frozenset(written))


def closed_over(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of the variables of enclosing functions that a function uses."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not bound yet
            continue


def names_of_main() -> dict[str, Any]:
    """Return the globals of this process's main program.

    `runpy`, which multiprocessing uses to import it in a spawned child, copies them into the module. Functions use the
    original dictionary.
    """
    names = vars(sys.modules[MAIN])
    if names.get("__name__") == SPAWNED_MAIN:
        for value in names.values():
            if type(value) is FunctionType and value.__module__ == SPAWNED_MAIN:
                return value.__globals__
    return names


# By the id of the object in the entry: the names that workers may lack or have otherwise, and True if one of them is
# bound as workers import the program. Entries are replaced as a whole.
_known: dict[int, tuple[Callable[[], Any], frozenset[str], bool]] = {}


def lacks(thing: Any) -> bool:
    """Return True if workers lack a function, or if it or a class uses a global that they lack or have otherwise.

    If the guard or a function binds a name again or deletes it, workers have its first value. If the function itself
    assigns the name, that is its state, and each worker has its own.
    """
    names = vars(sys.modules[MAIN])
    known = _known.get(id(thing))
    if known is None or known[0]() is not thing:
        source = source_of(str(names.get("__file__")))
        read, written = lookups_from(thing, names)
        if isinstance(thing, type | FunctionType):
            read |= {thing.__qualname__.partition(".")[0]}
        # `absent`: no statement at the top level binds the name. After an `import *`, nothing is known to be absent.
        # `again`: a statement under the guard, or a function that declares the name as global, may have replaced the
        # value that workers have. Names that this code itself assigns are its own state.
        absent = frozenset() if source.stars else (read | written) - source.top
        again = (read & (source.main | source.declared)) - written
        if len(_known) >= _CACHED:
            _known.clear()
        other = frozenset(name for name in absent | again if not name.startswith("__"))
        known = _known[id(thing)] = ref_to(thing), other, bool(other & again & source.top)
    # A name in `again` that the top level binds, too, may have another value at workers. Any other name makes a
    # difference only while it is bound here. This runs for each call, and the second set is mostly empty.
    return known[2] or (bool(known[1]) and any(name in names for name in known[1]))


def ref_to(thing: Any) -> Callable[[], Any]:
    """Return a function that returns the object; once it is freed, FREED. Objects of some types are never freed."""
    if not type(thing).__weakrefoffset__:
        return lambda: thing
    ref = weakref.ref(thing)
    return lambda: FREED if (found := ref()) is None else found


FREED = object()
_PASS_IT = "Pass it as an argument, or assign a new object to the name"
_LOOKS = 64  # buffers of a global whose content is compared
_SAMPLE = 1 << 16  # bytes of each
_OWN_WAYS = {name: getattr(object, name, None) for name in ("__getstate__", "__getnewargs_ex__", "__getnewargs__")}

log = logging.getLogger("telegrad")


class Deleted:
    """The value that is sent for a global that the sender has deleted."""

    def __repr__(self) -> str:
        return "deleted"


DELETED = Deleted()  # one for all: versions compare values by identity


class SentGlobals:
    """The globals of one program that are sent with its functions."""

    def __init__(self) -> None:
        # Guards all attributes below. No user code runs under it, since that may send a function, which takes it.
        self._lock = renewed(threading.Lock())
        self._last: dict[str, Callable[[], Any]] = {}  # by name: the value of the current version; `object`: none
        self.versions: dict[str, int] = {}  # by name; its keys are read without the lock
        # Values whose objects were examined; also read without the lock. The program may free them.
        self._looked: dict[str, Callable[[], Any]] = {}
        # by id of an object: the first global that contains it; also copied without the lock
        self._owners: dict[int, str] = {}
        self._group: dict[str, set[str]] = {}  # by name: the globals that share objects with it, and itself
        self._sent: set[str] = set()
        self._conflicts: dict[str, str] = {}  # by name: a global sent before that shares an object with it
        self._states: dict[str, tuple[int, int]] = {}  # versions and states of mutable values when they were sent
        self._warned: set[str] = set()
        self.read_by_classes: set[str] = set()  # globals read by methods of sent classes
        self._replaced: set[str] = set()  # those of them whose rebinding was reported

    def version(self, name: str, value: Any) -> int:
        """Return the version of a global to be sent."""
        with self._lock:
            if not _is_same(self._last.get(name, object)(), value):
                self._replaced.discard(name)
                self._warned.discard(name)
                self._last[name] = ref_to(value)
                self.versions[name] = self.versions.get(name, 0) + 1
            return self.versions[name]

    def note_sent(self, items: Iterable[tuple[str, int, Any]]) -> None:
        """Record names, versions and values that were sent. Warn once of each that was changed in place since then."""
        changed = {}
        # Without the lock, since it may call methods of the values.
        states = [(name, value, (version, _state_of(value))) for name, version, value in items]
        with self._lock:
            for name, value, state in states:
                if not isinstance(value, NO_DATA):
                    self._sent.add(name)
                before = self._states.setdefault(name, state)
                if before[0] < state[0]:
                    self._states[name] = state
                elif before != state and name not in self._warned:
                    self._warned.add(name)
                    changed[name] = value
        for name, value in changed.items():
            log.warning(
                "telegrad: the global %r of the main program was changed in place after it was sent: workers that "
                "have it keep their own copy. %s",
                *(name, "Define the class anew" if isinstance(value, type) else _PASS_IT),
            )

    def note_class(self, names: frozenset[str]) -> None:
        """Record the globals that methods of a class read, when the class is sent."""
        with self._lock:
            self.read_by_classes |= names

    def warn_of_rebound(self, scope: dict[str, Any]) -> None:
        """Warn once for each global that methods of sent classes read and that is bound otherwise or deleted now."""
        with self._lock:
            found = [
                name
                for name in self.read_by_classes & self._last.keys() - self._replaced
                if not _is_same(self._last[name](), scope.get(name, DELETED))
            ]
            self._replaced.update(found)
        for name in found:
            log.warning(
                "telegrad: the global %r of the main program was bound to another object, or deleted, after it was "
                "sent: methods of objects at workers use the earlier one until a function that reads it is called "
                "there",
                name,
            )

    def complete(self, names: set[str], scope: dict[str, Any], has: frozenset[str]) -> set[str]:
        """Return the names, and the globals that share objects with them; `has`: globals that receivers have anyway.
        Raise CannotEncode if one of them shares an object with one that was sent before, or that receivers have."""
        fresh = self._look(scope)
        gone = self._gone([part for _, _, parts in fresh for part in parts])
        with self._lock:
            if gone:
                self._owners = dict(self._owners.items() - gone)
            self._note_parts(fresh, scope, has)
            found = {other for name in names for other in self._group.get(name, (name,)) if other in scope}
            for name in sorted(found - has):
                if name in self._conflicts:
                    raise CannotEncode(
                        f"the global {name!r} of the main program shares an object with {self._conflicts[name]!r}, "
                        "which workers already have: they would get a second copy of it. Create both in one cell, "
                        "before either is used, or in a function that workers run"
                    )
        return found

    def _look(self, scope: dict[str, Any]) -> list[tuple[str, Any, list[Any]]]:
        """Return the globals bound since the last call, with the parts that they may share.

        Not under the lock: this may call methods of the values, such as a property `__class__`.
        """
        shell = getattr(scope.get("get_ipython"), "__self__", None)
        hidden = getattr(shell, "user_ns_hidden", {})  # IPython adds these: `In`, `Out`, `exit` and others
        return [
            (name, value, _shared_parts(value, scope))
            for name, value in list(scope.items())
            if self._looked.get(name, object)() is not value
            and type(value) not in ATOMS
            and not isinstance(value, NO_DATA)
            and not name.startswith("_")
            and hidden.get(name, self) is not value
        ]

    def _gone(self, parts: list[Any]) -> set[tuple[int, str]]:
        """Return the entries of `_owners` for objects that were freed: one of `parts` may have such an object's id."""
        owners, found = self._owners.copy(), set[tuple[int, str]]()
        for name in {owners[id(part)] for part in parts if id(part) in owners}:
            now = set(map(id, mutable_parts(self._looked.get(name, object)())))
            found |= {(key, owner) for key, owner in owners.items() if owner == name and key not in now}
        return found

    def _note_parts(self, found: list[tuple[str, Any, list[Any]]], scope: dict[str, Any], has: frozenset[str]) -> None:
        """Record which globals share objects."""
        # Another thread may have bound or recorded some meanwhile.
        fresh = [
            (name, value, parts)
            for name, value, parts in found
            if scope.get(name) is value and self._looked.get(name, object)() is not value
        ]
        # The first global with an object becomes its owner. Those that receivers have come first: in the other order, a
        # global to be sent would own the shared object, and the conflict with a global that receivers already have
        # would not be found.
        fresh.sort(key=lambda each: each[0] not in has)
        # A name that was bound to another object, or deleted, gives up the objects that it owned, and no longer counts
        # as sent. Its value is not kept here either: dictionaries and lists have no weak references.
        over = {name for name, value in self._looked.items() if value() is not scope.get(name, DELETED)}
        if over:
            self._owners = {key: name for key, name in self._owners.items() if name not in over}
        for name in over:
            del self._looked[name]
            if name in self._last:
                self._last[name] = object
        for name, value, _ in fresh:
            self._looked[name] = ref_to(value)
            self._group[name] = {name}
            self._conflicts.pop(name, None)
            self._sent.discard(name)
        for name, _, parts in fresh:
            for part in parts:
                other = self._owners.setdefault(id(part), name)
                if other == name:
                    continue
                if (other in self._sent or other in has) and name not in has:
                    self._conflicts[name] = other
                group = self._group[other] | self._group[name]
                for member in group:
                    self._group[member] = group


def _is_same(last: Any, value: Any) -> bool:
    return last is value or (type(value) in ATOMS and type(last) is type(value) and last == value)


def _shared_parts(value: Any, scope: dict[str, Any]) -> list[Any]:
    """Return the parts of a global that other globals can share at a worker: none if it cannot be sent.

    An object that refers to the globals themselves, such as the shell of a notebook, would connect all of them. An
    object with a file, a lock or a connection cannot be sent either; through these, objects of this package refer to
    others.
    """
    found = []
    for part in mutable_parts(value):
        if part is scope or not _can_be_pickled(part):
            return []
        found.append(part)
    return found


def _can_be_pickled(part: Any) -> bool:
    """Return False if pickle refuses an object because of its class. Run no code of the class."""
    kind: Any = type(part)
    # A class with its own rules of pickling may do anything there, so its objects count as picklable until they are
    # pickled. `object.__reduce_ex__` calls none of the class's methods. It raises TypeError for objects with state in
    # C, such as locks.
    if not is_plain(kind) or any(getattr(kind, name, own) is not own for name, own in _OWN_WAYS.items()):
        return True
    try:
        object.__reduce_ex__(part, 2)
    except TypeError:
        return False
    return True


def mutable_parts(value: Any) -> Iterator[Any]:
    """Yield the mutable objects in a value: containers, tensors, and objects pickled by their attributes."""
    seen: set[int] = set()
    todo = [value]
    while todo and len(seen) < MOST:
        each = todo.pop()
        kind: Any = type(each)
        if kind in ATOMS or id(each) in seen or isinstance(each, NO_DATA):
            continue
        seen.add(id(each))
        if isinstance(each, dict):
            todo += list(each.values())
        elif kind in (tuple, list, set, deque):
            todo += list(each)
        elif not (isinstance(each, Tensor) or _is_buffer(each)):
            if not is_plain(kind):
                continue
            todo += list(getattr(each, "__dict__", {}).values())
        if kind is not tuple:
            yield each


def _state_of(value: Any) -> int:
    """Return a number that changes if the value is changed in place: a tensor written, an element or attribute set."""
    found: list[Any] = []
    looks = 0
    if isinstance(value, type | FunctionType):
        value = attributes_of(value) if isinstance(value, type) else value.__dict__
    for part in mutable_parts(value):
        # torch counts writes by operators in `_version`. It does not count those through `data`, numpy or a fused
        # optimizer, and inference tensors have no counter. So the content is compared as well.
        if isinstance(part, Tensor):
            found.append(0 if part.is_inference() else part._version)
        if isinstance(part, Tensor) or _is_buffer(part):
            looks += 1
            found.append(_sample(part) if looks <= _LOOKS else 0)
        else:
            held = part if isinstance(part, dict | list | set | deque) else getattr(part, "__dict__", {})
            values = list(held.values()) if isinstance(held, dict) else list(held)
            found += [hash(each) if type(each) in ATOMS else id(each) for each in values]
    return hash(tuple(found))


def _is_buffer(part: Any) -> bool:
    """Return True for arrays of numbers and bytes that can be changed."""
    return isinstance(part, bytearray | array.array) or type(part).__module__ == "numpy"


def _sample(part: Any) -> int:
    """Return a checksum of the content of a tensor or an array; of some of its bytes if it is large."""
    try:
        if isinstance(part, Tensor):
            if type(part) not in (Tensor, Parameter) or not part.is_cpu or not part.is_contiguous():
                return 0
            content: Any = memoryview((ctypes.c_char * part.nbytes).from_address(part.data_ptr())).cast("B")
        else:
            content = memoryview(part).cast("B")
    except (TypeError, ValueError, RuntimeError):  # not in one piece, or objects; a tensor without memory
        return 0
    step = 1 + len(content) // _SAMPLE
    return zlib.crc32(content if step == 1 else bytes(content[::step]))


def warn_of_differing(function: Any) -> None:
    """Warn once of each global that a called function reads and that the driver had changed before it began."""
    names = names_of_main()
    found = lookups_from(function, names)
    for name in sorted(programs.differing & (found.read - found.written) & names.keys()):
        warn_of_change(name, names[name])


def warn_of_change(name: str, value: Any) -> None:
    """Warn of a global that the driver had changed, unless this worker has changed it, too."""
    programs.differing.discard(name)
    if programs.digest_of(value) != programs.own_data[name]:
        return
    log.warning(
        "telegrad: the global %r of the main program is another at the caller, changed under `%s` or random, and this "
        "worker uses its own of the top level: pass it as an argument, or make it equal at the top level",
        *(name, GUARD),
    )
