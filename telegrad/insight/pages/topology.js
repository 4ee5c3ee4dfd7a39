// The workers in a circle, and arrows for what goes between them.

import { make, show, text, widthOf } from "./draw.js";
import { bytes, clipped } from "./words.js";

const MOST = 80; // arrows; in large groups those with the most traffic

export function drawTopology(svg, data) {
  const width = widthOf(svg);
  const height = Math.min(420, Math.max(260, width * 0.6));
  const names = [...data.workers.map((worker) => worker.worker), ...Object.keys(data.silent)];
  const places = new Map(names.map((name, index) => [name, place(index, names.length, width, height)]));
  const flows = data.flows
    .filter((flow) => places.has(flow.source) && places.has(flow.target))
    .filter((flow) => flow.rate > 0 || flow.calls > 0)
    .sort((one, other) => other.rate - one.rate || other.calls - one.calls)
    .slice(0, MOST);
  const most = Math.max(1, ...flows.map((flow) => flow.rate));
  const labelled = flows.length <= 24 ? flows : [];
  show(svg, height, describe(names, flows), [
    ...flows.map((flow) => arrow(flow, places, most)),
    ...labelled.map((flow) => label(flow, places)),
    ...names.flatMap((name) => node(name, places.get(name), name in data.silent, names.length)),
  ]);
}

function place(index, count, width, height) {
  const angle = ((index + 0.5) / count) * 2 * Math.PI - Math.PI * 0.75 + (count === 4 ? 0 : Math.PI / 4);
  return { x: width / 2 + (width / 2 - 80) * Math.cos(angle), y: height / 2 + (height / 2 - 42) * Math.sin(angle) };
}

// Both directions are bowed to the side, each to its own.
function bow(flow, places) {
  const from = places.get(flow.source);
  const to = places.get(flow.target);
  const length = Math.hypot(to.x - from.x, to.y - from.y) || 1;
  const [dx, dy] = [(to.x - from.x) / length, (to.y - from.y) / length];
  const gap = 20;
  const middle = { x: (from.x + to.x) / 2 - dy * 22, y: (from.y + to.y) / 2 + dx * 22 };
  return {
    start: { x: from.x + dx * gap - dy * 6, y: from.y + dy * gap + dx * 6 },
    end: { x: to.x - dx * (gap + 6) - dy * 6, y: to.y - dy * (gap + 6) + dx * 6 },
    middle,
  };
}

function arrow(flow, places, most) {
  const { start, end, middle } = bow(flow, places);
  const busy = flow.calls ? " busy" : "";
  const thick = 1 + 4 * Math.sqrt(flow.rate / most);
  const angle = Math.atan2(end.y - middle.y, end.x - middle.x);
  const wing = (turn) => `${(end.x + 11 * Math.cos(angle + turn)).toFixed(1)} ${(end.y + 11 * Math.sin(angle + turn)).toFixed(1)}`;
  return make(
    "g",
    {},
    make("path", { d: `M${start.x} ${start.y}Q${middle.x} ${middle.y} ${end.x} ${end.y}`, class: `edge${busy}`, "stroke-width": thick.toFixed(1) }),
    make("path", { d: `M${end.x + 4 * Math.cos(angle)} ${end.y + 4 * Math.sin(angle)}L${wing(2.6)}L${wing(-2.6)}z`, class: `arrow${busy}` }),
  );
}

function label(flow, places) {
  const { start, end, middle } = bow(flow, places);
  const x = start.x * 0.3 + middle.x * 0.45 + end.x * 0.25;
  const y = start.y * 0.3 + middle.y * 0.45 + end.y * 0.25;
  const calls = flow.calls ? `, ${flow.calls} calls` : "";
  return text(x, y + 4, `${bytes(flow.rate)}/s${calls}`, "halo middle");
}

function node(name, at, silent, count) {
  const radius = count > 16 ? 8 : 14;
  const below = at.y + (radius + 15);
  return [
    make("circle", { cx: at.x, cy: at.y, r: radius, class: silent ? "node silent" : "node" }),
    text(at.x, below, clipped(silent ? `${name} (silent)` : name, 22), "halo middle"),
  ];
}

function describe(names, flows) {
  const busiest = flows[0] ? ` Most goes from ${flows[0].source} to ${flows[0].target}: ${bytes(flows[0].rate)} per second.` : "";
  return `${names.length} workers, ${flows.length} flows between them.${busiest} The table below has all.`;
}
