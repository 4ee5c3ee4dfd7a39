"""`torch._C._distributed_rpc_testing`: torch's fault-injecting agent, which Telegrad does not have."""

from telegrad.compat.missing import missing_from

__all__: list[str] = []

__getattr__ = missing_from("torch._C._distributed_rpc_testing")
