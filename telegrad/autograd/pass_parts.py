"""This worker's parts in backward passes: threads, messages, and handling of failures."""

from __future__ import annotations

import contextlib
import itertools
import queue
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic, perf_counter
from typing import Any, Protocol
from weakref import WeakValueDictionary

from torch import Tensor

from telegrad._core import events
from telegrad._core.agent.agent import Agent
from telegrad._core.calls.call_context import under_autocast
from telegrad._core.calls.call_names import user_name
from telegrad._core.calls.futures import Future, Signal
from telegrad._core.interrupts import raised_by_handler
from telegrad._core.membership.members import Identity
from telegrad._core.pickling.exceptions import describe, rebuild
from telegrad.autograd.contexts import Contexts
from telegrad.autograd.engine.captures import Capture
from telegrad.autograd.engine.outbox import Outbox, PackedShipment, unpacked
from telegrad.autograd.engine.passes import Abandon, DeclareDead, Failed, Mark, PassSpec, Report, Start, Task
from telegrad.autograd.engine.record import AutogradContext, Inside
from telegrad.autograd.mailbox import LocalPart, Mailbox
from telegrad.errors import ContextLost, LimitReached, PeerLost, TelegradError

# seconds. If the last tasks took less, the reader thread runs the next ones, which are expected to be as short.
SHORT = 1e-3

GATHER = 1e-3  # seconds: how long gradients wait at most for others that the same step will send to the same worker

OpenRoots = Callable[[Sequence[Any]], Future[list[Tensor]]]


class PassHook(Protocol):
    """An object that needs all gradients that a worker has in a context, such as an optimizer's part on that worker."""

    def ride(self, context_id: int, request: bytes) -> Any:
        """Process the request, now that the gradients are complete. Return a plain value."""


class LocalParts:
    """This worker's parts in all passes, whether this or another worker drives them."""

    def __init__(
        self,
        agent: Agent,
        contexts: Contexts,
        open_roots: OpenRoots,
        reported: Callable[[str, Report], None],
        failed: Callable[[PassSpec, BaseException], None],
    ) -> None:
        """`open_roots` gives the tensors of values on this worker, once they are available.

        `reported`, with this worker's name, and `failed` are called for passes that this worker drives.
        """
        self._agent = agent
        self._contexts = contexts
        self._open_roots = open_roots
        self._reported = reported
        self._tell_failed = failed
        self.riders: WeakValueDictionary[int, PassHook] = (
            WeakValueDictionary()
        )  # by the numbers that passes use for them
        # of passes that this worker drives
        self.captures: WeakValueDictionary[PassSpec, Capture] = WeakValueDictionary()
        # These need no lock: each use is one atomic operation of a dict or a set, or sets a flag.
        self._mailboxes: dict[int, Mailbox] = {}  # by context ids
        self._gathering: set[Outbox] = set()
        self._short = False  # the last tasks did not take long
        for task in (Start, Mark, DeclareDead):
            agent.on(task, self._take_task)
        agent.on(PackedShipment, self._take_shipment)
        agent.on(Abandon, lambda sender, message: self.abandon(message.spec))

    def __len__(self) -> int:
        """Return the number of parts in contexts that have not ended, without failed passes."""
        parts = [part for mailbox in self._mailboxes.copy().values() for part in mailbox.parts.copy().values()]
        return len(parts) - parts.count(None)

    def at_work(self) -> set[int]:
        """Return the contexts whose tasks a thread is running."""
        return {id_ for id_, mailbox in self._mailboxes.copy().items() if mailbox.busy}

    def __repr__(self) -> str:
        return f"<LocalParts of {self._agent.name!r}: {list(self._mailboxes.copy().values())}>"

    # Receiving tasks

    def give(self, context: AutogradContext, worker: str, task: Task, here: bool = False) -> None:
        """Send a task to a worker, or queue it here. With `here`, this thread runs it unless another runs tasks."""
        if worker == self._agent.name:
            self._post(context, task, here)
        else:
            self.tell(context, worker, task)

    def tell(self, context: AutogradContext, worker: str, message: Task | Report | Abandon) -> None:
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

    def _take_shipment(self, sender: Identity, parcel: PackedShipment) -> None:
        shipment, report = unpacked(parcel)
        self._take_task(sender, shipment)
        if report is not None:
            self._reported(sender.name, report)

    def _post(self, context: AutogradContext, task: Task, here: bool = False, by_who_waits: bool = False) -> None:
        """Queue a task. If no thread runs the tasks of its context, this thread or another one begins to."""
        mailbox = self._mailboxes.get(context.id) or self._open(context)
        if not mailbox.put(task, here):
            return
        if here:
            self._work(mailbox)
        else:
            self._agent.run(self._work, mailbox, self._short, by_who_waits)

    def _open(self, context: AutogradContext) -> Mailbox:
        """Return the mailbox of a context, which is not kept if the context has ended, even during this call."""
        mailbox = self._mailboxes.setdefault(context.id, Mailbox(context))
        if context.ended:
            self.end(context.id)
        return mailbox

    # Running tasks

    def attend(self, context: AutogradContext, outcome: Signal) -> None:
        """Run the tasks of a context on this thread, so that a profiler sees them, until `outcome` is done."""
        mailbox = self._open(context)
        calls = queue.SimpleQueue[bool]()
        mailbox.call(calls)
        outcome.add_done_callback(lambda _: calls.put(False))
        try:
            with self._agent.waiting():
                while calls.get():
                    self._work(mailbox)
        finally:
            mailbox.call(None)
            while not calls.empty():
                if calls.get():
                    self._agent.run(self._work, mailbox, self._short)

    def _work(self, mailbox: Mailbox) -> None:
        """Run the tasks of a context until none is left. Raise errors that a signal handler raised meanwhile."""
        left: list[list[Task]] = []
        try:
            with self._agent.streams.turn():
                start = perf_counter()
                while tasks := mailbox.take():
                    left = [list(group) for _, group in itertools.groupby(tasks, lambda task: task.spec)]
                    while left:
                        self._do(mailbox, left.pop(0))
                self._short = perf_counter() - start < SHORT
        except BaseException:  # this thread raises the error, so another thread runs the rest
            mailbox.put_back([task for group in left for task in group])
            self._agent.run(self._work, mailbox, False)
            raise

    def _do(self, mailbox: Mailbox, tasks: list[Task]) -> None:
        """Run tasks of one pass, and report. Raise only errors that a signal handler raised on this thread."""
        spec, context = tasks[0].spec, mailbox.context
        begun = perf_counter()
        try:
            if context.ended:
                self._contexts.check_kept(context.id)
                return
            if spec not in mailbox.parts:
                tasks = self._begin(mailbox, spec, tasks)
            part = mailbox.parts.get(spec)
            if part is None or not tasks:
                return
            with Inside(context.id), under_autocast(spec.autocast):
                letters = part.participant.take(tasks)
            if spec.rider:
                self._let_ride(mailbox, part)
            self._agent.streams.publish()  # before other workers learn that it is done
            for worker, task in letters:
                self.give(context, worker, task)
            if (note := events.note) is not None:
                note((events.BACKWARD_TASKS, begun, perf_counter(), spec.context, spec.driver, spec.number))
            if part.outbox.send_with(part.participant.report):
                return
            report = part.participant.report()
            if spec.driver == self._agent.name:
                self._reported(self._agent.name, report)
            else:
                self.tell(context, spec.driver, report)
        except BaseException as error:
            self._failed(spec, error)
            if raised_by_handler(error):
                raise

    def _let_ride(self, mailbox: Mailbox, part: LocalPart) -> None:
        """Run the pass's rider if this worker has all gradients."""
        spec, participant = part.ledger.spec, part.participant
        rider = self.riders.get(spec.rider)
        others = (each.participant for each in mailbox.parts.copy().values() if each is not None)
        is_over = mailbox.context.ended or mailbox.parts.get(spec) is not part  # it may have failed meanwhile
        if rider is None or is_over or mailbox.early or not participant.may_ride(others):
            return
        part.outbox.send_early()  # the driver may wait for these gradients
        participant.ride(self.give_turn(rider, spec.context, spec.request))

    def give_turn(self, rider: PassHook, context_id: int, request: bytes) -> tuple[bool, Any]:
        """Run a rider. Return True and its value, or False and a description of its error."""
        try:
            with Inside(None):
                return True, rider.ride(context_id, request)
        except Exception as error:
            if raised_by_handler(error):
                raise
            return False, describe(error, self._agent.name, user_name(rider.ride))

    def _begin(self, mailbox: Mailbox, spec: PassSpec, tasks: list[Task]) -> list[Task]:
        """Create this worker's part once its own roots are available. Return the tasks to run then.

        Other tasks wait for the roots: the nodes that the roots lead to must not run without them.
        """
        self._contexts.count_passes(mailbox.context, len(tasks))
        roots: Sequence[Tensor] = ()
        if self._agent.name in spec.roots:
            early = mailbox.early.setdefault(spec, [])
            for task in tasks:
                if isinstance(task, Start):
                    roots = task.values
                    early.insert(0, task)
                else:
                    early.append(task)
            if not roots:
                return []
            for root in roots:
                if not isinstance(root, Tensor):
                    self._open_roots(roots).add_done_callback(partial(self._opened, mailbox.context, early.pop(0)))
                    return []
            mailbox.early.pop(spec, None)
            tasks = early
        capture = self.captures.get(spec)
        part = LocalPart(self._agent, mailbox.context, spec, roots, self._short, self._gathers, capture)
        mailbox.parts.setdefault(spec, part)  # keep None if the pass has failed meanwhile
        return tasks

    def _opened(self, context: AutogradContext, start: Start, done: Any) -> None:
        try:
            self._post(context, start._replace(values=done.wait()))
        except Exception as error:
            self._failed(start.spec, error)

    def _gathers(self, outbox: Outbox) -> None:
        self._gathering.add(outbox)
        self._agent.wake_at(monotonic() + GATHER, rough=outbox.rides_with_report)

    def send_gathered(self) -> None:
        """Send gradients that waited for others. Only the timer thread calls this."""
        while self._gathering:
            outbox = self._gathering.pop()
            try:
                outbox.send_early()
            except Exception as error:
                self._failed(outbox.spec, error)

    # Failed passes, ended contexts

    def _failed(self, spec: PassSpec, error: BaseException) -> None:
        """Report to the driver that this worker cannot do its part."""
        description = describe(_advised(error), self._agent.name)
        self.abandon(spec)
        if spec.driver != self._agent.name:
            with contextlib.suppress(TelegradError):  # the driver has left, so the context has ended
                self._agent.notify(spec.driver, Failed(spec, description))
        elif isinstance(error, Exception):
            self._tell_failed(spec, rebuild(description))
        else:  # SystemExit, KeyboardInterrupt: user code wants to end this process
            self._tell_failed(spec, error)

    def abandon(self, spec: PassSpec) -> None:
        """Drop a pass that has failed here or elsewhere."""
        context = self._contexts.get(spec.context)
        if context is None:
            return
        mailbox = self._open(context)
        if spec not in mailbox.parts:
            try:
                self._contexts.count_passes(context)
            except LimitReached:  # later messages for the pass are refused as well, so its failure need not be recorded
                mailbox.early.pop(spec, None)
                return
        mailbox.fail(spec)

    def lost(self, who: Identity, error: PeerLost) -> None:
        """Fail the passes in which this worker sent something to a lost worker."""
        for mailbox in self._mailboxes.copy().values():
            if mailbox.context.knows(who):
                for spec, part in mailbox.parts.copy().items():
                    if part is not None and who.name in part.ledger.reached:
                        self._failed(spec, error)

    def end(self, context_id: int) -> None:
        """Drop the tasks of a context that has ended."""
        self._mailboxes.pop(context_id, None)


def _advised(error: BaseException) -> BaseException:
    """Add the usual cause and a remedy to the error for a tensor that was changed in place."""
    if type(error) is not RuntimeError or "modified by an inplace operation" not in str(error):
        return error
    return RuntimeError(
        f"{error}\nWhere that is a parameter, another context's optimizer may have changed it between forward and "
        "backward: let the steps wait for each other, or make the optimizers with hogwild=True"
    )
