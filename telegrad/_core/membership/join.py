"""Joining a group of any kind: where a worker meets the others, and how it becomes a member.

The program's arguments have priority: an `init_method`, a rank or a size. Without them, `telegrad run` decides, then
Ray, then the variables of a launcher (torchrun, mpirun, srun, ...). Inside Ray, a framework may have set the variables
of a launcher as well, for its own group: then the program must choose.

Ray gives a process no rank, so the group of a Ray job is dynamic. A named actor keeps its directory, one for each job.
The first worker, which may be the driver, lets Ray start the actor on the head node, because a cluster ends without
that node. The actor ends a minute after the last worker: it is detached, because otherwise it would end with the
process that happened to start it. Ray restarts it if it was killed. Its directory is a process that outlives it, and
the actor finds that by a note (`find_directory.py`).
"""

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from telegrad._core.membership.dynamic import DynamicGroup, ttl_of
from telegrad._core.membership.form_generations import DirectoryLease, JoinRequest, Prober
from telegrad._core.membership.generations import Formed, lives_in
from telegrad._core.membership.members import Member, Members
from telegrad._core.membership.registry import Registry
from telegrad._core.membership.rendezvous import COMPLETE, OPENED, ROUND, RankTable, StaticJoin, StoreOver, terms_of
from telegrad._core.pickling.remote_text import first_line
from telegrad._core.private_files import create_once, state_folder
from telegrad._core.security.keyring import Key, Keyring, find_keys, given_keys, new_key
from telegrad._core.sockets import accepts_connections
from telegrad._core.stores.directory import Directory, DirectoryLost, DirectoryReset, LeaseLost
from telegrad._core.stores.find_directory import (
    POINTER,
    DirectoryMonitor,
    Found,
    Pointer,
    connect,
    find_directory,
    note,
    noted,
    restore_pointer,
)
from telegrad._core.stores.launchers import STORE, detect_launcher, one_of_several
from telegrad._core.stores.sealed_store import KeyValueStore, SealedDirectory, SealedStore, read_server_mark
from telegrad._core.stores.stores import LONGEST, RendezvousStore, join_store, open_store, serve_or_join
from telegrad._core.texts import Wait
from telegrad._core.threads import Thread
from telegrad.errors import RendezvousError, StoreLost, StoreUnreachable, TelegradError, UsageError

SAID_BY_ENVIRONMENT = "env://"

NAMESPACE = "telegrad"  # of the actors' names, which contain the job's number
IDLE = 60.0  # seconds without workers until the directory of a Ray job ends
LOOK = 5.0  # seconds between two checks for workers of a Ray job
HEAD, LITTLE = "node:__internal_head__", 0.001  # Ray's name for its head node, as a resource of 1

CONNECT_TIMEOUT = 2.0  # seconds for a worker whose name or rank is claimed to answer

T = TypeVar("T")

log = logging.getLogger("telegrad")


def open_meeting(init_method: str, rank: int, world_size: int | None, key: Key, timeout: float) -> RendezvousStore:
    """Open the store. The program's arguments have priority; a rank without a size is that of a dynamic group.

    Raises:
        UsageError: the program or the launcher gives invalid or insufficient data; or there is no key.
        RendezvousError: the store cannot be opened.
    """
    found = None
    if init_method.partition(":")[0] == "ray":
        return _on_ray(rank, world_size, key, timeout)
    if init_method == SAID_BY_ENVIRONMENT and rank == -1 and world_size is None:
        if STORE not in os.environ and _is_of_ray():
            _check_contradiction()
            return _on_ray(rank, world_size, key, timeout)
        found = detect_launcher(os.environ)
    if found is None:
        return open_store(init_method, rank, world_size, find_keys(key), timeout)
    log.info("telegrad: %s", found)
    try:
        return open_store(found.init_method, found.rank, found.size, find_keys(key), timeout)
    except (UsageError, RendezvousError) as error:
        raise type(error)(f"{error} ({found})") from error.__cause__


def find_place(init_method: str, rank: int) -> tuple[str, int]:
    """Return where an elastic group meets, and the preferred rank; raise UsageError for invalid launcher data."""
    found = detect_launcher(os.environ, is_elastic=True) if init_method == SAID_BY_ENVIRONMENT else None
    if found is None:
        return init_method, rank
    log.info("telegrad: %s", found)
    return found.init_method, found.rank if rank == -1 else rank


def _is_of_ray() -> bool:
    """Return True if this process is one of Ray's, its driver included."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def _check_contradiction() -> None:
    """Raise UsageError if Ray has started this process, and variables name another group."""
    said = [f"{name}={os.environ[name]}" for name in ("MASTER_ADDR", "RANK", "WORLD_SIZE") if name in os.environ]
    if said:
        raise UsageError(
            f"this process belongs to a Ray job, but its environment names another group ({', '.join(said)}). Choose "
            'one: TelegradOptions(init_method="ray://") for the workers of this Ray job; or pass rank and '
            "world_size, or an init_method such as tcp://HOST:PORT, to init_rpc for the other group"
        )


def _on_ray(rank: int, world_size: int | None, key: Key, timeout: float) -> RendezvousStore:
    """Find the directory of this job's group, with the given keys, or else with the key that the actor has made.

    Raises:
        UsageError: this process is not one of Ray's; its program gives a rank or a size; or a launcher has started
            several drivers.
        StoreUnreachable: Ray did not start the actor that keeps the directory, or it cannot be reached from here.
    """
    if not _is_of_ray():
        raise UsageError('init_method="ray://" is for Ray processes: call ray.init() first')
    if rank != -1 or world_size is not None:
        raise UsageError('init_method="ray://" is for dynamic groups: leave out rank and world_size')
    ray: Any = sys.modules["ray"]
    # Each of several drivers would have its own group.
    if (launcher := one_of_several(os.environ)) and ray.get_runtime_context().worker.mode != ray.WORKER_MODE:
        raise UsageError(
            f"this process is one of several Ray drivers that {launcher} has started. To form one group of them, "
            "give all the same init_method, such as tcp://HOST:PORT; to form a group with the actors of a Ray job, "
            "start its driver once"
        )
    given = given_keys(key)
    name = f"telegrad-{ray.get_runtime_context().get_job_id()}"
    at_head = {HEAD: LITTLE} if HEAD in ray.cluster_resources() else {}
    known = {"name": name, "namespace": NAMESPACE, "get_if_exists": True, "lifetime": "detached", "max_restarts": -1}
    actor = ray.remote(Keeper).options(**known, num_cpus=0, resources=at_head)
    try:
        text, made = ray.get(actor.remote(name, given).place.remote(), timeout=min(timeout, LONGEST))
    except ray.exceptions.RayError as error:
        raise StoreUnreachable(
            f"the actor {name!r}, which keeps the directory of this job's group, does not answer (waited up to "
            f"{min(timeout, LONGEST):g} s; {type(error).__name__}: {first_line(error)}): is Telegrad installed on the "
            "cluster's head node? See `ray list actors`"
        ) from error
    keys = given or Keyring([made])
    pointer = Pointer.from_json(text)
    # The actor gives the address, so no store is needed. This one is local, and unused.
    store = SealedStore(dist.HashStore(), keys)
    meeting = RendezvousStore(store, pointer.host, -1, None, directory=lambda: connect(pointer, keys), launched=True)
    return meeting._replace(location=f"the actor {name!r}")


class Keeper:
    """The actor that keeps the directory, and makes the key of the job's group, which Ray sends to its workers."""

    def __init__(self, name: str, given: Keyring | None) -> None:
        """`given` are the keys of the first worker, if its program or its environment sets any."""
        ray: Any = sys.modules["ray"]
        host = ray.util.get_node_ip_address()
        # A restarted actor needs the key of its earlier life.
        self._made = create_once(state_folder() / name, new_key())
        self._keys = given or Keyring([self._made])
        self._keeping = DirectoryMonitor(self._keys, host, noted(name))
        note(name, self._keeping.pointer)
        self._needed = monotonic()  # the last time; no lock: a float is loaded and stored as a whole
        end = lambda: ray.kill(ray.get_actor(name, NAMESPACE))  # noqa: E731 - of itself, which Ray takes for no failure
        Thread(target=self._watch, args=(end,), name="telegrad-keeper").start()

    def place(self) -> tuple[str, bytes]:
        """Return the directory's address, and the key for a group without a given one."""
        self._needed = monotonic()
        return self._keeping.pointer.to_json(), self._made

    def _watch(self, end: Callable[[], None]) -> None:
        registry = Registry(connect(self._keeping.pointer, self._keys))
        while monotonic() - self._needed < IDLE:
            sleep(LOOK)
            with contextlib.suppress(TelegradError):
                if registry.roster().members:
                    self._needed = monotonic()
        end()


class Joined(NamedTuple):
    me: Member
    directory: Members | DynamicGroup
    keys: Keyring  # bound to this group
    generation: Formed | None = None  # of an elastic group
    renew_seals: Callable[[], None] | None = None  # of a store that later workers read, if the key may be replaced


def join(meeting: RendezvousStore, me: Member, silence: float, timeout: float, prober: Prober) -> Joined:
    """Join the group that meets in a store; in a dynamic one, with a lease of `silence` seconds. Raise RendezvousError
    if the group could not be formed, or a group of the other kind meets there; HandshakeError if, in an elastic group,
    this worker and the others cannot connect to each other."""
    coming: JoinRequest | None = meeting.coming
    if coming is not None and coming.held is not None:
        return _join_elastic(meeting, coming, coming.held, me, timeout, prober)
    if meeting.world_size is None:
        return _join_dynamic(meeting, me, silence, timeout)
    roster = _join_static(meeting, me, meeting.world_size, timeout)
    formed = Formed(roster.round, tuple(roster.members)) if coming is not None else None
    lasts = me.id == 0 and meeting.keys.may_change and not meeting.serves
    renew = meeting.store.renew if lasts else None
    return Joined(roster.members.find(me.id), roster.members, meeting.keys.within(roster.group), formed, renew)


def _join_dynamic(meeting: RendezvousStore, me: Member, silence: float, timeout: float) -> Joined:
    """Register in the directory of the group."""

    def enter(meeting: RendezvousStore, found: Found) -> Joined:
        if lives_in(found.directory, is_alive):
            raise mixed(me)
        group = DynamicGroup(found.directory, ttl_of(silence), found.launched)
        try:
            joined = group.join(me, shows_life)
            # Only after the join: the last member that leaves removes the pointer, and looks for other members after
            # that (`remove_pointer`). So it finds this worker, or this worker finds no pointer and restores it.
            restore_pointer(meeting.store, found)
            store = _kept(meeting)
            renew = _renewal(found.directory, store)
        except BaseException:
            group.leave()
            raise
        group.keeps(store, found.keeping)
        return Joined(joined, group, meeting.keys.within(group.identity), renew_seals=renew)

    return _enter_directory(meeting, me, timeout, enter)


def _enter_directory(
    meeting: RendezvousStore, me: Member, timeout: float, enter: Callable[[RendezvousStore, Found], T]
) -> T:
    """Return the result of `enter` with the group's directory and the store; retry if one of them is lost meanwhile."""
    until = monotonic() + min(timeout, LONGEST)
    with Wait(
        "init_rpc", lambda: f"the directory of the group at {meeting.where} was not found yet", place=meeting.where
    ) as wait:
        while True:
            try:
                if meeting.directory is not None:
                    found = Found(meeting.directory(), launched=meeting.launched)
                elif fixed_group_lives(meeting.store):
                    raise mixed(me)
                else:
                    found = find_directory(meeting.store, meeting.where, meeting.served, me.tcp[0], until, wait)
            except StoreLost:
                meeting = _reopened(meeting, until)
                continue
            except DirectoryLost:
                if monotonic() >= until:
                    raise
                wait.look()
                continue
            try:
                return enter(meeting, found)
            except BaseException as error:
                found.directory.close()
                if found.keeping is not None:
                    # `leave` and not `close`: others may have joined by this directory, so it ends only once no lease
                    # is left.
                    found.keeping.leave()
                if isinstance(error, DirectoryLost | DirectoryReset | LeaseLost) and monotonic() < until:
                    wait.look()
                    continue
                raise


def _kept(meeting: RendezvousStore) -> SealedStore | None:
    """Return the store if this worker serves it, or if no worker does: then it outlives the group."""
    stays = meeting.directory is None and not read_server_mark(meeting.store)
    return meeting.store if meeting.serves or stays else None


def _renewal(directory: Directory, store: SealedStore | None) -> Callable[[], None] | None:
    """Return a function that renews the seals that later workers of the group need, if its key may be replaced."""
    if isinstance(directory, SealedDirectory):
        return directory.renew_seals
    return store.renew if store is not None and store.keys.may_change else None


def _reopened(meeting: RendezvousStore, until: float) -> RendezvousStore:
    left = until - monotonic()
    if meeting.place is None or left <= 0:
        raise StoreLost(f"the store at {meeting.where} was lost before this worker had joined")
    store, serves = serve_or_join(meeting.place, meeting.rank, meeting.keys, left)
    return meeting._replace(store=store, serves=serves)


def _join_static(meeting: RendezvousStore, me: Member, size: int, timeout: float) -> RankTable:
    """Meet the others in this store. If it still belonged to another group, use the next one at its place."""
    until = monotonic() + timeout
    store = meeting.store
    while True:
        if _directory_is_used(store):
            raise mixed(me)
        try:
            return StaticJoin(store, me, size, timeout, is_alive, meeting.where, meeting.names).join()
        except StoreOver:
            if meeting.place is None:
                raise
        timeout = until - monotonic()
        store = join_store(*meeting.place, meeting.keys, timeout)


def _join_elastic(
    meeting: RendezvousStore, coming: JoinRequest, held: DirectoryLease, me: Member, timeout: float, prober: Prober
) -> Joined:
    """Form the next generation in the directory; for the first one, find the directory."""

    def enter(meeting: RendezvousStore, found: Found) -> None:
        if _dynamic_group_lives(found.directory):
            raise mixed(me)
        held.hold(meeting, found)

    if held.found is None:
        _enter_directory(meeting, me, timeout, enter)
    else:
        held.serve_again()
    generation = coming.join(held, me, is_alive, prober)
    members = Members(generation.members)
    mine = next(member for member in members if member.incarnation == me.incarnation)
    renew = _renewal(held.directory, _kept(held.meet(0)))
    return Joined(mine, members, meeting.keys.within(generation.group), generation, renew)


def _directory_is_used(store: SealedStore) -> bool:
    """Return True if this store points to the directory of a dynamic group with members, or of an elastic one."""
    text = KeyValueStore(store).read(POINTER)
    pointer = Pointer.from_json(text) if text else None
    if pointer is None or not accepts_connections(pointer.address, CONNECT_TIMEOUT):
        return False
    directory = connect(pointer, store.keys, CONNECT_TIMEOUT)
    try:
        return _dynamic_group_lives(directory) or lives_in(directory, is_alive)
    except TelegradError:  # it does not answer, or is now another program's
        return False
    finally:
        directory.close()


def _dynamic_group_lives(directory: Directory) -> bool:
    return any(is_alive(each.member) for each in Registry(directory).roster().members.values())


def mixed(me: Member) -> RendezvousError:
    return RendezvousError(
        f"RPC group mixes statically and dynamically initialized members which is not supported. {me} joined at a "
        "store that another kind of group uses. Give all workers world_size, or all of them min_workers or "
        "max_workers (an elastic group), or none of them any of these; or give each group a port or a file of its own"
    )


def fixed_group_lives(store: SealedStore) -> bool:
    """Return True if a group of fixed size forms in this store, or has formed and runs."""
    number = KeyValueStore(store).read(ROUND)
    board = KeyValueStore(store, f"telegrad/{number}")
    terms = terms_of(board) if number else None
    if terms is None or board.read(COMPLETE) not in ("", OPENED):
        return False
    entries = [board.read(f"rank/{rank}") for rank in range(terms.size)]
    return any(is_alive(Member.from_json(entry)) for entry in entries if entry)


def shows_life(member: Member) -> bool | None:
    """Return True if a program listens at the member's address, False if none does; None if its host is silent."""
    return accepts_connections(member.tcp, CONNECT_TIMEOUT)


def is_alive(member: Member) -> bool:
    """Return True if a program listens at the member's address."""
    return bool(accepts_connections(member.tcp, CONNECT_TIMEOUT))
