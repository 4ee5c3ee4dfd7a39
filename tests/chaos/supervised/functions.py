"""The functions that run on workers that are called: each one reports in which life it runs."""

from collections.abc import Iterator
from pathlib import Path

from tests.chaos.supervised.record import Life, Record

record: Record  # the record of this process
table_of: Life | None = None  # the last life that made the table


def begin(name: str, folder: Path) -> Record:
    global record
    record = Record(folder, name)
    return record


def here() -> Life:
    return record.life


def run(key: str) -> Life:
    """Note that this call has run."""
    record.note("ran", key)
    return record.life


def count(items: int) -> Iterator[tuple[Life, int]]:
    for number in range(items):
        yield record.life, number


class Token:
    """A value that belongs to one life."""

    def __init__(self) -> None:
        self.life = record.life

    def of(self) -> Life:
        if self.life != record.life:
            record.note("wrong", f"a value of {self.life} was reached in {record.life}")
        return self.life


def make_table() -> Token:
    global table_of
    table_of = record.life
    record.note("made")
    return Token()
