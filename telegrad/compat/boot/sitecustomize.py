"""Turn on the compatibility mode in each Python process that inherits it; then run the next `sitecustomize`."""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))


def _run_the_next() -> None:
    """Run the `sitecustomize` that this file shadows."""
    elsewhere = [path for path in sys.path if os.path.abspath(path) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if importlib.util.find_spec("telegrad") is None:
    sys.path.append(_ROOT)  # the parent imported it from a folder that is not on this process's path

from telegrad.compat import install  # noqa: E402

install()
_run_the_next()
