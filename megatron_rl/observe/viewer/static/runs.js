import { ask } from "./data.js";
import { choosing, duration, el, link, number, table } from "./parts.js";

const MAX_COLUMNS = 10; // of settings that differ

function stepsOf({ num_done, num_steps }) {
  if (num_done === null) return ["no step yet"];
  const text = `${num_done}${num_steps ? `/${num_steps}` : ""}`;
  return num_steps ? [el("progress", { max: num_steps, value: Math.min(num_done, num_steps), "aria-label": "steps" }), ` ${text}`] : [text];
}

// State and last figures of all runs, and the settings in which they differ.
export async function overviewView(at, { main, setKeys }) {
  const found = await ask("overview", {}), differing = found.differing.slice(0, MAX_COLUMNS), more = found.differing.length - differing.length;
  const metrics = Object.keys(found.runs[0]?.figures || {}).filter(name => found.runs.some(run => run.figures[name] !== null));
  const to = name => link("rollouts", { run: name });
  const body = found.runs.map((run, place) => el("tr", {}, el("td", {}, el("a", { href: to(run.name), class: `run${place % 6}` }, run.name)),
    el("td", { class: `state ${run.state}` }, run.state || "no end recorded", ...(run.reason ? [el("div", { class: "hint reason" }, run.reason)] : []),
      ...run.alarms.map(alarm => el("div", { class: "hint reason alarm" }, `warning: ${alarm}`))),
    el("td", {}, ...stepsOf(run)),
    el("td", {}, run.age_s === null ? "–" : `${duration(run.age_s)} ago`), ...metrics.map(name => el("td", {}, number(run.figures[name]))),
    ...differing.map(key => el("td", {}, run.settings[key] ?? "–"))));
  const about = differing.length ? `The last columns are settings in which the runs differ${more ? `; ${more} more differ` : ""}. ` : "";
  main.replaceChildren(table(["run", "state", "steps", "last step", ...metrics, ...differing], body, "runs"),
    el("p", { class: "hint" }, about, el("a", { href: link("settings", {}) }, "all settings")));
  setKeys(choosing(body, place => to(found.runs[place].name)));
}

// All settings of all runs side by side, to search; those that differ are marked.
export async function settingsView(at, { main }) {
  const found = await ask("overview", {});
  const keys = [...new Set(found.runs.flatMap(run => Object.keys(run.settings)))].sort();
  const box = el("input", { type: "search", placeholder: "optim., lr ...", value: at.params.get("find") || "" });
  const only = el("input", { type: "checkbox" }), shown = el("div", {});
  const differing = new Set(found.differing), differs = key => differing.has(key);
  const draw = () => {
    const rows = keys.filter(key => key.includes(box.value) && (!only.checked || differs(key)))
      .map(key => el("tr", { class: differs(key) ? "differs" : "" }, el("th", { scope: "row" }, key),
        ...found.runs.map(run => el("td", { class: "setting" }, run.settings[key] ?? "–"))));
    const head = ["setting", ...found.runs.map((run, place) => el("th", { scope: "col", class: `run${place % 6}` }, run.name))];
    const nothing = keys.length ? "no setting with this name" : "config.yaml cannot be read";
    shown.replaceChildren(rows.length ? table(head, rows, "settings") : el("p", { class: "hint" }, nothing));
  };
  for (const input of [box, only]) input.addEventListener("input", draw);
  draw();
  main.replaceChildren(el("div", { class: "filters" }, el("label", {}, "settings", box),
    ...(found.runs.length > 1 ? [el("label", { class: "check" }, only, "only settings that differ")] : [])), shown);
}
