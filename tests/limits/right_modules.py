"""Uses of modules that give the same as in one process.

Each program runs twice: in one process, and with its calls, modules and optimizers on another worker.
"""

RIGHT = {
    "Modules": """
## forward hooks of the handle, of all kinds
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
seen = []
layer.register_forward_pre_hook(lambda mod, a: (a[0] * 2,))
layer.register_forward_hook(lambda mod, a, o: o.tanh())
layer.register_forward_hook(lambda mod, a, k, o: seen.append(sorted(k)), with_kwargs=True)
layer.register_forward_pre_hook(lambda mod, a, k: (a, k), with_kwargs=True, prepend=True)
layer.register_forward_hook(lambda mod, a, o: None, always_call=True)
found = [*gradients_of(layer(x), x), seen]
## full backward hooks of the handle
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
seen = []
layer.register_full_backward_hook(lambda mod, given, taken: seen.append((given, taken)))
layer.register_full_backward_pre_hook(lambda mod, taken: (taken[0] * 2,))
found = [*gradients_of(layer(x), x), seen]
## hooks of the module itself
class M(nn.Linear):
    def __init__(self):
        super().__init__(3, 3, dtype=torch.float64)
        self.register_forward_pre_hook(lambda mod, a: (a[0] * 2,))
        self.register_forward_hook(lambda mod, a, o: o.tanh())
        self.register_full_backward_hook(lambda mod, given, taken: (given[0] * 3,))
layer = made(M)
found = gradients_of(layer(x), x)
## hooks of all modules of a process
seen = []
h = nn.modules.module.register_module_forward_hook(lambda layer, a, o: seen.append(type(layer).__name__))
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
backward(layer(x).sum())
h.remove()
found = gradients(x)
## `weight_norm`
def make():
    return nn.utils.parametrizations.weight_norm(nn.Linear(3, 3, dtype=torch.float64))
layer = made(make)
optimizer = Opt(torch.optim.SGD, layer, lr=0.1)
found = stepped(layer, optimizer)
## `orthogonal`
def make():
    return nn.utils.parametrizations.orthogonal(nn.Linear(3, 3).double())
layer = made(make)
found = [*gradients_of(layer(x), x), layer.state_dict()]
## parametrizations of one's own
class Sym(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).t()
def make():
    layer = nn.Linear(3, 3).double()
    nn.utils.parametrize.register_parametrization(layer, "weight", Sym())
    return layer
layer = made(make)
found = [*gradients_of(layer(x), x), layer.state_dict()]
## tied parameters
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, dtype=torch.float64), nn.Linear(3, 3, dtype=torch.float64)
        self.b.weight = self.a.weight
    def forward(self, v):
        return self.b(self.a(v).tanh())
layer = made(M)
optimizer = Opt(torch.optim.Adam, layer, lr=0.1)
found = stepped(layer, optimizer)
## buffers, persistent or not
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
found = [*gradients_of(layer(x), x), layer.state_dict()]
## `AveragedModel` where the module lives
def make():
    return torch.optim.swa_utils.AveragedModel(nn.Linear(3, 3).double())
layer = made(make)
found = layer(x)
## dynamic quantization
def make():
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(3, 3)), {nn.Linear}, dtype=torch.qint8)
layer = made(make)
found = layer(torch.ones(2, 3))
## conversions after an optimizer was made
layer = made(nn.Linear, 3, 3)
optimizer = Opt(torch.optim.SGD, layer, lr=0.1)
layer.double()
found = stepped(layer, optimizer)
## `bfloat16()`, `half()`, `double()`
layer = made(nn.Linear, 3, 3)
layer.bfloat16()
found = [*gradients_of(layer(x.bfloat16()), x), layer.state_dict()]
## `ModuleDict`, `ParameterList`, `ParameterDict`
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
found = stepped(layer, optimizer)
## `requires_grad_`
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
layer.requires_grad_(False)
found = gradients_of(layer(x), x)
## `apply`
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
def fill(mod):
    nn.init.constant_(mod.weight, 2.0)
layer.apply(fill)
found = layer.state_dict()
## `train` and `eval`
layer = made(nn.Dropout, 0.5)
layer.eval()
found = [layer(x), layer.training]
## `compile()` of the handle
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
layer.compile(backend="eager")
found = gradients_of(layer(x), x)
## compiled modules
def make():
    return torch.compile(nn.Linear(3, 3).double(), backend="eager")
layer = made(make)
found = gradients_of(layer(x), x)
## scripted modules
def make():
    return torch.jit.script(nn.Linear(3, 3).double())
layer = made(make)
found = gradients_of(layer(x), x)
## `share_memory`
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
layer.share_memory()
found = layer(x)
## `to_empty`
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
layer.to_empty(device="cpu")
found = layer(x).shape
## `to(memory_format=...)`
layer = made(nn.Conv2d, 1, 1, 1)
layer.to(memory_format=torch.channels_last)
found = layer(torch.ones(1, 1, 3, 3))
## `PackedSequence`
p = nn.utils.rnn.pack_sequence([torch.ones(3, 3), torch.ones(2, 3)])
layer = made(nn.LSTM, 3, 3)
optimizer, _ = layer(p)
backward(optimizer.data.sum())
found = optimizer.data
## hooks of the state dict, `get_extra_state`
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
## `load_state_dict(assign=True)`
layer = made(nn.Linear, 3, 3)
s = {k: v.double() for k, v in layer.state_dict().items()}
layer.load_state_dict(s, assign=True)
found = layer.state_dict()
## `load_state_dict(strict=False)`
layer = made(nn.Linear, 3, 3)
found = layer.load_state_dict({"weight": torch.ones(3, 3)}, strict=False)
found = [list(found.missing_keys), list(found.unexpected_keys)]
## modules that are sent by value, with their hooks
layer = nn.Linear(3, 3).double()
layer.register_forward_hook(lambda mod, a, o: o * 2)
found = gradients_of(call(apply, layer, x), x, *layer.parameters())
## hooks of parameters that are sent
w = nn.Parameter(leaf(seed=4).detach())
w.register_hook(lambda g: g * 2)
found = gradients_of(call(torch.mul, w, x), x, w)
## `DataParallel` on the CPU
layer = nn.DataParallel(nn.Linear(3, 3).double())
found = gradients_of(call(torch.sin, layer(x)), x, *layer.parameters())
## handles inside of other modules
layer = nn.Sequential(made(nn.Linear, 3, 3, dtype=torch.float64), nn.Tanh())
found = layer.state_dict()
## `swap_tensors`
y = call(torch.sin, x)
z = torch.ones(3, 3)
torch.utils.swap_tensors(y, z)
found = gradients_of(z, x)
## `parametrizations.spectral_norm`
def make():
    return nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3).double())
layer = made(make)
optimizer = Opt(torch.optim.SGD, layer, lr=0.1)
found = [stepped(layer, optimizer), *gradients(x)]
## `weight_norm` and `spectral_norm` of `torch.nn.utils`, made there or sent
def make():
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 3)), nn.utils.spectral_norm(nn.Linear(3, 3))).double()
layer = made(make)
found = [*gradients_of(layer(x), x), layer.state_dict()]
sent = make()
found += gradients_of(call(apply, sent, x.detach()), *sent.parameters())
## all methods of `torch.nn.utils.prune`, made there or sent
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
found = [stepped(layer, optimizer), *gradients(x)]
sent = make()
found += gradients_of(call(apply, sent, x.detach()), *sent.parameters())
## `parametrize.cached`
def f(a):
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3, dtype=torch.float64))
    with nn.utils.parametrize.cached():
        return layer(a) + layer(a)
found = through(f, x)
## `skip_init`
def make():
    m = nn.utils.skip_init(nn.Linear, 3, 3, dtype=torch.float64)
    nn.init.ones_(m.weight)
    nn.init.zeros_(m.bias)
    return m
layer = made(make)
found = gradients_of(layer(x), x)
## `fuse_conv_bn_eval`, `convert_conv2d_weight_memory_format`
def make():
    fused = nn.utils.fuse_conv_bn_eval(nn.Conv2d(2, 2, 2).eval(), nn.BatchNorm2d(2).eval())
    return nn.utils.convert_conv2d_weight_memory_format(fused, torch.channels_last)
layer = made(make)
found = [layer(torch.ones(1, 2, 2, 2)), layer.state_dict()["weight"].stride()]
## `replace_all_batch_norm_modules_`
def make():
    return torch.func.replace_all_batch_norm_modules_(nn.Sequential(nn.BatchNorm1d(3)))
layer = made(make)
found = layer(torch.arange(9.).reshape(3, 3))
## `torch.func.stack_module_state` inside of a function that is called
def f(a):
    torch.manual_seed(0)
    ms = [nn.Linear(3, 3).double() for _ in range(2)]
    p, b = torch.func.stack_module_state(ms)
    one = lambda p, b, a: torch.func.functional_call(ms[0], (p, b), (a,))
    return torch.func.vmap(one, in_dims=(0, 0, None))(p, b, a)
found = through(f, x)
## `parameters_to_vector` of a module of this worker
layer = nn.Linear(3, 3).double()
v = nn.utils.parameters_to_vector(layer.parameters())
found = gradients_of(call(torch.sin, v), *layer.parameters())
## hooks of the state that are registered on the handle
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
seen = []
layer.register_state_dict_pre_hook(lambda m, p, k: seen.append("pre"))
layer.register_state_dict_post_hook(lambda m, s, p, meta: seen.append("post"))
layer.register_load_state_dict_pre_hook(lambda m, *a: seen.append("lpre"))
layer.register_load_state_dict_post_hook(lambda m, k: seen.append("lpost"))
layer.load_state_dict(layer.state_dict())
found = seen
## `state_dict(destination=..., prefix=...)`
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
d = {}
layer.state_dict(destination=d, prefix="p.")
found = sorted(d)
## quantization-aware training
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
## quantized modules, and their states, that are sent
m = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(3, 3)), {nn.Linear}, dtype=torch.qint8)
found = [call(apply, m, torch.ones(2, 3))]
m.load_state_dict(call(echo, m.state_dict()))
found.append(m(torch.ones(2, 3)))
## `FloatFunctional`
def make():
    return torch.ao.nn.quantized.FloatFunctional()
def f(a):
    return make().add(a, a)
found = through(f, x)
## complex parameters
layer = made(nn.Linear, 3, 3, dtype=torch.complex128)
optimizer = Opt(torch.optim.Adam, layer, lr=0.1)
z = torch.complex(x.detach(), x.detach()).requires_grad_()
backward(layer(z).abs().sum())
optimizer.step()
found = [*gradients(z), layer.state_dict()]
## keyword arguments, dictionaries and dataclasses in `forward`
import dataclasses
@dataclasses.dataclass
class Out:
    a: torch.Tensor
class M(nn.Module):
    def forward(self, a, *, more):
        return Out(a["x"] * 2 + more)
layer = made(M)
found = gradients_of(layer({"x": x}, more=x * 3).a, x)
## tied parameters of modules that are sent
a, b = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
b.weight = a.weight
def f(a, b, v):
    return b(a(v)), a.weight is b.weight
y, same = call(f, a, b, x)
found = [same, *gradients_of(y, x, a.weight, a.bias, b.bias)]
## parameters as results
layer = nn.Linear(3, 3).double()
def f(m):
    return m.weight
w = call(f, layer)
found = [type(w).__name__, *gradients_of(w * x, x, layer.weight)]
## a `torch.fx.GraphModule` without gradients, and a compiled module, that are sent
import torch.fx
gm = torch.fx.symbolic_trace(nn.Linear(3, 3).double().requires_grad_(False))
backward(call(apply, gm, x).sum())
m = torch.compile(nn.Linear(3, 3).double(), backend="eager")
found = gradients_of(call(apply, m, x), x, *m.parameters())
## `get_ema_multi_avg_fn`
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
    stepped(layer, optimizer)
found = layer(x)
## `update_bn` in a function that is called
m = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
def f(m):
    torch.optim.swa_utils.update_bn([torch.arange(9.).reshape(3, 3)], m)
    return m.state_dict()
found = call(f, m)
## `DistributedDataParallel`, made there or on this worker
one_process()

def make():
    return nn.parallel.DistributedDataParallel(nn.Linear(3, 3).double())
layer = made(make)
optimizer = Opt(torch.optim.SGD, layer, lr=0.1)
stepped(layer, optimizer)
here = make()
found = [*gradients_of(call(torch.sin, here(x)), x, *here.parameters()), layer.state_dict()]
## `no_sync`, `Join`, `gradient_as_bucket_view` and `find_unused_parameters` of such
one_process()

from torch.distributed.algorithms.join import Join
layer = nn.Linear(3, 3).double()
options = {"gradient_as_bucket_view": True, "find_unused_parameters": True}
m = nn.parallel.DistributedDataParallel(layer, **options)
with m.no_sync():
    backward(call(torch.sin, m(x)).sum())
with Join([m]):
    backward(call(torch.sin, m(x)).sum())
found = gradients(x, *m.parameters())
## communication hooks of `DistributedDataParallel`
one_process()

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
## tensor-parallel modules
one_process()

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
## `torch.distributed.checkpoint` of a remote module
one_process()

import torch.distributed.checkpoint as dcp, tempfile
layer = made(nn.Linear, 3, 3)
d = tempfile.mkdtemp()
dcp.save({"m": layer}, checkpoint_id=d, no_dist=True)
s = layer.state_dict()
layer.load_state_dict({k: v + 1 for k, v in s.items()})
dcp.load({"m": layer}, checkpoint_id=d, no_dist=True)
found = layer.state_dict()
## collectives inside of a function that is called, with their gradients
one_process()

import torch.distributed.nn.functional as F
def f(a):
    return F.all_reduce(a * 2)
found = through(f, x)
"""
}
