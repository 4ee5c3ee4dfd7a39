"""What is neither refused nor as in one process: each worker does it for itself."""

from __future__ import annotations

from tests.limits.page import Left

LEFT = [
    Left(
        "Autograd",
        "`saved_tensors_hooks` around a remote call hold on the worker that registers them",
        """
with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved * 2):
    y = call(torch.sin, x * 1.0)
backward(y.sum())
found = gradients(x)
""",
        "register them in the function that is called",
    ),
    Left(
        "Autograd",
        "a `TorchDispatchMode` around a call does not see operators of other workers",
        """
from torch.utils._python_dispatch import TorchDispatchMode


class Doubles(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is torch.ops.aten.sin.default else found


with Doubles():
    found = call(torch.sin, x)
""",
        "enter it in the function that is called",
    ),
    Left(
        "Autograd",
        "`.grad` of leaves stays empty in a context, for `torch.nn.utils.clip_grad_norm_` too",
        """
layer = nn.Linear(3, 3).double()
backward(call(torch.sin, layer(x)).sum())
found = nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
""",
        "`get_gradients(context_id)`, `telegrad.optim.clip_grad_norm_`",
    ),
    Left(
        "Modules",
        "`modules()`, `children()` and the like of a remote module, or of one with such a module inside, leave it out",
        """
layers = made(nn.Sequential, nn.Linear(3, 3))
found = [name for name, _ in layers.named_modules()]
""",
        "`remote_parameters()`, `apply()`; functions that are called with `get_module_rref()`",
    ),
    Left(
        "Modules",
        "attributes that are set on a remote module are those of the handle",
        """
layer = made(nn.Dropout, 0.5)
layer.p = 0.0
found = layer(torch.ones(3, 3))
""",
        "a function that is called with `get_module_rref()`",
    ),
    Left(
        "Modules",
        "`parameters()` of a module with a remote module inside are those of this worker",
        """
model = nn.Sequential(made(nn.Linear, 3, 3), nn.Linear(3, 3))
found = len(list(model.parameters()))
""",
        "`DistributedOptimizer.for_module`",
    ),
    Left(
        "Optimizers",
        "an optimizer of torch that steps in a context finds no gradients, as a `TelegradWarning` says",
        """
layer = nn.Linear(3, 3).double()
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
backward(call(torch.sin, layer(x)).sum())
optimizer.step()
found = layer.state_dict()
""",
        "`DistributedOptimizer`",
    ),
    Left(
        "Optimizers",
        "`state` of a `DistributedOptimizer` is empty: the owners of the parameters have it",
        """
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
optimizer = Opt(torch.optim.Adam, layer, lr=0.1)
backward(layer(x).sum())
optimizer.step()
found = len(optimizer.own.state)
""",
        "`state_dict()`",
    ),
    Left(
        "Tensors",
        "`.grad` of a tensor that is sent does not travel",
        """
x.grad = torch.ones_like(x)
found = call(getattr, x, "grad")
""",
        "send it as a value of its own",
    ),
    Left(
        "Tensors",
        "what arrives is in memory of the receiver's own: not pinned, not shared",
        """
found = call(echo, torch.ones(3).share_memory_()).is_shared()
""",
        "`share_memory_()` there",
    ),
    Left(
        "Tensors",
        "tensors that were made in `inference_mode` arrive as ordinary ones",
        """
with torch.inference_mode():
    made_so = torch.ones(3)
found = call(torch.Tensor.is_inference, made_so)
""",
        "nothing: they can be saved for backward there",
    ),
]
