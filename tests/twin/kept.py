"""Published weights and checkpoints in the one process."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tests.twin.calls import RRef
from tests.twin.training import RemoteModule
from tests.twin.world import World


class Publisher:
    """Keeps the latest published state, and the earlier ones."""

    world: World

    def __init__(self, name: str, source: Any, **_: Any) -> None:
        self.source, self.versions = source, [None]
        self.world.published[self.world.names[self.world.here], name] = self

    def publish(self, **_: Any) -> int:
        source = self.source._found() if isinstance(self.source, RRef) else self.source
        if isinstance(source, RemoteModule):
            source = source.reference._found()
        state = source.state_dict() if isinstance(source, nn.Module) else source() if callable(source) else source
        with torch.no_grad():
            self.versions.append(self.world.carry(state, self.world.here))
        return len(self.versions) - 1

    @property
    def version(self) -> int:
        return len(self.versions) - 1

    def close(self) -> None:
        pass


class Version:
    def __init__(self, number: int, state: Any) -> None:
        self.number, self.state = number, state

    def load_into(self, module: nn.Module) -> None:
        module.load_state_dict(self.state)

    swap_into = load_into


class Subscriber:
    world: World

    def __init__(self, worker: str, name: str, **_: Any) -> None:
        self.publisher = self.world.published[worker, name]
        self.last: Version | None = None

    def newest(self) -> Version:
        state = self.publisher.versions[-1]
        with torch.no_grad():
            self.last = Version(self.publisher.version, self.world.carry(state, self.world.here))
        return self.last

    def at_least(self, number: int) -> Version:
        return self.newest()

    def load_into(self, module: nn.Module) -> None:
        self.last.load_into(module)

    swap_into = load_into

    @property
    def version(self) -> int:
        return self.last.number

    def close(self) -> None:
        pass


def state_of(value: Any) -> Any:
    if isinstance(value, RRef):
        return state_of(value._found())
    return value.state_dict() if hasattr(value, "state_dict") else value


class Checkpoint:
    """Keeps saved states in memory, by folder."""

    def __init__(self, world: World) -> None:
        self.world = world

    def save(self, state: dict[str, Any], folder: str, **_: Any) -> None:
        self.world.saved[folder] = {name: copy.deepcopy(state_of(each)) for name, each in state.items()}

    def load(self, state: dict[str, Any], folder: str) -> None:
        for name, each in self.world.saved[folder].items():
            has = state[name]._found() if isinstance(state[name], RRef) else state[name]
            if hasattr(has, "load_state_dict"):
                has.load_state_dict(copy.deepcopy(each))
            elif isinstance(has, Tensor):
                has.detach().copy_(each)
            else:
                state[name] = copy.deepcopy(each)
