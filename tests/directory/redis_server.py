"""A real Redis server for tests, in a folder of its own."""

import contextlib
import os
import pathlib
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator

import pytest
import redis

from telegrad.directories.on_redis import RedisDirectory
from tests.cluster import PATIENCE, free_port, wait_until

PROGRAM = shutil.which("redis-server")
NEEDED = pytest.mark.skipif(PROGRAM is None, reason="there is no redis-server: apt-get install redis-server")


@contextlib.contextmanager
def running(folder: pathlib.Path, **settings: str) -> "Iterator[Server]":
    server = Server(folder, **settings)
    try:
        server.start()
        yield server
    finally:
        server.kill()


class Server:
    """`redis-server` with the settings that a directory needs, and others; an engine of the contract."""

    ttl, slack = 0.4, 0.3

    def __init__(self, folder: pathlib.Path, **settings: str) -> None:
        self.folder, self.port = folder, free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.group = f"group-{secrets.token_hex(4)}"
        self.settings = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(folder),
            "save": '""',
            "appendonly": "yes",
            "appendfsync": "always",
            **{name.replace("_", "-"): value for name, value in settings.items()},
        }

    @property
    def where(self) -> str:
        """Return the URL for a group that has its directory here."""
        return self.url

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def client(self, patience: float = 10.0) -> RedisDirectory:
        return RedisDirectory(self.url, self.group, patience)

    def admin(self) -> redis.Redis:
        return redis.Redis(port=self.port, password=self.settings.get("requirepass"), protocol=2, decode_responses=True)

    def start(self) -> None:
        log, file = self.folder / "log", self.folder / "redis.conf"
        file.write_text("".join(f"{name} {value}\n" for name, value in self.settings.items()))
        with log.open("wb") as output:
            self.process = subprocess.Popen([str(PROGRAM), str(file)], stdout=output, stderr=subprocess.STDOUT)
        wait_until(lambda: "Ready to accept connections" in log.read_text() or self.process.poll() is not None)
        assert self.process.poll() is None, log.read_text()

    def kill(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait(PATIENCE)

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def forget(self) -> None:
        self.admin().xtrim(f"telegrad:{self.group}:history", maxlen=0, approximate=False)
