"""The rim of the backward passes: which thread runs what, what is sent when, and what becomes of failures."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from time import monotonic, perf_counter
from typing import Any

from torch import Tensor

from telegrad.agent import profiling
from telegrad.agent.agent import Agent
from telegrad.agent.futures import Future, Signal
from telegrad.autograd.contexts import Context, Contexts
from telegrad.autograd.engine import LocalPass
from telegrad.autograd.outbox import Outbox, Parcel, unwrap
from telegrad.autograd.passes import (
    Abandon,
    Bury,
    Driver,
    Failed,
    Ledger,
    Mark,
    Missing,
    Order,
    Participant,
    Report,
    Start,
    Task,
)
from telegrad.errors import CallTimeout, ContextEnded, ContextLost, PeerError, PeerLost, TelegradError, UnusedSends
from telegrad.group.members import Identity
from telegrad.wire.failures import describe, rebuild

SHORT = 1e-3  # tasks that took less last time are run by the thread that reads, as they are expected to be short again

GATHER = 1e-3  # how long gradients wait at most for others that the same step will bring for the same worker

OpenRoots = Callable[[Sequence[Any]], Future[list[Tensor]]]


class Part:
    """This worker's part in one pass."""

    def __init__(
        self,
        agent: Agent,
        context: Context,
        order: Order,
        gathers: Callable[[Outbox], None],
        failed: Callable[[Order, BaseException], None],
    ) -> None:
        ledger = Ledger(order, agent.name)
        self.outbox = Outbox(agent, context, ledger, gathers, failed)
        self.participant = Participant(ledger, LocalPass(context, order, self.outbox, agent.streams))
        self.held: list[Task] | None = [] if agent.name in order.roots else None  # until its own roots are there


class Run:
    """A pass that this worker drives."""

    def __init__(self, context: Context, order: Order, deadline: float, keeps: Any, outcome: Signal | Future[None]):
        self.context = context
        self.keeps = keeps  # what must live until the pass has ended
        self.driver = Driver(order)
        self.outcome: Any = outcome
        self.deadline = deadline
        self.lock = threading.Lock()  # guards the driver


class Conductor:
    """All passes in which this worker takes part."""

    def __init__(self, agent: Agent, open_roots: OpenRoots) -> None:
        """`open_roots` gives the tensors of values that live here, once they are there."""
        self.contexts = Contexts(agent, self._context_ended)
        self.current, self.received = self.contexts.current, self.contexts.received
        self.name = agent.name
        self._agent = agent
        self._open_roots = open_roots
        self._runs: dict[tuple[int, int], Run] = {}  # by context and number
        self._gathering: set[Outbox] = set()
        self._short = False
        self._closed = False
        for task in (Start, Mark, Bury):
            agent.on(task, self._take_task)
        agent.on(Parcel, self._take_parcel)
        agent.on(Report, lambda sender, message: self._on_report(sender.name, message))
        agent.on(Failed, lambda sender, message: self._fail_by(message.order, message.failure))
        agent.on(Abandon, lambda sender, message: self._abandon(message.order))
        agent.record(self)
        agent.lost.append(self._on_lost)
        agent.ticking.append(self._tick)

    # Beginning

    def begin(
        self,
        context: Context,
        roots: dict[str, list[Any]],
        *,
        retain: bool,
        create: bool,
        fast: bool,
        timeout: float | None,
        keeps: Any,
        outcome: Signal | Future[None],
    ) -> Run:
        """Run backward from `roots`: of this worker tensors or values, of others values that live there.

        `keeps` is held until the end, of which `outcome` is told. With a signal, `wait` must follow: this thread has
        nothing better to do than this worker's part.
        """
        if timeout is None:
            timeout = self._agent.timeout
        self._agent.streams.publish()
        number = next(context.passes)
        order = Order(context.id, self._agent.name, number, retain, create, fast, tuple(sorted(roots)))
        run = Run(context, order, monotonic() + timeout if timeout else inf, keeps, outcome)
        self._runs[context.id, number] = run
        if timeout:
            self._agent.wake_at(run.deadline)
        with run.lock:
            letters = run.driver.start(roots.items())
        self._deliver(run, letters, type(outcome) is Signal)
        return run

    def _deliver(self, run: Run, letters: list[tuple[str, Task]], here: bool = False) -> None:
        if len(letters) > 1:
            letters.sort(key=lambda letter: letter[0] == self.name)  # so that the others work meanwhile
        for worker, task in letters:
            try:
                self._give(run.context, worker, task, here)
            except TelegradError as error:
                self._fail(run, error)
                return

    def wait(self, run: Run) -> None:
        """Wait until a pass of this worker has ended; raises its error."""
        if profiling.enabled():
            self._attend(run)
        elif not run.outcome.done():
            with run.lock:
                others = run.driver.workers - {self.name}
            self._agent.wait_for(run.outcome, senders=others)
        run.outcome.wait()
        self._agent.streams.join()

    def gradients(self, context_id: int) -> dict[Tensor, Tensor]:
        """Those of this worker's leaves."""
        gradients = self.contexts.find(context_id).gradients.as_dict()
        self._agent.streams.adopt(*gradients.values())
        return gradients

    def _attend(self, run: Run) -> None:
        """Do this worker's part of a pass on this thread while it lasts, where a profiler sees it."""
        context, calls = run.context, queue.SimpleQueue[bool]()
        with context.lock:
            context.calls = calls
        run.outcome.add_done_callback(lambda _: calls.put(False))
        with self._agent.waiting():
            while calls.get():
                self._work(context)
        with context.lock:
            context.calls = None
        while not calls.empty():
            if calls.get():
                self._work(context)

    # This worker's part

    def _give(self, context: Context, worker: str, task: Task, here: bool = False) -> None:
        """Have a worker do something, which may be this one."""
        if worker == self.name:
            self._post(context, task, here)
        else:
            context.meet(self._agent.identify(worker))
            self._agent.notify(worker, task)

    def _take_task(self, sender: Identity, task: Task) -> None:
        context = self.contexts.join(task.order.context)
        if context is not None:
            context.meet(sender)
            self._post(context, task, errand=True)
            return
        try:
            self.contexts.check_kept(task.order.context)
        except ContextLost as error:
            self._failed(task.order, error)

    def _take_parcel(self, sender: Identity, parcel: Parcel) -> None:
        shipment, report = unwrap(parcel)
        self._take_task(sender, shipment)
        if report is not None:
            self._on_report(sender.name, report)

    def _post(self, context: Context, task: Task, here: bool = False, errand: bool = False) -> None:
        """Something is to be done in a context: by whoever is at it, or by this thread or one that begins now."""
        with context.lock:
            context.inbox.append(task)
            if context.busy:
                return
            context.busy = True
            if context.calls is not None and not here:
                context.calls.put(True)
                return
        if here:
            self._work(context)
        else:
            self._agent.run(self._work, context, self._short, errand)

    def _work(self, context: Context) -> None:
        with self._agent.streams.turn():
            self._work_off(context)

    def _work_off(self, context: Context) -> None:
        start = perf_counter()
        while True:
            with context.lock:
                if not context.inbox:
                    context.busy = False
                    break
                tasks = list(context.inbox)
                context.inbox.clear()
            if len(tasks) == 1:
                self._do(context, tasks)
                continue
            for _, group in itertools.groupby(tasks, lambda task: task.order):
                self._do(context, list(group))
        self._short = perf_counter() - start < SHORT

    def _do(self, context: Context, tasks: list[Task]) -> None:
        order = tasks[0].order
        pass_ = order.driver, order.number
        if pass_ in context.over:
            return
        part = context.parts.get(pass_)
        if part is None:
            part = context.parts[pass_] = Part(self._agent, context, order, self._gathers, self._failed)
            part.outbox.brief = self._short
        try:
            if part.held is not None:
                tasks = self._hold(context, part, tasks)
            if tasks:
                with context.entered():
                    letters = part.participant.take(tasks)
                self._agent.streams.publish()  # before anybody hears that it is done
                for worker, task in letters:
                    part.outbox.reached.add(worker)
                    self._give(context, worker, task)
                if not part.outbox.send_with(part.participant.report):
                    self._report(part.participant.report())
        except BaseException as error:
            self._failed(order, error)

    def _gathers(self, outbox: Outbox) -> None:
        self._gathering.add(outbox)
        self._agent.wake_at(monotonic() + GATHER, rough=outbox.brief)

    def _hold(self, context: Context, part: Part, tasks: list[Task]) -> list[Task]:
        """The roots of this worker come first: what waits for them must not run before they are known."""
        held, there = part.held, False
        assert held is not None
        for task in tasks:
            if not isinstance(task, Start):
                held.append(task)
            elif all(isinstance(value, Tensor) for value in task.values):
                held.insert(0, task)
                there = True
            else:
                future = self._open_roots(task.values)
                future.add_done_callback(partial(self._opened, context, task))
        if not there:
            return []
        part.held = None
        return held

    def _opened(self, context: Context, task: Start, done: Any) -> None:
        try:
            self._post(context, task._replace(values=done.wait()))
        except Exception as error:
            self._failed(task.order, error)

    def _failed(self, order: Order, error: BaseException) -> None:
        """This worker cannot do its part."""
        failure = describe(_advised(error), self._agent.name)
        self._abandon(order)
        if order.driver == self.name:
            self._fail_by(order, failure)
        else:
            with contextlib.suppress(TelegradError):  # it has gone, and its context with it
                self._agent.notify(order.driver, Failed(order, failure))

    def _abandon(self, order: Order) -> None:
        context = self.contexts.get(order.context)
        if context is not None:
            context.over.add((order.driver, order.number))
            context.parts.pop((order.driver, order.number), None)

    def _report(self, report: Report) -> None:
        if report.order.driver == self.name:
            self._on_report(self.name, report)
        else:
            self._agent.notify(report.order.driver, report)

    # Driving

    def _run_of(self, order: Order) -> Run | None:
        return self._runs.get((order.context, order.number))

    def _on_report(self, worker: str, report: Report) -> None:
        run = self._run_of(report.order)
        if run is None:
            if worker != self._agent.name:  # it came to the pass after that had failed
                with contextlib.suppress(TelegradError):
                    self._agent.notify(worker, Abandon(report.order))
            return
        try:
            with run.lock:
                letters = run.driver.report(worker, report)
                ended = run.driver.ended
        except Missing as missing:
            self._fail(run, _unused(missing))
            return
        self._deliver(run, letters)
        if ended and self._take(run):
            run.outcome.set_result(None)

    def _fail_by(self, order: Order, failure: bytes) -> None:
        run = self._run_of(order)
        if run is not None:
            self._fail(run, rebuild(failure))

    def _fail(self, run: Run, error: BaseException) -> None:
        """End a pass everywhere, and tell who waits for it."""
        if not self._take(run):
            return
        order = run.driver.order
        self._abandon(order)
        for worker in sorted(run.driver.workers - {self._agent.name}):
            with contextlib.suppress(TelegradError):
                self._agent.notify(worker, Abandon(order))
        tell = partial(_tell_failure, run.outcome)
        if self._closed:
            tell(error)
        else:
            self._agent.later(tell, error)  # its callbacks are user code, and this may be a thread that reads

    def _take(self, run: Run) -> bool:
        """Whether the caller is the one to end the pass."""
        return self._runs.pop((run.driver.order.context, run.driver.order.number), None) is not None

    # What goes wrong by itself

    def _on_lost(self, who: Identity, reason: PeerError) -> None:
        lost = PeerLost(f"a backward pass cannot go on without worker {who.name!r}: {reason}")
        for run in list(self._runs.values()):
            if who.name in run.driver.workers:
                self._fail(run, lost)
        for context in self.contexts.knowing(who):
            for part in list(context.parts.values()):
                if who.name in part.outbox.reached:
                    self._failed(part.participant.order, lost)

    def _context_ended(self, id_: int) -> None:
        for run in list(self._runs.values()):
            if run.driver.order.context == id_:
                self._fail(run, ContextEnded(f"the context {id_} ended before its backward pass did: wait for that"))

    def close(self, reason: PeerError) -> None:
        """This worker leaves."""
        self._closed = True
        for run in list(self._runs.values()):
            self._fail(run, reason)

    def _tick(self, now: float) -> float:
        upcoming = inf
        while self._gathering:
            self._gathering.pop().send_early()
        for run in list(self._runs.values()):
            if run.deadline <= now:
                self._fail(run, _late(run))
            else:
                upcoming = min(upcoming, run.deadline)
        return upcoming


def _tell_failure(outcome: Any, error: BaseException) -> None:
    outcome.set_exception(error)


def _advised(error: BaseException) -> BaseException:
    """Where a tensor was changed that the pass needs, the usual reason and what helps."""
    if type(error) is not RuntimeError or "modified by an inplace operation" not in str(error):
        return error
    return RuntimeError(
        f"{error}\nWhere that is a parameter, another context's optimizer may have changed it between forward and "
        "backward: let the steps wait for each other, or make the optimizers with hogwild=True"
    )


def _unused(missing: Missing) -> UnusedSends:
    lines = [f"  on worker {worker!r}: {'; '.join(waiting)}" for worker, waiting in missing.waiting.items()]
    return UnusedSends(
        "mode='fast' states that every tensor that was sent takes part in the backward pass, but no gradient came for\n"
        + "\n".join(lines)
        + "\nUse mode='smart', which costs nothing where all take part"
    )


def _late(run: Run) -> CallTimeout:
    with run.lock:
        owing = sorted(run.driver.owing)
    return CallTimeout(
        f"the backward pass of context {run.driver.order.context} did not end in its time; it waited for "
        f"{', '.join(map(repr, owing)) or 'nobody'}. Give it a longer timeout"
    )
