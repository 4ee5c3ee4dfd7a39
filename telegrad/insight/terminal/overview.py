"""The first screen: all workers, and the functions that are called."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Input

from telegrad.insight import watching
from telegrad.insight.tables import WORKERS
from telegrad.insight.terminal.detail import Detail
from telegrad.insight.terminal.grid import Grid
from telegrad.insight.terminal.pages import Page
from telegrad.insight.watching import FUNCTIONS


class Workers(Grid):
    """Opens what is under its cursor."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "Look in", key_display="\u23ce")]


class Overview(Page):
    """Workers above, functions below."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "all", "All rows", show=False),
        Binding("slash", "filter", "Filter", key_display="/"),
    ]

    def body(self) -> ComposeResult:
        yield Workers(WORKERS, "workers")
        yield Grid(FUNCTIONS, "functions")
        words = Input(placeholder="words that a row must show; enter keeps them, escape shows all", compact=True)
        words.display = False
        yield words

    def on_mount(self) -> None:
        self.query_one("#workers").focus()

    def show(self) -> None:
        if (view := self.app.view) is None:
            return
        self.query_one("#workers", Grid).fill(watching.workers(view))
        self.query_one("#functions", Grid).fill(watching.functions(view))

    def action_filter(self) -> None:
        words = self.query_one(Input)
        words.display = True
        words.focus()

    def action_all(self) -> None:
        self.query_one(Input).value = ""
        self.on_input_submitted()

    def on_input_changed(self, event: Input.Changed) -> None:
        for grid in self.query(Grid):
            grid.narrow(event.value)

    def on_input_submitted(self) -> None:
        words = self.query_one(Input)
        if words.has_focus:
            self.query_one("#workers").focus()
        words.display = bool(words.value)

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        if event.data_table.id == "workers" and event.row_key.value is not None:
            self.app.push_screen(Detail(event.row_key.value))
