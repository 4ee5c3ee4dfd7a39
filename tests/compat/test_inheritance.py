"""The compatibility mode in programs and in their children; `test_matrix.py` has all ways of starting."""

import importlib.util
import inspect
import os
import pathlib
import pkgutil
import subprocess
import sys
import textwrap

import pytest

import telegrad
import telegrad.ext
from telegrad.compat import BOOT, VARIABLE, WITH_TORCH

CALL = """
import os, sys
import torch.distributed.rpc as rpc
from torch.distributed.rpc import rpc_sync

def served():
    return rpc.__name__, rpc_sync.__module__
"""
PATIENT = 150  # seconds; a program imports torch twice, which takes 3 to 9
pytestmark = pytest.mark.timeout(PATIENT + 30)
SERVED = "telegrad.compat.rpc telegrad.compat.rpc.calls"


def run(tmp_path: pathlib.Path, program: str, *command: str, env: dict[str, str] | None = None) -> tuple[str, str]:
    """Return the output and the errors of a program that `command` runs."""
    script = tmp_path / "program.py"
    script.write_text(CALL + textwrap.dedent(program))
    filled = [part.replace("SCRIPT", str(script)) for part in command]
    done = subprocess.run(
        [sys.executable, *filled, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=PATIENT,
        env={**os.environ, **(env or {})},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


@pytest.mark.nightly
def test_another_program_as_a_module(tmp_path: pathlib.Path) -> None:
    program = """
    if __name__ == "__main__":
        print(*served(), __name__, sys.argv[1:2] == [sys.argv[1]], sys.modules["__main__"].__spec__.name)
    """
    assert run(tmp_path, program, "-m", "telegrad", "-m", "program")[0] == f"{SERVED} __main__ True program"


@pytest.mark.nightly
def test_a_program_has_its_name_and_its_folder(tmp_path: pathlib.Path) -> None:
    program = """
    folder, name = os.path.split(sys.argv[0])
    print(name, len(sys.argv), sys.path[0] == folder, __file__ == sys.argv[0])
    """
    out, said = run(tmp_path, program, "-m", "telegrad", "SCRIPT")
    assert out == "program.py 2 True True"
    assert said == ""  # no message without a problem


@pytest.mark.nightly
def test_functions_of_a_program_exist_until_its_exit(tmp_path: pathlib.Path) -> None:
    """A worker that shuts down at exit is called meanwhile, after the end of the program's code."""
    program = """
    import atexit, subprocess, threading

    def ended():
        return threading.main_thread().is_alive(), __name__

    rank = len(sys.argv) - 2
    if rank == 0:
        command = [sys.executable, "-m", "telegrad", sys.argv[0], sys.argv[1], "1"]
        child = subprocess.Popen(command, stdout=subprocess.PIPE)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{sys.argv[1]}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    atexit.register(rpc.shutdown)
    if rank == 1:
        atexit.register(print, "over", flush=True)
    else:
        assert child.stdout.readline() == b"over\\n"
        print(rpc.rpc_sync("worker1", ended)[1])
    """
    assert run(tmp_path, program, "-m", "telegrad", "SCRIPT")[0] == "__main__"


@pytest.mark.parametrize(
    "way", [("SCRIPT",), pytest.param(("-m", "program"), marks=pytest.mark.nightly)], ids=["script", "module"]
)
def test_a_programs_signals_reach_its_handlers_at_once(way: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    """The frame that runs the program does not count as a remote call, which would delay a handler by up to 10 s."""
    program = """
    import signal, threading, time

    if __name__ == "__main__":
        ran = []
        signal.signal(signal.SIGTERM, lambda *_: ran.append(time.monotonic()))
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{sys.argv[1]}")
        rpc.init_rpc("worker", rank=0, world_size=1, rpc_backend_options=options)
        sent = time.monotonic()
        threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGTERM)).start()
        while not ran:
            sum(range(100))
        rpc.shutdown()
        print(ran[0] - sent < 5)
    """
    assert run(tmp_path, program, "-m", "telegrad", *way)[0] == "True"


@pytest.mark.nightly
def test_the_environment_of_the_user_is_kept(tmp_path: pathlib.Path) -> None:
    """A sitecustomize of the user still runs, and the rest of PYTHONPATH is kept."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import builtins; builtins.customized = True")
    program = """
    import subprocess
    child = "import builtins, torch.distributed.rpc as rpc; print(rpc.__name__, builtins.customized)"
    subprocess.run([sys.executable, "-c", child], check=True)
    """
    out, _ = run(tmp_path, program, "-m", "telegrad", "SCRIPT", env={"PYTHONPATH": str(own)})
    assert out == "telegrad.compat.rpc True"


@pytest.mark.nightly
def test_a_child_that_never_imports_torch_is_left_alone(tmp_path: pathlib.Path) -> None:
    program = """
    import subprocess
    child = "import sys; print('torch' in sys.modules, 'telegrad.rpc' in sys.modules)"
    subprocess.run([sys.executable, "-c", child], check=True)
    """
    assert run(tmp_path, program, "-m", "telegrad", "SCRIPT")[0] == "False False"


@pytest.mark.parametrize(
    "name", ["rpc", *(pytest.param(name, marks=pytest.mark.nightly) for name in WITH_TORCH if name != "rpc")]
)
def test_each_module_of_telegrad_can_be_imported_before_torch(name: str) -> None:
    """The import runs in a process that inherits the mode, and starts without torch."""
    child = textwrap.dedent(f"""
    import importlib, sys
    assert "torch" not in sys.modules and "telegrad.compat" in sys.modules
    module = importlib.import_module("telegrad.{name}")
    assert sys.modules[module.__name__] is module and module.__spec__.name == "telegrad.{name}"
    import torch.distributed.rpc as rpc
    assert rpc.__name__ == "telegrad.compat.rpc"
    """)
    subprocess.run([sys.executable, "-c", child], env={**os.environ, VARIABLE: BOOT}, timeout=PATIENT, check=True)


def test_each_module_on_the_list_exists() -> None:
    assert [name for name in WITH_TORCH if importlib.util.find_spec(f"telegrad.{name}") is None] == []


@pytest.mark.nightly
def test_the_list_of_packages_that_import_torch_is_complete() -> None:
    packages = [name for name in telegrad.__all__ if inspect.ismodule(getattr(telegrad, name))]
    for name in packages + [f"ext.{each.name}" for each in pkgutil.iter_modules(telegrad.ext.__path__)]:
        look = f"import sys, telegrad.{name}; print('torch' in sys.modules)"
        imports = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=50, check=True)
        assert imports.stdout == f"{name in WITH_TORCH}\n"


@pytest.mark.parametrize("arguments", [[], ["-m"], ["--help"]])
def test_usage(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "telegrad", *arguments], capture_output=True, text=True, timeout=30)
    assert (done.returncode == 0) == (arguments == ["--help"])
    assert "telegrad" in done.stdout + done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize(("command", "frozen"), [(["-m", "telegrad", "SCRIPT"], True), (["SCRIPT"], False)])
def test_torch_is_frozen_if_it_is_imported_before_the_program(
    tmp_path: pathlib.Path, command: list[str], frozen: bool
) -> None:
    program = """
    if __name__ == "__main__":
        import subprocess, telegrad.compat
        telegrad.compat.install()
        look = "import gc, torch; print(gc.get_freeze_count() > len(gc.get_objects()), flush=True)"
        exec(look)
        subprocess.run([sys.executable, "-c", look])
    """
    assert run(tmp_path, program, *command)[0].split() == [str(frozen), "True"]


def test_the_exit_closes_files_that_were_open_before_torch_was_imported(tmp_path: pathlib.Path) -> None:
    opens = "def use(): pass\nleft_open = open(__name__, 'w')\nleft_open.write('data')\n"
    (tmp_path / "logs.py").write_text(opens)
    (tmp_path / "program.py").write_text(f"import logs\n{opens}import torch.distributed.rpc")
    command = [sys.executable, "-m", "telegrad", "program.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENT, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [(tmp_path / name).read_text() for name in ("logs", "__main__")] == ["data", "data"]


@pytest.mark.parametrize(("given", "found"), [({}, "passive"), ({"GOMP_SPINCOUNT": "9"}, "None")], ids=str)
def test_waiting_threads_of_openmp_sleep_by_default(tmp_path: pathlib.Path, given: dict[str, str], found: str) -> None:
    script = tmp_path / "program.py"
    script.write_text("import os, sys; print(os.environ.get('OMP_WAIT_POLICY'), 'torch' in sys.modules)")
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    command = [sys.executable, "-m", "telegrad", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, env=environment | given)
    assert done.stdout.split() == [found, "False"], done.stderr  # set before the import of torch, which reads it
