"""`telegrad top`: what the workers of a group do right now, in a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable

from telegrad.errors import UsageError
from telegrad.insight.source import Sight, Source
from telegrad.insight.tables import WORKERS, as_text, ordered
from telegrad.insight.watching import FUNCTIONS, Watch, functions, troubles, workers
from telegrad.safe_text import safe


def run(source: Source, why: Callable[[Sight], str], interval: float = 1.0) -> None:
    """Show a group until the user quits, and ask it anew every `interval` seconds; `why` tells what it waits for.

    Raises:
        UsageError: Textual is not installed.
    """
    try:
        from telegrad.insight.terminal.app import Top
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("textual", "rich"):
            raise
        raise UsageError(
            "top needs Textual: pip install 'telegrad[insight]'; a plain table, `top --once`, does without"
        ) from None
    Top(source, why, interval).run()


def once(source: Source, between: float = 1.0) -> str:
    """Tables of workers and functions, as plain text; rates are those of `between` seconds."""
    watch = Watch()
    watch.look(source)
    time.sleep(between)
    view = watch.look(source)
    parts = [as_text(WORKERS, ordered(workers(view), WORKERS.by, WORKERS.descending))]
    if view.functions:
        parts.append(as_text(FUNCTIONS, ordered(functions(view), FUNCTIONS.by, FUNCTIONS.descending)))
    if notes := troubles(view):
        parts.append("\n".join(f"! {safe(note)}" for note in notes))
    return "\n\n".join(parts) + "\n"
