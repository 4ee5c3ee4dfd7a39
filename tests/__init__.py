"""The tests. Messages about waiting go to the log, also at a terminal."""

import os

os.environ.setdefault("TELEGRAD_DUMPS", "off")  # no dumps are needed
os.environ["TERM"] = "dumb"
