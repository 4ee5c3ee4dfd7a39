"""A table that whoever looks at it sorts and narrows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.cells import cell_len
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.widgets import DataTable
from textual.widgets.data_table import RowDoesNotExist

from telegrad.insight.tables import Row, Table, narrowed, ordered, shown

ASCENDING, DESCENDING = "\u25b2", "\u25bc"


class Name(Text):
    """The first cell of a row, which knows the row's place."""

    place = 0


class Grid(DataTable[Text]):
    """Keeps the cursor on its row, wherever that goes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s,greater_than_sign", "sort(1)", "Sort", key_display="s"),
        Binding("S,less_than_sign", "sort(-1)", "Sort by the column before", show=False),
        Binding("r", "reverse", "Reverse"),
    ]

    def __init__(self, table: Table, name: str) -> None:
        super().__init__(id=name, cursor_type="row", cell_padding=0)
        self.fixed_columns = 0 if table.columns[0].width else 1
        self.table = table
        self.words = ""  # rows that do not show them are left out
        self._by, self._descending = table.by, table.descending
        self._rows: Sequence[Row] = ()
        self._drawn: dict[str, list[str]] = {}

    def on_mount(self) -> None:
        for index, column in enumerate(self.table.columns):
            heading = self._heading(index)
            self.add_column(heading, key=column.name, width=len(heading))
        self._tell()

    def fill(self, rows: Sequence[Row]) -> None:
        """Show these rows from now on."""
        self._rows = list({row.key: row for row in rows}.values())  # a second of one key would end the program
        self._draw()

    def narrow(self, words: str) -> None:
        self.words = words
        self._draw()

    @property
    def selected(self) -> str | None:
        """The key of the row under the cursor."""
        if not self.is_valid_row_index(self.cursor_row):
            return None
        return self.coordinate_to_cell_key(self.cursor_coordinate).row_key.value

    def action_sort(self, step: int) -> None:
        self._sort((self._by + step) % len(self.table.columns))

    def action_reverse(self) -> None:
        self._sort(self._by)

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        self._sort(event.column_index)

    def _sort(self, by: int) -> None:
        """By another column, numbers from the highest and texts from the first on; by the same, in reverse."""
        self._descending = not self._descending if by == self._by else self.table.columns[by].width > 0
        self._by = by
        for index, column in enumerate(self.ordered_columns):
            column.label = self._heading(index)
        self._draw()
        left = sum(column.get_render_width(self) for column in self.ordered_columns[:by])
        width = self.ordered_columns[by].get_render_width(self)
        fixed = self.ordered_columns[0].get_render_width(self) if self.fixed_columns else 0
        if by and not self.scroll_x + fixed <= left <= self.scroll_x + self.size.width - width:
            self.scroll_to(x=left - fixed, animate=False)

    def _draw(self) -> None:
        """Change what is different from what stands there."""
        chosen = self.selected
        rows = ordered(narrowed(self.table, self._rows, self.words), self._by, self._descending)
        for key in self._drawn.keys() - {row.key for row in rows}:
            self.remove_row(key)
            del self._drawn[key]
        grown = self._widen(rows)
        for place, row in enumerate(rows):
            self._draw_row(row, grown)
            first = self.get_cell(row.key, self.table.columns[0].name)
            assert isinstance(first, Name)
            first.place = place
        self.sort(self.table.columns[0].name, key=lambda cell: cell.place)
        if chosen is not None:
            try:
                self.move_cursor(row=self.get_row_index(chosen))
            except RowDoesNotExist:
                pass
        self._tell()

    def _widen(self, rows: Sequence[Row]) -> bool:
        """Make columns of texts as wide as these; whether that changes them.

        Columns that find their widths themselves do so after they were drawn, and keep what was.
        """
        lines = [shown(self.table, row) for row in rows]
        before = [column.width for column in self.ordered_columns]
        for index, column in enumerate(self.ordered_columns):
            if not self.table.columns[index].width:
                widest = max([cell_len(line[index]) for line in lines], default=0) + (3 if index == 0 else 1)
                column.width = max(len(column.label), widest)
        return before != [column.width for column in self.ordered_columns]

    def _draw_row(self, row: Row, anew: bool) -> None:
        texts = [*shown(self.table, row), "!" if row.trouble else ""]
        known = self._drawn.get(row.key)
        self._drawn[row.key] = texts
        if known is None:
            self.add_row(*(self._cell(index, row, text) for index, text in enumerate(texts[:-1])), key=row.key)
            return
        for index, column in enumerate(self.table.columns):
            if anew or texts[index] != known[index] or texts[-1] != known[-1]:
                self.update_cell(row.key, column.name, self._cell(index, row, texts[index]), update_width=anew)

    def _cell(self, index: int, row: Row, text: str) -> Text:
        """A mark beside the colour, for those who do not see that."""
        width = self.table.columns[index].width
        style = "bold red" if row.trouble else ""
        if index == 0:
            mark = "" if width else "! " if row.trouble else "  "
            return Name(f"{mark}{text.rjust(width)} ", style)
        return Text(f"{text.rjust(width)} ", style)

    def _heading(self, index: int) -> Text:
        column = self.table.columns[index]
        mark = (DESCENDING if self._descending else ASCENDING) if index == self._by else " "
        indent = " " * (column.width - len(column.name) if column.width else 2 * (index == 0))
        return Text.assemble(indent, (column.name, "" if mark == " " else "underline"), mark)

    def _tell(self) -> None:
        """Above the table, what is in it."""
        column = self.table.columns[self._by].name
        number = f"{len(self._drawn)} of {len(self._rows)}" if self.words else f"{len(self._rows)}"
        mark = DESCENDING if self._descending else ASCENDING
        self.border_title = f"{self.table.name}: {number}, by {column} {mark}"
