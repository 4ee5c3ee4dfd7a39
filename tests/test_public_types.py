"""Public names have types that every type checker sees alike, as pyright judges."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import venv
from typing import Any

import pytest

import telegrad
from tests import surface


def judged(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Return pyright's report on each symbol; it needs the package to be installed, with its libraries."""
    pytest.importorskip("basedpyright", reason="pip install basedpyright")
    home = folder / "installed"
    venv.create(home)
    site = next(home.glob("lib*/**/site-packages"))
    shutil.copytree(pathlib.Path(telegrad.__file__).parent, site / "telegrad")
    (site / "libraries.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    said = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--outputjson", "--ignoreexternal", "--verifytypes", "telegrad"],
        env={**os.environ, "VIRTUAL_ENV": str(home), "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"},
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    return {symbol["name"]: symbol for symbol in json.loads(said)["typeCompleteness"]["symbols"]}


def public() -> list[str]:
    """Return the full names of the definitions of all public names."""
    names = [(module, name) for module in surface.MODULES for name in surface.exported(module)]
    found = [(name, surface.definition(module, name)) for module, name in (*names, *surface.HANDED_OUT)]
    return [f"{each.module}.{getattr(each.node, 'name', name)}" for name, each in found if each and each.node]


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_all_public_types_are_known(tmp_path: pathlib.Path) -> None:
    symbols, places = judged(tmp_path), public()
    assert len(symbols) > 1000
    missing = {
        name: [said["message"] for said in symbol["diagnostics"]]
        for name, symbol in symbols.items()
        if any(name == place or name.startswith(f"{place}.") for place in places)
        and (symbol["isTypeAmbiguous"] or not symbol["isTypeKnown"])
    }
    assert missing == {}
