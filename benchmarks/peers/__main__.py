"""Measure Telegrad beside Ray and Monarch: `python -m benchmarks.peers [words of row names] [--quick]`.

One caller and one callee of each on one host, or one that publishes and four that read, in turns. A peer that is not
installed or does not start is told so in the table. A whole run writes `peers.md` and `peers.json` to
`benchmarks/results`; any other where `--results` says.
"""

from __future__ import annotations

import json
import sys

from benchmarks.command import choose, machine, run
from benchmarks.measuring import TELEGRAD
from benchmarks.peers.report import Line, table
from benchmarks.peers.rows import ROWS
from benchmarks.peers.side import PEERS, PeerSide, version
from benchmarks.turns import Side, Workers, closed, take_turns
from benchmarks.weights import READERS


def main() -> int:
    chosen = choose("benchmarks.peers", __doc__, ROWS)
    sides: list[Side] = [Workers(TELEGRAD, "host", 1 + READERS), *(PeerSide(peer) for peer in PEERS)]
    lines = []
    with closed(sides):
        for row in chosen.rows:
            print(f"\r{row.name:45}", end="", file=sys.stderr, flush=True)
            lines.append(Line(row, *take_turns(row, sides, chosen.rounds)))
    print(file=sys.stderr)
    names = [f"{peer.name} ({version(peer.package)})" for peer in PEERS]
    text = table(machine(), names, lines)
    print(text)
    if chosen.folder:
        chosen.folder.mkdir(parents=True, exist_ok=True)
        (chosen.folder / "peers.md").write_text(text)
        rows = [{"name": row.name, "unit": row.unit, "figures": figures, "failed": why} for row, figures, why in lines]
        (chosen.folder / "peers.json").write_text(json.dumps({"sides": ["Telegrad", *names], "rows": rows}, indent=1))
    return 1 if any(line.failures[0] for line in lines) else 0


if __name__ == "__main__":
    run(main)
