"""The faults of a schedule and their times: a plan is made of its seed alone."""

import random
from collections.abc import Sequence
from typing import NamedTuple

NETWORK = ("cut", "truncate", "delay", "trickle", "drop", "refuse", "replay")
PROCESS = ("kill", "stop")
MEMORY = ("squeeze",)
KINDS = NETWORK + PROCESS + MEMORY  # the last one only if it is asked for: see `faults.LEAST_SPARE`

MOST_ROUNDS = 4
AT_ONCE = 3  # faults of one round, at most
SPREAD = 0.3  # seconds within which the faults of a round begin
LONGEST = 1.0  # seconds that a fault lasts
SURVIVORS = 2  # workers that live at the end of a schedule, at least


class Fault(NamedTuple):
    """A fault: `kind` happens to worker number `victim`."""

    kind: str
    victim: int
    start: float  # seconds after the round's beginning
    duration: float
    amount: float  # between 0 and 1: the strength of the fault

    def __str__(self) -> str:
        return f"{self.kind} worker{self.victim} at {self.start:.2f} for {self.duration:.2f} s ({self.amount:.2f})"


class Plan(NamedTuple):
    """Rounds of faults; after each round the workers must go on."""

    seed: int
    workers: int
    transport: str
    rounds: list[list[Fault]]

    def __str__(self) -> str:
        rounds = ["; ".join(map(str, faults)) for faults in self.rounds]
        return "\n".join([f"{self.workers} workers over {self.transport!r}", *rounds])


def make_plan(seed: int, workers: int, kinds: Sequence[str] = (), rounds: int = 0) -> Plan:
    """Return the plan of a seed, with faults of these kinds, or of kinds that the seed decides."""
    chance = random.Random(seed)
    kinds = kinds or chance.choice((NETWORK, PROCESS, NETWORK + PROCESS))
    by_proxy = any(kind in NETWORK for kind in kinds)
    transport = "tcp" if by_proxy else chance.choice(("tcp", "auto"))
    alive = list(range(workers))
    made = []
    for _ in range(rounds or chance.randint(1, MOST_ROUNDS)):
        faults = []
        for _ in range(chance.randint(1, AT_ONCE)):
            kind = chance.choice(kinds)
            if kind == "kill" and len(alive) <= SURVIVORS:
                kind = "stop"
            victim = chance.choice(alive)
            if kind == "kill":
                alive.remove(victim)
            start, duration = chance.uniform(0, SPREAD), chance.uniform(0.05, LONGEST)
            faults.append(Fault(kind, victim, start, duration, chance.random()))
        made.append(sorted(faults, key=lambda fault: fault.start))
    return Plan(seed, workers, transport, made)
