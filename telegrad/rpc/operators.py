"""Operators on references: they run at the owner, and what they return stays there."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

_BINARY = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift")
_COMPARISONS = ("lt", "le", "gt", "ge")  # equality stays that of the references themselves
_UNARY = ("neg", "pos", "abs", "invert")


def is_tensor_method(name: str) -> bool:
    """Whether a reference offers it as if it were the tensor itself; gradients are another layer's subject."""
    return not name.startswith("_") and name != "backward" and callable(getattr(torch.Tensor, name, None))


class Operators:
    """Gives a class every operator; `_operate(function, *operands)` says what becomes of one."""

    __slots__ = ()

    _operate: Callable[..., Any]

    # Without these Python would try to iterate by __getitem__, for ever.
    __iter__ = None
    __contains__ = None

    def __getitem__(self, index: Any) -> Any:
        return self._operate(operator.getitem, self, index)


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *others: self._operate(function, self, *others)


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: self._operate(function, other, self)


for _name in (*_BINARY, *_COMPARISONS, *_UNARY):
    setattr(Operators, f"__{_name.strip('_')}__", _plain(getattr(operator, _name)))
for _name in _BINARY:
    setattr(Operators, f"__r{_name.strip('_')}__", _reflected(getattr(operator, _name)))
