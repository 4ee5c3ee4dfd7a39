"""Calls that do not fail at once: they wait for their worker, or are made once more and run once."""
