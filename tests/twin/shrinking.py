"""Reduce a failing program until no line can be dropped."""

from collections.abc import Callable

from tests.twin.making import Program

MOST_TRIES = 400  # each try runs the program


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """Return a program that fails, without lines that are not needed for the failure."""
    tries = 0
    size = max(1, len(program.lines) // 2)
    while tries < MOST_TRIES:
        dropped = False
        for field in ("lines", "definitions"):
            start = 0
            while start < len(getattr(program, field)) and tries < MOST_TRIES:
                has = getattr(program, field)
                smaller = program._replace(**{field: has[:start] + has[start + size :]})
                tries += 1
                if fails(smaller):
                    program, dropped = smaller, True
                else:
                    start += size
        if not dropped and size == 1:
            break
        size = max(1, size // 2)
    return program
