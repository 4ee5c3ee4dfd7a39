"""Make random programs, each from a seed alone."""

import random
from typing import Any, NamedTuple

from tests.autograd.functions import Way

USUAL = ["add", "mul", "addmm", "broadcast", "cat", "unbind", "split", "view", "in place"]  # operations
RARE = ["checkpoint", "reentrant checkpoint", "constant", "no grad"]
WRAPS = ["box", "dict", "list", "tuple"]
FETCHES = ["call", "future", "reference"]
PUSHES = ["argument", "shared", "created"]
VARIANTS = ["once", "once", "once", "fast", "twice", "at once", "second order"]


class Program(NamedTuple):
    count: int  # type: ignore[assignment]  # the number of workers
    instructions: list[tuple[int, tuple[Any, ...]]]  # pairs of worker and instruction
    roots: list[tuple[int, int]]
    variant: str  # the way to run the backward pass


class Making:
    """A program that is being made."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.variant = draw.choice(VARIANTS)
        self.count = draw.choice([1, 2, 2, 3, 3, 4, 5])
        self.steps = draw.choice([6, 12, 25, 40])
        self.special = draw.random() < 0.6 and self.variant != "second order"
        self.hooks = draw.random() < 0.7
        self.lengths = [0] * self.count  # the number of values of each worker
        self.leaves = [0] * self.count
        self.instructions: list[tuple[int, tuple[Any, ...]]] = []
        self._numbers = iter(range(1, 1 << 30))

    def add(self, worker: int, *instruction: Any, values: int = 0, leaves: int = 0) -> None:
        """Add an instruction that makes `values` values and `leaves` leaves on a worker."""
        self.instructions.append((worker, instruction))
        self.lengths[worker] += values
        self.leaves[worker] += leaves

    def pick(self, worker: int) -> int:
        """Return the number of one of the latest values."""
        return self.draw.randrange(max(0, self.lengths[worker] - 6), self.lengths[worker])

    def step(self) -> None:
        worker, chance = self.draw.randrange(self.count), self.draw.random()
        if chance < 0.4 and self.count > 1:
            self.transfer(worker)
        elif chance < 0.52 and self.hooks:
            self.hook(worker)
        elif chance < 0.67:
            self.function(worker)
        elif chance < 0.77 and self.special:
            self.layer(worker)
        else:
            name = self.draw.choice([*USUAL, *RARE] if self.special else USUAL)
            self.add(worker, "operation", name, self.pick(worker), self.pick(worker), values=1)

    def transfer(self, worker: int) -> None:
        draw = self.draw
        other = draw.choice([each for each in range(self.count) if each != worker or draw.random() < 0.1] or [worker])
        sent = [self.pick(worker) for _ in range(draw.choice([1, 1, 2, 3]))]
        if draw.random() < 0.5:
            self.add(other, "fetch", worker, sent, draw.choice(WRAPS), draw.choice(FETCHES))
        else:
            self.add(worker, "push", other, sent, draw.choice(WRAPS), draw.choice(PUSHES))
        self.lengths[other] += len(sent)

    def hook(self, worker: int) -> None:
        number = next(self._numbers)
        if self.special and self.draw.random() < 0.2:
            self.add(worker, "leaf hook", number, self.draw.randrange(self.leaves[worker]))
        else:
            self.add(worker, self.draw.choice(["hook", "hook", "node hook"]), number, self.pick(worker))

    def function(self, worker: int) -> None:
        """Add a function that is written in Python."""
        draw, number = self.draw, next(self._numbers)
        if draw.random() < 0.2:
            self.add(worker, "counted", number, self.pick(worker), values=1)
            return
        gives = tuple(draw.random() < 0.7 for _ in range(draw.choice([1, 2, 3])))
        outputs = draw.choice([1, 2, 3])
        way = Way(outputs, draw.random() < 0.6, gives, outputs > 1 and draw.random() < 0.2)
        self.add(worker, "told", number, way, [self.pick(worker) for _ in gives], values=outputs)

    def layer(self, worker: int) -> None:
        number, seed, kind = next(self._numbers), self.draw.randrange(1 << 30), self.draw.randrange(3)
        if kind == 0:
            self.add(worker, "recompute", (number, next(self._numbers)), self.pick(worker), self.pick(worker), values=1)
        elif kind == 1:
            self.add(worker, "module", number, seed, self.pick(worker), values=1, leaves=2)
        else:
            self.add(worker, "embedding", seed, self.pick(worker), values=1, leaves=1)


def make(seed: int) -> Program:
    making = Making(seed)
    draw, lengths = making.draw, making.lengths
    for worker in range(making.count):
        for _ in range(draw.choice([1, 2])):
            making.add(worker, "leaf", draw.randrange(1 << 30), values=1, leaves=1)
    for _ in range(making.steps):
        making.step()
    workers = range(making.count)
    wheres = [0] if draw.random() < 0.7 else draw.sample(workers, draw.randint(1, making.count))
    roots = [(w, n) for w in sorted(wheres) for n in sorted(draw.sample(range(lengths[w]), min(3, lengths[w])))]
    return Program(making.count, making.instructions, roots, making.variant)
