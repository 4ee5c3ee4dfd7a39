"""Programs with distributed autograd, on several agents in this process."""

import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import copy_context
from functools import partial
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import telegrad.autograd as autograd
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from telegrad.autograd import engine
from telegrad.autograd.schedule import GraphSchedule, GraphStep
from telegrad.errors import CallTimeout, ContextEnded, NotOwner, RemoteError, UnusedSends, UsageError
from telegrad.rpc import Future, RRef, functions, remote, rpc_async, rpc_sync
from tests.autograd.functions import Passing
from tests.cluster import PATIENCE, in_threads, wait_until

pytestmark = pytest.mark.usefixtures("contexts_end")
GATE = threading.Event()


@pytest.fixture(autouse=True)
def closed_gate() -> None:
    GATE.clear()


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (3, 3)), dtype=torch.float64, requires_grad=True)


def with_value(function: Callable[..., torch.Tensor], *references: RRef[torch.Tensor]) -> torch.Tensor:
    return function(*(reference.to_here() for reference in references))


# Contexts


def test_nested_contexts_are_an_error() -> None:
    with autograd.context() as context, pytest.raises(UsageError, match=str(context)), autograd.context():
        pass


def test_unknown_contexts() -> None:
    with autograd.context() as context:
        pass
    with pytest.raises(ContextEnded):
        autograd.backward(context, leaf().sum())


def test_an_unknown_mode() -> None:
    with autograd.context() as context, pytest.raises(UsageError, match="smart"):
        autograd.backward(context, leaf().sum(), mode="quick")


def test_a_context_that_ends_during_its_pass() -> None:
    with autograd.context() as context:
        future = autograd.backward_async(context, rpc_sync("w1", slow_backward, [leaf()]).sum())
    with pytest.raises(ContextEnded, match="wait for the pass"):
        future.wait()
    GATE.set()


def test_a_callback_that_begins_another_pass() -> None:
    with autograd.context() as context:
        loss = slow_backward(leaf()).sum()
        future = autograd.backward_async(context, loss, retain_graph=True)
        again = future.then(lambda _: autograd.backward(context, loss, timeout=5.0))
        GATE.set()
        again.wait()


def test_a_context_that_ends_as_its_pass_begins(five: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    conductor = five[0].conductor
    numbers = conductor._numbers

    def number() -> Iterator[int]:
        conductor.contexts.release(context)  # as another thread that leaves the block
        yield next(numbers)

    for run in (autograd.backward, lambda *args, **named: autograd.backward_async(*args, **named).wait()):
        with autograd.context() as context:
            loss = rpc_sync("w1", torch.mul, (leaf(), 2)).sum()
            monkeypatch.setattr(conductor, "_numbers", number())
            with pytest.raises(ContextEnded, match="wait for the pass"):
                run(context, loss, timeout=1.0)
    assert not conductor.running


class Slow(Passing):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        assert GATE.wait(PATIENCE)
        return gradient


def slow_backward(x: torch.Tensor) -> torch.Tensor:
    return Slow.apply(x)


# Every kind of call


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    @functions.async_execution
    def later(self, x: torch.Tensor) -> Future[torch.Tensor]:
        return rpc_async("w2", torch.mul, (x, 2)).then(lambda done: self.layer(done.wait()))


async def in_steps(x: torch.Tensor) -> torch.Tensor:
    return await rpc_async("w2", torch.sin, (x,)) + await rpc_async("w3", torch.cos, (x,))


@functions.async_execution
def by_callback(x: torch.Tensor) -> Future[torch.Tensor]:
    return rpc_async("w2", torch.sin, (x,)).then(lambda done: rpc_sync("w3", torch.mul, (done.wait(), x)))


def nested(x: torch.Tensor, left: int) -> torch.Tensor:
    return x.sin() if not left else rpc_sync(f"w{left % 3 + 1}", nested, (x * 2, left - 1))


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


compiled = torch.compile(lambda x: x.cos() * 3, backend="eager")


def in_parts(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {"sum": values["a"] + values["b"][0], "count": torch.tensor(3)}


def in_a_thread(x: torch.Tensor) -> torch.Tensor:
    worker = current.here()

    def work() -> torch.Tensor:
        current.enter(worker)
        return rpc_sync("w2", torch.sin, (x,))

    return in_threads(partial(copy_context().run, work))[0]


def with_operators(x: torch.Tensor) -> torch.Tensor:
    reference: Any = remote("w1", torch.sin, (x,))  # the types do not have its operators
    return (reference * 2 + 1).to_here()


CALLS = {
    "sync": lambda x: rpc_sync("w1", torch.sin, (x,)),
    "async": lambda x: rpc_async("w1", torch.sin, (x,)).wait(),
    "keyword": lambda x: rpc_sync("w1", torch.mul, (x,), {"other": x}),
    "remote": lambda x: remote("w1", torch.sin, (x,)).to_here(),
    "to itself": lambda x: rpc_sync("w0", torch.sin, (x,)),
    "coroutine": lambda x: rpc_sync("w1", in_steps, (x,)),
    "callback": lambda x: rpc_sync("w1", by_callback, (x,)),
    "nested": lambda x: rpc_sync("w1", nested, (x, 7)),
    "third party": lambda x: rpc_sync("w1", remote, ("w3", torch.exp, (x,))).to_here(),
    "shared": lambda x: rpc_sync("w2", with_value, (torch.sin, RRef(x))),
    "operator": with_operators,
    "script": lambda x: rpc_sync("w1", scripted, (x,)),
    "compiled": lambda x: rpc_sync("w1", compiled, (x,)),
    "container": lambda x: rpc_sync("w1", in_parts, ({"a": x, "b": [x.exp(), 3]},))["sum"],
    "thread": lambda x: rpc_sync("w1", in_a_thread, (x,)),
    "same twice": lambda x: rpc_sync("w1", torch.mul, (x, x)),
    "awaited": lambda x: (
        rpc_async("w1", torch.sin, (x,)).then(lambda done: rpc_sync("w2", torch.exp, (done.wait(),))).wait()
    ),
}
LOCALLY = {
    "keyword": lambda x: x * x,
    "coroutine": lambda x: x.sin() + x.cos(),
    "callback": lambda x: x.sin() * x,
    "nested": lambda x: (x * 2**7).sin(),
    "third party": torch.exp,
    "operator": lambda x: x.sin() * 2 + 1,
    "script": lambda x: x.sin() * 2,
    "compiled": lambda x: x.cos() * 3,
    "container": lambda x: x + x.exp(),
    "same twice": lambda x: x * x,
    "awaited": lambda x: x.sin().exp(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("start", ["leaf", "inner"])
def test_every_call_records(call: str, start: str) -> None:
    x = leaf()
    prepare = (lambda: x) if start == "leaf" else (lambda: x * 0.5)
    (expected,) = torch.autograd.grad(LOCALLY.get(call, torch.sin)(prepare()).sum(), [x])
    with autograd.context() as context:
        autograd.backward(context, CALLS[call](prepare()).sum())
        assert torch.allclose(autograd.get_gradients(context)[x], expected)


@pytest.mark.parametrize("how", ["rpc_sync", "rpc_async", "remote"])
@pytest.mark.parametrize("method", ["forward", "later", "__call__"])
def test_proxies_record(how: str, method: str) -> None:
    x = leaf()
    with autograd.context() as context:
        reference = remote("w1", Model)
        proxy = getattr(reference, how)()
        result = proxy(x) if method == "__call__" else getattr(proxy, method)(x)
        result = result.wait() if how == "rpc_async" else result.to_here() if how == "remote" else result
        autograd.backward(context, result.sum())
        found = rpc_sync("w1", model_gradients, (reference, context))
        module = reference.rpc_sync().state_dict()
        factor = 2 if method == "later" else 1
        assert torch.allclose(autograd.get_gradients(context)[x], factor * module["layer.weight"].sum(0).expand(3, 3))
        assert torch.allclose(found[0], factor * x.sum(0).expand(3, 3))


def model_gradients(reference: RRef[Model], context: int) -> list[torch.Tensor]:
    found = autograd.get_gradients(context)
    return [found[parameter] for parameter in reference.local_value().parameters()]


def test_parameters_are_sent_with_their_history() -> None:
    parameter = nn.Parameter(torch.randn(3, 3))
    with autograd.context() as context:
        kind, result = rpc_sync("w1", look_at, (parameter,))
        assert kind == (True, False)
        autograd.backward(context, result.sum())
        assert torch.equal(autograd.get_gradients(context)[parameter], torch.full((3, 3), 2.0))


def look_at(parameter: nn.Parameter) -> tuple[tuple[bool, bool], torch.Tensor]:
    return (isinstance(parameter, nn.Parameter), parameter.is_leaf), parameter * 2


def test_parameters_of_modules_that_are_sent_get_gradients_at_the_caller() -> None:
    model, x = Model(), torch.randn(2, 3, dtype=torch.float64)
    with autograd.context() as context:
        autograd.backward(context, rpc_sync("w1", operator.call, (model, x)).sum())
        found = autograd.get_gradients(context)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(found[parameter], gradient)


def test_values_without_gradients_are_sent_unchanged() -> None:
    with autograd.context():
        whole = rpc_sync("w1", list, ([torch.arange(3), torch.ones(2), 7],))
        assert [getattr(each, "requires_grad", False) for each in whole] == [False] * 3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_recorded_without_grad(
    mode: Callable[[], AbstractContextManager[object]], five: list[Worker]
) -> None:
    x = leaf()
    with autograd.context() as context, mode():
        assert rpc_sync("w1", torch.mul, (x, 2)).grad_fn is None
        assert not five[0].conductor.contexts.find(context).sends
    with autograd.context() as context:
        assert rpc_sync("w1", torch.mul, (x, 2)).grad_fn is not None


def test_outside_of_a_context_nothing_is_recorded() -> None:
    assert rpc_sync("w1", torch.mul, (leaf(), 2)).grad_fn is None


# Graphs as local autograd runs them


def test_a_plain_backward_is_refused_with_advice() -> None:
    with autograd.context():
        loss = rpc_sync("w1", torch.sin, (leaf(),)).sum()
        with pytest.raises(UsageError, match=r"telegrad\.autograd\.backward"):
            loss.backward()


def doubled_at_last(x: torch.Tensor) -> torch.Tensor:
    assert GATE.wait(PATIENCE)
    return x * 2


@pytest.mark.parametrize("is_late", [False, True])
def test_an_answer_refuses_gradients_after_its_context_also_if_it_comes_late(is_late: bool) -> None:
    x = leaf()
    with autograd.context():
        if not is_late:
            GATE.set()
        future = rpc_async("w1", doubled_at_last, (x,))
        if not is_late:
            future.wait()
    GATE.set()
    y = future.wait()
    assert torch.equal(y, x * 2)
    with pytest.raises(UsageError, match="came from worker 'w1' in context"):
        y.sum().backward()
    with autograd.context() as context, pytest.raises(UsageError, match="another context"):
        autograd.backward(context, y.sum())


def test_tensors_of_a_call_refuse_gradients_if_their_context_has_ended(five: list[Worker]) -> None:
    caller, callee = five[0], five[1]
    with autograd.context():
        context = caller.conductor.current()
        assert context is not None
        data = context.sent([leaf()], callee.agent.me.identity, "f", True)
    callee.conductor.contexts.release(context.id)
    late, (tensor,) = callee.conductor.received(data, [leaf()], caller.agent.me.identity)
    assert late.sent([tensor * 2], caller.agent.me.identity, "f", True)  # so does the result of the call, then
    with pytest.raises(UsageError, match="came from worker 'w0' in context"):
        tensor.sum().backward()
    assert callee.conductor.contexts.get(context.id) is None


def test_in_place_after_sending() -> None:
    x = leaf()
    with autograd.context() as context:
        y = x * 2
        z = rpc_sync("w1", torch.sin, (y,))
        y.mul_(3)
        autograd.backward(context, (rpc_sync("w2", torch.cos, (y,)) + z).sum())
        found = autograd.get_gradients(context)[x]
    assert torch.allclose(found, 2 * torch.cos(2 * x) - 6 * torch.sin(6 * x))


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("looks", [False, True], ids=["off", "on"])
def test_a_nan_gradient_is_an_error_in_anomaly_mode_only(looks: bool) -> None:
    """This holds for a node between two tensors of another worker, too, which runs without torch's engine."""
    x = torch.tensor([0.0, 4.0], requires_grad=True)

    def gradient(call: Callable[..., torch.Tensor], backward: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        sent = x * 1.0
        root = call(torch.sqrt, sent)
        between = sent - 0.5 * root
        return backward((call(torch.sqrt, between * 0) * 0).sum() + root.sum() * 0)

    def of_context(loss: torch.Tensor) -> torch.Tensor:
        autograd.backward(context, loss)
        return autograd.get_gradients(context)[x]

    expected = gradient(lambda function, *args: function(*args), lambda loss: torch.autograd.grad(loss, [x])[0])
    with torch.autograd.set_detect_anomaly(looks), autograd.context() as context:
        if looks:
            with pytest.raises(RuntimeError, match="nan"):
                gradient(lambda function, *args: rpc_sync("w1", function, args), of_context)
        else:
            found = gradient(lambda function, *args: rpc_sync("w1", function, args), of_context)
            assert torch.equal(found, expected) or torch.allclose(found, expected, equal_nan=True)


def test_autocast_in_forward() -> None:
    x = torch.randn(3, 3, requires_grad=True)
    with autograd.context() as context:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = rpc_sync("w1", torch.mul, (torch.mm(x, x), 2))
        assert y.dtype == torch.bfloat16
        autograd.backward(context, y.float().sum())
        assert autograd.get_gradients(context)[x].dtype == torch.float32


def test_autocast_around_backward_holds_on_other_workers_for_that_pass() -> None:
    x = torch.randn(3, 3, requires_grad=True)

    def gradient_of(loss: Callable[[], None]) -> torch.Tensor:
        before = autograd.get_gradients(context).get(x, torch.zeros(3, 3)).clone()
        loss()
        return autograd.get_gradients(context)[x] - before

    y = torch.matmul(x, x).sum()
    (exact,) = torch.autograd.grad(y, [x], retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (rounded,) = torch.autograd.grad(y, [x])
    assert not torch.equal(exact, rounded)
    with autograd.context() as context:
        y = rpc_sync("w1", torch.matmul, (x, x)).sum()

        def inside() -> None:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                autograd.backward(context, y, retain_graph=True)

        assert torch.equal(gradient_of(inside), rounded)
        assert torch.allclose(gradient_of(lambda: autograd.backward(context, y)), exact)


# Roots on other workers


def test_a_reference_as_root() -> None:
    x = leaf()
    with autograd.context() as context:
        remote("w1", torch.sum, (remote("w1", torch.sin, (x,)).to_here(),)).backward(context)
        assert torch.allclose(autograd.get_gradients(context)[x], x.cos())


def test_a_reference_to_no_tensor_as_root() -> None:
    with autograd.context() as context, pytest.raises(UsageError, match="should contain a tensor"):
        remote("w1", int).backward(context)


def test_a_reference_backward_without_context() -> None:
    x = leaf()
    RRef(x.sum()).backward()
    assert x.grad is not None
    with pytest.raises(NotOwner):
        remote("w1", torch.ones, ((),), {"requires_grad": True}).backward()


# Failures


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, error: BaseException) -> torch.Tensor:
        ctx.error = error
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> NoReturn:
        raise ctx.error


def failing(x: torch.Tensor, error: BaseException, left: int = 0) -> torch.Tensor:
    return Failing.apply(x, error) if not left else rpc_sync(f"w{left}", failing, (x, error, left - 1))


def test_an_error_in_a_backward_function_on_another_worker(five: list[Worker]) -> None:
    x = leaf()
    with autograd.context() as context:
        loss = rpc_sync("w3", failing, (x, ValueError("no gradient today"), 2)).sum()
        with pytest.raises(ValueError, match=r"no gradient today[\s\S]*On worker 'w1'"):
            autograd.backward(context, loss)
        wait_until(lambda: not any(each.conductor.passes for each in five))
    with autograd.context() as context:
        autograd.backward(context, rpc_sync("w1", torch.sin, (x,)).sum())


def test_system_exit_in_a_backward_function(five: list[Worker]) -> None:
    """SystemExit ends the program on the caller's worker, and is an error on another one."""
    x = leaf()
    with autograd.context() as context:
        here = failing(rpc_sync("w1", torch.sin, (x,)), SystemExit(7)).sum()
        with pytest.raises(SystemExit) as ended:
            autograd.backward(context, here)
        assert ended.value.code == 7
    with autograd.context() as context:
        future = autograd.backward_async(context, rpc_sync("w1", torch.sin, (failing(x, SystemExit(7)),)).sum())
        with pytest.raises(SystemExit):
            future.wait()
    with autograd.context() as context:
        loss = rpc_sync("w1", failing, (x, SystemExit(7))).sum()
        with pytest.raises(RemoteError, match=r"SystemExit, which is no Exception, was raised[\s\S]*On worker 'w1'"):
            autograd.backward(context, loss)


def test_ended_passes_are_not_running(five: list[Worker]) -> None:
    seen: list[int] = []
    with autograd.context() as context:
        for count in (1, 2):
            x = leaf()
            x.register_hook(lambda gradient: seen.append(five[0].conductor.running))
            autograd.backward(context, rpc_sync("w1", torch.sin, (x,)).sum())
            wait_until(lambda: not any(each.conductor.running for each in five))
            assert [each.conductor.passes for each in five[:2]] == [count] * 2
    assert seen == [1, 1]


@pytest.mark.parametrize(
    "run", [lambda context, loss, _, **more: autograd.backward(context, loss, **more), autograd.grad]
)
def test_a_pass_that_times_out_names_the_worker(run: Callable[..., Any]) -> None:
    with autograd.context() as context:
        x = leaf()
        loss = rpc_sync("w1", slow_backward, [x]).sum()
        with pytest.raises(CallTimeout, match="'w1'"):
            run(context, loss, x, timeout=0.2)
        GATE.set()


def test_a_pass_reports_the_workers_that_it_waits_for(five: list[Worker]) -> None:
    with autograd.context() as context:
        future = autograd.backward_async(context, rpc_sync("w1", slow_backward, [leaf()]).sum())
        wait_until(lambda: [owing for *_, owing in five[0].conductor.under_way()] == [["w1"]])
        wait_until(lambda: "its graph runs" in repr(five[1].conductor.contexts.find(context)))
        GATE.set()
        future.wait()
    assert not five[0].conductor.under_way()


def test_fast_mode_names_unused_sends() -> None:
    a = leaf()
    with autograd.context() as context:
        used = rpc_sync("w1", torch.sin, (a,))
        rpc_sync("w2", torch.cos, (a,))
        with pytest.raises(UnusedSends, match=r"'w0': 1 tensor\(s\) sent to 'w2' with cos"):
            autograd.backward(context, used.sum(), mode="fast")
    with autograd.context() as context:
        autograd.backward(context, rpc_sync("w1", torch.sin, (a,)).sum(), mode="fast")


def test_early_gradients_do_not_wait_for_other_branches() -> None:
    """The gradients of one branch are used on w0 while the other branch still runs on w1."""
    x = leaf()
    x.register_hook(lambda gradient: GATE.set())
    with autograd.context() as context:
        autograd.backward(context, rpc_sync("w1", two_branches, [x]).sum())
        assert x in autograd.get_gradients(context)


def two_branches(x: torch.Tensor) -> torch.Tensor:
    slow = Slow.apply(torch.ones(3, 3, dtype=torch.float64, requires_grad=True))
    return x * 2 + slow  # the engine runs the newest ready node first


# Costs


def notices(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the classes of the control messages that a worker sends."""
    sent = []
    original = worker.agent.notify

    def notify(to: str | int, message: tuple[Any, ...], *rest: Any, **more: Any) -> None:
        sent.append(type(message).__name__)
        original(to, message, *rest, **more)

    monkeypatch.setattr(worker.agent, "notify", notify)
    return sent


KEPT: list[torch.Tensor] = []


def keep(x: torch.Tensor) -> None:
    KEPT.append(x * 2)


def sum_of_kept() -> torch.Tensor:
    total = torch.stack(KEPT).sum()
    KEPT.clear()
    return total


def test_gradients_that_are_ready_together_leave_together(five: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    sent = notices(five[1], monkeypatch)
    leaves = [leaf() for _ in range(16)]
    with autograd.context() as context:
        for each in leaves:
            rpc_sync("w1", keep, (each,))
        autograd.backward(context, rpc_sync("w1", sum_of_kept))
        assert len(autograd.get_gradients(context)) == 16
    assert sent.count("PackedShipment") <= 4, "sixteen messages, but one step of one pass"


def test_micro_batches_that_share_parameters_do_not_wait_for_each_other(
    five: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each enters the engine once, when its gradients are complete, so the work is linear."""
    steps, original = [], GraphSchedule.step

    def step(schedule: GraphSchedule, *given: Any) -> GraphStep | None:
        steps.append(original(schedule, *given))
        return steps[-1]

    monkeypatch.setattr(GraphSchedule, "step", step)
    monkeypatch.setattr(GraphSchedule, "_ordered_step", None)
    stage = remote("w1", Model)
    with autograd.context() as context:
        outputs = [stage.rpc_async().forward(leaf()) for _ in range(32)]
        autograd.backward(context, sum(output.wait().sum() for output in outputs))
    calls = [act for step in steps if step is not None for act in step.acts]
    assert (sum(len(call.nodes) for call in calls), sum(len(call.recvs) for call in calls)) == (33, 64)


def test_no_questions_are_sent_if_every_send_is_used(five: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    wait_until(lambda: not any(any(worker.references.counts().values()) for worker in five))  # of earlier tests
    sent = [notices(worker, monkeypatch) for worker in five]
    x = leaf()
    with autograd.context() as context:
        autograd.backward(context, rpc_sync("w1", nested, (x, 6)).sum())
    assert {kind for each in sent for kind in each} <= {"PackedShipment", "PassReport", "Release"}


def graph_of_its_own() -> torch.Tensor:
    return leaf().sin().sum()


def test_a_reference_from_before_the_context_as_root() -> None:
    """The owner joins the context by the pass alone, and still learns of its end."""
    reference = remote("w1", graph_of_its_own)
    with autograd.context() as context:
        reference.backward(context)
        assert len(rpc_sync("w1", autograd.get_gradients, (context,))) == 1


# Received and returned gradients


def sparse(*values: float) -> torch.Tensor:
    places = torch.tensor([[0, 2], [1, 0]])
    return torch.sparse_coo_tensor(places, list(values), (3, 3), dtype=torch.float64, requires_grad=True)


def pass_on(to: str, x: torch.Tensor) -> torch.Tensor:
    return rpc_sync(to, torch.add, (x, x))


def test_sparse_tensors_that_a_worker_forwards() -> None:
    x = sparse(1.0, 2.0)
    with autograd.context() as context:
        autograd.backward(context, torch.sparse.sum(rpc_sync("w1", pass_on, ("w2", x))))
        assert torch.equal(autograd.get_gradients(context)[x].to_dense(), 2.0 * (x.to_dense() != 0))


class Keeping(torch.autograd.Function):
    """Gives one gradient to two leaves, or keeps a reference to it."""

    kept: torch.Tensor

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        return inputs[0] + inputs[-1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        Keeping.kept = gradient
        return (gradient,) * len(ctx.needs_input_grad)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("layout", ["dense", "sparse"])
def test_gradients_have_memory_of_their_own(count: int, layout: str) -> None:
    leaves = [leaf() if layout == "dense" else sparse(1.0, 2.0) for _ in range(count)]
    with autograd.context() as context:
        made = Keeping.apply(*leaves)
        autograd.backward(context, torch.sparse.sum(made * made) if layout == "sparse" else (made * made).sum())
        found = autograd.get_gradients(context)
        wanted = Keeping.kept.to_dense().clone()
        for each in leaves:
            found[each].mul_(0)
            assert not found[each].to_dense().any()
        assert torch.equal(Keeping.kept.to_dense(), wanted)


@pytest.mark.parametrize("arrives", [False, True])
def test_gradients_of_nodes_apart_have_memory_of_their_own(arrives: bool) -> None:
    """The node waits for another worker, and so runs by hand; or the leaf's gradient arrives for its output, too."""
    x, inner = leaf(), leaf() * 1
    with autograd.context() as context:
        made = rpc_sync("w1", torch.add, (x, Keeping.apply(inner))) if arrives else Keeping.apply(x, inner)
        other = inner if arrives else rpc_sync("w1", torch.mul, (inner, inner))
        autograd.backward(context, (made * made + other).sum())
        wanted = Keeping.kept.clone()
        autograd.get_gradients(context)[x].mul_(0)
        assert torch.equal(Keeping.kept, wanted)


def test_the_graph_is_searched_once_for_all_received_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    search = Mock(wraps=engine.outputs_reached)
    monkeypatch.setattr(engine, "outputs_reached", search)
    with autograd.context() as context:
        made = [rpc_sync("w1", torch.aminmax, (leaf() * 1,)) for _ in range(3)]
        autograd.backward(context, torch.stack([least for least, _ in made]).sum())
    assert search.call_count == 1


class Telling(Passing):
    """Records the address of the gradient that it gives."""

    given = 0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        given = gradient.contiguous()
        Telling.given = given.data_ptr()
        return given


def test_a_gradient_without_other_references_is_not_copied() -> None:
    x = leaf()
    with autograd.context() as context:
        autograd.backward(context, Telling.apply(x).sum())
        assert autograd.get_gradients(context)[x].data_ptr() == Telling.given


def test_compiled_code_does_not_copy_such_a_gradient() -> None:
    """Torch's compiler then evaluates all frames of the process, and a Python call holds another reference."""
    x = leaf()

    def step() -> int:
        with autograd.context() as context:
            autograd.backward(context, Telling.apply(x).sum())
            return autograd.get_gradients(context)[x].data_ptr()

    assert torch.compile(step, backend="eager")() == Telling.given
