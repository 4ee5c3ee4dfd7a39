"""Hosts for tests: network namespaces at one bridge, with cables to pull, and nftables rules that drop packets.

All rules belong to the bridge's namespace, so they affect only traffic between hosts. A dropped packet has no effect at
its sender: neither a refusal nor an unreachable host.
"""

import contextlib
import ctypes
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator

import pytest

ADDRESS = "10.234.77.{}"
PATIENCE = 30.0
NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_serial = itertools.count()  # several networks may exist at once


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=PATIENCE)


def why_not() -> str:
    """Return the reason why there can be no namespaces here, or ""."""
    if not shutil.which("ip"):
        return "needs iproute2, for `ip netns`"
    probe = f"telegrad{os.getpid()}probe"
    try:
        ip("netns", "add", probe)
        ip("netns", "delete", probe)
    except (subprocess.SubprocessError, OSError) as error:
        return f"needs the right to make network namespaces: {getattr(error, 'stderr', '') or error}".strip()
    return ""


def enter(namespace: str) -> None:
    """Move this thread, and all that it starts, to a host; Python itself can do so since 3.12."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "setns")


class Network:
    """Hosts by number; the first ones have a worker each, the later ones serve at most a directory."""

    def __init__(self, count: int) -> None:
        own = f"telegrad{os.getpid()}n{next(_serial)}"
        self.bridge = f"{own}bridge"
        self.addresses = [ADDRESS.format(number + 1) for number in range(count)]
        self.namespaces = [f"{own}host{number}" for number in range(count)]

    def make(self) -> None:
        ip("netns", "add", self.bridge)
        ip("-n", self.bridge, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.bridge, "link", "set", "bridge", "up")
        for number, (name, address) in enumerate(zip(self.namespaces, self.addresses, strict=True)):
            cable = f"cable{number}"
            ip("netns", "add", name)
            ip("link", "add", cable, "netns", self.bridge, "type", "veth", "peer", "name", "wire", "netns", name)
            ip("-n", self.bridge, "link", "set", cable, "master", "bridge")
            ip("-n", name, "address", "add", f"{address}/24", "dev", "wire")
            for place, link in ((self.bridge, cable), (name, "wire"), (name, "lo")):
                ip("-n", place, "link", "set", link, "up")

    def remove(self) -> None:
        for name in (*self.namespaces, self.bridge):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)

    def run(self, number: int, *command: str, **options: object) -> subprocess.Popen[bytes]:
        """Start a program on a host."""
        return subprocess.Popen(["ip", "netns", "exec", self.namespaces[number], *command], **options)  # type: ignore[call-overload]

    def cable(self, number: int, state: str) -> None:
        """Pull the cable of a host ("down"), or plug it in ("up")."""
        ip("-n", self.bridge, "link", "set", f"cable{number}", state)

    def cut(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Drop all packets from the first host of each pair to the second."""
        found = ", ".join(f"{self.addresses[source]} . {self.addresses[target]}" for source, target in sorted(pairs))
        self._replace(f"ip saddr . ip daddr {{ {found} }} counter drop")

    def lose(self, percent: int) -> None:
        """Drop some of all packets, at random."""
        self._replace(f"ether type ip numgen random mod 100 < {percent} counter drop")

    def heal(self) -> int:
        """Drop no more packets; return how many were dropped."""
        listed = json.loads(self._nft("-j", "list", "table", "bridge", "faults"))["nftables"]
        parts = [part for each in listed if "rule" in each for part in each["rule"]["expr"]]
        dropped = sum(part["counter"]["packets"] for part in parts if "counter" in part)
        self._nft("delete", "table", "bridge", "faults")
        return dropped

    def _replace(self, rule: str) -> None:
        chain = f"chain forward {{ type filter hook forward priority 0; {rule}; }};"
        self._nft("-f", "-", rules=f"table bridge faults {{ {chain} }}")

    def _nft(self, *words: str, rules: str = "") -> str:
        command = ["ip", "netns", "exec", self.bridge, "nft", *words]
        return subprocess.run(command, input=rules, check=True, capture_output=True, text=True, timeout=PATIENCE).stdout


@contextlib.contextmanager
def network(count: int, *programs: str) -> Iterator[Network]:
    """Make hosts, and remove them at the end; skip the test if namespaces or a needed program are missing."""
    why = why_not() or ", ".join(f"needs {program}" for program in programs if not shutil.which(program))
    if why:
        pytest.skip(why)
    made = Network(count)
    try:
        made.make()
        yield made
    finally:
        made.remove()
