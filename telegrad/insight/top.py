"""`telegrad top`: the current state of a group's workers, in a terminal."""

from __future__ import annotations

import shutil
import sys
import time
from typing import NamedTuple

from telegrad.errors import UsageError
from telegrad.ext.texts import safe
from telegrad.insight.reading import tables
from telegrad.insight.reading.history import GroupHistory, Source

LEAST = 0.2  # minimum seconds between two queries
NOTES = 3  # maximum number of lines with problems
HOME, END_OF_LINE, END = "\x1b[H", "\x1b[K\n", "\x1b[J"  # control sequences: to the top; clear the rest of line, screen


class TopView(NamedTuple):
    sort: str = ""  # the column by which tables are sorted, if they have it
    words: str = ""  # show only rows with all of these
    worker: str = ""  # show this worker instead of the whole group
    stacks: bool = False  # also show that worker's stacks

    def text(self, history: GroupHistory, height: int = 0) -> str:
        """Return the group as text, with tables that fit into `height` lines, if given.

        Raises:
            UsageError: there is no such column or worker.
        """
        columns = list(dict.fromkeys(column for table in tables.ALL for column in table))
        if self.sort and self.sort not in columns:
            raise UsageError(f"no table has a column {self.sort!r}; the columns are: {', '.join(columns)}")
        sight = history.sight
        places = sorted({account["place"] for account in sight.accounts})
        notes = [f"no new data: {history.trouble}; trying again"] if history.trouble else []
        notes += [f"{name} is silent: {why}" for name, why in sight.silent.items()]
        notes += [f"{name} is no longer in the group: {why}" for name, why in history.lost().items()]
        if height and len(notes) > NOTES:
            notes[NOTES - 1 :] = [f"and {len(notes) - NOTES + 1} more"]
        about = [f"{len(sight.accounts)} workers", f"{len(sight.silent)} silent", f"store {', '.join(places)}"]
        found = [" | ".join(about), *(f"! {safe(note)}" for note in notes), ""]
        if self.worker and (history.last or sight.silent):
            told, shown = tables.of_worker(history, self.worker, self.stacks)
            found += [*told.splitlines(), ""]
        else:
            shown = tables.of_group(history)
        shown = [table for table in shown if table.rows]
        for left, table in zip(range(len(shown), 0, -1), shown, strict=True):
            lines = tables.lines(table.columns, tables.texts(table, self.sort, self.words))
            room = max(4, (height - len(found)) // left - 2)  # an equal part of the remaining lines
            if height and len(lines) > room:
                lines[room - 1 :] = [f"... and {len(lines) - room + 1} more"]
            found += [f"{table.name}:", *lines, ""]
        return "\n".join(found)


GROUP = TopView()


def run(source: Source, interval: float = 1.0, view: TopView = GROUP) -> None:
    """Show a group, and query it every `interval` seconds, until Ctrl-C.

    Raises:
        UsageError: there is no such column or worker.
    """
    history = GroupHistory()
    while True:
        begun = time.monotonic()
        history.update(source)
        if sys.stdout.isatty():
            width, height = shutil.get_terminal_size()
            lines = view.text(history, height - 1).splitlines()[: height - 1]
            print(HOME + "".join(line[:width] + END_OF_LINE for line in lines), end=END, flush=True)
        else:
            print(view.text(history), flush=True)
        time.sleep(max(0.0, begun + max(interval, LEAST) - time.monotonic()))


def once(source: Source, between: float = 1.0, view: TopView = GROUP) -> str:
    """Return one view as text with all lines; rates are over `between` seconds."""
    history = GroupHistory()
    history.update(source)
    time.sleep(between)
    history.update(source)
    return view.text(history)
