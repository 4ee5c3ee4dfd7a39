// Charts: traffic, calls in lanes, a pipeline's batch, series of figures, steps.

import { boxes, line, make, show, text, ticks, widthOf } from "./draw.js";
import { TIME, most } from "./series.js";
import { bytes, clipped, seconds, share, short } from "./words.js";

export const KINDS = ["forward", "backward", "input", "weights"]; // of actions on micro-batches; others are on weights

const MATRIX = 64; // workers whose names fit; with more, only the table has them

function left(width) {
  return width < 500 ? 70 : 110;
}

function axis(width, from, top, bottom, length, word, zero = word(0)) {
  return ticks(length, width < 500 ? 3 : 6)
    .filter((at) => at <= length)
    .flatMap((at) => {
      const x = from + (at / length) * (width - from - 8);
      const style = x > width - 40 ? "faint end" : "faint middle";
      return [line(x, top, x, bottom), text(x, bottom + 14, at ? word(at) : zero, style)];
    });
}

// A matrix: who sends how much to whom.
export function drawTraffic(svg, data) {
  if (data.workers.length > MATRIX) return show(svg, 0, `${data.workers.length} workers: the table below has their traffic.`, []);
  const width = widthOf(svg);
  const from = left(width);
  const names = [...data.workers.map((worker) => worker.worker), ...Object.keys(data.silent)];
  const size = Math.max(2, Math.min(36, (width - from - 60) / names.length));
  const top = size < 12 ? 4 : 70; // below 12 names do not fit
  const most = Math.max(1, ...data.flows.map((flow) => flow.rate));
  const middle = (index) => (index + 0.5) * size;
  const children = size < 12 ? [] : names.flatMap((name, index) => {
    const style = name in data.silent ? "silent" : "";
    const above = text(0, 0, clipped(name, 12), style);
    above.setAttribute("transform", `translate(${from + middle(index) + 3} ${top - 5}) rotate(-50)`);
    return [text(0, top + middle(index) + 4, clipped(name, from > 80 ? 16 : 10), style), above];
  });
  const flows = data.flows.filter((flow) => (flow.rate > 0 || flow.calls > 0) && names.includes(flow.source) && names.includes(flow.target));
  for (const { source, target, rate, calls } of flows) {
    const place = { x: from + names.indexOf(target) * size, y: top + names.indexOf(source) * size, width: size - 1, height: size - 1 };
    const words = `${source} → ${target}: ${bytes(rate)}/s, ${calls} calls in flight`;
    children.push(make("rect", { ...place, class: calls ? "flow busy" : "flow", "fill-opacity": (0.1 + 0.9 * Math.sqrt(rate / most)).toFixed(2) }, make("title", {}, words)));
  }
  const frame = make("rect", { x: from - 1, y: top - 1, width: names.length * size + 1, height: names.length * size + 1, class: "frame" });
  const busiest = flows.sort((one, other) => other.rate - one.rate)[0];
  const told = busiest ? ` The most goes from ${busiest.source} to ${busiest.target}: ${bytes(busiest.rate)} per second.` : "";
  show(svg, top + names.length * size + 4, `${names.length} workers, ${flows.length} flows between them.${told} The table below has all.`, [frame, ...children]);
}

// Gives what lies under a place of the chart, for who points there.
export function drawCalls(svg, data) {
  const width = widthOf(svg);
  const from = left(width);
  const begun = data.now - data.seconds;
  const scale = (width - from - 8) / data.seconds;
  const groups = { called: [], ran: [], failed: [], "called going": [], "ran going": [] };
  const found = [];
  const children = [];
  const tall = Math.max(8, Math.min(16, 210 / (data.lanes.length * 2)));
  let y = 4;
  let last = "";
  for (const lane of data.lanes) {
    if (lane.worker !== last) {
      if (last) children.push(line(0, y + 2, width, y + 2));
      y += last ? 6 : 0;
      children.push(text(0, y + 10, clipped(lane.worker, from > 80 ? 16 : 10)));
      last = lane.worker;
    }
    const rows = 1 + Math.max(...lane.spans.map((span) => span[0]));
    for (const span of lane.spans) {
      const [row, start, end, , , , failure] = span;
      const x = Math.max(from, from + (start - begun) * scale);
      const until = Math.min(data.now, end ?? data.now);
      const box = [x, y + row * tall, Math.max(1.5, from + (until - begun) * scale - x), tall - 1.5];
      groups[failure ? "failed" : end === null ? `${lane.kind} going` : lane.kind].push(box);
      found.push({ box, span, lane, now: data.now });
    }
    y += rows * tall + 3;
  }
  const height = Math.max(y, 60) + 20;
  const rules = axis(width, from, 0, height - 18, data.seconds, (at) => (at < data.seconds ? `−${seconds(data.seconds - at)}` : "now"));
  const bars = Object.entries(groups).filter(([, own]) => own.length).map(([style, own]) => boxes(own, style));
  show(svg, height, describeCalls(data), [...rules, ...children, ...bars]);
  return found;
}

export function under(found, x, y) {
  return found.find(({ box }) => x >= box[0] - 1 && x <= box[0] + box[2] + 1 && y >= box[1] && y <= box[1] + box[3]);
}

export function callInWords({ span, lane, now }) {
  const [, start, end, calls, name, peer, failure] = span;
  const what = lane.kind === "called" ? `${lane.worker} called ${name} on ${peer}` : `${lane.worker} ran ${name} for ${peer}`;
  const many = calls > 1 ? `, the longest of ${calls} calls` : "";
  if (end === null) return `${what}${many}: for ${seconds(Math.max(0, now - start))} now`;
  return `${what}${many}: ${seconds(end - start)}${failure ? `, failed: ${failure}` : ""}`;
}

function describeCalls(data) {
  const workers = new Set(data.lanes.map((lane) => lane.worker)).size;
  const spans = data.lanes.filter((lane) => lane.kind === "called").flatMap((lane) => lane.spans);
  const calls = spans.reduce((sum, span) => sum + span[3], 0);
  return `${calls} calls of ${workers} workers in the last ${seconds(data.seconds)}. The table below has the longest.`;
}

export function drawGantt(svg, gantt) {
  const width = widthOf(svg);
  const from = left(width);
  const workers = [...new Set(gantt.bars.map((bar) => bar.worker))];
  workers.sort((one, other) => firstStage(gantt, one) - firstStage(gantt, other));
  const length = gantt.ended - gantt.begun || 1e-6;
  const scale = (width - from - 8) / length;
  const tall = 24;
  const children = axis(width, from, 0, workers.length * tall + 2, length, seconds, "0");
  workers.forEach((worker, index) => {
    children.push(text(0, index * tall + 16, clipped(worker, from > 80 ? 16 : 10)));
  });
  for (const bar of gantt.bars) {
    const x = from + (bar.begun - gantt.begun) * scale;
    const y = workers.indexOf(bar.worker) * tall + 2;
    const wide = Math.max(1, (bar.ended - bar.begun) * scale - 1);
    const later = bar.stage > firstStage(gantt, bar.worker) ? " later" : "";
    const style = KINDS.includes(bar.kind) ? `${bar.kind}${later}` : "waits";
    children.push(make("rect", { x: x.toFixed(1), y, width: wide.toFixed(1), height: tall - 3, class: style }));
    if (wide > 14 && style !== "waits") children.push(text(x + wide / 2, y + 15, String(bar.number), "on-bar"));
  }
  show(svg, workers.length * tall + 20, `Batch ${gantt.batch} on ${workers.length} workers: ${seconds(length)}, idle ${share(gantt.idle)}. The table below has all actions.`, children);
}

function firstStage(gantt, worker) {
  return Math.min(...gantt.bars.filter((bar) => bar.worker === worker).map((bar) => bar.stage));
}

// One figure of the 12 workers with the most of it, over the time that is known; `word` writes a value.
export function drawSeries(svg, data, figure, word, name) {
  const width = widthOf(svg);
  const [from, right, height] = [60, width < 500 ? 80 : 120, 200];
  const sorted = Object.entries(data.series).sort(([, one], [, other]) => most(other, figure) - most(one, figure));
  const lines = sorted.slice(0, 12).sort(([one], [other]) => one.localeCompare(other)); // so that each keeps its colour
  const greatest = Math.max(1, ...lines.map(([, own]) => most(own, figure)));
  const first = Math.min(...lines.map(([, own]) => own[0][TIME]));
  const length = Math.max(1, data.now - first);
  const rising = ticks(greatest);
  const top = rising.at(-1);
  const x = (time) => from + ((time - first) / length) * (width - from - right);
  const y = (size) => height - 20 - (size / top) * (height - 30);
  const children = rising.flatMap((size) => [line(from, y(size), width - right, y(size)), text(from - 6, y(size) + 4, word(size), "faint end")]);
  children.push(text(from, height - 4, `−${seconds(length)}`, "faint"), text(width - right, height - 4, "now", "faint end"));
  const labels = [];
  lines.forEach(([worker, own], index) => {
    const points = own.map((point) => `${x(point[TIME]).toFixed(1)},${y(point[figure]).toFixed(1)}`);
    const style = `series series-${index % 6}${index % 12 >= 6 ? " dashed" : ""}`;
    children.push(make("polyline", { points: points.join(" "), class: style }));
    labels.push({ at: y(own.at(-1)[figure]) + 4, worker, style });
  });
  labels.sort((one, other) => one.at - other.at);
  labels.forEach((label, index) => {
    if (index) label.at = Math.max(label.at, labels[index - 1].at + 14);
  });
  const low = Math.max(0, (labels.at(-1)?.at ?? 0) - (height - 4));
  for (const { at, worker, style } of labels) children.push(text(width - right + 6, at - low, clipped(worker, right > 100 ? 16 : 10), style));
  const now = lines.map(([worker, own]) => `${worker} ${word(own.at(-1)[figure])}`).join(", ");
  show(svg, height, `${name} now: ${now}.`, children);
}

export function drawSteps(svg, data) {
  const width = widthOf(svg);
  const height = 110;
  const { series, steps } = data.training;
  const each = data.seconds / series.length;
  const top = ticks(Math.max(...series) / each, 3).at(-1);
  const slot = (width - 48) / series.length;
  const y = (rate) => height - 18 - (rate / top) * (height - 28);
  const bars = series.map((count, index) => {
    const at = y(count / each);
    return [40 + index * slot, at, Math.max(1, slot - 1), (height - 18 - at).toFixed(1)];
  });
  show(svg, height, `${steps} steps in the last ${seconds(data.seconds)}.`, [
    ...ticks(Math.max(...series) / each, 3).flatMap((rate) => [line(40, y(rate), width - 8, y(rate)), text(34, y(rate) + 4, short(rate), "faint end")]),
    boxes(bars, "bar"),
    text(40, height - 4, `−${seconds(data.seconds)}`, "faint"),
    text(width - 8, height - 4, "now", "faint end"),
  ]);
}
