"""Who holds which reference: one worker's part of the reference protocol, as a pure state machine.

A reference is named by its creator and a number, and so is a fork: one worker's share in a reference. Workers are
named by keys that are never used twice. The owner keeps the value while any fork is known to it (or a handle of its
own lives); a user keeps its fork while a handle lives or the fork has children that have not settled.

    G1  the owner hears of the end of every fork                              DROPPED
    G2  a parent outlives its child until the owner knows the child           CONFIRM, CONFIRMED, SETTLED

The paths by which a reference reaches a worker, and the letters that each takes beside the user's own message:

    created on a user, value at the owner   none: the answer to the creating call confirms it
    user to owner                           SETTLED
    owner to user                           none: the owner counts the child before it sends it
    user to user                            CONFIRM to the owner, CONFIRMED, SETTLED to the parent
                                            (and WANTED to the creator where they outrun the creating call)
    the end of a fork                       DROPPED

A worker that receives a reference it holds already adds to its fork instead of beginning another. Letters are
delivered once each, in any order (see courier.py). The user's own messages may be lost with their connection: then the
sender ASKs for the forks it sent, and those that never came are MISSING, and refused should they still come.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

Id = tuple[str, int]  # who made it, and that worker's number for it

CONFIRM = "confirm"  # user to owner: I hold this fork
CONFIRMED = "confirmed"  # owner to user: I know it
SETTLED = "settled"  # child to parent: you need not hold on for this fork any longer
DROPPED = "dropped"  # user to owner: this fork has ended
ASK = "ask"  # sender to receiver: the connection broke; did this fork come?
MISSING = "missing"  # receiver to sender: it did not, and will be refused
STILLBORN = "stillborn"  # creator to owner: the creating call will not come, if it has not
WANTED = "wanted"  # owner to creator: does the creating call come?
GONE = "gone"  # owner to user: there is no value for this fork

# Why a reference cannot be used.
OWNER_DIED, VALUE_GONE, CAME_LATE = "owner died", "value gone", "came late"

MOST_REMEMBERED = 1 << 14  # of the references and forks that were refused


class Letter(NamedTuple):
    """A control message about one fork of one reference."""

    kind: str
    ref: Id
    fork: Id


@dataclass(slots=True)
class Share:
    """What a user has of a reference: its one fork, and what keeps that alive."""

    owner: str
    fork: Id
    confirmed: bool
    handles: int = 1
    parents: list[tuple[str, Id]] = field(default_factory=list)  # to be told once the owner knows the fork
    extras: list[Id] = field(default_factory=list)  # known to the owner, given back once the fork is confirmed
    children: dict[Id, str] = field(default_factory=dict)  # sent on, and not settled
    fault: str = ""


@dataclass(slots=True)
class Owned:
    """What the owner knows of a reference."""

    made: bool  # the value exists, or the call that creates it has come
    handles: int = 0
    forks: dict[Id, str] = field(default_factory=dict)  # where each lives, or is on its way to


class References:
    """All references that one worker owns or uses.

    Every event may add to `letters` (to whom, what), to `freed` (references that ended here) and to
    `hopeless` (owned references whose value will never come); the driver empties them.
    """

    def __init__(self, me: str) -> None:
        self.me = me
        self.shares: dict[Id, Share] = {}
        self.owned: dict[Id, Owned] = {}
        self.letters: list[tuple[str, Letter]] = []
        self.freed: list[Id] = []
        self.hopeless: list[Id] = []
        self._numbers = 0
        self._creating: set[Id] = set()  # the creating call was not answered
        self._dead: set[str] = set()
        self._refused: dict[Id, None] = {}  # references and forks of which a message may still come

    def _new_id(self) -> Id:
        self._numbers += 1
        return self.me, self._numbers

    def _post(self, to: str, kind: str, ref: Id, fork: Id) -> None:
        self.letters.append((to, Letter(kind, ref, fork)))

    def _refuse(self, id_: Id) -> None:
        self._refused[id_] = None
        if len(self._refused) > MOST_REMEMBERED:
            del self._refused[next(iter(self._refused))]

    # Making references

    def own(self) -> Id:
        """A reference to a value of this worker, with one handle."""
        ref = self._new_id()
        self.owned[ref] = Owned(made=True, handles=1)
        return ref

    def create(self, owner: str) -> tuple[Id, Id]:
        """A reference to what a call to `owner` will return, with one handle, and the fork to tell the owner of."""
        ref, fork = self._new_id(), self._new_id()
        self.shares[ref] = Share(owner, fork, confirmed=False)
        self._creating.add(ref)
        return ref, fork

    def expect(self, ref: Id, fork: Id, creator: str) -> bool:
        """A creating call has come to the owner; False where it must not run."""
        if ref in self._refused:
            return False
        owned = self.owned.setdefault(ref, Owned(made=True))
        owned.made = True
        owned.forks[fork] = creator
        return True

    def created(self, ref: Id, fork: Id) -> None:
        """The creating call was answered: the owner knows the fork."""
        self._on_confirmed("", ref, fork)

    def cancel(self, ref: Id) -> None:
        """The creating call was never sent."""
        self._creating.discard(ref)
        del self.shares[ref]

    def stillborn(self, ref: Id, fork: Id, owner: str) -> None:
        """The creating call was cut off: whether it came, the owner must say."""
        self._post(owner, STILLBORN, ref, fork)

    # Passing them on

    def fork(self, ref: Id, to: str) -> Id:
        """A reference is about to be sent; the fork to be sent with it."""
        child = self._new_id()
        owned = self.owned.get(ref)
        if owned is not None:
            owned.forks[child] = to
        else:
            self.shares[ref].children[child] = to
        return child

    def arrive(self, ref: Id, fork: Id, owner: str, sender: str) -> str:
        """A reference has come: one more handle here; or else why there is none."""
        if fork in self._refused:
            return CAME_LATE
        if owner == self.me:
            self._come_home(ref, fork, sender)
        elif sender == self.me:
            self.shares[ref].handles += 1
            self._end_child(ref, fork)
        else:
            self._take_in(ref, fork, owner, sender)
        return ""

    def _come_home(self, ref: Id, fork: Id, sender: str) -> None:
        owned = self.owned.get(ref)
        if owned is None:
            if self._never_comes(ref):
                owned = self.owned[ref] = Owned(made=False)
                self._lose_hope(ref)
            else:
                owned = self._want(ref, fork)
        owned.handles += 1
        if sender == self.me:
            owned.forks.pop(fork, None)
        else:
            self._post(sender, SETTLED, ref, fork)

    def _take_in(self, ref: Id, fork: Id, owner: str, sender: str) -> None:
        share = self.shares.get(ref)
        if share is not None and not share.fault:
            share.handles += 1
            self._merge(ref, share, fork, sender)
            return
        if share is None:
            share = self.shares[ref] = Share(owner, fork, confirmed=True, handles=0)
        share.handles += 1
        if owner in self._dead:
            share.fault = OWNER_DIED
            if sender != owner:
                self._post(sender, SETTLED, ref, fork)
            return
        share.fork, share.fault, share.confirmed = fork, "", sender == owner
        if sender != owner:
            share.parents.append((sender, fork))
            self._post(owner, CONFIRM, ref, fork)

    def _merge(self, ref: Id, share: Share, fork: Id, sender: str) -> None:
        if sender == share.owner:
            if share.confirmed:
                self._post(sender, DROPPED, ref, fork)
            else:
                share.extras.append(fork)
        elif share.confirmed:
            self._post(sender, SETTLED, ref, fork)
        else:
            share.parents.append((sender, fork))

    # Letting them go

    def drop(self, ref: Id) -> None:
        """A handle has ended."""
        owned = self.owned.get(ref)
        if owned is not None:
            owned.handles -= 1
            self._free_if_unused(ref, owned)
        elif ref in self.shares:
            self.shares[ref].handles -= 1
            self._end_if_unused(ref)

    def _end_if_unused(self, ref: Id) -> None:
        share = self.shares[ref]
        if share.handles or share.children or not share.confirmed:
            return
        del self.shares[ref]
        if not share.fault:
            self._post(share.owner, DROPPED, ref, share.fork)
        self.freed.append(ref)

    def _free_if_unused(self, ref: Id, owned: Owned) -> None:
        if not owned.handles and not owned.forks:
            del self.owned[ref]
            self.freed.append(ref)

    def _end_child(self, ref: Id, fork: Id) -> None:
        share = self.shares.get(ref)
        if share is not None:
            share.children.pop(fork, None)
            self._end_if_unused(ref)

    def seek(self, ref: Id) -> bool:
        """Somebody wants the value from its owner; False where there is none and none will come.

        The request may outrun the creating call, and the user's CONFIRM, which holds what is made here.
        """
        if ref not in self.owned:
            if self._never_comes(ref):
                return False
            self._want(ref, ref)
        return True

    def fault(self, ref: Id) -> str:
        """Why a reference cannot be used here; empty where it can."""
        share = self.shares.get(ref)
        return share.fault if share is not None else ""

    # Letters

    def receive(self, sender: str, letter: Letter) -> None:
        """Take in a letter; each comes once."""
        kind, ref, fork = letter
        _TAKE[kind](self, sender, ref, fork)

    def _on_confirm(self, sender: str, ref: Id, fork: Id) -> None:
        owned = self.owned.get(ref)
        if owned is None:
            if self._never_comes(ref):
                self._post(sender, GONE, ref, fork)
                return
            owned = self._want(ref, fork)
        owned.forks[fork] = sender
        self._post(sender, CONFIRMED, ref, fork)

    def _want(self, ref: Id, fork: Id) -> Owned:
        """Of a reference nothing is known: its creating call is on its way, unless all was over before a death."""
        self._post(ref[0], WANTED, ref, fork)
        owned = self.owned[ref] = Owned(made=False)
        return owned

    def _on_wanted(self, sender: str, ref: Id, fork: Id) -> None:
        if ref not in self._creating:
            self._post(sender, STILLBORN, ref, fork)

    def _never_comes(self, ref: Id) -> bool:
        return ref[0] == self.me or ref[0] in self._dead or ref in self._refused

    def _on_confirmed(self, sender: str, ref: Id, fork: Id) -> None:
        self._creating.discard(ref)
        share = self.shares.get(ref)
        if share is None or share.fork != fork or share.confirmed:
            return
        self._conclude(ref, share)

    def _conclude(self, ref: Id, share: Share) -> None:
        """The owner knows the fork, or it has failed: either way nobody need wait for it any longer."""
        share.confirmed = True
        for parent, fork in share.parents:
            self._post(parent, SETTLED, ref, fork)
        share.parents.clear()
        if share.fault != OWNER_DIED:
            for extra in share.extras:
                self._post(share.owner, DROPPED, ref, extra)
        share.extras.clear()
        self._end_if_unused(ref)

    def _on_settled(self, sender: str, ref: Id, fork: Id) -> None:
        self._end_child(ref, fork)

    def _on_dropped(self, sender: str, ref: Id, fork: Id) -> None:
        owned = self.owned.get(ref)
        if owned is not None and fork in owned.forks:
            del owned.forks[fork]
            self._free_if_unused(ref, owned)

    def _on_gone(self, sender: str, ref: Id, fork: Id) -> None:
        share = self.shares.get(ref)
        if share is not None and share.fork == fork and not share.fault:
            self._fail(ref, share, VALUE_GONE)

    def _fail(self, ref: Id, share: Share, fault: str) -> None:
        self._creating.discard(ref)
        share.fault = fault
        self._conclude(ref, share)

    # Connections that broke, workers that died

    def ask(self, receiver: str) -> None:
        """The connection to `receiver` broke, and with it messages may be lost."""
        for ref, fork in list(self._sent_to(receiver)):
            self._post(receiver, ASK, ref, fork)

    def _sent_to(self, receiver: str) -> Iterator[tuple[Id, Id]]:
        for ref, owned in self.owned.items():
            yield from ((ref, fork) for fork, holder in owned.forks.items() if holder == receiver)
        for ref, share in self.shares.items():
            yield from ((ref, fork) for fork, holder in share.children.items() if holder == receiver)

    def _on_ask(self, sender: str, ref: Id, fork: Id) -> None:
        share = self.shares.get(ref)
        if share is not None and (
            (share.fork == fork and not share.fault) or fork in share.extras or (sender, fork) in share.parents
        ):
            return  # it came; the usual letters follow
        self._refuse(fork)
        self._post(sender, MISSING, ref, fork)

    def _on_missing(self, sender: str, ref: Id, fork: Id) -> None:
        share = self.shares.get(ref)
        if ref in self.owned:
            self._on_dropped(sender, ref, fork)
        elif share is not None and share.fork == fork:
            self._fail(ref, share, VALUE_GONE)
        else:
            self._end_child(ref, fork)

    def _on_stillborn(self, sender: str, ref: Id, fork: Id) -> None:
        owned = self.owned.get(ref)
        if owned is not None and owned.made:
            self._post(sender, CONFIRMED, ref, fork)
            return
        self._refuse(ref)
        self._post(sender, MISSING, ref, fork)
        if owned is not None:
            self._give_up(ref, owned)

    def _lose_hope(self, ref: Id) -> None:
        self._refuse(ref)
        self.hopeless.append(ref)

    def _give_up(self, ref: Id, owned: Owned) -> None:
        """The value of a reference will never come."""
        for fork, holder in list(owned.forks.items()):
            if holder != self.me:
                self._post(holder, GONE, ref, fork)
                del owned.forks[fork]
        self._lose_hope(ref)
        self._free_if_unused(ref, owned)

    def dead(self, worker: str) -> None:
        """A worker has died or left: what it owned is lost, what it used is released."""
        self._dead.add(worker)
        for ref, share in list(self.shares.items()):
            share.parents = [parent for parent in share.parents if parent[0] != worker]
            share.children = {fork: holder for fork, holder in share.children.items() if holder != worker}
            if share.owner == worker and not share.fault:
                self._fail(ref, share, OWNER_DIED)
            else:
                self._end_if_unused(ref)
        for ref, owned in list(self.owned.items()):
            released = [fork for fork, holder in owned.forks.items() if holder == worker]
            for fork in released:
                del owned.forks[fork]
            if not owned.made and ref[0] == worker:
                self._give_up(ref, owned)
            elif released:
                self._free_if_unused(ref, owned)

    def alive(self, worker: str) -> bool:
        """A worker speaks; whether it had been taken for dead."""
        known = worker in self._dead
        self._dead.discard(worker)
        return known


_TAKE = {
    CONFIRM: References._on_confirm,
    CONFIRMED: References._on_confirmed,
    SETTLED: References._on_settled,
    DROPPED: References._on_dropped,
    ASK: References._on_ask,
    MISSING: References._on_missing,
    STILLBORN: References._on_stillborn,
    WANTED: References._on_wanted,
    GONE: References._on_gone,
}
