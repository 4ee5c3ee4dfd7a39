"""Figures of a record for people: the duration of each reaction."""

from tests.partitions.checker import Record, calls_after, gaps_of_calls
from tests.partitions.record import SAW


def line(record: Record, name: str) -> str:
    """Return the figures of a case in one line."""
    healed = record.healed
    told = [at - healed for at in record.told.values()]
    back = [
        min(event.at for event in found) - healed
        for worker in record.final.members
        for other in record.final.members - {worker}
        if (found := calls_after(record, worker, other))
    ]
    longest = max((gap for _, _, gap, _ in gaps_of_calls(record)), default=0.0)
    evidence = sum(fault.evidence for fault in record.faults)
    return (
        f"{name}: {evidence} packets or processes hit; longest gap of connected workers {longest:.2f} s; "
        f"dropped after {_seconds(_dropped(record))}; told {_seconds(told)} after healing; "
        f"calls again {_seconds(back)} after healing; paused at most "
        f"{max(map(record.longest_pause, record.workers)):.2f} s; no answer of the directory for at most "
        f"{record.longest_wait():.2f} s; members at the end {len(record.final.members)}"
    )


def _dropped(record: Record) -> list[float]:
    """Return after how many seconds each worker of the directory's side first saw none of the unreachable ones."""
    found = []
    for fault in record.faults:
        for worker in set(record.workers) - record.away if fault.away else ():
            times = [
                event.began - fault.begins
                for event in record.of(SAW, worker)
                if event.began > fault.begins and not fault.away & set(event.seen)
            ]
            found += [min(times)] if times else []
    return found


def _seconds(values: list[float]) -> str:
    return f"{min(values):.1f} to {max(values):.1f} s ({len(values)})" if values else "-"
