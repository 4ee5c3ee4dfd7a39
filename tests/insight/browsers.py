"""The browser for tests: that of the system."""

from __future__ import annotations

import shutil

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
