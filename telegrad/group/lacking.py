"""Who is not there, of those that are waited for."""

from __future__ import annotations

from collections.abc import Collection


def missing(names: Collection[str], wanted: int | Collection[str]) -> list[str]:
    """Of those that are wanted by name."""
    return [] if isinstance(wanted, int) else [name for name in wanted if name not in names]


def lack(names: Collection[str], wanted: int | Collection[str], role: str = "") -> str:
    """What is not as wanted, or ""."""
    there = ", ".join(sorted(names))
    if isinstance(wanted, int):
        of_role = f" of role {role!r}" if role else ""
        few = f"there are {len(names)} workers{of_role}, not {wanted}: {there or 'none'}"
        return "" if len(names) >= wanted else few
    absent = ", ".join(map(repr, missing(names, wanted)))
    return f"{absent} not there; there are {there}" if absent else ""
