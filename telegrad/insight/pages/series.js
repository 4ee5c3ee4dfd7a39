// The series of the workers' figures of the last ten minutes.

export const [TIME, CALLS, FAILED, BYTES, MEMORY, PROCESSOR] = [0, 1, 2, 3, 4, 5]; // of a point of a series
const LONGEST = 600; // seconds

// Adds the points that the page has already, which the server does not send again.
export function remember(data, before) {
  if (before?.epoch !== data.epoch) return;
  for (const [worker, own] of Object.entries(before.series)) {
    const all = [...own, ...(data.series[worker] ?? [])].filter((point) => point[TIME] > data.now - LONGEST);
    if (all.length) data.series[worker] = all;
  }
}

export function most(own, figure) {
  return Math.max(...own.map((point) => point[figure]));
}
