"""Publish weights from a learner to actors on any host: whole, numbered versions."""

from telegrad.weights.publisher import Publisher
from telegrad.weights.sharded import Shard, ShardedPublisher, ShardedSubscriber
from telegrad.weights.shards import Box
from telegrad.weights.subscriber import Subscriber
from telegrad.weights.version import Version

__all__ = ["Box", "Publisher", "Shard", "ShardedPublisher", "ShardedSubscriber", "Subscriber", "Version"]
