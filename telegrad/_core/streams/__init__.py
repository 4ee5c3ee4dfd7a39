"""Streams: the items that a function on another worker yields, as far ahead of its reader as that allows."""
