import { el } from "./parts.js";
import { BOTTOM, HEIGHT, RIGHT, TOP, WIDTH, draw, drawAxis, drawAxisName, limits, newChart, roundTicks, short, usesLogAxis } from "./svg.js";

const MIN_DRAG = 8;

// Exponential moving average without the bias of its start, as in TensorBoard.
function smooth(points, weight) {
  let sum = 0, total = 0;
  return points.map(([step, value]) => {
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return [step, sum / total];
  });
}

// One metric of several runs. A run is { run, place, lines }; its place among all runs decides its color.
export function stepChart(name, runs, { smoothing = 0, log = false } = {}) {
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
  const svg = newChart(`${name} by step`);
  const inside = points => zoom ? points.filter(([step]) => step >= zoom[0] && step <= zoom[1]) : points;
  const all = series.flatMap(line => [...inside(line.raw), ...inside(line.points)]);
  if (!all.length) return svg;
  const usesLog = usesLogAxis(log, all.map(([, value]) => value));
  const { left, y } = drawAxis(svg, all.map(([, value]) => value), usesLog), [x0, x1] = limits(all.map(([step]) => step));
  const x = step => left + (step - x0) / (x1 - x0) * (WIDTH - left - RIGHT);
  for (const step of roundTicks(x0, x1)) {
    svg.append(draw("line", { class: "grid", x1: x(step), x2: x(step), y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM + 3 }),
      draw("text", { x: x(step), y: HEIGHT - 18, "text-anchor": "middle" }, short(step)));
  }
  drawAxisName(svg, left, usesLog ? "step; logarithmic values" : "step");
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
