"""The heap is trimmed when the process has grown by much, and seldom."""

import errno

import pytest

from telegrad._core.processes import GROWN, LOOK, Heap, own_bytes, trimmer

MB = 1 << 20


class World:
    """A process whose size the test sets, and which has the size `used` after a trim."""

    def __init__(self) -> None:
        self.size, self.used, self.trims, self.now = 200 * MB, 200 * MB, 0, 0.0
        self.heap = Heap(self.trim, lambda: self.size)

    def trim(self, _: int) -> int:
        self.trims += 1
        self.size = self.used
        return 1

    def look(self, size: int) -> int:
        self.now += LOOK
        self.size = size
        self.heap.tick(self.now)
        return self.trims


@pytest.fixture
def world() -> World:
    made = World()
    made.look(made.size)
    return made


@pytest.mark.parametrize(
    ("used", "looks"),
    [
        (200, [(200 * MB + GROWN, 0), (200 * MB, 0)]),
        (200, [(201 * MB + GROWN, 1), (190 * MB + GROWN, 1), (201 * MB + GROWN, 2)]),  # growth counts from there
        (4000, [(4000 * MB, 1), (4000 * MB, 1)]),
        (200, [(300 * MB, 0), (299 * MB, 1), (200 * MB, 1), (200 * MB, 1)]),  # an idle process is trimmed for less
        (200, [(100 * MB, 0), (101 * MB + GROWN, 1)]),  # growth counts from the smallest size
    ],
    ids=["no growth", "growth", "growth in use", "rest", "least"],
)
def test_a_process_that_has_grown_is_trimmed(world: World, used: int, looks: list[tuple[int, int]]) -> None:
    world.used = used * MB
    assert [world.look(size) for size, _ in looks] == [trims for _, trims in looks]


def test_a_size_that_cannot_be_read_is_read_later() -> None:
    sizes: list[int | Exception] = [200 * MB, OSError(errno.EMFILE, "Too many open files"), 201 * MB + GROWN, 200 * MB]

    def size() -> int:
        found = sizes.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    trims: list[int] = []

    def trim(_: int) -> int:
        trims.append(len(sizes))
        return 1

    heap = Heap(trim, size)
    for now in (LOOK, 2 * LOOK, 3 * LOOK):
        heap.tick(now)
    assert trims == [1]


def test_the_size_is_read_seldom(world: World) -> None:
    world.size = 300 * MB + GROWN
    world.heap.tick(world.now + LOOK / 2)
    assert world.trims == 0
    world.heap.tick(world.now + LOOK)
    assert world.trims == 1


def test_the_heap_of_another_allocator_is_not_trimmed() -> None:
    Heap(None, lambda: pytest.fail("it looks at the size")).tick(LOOK)


@pytest.mark.skipif(trimmer() is None, reason="needs glibc")
def test_the_real_heap_is_smaller_after_a_trim() -> None:
    """The last of the blocks of 64 KB stays alive, so glibc keeps the 64 MB before it until the trim."""
    heap = Heap()
    heap.tick(0.0)
    before = own_bytes()
    pieces = [bytearray(1 << 16) for _ in range(1 << 10)]
    last = bytearray(1 << 16)
    for piece in pieces:
        piece[::4096] = b"x" * 16
    del pieces, piece
    trim = trimmer()
    assert trim is not None
    trim(0)
    assert own_bytes() - before < 16 * MB
    assert len(last) == 1 << 16
