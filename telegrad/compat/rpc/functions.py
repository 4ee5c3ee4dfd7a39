"""`torch.distributed.rpc.functions`."""

from telegrad.compat.missing import missing_from
from telegrad.rpc.functions import async_execution

__all__ = ["async_execution"]

__getattr__ = missing_from("torch.distributed.rpc.functions")
