"""Operators on references: they run at the owner, and what they return stays there."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch


def is_tensor_method(name: str) -> bool:
    """Whether a reference offers it as if it were the tensor itself; gradients are another layer's subject."""
    return not name.startswith("_") and name != "backward" and callable(getattr(torch.Tensor, name, None))


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *others: self._operate(function, self, *others)


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: self._operate(function, other, self)


class Operators:
    """Gives a class every operator; `_operate(function, *operands)` says what becomes of one."""

    __slots__ = ()

    _operate: Callable[..., Any]

    # Without these Python would try to iterate by __getitem__, for ever.
    __iter__ = None
    __contains__ = None

    def __getitem__(self, index: Any) -> Any:
        return self._operate(operator.getitem, self, index)

    __add__ = _plain(operator.add)
    __sub__ = _plain(operator.sub)
    __mul__ = _plain(operator.mul)
    __matmul__ = _plain(operator.matmul)
    __truediv__ = _plain(operator.truediv)
    __floordiv__ = _plain(operator.floordiv)
    __mod__ = _plain(operator.mod)
    __pow__ = _plain(operator.pow)
    __and__ = _plain(operator.and_)
    __or__ = _plain(operator.or_)
    __xor__ = _plain(operator.xor)
    __lshift__ = _plain(operator.lshift)
    __rshift__ = _plain(operator.rshift)

    __radd__ = _reflected(operator.add)
    __rsub__ = _reflected(operator.sub)
    __rmul__ = _reflected(operator.mul)
    __rmatmul__ = _reflected(operator.matmul)
    __rtruediv__ = _reflected(operator.truediv)
    __rfloordiv__ = _reflected(operator.floordiv)
    __rmod__ = _reflected(operator.mod)
    __rpow__ = _reflected(operator.pow)
    __rand__ = _reflected(operator.and_)
    __ror__ = _reflected(operator.or_)
    __rxor__ = _reflected(operator.xor)
    __rlshift__ = _reflected(operator.lshift)
    __rrshift__ = _reflected(operator.rshift)

    # Equality stays that of the references themselves.
    __lt__ = _plain(operator.lt)
    __le__ = _plain(operator.le)
    __gt__ = _plain(operator.gt)
    __ge__ = _plain(operator.ge)

    __neg__ = _plain(operator.neg)
    __pos__ = _plain(operator.pos)
    __abs__ = _plain(operator.abs)
    __invert__ = _plain(operator.invert)
