// The workers in a circle, and arrows for what goes between them.

import { make, show, text, widthOf } from "./draw.js";
import { bytes, clipped } from "./words.js";

const MOST = 80; // arrows; in large groups those with the most traffic
const MANY = 8; // workers, from which on their names stand outside of the circle

export function drawTopology(svg, data) {
  const width = widthOf(svg);
  const names = [...data.workers.map((worker) => worker.worker), ...Object.keys(data.silent)];
  const height = Math.min(names.length > MANY ? 560 : 360, Math.max(260, width * (names.length > MANY ? 0.9 : 0.55)));
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
    ...names.flatMap((name) => node(name, places.get(name), name in data.silent, names.length, width, height)),
  ]);
}

function place(index, count, width, height) {
  const four = count === 4; // stand in the corners
  const angle = (index / count) * 2 * Math.PI - Math.PI * (four ? 0.75 : 0.5);
  const across = width / 2 - (count > MANY ? Math.min(130, width * 0.34) : Math.min(90, width * 0.28));
  const down = height / 2 - 48;
  const out = four ? Math.SQRT2 : 1;
  return { x: width / 2 + across * out * Math.cos(angle), y: height / 2 + down * out * Math.sin(angle) };
}

// Both directions are bowed to the side, each to its own.
function bow(flow, places) {
  const from = places.get(flow.source);
  const to = places.get(flow.target);
  const length = Math.hypot(to.x - from.x, to.y - from.y) || 1;
  const [dx, dy] = [(to.x - from.x) / length, (to.y - from.y) / length];
  const gap = 20;
  const middle = { x: (from.x + to.x) / 2 - dy * 30, y: (from.y + to.y) / 2 + dx * 30 };
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

// Beside the outer side of its arrow, nearer to its source.
function label(flow, places) {
  const { start, end, middle } = bow(flow, places);
  const along = (axis) => start[axis] * 0.42 + middle[axis] * 0.46 + end[axis] * 0.12;
  const length = Math.hypot(end.x - start.x, end.y - start.y) || 1;
  const [outX, outY] = [-(end.y - start.y) / length, (end.x - start.x) / length];
  const upright = Math.abs(outX) > 0.6;
  const style = !upright ? "middle" : outX < 0 ? "end" : "";
  const calls = flow.calls ? `${flow.calls} ${flow.calls === 1 ? "call" : "calls"}` : "";
  const words = [flow.rate > 0 && `${bytes(flow.rate)}/s`, calls].filter(Boolean).join(", ");
  return text(along("x") + outX * 8, along("y") + 4 + outY * (upright ? 4 : 13), words, `halo ${style}`);
}

function node(name, at, silent, count, width, height) {
  const radius = count > MANY ? 7 : 14;
  const label = clipped(silent ? `${name} (silent)` : name, width < 500 && count > MANY ? 10 : 16);
  return [
    make("circle", { cx: at.x, cy: at.y, r: radius, class: silent ? "node silent" : "node" }),
    count > MANY ? outside(label, at, radius, width, height) : text(at.x, at.y + (at.y < height / 2 ? -20 : 29), label, "halo middle"),
  ];
}

function outside(label, at, radius, width, height) {
  const length = Math.hypot(at.x - width / 2, at.y - height / 2);
  const [outX, outY] = [(at.x - width / 2) / length, (at.y - height / 2) / length];
  const style = Math.abs(outX) < 0.1 ? "middle" : outX < 0 ? "end" : "";
  return text(at.x + outX * (radius + 6), at.y + 4 + outY * (radius + 10), label, `halo ${style}`);
}

function describe(names, flows) {
  const busiest = flows[0] ? ` Most goes from ${flows[0].source} to ${flows[0].target}: ${bytes(flows[0].rate)} per second.` : "";
  return `${names.length} workers, ${flows.length} flows between them.${busiest} The table below has all.`;
}
