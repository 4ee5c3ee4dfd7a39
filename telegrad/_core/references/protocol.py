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
                                            (and WANTED to the creator where they outrun the creating call, which
                                            answers STILLBORN once that is over: it will not come any more)
    the end of a fork                       DROPPED

A worker that receives a reference it holds already adds to its fork instead of beginning another. Letters are
delivered once each, in any order (see courier.py). The user's own messages may be lost with their connection: then the
sender ASKs for the forks it sent, and those that never came are MISSING, and refused should they still come.

A worker that is taken for dead may live, and only be out of reach. Who took it for dead has let go of its forks, of
what was sent to it and of what it owned, and says FORGOT once it speaks again. Upon that the other side

    ASKs for all that it has sent there     MISSING ends what was let go of, SETTLED what waits for nothing more
    confirms its shares anew                under new forks, since letters about the old ones may still be on their way;
                                            the owner knows them again, or the value is GONE
    asks for values still to come           the word that they will not may be among what was let go of

What one side let go of stays lost for its own handles; handles of the other side can be used again, or tell why not.
"""

from __future__ import annotations

from collections.abc import Iterator

from telegrad._core.references.letters import (
    ASK,
    CONFIRM,
    CONFIRMED,
    DROPPED,
    FORGOT,
    GONE,
    MISSING,
    NOTHING,
    SETTLED,
    STILLBORN,
    WANTED,
    Id,
    Letter,
)
from telegrad._core.references.records import Holders, Owned, Share, remember

# Why a reference cannot be used.
OWNER_DIED, VALUE_GONE, CAME_LATE = "owner died", "value gone", "came late"

MOST_REMEMBERED = 1 << 14  # of the references and forks that were refused, and of workers that have died


class References:
    """All references that one worker owns or uses.

    Every event may add to `letters` (to whom, what), to `freed` (references that ended here) and to
    `hopeless` (owned references whose value will never come); the driver empties them.
    """

    def __init__(self, me: str) -> None:
        self.me = me
        self.shares: dict[Id, Share] = {}
        self.owned: dict[Id, Owned] = {}
        self.holders = Holders()
        self.letters: list[tuple[str, Letter]] = []
        self.freed: list[Id] = []
        self.hopeless: list[Id] = []
        self._numbers = 0
        self._creating: dict[Id, bool] = {}  # whose creating call may still come; whether its owner asks for that
        self._dead: dict[str, int] = {}  # and the last number that was given before the death
        self._forgotten: dict[str, int] = {}  # by workers that live: their forks up to that number
        self._refused: dict[Id, None] = {}  # references and forks of which a message may still come

    def _new_id(self) -> Id:
        self._numbers += 1
        return self.me, self._numbers

    def _post(self, to: str, kind: str, ref: Id, fork: Id) -> None:
        self.letters.append((to, Letter(kind, ref, fork)))

    def _refuse(self, id_: Id) -> None:
        remember(self._refused, id_, None, MOST_REMEMBERED)

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
        self._creating[ref] = False
        return ref, fork

    def expect(self, ref: Id, fork: Id, creator: str) -> bool:
        """A creating call has come to the owner; False where it must not run."""
        if ref in self._refused:
            self._post(creator, GONE, ref, fork)
            return False
        owned = self.owned.setdefault(ref, Owned(made=True))
        owned.made = True
        self.holders.add(owned, fork, creator)
        return True

    def created(self, ref: Id, fork: Id, owner: str) -> None:
        """The creating call was answered: the owner knows the fork."""
        if self._creating.pop(ref, False):
            self._post(owner, STILLBORN, ref, ref)
        self._on_confirmed(owner, ref, fork)

    def cancel(self, ref: Id) -> None:
        """The creating call was never sent."""
        del self._creating[ref], self.shares[ref]

    def stillborn(self, ref: Id, fork: Id, owner: str) -> None:
        """The creating call was cut off: whether it came, the owner must say."""
        if self._creating.pop(ref, None) is not None:
            self._post(owner, STILLBORN, ref, fork)

    # Passing them on

    def fork(self, ref: Id, to: str) -> Id:
        """A reference is about to be sent; the fork to be sent with it."""
        child = self._new_id()
        owned = self.owned.get(ref)
        if owned is not None:
            self.holders.add(owned, child, to)
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
                owned = self.owned[ref] = Owned(made=True)
                self._lose_hope(ref)
            else:
                owned = self._want(ref, fork)
        owned.handles += 1
        if sender == self.me:
            self.holders.end(owned, fork)
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
        share.fork, share.fault = fork, ""
        share.confirmed = sender == owner and fork[1] > self._forgotten.get(owner, 0)
        if sender != owner:
            share.parents.append((sender, fork))
        if not share.confirmed:
            self._post(owner, CONFIRM, ref, fork)

    def _merge(self, ref: Id, share: Share, fork: Id, sender: str) -> None:
        if sender == share.owner:
            if share.confirmed:
                self._post(sender, DROPPED, ref, fork)
            else:
                share.extras.append(fork)
        else:
            self._settle(sender, share, ref, fork)

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
        if owned.made and not owned.handles and not owned.forks:  # else the call may come, and somebody may wait for it
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
        self.holders.add(owned, fork, sender)
        self._post(sender, CONFIRMED, ref, fork)

    def _want(self, ref: Id, fork: Id) -> Owned:
        """Of a reference nothing is known: its creating call is on its way, unless all was over before a death."""
        self._post(ref[0], WANTED, ref, fork)
        owned = self.owned[ref] = Owned(made=False)
        return owned

    def _on_wanted(self, sender: str, ref: Id, fork: Id) -> None:
        if ref in self._creating:
            self._creating[ref] = True  # the answer comes when the call is over
        else:
            self._post(sender, STILLBORN, ref, fork)

    def _never_comes(self, ref: Id) -> bool:
        return ref[0] == self.me or ref[0] in self._dead or ref in self._refused

    def _on_confirmed(self, sender: str, ref: Id, fork: Id) -> None:
        share = self.shares.get(ref)
        if share is None or share.fault or (share.confirmed and share.fork != fork):
            self._post(sender, DROPPED, ref, fork)  # given up, or confirmed anew, while this was on its way
        elif share.fork != fork:
            share.extras.append(fork)
        elif not share.confirmed:
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
        if owned is not None and owned.forks.get(fork) == sender:
            self.holders.end(owned, fork)
            self._free_if_unused(ref, owned)

    def _on_gone(self, sender: str, ref: Id, fork: Id) -> None:
        share = self.shares.get(ref)
        if share is not None and share.fork == fork and not share.fault:
            self._fail(ref, share, VALUE_GONE)

    def _fail(self, ref: Id, share: Share, fault: str) -> None:
        self._creating.pop(ref, None)
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
        if share is not None and (sender, fork) in share.parents:
            return  # it came; SETTLED follows
        if share is not None and not share.fault and (fork == share.fork or fork in share.extras):
            if sender != share.owner:  # else DROPPED will follow
                self._settle(sender, share, ref, fork)
            return
        self._refuse(fork)
        if share is not None and sender == share.owner and not share.confirmed:
            share.extras.append(fork)  # given back once the owner knows the one in its place
        else:
            self._post(sender, MISSING, ref, fork)

    def _settle(self, parent: str, share: Share, ref: Id, fork: Id) -> None:
        """A parent need not hold on once the owner knows this worker's fork."""
        if share.confirmed:
            self._post(parent, SETTLED, ref, fork)
        else:
            share.parents.append((parent, fork))

    def _on_missing(self, sender: str, ref: Id, fork: Id) -> None:
        share = self.shares.get(ref)
        if ref in self.owned:
            self._on_dropped(sender, ref, fork)
        elif share is not None and share.fork == fork:
            self._on_gone(sender, ref, fork)
        else:
            self._end_child(ref, fork)

    def _on_stillborn(self, sender: str, ref: Id, fork: Id) -> None:
        owned = self.owned.get(ref)
        if owned is not None and owned.made and ref not in self._refused:
            if fork != ref:
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
                self.holders.end(owned, fork)
        owned.made = True
        self._lose_hope(ref)
        self._free_if_unused(ref, owned)

    def dead(self, worker: str) -> None:
        """A worker has died or left: what it owned is lost, what it used is released."""
        remember(self._dead, worker, self._numbers, MOST_REMEMBERED)
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
                self.holders.end(owned, fork)
            if not owned.made and ref[0] == worker:
                self._give_up(ref, owned)
            elif released:
                self._free_if_unused(ref, owned)

    def alive(self, worker: str) -> bool:
        """A worker speaks; whether it had been taken for dead, of which it is told."""
        if worker not in self._dead:
            return False
        self._post(worker, FORGOT, NOTHING, (self.me, self._dead.pop(worker)))
        self.ask(worker)
        return True

    def _on_forgot(self, sender: str, _: Id, last: Id) -> None:
        self._forgotten[sender] = max(last[1], self._forgotten.get(sender, 0))
        self.ask(sender)
        for ref, share in self.shares.items():
            if share.owner == sender and not share.fault:
                self._confirm_anew(ref, share)
        for ref, owned in self.owned.items():
            if not owned.made and ref[0] == sender:
                self._post(sender, WANTED, ref, ref)

    def _confirm_anew(self, ref: Id, share: Share) -> None:
        if share.confirmed:
            share.extras.append(share.fork)  # the owner may know it again: it was confirmed after the forgetting
        share.fork, share.confirmed = self._new_id(), False
        self._post(share.owner, CONFIRM, ref, share.fork)


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
    FORGOT: References._on_forgot,
}
