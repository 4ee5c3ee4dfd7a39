"""Hosts for tests: network namespaces at one bridge, where rules of nftables drop packets between them.

All faults are rules of the bridge's namespace, so they hit what crosses between hosts and nothing else. A packet that
is dropped leaves no trace for its sender: neither a refusal nor an unreachable host.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator

import pytest

from tests.chaos.test_hosts import ip, why_not

ADDRESS = "10.234.77.{}"
PATIENCE = 30.0
_serial = itertools.count()  # several networks may be there at once


class Network:
    """Hosts by number; the first have a worker each, those behind them serve a directory at most."""

    def __init__(self, count: int) -> None:
        own = f"telegrad{os.getpid()}n{next(_serial)}"
        self._bridge = f"{own}bridge"
        self.addresses = [ADDRESS.format(number + 1) for number in range(count)]
        self.namespaces = [f"{own}host{number}" for number in range(count)]

    def make(self) -> None:
        ip("netns", "add", self._bridge)
        ip("-n", self._bridge, "link", "add", "bridge", "type", "bridge")
        ip("-n", self._bridge, "link", "set", "bridge", "up")
        for number, (name, address) in enumerate(zip(self.namespaces, self.addresses, strict=True)):
            cable = f"cable{number}"
            ip("netns", "add", name)
            ip("link", "add", cable, "netns", self._bridge, "type", "veth", "peer", "name", "wire", "netns", name)
            ip("-n", self._bridge, "link", "set", cable, "master", "bridge")
            ip("-n", name, "address", "add", f"{address}/24", "dev", "wire")
            for place, link in ((self._bridge, cable), (name, "wire"), (name, "lo")):
                ip("-n", place, "link", "set", link, "up")

    def remove(self) -> None:
        for name in (*self.namespaces, self._bridge):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)

    def run(self, number: int, *command: str, **options: object) -> subprocess.Popen[bytes]:
        """Start a program on a host."""
        return subprocess.Popen(["ip", "netns", "exec", self.namespaces[number], *command], **options)  # type: ignore[call-overload]

    def cut(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Drop all packets from the first host of each pair to the second."""
        found = ", ".join(f"{self.addresses[source]} . {self.addresses[target]}" for source, target in sorted(pairs))
        self._replace(f"ip saddr . ip daddr {{ {found} }} counter drop")

    def lose(self, percent: int) -> None:
        """Drop some of all packets, at random."""
        self._replace(f"ether type ip numgen random mod 100 < {percent} counter drop")

    def heal(self) -> int:
        """Drop nothing any more; return how many packets were dropped since."""
        listed = json.loads(self._nft("-j", "list", "table", "bridge", "faults"))["nftables"]
        parts = [part for each in listed if "rule" in each for part in each["rule"]["expr"]]
        dropped = sum(part["counter"]["packets"] for part in parts if "counter" in part)
        self._nft("delete", "table", "bridge", "faults")
        return dropped

    def _replace(self, rule: str) -> None:
        chain = f"chain forward {{ type filter hook forward priority 0; {rule}; }};"
        self._nft("-f", "-", rules=f"table bridge faults {{ {chain} }}")

    def _nft(self, *words: str, rules: str = "") -> str:
        command = ["ip", "netns", "exec", self._bridge, "nft", *words]
        return subprocess.run(command, input=rules, check=True, capture_output=True, text=True, timeout=PATIENCE).stdout


@contextlib.contextmanager
def network(count: int) -> Iterator[Network]:
    """Make hosts, and remove them; skip the test where there can be none."""
    why = why_not() or ("" if shutil.which("nft") else "needs nft (apt-get install nftables)")
    if why:
        pytest.skip(why)
    made = Network(count)
    try:
        made.make()
        yield made
    finally:
        made.remove()
