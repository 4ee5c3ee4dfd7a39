"""Operators on references: they run at the owner, and their results stay there."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

Operator = Callable[..., Any]


def is_tensor_method(name: str) -> bool:
    """Return True if references offer this method of tensors; another layer handles `backward`."""
    return not name.startswith("_") and name != "backward" and callable(getattr(torch.Tensor, name, None))


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *others: self._operate(function, self, *others)


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: self._operate(function, other, self)


class Operators:
    """Gives a class every operator; `_operate(function, *operands)` implements them."""

    __slots__ = ()

    _operate: Callable[..., Any]

    # Without these Python would iterate with __getitem__, without end.
    __iter__ = None
    __contains__ = None

    def __getitem__(self, index: Any) -> Any:
        return self._operate(operator.getitem, self, index)

    __add__: Operator = _plain(operator.add)
    __sub__: Operator = _plain(operator.sub)
    __mul__: Operator = _plain(operator.mul)
    __matmul__: Operator = _plain(operator.matmul)
    __truediv__: Operator = _plain(operator.truediv)
    __floordiv__: Operator = _plain(operator.floordiv)
    __mod__: Operator = _plain(operator.mod)
    __pow__: Operator = _plain(operator.pow)
    __and__: Operator = _plain(operator.and_)
    __or__: Operator = _plain(operator.or_)
    __xor__: Operator = _plain(operator.xor)
    __lshift__: Operator = _plain(operator.lshift)
    __rshift__: Operator = _plain(operator.rshift)

    __radd__: Operator = _reflected(operator.add)
    __rsub__: Operator = _reflected(operator.sub)
    __rmul__: Operator = _reflected(operator.mul)
    __rmatmul__: Operator = _reflected(operator.matmul)
    __rtruediv__: Operator = _reflected(operator.truediv)
    __rfloordiv__: Operator = _reflected(operator.floordiv)
    __rmod__: Operator = _reflected(operator.mod)
    __rpow__: Operator = _reflected(operator.pow)
    __rand__: Operator = _reflected(operator.and_)
    __ror__: Operator = _reflected(operator.or_)
    __rxor__: Operator = _reflected(operator.xor)
    __rlshift__: Operator = _reflected(operator.lshift)
    __rrshift__: Operator = _reflected(operator.rshift)

    # Equality compares the references themselves.
    __lt__: Operator = _plain(operator.lt)
    __le__: Operator = _plain(operator.le)
    __gt__: Operator = _plain(operator.gt)
    __ge__: Operator = _plain(operator.ge)

    __neg__: Operator = _plain(operator.neg)
    __pos__: Operator = _plain(operator.pos)
    __abs__: Operator = _plain(operator.abs)
    __invert__: Operator = _plain(operator.invert)
