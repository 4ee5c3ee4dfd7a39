"""Streams: the items that a function on another worker yields, with flow control between callee and reader."""
