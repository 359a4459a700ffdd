import { el } from "./parts.js";

const WIDTH = 320, HEIGHT = 170, RIGHT = 10, TOP = 8, BOTTOM = 32, DIGIT = 5.8; // DIGIT: width of a character of a label
const MIN_DRAG = 8;

function draw(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const short = value => Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(1) : String(Number(value.toPrecision(4)));

// Exponential moving average without the bias of its start, as in TensorBoard.
function smooth(points, weight) {
  let sum = 0, total = 0;
  return points.map(([step, value]) => {
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return [step, sum / total];
  });
}

function limits(values) {
  const low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}

// One metric of several runs. A run is { run, place, lines }; its place among all runs decides its color.
export function chart(name, runs, { smoothing = 0, log = false } = {}) {
  const series = runs.map(({ run, place, lines }) => {
    const points = lines.filter(line => line[name] !== null && line[name] !== undefined).map(line => [line.step, line[name]]);
    return { run, color: `run${place % 6}`, raw: points, points: smooth(points, smoothing) };
  });
  const plot = el("div", { class: "plot" }), legend = el("div", { class: "legend" });
  let zoom = null;
  const told = step => {
    const reset = el("button", {}, "whole run");
    reset.addEventListener("click", () => { zoom = null; paint(); });
    legend.replaceChildren(...series.map(({ run, color, points }) => {
      const at = points.length && (step === null ? points.at(-1) : points.reduce((a, b) => Math.abs(b[0] - step) < Math.abs(a[0] - step) ? b : a));
      return el("span", { class: color }, `${run} ${at ? `${short(at[1])} (step ${short(at[0])})` : "none"}`);
    }), ...(zoom ? [reset] : []));
  };
  const paint = () => {
    plot.replaceChildren(picture(name, series, { zoom, log, told, onZoom: range => { zoom = range; paint(); } }), legend);
    told(null);
  };
  paint();
  return plot;
}

function picture(name, series, { zoom, log, told, onZoom }) {
  const svg = draw("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${name} by step` });
  const inside = points => zoom ? points.filter(([step]) => step >= zoom[0] && step <= zoom[1]) : points;
  const all = series.flatMap(line => [...inside(line.raw), ...inside(line.points)]);
  if (!all.length) return svg;
  const usesLog = log && all.every(([, value]) => value > 0);
  const scaled = usesLog ? Math.log10 : value => value, back = usesLog ? value => 10 ** value : value => value;
  const [x0, x1] = limits(all.map(([step]) => step)), [y0, y1] = limits(all.map(([, value]) => scaled(value)));
  const ticks = [y0, (y0 + y1) / 2, y1].map(value => [value, short(back(value))]);
  const left = 8 + DIGIT * Math.max(...ticks.map(([, label]) => label.length));
  const x = step => left + (step - x0) / (x1 - x0) * (WIDTH - left - RIGHT), y = value => HEIGHT - BOTTOM - (scaled(value) - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM);
  for (const [value, label] of ticks) {
    const height = HEIGHT - BOTTOM - (value - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM);
    svg.append(draw("line", { class: "grid", x1: left, x2: WIDTH - RIGHT, y1: height, y2: height }), draw("text", { x: left - 4, y: height + 3, "text-anchor": "end" }, label));
  }
  for (const [step, anchor] of [[x0, "start"], [x1, "end"]]) svg.append(draw("text", { x: x(step), y: HEIGHT - 18, "text-anchor": anchor }, short(step)));
  svg.append(draw("text", { x: (left + WIDTH - RIGHT) / 2, y: HEIGHT - 5, "text-anchor": "middle" }, usesLog ? "step (logarithmic values)" : "step"));
  for (const { color, raw, points } of series) {
    const layers = points.some(([, value], place) => value !== raw[place][1]) ? [[raw, "raw"], [points, "line"]] : [[points, "line"]];
    for (const [layer, kind] of layers) {
      const shown = inside(layer);
      if (shown.length === 1) svg.append(draw("circle", { class: `${kind} ${color}`, cx: x(shown[0][0]), cy: y(shown[0][1]), r: 3 }));
      else if (shown.length) svg.append(draw("polyline", { class: `${kind} ${color}`, points: shown.map(([step, value]) => `${x(step)},${y(value)}`).join(" ") }));
    }
  }
  follow(svg, { stepAt: place => x0 + (place - left) / (WIDTH - left - RIGHT) * (x1 - x0), left, told, onZoom });
  return svg;
}

// The pointer shows values in the legend; dragging chooses the steps that are shown.
function follow(svg, { stepAt, left, told, onZoom }) {
  const cursor = draw("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  svg.append(cursor);
  const placeOf = event => { const box = svg.getBoundingClientRect(); return Math.max(left, Math.min(WIDTH - RIGHT, (event.clientX - box.left) / box.width * WIDTH)); };
  let from = null;
  svg.addEventListener("pointermove", event => {
    const place = placeOf(event);
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, place);
    cursor.setAttribute("visibility", "visible");
    told(stepAt(place));
  });
  svg.addEventListener("pointerleave", () => { from = null; cursor.setAttribute("visibility", "hidden"); told(null); });
  svg.addEventListener("pointerdown", event => { from = placeOf(event); });
  svg.addEventListener("pointerup", event => {
    const to = placeOf(event);
    if (from !== null && Math.abs(to - from) >= MIN_DRAG) onZoom([stepAt(Math.min(from, to)), stepAt(Math.max(from, to))]);
    from = null;
  });
}
