"""Introspection of a worker: its current state and its recent events. An extension."""
