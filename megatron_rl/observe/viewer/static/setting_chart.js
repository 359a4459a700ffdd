import { el } from "./parts.js";
import { BOTTOM, HEIGHT, RIGHT, WIDTH, draw, drawAxis, drawAxisName, limits, newChart, short, usesLogAxis } from "./svg.js";

const LAST_SHARE = 0.1; // share of a run's steps over which its final value is averaged
const LOG_RATIO = 30; // numbers that differ by this factor are drawn on a logarithmic axis
const mean = values => values.reduce((a, b) => a + b, 0) / values.length;

// One metric of several runs over a setting: a dot for each run, and a line through the means of equal settings.
export function settingChart(name, runs, { setting, log = false }) {
  const points = runs.map(({ run, place, lines, settings }) => {
    const values = lines.map(line => line[name]).filter(value => value !== null && value !== undefined);
    const value = values.length ? mean(values.slice(-Math.ceil(LAST_SHARE * values.length))) : null;
    return { run, color: `run${place % 6}`, given: settings[setting] ?? "–", value };
  });
  const legend = el("div", { class: "legend" }, ...points.map(({ run, color, given, value }) =>
    el("span", { class: color }, `${run} ${value === null ? "none" : short(value)} (${given})`)));
  return el("div", { class: "plot" }, picture(name, points.filter(each => each.value !== null), { setting, log }), legend);
}

function picture(name, points, { setting, log }) {
  const svg = newChart(`${name} by ${setting}`);
  if (!points.length) return svg;
  const values = points.map(each => each.value), { left, y } = drawAxis(svg, values, usesLogAxis(log, values));
  const { positionOf, usesLog } = positions(points.map(each => each.given));
  const x = given => left + 14 + positionOf(given) * (WIDTH - left - RIGHT - 28);
  const groups = Map.groupBy(points, each => each.given), ordered = [...groups.keys()].sort((a, b) => x(a) - x(b));
  svg.append(draw("polyline", { class: "means", points: ordered.map(given => `${x(given)},${y(mean(groups.get(given).map(each => each.value)))}`).join(" ") }));
  for (const { color, given, value } of points) svg.append(draw("circle", { class: color, cx: x(given), cy: y(value), r: 4 }));
  const room = Math.max(4, Math.floor((WIDTH - left) / ordered.length / 6));
  for (const given of ordered) {
    svg.append(draw("text", { x: x(given), y: HEIGHT - BOTTOM + 14, "text-anchor": "middle" }, given.length > room ? `${given.slice(0, room - 1)}…` : given));
  }
  drawAxisName(svg, left, usesLog ? `${setting} (logarithmic)` : setting);
  return svg;
}

// Positions between 0 and 1 of settings: numbers by their size, other values side by side.
function positions(given) {
  const numbers = given.map(Number), different = [...new Set(given)];
  if (!given.every((each, place) => each.trim() !== "" && Number.isFinite(numbers[place]))) {
    return { positionOf: each => different.length > 1 ? different.indexOf(each) / (different.length - 1) : 0.5, usesLog: false };
  }
  const usesLog = numbers.every(each => each > 0) && Math.max(...numbers) / Math.min(...numbers) >= LOG_RATIO;
  const scaled = usesLog ? Math.log10 : value => value, [low, high] = limits(numbers.map(scaled));
  return { positionOf: each => (scaled(Number(each)) - low) / (high - low), usesLog };
}
