"""Run programs one after the other in one group of processes that stays alive."""

import contextlib
import marshal
import sys
import types
from typing import Any

from tests.cluster import Process, group
from tests.twin.making import IMPORTS
from tests.twin.sight import describe
from tests.twin.world import PROGRAM

SIZE = 4


_IMPORTS = compile(IMPORTS, PROGRAM, "exec")


def load(code: bytes) -> None:
    """Make the program's module anew on this worker, before the program runs."""
    module = types.ModuleType(PROGRAM)
    module.__dict__.update(describe=describe)
    sys.modules[PROGRAM] = module
    exec(_IMPORTS, module.__dict__)
    exec(marshal.loads(code), module.__dict__)


def seen() -> Any:
    return sys.modules[PROGRAM].seen()


def run(names: list[str], text: str) -> dict[str, Any]:
    """Run a program on the driver, which is the first worker; return what each worker has seen."""
    import telegrad.rpc as rpc

    code = marshal.dumps(compile(text, PROGRAM, "exec"))
    for future in [rpc.rpc_async(name, load, (code,)) for name in names]:
        future.wait()
    sys.modules[PROGRAM].run()
    return {name: rpc.rpc_sync(name, seen) for name in names}


class Runner:
    """A group that is made anew after a program has broken it."""

    def __init__(self) -> None:
        self._open: contextlib.ExitStack | None = None
        self._driver: Process | None = None

    def run(self, names: list[str], text: str) -> dict[str, Any]:
        if self._driver is None:
            self._open = contextlib.ExitStack()
            self._driver = self._open.enter_context(group(SIZE))[0]
        try:
            return self._driver.run(run, names, text)
        except Exception as error:
            self.close()
            return {"": {"broken": [str(error)]}}

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
        self._open = self._driver = None
