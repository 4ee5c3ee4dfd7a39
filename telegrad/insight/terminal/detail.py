"""One worker: what it waits for, what it runs, where its threads stand, with whom it speaks."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Static, TabbedContent, TabPane

from telegrad.insight import tables, watching
from telegrad.insight.tables import CALLS_IN, CALLS_OUT, PASSES, PEERS, THREADS, amount, duration
from telegrad.insight.terminal.grid import Grid
from telegrad.insight.terminal.pages import Page
from telegrad.insight.watching import View
from telegrad.safe_text import safe
from telegrad.witness.account import MEMBER, Account

TABS = {"out": CALLS_OUT, "in": CALLS_IN, "threads": THREADS, "bytes": PEERS, "passes": PASSES}


class Detail(Page):
    """Its tables, each on a tab; of a worker that has fallen silent, what it told last."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(str(number), f"tab('{tab}')", table.name, show=False)
        for number, (tab, table) in enumerate(TABS.items(), 1)
    ]

    def __init__(self, name: str) -> None:
        super().__init__()
        self._worker = name
        self._stacks: dict[str, list[str]] = {}

    def body(self) -> ComposeResult:
        yield Static(id="worker", markup=False)
        with TabbedContent(initial="out"):
            for tab, table in TABS.items():
                with TabPane(table.name, id=tab):
                    yield Grid(table, f"{tab}-grid")
                    if tab == "threads":
                        with VerticalScroll(id="stack-scroll") as scroll:
                            scroll.border_title = "Stack, innermost first"
                            yield Static(id="stack", markup=False)

    def show(self) -> None:
        if (view := self.app.view) is None:
            return
        account = view.last.get(self._worker)
        self.query_one("#worker", Static).update(self._about(view, account))
        if account is None:
            return
        rows = {
            "out": tables.calls_out(account),
            "in": tables.calls_in(account),
            "threads": tables.threads(account),
            "bytes": watching.peers(view, account),
            "passes": tables.passes(account),
        }
        tabs = self.query_one(TabbedContent)
        for number, (tab, table) in enumerate(TABS.items(), 1):
            self.query_one(f"#{tab}-grid", Grid).fill(rows[tab])
            tabs.get_tab(tab).label = f"{number} {table.name} {len(rows[tab])}"
        self._stacks = {str(thread["number"]): thread["stack"] for thread in account["threads"]}
        self._show_stack()

    def action_tab(self, tab: str) -> None:
        self.query_one(TabbedContent).active = tab

    def on_tabbed_content_tab_activated(self, event: TabbedContent.TabActivated) -> None:
        self.query_one(f"#{event.pane.id}-grid").focus()

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        if event.data_table.id == "threads-grid":
            self._show_stack()

    def _show_stack(self) -> None:
        chosen = self.query_one("#threads-grid", Grid).selected
        self.query_one("#stack", Static).update(
            safe("\n".join(reversed(self._stacks.get(chosen or "", []))), lines=True)
        )

    def _about(self, view: View, account: Account | None) -> Text:
        name = self._worker
        why = view.sight.silent.get(name) or view.gone.get(name)
        told = Text()
        if why:
            told.append(f"! {name} gives no account: {safe(why)}\n", "bold red")
        if account is None:
            told.append(
                f"{name} has told nothing of itself yet" if not why else "and has told nothing of itself before"
            )
            return told
        if why:
            latest = max((each["time"] for each in view.sight.accounts), default=account["time"])
            told.append(f"What it told {duration(max(0.0, latest - account['time']))} before the others did:\n")
        told.append(f"{name}", "bold")
        told.append(
            f" rank {account['rank']} on {account['host']}, pid {account['pid']}: {safe(account['program'])}\n"
            f"{_phase(account)}; slots {account['busy']}/{account['slots']}; "
            f"memory {amount(account['memory'])}, lent {amount(account['shared'])}; contexts {account['contexts']}\n"
        )
        told.append("references: " + ", ".join(f"{what} {many}" for what, many in account["references"].items()))
        return told


def _phase(account: Account) -> str:
    phase = f"{account['phase']} for {duration(account['phase_age'])}"
    if account["phase"] == MEMBER:
        return f"{phase}, generation {account['generation']}"
    return f"{phase}, waits for {', '.join(account['missing'])}" if account["missing"] else phase
