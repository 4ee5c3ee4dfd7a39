"""A weight scheme for TorchRL's collectors, which replaces `RPCWeightSyncScheme`.

The trainer publishes a version, and makes each collector read it. So weights leave the trainer once per host, whatever
the number of collectors there, and need no process group. Collectors must be workers of the group: with TorchRL's own
`RPCCollector` that is a program run as `python -m telegrad train.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from telegrad.errors import CallTimeout, UsageError
from telegrad.ext.calls import Future, known_as
from telegrad.rpc import RRef, get_worker_info, rpc_async
from telegrad.weights.publisher import Publisher
from telegrad.weights.subscriber import Subscriber

try:
    from tensordict import TensorDict, TensorDictBase
    from torchrl.weight_update import WeightSyncScheme
except ImportError as error:
    raise ImportError("this scheme needs TorchRL: pip install 'telegrad[torchrl]'") from error

__all__ = ["TelegradWeightSyncScheme"]

NO_LIMIT = 0

_publishers: dict[str, str] = {}  # on the workers of collectors: the publishing worker of each feed


class TelegradWeightSyncScheme(WeightSyncScheme):
    """Makes collectors read versions of the trainer: `weight_sync_schemes={"policy": TelegradWeightSyncScheme()}`.

    Args:
        strategy: as for TorchRL's other schemes.
        **publishing: arguments of `Publisher` besides its name and source, such as `dtype=torch.bfloat16`.
    """

    def __init__(self, strategy: str = "tensordict", **publishing: Any) -> None:
        super().__init__(strategy)
        self._feed = f"torchrl-{uuid4().hex}"  # is sent to the collectors
        self._publishing = publishing
        self._publisher: Publisher | None = None
        self._state: dict[str, Any] = {}  # the next version's content

    # Trainer

    def _init_on_sender_impl(self, *, model_id: str, context: Any, num_workers: int, **_: Any) -> None:
        if context is None or getattr(context, "collector_rrefs", None) is None:
            raise UsageError(
                "TelegradWeightSyncScheme is for collectors that have references to remote ones "
                "(context.collector_rrefs), such as RPCCollector"
            )
        self.model_id = model_id
        self.context = context
        self._publisher = Publisher(self._feed, self._state, **self._publishing)
        for number in range(num_workers):
            transport = self.create_transport(collector=context.collector_rrefs[number])
            self._register_worker_sender(worker_idx=number, transport=transport)

    def create_transport(self, *, collector: RRef[Any], **_: Any) -> Signal:
        return Signal(self._feed, collector)

    def send(self, weights: Any = None, worker_ids: int | list[int] | None = None) -> None:
        """Publish the weights, and return once the collectors (`None`: all) have applied them."""
        if self._publisher is None:
            raise UsageError("the scheme can send only after its collector has started and before it is shut down")
        prepared = self.prepare_weights(weights, self._model_id, self._strategy, self.context)
        self._state.clear()
        self._state.update(_flat(prepared))
        self._publisher.publish()
        super().send(prepared, worker_ids)

    # Collectors

    def _init_on_receiver_impl(
        self, *, model_id: str, context: Any = None, worker_idx: int | None = None, model: Any = None, **_: Any
    ) -> None:
        self.model_id = model_id
        self.context = context
        self.worker_idx = worker_idx
        if model is not None:
            self.model = model
        self._register_transport_receiver(Reading(self._feed))

    # Both

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        # The scheme is sent to the collectors. The publisher, and the transports, stay at the trainer.
        return state | {"_publisher": None, "_state": {}, "_sender_transports": None, "_receiver_transport": None}

    def shutdown(self) -> None:
        """Stop publishing and reading."""
        super().shutdown()
        self._publisher = self._sender_transports = self._receiver_transport = None  # garbage collection closes them
        _publishers.pop(self._feed, None)


class Signal:
    """Notifies one collector that there is a new version."""

    def __init__(self, feed: str, collector: RRef[Any]) -> None:
        self._feed = feed
        self._collector = collector
        self._told: Future[None] | None = None

    def send_weights(self, weights: Any) -> None:
        self.send_weights_async(weights)
        self.wait_ack()

    def send_weights_async(self, weights: Any) -> None:
        args = self._collector, self._feed, get_worker_info().name
        self._told = rpc_async(self._collector.owner(), _receive, args)

    def wait_ack(self) -> None:
        told, self._told = self._told, None
        if told is not None:
            told.wait()

    def setup_connection_and_weights_on_sender(self) -> None:
        """Do nothing: the first `send` brings the weights."""


class Reading:
    """A collector's subscription, made once the publishing worker is known."""

    def __init__(self, feed: str) -> None:
        self._feed = feed
        self._subscriber: Subscriber | None = None

    def receive_weights(
        self, timeout: float | None = None, *, weights: Any = None, model: Any = None, strategy: Any = None
    ) -> Any:
        """Apply the newest weights to the model, and return them. Return None if there are no new ones in time."""
        if self._subscriber is None:
            publisher = _publishers.get(self._feed)
            if publisher is None:
                return None
            self._subscriber = Subscriber(publisher, self._feed)
        before = self._subscriber.version
        try:
            version = self._subscriber.refresh(timeout=NO_LIMIT if timeout is None else timeout)
        except CallTimeout:
            return None
        if version.number == before:
            return None
        if model is not None and strategy is not None:
            strategy.apply_weights(model, version.state)
        return TensorDict(version.state).unflatten_keys(".")

    def setup_connection_and_weights_on_receiver(self, **_: Any) -> None:
        """Do nothing: the trainer's first `send` brings the weights."""


@known_as("TelegradWeightSyncScheme.send")
def _receive(collector: RRef[Any], feed: str, publisher: str) -> None:
    """Read the weights, on the worker of a collector."""
    _publishers[feed] = publisher
    collector.local_value()._receive_weights_scheme()


def _flat(weights: Any) -> dict[str, Any]:
    """Return weights by names with dots, as in a state dict."""
    if isinstance(weights, TensorDictBase):
        flat: dict[str, Any] = weights.data.flatten_keys(".").to_dict()
        return flat
    if isinstance(weights, Mapping):
        return dict(weights)
    raise UsageError(f"weights must be a TensorDict or a state dict, not {type(weights).__name__}")
