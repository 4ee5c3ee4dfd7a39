"""Weights that several stages use: one stage owns each, and the others get its value and give back what it gets.

As actions of a plan, between those of the stages. Knows no worker and no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from telegrad.checks import shown
from telegrad.errors import UsageError
from telegrad.nn.schedule import Action

LEND, BORROW, RETURN, COLLECT = "lend", "borrow", "return", "collect"


class Tie(NamedTuple):
    """One weight in two stages, by its name in each."""

    owner: int
    name: str
    borrower: int
    borrowed: str


def parse_ties(names: Sequence[str], count: int) -> list[Tie]:
    """A parameter of one stage, and those of others that are the same."""
    if len(names) < 2 or not all(isinstance(name, str) for name in names):
        raise UsageError(
            f"tied parameters are named together, not as {shown(names)}: tied=[('0.embedding.weight', '2.head.weight')]"
        )
    found = [name.partition(".") for name in names]
    for name, (stage, _, rest) in zip(names, found, strict=True):
        if not stage.isdigit() or int(stage) >= count or not rest:
            raise UsageError(
                f"{name!r} names no parameter of one of {count} stages: write the number of the stage, and the name "
                "in it, such as '0.embedding.weight'"
            )
    (owner, _, own), *others = found
    return [Tie(int(owner), own, int(stage), name) for stage, _, name in others]


def with_ties(
    plans: Sequence[Sequence[Action]], stations: Sequence[int], ties: Sequence[Tie], trains: bool
) -> list[list[Action]]:
    """Plans in which values go to borrowers before these begin, and gradients to owners once borrowers are through.

    In the place of a micro-batch such actions have the number of the tie.
    """
    found = list(map(list, plans))
    for number, tie in enumerate(ties):
        owner, borrower = found[stations[tie.owner]], found[stations[tie.borrower]]
        owner.insert(0, Action(LEND, tie.owner, number))
        own = [at for at, action in enumerate(borrower) if action.stage == tie.borrower]
        if trains:
            borrower.insert(own[-1] + 1, Action(RETURN, tie.borrower, number))
        borrower.insert(own[0], Action(BORROW, tie.borrower, number))
        if trains:
            owner.append(Action(COLLECT, tie.owner, number))
    return found
