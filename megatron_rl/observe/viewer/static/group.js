import { ask } from "./data.js";
import { picture } from "./episode.js";
import { chip, choosing, el, fact, link, number, questionText } from "./parts.js";

function memberCard(each, { run, step, mean, rewards }) {
  const minusMean = each.reward === null || mean === null ? null : each.reward - mean;
  const facts = [each.advantage === null ? ["minus the mean", minusMean] : ["advantage", each.advantage],
    ["failed calls", each.turns.filter(turn => turn.tool_call?.error).length || null], ["stop reason", each.stop_reason],
    ["status", each.status === "completed" ? null : each.status], ["reason", each.reason || null], ["filtered", each.filter_reason || null],
    ...Object.entries(each.reward_terms).filter(([, value]) => value !== 0)];
  return el("div", { class: "card" },
    el("h3", {}, el("a", { href: link("episode", { run, step, row_index: each.row_index }) }, `sample ${each.sample_index}`), " ", chip(each.reward, rewards)),
    el("div", { class: "facts" }, ...facts.filter(([, value]) => value !== null).map(([name, value]) => fact(name, number(value)))),
    ...each.turns.map(turn => el("pre", {}, turn.text)));
}

// The members of a group side by side, below question, image and expected answer.
export async function groupView(at, { main, runs, setKeys }) {
  const [run, step] = [at.params.get("run"), at.params.get("step")];
  const found = await ask("group", { run, step, group: at.params.get("group") });
  const rewards = runs.find(each => each.name === run)?.rewards || [null, null];
  const members = found.members.map(each => memberCard(each, { run, step, mean: found.mean, rewards }));
  main.replaceChildren(el("h2", {}, `${run}, step ${step}, group ${at.params.get("group")}`),
    el("div", { class: "facts" }, fact("mean reward", number(found.mean)), fact("standard deviation", number(found.std)),
      ...(found.answer ? [fact("expected", found.answer)] : [])),
    ...(found.question ? [el("pre", {}, questionText(found.question))] : []),
    ...(found.first?.length ? [el("div", { class: "pictures" }, ...found.first.map(image => picture(run, [], image)))] : []),
    el("div", { class: "members" }, ...members), el("p", { class: "hint" }, "keys: j and k select a member, Enter opens it, ? lists all keys"));
  setKeys(choosing(members, place => link("episode", { run, step, row_index: found.members[place].row_index })));
}
