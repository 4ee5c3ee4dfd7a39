"""Every exception a user of Telegrad can meet.

TelegradError (RuntimeError)
├── UsageError                 the program asked for something that cannot be
│   ├── NotInitialized         no `init_rpc` yet, or already shut down
│   ├── AlreadyInitialized     `init_rpc` twice without `shutdown` between
│   ├── InvalidName            a worker name with forbidden characters
│   ├── UnknownWorker          no worker of that name or rank
│   ├── UnknownPublisher       the worker publishes no weights of that name
│   ├── NotOwner               the value of a reference was asked for where it is not
│   ├── InvalidArgument (TypeError, ValueError) an argument is of the wrong kind, or out of range
│   └── DeviceError (ValueError) a wrong device map, or a tensor on a device that is in none
├── RendezvousError            the group could not be formed
│   ├── StoreUnreachable       nobody answers at the store's address
│   ├── StoreLost              it has ended before this worker had joined
│   ├── StorePortTaken         another program listens on the store's port
│   ├── WorkerTaken            a name or a rank is used twice
│   ├── GroupIncomplete        not all workers came in time
│   ├── DirectoryLost          the directory of a dynamic group does not answer
│   ├── DirectoryRefused       etcd or Redis cannot hold the directory, or refuses this worker
│   ├── DirectoryReset         the directory has lost what it had stored: start the group anew
│   ├── LeaseLost              a worker came too late to renew its lease in the directory
│   └── GroupEnded             the elastic group that a worker waited to join has ended
├── PeerError                  the other worker, or the way to it
│   ├── PeerLost (ConnectionError) it died, or its connection broke
│   │   ├── PeerSilent         its process does not run: it was stopped, or does not answer heartbeats
│   │   └── PublisherLost      who published weights has gone, or has closed the publisher
│   ├── PeerUnreachable (ConnectionError) no connection could be made
│   │   └── PeerStopped (PeerSilent) since its process is stopped
│   ├── HandshakeError (ConnectionError) it is not who it should be
│   │   ├── AuthenticationFailed
│   │   │   └── StoreUntrusted (RendezvousError) the store holds what was written without this worker's key
│   │   ├── VersionMismatch
│   │   └── ProtocolViolation
│   └── ShutDown               the call was cut off by a shutdown
│       ├── LeftEarly          the other worker did not wait for the rest of its group
│       └── GenerationOver     the generation of an elastic group to which it belonged has ended
├── CallTimeout (TimeoutError) no answer in the call's time
├── LimitReached               a worker refused something: its limit for one other worker is reached
├── AnswerLost                 an idempotent call may have run, and its answer is not kept any more
├── CallCancelled              the call was cancelled, or the one for whose sake it was made
├── CodecError                 a value could not travel
│   ├── CannotEncode (TypeError) an argument or a result cannot be pickled
│   ├── CannotDecode           it arrived, but cannot be rebuilt there
│   │   └── DeltaRefused       a delta of weights is damaged, or was made from other values
│   └── FunctionNotFound       the callee has no function of that name
├── RRefError                  a remote reference cannot be used
│   ├── OwnerLost (PeerLost)   its owner has died or left, and the value with it
│   │   ├── CannotRestore      nothing says how to make it anew
│   │   └── ClaimLost          it was published, and its owner may not act as such any more
│   ├── RRefLost               its value was never made, or the reference came too late
│   └── NotPublished           no worker publishes a value under that name, or none did in time
├── AutogradError              a backward pass across workers could not run
│   ├── ContextEnded           there is no context of that id, or no longer
│   │   └── ContextLost        a worker took the context's owner for dead, and let it go
│   └── UnusedSends            a fast pass, but something that was sent took no part
├── CheckpointFailed           a checkpoint that was written beside the program was not completed
├── WorkersFailed              several workers failed at one thing that all should do
│   └── GroupError             some workers failed at a call to a group; what the others gave is on it
└── RemoteError                a remote exception whose own type cannot be rebuilt here

TelegradWarning (UserWarning)  the program goes on, but most likely does not do what was meant
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AlreadyInitialized",
    "AnswerLost",
    "AuthenticationFailed",
    "AutogradError",
    "CallCancelled",
    "CallTimeout",
    "CannotDecode",
    "CannotEncode",
    "CannotRestore",
    "CheckpointFailed",
    "ClaimLost",
    "CodecError",
    "ContextEnded",
    "ContextLost",
    "DeltaRefused",
    "DeviceError",
    "DirectoryLost",
    "DirectoryRefused",
    "DirectoryReset",
    "FunctionNotFound",
    "GenerationOver",
    "GroupEnded",
    "GroupError",
    "GroupIncomplete",
    "HandshakeError",
    "InvalidArgument",
    "InvalidName",
    "LeaseLost",
    "LeftEarly",
    "LimitReached",
    "NotInitialized",
    "NotOwner",
    "NotPublished",
    "OwnerLost",
    "PeerError",
    "PeerLost",
    "PeerSilent",
    "PeerStopped",
    "PeerUnreachable",
    "ProtocolViolation",
    "PublisherLost",
    "RRefError",
    "RRefLost",
    "RemoteError",
    "RendezvousError",
    "ShutDown",
    "StoreLost",
    "StorePortTaken",
    "StoreUnreachable",
    "StoreUntrusted",
    "TelegradError",
    "TelegradWarning",
    "UnknownPublisher",
    "UnknownWorker",
    "UnusedSends",
    "UsageError",
    "VersionMismatch",
    "WorkerTaken",
    "WorkersFailed",
]


class TelegradError(RuntimeError):
    """The root: `except TelegradError` catches whatever this package raises itself."""


class UsageError(TelegradError):
    """The program asked for something that cannot be."""


class NotInitialized(UsageError):
    """A remote call before `init_rpc`, or after `shutdown`."""


class AlreadyInitialized(UsageError):
    """`init_rpc` was called twice without a `shutdown` between."""


class InvalidName(UsageError, ValueError):
    """A worker name may hold letters, digits, `_`, `:`, `-` and is shorter than 128 characters."""


class UnknownWorker(UsageError, ValueError):
    """No worker of that name or rank is in the group."""


class UnknownPublisher(UsageError, ValueError):
    """A worker publishes no weights under that name."""


class NotOwner(UsageError):
    """The value of a reference was asked for on a worker that does not own it."""


class InvalidArgument(UsageError, TypeError, ValueError):
    """An argument is of the wrong kind, or out of range; nothing was sent."""


class DeviceError(UsageError, ValueError):
    """A tensor lives on a device from which it cannot be sent to that worker."""


class RendezvousError(TelegradError):
    """The group of workers could not be formed."""


class StoreUnreachable(RendezvousError):
    """Nobody answers at the store's address."""


class StoreLost(RendezvousError):
    """The worker that serves the store has ended, or cannot be reached any more, before this worker had joined."""


class StorePortTaken(RendezvousError):
    """Another program listens on the port where this worker should serve the store."""


class WorkerTaken(RendezvousError):
    """Two workers claim one name or one rank."""


class GroupIncomplete(RendezvousError):
    """Not all workers of the group came in time."""


class DirectoryLost(RendezvousError):
    """The directory of a dynamic group did not answer; whether a write was done is unknown."""


class DirectoryRefused(RendezvousError):
    """The server cannot hold a directory, or refuses this client; the message says what to change."""


class DirectoryReset(RendezvousError):
    """The directory has lost writes that it had acknowledged, so its tokens may repeat: the group must end."""


class LeaseLost(RendezvousError):
    """The lease has ended: its keys are deleted, or about to be, and others may claim them."""


class GroupEnded(RendezvousError):
    """The elastic group that this worker waited to join has ended in order."""


class PeerError(TelegradError):
    """The other worker failed, or the way to it."""


class PeerLost(PeerError, ConnectionError):
    """The worker died or its connection broke; calls in flight may or may not have run."""


class PeerSilent(PeerLost):
    """The worker lives, but does not run: its process was stopped, or does not answer heartbeats; it may go on yet."""


class PublisherLost(PeerLost):
    """Who published weights has died, cannot be reached, or has closed the publisher; versions that are here stay."""


class PeerUnreachable(PeerError, ConnectionError):
    """No connection to the worker could be made; the call has not run."""


class PeerStopped(PeerSilent, PeerUnreachable):
    """The worker's process is stopped, and no connection to it could be made; the call has not run."""


class HandshakeError(PeerError, ConnectionError):
    """The other end of a connection is not a worker of this group."""


class AuthenticationFailed(HandshakeError):
    """It does not hold the group's key, or its certificate is not accepted."""


class StoreUntrusted(AuthenticationFailed, RendezvousError):
    """The store where the group meets has a value that was not written with this worker's key."""


class VersionMismatch(HandshakeError):
    """It speaks another version of Telegrad's protocol."""


class ProtocolViolation(HandshakeError):
    """It sent something that is not Telegrad's protocol."""


class ShutDown(PeerError):
    """The call was cut off because this worker or the other one shut down."""

    _ends_group = False  # True if the other worker's program had started this one


class LeftEarly(ShutDown):
    """The other worker of a group of fixed size left without the rest: by `graceful=False`, or at its program's end."""


class GenerationOver(ShutDown):
    """What was called, or referred to, belongs to a generation of an elastic group that has ended."""


class CallTimeout(TelegradError, TimeoutError):
    """The call did not end in its time; it may still run on the other worker."""


class LimitReached(TelegradError):
    """A worker refused something from another, of which it has as much as it keeps for one worker; it has not run."""


class AnswerLost(TelegradError):
    """An idempotent call was repeated whose answer its callee does not keep any more; it may have run."""


class CallCancelled(TelegradError):
    """The call was cancelled: by its future, or with the call for whose sake it was made."""


class CodecError(TelegradError):
    """A value could not travel."""


class CannotEncode(CodecError, TypeError):
    """An argument or a result cannot be pickled."""


class CannotDecode(CodecError):
    """A value arrived but could not be rebuilt."""


class DeltaRefused(CannotDecode):
    """A delta of weights is damaged, or was made from other values than those that are here."""


class FunctionNotFound(CodecError, AttributeError):
    """The callee cannot import the function by its name."""


class RRefError(TelegradError):
    """A remote reference cannot be used."""


class OwnerLost(RRefError, PeerLost):
    """The worker that owned the value has died or left."""


class CannotRestore(OwnerLost):
    """The value was lost with its owner, and was made without `restore`."""


class ClaimLost(OwnerLost):
    """The worker that made a published value did not run the call: another one may own the value by now."""

    claim: tuple[str, int] | None = None  # the name and the token of what was not run


class RRefLost(RRefError):
    """The value was never made, or the reference was given up when its connection broke."""


class NotPublished(RRefError):
    """No worker had a value under that name in the time that was given."""


class AutogradError(TelegradError):
    """A backward pass across workers could not run."""


class ContextEnded(AutogradError):
    """There is no context of that id on this worker, or it has ended."""


class ContextLost(ContextEnded):
    """A worker let go of a context whose owner it could not reach, and which lives all the same."""


class UnusedSends(AutogradError):
    """In a fast pass no gradient came for something that was sent."""


class CheckpointFailed(TelegradError):
    """A checkpoint that was written beside the program was not completed; the one before it is the last."""


class WorkersFailed(TelegradError):
    """Several workers failed at one thing that all should do; `errors` has the error of each, by the worker's name."""

    def __init__(self, message: str, errors: dict[str, BaseException] | None = None) -> None:
        super().__init__(message)
        self.errors: dict[str, BaseException] = errors or {}


class GroupError(WorkersFailed):
    """Some workers failed at a call to a group.

    `errors` has the error of each, and `results` the values of the others, by the workers' names; of a `map` by the
    numbers of the items. `reduced` is what the values of the others came to, where they were to be reduced.
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
    """The program goes on, but most likely does not do what was meant; given once for each of its lines."""
