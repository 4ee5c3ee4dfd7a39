"""Distributed reference counting: a protocol without I/O, and the table of one worker that runs it."""
