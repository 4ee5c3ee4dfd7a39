"""The events of a schedule and their times: a plan is made of its seed alone."""

import random
from typing import NamedTuple

FOLDER, OWN, SEED = "CHAOS_FOLDER", "CHAOS_OWN_STORE", "CHAOS_SEED"  # variables of the workers
COUNTS = {"a": 2, "b": 2}  # workers of each role
ROLES = {f"{role}{number}": role for role, count in COUNTS.items() for number in range(count)}
FIRST = "a0"  # the worker that begins the store, if no supervisor keeps it
PUBLISHERS = "b"  # the role whose workers publish

KEPT, SERVED = "kept by telegrad run", "served by a worker"
IN_ORDER, KILLED = "in order", "telegrad run is killed"
KINDS = ("kill", "again", "stop", "leave", "exit", "join", "store", "hang")
WEIGHTS = (4, 2, 2, 2, 1, 1, 2, 1)
OF_THE_STORE = ("store", "hang")
MOST_ROUNDS = 4
AT_ONCE = 3  # events of one round, at most
SPREAD = 1.0  # seconds within which the events of a round begin
LONGEST = 1.5  # seconds that a worker is stopped
HANGS = 6.0, 8.0  # seconds that the worker with the store is stopped: longer than the others wait for it


class Event(NamedTuple):
    """An event: `kind` happens to a worker: the keeper of the store for "store" and "hang", a new one for "join".

    "again" kills a worker, and once more as it comes back.
    """

    kind: str
    victim: str
    start: float  # seconds after the round's beginning
    duration: float  # of a stop; for "again": from its coming to its second end

    def __str__(self) -> str:
        return f"{self.kind} {self.victim} at {self.start:.2f}" + (
            f" for {self.duration:.2f} s" * (self.kind == "stop")
        )


class Plan(NamedTuple):
    """Rounds of events; after each round all workers must reach all."""

    seed: int
    store: str
    end: str
    rounds: list[list[Event]]

    def __str__(self) -> str:
        rounds = ["; ".join(map(str, events)) for events in self.rounds]
        return "\n".join([f"{len(ROLES)} workers, whose store is {self.store}; the end: {self.end}", *rounds])


def make_plan(seed: int, rounds: int = 0) -> Plan:
    chance = random.Random(seed)
    store, end = chance.choice((KEPT, SERVED)), chance.choice((IN_ORDER, IN_ORDER, KILLED))
    made = []
    guests = 0
    for _ in range(rounds or chance.randint(1, MOST_ROUNDS)):
        events = []
        victims = list(ROLES)
        chance.shuffle(victims)
        for _ in range(chance.randint(1, AT_ONCE)):
            kind = chance.choices(KINDS, WEIGHTS)[0]
            victim = "" if kind in OF_THE_STORE else victims.pop()
            if kind == "join":
                victim, guests = f"guest{guests}", guests + 1
            duration = chance.uniform(*HANGS) if kind == "hang" else chance.uniform(0.1, LONGEST)
            events.append(Event(kind, victim, chance.uniform(0, SPREAD), duration))
        made.append(sorted(events, key=lambda event: event.start))
    return Plan(seed, store, end, made)
