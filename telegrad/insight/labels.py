"""Names of functions and workers as labels: few enough to count by."""

from __future__ import annotations

OTHER = "other"


class Names:
    """The first `most` names; all further ones are "other"."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[str] = set()

    def __getitem__(self, name: str) -> str:
        if name not in self._known:
            if len(self._known) >= self._most:
                return OTHER
            self._known.add(name)
        return name


def without_object(name: str) -> str:
    """The name of a function without what it is asked of: "to_here" of "to_here() of <RRef 1.2 on 'worker1'>"."""
    return name.partition("() of ")[0]
