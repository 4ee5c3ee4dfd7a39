"""Tests that mean nothing here: each reaches into something that Telegrad does not have on purpose.

A test that is merely hard to pass has no place here. Tests that need CUDA skip themselves where there is none.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

NOT_APPLICABLE: dict[str, tuple[str, ...]] = {
    "looks into the C++ of torch's agent": (),
    "calls RPC operators from TorchScript code": (),
    "tests torch's fault injector itself": (),
}


def reason(test: str) -> str | None:
    """Why the test is not applicable, if it is not."""
    return next(
        (why for why, patterns in NOT_APPLICABLE.items() if any(fnmatchcase(test, pattern) for pattern in patterns)),
        None,
    )


def stale(tests: Iterable[str]) -> list[str]:
    """The patterns that match none of all the tests."""
    names = list(tests)
    patterns = [pattern for group in NOT_APPLICABLE.values() for pattern in group]
    return [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]
