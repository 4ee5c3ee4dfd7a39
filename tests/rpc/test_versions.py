"""Tests of a module that was edited on one worker after another had imported its old version."""

import asyncio
import importlib
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from telegrad.errors import FunctionNotFound, InvalidArgument
from telegrad.rpc import functions, rpc_sync
from tests.cluster import Process
from tests.naming import alike

BEFORE = """
def helper(x):
    return x

def step(x):
    return helper(x)
"""
AFTER = """
from telegrad.rpc import functions, rpc_async
import math

def helper(x):
    return 10 * x + math.floor(0.5)

def step(x, *, more=1):
    return helper(x) + more

def added(x):
    return helper(x) + 2

def factorial(n):
    return n * factorial(n - 1) if n else 1

@functions.by_value
def decorated(n):
    return n * decorated(n - 1) if n else helper(1)

@functions.async_execution
def later(to, x):
    return rpc_async(to, abs, (-x,))

async def awaited(x):
    return helper(x)
"""


@pytest.fixture
def edited(workers: list[Process], tmp_path: pathlib.Path) -> Iterator[tuple[Process, str]]:
    """Load the old version on worker 1 and the new one on worker 0; return worker 0 and the file."""
    file = tmp_path / "edited_module.py"
    file.write_text(BEFORE)
    workers[1].run(load, str(tmp_path))
    file.write_text(AFTER)
    workers[0].run(load, str(tmp_path))
    yield workers[0], str(file)
    for worker in workers[:2]:
        worker.run(unload, str(tmp_path))


def load(folder: str) -> None:
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    sys.dont_write_bytecode = True  # two versions within a second would share bytecode
    importlib.import_module("edited_module")


def unload(folder: str) -> None:
    sys.path.remove(folder)
    del sys.modules["edited_module"]


def call(name: str, *args: Any, by_value: bool = False, **kwargs: Any) -> Any:
    function = getattr(importlib.import_module("edited_module"), name)
    return rpc_sync("worker1", functions.by_value(function) if by_value else function, args, kwargs)


def not_found() -> str:
    with pytest.raises(FunctionNotFound) as raised:
        call("added", 3)
    return str(raised.value)


def test_the_error_for_a_missing_function_names_the_file_at_the_callee(edited: tuple[Process, str]) -> None:
    worker, file = edited
    said = worker.run(not_found)
    assert re.search(r"this worker has no 'added' in module 'edited_module'", said)
    assert f"imported the module from {file}" in said
    assert "maybe an older version" in said
    assert "by_value(function)" in said
    assert "On worker 'worker1'" in said


def test_functions_marked_by_value_are_sent_with_their_code(edited: tuple[Process, str]) -> None:
    worker, _ = edited
    assert worker.run(call, "step", 3) == 3
    assert worker.run(lambda: call("step", 3, by_value=True)) == 31
    assert worker.run(lambda: call("step", 3, by_value=True, more=5)) == 35
    assert worker.run(lambda: call("added", 3, by_value=True)) == 32
    assert worker.run(lambda: call("factorial", 5, by_value=True)) == 120
    assert worker.run(lambda: call("later", "worker0", 3, by_value=True)) == 3
    assert worker.run(lambda: call("awaited", 3, by_value=True)) == 30
    assert worker.run(call, "decorated", 3) == 60
    assert worker.run(call, "step", 3) == 3


def local(x: int) -> int:
    return x + 1


def test_a_function_marked_by_value_can_be_called_locally() -> None:
    assert (functions.by_value(local)(1), functions.by_value(lambda: 5)()) == (2, 5)


@pytest.mark.parametrize("function", [abs, int, functions.by_value(local), "local", asyncio.Lock().acquire], ids=alike)
def test_only_functions_can_be_sent_by_value(function: Any) -> None:
    with pytest.raises(InvalidArgument, match="defined by def or lambda"):
        functions.by_value(function)
