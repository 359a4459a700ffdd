import { el, ask, number, link } from "./parts.js";

// What a token is colored by: a column, or the engine's logprob minus the trainer's.
const GAP = "engine gap", PLAIN = "nothing";
const TITLES = { rollout_logprobs: "logprob", old_logprobs: "trainer logprob", reference_logprobs: "reference logprob", loss_mask: "mask", weight_versions: "weight version",
  advantages: "advantage", values: "value", returns: "return", logprob_scale: "logprob scale", entropies: "entropy" };

function column(context, name) {
  const columns = context.columns;
  if (name === GAP) return columns.old_logprobs && columns.rollout_logprobs.map((value, place) => columns.loss_mask[place] ? Math.abs(value - columns.old_logprobs[place]) : 0);
  return columns[name];
}

function tint(value, low, high) {
  if (value === null || low === high) return "";
  if (low < 0 && high > 0) { // around zero: red below, green above
    const share = Math.round(70 * Math.abs(value) / Math.max(-low, high));
    return `color-mix(in srgb, ${value < 0 ? "#e03131" : "#2f9e44"} ${share}%, transparent)`;
  }
  return `color-mix(in srgb, #f08c00 ${Math.round(75 * (value - low) / (high - low))}%, transparent)`;
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
    shown.style.backgroundColor = tint(value, low, high);
    return place ? [" to ", shown] : [shown];
  })];
}

function tokens(context, name, hasWords) {
  const values = name === PLAIN ? null : column(context, name), mask = context.columns.loss_mask;
  const [low, high] = range(context, name);
  const spans = [], told_of = [...Object.keys(context.columns), GAP].map(each => [TITLES[each] || each, column(context, each)]);
  for (let place = 0; place < context.tokens.length; place++) {
    let last = place;
    while (context.tokens[last + 1] === context.tokens[place] && !mask[last + 1] && !mask[place]) last++; // a picture's places
    const told = last > place ? `${context.tokens[place]} × ${last - place + 1}` : context.tokens[place];
    const span = el("span", { class: mask[place] ? "sampled" : "observed", title: told_of.filter(([, values]) => values?.[place] !== undefined)
      .map(([each, values]) => `${each} ${number(values[place])}`).join("\n") }, hasWords ? told : `${told} `);
    if (values && mask[place]) span.style.backgroundColor = tint(values[place], low, high);
    spans.push(span);
    place = last;
  }
  return el("div", { class: "tokens" }, ...spans);
}

// `frame`: width and height that the box is given in; without one the picture's own.
export function picture(run, missing, image, box, frame) {
  if (missing.includes(image.key)) return el("span", { class: "hint" }, `the image file is missing: ${image.key}`);
  const img = el("img", { src: `picture/${run.split("/").map(encodeURIComponent).join("/")}/${image.key}.png`, alt: `image of ${image.tokens} tokens`, loading: "lazy" });
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

const seconds = value => el("b", {}, `${number(value)} s`);

function verdicts(said) {
  return said.flatMap(({ judge, prompt, value, wall_s, reasoning }) => [
    el("div", { class: "facts" }, el("div", {}, `judge ${judge}, ${prompt} `, el("b", {}, number(value))), el("div", {}, "judged in ", seconds(wall_s))),
    ...(reasoning ? [el("pre", {}, reasoning)] : [])]);
}

function turn(run, each, place, first, said, missing) {
  const box = each.tool_call && boxOf(each.tool_call);
  const parts = [el("h3", {}, `turn ${place + 1}`), el("pre", {}, each.text)];
  parts.push(el("div", { class: "facts" }, ...[["reward", each.reward], ["reward delta", each.reward_delta], ["step score", each.step_score]].filter(([, value]) => value)
    .map(([name, value]) => el("div", {}, `${name} `, el("b", {}, number(value)))),
    el("div", {}, "generation ", seconds(each.generation_s)), el("div", {}, each.tool_call ? "tool " : "environment ", seconds(each.env_s))));
  if (each.tool_call) parts.push(el("h3", {}, `${each.tool_call.tool}`), el("pre", { class: "code" }, each.tool_call.source), el("pre", {}, each.tool_call.text));
  if (each.tool_call?.error) parts.push(el("pre", { class: "error" }, each.tool_call.error));
  if (box && first) parts.push(el("div", { class: "pictures" }, picture(run, missing, first, box, each.tool_call.frame)));
  if (each.images.length) parts.push(el("div", { class: "pictures" }, ...each.images.map(image => picture(run, missing, image))));
  return el("div", { class: "card turn" }, ...parts, ...verdicts(said));
}

export async function episodeView(at, main) {
  const [run, step, row_index] = ["run", "step", "row_index"].map(name => at.params.get(name));
  const found = await ask("episode", { run, step, row_index });
  const names = [PLAIN, ...new Set(found.sequences.flatMap(context => Object.keys(context.columns))), GAP].filter(name => name === PLAIN || found.sequences.some(context => column(context, name)));
  const select = el("select", {}, ...names.map(name => el("option", { value: name }, TITLES[name] || name)));
  select.value = names.includes(at.params.get("color")) ? at.params.get("color") : "rollout_logprobs";
  const shown = el("div", {});
  const paint = () => shown.replaceChildren(...found.sequences.map((context, number_) => el("div", { class: "card" },
    el("h3", {}, `sequence ${number_ + 1}: ${context.tokens.length} tokens`, ...legend(context, select.value)),
    tokens(context, select.value, !found.no_words))));
  select.addEventListener("change", () => { const next = new URLSearchParams(at.params); next.set("color", select.value); history.replaceState(null, "", link("episode", next)); paint(); });
  paint();
  const facts = [["expected", found.answer], ["reward", found.reward], ["outcome", found.outcome_reward], ...Object.entries(found.reward_terms), ["status", found.status], ["stop reason", found.stop_reason], ["reason", found.reason],
    ["source", found.source], ["filtered", found.filter_reason], ["seconds", found.wall_s], ["seconds in tools", found.env_s], ["seconds in scoring", found.scoring_s]].filter(([, value]) => value !== null && value !== "");
  main.replaceChildren(
    el("h2", {}, `${found.task} ${found.example_id}, step ${step}, sample ${found.sample_index} of `, el("a", { href: link("group", new URLSearchParams({ run, step, group: found.group })) }, `group ${found.group}`)),
    el("div", { class: "facts" }, ...facts.map(([name, value]) => el("div", {}, `${name} `, el("b", {}, number(value))))),
    ...verdicts(found.verdicts.filter(said => said.turn === null)),
    ...(found.first.length ? [el("div", { class: "card" }, el("h3", {}, "images of the prompt"), el("div", { class: "pictures" }, ...found.first.map(image => picture(run, found.missing, image))))] : []),
    ...(found.prompt ? [el("div", { class: "card" }, el("h3", {}, "prompt"), el("pre", {}, found.prompt))] : []),
    ...found.turns.map((each, number_) => turn(run, each, number_, found.first[0], found.verdicts.filter(said => said.turn === number_), found.missing)),
    el("div", { class: "filters" }, el("label", {}, "tokens colored by", select), ...(found.no_words ? [el("span", { class: "hint" }, `${found.no_words}: token ids are shown`)] : [])), shown,
    el("p", { class: "hint" }, "keys: j and k move through the rollouts of the run, g opens the group, ? lists all keys"));
  const go = other => {
    if (!other) return;
    const next = new URLSearchParams(at.params);
    next.set("step", other[0]); next.set("row_index", other[1]);
    location.hash = link("episode", next);
  };
  const [later, earlier] = [() => go(found.after), () => go(found.before)];
  return { j: later, ArrowRight: later, k: earlier, ArrowLeft: earlier,
    g: () => { location.hash = link("group", new URLSearchParams({ run, step, group: found.group })); } };
}
