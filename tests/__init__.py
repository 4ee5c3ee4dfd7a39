"""Tests. What locks guard is checked in all of them."""

import os

os.environ.setdefault("TELEGRAD_CHECK_LOCKS", "1")
os.environ.setdefault("TELEGRAD_DUMPS", "off")  # files that nobody would read
