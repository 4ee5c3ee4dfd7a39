"""Results of schedules: counted, added up, and shown as a table."""

from collections import Counter
from dataclasses import dataclass, field

from tests.chaos.load import Tally


@dataclass
class Report:
    """The results of one schedule, or of many."""

    schedules: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    operations: int = 0
    by_kind: Counter[str] = field(default_factory=Counter)  # of clients that lived long enough to report
    errors: Counter[str] = field(default_factory=Counter)
    longest: float = 0.0
    squeezed_to_death: int = 0
    violations: list[str] = field(default_factory=list)

    def take(self, tally: Tally) -> None:
        self.by_kind += tally.operations
        self.errors += tally.errors
        self.longest = max(self.longest, tally.longest)

    def add(self, other: "Report") -> None:
        self.schedules += other.schedules
        self.faults += other.faults
        self.operations += other.operations
        self.by_kind += other.by_kind
        self.errors += other.errors
        self.longest = max(self.longest, other.longest)
        self.squeezed_to_death += other.squeezed_to_death
        self.violations += other.violations

    def __str__(self) -> str:
        rows = [
            ("schedules", self.schedules),
            ("faults", self.faults.total()),
            *_indented(self.faults),
            ("operations", self.operations),
            *_indented(self.by_kind),
            ("ended by an error", self.errors.total()),
            *_indented(self.errors),
            ("longest operation, s", f"{self.longest:.1f}"),
            ("died of lack of memory", self.squeezed_to_death),
            ("violations", len(self.violations)),
        ]
        return "\n".join(f"{name:<32}{value:>10}" for name, value in rows)


def _indented(counts: Counter[str]) -> list[tuple[str, int]]:
    return [(f"    {name}", count) for name, count in counts.most_common()]
