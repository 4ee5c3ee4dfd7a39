"""The rules for all that was recorded; without side effects.

once        a call without `idempotent` runs once at most, in any life; one with it once at most in each
honest      the life that answered has run the call under the called name; a call that failed as not run has not run
one table   while the owner of a published value is there, no other makes it
back        a worker that was killed can soon be called again by all living ones
undisturbed calls among workers without faults are not late
"""

from collections import Counter
from collections.abc import Collection, Iterable
from itertools import pairwise
from typing import NamedTuple

from tests.chaos.supervised.record import Life, Note

ONCE_IN_EACH = ("repeated", "once", "role")  # operations whose calls are idempotent
HAS_NOT_RUN = ("UnknownWorker", "PeerUnreachable")  # failures which say that the call has not run
ANSWERED = ("plain", "patient", "repeated", "once")  # operations that tell which life ran the call
BACK = 2.0  # seconds, beside those of the imports, until a killed worker can be called again
STORE_BACK = 2.0  # seconds more, if the store was lost at that time
LATE = 0.1  # seconds that calls between other workers may take
AROUND = 0.5  # seconds before and after a call in which noise of the machine and faults of the two count
LONG = 5.0  # seconds of a life after which a worker is restarted at once, as after its first failure


class Blow(NamedTuple):
    """A fault that a life has suffered, and its duration."""

    kind: str
    name: str
    pid: int
    began: float
    ended: float

    def __str__(self) -> str:
        return f"{self.kind} {self.name} ({self.pid}) at {self.began:.2f}"


def violations(notes: list[Note], blows: list[Blow]) -> list[str]:
    told = [f"{note.life}: {note.told[0]}" for note in notes if note.what == "wrong"]
    return [*told, *_calls(notes), *_tables(notes, blows), *_returns(notes, blows), *_late(notes, blows)]


def _calls(notes: list[Note]) -> Iterable[str]:
    ran: dict[str, Counter[Life]] = {}
    for note in notes:
        if note.what == "ran":
            ran.setdefault(note.told[0], Counter())[note.life] += 1
    for key, lives in ran.items():
        most = max(lives.values()) if key.split()[0] in ONCE_IN_EACH else lives.total()
        if most > 1:
            yield f"call {key!r} ran more than once: {_counts(lives)}"
    for note in notes:
        if note.what == "ended":
            yield from _ended(note, ran.get(note.told[2], Counter()))


def _ended(note: Note, ran: Counter[Life]) -> Iterable[str]:
    operation, to, key, answer, failure, _ = note.told
    if answer is not None:
        life = Life(*answer)
        if life.name != to or not ran[life]:
            yield f"call {key!r} to {to} was answered by {life}; it ran in {_counts(ran) or 'none'}"
    elif not failure and operation in ANSWERED:
        yield f"call {key!r} to {to} was answered by nobody"
    if failure in HAS_NOT_RUN and ran and operation not in ONCE_IN_EACH:
        yield f"call {key!r} to {to} failed with {failure}, and ran in {_counts(ran)}"


def _counts(lives: Counter[Life]) -> str:
    return ", ".join(f"{life}: {times}" for life, times in lives.items())


def _tables(notes: list[Note], blows: list[Blow]) -> Iterable[str]:
    made = [note for note in notes if note.what == "made"]
    for before, after in pairwise(made):
        left = any(note.what == "leaves" and note.life == before.life and note.at < after.at for note in notes)
        struck = any(blow.pid == before.life.pid and blow.began < after.at for blow in blows)
        if not left and not struck:
            yield f"{after.life} made the table while {before.life} had it"


def _returns(notes: list[Note], blows: list[Blow]) -> Iterable[str]:
    for blow in blows:
        if blow.kind == "kill":
            yield from _return(blow, notes, blows)


def _return(blow: Blow, notes: list[Note], blows: list[Blow]) -> Iterable[str]:
    """Check that all workers that were there all the time reach the next life in time."""
    earlier = [note for note in notes if note.life.name == blow.name and note.at < blow.began]
    before = {note.life.pid: note.at for note in reversed(earlier)}  # begin of each process of that name
    joins = next((note for note in notes if _is_next(note, blow)), None)
    if blow.pid not in before or joins is None:  # it has not come yet, or never does
        return
    if len(before) > 1 and blow.began - before[blow.pid] < LONG:  # its restart is delayed
        return
    last = joins.at + BACK
    if any(other.kind == "hang" and blow.began < other.ended + LONG and other.began < last for other in blows):
        return  # a worker that knows only that address waits for it
    limit = BACK + joins.told[0] + _longest(note for note in notes if blow.began < note.at < last)
    if any(other.kind in ("store", "stop") and abs(other.began - blow.began) < LONG for other in blows):
        limit += STORE_BACK
    until = blow.began + limit
    if _struck(joins.life, blow.began, until, blows) or _goes(joins.life, ("leaves",), blow.began, until, notes):
        return
    for life in {note.life for note in notes if note.what == "joined" and note.at < blow.began - AROUND}:
        gone = _goes(life, ("leaves", "rests"), 0.0, until, notes)
        if life.pid == blow.pid or gone or _struck(life, blow.began - AROUND, until, blows):
            continue
        own = [note for note in notes if note.what == "met" and note.life == life]
        met = [note.at for note in own if Life(*note.told[0]) == joins.life]
        if not met or met[0] > until:
            when = f"after {met[0] - blow.began:.2f} s" if met else "never"
            yield f"{blow}: {life} reached it {when}, not within {limit:.2f} s (imports {joins.told[0]:.2f})"


def _is_next(note: Note, blow: Blow) -> bool:
    return note.what == "joins" and note.life.name == blow.name and note.life.number == 0 and note.at > blow.began


def _late(notes: list[Note], blows: list[Blow]) -> Iterable[str]:
    for note in notes:
        if note.what != "late":
            continue
        callee, began, took = Life(*note.told[0]), note.told[1], note.told[2]
        window = began - AROUND, began + took + AROUND
        if any(_disturbed(life, *window, notes, blows) for life in (note.life, callee)):
            continue
        noise = sum(_noise(life, *window, notes) for life in {note.life, callee})
        if took > LATE + 2 * noise:
            yield f"a call from {note.life} to {callee} took {took:.3f} s at {began:.2f}, with noise of {noise:.3f} s"


def _disturbed(life: Life, since: float, until: float, notes: list[Note], blows: list[Blow]) -> bool:
    """Return True if a life has suffered a fault, has come or has gone."""
    passes = ("joins", "joined", "leaves", "rests")
    return _struck(life, since, until, blows) or _goes(life, passes, since, until, notes)


def _struck(life: Life, since: float, until: float, blows: list[Blow]) -> bool:
    return any(blow.pid == life.pid and blow.began < until and since < blow.ended for blow in blows)


def _goes(life: Life, how: Collection[str], since: float, until: float, notes: list[Note]) -> bool:
    return any(note.life == life and note.what in how and since < note.at < until for note in notes)


def _noise(life: Life, since: float, until: float, notes: list[Note]) -> float:
    own = (note for note in notes if note.what == "noise" and note.life == life)
    return _longest(note for note in own if since < note.at < until + note.told[0])


def _longest(notes: Iterable[Note]) -> float:
    """Return the longest delay of the machine."""
    return max((note.told[0] for note in notes if note.what == "noise"), default=0.0)
