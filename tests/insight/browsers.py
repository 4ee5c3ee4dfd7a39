"""The browser for tests: that of the system."""

import pathlib
import shutil

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# `make nightly` fetches it from npm, if it can.
AXE = pathlib.Path(__file__).parents[2] / "build/node_modules/axe-core/axe.min.js"
OPTIONS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
