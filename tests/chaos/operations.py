"""The operations of clients: each one checks its result, and raises Wrong if that is not the expected one.

An operation ends with the right result, with an error of `telegrad.errors`, or with the remote function's own.
"""

import itertools
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

import telegrad.autograd as autograd
import telegrad.rpc as rpc
from telegrad.errors import PublisherLost, RRefError
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer
from telegrad.weights import Subscriber
from tests.chaos import functions
from tests.chaos.functions import Counter, Deliberate, pattern

BURST = 20
LARGE = 400_000  # elements of a large tensor, at most: 1.6 MB
MEDIUM = 50_000  # elements of a tensor that stays where it was made
HELD = 4  # references that a client keeps
STEPS = 3
OFTEN, SELDOM, IMPATIENCE = 0.9, 0.1, 0.3
INPUTS, HIDDEN = 6, 5

_tokens = itertools.count(1)


class Wrong(Exception):
    """A result is wrong."""


def expect(what: str, got: Any, wanted: Any) -> None:
    same = torch.equal(got, wanted) if isinstance(wanted, Tensor) else got == wanted
    if not same:
        raise Wrong(f"{what}: got {got!r:.200}, not {wanted!r:.200}")


class Client:
    """The operations of one thread on the workers of a group."""

    def __init__(self, me: int, others: Callable[[], list[str]], chance: random.Random, timeout: float) -> None:
        self._chance = chance
        self._others = others
        self._patience = timeout
        self._base = me << 40  # tokens differ on all workers
        self._held: list[tuple[int, int, Any]] = []  # token and size of the value, its reference
        self._shared: list[tuple[str, int, int, int]] = []  # (holder, token of the place, token of the value, its size)
        self._readers: dict[str, tuple[Subscriber, int]] = {}  # by worker, with the last version that was read
        self._counters: dict[str, tuple[Any, int, int]] = {}  # by worker: reference, calls begun, and answered

    def forget(self) -> None:
        """Drop all references."""
        self._held.clear()
        self._shared.clear()
        self._counters.clear()
        while self._readers:
            self._readers.popitem()[1][0].close()

    @property
    def _timeout(self) -> float:
        """Return the timeout of the next call: sometimes too short for a fault that lasts a while."""
        return self._patience if self._chance.random() < OFTEN else IMPATIENCE

    def _token(self) -> int:
        return self._base + next(_tokens)

    def _one(self) -> str:
        return self._chance.choice(self._others())

    def _two(self) -> tuple[str, str]:
        others = self._others()
        return self._chance.choice(others), self._chance.choice(others)

    # Calls

    def call(self) -> None:
        token = self._token()
        expect("mirror", rpc.rpc_sync(self._one(), functions.mirror, (token, "x"), timeout=self._timeout), (token, "x"))

    def call_large(self) -> None:
        token, size = self._token(), self._chance.randrange(LARGE)
        back, tensor = rpc.rpc_sync(self._one(), functions.mirror, (token, pattern(token, size)), timeout=self._timeout)
        expect("large mirror", back, token)
        expect("large mirror", tensor, pattern(token, size))

    def burst(self) -> None:
        to, tokens = self._one(), [self._token() for _ in range(BURST)]
        futures = [
            rpc.rpc_async(to, functions.mirror, (token, torch.tensor(token)), timeout=self._timeout) for token in tokens
        ]
        failed: Exception | None = None
        for token, future in zip(tokens, futures, strict=True):
            try:
                back, tensor = future.wait()
            except Exception as error:
                failed = error
            else:
                expect("burst", (back, tensor.item()), (token, token))
        if failed is not None:
            raise failed

    def nested(self) -> None:
        over, to = self._two()
        token = self._token()
        how = self._chance.choice((functions.relay, functions.relay_async, functions.relay_awaiting))
        back = rpc.rpc_sync(over, how, (to, token, "y", self._timeout), timeout=2 * self._patience)
        expect(how.__name__, back, (token + (how is functions.relay_async), "y"))

    def fail(self) -> None:
        token = self._token()
        with suppress(Deliberate):
            try:
                rpc.rpc_sync(self._one(), functions.fail, (token,), timeout=self._timeout)
            except Deliberate as error:
                expect("a remote error", error.args[0], token)
                raise
            raise Wrong("a function that fails gave a value")

    def hoard(self) -> None:
        with suppress(MemoryError):
            rpc.rpc_sync(self._one(), functions.hoard, timeout=self._timeout)
            raise Wrong("there was memory that cannot be")

    # References

    def create(self) -> None:
        token, size = self._token(), self._chance.randrange(1, MEDIUM)
        reference = rpc.remote(self._one(), functions.pattern, (token, size), timeout=self._timeout)
        reference.future().add_done_callback(lambda _: None)  # it may be dropped before an operation sees its failure
        self._held.append((token, size, reference))
        if len(self._held) > HELD:
            self._held.pop(self._chance.randrange(HELD))

    def visit(self) -> None:
        if not self._held:
            self.create()
        token, size, reference = at = self._chance.choice(self._held)
        try:
            expect("a fetch", reference.to_here(self._timeout), pattern(token, size))
            expect("a method by proxy", reference.rpc_sync(self._timeout).max(), pattern(token, size).max())
            expect("an operator", (reference + 1).to_here(self._timeout), pattern(token, size) + 1)
        except Exception:
            self._held.remove(at)
            raise

    def share(self) -> None:
        """Let a third worker keep a reference, or fetch the value of one that it keeps."""
        if self._held and len(self._shared) < HELD:
            token, size, reference = self._chance.choice(self._held)
            holder, place = self._one(), self._token()
            rpc.rpc_sync(holder, functions.put, (place, reference), timeout=self._timeout)
            self._shared.append((holder, place, token, size))
        elif self._shared:
            holder, place, token, size = self._shared.pop()
            value = rpc.rpc_sync(holder, functions.fetch, (place, self._timeout), timeout=2 * self._patience)
            expect("a shared reference", value, pattern(token, size))
        else:
            self.create()

    def count(self) -> None:
        """Check that no call runs twice, and that each answered call has run."""
        to = self._one()
        if to not in self._counters:
            made = rpc.remote(to, Counter, timeout=self._timeout)
            made.future().wait()
            self._counters[to] = made, 0, 0
        counter, begun, answered = self._counters.pop(to)
        begun += 1
        try:
            value = counter.rpc_sync(self._timeout).add()
        except RRefError:  # the counter has gone, and will not come back
            raise
        except Exception:
            self._counters[to] = counter, begun, answered
            raise
        answered += 1
        if not answered <= value <= begun:
            raise Wrong(f"a counter that was called {begun} times, {answered} with an answer, stands at {value}")
        self._counters[to] = counter, begun, answered

    def read_weights(self) -> None:
        """Check that a version is whole, and no older than one that was read before."""
        to = self._one()
        published = rpc.rpc_sync(to, functions.publish, timeout=self._timeout)
        reader, last = self._readers.pop(to, (None, 0))
        if reader is None:
            reader = Subscriber(to, "weights", self._timeout)
        try:
            version = reader.at_least(published, self._timeout) if self._chance.random() < OFTEN else reader.newest()
        except PublisherLost:  # the publisher may come back, and others may have its name then
            reader.close()
            raise
        except Exception:
            self._readers[to] = reader, last
            raise
        self._readers[to] = reader, version.number
        for name, wanted in functions.weights(version.number).items():
            expect(f"{name} of version {version.number}", version.state[name], wanted)
        if version.number < last:
            raise Wrong(f"version {version.number} was read after version {last}")
        if self._chance.random() < SELDOM:
            self._readers.pop(to)[0].close()

    # Backward passes, training

    def backward(self) -> None:
        over, to = self._two()
        x = torch.rand(8, requires_grad=True)
        mode = self._chance.choice(("smart", "fast"))
        with autograd.context() as context:
            cubed = rpc.rpc_sync(over, functions.cube_by, (to, x, self._timeout), timeout=2 * self._patience)
            autograd.backward(context, cubed.sum(), mode=mode, timeout=self._timeout)
            gradients = autograd.get_gradients(context)
        expect("how many gradients", len(gradients), 1)
        if not torch.allclose(gradients[x], 3 * x.detach() ** 2):
            raise Wrong(f"a gradient: {gradients[x]} at {x}")

    def train(self) -> None:
        """Compare a few steps of a model on two workers with the same model on this one."""
        seed = self._chance.randrange(1 << 30)
        shapes = (seed, INPUTS, HIDDEN), (seed + 1, HIDDEN, 1)
        model = nn.Sequential(
            *(RemoteModule(on, functions.make_layer, shape) for on, shape in zip(self._two(), shapes, strict=True))
        )
        twin = nn.Sequential(*(functions.make_layer(*shape) for shape in shapes))
        optimizer = DistributedOptimizer.for_module(torch.optim.SGD, model, lr=0.1, momentum=0.9)
        twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
        for _ in range(STEPS):
            inputs = torch.rand(4, INPUTS)
            with autograd.context() as context:
                loss = model(inputs).pow(2).sum()
                autograd.backward(context, loss, timeout=self._timeout)
                optimizer.step(context)
            twin_optimizer.zero_grad()
            twin_loss = twin(inputs).pow(2).sum()
            twin_loss.backward()
            twin_optimizer.step()
            if not torch.allclose(loss, twin_loss, rtol=1e-4):
                raise Wrong(f"a loss of {loss.item()} where alone it is {twin_loss.item()}")
        for part, own in zip(model, twin, strict=True):
            trained = part.state_dict()
            for name, wanted in own.state_dict().items():
                if not torch.allclose(trained[name], wanted, rtol=1e-4, atol=1e-6):
                    raise Wrong(f"parameter {name} is {trained[name]}, alone {wanted}")


OPERATIONS: tuple[tuple[Callable[[Client], None], int], ...] = (
    (Client.call, 6),
    (Client.call_large, 3),
    (Client.burst, 2),
    (Client.nested, 3),
    (Client.fail, 1),
    (Client.hoard, 1),
    (Client.create, 2),
    (Client.visit, 3),
    (Client.share, 4),
    (Client.count, 3),
    (Client.read_weights, 3),
    (Client.backward, 4),
    (Client.train, 1),
)
"""Each with how often it is chosen."""
