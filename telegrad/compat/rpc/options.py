"""`torch.distributed.rpc.options`."""

from telegrad.compat.missing import missing_from
from telegrad.rpc import TensorPipeRpcBackendOptions

__all__ = ["TensorPipeRpcBackendOptions"]

__getattr__ = missing_from("torch.distributed.rpc.options")
