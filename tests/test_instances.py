import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from telegrad._core.processes import instances
from tests.cluster import in_background


class Base: ...


class Derived(Base):
    __slots__ = ("part",)


@pytest.fixture
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_only_instances_of_a_class_and_its_subclasses_are_found() -> None:
    kept = [Base(), Derived(), Base()]
    assert set(map(id, instances(Base))) == set(map(id, kept))
    assert instances(Derived) == [kept[1]]
    assert instances(Iterator) == []


def fail_in_another_thread(search: Callable[[], object]) -> list[SystemError]:
    """Search while another thread fills tuples; return the errors of that thread."""
    errors: list[SystemError] = []
    done = threading.Event()

    def fill() -> None:
        while not done.is_set():
            try:
                assert len(tuple(number for number in range(40))) == 40
            except SystemError as error:
                errors.append(error)
                return

    with in_background(fill):
        for _ in range(30):
            search()
        done.set()
    return errors


@pytest.mark.nightly
@pytest.mark.usefixtures("quick_switches")
def test_a_search_does_not_disturb_tuples_of_other_threads() -> None:
    assert not fail_in_another_thread(lambda: instances(Base))
