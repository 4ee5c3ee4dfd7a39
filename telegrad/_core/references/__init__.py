"""Distributed reference counting: a pure protocol, and the table of one worker that runs it."""
