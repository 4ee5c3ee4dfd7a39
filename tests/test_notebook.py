"""Workers of a notebook in a real kernel: the page, changed cells, interrupts, and the end of the kernel."""

import os
import pathlib
import re
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster import PATIENCE, is_over, wait_until

pytest.importorskip("ipykernel")
nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

ROOT = pathlib.Path(__file__).parent.parent
PAGE = ROOT / "docs" / "notebook.md"
BLOCK = re.compile(r"```(python|text)\n(.*?)```", re.DOTALL)
SHOWN = re.compile(r"^print\(.*\)  # (.+)$", re.MULTILINE)
FROM_WORKERS = re.compile(r"\[worker\d+\] .*\n")

pytestmark = pytest.mark.timeout(8 * PATIENCE)


class Notebook:
    """A kernel that runs cells one after the other."""

    def __init__(self) -> None:
        self._book = nbformat.v4.new_notebook()
        resources = {"metadata": {"path": str(ROOT)}}
        self._client = nbclient.NotebookClient(self._book, timeout=4 * PATIENCE, allow_errors=True, resources=resources)
        self._kernel = self._client.setup_kernel()
        self._kernel.__enter__()
        self.pid = int(self.run("import os; print(os.getpid())"))

    def run(self, source: str) -> str:
        """Return the output of a cell; of an error, its text."""
        cell = nbformat.v4.new_code_cell(source)
        self._book.cells.append(cell)
        self._client.execute_cell(cell, len(self._book.cells) - 1)
        return "".join(map(_text, cell.outputs))

    def interrupt(self, source: str) -> tuple[str, float]:
        """Interrupt a cell a second after its start; return its output, and how long it went on after that."""
        timer = threading.Timer(1.0, lambda: os.killpg(self.pid, signal.SIGINT))
        timer.start()
        begun = time.monotonic()
        said = self.run(source)
        timer.join()
        return said, time.monotonic() - begun - 1.0

    def end(self) -> None:
        self._kernel.__exit__(None, None, None)


def _text(output: Any) -> str:
    if output.output_type == "error":
        return f"{output.ename}: {output.evalue}"
    return output.text if output.output_type == "stream" else output.data["text/plain"]


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    made = Notebook()
    try:
        yield made
    finally:
        made.end()


def prints(said: str, line: str) -> bool:
    """Return True if the output has that line; parts of it may be separated by lines of workers."""
    return line in said.splitlines() or line in FROM_WORKERS.sub("", said).splitlines()


@pytest.mark.nightly
def test_the_page_interrupts_and_the_end_of_the_kernel(notebook: Notebook) -> None:
    said = ""
    for kind, text in BLOCK.findall(PAGE.read_text()):
        if kind == "python" and text != "group.shutdown()\n":
            said = notebook.run(text)
        elif kind == "text":
            assert all(prints(said, line) for line in text.splitlines() if "/tmp/" not in line), said
        for shown in SHOWN.findall(text):
            assert prints(said, shown), said

    assert "AlreadyInitialized" in notebook.run("telegrad.local(2)")
    notebook.run("import time, threading; lock = threading.Lock()")
    assert "the variable `lock`" in notebook.run("rpc.rpc_sync('worker0', lambda: lock)")

    for source, error in [
        ("rpc.rpc_sync('worker0', time.sleep, (20,))", "KeyboardInterrupt"),
        ("future = rpc.rpc_async('worker0', time.sleep, (20,)); future.wait()", "KeyboardInterrupt"),
        ("await rpc.rpc_async('worker0', time.sleep, (20,))", "CancelledError"),
    ]:
        said, took = notebook.interrupt(source)
        assert error in said
        assert took < 10, source
        assert notebook.run("print(rpc.rpc_sync('worker0', abs, (-1,)))") == "1\n"
    assert notebook.run("print(future.done(), future.cancel())") == "False True\n"

    pids = notebook.run("print(*rpc.group(['worker0', 'worker1']).rpc_sync(os.getpid))")
    notebook.end()
    wait_until(lambda: all(is_over(int(pid)) for pid in pids.split()))


def test_the_first_call_may_use_any_global(notebook: Notebook) -> None:
    """The shell has names of its own in the notebook, which refer to all others."""
    notebook.run("import telegrad, telegrad.rpc as rpc, telegrad.autograd, torch\ngroup = telegrad.local(1)")
    notebook.run("seen, held = [], get_ipython()\ndef note(value): seen.append(value); return len(seen)")
    assert notebook.run("print(rpc.rpc_sync('worker0', note, (1,)), rpc.rpc_sync('worker0', note, (2,)))") == "1 2\n"
    notebook.run("context = telegrad.autograd.context(); context_id = context.__enter__()")
    notebook.run("model = torch.nn.Linear(2, 2)\ndef shape(): return tuple(model(torch.ones(2)).shape)\nmodel")
    assert notebook.run("print(rpc.rpc_sync('worker0', shape), rpc.rpc_sync('worker0', note, (3,)))") == "(2,) 3\n"
    notebook.run("context.__exit__(None, None, None)\ngroup.shutdown()")


@pytest.mark.nightly
def test_a_changed_global_that_an_object_at_a_worker_reads_is_logged(notebook: Notebook) -> None:
    notebook.run("import telegrad, telegrad.rpc as rpc\ngroup = telegrad.local(1)")
    notebook.run("factor, other = 2.0, 1\nclass Scale:\n    def get(self): return factor")
    notebook.run("scale = rpc.remote('worker0', Scale)")
    assert notebook.run("other = 2\nprint(scale.rpc_sync().get())") == "2.0\n"
    notebook.run("factor = 3.0")
    assert "the global 'factor' of the main program was bound to another" in notebook.run("scale.rpc_sync().get()")
    assert notebook.run("def read(): return factor\nprint(rpc.rpc_sync('worker0', read))") == "3.0\n"
    assert notebook.run("print(scale.rpc_sync().get())") == "3.0\n"
    notebook.run("group.shutdown()")
