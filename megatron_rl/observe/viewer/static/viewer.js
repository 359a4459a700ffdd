// Everything that a model, a tool or a data set wrote reaches the page through textContent; nothing is ever parsed as HTML.
import { chart } from "./chart.js";
import { episodeView, picture } from "./episode.js";
import { el, ask, number, route, link, replaceRoute } from "./parts.js";

const main = document.getElementById("main"), banner = document.getElementById("banner");
const FIRST = ["reward/mean", "eval/greedy_success", "loss", "grad_norm", "policy/entropy", "policy/kl_ref", "rollout_mismatch/logprob_abs_diff_max", "rollout/turns"];
const EVERY_MS = 5000; // between two looks at runs that may be under way
const KEYS = [["0, 1, 2, 3", "runs, curves, rollouts, examples"], ["/", "focus the search field or the first filter"], ["Escape", "leave the field"], ["j, k, arrows", "next, previous rollout, group member or chart"],
  ["Enter", "open the selected item"], ["g", "open the group of a rollout"], ["?", "show or hide this list"]];
let runs = [], keys = {}, chosenLink = "";

function views(at) {
  const own = new URLSearchParams();
  for (const run of at.params.getAll("run")) own.append("run", run);
  document.getElementById("views").replaceChildren(
    ...["runs", "curves", "rollouts", "examples"].map(name => el("a", { href: link(name, own), class: at.view === name ? "here" : "" }, name)));
  const chosen = new Set(at.params.getAll("run"));
  document.getElementById("runs").replaceChildren(...runs.map((run, place) => {
    const box = el("input", { type: at.view === "curves" ? "checkbox" : "radio", name: "run" });
    box.checked = chosen.has(run.name);
    box.addEventListener("change", () => {
      const next = new URLSearchParams(), names = runs.map(each => each.name);
      const kept = at.view === "curves" ? names.filter(name => name === run.name ? box.checked : chosen.has(name)) : [run.name];
      for (const name of kept.length ? kept : [run.name]) next.append("run", name);
      location.hash = link(["curves", "examples"].includes(at.view) ? at.view : "rollouts", next);
    });
    const text = el("span", { class: "run" + place % 6 }, ` ${run.name} (${run.rollouts} rollouts${run.last_step === null ? "" : `, step ${run.last_step}`})`);
    return el("label", { class: "choice" }, el("span", {}, box, text));
  }));
}

async function curves(at) {
  const names = at.params.getAll("run");
  const series = await Promise.all(names.map(async run => ({ run, place: runs.findIndex(each => each.name === run), lines: await ask("curves", { run }) })));
  const all = new Set(series.flatMap(each => each.lines.flatMap(line => Object.keys(line))));
  all.delete("step");
  const rank = name => { const place = FIRST.indexOf(name); return place < 0 ? FIRST.length : place; };
  const metrics = [...all].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
  const box = el("input", { type: "search", placeholder: "reward, time/, gap ...", value: at.params.get("find") || "" });
  const smoothing = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: at.params.get("smoothing") || 0 });
  const log = el("input", { type: "checkbox" });
  log.checked = at.params.get("log") === "true";
  const charts = el("div", {});
  const draw = () => {
    const how = { smoothing: Number(smoothing.value), log: log.checked };
    const found = metrics.filter(name => name.includes(box.value));
    const sections = Map.groupBy(found, name => rank(name) < FIRST.length && !box.value ? "at a glance" : name.includes("/") ? name.split("/")[0] : "update");
    charts.replaceChildren(...[...sections].flatMap(([title, part]) => [
      el("h2", {}, title),
      el("div", { class: "charts" }, ...part.map(name => el("div", { class: "card" }, el("h3", {}, name), chart(name, series, how)))),
    ]));
    if (!found.length) charts.replaceChildren(el("p", { class: "hint" }, "no metric with this name"));
    keys = choosing([...charts.querySelectorAll(".card")], place => link("curves", new URLSearchParams([...names.map(run => ["run", run]), ["find", found[place]]])));
  };
  const changed = () => {
    draw();
    const next = new URLSearchParams(at.params);
    for (const [name, value] of [["find", box.value], ["smoothing", smoothing.value === "0" ? "" : smoothing.value], ["log", log.checked ? "true" : ""]]) {
      value ? next.set(name, value) : next.delete(name);
    }
    replaceRoute("curves", next);
  };
  for (const input of [box, smoothing, log]) input.addEventListener("input", changed);
  draw();
  main.replaceChildren(el("div", { class: "filters" }, el("label", {}, "metrics", box), el("label", {}, "smoothing", smoothing), el("label", { class: "check" }, log, "log axis"),
    el("span", { class: "hint" }, "drag over a chart to zoom in")), charts);
}

const AGES = [[86400, "days"], [3600, "h"], [60, "min"], [1, "s"]];
const ago = seconds => { if (seconds === null) return "–"; const [size, unit] = AGES.find(([size]) => seconds >= size) || AGES.at(-1); return `${Math.round(seconds / size)} ${unit} ago`; };

async function overview() {
  const found = await ask("overview", {});
  const metrics = Object.keys(found.runs[0]?.figures || {}).filter(name => found.runs.some(run => run.figures[name] !== null));
  const to = name => link("rollouts", new URLSearchParams({ run: name }));
  const body = found.runs.map((run, place) => el("tr", {}, el("td", {}, el("a", { href: to(run.name), class: `run${place % 6}` }, run.name)),
    el("td", { class: `state ${run.state}` }, run.state || "no end recorded"), el("td", {}, run.num_done === null ? "–" : `${run.num_done}${run.num_steps ? `/${run.num_steps}` : ""}`),
    el("td", {}, ago(run.age_s)), ...metrics.map(name => el("td", {}, number(run.figures[name]))), ...found.differing.map(key => el("td", {}, run.settings[key] ?? "–"))));
  const head = ["run", "state", "steps", "last step", ...metrics, ...found.differing].map(name => el("th", {}, name));
  main.replaceChildren(el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body))),
    el("p", { class: "hint" }, found.runs.length > 1 ? "The last columns are the settings in which the runs differ." : ""),
    ...found.runs.map(run => el("details", {}, el("summary", {}, `all settings of ${run.name}`),
      el("pre", {}, Object.entries(run.settings).map(([key, value]) => `${key}: ${value}`).join("\n") || "config.yaml cannot be read"))));
  keys = choosing(body, place => to(found.runs[place].name));
}

const FIELDS = [["step_from", "number"], ["step_to", "number"], ["reward_from", "number"], ["reward_to", "number"], ["source", "sources"], ["stop_reason", "stop_reasons"], ["tool", "tools"],
  ["example", "text"], ["stale_from", "number"], ["errors_from", "number"], ["text", "search"]];
const TIPS = { stale_from: "at least this many updates between the oldest weights that sampled a rollout and its step", text: "text in questions and responses",
  errors_from: "at least this many failed tool calls", sampled: "tokens that the policy sampled", version: "oldest weights that sampled a token of the rollout",
  "stop reason": "why the episode ended", errors: "failed tool calls", sample: "number within the group" };
const PRESETS = [["failed", { status: "failed" }], ["mixed groups", { is_mixed: "true" }], ["longest", { sort: "num_sampled", descending: "true" }],
  ["truncated", { status: "truncated" }], ["tool errors", { errors_from: "1" }], ["lowest reward", { sort: "reward" }]];
const SHOWN = [["step", "step"], ["example_id", "example"], ["source", "source"], ["group", "group"], ["sample_index", "sample"], ["reward", "reward"], ["stop_reason", "stop reason"],
  ["num_turns", "turns"], ["num_sampled", "sampled"], ["num_images", "images"], ["num_errors", "errors"], ["oldest_version", "version"]];
const TEXTS = [["question", "question"], ["answer", "expected"], ["responses", "responses"]];

// A reward on a background between red (the run's lowest) and green (its highest).
function chip(reward, [low, high]) {
  const made = el("span", { class: "chip" }, number(reward));
  if (reward !== null && low !== null && low < high) {
    made.style.backgroundColor = `color-mix(in srgb, #2f9e44 ${Math.round(100 * (reward - low) / (high - low))}%, #e03131)`;
    made.classList.add("colored");
  }
  return made;
}

async function rollouts(at) {
  const run = runs.find(each => each.name === at.params.get("run")) || runs[0];
  const params = new URLSearchParams(at.params);
  params.set("run", run.name);
  const limit = 50, offset = Number(params.get("offset") || 0);
  const found = await ask("rollouts", { ...Object.fromEntries(params), limit });
  const change = (name, value) => {
    const next = new URLSearchParams(params);
    value === "" ? next.delete(name) : next.set(name, value);
    if (name !== "offset") next.delete("offset");
    location.hash = link("rollouts", next);
  };
  const filter = ([name, kind]) => {
    const choices = { stop_reasons: run.stop_reasons, tools: run.tools, sources: run.sources }[kind];
    const input = choices
      ? el("select", {}, el("option", { value: "" }, "any"), ...choices.map(each => el("option", { value: each }, each)))
      : el("input", kind === "number" ? { type: "number", step: "any" } : { type: kind });
    input.value = params.get(name) || "";
    input.addEventListener("change", () => change(name, input.value));
    return el("label", { title: TIPS[name] || "" }, name.replace("_", " "), input);
  };
  const sorted = params.get("sort") || "step", down = params.get("descending") === "true";
  const columns = SHOWN.filter(([column]) => !run.constant.includes(column)), texts = TEXTS.filter(([column]) => !run.constant.includes(column));
  const head = columns.map(([column, title]) => {
    const button = el("button", { title: TIPS[title] || "" }, title + (column === sorted ? (down ? " ↓" : " ↑") : ""));
    button.addEventListener("click", () => {
      const next = new URLSearchParams(params);
      next.set("sort", column); next.set("descending", String(column === sorted && !down)); next.delete("offset");
      location.hash = link("rollouts", next);
    });
    return el("th", {}, button);
  });
  const to = row => link("episode", new URLSearchParams({ run: run.name, step: row.step, row_index: row.row_index }));
  const body = found.rows.map(row => {
    const cells = columns.map(([column]) => el("td", {}, column === "step" ? el("a", { href: to(row) }, String(row.step))
      : column === "group" ? el("a", { href: link("group", new URLSearchParams({ run: run.name, step: row.step, group: row.group })) }, String(row.group))
      : column === "reward" ? chip(row.reward, run.rewards)
      : number(row[column])));
    return el("tr", {}, ...cells, ...texts.map(([column]) => el("td", { class: `text ${column}` }, row[column])));
  });
  const pages = el("p", { class: "hint" }, `${found.total} rollouts, ${Math.min(offset + 1, found.total)} to ${Math.min(offset + limit, found.total)} `);
  for (const [title, next, possible] of [["earlier", offset - limit, offset > 0], ["later", offset + limit, offset + limit < found.total]]) {
    if (!possible) continue;
    const button = el("button", {}, title);
    button.addEventListener("click", () => change("offset", String(Math.max(0, next))));
    pages.append(button, " ");
  }
  const jump = el("input", { type: "number", min: 1, max: Math.max(1, Math.ceil(found.total / limit)), value: Math.floor(offset / limit) + 1 });
  jump.addEventListener("change", () => change("offset", String((Math.max(1, Math.min(Number(jump.max), Number(jump.value) || 1)) - 1) * limit)));
  pages.append(el("label", {}, "page ", jump, ` of ${jump.max}`));
  const presets = PRESETS.map(([name, asked]) => el("a", { href: link("rollouts", new URLSearchParams({ run: run.name, ...asked })),
    class: Object.entries(asked).every(([key, value]) => params.get(key) === value) ? "here" : "" }, name));
  banner.textContent = found.skipped.length ? `left out: ${found.skipped.join("; ")}` : "";
  main.replaceChildren(el("nav", { class: "presets" }, el("a", { href: link("rollouts", new URLSearchParams({ run: run.name })) }, "all"), ...presets),
    el("div", { class: "filters" }, ...FIELDS.map(filter)), pages,
    el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ...head, ...texts.map(([, title]) => el("th", {}, title)))), el("tbody", {}, ...body))),
    el("p", { class: "hint" }, "keys: j and k select a row, Enter opens it, ? lists all keys"));
  keys = choosing(body, place => to(found.rows[place]));
}

// One row an example: does the policy solve it, and does it get better at it?
async function examples(at) {
  const run = runs.find(each => each.name === at.params.get("run")) || runs[0];
  const found = await ask("examples", { run: run.name });
  const to = row => link("rollouts", new URLSearchParams({ run: run.name, example: row.example_id }));
  const change = row => row.early === null ? null : row.late - row.early;
  const body = found.map(row => el("tr", {}, el("td", {}, el("a", { href: to(row) }, row.example_id)), el("td", {}, number(row.rollouts)),
    ...["mean", "lowest", "highest", "early", "late"].map(name => el("td", {}, chip(row[name], run.rewards))),
    el("td", { class: change(row) < 0 ? "error" : "" }, change(row) === null ? "–" : `${change(row) > 0 ? "+" : ""}${number(change(row))}`),
    el("td", { class: "text question" }, row.question), el("td", { class: "text answer" }, row.answer)));
  const head = ["example", "rollouts", "mean reward", "lowest", "highest", "first half", "second half", "change", "question", "expected"].map(name => el("th", {}, name));
  main.replaceChildren(el("p", { class: "hint" }, `${found.length} examples, lowest mean reward first. The halves are those of an example's rollouts, in the order of the steps.`),
    el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body))),
    el("p", { class: "hint" }, "keys: j and k select an example, Enter shows its rollouts, ? lists all keys"));
  keys = choosing(body, place => to(found[place]));
}

async function group(at) {
  const [run, step] = [at.params.get("run"), at.params.get("step")];
  const found = await ask("group", { run, step, group: at.params.get("group") });
  const members = found.members.map(each => el("div", { class: "card" },
    el("h3", {}, el("a", { href: link("episode", new URLSearchParams({ run, step, row_index: each.row_index })) }, `sample ${each.sample_index}`)),
    el("div", { class: "facts" }, ...[["reward", each.reward], ["minus the mean", each.reward === null || found.mean === null ? null : each.reward - found.mean],
      ["advantage", each.advantage], ["stop reason", each.stop_reason], ["filtered", each.filter_reason || null],
      ...Object.entries(each.reward_terms).filter(([, value]) => value !== 0)]
      .filter(([, value]) => value !== null).map(([name, value]) => el("div", {}, `${name} `, el("b", {}, number(value))))),
    ...each.turns.map(turn => el("pre", {}, turn.text))));
  main.replaceChildren(el("h2", {}, `${run}, step ${step}, group ${at.params.get("group")}`),
    el("div", { class: "facts" }, el("div", {}, "mean reward ", el("b", {}, number(found.mean))), el("div", {}, "standard deviation ", el("b", {}, number(found.std))),
      ...(found.answer ? [el("div", {}, "expected ", el("b", {}, found.answer))] : [])),
    ...(found.question ? [el("pre", {}, found.question)] : []),
    ...(found.first?.length ? [el("div", { class: "pictures" }, ...found.first.map(image => picture(run, [], image)))] : []),
    el("div", { class: "members" }, ...members), el("p", { class: "hint" }, "keys: j and k select a member, Enter opens it, ? lists all keys"));
  keys = choosing(members, place => link("episode", new URLSearchParams({ run, step, row_index: found.members[place].row_index })));
}

// Keys that step through `parts` of a view and open the chosen one, which stays chosen when the view is drawn again.
function choosing(parts, to) {
  let chosen = parts.findIndex((_, place) => to(place) === chosenLink);
  parts[chosen]?.classList.add("chosen");
  const choose = place => {
    chosen = Math.max(0, Math.min(parts.length - 1, place));
    parts.forEach((part, each) => part.classList.toggle("chosen", each === chosen));
    parts[chosen]?.scrollIntoView({ block: "nearest" });
    if (parts[chosen]) chosenLink = to(chosen);
  };
  return { j: () => choose(chosen + 1), ArrowDown: () => choose(chosen + 1), k: () => choose(chosen - 1), ArrowUp: () => choose(chosen - 1),
    Enter: () => { if (parts[chosen]) location.hash = to(chosen); } };
}

async function show() {
  keys = {};
  banner.textContent = "";
  const at = route();
  if (!location.hash && runs.length > 1) at.view = "runs";
  if (!at.params.get("run") && runs.length) {
    for (const run of at.view === "curves" ? runs : runs.slice(0, 1)) at.params.append("run", run.name);
  }
  views(at);
  try {
    if (at.view === "runs") await overview();
    else if (at.view === "rollouts") await rollouts(at);
    else if (at.view === "examples") await examples(at);
    else if (at.view === "group") await group(at);
    else if (at.view === "episode") keys = await episodeView(at, main);
    else await curves(at);
  } catch (error) {
    banner.textContent = String(error.message);
    main.replaceChildren();
  }
  const skipped = runs.flatMap(run => run.skipped);
  if (skipped.length && !banner.textContent) banner.textContent = `left out: ${skipped.join("; ")}`;
  document.body.dataset.shown = at.view;
}

// Runs go on while they are looked at: new steps appear where nobody is typing.
async function follow() {
  const now = await ask("runs", {}).catch(() => runs); // the program may have been ended
  if (JSON.stringify(now) === JSON.stringify(runs) || main.contains(document.activeElement)) return;
  runs = now;
  const { view } = route();
  if (["runs", "curves", "rollouts"].includes(view)) await show();
  else views(route());
}

addEventListener("hashchange", show);
setInterval(() => { if (!document.hidden) follow(); }, EVERY_MS);
const help = document.getElementById("help");
help.replaceChildren(el("h2", {}, "keys"), el("table", {}, ...KEYS.map(([key, told]) => el("tr", {}, el("td", {}, key), el("td", {}, told)))));
const EVERYWHERE = { 0: () => { location.hash = "#/runs"; }, 1: () => { location.hash = "#/curves"; }, 2: () => { location.hash = "#/rollouts"; },
  3: () => { location.hash = "#/examples"; },
  "/": () => main.querySelector("input[type=search], .filters input")?.focus(), "?": () => help.open ? help.close() : help.showModal() };
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
});
