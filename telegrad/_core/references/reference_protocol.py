"""Distributed reference counting: one worker's part of the protocol, as a state machine without I/O.

A reference is named by its creator and a number. So is a fork: one worker's share in a reference. Workers are named by
keys that are never reused. The owner keeps the value while it knows any fork or has a live handle itself. A user keeps
its fork while a handle lives or the fork has unsettled children.

    G1  the owner learns of the end of every fork                             DROPPED
    G2  a parent outlives its child until the owner knows the child           CONFIRM, CONFIRMED, SETTLED

The paths by which a reference reaches a worker, and the control messages that each needs besides the user's own:

    created on a user, value at the owner   none: the answer to the creating call confirms it
    user to owner                           SETTLED
    owner to user                           none: the owner counts the child before it sends it
    user to user                            CONFIRM to the owner, CONFIRMED, SETTLED to the parent
                                            (and WANTED to the creator if they overtake the creating call; it answers
                                            STILLBORN after that call: the call will not arrive any more)
    the end of a fork                       DROPPED

A worker that receives a reference it already holds adds to its fork instead of starting another. Each control message
is delivered once, in any order (see `ReliableDelivery`). The user's own messages may be lost with their connection. The
sender then ASKs for the forks it sent. Forks that did not arrive are MISSING, and are refused if they arrive later.

A worker that was declared dead may only be unreachable. The declaring worker has released the other's forks, the forks
sent to it, and the references that it owned. It sends FORGOT after the next message of that worker. The other side then

    ASKs for all forks it sent there        MISSING ends what was released, SETTLED what no longer waits
    confirms its shares again               under new forks, since messages about the old ones may be in transit;
                                            the owner then knows them again, or the value is GONE
    asks for values not yet created         the notice that they will not come may have been dropped

References that one side has released stay lost for its own handles. Handles of the other side become usable again, or
report an error.
"""

# Any order means that no rule may rely on one message being processed before another: a worker whose message must not
# overtake an earlier one waits for an answer first. So a user sends DROPPED only for a fork that the owner has
# confirmed. A DROPPED that overtook its CONFIRM would be ignored as unknown, and the owner would keep the fork.
#
# Nothing here does I/O or reads a clock, so simulations run it with many orders, losses and deaths
# (tests/sim/test_references.py), and `spin` searches a model of it for three workers (tests/sim/references.pml). The
# caller holds the lock of `ReferenceTable` during each method. Only `shares` and the fields of one share are also read
# without it.

from collections.abc import Iterator
from typing import NamedTuple

from telegrad._core.references import Holders, Id, Owned, SharedFork, added, remember

CONFIRM = "confirm"  # user to owner: I hold this fork
CONFIRMED = "confirmed"  # owner to user: I know it
SETTLED = "settled"  # child to parent: you need not keep your fork for this one any longer
DROPPED = "dropped"  # user to owner: this fork has ended
ASK = "ask"  # sender to receiver: the connection broke; did this fork arrive?
MISSING = "missing"  # receiver to sender: it did not, and I will refuse it
STILLBORN = "stillborn"  # creator to owner: the creating call will not arrive, if it has not
WANTED = "wanted"  # owner to creator: will the creating call arrive?
GONE = "gone"  # owner to user: this fork has no value
FORGOT = "forgot"  # I declared you dead and dropped all shared state; contains my last fork number before that

NOTHING: Id = ("", 0)  # in a message without a reference

# Faults: why a reference cannot be used.
OWNER_DIED, VALUE_GONE, CAME_LATE = "owner died", "value gone", "came late"

MOST_REMEMBERED = 1 << 14  # number of refused references and forks, and of dead workers


class ControlMessage(NamedTuple):
    """A control message about one fork of one reference."""

    kind: str
    ref: Id
    fork: Id


class References:
    """All references that one worker owns or uses. Events add to `messages` (receiver, message), `freed` (references
    that ended here) and `hopeless` (owned references whose value will never come); the driver empties these lists."""

    def __init__(self, me: str) -> None:
        self.me = me
        self.shares: dict[Id, SharedFork] = {}
        self.owned: dict[Id, Owned] = {}
        self.holders = Holders()
        self.messages: list[tuple[str, ControlMessage]] = []
        self.freed: list[Id] = []
        self.hopeless: list[Id] = []
        self._numbers = 0
        self._creating: dict[Id, bool] = {}  # creating calls that may still arrive; True if the owner has asked
        self._dead: dict[str, int] = {}  # each with the last number issued before the death
        self._forgotten: dict[str, int] = {}  # by live workers: they do not know forks up to this number
        self._refused: dict[Id, None] = {}  # references and forks that may still arrive in a message

    def _new_id(self) -> Id:
        self._numbers += 1
        return self.me, self._numbers

    def _post(self, to: str, kind: str, ref: Id, fork: Id) -> None:
        self.messages.append((to, ControlMessage(kind, ref, fork)))

    def _refuse(self, id_: Id) -> None:
        remember(self._refused, id_, None, MOST_REMEMBERED)

    # Creating references

    def own(self) -> Id:
        """Create a reference to a value of this worker, with one handle."""
        ref = self._new_id()
        self.owned[ref] = Owned(made=True, handles=1)
        return ref

    def create(self, owner: str) -> tuple[Id, Id]:
        """Create a reference to the result of a call to `owner`, with one handle; return it and the fork to send."""
        self._numbers = number = self._numbers + 2
        ref, fork = (self.me, number - 1), (self.me, number)
        self.shares[ref] = SharedFork(owner, fork, confirmed=False)
        self._creating[ref] = False
        return ref, fork

    def expect(self, ref: Id, fork: Id, creator: str) -> bool:
        """Handle a creating call on the owner; return False if no worker can use its value any more."""
        # This worker has given the reference up: the creator has said that the call is lost, or was declared dead. The
        # call was in transit all the same.
        if ref in self._refused:
            self._post(creator, GONE, ref, fork)
            return False
        owned = self.owned.get(ref)
        if owned is None:
            owned = self.owned[ref] = Owned(made=True)
        owned.made = True
        self.holders.add(owned, fork, creator)
        return True

    def created(self, ref: Id, fork: Id, owner: str) -> None:
        """Handle the answer to the creating call: the owner knows the fork."""
        # The owner has asked WANTED during the call. If it has got the value since, it ignores this message.
        if self._creating.pop(ref, False):
            self._post(owner, STILLBORN, ref, ref)
        self._on_confirmed(owner, ref, fork)

    def cancel(self, ref: Id) -> bool:
        """Remove a reference whose creating call is given up; return False if that call has ended."""
        if self._creating.pop(ref, None) is None:
            return False
        del self.shares[ref]
        return True

    def stillborn(self, ref: Id, fork: Id, owner: str) -> None:
        """Handle the loss of the creating call; only the owner knows if it arrived."""
        if self._creating.pop(ref, None) is not None:
            self._post(owner, STILLBORN, ref, fork)

    # Sending and receiving references

    def fork(self, ref: Id, to: str) -> Id:
        """Return the fork to send with a reference."""
        child = self._new_id()
        owned = self.owned.get(ref)
        if owned is not None:
            self.holders.add(owned, child, to)
        else:
            share = self.shares[ref]
            share.children = children = share.children or {}
            children[child] = to
        return child

    def arrive(self, ref: Id, fork: Id, owner: str, sender: str) -> str:
        """Add a handle for a received reference; return a fault if that is impossible."""
        # The sender has been told that this fork is MISSING and has released it, so nothing would keep the value alive
        # for this handle.
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
            # The handle gets a record even without a value: uses of it then find a failed slot and do not wait.
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
            share = self.shares[ref] = SharedFork(owner, fork, confirmed=True, handles=0)
        share.handles += 1
        if owner in self._dead:
            share.fault = OWNER_DIED
            if sender != owner:
                self._post(sender, SETTLED, ref, fork)
            return
        # A share with a fault was settled when it failed. The new fork makes it usable again, also for its old handles.
        share.fork, share.fault = fork, ""
        # The owner knows a fork that it sends itself, unless it has sent the fork before it declared this worker dead.
        # It numbers forks in ascending order, and FORGOT has the last number before that.
        share.confirmed = sender == owner and fork[1] > self._forgotten.get(owner, 0)
        if sender != owner:
            share.parents = added(share.parents, (sender, fork))
        if not share.confirmed:
            self._post(owner, CONFIRM, ref, fork)

    def _merge(self, ref: Id, share: SharedFork, fork: Id, sender: str) -> None:
        if sender == share.owner:
            # As long as the owner does not know this worker's own fork, only the parent keeps the value alive, and it
            # may die. So the fork from the owner is kept until then: DROPPED for it might overtake CONFIRM.
            if share.confirmed:
                self._post(sender, DROPPED, ref, fork)
            else:
                share.extras = added(share.extras, fork)
        else:
            self._settle(sender, share, ref, fork)

    # Releasing references

    def drop(self, ref: Id) -> None:
        """Handle the end of a handle."""
        owned = self.owned.get(ref)
        if owned is not None:
            owned.handles -= 1
            self._free_if_unused(ref, owned)
        elif ref in self.shares:
            self.shares[ref].handles -= 1
            self._end_if_unused(ref)

    def _end_if_unused(self, ref: Id) -> None:
        share = self.shares[ref]
        # An unconfirmed share stays without handles: see "any order" above. `_conclude` comes here again.
        if share.handles or share.children or not share.confirmed:
            return
        del self.shares[ref]
        if not share.fault:
            self._post(share.owner, DROPPED, ref, share.fork)
        self.freed.append(ref)

    def _free_if_unused(self, ref: Id, owned: Owned) -> None:
        # Without `made`, the creating call may still arrive, and uses that have overtaken it wait for its value.
        if owned.made and not owned.handles and not owned.forks:
            del self.owned[ref]
            self.freed.append(ref)

    def _end_child(self, ref: Id, fork: Id) -> None:
        share = self.shares.get(ref)
        if share is not None:
            (share.children or {}).pop(fork, None)
            self._end_if_unused(ref)

    def seek(self, ref: Id) -> bool:
        """Prepare for a request of a value on its owner; return False if the value does not exist and never will. The
        request may overtake the creating call, and the user's CONFIRM, which keeps alive the record made here."""
        if ref not in self.owned:
            if self._never_comes(ref):
                return False
            self._want(ref, ref)
        return True

    def fault(self, ref: Id) -> str:
        """Return why a reference cannot be used here; empty if it can be used."""
        share = self.shares.get(ref)
        return share.fault if share is not None else ""

    # Control messages

    def receive(self, sender: str, message: ControlMessage) -> None:
        """Handle a control message by the method `_on_` and its kind. Each arrives once."""
        kind, ref, fork = message
        getattr(self, f"_on_{kind}")(sender, ref, fork)

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
        """Record an unknown reference and ask its creator: its creating call is in transit, unless all ended before a
        death."""
        self._post(ref[0], WANTED, ref, fork)
        owned = self.owned[ref] = Owned(made=False)
        return owned

    def _on_wanted(self, sender: str, ref: Id, fork: Id) -> None:
        if ref in self._creating:
            self._creating[ref] = True  # the answer follows when the call is over
        else:
            self._post(sender, STILLBORN, ref, fork)

    def _never_comes(self, ref: Id) -> bool:
        return ref[0] == self.me or ref[0] in self._dead or ref in self._refused

    def _on_confirmed(self, sender: str, ref: Id, fork: Id) -> None:
        share = self.shares.get(ref)
        if share is None or share.fault or (share.confirmed and share.fork != fork):
            self._post(sender, DROPPED, ref, fork)  # released, or confirmed again, while this was in transit
        elif share.fork != fork:
            share.extras = added(share.extras, fork)
        elif not share.confirmed:
            self._conclude(ref, share)

    def _conclude(self, ref: Id, share: SharedFork) -> None:
        """Settle with the parents: the owner knows the fork, or it has failed. Either way no worker needs to wait."""
        share.confirmed = True
        for parent, fork in share.parents or ():
            self._post(parent, SETTLED, ref, fork)
        share.parents = None
        if share.fault != OWNER_DIED:
            for extra in share.extras or ():
                self._post(share.owner, DROPPED, ref, extra)
        share.extras = None
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

    def _fail(self, ref: Id, share: SharedFork, fault: str) -> None:
        self._creating.pop(ref, None)
        share.fault = fault
        self._conclude(ref, share)

    # Broken connections and dead workers

    def ask(self, receiver: str) -> None:
        """Handle a broken connection to `receiver`: messages may be lost."""
        # Two workers have a connection in each direction. A fork in an answer may be in transit over the other one, and
        # ASK may overtake it. It is then refused as well, and its handle reports the loss: safe, but not necessary.
        for ref, fork in list(self._sent_to(receiver)):
            self._post(receiver, ASK, ref, fork)

    def _sent_to(self, receiver: str) -> Iterator[tuple[Id, Id]]:
        for ref, owned in self.owned.items():
            yield from ((ref, fork) for fork, holder in owned.forks.items() if holder == receiver)
        for ref, share in self.shares.items():
            yield from ((ref, fork) for fork, holder in (share.children or {}).items() if holder == receiver)

    def _on_ask(self, sender: str, ref: Id, fork: Id) -> None:
        share = self.shares.get(ref)
        if share is not None and (sender, fork) in (share.parents or ()):
            return  # it arrived; SETTLED follows
        if share is not None and not share.fault and (fork == share.fork or fork in (share.extras or ())):
            if sender != share.owner:  # otherwise DROPPED will follow
                self._settle(sender, share, ref, fork)
            return
        # The fork has not arrived, or it has arrived and ended. In both cases the sender may release it.
        self._refuse(fork)
        if share is not None and sender == share.owner and not share.confirmed:
            # The owner may count only this fork so far, so it is dropped once the owner knows the one that replaced it.
            share.extras = added(share.extras, fork)
        else:
            self._post(sender, MISSING, ref, fork)

    def _settle(self, parent: str, share: SharedFork, ref: Id, fork: Id) -> None:
        """Release a parent once the owner knows this worker's fork."""
        if share.confirmed:
            self._post(parent, SETTLED, ref, fork)
        else:
            share.parents = added(share.parents, (parent, fork))

    def _on_missing(self, sender: str, ref: Id, fork: Id) -> None:
        # MISSING answers ASK, at the owner or at a parent. It also answers STILLBORN, at the creator, about its own
        # fork.
        share = self.shares.get(ref)
        if ref in self.owned:
            self._on_dropped(sender, ref, fork)
        elif share is not None and share.fork == fork:
            self._on_gone(sender, ref, fork)
        else:
            self._end_child(ref, fork)

    def _on_stillborn(self, sender: str, ref: Id, fork: Id) -> None:
        owned = self.owned.get(ref)
        # A record that was given up is `made`, too, so that it can be freed. It is in `_refused` then.
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
        """Mark an owned reference whose value will never come."""
        for fork, holder in list(owned.forks.items()):
            if holder != self.me:
                self._post(holder, GONE, ref, fork)
                self.holders.end(owned, fork)
        owned.made = True
        self._lose_hope(ref)
        self._free_if_unused(ref, owned)

    def dead(self, worker: str) -> None:
        """Handle the death or leaving of a worker: its own values are lost, and its forks are released."""
        # The number goes into FORGOT: the other side then knows which forks from this worker were sent before the
        # death, and were dropped here.
        remember(self._dead, worker, self._numbers, MOST_REMEMBERED)
        for ref, share in list(self.shares.items()):
            share.parents = [parent for parent in share.parents or () if parent[0] != worker]
            share.children = {fork: to for fork, to in (share.children or {}).items() if to != worker}
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

    def is_dead(self, worker: str) -> bool:
        return worker in self._dead

    def alive(self, worker: str) -> bool:
        """Handle a sign of life. If the worker was declared dead, notify it and return True."""
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
        # The answer to an earlier WANTED may be among the messages that were dropped.
        for ref, owned in self.owned.items():
            if not owned.made and ref[0] == sender:
                self._post(sender, WANTED, ref, ref)

    def _confirm_anew(self, ref: Id, share: SharedFork) -> None:
        if share.confirmed:
            share.extras = added(share.extras, share.fork)  # the owner may know it again: it was confirmed after FORGOT
        share.fork, share.confirmed = self._new_id(), False
        self._post(share.owner, CONFIRM, ref, share.fork)
