"""What is right as it is in one process: what `torch.nn.utils`, quantization and torch.func make of modules.

Each program runs twice: in one process, and with its calls, modules and optimizers on another worker.
"""

from __future__ import annotations

RIGHT = {
    "`parametrizations.spectral_norm`": """
def make():
    return nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3).double())
layer = made(make)
optimizer = Opt(torch.optim.SGD, layer, lr=0.1)
backward(layer(x).sum())
optimizer.step()
found = [*gradients(x), layer.state_dict()]
""",
    "`weight_norm` and `spectral_norm` of `torch.nn.utils`, made there or sent": """
def make():
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 3)), nn.utils.spectral_norm(nn.Linear(3, 3))).double()
layer = made(make)
backward(layer(x).sum())
found = [*gradients(x), layer.state_dict()]
sent = make()
def f(mod, a):
    return mod(a)
backward(call(f, sent, x.detach()).sum())
found += gradients(*sent.parameters())
""",
    "all methods of `torch.nn.utils.prune`, made there or sent": """
import torch.nn.utils.prune as pr
def make():
    m = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)).double()
    pr.random_unstructured(m[0], "weight", 3)
    pr.ln_structured(m[1], "weight", 1, n=2, dim=0)
    pr.random_structured(m[2], "weight", 1, dim=0)
    pr.custom_from_mask(m[1], "bias", torch.tensor([1, 0, 1]))
    pr.global_unstructured([(m[0], "weight"), (m[1], "weight")], pr.L1Unstructured, amount=2)
    pr.identity(m[0], "bias")
    pr.l1_unstructured(m[2], "bias", 1)
    pr.remove(m[2], "bias")
    return m
layer = made(make)
optimizer = Opt(torch.optim.SGD, layer, lr=0.1)
backward(layer(x).sum())
optimizer.step()
found = [*gradients(x), layer.state_dict()]
sent = make()
def f(mod, a):
    return mod(a)
backward(call(f, sent, x.detach()).sum())
found += gradients(*sent.parameters())
""",
    "`parametrize.cached`": """
def f(a):
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3, dtype=torch.float64))
    with nn.utils.parametrize.cached():
        return layer(a) + layer(a)
backward(call(f, x).sum())
found = gradients(x)
""",
    "`skip_init`": """
def make():
    m = nn.utils.skip_init(nn.Linear, 3, 3, dtype=torch.float64)
    nn.init.ones_(m.weight)
    nn.init.zeros_(m.bias)
    return m
layer = made(make)
backward(layer(x).sum())
found = gradients(x)
""",
    "`fuse_conv_bn_eval`, `convert_conv2d_weight_memory_format`": """
def make():
    fused = nn.utils.fuse_conv_bn_eval(nn.Conv2d(2, 2, 2).eval(), nn.BatchNorm2d(2).eval())
    return nn.utils.convert_conv2d_weight_memory_format(fused, torch.channels_last)
layer = made(make)
found = [layer(torch.ones(1, 2, 2, 2)), layer.state_dict()["weight"].stride()]
""",
    "`replace_all_batch_norm_modules_`": """
def make():
    return torch.func.replace_all_batch_norm_modules_(nn.Sequential(nn.BatchNorm1d(3)))
layer = made(make)
found = layer(torch.arange(9.).reshape(3, 3))
""",
    "`torch.func.stack_module_state` inside of a function that is called": """
def f(a):
    torch.manual_seed(0)
    ms = [nn.Linear(3, 3).double() for _ in range(2)]
    p, b = torch.func.stack_module_state(ms)
    one = lambda p, b, a: torch.func.functional_call(ms[0], (p, b), (a,))
    return torch.func.vmap(one, in_dims=(0, 0, None))(p, b, a)
backward(call(f, x).sum())
found = gradients(x)
""",
    "`parameters_to_vector` of a module of this worker": """
layer = nn.Linear(3, 3).double()
v = nn.utils.parameters_to_vector(layer.parameters())
backward(call(torch.sin, v).sum())
found = gradients(*layer.parameters())
""",
    "hooks of the state that are registered on the handle": """
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
seen = []
layer.register_state_dict_pre_hook(lambda m, p, k: seen.append("pre"))
layer.register_state_dict_post_hook(lambda m, s, p, meta: seen.append("post"))
layer.register_load_state_dict_pre_hook(lambda m, *a: seen.append("lpre"))
layer.register_load_state_dict_post_hook(lambda m, k: seen.append("lpost"))
layer.load_state_dict(layer.state_dict())
found = seen
""",
    "`state_dict(destination=..., prefix=...)`": """
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
d = {}
layer.state_dict(destination=d, prefix="p.")
found = sorted(d)
""",
    "quantization-aware training": """
def make():
    m = nn.Sequential(torch.ao.quantization.QuantStub(), nn.Linear(3, 3), torch.ao.quantization.DeQuantStub())
    m.qconfig = torch.ao.quantization.get_default_qat_qconfig("x86")
    return torch.ao.quantization.prepare_qat(m.train())
layer = made(make)
optimizer = Opt(torch.optim.SGD, layer, lr=0.1)
z = x.detach().float().requires_grad_()
backward(layer(z).sum())
optimizer.step()
found = [*gradients(z), layer.state_dict()["1.weight"]]
""",
    "quantized modules, and their states, that are sent": """
m = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(3, 3)), {nn.Linear}, dtype=torch.qint8)
def f(mod, a):
    return mod(a)
found = [call(f, m, torch.ones(2, 3))]
m.load_state_dict(call(echo, m.state_dict()))
found.append(m(torch.ones(2, 3)))
""",
    "`FloatFunctional`": """
def make():
    return torch.ao.nn.quantized.FloatFunctional()
def f(a):
    return make().add(a, a)
backward(call(f, x).sum())
found = gradients(x)
""",
    "complex parameters": """
layer = made(nn.Linear, 3, 3, dtype=torch.complex128)
optimizer = Opt(torch.optim.Adam, layer, lr=0.1)
z = torch.complex(x.detach(), x.detach()).requires_grad_()
backward(layer(z).abs().sum())
optimizer.step()
found = [*gradients(z), layer.state_dict()]
""",
    "keyword arguments, dictionaries and dataclasses in `forward`": """
import dataclasses
@dataclasses.dataclass
class Out:
    a: torch.Tensor
class M(nn.Module):
    def forward(self, a, *, more):
        return Out(a["x"] * 2 + more)
layer = made(M)
backward(layer({"x": x}, more=x * 3).a.sum())
found = gradients(x)
""",
    "tied parameters of modules that are sent": """
a, b = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
b.weight = a.weight
def f(a, b, v):
    return b(a(v)), a.weight is b.weight
y, same = call(f, a, b, x)
backward(y.sum())
found = [same, *gradients(x, a.weight, a.bias, b.bias)]
""",
    "parameters as results": """
layer = nn.Linear(3, 3).double()
def f(m):
    return m.weight
w = call(f, layer)
backward((w * x).sum())
found = [type(w).__name__, *gradients(x, layer.weight)]
""",
    "a `torch.fx.GraphModule` without gradients, and a compiled module, that are sent": """
import torch.fx
gm = torch.fx.symbolic_trace(nn.Linear(3, 3).double().requires_grad_(False))
def f(m, a):
    return m(a)
backward(call(f, gm, x).sum())
m = torch.compile(nn.Linear(3, 3).double(), backend="eager")
backward(call(f, m, x).sum())
found = gradients(x, *m.parameters())
""",
    "`get_ema_multi_avg_fn`": """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.m = nn.Linear(3, 3).double()
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        self.a = [torch.optim.swa_utils.AveragedModel(self.m, multi_avg_fn=average)]
    def forward(self, v):
        self.a[0].update_parameters(self.m)
        return self.m(v) + self.a[0](v)
layer = made(M)
optimizer = Opt(torch.optim.SGD, layer, lr=0.1)
for _ in range(2):
    backward(layer(x).sum())
    optimizer.step()
found = layer(x)
""",
    "`update_bn` in a function that is called": """
m = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
def f(m):
    torch.optim.swa_utils.update_bn([torch.arange(9.).reshape(3, 3)], m)
    return m.state_dict()
found = call(f, m)
""",
}
