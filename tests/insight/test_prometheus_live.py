"""Metrics of a real group."""

from __future__ import annotations

import pytest
import torch

import telegrad.autograd as autograd
from telegrad.insight.prometheus import ServedMetrics, serve_metrics
from telegrad.rpc import remote, rpc_async, rpc_sync
from tests.cluster import Process
from tests.insight.test_prometheus import scrape

pytest.importorskip("telegrad.reporting.introspection")

_served: list[ServedMetrics] = []


def begin() -> int:
    _served.append(serve_metrics(0))
    return _served[0].port


def end() -> None:
    _served.pop().close()


def use() -> None:
    rpc_sync("worker1", torch.add, (torch.ones(100_000), 1))
    rpc_async("worker1", abs, (-1,)).wait()
    for _ in range(3):
        with pytest.raises(ValueError, match="invalid literal"):
            rpc_sync("worker1", int, ("none",))
    remote("worker1", abs, (-1,)).to_here()
    with autograd.context() as context:
        loss = rpc_sync("worker1", torch.sum, (torch.ones(2, requires_grad=True),))
        autograd.backward(context, loss)


def test_two_workers_count_what_they_do(workers: list[Process]) -> None:
    ports = [worker.run(begin) for worker in workers[:2]]
    try:
        workers[0].run(use)
        caller, callee = map(scrape, ports)
        assert caller["telegrad_calls_total", "torch.add", "ok", "worker1"] == 1
        assert caller["telegrad_calls_total", "builtins.int", "raised", "worker1"] == 3
        assert caller["telegrad_call_bytes_total", "torch.add"] == 400_000
        assert caller["telegrad_call_duration_seconds_count", "builtins.abs"] >= 1
        assert caller["telegrad_passes_total", "ok"] == 1
        assert caller["telegrad_phase", "member"] == callee["telegrad_phase", "member"] == 1
        assert caller[("telegrad_members",)] == caller[("telegrad_size",)] == 4
        assert callee["telegrad_served_total", "builtins.int", "ValueError", "worker0"] == 3
        assert callee["telegrad_served_total", "torch.add", "ok", "worker0"] == 1
        assert callee[("telegrad_answered_total",)] >= 6
        assert callee["telegrad_received_bytes_total", "worker0"] > 400_000
        assert callee[("telegrad_resident_memory_bytes",)] > 1 << 20
    finally:
        for worker in workers[:2]:
            worker.run(end)
