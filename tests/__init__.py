"""Tests. What locks guard is checked in all of them; and what they wait for is told to the log, at a terminal, too."""

import os

os.environ.setdefault("TELEGRAD_CHECK_LOCKS", "1")
os.environ.setdefault("TELEGRAD_DUMPS", "off")  # files that nobody would read
os.environ["TERM"] = "dumb"
