export function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children); // strings become text
  return made;
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number" || Number.isInteger(value)) return String(value);
  return Math.abs(value) < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

const UNITS = [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]];

// A duration in units that people read: 2 h 5 min, 3 min 20 s, 2.5 s, 350 ms.
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const unit = UNITS.find(([size]) => Math.round(seconds) >= size);
  if (unit) {
    const [size, name, part, partName] = unit, parts = Math.round(seconds / part), rest = parts % (size / part);
    return `${Math.floor(parts / (size / part))} ${name}${rest ? ` ${rest} ${partName}` : ""}`;
  }
  if (seconds === 0) return "0 s";
  return seconds >= 1 ? `${Number(seconds.toPrecision(2))} s` : seconds >= 0.001 ? `${Math.round(seconds * 1000)} ms` : "< 1 ms";
}

export const link = (view, params) => `#/${view}?${params instanceof URLSearchParams ? params : new URLSearchParams(params)}`;
export const replaceRoute = (view, params) => history.replaceState(null, "", link(view, params));

export function route() {
  const [view, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { view: view || "curves", params: new URLSearchParams(query || "") };
}

// A reward on a background between red (the run's lowest) and green (its highest).
export function chip(reward, [low, high]) {
  const made = el("span", { class: "chip" }, number(reward));
  if (reward !== null && low !== null && low < high) {
    made.style.backgroundColor = `color-mix(in srgb, #2b8a3e ${Math.round(100 * (reward - low) / (high - low))}%, #c92a2a)`;
    made.classList.add("colored");
  }
  return made;
}

export const fact = (name, value) => el("div", {}, `${name} `, el("b", {}, value));

export function table(head, body, label) {
  const titles = head.map(each => each instanceof Element ? each : el("th", { scope: "col" }, each));
  return el("div", { class: "scroll", role: "region", "aria-label": label, tabindex: 0 },
    el("table", {}, el("thead", {}, el("tr", {}, ...titles)), el("tbody", {}, ...body)));
}

// A question without the placeholders of its images.
export const questionText = question => question.replaceAll(/<(?:image|video)>\n?/g, "").trim();

let list = { link: "", links: [] };

// The table of rollouts that was shown last. An episode leads to its neighbors there.
export function rememberList(link, links) { list = { link, links }; }
export function lastList() { return list; }

let chosenLink = "";

// Keys that step through `parts` of a view and open the chosen one, which stays chosen when the view is drawn again.
export function choosing(parts, to) {
  let chosen = parts.findIndex((_, place) => to(place) === chosenLink);
  parts[chosen]?.classList.add("chosen");
  const choose = place => {
    chosen = Math.max(0, Math.min(parts.length - 1, place));
    parts.forEach((part, each) => part.classList.toggle("chosen", each === chosen));
    parts[chosen]?.scrollIntoView({ block: "nearest" });
    if (parts[chosen]) chosenLink = to(chosen);
  };
  const [next, previous] = [() => choose(chosen + 1), () => choose(chosen - 1)];
  return { j: next, ArrowDown: next, k: previous, ArrowUp: previous, Enter: () => { if (parts[chosen]) location.hash = to(chosen); } };
}
