"""Make the site: the pages of this version in a folder of its name, beside those of others that stand there already."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

DOCS = pathlib.Path(__file__).parent.resolve()
sys.path.insert(0, str(DOCS.parent))

from telegrad.version import VERSION  # noqa: E402


def build(site: pathlib.Path) -> int:
    """Make this version's pages, and list all versions. What Sphinx warns of fails."""
    settings = ["-W", "--keep-going", "-q", "-d", site.parent / "doctrees"]
    made = subprocess.run([sys.executable, "-m", "sphinx", *settings, DOCS, site / VERSION])
    if made.returncode == 0:
        list_versions(site)
        print(site / "index.html")
    return made.returncode


def list_versions(site: pathlib.Path) -> None:
    """Write which versions stand in that folder, newest first, and have its first page lead to the newest."""
    versions = sorted((page.parent.name for page in site.glob("*/index.html")), key=_order, reverse=True)
    (site / "versions.js").write_text(f"const VERSIONS = {json.dumps(versions)};\n")
    (site / "index.html").write_text(f'<meta http-equiv="refresh" content="0; url={versions[0]}/index.html">\n')


def _order(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


if __name__ == "__main__":
    sys.exit(build(DOCS.parent / "build" / "docs"))
