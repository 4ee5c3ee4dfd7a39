"""The contexts of one worker; the test plays its agent and other threads."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from telegrad import autograd
from telegrad._core.membership.members import Identity
from telegrad.autograd.contexts import MOST_PASSES, OWNER_SHIFT, REMEMBERED, ContextQuestion, Contexts, Release
from telegrad.errors import ContextLost, LimitReached, PeerUnreachable, UsageError
from tests.autograd.rivals import Rival

ME, OWNER = Identity("me", 0, "a"), Identity("owner", 1, "b")
FOREIGN = OWNER.id << OWNER_SHIFT | 7


class Agent:
    """Records the messages that are sent."""

    def __init__(self) -> None:
        self.name, self.incarnation = ME.name, ME.incarnation
        self.ticks = False
        self.me = SimpleNamespace(id=ME.id)
        self.lost: list[object] = []
        self.ticking: list[object] = []
        self.sent: list[tuple[str, object]] = []
        self.submitted: list[Callable[[], None]] = []

    def on(self, message: type, handler: object) -> None:
        pass

    def identify(self, rank: int) -> Identity:
        """Look up a worker, which may block."""
        assert rank == OWNER.id
        assert not self.ticks
        return OWNER

    def later(self, act: Callable[[Any], None], argument: Any) -> None:
        self.submitted.append(partial(act, argument))

    def tick(self, contexts: Contexts, now: float) -> None:
        """Run the timer thread, and then what it has submitted."""
        self.ticks = True
        contexts._tick(now)
        self.ticks = False
        while self.submitted:
            self.submitted.pop()()

    def notify(self, to: str, message: object, incarnation: str = "", patient: bool = False) -> None:
        self.sent.append((to, message))


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def contexts(agent: Any) -> Contexts:
    return Contexts(agent, lambda _: None)


def test_joining_a_context_that_ends_meanwhile_does_not_begin_it_anew(contexts: Contexts) -> None:
    Rival.at(contexts).act = lambda: contexts.release(FOREIGN)
    assert contexts.join(FOREIGN) is None
    assert not len(contexts)


def test_owners_are_asked_every_two_seconds_but_not_at_the_first_tick(contexts: Contexts, agent: Agent) -> None:
    contexts.join(FOREIGN)
    contexts.begin()
    asked = []
    for now in range(8):
        agent.sent.clear()
        agent.tick(contexts, float(now))
        if agent.sent:
            assert agent.sent == [("owner", ContextQuestion((FOREIGN,)))]
            asked.append(now)
    assert asked == [2, 4, 6]
    contexts.release(FOREIGN)
    assert not contexts._open
    assert not contexts._passes


def test_the_end_is_sent_to_participants_except_for_its_sender(contexts: Contexts, agent: Agent) -> None:
    context = contexts.join(FOREIGN)
    for who in (OWNER, ME, Identity("other", 2, "c")):
        context.meet(who)
    contexts.release(FOREIGN, OWNER)
    assert agent.sent == [("other", Release(FOREIGN))]
    assert context.ended


def test_messages_that_came_together_count_as_many(contexts: Contexts) -> None:
    with pytest.raises(LimitReached, match="65,536 backward passes"):
        contexts.count_passes(contexts.begin(), MOST_PASSES + 1)


def test_a_context_whose_owner_seems_dead_is_lost(contexts: Contexts) -> None:
    contexts.join(FOREIGN)
    contexts._on_lost(OWNER, PeerUnreachable("it only seems so"))
    assert contexts.join(FOREIGN) is None
    with pytest.raises(ContextLost):
        contexts.check_kept(FOREIGN)


def test_the_context_of_a_former_holder_of_the_own_rank_is_not_joined(contexts: Contexts) -> None:
    own = contexts.begin()
    assert contexts.join(own.id) is own
    assert (contexts.join(own.id ^ 1), contexts.all()) == (None, [own])


def test_the_loss_of_a_previous_holder_of_the_rank_ends_no_context(contexts: Contexts) -> None:
    context = contexts.join(FOREIGN)
    assert context is not None
    context.meet(OWNER)
    contexts._on_lost(Identity("former", OWNER.id, "z"), PeerUnreachable("which is noticed late"))
    assert contexts.get(FOREIGN) is context
    contexts._on_lost(OWNER, PeerUnreachable("it only seems so"))
    assert contexts.get(FOREIGN) is None


def test_a_successor_remembers_no_more_ends(contexts: Contexts, agent: Any) -> None:
    former = Contexts(agent, lambda _: None)
    former._ended = dict.fromkeys(range(REMEMBERED), False)
    for number in range(3):
        former.join(FOREIGN + number)
    contexts.succeed(former, "generation 1 has ended")
    contexts.release(FOREIGN)
    assert len(contexts._ended) == REMEMBERED


def test_sends_after_the_end_are_not_kept(contexts: Contexts) -> None:
    context = contexts.begin()
    tensors = [torch.ones(1, requires_grad=True)]
    context.sent(tensors, OWNER, torch.add, True)
    assert len(context.sends) == 1
    contexts.release(context.id)
    context.sent(tensors, OWNER, torch.add, True)
    assert not context.sends


def test_the_text_of_a_context_has_its_state(contexts: Contexts) -> None:
    context = contexts.begin()
    context.meet(OWNER)
    assert "0 sends" in repr(context)
    assert "known to owner" in repr(context)
    contexts.release(context.id)
    assert "has ended" in repr(context)


@pytest.fixture
def worker(contexts: Contexts, monkeypatch: pytest.MonkeyPatch) -> Contexts:
    """Make `contexts` those of this process's worker."""
    monkeypatch.setattr(autograd, "_find", [lambda: SimpleNamespace(contexts=contexts)])
    return contexts


def test_one_object_is_one_block_at_a_time(worker: Contexts) -> None:
    shared = autograd.context()
    with ThreadPoolExecutor(1) as other, shared as first:
        with pytest.raises(UsageError, match="each block needs its own"):
            other.submit(shared.__enter__).result()
        with pytest.raises(UsageError, match="each block needs its own"):
            shared.__enter__()
        assert [each.id for each in worker.all()] == [first]
    with shared as second:
        assert second != first
    assert not len(worker)


def test_a_refused_object_can_be_entered_later(worker: Contexts) -> None:
    inner = autograd.context()
    with autograd.context(), pytest.raises(UsageError, match="Already have"):
        inner.__enter__()
    with inner:
        assert len(worker) == 1


def test_a_block_may_begin_although_one_of_an_ended_group_was_never_left(
    worker: Contexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadPoolExecutor(1) as thread:
        thread.submit(autograd.context().__enter__).result()
        monkeypatch.setattr(worker, "_contexts", {})  # as in the next group
        assert isinstance(thread.submit(autograd.context().__enter__).result(), int)


def test_a_block_that_another_thread_leaves_ends_its_context(worker: Contexts) -> None:
    left = autograd.context()
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        first.submit(left.__enter__).result()
        own = ValueError("raised in the block")
        with pytest.raises(UsageError, match="was left on another thread") as caught:
            second.submit(left.__exit__, ValueError, own, None).result()
        assert caught.value.__cause__ is own
        assert not len(worker)
        assert isinstance(first.submit(autograd.context().__enter__).result(), int)
