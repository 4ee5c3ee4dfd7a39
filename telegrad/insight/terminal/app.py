"""The application: its keys, its looks, its screens."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual.binding import Binding, BindingType

from telegrad.insight import tables, watching
from telegrad.insight.source import Sight, Source
from telegrad.insight.terminal.asking import Asking
from telegrad.insight.terminal.overview import Overview
from telegrad.insight.terminal.pages import Page, Reading

INTERVALS = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)  # seconds
TABLES = (
    tables.WORKERS,
    watching.FUNCTIONS,
    tables.CALLS_OUT,
    tables.CALLS_IN,
    tables.THREADS,
    tables.PEERS,
    tables.PASSES,
)
KEYS = """\
arrows, page up/down   move; left and right show further columns
tab                    from one table to the next
enter, or a click      look into the worker under the cursor; escape: back
1 to 5                 there: calls out, calls in, threads, bytes, passes
s S (or > <)           sort by the next column, by the one before
r                      reverse the order; a click on a heading does both
/                      only rows that show some words; escape: all rows
w                      why: who waits for whom, in words
p                      pause, and go on
space                  ask now
+ -                    ask less often, more often
q                      quit
"""

LOOKS = """
Screen { layout: vertical; }
#group { height: 1; text-wrap: nowrap; text-overflow: ellipsis; background: $primary; color: $text; padding: 0 1; }
#notes { height: auto; max-height: 4; padding: 0 1; }
#worker { height: auto; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }
Grid { background: $background; border-top: solid $primary; border-title-color: $text; }
Grid:focus { border-top: heavy $accent; border-title-style: bold; }
#workers { height: auto; max-height: 60%; }
#functions { height: 1fr; }
Input { dock: bottom; margin-bottom: 1; }
VerticalScroll { height: 1fr; border-top: solid $primary; padding: 0 1; }
VerticalScroll:focus { border-top: heavy $accent; }
TabbedContent { height: 1fr; }
TabPane { padding: 0; }
TabPane Grid, TabPane Grid:focus { height: 1fr; border: none; }
#stack-scroll { height: 1fr; }
"""


class Top(Asking):
    """A live view of a group."""

    TITLE = "telegrad top"
    ENABLE_COMMAND_PALETTE = False
    CSS = LOOKS
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("w", "why", "Why"),
        Binding("p", "pause", "Pause"),
        Binding("space", "now", "Ask now", show=False),
        Binding("plus,equals_sign", "interval(1)", "Interval", key_display="+/-"),
        Binding("minus", "interval(-1)", "Ask more often", show=False),
        Binding("question_mark", "keys", "Help", key_display="?"),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, source: Source, why: Callable[[Sight], str], interval: float = 1.0) -> None:
        super().__init__(source, max(interval, INTERVALS[0]))
        self._why = why

    def on_mount(self) -> None:
        self.push_screen(Overview())
        self._ask()

    def renew(self) -> None:
        if isinstance(self.screen, Page) and self.screen.is_mounted:  # else it shows all once it is
            self.screen.renew()

    def action_why(self) -> None:
        self._read(lambda: self._why(self.view.sight) if self.view else "Nobody has answered yet.", "Why")

    def action_keys(self) -> None:
        self._read(lambda: "\n\n".join([KEYS.rstrip(), *map(_explained, TABLES)]), "Keys and columns")

    def action_pause(self) -> None:
        self.paused = not self.paused
        self._ask_later(None)
        if not self.paused:
            self._ask()

    def action_now(self) -> None:
        self._ask()

    def action_interval(self, step: int) -> None:
        further = [each for each in INTERVALS if (each > self.interval if step > 0 else each < self.interval)]
        if further:
            self.interval = further[0] if step > 0 else further[-1]
        self._ask_later(self.interval)

    def _read(self, make: Callable[[], str], title: str) -> None:
        if not isinstance(self.screen, Reading):
            self.push_screen(Reading(make, title))


def _explained(table: tables.Table) -> str:
    lines = (f"  {column.name:<10} {column.about}" for column in table.columns)
    return "\n".join([table.name, *lines])
