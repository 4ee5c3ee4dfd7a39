"""The workers that a group consists of: a value that can be sent, and is evaluated where it is used. Pure.

A selection that begins with all workers or with a role is live: it changes as workers join and leave. So does each
selection that is made from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from telegrad.ext.calls import user_name
from telegrad.ext.workers import WorkerInfo, listed

ALL, ROLE, NAMED, SLICE, FILTER, MINUS, PLUS = "all", "role", "named", "slice", "filter", "minus", "plus"


class Selection(NamedTuple):
    """An operation and its arguments, which may be other selections. Its text identifies it."""

    op: str
    args: tuple[Any, ...] = ()

    @property
    def live(self) -> bool:
        """Return True if the selection depends on the current workers."""
        return self.op in (ALL, ROLE) or any(each.live for each in self.args if isinstance(each, Selection))

    def pick(self, there: Sequence[WorkerInfo]) -> list[WorkerInfo]:
        """Return the selected workers, given the present ones by rank. Named workers need not be present."""
        args = self.args
        inner = [each.pick(there) for each in args if isinstance(each, Selection)]
        match self.op:
            case "all":
                return list(there)
            case "role":
                return [worker for worker in there if worker.role == args[0]]
            case "named":
                return list(args)
            case "slice":
                return inner[0][slice(*args[1:])]
            case "filter":
                return [worker for worker in inner[0] if args[1](worker)]
            case "minus":
                others = {worker.name for worker in inner[1]}
                return [worker for worker in inner[0] if worker.name not in others]
        return list({worker.name: worker for part in inner for worker in part}.values())

    def __str__(self) -> str:
        args = self.args
        match self.op:
            case "all":
                return "everybody"
            case "role":
                return f"role {args[0]!r}"
            case "named":
                return listed([worker.name for worker in args])
            case "slice":
                ends = ["" if end is None else str(end) for end in args[1:]]
                return f"{args[0]} [{':'.join(ends if ends[2] else ends[:2])}]"
            case "filter":
                return f"{args[0]} where {user_name(args[1])}"
        return f"{args[0]} {'without' if self.op == MINUS else 'and'} {args[1]}"
