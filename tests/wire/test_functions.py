"""A function is named only if its name leads back to the same object."""

import functools
import gc
import importlib
import math
import operator
import os
import pathlib
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from telegrad import errors
from telegrad._core.calls.call_names import user_name
from telegrad._core.pickling import function_names
from telegrad._core.pickling.function_names import name_of, program, resolve
from telegrad._core.pickling.global_names import lacks
from telegrad._core.pickling.pickling import decode, encode
from tests.cluster import in_background, processes
from tests.naming import alike


def named(thing: Any, same_program: bool) -> str:
    name = name_of(thing, same_program)
    assert name is not None
    return name


def plain(x: Any) -> Any:
    return x


def twice() -> str:
    return "the first of that name"


first_twice = twice


def twice() -> str:  # type: ignore[no-redef]
    return "the second"


def gone() -> str:
    return "not found by its name any more"


kept = [gone]
del gone


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@torch.compile(backend="eager")
def decorated(x: Any) -> Any:
    return x * 3


compiled = torch.compile(plain, backend="eager")
compiled_lambda = torch.compile(lambda x: x, backend="eager")


@functools.lru_cache
def remembered(x: Any) -> Any:
    return x


class Holder:
    @staticmethod
    def double(x: Any) -> Any:
        return 2 * x

    @classmethod
    def build(cls) -> "Holder":
        return cls()

    def method(self) -> int:
        return 1

    class Inner:
        pass


class Heir(Holder):
    pass


class Sly:
    """An object that equals every other object."""

    __module__ = __name__
    __qualname__ = "sly"

    def __init__(self) -> None:
        self.__qualname__ = "sly"

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return hash("sly")


sly = Sly()


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Replace the main program by a module of the test."""
    module = types.ModuleType("__main__")
    exec("def f(): return 5\nclass C: pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


@pytest.mark.parametrize(
    "function",
    [
        *(plain, first_twice, twice, Holder, Holder.Inner, Holder.double, Holder.method),
        *(scripted, decorated, compiled, compiled_lambda, remembered),
        *(min, len, int, math.sqrt, operator.add, functools.reduce, str.upper),
        *(torch.add, torch.relu, torch.ones, torch.empty, torch.linalg.norm, torch.fft.fft, torch.special.erf),
        *(torch.nn.Linear, torch.nn.functional.relu, torch.nn.functional.linear, torch.nn.functional.gelu),
        *(torch._foreach_add, torch.Tensor.add, torch.Tensor.backward, torch.ops.aten.add, torch.ops.aten.add.Tensor),
    ],
    ids=alike,
)
def test_names_lead_back(function: Callable[..., Any]) -> None:
    name = named(function, False)
    assert resolve(name) is function
    assert name_of(function, True) == name  # from the cache
    assert decode(encode([function], True).body, [])[0] is function


@pytest.mark.parametrize("function", [Holder.build, Heir.build, dict.fromkeys], ids=alike)
def test_names_of_class_methods_lead_to_an_equal_method(function: Callable[..., Any]) -> None:
    assert resolve(named(function, False)) == function


def test_an_inherited_class_method_keeps_its_class() -> None:
    assert type(resolve(named(Heir.build, False))()) is Heir


@pytest.mark.parametrize(
    "thing",
    [
        lambda: 1,
        Holder().method,
        [].append,
        functools.partial(plain, 1),
        (lambda: lambda: 1)(),
        torch.nn.Linear(1, 1),
        kept.pop(),
        torch.compile(lambda x: x, backend="eager"),
        [],
        5,
    ],
    ids=alike,
)
def test_objects_without_a_name(thing: Any) -> None:
    assert name_of(thing, True) is None


def test_an_object_that_equals_every_object_does_not_use_the_cache() -> None:
    assert (name_of(sly, True), name_of(Sly(), True)) == (f"{__name__}:sly", None)


def test_the_cache_is_bounded_and_keeps_its_functions_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function_names, "_CACHED", 3)
    monkeypatch.setattr(function_names, "verified", {})
    for _ in range(2):
        for function in (plain, min, len, Holder, torch.add):
            assert resolve(named(function, True)) is function
            assert len(function_names.verified) <= 3
            assert function in function_names.verified


def test_a_name_resolves_to_a_patched_function(monkeypatch: pytest.MonkeyPatch) -> None:
    name = named(plain, True)
    monkeypatch.setattr(sys.modules[__name__], "plain", min)
    assert resolve(name) is min


def test_a_module_that_is_not_imported_yet_is_imported(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "found_late.py").write_text("def f(): return 7")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert resolve("found_late:f")() == 7
    monkeypatch.delitem(sys.modules, "found_late")


def test_an_import_that_fails_with_a_deadlock_error_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def refuse_once(name: str) -> ModuleType:
        tried.append(name)
        if len(tried) == 1:
            raise RuntimeError("deadlock detected by _ModuleLock('other') at 1")
        return torch

    monkeypatch.setattr(importlib, "import_module", refuse_once)
    assert resolve("parcel:ones") is torch.ones
    assert tried == ["parcel", "parcel"]


def test_resolving_waits_for_a_module_that_is_none_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    for use in (lambda: resolve("withheld:ones"), lambda: function_names._verified(torch.ones, "withheld", "ones")):
        monkeypatch.setitem(sys.modules, "withheld", None)
        with in_background(sys.modules.__setitem__, "withheld", torch, after=0.02):
            assert use() in (torch.ones, "withheld:ones")


def test_a_module_that_stays_none_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function_names, "WITHHELD", 0.01)
    monkeypatch.setitem(sys.modules, "withheld", None)
    with pytest.raises(errors.FunctionNotFound, match=r"None in sys\.modules"):
        resolve("withheld:ones")


def test_resolving_waits_for_an_import_of_another_thread(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(function_names, "events", (begun, go_on), raising=False)
    (tmp_path / "found_slowly.py").write_text(
        "from telegrad._core.pickling.function_names import events\n"
        "events[0].set()\nevents[1].wait(10)\ndef f(): return 7"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    results = []
    threads = [threading.Thread(target=lambda: results.append(resolve("found_slowly:f")())) for _ in range(2)]
    threads[0].start()
    begun.wait(10)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert results == [7, 7]
    monkeypatch.delitem(sys.modules, "found_slowly")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "torch:nothing",
            r"no 'nothing' in module 'torch'.*imported the module from .*__init__\.py.*maybe an older version",
        ),
        ("no_such_module:f", "no 'f' in module 'no_such_module'.*importable on all workers"),
        ("torch.nn:Linear.nothing", "no 'Linear.nothing'"),
        ("__main__:not_there_at_all", "top level of the main program"),
    ],
)
def test_the_error_names_the_missing_part(name: str, text: str) -> None:
    with pytest.raises(errors.FunctionNotFound, match=text) as caught:
        resolve(name)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_the_error_says_why_an_import_failed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_module.py").write_text("raise RuntimeError('no licence')")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    with pytest.raises(errors.FunctionNotFound, match=r"broken_module.*no licence") as caught:
        resolve("broken_module:f")
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("module", ["__main__", "__mp_main__"])
def test_functions_of_the_main_program_have_a_name_only_in_the_same_program(main: ModuleType, module: str) -> None:
    main.f.__module__ = main.C.__module__ = module  # as in a spawned child
    for thing, name in ((main.f, "__main__:f"), (main.C, "__main__:C")):
        assert (name_of(thing, True), name_of(thing, False)) == (name, None)
        assert resolve(name) is thing


@pytest.fixture
def unread(main: ModuleType) -> Iterator[ModuleType]:
    """Have the file of the main module read again, and that of the real one afterwards."""
    program.cache_clear()
    yield main
    program.cache_clear()


def test_programs_are_compared_by_the_content_of_their_file(unread: ModuleType, tmp_path: pathlib.Path) -> None:
    prints = []
    for folder, content in (("a", "x = 1"), ("b", "x = 1"), ("c", "x = 2")):
        path = tmp_path / folder / "script.py"
        path.parent.mkdir()
        path.write_text(content)
        unread.__file__ = str(path)
        program.cache_clear()
        prints.append(program())
        path.unlink()
        assert program() == prints[-1]  # the cached value
    assert prints[0] == prints[1] != prints[2]  # equal content in another folder is the same program


@pytest.mark.parametrize("file", [None, "<stdin>", "pipe"])
def test_an_interactive_session_and_a_program_in_a_pipe_have_no_program(
    unread: ModuleType, file: str | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if hasattr(os, "mkfifo"):
        os.mkfifo("pipe")  # a read would block
    unread.__file__ = file
    assert program() == ""


def test_a_child_process_has_the_program_of_its_parent() -> None:
    with processes(1) as (child,):
        assert child.run(program) == program()


def test_a_function_that_is_defined_again_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("again")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    made = []
    for _ in range(3):
        exec("def f(): pass", vars(module))
        assert (name_of(module.f, True), user_name(module.f), lacks(module.f)) == ("again:f", "again.f", False)
        made.append(weakref.ref(module.f))
    gc.collect()
    assert [function() is None for function in made] == [True, True, False]
