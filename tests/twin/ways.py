"""Ways to start a program: commands, each with the files that it needs.

The definitions are in the main script, or in a module beside it. The driver writes down what all workers have seen.
"""

import inspect
import pathlib
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.cluster import PATIENCE, free_port
from tests.twin import sight
from tests.twin.making import IMPORTS, Program

COMMON_IMPORTS = """
import torch
from torch import nn
import torch.distributed.autograd as autograd
import torch.distributed.rpc as rpc
from torch.distributed.nn.api.remote_module import RemoteModule
from torch.distributed.optim import DistributedOptimizer
"""

END = """
def drive():
    run()
    import pickle

    try:
        found = {name: rpc.rpc_sync(name, seen) for name in WORKERS}
    except Exception as error:
        found = {name: {"error": [describe(error)]} for name in WORKERS}
    with open(RESULT, "wb") as file:
        pickle.dump(found, file)


def serve(rank):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{PORT}")
    rpc.init_rpc(WORKERS[rank], rank=rank, world_size=len(WORKERS), rpc_backend_options=options)
    if rank == 0:
        drive()
    rpc.shutdown()
"""

PROCESSES = """
if __name__ == "__main__":
    import torch.multiprocessing as mp

    mp.start_processes(serve, nprocs=len(WORKERS), start_method={!r})
"""
LOCAL = """
if __name__ == "__main__":
    import telegrad

    with telegrad.local(WORKERS[1:], driver=WORKERS[0]):
        drive()
"""
TORCHRUN = """
import os

rpc.init_rpc(WORKERS[int(os.environ["RANK"])])
if os.environ["RANK"] == "0":
    drive()
rpc.shutdown()
"""
RUN = """
rpc.init_rpc()
if rpc.get_worker_info().name == WORKERS[0]:
    rpc.wait_for_workers(WORKERS)
    drive()
    for name in WORKERS[1:]:
        rpc.rpc_sync(name, rpc.stop_serving)
    rpc.shutdown()
else:
    rpc.serve()
"""
DRIVER = "\nserve(0)\n"
GUARDED = """
if __name__ == "__main__":
    serve(0)
"""


class Way(NamedTuple):
    ending: str  # the end of the script
    command: tuple[str, ...] = (sys.executable, "main.py")
    beside: bool = False  # the definitions are in a module beside the script
    workers: bool = False  # `telegrad worker` runs all but the driver
    common: bool = False  # the program imports torch's names

    @property
    def guarded(self) -> bool:
        return "__main__" in self.ending


_TELEGRAD = (sys.executable, "-m", "telegrad")
WAYS = {
    "fork": Way(PROCESSES.format("fork")),
    "forkserver": Way(PROCESSES.format("forkserver")),
    "spawn": Way(PROCESSES.format("spawn")),
    "torchrun": Way(TORCHRUN, (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "{size}", "main.py")),
    "telegrad run": Way(RUN, (*_TELEGRAD, "run", "--role", "worker", "--count", "{size}", "--", "python", "main.py")),
    "telegrad.local": Way(LOCAL),
    "telegrad.local, with a module": Way(LOCAL, beside=True),
    "telegrad worker": Way(DRIVER, workers=True),
    "telegrad worker, with a guard": Way(GUARDED, workers=True),
    "telegrad worker, with a module": Way(DRIVER, workers=True, beside=True),
    "drop-in": Way(PROCESSES.format("spawn"), (*_TELEGRAD, "main.py"), common=True),
    "drop-in, forked": Way(PROCESSES.format("fork"), (*_TELEGRAD, "main.py"), common=True),
}


def run(way: Way, program: Program, folder: pathlib.Path) -> dict[str, Any]:
    """Start a program in an empty folder in one of the ways; return what each worker has seen."""
    port, result = free_port(), folder / "seen"
    given = f"FOLDER, RESULT, PORT = {str(folder / 'saved')!r}, {str(result)!r}, {port}\n"
    imports = COMMON_IMPORTS if way.common else IMPORTS
    definitions = f"from typing import Any\n{imports}\n{inspect.getsource(sight.describe)}\n{given}{program.text()}"
    script = definitions
    if way.beside:
        (folder / "beside.py").write_text(definitions + END)
        script = "from beside import *\n"
    (folder / "main.py").write_text(script + (way.ending if way.beside else END + way.ending))
    size = len(program.names)
    commands = [[each.format(size=size) for each in way.command]]
    if way.workers:
        commands += [
            [
                *_TELEGRAD,
                "worker",
                name,
                "--rank",
                str(rank),
                "--world-size",
                str(size),
                "--master",
                f"127.0.0.1:{port}",
            ]
            for rank, name in enumerate(program.names)
            if rank
        ]
    _run_all(commands, folder)
    return pickle.loads(result.read_bytes())


def _run_all(commands: list[list[str]], folder: pathlib.Path) -> None:
    with (folder / "output").open("w+") as output:
        start: Callable[..., Any] = subprocess.Popen
        made = [start(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT) for command in commands]
        try:
            codes = [process.wait(6 * PATIENCE) for process in made]
        finally:
            for process in made:
                process.kill()
                process.wait()
        output.seek(0)
        assert not any(codes), output.read()
