"""Connections between two workers: made, accepted, read, written, watched, and ended."""
