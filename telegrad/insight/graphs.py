"""The autograd graph of a context as plain data: of each worker its nodes and edges, and the messages that join them.

Edges lead forward, as values went; gradients take them back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from telegrad.safe_text import safe

MOST = 2000  # nodes of one worker; where there are more, chains are folded, and what is still too many is left out

OPERATION, LEAF, ROOT, SEND, RECEIVE, FOLDED = "operation", "leaf", "root", "send", "receive", "folded"


class Node(NamedTuple):
    """A node of one worker."""

    kind: str
    name: str  # as torch names it; of a leaf that of the parameter, of a send or receive that of the function
    detail: str = ""  # shapes; of a send or receive the other worker


class Part(NamedTuple):
    """What one worker has of a graph. Nodes go by their place in the list."""

    nodes: list[Node]
    edges: list[tuple[int, int]]  # forward: from a node to one that uses its value
    sends: dict[int, int]  # the nodes of messages that left, by their numbers
    receives: dict[tuple[str, int], int]  # the nodes of messages that came, by sender and number
    left_out: int = 0  # nodes that were too many


class Message(NamedTuple):
    """An edge between two workers: of a `Send` of one, and the `Recv` of another."""

    sender: str
    receiver: str
    number: int
    start: int  # the node at the sender
    end: int  # the node at the receiver
    name: str


def completed(parts: Mapping[str, Part]) -> tuple[dict[str, Part], list[Message]]:
    """The parts, and the messages between them. Ends that nobody knows are made up.

    Nobody holds on to what came but the tensors that were made of it; so where no root or send leads to a `Recv`,
    it is not found. Texts of nodes come from other processes, and are made safe here.
    """
    found = {
        name: part._replace(
            nodes=[Node(node.kind, safe(node.name), safe(node.detail, lines=True)) for node in part.nodes],
            sends={**part.sends},
            receives={**part.receives},
        )
        for name, part in parts.items()
    }
    messages = []
    for sender, part in [*found.items()]:
        for number, start in part.sends.items():
            node = part.nodes[start]
            receiver = found.setdefault(node.detail, Part([], [], {}, {}))
            end = receiver.receives.get((sender, number))
            if end is None:
                end = receiver.receives[sender, number] = len(receiver.nodes)
                receiver.nodes.append(Node(RECEIVE, node.name, sender))
            receiver.nodes[end] = receiver.nodes[end]._replace(name=node.name)
            messages.append(Message(sender, node.detail, number, start, end, node.name))
    return found, messages


def folded(part: Part, most: int = MOST) -> Part:
    """The same with at most so many nodes: chains of operations become one node each; then what was found last goes.

    Sends, receives and roots always stay.
    """
    if len(part.nodes) <= most:
        return part
    part = _with_chains_folded(part)
    spare = len(part.nodes) - most
    loose = [index for index, node in enumerate(part.nodes) if node.kind in (OPERATION, LEAF, FOLDED)]
    return _without(part, set(loose[-spare:])) if spare > 0 else part


def _with_chains_folded(part: Part) -> Part:
    chains = list(_chains(part))
    nodes = list(part.nodes)
    for chain in chains:
        first, last = nodes[chain[0]], nodes[chain[-1]]
        nodes[chain[0]] = Node(FOLDED, f"{len(chain)} operations", f"{first.name} … {last.name}")
    stands_for = {index: chain[0] for chain in chains for index in chain}
    moved = ((stands_for.get(start, start), stands_for.get(end, end)) for start, end in part.edges)
    edges = list(dict.fromkeys((start, end) for start, end in moved if start != end))
    gone = {index for chain in chains for index in chain[1:]}
    return _without(part._replace(nodes=nodes, edges=edges), gone)._replace(left_out=part.left_out)


def _chains(part: Part) -> Iterator[list[int]]:
    """Runs of operations, each with one input, which only it uses."""
    inputs: dict[int, list[int]] = {}
    users: dict[int, list[int]] = {}
    for start, end in part.edges:
        users.setdefault(start, []).append(end)
        inputs.setdefault(end, []).append(start)
    follows: dict[int, int] = {}
    for start, after in users.items():
        end = after[0]
        if len(after) == len(inputs[end]) == 1 and part.nodes[start].kind == part.nodes[end].kind == OPERATION:
            follows[start] = end
    inside = set(follows.values())
    for first in follows:
        if first not in inside:
            chain = [first]
            while chain[-1] in follows:
                chain.append(follows[chain[-1]])
            yield chain


def _without(part: Part, gone: set[int]) -> Part:
    """The part without some nodes, and with others in their places."""
    kept = [index for index in range(len(part.nodes)) if index not in gone]
    place = {index: number for number, index in enumerate(kept)}
    return Part(
        [part.nodes[index] for index in kept],
        [(place[start], place[end]) for start, end in part.edges if start in place and end in place],
        {number: place[index] for number, index in part.sends.items()},
        {message: place[index] for message, index in part.receives.items()},
        part.left_out + len(gone),
    )
