"""The programs of docs/streams.md do what is said there."""

from __future__ import annotations

import asyncio
import pathlib
import re
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.errors import UsageError

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "streams.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of the page's programs, where `worker1` is a worker of this process."""
    stream = rpc.rpc_stream
    monkeypatch.setattr(rpc, "init_rpc", lambda name: None)
    monkeypatch.setattr(rpc, "rpc_stream", lambda to, *args, **kwargs: stream("w1", *args, **kwargs))
    names: dict[str, Any] = {"torch": torch}
    for program in PROGRAMS:
        exec(program, names)
    return names


def test_the_first_program(page: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    page["main"]()
    assert capsys.readouterr().out.split("\n")[:6] == ["0", "1", "4", "9", "16", "all of them"]


def test_the_one_of_asyncio(page: dict[str, Any]) -> None:
    assert asyncio.run(page["first_above"](50)) == 64


def test_sums_that_are_cloned(page: dict[str, Any]) -> None:
    batches = [torch.ones(2), torch.ones(3)]
    assert [float(each) for each in rpc.rpc_stream("worker1", page["running_sums"], (batches,))] == [2, 5]


def test_the_loop_that_is_left(page: dict[str, Any]) -> None:
    assert page["item"] == 121
    assert [*page["stream"]] == []


def test_sums_that_are_not_cloned(page: dict[str, Any]) -> None:
    exec(PROGRAMS[2].replace(".clone()", ""), page)
    with pytest.raises(UsageError, match="clone"):
        list(rpc.rpc_stream("worker1", page["running_sums"], ([torch.ones(2)] * 3,)))
