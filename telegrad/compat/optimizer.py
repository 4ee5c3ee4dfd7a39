"""`torch.distributed.optim.optimizer`."""

from telegrad.compat.missing import missing_from
from telegrad.compat.rpc.references import RRef  # noqa: F401 - public in torch's module
from telegrad.optim import DistributedOptimizer

__all__ = ["DistributedOptimizer"]

__getattr__ = missing_from("torch.distributed.optim.optimizer")
