import { ask } from "./data.js";
import { pictureUrl } from "./episode.js";
import { chip, choosing, el, link, number, questionText, rememberList, table } from "./parts.js";

const LIMIT = 50;
const FIELDS = [["step_from", "number"], ["step_to", "number"], ["reward_from", "number"], ["reward_to", "number"], ["source", "sources"],
  ["stop_reason", "stop_reasons"], ["term", "terms"], ["term_from", "number"], ["term_to", "number"], ["tool", "tools"], ["example", "text"],
  ["stale_from", "number"], ["errors_from", "number"], ["text", "search"]];
const TIPS = { stale_from: "at least this many updates between the oldest weights that sampled a rollout and its step", text: "text in questions and responses",
  errors_from: "at least this many failed tool calls", sampled: "tokens that the policy sampled", version: "oldest weights that sampled a token of the rollout",
  "stop reason": "why the episode ended", errors: "failed tool calls", sample: "number within the group", reason: "the environment's reason for the end, or the error",
  terms: "unweighted reward terms, without those that are always 0",
  mismatch: "largest difference between the logprobs of engine and trainer in the rollout" };
const PRESETS = [["failed", { status: "failed" }], ["mixed groups", { is_mixed: "true" }], ["uniform groups", { is_mixed: "false" }],
  ["largest mismatch", { sort: "logprob_abs_diff_max", descending: "true" }], ["longest", { sort: "num_sampled", descending: "true" }],
  ["truncated", { status: "truncated" }], ["tool errors", { errors_from: "1", sort: "num_errors", descending: "true" }],
  ["lowest reward", { sort: "reward" }]];
const TEXTS = ["question", "answer", "responses", "reason"];
const COLUMNS = [["step", "step"], ["example_id", "example"], ["source", "source"], ["group", "group"], ["sample_index", "sample"],
  ["first_image", "image"], ["question", "question"], ["answer", "expected"], ["responses", "response"], ["reward", "reward"],
  ["reward_terms", "terms"], ["stop_reason", "stop reason"], ["reason", "reason"], ["num_turns", "turns"], ["num_sampled", "sampled"],
  ["num_images", "images"], ["num_errors", "errors"], ["logprob_abs_diff_max", "mismatch"], ["oldest_version", "version"]];
const SORTED_BY = COLUMNS.map(([column]) => column).filter(column => ![...TEXTS, "first_image", "reward_terms"].includes(column));

function changeTo(params, changes) {
  const next = new URLSearchParams(params);
  if (!("offset" in changes)) next.delete("offset");
  for (const [name, value] of Object.entries(changes)) value === "" ? next.delete(name) : next.set(name, value);
  location.hash = link("rollouts", next);
}

function filter([name, kind], run, params) {
  const choices = { stop_reasons: run.stop_reasons, tools: run.tools, terms: run.terms, sources: run.sources }[kind];
  if ((choices && !choices.length) || (name.startsWith("term_") && !params.get("term"))) return [];
  const input = choices
    ? el("select", {}, el("option", { value: "" }, "any"), ...choices.map(each => el("option", { value: each }, each)))
    : el("input", kind === "number" ? { type: "number", step: "any" } : { type: kind });
  input.value = params.get(name) || "";
  input.addEventListener("change", () => changeTo(params, { [name]: input.value }));
  return [el("label", { title: TIPS[name] || "" }, name.replace("_", " "), input)];
}

function headOf([column, title], params) {
  if (!SORTED_BY.includes(column)) return el("th", { scope: "col", title: TIPS[title] || "" }, title);
  const isSorted = column === (params.get("sort") || "step"), down = params.get("descending") === "true";
  const button = el("button", { title: TIPS[title] || "" }, title + (isSorted ? (down ? " ↓" : " ↑") : ""));
  button.addEventListener("click", () => changeTo(params, { sort: column, descending: String(isSorted && !down) }));
  return el("th", { scope: "col", ...(isSorted ? { "aria-sort": down ? "descending" : "ascending" } : {}) }, button);
}

function cellOf(column, row, run, to) {
  if (column === "step") return el("td", {}, el("a", { href: to, title: "open the rollout" }, String(row.step)));
  if (column === "group") {
    const group = link("group", { run: run.name, step: row.step, group: row.group });
    return el("td", {}, el("a", { href: group, title: "open the group" }, String(row.group)));
  }
  if (column === "reward") return el("td", {}, chip(row.reward, run.rewards));
  if (column === "reward_terms") {
    return el("td", { class: "terms" }, ...run.terms.filter(name => name in row.reward_terms)
      .map(name => el("div", {}, `${name} ${number(row.reward_terms[name])}`)));
  }
  if (column === "first_image") return el("td", { class: "thumbnail" }, ...(row.first_image ? [thumbnail(run, row, to)] : []));
  if (TEXTS.includes(column)) {
    const text = column === "question" ? questionText(row.question) : row[column];
    return el("td", { class: `text ${column}` }, el("div", { class: "clamp" }, text));
  }
  return el("td", {}, number(row[column]));
}

function thumbnail(run, row, to) {
  const img = el("img", { src: pictureUrl(run.name, row.first_image), alt: `first image of step ${row.step}, sample ${row.sample_index}`, loading: "lazy" });
  img.addEventListener("error", () => img.remove());
  return el("a", { href: to, tabindex: -1 }, img);
}

function pagesOf(total, offset, params) {
  const pages = el("p", { class: "hint" }, `${total} rollouts, ${Math.min(offset + 1, total)} to ${Math.min(offset + LIMIT, total)} `);
  for (const [title, next, isPossible] of [["previous page", offset - LIMIT, offset > 0], ["next page", offset + LIMIT, offset + LIMIT < total]]) {
    if (!isPossible) continue;
    const button = el("button", {}, title);
    button.addEventListener("click", () => changeTo(params, { offset: String(Math.max(0, next)) }));
    pages.append(button, " ");
  }
  const last = Math.max(1, Math.ceil(total / LIMIT));
  const jump = el("input", { type: "number", min: 1, max: last, value: Math.floor(offset / LIMIT) + 1 });
  jump.addEventListener("change", () => changeTo(params, { offset: String((Math.max(1, Math.min(last, Number(jump.value) || 1)) - 1) * LIMIT) }));
  pages.append(el("label", {}, "page ", jump, ` of ${last}`));
  return pages;
}

// The column by which the table is sorted comes before the long texts.
function columnsOf(run, sort) {
  const isShown = column => !run.constant.includes(column) && (column !== "reward_terms" || run.terms.length);
  const columns = COLUMNS.filter(([column]) => isShown(column)), from = columns.findIndex(([column]) => column === sort);
  const to = columns.findIndex(([column]) => column === "sample_index") + 1;
  if (from >= to) columns.splice(to, 0, ...columns.splice(from, 1));
  return columns;
}

export async function rolloutsView(at, { main, runs, banner, setKeys }) {
  const run = runs.find(each => each.name === at.params.get("run")) || runs[0];
  const params = new URLSearchParams(at.params);
  params.set("run", run.name);
  const offset = Number(params.get("offset") || 0), found = await ask("rollouts", { ...Object.fromEntries(params), limit: LIMIT });
  const columns = columnsOf(run, params.get("sort"));
  const to = row => link("episode", { run: run.name, step: row.step, row_index: row.row_index });
  const body = found.rows.map(row => el("tr", {}, ...columns.map(([column]) => cellOf(column, row, run, to(row)))));
  const isChosen = asked => Object.entries(asked).every(([key, value]) => params.get(key) === value);
  const presets = PRESETS.filter(([, asked]) => !run.constant.includes(asked.sort))
    .map(([name, asked]) => el("a", { href: link("rollouts", { run: run.name, ...asked }), class: isChosen(asked) ? "here" : "" }, name));
  banner.textContent = found.skipped.length ? `left out: ${found.skipped.join("; ")}` : "";
  const pages = pagesOf(found.total, offset, params);
  main.replaceChildren(el("nav", { class: "presets", "aria-label": "presets" }, el("a", { href: link("rollouts", { run: run.name }) }, "all"), ...presets),
    el("div", { class: "filters" }, ...FIELDS.flatMap(each => filter(each, run, params))), pages,
    table(columns.map(each => headOf(each, params)), body, "rollouts"),
    el("p", { class: "hint" }, "keys: j and k select a row, Enter opens it, ? lists all keys"));
  rememberList(link("rollouts", params), found.rows.map(to));
  setKeys(choosing(body, place => to(found.rows[place])));
}
