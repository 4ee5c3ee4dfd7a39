"""Every parameter of every public function refuses wrong values at once, by its name and in few words."""

import inspect
import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import telegrad
from telegrad import autograd, errors, rpc
from telegrad._core import checks
from telegrad._core.rpc import conversion
from tests import public
from tests.cluster import PATIENCE, processes
from tests.things import Things

LONGEST = 500  # characters of a message
PACKAGE = os.path.dirname(telegrad.__file__)
NAN, INF, HUGE, LONG = float("nan"), float("inf"), 10**400, "x" * 1_000_000
REFUSED = (errors.UsageError, TypeError, ValueError)


class Indexed:
    """Not a number, although Python takes it as an index."""

    def __index__(self) -> int:
        return 1


# Wrong values for each kind of parameter.
LONE = "\ud800"  # a lone surrogate, which UTF-8 cannot encode
NO_TEXT: list[Any] = [None, b"x", 5, 1.5, True, ["x"], object(), HUGE, LONE, LONE + LONG]
NO_FLAG: list[Any] = [0, 1, "yes", b"", [], object(), 1.0]
SCALARS: list[Any] = [np.bool_(True), np.array([1, 2]), np.array(1), torch.tensor(True), torch.tensor(1), 1j, Indexed()]
NO_COUNT: list[Any] = ["1", b"1", True, 1.5, NAN, INF, -5, -HUGE, [1], object(), torch.ones(2), np.float64(1), *SCALARS]
NO_SECONDS: list[Any] = ["1", b"1", True, NAN, -5, -0.5, -INF, 1e300, HUGE, [1], object(), np.float64(NAN), *SCALARS]
NO_FUNCTION: list[Any] = [None, "f", b"f", 5, True, NAN, [print], object()]
NO_LIST: list[Any] = [b"x", 5, True, 1.5, object(), HUGE, np.array(1), torch.tensor(1)]
NO_MAPPING: list[Any] = [None, "x", b"x", 5, True, [1], object()]
NO_CHOICE: list[Any] = [None, "other", b"x", 5, True, [], object(), LONG, LONE]
NO_WORKER: list[Any] = [None, b"worker0", 1.0, True, [], object(), NAN, "", -1, HUGE, LONG, "worker0\0", "\udcff", LONE]
NO_INFO: list[Any] = [rpc.WorkerInfo("worker0", 99), rpc.WorkerInfo("nobody", 0)]
NO_PATH: list[Any] = [5, True, 1.5, [], object(), "", LONE, "a\0b", LONE + LONG]
NO_MODULE: list[Any] = [None, "x", b"x", 5, True, NAN, object()]
NO_CONTEXT: list[Any] = [None, "x", b"x", True, 1.5, NAN, -5, [1], object()]


def without_none(values: list[Any]) -> list[Any]:
    return [value for value in values if value is not None]


def with_none(values: list[Any]) -> list[Any]:
    return [None, *values]


def all_of(names: Iterable[str], values: list[Any]) -> dict[str, list[Any]]:
    return dict.fromkeys(names, values)


# By the names of parameters: a name means the same everywhere, except for those in BY_ENTRY.
BY_NAME: dict[str, list[Any]] = {
    **all_of(("timeout", "rpc_timeout"), with_none(NO_SECONDS)),
    **all_of(("silence", "heartbeat", "max_wait"), with_none([*NO_SECONDS, INF])),
    "seconds": [*NO_SECONDS, INF],
    **all_of(("to", "worker"), [*NO_WORKER, *NO_INFO]),
    "worker_name": [*without_none(NO_WORKER), *NO_INFO],
    "remote_device": [*NO_WORKER, *NO_INFO, "cuda:0", "worker0/nothing"],
    **all_of(("func", "fn", "callback", "factory", "module_cls", "optimizer_class", "loss"), NO_FUNCTION),
    **all_of(("op", "reduce"), without_none(NO_FUNCTION)),
    "args": [5, "ab", b"x", True, {1: 2}, object()],
    "kwargs": [5, "ab", b"x", True, [], object()],
    "wait_for_worker": NO_FLAG,
    **all_of(("idempotent", "graceful", "retain_graph", "create_graph", "allow_unused", "error_if_nonfinite", "hogwild",
        "recurse", "check", "requires_grad", "set_to_none", "keep_vars", "pass_deadlines", "profile"),
        with_none(NO_FLAG)),
    "restore": [None, 5, "yes", b"", [], object()],
    "window": with_none([*NO_COUNT, 0, HUGE]),
    "num_worker_threads": with_none([*NO_COUNT, 0, 10**9, HUGE]),
    "shared_memory": [*NO_COUNT, HUGE],
    **all_of(("max_size", "chunks"), with_none([*NO_COUNT, 0])),
    "stage": with_none([*NO_COUNT, 7]),
    **all_of(("number", "max_behind"), with_none(NO_COUNT)),
    "n": with_none([*NO_COUNT, 0, 7]),
    "port": with_none([*NO_COUNT, 65536, HUGE]),
    "dashboard": [*NO_COUNT, 65536, HUGE],
    "rank": with_none([*NO_COUNT, HUGE]),
    **all_of(("world_size", "min_workers", "max_workers"), [*NO_COUNT, 0, HUGE]),
    **all_of(("context_id", "dist_autograd_ctx_id"), NO_CONTEXT),
    **all_of(("name", "method"), [*NO_TEXT, ""]),
    "role": [*NO_TEXT, LONG, "a.b", "a#"],
    "host": [each for each in [*NO_TEXT, ""] if each is not None],
    "address": without_none(NO_TEXT),
    **all_of(("init_method", "prefix"), NO_TEXT),
    "backend": [*without_none(NO_TEXT), LONG],
    "driver": [*NO_TEXT, "", LONG, "a.b", "a#"],
    **all_of(("mode", "schedule", "transport", "deltas"), NO_CHOICE),
    "reduction": without_none(NO_CHOICE),
    "keep": [*NO_COUNT, 0],
    "wait": [*NO_SECONDS],
    "dtype": ["float", 5, True, [], object(), float, int, torch.Tensor, torch.int8, torch.complex64],
    "source": [None, 5, True, 1.5, object()],
    "roots": [None, 5, "x", True, [], [5], object(), torch.ones(2), torch.ones(1)],
    "outputs": [None, 5, "x", True, [], [5], object(), torch.ones(1)],
    "grad_outputs": [5, "x", True, [], [5], object(), torch.ones(2), [None, None]],
    "step": [5, "x", True, [], object()],
    **all_of(("module", "model", "module_rref"), NO_MODULE),
    **all_of(("path", "folder", "checkpoint_id"), [None, *NO_PATH]),
    "state": [*NO_MAPPING, {1: 2}],
    "state_dict": [*NO_MAPPING, {}, {"state": 5, "param_groups": []}],
    "groups": [*NO_LIST, None, [5], [{}]],
    "param_group": [*NO_MAPPING, {}],
    **all_of(("params", "params_rref"), [*NO_LIST, None, "x", [5]]),
    **all_of(("max_norm", "norm_type"), [None, "1", True, NAN, -1.0, HUGE, [1], object()]),
    "stages": [*NO_LIST, None, "x", [], [5]],
    "tied": [*NO_LIST, None, "x", [5], [[5, 6]], [["0.weight"]]],
    "at": [*NO_LIST, "x", [5]],
    "balance": [*NO_LIST, "x", ["x"], [True]],
    "wanted": [*NO_LIST, [5]],
    "require": [*without_none(NO_LIST[:2]), 1.5, object(), "worker0", [5.5], [True], NO_INFO[:1]],
    "of": [5, True, 1.5, object(), [], [5.5], [True], ["nobody"], ["worker0", "worker0"], [LONG],
        NO_INFO[:1], b"x", bytearray(b"\0"), memoryview(b"\0")],
    "after": [5, "x", True, object()],
    "device_maps": [5, "x", True, [1], object(), {5: {}}, {"a": 5}, {"a": {"cpu": "nothing"}}, {LONE: {}}],
    "device_map": [None, 5, "x", True, [1], object(), {"cpu": "nothing"}],
    "devices": [5, "cpu", True, object(), ["nothing"], [LONE], [1.5], [True], [-1], [HUGE], [NAN], [None],
        [np.int64(0)]],
    "key": [5, 1.5, True, "", "short", b"short", [], object(), bytearray(32), 16 * LONE, LONE + LONG],
    "tls": [5, "x", True, [1], ("a", "b"), ("a", "b", 5), ("a", "b", LONE), object()],
    "rpc_backend_options": [5, "x", True, {}, object()],
    "group": [None, 5, "x", True, [], object()],
    "cls": [None, 5, "x", True, print, object()],
    **all_of(("_transports", "_channels"), [5, "uv", object()]),
}  # fmt: skip
BY_ENTRY: dict[str, list[Any]] = {
    "telegrad.local: workers": [None, 0, -1, True, "ab", b"x", 1.5, HUGE, [], {}, ["a", "a"], [5], ["a.b"], [LONG],
        [LONE], {"a": 0}, {"a": True}, {"a": NAN}, {5: 1}, {"a": 10_001}, [""], [None], ["a"] * 10_001, {"a"},
        iter(["a"]), bytearray(b"a"), np.int64(1), *SCALARS, {"a.b": 1}, object()],
    **all_of(("telegrad.autograd.backward: timeout", "telegrad.autograd.backward_async: timeout",
        "telegrad.autograd.grad: timeout"), NO_SECONDS),
    "telegrad.autograd.grad: retain_graph": NO_FLAG,
    **all_of(("telegrad.checkpoint.save: wait", "telegrad.nn.RemoteModule.train: mode",
        "telegrad.rpc.TelegradOptions: wait_for_worker"),
        with_none(NO_FLAG)),
    "telegrad.insight.graph: roots": [None, 5, "x", [5], object()],
    "telegrad.rpc.get_worker_info: worker_name": [*without_none(NO_WORKER), *NO_INFO],
    "telegrad.rpc.init_rpc: name": [b"x", 5, True, ["x"], object(), LONG, "a.b", "a#", "", HUGE, LONE],
    "telegrad.rpc.init_rpc: backend": ["other", 5, True, [], object(), LONG],
    "telegrad.rpc.wait_for_workers: wanted": [None, 0, True, 1.5, object(), HUGE, [5], b"x"],
    **all_of(("telegrad.rpc.Group.barrier: name", "telegrad.rpc.Group.all_reduce: name",
        "telegrad.rpc.wait_for_workers: role"),
        NO_TEXT),
    "telegrad.rpc.Group.filter: keep": NO_FUNCTION,
    **all_of(("telegrad.rpc.functions.async_execution: fn", "telegrad.rpc.functions.must_finish: fn"),
        [*NO_FUNCTION, int, Indexed, nn.Linear]),
    "telegrad.rpc.Group.without: workers": [5.5, True, None, object(), LONG],
    "telegrad.nn.Pipeline.split: workers": [*NO_LIST, None, [], "worker0", [5], [True], [LONG], [object()]],
    **all_of(("telegrad.rpc.TelegradOptions.set_device_map: to",
        "telegrad.rpc.TensorPipeRpcBackendOptions.set_device_map: to"), [*NO_TEXT, ""]),
    "telegrad.optim.DistributedOptimizer.for_module: module": NO_MODULE,
    "telegrad.weights.ShardedPublisher: source": [None, 5, True, "x", [], object(), {}],
}  # fmt: skip
# parameters that accept every value, or are passed on
ANYTHING = {"value", "result", "inputs", "example", "targets", "type_hint", "items", "destination", "param"}
# Values, functions that Python or torch calls, and those with other tests.
LEFT_OUT = {
    "telegrad.rpc.BackendType", "telegrad.rpc.Generation", "telegrad.rpc.GroupFuture", "telegrad.rpc.Group",
    "telegrad.rpc.RefGroup", "telegrad.rpc.Stream", "telegrad.rpc.TlsFiles", "telegrad.rpc.WorkerInfo",
    "telegrad.weights.Box", "telegrad.weights.Shard", "telegrad.weights.Version", "telegrad.insight.GradientGraph",
    "telegrad.launch.local.LocalGroup",
    "telegrad.launch.local.LocalGroup.__exit__",
    "telegrad._core.rpc.rref.Proxy", "telegrad._core.rpc.rref.Proxy.__call__", "telegrad.rpc.RRef.__call__",
    "telegrad.rpc.Future",
    "telegrad.nn.RemoteModule.parameters", "telegrad.nn.RemoteModule.buffers",  # these methods always refuse
    "telegrad.nn.RemoteModule.register_buffer", "telegrad.nn.RemoteModule.register_parameter",
    "telegrad.nn.RemoteModule.add_module", "telegrad.optim.DistributedOptimizer.zero_grad",
    "telegrad.optim.DistributedOptimizer.register_state_dict_pre_hook",
    "telegrad.optim.DistributedOptimizer.register_state_dict_post_hook",
    "telegrad.optim.DistributedOptimizer.register_load_state_dict_pre_hook",
    "telegrad.optim.DistributedOptimizer.register_load_state_dict_post_hook",
    "telegrad.nn.Pipeline.parameters",
}  # fmt: skip


def entries() -> Iterator[tuple[str, Any]]:
    """Yield each public function, class and method, by its name."""
    yield from public.functions().items()
    for name, kind in public.classes().items():
        if not issubclass(kind, errors.TelegradError):
            yield name, kind
        for member, value in public.members(kind).items():
            if not isinstance(value, property):
                yield f"{name}.{member}", getattr(kind, member)


def parameters(function: Any) -> list[str]:
    found = inspect.signature(function).parameters.values()
    passed_on: tuple[object, ...] = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [each.name for each in found if each.kind not in passed_on or each.name in ("workers", "items")]
    return [name for name in named if name not in ("self", "_", "__")]


def wrong_values(entry: str, parameter: str) -> list[Any] | None:
    return BY_ENTRY.get(f"{entry}: {parameter}", BY_NAME.get(parameter))


def test_each_parameter_has_an_entry_in_the_table() -> None:
    missing = [
        f"{entry}: {parameter}"
        for entry, function in entries()
        if entry not in LEFT_OUT
        for parameter in parameters(function)
        if parameter not in ANYTHING and wrong_values(entry, parameter) is None
    ]
    assert not missing, "say what these must refuse, in BY_NAME or BY_ENTRY"
    known = {f"{entry}: {parameter}" for entry, function in entries() for parameter in parameters(function)}
    assert not BY_ENTRY.keys() - known, "these are no parameters any more"
    names = {each.partition(": ")[2] for each in known}
    assert not {*BY_NAME, *ANYTHING} - names, "no parameter has such a name any more"
    assert not LEFT_OUT - {entry for entry, _ in entries()}, "there are no such functions any more"


def call(things: Things, entry: str, function: Any, parameter: str, value: Any) -> None:
    """Call with one wrong argument, and right ones for the other required parameters."""
    owner, _, member = entry.rpartition(".")
    if owner in public.classes():
        function = getattr(things.instances[owner], member)
    given = things.arguments(function)
    if entry.endswith(".without"):
        function(value)
        return
    if entry.endswith(".map"):
        first = next(iter(given))
        function({**given, parameter: value}[first], [1], **({} if parameter == first else {parameter: value}))
        return
    if entry.endswith("TensorPipeRpcBackendOptions") or "Options" in entry:
        given.pop("own", None)
    if parameter == "balance":
        given |= {"model": nn.Sequential(nn.Identity())}
    made = function(**{**given, parameter: value})
    if entry == "telegrad.rpc.functions.batch":
        made(call)


def check_all() -> list[str]:
    """Return all faults of refusals, in a group of this process and a worker."""
    with telegrad.local(["worker0"]) as local:
        things, wrong = Things(local), []
        for entry, function in entries():
            if entry in LEFT_OUT:
                continue
            for parameter in parameters(function):
                for value in (wrong_values(entry, parameter) or []) if parameter not in ANYTHING else []:
                    fault = fault_of(lambda: call(things, entry, function, parameter, value), parameter, entry)  # noqa: B023
                    if fault:
                        wrong.append(f"{entry}({parameter}={checks.short_repr(value)}): {fault}")
        assert rpc.rpc_sync("worker0", pow, (2, 3)) == 8
        wrong += check_starts()
        rpc.shutdown(graceful=False)
    return wrong


# Called often, so without a decorator; or in modules that do not import torch.
SHOW_FRAMES = {
    "telegrad.rpc.Future.add_done_callback", "telegrad.rpc.GroupFuture.add_done_callback", "telegrad.insight.trace",
    "telegrad.insight.tracing", "telegrad.insight.dashboard", "telegrad.launch.local.LocalGroup.shutdown",
}  # fmt: skip


def frames_shown(error: BaseException) -> list[str]:
    """Return the functions of the package in the traceback of an error."""
    return [frame.name for frame in traceback.extract_tb(error.__traceback__) if PACKAGE in frame.filename]


def check_starts() -> list[str]:
    """Return the functions of the package that errors show if a group or a context cannot start."""
    shown = []
    for start in (lambda: telegrad.local(1), lambda: autograd.context().__enter__()):
        with pytest.raises((errors.AlreadyInitialized, errors.NotInitialized, errors.UsageError)) as raised:
            start()
        shown += frames_shown(raised.value)
    return shown


def fault_of(call: Callable[[], Any], parameter: str, entry: str) -> str:
    """Return the fault of a refusal, or "" for a good one."""
    try:
        call()
    except errors.NotInitialized:
        return "says that this process is in no group"
    except errors.AlreadyInitialized:
        return "was looked at too late"
    except REFUSED as error:
        said = str(error)
        if len(said) > LONGEST:
            return f"a message of {len(said)} characters"
        if len(frames := frames_shown(error)) > 1 and entry not in SHOW_FRAMES:
            return f"shows frames of the package: {frames}"
        words = {parameter, *ALSO.get(parameter, ())}
        return "" if any(word in said for word in words) else f"does not name it: {said[:200]}"
    except BaseException as error:
        return f"raises {type(error).__name__}: {str(error)[:200]}"
    return "is taken"


# Other words for parameters, in messages that users know.
ALSO = {
    "to": ("destination",),
    "worker": ("destination",),
    "worker_name": ("destination",),
    "remote_device": ("destination",),
    "of": ("destination", "the group twice", "named workers"),
    "require": ("destination",),
    "func": ("function to call",),
    "callback": ("then",),
    "method": ("attribute",),
    "name": ("worker's name", "a name for this worker"),
    "role": ("worker's role",),
    "driver": ("worker's name",),
    "workers": ("destination", "worker's name", "worker's role", "remote_device", "driver"),
    "rank": ("rank",),
    "devices": ("a device",),
    "device_maps": ("a device", "device_map"),
    "device_map": ("a device",),
    "roots": ("root",),
    "groups": ("other parameters",),
    "params": ("parameters",),
    "params_rref": ("parameters", "references"),
    "param_group": ("parameter",),
    "model": ("module",),
    "module": ("parameters", "model"),
    "tls": ("tls:",),
    "checkpoint_id": ("checkpoint",),
    "group": ("group",),
    "at": ("`at`",),
    "stages": ("stage",),
}


@pytest.mark.timeout(3 * PATIENCE)
def test_each_parameter_refuses_wrong_values() -> None:
    with processes(1) as (process,):
        wrong: list[str] = process.run(check_all, patience=3 * PATIENCE)
    assert not wrong, "\n" + "\n".join(wrong)


def test_a_role_without_a_name_is_shown() -> None:
    with pytest.raises(errors.InvalidArgument, match=r"^workers must be .* each role .*, not \{'': 1\}$"):
        telegrad.local({"": 1})


def test_numbers_of_numpy_are_accepted() -> None:
    assert checks.seconds("timeout", np.float32(0.5)) == 0.5
    assert type(checks.seconds("timeout", np.int64(5))) is float
    assert type(checks.number("factor", np.float16(2), 0)) is float
    assert checks.count("wanted", np.int64(3)) == 3
    assert conversion.target(np.int32(1)) == 1


def test_values_are_shown_in_few_words() -> None:
    class Fails:
        def __repr__(self) -> str:
            raise RuntimeError

    large = LONG, LONG.encode(), HUGE, [LONG] * 1000, {LONG: LONG}, torch.ones(1000, 1000)
    for value in (*large, Fails(), object(), [[[[[1]]]]]):
        assert 0 < len(checks.short_repr(value)) <= 2 * checks.SHOWN + 3
    assert checks.short_repr("worker0") == "'worker0'"
    assert checks.short_repr(torch.ones(3)) == "Tensor"


def test_options_of_another_package_are_refused_with_their_type() -> None:
    class TensorPipeRpcBackendOptions:
        """Has the name of torch's options."""

    with pytest.raises(errors.InvalidArgument, match=r"telegrad\.rpc\.Telegrad.*of the type tests\.test_checks"):
        rpc.init_rpc("a", rpc_backend_options=TensorPipeRpcBackendOptions())  # type: ignore[arg-type]
