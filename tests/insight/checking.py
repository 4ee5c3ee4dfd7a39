"""Check that Perfetto can show a trace, with a strict reading of the format of Chrome's traces."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

KNOWN = {"X", "M", "i", "s", "t", "f", "C", "b", "e"}


def check(file: Mapping[str, Any]) -> None:
    """Raise AssertionError if a trace is invalid."""
    events = file["traceEvents"]
    threads: set[tuple[int, int]] = set()
    names: dict[int, str] = {}
    for event in events:
        assert event["ph"] in KNOWN, event
        assert isinstance(event["pid"], int), event
        assert isinstance(event["tid"], int), event
        if event["ph"] == "M":
            if event["name"] == "process_name":
                assert event["pid"] not in names, f"two processes have the number {event['pid']}"
                names[event["pid"]] = event["args"]["name"]
            if event["name"] == "thread_name":
                assert (event["pid"], event["tid"]) not in threads, f"two names for thread {event['tid']}"
                threads.add((event["pid"], event["tid"]))
        else:
            assert event["ts"] == event["ts"] >= 0, event
            assert event["pid"] in names, f"nobody has the number {event['pid']}"
    assert len(set(names.values())) == len(names)
    assert len({tid for _, tid in threads}) == len(threads), "a thread's number stands for two"
    slices = defaultdict(list)
    for event in events:
        if event["ph"] != "M":
            assert (event["pid"], event["tid"]) in threads, f"on a thread without a name: {event}"
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            begun = nanoseconds(event["ts"])
            slices[event["pid"], event["tid"]].append((begun, begun + nanoseconds(event["dur"])))
    for own in slices.values():
        check_nested(own)
    check_arrows([event for event in events if event["ph"] in "stf"], slices)


def check_nested(own: list[tuple[int, int]]) -> None:
    """Assert that slices of a thread are nested or disjoint."""
    stack: list[tuple[int, int]] = []
    for begun, ended in sorted(own, key=lambda each: (each[0], -each[1])):
        while stack and stack[-1][1] <= begun:
            stack.pop()
        assert not stack or ended <= stack[-1][1], f"{begun, ended} overlaps {stack[-1]}"
        stack.append((begun, ended))


def check_arrows(events: list[dict[str, Any]], slices: Mapping[tuple[int, int], list[tuple[int, int]]]) -> None:
    """Assert that each arrow begins and ends once, in slices, and not backwards in time."""
    ends = defaultdict(list)
    for event in events:
        ends[event["cat"], event["id"]].append(event)
        if event["cat"] == "telegrad":
            at, own = nanoseconds(event["ts"]), slices[event["pid"], event["tid"]]
            assert any(begun <= at < ended for begun, ended in own), f"not in a slice: {event}"
    numbers = [number for _, number in ends]
    assert len(set(numbers)) == len(numbers), "two arrows have one number"
    for pair in ends.values():
        assert [event["ph"] for event in pair] == ["s", "f"], pair
        start, end = pair
        assert start["name"] == end["name"]
        assert start["ts"] <= end["ts"], f"back in time: {pair}"
        assert end["bp"] == "e"


def nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1000)
