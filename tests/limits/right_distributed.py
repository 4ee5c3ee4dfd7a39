"""What is right as it is in one process: what is made of modules and optimizers by a process group of one.

Each program runs twice: in one process, and with its calls, modules and optimizers on another worker.
"""

from __future__ import annotations

GROUP = """
import torch.distributed as dist
if not dist.is_initialized():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""

MODULES = {
    "`DistributedDataParallel`, made there or on this worker": GROUP
    + """
def make():
    return nn.parallel.DistributedDataParallel(nn.Linear(3, 3).double())
layer = made(make)
optimizer = Opt(torch.optim.SGD, layer, lr=0.1)
backward(layer(x).sum())
optimizer.step()
here = make()
backward(call(torch.sin, here(x)).sum())
found = [*gradients(x, *here.parameters()), layer.state_dict()]
""",
    "`no_sync`, `Join`, `gradient_as_bucket_view` and `find_unused_parameters` of such": GROUP
    + """
from torch.distributed.algorithms.join import Join
layer = nn.Linear(3, 3).double()
options = {"gradient_as_bucket_view": True, "find_unused_parameters": True}
m = nn.parallel.DistributedDataParallel(layer, **options)
with m.no_sync():
    backward(call(torch.sin, m(x)).sum())
with Join([m]):
    backward(call(torch.sin, m(x)).sum())
found = gradients(x, *m.parameters())
""",
    "communication hooks of `DistributedDataParallel`": GROUP
    + """
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook
def doubled(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer() * 2)
    return future
found = []
wrapped = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
hooks = [default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, debugging_hooks.noop_hook, wrapped, doubled]
for hook in [*hooks, powerSGD_hook.powerSGD_hook]:
    def make():
        m = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
        state = None
        if hook is powerSGD_hook.powerSGD_hook:
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        m.register_comm_hook(state, hook)
        return m
    layer = made(make)
    optimizer = Opt(torch.optim.SGD, layer, lr=0.1)
    backward(layer(x.float()).sum())
    optimizer.step()
    found.append(layer.state_dict())
""",
    "tensor-parallel modules": GROUP
    + """
from torch.distributed.tensor.parallel import parallelize_module, ColwiseParallel
from torch.distributed.tensor import init_device_mesh
def make():
    mesh = init_device_mesh("cpu", (1,))
    return parallelize_module(nn.Sequential(nn.Linear(3, 3).double()), mesh, {"0": ColwiseParallel()})
m = made(make)
optimizer = Opt(torch.optim.SGD, m, lr=0.1)
backward(m(x).sum())
optimizer.step()
found = [*gradients(x)]
""",
    "`torch.distributed.checkpoint` of a remote module": GROUP
    + """
import torch.distributed.checkpoint as dcp, tempfile
layer = made(nn.Linear, 3, 3)
d = tempfile.mkdtemp()
dcp.save({"m": layer}, checkpoint_id=d, no_dist=True)
s = layer.state_dict()
layer.load_state_dict({k: v + 1 for k, v in s.items()})
dcp.load({"m": layer}, checkpoint_id=d, no_dist=True)
found = layer.state_dict()
""",
    "collectives inside of a function that is called, with their gradients": GROUP
    + """
import torch.distributed.nn.functional as F
def f(a):
    return F.all_reduce(a * 2)
backward(call(f, x).sum())
found = gradients(x)
""",
}

OPTIMIZERS = {
    "`ZeroRedundancyOptimizer`, `PostLocalSGDOptimizer`, in classes that take parameters alone": GROUP
    + """
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
class Zero(ZeroRedundancyOptimizer):
    def __init__(self, params, lr):
        super().__init__(params, torch.optim.Adam, lr=lr)
class PostLocal(PostLocalSGDOptimizer):
    def __init__(self, params, lr):
        averager = PeriodicModelAverager(period=1, process_group=dist.group.WORLD)
        super().__init__(torch.optim.SGD(params, lr), averager)
found = []
for kind in (Zero, PostLocal):
    layer = made(nn.Linear, 3, 3, dtype=torch.float64)
    optimizer = Opt(kind, layer, lr=0.1)
    backward(layer(x).sum())
    optimizer.step()
    found.append(layer.state_dict())
"""
}

TENSORS = {
    "`DTensor` and `DeviceMesh`": GROUP
    + """
from torch.distributed.tensor import distribute_tensor, Shard, init_device_mesh
mesh = init_device_mesh("cpu", (1,))
d = distribute_tensor(torch.ones(3, 3), mesh, [Shard(0)])
r = call(echo, d)
found = [type(r).__name__, r.to_local(), str(r.placements), str(call(echo, mesh))]
"""
}
