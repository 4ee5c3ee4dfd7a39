"""Decorators that control how the callee runs a function: `telegrad.rpc.functions`."""

from telegrad._core.rpc.functions import async_execution, batch, by_value, must_finish

__all__ = ["async_execution", "batch", "by_value", "must_finish"]
