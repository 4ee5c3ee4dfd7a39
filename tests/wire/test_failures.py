"""Exceptions keep their type, text and attributes when they are sent, and name the worker that raised them."""

import builtins
import copy
import dataclasses
import errno
import functools
import linecache
import pickle
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from time import process_time
from typing import Any, NoReturn

import pytest
import torch

from telegrad import errors
from telegrad._core.calls.call_names import user_name
from telegrad._core.pickling import remote_text
from telegrad._core.pickling.exceptions import as_runtime_error, describe, fresh, readable, rebuild, without_frames
from telegrad._core.pickling.function_names import resolve
from telegrad._core.pickling.remote_text import LONGEST_LINE, LONGEST_TEXT, MOST_TOLD, first_line, folded
from telegrad.compat.rpc import calls, references
from tests.cluster import agents_here


def journey(error: Any, worker: str = "w1") -> Any:
    try:
        raise error
    except BaseException as raised:
        return rebuild(describe(raised, worker))


class KeywordOnly(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__("keyword", code)
        self.code = code


class OwnText(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(a)
        self.b = b

    def __str__(self) -> str:
        return f"own {self.b}"


class Mangling(Exception):
    """An exception whose `__reduce__` returns wrong arguments."""

    def __init__(self, number: int | str) -> None:
        super().__init__(f"number {number}")
        self.number = number


class Slotted(Exception):
    __slots__ = ("first",)

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first


class Guarded(Exception):
    __slots__ = ("__code", "__weakref__")

    def __init__(self, code: int) -> None:
        super().__init__()
        self.__code = code

    @property
    def code(self) -> int:
        return self.__code


class InPieces(Exception):
    """An exception with a `__reduce__` of its own."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.first = first + second

    def __reduce__(self) -> Any:
        return InPieces, (self.first, "")


class Odd(OSError):
    def __init__(self, number: int, text: str) -> None:
        super().__init__(number, text)
        self.number = number

    def __str__(self) -> str:
        return "odd"


class Unsendable(Exception):
    def __init__(self, *args: str) -> None:
        super().__init__(*args)
        self.lock = threading.Lock()


class Final(Exception):
    def __init_subclass__(cls) -> NoReturn:
        raise TypeError("no heirs")


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int | str
    text: str = "by default"


@dataclasses.dataclass(frozen=True)
class FrozenAndFinal(Frozen):
    def __init_subclass__(cls) -> NoReturn:
        raise TypeError("no heirs")


TELEGRAD = [getattr(errors, name) for name in errors.__all__]


class BadText(Exception):
    def __str__(self) -> NoReturn:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        KeyError("x"),
        KeyError(5),
        ValueError(),
        ValueError(1, 2),
        OSError(2, "gone", "file"),
        KeywordOnly(code=3),
        OwnText(1, 2),
        UnicodeDecodeError("utf-8", b"ab", 0, 1, "bad"),
        errors.UnknownWorker("nobody"),
        TimeoutError("late"),
    ],
    ids=repr,
)
def test_type_text_and_attributes(error: Any) -> None:
    back = journey(error)
    assert isinstance(back, type(error))
    assert (type(back).__qualname__, back.args) == (type(error).__qualname__, error.args)
    assert "'w1'" in str(back)
    assert "in journey" in str(back)
    assert str(error) in str(back)
    for again in (back, fresh(back), journey(back, "w2")):
        assert vars(again) == vars(error)
        assert "'w1'" in str(again)
    if isinstance(error, OSError):
        assert (back.errno, back.filename) == (error.errno, error.filename)


@pytest.mark.parametrize("kind", [ValueError, RuntimeError, KeyError, OSError, TimeoutError, AttributeError, *TELEGRAD])
def test_a_built_in_exception_keeps_its_exact_type(kind: type[BaseException]) -> None:
    back = journey(kind("text"))
    assert type(back) is kind
    assert (back.args, back.args[0]) == (("text",), "text")
    assert "'w1'" in str(back)
    assert "in journey" in repr(back)
    assert type(journey(back, "w2")) is kind


def test_a_built_in_exception_keeps_its_attributes() -> None:
    back = journey(FileNotFoundError(errno.ENOENT, "gone", "a", None, "b"))
    assert (back.errno, back.strerror, back.filename, back.filename2) == (errno.ENOENT, "gone", "a", "b")
    again = journey(back, "w2")
    assert (again.errno, again.filename, again.filename2) == (errno.ENOENT, "a", "b")
    back = journey(journey(UnicodeDecodeError("utf-8", b"ab", 0, 1, "bad")), "w2")
    assert (back.encoding, back.object, back.start, back.end, back.reason) == ("utf-8", b"ab", 0, 1, "bad")
    back = journey(journey(ImportError("none", name="n", path="p")), "w2")
    assert (back.msg, back.name, back.path) == ("none", "n", "p")


@pytest.mark.parametrize("hops", [1, 2])
def test_exceptions_whose_constructors_take_other_arguments(hops: int) -> None:
    for error in (
        KeywordOnly(code=3),
        OwnText(1, 2),
        Mangling(5),
        Slotted(4),
        Guarded(4),
        InPieces("a", "b"),
        Odd(2, "x"),
    ):
        back = error
        for _ in range(hops):
            back = journey(back)
        assert isinstance(back, type(error))
        assert back.args == error.args
        for name in ("code", "b", "number", "first", "errno"):
            assert getattr(back, name, None) == getattr(error, name, None)


@pytest.mark.parametrize("error", [Frozen(3), Frozen("text"), FrozenAndFinal(3)], ids=repr)
def test_an_exception_that_forbids_new_attributes(error: Frozen | FrozenAndFinal) -> None:
    back = journey(journey(error), "w2")
    assert isinstance(back, type(error))
    assert (back.args, back.code, back.text) == (error.args, error.code, "by default")
    told = "".join(traceback.format_exception(type(back), back, None))
    assert told.index("'w2'") < told.index("'w1'")
    assert ("'w2'" in str(back)) == (type(error) is Frozen)  # the worker is named by the cause of a final type


def copies(error: Any) -> Iterator[Any]:
    yield from (copy.copy(error), copy.deepcopy(error), fresh(error))
    yield from (pickle.loads(pickle.dumps(error, protocol)) for protocol in (3, pickle.HIGHEST_PROTOCOL))


@pytest.mark.parametrize("make", [lambda error: error, as_runtime_error])
def test_a_rebuilt_exception_can_be_copied_and_pickled(make: Callable[[Any], Any]) -> None:
    several = ExceptionGroup("several", (ExceptionGroup("inner", [KeywordOnly(code=3)]), KeyError("x")))
    odd = (OwnText(1, 2), Slotted(4), Guarded(4), Odd(2, "x"), Frozen(3), ValueError(1, KeywordOnly(code=3)), several)
    for error in (ValueError("x"), KeyError("x"), OSError(2, "gone", "file"), ImportError("none", name="n"), *odd):
        back = make(journey(error))
        for twin in copies(back):
            assert (type(twin), str(twin), repr(twin)) == (type(back), str(back), repr(back))
            assert str(twin).startswith(str(error))
            assert vars(twin) == vars(error)
            for name in ("errno", "filename", "name", "code"):
                assert getattr(twin, name, None) == getattr(error, name, None)
            again = journey(twin, "w2")
            assert type(again) is type(back)
            assert str(again).count("'w1'") == str(back).count("'w1'")


def test_a_rebuilt_exception_that_contains_itself_can_be_copied() -> None:
    error: Any = ValueError(1, 2)
    error.itself = error
    for twin in copies(journey(error)):
        assert isinstance(twin.itself, ValueError)
        assert "'w1'" in str(twin)


class Held(Exception):
    pass


def fail(kind: type[BaseException], *args: Any) -> NoReturn:
    raise kind(*args)


class Failing:
    fail = staticmethod(fail)


UNREADABLE_BYTE = "utf-8", b"ab", 0, 1, "bad"
KINDS: dict[type[BaseException], tuple[Any, ...]] = {
    KeyError: ("k",),
    OSError: (2, "gone"),
    Held: ("k",),
    StopIteration: (),
    UnicodeDecodeError: UNREADABLE_BYTE,
    OwnText: (1, 2),
}


@pytest.mark.parametrize("kind", [*KINDS, ValueError, TypeError, errors.InvalidName])
def test_in_the_compatibility_mode_errors_of_calls_are_of_the_types_that_torch_raises(kind: type[Exception]) -> None:
    """`to_here` raises an error as its own type in torch, too."""
    args = KINDS.get(kind, ("text",))
    with agents_here(2) as workers:
        made = calls.remote("w1", Failing)  # in a group that `compat` enters, it is of this class at once
        owned: Any = references.RRef._of_handle(workers[0].references, made._handle)
        for way in (
            lambda: calls.rpc_sync("w1", fail, (kind, *args)),
            lambda: calls.rpc_async("w1", fail, (kind, *args)).wait(),
            lambda: calls.wait_all([calls.rpc_async("w1", fail, (kind, *args))]),
            lambda: owned.rpc_sync().fail(kind, *args),
            lambda: owned.rpc_async().fail(kind, *args).wait(),
        ):
            with pytest.raises(RuntimeError if kind in KINDS else kind, match="w1") as caught:
                way()
            assert isinstance(caught.value, kind)
            assert isinstance(caught.value, RuntimeError) == (kind in KINDS or issubclass(kind, RuntimeError))
            assert caught.value.args == kind(*args).args
            assert "raise_translated" not in "".join(traceback.format_exception(caught.value))
        with pytest.raises(kind, match="w1") as caught:
            calls.remote("w1", fail, (kind, *args)).to_here()
        assert isinstance(caught.value, RuntimeError) == (kind is OwnText or issubclass(kind, RuntimeError))


def test_an_error_that_is_also_a_runtime_error_is_sent_as_one() -> None:
    for error in (KeyError("x"), OSError(2, "gone"), Unsendable("x"), OwnText(1, 2)):
        back: Any = journey(as_runtime_error(journey(error)), "w2")
        assert isinstance(back, RuntimeError)
        assert isinstance(back, type(error))
        assert str(back).index("'w2'") < str(back).index("'w1'")
    final = journey(Final("x"))
    assert as_runtime_error(final) is final


def test_the_type_of_a_rebuilt_exception_is_made_once() -> None:
    assert type(journey(OwnText(1, 2))) is type(journey(OwnText(3, 4)))
    assert type(journey(OwnText(1, 2))).__module__ == OwnText.__module__


def test_notes_are_sent_and_not_repeated() -> None:
    error: Any = ValueError("x")
    error.__notes__ = ["a note"]
    assert journey(error).__notes__ == ["a note"]


def test_tensors_in_an_exception() -> None:
    error: Any = ValueError("x")
    error.small, error.large = torch.ones(3), torch.arange(10_000)
    back = journey(error)
    assert back.small.tolist() == [1, 1, 1]
    assert torch.equal(back.large, error.large)


def test_an_exception_that_the_caller_cannot_import(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("gone_errors")
    exec("class Gone(Exception): pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "gone_errors", module)
    data = describe(module.Gone("text"), "w1")
    monkeypatch.delitem(sys.modules, "gone_errors")
    back = rebuild(data)
    assert type(back) is errors.RemoteError
    assert "gone_errors.Gone was raised" in str(back)
    assert "text" in str(back)
    assert "'w1'" in str(back)


def test_an_exception_of_a_local_class() -> None:
    class Local(Exception):
        pass

    assert type(journey(Local("text"))).__name__ == "Local"


def test_an_exception_of_the_main_program_keeps_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    main = types.ModuleType("__main__")
    exec("class Mine(Exception): pass", main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert type(journey(main.Mine("text"))) is main.Mine


def test_the_program_that_a_worker_imports_is_named_main() -> None:
    kind = type("Stop", (Exception,), {"__module__": "__mp_main__"})
    for error in (kind("z"), ExceptionGroup("both", [RuntimeError("y"), kind("z")])):
        told = str(journey(error))
        assert "__main__.Stop: z" in told, told
        assert "__mp_main__" not in told, told


def test_an_exception_type_that_cannot_be_subclassed() -> None:
    back = journey(Final(1, 2))
    assert type(back) is Final
    assert "'w1'" in "".join(traceback.format_exception(type(back), back, None))


@pytest.mark.parametrize("hops", [1, 2])
def test_exception_groups(hops: int) -> None:
    error = builtins.ExceptionGroup("several", [ValueError("a"), KeywordOnly(code=3), Unsendable("c")])
    back = error
    for _ in range(hops):
        back = journey(back)
    assert isinstance(back, type(error))
    assert [type(member) for member in back.exceptions] == [ValueError, KeywordOnly, Unsendable]
    assert back.exceptions[1].code == 3
    assert back.subgroup(ValueError).exceptions[0].args == ("a",)
    assert "'w1'" in str(back)


def test_all_members_of_a_local_class_arrive() -> None:
    class Local(Unsendable):
        """A class that is sent by value, after an attempt by name."""

    back = journey(ExceptionGroup("several", [Local("x") for _ in range(MOST_TOLD * 4 // 5)]))
    assert len(back.exceptions) == MOST_TOLD * 4 // 5


def test_a_description_that_cannot_be_decoded_becomes_a_remote_error() -> None:
    assert type(rebuild(b"nonsense")) is errors.RemoteError


@pytest.mark.parametrize("error", [ValueError("bad"), KeyError("k"), OSError("x")], ids=repr)
def test_an_error_without_lines_of_the_program_is_told_once(error: Exception) -> None:
    back = rebuild(describe(error, "w1", "f"))
    text = str(back)
    assert (text.count("w1"), text.splitlines()[-1], len(text.splitlines())) == (1, "On worker 'w1', in f", 2)
    assert "On worker 'w1', in f:\n" in str(journey(back, "w2"))  # with its text again, behind other lines
    assert str(rebuild(describe(LookupError(), "w1", "f"))) == "\nOn worker 'w1', in f:\nLookupError\n"  # has no text


def test_an_error_over_two_hops_names_both_workers_in_order() -> None:
    for error in (ValueError("x"), OwnText(1, 2)):
        text = str(journey(journey(error, "inner"), "outer"))
        assert text.index("'outer'") < text.index("'inner'")
        assert isinstance(journey(journey(error, "inner"), "outer"), type(error))


def test_attributes_that_cannot_be_pickled_are_left_out() -> None:
    error: Any = ValueError("x")
    error.lock, error.code = threading.Lock(), 5
    back = journey(error)
    assert (back.code, type(back), hasattr(back, "lock")) == (5, ValueError, False)
    assert "lock" in str(journey(ValueError(threading.Lock())))


def test_source_lines_that_only_the_caller_has_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """An example are lines of a notebook's cell."""
    source = "def deeper():\n    raise ValueError('text')\n\ndef step():\n    deeper()\n"
    space: dict[str, Any] = {}
    exec(compile(source, "<cell 1>", "exec"), space)
    with pytest.raises(ValueError, match="text") as caught:
        space["step"]()
    data = describe(caught.value, "w1")
    monkeypatch.setitem(linecache.cache, "<cell 1>", (len(source), None, source.splitlines(True), "<cell 1>"))
    told = str(rebuild(data))
    frames = '  File "<cell 1>", line 5, in step\n    deeper()\n  File "<cell 1>", line 2, in deeper\n    raise Value'
    assert frames in told
    assert told.count("deeper()") == 1
    assert str(rebuild(describe(rebuild(data), "w2"))).count("deeper()") == 1


def chained(how: str, count: int) -> BaseException:
    """Return the last of `count` exceptions, each linked with its predecessor."""
    last: Any = ValueError("number 0")
    first = last
    for number in range(1, count):
        before = last
        if how == "nested":
            last = ExceptionGroup(f"number {number}", [before])
            continue
        last = ValueError(f"number {number}")
        if how == "context":
            last.__context__ = before
        else:
            last.__cause__ = before
    if how == "circle":
        first.__cause__ = last
    if how == "group":
        last = ExceptionGroup("group", [ValueError(f"number {number}") for number in range(count)])
    if how == "groups":
        last = ExceptionGroup("all", [ExceptionGroup(f"number {count - 1}", [ValueError("number 0")] * 250)] * 250)
    if how == "equal":
        for _ in range(24):  # 2 ** 24 members, of two objects each
            last = ExceptionGroup(f"number {count - 1}", [last, last])
    return last


@pytest.mark.parametrize("how", ["cause", "context", "circle", "nested", "group", "groups", "equal"])
@pytest.mark.parametrize("count", [150, 20_000])
def test_a_long_chain_of_exceptions_is_cut_to_the_last_ones(how: str, count: int) -> None:
    last = chained(how, 900 if how == "nested" and count > 900 else count)
    before = process_time()
    made = rebuild(describe(last, "w1"))
    for _ in range(2):
        last = without_frames(fresh(last))
        made = fresh(made)
    assert process_time() - before < 2
    assert str(made).count("number") in range(60, 3 * MOST_TOLD)
    assert "are left out]" in str(made) or (how == "circle" and count < 100)
    assert len(str(made)) <= LONGEST_TEXT + 100


def test_long_names_are_cut_in_messages() -> None:
    name = "f" * 100_000

    def function() -> None:
        pass

    function.__qualname__ = function.__name__ = name
    kind = type(name, (), {"__call__": lambda self: None})
    named: list[Any] = [function, kind(), name, torch.futures.Future().then, functools.partial(function)]
    for each in named:
        assert len(user_name(each)) <= LONGEST_LINE + 3
    for wanted in (f"os:{name}", f"{name}:f", f"os.{name}:f"):
        with pytest.raises(errors.FunctionNotFound) as caught:
            resolve(wanted)
        assert len(str(caught.value)) < 4 * LONGEST_LINE


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_an_exception_that_ends_a_process_arrives_as_a_remote_error(error: BaseException) -> None:
    back = journey(error)
    assert type(back) is errors.RemoteError
    assert f"{type(error).__name__}, which is no Exception, was raised" in str(back)


def test_an_exception_whose_str_raises() -> None:
    assert type(journey(BadText())).__name__ == "BadText"


def test_an_interrupt_in_the_code_of_an_exception_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Exception):
        def __str__(self) -> NoReturn:
            raise KeyboardInterrupt

    assert first_line(Slow()) == "(its text could not be formatted)"
    monkeypatch.setattr(remote_text, "raised_by_handler", lambda error: isinstance(error, KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        first_line(Slow())


def test_very_long_texts_are_cut() -> None:
    back = journey(ValueError("x" * 5 * LONGEST_TEXT))
    assert back.args == ("x" * 5 * LONGEST_TEXT,)
    assert len(str(back)) < 7 * LONGEST_TEXT


@pytest.mark.parametrize("error", [ValueError("once"), OwnText(1, 2), KeyError("once")], ids=repr)
def test_a_traceback_prints_the_remote_part_once(error: KeyError | OwnText | ValueError) -> None:
    back = journey(error)
    text = "".join(traceback.format_exception(type(back), back, back.__traceback__))
    assert (text.count("On worker 'w1'"), text.count("raise error")) == (1, 1)


class Meta(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise KeyError("no name")


class Nameless(Exception, metaclass=Meta):
    pass


class StrictMeta(type):
    def __subclasscheck__(cls, other: type) -> bool:
        if other is not cls:  # Python itself asks this for each `raise`
            raise KeyError("no subclasses")
        return True

    def __instancecheck__(cls, other: object) -> bool:
        raise KeyError("no instances")


class Strict(Exception, metaclass=StrictMeta):
    def __init__(self, *parts: object) -> None:
        super().__init__(*parts)


@pytest.mark.parametrize("parts", [("why",), ("why", 2)])
def test_no_check_of_an_exceptions_metaclass_runs(parts: tuple[object, ...]) -> None:
    back = journey(Strict(*parts))
    assert type(back).__mro__[:2] in ((Strict, Exception), (type(back), Strict))
    assert back.args == parts


def hides(name: str, raised: type[BaseException]) -> BaseException:
    class Hiding(Exception):
        def __getattribute__(self, asked: str) -> Any:
            if asked == name:
                raise raised(asked)
            return super().__getattribute__(asked)

    return Hiding("hidden")


HIDDEN = ["__dict__", "__notes__", *dir(BaseException)]


@pytest.mark.parametrize("raised", [KeyError, SystemExit, GeneratorExit])
@pytest.mark.parametrize("name", [*HIDDEN, "metaclass"])
def test_an_exception_whose_attributes_cannot_be_read_is_described(name: str, raised: type[BaseException]) -> None:
    error = Nameless("x") if name == "metaclass" else hides(name, raised)
    assert first_line(readable(error))
    made = rebuild(describe(error, "w1", "f"))
    assert "w1" in str(made)
    raised_here = fresh(made)
    with pytest.raises(Exception, match="w1"):
        raise raised_here


class Bomb(Exception):
    def __reduce__(self) -> Any:
        return (sys.exit, ("as it is rebuilt",))


class Fuse(Exception):
    def __reduce__(self) -> NoReturn:
        raise self.args[1]


FUSES = [Fuse("x", raised) for raised in (SystemExit(3), KeyboardInterrupt(), GeneratorExit())]


@pytest.mark.parametrize("error", [Bomb("x"), *FUSES], ids=repr)
def test_an_exception_whose_pickling_exits_the_process_keeps_its_type_and_text(error: Exception) -> None:
    holder = ValueError("held")
    holder.inner = error  # type: ignore[attr-defined]
    assert type(journey(holder)) is ValueError
    back = journey(journey(error), "w2")
    assert isinstance(back, type(error))
    assert "in journey" in str(back)
    assert "'x'" in repr(back.args)
    assert str(back).index("'w2'") < str(back).index("'w1'")


class Sealed(Exception):
    __notes__ = property()

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{name!r} of a sealed exception")


def test_an_exception_whose_class_forbids_all_attributes_stays_itself() -> None:
    back = without_frames(journey(Sealed("why")))
    assert (type(back).__name__, str(back).partition("\n")[0]) == ("Sealed", "why")

    @folded
    def call() -> None:
        raise back

    with pytest.raises(Sealed, match="why"):
        call()
