"""Options of `init_rpc`: those of the documented API, and Telegrad's own; and the timeouts of single calls."""

import enum
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from telegrad._core import checks, processes
from telegrad._core.membership.members import Devices
from telegrad._core.memory import device_streams
from telegrad._core.pickling.remote_text import folded
from telegrad._core.security.keyring import Key, check_key
from telegrad._core.security.tls import TlsFiles
from telegrad.errors import DeviceError, InvalidArgument

DEFAULT_RPC_TIMEOUT = 60.0
DEFAULT_INIT_METHOD = "env://"
DEFAULT_NUM_WORKER_THREADS = 16
SHARED_MEMORY = 0.5  # default, as a share of the memory that a process may use
MOST_THREADS = 1 << 16  # more than any system gives a process

TRANSPORTS = ("auto", "unix", "tcp")
# Transport names of torch.distributed.rpc that choose a transport; its channel names have no meaning here.
_HINTS = {"uv": "tcp", "ibv": "tcp", "shm": "unix"}

DeviceMap = Mapping[Any, Any]
_DEVICE_MAP = "a dictionary from devices here to devices there, such as {0: 1}"
_DEVICE_MAPS = "a dictionary of such maps by the names of workers, such as {'worker1': {0: 1}}"


class BackendType(enum.Enum):
    """The backends that `init_rpc` accepts: only one, under the name that existing programs use."""

    TENSORPIPE = "TENSORPIPE"


@folded
class RpcBackendOptions:
    """Options of every backend, for programs that use this name. `TelegradOptions` has more.

    Args:
        rpc_timeout: seconds that a call may take if it has no timeout of its own; 0 for no limit.
        init_method: where the workers meet.
    """

    rpc_timeout: float
    init_method: str

    def __init__(self, rpc_timeout: float = DEFAULT_RPC_TIMEOUT, init_method: str = DEFAULT_INIT_METHOD) -> None:
        self.rpc_timeout = float(checks.seconds("incompatible constructor arguments: rpc_timeout", rpc_timeout))
        self.init_method = checks.text("init_method", init_method, "a URL, such as 'tcp://HOST:PORT' or 'file:///PATH'")


@folded
class TelegradOptions(RpcBackendOptions):
    """Options for `init_rpc`: how this worker joins its group, and how data is sent.

    Args:
        num_worker_threads: how many calls run at once on this worker; calls that wait do not count.
        rpc_timeout: seconds that a call may take if it has no timeout of its own; 0 for no limit.
        init_method: where the workers meet: `env://`, `tcp://host:port`, `file:///path`; or the server with the
            directory of a dynamic group: `etcd://host:2379/prefix`, `redis://host:6379/0`.
        device_maps: for each callee, a map from devices of this worker to those on which its tensors arrive;
            results use the reverse map. A device is an index, a name or a `torch.device`.
        devices: the devices that calls may use; by default those in the maps.
        transport: "auto", or "unix" or "tcp" to force one.
        address: the address of this host under which others reach it; by default the one that reaches the store.
        key: the secret of the group, of at least 16 bytes. By default it is read from `TELEGRAD_KEY`, from the file
            named by `TELEGRAD_KEY_FILE`, or from a file that each user has. False for a group without one, in which
            anyone with access to a worker can run code.
        tls: certificate files, for encrypted and mutually authenticated TCP; not together with `key=False`.
        shared_memory: bytes of memory files that this worker may lend to others of its host; by default half of the
            memory of the machine, or of the container.
        silence: seconds after which another host that gives no sign of life, or a stopped process of this host, is
            declared lost; 0 for never. In a dynamic group also the length of its lease in the directory:
            a worker that does not renew its lease in that time is removed from the group.
        heartbeat: seconds after which a worker on any host that does not answer heartbeats is declared lost, even
            if only its interpreter is busy; 0 for none.
        pass_deadlines: whether nested calls, on any worker, are limited to the time left of the call of this worker
            that caused them.
        wait_for_worker: the default of calls of this worker: whether they wait while the callee is absent.
        dashboard: the port of this host at which this worker shows the group to browsers (0: a free one), as
            `telegrad.insight.dashboard` does; the log shows the address, or why there is none.

    Example:
        >>> options = rpc.TelegradOptions(rpc_timeout=10, init_method="env://", num_worker_threads=4)
        >>> rpc.init_rpc("worker", rank=0, world_size=1, rpc_backend_options=options)
        >>> rpc.shutdown()
    """

    __slots__ = ("key",)  # so `vars` does not contain the secret: programs log that

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT,
        init_method: str = DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, DeviceMap] | None = None,
        devices: Sequence[int | str | torch.device] | None = None,
        transport: str = "auto",
        address: str | None = None,
        key: str | bytes | bool | None = None,
        tls: TlsFiles | None = None,
        shared_memory: int | None = None,
        silence: float = 10.0,
        heartbeat: float = 0.0,
        pass_deadlines: bool = False,
        wait_for_worker: bool = False,
        dashboard: int | None = None,
    ) -> None:
        super().__init__(rpc_timeout, init_method)
        self.num_worker_threads: int = checks.count("num_worker_threads", num_worker_threads, 1, MOST_THREADS)
        self.device_maps: dict[str, dict[torch.device, torch.device]] = {}
        if device_maps is not None:
            for to, map_ in checks.mapping("device_maps", device_maps, _DEVICE_MAPS).items():
                self.set_device_map(checks.text("a key of device_maps", to, "the name of a worker"), map_)
        self.set_devices(() if devices is None else devices)
        self.transport: str = checks.one_of("transport", transport, TRANSPORTS)
        where = "an address of this host"
        self.address: str | None = None if address is None else checks.text("address", address, where)
        self.key: Key = key if key is None or key is False else check_key(key, "the option key")
        self.tls: TlsFiles | None = None if tls is None else _tls(tls)
        if self.key is False and self.tls is not None:
            raise InvalidArgument(
                "key=False makes a group that anyone may join, but tls=... only admits workers with certificates: "
                "leave key=False out; a group with TLS needs a key, too"
            )
        if shared_memory is None:
            shared_memory = int(SHARED_MEMORY * processes.usable_memory())
        self.shared_memory: int = checks.count("shared_memory", shared_memory, 0, what="a number of bytes")
        self.silence: float = float(checks.seconds("silence", silence, "0 for never"))
        self.heartbeat: float = float(checks.seconds("heartbeat", heartbeat, "0 for none"))
        self.pass_deadlines: bool = checks.flag("pass_deadlines", pass_deadlines)
        self.wait_for_worker: bool = checks.flag("wait_for_worker", wait_for_worker)
        self.dashboard: int | None = None if dashboard is None else checks.port("dashboard", dashboard)

    def set_device_map(self, to: str, device_map: DeviceMap) -> None:
        """Add to the map from this worker's devices to those of another.

        Args:
            to: the name of the other worker.
            device_map: a map from each device here to the one there on which its tensors arrive.

        Raises:
            DeviceError: a device would be sent to two. That no two are sent to one is checked when the workers connect.
        """
        checks.text("to", to, "the name of a worker")
        given = checks.mapping("device_map", device_map, _DEVICE_MAP)
        pairs = {as_device(here): as_device(there) for here, there in given.items()}
        known = self.device_maps.setdefault(to, {})
        for here, there in pairs.items():
            if known.setdefault(here, there) != there:
                raise DeviceError(
                    f"`set_device_map` only supports 1-to-1 mapping: {here} goes to {known[here]} of worker {to!r} "
                    f"already, and cannot go to {there} too"
                )

    def set_devices(self, devices: Sequence[int | str | torch.device]) -> None:
        """Set the devices that calls may use.

        Args:
            devices: indexes of accelerators, names, or devices of torch.
        """
        listed = checks.several("devices", devices, "a list of devices")
        self.devices: list[torch.device] = [as_device(device) for device in listed]

    def published(self) -> Devices:
        """Return the device data that other workers need; raise DeviceError if there is no such accelerator here."""
        own = device_streams.kind()  # `device_maps.faults` checks the indexes
        given = {"devices": self.devices} | {f"device_maps for {to}": [*map_] for to, map_ in self.device_maps.items()}
        for name, device in ((name, each) for name, devices in given.items() for each in devices):
            if own is not None and device.type not in ("cpu", own):
                raise DeviceError(
                    f"{name}: this process has no device {device}, its accelerators are of the type {own}"
                )
        maps = {
            to: {str(here): str(there) for here, there in map_.items()} for to, map_ in self.device_maps.items() if map_
        }
        return Devices(device_streams.count(), maps, tuple(map(str, self.devices)))


@folded
class TensorPipeRpcBackendOptions(TelegradOptions):
    """`TelegradOptions` under the name and with the arguments that existing programs use.

    The other arguments are as for `TelegradOptions`.

    Args:
        _transports: a hint which transport to use.
        _channels: ignored.
        **own: the other options of `TelegradOptions`.

    Example:
        >>> options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, rpc_timeout=20)
        >>> options.rpc_timeout
        20.0
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT,
        init_method: str = DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, DeviceMap] | None = None,
        devices: Sequence[int | str | torch.device] | None = None,
        _transports: Sequence[str] | None = None,
        _channels: Sequence[str] | None = None,
        **own: Any,
    ) -> None:
        names = [] if _transports is None else checks.several("_transports", _transports, "a list of names")
        if _channels is not None:
            checks.several("_channels", _channels, "a list of names")
        hinted = [_HINTS[name] for name in names if isinstance(name, str) and name in _HINTS]
        own.setdefault("transport", hinted[0] if len(set(hinted)) == 1 else "auto")
        super().__init__(
            num_worker_threads=num_worker_threads,
            rpc_timeout=rpc_timeout,
            init_method=init_method,
            device_maps=device_maps,
            devices=devices,
            **own,
        )


def _tls(given: Any) -> TlsFiles:
    if not isinstance(given, tuple) or len(given) != len(TlsFiles._fields):
        checks.raise_invalid("tls", "rpc.TlsFiles(certificate, private_key, authority)", given)
    return TlsFiles(*(checks.path(f"tls: {name}", each) for name, each in zip(TlsFiles._fields, given, strict=True)))


def as_device(device: int | str | torch.device) -> torch.device:
    """Convert a device as users give it; an index means an accelerator."""
    try:
        if isinstance(device, bool) or not isinstance(device, int | str | torch.device):
            raise ValueError
        named = device_streams.device(device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, OverflowError, ValueError):
        checks.raise_invalid(
            "a device", "the index of an accelerator, a name such as 'cuda:0', or a torch.device", device
        )
    return named if named.type == "cpu" or named.index is not None else torch.device(named.type, 0)


class Settings(NamedTuple):
    """Settings of an agent; see `TelegradOptions` for the meaning."""

    threads: int
    timeout: float
    address: str  # to listen on
    transport: str  # "auto", "unix" or "tcp"
    shared_memory: int
    silence: float
    tls: TlsFiles | None
    devices: Devices
    pass_deadlines: bool = False
    sends_modes: bool = True  # grad mode and autocast of callers hold in their calls; not after torch's `init_rpc`
    wait_for_worker: bool = False
    most_calls: int = 1 << 15  # in flight to one worker; further calls block, unless the thread serves a call
    most_bytes: int = 1 << 30  # of the tensors in them
    heartbeat: float = 0.0
    most_waiting: int = 40_000  # unanswered calls of one worker; above, its connection is read slowly
    most_waiting_bytes: int = 1 << 28  # of its calls and control messages that have not begun


def options_of(given: RpcBackendOptions | None) -> TelegradOptions:
    """Return the options for a user's `rpc_backend_options`; raise InvalidArgument if they are no options."""
    if given is None:
        return TelegradOptions()
    if isinstance(given, TelegradOptions):
        return given
    if isinstance(given, RpcBackendOptions):
        return TelegradOptions(rpc_timeout=given.rpc_timeout, init_method=given.init_method)
    kind = type(given)
    hint = f" of the type {kind.__module__}.{kind.__qualname__}" if kind.__name__.endswith("Options") else ""
    options = "telegrad.rpc.TelegradOptions(...), or telegrad.rpc.TensorPipeRpcBackendOptions(...)"
    raise InvalidArgument(f"rpc_backend_options must be {options}, not {checks.short_repr(given)}{hint}")


# Timeouts of single calls

DEFAULT = -1.0  # timeout of a call that uses the timeout of the options
_HINT = "; leave it out for the rpc_timeout of the options"


def limit_of(timeout: Any, default: float) -> float:
    """Return the user's timeout, or the default if left out; raise InvalidArgument if it is no number of seconds."""
    if type(timeout) in (float, int) and timeout == DEFAULT:
        return default
    found: float = checks.seconds("timeout", timeout, hint=_HINT)
    return found


def check_timeout(timeout: Any) -> None:
    """Raise InvalidArgument for an invalid timeout that is given now and used later."""
    if timeout is not DEFAULT:
        limit_of(timeout, DEFAULT)
