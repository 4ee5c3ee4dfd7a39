"""Pictures in SVG, of boxes and of messages between lanes: light or dark, as what they stand in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH = 760
MARGIN = 20
LINE = 18  # of text
LETTER = 7.1  # how wide one is, about

LOOKS = {
    "light": {
        "ground": "#ffffff",
        "box": "#eef3fb",
        "edge": "#8aa4c8",
        "ink": "#1f2733",
        "soft": "#5a6675",
        "flow": "#1d62c4",
    },
    "dark": {
        "ground": "#161b22",
        "box": "#1f2a3a",
        "edge": "#52719c",
        "ink": "#e4e9f0",
        "soft": "#9aa7b8",
        "flow": "#74a9f5",
    },
}


class Message(NamedTuple):
    """From one lane to another."""

    start: str
    end: str
    text: str
    letter: bool = False  # one of Telegrad's own, for which nobody waits: dashed


class Note(NamedTuple):
    """What happens in a lane."""

    lane: str
    text: str


class Phase(NamedTuple):
    """What begins here, across all lanes."""

    text: str


Step = Message | Note | Phase


class Picture:
    """Shapes, as they are drawn one after the other."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._shapes: list[str] = []

    def text(
        self, x: float, y: float, text: str, kind: str = "ink", anchor: str = "middle", bold: bool = False
    ) -> None:
        """Lines of text, the first on that height."""
        weight = ' font-weight="600"' if bold else ""
        for number, line in enumerate(text.split("\n")):
            self._shapes.append(
                f'<text class="{kind}" x="{x:g}" y="{y + number * LINE:g}" text-anchor="{anchor}"{weight}>'
                f"{escape(line)}</text>"
            )

    def box(self, x: float, y: float, width: float, height: float, kind: str = "box") -> None:
        self._shapes.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>')

    def line(self, x: float, y: float, to_x: float, to_y: float, kind: str = "lane") -> None:
        self._shapes.append(f'<path class="{kind}" d="M{x:g} {y:g}L{to_x:g} {to_y:g}"/>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float, kind: str = "flow") -> None:
        self._shapes.append(f'<path class="{kind}" d="M{x:g} {y:g}L{to_x:g} {to_y:g}" marker-end="url(#head)"/>')

    def svg(self, height: float) -> str:
        light, dark = (_rules(look) for look in LOOKS.values())
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}"'
                f' width="{WIDTH}" height="{height:g}" role="img"'
                ' font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif" font-size="13">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{light} @media (prefers-color-scheme: dark) {{ {dark} }}</style>",
                '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"'
                ' orient="auto"><path class="head" d="M0 0L8 4L0 8z"/></marker></defs>',
                f'<rect class="ground" width="{WIDTH}" height="{height:g}" rx="8"/>',
                *self._shapes,
                "</svg>\n",
            ]
        )


def _rules(look: dict[str, str]) -> str:
    return (
        f".ground {{ fill: {look['ground']} }} .box {{ fill: {look['box']}; stroke: {look['edge']} }}"
        f" .frame {{ fill: none; stroke: {look['edge']} }} .lane {{ stroke: {look['edge']} }}"
        f" .ink {{ fill: {look['ink']} }} .soft {{ fill: {look['soft']} }} .head {{ fill: {look['flow']} }}"
        f" .flow {{ stroke: {look['flow']}; stroke-width: 1.6 }}"
        f" .letter {{ stroke: {look['flow']}; stroke-width: 1.6; stroke-dasharray: 5 4 }}"
    )


def sequence(title: str, lanes: Sequence[str], steps: Sequence[Step]) -> str:
    """What the lanes tell each other, from top to bottom. A lane's name may have lines; the first names it in steps."""
    picture = Picture(title)
    apart = (WIDTH - 2 * MARGIN) / len(lanes)
    places = {lane.split("\n")[0]: MARGIN + apart * (number + 0.5) for number, lane in enumerate(lanes)}
    top = MARGIN + 20 + LINE * max(lane.count("\n") + 1 for lane in lanes)
    bottom = top + 12 + sum(map(_height, steps))
    for place in places.values():
        picture.line(place, top, place, bottom)
    for lane, place in zip(lanes, places.values(), strict=True):
        name, *rest = lane.split("\n")
        picture.box(place - apart / 2 + 8, MARGIN, apart - 16, top - MARGIN)
        picture.text(place, MARGIN + 23, name, bold=True)
        picture.text(place, MARGIN + 23 + LINE, "\n".join(rest), "soft")
    y = top + 12
    for step in steps:
        _draw(picture, step, places, y)
        y += _height(step)
    return picture.svg(bottom + MARGIN)


def _height(step: Step) -> float:
    lines = LINE * (step.text.count("\n") + 1)
    return lines + {Message: 20, Note: 22, Phase: 26}[type(step)]


def _draw(picture: Picture, step: Step, places: dict[str, float], y: float) -> None:
    if isinstance(step, Phase):
        picture.box(MARGIN, y + 6, WIDTH - 2 * MARGIN, LINE + 6, "ground")
        picture.line(MARGIN, y + 6, WIDTH - MARGIN, y + 6)
        picture.text(MARGIN, y + 22, step.text, "soft", "start", bold=True)
    elif isinstance(step, Note):
        width = 16 + LETTER * max(map(len, step.text.split("\n")))
        left = min(max(places[step.lane] - width / 2, MARGIN + 8), WIDTH - MARGIN - 8 - width)
        picture.box(left, y + 4, width, _height(step) - 10)
        picture.text(left + width / 2, y + 23, step.text)
    else:
        start, end = places[step.start], places[step.end]
        lines = step.text.split("\n")
        middle, width = (start + end) / 2, 8 + LETTER * max(map(len, lines))
        picture.box(middle - width / 2, y, width, LINE * len(lines), "ground")  # no lane goes through the words
        picture.text(middle, y + 14, step.text)
        below = y + 6 + LINE * len(lines)
        inward = 3 if end > start else -3
        picture.arrow(start + inward, below, end - inward, below, "letter" if step.letter else "flow")
