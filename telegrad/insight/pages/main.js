// Asks the server for what there is, again and again, and has it shown.

import { callInWords, drawCalls, drawGantt, drawSeries, drawSteps, drawTraffic, under } from "./charts.js";
import { BYTES, CALLS, FAILED, MEMORY, PROCESSOR, remember } from "./series.js";
import { framed } from "./tables.js";
import { choose, fillTables, fillWorker, found, some } from "./views.js";
import { bytes, seconds as inSeconds, share, short } from "./words.js";

const PAUSE = 1000; // milliseconds between two looks; the server looks no more often
const LONGEST = 15000; // between two tries where it does not answer
const PATIENCE = 8000; // with one answer

const FIGURES = { served: [CALLS, short], failed: [FAILED, short], bytes: [BYTES, bytes], processor: [PROCESSOR, share] };
const ADDRESS = "#worker="; // and the name of a worker

const at = (id) => document.getElementById(id);
const state = at("state");
let latest = null;
let shown = []; // calls in the timeline, and where
let paused = false;
let wait = PAUSE;
let timer = 0;
let asking = false;

async function look() {
  clearTimeout(timer);
  if (paused || document.hidden || asking) return;
  asking = true;
  try {
    const data = await ask(`data?seconds=${at("seconds").value}&worker=${encodeURIComponent(at("one").value)}&after=${latest ? latest.epoch + latest.now : 0}`).then((answer) => answer.json());
    wait = PAUSE;
    if (!paused) take(data);
  } catch (error) {
    wait = Math.min(wait * 2, LONGEST);
    if (!paused) tell("lost", `${trouble(error)} Trying again in ${Math.round(wait / 1000)} s.${asOf()}`);
  } finally {
    asking = false;
    if (!paused && !document.hidden) timer = setTimeout(look, wait);
  }
}

async function ask(path) {
  const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
  if (!answer.ok) throw new Refused(answer.status === 403 ? "This page no longer has access: open the latest address that the dashboard printed." : `The server answered ${answer.status}.`);
  return answer;
}

class Refused extends Error {}

function trouble(error) {
  return error instanceof Refused ? error.message : "The dashboard's server does not answer.";
}

function asOf() {
  return latest?.place ? ` The data shown is from ${clock(latest)}.` : "";
}

function clock(data) {
  return new Date((data.epoch + data.now) * 1000).toLocaleTimeString();
}

function take(data) {
  if (data.trouble) {
    tell("lost", `The group cannot be queried: ${data.trouble}.${asOf()}`);
    if (!data.workers.length) return;
  } else {
    const silent = Object.keys(data.silent);
    tell("live", silent.length ? `Live; no answer from ${some(silent)}` : "Live");
  }
  remember(data, latest);
  latest = data;
  render();
}

// Says it only where it is new, so that it is read aloud once.
function tell(kind, words) {
  state.dataset.state = kind;
  if (state.textContent !== words) state.textContent = words;
}

function render() {
  if (!latest) return;
  const { programs, place, size, workers, silent } = latest;
  const data = found(latest, at("find").value);
  const members = `${workers.length} of ${size ?? workers.length + Object.keys(silent).length} workers answer`;
  at("group").textContent = [programs.join(", "), place, members].filter(Boolean).join(" · ");
  fillTables(at, data);
  fillWorker(at, latest);
  drawTraffic(at("matrix"), data);
  shown = drawCalls(at("timeline"), data);
  if (Object.keys(data.series).length) {
    drawSeries(at("memory-chart"), data, MEMORY, bytes, "Memory");
    drawSeries(at("history-chart"), data, ...FIGURES[at("figure").value], at("figure").selectedOptions[0].text);
  }
  const { steps, passes, pass_p50 } = data.training;
  at("steps").replaceChildren(`${short(steps / data.seconds)} steps/s `, small(passes ? `${passes} backward passes, median ${inSeconds(pass_p50)}` : ""));
  drawSteps(at("series"), data);
  at("pipeline").hidden = !data.gantt;
  if (data.gantt) {
    const { batch, begun, ended, idle } = data.gantt;
    at("pipeline-title").textContent = `Pipeline: batch ${batch}, ${inSeconds(ended - begun)}, idle ${share(idle)}`;
    drawGantt(at("gantt"), data.gantt);
  }
}

// Shows the worker of the address. The addresses of sections leave it as it is.
function follow() {
  if (location.hash && !location.hash.startsWith(ADDRESS)) return;
  const name = decoded(location.hash.slice(ADDRESS.length));
  choose(at, name);
  if (name) at("worker").scrollIntoView();
  document.title = name ? `${name} · Telegrad` : "Telegrad";
  look();
}

// A person may have typed the address.
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function small(words) {
  const found = document.createElement("small");
  found.textContent = words;
  return found;
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  at("theme").value = theme;
  keep("theme", theme);
}

// A browser may forbid to keep anything.
function keep(name, value) {
  try {
    localStorage.setItem(`telegrad-${name}`, value);
  } catch {}
}

function kept(name, otherwise) {
  try {
    return localStorage.getItem(`telegrad-${name}`) ?? otherwise;
  } catch {
    return otherwise;
  }
}

at("theme").addEventListener("change", (event) => setTheme(event.target.value));
at("seconds").addEventListener("change", () => {
  keep("seconds", at("seconds").value);
  look();
});
at("find").addEventListener("input", render);
at("figure").addEventListener("change", render);
at("one").addEventListener("change", () => (location.hash = ADDRESS + encodeURIComponent(at("one").value)));
at("workers-table").addEventListener("click", (event) => {
  const name = event.target.closest("tbody tr")?.dataset.key;
  if (name) location.hash = ADDRESS + encodeURIComponent(name);
});
addEventListener("hashchange", follow);
at("pause").addEventListener("click", () => {
  paused = !paused;
  at("pause").setAttribute("aria-pressed", paused);
  if (paused) tell("paused", `Paused.${asOf()}`);
  look();
});
at("ask").addEventListener("click", async () => {
  at("ask").setAttribute("aria-busy", "true");
  const answer = at("answer");
  answer.textContent = "Asking all workers…";
  answer.hidden = false;
  answer.textContent = await ask("why").then((found) => found.text(), trouble);
  at("ask").removeAttribute("aria-busy");
});
at("timeline").addEventListener("pointermove", (event) => {
  const frame = at("timeline").getBoundingClientRect();
  const found = under(shown, event.clientX - frame.left, event.clientY - frame.top);
  at("hovered").textContent = found ? callInWords(found) : "";
});
document.addEventListener("visibilitychange", look);
addEventListener("online", look);
let width = innerWidth;
addEventListener("resize", () => {
  if (width !== innerWidth) requestAnimationFrame(render);
  width = innerWidth;
});

for (const section of document.querySelectorAll("section")) {
  const title = section.querySelector("h2").textContent;
  section.ariaLabel = title;
  const link = document.createElement("a");
  link.href = `#${section.id}`;
  link.textContent = title;
  document.querySelector("nav").append(link);
  for (const table of section.querySelectorAll("table")) {
    framed(table, table.parentElement.querySelector(":scope > summary")?.textContent ?? title);
  }
}

history.replaceState(null, "", location.pathname + location.hash); // the token is in a cookie now
setTheme(kept("theme", "system"));
at("seconds").value = kept("seconds", "15");
follow();
look();
