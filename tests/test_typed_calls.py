"""Type checkers know the results of calls and find wrong arguments: mypy and pyright read right and wrong lines."""

import json
import pathlib
import subprocess
import sys
from collections.abc import Callable

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PRELUDE = """
from __future__ import annotations
import functools
import operator
from collections import Counter as Bag
from collections.abc import AsyncIterator, Iterator
from typing import Any, assert_type
import torch
from torch import Tensor, nn
import telegrad
import telegrad.rpc as rpc
from telegrad import autograd
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer
from telegrad.rpc import RRef, functions


class Table:
    def __init__(self, rows: int, name: str = "") -> None:
        self.rows = rows

    def row(self, number: int) -> Tensor: ...
    def add(self, number: int, *, scale: float = 1.0) -> None: ...
    def __call__(self, number: int) -> str: ...
    @classmethod
    def empty(cls) -> Table: ...
    @staticmethod
    def limit(scale: float) -> int: ...
    def items(self) -> Iterator[bytes]: ...


def two(a: int, b: str) -> float: ...
def optional(a: int, b: str = "") -> float: ...
def nothing() -> int: ...
def many(a: int, *rest: str) -> list[str]: ...
def keyword(a: int, *, flag: bool) -> bytes: ...
def procedure(a: int) -> None: ...
def with_reference(table: RRef[Table], a: int) -> str: ...
def squares(up_to: int) -> Iterator[int]: ...
def untyped(a, b=1): ...
async def waits(a: int) -> str: ...
async def streams(a: int) -> AsyncIterator[str]:
    yield ""
@functions.async_execution
def later(a: int) -> torch.futures.Future[str]: ...
@functions.must_finish
def finishes(a: int) -> str: ...


number: RRef[int] = RRef(1)
table: RRef[Table] = RRef(Table(1))
here = rpc.get_worker_info()
group = rpc.group()
"""

RIGHT = """
assert_type(rpc.rpc_sync("worker1", two, (1, "a")), float)
assert_type(rpc.rpc_sync("worker1", two, args=(1, "a"), timeout=3), float)
assert_type(rpc.rpc_sync("worker1", two, (1, "a"), None, 3.0), float)
assert_type(rpc.rpc_sync(1, two, (1, "a"), wait_for_worker=True, idempotent=True), float)
assert_type(rpc.rpc_sync(here, optional, (1,)), float)
assert_type(rpc.rpc_sync("worker1", optional, (1, "a")), float)
assert_type(rpc.rpc_sync("worker1", nothing), int)
assert_type(rpc.rpc_sync("worker1", nothing, ()), int)
assert_type(rpc.rpc_sync("worker1", nothing, timeout=1), int)
assert_type(rpc.rpc_sync("worker1", many, (1, "a", "b")), list[str])
assert_type(rpc.rpc_sync("worker1", keyword, (1,), {"flag": True}), bytes)
assert_type(rpc.rpc_sync("worker1", keyword, kwargs={"a": 1, "flag": True}), bytes)
assert_type(rpc.rpc_sync("worker1", procedure, (1,)), None)
assert_type(rpc.rpc_sync("worker1", waits, (1,)), str)
assert_type(rpc.rpc_sync("worker1", later, (1,)), str)
assert_type(rpc.rpc_sync("worker1", finishes, (1,)), str)
assert_type(rpc.rpc_sync("worker1", with_reference, (table, 1)), str)
assert_type(rpc.rpc_sync("worker1", two, (number, "a")), float)
assert_type(rpc.rpc_sync("worker1", Table, (1,)), Table)
assert_type(rpc.rpc_sync("worker1", Table.empty), Table)
assert_type(rpc.rpc_sync("worker1", Table.limit, (0.5,)), int)
assert_type(rpc.rpc_sync("worker1", torch.add, (torch.ones(2), 1)), Tensor)
assert_type(rpc.rpc_sync("worker1", torch.ones, (2, 3)), Tensor)
assert_type(rpc.rpc_sync("worker1", torch.cat, ([torch.ones(2), torch.ones(2)],)), Tensor)
assert_type(rpc.rpc_sync("worker1", nn.functional.relu, (torch.ones(2),)), Tensor)
assert_type(rpc.rpc_sync("worker1", nn.Linear, (2, 3)), nn.Linear)
assert_type(rpc.rpc_sync("worker1", sorted, ([3, 1],)), list[int])
assert_type(rpc.rpc_sync("worker1", functools.partial(two, 1), ("a",)), float)
assert_type(rpc.rpc_sync("worker1", lambda: 2.0), float)
assert_type(rpc.rpc_async("worker1", two, (1, "a")), rpc.Future[float])
assert_type(rpc.rpc_async("worker1", two, (1, "a")).wait(), float)
assert_type(rpc.rpc_async("worker1", waits, (1,)).wait(), str)
assert_type(rpc.rpc_async("worker1", nothing).then(lambda done: str(done.wait())).wait(), str)
assert_type(rpc.remote("worker1", Table, (1,)), RRef[Table])
assert_type(rpc.remote("worker1", Table, (1, "a"), restore=True).to_here(), Table)
assert_type(rpc.remote("worker1", torch.ones, (3,)).to_here(), Tensor)
assert_type(table.rpc_sync().row(1), Tensor)
assert_type(table.rpc_sync(timeout=3)(1), str)
assert_type(table.rpc_async().row(1), rpc.Future[Any])
assert_type(table.remote().row(1), RRef[Any])
assert_type(table.rpc_stream().items(), rpc.Stream[Any])
assert_type(table.local_value(), Table)
assert_type([each + 1 for each in rpc.rpc_stream("worker1", squares, (3,))], list[int])
assert_type(rpc.rpc_stream("worker1", streams, (3,), window=2), rpc.Stream[str])
assert_type(rpc.rpc_stream("worker1", range, (3,)), rpc.Stream[int])
assert_type(group.rpc_sync(two, (1, "a")), list[float])
assert_type(group.rpc_sync(nothing), list[int])
assert_type(group.rpc_sync(nothing, None, None, 3.0), list[int])
assert_type(group.rpc_sync(waits, (1,)), list[str])
assert_type(group.rpc_sync(keyword, (1,), {"flag": True}), list[bytes])
assert_type(group.rpc_sync(keyword, kwargs={"a": 1, "flag": True}, idempotent=True), list[bytes])
assert_type(group.rpc_sync(torch.ones, (2,), reduce=torch.add), Tensor)
assert_type(group.rpc_async(two, (1, "a")), rpc.GroupFuture[list[float]])
assert_type(group[1:].rpc_async(later, (1,), timeout=3).wait(), list[str])
assert_type(group.rpc_async(torch.ones, (2,), reduce=torch.maximum).wait(), Tensor)
assert_type(group.map(procedure, [1, 2]).wait(), list[None])
assert_type(group.gather(two, (1, "a")), dict[str, float])
assert_type(group.all_reduce(torch.ones(2)), Tensor)
""".strip().splitlines()

WRONG = """
rpc.rpc_sync("worker1", two, ("a", 1))
rpc.rpc_sync("worker1", two, (1,))
rpc.rpc_sync("worker1", two, (1, "a", 2))
rpc.rpc_sync("worker1", two)
rpc.rpc_sync("worker1", two, 1)
rpc.rpc_sync("worker1", two, "a")
rpc.rpc_sync("worker1", two(1, "a"))
rpc.rpc_sync("worker1", "two", (1, "a"))
rpc.rpc_sync(1.5, two, (1, "a"))
rpc.rpc_sync(None, nothing)
rpc.rpc_sync("worker1")
rpc.rpc_sync("worker1", nothing, (1,))
rpc.rpc_sync("worker1", nothing, timeout="3")
rpc.rpc_sync("worker1", nothing, idempotnet=True)
rpc.rpc_sync("worker1", nothing, idempotent="yes")
rpc.rpc_sync("worker1", nothing, wait_for_worker=3.0)
rpc.rpc_sync("worker1", optional, ("a",))
rpc.rpc_sync("worker1", many, (1, 2))
rpc.rpc_sync("worker1", keyword, (1,), ["flag"])
rpc.rpc_sync("worker1", Table, ("a",))
rpc.rpc_sync("worker1", Table)
rpc.rpc_sync("worker1", Table.limit, ("a",))
rpc.rpc_sync("worker1", waits, ("a",))
rpc.rpc_sync("worker1", len, (3,))
text: str = rpc.rpc_sync("worker1", nothing)
count: int = rpc.rpc_sync("worker1", torch.ones, (2,))
count = rpc.rpc_sync("worker1", waits, (1,))
count = rpc.rpc_sync("worker1", keyword, (1,), {"flag": True})
count = rpc.rpc_async("worker1", nothing)
text = rpc.rpc_async("worker1", nothing).wait()
rpc.rpc_async("worker1", two, ("a", 1))
rpc.rpc_async("worker1", nothing).waits()
rpc.remote("worker1", Table, ("a",))
rpc.remote("worker1", Table, (1,), restore="yes")
bag: RRef[Bag[str]] = rpc.remote("worker1", Table, (1,))
table.rpc_sync().rwo(1)
table.rpc_sync().row("a")
table.rpc_sync().row()
table.rpc_sync().rows(1)
table.to_here().row("a")
table.rpc_sync("a").row(1)
count = table.rpc_sync().row(1)
rpc.rpc_stream("worker1", nothing)
rpc.rpc_stream("worker1", squares, ("a",))
text = next(rpc.rpc_stream("worker1", squares, (3,)))
group.rpc_sync(two, ("a", 1))
group.rpc_sync(two)
group.rpc_sync(nothing, (1,))
group.rpc_sync(waits, ("a",))
group.rpc_sync(nothing, reduce=3)
group.rpc_async(two, (1,))
count = group.rpc_sync(nothing)
text = group.rpc_async(nothing).wait()
rpc.TelegradOptions(rpc_timout=3)
rpc.init_rpc("worker1", rank="a")
""".strip().splitlines()


def mypy(program: pathlib.Path) -> set[int]:
    """Return the lines in which mypy finds an error; it reads the cache of the check of the whole project, if any."""
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--no-pretty", str(program)]
    said = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout
    places = [line.split(":") for line in said.splitlines()]
    # The cache may have errors of the same program in another folder.
    return {int(place[1]) for place in places if place[0].endswith(program.name) and place[2] == " error"}


def pyright(program: pathlib.Path) -> set[int]:
    pytest.importorskip("basedpyright", reason="pip install basedpyright")
    (program.parent / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, str(program)]
    said = subprocess.run(command, cwd=program.parent, stdout=subprocess.PIPE, text=True).stdout
    found = json.loads(said)["generalDiagnostics"]
    return {each["range"]["start"]["line"] + 1 for each in found if each["severity"] == "error"}


@pytest.mark.nightly
@pytest.mark.parametrize("checker", [mypy, pyright])
@pytest.mark.timeout(600)
def test_right_and_wrong_lines(checker: Callable[[pathlib.Path], set[int]], tmp_path: pathlib.Path) -> None:
    program = tmp_path / "program.py"
    lines = [*PRELUDE.splitlines(), *RIGHT, *WRONG]
    program.write_text("\n".join(lines) + "\n")
    found, first = checker(program), len(PRELUDE.splitlines()) + 1
    right, wrong = range(first, first + len(RIGHT)), range(first + len(RIGHT), len(lines) + 1)
    assert [lines[number - 1] for number in right if number in found] == []
    assert [lines[number - 1] for number in wrong if number not in found] == []
