"""Members of groups for tests, which no process stands behind."""

from telegrad._core.membership.members import Member


def member(name: str = "", rank: int = -1, life: str = "", port: int = 1, role: str = "") -> Member:
    return Member(name, rank, life or f"life of {name}", "program", "host", "", ("127.0.0.1", port), role=role)


def alive(_: Member) -> bool:
    return True
