"""The backward passes of one worker: it drives some of them, and creates the objects that do the rest.

The conductor is the agent's graph layer: it records the tensors that are sent and received in a context.

Several threads use a driven pass at once. The program's thread begins it and waits; reader threads bring reports,
failures and losses of workers; the timer thread ends passes that are late; any thread may end the context. No lock
covers the whole pass. Instead, the thread whose `pop` from `_driven` returns the pass ends it and sets its outcome, and
all others find nothing. Only the counts of the protocol have a lock, in `DrivenPass`. Its result, the next tasks, is
carried out after the lock is released: that takes locks of the agent, and may fail the pass.

A thread may send tasks of a pass that another thread has just failed. Workers that have received `Abandon` drop them.

Once a pass has begun at a worker, it knows no tensors that the worker sends later. The call that makes a root may still
have others send some. So if several workers have roots, none of them begins before the values of all roots exist.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from math import inf
from time import monotonic, perf_counter
from typing import Any

import torch
from torch import Tensor

from telegrad._core import events
from telegrad._core.agent.agent import Agent
from telegrad._core.calls import call_context, profiling
from telegrad._core.calls.futures import Future, Signal
from telegrad._core.membership.members import Identity
from telegrad._core.pickling.exceptions import rebuild
from telegrad._core.pickling.reducers import ask_whether_recorded
from telegrad.autograd import guard
from telegrad.autograd.contexts import AutogradContext, Contexts, entered_id, read_id
from telegrad.autograd.guard import Capture
from telegrad.autograd.pass_parts import LocalParts, OpenRoots
from telegrad.autograd.passes import ENDED, Abandon, Driver, Failed, PassReport, PassSpec, Task
from telegrad.errors import CallTimeout, ContextEnded, PeerError, PeerLost, TelegradError, UnusedSends, UsageError

WhenMade = Callable[[float], Future[None]]  # returns a future of a root's value, given a timeout in case of a question

ask_whether_recorded(lambda: entered_id() is not None and torch.is_grad_enabled())


class DrivenPass(Driver):
    """A pass that this worker drives, from its beginning to its end."""

    def __init__(
        self, context: AutogradContext, spec: PassSpec, timeout: float, keeps: Any, outcome: Signal | Future[None]
    ) -> None:
        super().__init__(spec)
        self.context = context
        self.deadline = monotonic() + timeout if timeout else inf
        self.begun = perf_counter()
        self.outcome: Any = outcome
        self._keeps = keeps  # kept alive until the pass has ended
        self.starts: list[tuple[str, Task]] = []  # the first tasks
        self.missing: dict[int, str] = {}  # the numbers and the workers of roots whose values may not exist yet
        # Guards changes of `missing`, and the fields of Driver: reports of several workers come concurrently.
        self.lock = threading.Lock()

    @property
    def owing(self) -> list[str]:
        """Return the workers that the pass waits for: first for roots, then for reports. The copy is atomic."""
        return sorted(set(self.missing.copy().values())) or super().owing


class Conductor:
    """All passes in which this worker takes part, and their contexts."""

    def __init__(self, agent: Agent, open_roots: OpenRoots) -> None:
        """`open_roots` gives the tensors of values on this worker, once they are available."""
        self.contexts = Contexts(agent, self._context_ended)
        self._agent = agent
        self._parts = LocalParts(agent, self.contexts, open_roots, self._on_report, self._fail)
        self.fused_steps = self._parts.fused_steps
        self._numbers = itertools.count(1)  # pass numbers; `next` is atomic
        self._driven: dict[PassSpec, DrivenPass] = {}  # no lock: each use is one atomic operation of a dict
        self._closed = False
        agent.on(PassReport, lambda _, message: self._on_report(message))
        agent.on(Failed, lambda sender, message: self._fail(message.spec, rebuild(message.failure)))
        agent.layers.graphs, agent.layers.entered_id = self, entered_id
        agent.lost.append(self._on_lost)
        agent.ticking.append(self._tick)

    @property
    def name(self) -> str:
        return self._agent.name

    @property
    def passes(self) -> int:
        """The number of passes, in contexts that have not ended, in which this worker takes part or has taken part."""
        return len(self._parts)

    @property
    def running(self) -> int:
        """The number of contexts with a pass that this worker drives, or works on right now."""
        at_work = {context.id for context in self.contexts.all() if context.tasks.busy}
        return len({spec.context for spec in self._driven.copy()} | at_work)

    # Called by the agent when it sends and receives

    def current(self) -> AutogradContext | None:
        """Return the context in which this thread's code runs, or None."""
        id_ = entered_id()
        return self.contexts.join(id_) if id_ is not None else None

    def received(
        self, data: bytes, tensors: list[Tensor], sender: Identity
    ) -> tuple[AutogradContext, Sequence[Tensor]]:
        """Record received tensors. Return their context, and replacements for the tensors."""
        (id_,) = read_id(data)
        context = self.contexts.join(id_)
        if context is None:
            # A gradient that comes to these tensors could not be sent on, and is an error, as if they had come before
            # the end.
            self.contexts.check_kept(id_)
            context = self.contexts.ended(id_)
        return context, context.received(data, tensors, sender)

    def close(self, reason: PeerError) -> None:
        """Fail the passes that this worker drives, because it leaves the group."""
        self._closed = True
        for spec in self._driven.copy():
            self._fail(spec, reason)

    # Called by users

    def begin(
        self,
        context: AutogradContext,
        roots: dict[str, list[Any]],
        timeout: float | None,
        keeps: Any,
        outcome: Signal | Future[None],
        capture: Capture | None = None,
        awaited: Sequence[tuple[str, WhenMade]] = (),
        **options: Any,
    ) -> DrivenPass:
        """Start a backward pass from `roots`, with `options` of PassSpec, and return without waiting for it.

        Roots of this worker are tensors or values; roots of other workers are descriptions of values there. A worker
        waits for its own roots; several workers begin once all `awaited` ones exist. `keeps` is kept alive until the
        pass has ended, which `outcome` reports. If `outcome` is a Signal, the caller must call `wait`: this thread does
        this worker's part meanwhile. A worker that has the fused step gives it the request once it knows that
        all its gradients are there. With a `capture`, which `keeps` must hold, gradients go there instead.
        """
        # The tasks of a context run one after the other. The new pass would wait for the task of the running one, which
        # this thread can only finish after the hook has returned: without the check, until the timeout.
        if type(outcome) is Signal and context.running is not None and guard.runs_pass():
            raise UsageError(
                f"this code runs inside a backward pass of context {context.id}, as hooks and backward functions do, "
                "and would deadlock with another pass of that context, which waits for this one: begin it afterwards"
            )
        if timeout is None:
            timeout = self._agent.timeout
        if self._agent.streams.used:
            self._agent.streams.publish()  # another thread may run this worker's part
        autocast = call_context.described_autocast() if call_context.is_autocast_on() else b""
        # In the drop-in mode the caller's autocast holds on this worker only, as with torch's RPC. So it is not put
        # into the specification, which is sent; `LocalParts._run` takes it from the context.
        if not self._agent.layers.sends_modes:
            context.autocast, autocast = autocast, b""
        spec = PassSpec(
            context.id,
            self._agent.name,
            next(self._numbers),
            roots=tuple(sorted(roots)),
            captures=capture is not None,
            autocast=autocast,
            **options,
        )
        if capture is not None:
            self._parts.captures[spec] = capture
        # The pass must be found in `_driven` before its first task is given away: the report of a worker, or a failure,
        # may arrive on another thread before `_give` returns, and an unknown pass counts as failed.
        driven = DrivenPass(context, spec, timeout, keeps, outcome)
        driven.starts = driven.start(roots.items())
        coming: list[Future[None]] = []
        if len(roots) > 1 and awaited:
            driven.missing = {number: worker for number, (worker, _) in enumerate(awaited)}
            # The pass's own timeout comes first, since its error names all missing workers.
            coming = [when_made(timeout and timeout + 1) for _, when_made in awaited]
        self._driven[spec] = driven
        # Another thread may have ended the context since the caller found it. That thread sets `ended` and then looks
        # for passes in `_driven`: one of the two sees the other.
        if context.ended:
            self._fail(spec, _too_early(context.id))
            return driven
        if timeout:
            self._agent.wake_at(driven.deadline)
        if not coming:
            self._give(driven, driven.starts, type(outcome) is Signal)
        for number, made in enumerate(coming):
            made.add_done_callback(partial(self._on_root, spec, number))
        return driven

    def wait(self, driven: DrivenPass) -> None:
        """Wait until a pass of this worker has ended. Raise its error, if any."""
        # A thread that only waits here may also run this worker's tasks: the agent lets it read the messages of the
        # workers that are known to take part, so no other thread has to be woken. With a profiler it runs all of them.
        if profiling.enabled():
            self._parts.attend(driven.context, driven.outcome)
        elif not driven.outcome.done():
            self._agent.wait_for(driven.outcome, senders=driven.workers - {self._agent.name})
        driven.outcome.wait()
        if self._agent.streams.used:
            self._agent.streams.join()

    def under_way(self) -> list[tuple[int, int, float, list[str]]]:
        """Return context, number, start time and workers with pending tasks of each pass that this worker drives."""
        driven = self._driven.copy()
        return [(spec.context, spec.number, each.begun, each.owing) for spec, each in driven.items()]

    def follow(self, passed: Future[None], act: Callable[[Future[None]], None]) -> None:
        """Run `act(passed)`, which may wait for other workers, on another thread once the pass has ended."""
        context = copy_context()

        def run(passed: Future[None]) -> None:
            context.run(act, passed)

        passed.add_done_callback(lambda _: self._agent.later(run, passed))

    def step_now(self, context: AutogradContext, step_id: int, request: bytes) -> tuple[bool, Any] | None:
        """Run a fused step if this worker has all its gradients, except those from passes.

        Return None if there is no such step, or if a sent tensor may still receive a gradient.
        """
        # An entry of `sends` stays until the context ends, so nothing here tells whether its gradient has come.
        found = self.fused_steps.get(step_id)
        return None if found is None or context.sends else self._parts.give_turn(found, context.id, request)

    def gradients(self, context_id: int) -> dict[Tensor, Tensor]:
        """Return the gradients of this worker's leaves in a context, ready for use by this thread."""
        gradients = self.contexts.find(context_id).gradients.as_dict()
        self._agent.streams.adopt(*gradients.values())
        return gradients

    # Driving passes

    def _give(self, driven: DrivenPass, tasks: list[tuple[str, Task]], here: bool = False) -> None:
        if len(tasks) > 1:
            # other workers first: they run while this worker does its part
            tasks.sort(key=lambda task: task[0] == self.name)
        for worker, task in tasks:
            try:
                self._parts.give(driven.context, worker, task, here)
            except TelegradError as error:
                self._fail(driven.spec, error)
                return

    def _on_root(self, spec: PassSpec, number: int, made: Any) -> None:
        """Begin a pass when its last root exists; fail it if the root will not exist."""
        # The callback has only the specification: the call that makes the root may outlive the pass by far.
        driven = self._driven.get(spec)
        if driven is None:
            return
        try:
            made.wait()
        except BaseException as error:
            self._fail(spec, error)
            return
        with driven.lock:
            del driven.missing[number]
            tasks = driven.starts if not driven.missing else []
        self._give(driven, tasks)

    def _on_report(self, report: PassReport) -> None:
        driven = self._driven.get(report.spec)
        if driven is None:
            if report.worker != self.name:  # it joined the pass after the pass had failed
                with contextlib.suppress(TelegradError):
                    self._agent.notify(report.worker, Abandon(report.spec))
            return
        try:
            with driven.lock:
                tasks = driven.report(report)
        except UnusedSends as error:
            self._fail(driven.spec, error.with_traceback(None))  # its frames would keep the graph alive
            return
        if tasks:
            self._give(driven, tasks)
        # Two threads may see the end at once, or one of them while another one fails the pass: `pop` decides.
        if driven.state == ENDED and self._driven.pop(driven.spec, None) is not None:
            self._complete(driven)

    def _fail(self, spec: PassSpec, error: BaseException) -> None:
        """End a pass on all workers, and fail its outcome."""
        driven = self._driven.pop(spec, None)
        if driven is None:  # another thread ends it
            return
        # The outcome comes last: when the caller continues, this worker has dropped the pass, and `Abandon` is on its
        # way to the others, before any message of the next pass.
        self._parts.abandon(spec)
        for worker in sorted(driven.workers - {self.name}):
            with contextlib.suppress(TelegradError):
                self._parts.tell(driven.context, worker, Abandon(spec))
        self._complete(driven, error)

    def _complete(self, driven: DrivenPass, error: BaseException | None = None) -> None:
        if (note := events.note) is not None:
            spec, failure = driven.spec, "" if error is None else type(error).__name__
            note((events.BACKWARD_PASS, driven.begun, perf_counter(), spec.context, spec.number, failure))
        # Before the outcome: the caller continues with it.
        driven.context.accumulated |= error is None and not driven.spec.captures
        act, result = (driven.outcome.set_result, None) if error is None else (driven.outcome.set_exception, error)
        # Callbacks of a future are user code. They must not run on a reader thread, nor on the thread that runs the
        # tasks of the context: another pass that they begin there would wait for them. A signal has no such callbacks.
        if self._closed or type(driven.outcome) is Signal:
            act(result)
        else:
            self._agent.later(act, result)

    # Failures, ends of contexts, timeouts

    def _on_lost(self, who: Identity, reason: PeerError) -> None:
        lost = PeerLost(f"a backward pass cannot continue without worker {who.name!r}: {reason}")
        for spec, driven in self._driven.copy().items():
            # The news may come when another worker, which takes part, has the name already.
            if who.name in driven.workers and driven.context.met(who.name) in (None, who):
                self._fail(spec, lost)
        self._parts.lost(who, lost)

    def _context_ended(self, id_: int) -> None:
        for spec in self._driven.copy():
            if spec.context == id_:
                self._fail(spec, _too_early(id_))

    def _tick(self, now: float) -> float:
        upcoming = self._parts.send_gathered(now)
        for spec, driven in self._driven.copy().items():
            if driven.deadline <= now:
                owing = ", ".join(map(repr, driven.owing)) or "no worker"
                text = f"the backward pass of context {driven.context.id} timed out; it was waiting for {owing}"
                self._fail(spec, CallTimeout(f"{text}. Give it a longer timeout"))
            else:
                upcoming = min(upcoming, driven.deadline)
        return upcoming


def _too_early(id_: int) -> ContextEnded:
    return ContextEnded(f"the context {id_} ended before its backward pass did: wait for the pass")
