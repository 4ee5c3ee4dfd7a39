"""Pictures of graphs: as SVG, drawn here, and as text for Graphviz."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from telegrad.insight.graphs import FOLDED, LEAF, OPERATION, RECEIVE, ROOT, SEND, Message, Node, Part
from telegrad.insight.layout import GAP, HEADER, LINE, MARGIN, PADDING, Box, Key, Layout, placed

LEGEND = "Arrows lead forward; gradients take them back. Dashed: a message to another worker."
LEAST_WIDTH = 520  # room for the legend
SHARES = (0.5, 0.34, 0.66, 0.24, 0.76)  # of their way at which messages of one row are named, so that names keep apart

STYLE = """
.tg-page{fill:#fff}.tg-worker{fill:#f6f8fa;stroke:#d0d7de}.tg-text{fill:#1f2328}.tg-small{fill:#57606a;font-size:11px}
.tg-head{font-weight:600;font-size:14px}.tg-operation,.tg-folded{fill:#fff;stroke:#8c959f}.tg-leaf{fill:#ddf4ff;stroke:#0969da}
.tg-root{fill:#dafbe1;stroke:#1a7f37}.tg-send,.tg-receive{fill:#fff8c5;stroke:#9a6700}.tg-folded{stroke-dasharray:3 3}
.tg-edge{fill:none;stroke:#8c959f}.tg-message{fill:none;stroke:#9a6700;stroke-width:1.5;stroke-dasharray:6 4}
.tg-tip{fill:#8c959f}.tg-mtip{fill:#9a6700}.tg-name{fill:#7d4e00;font-size:11px;stroke:#f6f8fa;stroke-width:8px;stroke-linejoin:round;paint-order:stroke}
@media (prefers-color-scheme:dark){
.tg-page{fill:#0d1117}.tg-worker{fill:#161b22;stroke:#30363d}.tg-text{fill:#e6edf3}.tg-small{fill:#9da7b3}
.tg-operation,.tg-folded{fill:#0d1117;stroke:#6e7681}.tg-leaf{fill:#0c2d6b;stroke:#58a6ff}.tg-root{fill:#033a16;stroke:#3fb950}
.tg-send,.tg-receive{fill:#3b2300;stroke:#d29922}.tg-edge{stroke:#6e7681}.tg-message{stroke:#d29922}
.tg-tip{fill:#6e7681}.tg-mtip{fill:#d29922}.tg-name{fill:#e3b341;stroke:#161b22}
}
""".strip()

COLOURS = {
    LEAF: "#ddf4ff",
    ROOT: "#dafbe1",
    SEND: "#fff8c5",
    RECEIVE: "#fff8c5",
    OPERATION: "#ffffff",
    FOLDED: "#ffffff",
}


def words(node: Node) -> tuple[str, str]:
    """The two lines of a node."""
    if node.kind == SEND:
        return f"send {node.name}", f"to {node.detail}"
    if node.kind == RECEIVE:
        return f"receive {node.name}".strip(), f"from {node.detail}"
    return node.name, node.detail


def dot(title: str, parts: Mapping[str, Part], messages: Sequence[Message]) -> str:
    """Text for Graphviz."""
    names = {
        (worker, index): f"n{number}_{index}"
        for number, worker in enumerate(parts)
        for index in _indices(parts, worker)
    }
    lines = [
        f"digraph {json.dumps(title, ensure_ascii=False)} {{",
        '  node [shape=box, style=filled, fontname="sans-serif"];',
    ]
    for number, (worker, part) in enumerate(parts.items()):
        lines += [
            f"  subgraph cluster_{number} {{",
            f"    label={json.dumps(_head(worker, part), ensure_ascii=False)};",
        ]
        for index, node in enumerate(part.nodes):
            text = json.dumps("\n".join(filter(None, words(node))), ensure_ascii=False)
            lines.append(f'    {names[worker, index]} [label={text}, fillcolor="{COLOURS[node.kind]}"];')
        lines += [f"    {names[worker, start]} -> {names[worker, end]};" for start, end in part.edges]
        lines.append("  }")
    for each in messages:
        label = json.dumps(_name(each), ensure_ascii=False)
        ends = f"{names[each.sender, each.start]} -> {names[each.receiver, each.end]}"
        lines.append(f"  {ends} [label={label}, style=dashed];")
    return "\n".join([*lines, "}", ""])


def svg(title: str, summary: str, parts: Mapping[str, Part], messages: Sequence[Message]) -> str:
    """The picture; `title` and `summary` are read to those who do not see it."""
    shown = {
        worker: part._replace(nodes=[Node(node.kind, *words(node)) for node in part.nodes])
        for worker, part in parts.items()
    }
    layout = placed(shown, messages)
    width, height = max(layout.width, LEAST_WIDTH), layout.height + 2 * LINE
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" font-family="ui-sans-serif, system-ui, sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f"<desc>{escape(summary)}</desc>",
        f"<style>{STYLE}</style>",
        "<defs>",
        *(_tip(name) for name in ("tip", "mtip")),
        "</defs>",
        f'<rect class="tg-page" width="{width:.0f}" height="{height:.0f}"/>',
        *_columns(shown, layout),
        *_edges(layout),
        *_messages(layout, messages),
        *(
            _node(node, layout.boxes[worker, index])
            for worker, part in shown.items()
            for index, node in enumerate(part.nodes)
        ),
        *_names(layout, messages),
        f'<text class="tg-text tg-small" x="{MARGIN}" y="{height - LINE / 2:.1f}">{LEGEND}</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _indices(parts: Mapping[str, Part], worker: str) -> range:
    return range(len(parts[worker].nodes))


def _head(worker: str, part: Part) -> str:
    return f"{worker} ({part.left_out:,} more nodes)" if part.left_out else worker


def _name(message: Message) -> str:
    return f"{message.name} ({message.sender}, message {message.number})"


def _tip(name: str) -> str:
    return (
        f'<marker id="tg-{name}" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path class="tg-{name}" d="M0 0L8 4L0 8z"/></marker>'
    )


def _columns(parts: Mapping[str, Part], layout: Layout) -> Iterator[str]:
    for worker, column in layout.columns.items():
        yield (
            f'<rect class="tg-worker" x="{column.x:.1f}" y="{MARGIN / 2}" width="{column.width:.1f}" '
            f'height="{layout.height - MARGIN:.1f}" rx="8"/>'
            f'<text class="tg-text tg-head" x="{column.x + MARGIN / 2:.1f}" y="{HEADER - LINE / 4}">'
            f"{escape(_head(worker, parts[worker]))}</text>"
        )


def _node(node: Node, box: Box) -> str:
    left, top = box.x - box.width / 2, box.y - box.height / 2
    first = top + PADDING / 2 + LINE * 0.8
    lines = [("tg-text", node.name, first), ("tg-text tg-small", node.detail, first + LINE)]
    text = "".join(
        f'<text class="{kind}" text-anchor="middle" x="{box.x:.1f}" y="{y:.1f}">{escape(line)}</text>'
        for kind, line, y in lines
        if line
    )
    return (
        f'<g><rect class="tg-{node.kind}" x="{left:.1f}" y="{top:.1f}" width="{box.width:.1f}" '
        f'height="{box.height:.1f}" rx="{10 if node.kind in (LEAF, ROOT) else 3}"/>{text}</g>'
    )


def _edges(layout: Layout) -> Iterator[str]:
    for _, path in layout.edges:
        yield f'<path class="tg-edge" marker-end="url(#tg-tip)" d="{_curve(layout, path)}"/>'


def _messages(layout: Layout, messages: Sequence[Message]) -> Iterator[str]:
    for each in messages:
        curve = _curve(layout, [(each.sender, each.start), (each.receiver, each.end)])
        title = f"<title>{escape(_name(each))}</title>"
        yield f'<path class="tg-message" marker-end="url(#tg-mtip)" d="{curve}">{title}</path>'


def _curve(layout: Layout, path: Sequence[Key]) -> str:
    """From the lower edge of the first to the upper edge of the last."""
    boxes = [layout.boxes[key] for key in path]
    drawn = [f"M{boxes[0].x:.1f} {boxes[0].y + boxes[0].height / 2:.1f}"]
    for before, box in itertools.pairwise(boxes):
        bottom, top = before.y + before.height / 2, box.y - box.height / 2
        bend = max(GAP, top - bottom) / 2
        drawn.append(f"V{bottom:.1f}")  # through its row
        drawn.append(f"C{before.x:.1f} {bottom + bend:.1f} {box.x:.1f} {top - bend:.1f} {box.x:.1f} {top:.1f}")
    return "".join(drawn)


def _names(layout: Layout, messages: Sequence[Message]) -> Iterator[str]:
    """The names of messages, on their curves."""
    of_row: dict[float, int] = {}
    for each in messages:
        start, end = layout.boxes[each.sender, each.start], layout.boxes[each.receiver, each.end]
        number = of_row[start.y] = of_row.get(start.y, -1) + 1
        share = SHARES[number % len(SHARES)]
        weight = 3 * share * share - 2 * share**3  # of the curve's end there: its bends lie right above each other
        x = start.x + (end.x - start.x) * weight
        bottom, top = start.y + start.height / 2, end.y - end.height / 2
        y = bottom + (top - bottom) * (1.5 * share * (1 - share) + share**3)
        yield f'<text class="tg-name" text-anchor="middle" x="{x:.1f}" y="{y + 3.5:.1f}">{escape(_name(each))}</text>'
