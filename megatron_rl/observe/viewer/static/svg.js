// What charts over steps and over settings have in common.
export const WIDTH = 320, HEIGHT = 170, RIGHT = 10, TOP = 8, BOTTOM = 32;
const DIGIT = 5.8; // width of a character of a label

export function draw(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

export const short = value =>
  Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(1) : String(Number(value.toPrecision(4)));

export function limits(values) {
  const low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}

// Round numbers within limits, at most five.
export function roundTicks(low, high) {
  const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map(factor => factor * power).find(each => each >= rough);
  const first = Math.ceil(low / size);
  return Array.from({ length: Math.floor(high / size) - first + 1 }, (_, place) => Number(((first + place) * size).toPrecision(12)));
}

export const usesLogAxis = (log, values) => log && values.every(value => value > 0);

// Draw the grid and the labels of `values` on the vertical axis. Return the left edge, and the height of a value.
export function drawAxis(svg, values, usesLog) {
  const scaled = usesLog ? Math.log10 : value => value, back = usesLog ? value => 10 ** value : value => value;
  const [low, high] = limits(values.map(scaled));
  const heightOf = value => HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM);
  const ticks = [low, (low + high) / 2, high].map(value => [value, short(back(value))]);
  const left = 8 + DIGIT * Math.max(...ticks.map(([, label]) => label.length));
  for (const [value, label] of ticks) {
    const height = heightOf(value);
    svg.append(draw("line", { class: "grid", x1: left, x2: WIDTH - RIGHT, y1: height, y2: height }),
      draw("text", { x: left - 4, y: height + 3, "text-anchor": "end" }, label));
  }
  return { left, y: value => heightOf(scaled(value)) };
}

export function drawAxisName(svg, left, name) {
  svg.append(draw("text", { x: (left + WIDTH - RIGHT) / 2, y: HEIGHT - 5, "text-anchor": "middle" }, name));
}

export const newChart = label => draw("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label });
