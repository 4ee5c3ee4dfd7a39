"""Values arrive as they were sent, functions by name or by value, and errors say what to do."""

import codecs
import collections
import dataclasses
import datetime
import enum
import functools
import gzip
import io
import mmap
import multiprocessing
import os
import platform
import socket
import sqlite3
import sys
import tempfile
import threading
import types
import typing
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NoReturn, Self, SupportsIndex

import cloudpickle
import numpy
import pytest
import torch
from torch import Tensor, nn

from telegrad import errors, rpc
from telegrad._core.pickling import by_value, function_names, main_modules, main_program, pickling
from telegrad._core.pickling.main_modules import MainNamespace
from telegrad._core.pickling.main_program import Program
from telegrad._core.pickling.pickling import decode, encode
from telegrad._core.wire.packing import pack, unpack
from tests.cluster import PATIENCE, in_threads
from tests.naming import alike


def journey(value: Any, same_program: bool = True) -> Any:
    body, tensors, *_ = encode(value, same_program)
    meta, blobs, _ = pack(tensors)
    return decode(body, unpack(meta, [blob.clone() for blob in blobs]))


class Tagged(torch.Tensor):
    """A subclass with an attribute."""

    label: str


class Rereadable(io.TextIOWrapper):
    """A file that is pickled by its content."""

    def __reduce_ex__(self, _: Any) -> Any:
        return io.StringIO, (self.read(),)


def open_things() -> dict[str, Any]:
    """Return an object of each kind that only the process which opened it can use."""
    first, _ = multiprocessing.Pipe()
    own = tempfile.NamedTemporaryFile
    return {
        "a text file": open(__file__),
        "a binary file": open(__file__, "rb"),
        "a raw file": open(__file__, "rb", buffering=0),
        "a file that is written": open(os.devnull, "w"),
        "a temporary file": tempfile.TemporaryFile("w+"),
        "one with a name": own(),
        "a text file with a name": own("w+"),
        "one in memory": tempfile.SpooledTemporaryFile(),
        "a folder": tempfile.TemporaryDirectory(),
        "a codec's": codecs.open(__file__, "r"),
        "a compressed one": gzip.open(os.devnull, "wt"),
        "a socket": socket.socket(),
        "a socket's file": socket.socket().makefile("rw"),
        "a connection": first,
        "an iterator of a file": map(str.strip, open(__file__)),
        "a lock": threading.RLock(),
        "a condition": threading.Condition(),
        "a queue": multiprocessing.get_context("spawn").Queue(),
        "memory": mmap.mmap(-1, 16),
        "a database": sqlite3.connect(":memory:"),
        "a generator": (each for each in range(3)),
        "a thread": threading.current_thread(),
    }


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", open_things())
def test_open_resources_of_this_process_cannot_be_sent(name: str) -> None:
    thing = open_things()[name]

    def holds() -> Any:
        return thing

    values: list[Any] = [((thing,), {}), thing, [{"a": thing}], holds]
    for value in values:
        with pytest.raises(errors.CannotEncode, match="cannot be sent"):
            encode(value, True)


@pytest.mark.parametrize("name", ["a text file", "a file that is written", "one with a name", "a temporary file"])
def test_the_error_for_an_open_file_advises_to_send_its_path(name: str) -> None:
    with pytest.raises(errors.CannotEncode, match=r"argument 0.*Send its path and open it there"):
        encode(((open_things()[name],), {}), True)


def test_files_in_memory_and_standard_streams_can_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert journey(io.StringIO("some")).read() == "some"
    assert journey(io.BytesIO(b"some")).read() == b"some"
    with open(__file__, "rb") as file, open(os.devnull, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert journey(sys.stdout) is sys.stdout
        assert journey([sys.stderr])[0] is sys.stderr
        assert "Rereadable" in journey(Rereadable(file)).read()


class Dispatching(torch.Tensor):
    """A subclass without memory that does not implement `__tensor_flatten__`."""

    inner: Any  # `torch.Tensor` has a method of that name

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Self:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise NotImplementedError(function)


class Wrapper(Dispatching):
    """A subclass made of an inner tensor."""

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["inner"], "context"

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: str, shape: torch.Size, stride: tuple[int]
    ) -> "Wrapper":
        assert context == "context"
        return Wrapper(inner["inner"])


def plain(x: Any) -> Any:
    return x


class Own(torch.Tensor):
    """A subclass with a `__reduce_ex__` of its own."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Callable[..., Any], tuple[torch.Tensor]]:
        return _own, (self.as_subclass(torch.Tensor) * 2,)


def _own(tensor: torch.Tensor) -> Own:
    return tensor.as_subclass(Own)


class Weight(nn.Parameter):
    """A subclass of `nn.Parameter`."""


class Stubborn:
    def __getstate__(self) -> dict[str, int]:
        return {"x": 1}

    def __setstate__(self, state: dict[str, int]) -> NoReturn:
        raise AttributeError("no such state")


class Holder:
    def method(self) -> int:
        return 1

    @classmethod
    def build(cls) -> "Holder":
        return cls()


def test_each_tensor_is_sent_once() -> None:
    tensor = torch.ones(3)
    body, tensors, *_ = encode({"a": tensor, "b": [tensor, torch.zeros(2)]}, True)
    assert [t.tolist() for t in tensors] == [[1, 1, 1], [0, 0]]
    back = decode(body, tensors)
    assert back["a"] is back["b"][0]
    assert b"storage" not in body


def test_parameters_and_buffers() -> None:
    frozen = journey(nn.Parameter(torch.ones(2), requires_grad=False))
    assert (type(frozen), frozen.requires_grad) == (nn.Parameter, False)
    back = journey(nn.Buffer(torch.ones(2), persistent=False))
    assert isinstance(back, nn.Buffer)
    assert not back.persistent


def test_subclasses() -> None:
    tagged: Any = torch.ones(2).as_subclass(Tagged)
    tagged.label = "x"
    back = journey(tagged)
    assert (type(back), back.label) == (Tagged, "x")
    assert type(journey(Wrapper(torch.ones(2))).inner) is torch.Tensor
    noted: Any = torch.ones(2)
    noted.note = "y"
    assert journey(noted).note == "y"


def test_subclasses_with_rules_of_their_own() -> None:
    own = journey(torch.ones(2).as_subclass(Own))
    assert (type(own), own.tolist()) == (Own, [2, 2])
    back = journey(Dispatching(torch.arange(3)))
    assert (type(back), back.inner.tolist()) == (Dispatching, [0, 1, 2])
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert [part.tolist() for part in journey(jagged).unbind()] == [[1, 1], [1, 1, 1]]


def test_leaves_arrive_as_leaves() -> None:
    weight: Any = Weight(torch.ones(2))
    weight.note = "kept"
    tagged = torch.ones(2).as_subclass(Tagged).requires_grad_()
    for tensor in (nn.Parameter(torch.ones(2)), weight, tagged):
        body, tensors, *_ = encode([tensor], True)
        assert tensors[0].requires_grad
        (back,) = decode(body, [tensors[0].detach().clone().requires_grad_()])
        assert (type(back), back.requires_grad, back.is_leaf) == (type(tensor), True, True)
    assert decode(*encode(weight, True)[:3]).note == "kept"


def test_the_graph_of_a_received_tensor_is_kept() -> None:
    """Distributed autograd replaces the tensors; gradients must reach the replacements."""
    for tensor in (nn.Parameter(torch.ones(2)), torch.ones(2).as_subclass(Tagged), torch.ones(2)):
        received = torch.ones(2, requires_grad=True)
        (back,) = decode(encode([tensor], True).body, [received * 2])
        assert isinstance(back, type(tensor))
        back.sum().backward()
        assert received.grad.tolist() == [2, 2]


def test_tensors_that_share_memory_are_extracted_without_copies() -> None:
    """`pack` must see that they belong together."""
    parameter = nn.Parameter(torch.ones(4))
    value = [parameter, parameter.data, parameter.untyped_storage(), parameter.detach().as_subclass(Tagged)]
    assert len({tensor.data_ptr() for tensor in encode(value, True).tensors}) == 1


def test_storages_and_arrays() -> None:
    assert journey(torch.arange(3).untyped_storage()).tolist()[:8] == [0] * 8
    for array in (
        numpy.arange(5),
        numpy.arange(40_000.0).reshape(200, 200),
        numpy.asfortranarray(numpy.arange(40_000.0).reshape(200, 200)),
        numpy.broadcast_to(numpy.arange(200.0), (200, 200)),
        numpy.arange(80_000.0).reshape(200, 400)[:, ::2],
        numpy.zeros(40_000, dtype="datetime64[s]"),
        numpy.zeros(40_000, dtype=[("x", "f8"), ("y", "i4")]),
        numpy.array([[1, "a"], [None, 2.5]], dtype=object),
    ):
        back = journey([array])[0]
        assert numpy.array_equal(back, array)
        assert back.dtype == array.dtype
    typed = journey(torch.TypedStorage(3, dtype=torch.int16, device="cpu"))
    assert (typed.dtype, len(typed)) == (torch.int16, 3)


def test_large_arrays_are_not_copied() -> None:
    array = numpy.zeros(100_000)
    body, (sent,), *_ = encode([array], True)
    assert len(body) < 1000
    assert sent.data_ptr() == array.ctypes.data
    received = sent.clone()
    (back,) = decode(body, [received])
    back[7] = 1
    assert received.view(torch.float64)[7] == 1
    address = received.data_ptr()
    del received
    assert (back.ctypes.data, back.sum()) == (address, 1)


def test_large_buffers_follow_the_tensors() -> None:
    body, tensors, *_ = encode([numpy.ones(10_000), torch.zeros(2), numpy.arange(10_000), numpy.arange(3)], True)
    assert [tensor.dtype for tensor in tensors] == [torch.float32, torch.uint8, torch.uint8]
    ones, zeros, numbers, few = decode(body, tensors)
    assert (ones.sum(), zeros.tolist(), numbers[-1], few.tolist()) == (10_000, [0, 0], 9999, [0, 1, 2])


def test_a_read_only_array_stays_read_only() -> None:
    array = numpy.ones(10_000)
    array.flags.writeable = False
    assert not journey(array).flags.writeable
    assert journey(array).sum() == 10_000


def test_methods() -> None:
    assert journey([Holder().method])[0]() == 1
    assert type(journey([Holder.build])[0]()) is Holder
    assert journey([[3, 1, 2].index])[0](2) == 2


def test_by_value() -> None:
    captured = torch.ones(2)

    def closure(x: int) -> Tensor:
        return x + captured

    back = journey([closure, lambda x: -x])
    assert back[0](1).tolist() == [2, 2]
    assert back[1](3) == -3
    assert journey([torch.jit.script(nn.Linear(2, 2))])[0](captured).shape == (2,)

    @torch.jit.script
    def script(x: torch.Tensor) -> torch.Tensor:
        return x + 5

    assert journey([script])[0](captured).tolist() == [6, 6]

    class Local:
        @functools.cached_property
        def kept(self) -> list[int]:
            return [1]

    back = journey(Local())
    assert back.__class__.__name__ == "Local"
    assert back.kept is back.kept


def test_classes_arrive_with_their_slots_names_and_members(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slotted:
        __slots__ = ("__private", "__weakref__", "x")

        def __init__(self) -> None:
            self.x = self.__private = 1

    class Heir(Slotted):
        __slots__: Any = "__own"

    class Listed(typing.NamedTuple):
        x: int = 1

    made = dataclasses.make_dataclass("Data", [("x", int, 1)], slots=True)
    documented = type("Documented", (Slotted,), {"__slots__": {"a": "text"}, "z": 1, "b": 2})
    for kind in (Slotted, Heir, documented, Listed, made):
        arrived = abroad(kind(), monkeypatch)
        assert type(arrived) is not kind
        assert (arrived.x, type(arrived).__qualname__) == (1, kind.__qualname__)
        assert vars(type(arrived)).keys() == vars(kind).keys()
        with pytest.raises(AttributeError):
            arrived.unknown = 1
        assert type(journey([arrived])[0]) is kind
    assert [name for name in vars(type(journey(documented()))) if name in "zb"] == ["z", "b"]


def abroad(value: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the value as a process that does not know its class decodes it."""
    sent = encode([value], True)
    with monkeypatch.context() as receiver:
        receiver.setattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", {})
        return decode(sent.body, [])[0]


def test_enumerations_arrive_with_all_parts_of_their_members(monkeypatch: pytest.MonkeyPatch) -> None:
    class Planet(enum.Enum):
        EARTH = (6.0, 2.0)
        HOME = EARTH
        MARS = (3.0, 1.0)

        def __init__(self, mass: float, radius: float) -> None:
            self.mass, self.radius = mass, radius

    class Labelled(int, enum.Enum):
        def __new__(cls, number: int, label: str) -> Any:
            made: Any = int.__new__(cls, number)
            made._value_, made.label = label, label * 2
            return made

        ONE = 1, "one"

    class Mode(enum.Flag, boundary=enum.KEEP):
        READ = 1
        BOTH = 3
        HIGH = 12

    class Day(datetime.date, enum.Enum):
        FIRST = 2026, 1, 1

    class Data(dataclasses.make_dataclass("Base", ["x"]), enum.Enum):  # type: ignore[misc]
        A = 5

    class Meta(enum.EnumMeta):
        pass

    class Action(enum.Enum, metaclass=Meta):
        RUN = enum.member(print)

    class Base(enum.Enum):
        pass

    class Same(Base):
        ITSELF = object()  # equal to itself alone

    Base.__module__ = Same.__module__ = "__main__"
    assert abroad([Same, Same.ITSELF], monkeypatch)[1].name == "ITSELF"
    for kind in (Planet, Labelled, Mode, Day, Data, Action, Same):
        made = abroad(kind, monkeypatch)
        assert made is not kind
        assert vars(made).keys() ^ vars(kind).keys() <= {"__static_attributes__"}
        assert [*made.__members__] == [*kind.__members__]
        assert [member.name for member in made] == [member.name for member in kind]
        assert type(made).__name__ == type(kind).__name__
        assert (made.__module__, made.__qualname__) == (kind.__module__, kind.__qualname__)
        for name, member in kind.__members__.items():
            parts = {**vars(made[name]), "__objclass__": kind}
            assert kind is Same or sorted(map(str, parts.items())) == sorted(map(str, vars(member).items()))
            assert kind is Same or str(made[name].value) == str(member.value)
            assert kind in (Planet, Mode, Data, Action, Same) or made[name] == member
        assert journey([made])[0] is kind
    assert abroad(Mode, monkeypatch)(17).name == Mode(17).name
    assert abroad(Labelled, monkeypatch)("one") + 1 == 2

    class Reduced(enum.Enum):
        A = 1

        def __reduce__(self) -> Any:
            return getattr, (Reduced, self.name)

    with pytest.raises(errors.CannotEncode, match=r"members of .*Reduced have a __reduce__"):
        encode([Reduced], True)


def test_code_of_another_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def local() -> None:
        pass

    for function in (lambda: 1, local, [lambda: 1]):
        with monkeypatch.context() as there:
            there.setattr(by_value, "MAGIC_NUMBER", b"3.99")
            there.setattr(platform, "python_version", lambda: "3.99.1")
            body, *_ = encode(function, same_program=True)
        with pytest.raises(errors.CannotDecode, match=r"is for Python 3\.99\.1, .* runs Python 3\.1"):
            decode(body, [])


def test_code_whose_attributes_have_names_of_torch_modules() -> None:
    class Local:
        def __init__(self) -> None:
            self.ops, self.classes = 1, torch.ones(2)

    made = journey([Local], False)[0]()
    assert (made.ops, made.classes.tolist()) == (1, [1, 1])


def test_compiled_functions_are_compiled_once() -> None:
    for function in (plain, lambda x: x * 2):
        made = torch.compile(function, backend="eager", dynamic=True)
        body, tensors, *_ = encode([made, torch.ones(2)], True)
        arrived = [decode(body, tensors)[0] for _ in range(3)]
        assert arrived[0] is arrived[1] is arrived[2]
        assert arrived[0] is not made
        assert arrived[0](torch.ones(2)).tolist() == function(torch.ones(2)).tolist()
        assert decode(encode([made], True).body, [])[0] is arrived[0]


def test_compiled_modules() -> None:
    module = torch.compile(nn.Linear(2, 1), backend="eager")
    back = journey(module)
    assert type(back) is type(module)
    assert torch.equal(back(torch.ones(2)), module(torch.ones(2)))


def test_unusual_values() -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    back = journey(ring)
    assert back[1] is back
    assert journey(((), {})) == ((), {})
    assert journey([sys, numpy])[0] is sys
    values = [torch.float32, torch.Size([1]), torch.device("cpu"), None, Ellipsis, NotImplemented, 1j]
    assert journey(values) == values


@pytest.mark.parametrize("value", [None, 3, -(1 << 80), 2.5, "text \udc80", b"bytes", True, 1j, torch.ones(2)], ids=str)
def test_values_that_are_not_in_a_container(value: Any) -> None:
    back = journey(value)
    assert type(back) is type(value)
    assert back is value or bool((back == value).all() if isinstance(value, torch.Tensor) else back == value)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((1, "a", None), {}),
        ((), {"x": 2.5}),
        ((torch.ones(2), 1), {}),
        ((1, torch.ones(2)), {"alpha": 2, "out": torch.zeros(1)}),
        ((), {"x": torch.ones(1)}),
        (tuple(range(300)), {"x": torch.ones(1)}),
        (([torch.ones(2)],), {"x": {"deep": torch.zeros(1)}}),
    ],
    ids=str,
)
def test_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    back_args, back_kwargs = journey((args, kwargs))
    assert type(back_args) is tuple
    assert (repr((back_args, back_kwargs)), list(back_kwargs)) == (repr((args, kwargs)), list(kwargs))


def test_a_tensor_that_is_given_twice_arrives_as_one_tensor() -> None:
    tensor = torch.ones(2)
    assert len(encode(((tensor, tensor), {}), True).tensors) == 1
    (first, second), more = journey(((tensor, tensor), {"again": tensor}))
    assert first is second is more["again"]


def test_the_empty_call_is_constant() -> None:
    assert encode(((), {}), True).body is encode(((), {}), False).body


def test_plain_elements_of_containers_call_no_python_code(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(pickling._Pickler, "reducer_override", lambda self, obj: asked.append(obj))
    value = [list(range(10_000)), {str(n): (n, 0.5, None) for n in range(10_000)}, {1, 2}, b"x" * 100_000]
    assert journey(value) == value
    assert not asked


class Locked:
    def __init__(self) -> None:
        self.lock = threading.Lock()


class Locking(Locked):
    def __call__(self) -> None:
        pass

    def method(self) -> None:
        pass


class FalseList(list[Any]):
    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[Any]:
        return iter(int, 1)  # without end

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("cannot pickle this")


LOCK, VIEW = threading.Lock(), memoryview(b"bytes")


def closed_over() -> tuple[Callable[..., Any], ...]:
    lock = threading.Lock()
    config = {"all": [lock]}

    def step() -> None:
        with lock:
            pass

    def deeper() -> Any:
        return config["all"]

    def nested() -> Any:
        return deeper()

    def with_default(value: Any = lock) -> None:
        pass

    dispatching = functools.singledispatch(lambda value: value)
    dispatching.register(int, step)
    return step, deeper, nested, with_default, dispatching, lambda: LOCK


STEP, DEEPER, NESTED, WITH_DEFAULT, DISPATCHING, GLOBAL = closed_over()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((STEP, (), {}), r"the variable `lock` that the function `step` uses \(_thread.lock\) cannot be sent"),
        ((DEEPER, (), {}), r"the variable `config`\['all'\]\[0\] that the function `deeper` uses \(_thread.lock\)"),
        (
            (NESTED, (), {}),
            r"`config`\['all'\]\[0\] that this function uses: the variable `deeper` that the function `nested` uses",
        ),
        ((WITH_DEFAULT, (), {}), "the variable `value` that the function `with_default` uses"),
        (
            (DISPATCHING, (), {}),
            "`lock` that this function uses: the variable `step` that the function `<lambda>` uses",
        ),
        ((GLOBAL, (), {}), "the variable `LOCK` that the function `<lambda>` uses"),
        (((1, [STEP]), {}), r"the variable `lock` that argument 1\[0\], a function, uses"),
        (((functools.partial(plain, LOCK),), {}), r"argument 0\.args\[0\] \(_thread.lock\)"),
        (((Locking().method,), {}), r"argument 0\.__self__\.lock \(_thread.lock\)"),
        (((Locking(),), {}), r"argument 0\.lock \(_thread.lock\)"),
        ([1, {"deep": threading.Lock()}], r"\[1\]\['deep'\] \(_thread.lock\) cannot be sent"),
        ((1, {"rows": (x for x in "")}), r"\[1\]\['rows'\] \(builtins.generator\) cannot be sent"),
        ([FalseList([LOCK])], r"\[0\]\[0\] \(_thread.lock\)"),
        ([weakref.ref(Locked)], r"\[0\] \(weakref.ReferenceType\) cannot be sent"),
        (((1, threading.Lock()), {}), r"argument 1 \(_thread.lock\)"),
        (((), {"x": Locked()}), r"argument 'x'\.lock \(_thread.lock\)"),
        ((plain, (threading.Lock(),), {}), r"argument 0 \(_thread.lock\)"),
        (threading.Lock(), r"a value \(_thread.lock\)"),
    ],
    ids=alike,
)
def test_the_error_names_the_part_that_cannot_be_sent(value: Any, text: str) -> None:
    with pytest.raises(errors.CannotEncode, match=text + r".*: cannot pickle .*\. (Send|Create it|To send)") as caught:
        encode(value, True)
    assert isinstance(caught.value.__cause__, TypeError)


def fail(error: BaseException) -> NoReturn:
    raise error


def test_objects_of_a_worker_name_the_way_to_share_them() -> None:
    gone = type("Gone", (), {"__module__": "telegrad.x", "__reduce_ex__": lambda *_: fail(errors.RRefError("deleted"))})
    with pytest.raises(errors.CannotEncode, match="cannot be sent: deleted"):
        encode(gone(), True)
    for value in (future := rpc.Future[int](), {"deep": [future]}):
        with pytest.raises(errors.CannotEncode, match=r"\(telegrad\S+\) cannot be sent: it .* rpc.RRef\(it\)"):
            encode(value, True)


@pytest.mark.parametrize(
    "value",
    [DATA := memoryview(b"bytes"), [DATA], {"x": (1, DATA)}, ((DATA,), {}), types.SimpleNamespace(x=DATA)],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("same_program", [False, True])
def test_a_view_of_memory_is_refused_as_pickle_does(value: Any, same_program: bool) -> None:
    """A memoryview would arrive as bytes."""
    with pytest.raises(errors.CannotEncode, match=r"memoryview\) cannot be sent: .* Send bytes\(view\)"):
        encode(value, same_program)


@pytest.mark.parametrize("part", [DATA, threading.Lock()], ids=["memoryview", "lock"])
def test_the_error_names_the_place_of_an_object_in_a_class_that_is_sent(part: Any) -> None:
    class Base:
        def method(self) -> Any:
            return super().__init__(), part

    class Holder(Base):
        held = part

    function = r"a function, uses \(\S+\) cannot be sent"
    for value, text in (
        (Base, rf"the variable `part` that argument 0\.method, {function}"),
        (Base(), rf"the variable `part` that argument 0\.__class__\.method, {function}"),
        (Holder, r"argument 0\.held \(\S+\) cannot be sent"),
        ([Base], rf"the variable `part` that argument 0\[0\]\.method, {function}"),
        (type("Sub", (Base,), {}), rf"the variable `part` that argument 0\.__bases__\[0\]\.method, {function}"),
    ):
        with pytest.raises(errors.CannotEncode, match=text):
            encode(((value,), {}), True)
    with pytest.raises(errors.CannotEncode, match=r"\(collections.deque\) cannot be sent: (a memoryview in it|.*lock)"):
        encode(((collections.deque([part]),), {}), True)


def test_the_error_names_a_variable_that_a_function_of_the_main_program_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function has a name, which cannot be resolved in another program."""
    program: dict[str, Any] = {"__name__": "__main__", "lock": threading.Lock()}
    exec("def use():\n    return lock", program)
    monkeypatch.setattr(sys.modules["__main__"], "use", program["use"], raising=False)
    with pytest.raises(errors.CannotEncode, match=r"the variable `lock` that the function `use` uses \(_thread.lock\)"):
        encode((program["use"], (), {}), False)


def test_the_error_names_a_missing_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("gone_module")
    exec("class Thing: pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "gone_module", module)
    body, *_ = encode([module.Thing()], True)
    monkeypatch.delitem(sys.modules, "gone_module")
    function_names.verified.pop(module.Thing)
    with pytest.raises(errors.FunctionNotFound, match="gone_module"):
        decode(body, [])


def test_the_error_says_why_a_value_cannot_be_rebuilt() -> None:
    with pytest.raises(errors.CannotDecode, match="cannot be rebuilt"):
        decode(b"\x80\x05garbage", [])
    values: list[Any] = [[torch.ones(1), torch.ones(1)], ((torch.ones(1), torch.ones(1)), {})]
    for value in values:
        with pytest.raises(errors.CannotDecode):
            decode(encode(value, True).body, [torch.ones(1)])
    with pytest.raises(errors.CannotDecode, match="AttributeError: no such state") as caught:
        decode(encode(Stubborn(), True).body, [])
    assert type(caught.value.__cause__) is AttributeError


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Raises:
    """An object that raises when it is rebuilt."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Callable[..., NoReturn], tuple[BaseException]]:
        return fail, (self._error,)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt("now"), GeneratorExit(), Mute()], ids=repr)
def test_any_exception_of_a_rebuilt_value_is_a_decoding_error(error: BaseException) -> None:
    body = encode(Raises(error), True).body
    with pytest.raises(errors.CannotDecode, match=f"cannot be rebuilt: {type(error).__name__}") as caught:
        decode(body, [])
    assert type(caught.value.__cause__) is type(error)


# Values of other libraries and of the main program


class Color(enum.Enum):
    RED = 1


class Pair(typing.NamedTuple):
    first: int
    second: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Record:
    first: int
    second: torch.Tensor


CONSTANTS = [1]
MAIN = """
import enum
import functools
import torch
weight = torch.ones(5000)
class Color(enum.Enum):
    RED = 1
class Base:
    def value(self): return 1
class Heir(Base):
    def value(self): return super().value() + weight.sum().item()
def factorial(n): return 1 if n < 2 else n * factorial(n - 1)
def even(n): return n == 0 or odd(n - 1)
def odd(n): return n != 0 and even(n - 1)
@functools.cache
def cached(n): return n
@functools.singledispatch
def depth(x): return 0
@depth.register
def _(x: list): return 1 + depth(x[0])
cached.own = [cached]
depth.own = [depth]
"""


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Replace the main program by a module of the test."""
    module = types.ModuleType("__main__")
    exec(MAIN, module.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", module)
    function_names.program.cache_clear()
    yield module
    function_names.program.cache_clear()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_modules_in_any_mode(mode: type[Any]) -> None:
    module: Any = nn.Sequential(nn.Conv2d(3, 40, 5), nn.BatchNorm2d(40), nn.Flatten())
    with mode():
        back = journey(module)
    assert [type(p) for p in back.parameters()] == [nn.Parameter] * 4
    assert all(p.requires_grad and p.is_leaf and not p.is_inference() for p in back.parameters())
    assert all(torch.equal(a, b) for a, b in zip(module.state_dict().values(), back.state_dict().values(), strict=True))
    back(torch.ones(2, 3, 8, 8)).sum().backward()
    assert back[0].weight.grad is not None


def test_lazy_parameters() -> None:
    back = journey(nn.LazyLinear(4))
    assert back(torch.ones(3)).shape == (4,)
    assert type(back.weight) is nn.Parameter


def test_tied_weights_stay_tied() -> None:
    module: Any = nn.ModuleDict({"embed": nn.Embedding(100, 20), "head": nn.Linear(20, 100)})
    module.head.weight = module.embed.weight
    module.view = module.embed.weight.data[50:]
    back = journey(module)
    assert back.head.weight is back.embed.weight
    back.view.zero_()
    assert not back.head.weight[50:].any()
    assert back.head.weight[:50].any()


def test_an_optimizer_comes_with_its_parameters() -> None:
    module = nn.Linear(200, 30)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(200)).sum().backward()
    optimizer.step()
    there, optimizer_there = journey([module, optimizer])
    assert optimizer_there.param_groups[0]["params"][0] is there.weight
    assert torch.equal(optimizer_there.state[there.weight]["exp_avg"], optimizer.state[module.weight]["exp_avg"])


@pytest.mark.parametrize("same_program", [True, False])
@pytest.mark.parametrize("value", [Pair(1, torch.ones(3)), Record(1, torch.ones(5000))], ids=["tuple", "dataclass"])
def test_records(value: Pair | Record, same_program: bool) -> None:
    back = journey(value, same_program)
    assert (type(back), back.first) == (type(value), 1)
    assert torch.equal(back.second, value.second)


def test_enum_members_keys_and_ordered_dictionaries() -> None:
    assert journey([Color.RED])[0] is Color.RED
    key = torch.ones(1)
    table, same = journey([{key: "found"}, key])
    assert table[same] == "found"
    ordered = journey(collections.OrderedDict(b=1, a=2))
    assert isinstance(ordered, collections.OrderedDict)
    assert list(ordered) == ["b", "a"]


def test_a_tensor_with_an_attribute_that_contains_it() -> None:
    tensor: Any = torch.ones(2)
    tensor.held = [tensor]
    back = journey(tensor)
    assert back.held[0] is back


@pytest.mark.parametrize("size", [10, 100_000])
def test_an_array_and_a_tensor_that_share_memory_still_share_it(size: int) -> None:
    array = numpy.zeros(size)
    there, tensor, part = journey([array, torch.from_numpy(array), torch.from_numpy(array[1:3])])
    tensor[2] = 7
    assert part.tolist() == [0, 7]
    if size > 10:  # a small array is part of the pickle
        assert there[2] == 7


def test_named_results_and_packed_sequences() -> None:
    assert journey(torch.arange(6.0).view(2, 3).max(dim=1)).indices.tolist() == [2, 2]
    sequence = nn.utils.rnn.pack_padded_sequence(torch.ones(2, 2, 1), [2, 1])
    assert torch.equal(journey(sequence).data, sequence.data)


@pytest.mark.parametrize("same_program", [True, False])
def test_the_main_program_by_name_and_by_value(main: ModuleType, same_program: bool) -> None:
    heir = main.Heir()
    sent = encode([main.factorial, main.even, heir, main.Color.RED], same_program)
    assert bool(sent.tensors) != same_program  # a class by value brings the tensors that it uses
    factorial, even, heir, red = journey([main.factorial, main.even, heir, main.Color.RED], same_program)
    assert factorial is main.factorial  # the receiver is the same program in both cases
    assert (factorial(5), even(4), heir.value(), red.name) == (120, True, 5001, "RED")


@pytest.mark.parametrize("step", ["lacks_state", "fill"])
@pytest.mark.parametrize("name", ["factorial", "cached", "depth"])
def test_threads_that_decode_the_same_function_make_one(
    main: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, step: str
) -> None:
    sent = encode(getattr(main, name), same_program=False)
    receiver = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", receiver)
    monkeypatch.setattr(main_modules, "_own", [MainNamespace(Program("another"), vars(receiver), own=True)])
    found: list[Any] = []
    take_step: Any = getattr(MainNamespace, step)

    def interrupted(scope: MainNamespace, told: Any, *more: Any, **options: Any) -> Any:
        if told and not found:  # another thread decodes the same just before this step of the first one
            found.append(None)
            found[0] = decode(sent.body, [])
        return take_step(scope, told, *more, **options)

    monkeypatch.setattr(MainNamespace, step, interrupted)
    assert decode(sent.body, []) is found[0]
    assert decode(sent.body, []) is found[0]
    assert name != "depth" or found[0]([[1]]) == 2
    assert name == "factorial" or found[0].own[0] is found[0]


def test_threads_that_need_the_scope_of_this_process_make_one(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, waits, find = threading.Lock(), threading.Event(), main_program.find

    class Watched:
        def __enter__(self) -> None:
            if not lock.acquire(blocking=False):
                waits.set()
                lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    def found(key: str) -> Program:
        assert waits.wait(PATIENCE)  # for the other thread, which has found no scope
        return find(key)

    monkeypatch.setattr(main_modules, "_lock", Watched())
    monkeypatch.setattr(main_modules, "_own", [])
    monkeypatch.setattr(main_program, "find", found)
    one, other = in_threads(main_modules.own_scope, main_modules.own_scope)
    assert one is other


class Refusing:
    __module__ = "__mp_main__"  # as in a spawned child

    def __reduce__(self) -> Any:
        raise Mute


def test_the_error_names_an_object_that_refuses_to_be_pickled() -> None:
    with pytest.raises(
        errors.CannotEncode, match=r"argument 0 \(__main__\.Refusing\) cannot .*: \(its text could not be formatted\)"
    ):
        journey(((Refusing(),), {}))


def test_a_value_that_is_nested_too_deeply_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(errors.CannotEncode, match="recursion"):
        journey(deep)


def test_globals_are_freed_with_their_program(main: ModuleType) -> None:
    class Thing:
        pass

    for sent in (False, True):  # the function reads the global
        for kept in (lambda thing: thing, lambda thing: [thing]):
            exec("def reads(): return thing" if sent else "def reads(): return 1", vars(main))
            thing = Thing()
            vars(main)["thing"] = kept(thing)
            encode(main.reads, same_program=False)
            freed = weakref.ref(thing)
            del main.thing, thing
            encode(main.factorial, same_program=False)
            assert freed() is None


@pytest.mark.parametrize("name", [None, "__main__", "__console__"])
def test_a_copy_of_a_global_that_can_change_is_reported(name: str | None, caplog: pytest.LogCaptureFixture) -> None:
    by_value._warn_once.cache_clear()
    names = {} if name is None else {"__name__": name}
    lines = "import re", "n, kept, rate, text = 0, [], 3, re.compile('')", "def count():", " global n", " n += rate"
    exec("\n".join((*lines, " kept.append(text)")), names)
    for _ in range(2):
        encode(names["count"], same_program=False)
    encode(lambda: CONSTANTS, same_program=False)  # most local functions of modules only read such globals
    assert [said.split("a copy of the global ")[1].split()[0] for said in sorted(caplog.messages)] == ["'kept'", "'n'"]


def test_a_changed_attribute_of_a_sent_class_is_reported(main: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    exec("class Counted:\n    count = 1", vars(main))
    for _ in range(2):
        encode(main.Counted(), same_program=False)
    assert not caplog.messages
    for _ in range(2):
        main.Counted.count = 2
        encode(main.Counted(), same_program=False)
    (said,) = caplog.messages
    assert "the global 'Counted' of the main program was changed in place" in said
    assert said.endswith("Define the class anew")
