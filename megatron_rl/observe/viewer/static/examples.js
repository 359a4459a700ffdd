import { ask } from "./data.js";
import { chip, choosing, el, link, number, questionText, table } from "./parts.js";

const change = row => row.early === null ? null : row.late - row.early;
const ORDERS = {
  hardest: (a, b) => a.solved / a.rollouts - b.solved / b.rollouts || a.mean - b.mean,
  "getting worse": (a, b) => (change(a) ?? 0) - (change(b) ?? 0),
  "getting better": (a, b) => (change(b) ?? 0) - (change(a) ?? 0),
};
const textCell = (kind, text) => el("td", { class: `text ${kind}` }, el("div", { class: "clamp" }, text));

// One row an example: does the policy solve it, and does it get better at it?
export async function examplesView(at, { main, runs, setKeys }) {
  const run = runs.find(each => each.name === at.params.get("run")) || runs[0];
  const sort = ORDERS[at.params.get("sort")] ? at.params.get("sort") : "hardest";
  const found = [...await ask("examples", { run: run.name })].sort(ORDERS[sort]);
  const to = row => link("rollouts", { run: run.name, example: row.example_id });
  const solved = row => row.solved === null ? row.rollouts : `${row.solved} of ${row.rollouts}`;
  const body = found.map(row => el("tr", {}, el("td", {}, el("a", { href: to(row) }, row.example_id)), el("td", {}, solved(row)),
    el("td", {}, `${row.mixed} of ${row.groups}`),
    el("td", {}, chip(row.mean, run.rewards)), ...["lowest", "highest", "early", "late"].map(name => el("td", {}, number(row[name]))),
    el("td", { class: change(row) < 0 ? "error" : "" }, change(row) === null ? "–" : `${change(row) > 0 ? "+" : ""}${number(change(row))}`),
    textCell("question", questionText(row.question)), textCell("answer", row.answer)));
  const head = ["example", found.some(row => row.solved !== null) ? "solved" : "rollouts", "mixed groups", "mean reward", "lowest", "highest",
    "first half", "second half", "change", "question", "expected"];
  const orders = Object.keys(ORDERS).map(name => el("a", { href: link("examples", { run: run.name, sort: name }), class: name === sort ? "here" : "" }, name));
  const about = `${found.length} examples. The halves are those of an example's rollouts, in the order of the steps. Failed rollouts are left out.`;
  main.replaceChildren(el("nav", { class: "presets", "aria-label": "order" }, ...orders), el("p", { class: "hint" }, about),
    table(head, body, "examples"), el("p", { class: "hint" }, "keys: j and k select an example, Enter shows its rollouts, ? lists all keys"));
  setKeys(choosing(body, place => to(found[place])));
}
