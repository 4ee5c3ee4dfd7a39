"""Sights of a group one after another, and the rows of tables that come from them. Times come with what is seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from telegrad.insight import figures
from telegrad.insight.source import Sight, Source
from telegrad.insight.tables import GONE, SILENT, Column, Row, Table, Used, count, duration
from telegrad.instruments import CALLED, Event
from telegrad.witness.account import QUEUED, RUNNING, Account, counts

WINDOW = 10.0  # seconds whose calls make the figures of functions
KEPT = 100_000  # events of all workers together; more would take too long to go through at each sight

FUNCTIONS = Table(
    "Functions",
    (
        Column("calls/s", f"calls that ended, per second of the last {WINDOW:.0f} seconds", count, 7),
        Column("p50", "half of them took no longer, from the call to its answer", duration, 6),
        Column("p99", "99 of 100 took no longer", duration, 6),
        Column(
            "ran", "half of them ran no longer than this; the rest is the way, and the wait for a slot", duration, 6
        ),
        Column("failed", "how many of them failed", count, 6),
        Column("function", "what was called", str),
    ),
    descending=True,
)


class View(NamedTuple):
    """A group at one moment, and what changed since the sight before."""

    sight: Sight
    rates: Mapping[str, figures.Rate]  # of workers that answered this time and the time before
    called: Mapping[str, float]  # calls of each worker that ended, per second of the window
    flows: Sequence[figures.Flow]
    functions: Sequence[figures.Function]
    window: float  # seconds that `called` and `functions` tell of
    last: Mapping[str, Account]  # what each worker told last, those that are silent now included
    gone: Mapping[str, str]  # who has died or left early, and why


class Watch:
    """Keeps what the next sight is compared with."""

    def __init__(self) -> None:
        self._before: Sight | None = None
        self._last: dict[str, Account] = {}
        self._events: dict[str, list[Event]] = {}

    def look(self, source: Source) -> View:
        """Ask, and tell what has changed."""
        sight = source.look()
        return self.take(sight, source.events(self.after(sight)))

    def after(self, sight: Sight) -> dict[str, float]:
        """From when on events are wanted, of each worker's process."""
        for account in sight.accounts:
            last = self._last.get(account["worker"])
            if last is not None and (last["host"], last["pid"]) != (account["host"], account["pid"]):
                self._events.pop(account["worker"], None)  # of another clock
        begun = {account["worker"]: account["clock"] - WINDOW for account in sight.accounts}
        return begun | {name: own[-1][2] for name, own in self._events.items() if own and name in begun}

    def take(self, sight: Sight, events: Mapping[str, Sequence[Event]]) -> View:
        accounts = {account["worker"]: account for account in sight.accounts}
        window = self._keep(accounts, events)
        before, self._before = self._before, sight
        self._last = {name: account for name, account in self._last.items() if name in sight.silent} | accounts
        known = {account["worker"] for account in before.accounts} if before else set()
        rates = {name: rate for name, rate in figures.rates(before, sight).items() if name in known}
        called = {name: sum(event[0] == CALLED for event in own) / window for name, own in self._events.items()}
        gone = {name: why for account in sight.accounts for name, why in account["gone"].items()}
        for name in accounts.keys() | sight.silent.keys():
            gone.pop(name, None)
        return View(
            sight,
            rates,
            called,
            figures.flows(before, sight),
            figures.functions(self._events),
            window,
            self._last,
            gone,
        )

    def _keep(self, accounts: Mapping[str, Account], events: Mapping[str, Sequence[Event]]) -> float:
        """Keep the events of a window, which is as long for all; how long it is."""
        room = max(1000, KEPT // max(1, len(accounts)))
        window = WINDOW
        kept = {}
        for name, account in accounts.items():
            own = [*self._events.get(name, ()), *events.get(name, ())]
            if len(own) > room:
                own = own[-room:]
                window = min(window, max(account["clock"] - own[0][2], 1e-3))
            kept[name] = own
        self._events = {
            name: [event for event in own if event[2] > accounts[name]["clock"] - window] for name, own in kept.items()
        }
        return window


def workers(view: View) -> list[Row]:
    """Rows of WORKERS."""
    rows = [_worker(account, view) for account in view.sight.accounts]
    return (
        rows
        + [_absent(name, SILENT, view) for name in view.sight.silent]
        + [_absent(name, GONE, view) for name in view.gone]
    )


def functions(view: View) -> list[Row]:
    """Rows of FUNCTIONS."""
    return [
        Row(each.name, (each.calls / view.window, each.p50, each.p99, each.running, each.failures, each.name))
        for each in view.functions
    ]


def peers(view: View, account: Account) -> list[Row]:
    """Rows of PEERS."""
    me = account["worker"]
    to = {flow.target: flow for flow in view.flows if flow.source == me}
    come = {flow.source: flow for flow in view.flows if flow.target == me}
    waited = counts(account["calls_out"], lambda call: call["to"])
    names = {*account["members"], *account["bytes_out"], *account["bytes_in"], *waited} - {me}
    return [
        Row(
            name,
            (
                name,
                to[name].rate if name in to else 0,
                come[name].rate if name in come else 0,
                account["bytes_out"].get(name, 0),
                account["bytes_in"].get(name, 0),
                waited[name],
                account["members"].get(name),
            ),
            trouble=name in view.sight.silent or name in view.gone,
        )
        for name in names
    ]


def troubles(view: View) -> list[str]:
    """Who does not answer, and why."""
    silent = [f"{name} is silent: {why}" for name, why in view.sight.silent.items()]
    return silent + [f"{name} has gone: {why}" for name, why in view.gone.items()]


def _worker(account: Account, view: View) -> Row:
    name = account["worker"]
    states = counts(account["calls_in"], lambda call: call["state"])
    rate = view.rates.get(name)
    return Row(
        name,
        (
            name,
            account["rank"],
            account["phase"],
            rate.calls if rate else None,
            view.called.get(name),
            counts(account["calls_out"], lambda call: call["to"]).total(),
            states[RUNNING],
            states[QUEUED],
            Used(account["busy"], account["slots"]),
            rate.sent if rate else None,
            rate.received if rate else None,
            account["shared"],
            account["references"].get("owners"),
            account["references"].get("users"),
            account["contexts"],
            len(account["threads"]),
            account["memory"],
            account["generation"],
            account["host"],
        ),
    )


def _absent(name: str, phase: str, view: View) -> Row:
    """Of a worker that gives no account; what it told last, as far as that goes on."""
    last = view.last.get(name)
    hosts = (account["members"][name] for account in view.sight.accounts if name in account["members"])
    host = last["host"] if last else next(hosts, None)
    unknown = (None,) * 15
    return Row(name, (name, last["rank"] if last else None, phase, *unknown, host), trouble=True)
