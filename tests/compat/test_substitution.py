"""Telegrad's modules replace torch's in every form of import; each case runs in a process of its own."""

import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest

from tests.cluster import free_port

START = """
import sys
import torch
from telegrad import compat
"""


Run = Callable[..., None]


@pytest.fixture
def run(tmp_path: pathlib.Path) -> Run:
    def run(program: str, start: str = START) -> None:
        script = tmp_path / "program.py"
        script.write_text(start + textwrap.dedent(program))
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=50)
        assert done.returncode == 0, done.stderr

    return run


FORMS = {
    "import torch.distributed.rpc": "torch.distributed.rpc.rpc_sync",
    "import torch.distributed.rpc as rpc": "rpc.init_rpc",
    "from torch.distributed import rpc": "rpc.remote",
    "from torch.distributed.rpc import rpc_async": "rpc_async",
    "from torch.distributed.rpc.api import shutdown": "shutdown",
    "import torch.distributed.rpc.api as api": "api._wait_all_workers",
    "from torch.distributed.rpc import RRef as Reference": "Reference",
    "from torch.distributed.rpc import functions": "functions.async_execution",
    "import torch.distributed.autograd as dist_autograd": "dist_autograd.backward",
    "from torch.distributed.autograd import context": "context",
    "from torch._C._distributed_rpc import PyRRef": "PyRRef",
    "from torch._C._distributed_rpc import _is_current_rpc_agent_set as is_set": "is_set",
    "import torch._C._distributed_rpc as in_c": "in_c._get_current_rpc_agent",
    "import torch._C": "torch._C._distributed_rpc.WorkerInfo",
    "from torch._C._distributed_autograd import _current_context": "_current_context",
}
LATE_FORMS = {  # modules that `import torch` does not import
    "from torch.distributed.optim import DistributedOptimizer": "DistributedOptimizer",
    "import torch.distributed.optim.optimizer as made": "made.DistributedOptimizer",
    "from torch.distributed.nn import RemoteModule": "RemoteModule",
    "from torch.distributed.nn.api.remote_module import RemoteModule": "RemoteModule",
    "import torch.distributed.nn.api.remote_module": "torch.distributed.nn.api.remote_module._RemoteModule",
}
TRY = """
    import types
    for number, (form, value) in enumerate({forms!r}.items()):
        user = sys.modules[f"user{{number}}"] = types.ModuleType(f"user{{number}}")
        if {early}:
            exec(form, vars(user))
            held = [eval(value, vars(user))]  # no name of a module, which would be changed
        compat.install()
        assert compat.installed()
        exec(form if not {early} else "", vars(user))
        assert eval(value, vars(user)).__module__.startswith("telegrad."), form
        compat.uninstall()
        assert not compat.installed()
        assert eval(value, vars(user)).__module__.startswith("torch."), form
        assert not {early} or eval(value, vars(user)) is held[0], form
"""


@pytest.mark.parametrize(
    "early", [pytest.param(True, marks=pytest.mark.nightly), False], ids=["imported before", "imported after"]
)
@pytest.mark.parametrize(
    "forms",
    [FORMS, *(pytest.param({form: value}, marks=pytest.mark.nightly) for form, value in LATE_FORMS.items())],
    ids=["rpc and autograd", *LATE_FORMS],
)
def test_forms_of_import(run: Run, forms: dict[str, str], early: bool) -> None:
    """Each gives Telegrad's module after `install`, and torch's after `uninstall`."""
    run(TRY.format(forms=forms, early=early))


@pytest.mark.nightly
def test_names_that_torch_keeps_itself(run: Run) -> None:
    run("""
        import torch.nn.parallel.distributed as ddp
        kept = ddp.RRef, torch._jit_internal.RRef, torch.futures.wait_all
        compat.install()
        import torch.distributed.rpc as rpc
        assert ddp.RRef is torch._jit_internal.RRef is rpc.RRef
        @torch.jit.script
        def holds(reference: rpc.RRef[torch.Tensor]) -> int:
            return 1
        compat.uninstall()
        assert (ddp.RRef, torch._jit_internal.RRef, torch.futures.wait_all) == kept
    """)


def test_install_and_uninstall_can_be_repeated(run: Run) -> None:
    """The second of two calls does nothing, and logs no message."""
    run("""
        import logging, os
        said = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("telegrad").addHandler(handler)
        logging.getLogger("telegrad").setLevel(logging.INFO)
        before = dict(os.environ)
        for _ in range(2):
            compat.install()
            compat.install()
            assert os.environ["PYTHONPATH"].count("telegrad") == 1
            compat.uninstall()
            compat.uninstall()
            assert dict(os.environ) == before
        compat.install()
        import torch.distributed.rpc as rpc
        assert rpc.rpc_sync.__module__.startswith("telegrad.")
        assert len(said) == 3 and "serves torch.distributed.rpc" in said[0], said
    """)


@pytest.mark.nightly
def test_names_of_torch_c_lead_to_the_current_group(run: Run, tmp_path: pathlib.Path) -> None:
    """No name leads to torch's own RPC; unsupported names are errors that say so."""
    run(f"""
        import pytest
        names = dir(torch._C._distributed_rpc), dir(torch._C._distributed_autograd)
        torchs_own = {{id(value) for name in names[0] for value in [getattr(torch._C._distributed_rpc, name)]}}
        torchs_own |= {{id(value) for name in names[1] for value in [getattr(torch._C._distributed_autograd, name)]}}
        compat.install()
        import torch.distributed.autograd as dist_autograd
        import torch.distributed.rpc as rpc
        from torch._C._distributed_autograd import _current_context
        from torch._C._distributed_rpc import PyRRef, _get_current_rpc_agent, _is_current_rpc_agent_set
        for module, inside in zip((torch._C._distributed_rpc, torch._C._distributed_autograd), names):
            for name in inside:
                value = getattr(module, name, None)
                assert not callable(value) or id(value) not in torchs_own, name
        assert not _is_current_rpc_agent_set()
        options = rpc.TensorPipeRpcBackendOptions(init_method="file://{tmp_path}/store")
        rpc.init_rpc("only", rank=0, world_size=1, rpc_backend_options=options)
        assert _is_current_rpc_agent_set() and _get_current_rpc_agent().get_worker_info().name == "only"
        assert isinstance(rpc.RRef(1), PyRRef) and isinstance(rpc.remote("only", int), PyRRef)
        with dist_autograd.context() as context:
            assert _current_context()._context_id() == context
        states = rpc.AllGatherStates()  # for a gathering of the program's own
        assert states.gathered_objects == {{}} and not states.proceed_signal.is_set()
        assert rpc.method_factory("owner_name", "Its owner.")(rpc.RRef(1)) == "only"
        rpc.shutdown()
        with pytest.raises(AttributeError, match="migration"):
            torch._C._distributed_rpc._invoke_rpc_builtin
    """)


@pytest.mark.nightly
@pytest.mark.parametrize("early", [True, False], ids=["installed before", "installed meanwhile"])
def test_one_thread_installs_while_another_imports_torch(run: Run, early: bool) -> None:
    """Each of the two threads may wait for the lock of the other."""
    run(
        """
        import threading

        def install():
            while "torch" not in sys.modules:  # the other has begun
                pass
            compat.install()
            from torch.distributed.rpc import rpc_sync
            seen.append(rpc_sync)

        seen, errors = [], []
        threading.excepthook = lambda failure: errors.append(failure.exc_value)
        if early:
            compat.install()
        threads = [threading.Thread(target=install, daemon=True) for _ in range(2)]
        for each in threads:
            each.start()
        import torch
        for each in threads:
            each.join(20)
        import torch.distributed.rpc as rpc
        assert not errors, errors
        assert len(seen) == 2 and {rpc.rpc_sync, *seen} == {rpc.rpc_sync}
        assert rpc.__name__.startswith("telegrad.")
        """,
        f"import sys\nfrom telegrad import compat\nearly = {early}\n",
    )


def test_the_rank_and_the_size_of_a_group_come_from_the_environment(run: Run) -> None:
    run(
        f"""
        import os
        compat.install()
        import torch.distributed.rpc as rpc
        from telegrad._core.worker import current
        os.environ |= {{"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "{free_port()}"}}
        rpc.init_rpc("w0")
        assert current.joined().membership.is_fixed
        rpc.shutdown()
        """
    )


@pytest.mark.nightly
def test_installing_inside_of_a_group_is_refused(run: Run, tmp_path: pathlib.Path) -> None:
    run(f"""
        import pytest, telegrad.rpc as rpc
        from telegrad.errors import UsageError
        options = rpc.TelegradOptions(init_method="file://{tmp_path}/store")
        rpc.init_rpc("only", rank=0, world_size=1, rpc_backend_options=options)
        with pytest.raises(UsageError, match="init_rpc"):
            compat.install()
        rpc.shutdown()
        compat.install()
    """)


WITHOUT_RPC = """
import importlib.abc, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch._C":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            for member in ("_rpc_init", "_faulty_agent_init", "_dist_autograd_init"):
                delattr(module, member)
        spec.loader.exec_module = exec_module
        return spec

import importlib.util
sys.meta_path.insert(0, Finder())
import torch
import torch.distributed.rpc
assert not torch.distributed.rpc.is_available() and not hasattr(torch.distributed.rpc, "rpc_sync")
"""


@pytest.mark.nightly
def test_torch_that_was_built_without_rpc(run: Run, tmp_path: pathlib.Path) -> None:
    run(
        f"""
from telegrad import compat
compat.install()
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
assert rpc.is_available() and dist_autograd.is_available()
options = rpc.TensorPipeRpcBackendOptions(init_method="file://{tmp_path}/store")
rpc.init_rpc("only", rank=0, world_size=1, rpc_backend_options=options)
module = RemoteModule("only/cpu", torch.nn.Linear, (2, 1))
optimizer = DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.1)
with dist_autograd.context() as context:
    dist_autograd.backward(context, [module(torch.ones(1, 2)).sum()])
    optimizer.step(context)
rpc.shutdown()
compat.uninstall()
assert not torch.distributed.rpc.is_available()
""",
        WITHOUT_RPC,
    )


@pytest.mark.nightly
def test_other_optimizers_are_imported_at_their_first_use(run: Run) -> None:
    run("""
        before = "torch.distributed.optim" in sys.modules
        compat.install()
        from torch.distributed.optim import DistributedOptimizer
        import torch.distributed.optim as package
        assert before or "torch.distributed.optim.zero_redundancy_optimizer" not in sys.modules
        assert before or "torch.distributed.fsdp" not in sys.modules
        assert DistributedOptimizer.__module__.startswith("telegrad.")
        from torch.distributed.optim import ZeroRedundancyOptimizer
        assert ZeroRedundancyOptimizer.__module__.startswith("torch.")
        assert package.DistributedOptimizer is DistributedOptimizer
        assert not hasattr(package, "nothing")
        assert package.__loader__ is package.__spec__.loader
        assert package.__loader__.get_source("torch.distributed.optim")
        compat.uninstall()
        assert package.DistributedOptimizer.__module__.startswith("torch.")
    """)


@pytest.mark.nightly
def test_a_worker_without_references_does_not_search_for_them(run: Run) -> None:
    run("""
        compat.install()
        import gc
        import torch.distributed.rpc as rpc
        looks = []
        get_referrers = gc.get_referrers
        gc.get_referrers = lambda *classes: looks.append(1) or get_referrers(*classes)

        def live(kept):
            options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{__file__}.store")
            rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
            kept.append(rpc.remote("alone", torch.add, (torch.ones(2), 1)))
            assert torch.equal(kept[0].to_here(), torch.ones(2) + 1)
            rpc.shutdown()

        live([])
        assert not looks
    """)


@pytest.mark.parametrize("program", ["def f():\n    1 / 0\nf()\n", "x = (\n"])
def test_a_failing_program_prints_what_python_prints(program: str, tmp_path: pathlib.Path) -> None:
    (script := tmp_path / "program.py").write_text(program)
    for_torch, for_python = (
        subprocess.run([sys.executable, *way, str(script)], capture_output=True, text=True, timeout=50)
        for way in (["-m", "telegrad"], [])
    )
    assert (for_torch.returncode, for_torch.stderr) == (for_python.returncode, for_python.stderr)
