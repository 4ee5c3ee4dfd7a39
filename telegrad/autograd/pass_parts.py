"""This worker's parts in backward passes: threads, messages, and handling of failures.

Tasks of all passes of one context are in one mailbox (`contexts.Mailbox`), and one thread at a time runs them. So a
part and its `EngineRunner` need no locks, and contexts do not wait for each other. Which thread it is changes with each
batch of tasks: the caller of `backward` that begins or waits, the reader thread if the last tasks were short, or
another thread of the reactor.

Other threads may end the context, or fail the pass, while its tasks run. They do not stop the running thread. They
change `parts` and `early`, and the running thread looks there:

- A failed pass has None in `parts`, and later messages for it are dropped. The entry stays until the context ends,
  because such messages may come until then.
- A context that has ended has no parts. The running thread may just have added one, so it checks `ended` once more at
  the end, and drops the parts again.

A part reports what it has done only after all resulting messages have been sent, or with the last of them, and in its
report it names them. The driver would otherwise count the pass as quiescent while a message is under way.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from time import monotonic, perf_counter
from typing import Any, Protocol
from weakref import WeakValueDictionary

from torch import Tensor

from telegrad._core import events
from telegrad._core.agent.agent import Agent
from telegrad._core.calls.call_context import is_autocast_on, under_autocast
from telegrad._core.calls.call_names import user_name
from telegrad._core.calls.futures import Future, Signal
from telegrad._core.interrupts import raised_by_handler
from telegrad._core.membership.members import Identity
from telegrad._core.pickling.exceptions import describe, rebuild
from telegrad.autograd.contexts import AutogradContext, Contexts, Inside, entered
from telegrad.autograd.engine import EngineRunner
from telegrad.autograd.guard import Capture
from telegrad.autograd.passes import (
    NAMED,
    Abandon,
    DeclareDead,
    Failed,
    Key,
    Mark,
    PackedShipment,
    PassReport,
    PassSpec,
    Start,
    Task,
)
from telegrad.autograd.send_recv import Outbox
from telegrad.errors import ContextLost, LimitReached, PeerLost, TelegradError

# seconds. If the last tasks took less, the reader thread runs the next ones, which are expected to be as short.
SHORT = 1e-3

# The timer thread sends gradients and reports that have waited for these times. Another thread that was woken at once
# would send gradients in small pieces, depending on chance.
GATHER = 1e-3  # seconds: how long gradients wait at most for others that the same step will send to the same worker
HOLD = 5e-3  # and how long for the report, with reports of other workers, if this worker's part is expected to be short

OpenRoots = Callable[[Sequence[Any]], Future[list[Tensor]]]


class PassHook(Protocol):
    """An object that needs all gradients that a worker has in a context, such as an optimizer's part on that worker."""

    def step_in_pass(self, context_id: int, request: bytes) -> Any:
        """Process the request, now that the gradients are complete. Return a plain value."""


class LocalPart:
    """This worker's part in one pass: it does tasks, and reports."""

    def __init__(self, outbox: Outbox, runner: EngineRunner) -> None:
        self.outbox = outbox
        self._runner = runner
        self._done: list[Key] = []
        self._reports = 0
        self._waits_to_step = outbox.spec.step_id != 0
        self._stepped: tuple[bool, Any] | None = None  # to be reported

    def take(self, tasks: Sequence[Task]) -> list[tuple[str, Task]]:
        """Do tasks. Return the messages to send, except shipments, which leave during the call."""
        # The gradients of all shipments are taken in together, so nodes that become ready by different messages run in
        # one order, that of torch's engine.
        letters: list[tuple[str, Task]] = []
        arrived: list[tuple[int, list[Any]]] = []
        for task in tasks:
            if isinstance(task, PackedShipment):
                arrived += task.unpacked()
            elif isinstance(task, Start):
                self._runner.start()
            # Marks only come while no gradient is under way, so the timer thread sends nothing, and `key` needs no
            # lock.
            elif isinstance(task, Mark):
                for worker, sends in self._runner.mark(task.sends).items():
                    letters.append((worker, Mark(task.spec, self.outbox.key(worker), sends)))
            else:
                self._runner.bury()
            self._done.append(task.key)
        if arrived:
            self._runner.arrive(arrived)
        return letters

    def may_step(self, parts: Iterable[LocalPart]) -> bool:
        """Return True if the fused step may run: the context expects no gradient here. Then call `note_step`."""
        return self._waits_to_step and not any(part._runner.expects for part in parts)

    def note_step(self, outcome: tuple[bool, Any]) -> None:
        """Record the outcome of the fused step, which does not run again."""
        self._waits_to_step = False
        self._stepped = outcome

    def report(self) -> PassReport:
        """Return the report for the driver. All other messages must have been sent before."""
        done, self._done = self._done, []
        stepped, self._stepped = self._stepped, None
        self._reports += 1
        outbox, runner = self.outbox, self._runner
        waiting = [*itertools.islice(runner.waiting, NAMED)] if outbox.spec.fast else ()
        number, sent, outbox.sent = self._reports, outbox.sent, []
        return PassReport(outbox.spec, outbox.worker, number, done, sent, runner.starved, waiting, stepped)


class LocalParts:
    """This worker's parts in all passes, whether this or another worker drives them."""

    def __init__(
        self,
        agent: Agent,
        contexts: Contexts,
        open_roots: OpenRoots,
        reported: Callable[[PassReport], None],
        failed: Callable[[PassSpec, BaseException], None],
    ) -> None:
        """`open_roots` gives the tensors of values on this worker, once they are available.

        `reported` and `failed` are called for passes that this worker drives.
        """
        self._agent = agent
        self._contexts = contexts
        self._open_roots = open_roots
        self._reported = reported
        self._tell_failed = failed
        # by the numbers that passes use for them
        self.fused_steps: WeakValueDictionary[int, PassHook] = WeakValueDictionary()
        # of passes that this worker drives
        self.captures: WeakValueDictionary[PassSpec, Capture] = WeakValueDictionary()
        # These need no lock: each use is one atomic operation of a dict, or sets a flag.
        self._gathering: dict[Outbox, float] = {}  # until when gradients or reports wait there
        self._short = False  # the last tasks did not take long
        for task in (Start, Mark, DeclareDead):
            agent.on(task, self._take_task)
        agent.on(PackedShipment, self._take_shipment)
        agent.on(Abandon, lambda sender, message: self.abandon(message.spec))

    def __len__(self) -> int:
        """Return the number of parts in contexts that have not ended, without failed passes."""
        return sum(part is not None for context in self._contexts.all() for part in list(context.parts.values()))

    # Receiving tasks

    def give(self, context: AutogradContext, worker: str, task: Task, here: bool = False) -> None:
        """Send a task to a worker, or queue it here. With `here`, this thread runs it unless another runs tasks."""
        if worker == self._agent.name:
            self._post(context, task, here)
        else:
            self.tell(context, worker, task)

    def tell(self, context: AutogradContext, worker: str, message: Task | PassReport | Abandon) -> None:
        """Send a message to a worker that takes part, but not to a restarted worker of the same name."""
        who = context.met(worker)
        if who is None:
            who = self._agent.identify(worker)
            context.meet(who)
        self._agent.notify(worker, message, who.incarnation)

    def _take_task(self, sender: Identity, task: Task) -> None:
        try:
            context = self._contexts.join(task.spec.context)
            if context is None:
                self._contexts.check_kept(task.spec.context)
                return
        except (ContextLost, LimitReached) as error:
            self._failed(task.spec, error)
            return
        context.meet(sender)
        self._post(context, task, by_who_waits=True)

    def _take_shipment(self, sender: Identity, shipment: PackedShipment) -> None:
        _, key, gradients, reports, tensors = shipment
        spec = PassSpec(*shipment.spec)
        if spec.driver != self._agent.name:
            self._take_task(sender, PackedShipment(spec, key, gradients, reports, tensors))
            return
        self._take_task(sender, PackedShipment(spec, key, gradients, (), tensors))
        for report in reports:
            self._reported(PassReport(spec, *report))

    def _post(self, context: AutogradContext, task: Task, here: bool = False, by_who_waits: bool = False) -> None:
        """Queue a task. If no thread runs the tasks of its context, this thread or another one begins to."""
        if context.tasks.put(task, here):
            # A message handler must not wait, so tasks that came in a message get a slot of the reactor, as calls do.
            if here:
                self._work(context)
            else:
                self._agent.run(self._work, context, self._short, by_who_waits)

    # Running tasks

    def attend(self, context: AutogradContext, outcome: Signal) -> None:
        """Run the tasks of a context on this thread, so that a profiler sees them, until `outcome` is done."""
        calls = queue.SimpleQueue[bool]()
        context.tasks.call(calls)
        outcome.add_done_callback(lambda _: calls.put(False))
        try:
            with self._agent.waiting():
                while calls.get():
                    self._work(context)
        finally:
            # `put` may have left tasks to this thread since it stopped waiting. Their mailbox counts as busy, so
            # another thread must be started for them.
            context.tasks.call(None)
            while not calls.empty():
                if calls.get():
                    self._agent.run(self._work, context, self._short)

    def _work(self, context: AutogradContext) -> None:
        """Run the tasks of a context until none is left. Raise errors that a signal handler raised meanwhile."""
        left: list[list[Task]] = []
        try:
            with self._agent.streams.turn():
                start = perf_counter()
                while tasks := context.tasks.take():
                    left = [tasks]
                    if len(tasks) > 1:  # group consecutive ones of the same pass
                        left = [list(same) for _, same in itertools.groupby(tasks, lambda task: task.spec)]
                    while left:
                        self._do(context, left.pop(0))
                # `close` may have dropped the parts just before `_begin` added one, which would keep the graph and the
                # context alive. It sets `ended` before it drops them, so one of the two threads drops the new part.
                if context.ended:
                    context.drop_parts()
                self._short = perf_counter() - start < SHORT
        except BaseException as error:
            context.tasks.put_back([task for group in left for task in group])
            if raised_by_handler(error):  # this thread raises the error, so another thread runs the rest
                self._agent.run(self._work, context, False)
                raise
            # There is no turn, as a device has failed, or no memory. It would be the same on another thread.
            while tasks := context.tasks.take():
                for spec in {task.spec for task in tasks}:
                    self._failed(spec, error)

    def _do(self, context: AutogradContext, tasks: list[Task]) -> None:
        """Run tasks of one pass, and report. Raise only errors that a signal handler raised on this thread."""
        spec = tasks[0].spec
        begun = perf_counter()
        try:
            if context.ended:
                self._contexts.check_kept(context.id)
                return
            if spec not in context.parts:
                tasks = self._begin(context, spec, tasks)
            part: LocalPart | None = context.parts.get(spec)
            if part is None or not tasks:
                return
            # In this order: the fused step's result is in the report, and the report names all messages that were sent.
            letters = self._run(context, part, tasks)
            if spec.step_id:
                self._try_step(context, part)
            if self._agent.streams.used:
                self._agent.streams.publish()  # before other workers learn that it is done
            for worker, task in letters:
                self.give(context, worker, task)
            if (note := events.note) is not None:
                note((events.BACKWARD_TASKS, begun, perf_counter(), spec.context, spec.driver, spec.number))
            for report in part.outbox.finish(part.report):
                if spec.driver == self._agent.name:
                    self._reported(report)
                else:
                    self.tell(context, spec.driver, report)
            # Nothing waits there any more. The entry would only wake the timer thread.
            self._gathering.pop(part.outbox, None)
        except BaseException as error:
            self._failed(spec, error)
            if raised_by_handler(error):
                raise

    def _run(self, context: AutogradContext, part: LocalPart, tasks: Sequence[Task]) -> list[tuple[str, Task]]:
        """Run tasks in their context, and in the autocast state of the driver. Return the messages to send."""
        spec = part.outbox.spec
        autocast = context.autocast if spec.driver == self._agent.name and not spec.autocast else spec.autocast
        for task in tasks:
            if isinstance(task, PackedShipment) and task.reports:
                for report in part.outbox.carry(task):
                    self.tell(context, spec.driver, report)
        token = entered.set(context.id)
        try:
            if autocast or is_autocast_on():
                with under_autocast(autocast):
                    return part.take(tasks)
            return part.take(tasks)
        finally:
            entered.reset(token)

    def _try_step(self, context: AutogradContext, part: LocalPart) -> None:
        """Run the pass's fused step if this worker has all gradients."""
        # Gradients of this worker are complete if no pass of the context may bring more: neither one that has a part
        # here, nor one whose messages wait for its roots (`early`).
        spec = part.outbox.spec
        hook = self.fused_steps.get(spec.step_id)
        parts = [each for each in list(context.parts.values()) if each is not None]
        is_over = context.ended or context.parts.get(spec) is not part  # it may have failed meanwhile
        if hook is None or is_over or context.early or not part.may_step(parts):
            return
        self._send_early(part.outbox)  # other workers may wait for these gradients
        part.note_step(self.give_turn(hook, spec.context, spec.request))

    def give_turn(self, hook: PassHook, context_id: int, request: bytes) -> tuple[bool, Any]:
        """Run a fused step. Return True and its value, or False and a description of its error."""
        try:
            with Inside(None):
                return True, hook.step_in_pass(context_id, request)
        except Exception as error:
            if raised_by_handler(error):
                raise
            return False, describe(error, self._agent.name, user_name(hook.step_in_pass))

    def _begin(self, context: AutogradContext, spec: PassSpec, tasks: list[Task]) -> list[Task]:
        """Create this worker's part once its own roots are available. Return the tasks to run then.

        Other tasks wait for the roots: the nodes that the roots lead to must not run without them.
        """
        # This runs once for each batch of messages that comes before the part exists. All of them count, since a worker
        # could otherwise make this one keep any number of them.
        self._contexts.count_passes(context, len(tasks))
        roots: Sequence[Tensor] = ()
        if self._agent.name in spec.roots:
            early = context.early.setdefault(spec, [])
            for task in tasks:
                early.insert(0 if isinstance(task, Start) else len(early), task)
            if not isinstance(early[0], Start):
                return []
            roots = early[0].values
            # The value of a reference may not be computed yet. This thread does not wait for it: `_opened` posts the
            # start again, with tensors in the place of descriptions, and other messages are kept until then.
            for root in roots:
                if not isinstance(root, Tensor):
                    self._open_roots(roots).add_done_callback(partial(self._opened, context, early.pop(0)))
                    return []
            context.early.pop(spec, None)
            tasks = early
        outbox = Outbox(self._agent, context, spec, self._short, self._gathers)
        capture = self.captures.get(spec) if spec.captures else None
        runner = EngineRunner(context, spec, roots, outbox, self._agent.streams, capture)
        context.parts.setdefault(spec, LocalPart(outbox, runner))  # keep None if the pass has failed meanwhile
        return tasks

    def _opened(self, context: AutogradContext, start: Start, done: Any) -> None:
        try:
            self._post(context, start._replace(values=done.wait()))
        except Exception as error:
            self._failed(start.spec, error)

    def _gathers(self, outbox: Outbox) -> None:
        self._gathering[outbox] = until = monotonic() + (HOLD if outbox.holds else GATHER)
        self._agent.wake_at(until, rough=outbox.holds)

    def send_gathered(self, now: float) -> float:
        """Send gradients and reports that have waited for long. Return the next time to check. For the timer thread."""
        upcoming = inf
        for outbox, until in self._gathering.copy().items():
            if now < until:
                upcoming = min(upcoming, until)
                continue
            self._gathering.pop(outbox, None)
            try:
                self._send_early(outbox)
            except Exception as error:
                self._failed(outbox.spec, error)
        return upcoming

    def _send_early(self, outbox: Outbox) -> None:
        for report in outbox.send_early():
            self.tell(outbox.context, outbox.spec.driver, report)

    # Failed passes, ended contexts

    def _failed(self, spec: PassSpec, error: BaseException) -> None:
        """Report to the driver that this worker cannot do its part."""
        # The driver gets an error that is rebuilt from a description, also on this worker. It has no frames, which
        # would keep tensors and the graph alive as long as the error.
        own = spec.driver == self._agent.name
        is_same = own or self._agent.shares_program(spec.driver)
        description = describe(_advised(error), self._agent.name, same_program=is_same)
        self.abandon(spec)
        if not own:
            with contextlib.suppress(TelegradError):  # the driver has left, so the context has ended
                self._agent.notify(spec.driver, Failed(spec, description))
        elif isinstance(error, Exception):
            self._tell_failed(spec, rebuild(description))
        else:  # SystemExit, KeyboardInterrupt: user code wants to end this process
            self._tell_failed(spec, error)

    def abandon(self, spec: PassSpec) -> None:
        """Drop a pass that has failed here or elsewhere, and all later messages for it."""
        context = self._contexts.get(spec.context)
        if context is None:
            return
        if spec not in context.parts:
            try:
                self._contexts.count_passes(context)
            except LimitReached:  # later messages for the pass are refused as well, so its failure need not be recorded
                context.early.pop(spec, None)
                return
        context.parts[spec] = None
        context.early.pop(spec, None)

    def lost(self, who: Identity, error: PeerLost) -> None:
        """Fail the passes in which this worker sent something to a lost worker."""
        for context in self._contexts.all():
            for spec, part in context.parts.copy().items():
                if part is not None and who.name in part.outbox.reached and context.met(who.name) == who:
                    self._failed(spec, error)


def _advised(error: BaseException) -> BaseException:
    """Add the usual cause and a remedy to the error for a tensor that was changed in place."""
    if type(error) is not RuntimeError or "modified by an inplace operation" not in str(error):
        return error
    return RuntimeError(
        f"{error}\nIf that is a parameter, another context's optimizer may have changed it between forward and "
        "backward: let the steps wait for each other, or create the optimizers with hogwild=True"
    )
