"""The protocol of a directory, which decides which workers are in a group, and the embedded engine.

Clients of a directory import `directory`. Engines on other servers are in `telegrad.directories`.
"""
