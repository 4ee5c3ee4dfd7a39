"""Turns the compatibility mode on in each Python process that inherits it, and has the next of its name run."""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))


def _run_the_next() -> None:
    """What would have run, had this file not been found first."""
    elsewhere = [path for path in sys.path if os.path.abspath(path) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if importlib.util.find_spec("telegrad") is None:
    sys.path.append(_ROOT)  # the parent ran it from a folder that this process does not look into

from telegrad.compat import install  # noqa: E402

install()
_run_the_next()
