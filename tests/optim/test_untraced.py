"""Torch's optimizers without its tracer take the same steps, without an import that takes seconds."""

import inspect
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

import telegrad.autograd as autograd
import telegrad.rpc as rpc
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer, clip_grad_norm_, optimizer
from telegrad.optim import owner as untraced
from tests.cluster import group, processes, run_all

ALL = sorted(
    (each for each in vars(torch.optim).values() if isinstance(each, type) and issubclass(each, Optimizer)),
    key=lambda kind: kind.__name__,
)
ALL = [kind for kind in ALL if kind not in (Optimizer, torch.optim.LBFGS)]


class Own(Optimizer):
    def __init__(self, params: list[dict[str, list[nn.Parameter]]] | list[nn.Parameter]) -> None:
        super().__init__(params, {})

    def step(self) -> None:  # type: ignore[override]
        pass


class Plain(torch.optim.SGD):
    pass


class Above(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def traces() -> bool:
    return untraced.TRACER in sys.modules


def train(rank: int) -> bool:
    """Use all features of an optimizer on the first worker, over parameters of the second."""
    if rank:
        return traces()
    layer = RemoteModule("worker1", nn.Linear, (4, 4))
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        made = DistributedOptimizer.for_module(kind, layer, lr=0.1)
        made.add_param_group({"params": RemoteModule("worker1", nn.Linear, (4, 4)).get_module_rref(), "lr": 0.2})
        scheduler = torch.optim.lr_scheduler.StepLR(made, 1)
        with autograd.context() as context:
            autograd.backward(context, layer(torch.ones(1, 4)).sum())
            clip_grad_norm_(context, made, 1.0)
            made.step(context)
        scheduler.step()
        made.load_state_dict(made.state_dict())
    return traces() or bool(rpc.rpc_sync("worker1", traces))


def test_training_over_remote_parameters_does_not_import_the_tracer() -> None:
    with group(2) as workers:
        assert run_all(workers, train) == [False, False]


def stepped(kind: Any, options: dict[str, bool], untracedly: bool) -> tuple[torch.Tensor, str]:
    """Return a parameter after some steps, and the state of the optimizer."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(6, 4))
    own = kind([{"params": [parameter]}], **options)
    step = untraced.step_of(own) if untracedly else own.step
    for _ in range(3):
        gradient = parameter.detach() * 0.5 + 1
        parameter.grad = gradient.to_sparse() if isinstance(own, torch.optim.SparseAdam) else gradient
        step()
    own.load_state_dict(own.state_dict())
    return parameter.detach(), str(own.state_dict())


def step_all() -> tuple[list[dict[tuple[str, str], tuple[torch.Tensor, str]]], list[bool]]:
    """Step with each optimizer of torch, untraced and traced; return the results, and when the tracer was imported."""
    found: list[dict[tuple[str, str], tuple[torch.Tensor, str]]] = [{}, {}]
    imported = []
    for results in found:
        for kind in ALL:
            for options in ({}, {"foreach": True}, {"fused": True}):
                if options.keys() <= inspect.signature(kind).parameters.keys():
                    results[kind.__name__, str(options)] = stepped(kind, options, results is found[0])
        imported.append(traces())
    return found, imported


def test_untraced_steps_equal_traced_steps() -> None:
    with processes(1) as (process,):
        (ours, theirs), imported = process.run(step_all)
    assert imported == [False, True]
    assert len(ours) > 25
    for each, (parameter, state) in ours.items():
        assert torch.equal(parameter, theirs[each][0]), each
        assert state == theirs[each][1], each


def run_hooks() -> tuple[list[Any], bool]:
    """Return the hook calls of an untraced step, in order, and True if the tracer was imported."""
    seen: list[Any] = []
    parameter = nn.Parameter(torch.ones(2))
    own = torch.optim.SGD([{"params": [parameter]}], lr=0.1)
    own.register_step_pre_hook(lambda *_: seen.append(("before", torch.is_grad_enabled())))
    own.register_step_post_hook(lambda *_: seen.append(("after", torch.is_grad_enabled())))
    everywhere = register_optimizer_step_post_hook(lambda *_: seen.append("everywhere"))
    own.register_state_dict_post_hook(lambda *_: seen.append("state"))
    with torch.autograd.profiler.profile() as profile:
        untraced.step_of(own)()
    everywhere.remove()
    own.state_dict()
    seen.append(any("Optimizer.step#SGD.step" in event.name for event in profile.function_events))
    return seen, traces()


def test_hooks_and_profilers_see_untraced_steps() -> None:
    with processes(1) as (process,):
        seen, imported = process.run(run_hooks)
    assert seen == [("before", True), ("after", True), "everywhere", "state", True]
    assert not imported


def test_the_guard_of_an_imported_tracer_is_called() -> None:
    untraced.import_tracer()
    own = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    asked = []
    guard: Any = type(own).step.__wrapped__  # type: ignore[attr-defined]

    def watch(*args: torch.optim.SGD) -> Any:
        asked.append(args)
        return guard(*args)

    guarded: Any = watch
    guarded.__code__ = guarded.__code__.replace(co_names=(*guarded.__code__.co_names, untraced.TRACER))
    guarded.__wrapped__ = guard.__wrapped__

    class Watched(torch.optim.SGD):
        step = guarded

    watched = Watched([nn.Parameter(torch.ones(2))], lr=0.1)
    untraced.step_of(watched)()
    assert asked == [(watched,)]
    kept = vars(Optimizer.add_param_group.__wrapped__)[untraced._CACHE]  # type: ignore[attr-defined]
    assert kept.__module__ != untraced.__name__


@pytest.mark.parametrize(
    ("make", "imports"),
    [(torch.optim.SGD, False), (Plain, False), (Own, False), (Above, True), (lambda own: Own(own), True)],
)
def test_may_import_knows_the_optimizers_that_import_the_tracer(make: Callable[..., Any], imports: bool) -> None:
    assert untraced.may_import(make) is imports
    if not imports:
        make([nn.Parameter(torch.ones(2))])  # makes torch wrap the step of the class
        assert untraced.may_import(make) is imports


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("make", [Above, Own])
def test_an_import_of_the_tracer_does_not_count_against_a_timeout(
    make: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Mock(wraps=rpc.rpc_async)
    monkeypatch.setattr(optimizer, "rpc_async", noted)
    DistributedOptimizer.for_module(make, RemoteModule("w1", nn.Linear, (2, 2)))
    imported = [each for each in noted.call_args_list if each.args[1] is untraced.import_tracer]
    assert imported == ([call("w1", untraced.import_tracer, timeout=0)] if make is Above else [])
