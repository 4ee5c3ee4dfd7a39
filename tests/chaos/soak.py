"""Load without faults for a long time: memory must not grow after the warm-up.

Descriptors and threads come and go with the load. They are shown meanwhile, and compared at rest: the schedule ends
with a count of everything that is open, by its kind.
"""

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from tests.chaos.plan import Plan
from tests.chaos.schedule import Schedule, prepared
from tests.cluster import pause

WARM_UP = 0.4  # share of the time after which samples count
SAMPLES = 50
MORE_MEMORY = 0.02  # growth from the first half of the counted samples to the second, at most
SPARE_MEMORY = 16 << 20  # bytes that come and go anyway


class Sample(NamedTuple):
    """The resources of one worker at one moment."""

    memory: int  # resident bytes
    descriptors: int
    threads: int


def sample(pid: int) -> Sample:
    with open(f"/proc/{pid}/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return Sample(int(fields["VmRSS"].split()[0]) << 10, len(os.listdir(f"/proc/{pid}/fd")), int(fields["Threads"]))


def grown(samples: Sequence[Sample]) -> list[str]:
    """Describe growth of memory beyond the limit. The least of each half is compared: passing peaks are no leak."""
    half = len(samples) // 2
    before, after = (min(sample.memory for sample in part) for part in (samples[:half], samples[half:]))
    if after - before <= before * MORE_MEMORY + SPARE_MEMORY:
        return []
    return [f"memory grew from {before:,} to {after:,} bytes"]


def run(seconds: float, workers: int, seed: int, transport: str = "auto") -> int:
    """Print the resources of the workers over time; return 1 if anything grew or failed, else 0."""
    with prepared(Plan(seed, workers, transport, [])) as schedule:
        samples: dict[int, list[Sample]] = {rank: [] for rank in range(workers)}
        report = schedule.run(lambda: _watch(schedule, seconds, samples))
    for rank, all_ in samples.items():
        report.violations += [f"worker{rank}: {what}" for what in grown(all_[int(len(all_) * WARM_UP) :])]
    print(report, *report.violations, sep="\n")
    return bool(report.violations)


def _watch(schedule: Schedule, seconds: float, samples: dict[int, list[Sample]]) -> None:
    """Take samples while the load runs."""
    began = time.monotonic()
    for number in range(1, SAMPLES + 1):
        pause(began + seconds * number / SAMPLES - time.monotonic())
        for rank, pid in schedule.living().items():
            samples[rank].append(sample(pid))
        if number % (SAMPLES // 10) == 0:
            taken = [own[-1] for own in samples.values()]
            print(
                f"{time.monotonic() - began:6.0f} s  resident MB {[each.memory >> 20 for each in taken]}, "
                f"descriptors {[each.descriptors for each in taken]}, threads {[each.threads for each in taken]}",
                flush=True,
            )
