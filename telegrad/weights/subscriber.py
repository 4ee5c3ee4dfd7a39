"""An actor's side: read versions of weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any

from torch import nn

from telegrad.errors import CallTimeout, PublisherLost, UsageError
from telegrad.ext.arguments import checks
from telegrad.ext.calls import DEFAULT, check_timeout, limit_of, not_compiled, target
from telegrad.ext.processes import forks
from telegrad.ext.texts import Wait, report_in_background
from telegrad.ext.workers import WorkerInfo, current
from telegrad.weights.subscription import SubscriberEndpoint
from telegrad.weights.weight_service import TICK, WeightsService
from telegrad.weights.weight_version import Version, check_module

if TYPE_CHECKING:
    from typing import Self


class Subscriber:
    """Reads the versions of a `Publisher` on this or another worker; `for version in subscriber` yields each.

    Args:
        worker: the worker of the publisher.
        name: the name of the publisher. If it does not exist yet, the constructor waits for it.
        timeout: seconds for this wait; 0 for no limit, default: the timeout in the options.

    Raises:
        UnknownPublisher: that worker has no publisher of that name; the message lists those that it has.
        UnknownWorker: there is no such worker.

    Example:
        >>> publisher = telegrad.weights.Publisher("policy", nn.Linear(4, 2))
        >>> number = publisher.publish()
        >>> subscriber = telegrad.weights.Subscriber("driver", "policy")
        >>> actor = nn.Linear(4, 2)
        >>> subscriber.newest().load_into(actor)
        >>> subscriber.version, subscriber.behind
        (1, 0)
        >>> subscriber.close()
        >>> publisher.close()
    """

    def __init__(self, worker: str | int | WorkerInfo, name: str, timeout: float = DEFAULT) -> None:
        here = current.here()
        self.name: str = checks.text("name", name, "the name of what is published")
        self._agent = here.agent
        limit = self._limit(timeout)
        to = self._agent.identify(target(worker, "worker"))
        self.worker: str = to.name
        service = here.attached(WeightsService)
        with report_in_background(Wait("Subscriber", lambda: self._story("wait for the publisher"), lambda: [to.name])):
            self._endpoint = SubscriberEndpoint(service, name, to, limit)
        self._end = weakref.finalize(self, service.close_later, self._endpoint)
        self._end.atexit = False
        self._taken: Version | None = None
        self._every = False

    # Reading versions

    @not_compiled
    def newest(self, timeout: float = DEFAULT) -> Version:
        """Return the newest version on this host. Wait only if there is none.

        After the publisher has gone, this still returns the last version.

        Args:
            timeout: seconds; 0 for no limit, default: the timeout in the options.

        Returns:
            A `Version`.

        Raises:
            PublisherLost: the publisher has gone, and there is no version here.
            CallTimeout: no version arrived in time.
        """
        check_timeout(timeout)
        endpoint = self._endpoint
        endpoint.ask_for_newer()
        found = endpoint.find(1)
        return self._take(found) if found is not None else self._obtain("newest", lambda: 1, False, timeout)

    @not_compiled
    def at_least(self, number: int, timeout: float = DEFAULT) -> Version:
        """Wait for that version or a later one. Return the newest.

        Args:
            number: the lowest acceptable number.
            timeout: seconds; 0 for no limit, default: the timeout in the options.

        Returns:
            A `Version`.

        Raises:
            PublisherLost: the publisher has gone, so the version cannot arrive.
            CallTimeout: the version did not arrive in time.
        """
        checks.count("number", number, 0, what="the number of a version")
        check_timeout(timeout)
        found = self._endpoint.find(number)
        return self._take(found) if found is not None else self._obtain("at_least", lambda: number, False, timeout)

    @not_compiled
    def refresh(self, max_behind: int = 0, timeout: float = DEFAULT) -> Version:
        """Return a version that is not too old.

        This worker knows all versions that a publisher published before it called this worker.

        Args:
            max_behind: how many versions the result may be behind the newest published one that is known here.
            timeout: seconds; 0 for no limit, default: the timeout in the options.

        Returns:
            A `Version`.

        Raises:
            PublisherLost: the publisher has gone, so the newest version is unknown.
            CallTimeout: no such version arrived in time.
        """
        checks.count("max_behind", max_behind, 0, what="a number of versions")
        check_timeout(timeout)
        self._endpoint.check()
        endpoint = self._endpoint
        limit = self._limit(timeout)
        until = monotonic() + limit if limit else float("inf")
        while not self._agent.handle_notices(min(until - monotonic(), TICK)):
            endpoint.check()
            if monotonic() >= until:
                raise CallTimeout(
                    f"the newest version of {self.name!r} was not known within {limit:g} s, because this worker has "
                    "not handled all messages that arrived"
                )
        number = max(1, endpoint.known - max_behind)
        newest_here = endpoint.machine.store.newest_complete()
        if self._taken is not None and self._taken.number >= max(number, newest_here):
            return self._taken
        return self.at_least(number, timeout)

    def __iter__(self) -> Iterator[Version]:
        """Iterate over every version from now on, in order, until the publisher closes.

        The publisher keeps the versions that this reader has not reached yet, up to a bound (`keep`). A reader that is
        further behind continues with the oldest kept one, and skips numbers.

        Raises:
            PublisherLost: the publisher was lost.
        """
        self._every = True
        begun = self._taken.number if self._taken is not None else self._endpoint.known
        self._endpoint.taken(begun, True)
        try:
            while True:
                last = max(begun, self.version)
                try:
                    yield self._obtain("iteration", lambda last=last: self._endpoint.next_after(last), True, 0)  # type: ignore[misc]
                except PublisherLost:
                    if self._endpoint.over:
                        return
                    raise
        finally:
            self._every = False
            self._endpoint.taken(self.version, False)

    def _after(self, number: int, timeout: float) -> Version:
        """Return the version after that one, or the oldest later one that is kept.

        From now on, all new versions are kept for this reader.
        """
        self._every = True
        return self._obtain("after", lambda: self._endpoint.next_after(number), True, timeout)

    @property
    def version(self) -> int:
        """The number of the version that was read last; 0 before the first."""
        return self._taken.number if self._taken is not None else 0

    @property
    def behind(self) -> int:
        """The number of versions published since the one that was read last."""
        return max(0, self._endpoint.known - self.version)

    # Loading

    def load_into(self, module: nn.Module | Mapping[str, Any]) -> None:
        """Copy the version that was read last, or else the newest, into a module; see `Version.load_into`.

        Args:
            module: a module, or its state dict.
        """
        check_module(module)
        (self._taken or self.newest()).load_into(module)

    def swap_into(self, module: nn.Module) -> None:
        """Make a module's tensors use the memory of the version that was read last, or else the newest.

        Args:
            module: a module that only reads its tensors.
        """
        if not isinstance(module, nn.Module):
            checks.raise_invalid("module", "a module", module)
        (self._taken or self.newest()).swap_into(module)

    # Implementation

    def _take(self, version: Version) -> Version:
        if self._taken is None or version.number != self._taken.number:
            self._taken = version
            self._endpoint.taken(version.number, self._every)
        return self._taken

    def _obtain(self, what: str, least: Callable[[], int], exact: bool, timeout: float) -> Version:
        endpoint, limit = self._endpoint, self._limit(timeout)

        def look() -> Version | None:
            if not self._end.alive:
                raise UsageError(f"the subscriber to {self.name!r} was closed: create a new one")
            version = endpoint.find(least(), exact)
            if version is None:
                endpoint.check()
                endpoint.want(least(), exact)
            return version

        def text() -> str:
            return f"Subscriber.{what}: {self._story(f'wait for version {least()}')}; the newest is {endpoint.known}"

        wait = Wait(f"Subscriber.{what}", text, lambda: [self.worker], worker=self._agent.name)
        found = endpoint.wait_until(look, wait, limit)
        if found is None:
            hint = "" if endpoint.known else ". Nothing is published yet: call publisher.publish() there"
            raise CallTimeout(
                f"version {least()} of {self.name!r} on worker {self.worker!r} did not arrive within {limit:g} s; the "
                f"newest known version is {endpoint.known}, the last one read {self.version}{hint}"
            )
        return self._take(found)

    def _limit(self, timeout: float) -> float:
        return limit_of(timeout, self._agent.timeout)

    def _story(self, doing: str) -> str:
        return f"{doing} of {self.name!r} on worker {self.worker!r}"

    @not_compiled
    def close(self) -> None:
        """End reading. Versions that were read stay valid."""
        if self._end.detach() and not forks.is_inherited(self._agent):
            self._endpoint.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"at version {self.version} of {self._endpoint.known}" if self._end.alive else "closed"
        return f"<Subscriber to {self.name!r} on {self.worker!r}: {state}>"
