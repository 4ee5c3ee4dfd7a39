// Small things that all charts are made of.

const SPACE = "http://www.w3.org/2000/svg";

export function make(name, attributes = {}, ...children) {
  const found = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  found.append(...children);
  return found;
}

export function text(x, y, content, style = "") {
  return make("text", { x: x.toFixed(1), y: y.toFixed(1), class: style }, content);
}

export function line(x1, y1, x2, y2, style = "rule") {
  return make("line", { x1, y1, x2, y2, class: style });
}

// Many rectangles of one colour are one element: a chart can have thousands.
export function boxes(rectangles, style) {
  const d = rectangles.map(([x, y, width, height]) => `M${x.toFixed(1)} ${y.toFixed(1)}h${width.toFixed(1)}v${height}h${(-width).toFixed(1)}z`);
  return make("path", { d: d.join(""), class: style });
}

// Draws into an element of the page at its true width, so that text keeps its size in narrow windows.
export function show(svg, height, description, children) {
  svg.setAttribute("viewBox", `0 0 ${widthOf(svg)} ${height}`);
  svg.setAttribute("height", height);
  svg.setAttribute("aria-label", description);
  svg.replaceChildren(...children);
}

export function widthOf(svg) {
  return Math.max(240, svg.clientWidth || svg.parentElement.clientWidth);
}

// Round numbers from 0 to what is at least the greatest.
export function ticks(greatest, about = 4, base = 10) {
  if (!(greatest > 0)) return [0, 1];
  const raw = greatest / about;
  const power = base ** Math.floor(Math.log(raw) / Math.log(base));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw) ?? base * power;
  const found = [];
  for (let at = 0; at < greatest + step; at += step) found.push(at);
  return found;
}
