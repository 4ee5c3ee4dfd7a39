"""Groups of workers, as values: made from roles or names, sliced, filtered, sent, and called together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, overload

from telegrad.errors import InvalidArgument, NotInitialized, UnknownWorker
from telegrad.ext.calls import folded, not_compiled, target, user_name
from telegrad.ext.feedback import checks, plural
from telegrad.ext.workers import View, WorkerInfo, current, listed
from telegrad.groups.group_methods import GroupCalls

Named = str | int | WorkerInfo


@not_compiled
@folded
def group(of: str | Iterable[Named] | Group | None = None) -> Group:
    """Return a group of the workers of a role, of those with these names or ranks, or of all.

    Args:
        of: a role, `group("actor")`; a list of workers; another group; default: all workers. A group of a role or of
            all is live: its members change as workers join and leave.

    Returns:
        A `Group`.

    Raises:
        NotInitialized: this process is in no group.
        UnknownWorker: there is no worker of that name, or none of that role, and none can join.
        InvalidArgument: the list contains a worker twice, or is empty.

    Example:
        >>> rpc.group(["worker0", "worker1"]).rpc_sync(pow, (2, 3))
        [8, 8]
    """
    membership = current.here().membership
    membership.refresh()
    if of is None or isinstance(of, Group):
        return Group("all") if of is None else of
    if isinstance(of, str):
        made = Group("role", of)
        if membership.is_fixed and not made:
            raise UnknownWorker(made._emptiness())
        return made
    what = "a role, a list of workers or a group; for one worker: group([worker])"
    if isinstance(of, WorkerInfo):
        checks.raise_invalid("of", what, of)
    there = membership.view()
    workers = [_found(each, there) for each in checks.several("of", of, what)]
    if not workers:
        raise InvalidArgument("a group of named workers needs at least one")
    names = [worker.name for worker in workers]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidArgument(f"worker {twice!r} is in the group twice: name each worker once")
    return Group("named", *workers)


def _found(named: Named, there: View) -> WorkerInfo:
    wanted = target(named, "of")
    for worker in there.workers:
        if wanted in (worker.name, worker.id):
            return worker
    member = current.agent().find(wanted)
    return WorkerInfo(member.name, member.id, member.role)


@folded
class Group(GroupCalls):
    """A set of workers: a value that can be kept, sent, compared, and called; made by `group`.

    Each use looks up the current members, on the worker that uses it. Parts of a live group are live, too. `group[0]`
    is a worker; `group[1:]`, `a - b` and `a | b` are groups.

    Example:
        >>> others = rpc.group() - rpc.group(["driver"])
        >>> others.names
        ['worker0', 'worker1']
        >>> others.rpc_sync(torch.ones, (2,), reduce=torch.add)
        tensor([2., 2.])
    """

    __slots__ = ("_args", "_last", "_op")

    def __init__(self, op: str, *args: Any) -> None:
        self._op, self._args = op, args  # an operation on other groups, or one that selects workers
        self._last: tuple[View, tuple[WorkerInfo, ...]] | None = None  # cache of the last lookup; replaced as a whole

    def _look(self) -> tuple[View, tuple[WorkerInfo, ...]]:
        """Return the current members, and the view that they were looked up in."""
        view = current.here().membership.view()
        # Membership makes another view for each change, so the identity of the view shows whether the members are
        # current.
        last = self._last
        if last is None or last[0] is not view:
            last = self._last = view, tuple(self._pick(view.workers))
        return last

    def _pick(self, there: Sequence[WorkerInfo]) -> Iterable[WorkerInfo]:
        """Return the members, given the present workers by rank. Named workers need not be present."""
        args = self._args
        inner = [list(each._pick(there)) for each in args if isinstance(each, Group)]
        match self._op:
            case "all":
                return there
            case "role":
                return [worker for worker in there if worker.role == args[0]]
            case "named":
                return args
            case "slice":
                return inner[0][slice(*args[1:])]
            case "filter":
                return [worker for worker in inner[0] if args[1](worker)]
            case "without":
                others = {worker.name for worker in inner[1]}
                return [worker for worker in inner[0] if worker.name not in others]
        return {worker.name: worker for part in inner for worker in part}.values()

    def _members(self) -> tuple[WorkerInfo, ...]:
        """Return the current members. Raise UnknownWorker if there are none."""
        members = self._look()[1]
        if not members:
            raise UnknownWorker(self._emptiness())
        return members

    def _emptiness(self) -> str:
        there = self._look()[0].workers
        roles = sorted({worker.role for worker in there if worker.role})
        have = f"the roles are: {listed(roles)}" if roles else "no worker here has a role"
        if self._op == "role":
            (role,) = self._args
            if any(worker.name == role for worker in there):
                return f"no worker has the role {role!r}; there is a worker of that name: group([{role!r}])"
            later = "" if current.here().membership.is_fixed else "; rpc.wait_for_workers(1, role=...) waits for one"
            return f"no worker has the role {role!r}; {have}{later}"
        return f"the group ({self.description}) has no workers now; the workers are {listed([w.name for w in there])}"

    # Members

    @property
    def live(self) -> bool:
        """True if the members change as workers join and leave."""
        return self._op in ("all", "role") or any(each.live for each in self._args if isinstance(each, Group))

    @property
    def version(self) -> int:
        """The version of a live group on this worker: equal versions have equal members. 0 for other groups."""
        return self._look()[0].version if self.live else 0

    @property
    def description(self) -> str:
        """A text of how the group was made, the same on all workers."""
        args = self._args
        match self._op:
            case "all":
                return "everybody"
            case "role":
                return f"role {args[0]!r}"
            case "named":
                return listed([worker.name for worker in args])
            case "slice":
                ends = ["" if end is None else str(end) for end in args[1:]]
                return f"{args[0].description} [{':'.join(ends if ends[2] else ends[:2])}]"
            case "filter":
                return f"{args[0].description} where {user_name(args[1])}"
        return f"{args[0].description} {self._op} {args[1].description}"

    @property
    def names(self) -> list[str]:
        """The names of the members: by rank, or in the order in which they were listed."""
        return [worker.name for worker in self]

    def __iter__(self) -> Iterator[WorkerInfo]:
        return iter(self._look()[1])

    def __len__(self) -> int:
        return len(self._look()[1])

    def __contains__(self, worker: Named) -> bool:
        wanted = worker.name if isinstance(worker, WorkerInfo) else worker
        return not isinstance(wanted, bool) and any(wanted in (each.name, each.id) for each in self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Group) and (self._op, self._args) == (other._op, other._args)

    def __hash__(self) -> int:
        return hash((self._op, self._args))

    def __reduce__(self) -> tuple[Any, ...]:
        return Group, (self._op, *self._args)

    def __repr__(self) -> str:
        try:
            names = f": {listed(self.names)}" if self.live else ""
        except NotInitialized:  # in a forked child, too
            names = ""
        return f"<Group {self.description}{names}>"

    # Groups made from this one

    @overload
    def __getitem__(self, which: int) -> WorkerInfo: ...

    @overload
    def __getitem__(self, which: slice) -> Group: ...

    def __getitem__(self, which: int | slice) -> WorkerInfo | Group:
        places = (which.start, which.stop, which.step) if isinstance(which, slice) else (which,)
        if not all(checks.is_whole(each) or (each is None and len(places) > 1) for each in places):
            checks.raise_invalid("the index of a group", "the place of a worker, or a slice", which)
        if isinstance(which, slice):
            return Group("slice", self, *places)
        members = self._look()[1]
        try:
            return members[which]
        except IndexError:
            raise IndexError(
                f"the group ({self.description}) has {plural(len(members), 'worker')} now, and none at {which}"
            ) from None

    def filter(self, keep: Callable[[WorkerInfo], object]) -> Group:
        """Return the group of the members for which a function is true.

        Args:
            keep: a function of a `WorkerInfo`. It is called again as workers join, and is sent along with the group.

        Returns:
            A new group.
        """
        checks.function("keep", keep, "a function of a worker")
        return Group("filter", self, keep)

    def without(self, *workers: Named | Group) -> Group:
        """Return the group without some workers.

        Args:
            *workers: workers, or groups of workers.

        Returns:
            A new group.
        """
        left = self
        for each in workers:
            left = Group("without", left, each if isinstance(each, Group) else group([target(each, "workers")]))
        return left

    def now(self) -> Group:
        """Return the current members as a group that does not change."""
        return Group("named", *self._members())

    def __sub__(self, other: Group) -> Group:
        return self.without(other) if isinstance(other, Group) else NotImplemented

    def __or__(self, other: Group) -> Group:
        return Group("and", self, other) if isinstance(other, Group) else NotImplemented
