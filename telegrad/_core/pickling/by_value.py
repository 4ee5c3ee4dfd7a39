"""Send functions and classes by value, as their code, if no name leads to them at the receiver.

cloudpickle takes functions and classes apart. It gives each pickle a copy of the globals that a function reads, which
is wrong for functions of a main program: a counter or a model would start anew with each call. So for these, the parts
of cloudpickle's result are rearranged (`in_scope`). The receiver creates the function with the globals of its
`__main__` for that program, and the globals that the function reads are sent beside its state, each with a version
(`main_modules`). A function or class that is at the top level of its program is created once at the receiver.

If that fails too, find the part of the value that cannot be pickled, and name it: an argument, an element, a variable.
Imported only when needed, which is rare: cloudpickle would make each start slower.
"""

import abc
import enum
import functools
import importlib
import io
import logging
import platform
import sys
import types
from collections import ChainMap
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import MAGIC_NUMBER
from types import AsyncGeneratorType, CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, ClassVar, NewType, ParamSpec, TypeVarTuple

import cloudpickle

from telegrad._core.interrupts import raised_by_handler
from telegrad._core.pickling import main_modules
from telegrad._core.pickling.function_names import name_of
from telegrad._core.pickling.global_names import MAINS, closed_over, lookups_of, mutable_parts
from telegrad._core.pickling.main_program import GUARD
from telegrad._core.pickling.reducers import BoundToProcess, Pickler
from telegrad._core.pickling.remote_text import first_line, kind_of
from telegrad.errors import CannotDecode, CannotEncode, TelegradError, UsageError

log = logging.getLogger("telegrad")


def _reduce_code(code: CodeType) -> Any:
    # cloudpickle 3.1.3 and later omits the file, without which a remote traceback could not show its lines.
    parts = tuple(code.co_filename if part == _NO_FILE else part for part in _REDUCE_CODE(code)[1])
    return make_code, (code.co_name, MAGIC_NUMBER, platform.python_version(), parts)


def make_code(name: str, magic: bytes, version: str, parts: tuple[Any, ...]) -> CodeType:
    """Create a received code object; raise CannotDecode for another Python version, whose code would crash this one."""
    if magic != MAGIC_NUMBER:
        raise CannotDecode(
            f"the code of {name!r} is for Python {version}, and this worker runs Python {platform.python_version()}: "
            "have both import it from a module, or run the same minor version everywhere"
        )
    return CodeType(*parts)


_NO_FILE = "<dynamic-code>"
# Private parts of cloudpickle: the functions that set the state of an object, and its own reducers. `in_scope` replaces
# the constructors, so the states have to be set from here.
_own = cloudpickle.cloudpickle
_set_function = _own._function_setstate
_REDUCE_CODE = cloudpickle.Pickler.dispatch_table[CodeType]
_CACHE = "_abc_impl"
_OF_SLOTS = types.MemberDescriptorType | types.GetSetDescriptorType


class _Reducers(ChainMap[type, Any]):
    def __missing__(self, kind: type) -> Any:
        """Send a module of a type of its own by its name, and a cached property without its lock.

        cloudpickle includes each module that code seems to name, such as torch.ops for an attribute `ops`.
        """
        if issubclass(kind, functools.cached_property) and kind.__init__ is functools.cached_property.__init__:
            # Python 3.11 has the lock. The constructor makes another.
            return lambda each: (kind, (each.func,), {name: vars(each)[name] for name in vars(each).keys() - {"lock"}})
        if issubclass(kind, ModuleType):
            return lambda module: (importlib.import_module, (module.__name__,))
        if kind in (ParamSpec, TypeVarTuple, NewType):  # the pickler below sends a TypeVar
            return _reduce_type
        if issubclass(kind, enum.Enum) and kind.__module__ in MAINS:
            # By its name: a value may be equal to itself alone. A combination of flags may have no name.
            return lambda member: (
                (getattr, (kind, member._name_)) if member._name_ in kind.__members__ else member.__reduce_ex__(5)
            )
        raise KeyError(kind)


def _reduce_type(each: Any) -> Any:
    """Reduce a type variable or a NewType: by its name, unless a main program defines it."""
    if each.__module__ not in MAINS:
        return each.__reduce__()
    return type(each), (each.__name__, *([each.__supertype__] if isinstance(each, NewType) else ()))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table: ClassVar = _Reducers({CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, type) or obj in _own._BUILTIN_TYPE_NAMES:
            return super().reducer_override(obj)
        if _own._should_pickle_by_reference(obj):
            return NotImplemented
        return _reduce_enum(obj) if issubclass(obj, enum.Enum) else _reduce_class(obj)


def _reduce_class(kind: type) -> Any:
    """Reduce a class as cloudpickle does, and with its slots, its qualified name, and the order of its members."""
    constructor, name, bases, given, *more = _own._class_getnewargs(kind)
    members = dict(vars(kind))
    # Python makes these descriptors, under mangled names, from `__slots__`.
    slots = {each.__name__ for each in members.values() if isinstance(each, _OF_SLOTS) and each.__objclass__ is kind}
    for made_anew in (*slots, "__dict__", "__annotate_func__"):
        members.pop(made_anew, None)
    given["__qualname__"] = kind.__qualname__
    if type(kind) is type and "__orig_bases__" in members:  # of a generic class, or of a NamedTuple, whose fields exist
        bases, given["__orig_bases__"] = kind.__bases__, members["__orig_bases__"]
    if "__slots__" in members:
        given["__slots__"] = tuple(slots)
    if isinstance(kind, abc.ABCMeta):
        members["_abc_impl"] = [registered() for registered in abc._get_dump(kind)[0]]  # type: ignore[attr-defined]
    return _own._make_skeleton_class, (constructor, name, bases, given, *more), (members, {}), None, None, _set_class


def _reduce_enum(kind: Any) -> Any:
    """Reduce an enumeration as cloudpickle does, and with the parts of its members that their constructors have set."""
    members = kind.__members__  # aliases included
    data, more = {}, {}
    for name, member in members.items():
        make, arguments, *_ = _reduce_object(member, 2)
        if make is not kind and make.__name__ != "__newobj__":
            raise CannotEncode(f"members of {kind.__qualname__} have a __reduce__: define the class in a module")
        data[name] = member._value_, arguments if make is kind else arguments[1:]
        more[name] = {key: part for key, part in vars(member).items() if key not in _OF_ENUM}
    given = kind.__bases__, (kind.__module__, kind.__qualname__), data, getattr(kind, "_boundary_", None)
    contents, _ = _own._enum_getstate(kind)
    state = {name: value for name, value in contents.items() if name not in members}
    tracker = _own._get_or_create_tracker_id(kind)
    return make_enum, (type(kind), *given, tracker), (state, more), None, None, _set_class


_reduce_object: Any = object.__reduce_ex__  # the member's own sends its value alone
_OF_ENUM = {"_value_", "_name_", "__objclass__", "_sort_order_"}


def _reduce_wrapper(pickler: Any, wrapper: Any, make: Any, *arguments: Any) -> Any:
    """Reduce a wrapper of functools to the call that makes it: the receiver has one object for it."""
    own = {name: part for name, part in vars(wrapper).items() if name not in _OF_WRAPPERS}  # set by the program
    found = main_modules.scope_at_name(wrapper)
    if found is None:
        return make, arguments, own
    home, items = _home_and_items(pickler, found)
    return _keep, (*home, make, arguments), (*home, items, own), None, None, _set


def make_enum(
    meta: Any, bases: Any, names: tuple[str, str], members: dict[str, Any], boundary: Any, tracker: Any
) -> Any:
    """Create an enumeration whose members have these values and data, without a call of their own constructors."""
    coming = iter(members.values())

    def new(cls: Any, *_: Any) -> Any:
        value, data = next(coming)
        member = cls._member_type_.__new__(cls, *data)
        member._value_ = value
        return member

    module, path = names
    name = path.rpartition(".")[2]
    contents = meta.__prepare__(name, bases)
    contents["__module__"], contents["__qualname__"] = module, path
    for each, (value, _) in members.items():
        contents[each] = enum.member(value)  # a function, too, can be the value of a member
    contents["__new__"], contents["__init__"] = new, lambda *_: None
    made = meta.__new__(meta, name, bases, contents, boundary=boundary)
    del made.__new_member__, made.__init__  # the receiver sets those of the sender's class
    return _own._lookup_class_or_track(tracker, made)


def make_cached(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)  # its cache is empty


def make_dispatching(function: Any, registered: dict[type, Any]) -> Any:
    made = functools.singledispatch(function)
    for kind, one in registered.items():
        made.register(kind, one)
    return made


_dispatching: Any = functools.singledispatch(make_cached)
_DISPATCHING = _dispatching.__code__  # of all functions that singledispatch makes
_OF_WRAPPERS = {*functools.WRAPPER_ASSIGNMENTS, *vars(_dispatching)}


class ValuePickler(Pickler, _Pickler):
    """A pickler that also sends functions and classes without a name, by value."""

    def by_value(self, obj: Any) -> Any:
        if isinstance(obj, functools._lru_cache_wrapper):
            return _reduce_wrapper(self, obj, make_cached, obj.__wrapped__, obj.cache_parameters())
        if getattr(obj, "__code__", None) is _DISPATCHING:
            return _reduce_wrapper(self, obj, make_dispatching, obj.__wrapped__, dict(obj.registry))
        return in_scope(self, obj, _Pickler.reducer_override(self, obj))

    def dump_by_value(self, obj: Any) -> bytes:
        file = io.BytesIO()
        _Pickler(file).dump(obj)
        return file.getvalue()

    can_dump: ClassVar[Callable[[Any, bool], bool]]  # set by `pickling.py`, which has the other pickler


# Functions and classes of a main program: at the receiver, their globals are those of one `__main__`


def in_scope(pickler: Any, obj: Any, reduced: Any) -> Any:
    """Return how to send a function or class. `reduced`: the result of cloudpickle."""
    if not isinstance(reduced, tuple):
        return reduced
    found = main_modules.scope_from(obj)
    is_function = isinstance(obj, FunctionType)
    if found is None:
        # Its globals are not those of a `__main__` that workers have: a console, a debugger or `exec` has run the code
        # in a dictionary of its own, or it is a local function of a module. So the copies of cloudpickle stay.
        # A local function of a module that only reads a global most likely needs no more than its value.
        local = is_function and vars(sys.modules.get(obj.__module__, obj)) is obj.__globals__
        for name, value in reduced[2][1]["__globals__"].items() if is_function else ():
            is_fixed = local or next(mutable_parts(value), None) is None
            if (name in lookups_of(obj.__code__).written or not is_fixed) and not name.startswith("__"):
                _warn_once(name)
        return reduced
    make, arguments, state, *_ = reduced
    if not is_function:
        main_modules.note_class(found[0], obj)
        home, items = _home_and_items(pickler, found)
        return _keep, (*home, make, arguments), (*home, items, state), None, None, _set
    # cloudpickle's constructor gets code, globals and closure; everything else, such as the name and the defaults, is
    # in the state. It lists the globals that exist. A name that is only read and does not exist was deleted, which the
    # receiver must learn. A name that the function also assigns may not exist yet.
    code, _, _, _, closure = arguments
    read, written = lookups_of(obj.__code__)
    needed = {*state[1]["__globals__"], *(read - written)}
    state[1]["__globals__"] = {}
    home, items = _home_and_items(pickler, found, needed)
    return _keep_function, (*home, code, closure), (*home, items, state), None, None, _set


def _home_and_items(
    pickler: Any, found: tuple[main_modules.MainNamespace, str], needed: Iterable[str] = ()
) -> tuple[tuple[main_modules.MainNamespace, str, int], list[main_modules.Item]]:
    """Return the scope, the path and the version of a function or class, and the globals to send with it."""
    scope, path = found
    version = main_modules.version_of(scope, path) if path else 0
    return (scope, path, version), main_modules.items_for(pickler, scope, needed, path.partition(".")[0])


@functools.cache
def _warn_once(name: str) -> None:
    log.warning(
        "telegrad: a function that is neither of this process's main program (a profiler, a debugger, a console or "
        "exec has run it) nor found by its name in a module sends a copy of the global %r with each call, so a change "
        "at the worker is lost: run the program by itself, or move the function to the top level of a module",
        name,
    )


# At the receiver. An object is created before its state arrives, since the state may refer to it: a recursive function,
# or a method that names its class. `MainNamespace.make` returns the same object to each pickle that refers to it.
# All functions of one program have one dictionary as their globals: an assignment in one is seen by the others.


def _keep_function(scope: main_modules.MainNamespace, path: str, version: int, code: Any, closure: Any) -> Any:
    return scope.make(path, version, partial(FunctionType, code, scope.names, None, None, closure))


def _keep(scope: main_modules.MainNamespace, path: str, version: int, make: Any, arguments: Any) -> Any:
    return scope.make(path, version, partial(make, *arguments))


def _set(obj: Any, told: tuple[main_modules.MainNamespace, str, int, list[main_modules.Item], Any]) -> None:
    """Set the state of a function or class, unless the receiver had it already, then the globals that it reads."""
    scope, path, version, items, state = told
    lacks = scope.lacks_state(path, version, obj)
    if lacks and isinstance(state, dict):  # of a wrapper
        vars(obj).update(state)
    elif lacks:
        (_set_function if isinstance(obj, FunctionType) else _set_class)(obj, state)
    scope.fill(items, complete=(path, version) if lacks else None)


def _set_class(kind: Any, state: Any) -> None:
    contents, of_members = state
    _own._class_setstate(kind, (contents, {}))
    for name, parts in of_members.items():
        vars(kind._member_map_[name]).update(parts)


def register_spawned_main() -> None:
    """Send functions of `__mp_main__`, the main program of a spawned child, by value: others cannot import it."""
    spawned = sys.modules.get("__mp_main__")
    if spawned is not None and "__mp_main__" not in cloudpickle.list_registry_pickle_by_value():
        cloudpickle.register_pickle_by_value(spawned)


DEEPEST = 12  # levels of parts that are examined
_ADVICE = "Send the data that it is built from, or keep it where it is and call functions there"
_ADVICE_FOR_OWN = "Send a reference to it, rpc.RRef(it), or keep it where it is and call functions there"
_ADVICE_FOR_VARIABLES = (
    "Create it inside of the function, or put both at the top level of a module that all workers import: then each "
    f"uses its own. Workers import a script, too, if a guard, `{GUARD}`, precedes the code for the driver alone"
)

Part = tuple[str, Any]  # how to reach it from the containing value, and the part


def find_unpicklable_part(value: Any, same_program: bool, error: BaseException) -> CannotEncode:
    """Return the error that names the part of a value or call that cannot be sent; `error` gives the reason."""
    # Descend to the smallest part that cannot be pickled alone. Each step pickles the parts of one value until one of
    # them fails: that is slow, but it runs only for an error.
    where, within, advice = "", "", _ADVICE
    seen: list[Any] = []  # a method and its class have each other as parts
    for _ in range(DEEPEST):
        # Objects of this package that are not to be sent refuse it in `__reduce_ex__`, with a reason and advice.
        if isinstance(error, UsageError) and any("__reduce_ex__" in vars(kind) for kind in type(value).__mro__[:-1]):
            return CannotEncode(f"{where.lstrip('.') or 'a value'}{within} cannot be sent: {first_line(error)}")
        is_ours = f"{type(value).__module__}".startswith("telegrad.") and not isinstance(value, tuple | BaseException)
        if is_ours and not isinstance(error, TelegradError):  # the parts of such an object mean nothing to the user
            error = BoundToProcess(_ADVICE_FOR_OWN)
            break
        if isinstance(error, BoundToProcess) and issubclass(type(value), error.kind):
            break
        seen.append(value)
        parts = _parts_of(value, same_program, top=not where)
        fresh = (part for part in parts if not any(part[1] is each for each in seen))
        try:
            bad = next((part for part in fresh if not ValuePickler.can_dump(part[1], same_program)), None)
        except Exception as own:  # of the value's code, such as its `__iter__`
            if raised_by_handler(own):
                raise
            bad = None
        if bad is None:
            break
        step, part = bad
        if type(value) is FunctionType:
            function = where if where.startswith("the function") else f"{where or 'a value'}, a function,"
            within = f" that this function uses: {where}{within}" if within else f" that {function} uses"
            where, advice = f"the variable `{step}`", _ADVICE_FOR_VARIABLES
        else:
            where += step
        value = part
    if issubclass(type(value), GeneratorType | AsyncGeneratorType):
        advice = "To send its items, call its function by rpc.rpc_stream"
    where = where.lstrip(".") or "a value"
    why = first_line(error) or type(error).__name__
    if isinstance(error, BoundToProcess):
        advice = error.advice
        if not issubclass(type(value), error.kind):  # `value` has the object in a place that is not known here
            why = f"a {error.kind.__name__} in {why}"
    return CannotEncode(f"{where}{within} ({kind_of(value)}) cannot be sent: {why}. {advice}")


def _parts_of(value: Any, same_program: bool, top: bool) -> Iterable[Part]:
    # By the methods of the built-in types: a subclass may have a false `__len__`, or an endless `__iter__`.
    kind: Any = next((each for each in (tuple, list, dict, set, frozenset) if isinstance(value, each)), None)
    if kind in (tuple, list):
        if top and [type(part) for part in value[-2:]] == [tuple, dict]:  # the arguments of a call
            *functions, args, kwargs = value
            yield from ((f"argument {number}", arg) for number, arg in enumerate(args))
            yield from ((f"argument {name!r}", arg) for name, arg in kwargs.items())
            yield from ((f"the function `{getattr(each, '__name__', each)}`", each) for each in functions)
        else:
            # Of a NamedTuple of this package, users know the names of fields.
            fields = getattr(value, "_fields", ()) if type(value).__module__.startswith("telegrad.") else ()
            yield from ((f".{fields[n]}" if fields else f"[{n}]", part) for n, part in enumerate(kind.__iter__(value)))
    elif kind is dict:
        yield from ((f"[{key!r}]", part) for key, part in dict.items(value))
    elif kind is not None:
        yield from ((f" (the member {part!r})", part) for part in kind.__iter__(value))
    elif type(value) is FunctionType:
        yield from _variables_of(value, same_program)
    elif isinstance(value, MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, functools.partial):
        yield from ((f".{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
    else:
        members = getattr(value, "__dict__", {}).items()
        # The descriptors of slots, and the cache of an abstract class, are made anew.
        yield from ((f".{name}", part) for name, part in members if not (isinstance(part, _OF_SLOTS) or name == _CACHE))
        if isinstance(value, type):
            yield ".__bases__", value.__bases__
        elif not any("__getstate__" in vars(kind) for kind in type(value).__mro__[:-1]):  # which may have raised
            yield ".__class__", type(value)


def _variables_of(function: FunctionType, same_program: bool) -> Iterable[Part]:
    """Yield the variables that are sent with a function that is sent by value."""
    if name_of(function, same_program) is not None:
        return
    if function.__code__ is _DISPATCHING:
        yield from ((one.__name__, one) for one in vars(function)["registry"].values())
        return
    yield from closed_over(function)
    for name in sorted(lookups_of(function.__code__).read):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    defaults = function.__defaults__ or ()
    count = function.__code__.co_argcount
    yield from zip(function.__code__.co_varnames[count - len(defaults) : count], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    yield from function.__dict__.items()
