"""Which workers are chosen of those that are there."""

from __future__ import annotations

import pickle

import pytest

from telegrad.group.members import WorkerInfo
from telegrad.rpc.choices import Choice, Everybody, Filtered, Part, Role, These, Together, Without

THERE = [WorkerInfo("boss", 0), *(WorkerInfo(f"a{n}", n + 1, "actor") for n in range(4)), WorkerInfo("x", 9, "learner")]
PAIR = These((THERE[2], WorkerInfo("gone", 7)))


def is_even(worker: WorkerInfo) -> bool:
    return worker.id % 2 == 0


@pytest.mark.parametrize(
    ("choice", "names", "said", "live"),
    [
        (Everybody(), "boss a0 a1 a2 a3 x", "everybody", True),
        (Role("actor"), "a0 a1 a2 a3", "role 'actor'", True),
        (Role("none"), "", "role 'none'", True),
        (PAIR, "a1 gone", "a1, gone", False),
        (Part(Role("actor"), 1, None, None), "a1 a2 a3", "role 'actor' [1:]", True),
        (Part(Role("actor"), None, None, -2), "a3 a1", "role 'actor' [::-2]", True),
        (Part(PAIR, 0, 1, None), "a1", "a1, gone [0:1]", False),
        (Filtered(Everybody(), is_even), "boss a1 a3", f"everybody where {__name__}.is_even", True),
        (Filtered(PAIR, is_even), "a1", f"a1, gone where {__name__}.is_even", False),
        (Without(Role("actor"), PAIR), "a0 a2 a3", "role 'actor' without a1, gone", True),
        (Without(PAIR, PAIR), "", "a1, gone without a1, gone", False),
        (Together(Role("learner"), PAIR), "x a1 gone", "role 'learner' and a1, gone", True),
        (Together(PAIR, PAIR), "a1 gone", "a1, gone and a1, gone", False),
    ],
)
def test_who_is_chosen(choice: Choice, names: str, said: str, live: bool) -> None:
    assert [worker.name for worker in choice.of(THERE)] == names.split()
    assert str(choice) == said
    assert choice.live is live
    assert pickle.loads(pickle.dumps(choice)) == choice
