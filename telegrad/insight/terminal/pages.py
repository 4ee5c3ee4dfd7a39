"""What all screens have: a line about the group, what is wrong, the keys; and one that shows a text."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import Footer, Static

from telegrad.insight.terminal.asking import Asking
from telegrad.insight.watching import troubles
from telegrad.safe_text import safe

NOTES = 3  # lines of what is wrong, at most


class Page(Screen[None]):
    """Is told of each view of the group while it is the screen on top."""

    app: Asking

    BINDINGS: ClassVar[list[BindingType]] = [("escape", "back", "Back")]

    def body(self) -> ComposeResult:
        raise NotImplementedError

    def show(self) -> None:
        """Show what is known, below the notes."""
        raise NotImplementedError

    def compose(self) -> ComposeResult:
        yield Static(id="group", markup=False)
        yield Static(id="notes", markup=False)
        yield from self.body()
        yield Footer(compact=True)

    def on_screen_resume(self) -> None:
        self.renew()

    def renew(self) -> None:
        top = self.app
        self.query_one("#group", Static).update(_about(top))
        notes = [f"no news: {top.failure}; asked again"] if top.failure else []
        notes += troubles(top.view) if top.view else []
        if len(notes) > NOTES:
            notes = [*notes[: NOTES - 1], f"and {len(notes) - NOTES + 1} more"]
        lines = Text("\n".join(f"! {safe(note)}" for note in notes), "bold red")
        bar = self.query_one("#notes", Static)
        bar.update(lines)
        bar.display = bool(notes)
        self.show()

    def action_back(self) -> None:
        self.app.pop_screen()


class Reading(Page):
    """A text, made anew whenever something has changed."""

    def __init__(self, make: Callable[[], str], title: str) -> None:
        super().__init__()
        self._make = make
        self._title = title
        self._making = False

    def body(self) -> ComposeResult:
        with VerticalScroll(can_focus=True) as scroll:
            scroll.border_title = self._title
            yield Static("...", id="text", markup=False)

    def show(self) -> None:
        if not self._making:
            self._making = True
            self.app.aside(self._make, self._made)

    def _made(self, text: str | Exception) -> None:
        self._making = False
        if self.is_attached:
            self.query_one("#text", Static).update(
                safe(text if isinstance(text, str) else f"{type(text).__name__}: {text}", lines=True)
            )


def _about(top: Asking) -> str:
    parts = ["telegrad top"]
    if top.view is not None:
        sight = top.view.sight
        parts.append(f"{len(sight.accounts)} workers")
        if sight.silent:
            parts.append(f"{len(sight.silent)} silent")
        if places := {account["place"] for account in sight.accounts}:
            parts.append(f"store {', '.join(sorted(places))}")
    elif not top.failure:
        parts.append("asking...")
    parts.append("PAUSED" if top.paused else f"every {top.interval:g}s")
    return " | ".join(parts)
