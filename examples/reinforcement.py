"""Reinforcement learning: observers play CartPole, and an agent learns from their episodes.

Each observer runs the environment in its own process and chooses actions with a copy of the agent's network. The agent
publishes its weights after each update. Before each episode, an observer refreshes its weights so that they are at most
`--behind` versions old. With `--ask`, observers request every action from the agent instead. The agent answers
simultaneous requests in one batch. After each round of episodes, the agent learns from them (policy gradients with a
baseline).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import gymnasium
import torch
from common import Progress, group, seeded
from torch import Tensor, nn
from torch.distributions import Categorical

import telegrad.rpc as rpc
from telegrad.rpc import functions
from telegrad.weights import Publisher, Subscriber

GAME = "CartPole-v1"
EPISODES = 4  # per observer and round
DISCOUNT = 0.99
RATE = 0.01


class Episode:
    """The states and actions of one game."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []
        self.actions: list[int] = []

    @property
    def reward(self) -> int:
        """Return the reward: one for each step."""
        return len(self.actions)


def policy() -> nn.Module:
    """Return a network for the logits of both actions and the value of the state."""
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 3))


class Agent:
    """The agent: chooses actions and learns."""

    def __init__(self) -> None:
        self.network = seeded(0, policy)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=RATE)
        self.batches: list[int] = []  # sizes of the batches

    @functions.batch(max_size=4, max_wait=0.001)
    async def act(self, states: list[Tensor]) -> list[int]:
        """Return an action for each observer in the batch."""
        self.batches.append(len(states))
        return self.choose(torch.stack(states))

    def choose(self, states: Tensor) -> list[int]:
        return chosen_by(self.network, states)

    def learn(self, episodes: list[Episode]) -> None:
        states = torch.stack([state for episode in episodes for state in episode.states])
        actions = torch.tensor([action for episode in episodes for action in episode.actions])
        returns = torch.cat([returns_of(episode) for episode in episodes])
        outputs = self.network(states)
        values = outputs[:, 2]
        scaled = (returns - returns.mean()) / (returns.std() + 1e-6)
        better = scaled - values.detach()
        chances = Categorical(logits=outputs[:, :2]).log_prob(actions)
        loss = (values - scaled).square().mean() - (chances * better).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def chosen_by(network: nn.Module, states: Tensor) -> list[int]:
    with torch.no_grad():
        actions: list[int] = Categorical(logits=network(states)[:, :2]).sample().tolist()
    return actions


def returns_of(episode: Episode) -> Tensor:
    """Return the discounted return of each step."""
    later, returns = 0.0, []
    for _ in episode.actions:
        later = 1 + DISCOUNT * later
        returns.append(later)
    return torch.tensor(returns[::-1])


class Observer:
    """An observer: plays with actions of the agent, or with a copy of its weights."""

    def __init__(self, number: int) -> None:
        self.game = gymnasium.make(GAME)
        self.seed = number * 1_000_000
        self.behind: list[int] = []  # by episode: how many versions the weights were behind the newest

    def play(self, agent: rpc.RRef[Agent]) -> list[Episode]:
        return [self.episode(lambda state: agent.rpc_sync().act(state)) for _ in range(EPISODES)]

    def follow(self, behind: int) -> None:
        """Choose actions locally from now on, with weights at most `behind` versions old."""
        self.network = policy()
        self.weights = Subscriber("agent", "policy")
        self.bound = behind

    def play_alone(self) -> list[Episode]:
        episodes = []
        for _ in range(EPISODES):
            self.weights.refresh(max_behind=self.bound)
            self.weights.load_into(self.network)
            self.behind.append(self.weights.behind)
            episodes.append(self.episode(lambda state: chosen_by(self.network, state.unsqueeze(0))[0]))
        return episodes

    def oldest(self) -> int:
        return max(self.behind)

    def episode(self, act: Callable[[Tensor], int]) -> Episode:
        self.seed += 1
        seen, _ = self.game.reset(seed=self.seed)
        episode, over = Episode(), False
        while not over:
            state = torch.from_numpy(seen).double()
            action = act(state)
            episode.states.append(state)
            episode.actions.append(action)
            seen, _, failed, cut, _ = self.game.step(action)
            over = failed or cut
        return episode


def train(agent: Agent, observers: list[rpc.RRef[Observer]], rounds: int, weights: Publisher | None) -> list[float]:
    """Train, and return the mean reward of each round."""
    rewards = []
    progress = Progress(f"{len(observers)} observers,", rounds)
    reference = rpc.RRef(agent)
    for _ in range(rounds):
        if weights is not None:
            weights.publish()
            played = torch.futures.wait_all([observer.rpc_async(timeout=0).play_alone() for observer in observers])
        else:
            played = torch.futures.wait_all([observer.rpc_async(timeout=0).play(reference) for observer in observers])
        episodes = [episode for some in played for episode in some]
        agent.learn(episodes)
        rewards.append(statistics.mean(episode.reward for episode in episodes))
        progress.advance(f"reward {rewards[-1]:.0f}")
    return rewards


def train_alone(observers: int, rounds: int) -> list[float]:
    """Train with the same number of games in one process. Return the mean rewards."""
    agent, observer = Agent(), Observer(0)
    rewards = []
    progress = Progress("the same in one process,", rounds)
    for _ in range(rounds):
        episodes = [
            observer.episode(lambda state: agent.choose(state.unsqueeze(0))[0]) for _ in range(observers * EPISODES)
        ]
        agent.learn(episodes)
        rewards.append(statistics.mean(episode.reward for episode in episodes))
        progress.advance(f"reward {rewards[-1]:.0f}")
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4, help="how many observers")
    parser.add_argument("--steps", type=int, default=20, help="how many rounds")
    parser.add_argument("--behind", type=int, default=1, help="how many versions old an observer's weights may be")
    parser.add_argument("--ask", action="store_true", help="observers ask the agent for every action")
    chosen = parser.parse_args()

    names = [f"observer{number}" for number in range(chosen.workers)]
    with group("agent", *names):
        agent = Agent()
        observers = [rpc.remote(name, Observer, (number,)) for number, name in enumerate(names)]
        weights = None
        if not chosen.ask:
            weights = Publisher("policy", agent.network)
            for observer in observers:
                observer.rpc_sync().follow(chosen.behind)
        rewards = train(agent, observers, chosen.steps, weights)
        oldest = max(observer.rpc_sync().oldest() for observer in observers) if weights is not None else 0
    single = train_alone(chosen.workers, chosen.steps)

    print()
    print(f"{'mean reward of the first round':36}{rewards[0]:8.1f}")
    print(f"{'... of the last three':36}{statistics.mean(rewards[-3:]):8.1f}")
    print(f"{'... of the same, in one process':36}{statistics.mean(single[-3:]):8.1f}")
    if weights is None:
        print(f"{'observers answered at once':36}{statistics.mean(agent.batches):8.1f}")
    else:
        print(f"{'oldest weights, versions behind':36}{oldest:8d}")
        assert oldest <= chosen.behind
    assert statistics.mean(rewards[-3:]) > 1.5 * rewards[0], "it has not learnt"


if __name__ == "__main__":
    main()
