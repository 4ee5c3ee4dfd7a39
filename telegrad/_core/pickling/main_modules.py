"""One `__main__` at a worker for each program that calls it.

A function of a main program that is sent by value uses the globals of the receiver's `__main__` for that program. The
receiver has one for each program: the first possible of

- the main module of the receiver, if it runs or has imported the same program;
- the program's file, imported, if the receiver's host has the same file, and a guard keeps it from running again;
- a module that is kept, and filled by received globals.

A function is sent with the globals that it reads. The receiver binds those that it lacks and keeps its own: counters
and trained models keep their state, and a class remains one class. Each global that is sent has a version, which is
increased when the sender binds the name to another object or deletes it: a newer version replaces an older received
one. So a change in a re-run notebook cell takes effect. Globals that the receiver got by importing the program's file
are never replaced.

Globals that share an object (a model, and the optimizer of its parameters) must arrive in one message, else the
receiver would have two copies of it. The sender searches for shared objects, sends such globals together, and refuses a
global that shares an object with one sent before.

The sender does not record what each receiver has: a worker that was restarted would lack it. So each call carries the
globals again, and the receiver ignores those whose version it has. Many threads of a receiver rebuild functions at
once. `MainNamespace.make` and `fill` see to it that all of them get one object for a function or class, and that a name
is bound once for each version.
"""

import atexit
import builtins
import functools
import logging
import sys
import threading
import uuid
from collections.abc import Callable, Iterable
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from telegrad._core.checks import short_repr
from telegrad._core.forks import in_child, renewed
from telegrad._core.pickling import main_program as programs
from telegrad._core.pickling.function_names import program as own_program
from telegrad._core.pickling.global_names import (
    DELETED,
    MAINS,
    Deleted,
    SentGlobals,
    lookups_from,
    names_of_main,
    warn_of_change,
)
from telegrad._core.pickling.main_program import ATOMS, GUARD, MAIN, NO_DATA, Program, ProgramSource
from telegrad._core.pickling.remote_text import kind_of
from telegrad.errors import CannotDecode, CannotEncode

LONGEST_IMPORT = 300.0  # seconds that other threads wait for a thread that imports a program
OWN = sys.maxsize  # the version of globals created by the program's own file

log = logging.getLogger("telegrad")


class Item(NamedTuple):
    """A global to be sent."""

    name: str
    version: int
    value: Any


class Unsendable:
    """Placeholder for a global that cannot be sent: the receiver must have its own."""

    def __init__(self, value: Any) -> None:
        self.kind = kind_of(value)


class MainNamespace:
    """The `__main__` of a program in this process."""

    def __init__(self, program: Program, names: dict[str, Any], own: bool, imported: bool = False) -> None:
        self.program = program
        self.names = names
        self._own = own  # names without a version come from the program itself
        self._versions = dict.fromkeys(names, OWN) if imported else {}  # includes names that a function has deleted
        self._first: dict[str, Any] = {}  # numbers and texts as received
        self._data: dict[str, str] = {}  # digests of other values, as imported
        if imported:
            self._first = {name: value for name, value in names.items() if type(value) in ATOMS}
            self._data = programs.own_data or programs.data_of(program, names)
        self._made: dict[tuple[str, int], Any] = {}  # functions and classes without their state
        self._warned: set[str] = set()
        # Guards the six attributes above, and makes checking and binding a name atomic.
        self._lock = renewed(threading.Lock())

    def __reduce__(self) -> Any:
        return scope_of, tuple(self.program)

    def version(self, name: str) -> int:
        return self._versions.get(name, OWN if self._own else 0)

    def first(self, name: str) -> Any:
        """Return the value to forward: a number or text as received, anything else as it is now."""
        return self._first.get(name, self.names[name])

    def find(self, path: str, version: int) -> Any:
        """Return the object at a path if this version or a later one is here, else None."""
        name, *rest = path.split(".")
        # A later version is here if a newer pickle was rebuilt first. An older one does not count: this pickle has
        # newer code.
        if name not in self.names or self.version(name) < version:
            return None
        found = self.names[name]
        for part in rest:
            found = getattr(found, part, None)
        return found

    def make(self, path: str, version: int, make: Callable[[], Any]) -> Any:
        """Return the function or class of that path, or create one, whose state is to be set."""
        if not path:
            return make()
        with self._lock:
            found = self._made.get((path, version))
            # A class in `_made` may be bound already, but its methods are not set: `find` would return None, or the
            # method of a base class.
            if found is None and (path.partition(".")[0], version) not in self._made:
                found = self.find(path, version)
        if found is not None:
            return found
        made = make()  # without the lock, as a metaclass is user code
        with self._lock:
            return self._made.setdefault((path, version), made)

    def lacks_state(self, path: str, version: int, thing: Any) -> bool:
        """Return True if a function or class needs the received state."""
        return not path or self._made.get((path, version)) is thing

    def fill(self, items: Iterable[Item], complete: tuple[str, int] | None = None) -> None:
        """Bind the globals that are missing here, and bind or delete those received in a newer version.

        `complete`: path and version of a function or class whose state is set now. Raise CannotDecode if a global is
        missing here and could not be sent.
        """
        told, changed = [], []
        with self._lock:
            for name, version, value in items:
                if name in programs.differing and name in self.names and self.version(name) == OWN:
                    changed.append(name)
                    continue
                # A name that is not bound here, but has a version, was deleted here, by the sender or by a function.
                # The same version does not bind it again. Without a version it gets -1, which is less than the 0 of an
                # `Unsendable`.
                has = self.version(name) if name in self.names else self._versions.get(name, -1)
                if has >= version:
                    if has in (version, OWN) and self._differs(name, value):  # same version, but from another sender
                        told.append((name, value))
                elif isinstance(value, Unsendable):
                    if name not in self.names:
                        raise CannotDecode(
                            f"the global {name!r} of the caller's main program ({value.kind}) cannot be sent, and "
                            "this worker does not have that program: make its file available here under the same "
                            "path, or move the code that uses it into a module"
                        )
                elif isinstance(value, Deleted):
                    self.names.pop(name, None)
                    self._versions[name] = version
                else:
                    self.names[name] = value
                    self._versions[name] = version
                    if type(value) in ATOMS:
                        self._first[name] = value
            # Under the same lock as the binding: `make` always finds the object, either in `_made` or bound. Else
            # another thread would make a second one in between.
            if complete is not None:
                self._made.pop(complete, None)
        # Logging calls handlers, which are the user's code. So it is done without the lock.
        for name in changed:
            warn_of_change(name, self.names.get(name))
        for name, value in told:
            log.warning(
                "telegrad: the global %r of %s is %s at the caller and %s at this worker, which uses its own: pass "
                "it as an argument, or assign it at the top level, outside of `%s`",
                *(name, self.program.path, short_repr(value), short_repr(self.names[name]), GUARD),
            )

    def _differs(self, name: str, value: Any) -> bool:
        """Return True, once, if data differs from the sender's: of numbers and texts, if they were not changed here."""
        # A program that is run by one process and imported by another differs in `__name__`, as it should.
        if name in self._warned or name not in self.names or name == "__name__":
            return False
        here = self.names[name]
        if type(value) in ATOMS:
            is_same = here is not self._first.get(name, self) or (type(here) is type(value) and here == value)
        elif isinstance(value, Deleted):
            is_same = name not in self._first and name not in self._data
        else:
            known = not isinstance(value, (Unsendable, *NO_DATA)) and name in self._data
            is_same = not known or programs.digest_of(value) == self._data[name]
        if is_same:
            return False
        self._warned.add(name)
        return True


_lock = renewed(threading.Lock())  # guards _making
_scopes: dict[str, MainNamespace] = {}  # by the program's key
_making: dict[str, threading.Lock] = {}  # by the program's key: held while a thread imports the program
_sent = SentGlobals()
note_sent = _sent.note_sent
_trial = threading.local()
in_child(_making.clear)  # a forked child does not have the threads that import


def scope_of(*parts: Any) -> MainNamespace:
    """Return the scope of a program, made at the first use; raise CannotDecode if its file here cannot be imported."""
    program = Program(*parts)
    key = program.key
    own = own_scope()
    if key == own.program.key:
        return own
    if (scope := _scopes.get(key)) is not None:
        return scope
    # The import runs the user's program, and may take long. So each program has a lock of its own, and functions of
    # other programs are rebuilt meanwhile. The wait is limited, since the imported code may wait for a thread that
    # waits here.
    with _lock:
        making = _making.setdefault(key, threading.Lock())
    if not making.acquire(timeout=LONGEST_IMPORT):
        raise CannotDecode(f"another thread has been importing {program.path} for {LONGEST_IMPORT:g} s")
    try:
        if key not in _scopes:
            _scopes[key] = _new_scope(program)
        return _scopes[key]
    finally:
        making.release()


def _new_scope(program: Program) -> MainNamespace:
    if program.serves_torch and not programs.serves_torch:
        log.warning(
            "telegrad: a program that runs by `python -m telegrad` calls this worker, where torch.distributed.rpc is "
            "torch's own: start the worker in the same mode, by `python -m telegrad -m telegrad worker ...`"
        )
    if programs.matches(program):
        try:
            module = programs.load(program, as_main=False)
        except BaseException as error:
            raise CannotDecode(
                f"the program {program.path}, whose functions were sent, cannot be imported by this worker: "
                f"{type(error).__name__}: {error}"
            ) from error
        return MainNamespace(program, vars(module), own=True, imported=True)
    module = ModuleType(MAIN)
    vars(module).update(__builtins__=builtins, __file__=program.path)
    return MainNamespace(program, vars(module), own=False)


_key_without_file = functools.cache(lambda: uuid.uuid4().hex)  # of a main program; called under `_lock`
_own: list[MainNamespace] = []  # the scope of this process; replaced as a whole
# torch holds functions of this package beyond the end of the interpreter, and so all that is in the variables of these
# modules. The program's objects must end before: only then are the files written that it has left open.
atexit.register(_own.clear)
atexit.register(_scopes.clear)


def own_scope() -> MainNamespace:
    names = names_of_main()
    if not _is_own(names):
        with _lock:
            if not _is_own(names):  # again, under the lock: two scopes would make two objects for a function
                key = own_program() or _key_without_file()
                imported = names.get("__name__") in MAINS[1:] and names is vars(sys.modules[MAIN])
                _own[:] = [MainNamespace(programs.find(key), names, own=True, imported=imported)]
    return _own[0]


def _is_own(names: dict[str, Any]) -> bool:
    """Return True if the scope of this process is that of these names, the globals of its main module."""
    # The main module may change: a worker of `telegrad.local` runs this package as its main module, then adopts the
    # program of the driver.
    return bool(_own) and _own[0].names is names and _own[0].program.serves_torch == programs.serves_torch


def class_at(scope: MainNamespace, path: str) -> Any:
    """Return the class at a path of a program; raise CannotDecode if it is not here."""
    found = scope.find(path, 0)
    if not isinstance(found, type):
        raise CannotDecode(f"there is no class {path!r} of {scope.program.path} here")
    return found


# Sending


def scope_from(thing: Any) -> tuple[MainNamespace, str] | None:
    """Return the scope of a function or class of a main program, and its path there, "" for a local one."""
    if not isinstance(thing, FunctionType):
        return scope_at_name(thing)
    for scope in (own_scope(), *list(_scopes.values())):
        if thing.__globals__ is scope.names:
            return scope, _verified(scope, thing.__qualname__, thing)
    return None


def scope_at_name(thing: Any) -> tuple[MainNamespace, str] | None:
    """Return the scope and the path of an object that a main program has under its name."""
    path = thing.__qualname__
    if thing.__module__ in MAINS:
        for scope in (own_scope(), *list(_scopes.values())):
            if _verified(scope, path, thing):
                return scope, path
    return None


def _verified(scope: MainNamespace, path: str, thing: Any) -> str:
    return path if scope.find(path, 0) is thing else ""


def items_for(pickler: Any, scope: MainNamespace, needed: Iterable[str], home: str) -> list[Item]:
    """Return the globals to send with a function or class. `home`: the global that contains it, if any.

    `needed` may have names that are not bound: they are sent as deleted if receivers may have them.
    """
    # This worker passes on a function of another program. The next receiver may have the file of that program or not,
    # so all values are sent, with the versions that they have here. Those that the file has bound count as version 1.
    if scope not in _own:
        wanted = {name for name in needed if name in scope.names} | ({home} if home else set())
        return [Item(name, version_of(scope, name), _to_pass_on(pickler, scope, name)) for name in sorted(wanted)]
    source = programs.source_of(scope.program.path)
    # `has`: names that a receiver has if it runs or imports the file. A program without a guard is never imported.
    has = source.top if source.guarded else frozenset()
    if pickler.same_program:
        for name in sorted({*needed, home} & source.top & source.main):
            _check_bound(source, name, scope.names.get(name))
    names = _sent.complete({name for name in needed if name in scope.names}, scope.names, has)
    # A name that was never sent, and that no import binds, is unknown to receivers. So only other names need a
    # deletion.
    gone = [name for name in needed if name not in scope.names and (name in has or name in _sent.versions)]
    items = [Item(name, _sent.version(name, DELETED), DELETED) for name in sorted(gone)]
    for name in sorted(names):
        value = scope.names[name]
        if name in has and not isinstance(value, NO_DATA) and type(value) not in ATOMS:
            # Receivers that import the file keep their own value. This one is for receivers whose hosts lack the file,
            # and to compare it. Version 0 replaces nothing: a receiver that lacks the name raises.
            if pickler.same_program or not _can_be_sent(pickler, value):
                items.append(Item(name, 0, Unsendable(value)))
                continue
        elif name in has and pickler.same_program and type(value) not in ATOMS:
            continue
        item = Item(name, _sent.version(name, value), value)
        items.append(item)
        # Receivers keep these values. `note_sent` remembers their state once the whole pickle has succeeded, and warns
        # if they are sent again after a change in place.
        if name not in has and type(value) not in ATOMS and not isinstance(value, ModuleType):
            pickler.globals_sent.append(item)
    if home and home not in names:
        value = scope.names[home]
        items.append(Item(home, _sent.version(home, value), value))
        if home not in has and isinstance(value, type):
            pickler.globals_sent.append(items[-1])
    return items


def _to_pass_on(pickler: Any, scope: MainNamespace, name: str) -> Any:
    """Return the value of a global of another program; for one that cannot be sent, its kind if others import it."""
    value = scope.first(name)
    # A global that the program's file has bound may be of a type that cannot be pickled. One that came from another
    # worker was pickled before.
    is_plain = isinstance(value, NO_DATA) or type(value) in ATOMS or scope.version(name) != OWN
    return value if is_plain or _can_be_sent(pickler, value) else Unsendable(value)


def _check_bound(source: ProgramSource, name: str, value: Any) -> None:
    """Refuse a function or class whose name the guard has bound again: workers have the first one."""
    if not isinstance(value, type | FunctionType) or value.__module__ not in MAINS or name in source.declared:
        return
    code = getattr(value, "__code__", None)
    if code is None or code.co_qualname != name or code.co_firstlineno in source.lines:
        raise CannotEncode(
            f"the name {name!r} is bound at the top level of the main program and again under `{GUARD}`, and workers "
            "have the first: use two names"
        )


def note_class(scope: MainNamespace, kind: type) -> None:
    """Record a class of the main program that is sent: its methods read globals wherever its objects are."""
    if scope in _own:
        source = programs.source_of(scope.program.path)
        read = lookups_from(kind, scope.names).read
        _sent.note_class(read - source.top if source.guarded else read)


def warn_of_rebound() -> None:
    """Warn of globals that were rebound here, while methods of objects at workers read the earlier ones."""
    if _sent.read_by_classes:
        _sent.warn_of_rebound(own_scope().names)


def _can_be_sent(pickler: Any, value: Any) -> bool:
    """Return True if a value can be pickled, or if this thread is checking it: its class may use the global itself."""
    # Pickling a class asks for the globals that its methods read, which may lead back here: to an object of that class.
    tried: set[int] = _trial.__dict__.setdefault("tried", set())
    if id(value) in tried:
        return True
    tried.add(id(value))
    try:
        return bool(pickler.can_dump(value, pickler.same_program))
    finally:
        tried.discard(id(value))


def version_of(scope: MainNamespace, path: str) -> int:
    """Return the version of the first global in a path."""
    name = path.partition(".")[0]
    if scope not in _own:
        version = scope.version(name)
        return 1 if version == OWN else max(version, 1)
    return _sent.version(name, scope.names[name])
