"""Finds out if a worker is dead whose connection broke: it may be alive."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterator
from errno import ECONNREFUSED, EINPROGRESS, EWOULDBLOCK
from time import monotonic
from typing import Any, NamedTuple

from telegrad._core.membership.members import Member
from telegrad._core.sockets import family_of, socket_address
from telegrad.errors import PeerError, PeerLost, PeerSilent, PeerUnreachable

PATIENCE = 2.0  # seconds without an answer of its host after which a worker is considered dead
# A probe without an answer is replaced by another one: kernels send a lost packet again only after 1 s, then after 3 s.
AGAIN = 0.5  # seconds for one probe
LOOK = 0.25  # the longest wait for answers in seconds, because it delays new suspects
REMEMBERED = 1024  # workers that are not members of which something is stored
PROBE_DELAYS = (0.0, 0.25, 1.0, 4.0)  # seconds before each answered probe: a worker that answers all is alive
# Any other error, such as an unreachable network, is no answer of the worker's host, and counts as silence.
_ANSWERS: dict[int | None, bool] = {0: True, ECONNREFUSED: False}
# Needs no descriptor, unlike epoll, because the process may have none left. Windows only has `select`.
_Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)


class Suspect(NamedTuple):
    """A worker that may be dead, the begin of the suspicion, the time of the next probe, and the number of answers."""

    who: Member
    why: PeerError  # the cause of the suspicion
    begun: float
    due: float
    answered: int = 0

    def after(self, answer: bool | None, now: float) -> Suspect | bool:
        """Return True if the worker is dead and False if it is alive, given an answer; otherwise the next suspect."""
        if answer is None:
            # This worker itself did not run, for example after SIGSTOP: that is no silence of the other.
            if now > self.due + PATIENCE:
                return self._replace(begun=now, due=now)
            return now >= self.begun + PATIENCE or self._replace(due=self.due + AGAIN)
        answered = self.answered + 1
        if not answer or answered == len(PROBE_DELAYS):
            return not answer
        return self._replace(answered=answered, due=now + PROBE_DELAYS[answered])

    def evidence(self, answer: bool | None) -> str:
        """Return what shows that the worker is lost, given the last answer."""
        if isinstance(self.why, PeerSilent):  # was not probed, see `Probes.begin`
            return "it gives no sign of life"
        if answer is None:
            return "its host does not answer"
        return "no process listens at its address: it died, or its program ended without rpc.shutdown()"

    def anew(self, now: float) -> Suspect:
        """Return the suspect of a worker that was reached since this one began: it is probed, also if it was silent."""
        why = PeerLost(str(self.why)) if isinstance(self.why, PeerSilent) else self.why
        return Suspect(self.who, why, now, now)


class Probes:
    """Concurrent connection attempts to suspected workers: a silent host does not delay the others."""

    def __init__(self) -> None:
        self._begun: dict[socket.socket, tuple[Suspect, float]] = {}  # and when each times out
        self._answers: list[tuple[Suspect, bool | None]] = []

    def begin(self, suspect: Suspect) -> None:
        """Start a probe of a worker, without waiting for the answer."""
        if isinstance(suspect.why, PeerSilent):  # the kernel would answer although the process is stopped
            self._answers.append((suspect, False))
            return
        try:
            sock = socket.socket(family_of(suspect.who.tcp[0]))
            sock.setblocking(False)
            code = sock.connect_ex(socket_address(*suspect.who.tcp))
        except OSError:  # such as no free descriptor, which says nothing about the worker
            self._answers.append((suspect, True))
            return
        self._begun[sock] = suspect, monotonic() + AGAIN
        if code not in (EINPROGRESS, EWOULDBLOCK):
            self._end(sock, code)

    def answers(self) -> Iterator[tuple[Suspect, bool | None]]:
        """Yield the answers: True if the worker listens, False if the port is refused; None for a silent host."""
        if self._begun:
            soon = min(LOOK, *(ends - monotonic() for _, ends in self._begun.values()))
            with _Selector() as selector:
                for sock in self._begun:
                    selector.register(sock, selectors.EVENT_WRITE, sock)
                for key, _ in selector.select(0.0 if self._answers else max(0.0, soon)):
                    self._end(key.data, key.data.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        for sock, (_, ends) in list(self._begun.items()):
            if ends <= monotonic():
                self._end(sock, None)
        while self._answers:
            yield self._answers.pop()

    def close(self) -> None:
        for sock in self._begun:
            sock.close()

    def __bool__(self) -> bool:
        return bool(self._begun or self._answers)

    def _end(self, sock: socket.socket, code: int | None) -> None:
        suspect, _ = self._begun.pop(sock)
        sock.close()
        self._answers.append((suspect, _ANSWERS.get(code)))


def is_broken(reason: PeerError) -> bool:
    """Return True if no connection could be made to a worker, but none was refused."""
    return isinstance(reason, PeerUnreachable) and not isinstance(reason.__cause__, ConnectionRefusedError)


def remember(table: dict[str, Any], incarnation: str, told: Any) -> None:
    """Store a fact about a worker that is not a member; only the newest are kept."""
    table[incarnation] = told
    if len(table) > REMEMBERED:
        del table[next(iter(table))]
