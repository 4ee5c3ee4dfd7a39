"""What is right as it is in one process: optimizers.

Each program runs twice: in one process, and with its calls, modules and optimizers on another worker.
"""

from __future__ import annotations

RIGHT = {
    "SGD, Adam, AdamW, Adamax, Adadelta, Adafactor, Adagrad, ASGD, Muon, NAdam, RAdam, RMSprop, Rprop": """
found = []
for kind in vars(torch.optim).values():
    others = (torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam)
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind not in others:
        layer = made(nn.Linear, 3, 3, dtype=torch.float64, bias=False)
        optimizer = Opt(kind, layer, lr=0.1)
        backward(layer(x).sum())
        optimizer.step()
        found.append((kind.__name__, layer.state_dict()["weight"]))
""",
    "`SparseAdam`": """
layer = made(nn.Embedding, 5, 3, sparse=True, dtype=torch.float64)
optimizer = Opt(torch.optim.SparseAdam, layer, lr=0.1)
backward(layer(torch.tensor([1, 2, 2])).sum())
optimizer.step()
found = layer.state_dict()
""",
    "`fused=True`": """
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
optimizer = Opt(torch.optim.AdamW, layer, lr=0.1, fused=True)
backward(layer(x).sum())
optimizer.step()
found = layer.state_dict()
""",
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
    "all schedulers, also chained and in sequence, and `SWALR`": """
out = []
L = torch.optim.lr_scheduler
kinds = {
    "LambdaLR": (lambda e: 0.5 ** e,),
    "MultiplicativeLR": (lambda e: 0.5,),
    "StepLR": (1,),
    "MultiStepLR": ([1],),
    "ConstantLR": (),
    "LinearLR": (),
    "ExponentialLR": (0.5,),
    "CosineAnnealingLR": (3,),
    "PolynomialLR": (),
    "CyclicLR": (0.1, 0.2),
    "OneCycleLR": (0.2, 10),
    "CosineAnnealingWarmRestarts": (2,),
}
for name, args in kinds.items():
    torch.manual_seed(0)
    layer = made(nn.Linear, 3, 3, dtype=torch.float64)
    optimizer = Opt(torch.optim.SGD, layer, lr=0.1, momentum=0.9)
    s = getattr(L, name)(optimizer.own, *args)
    s.step()
    backward(layer(x).sum())
    optimizer.step()
    out.append((name, layer.state_dict()))
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
optimizer = Opt(torch.optim.SGD, layer, lr=0.1)
s = L.ChainedScheduler([L.ConstantLR(optimizer.own), L.ExponentialLR(optimizer.own, 0.9)])
s.step()
s = L.SequentialLR(optimizer.own, [L.ConstantLR(optimizer.own), L.ExponentialLR(optimizer.own, 0.9)], [2])
s.step()
s = torch.optim.swa_utils.SWALR(optimizer.own, 0.01)
s.step()
backward(layer(x).sum())
optimizer.step()
out.append(layer.state_dict())
found = out
""",
    "`ReduceLROnPlateau`": """
layer = made(nn.Linear, 3, 3, dtype=torch.float64)
optimizer = Opt(torch.optim.SGD, layer, lr=0.1)
s = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer.own, patience=0)
s.step(1.0)
s.step(2.0)
backward(layer(x).sum())
optimizer.step()
found = [layer.state_dict(), optimizer.own.param_groups[0]["lr"]]
""",
    "`get_total_norm` of gradients of the context": """
layer = nn.Linear(3, 3).double()
backward(call(torch.sin, layer(x)).sum())
found = nn.utils.get_total_norm([g for g in gradients(*layer.parameters())])
""",
}
