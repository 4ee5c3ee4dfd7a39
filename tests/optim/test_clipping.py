"""Clipping by the norm over all workers."""

from math import inf

import pytest
import torch
from torch import nn

import telegrad.autograd as autograd
from telegrad.errors import ContextEnded, UsageError
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer, clip_grad_norm_
from telegrad.rpc import RRef

pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize("fused", [False, True], ids=["after the pass", "with the pass"])
def test_the_norm_includes_accumulated_gradients(fused: bool) -> None:
    leaf = nn.Parameter(torch.zeros(4))
    optimizer = DistributedOptimizer(torch.optim.SGD, [RRef(leaf)], lr=1)
    with autograd.context() as context:
        autograd.backward(context, leaf.sum())
        optimizer.accumulate(context)
    with autograd.context() as context:
        clipped = optimizer.clipped(1.0)
        autograd.backward(context, leaf.sum(), step=clipped if fused else None)
        if not fused:
            clipped.norm = clip_grad_norm_(context, optimizer, 1.0)
            optimizer.step(context)
    assert clipped.norm == 4
    assert leaf.tolist() == pytest.approx([-0.5] * 4, rel=1e-5)


def test_sparse_gradients() -> None:
    table = RemoteModule("w1", nn.Embedding, (10, 4), {"sparse": True})
    with autograd.context() as context:
        autograd.backward(context, table(torch.tensor([1, 1, 4])).sum())
        references = table.remote_parameters()
        assert clip_grad_norm_(context, references, 1.0) == pytest.approx((4 * 4 + 4 * 1) ** 0.5)
        assert clip_grad_norm_(context, references, 1.0) == pytest.approx(1.0, rel=1e-4)


def test_an_infinite_norm() -> None:
    leaf = nn.Parameter(torch.ones(2))
    with autograd.context() as context:
        autograd.backward(context, (leaf * torch.tensor([inf, 1.0])).sum())
        with pytest.raises(RuntimeError, match="cannot be clipped"):
            clip_grad_norm_(context, [RRef(leaf)], 1.0, error_if_nonfinite=True)
        assert autograd.get_gradients(context)[leaf].tolist() == [inf, 1]
        assert clip_grad_norm_(context, [RRef(leaf)], 1.0) == inf
    optimizer = DistributedOptimizer(torch.optim.SGD, [RRef(leaf)], lr=1)
    loss = (leaf * torch.tensor([inf, 1.0])).sum()
    with autograd.context() as context, pytest.raises(RuntimeError, match="cannot be clipped"):
        autograd.backward(context, loss, step=optimizer.clipped(1.0, error_if_nonfinite=True))
    assert leaf.tolist() == [1, 1]


def test_nothing_to_clip() -> None:
    with autograd.context() as context:
        assert clip_grad_norm_(context, [RRef(nn.Parameter(torch.ones(2)))], 1.0) == 0
    with pytest.raises(ContextEnded):
        clip_grad_norm_(context, [RRef(nn.Parameter(torch.ones(2)))], 1.0)


def test_only_references_can_be_clipped() -> None:
    with pytest.raises(UsageError, match=r"not Linear: write clip_grad_norm_\(context_id, optimizer, max_norm\)"):
        clip_grad_norm_(1, nn.Linear(2, 2), 1.0)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="not Parameter"):
        clip_grad_norm_(1, nn.Linear(2, 2).parameters(), 1.0)  # type: ignore[arg-type]
