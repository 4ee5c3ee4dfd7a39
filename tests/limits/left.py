"""Features that are neither refused nor as in one process: each worker handles them by itself."""

LEFT = {
    "Autograd": """
## `saved_tensors_hooks` around a remote call hold on the worker that registers them
with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved * 2):
    y = call(torch.sin, x * 1.0)
found = gradients_of(y, x)
-> register them in the function that is called
## a `TorchDispatchMode` around a call does not see operators of other workers
from torch.utils._python_dispatch import TorchDispatchMode


class Doubles(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is torch.ops.aten.sin.default else found


with Doubles():
    found = call(torch.sin, x)
-> enter it in the function that is called
## `.grad` of leaves stays empty in a context, for `torch.nn.utils.clip_grad_norm_` too
layer = nn.Linear(3, 3).double()
backward(call(torch.sin, layer(x)).sum())
found = nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
-> `get_gradients(context_id)`, `telegrad.optim.clip_grad_norm_`
## `with torch.device(...)` and `set_default_device` hold on the thread that enters them
with torch.device("meta"):
    found = call(torch.ones, 3).device
-> enter it in the function that is called
## a `TorchFunctionMode` around a call does not see functions of other workers
from torch.overrides import TorchFunctionMode


class Doubles(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is torch.sin else found


with Doubles():
    found = call(torch.sin, x)
-> enter it in the function that is called
## profilers record the operators of the worker that starts them
with torch.autograd.profiler.profile() as profile:
    call(torch.sin, x)
found = "aten::sin" in [each.key for each in profile.key_averages()]
-> [traces](insight.md) of all workers
## a grad mode that a called function sets holds until it returns
call(torch.set_grad_enabled, False)
found = torch.is_grad_enabled()
torch.set_grad_enabled(True)
-> `with torch.no_grad()` around the calls
## hooks of a tensor on both sides of a call: each sees what passes on its worker, the receiver's first
def f(a):
    b = a * 1
    b.register_hook(lambda g: g + 1)
    return b
b = call(f, x)
b.register_hook(lambda g: g * 10)
found = gradients_of(b, x)
-> register all hooks of a tensor on one worker
## a leaf that is sent in a context, or a parameter that is returned, is no leaf where it arrives
found = [call(getattr, x, "is_leaf"), call(nn.Linear, 3, 3).weight.is_leaf]
-> `get_gradients` on the worker that made it
""",
    "Modules": """
## `modules()`, `children()` and the like of a remote module, or of one with such a module inside, leave it out
layers = made(nn.Sequential, nn.Linear(3, 3))
found = [name for name, _ in layers.named_modules()]
-> `remote_parameters()`, `apply()`; functions that are called with `get_module_rref()`
## attributes that are set on a remote module are those of the handle
layer = made(nn.Dropout, 0.5)
layer.p = 0.0
found = layer(torch.ones(3, 3))
-> a function that is called with `get_module_rref()`
## `parameters()` of a module with a remote module inside are those of this worker
model = nn.Sequential(made(nn.Linear, 3, 3), nn.Linear(3, 3))
found = len(list(model.parameters()))
-> `DistributedOptimizer.for_module`
## `torch.optim.swa_utils.update_bn` of a remote module does nothing, as `modules()` has none of its parts
layer = made(nn.BatchNorm1d, 3)
torch.optim.swa_utils.update_bn([torch.arange(9.0).reshape(3, 3)], layer)
found = layer.state_dict()["running_mean"]
-> a function that is called with `get_module_rref()`
""",
    "Optimizers": """
## an optimizer of torch that steps in a context, or behind it, finds no gradients, as a `TelegradWarning` says
layer = nn.Linear(3, 3).double()
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
backward(call(torch.sin, layer(x)).sum())
optimizer.step()
found = layer.state_dict()
-> `DistributedOptimizer`
## `state` of a `DistributedOptimizer` is empty: the owners of the parameters have it
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
optimizer = Opt(torch.optim.Adam, layer, lr=0.1)
stepped(layer, optimizer)
found = len(optimizer.own.state)
-> `state_dict()`
""",
    "Tensors": """
## `.grad` of a tensor that is sent does not travel
x.grad = torch.ones_like(x)
found = call(getattr, x, "grad")
-> send it as a value of its own
## what arrives is in memory of the receiver's own: not pinned, not shared
found = call(echo, torch.ones(3).share_memory_()).is_shared()
-> `share_memory_()` there
## arrays of numpy that share memory with one another, or with a tensor, may arrive apart
import numpy
def written(one, other):
    one += 1
    return float(other.sum())
whole = numpy.zeros(4)
found = [call(written, whole, whole[1:]), call(written, whole, torch.from_numpy(whole))]
-> the tensor alone, `torch.from_numpy(array)`, and `numpy()` there
## tensors that were made in `inference_mode` arrive as ordinary ones
with torch.inference_mode():
    made_so = torch.ones(3)
found = call(torch.Tensor.is_inference, made_so)
-> nothing: they can be saved for backward there
## `grad_dtype` of a leaf that is sent itself: its gradient comes back in the data type of the leaf
half = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
half.grad_dtype = torch.float32
backward(call(torch.Tensor.float, half).sum())
found = [each.dtype for each in gradients(half)]
-> convert before it is sent: `half.float()`
""",
    "Functions and values": """
## arguments and results are copies: writes in place, `out=` and the states of generators stay where they are
total, chance = torch.zeros(3), torch.Generator().manual_seed(3)
call(torch.add, torch.ones(3), torch.ones(3), out=total)
call(torch.rand, 3, generator=chance)
found = [total, torch.rand(3, generator=chance)]
-> return what has changed
## what a closure has captured goes with each call, as a copy: what the function changes in it there is lost
def make():
    count = 0
    def step():
        nonlocal count
        count += 1
        return count
    return step
step = make()
found = [call(step), call(step)]
-> a class, whose instance is at the worker: `rpc.remote`
""",
}

LEFT_TO_PROCESSES = {
    "Functions and values": """
## default dtype, deterministic algorithms, anomaly mode, precision of matrix products, kernels of attention
torch.set_default_dtype(torch.float64)
torch.use_deterministic_algorithms(True)
torch.autograd.set_detect_anomaly(True)
torch.set_float32_matmul_precision("medium")
torch.backends.cuda.enable_flash_sdp(False)
-> `rpc.group().rpc_sync(torch.set_default_dtype, (torch.float64,))`
"""
}
