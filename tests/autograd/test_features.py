"""Features of torch's autograd give the same bits in a context as in one process, or an error at once."""

import linecache
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from telegrad import autograd
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from telegrad.errors import CannotEncode, TelegradWarning, UsageError
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer
from telegrad.rpc import rpc_sync
from tests.autograd.functions import leaf, mix, two
from tests.cluster import in_threads

Found = Sequence[Tensor | None]


pytestmark = pytest.mark.usefixtures("contexts_end")


class Local:
    """Calls and differentiates in one process."""

    def call(self, to: str, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def backward(self, loss: Tensor, **options: Any) -> None:
        loss.backward(**options)

    def gradients(self, *leaves: Tensor) -> list[Tensor | None]:
        return [each.grad for each in leaves]


class Remote(Local):
    """Calls and differentiates over workers, in a context."""

    def __init__(self, context: int) -> None:
        self.context = context

    def call(self, to: str, function: Callable[..., Any], *args: Any) -> Any:
        return rpc_sync(to, function, args)

    def backward(self, loss: Tensor, **options: Any) -> None:
        autograd.backward(self.context, loss, **options)

    def gradients(self, *leaves: Tensor) -> list[Tensor | None]:
        found = autograd.get_gradients(self.context)
        return [found.get(each) for each in leaves]


def complex_leaf() -> Tensor:
    return torch.complex(leaf(), leaf(seed=2)).detach().requires_grad_()


def looked_up(weight: Tensor, rows: Tensor) -> Tensor:
    return nn.functional.embedding(rows, weight, sparse=True)


def unlike(one: Tensor, other: Tensor) -> bool:
    return one.layout != other.layout or not torch.equal(one.detach().to_dense(), other.detach().to_dense())


# Programs, each of which returns its gradients and the arguments of its hooks


def checkpoint_around_a_call(own: Local) -> Found:
    x, weight = leaf(), leaf(seed=3)
    made = checkpoint(lambda value: own.call("w1", mix, value, weight) * weight.exp(), x * 3, use_reentrant=False)
    own.backward(made.sum())
    return own.gradients(x, weight)


def hooks_of_tensors(own: Local) -> Found:
    x, seen = leaf(), list[Tensor]()
    inner = x * 2
    inner.register_hook(lambda gradient: seen.append(gradient.clone()))
    inner.register_hook(lambda gradient: gradient * 3)
    x.register_hook(lambda gradient: gradient + 1)
    made = own.call("w1", mix, inner, inner)
    made.register_hook(lambda gradient: gradient * 5)
    made.retain_grad()
    own.backward((made + inner).sum())
    return [*own.gradients(x), *seen, made.grad]


def hooks_of_modules(own: Local) -> Found:
    torch.manual_seed(1)
    net, seen = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double(), list[Tensor]()

    def see(_: nn.Module, given: Any, taken: Any) -> Any:
        seen.extend([given[0].clone(), taken[0].clone()])
        return (given[0] * 2,)

    net.register_full_backward_hook(see)

    def triple(_: nn.Module, taken: Any) -> Any:
        return (taken[0] * 3,)

    net.register_full_backward_pre_hook(triple)
    net.register_full_backward_hook(see)
    x = leaf(2, 3)
    own.backward(own.call("w1", torch.sin, net(own.call("w2", torch.sin, x))).sum())
    return [*own.gradients(x, *net.parameters()), *seen]


def hooks_of_nodes(own: Local) -> Found:
    x = leaf()
    inner = x.sin()
    assert inner.grad_fn is not None
    inner.grad_fn.register_prehook(lambda taken: (taken[0] * 3,))
    inner.grad_fn.register_hook(lambda given, taken: (given[0] * 2,))
    received = own.call("w1", mix, inner, inner)
    received.grad_fn.register_prehook(lambda taken: (taken[0] * 5,))
    own.backward(received.sum())
    return own.gradients(x)


def after_accumulation(change: Callable[[Tensor], None]) -> Callable[[Local], Found]:
    def program(own: Local) -> Found:
        x = leaf()
        x.register_post_accumulate_grad_hook(change)
        for _ in range(2):
            own.backward((own.call("w1", torch.sin, x) + x * 2).sum())
        return [*own.gradients(x), x.detach()]

    return program


def replace_gradient(own: Tensor) -> None:
    assert own.grad is not None
    own.grad = own.grad * 2


def change_gradient(own: Tensor) -> None:
    assert own.grad is not None
    own.grad.mul_(2)


def step_and_drop(own: Tensor) -> None:
    optimizer = torch.optim.SGD([own], lr=0.1)
    with torch.no_grad():
        optimizer.step()
    optimizer.zero_grad()


def a_hook_of_several_tensors(own: Local) -> Found:
    x, y, seen = leaf(), leaf(seed=2), list[Tensor]()
    received = own.call("w1", mix, x, y), own.call("w2", mix, y, x)
    torch.autograd.graph.register_multi_grad_hook(received, seen.extend)
    own.backward((received[0] * received[1]).sum())
    return [*own.gradients(x, y), *seen]


def sparse_and_dense(own: Local) -> Found:
    weight, other, rows = leaf(5, 3), leaf(5, 3), torch.tensor([1, 1, 3])
    own.backward((own.call("w1", looked_up, weight, rows) + own.call("w1", looked_up, other, rows)).sum() + other.sum())
    return own.gradients(weight, other)


def sparse_matrices(own: Local) -> Found:
    matrix, x = torch.eye(3, dtype=torch.float64).to_sparse().requires_grad_(), leaf(3, 3)
    own.backward(own.call("w1", torch.sparse.mm, matrix, x).sum())
    return own.gradients(matrix, x)


def no_elements(own: Local) -> Found:
    empty, x = leaf(0, 3), leaf(2, 3)
    own.backward(own.call("w1", torch.cat, [empty * 2, x * 2]).sum() + own.call("w1", mix, empty, empty).sum())
    return own.gradients(empty, x)


def lazy_modules(own: Local) -> Found:
    torch.manual_seed(0)
    net, x = nn.LazyLinear(3, dtype=torch.float64), leaf(2, 3)
    own.backward(net(own.call("w1", mix, x, x)).sum())
    return own.gradients(x, *net.parameters())


def tangents_of_one_worker(own: Local) -> Found:
    x = leaf().detach()
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(forward_ad.make_dual(x, x * 2).sin()).tangent
        return [own.call("w1", mix, tangent, tangent)]


def modes_of_one_process(own: Local) -> Found:
    x = leaf()
    with torch.autograd.set_multithreading_enabled(False), torch.autograd.graph.allow_mutation_on_saved_tensors():
        own.backward((own.call("w1", mix, x, x) * x).sum())
    return own.gradients(x)


SAME = [
    *(checkpoint_around_a_call, hooks_of_tensors, hooks_of_modules, hooks_of_nodes, a_hook_of_several_tensors),
    *(sparse_and_dense, sparse_matrices, no_elements, lazy_modules, tangents_of_one_worker, modes_of_one_process),
]
CHANGES = [replace_gradient, change_gradient, step_and_drop]


def check_same(program: Callable[[Local], Found]) -> None:
    wanted = program(Local())
    with autograd.context() as context:
        found = program(Remote(context))
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or not unlike(one, other)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("program", SAME)
def test_programs_give_the_same_as_in_one_process(program: Callable[[Local], Found]) -> None:
    check_same(program)


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_a_hook_after_accumulation_are_kept(change: Callable[[Tensor], None]) -> None:
    check_same(after_accumulation(change))


def test_threads_with_contexts_that_run_each_graph_twice(five: list[Worker]) -> None:
    def run(seed: int) -> Found:
        current.enter(five[0])
        x = leaf(seed=seed)
        with autograd.context() as context:
            loss = (rpc_sync("w1", mix, (x, x)) ** 2).sum()
            autograd.backward(context, loss, retain_graph=True)
            autograd.backward(context, loss)
            return [autograd.get_gradients(context)[x]]

    found = in_threads(*[lambda seed=seed: run(seed) for seed in range(4)])
    for seed, (gradient,) in enumerate(found):
        x = leaf(seed=seed)
        loss = (mix(x, x) ** 2).sum()
        for _ in range(2):
            loss.backward(retain_graph=True)
        assert torch.equal(gradient, x.grad)  # type: ignore[arg-type]


# Refused programs


def tangents_for_another_worker(own: Remote) -> None:
    with forward_ad.dual_level():
        own.call("w1", mix, forward_ad.make_dual(leaf().detach(), leaf().detach()), leaf())


def a_complex_root(own: Remote) -> None:
    own.backward(own.call("w1", mix, complex_leaf(), complex_leaf()).sum())


def a_hook_of_tensors_of_two_parts(own: Remote) -> None:
    x = leaf()
    received, _ = own.call("w1", two, x * 2, x)
    torch.autograd.graph.register_multi_grad_hook((received, x * 3), lambda _: None)
    own.backward(received.sum())


def a_hook_of_a_tensor_and_a_leaf(own: Remote) -> None:
    x = leaf()
    received, _ = own.call("w1", two, x, x)
    torch.autograd.graph.register_multi_grad_hook((received, x), lambda _: None)
    own.backward(received.sum())


def a_hook_that_returns_something(own: Remote) -> None:
    x = leaf()
    x.register_post_accumulate_grad_hook(lambda own: own)
    own.backward(own.call("w1", mix, x, x).sum())


def a_hook_of_a_received_node(own: Remote) -> None:
    received = own.call("w1", mix, leaf(), leaf())
    received.grad_fn.register_hook(lambda given, taken: (taken[0], *given[1:]))
    own.backward(received.sum())


def torch_jacobian(own: Remote) -> None:
    torch.autograd.functional.jacobian(lambda x: own.call("w1", mix, x, x), leaf())


def a_second_pass(own: Remote) -> None:
    x = leaf()
    loss = own.call("w1", mix, x, x).sum()
    own.backward(loss)
    own.backward(loss)


REFUSED: dict[Callable[[Remote], None], tuple[type[Exception], str]] = {
    tangents_for_another_worker: (CannotEncode, "with a tangent"),
    a_complex_root: (UsageError, "is complex"),
    a_hook_of_tensors_of_two_parts: (UsageError, "cannot wait for all gradients"),
    a_hook_of_a_tensor_and_a_leaf: (UsageError, "cannot wait for all gradients"),
    a_hook_that_returns_something: (RuntimeError, "should return None"),
    a_hook_of_a_received_node: (RuntimeError, "can't replace a None gradient"),
    torch_jacobian: (UsageError, r"telegrad\.autograd\.grad"),
    a_second_pass: (RuntimeError, "a second time"),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("program", REFUSED)
def test_a_refused_program_fails_at_once(program: Callable[[Remote], None]) -> None:
    kind, text = REFUSED[program]
    with autograd.context() as context, pytest.raises(kind, match=text):
        program(Remote(context))


def test_a_local_optimizer_in_a_context_warns_that_it_does_nothing() -> None:
    model = nn.Sequential(RemoteModule("w1", nn.Linear, (3, 3)), nn.Linear(3, 3))
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = DistributedOptimizer.for_module(torch.optim.SGD, model, lr=0.1)
    with autograd.context() as context:
        plain.step()
        autograd.backward(context, model(torch.ones(2, 3)).sum())
        whole.step(context)
        with pytest.warns(TelegradWarning, match=r"SGD steps with the gradients in \.grad") as said:
            plain.step()
        assert len(said) == 1
        for each, gradient in autograd.get_gradients(context).items():
            each.grad = gradient
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            plain.step()
            current.enter(None)  # the process has left its group
            plain.step()


def test_a_local_optimizer_behind_a_context_warns_once_that_it_does_nothing() -> None:
    model = nn.Sequential(RemoteModule("w1", nn.Linear, (3, 3)), nn.Linear(3, 3))
    plain, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    whole = DistributedOptimizer.for_module(torch.optim.SGD, model, lr=0.1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            with autograd.context() as context:
                autograd.backward(context, model(torch.ones(2, 3)).sum())
                whole.step(context)
            for each in (plain, other):
                each.step()
    (only,) = said  # of one line
    assert "each.step()" in linecache.getline(only.filename, only.lineno)
    with pytest.warns(TelegradWarning, match=r"SGD steps, but none .* in \.grad.*for_module\(torch\.optim\.SGD"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()


class Wraps(torch.optim.SGD):
    """An optimizer that leaves its step to another one, as `ZeroRedundancyOptimizer` does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups)
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def test_a_local_optimizer_behind_a_context_is_not_warned_of_without_need() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    plain, searching = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.LBFGS(model.parameters())
    whole = DistributedOptimizer.for_module(lambda *given: Wraps(torch.optim.SGD(*given)), model)

    def loss() -> torch.Tensor:
        model.zero_grad()
        result: torch.Tensor = model[0](torch.ones(2, 3)).sum()  # the second layer gets no gradients
        result.backward()
        return result

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "none of the parameters")  # of the step below
        with autograd.context() as context:
            whole.step(context)
        plain.step(loss)
        model.zero_grad()
        plain.step(closure=loss)
        plain.step()
        model.zero_grad()
        searching.step(loss)
        torch.optim.SGD(model.requires_grad_(False).parameters()).step()
        model.requires_grad_().zero_grad()
        current.enter(None)  # the process has left its group
        plain.step()


@pytest.mark.parametrize("written", [None, "replaced", "in place"])
def test_a_local_optimizer_in_a_context_warns_of_earlier_gradients(written: str | None) -> None:
    layer = nn.Linear(3, 3)
    plain = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.ones(2, 3)).sum().backward()
    with autograd.context() as context:
        autograd.backward(context, rpc_sync("w1", torch.sin, (layer(torch.ones(2, 3)),)).sum())
        for each, gradient in autograd.get_gradients(context).items():
            if written == "replaced":
                each.grad = gradient
            elif written:
                assert each.grad is not None
                each.grad.copy_(gradient)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            plain.step()
    texts = [str(each.message) for each in said]
    assert len(texts) == (written is None)
    assert all("it changes parameters by gradients of an earlier pass" in text for text in texts)
