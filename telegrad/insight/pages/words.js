// Numbers in words that people read quickly.

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 120) return `${Math.round(value / 60)} min`;
  if (value >= 1) return `${short(value)} s`;
  if (value >= 1e-3) return `${short(value * 1e3)} ms`;
  return `${short(value * 1e6)} µs`;
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit ? short(value) : Math.round(value)} ${units[unit]}`;
}

export function short(value) {
  return value >= 100 || Number.isInteger(value) ? String(Math.round(value)) : value.toPrecision(value >= 10 ? 3 : 2);
}

export function share(value) {
  return `${Math.round(value * 100)}%`;
}

// Names often differ in their ends only.
export function clipped(text, length) {
  const start = Math.floor(length * 0.4);
  return text.length <= length ? text : `${text.slice(0, start)}…${text.slice(text.length - (length - start - 1))}`;
}
