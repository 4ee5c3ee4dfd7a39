"""What is right as it is in one process: optimizers.

Each program runs twice: in one process, and with its calls, modules and optimizers on another worker.
"""

from __future__ import annotations

RIGHT = {
    "`foreach`, `maximize`, `nesterov`, `weight_decay`": """
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
options = {"maximize": True, "foreach": True, "weight_decay": 0.1, "momentum": 0.9, "nesterov": True}
optimizer = Opt(torch.optim.SGD, layer, lr=0.1, **options)
backward(layer(x).sum())
optimizer.step()
found = layer.state_dict()
""",
    "a tensor as learning rate": """
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
optimizer = Opt(torch.optim.SGD, layer, lr=torch.tensor(0.1))
backward(layer(x).sum())
optimizer.step()
optimizer.own.param_groups[0]["lr"].mul_(0.5)
found = layer.state_dict()
""",
    "optimizers of one's own": """
class Own(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign() * g["lr"])
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
optimizer = Opt(Own, layer, lr=0.1)
backward(layer(x).sum())
optimizer.step()
found = layer.state_dict()
""",
    "a compiled step": """
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
optimizer = Opt(torch.optim.SGD, layer, lr=0.1)
backward(layer(x).sum())
torch.compile(optimizer.step, backend="eager")()
found = layer.state_dict()
""",
    "hooks before and after the step": """
seen = []
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
optimizer = Opt(torch.optim.SGD, layer, lr=0.1)
optimizer.own.register_step_pre_hook(lambda *a: seen.append("pre") and None)
optimizer.own.register_step_post_hook(lambda *a: seen.append("post") and None)
backward(layer(x).sum())
optimizer.step()
found = seen
""",
    "`get_total_norm` of gradients of the context": """
layer = nn.Linear(3, 3).double()
backward(call(torch.sin, layer(x)).sum())
found = nn.utils.get_total_norm([g for g in gradients(*layer.parameters())])
""",
    "`GradScaler` inside of a function that is called": """
def f(a):
    s = torch.amp.GradScaler("cpu")
    torch.manual_seed(0)
    m = nn.Linear(3, 3).double()
    o = torch.optim.SGD(m.parameters(), lr=0.1)
    s.scale(m(a.detach()).sum()).backward()
    s.step(o)
    s.update()
    return m.state_dict()
found = call(f, x)
""",
    "options that are set in `param_groups`": """
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
optimizer = Opt(torch.optim.SGD, layer, lr=0.1)
for group in optimizer.own.param_groups:
    group["lr"], group["weight_decay"] = 0.5, 0.1
backward(layer(x).sum())
optimizer.step()
found = layer.state_dict()
""",
    "schedules of a learning rate that is a tensor": """
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
optimizer = Opt(torch.optim.SGD, layer, lr=torch.tensor(0.1, dtype=torch.float64))
s = torch.optim.lr_scheduler.ExponentialLR(optimizer.own, 0.5)
s.step()
backward(layer(x).sum())
optimizer.step()
found = [layer.state_dict(), float(optimizer.own.param_groups[0]["lr"])]
""",
    "warnings of schedulers that step before their optimizer": """
import warnings
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
optimizer = Opt(torch.optim.SGD, layer, lr=0.1)
with warnings.catch_warnings(record=True) as w:
    warnings.simplefilter("always")
    s = torch.optim.lr_scheduler.StepLR(optimizer.own, 1)
    s.step()
found = [str(e.message)[:40] for e in w]
""",
    "optimizers that are sent with their states": """
m = nn.Linear(3, 3).double()
optimizer = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
m(x.detach()).sum().backward()
optimizer.step()
def f(opt):
    return opt.state_dict()["param_groups"][0]["lr"], [state["momentum_buffer"] for state in opt.state.values()]
found = call(f, optimizer)
""",
}
