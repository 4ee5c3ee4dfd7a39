"""Results of tests."""

from typing import NamedTuple

PASSED = "passed"
NOT_APPLICABLE = "not applicable"
FAILED = "failed"


class Result(NamedTuple):
    """The result of one test, `Suite.test_name`."""

    test: str
    outcome: str
    seconds: float
    why: str  # the last line of the error, or why the test is not applicable

    @property
    def suite(self) -> str:
        return self.test.split(".")[0]


def worse(one: Result, other: Result) -> Result:
    """Return the worse of two results of a test."""
    return max(one, other, key=lambda result: (PASSED, NOT_APPLICABLE, FAILED).index(result.outcome))
