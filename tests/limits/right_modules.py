"""What is right as it is in one process: modules.

Each program runs twice: in one process, and with its calls, modules and optimizers on another worker.
"""

from __future__ import annotations

RIGHT = {
    "forward hooks of the handle, of all kinds": """
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
seen = []
layer.register_forward_pre_hook(lambda mod, a: (a[0] * 2,))
layer.register_forward_hook(lambda mod, a, o: o.tanh())
layer.register_forward_hook(lambda mod, a, k, o: seen.append(sorted(k)), with_kwargs=True)
layer.register_forward_pre_hook(lambda mod, a, k: (a, k), with_kwargs=True, prepend=True)
layer.register_forward_hook(lambda mod, a, o: None, always_call=True)
backward(layer(x).sum())
found = [*gradients(x), seen]
""",
    "full backward hooks of the handle": """
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
seen = []
layer.register_full_backward_hook(lambda mod, given, taken: seen.append((given, taken)))
layer.register_full_backward_pre_hook(lambda mod, taken: (taken[0] * 2,))
backward(layer(x).sum())
found = [*gradients(x), seen]
""",
    "hooks of the module itself": """
class M(nn.Linear):
    def __init__(self):
        super().__init__(3, 3, dtype=torch.float64)
        self.register_forward_pre_hook(lambda mod, a: (a[0] * 2,))
        self.register_forward_hook(lambda mod, a, o: o.tanh())
        self.register_full_backward_hook(lambda mod, given, taken: (given[0] * 3,))
layer = made(M)
backward(layer(x).sum())
found = gradients(x)
""",
    "hooks of all modules of a process": """
seen = []
h = nn.modules.module.register_module_forward_hook(lambda layer, a, o: seen.append(type(layer).__name__))
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
backward(layer(x).sum())
h.remove()
found = gradients(x)
""",
    "`weight_norm`": """
def make():
    return nn.utils.parametrizations.weight_norm(nn.Linear(3, 3, dtype=torch.float64))
layer = made(make)
optimizer = Opt(torch.optim.SGD, layer, lr=0.1)
backward(layer(x).sum())
optimizer.step()
found = layer.state_dict()
""",
    "`orthogonal`": """
def make():
    return nn.utils.parametrizations.orthogonal(nn.Linear(3, 3).double())
layer = made(make)
backward(layer(x).sum())
found = [*gradients(x), layer.state_dict()]
""",
    "`spectral_norm`": """
def make():
    return nn.utils.spectral_norm(nn.Linear(3, 3).double())
layer = made(make)
backward(layer(x).sum())
found = [*gradients(x), layer.state_dict()]
""",
    "parametrizations of one's own": """
class Sym(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).t()
def make():
    layer = nn.Linear(3, 3).double()
    nn.utils.parametrize.register_parametrization(layer, "weight", Sym())
    return layer
layer = made(make)
backward(layer(x).sum())
found = [*gradients(x), layer.state_dict()]
""",
    "`torch.nn.utils.prune`": """
import torch.nn.utils.prune
def make():
    layer = nn.Linear(3, 3).double()
    nn.utils.prune.l1_unstructured(layer, "weight", 3)
    return layer
layer = made(make)
optimizer = Opt(torch.optim.SGD, layer, lr=0.1)
backward(layer(x).sum())
optimizer.step()
found = layer.state_dict()
""",
    "tied parameters": """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, dtype=torch.float64), nn.Linear(3, 3, dtype=torch.float64)
        self.b.weight = self.a.weight
    def forward(self, v):
        return self.b(self.a(v).tanh())
layer = made(M)
optimizer = Opt(torch.optim.Adam, layer, lr=0.1)
backward(layer(x).sum())
optimizer.step()
found = layer.state_dict()
""",
    "buffers, persistent or not": """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("a", torch.zeros(3), persistent=False)
        self.register_buffer("b", torch.zeros(3))
    def forward(self, v):
        self.a += 1
        self.b = self.b + self.a
        return v * self.b
layer = made(M)
layer(x)
backward(layer(x).sum())
found = [*gradients(x), layer.state_dict()]
""",
    "lazy modules": """
layer = made(nn.LazyLinear, 3, dtype=torch.float64)
backward(layer(x).sum())
optimizer = Opt(torch.optim.SGD, layer, lr=0.1)
found = [*gradients(x), layer.state_dict()]
""",
    "`AveragedModel` where the module lives": """
def make():
    return torch.optim.swa_utils.AveragedModel(nn.Linear(3, 3).double())
layer = made(make)
found = layer(x)
""",
    "dynamic quantization": """
def make():
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(3, 3)), {nn.Linear}, dtype=torch.qint8)
layer = made(make)
found = layer(torch.ones(2, 3))
""",
    "conversions after an optimizer was made": """
layer = made(nn.Linear, 3, 3)
optimizer = Opt(torch.optim.SGD, layer, lr=0.1)
layer.double()
backward(layer(x).sum())
optimizer.step()
found = layer.state_dict()
""",
    "`bfloat16()`, `half()`, `double()`": """
layer = made(nn.Linear, 3, 3)
layer.bfloat16()
backward(layer(x.bfloat16()).sum())
found = [*gradients(x), layer.state_dict()]
""",
    "`ModuleDict`, `ParameterList`, `ParameterDict`": """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.d = nn.ModuleDict({"a": nn.Linear(3, 3).double()})
        self.p = nn.ParameterList([torch.ones(3), torch.zeros(3)])
        self.q = nn.ParameterDict({"z": torch.ones(3)})
    def forward(self, v):
        return self.d["a"](v) * self.p[0] + self.p[1] * self.q["z"]
layer = made(M)
optimizer = Opt(torch.optim.SGD, layer, lr=0.1)
backward(layer(x).sum())
optimizer.step()
found = layer.state_dict()
""",
    "`requires_grad_`": """
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
layer.requires_grad_(False)
backward(layer(x).sum())
found = gradients(x)
""",
    "`apply`": """
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
def fill(mod):
    nn.init.constant_(mod.weight, 2.0)
layer.apply(fill)
found = layer.state_dict()
""",
    "`train` and `eval`": """
layer = made(nn.Dropout, 0.5)
layer.eval()
found = [layer(x), layer.training]
""",
    "`compile()` of the handle": """
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
layer.compile(backend="eager")
backward(layer(x).sum())
found = gradients(x)
""",
    "compiled modules": """
def make():
    return torch.compile(nn.Linear(3, 3).double(), backend="eager")
layer = made(make)
backward(layer(x).sum())
found = gradients(x)
""",
    "scripted modules": """
def make():
    return torch.jit.script(nn.Linear(3, 3).double())
layer = made(make)
backward(layer(x).sum())
found = gradients(x)
""",
    "`share_memory`": """
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
layer.share_memory()
found = layer(x)
""",
    "`to_empty`": """
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
layer.to_empty(device="cpu")
found = layer(x).shape
""",
    "`to(memory_format=...)`": """
layer = made(nn.Conv2d, 1, 1, 1)
layer.to(memory_format=torch.channels_last)
found = layer(torch.ones(1, 1, 3, 3))
""",
    "`PackedSequence`": """
p = nn.utils.rnn.pack_sequence([torch.ones(3, 3), torch.ones(2, 3)])
layer = made(nn.LSTM, 3, 3)
optimizer, _ = layer(p)
backward(optimizer.data.sum())
found = optimizer.data
""",
    "hooks of the state dict, `get_extra_state`": """
class M(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
        self._register_state_dict_hook(lambda mod, sd, prefix, meta: sd.update({prefix + "more": torch.ones(1)}))
    def get_extra_state(self):
        return {"a": 1}
    def set_extra_state(self, s):
        self.extra = s
layer = made(M)
found = sorted(layer.state_dict())
""",
    "`load_state_dict(assign=True)`": """
layer = made(nn.Linear, 3, 3)
s = {k: v.double() for k, v in layer.state_dict().items()}
layer.load_state_dict(s, assign=True)
found = layer.state_dict()
""",
    "`load_state_dict(strict=False)`": """
layer = made(nn.Linear, 3, 3)
found = layer.load_state_dict({"weight": torch.ones(3, 3)}, strict=False)
found = [list(found.missing_keys), list(found.unexpected_keys)]
""",
    "modules that are sent by value, with their hooks": """
layer = nn.Linear(3, 3).double()
layer.register_forward_hook(lambda mod, a, o: o * 2)
def f(mod, a):
    return mod(a)
backward(call(f, layer, x).sum())
found = gradients(x, *layer.parameters())
""",
    "hooks of parameters that are sent": """
w = nn.Parameter(leaf(seed=4).detach())
w.register_hook(lambda g: g * 2)
backward(call(torch.mul, w, x).sum())
found = gradients(x, w)
""",
    "`DataParallel` on the CPU": """
layer = nn.DataParallel(nn.Linear(3, 3).double())
backward(call(torch.sin, layer(x)).sum())
found = gradients(x, *layer.parameters())
""",
    "`SyncBatchNorm` of one process": """
layer = made(nn.SyncBatchNorm, 3)
found = layer(torch.ones(4, 3))
""",
    "handles inside of other modules": """
layer = nn.Sequential(made(nn.Linear, 3, 3, dtype=torch.float64), nn.Tanh())
found = layer.state_dict()
""",
    "`swap_tensors`": """
y = call(torch.sin, x)
z = torch.ones(3, 3)
torch.utils.swap_tensors(y, z)
backward(z.sum())
found = gradients(x)
""",
}
