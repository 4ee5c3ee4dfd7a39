"""Tests. What they wait for is told to the log, at a terminal, too."""

import os

os.environ.setdefault("TELEGRAD_DUMPS", "off")  # files that nobody would read
os.environ["TERM"] = "dumb"
