"""The agent's interface that programs for torch use."""

from __future__ import annotations

import time

from telegrad._core.membership.members import Members, WorkerInfo
from telegrad._core.worker.worker import Worker

_LOOKS = 16  # samples that are averaged to measure the wait for the GIL


class RpcAgent:
    """A worker of a group."""

    measures_gil = False  # of all workers of the process

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._agent = worker.agent

    @property
    def is_static_group(self) -> bool:
        return isinstance(self._worker.directory, Members)

    def get_worker_info(self, worker: str | int | None = None) -> WorkerInfo:
        found = self._agent.me if worker is None else self._agent.find(worker)
        return WorkerInfo(found.name, found.id)

    def get_worker_infos(self) -> list[WorkerInfo]:
        """Return the workers of the group that this one knows."""
        directory = self._worker.directory
        members = list(directory) if isinstance(directory, Members) else directory.members()
        return [WorkerInfo(member.name, member.id) for member in members]

    def get_debug_info(self) -> dict[str, str]:
        info = {
            "agent.thread_pool_size": str(self._agent.settings.threads),
            "agent.calls_started": str(self._agent.started),
            "agent.idle": str(int(self._agent.idle)),
        }
        if self.measures_gil:
            info["agent.gil_average_wait_time_us"] = f"{_gil_wait():.1f}"
        return info

    def get_metrics(self) -> dict[str, str]:
        return self.get_debug_info()

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        """Wait until no call is in flight in the whole group, then leave it."""
        self._worker.shutdown(True, timeout)

    def shutdown(self) -> None:
        """Leave the group at once."""
        self._worker.shutdown(False, 0)

    def sync(self) -> None:
        """Block until no call of this worker is in flight, and none runs here."""
        while not self._agent.idle:
            time.sleep(1e-3)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RpcAgent) and other._worker is self._worker

    def __hash__(self) -> int:
        return id(self._worker)


class TensorPipeAgent(RpcAgent):
    """The agent under the name of torch's only kind."""


def enable_gil_profiling(flag: bool) -> None:
    """Include the average wait for the GIL in `get_debug_info` if `flag` is true."""
    RpcAgent.measures_gil = flag


def _gil_wait() -> float:
    """Return the average microseconds until a thread gets the GIL back after releasing it."""
    start = time.perf_counter()
    for _ in range(_LOOKS):
        time.sleep(0)
    return (time.perf_counter() - start) / _LOOKS * 1e6
