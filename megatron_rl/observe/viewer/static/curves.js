import { stepChart } from "./chart.js";
import { ask } from "./data.js";
import { choosing, el, link, replaceRoute } from "./parts.js";
import { settingChart } from "./setting_chart.js";

const FIRST = ["reward/mean", "eval/greedy_success", "loss", "grad_norm", "policy/entropy", "policy/kl_ref", "rollout_mismatch/logprob_abs_diff_max",
  "rollout/turns"];
const MAX_LARGE = 2; // so few charts are drawn large
const rank = name => { const place = FIRST.indexOf(name); return place < 0 ? FIRST.length : place; };

// Metrics of the chosen runs, over the steps or over a setting in which the runs differ. Return the keys of the view.
export async function curvesView(at, { main, runs, setKeys }) {
  const names = at.params.getAll("run"), about = await ask("overview", {});
  const series = await Promise.all(names.map(async run => ({
    run, place: runs.findIndex(each => each.name === run), lines: await ask("curves", { run }),
    settings: about.runs.find(each => each.name === run)?.settings || {},
  })));
  const metrics = [...new Set(series.flatMap(each => each.lines.flatMap(line => Object.keys(line))))].filter(name => name !== "step")
    .sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
  const box = el("input", { type: "search", placeholder: "reward, time/, mismatch ...", value: at.params.get("find") || "" });
  const smoothing = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: at.params.get("smoothing") || 0 });
  const log = el("input", { type: "checkbox" });
  log.checked = at.params.get("log") === "true";
  const by = el("select", {}, ...["step", ...about.differing].map(each => el("option", { value: each }, each)));
  by.value = about.differing.includes(at.params.get("by")) ? at.params.get("by") : "step";
  const charts = el("div", {});
  const chart = name => by.value === "step" ? stepChart(name, series, { smoothing: Number(smoothing.value), log: log.checked })
    : settingChart(name, series, { setting: by.value, log: log.checked });
  const draw = () => {
    const found = metrics.filter(name => name.includes(box.value));
    const sections = Map.groupBy(found, name => rank(name) < FIRST.length && !box.value ? "at a glance" : name.includes("/") ? name.split("/")[0] : "update");
    charts.replaceChildren(...[...sections].flatMap(([title, part]) => [
      el("h2", {}, title),
      el("div", { class: found.length <= MAX_LARGE ? "charts large" : "charts" }, ...part.map(name => el("div", { class: "card" }, el("h3", {}, name), chart(name)))),
    ]));
    if (!found.length) charts.replaceChildren(el("p", { class: "hint" }, metrics.length ? "no metric with this name" : "no metrics yet"));
    setKeys(choosing([...charts.querySelectorAll(".card")], place => link("curves", new URLSearchParams([...names.map(run => ["run", run]), ["find", found[place]]]))));
  };
  const changed = () => {
    draw();
    const next = new URLSearchParams(at.params), chosen = [["find", box.value], ["smoothing", smoothing.value === "0" ? "" : smoothing.value],
      ["log", log.checked ? "true" : ""], ["by", by.value === "step" ? "" : by.value]];
    for (const [name, value] of chosen) value ? next.set(name, value) : next.delete(name);
    replaceRoute("curves", next);
  };
  for (const input of [box, smoothing, log, by]) input.addEventListener("input", changed);
  draw();
  main.replaceChildren(el("div", { class: "filters" }, el("label", {}, "metrics", box), el("label", {}, "smoothing", smoothing), el("label", {}, "x axis", by),
    el("label", { class: "check" }, log, "log axis"), el("span", { class: "hint" }, "drag over a chart to zoom in")),
    ...about.runs.filter(run => names.includes(run.name)).flatMap(run => run.alarms.map(alarm =>
      el("p", { class: "hint alarm" }, `${names.length > 1 ? `${run.name}: ` : ""}warning: ${alarm}`))), charts);
}
