"""Publish weights from a learner to actors on any host: whole, numbered versions."""

from telegrad.weights.publisher import Publisher
from telegrad.weights.sharded_publisher import Shard, ShardedPublisher, ShardedSubscriber
from telegrad.weights.shards import Box
from telegrad.weights.subscriber import Subscriber
from telegrad.weights.weight_version import Version

__all__ = ["Box", "Publisher", "Shard", "ShardedPublisher", "ShardedSubscriber", "Subscriber", "Version"]
