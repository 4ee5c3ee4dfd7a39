// What stands in which table.

import { fill, framed } from "./tables.js";
import { boxes, make } from "./draw.js";
import { KINDS, callInWords } from "./charts.js";
import { BYTES, CALLS, FAILED, MEMORY, PROCESSOR, most } from "./series.js";
import { bytes, seconds, share, short } from "./words.js";

const SHARES = ["forward", "backward", "optimizer", "waits", "calls"];

const number = (title, cell) => ({ title, cell, style: "number" });
const PLACES = 16; // of more workers, there is a table by role and host
const ROWS = 200; // of flows
const LONG = 10; // seconds for a call that moves its worker up

export function some(names) {
  return names.length > 6 ? `${names.slice(0, 5).join(", ")} and ${names.length - 5} more` : names.join(", ");
}

// The data of workers with all of these words in their names, hosts or phases.
export function found(data, words) {
  const wanted = words.toLowerCase().split(" ").filter(Boolean);
  if (!wanted.length) return data;
  const rows = [...silent(data), ...data.workers].filter((row) => {
    const told = `${row.worker} ${row.host} ${phase(row).text}`.toLowerCase();
    return wanted.every((word) => told.includes(word));
  });
  const names = new Set(rows.map((row) => row.worker));
  const own = (all) => Object.fromEntries(Object.entries(all).filter(([name]) => names.has(name)));
  return {
    ...data,
    workers: data.workers.filter((row) => names.has(row.worker)),
    silent: own(data.silent),
    flows: data.flows.filter((flow) => names.has(flow.source) || names.has(flow.target)),
    lanes: data.lanes.filter((lane) => names.has(lane.worker)),
    series: own(data.series),
    training: { ...data.training, spent: own(data.training.spent) },
  };
}

function grouped(rows) {
  const groups = new Map();
  for (const row of rows) {
    for (const name of [`role ${row.worker.replace(/[\d_-]+$/, "") || row.worker}`, `host ${row.host || "unknown"}`]) {
      groups.set(name, [...(groups.get(name) ?? []), row]);
    }
  }
  return [...groups].map(([name, own]) => ({ name, own, worst: Math.max(...own.map((row) => row.trouble)) })).sort((one, other) => other.worst - one.worst);
}

function sum(own, amount) {
  return own.reduce((total, row) => total + (row.silent ? 0 : amount(row)), 0);
}

const GROUPS = [
  { title: "Role or host", cell: (group) => group.name },
  number("Workers", ({ own }) => own.length),
  number("No answer", ({ own }) => counted(own.filter((row) => row.silent))),
  number("Full", ({ own }) => counted(own.filter((row) => row.busy >= row.slots))),
  number("Queued", ({ own }) => sum(own, (row) => row.queued)),
  number("Oldest call", ({ own }) => seconds(Math.max(0, ...own.map((row) => row.oldest ?? 0)))),
  number("Sent/s", ({ own }) => bytes(sum(own, (row) => row.rate.sent))),
  number("Memory", ({ own }) => bytes(sum(own, (row) => row.memory))),
];

function counted(own) {
  return { text: own.length, mark: own.length > 0 };
}

export function fillTables(at, data) {
  const last = `last ${seconds(data.seconds)}${data.whole ? "" : ", of which only the latest events are kept"}`;
  const rows = [...silent(data), ...data.workers].sort((one, other) => other.trouble - one.trouble);
  at("groups").hidden = rows.length <= PLACES;
  fill(at("groups-table"), "Those in trouble first", GROUPS, at("groups").hidden ? [] : grouped(rows));
  fill(at("workers-table"), workersCaption(data), WORKERS, rows);
  const flows = data.flows.toSorted((one, other) => other.rate - one.rate).slice(0, ROWS);
  fill(at("flows-table"), `From worker to worker, the most first: ${flows.length} of ${data.flows.length}`, FLOWS, flows);
  fill(at("longest-table"), `The 20 longest calls of the ${last}`, LONGEST, longest(data));
  fill(at("functions-table"), `Calls of the ${last}, the most time-consuming first`, functionColumns(data.bounds), data.functions);
  fill(at("spent-table"), `Where the time went, ${last}`, spentColumns(data.seconds), Object.entries(data.training.spent));
  fill(at("memory-table"), "Memory of the workers' processes", MEMORIES, memory(data));
  fill(at("history-table"), "The most, in the last ten minutes at most", MOST, Object.entries(data.series));
  fill(at("references-table"), "References to values on other workers, and messages about them in flight", referenceColumns(data), data.workers);
  if (data.gantt) fill(at("gantt-table"), "Actions in the order in which they began", GANTT, data.gantt.bars);
}

// Chooses a worker, which may be unknown as yet.
export function choose(at, name) {
  if (![...at("one").options].some((option) => option.value === name)) at("one").add(new Option(name));
  at("one").value = name;
}

// The tables of the worker that was chosen, which the server has made.
export function fillWorker(at, data) {
  const listed = new Set([...at("one").options].map((option) => option.value));
  for (const { worker } of [...data.workers, ...silent(data)]) {
    if (!listed.has(worker)) at("one").add(new Option(worker));
  }
  const { about, tables } = data.worker ?? { about: "", tables: [] };
  at("about").textContent = about;
  const place = at("tables");
  while (place.children.length > tables.length) place.lastChild.remove();
  tables.forEach(([name, columns, texts], index) => {
    if (!place.children[index]) place.append(framed(document.createElement("table"), name));
    const shown = columns.map(([title, isNumber], at) => ({ title, cell: (row) => row[at + 1], style: isNumber ? "number" : "wrap" }));
    fill(place.children[index].firstChild, `${name}: ${texts.length}`, [number("No.", (row) => row[0]), ...shown], texts.map((own, at) => [at + 1, ...own]));
  });
}

const WORKERS = [
  { title: "Worker", cell: (row) => row.worker },
  { title: "Phase", cell: phase, style: "wrap" },
  number("Slots", (row) => (row.silent ? "" : { text: `${row.busy} of ${row.slots}`, mark: row.busy >= row.slots })),
  number("Queued", (row) => row.queued ?? ""),
  number("Calls out", (row) => row.calls_out ?? ""),
  number("Oldest", (row) => (row.calls_out ? seconds(row.oldest) : "")),
  number("Served/s", (row) => (row.silent ? "" : short(row.rate.calls))),
  number("Sent/s", (row) => (row.silent ? "" : bytes(row.rate.sent))),
  number("Received/s", (row) => (row.silent ? "" : bytes(row.rate.received))),
  number("Threads", (row) => row.threads ?? ""),
  number("Processor", (row) => (row.silent || row.rate.processor === null ? "" : share(row.rate.processor))),
  number("Memory", (row) => (row.silent ? "" : bytes(row.memory))),
  number("Contexts", (row) => row.contexts ?? ""),
  number("Generation", (row) => row.generation ?? ""),
  number("Rank", (row) => row.rank ?? ""),
  { title: "Host, process", cell: (row) => (row.silent ? row.host : `${row.host}, ${row.pid}`) },
];

function phase(row) {
  if (row.silent) return { text: `no answer: ${row.silent}`, mark: true };
  const missing = row.missing.length ? `, waits for ${row.missing.join(", ")}` : "";
  const long = row.oldest >= LONG ? `, a call for ${seconds(row.oldest)}` : "";
  return { text: `${row.phase} for ${seconds(row.phase_age)}${missing}${long}`, mark: row.missing.length > 0 };
}

function silent(data) {
  return Object.entries(data.silent).map(([worker, why]) => ({ worker, host: data.hosts[worker], trouble: 1e12, silent: why || "no reason is known" }));
}

function workersCaption(data) {
  const gone = Object.entries(data.gone).map(([name, why]) => `${name} (${why})`);
  return gone.length ? `No longer in the group: ${some(gone)}` : "Those in trouble first; click on one";
}

const FLOWS = [
  { title: "Flow", cell: (row) => `${row.source} → ${row.target}` },
  number("Bytes/s", (row) => bytes(row.rate)),
  number("Since the start", (row) => bytes(row.total)),
  number("Calls in flight", (row) => row.calls),
];

function longest(data) {
  return data.lanes
    .flatMap((lane) => lane.spans.map((span) => ({ lane, span, now: data.now, took: (span[2] ?? data.now) - span[1] })))
    .sort((one, other) => other.took - one.took)
    .slice(0, 20)
    .map((each, index) => ({ ...each, index }));
}

const LONGEST = [
  number("No.", (row) => row.index + 1),
  { title: "Call", cell: (row) => ({ text: callInWords(row), mark: Boolean(row.span[6]) }) },
  number("Began", (row) => `${seconds(Math.max(0, row.now - row.span[1]))} ago`),
];

function functionColumns(bounds) {
  return [
    { title: "Function", cell: (row) => row.name },
    number("Calls", (row) => row.calls),
    number("Failed", (row) => ({ text: row.failures, mark: row.failures > 0 })),
    number("p50", (row) => seconds(row.p50)),
    number("p99", (row) => seconds(row.p99)),
    number("p50 of running", (row) => seconds(row.running)),
    { title: `From ${seconds(bounds[0])} to ${seconds(bounds.at(-1))}`, cell: (row) => histogram(row, bounds), style: "wide" },
  ];
}

function histogram(row, bounds) {
  const most = Math.max(...row.histogram);
  const bars = row.histogram.map((count, index) => {
    const tall = count ? Math.max(1.5, (count / most) * 20) : 0;
    return [index * 10, 21 - tall, 9, tall.toFixed(1)];
  });
  const label = row.histogram.map((count, index) => (count ? `${count} ${index < bounds.length ? `up to ${seconds(bounds[index])}` : "longer"}` : "")).filter(Boolean).join(", ");
  const wide = row.histogram.length * 10;
  const base = make("path", { d: `M0 21.5H${wide}`, class: "rule" });
  return make("svg", { viewBox: `0 0 ${wide} 22`, height: 22, preserveAspectRatio: "none", role: "img", "aria-label": label }, make("title", {}, label), base, boxes(bars, "bar"));
}

function spentColumns(length) {
  return [
    { title: "Worker", cell: ([worker]) => worker },
    ...SHARES.map((kind) => number(kind[0].toUpperCase() + kind.slice(1), ([, spent]) => share(spent[kind] / length))),
    { title: "Of that time", cell: ([, spent]) => stack(spent, length), style: "wide" },
  ];
}

function stack(spent, length) {
  let x = 0;
  const bars = SHARES.map((kind) => {
    const wide = (spent[kind] / length) * 300;
    x += wide;
    return boxes([[x - wide, 2, wide, 16]], kind);
  });
  return make("svg", { viewBox: "0 0 300 20", height: 20, preserveAspectRatio: "none", "aria-hidden": "true" }, make("path", { d: "M0 19.5H300", class: "rule" }), ...bars);
}

function memory(data) {
  const shared = new Map(data.workers.map((worker) => [worker.worker, worker.shared]));
  return Object.entries(data.series).map(([worker, own]) => ({ worker, now: own.at(-1)[MEMORY], most: most(own, MEMORY), shared: shared.get(worker) ?? 0 }));
}

const MOST = [
  { title: "Worker", cell: ([worker]) => worker },
  number("Served/s", ([, own]) => short(most(own, CALLS))),
  number("Failed/s", ([, own]) => ({ text: short(most(own, FAILED)), mark: most(own, FAILED) > 0 })),
  number("Bytes/s", ([, own]) => bytes(most(own, BYTES))),
  number("Processor", ([, own]) => share(most(own, PROCESSOR))),
];

const MEMORIES = [
  { title: "Worker", cell: (row) => row.worker },
  number("Now", (row) => bytes(row.now)),
  number("Most", (row) => bytes(row.most)),
  number("Shared memory lent", (row) => bytes(row.shared)),
];

const KNOWN = { owners: "Owned", shared_owners: "Held by others", users: "Held" };

function referenceColumns(data) {
  const found = new Set(data.workers.flatMap((worker) => Object.keys(worker.references)));
  const keys = [...new Set([...Object.keys(KNOWN).filter((key) => found.has(key)), ...found])];
  const title = (key) => KNOWN[key] ?? key[0].toUpperCase() + key.slice(1).replaceAll("_", " ");
  return [{ title: "Worker", cell: (row) => row.worker }, ...keys.map((key) => number(title(key), (row) => row.references[key] ?? ""))];
}

const GANTT = [
  { title: "Action", cell: (row) => `${row.kind} of ${KINDS.includes(row.kind) ? "micro-batch" : "tied weight"} ${row.number}, stage ${row.stage}` },
  { title: "Worker", cell: (row) => row.worker },
  number("Took", (row) => seconds(row.ended - row.begun)),
];
