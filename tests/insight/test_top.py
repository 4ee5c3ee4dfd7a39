"""`telegrad top`, without a terminal."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, Static, TabbedContent

from telegrad.errors import UsageError
from telegrad.insight import top
from telegrad.insight.source import Sight
from telegrad.insight.terminal.app import Top
from telegrad.insight.terminal.detail import Detail
from telegrad.insight.terminal.grid import Grid
from telegrad.insight.terminal.overview import Overview
from telegrad.insight.terminal.pages import Reading
from tests.insight.training import REFUSED, WHY, Training

NEVER = 3600.0  # seconds: tests say themselves when the source is asked


class Looker:
    """Somebody before the screen."""

    def __init__(self, app: Top, source: Training, pilot: Pilot[None]) -> None:
        self.app = app
        self.source = source
        self.pilot = pilot

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self.pilot.pause(0.005)

    async def ask(self) -> None:
        """Have the source asked, and what it says shown."""
        await self.until(lambda: not self.app.asking)
        looks = self.source.looks
        await self.press("space")
        await self.until(lambda: self.source.looks > looks and not self.app.asking)
        await self.pilot.pause()

    def grid(self, name: str) -> Grid:
        return self.app.screen.query_one(f"#{name}", Grid)

    def column(self, name: str, heading: str) -> list[str]:
        """What stands in a column, from above."""
        grid = self.grid(name)
        at = grid.get_column_index(heading)
        return [grid.get_row_at(row)[at].plain.strip() for row in range(grid.row_count)]

    def row(self, name: str, first: str) -> dict[str, str]:
        """By heading, what stands in the row that begins with `first`."""
        grid = self.grid(name)
        at = next(at for at in range(grid.row_count) if grid.get_row_at(at)[0].plain.strip() == first)
        return {column.name: cell.plain.strip() for column, cell in zip(grid.table.columns, grid.get_row_at(at))}  # noqa: B905

    def text(self, name: str) -> str:
        return str(self.app.screen.query_one(f"#{name}", Static).render())


@asynccontextmanager
async def looking(
    size: tuple[int, int] = (80, 24), why: Callable[[Sight], str] = lambda sight: WHY, interval: float = NEVER
) -> AsyncIterator[Looker]:
    """A group that trains, when it has been seen once."""
    source = Training()
    app = Top(source, why, interval)
    async with app.run_test(size=size) as pilot:
        looker = Looker(app, source, pilot)
        await looker.until(lambda: app.view is not None)
        await pilot.pause()
        yield looker


def played(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test that is a coroutine."""

    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 30))

    return run


@played
async def test_workers_are_shown_with_what_changed_since_the_sight_before() -> None:
    async with looking(size=(160, 24)) as looker:
        assert looker.row("workers", "ps")["in/s"] == "-"
        await looker.ask()
        assert looker.row("workers", "ps") == {
            "worker": "ps",
            "rank": "0",
            "phase": "member",
            "in/s": "60",
            "out/s": "0",
            "flight": "1",
            "run": "2",
            "queue": "1",
            "slots": "16/16",
            "sent/s": "12M",
            "got/s": "12M",
            "shared": "0",
            "owned": "12",
            "held": "0",
            "ctx": "2",
            "thr": "2",
            "mem": "900M",
            "gen": "2",
            "host": "node0",
        }
        assert looker.row("workers", "trainer2")["out/s"] == "20"
        assert "4 workers | 1 silent | store tcp://node:29500" in looker.text("group")


@played
async def test_silent_workers_stand_out_without_colour() -> None:
    async with looking() as looker:
        row = looker.row("workers", "! trainer10")
        assert (row["phase"], row["host"], row["in/s"]) == ("silent", "node2", "-")
        assert f"! trainer10 is silent: {REFUSED}" in looker.text("notes")
        looker.source.silent = {}
        await looker.ask()
        assert "trainer10" in looker.column("workers", "worker")
        assert not looker.app.screen.query_one("#notes").display


@played
async def test_functions_have_rates_and_percentiles() -> None:
    async with looking() as looker:
        await looker.ask()
        row = {"calls/s": "45", "p50": "4.0ms", "p99": "94ms", "ran": "3.0ms", "failed": "0", "function": "Server.push"}
        assert looker.row("functions", "45") == row
        assert looker.column("functions", "failed") == ["0", "6"]


@played
async def test_sorting_by_keys() -> None:
    async with looking() as looker:
        names = ["ps", "trainer1", "trainer2", "trainer3", "! trainer10"]
        assert looker.column("workers", "worker") == names
        await looker.press("r")
        assert looker.column("workers", "worker") == names[::-1]
        await looker.press("s")
        assert looker.column("workers", "rank") == ["3", "2", "1", "0", "-"]
        await looker.press("r")
        assert looker.column("workers", "rank") == ["0", "1", "2", "3", "-"]
        await looker.press("less_than_sign", "less_than_sign")  # from the first to the last
        assert looker.column("workers", "host") == ["node0", "node1", "node1", "node2", "node2"]
        assert "by host" in str(looker.grid("workers").border_title)
        assert looker.grid("workers").scroll_x > 0
        await looker.press("tab", "r")
        assert looker.column("functions", "calls/s") == ["15", "45"]


@played
async def test_sorting_by_mouse() -> None:
    async with looking() as looker:
        heading = (16, 1)  # in it, "rank"; the line above is the table's title
        await looker.pilot.click("#workers", offset=heading)
        await looker.pilot.pause()
        assert looker.column("workers", "rank") == ["3", "2", "1", "0", "-"]
        await looker.pilot.click("#workers", offset=heading)
        await looker.pilot.pause()
        assert looker.column("workers", "rank") == ["0", "1", "2", "3", "-"]


@played
async def test_the_cursor_stays_on_its_worker() -> None:
    async with looking() as looker:
        await looker.press("down", "r")
        assert looker.grid("workers").selected == "trainer1"
        looker.source.silent = {"ps": "gone for lunch"}
        await looker.ask()
        assert looker.grid("workers").selected == "trainer1"
        assert looker.column("workers", "worker")[-1] == "! ps"
        assert looker.row("workers", "! ps")["rank"] == "0"  # as it told before


@played
async def test_workers_of_one_name_are_one_row() -> None:
    async with looking() as looker:
        looker.source.silent = {"ps": "another of that name"}
        look = looker.source.look

        def twice() -> Sight:
            sight = look()
            return Sight([*sight.accounts, *sight.accounts], {**sight.silent, "trainer1": "it is here, too"})

        looker.source.look = twice
        await looker.ask()
        assert len(looker.column("workers", "worker")) == 5


@played
async def test_a_filter_holds_until_escape() -> None:
    async with looking() as looker:
        await looker.press("slash", *"node2")
        assert looker.column("workers", "worker") == ["trainer3", "! trainer10"]
        await looker.press("enter")
        await looker.ask()
        assert looker.column("workers", "worker") == ["trainer3", "! trainer10"]
        assert "2 of 5" in str(looker.grid("workers").border_title)
        assert looker.app.screen.query_one(Input).display
        await looker.press("escape")
        assert len(looker.column("workers", "worker")) == 5
        assert not looker.app.screen.query_one(Input).display


@played
async def test_one_worker_and_back() -> None:
    async with looking() as looker:
        await looker.press("enter")
        assert isinstance(looker.app.screen, Detail)
        assert "ps rank 0 on node0, pid 200: server.py" in looker.text("worker")
        assert "owners 12, shared_owners 1, forks 3, users 0" in looker.text("worker")
        assert looker.row("out-grid", "12s") == {
            "age": "12s",
            "limit": "60s",
            "to": "trainer10",
            "function": "Trainer.gradients",
            "line": "server.py:41 push: others = gather(workers)",
            "thread": "call-0",
            "number": "31",
        }
        await looker.press("2")
        assert looker.column("in-grid", "from") == ["trainer1", "trainer2", "trainer3"]
        assert looker.column("in-grid", "state") == ["running", "running", "queued"]
        await looker.press("s")
        assert looker.column("in-grid", "from") == ["trainer1", "trainer2", "trainer3"]
        await looker.press("r")
        assert looker.column("in-grid", "from") == ["trainer3", "trainer2", "trainer1"]
        await looker.press("escape")
        assert isinstance(looker.app.screen, Overview)


@played
async def test_news_that_come_before_a_screen_is_there() -> None:
    async with looking() as looker:
        showing = looker.app.push_screen(Detail("ps"))
        looker.app.renew()
        await showing
        await looker.until(lambda: looker.column("out-grid", "function") == ["Trainer.gradients"])


@played
async def test_threads_and_their_stacks() -> None:
    async with looking() as looker:
        await looker.press("down", "enter", "3")
        assert looker.row("threads-grid", "MainThread")["does"] == "waits for Server.push at ps"
        assert looker.row("threads-grid", "reader")["does"] == "waits for future of ps (a value)"
        assert looker.text("stack").splitlines()[0] == "/home/me/train.py:88 step"
        await looker.press("down")
        assert looker.text("stack") == ""


@played
async def test_bytes_by_peer_and_passes() -> None:
    async with looking() as looker:
        await looker.ask()
        await looker.press("enter", "4")
        assert looker.row("bytes-grid", "trainer1") == {
            "worker": "trainer1",
            "sent/s": "5.0M",
            "got/s": "5.0M",
            "sent": "9.9M",
            "got": "9.9M",
            "flight": "0",
            "host": "node1",
        }
        assert looker.row("bytes-grid", "! trainer10")["flight"] == "1"
        await looker.press("escape", "down", "enter", "5")
        assert looker.row("passes-grid", "20ms")["owing"] == "ps"
        assert str(looker.app.screen.query_one(TabbedContent).get_tab("passes").label) == "5 Passes 1"


@played
async def test_a_worker_that_falls_silent_while_it_is_looked_at() -> None:
    async with looking() as looker:
        await looker.press("down", "enter")
        looker.source.silent = {"trainer1": "no answer"}
        await looker.ask()
        assert "! trainer1 gives no account: no answer" in looker.text("worker")
        assert "What it told 1.0s before the others did" in looker.text("worker")
        assert looker.column("out-grid", "function") == ["Server.push"]


@played
async def test_a_worker_that_never_answered() -> None:
    async with looking() as looker:
        await looker.press("up", "end", "ctrl+end", "enter")
        assert f"! trainer10 gives no account: {REFUSED}" in looker.text("worker")
        assert looker.grid("out-grid").row_count == 0


@played
async def test_why_is_told_and_told_anew() -> None:
    told: list[Sight] = []

    def why(sight: Sight) -> str:
        told.append(sight)
        return f"[told] {len(told)}"

    async with looking(why=why) as looker:
        await looker.press("w")
        await looker.until(lambda: looker.text("text") == "[told] 1")
        await looker.ask()
        await looker.until(lambda: looker.text("text") == "[told] 2")
        assert told[1].accounts[0]["clock"] > told[0].accounts[0]["clock"]
        await looker.press("w", "escape")
        assert isinstance(looker.app.screen, Overview)


@played
async def test_why_that_fails_says_so() -> None:
    def why(sight: Sight) -> str:
        raise ValueError("no words")

    async with looking(why=why) as looker:
        await looker.press("w")
        await looker.until(lambda: looker.text("text") == "ValueError: no words")


@played
async def test_help_names_keys_and_columns() -> None:
    async with looking() as looker:
        await looker.press("question_mark")
        assert isinstance(looker.app.screen, Reading)
        await looker.until(lambda: "autograd contexts" in looker.text("text"))
        assert "pause" in looker.text("text")


@played
async def test_a_source_that_fails_is_asked_again() -> None:
    async with looking(interval=0.2) as looker:
        looker.source.failure = ConnectionError("nobody [there]")
        await looker.until(lambda: bool(looker.app.failure))
        await looker.pilot.pause()
        assert "no news: ConnectionError: nobody [there]; asked again" in looker.text("notes")
        assert len(looker.column("workers", "worker")) == 5  # as they were
        looker.source.failure = None
        await looker.until(lambda: not looker.app.failure)
        await looker.pilot.pause()
        assert "nobody" not in looker.text("notes")


@played
async def test_news_come_by_themselves() -> None:
    async with looking(interval=0.0) as looker:
        await looker.until(lambda: looker.source.looks >= 3)
        assert looker.app.interval == 0.2  # the least
        await looker.until(lambda: looker.row("workers", "ps")["in/s"] == "60")


@played
async def test_a_pause_ends_the_asking() -> None:
    async with looking(interval=0.2) as looker:
        await looker.press("p")
        await looker.until(lambda: not looker.app.asking)
        assert "PAUSED" in looker.text("group")
        assert looker.app.next_ask is None
        looks = looker.source.looks
        await looker.press("p")
        await looker.until(lambda: looker.source.looks > looks)
        assert "PAUSED" not in looker.text("group")


@played
async def test_the_interval_is_changed() -> None:
    async with looking(interval=1.0) as looker:
        await looker.press("plus")
        assert "every 2s" in looker.text("group")
        await looker.press(*["minus"] * 9)
        assert "every 0.2s" in looker.text("group")


@played
async def test_a_source_that_hangs_holds_up_nobody() -> None:
    over = threading.Event()
    async with looking() as looker:
        look = looker.source.look
        asked = threading.Event()

        def hang() -> Sight:
            asked.set()
            over.wait(20)
            return look()

        looker.source.look = hang
        await looker.press("space")
        await looker.until(asked.is_set)
        await looker.press("r", "enter")
        assert isinstance(looker.app.screen, Detail)
    assert not over.is_set()
    over.set()


@pytest.mark.parametrize("size", [(30, 8), (200, 60)], ids=str)
def test_terminals_of_any_size(size: tuple[int, int]) -> None:
    async def use() -> None:
        async with looking(size=size) as looker:
            assert looker.grid("workers").row_count == 5
            await looker.press("enter", "3", "escape", "w", "escape", "slash")
            assert looker.app.screen.query_one(Input).has_focus

    asyncio.run(use())


@played
async def test_eighty_columns_show_the_most_important() -> None:
    async with looking(size=(80, 24)) as looker:
        await looker.until(lambda: "Quit" in looker.app.export_screenshot())
        screen = looker.app.export_screenshot().replace("&#160;", " ")
        for text in ("worker", "phase", "in/s", "flight", "queue", "slots", "16/16", "Server.push", "Why"):
            assert text in screen


def test_once_is_a_plain_table() -> None:
    text = top.once(Training(), between=0.0)
    lines = text.splitlines()
    assert lines[0].split()[:4] == ["worker", "rank", "phase", "in/s"]
    assert lines[1].split()[:5] == ["ps", "0", "member", "60", "0"]
    assert lines[5].split()[:4] == ["!", "trainer10", "-", "silent"]
    assert f"! trainer10 is silent: {REFUSED}" in lines
    assert any(line.endswith("Server.push") for line in lines)
    assert text.isascii()


def test_without_textual_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("textual", "telegrad.insight.terminal"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "textual", None)
    with pytest.raises(UsageError, match=r"pip install 'telegrad\[insight\]'"):
        top.run(Training(), lambda sight: "")
    assert top.once(Training(), between=0.0)
