import { ask } from "./data.js";
import { duration, el, fact, lastList, link, number, questionText } from "./parts.js";

// What a token is colored by: a column, or the engine's logprob minus the trainer's.
const GAP = "engine gap", PLAIN = "nothing";
const TITLES = { rollout_logprobs: "logprob", old_logprobs: "trainer logprob", reference_logprobs: "reference logprob", teacher_logprobs: "teacher logprob", loss_mask: "mask", weight_versions: "weight version",
  advantages: "advantage", values: "value", returns: "return", [GAP]: "mismatch of engine and trainer", logprob_scale: "logprob scale", entropies: "entropy" };

function column(context, name) {
  const columns = context.columns;
  if (name === GAP) return columns.old_logprobs && columns.rollout_logprobs.map((value, place) => columns.loss_mask[place] ? Math.abs(value - columns.old_logprobs[place]) : 0);
  return columns[name];
}

const UNLIKELY = ["rollout_logprobs", "old_logprobs", "reference_logprobs", "teacher_logprobs"]; // the lowest values have the strongest color

function tint(name, value, low, high) {
  if (value === null || low === high) return "";
  if (low < 0 && high > 0) { // around zero: red below, green above
    const share = Math.round(70 * Math.abs(value) / Math.max(-low, high));
    return `color-mix(in srgb, ${value < 0 ? "#e03131" : "#2f9e44"} ${share}%, transparent)`;
  }
  const share = UNLIKELY.includes(name) ? high - value : value - low;
  return `color-mix(in srgb, #f08c00 ${Math.round(75 * share / (high - low))}%, transparent)`;
}

// The least and the largest of what is colored; infinite where nothing is.
function range(context, name) {
  const values = name === PLAIN ? null : column(context, name), mask = context.columns.loss_mask;
  const known = values ? values.filter((value, place) => value !== null && (mask[place] || name === "loss_mask")) : [];
  return [known.reduce((a, b) => Math.min(a, b), Infinity), known.reduce((a, b) => Math.max(a, b), -Infinity)];
}

// What the colors of a context's tokens mean: its range, in its own colors.
function legend(context, name) {
  const [low, high] = range(context, name);
  if (low > high) return [];
  return [", ", TITLES[name] || name, " from ", ...[low, high].flatMap((value, place) => {
    const shown = el("span", { class: "sampled" }, number(value));
    shown.style.backgroundColor = tint(name, value, low, high);
    return place ? [" to ", shown] : [shown];
  })];
}

// One span a token. The tokens before the first sampled one, which the page shows as the prompt, can be unfolded.
function tokens(context, name, hasWords) {
  const start = context.columns.loss_mask.indexOf(1), count = start < 0 ? context.tokens.length : start;
  const [prompt, rest] = [[0, count], [count, context.tokens.length]].map(([from, to]) => spansOf(context, name, hasWords, from, to));
  return el("div", { class: "tokens" }, ...(count ? [el("details", {}, el("summary", {}, `prompt: ${count} tokens`), ...prompt)] : []), ...rest);
}

function spansOf(context, name, hasWords, from, to) {
  const values = name === PLAIN ? null : column(context, name), mask = context.columns.loss_mask;
  const [low, high] = range(context, name);
  const spans = [], told_of = [...Object.keys(context.columns), GAP].map(each => [TITLES[each] || each, column(context, each)]);
  for (let place = from; place < to; place++) {
    let last = place;
    while (last + 1 < to && context.tokens[last + 1] === context.tokens[place] && !mask[last + 1] && !mask[place]) last++; // a picture's places
    const told = last > place ? `${context.tokens[place]} × ${last - place + 1}` : context.tokens[place];
    const span = el("span", { class: mask[place] ? "sampled" : "observed", title: told_of.filter(([, values]) => values?.[place] !== undefined)
      .map(([each, values]) => `${each} ${number(values[place])}`).join("\n") }, hasWords ? told : `${told} `);
    if (values && mask[place]) span.style.backgroundColor = tint(name, values[place], low, high);
    spans.push(span);
    place = last;
  }
  return spans;
}

export const pictureUrl = (run, key) => `picture/${[...run.split("/"), key].map(encodeURIComponent).join("/")}.png`;

// `frame`: width and height that the box is given in; without one the picture's own.
export function picture(run, missing, image, box, frame) {
  if (missing.includes(image.key)) return el("span", { class: "hint" }, `the image file is missing: ${image.key}`);
  const img = el("img", { src: pictureUrl(run, image.key), alt: `image of ${image.tokens} tokens`, loading: "lazy" });
  const framed = el("span", { class: "picture" }, img);
  if (box) img.addEventListener("load", () => {
    const drawn = el("span", { class: "box" }), [left, top, right, bottom] = box, [width, height] = frame || [img.naturalWidth, img.naturalHeight];
    const share = (value, whole) => `${100 * Math.max(0, Math.min(1, value / whole))}%`;
    Object.assign(drawn.style, { left: share(left, width), top: share(top, height), width: share(right - left, width), height: share(bottom - top, height) });
    framed.append(drawn);
  });
  return framed;
}

// The box that a call asked for, where its arguments name one.
function boxOf(call) {
  try {
    const box = JSON.parse(call.source).bbox_2d;
    return Array.isArray(box) && box.length === 4 && box.every(Number.isFinite) ? box : null;
  } catch { return null; }
}

function verdicts(said) {
  return said.flatMap(({ judge, prompt, value, wall_s, reasoning, rule_score, is_reward }) => [
    el("div", { class: "facts" }, fact(`judge ${judge} (${prompt})${is_reward ? "" : ", not in the reward"}`, number(value)),
      ...(rule_score === null ? [] : [fact("score of the rules", number(rule_score))]), ...(wall_s ? [fact("judged in", duration(wall_s))] : [])),
    ...(reasoning ? [el("pre", {}, reasoning)] : [])]);
}

const times = pairs => pairs.filter(([, seconds]) => seconds).map(([name, seconds]) => fact(name, duration(seconds)));
const known = pairs => pairs.filter(([, value]) => value).map(([name, value]) => fact(name, number(value)));

// What the policy received after its response: text, and images with the box that was asked for.
function observation(run, each, first, missing) {
  const call = each.tool_call, box = call && boxOf(call), said = each.observation, parts = [];
  if (call?.text && !said.includes(call.text.trim())) parts.push(el("pre", {}, call.text));
  if (said) {
    const text = el("pre", {}, said);
    parts.push(each.is_new_prompt ? el("details", {}, el("summary", {}, "prompt of the next turn"), text) : text);
  }
  const pictures = [...(box && first ? [picture(run, missing, first, box, call.frame)] : []), ...each.images.map(image => picture(run, missing, image))];
  if (pictures.length) parts.push(el("div", { class: "pictures" }, ...pictures));
  return parts.length ? [el("h3", { class: "role" }, call ? "tool result" : "observation"), ...parts] : [];
}

function turn(run, each, place, first, said, missing) {
  const call = each.tool_call;
  return el("div", { class: "card turn" }, el("h3", { class: "role" }, `turn ${place + 1}`), el("pre", { class: "said" }, each.text),
    el("div", { class: "facts" }, ...known([["reward", each.reward], ["reward delta", each.reward_delta], ["step score", each.step_score]]),
      ...times([["generation", each.generation_s], [call ? "tool" : "environment", each.env_s]])),
    ...(call ? [el("h3", {}, call.tool), el("pre", { class: "code" }, call.source)] : []), ...(call?.error ? [el("pre", { class: "error" }, call.error)] : []),
    ...observation(run, each, first, missing), ...verdicts(said));
}

function factsOf(found) {
  const facts = [["expected", found.answer], ["reward", number(found.reward)], ["outcome", number(found.outcome_reward)],
    ...Object.entries(found.reward_terms).map(([name, value]) => [name, number(value)]), ["status", found.status], ["stop reason", found.stop_reason],
    ["reason", found.reason], ["source", found.source], ["filtered", found.filter_reason]];
  return el("div", { class: "facts" }, ...facts.filter(([, value]) => value !== "").map(([name, value]) => fact(name, value)),
    ...times([["time", found.wall_s], ["in environment and tools", found.env_s], ["in scoring", found.scoring_s]]));
}

function promptCard(run, found) {
  const images = found.first.map(image => picture(run, found.missing, image)), text = found.prompt || questionText(found.question);
  if (!images.length && !text) return [];
  return [el("div", { class: "card" }, el("h3", { class: "role" }, "prompt"), ...(images.length ? [el("div", { class: "pictures" }, ...images)] : []),
    ...(text ? [el("pre", {}, text)] : []))];
}

// Tokens in color, and the choice of the column that colors them.
function tokenView(at, found) {
  const names = [PLAIN, ...new Set(found.sequences.flatMap(context => Object.keys(context.columns))), GAP]
    .filter(name => name === PLAIN || found.sequences.some(context => column(context, name)));
  const select = el("select", {}, ...names.map(name => el("option", { value: name }, TITLES[name] || name)));
  select.value = names.includes(at.params.get("color")) ? at.params.get("color") : names.includes("rollout_logprobs") ? "rollout_logprobs" : PLAIN;
  const shown = el("div", {});
  const paint = () => shown.replaceChildren(...found.sequences.map((context, place) => el("div", { class: "card" },
    el("h3", {}, `sequence ${place + 1}: ${context.tokens.length} tokens`, ...legend(context, select.value)), tokens(context, select.value, !found.no_words))));
  select.addEventListener("change", () => {
    const next = new URLSearchParams(at.params);
    next.set("color", select.value);
    history.replaceState(null, "", link("episode", next));
    paint();
  });
  paint();
  const why = found.no_words ? [el("span", { class: "hint" }, `${found.no_words}: token ids are shown`)] : [];
  return [el("div", { class: "filters" }, el("label", {}, "tokens colored by", select), ...why), shown];
}

// One episode: prompt, turns as they happened, verdicts and tokens.
export async function episodeView(at, { main, setKeys }) {
  const [run, step, row_index] = ["run", "step", "row_index"].map(name => at.params.get(name));
  const found = await ask("episode", { run, step, row_index }), group = link("group", { run, step, group: found.group });
  const name = found.example_id.startsWith(found.task) ? found.example_id : `${found.task} ${found.example_id}`;
  const { back, earlier, later } = neighborsOf(at, found, { run, step, row_index });
  main.replaceChildren(steps([["list of rollouts", back], ["previous", earlier], ["next", later]]),
    el("h2", {}, `${name}, step ${step}, sample ${found.sample_index} of `, el("a", { href: group }, `group ${found.group}`)),
    factsOf(found), ...verdicts(found.verdicts.filter(said => said.turn === null)), ...promptCard(run, found),
    ...found.turns.map((each, place) => turn(run, each, place, found.first[0], found.verdicts.filter(said => said.turn === place), found.missing)),
    ...tokenView(at, found), el("p", { class: "hint" }, "keys: j and k move through the rollouts of the run, g opens the group, ? lists all keys"));
  const [goLater, goEarlier] = [later, earlier].map(to => () => { if (to) location.hash = to; });
  setKeys({ j: goLater, ArrowRight: goLater, k: goEarlier, ArrowLeft: goEarlier, g: () => { location.hash = group; } });
}

// Links to the neighbors of an episode: those in the filtered or sorted table that it was opened from, else those in the run.
function neighborsOf(at, found, { run, step, row_index }) {
  const list = lastList(), place = list.links.indexOf(link("episode", { run, step, row_index })), color = at.params.get("color");
  const colored = to => to && color ? `${to}&color=${encodeURIComponent(color)}` : to;
  if (place >= 0 && /[?&](?!run=|offset=)\w/.test(list.link)) {
    return { back: list.link, earlier: colored(list.links[place - 1]), later: colored(list.links[place + 1]) };
  }
  const [earlier, later] = [found.before, found.after].map(other => other && colored(link("episode", { run, step: other[0], row_index: other[1] })));
  return { back: place >= 0 ? list.link : link("rollouts", { run }), earlier, later };
}

const steps = links => el("nav", { class: "presets", "aria-label": "neighbors" },
  ...links.map(([name, to]) => to ? el("a", { href: to }, name) : el("span", { class: "hint" }, name)));
