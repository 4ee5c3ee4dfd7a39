"""Connections between two workers: connecting, accepting, reading, writing, monitoring and closing."""
