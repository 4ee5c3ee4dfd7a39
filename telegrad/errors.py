"""Every exception that Telegrad raises. Their tree is on the page of the reference, `docs/reference/errors.rst`."""

from typing import Any


class TelegradError(RuntimeError):
    """The base class: `except TelegradError` catches every exception that this package itself raises."""


class UsageError(TelegradError):
    """The program asked for something impossible."""


class NotInitialized(UsageError):
    """A remote call was made before `init_rpc` or after `shutdown`."""


class AlreadyInitialized(UsageError):
    """`init_rpc` was called twice without a `shutdown` between."""


class InvalidName(UsageError, ValueError):
    """The worker name is invalid: it may have letters, digits, `_`, `:` and `-`, and at most 127 characters."""


class UnknownWorker(UsageError, ValueError):
    """No worker of the group has that name or rank."""


class UnknownPublisher(UsageError, ValueError):
    """The worker publishes no weights under that name."""


class NotOwner(UsageError):
    """The value of a reference was requested on a worker that does not own it."""


class InvalidArgument(UsageError, TypeError, ValueError):
    """An argument has the wrong type or is out of range; nothing was sent."""


class DeviceError(UsageError, ValueError):
    """The tensor is on a device from which it cannot be sent to that worker."""


class RendezvousError(TelegradError):
    """The group of workers could not be formed."""


class StoreUnreachable(RendezvousError):
    """Nothing answers at the store's address."""


class StoreLost(RendezvousError):
    """The worker that serves the store ended or became unreachable before this worker had joined."""


class StorePortTaken(RendezvousError):
    """Another program listens on the port on which this worker should serve the store."""


class WorkerTaken(RendezvousError):
    """Two workers claim one name or one rank."""


class GroupIncomplete(RendezvousError):
    """Not all workers of the group joined in time."""


class DirectoryLost(RendezvousError):
    """The directory of a dynamic group did not answer; a write may or may not have happened."""


class DirectoryRefused(RendezvousError):
    """The server cannot hold a directory, or refuses this client; the message says what to change."""


class DirectoryReset(RendezvousError):
    """The directory lost acknowledged writes, so its fencing tokens may repeat: the group must end."""


class LeaseLost(RendezvousError):
    """The lease has ended: its keys are deleted or soon will be, and other workers may claim them."""


class GroupEnded(RendezvousError):
    """The elastic group that this worker waited to join has ended normally."""


class PeerError(TelegradError):
    """The other worker, or the connection to it, failed."""


class PeerLost(PeerError, ConnectionError):
    """The worker died or its connection broke; calls in flight may or may not have run."""


class PeerSilent(PeerLost):
    """The worker's process exists but does not run: it was stopped or misses heartbeats. It may resume."""


class PublisherLost(PeerLost):
    """The publisher of weights died, is unreachable or was closed; versions that are here stay usable."""


class PeerUnreachable(PeerError, ConnectionError):
    """No connection to the worker could be made; the call has not run."""


class PeerStopped(PeerSilent, PeerUnreachable):
    """The worker's process is stopped, and no connection to it could be made; the call has not run."""


class HandshakeError(PeerError, ConnectionError):
    """The other end of a connection is not a worker of this group."""


class AuthenticationFailed(HandshakeError):
    """The peer does not hold the group's key, or its certificate is not accepted."""


class StoreUntrusted(AuthenticationFailed, RendezvousError):
    """The store in which the group meets has a value that was not written with this worker's key."""


class VersionMismatch(HandshakeError):
    """The peer speaks another version of Telegrad's protocol."""


class ProtocolViolation(HandshakeError):
    """The peer sent data that is not Telegrad's protocol."""


class ShutDown(PeerError):
    """The call was ended because this worker or the other one shut down."""

    _how = _departure = ""  # the other worker's message about its end, and a text about it


class LeftEarly(ShutDown):
    """The other worker left a group of fixed size before the rest, or a dynamic one without `shutdown`."""


class GenerationOver(ShutDown):
    """The call or the reference belongs to an ended generation of an elastic group."""


class CallTimeout(TelegradError, TimeoutError):
    """The call did not end within its timeout; it may still run on the other worker."""


class LimitReached(TelegradError):
    """A worker refused a request because its limit for one peer is reached; the request did not run."""


class AnswerLost(TelegradError):
    """An idempotent call was repeated, but the callee no longer keeps its result; the call may have run."""


class CallCancelled(TelegradError):
    """The call was cancelled, through its future or together with the call that made it."""


class CodecError(TelegradError):
    """A value could not be sent."""


class CannotEncode(CodecError, TypeError):
    """An argument or a result cannot be pickled."""


class CannotDecode(CodecError):
    """A value arrived but could not be rebuilt."""


class DeltaRefused(CannotDecode):
    """A delta of weights is damaged, or was computed from other values than those held here."""


class FunctionNotFound(CodecError, AttributeError):
    """The callee cannot import the function by its name."""


class RRefError(TelegradError):
    """A remote reference cannot be used."""


class OwnerLost(RRefError, PeerLost):
    """The worker that owned the value died, left, or was lost for a time, which ends references to its values."""


class CannotRestore(OwnerLost):
    """The value was lost with its owner, and was made without `restore`."""


class ClaimLost(OwnerLost):
    """The worker that made a published value refused the call: another worker may own the value now."""

    claim: tuple[str, int] | None = None  # the name and the fencing token of the claim


class RRefLost(RRefError):
    """The value was never made, or the reference was dropped when its connection broke."""


class NotPublished(RRefError):
    """No worker published a value under that name in time."""


class AutogradError(TelegradError):
    """A backward pass across workers could not run."""


class ContextEnded(AutogradError):
    """No context has that id on this worker, or it has ended."""


class ContextLost(ContextEnded):
    """A worker deleted its part of a context because it could not reach the owner, which is alive."""


class UnusedSends(AutogradError):
    """A fast pass got no gradient for something that was sent."""


class CheckpointFailed(TelegradError):
    """Files of a checkpoint are missing or damaged; or one that was written in the background was not completed."""


class WorkersFailed(TelegradError):
    """Several workers failed at one operation; `errors` has the error of each, by worker name."""

    def __init__(self, message: str, errors: dict[str, BaseException] | None = None) -> None:
        super().__init__(message)
        self.errors: dict[str, BaseException] = errors or {}


class GroupError(WorkersFailed):
    """Some workers failed at a call to a group.

    `errors` has the error of each failed worker, and `results` the values of the others, by worker name; after a `map`,
    both are keyed by item number. `reduced` is the reduction of the values of the others, if one was requested.
    """

    errors: dict[Any, BaseException]

    def __init__(
        self,
        message: str,
        errors: dict[Any, BaseException] | None = None,
        results: dict[Any, Any] | None = None,
        reduced: Any = None,
    ) -> None:
        super().__init__(message, errors)
        self.results: dict[Any, Any] = results or {}
        self.reduced = reduced


class RemoteError(TelegradError):
    """A remote exception whose own type cannot be rebuilt on this worker."""


class TelegradWarning(UserWarning):
    """The program continues, but probably not as intended; given once per line of the program."""


__all__ = sorted(
    name
    for name, kind in globals().items()
    if isinstance(kind, type) and issubclass(kind, TelegradError | TelegradWarning)
)
