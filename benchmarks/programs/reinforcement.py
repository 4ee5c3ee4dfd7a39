"""Observers play with a pole on a cart, and ask an agent for each move; it learns from what they lived through."""

from __future__ import annotations

import math

import torch
from common import Steps, report, run
from library import rpc
from torch import Tensor, nn
from torch.distributions import Categorical

ROUNDS, MOVES = 10, 60
OBSERVERS = ("observer1", "observer2")


class Cart:
    """A pole that falls unless the cart below it is pushed the right way."""

    def __init__(self) -> None:
        self.place = self.speed = self.turn = 0.0
        self.angle = 0.02

    def push(self, right: int) -> float:
        force = 10.0 if right else -10.0
        sine, cosine = math.sin(self.angle), math.cos(self.angle)
        drive = (force + 0.05 * self.turn**2 * sine) / 1.1
        bend = (9.8 * sine - cosine * drive) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        self.place += 0.02 * self.speed
        self.speed += 0.02 * (drive - 0.05 * bend * cosine / 1.1)
        self.angle += 0.02 * self.turn
        self.turn += 0.02 * bend
        return 1.0 if abs(self.angle) < 0.2 else 0.0

    def state(self) -> Tensor:
        return torch.tensor([self.place, self.speed, self.angle, self.turn])


class Observer:
    def __init__(self) -> None:
        self.id = rpc.get_worker_info().id

    def play(self, agent: rpc.RRef) -> None:
        cart = Cart()
        for _ in range(MOVES):
            move = agent.rpc_sync().choose(self.id, cart.state())
            rpc.rpc_sync(agent.owner(), note_reward, (agent, self.id, cart.push(move)))


class Agent:
    def __init__(self) -> None:
        self.policy = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=1e-2)
        self.me = rpc.RRef(self)
        self.observers = [rpc.remote(name, Observer) for name in OBSERVERS]
        self.forget()

    def forget(self) -> None:
        self.chances: dict[int, list[Tensor]] = {each.owner().id: [] for each in self.observers}
        self.rewards: dict[int, list[float]] = {each.owner().id: [] for each in self.observers}

    def choose(self, observer: int, state: Tensor) -> int:
        moves = Categorical(logits=self.policy(state))
        move = moves.sample()
        self.chances[observer].append(moves.log_prob(move))
        return int(move)

    def play(self) -> None:
        played = [each.rpc_async(timeout=0).play(self.me) for each in self.observers]
        torch.futures.wait_all(played)

    def learn(self) -> None:
        chances = torch.stack([chance for each in self.chances.values() for chance in each])
        returns = torch.cat([later(rewards) for rewards in self.rewards.values()])
        loss = -(chances * (returns - returns.mean())).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.forget()


def note_reward(agent: rpc.RRef, observer: int, reward: float) -> None:
    agent.local_value().rewards[observer].append(reward)


def later(rewards: list[float]) -> Tensor:
    """What was still to come at each moment."""
    return torch.tensor(rewards).flip(0).cumsum(0).flip(0)


def main() -> None:
    agent = Agent()
    steps = Steps(ROUNDS)
    for _ in steps:
        agent.play()
        agent.learn()
    report(steps.median)


if __name__ == "__main__":
    run(main, "agent", *OBSERVERS)
