"""Which workers a selection picks of those that are there."""

from __future__ import annotations

import pickle

import pytest

from telegrad._core.membership.members import WorkerInfo
from telegrad.groups.selection import ALL, FILTER, MINUS, NAMED, PLUS, ROLE, SLICE, Selection

THERE = [WorkerInfo("boss", 0), *(WorkerInfo(f"a{n}", n + 1, "actor") for n in range(4)), WorkerInfo("x", 9, "learner")]
EVERYBODY = Selection(ALL)
ACTORS = Selection(ROLE, ("actor",))
PAIR = Selection(NAMED, (THERE[2], WorkerInfo("gone", 7)))


def is_even(worker: WorkerInfo) -> bool:
    return worker.id % 2 == 0


@pytest.mark.parametrize(
    ("selection", "names", "said", "live"),
    [
        (EVERYBODY, "boss a0 a1 a2 a3 x", "everybody", True),
        (ACTORS, "a0 a1 a2 a3", "role 'actor'", True),
        (Selection(ROLE, ("none",)), "", "role 'none'", True),
        (PAIR, "a1 gone", "a1, gone", False),
        (Selection(SLICE, (ACTORS, 1, None, None)), "a1 a2 a3", "role 'actor' [1:]", True),
        (Selection(SLICE, (ACTORS, None, None, -2)), "a3 a1", "role 'actor' [::-2]", True),
        (Selection(SLICE, (PAIR, 0, 1, None)), "a1", "a1, gone [0:1]", False),
        (Selection(FILTER, (EVERYBODY, is_even)), "boss a1 a3", f"everybody where {__name__}.is_even", True),
        (Selection(FILTER, (PAIR, is_even)), "a1", f"a1, gone where {__name__}.is_even", False),
        (Selection(MINUS, (ACTORS, PAIR)), "a0 a2 a3", "role 'actor' without a1, gone", True),
        (Selection(MINUS, (PAIR, PAIR)), "", "a1, gone without a1, gone", False),
        (Selection(PLUS, (Selection(ROLE, ("learner",)), PAIR)), "x a1 gone", "role 'learner' and a1, gone", True),
        (Selection(PLUS, (PAIR, PAIR)), "a1 gone", "a1, gone and a1, gone", False),
    ],
)
def test_selected_workers(selection: Selection, names: str, said: str, live: bool) -> None:
    assert [worker.name for worker in selection.pick(THERE)] == names.split()
    assert str(selection) == said
    assert selection.live is live
    assert pickle.loads(pickle.dumps(selection)) == selection
