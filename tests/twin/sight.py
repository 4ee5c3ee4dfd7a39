"""Describe the values of a program as plain data, and compare two accounts of one program.

`describe` needs only torch, since scripts that are printed or started contain its text.
"""

import math
from typing import Any

import torch


def describe(value: Any) -> Any:
    """Return the visible properties of a value as plain data, which later changes do not affect."""
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            dense = value.detach().to_dense().to(torch.complex128 if value.is_complex() else torch.float64)
            if type(dense) is not torch.Tensor:
                dense = dense.as_subclass(torch.Tensor)
            flat = dense.flatten().tolist()
        if len(flat) > 64:
            flat = [*flat[:16], sum(flat), sum(abs(each) for each in flat)]
        kinds = (type(value).__name__, str(value.dtype), tuple(value.shape), str(value.layout))
        return ("tensor", *kinds, value.requires_grad, vars(value) and describe(vars(value)), flat)
    if isinstance(value, BaseException):  # later lines name workers or give advice
        said = str(value).partition("\nOn worker ")[0].partition("\nIf that is a parameter")[0]
        return ("error", type(value).__name__, said)
    if isinstance(value, dict):
        return ("dict", [(describe(key), describe(each)) for key, each in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [describe(each) for each in value])
    if isinstance(value, (int, float, complex, str, bytes, type(None))):
        return value
    if isinstance(value, (torch.dtype, torch.Size, torch.device)):
        return str(value)
    if isinstance(value, (set, frozenset)):
        return (type(value).__name__, sorted(map(repr, value)))
    return (type(value).__name__, describe(getattr(value, "__dict__", {})))


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Return the differences of two accounts, one line for each place."""
    if isinstance(one, (list, tuple)) and type(one) is type(other) and len(one) == len(other):
        return [
            line
            for number, (a, b) in enumerate(zip(one, other, strict=True))
            for line in differences(a, b, f"{where}[{number}]")
        ]
    if isinstance(one, dict) and isinstance(other, dict):
        return [
            line
            for key in {**one, **other}
            for line in differences(one.get(key, "(not seen)"), other.get(key, "(not seen)"), f"{where} {key}")
        ]
    if type(one) is type(other) and (one == other or _close(one, other)):
        return []
    return [f"{where}: {one!r} in one process, {other!r} on workers"]


def _close(one: Any, other: Any) -> bool:
    """Return True if numbers differ only by the order of a sum."""
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)
    return isinstance(one, complex) and abs(one - other) <= 1e-9 * max(1.0, abs(one))
