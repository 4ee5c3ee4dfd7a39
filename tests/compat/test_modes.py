"""Remote code runs in the default modes of torch, and callers get its errors, as with torch's own RPC.

Two programs show what remote code and callers see. They run with torch's RPC, and in the drop-in mode.
"""

import pathlib
import subprocess
import sys

import pytest
import torch.distributed

PATIENCE = 300  # seconds; imports take long on a busy machine
pytestmark = [
    pytest.mark.timeout(2 * PATIENCE),
    pytest.mark.skipif(not hasattr(torch._C, "_rpc_init"), reason="torch was built without RPC"),
]

PROGRAM = """\
import contextlib, sys, warnings
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer

def modes(*_):
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")

def use(x):
    y = torch.eye(2).div(3).requires_grad_() @ x
    return modes(), x.requires_grad, x.is_inference(), y.requires_grad, y

def pass_on(x):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return use(x), rpc.rpc_sync("w0", use, (x,)), rpc.rpc_sync("w1", use, (x,))

@rpc.functions.async_execution
def later(x):
    return rpc.rpc_async("w0", use, (x,)).then(lambda done: (use(x), done.wait()))

class Descent(torch.optim.SGD):
    pass  # torch compiles optimizers of its own, which takes long

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.eye(2) / 3)
        self.w.register_hook(self.note)
        self.seen = []

    def note(self, gradient):
        self.seen.append(modes())
        return (gradient @ gradient).float()

    def forward(self, x):
        self.seen.append(modes())
        return x @ self.w

    use = staticmethod(use)

    def show(self):
        return self.w.detach(), self.seen

    def parameter(self):
        return rpc.RRef(self.w)

def ways(x, layer, module, made):
    yield "rpc_sync", lambda: rpc.rpc_sync("w1", use, (x,))
    yield "rpc_async", lambda: rpc.rpc_async("w1", use, (x,)).wait()
    yield "to itself", lambda: rpc.rpc_sync("w0", use, (x,))
    yield "of torch", lambda: rpc.rpc_sync("w1", torch.mm, (x, x))
    yield "remote", lambda: rpc.remote("w1", use, (x,)).to_here()
    yield "remote to itself", lambda: rpc.remote("w0", use, (x,)).to_here()
    yield "to_here", lambda: made.to_here()
    yield "proxy.rpc_sync", lambda: layer.rpc_sync().use(x)
    yield "proxy.rpc_async", lambda: layer.rpc_async().use(x).then(lambda done: (modes(), done.wait())).wait()
    yield "proxy.remote", lambda: layer.remote().use(x).to_here()
    yield "module", lambda: (module(x), module.forward_async(x).wait())
    yield "nested", lambda: rpc.rpc_sync("w1", pass_on, (x,))
    yield "async_execution", lambda: rpc.rpc_sync("w1", later, (x,))
    yield "then", lambda: rpc.rpc_async("w1", use, (x,)).then(modes).then(lambda done: (modes(), done.wait())).wait()

def train(make):
    layer = rpc.remote("w1", Layer)
    x, seen = torch.full((2, 2), 0.1, requires_grad=True), []
    # Whether it sees the inference mode depends on the thread that reads the last gradient.
    x.register_hook(lambda gradient: seen.append((torch.is_autocast_enabled("cpu"),)))
    with dist_autograd.context() as context:
        loss = (layer.rpc_sync().forward(x) @ torch.full((2, 2), 0.3)).sum()
        with make():
            optimizer = DistributedOptimizer(Descent, [layer.rpc_sync().parameter()], lr=0.1)
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        gradient = dist_autograd.get_gradients(context)[x]
    return gradient.float(), seen, layer.rpc_sync().show()

def text(value):
    if isinstance(value, torch.Tensor):
        return f"[{value.dtype} {value.requires_grad} {value.grad_fn is not None} {value.sum().item():.6f}]"
    return f"({' '.join(map(text, value))})" if isinstance(value, (tuple, list)) else str(value)

def show():
    layer, module = rpc.remote("w1", Layer), RemoteModule("w1/cpu", Layer)
    for make in (torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)):
        for around in (contextlib.nullcontext, dist_autograd.context):
            for name, _ in ways(*[None] * 4):
                with around():
                    x = torch.full((2, 2), 0.1, requires_grad=True) * 1
                    made = rpc.remote("w1", use, (x,))
                    with make():
                        print(name, text(dict(ways(x, layer, module, made))[name]()))
        print(layer.rpc_sync().show()[1], module.get_module_rref().rpc_sync().show()[1], text(train(make)))

"""
ERRORS = """\
import math, sys, warnings
import torch
import torch.distributed.rpc as rpc

def add(*args):
    return torch.add(*args)

def ways(to, *call):
    yield lambda: rpc.rpc_sync(to, *call)
    yield lambda: rpc.rpc_async(to, *call).wait()
    if to == "w1":  # torch keeps the reference of a failed call to itself, and its shutdown waits for that in vain
        yield lambda: rpc.remote(to, *call).to_here()

def show():
    x = torch.ones(2)
    for call in (
        (torch.add, (x, "x")), (torch.add, (x, x, 1, 2)), (torch.add, ()), (torch.add, (None, x)), (torch.norm, ()),
        (torch.add, (x, x), {"foo": 1}), (torch.neg, (x,), {"input": x}), (torch.cat, (["a"],)), (torch.mm, (x, {})),
        (torch.zeros, ("a",)), (torch.select, (x, 0.5, 0)), (torch.select, (x, 2**70, 0)), (math.sqrt, ("x",)),
        (torch.nn.functional.linear, (x, "x")), (torch.einsum, (3, x)), (torch.sum, (x, 5)), (torch.mm, (x, x)),
        (add, (x, "x")), (add, ()), (torch.Tensor.add, (x, "x")), (int, ([],)), (int, ("x",)),
    ):
        for way in (*ways("w1", *call), *ways("w0", *call)):
            try:
                way()
            except Exception as error:
                print(call[0].__name__, call[1:], isinstance(error, RuntimeError), isinstance(error, TypeError))
"""
RUN = """
def run(rank, store):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        show()
    rpc.shutdown()

if __name__ == "__main__":
    other = torch.multiprocessing.get_context("spawn").Process(target=run, args=(1, sys.argv[1]))
    other.start()
    run(0, sys.argv[1])
    other.join()
"""


def shown_in_both(program: str, folder: pathlib.Path) -> list[list[str]]:
    """Return the lines that `show()` of a program prints with torch's RPC, and in the drop-in mode."""
    path = folder / "program.py"
    path.write_text(program + RUN)
    shown = []
    for runner in ([], ["-m", "telegrad"]):
        command = [sys.executable, *runner, str(path), str(folder / f"store{len(runner)}")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        shown.append(done.stdout.splitlines())
    return shown


@pytest.mark.nightly  # tests/limits has a short program
def test_modes_of_the_caller_stay_with_it(tmp_path: pathlib.Path) -> None:
    torchs, ours = shown_in_both(PROGRAM, tmp_path)
    assert len(torchs) == 3 * (2 * 14 + 1)
    assert ours == torchs


def test_errors_of_calls_of_operators_are_of_the_types_that_torch_raises(tmp_path: pathlib.Path) -> None:
    torchs, ours = shown_in_both(ERRORS, tmp_path)
    assert len(torchs) == 22 * (3 + 2)
    assert ours == torchs
