"""What cutting a model refuses, where its forward pass is recorded."""

from __future__ import annotations

from tests.limits.page import Limit

TWO = """
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.register_buffer("state", torch.zeros(3))
        self.calls = 0

    def forward(self, value):
        {body}


{cut}
"""
CUT = 'Pipeline.split(Two(), ["w1", "w2"], at=["b"], example=torch.ones(3, 3))'
PLAIN = "return self.b(self.a(value))"


def two(body: str, cut: str = CUT) -> str:
    return TWO.format(body=body.replace("\n", "\n        "), cut=cut)


LIMITS = [
    Limit(
        "Pipelines",
        "splitting a model that is no `nn.Sequential` without an example",
        two(PLAIN, 'Pipeline.split(Two(), ["w1", "w2"], at=["b"])'),
        "UsageError",
        "Two is no nn.Sequential that is cut between its children, so its forward must be recorded, which takes an",
        "`example=inputs`",
    ),
    Limit(
        "Pipelines",
        "an example that does not begin with its samples",
        two(PLAIN, 'Pipeline.split(Two(), ["w1", "w2"], at=["b"], example=torch.tensor(1.0))'),
        "UsageError",
        "`example` consists of tensors with the samples along their first dimension, as many in each of them",
        "a few samples",
    ),
    Limit(
        "Pipelines",
        "splitting a forward that changes Python state",
        two("self.calls += 1\n" + PLAIN),
        "UsageError",
        "the forward pass of Two changes ",
        "a buffer",
    ),
    Limit(
        "Pipelines",
        "a buffer that one stage changes and another one uses",
        two("self.state.add_(1)\nreturn self.b(self.a(value) + self.state) * self.state"),
        "UsageError",
        "'state' is changed in place (",
        "let one stage alone use it",
    ),
    Limit(
        "Pipelines",
        "splitting a forward with activation checkpoints",
        two("return torch.utils.checkpoint.checkpoint(self.b, self.a(value), use_reentrant=False)"),
        "UsageError",
        "the forward pass uses activation checkpointing, or other saved_tensors_hooks, which no recording has",
        "more micro-batches",
    ),
    Limit(
        "Pipelines",
        "a micro-batch of another data type than the example's",
        two(PLAIN, f"pipeline = {CUT}\npipeline(torch.ones(3, 3).double())"),
        "UsageError",
        "Two was cut with an example, and its recorded forward does not fit this micro-batch: it has a tensor of",
        "an example that is like it",
    ),
    Limit(
        "Pipelines",
        "a micro-batch of one sample, in training, of a model that does not take one",
        two("return self.b(self.norm(self.a(value)))", f"pipeline = {CUT}\npipeline(torch.ones(1, 3))"),
        "UsageError",
        "Two was cut with an example, and its recorded forward does not fit this micro-batch: sizes of 0 and 1 may be",
        "fewer `chunks`",
    ),
    Limit(
        "Pipelines",
        "another data type for a model that was recorded",
        two(PLAIN, f"{CUT}.double()"),
        "UsageError",
        "the data types of a model are recorded as it is cut: change them before Pipeline.split, not after",
        "change it before",
    ),
    Limit(
        "Pipelines",
        "gradients of tied weights of several workers in a backward pass of one's own",
        """
tied = Pipeline([remote, nn.Linear(3, 3)], tied=[("0.weight", "1.weight")])
with autograd.context():
    tied(x)
""",
        "UsageError",
        "gradients of weights that are tied across workers come together in forward_backward alone",
        "`forward_backward`",
    ),
]
