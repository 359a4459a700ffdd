// Everything that a model, a tool or a data set wrote reaches the page through textContent; nothing is ever parsed as HTML.
import { curvesView } from "./curves.js";
import { ask, isLive } from "./data.js";
import { episodeView } from "./episode.js";
import { examplesView } from "./examples.js";
import { groupView } from "./group.js";
import { el, link, route } from "./parts.js";
import { rolloutsView } from "./rollouts.js";
import { overviewView, settingsView } from "./runs.js";

const VIEWS = { runs: overviewView, curves: curvesView, rollouts: rolloutsView, examples: examplesView, settings: settingsView, group: groupView, episode: episodeView };
const LISTED = ["runs", "curves", "rollouts", "examples", "settings"], OF_ALL_RUNS = ["runs", "settings"], FOLLOWED = ["runs", "curves", "rollouts"];
const EVERY_MS = 5000; // between two looks at runs that may be under way
const KEYS = [["0, 1, 2, 3, 4", "runs, curves, rollouts, examples, settings"], ["/", "focus the search field or the first filter"], ["Escape", "leave the field"],
  ["j, k, arrows", "next, previous rollout, group member or chart"], ["Enter", "open the selected item"], ["g", "open the group of a rollout"], ["?", "show or hide this list"]];
const main = document.getElementById("main"), banner = document.getElementById("banner"), help = document.getElementById("help");
let runs = [], keys = {}, numShown = 0;

function header(at) {
  const own = new URLSearchParams(), chosen = new Set(at.params.getAll("run"));
  for (const run of chosen) own.append("run", run);
  document.getElementById("views").replaceChildren(...LISTED.map(name =>
    el("a", { href: link(name, own), ...(at.view === name ? { class: "here", "aria-current": "page" } : {}) }, name)));
  document.getElementById("runs").replaceChildren(...(OF_ALL_RUNS.includes(at.view) ? [] : runs.map((run, place) => runChoice(run, place, at, chosen))));
}

function runChoice(run, place, at, chosen) {
  const isMany = at.view === "curves", box = el("input", { type: isMany ? "checkbox" : "radio", name: "run" });
  box.checked = chosen.has(run.name);
  box.addEventListener("change", () => {
    const names = runs.map(each => each.name), kept = isMany ? names.filter(name => name === run.name ? box.checked : chosen.has(name)) : [run.name];
    const next = new URLSearchParams((kept.length ? kept : [run.name]).map(name => ["run", name]));
    location.hash = link(["curves", "examples"].includes(at.view) ? at.view : "rollouts", next);
  });
  const text = el("span", { class: `run${place % 6}` }, ` ${run.name} (${run.rollouts} rollouts${run.last_step === null ? "" : `, step ${run.last_step}`})`);
  return el("label", { class: "choice" }, el("span", {}, box, text));
}

async function show() {
  const number = ++numShown, at = route();
  keys = {};
  banner.textContent = "";
  if (!location.hash && runs.length > 1) at.view = "runs";
  if (!VIEWS[at.view]) at.view = "curves";
  if (!at.params.get("run") && runs.length) {
    for (const run of at.view === "curves" ? runs : runs.slice(0, 1)) at.params.append("run", run.name);
  }
  header(at);
  // A view that was left before its data came must not replace its successor.
  const place = el("main", {}), setKeys = found => { if (number === numShown) keys = found; };
  try {
    if (!runs.length) throw new Error("no runs");
    await VIEWS[at.view](at, { main: place, runs, banner, setKeys });
  } catch (error) {
    if (number === numShown) banner.textContent = String(error.message);
  }
  if (number !== numShown) return;
  main.replaceChildren(...place.childNodes);
  const skipped = runs.flatMap(run => run.skipped);
  if (skipped.length && !banner.textContent) banner.textContent = `left out: ${skipped.join("; ")}`;
  document.body.dataset.shown = at.view;
}

// Runs go on while they are looked at: new steps appear where nobody is typing.
async function follow() {
  const now = await ask("runs", {}).catch(() => runs); // the program may have been ended
  if (JSON.stringify(now) === JSON.stringify(runs) || main.contains(document.activeElement)) return;
  runs = now;
  if (FOLLOWED.includes(route().view)) await show();
  else header(route());
}

addEventListener("hashchange", show);
if (isLive) setInterval(() => { if (!document.hidden) follow(); }, EVERY_MS);
help.replaceChildren(el("h2", {}, "keys"), el("table", {}, ...KEYS.map(([key, told]) => el("tr", {}, el("td", {}, key), el("td", {}, told)))));
const EVERYWHERE = {
  ...Object.fromEntries(LISTED.map((name, place) => [String(place), () => { location.hash = `#/${name}`; }])),
  "/": () => main.querySelector("input[type=search], .filters input")?.focus(), "?": () => help.open ? help.close() : help.showModal(),
};
addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || (help.open && event.key !== "?")) return;
  if (["INPUT", "SELECT"].includes(document.activeElement?.tagName)) {
    if (event.key === "Escape") document.activeElement.blur();
    return;
  }
  const act = EVERYWHERE[event.key] || keys[event.key];
  if (act) { event.preventDefault(); act(); }
});
ask("runs", {}).then(found => {
  runs = found;
  return show();
}).catch(error => { banner.textContent = String(error.message); });
