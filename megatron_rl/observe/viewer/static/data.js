// Data of the views: from the server, or from the files that `--export` wrote.
const isExport = document.documentElement.dataset.source === "files";

async function askServer(what, params) {
  const reply = await fetch(`api/${what}?${new URLSearchParams(params)}`);
  const found = await reply.json();
  if (!reply.ok) throw new Error(typeof found.detail === "string" ? found.detail : JSON.stringify(found.detail));
  return found;
}

const files = new Map();

async function readFile(path) {
  if (!files.has(path)) {
    files.set(path, fetch(`data/${path}.json`).then(reply => {
      if (!reply.ok) throw new Error(`the exported files have no ${path}`);
      return reply.json();
    }));
  }
  return files.get(path);
}

async function askFiles(what, { run, ...params }) {
  if (what === "runs" || what === "overview") return readFile(what);
  const folder = (await readFile("runs")).findIndex(each => each.name === run);
  if (folder < 0) throw new Error(`no run with this name: ${run}`);
  if (what === "group") return readFile(`${folder}/groups/${Number(params.step)}_${Number(params.group)}`);
  if (what === "episode") return readFile(`${folder}/episodes/${Number(params.step)}_${Number(params.row_index)}`);
  const found = await readFile(`${folder}/${what}`);
  return what === "rollouts" ? pageOf(found, params) : found;
}

export const ask = isExport ? askFiles : askServer;
export const isLive = !isExport;

// The filters of filters.py, for exported rows. A test compares both.
const AT_LEAST = (column, value) => row => row[column] !== null && row[column] >= Number(value);
const EQUAL = (column, value) => row => row[column] === value;
const TESTS = {
  step_from: value => AT_LEAST("step", value), step_to: value => row => row.step <= Number(value),
  reward_from: value => AT_LEAST("reward", value), reward_to: value => row => row.reward !== null && row.reward <= Number(value),
  source: value => EQUAL("source", value), stop_reason: value => EQUAL("stop_reason", value), status: value => EQUAL("status", value),
  example: value => EQUAL("example_id", value), tool: value => row => row.tools.includes(value),
  stale_from: value => AT_LEAST("staleness", value), errors_from: value => AT_LEAST("num_errors", value),
  term: (value, { term_from = "", term_to = "" }) => ({ reward_terms: { [value]: given } }) => typeof given === "number"
    && (term_from === "" || given >= Number(term_from)) && (term_to === "" || given <= Number(term_to)),
  is_mixed: value => row => String(row.is_mixed) === value,
  text: value => row => [row.question, row.responses].some(text => text.toLowerCase().includes(value.toLowerCase())),
};
const MAX_TEXT_CHARS = 400, TEXTS = ["question", "answer", "responses", "reason"]; // as in store.py

function pageOf(rows, { sort = "step", descending = "false", offset = 0, limit = 50, ...filters }) {
  const tests = Object.entries(filters).filter(([name, value]) => TESTS[name] && value !== "").map(([name, value]) => TESTS[name](value, filters));
  const found = rows.filter(row => tests.every(test => test(row)));
  const sign = descending === "true" ? -1 : 1;
  const compare = (a, b) => a === b ? 0 : a === null ? 1 : b === null ? -1 : (a < b ? -sign : sign);
  found.sort((a, b) => compare(a[sort], b[sort]) || a.step - b.step || a.row_index - b.row_index);
  const page = found.slice(Number(offset), Number(offset) + Number(limit));
  const cut = text => [...text.slice(0, 2 * MAX_TEXT_CHARS)].slice(0, MAX_TEXT_CHARS).join("");
  const cutRow = row => ({ ...row, ...Object.fromEntries(TEXTS.map(name => [name, cut(row[name])])) });
  return { total: found.length, rows: page.map(cutRow), skipped: [] };
}
