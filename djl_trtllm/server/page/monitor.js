// The page of /monitor: what one snapshot after the other says about a model.
import { Cache, HistogramPanel, Occupancy } from "./charts.js";
import { Events, secrets } from "./events.js";
import { bytes, compact, count, percent, uptime } from "./format.js";
import { describe, LABELS, Lanes, stateOf } from "./lanes.js";
import { Story } from "./story.js";

const $ = (id) => document.getElementById(id);
const still = matchMedia("(prefers-reduced-motion: reduce)"), dark = matchMedia("(prefers-color-scheme: dark)");
const HIDDEN_SECONDS = 10;
const ROW = ["number", "id", "arrived", "started", "first", "ended", "prompt", "reused", "output", "sequences", "reason", "client", "accepted", "images", "pictured"];
const CLIENT = ["name", "live", "waiting", "requests", "tokens"];

const lanes = new Lanes($("lanes"), $("lanes-said"), still);
const story = new Story($("story"), lanes);
const occupancy = new Occupancy($("occupancy")), cache = new Cache($("cache"));
const latencies = { first_token: new HistogramPanel($("first-token")), inter_token: new HistogramPanel($("inter-token")) };
const tiles = Object.fromEntries(
  [["running", "Running"], ["waiting", "Queued"], ["tokens", "Output tokens/s"], ["requests", "Requests/s"], ["kv", "KV cache used"], ["reused", "Prompts reused"]]
    .map(([key, name]) => [key, tile(key, name)]),
);
let paused = false, connection = "connecting", latest = null, past = [], tabled = 0;

function tile(key, name) {
  const box = $("tiles").appendChild(document.createElement("div"));
  box.className = "tile";
  box.dataset.tile = key;
  const put = (tag, className) => box.appendChild(Object.assign(document.createElement(tag), { className }));
  put("span", "name").textContent = name;
  const value = put("b", "value"), meter = put("div", "meter"), more = put("span", "more");
  const bar = meter.appendChild(document.createElement("i"));
  return (main, of, text, share = null) => {
    const unit = Object.assign(document.createElement("small"), { textContent: of });
    value.replaceChildren(main, " ", unit);
    more.textContent = text;
    more.title = text;
    meter.style.visibility = share === null ? "hidden" : "visible";
    bar.style.width = `${Math.min(1, share ?? 0) * 100}%`;
  };
}

const events = new Events({
  snapshot(data) {
    $("access").hidden = $("notice").hidden = true;
    link("live");
    if (paused) return;
    show(data);
  },
  link,
  refused(status, text) {
    link(`refused (${status})`);
    if (status === 401 || status === 403) {
      $("access").hidden = false;
      $("access-text").textContent = `${text}.`;
      $("key").focus();
      return false;
    }
    if (status === 404 && events.model !== null) {
      events.model = null; // it was unregistered
      return true;
    }
    $("notice").textContent = text;
    $("notice").hidden = false;
    return status >= 429;
  },
});

// What is known of the connection. Without one nobody knows what goes on there: the lanes stand still.
function link(text) {
  connection = text;
  const shown = paused && text === "live" ? "paused" : text;
  if ($("link").textContent !== shown) $("link").textContent = shown; // it is read aloud when it changes
  lanes.pause(paused || text !== "live");
}

function show({ server, models, model, clock }) {
  selector(models, model?.name);
  if (!model) {
    if (models.length && events.model !== null) {
      events.model = null; // it was unregistered; there are others
      events.open();
    } else nothing(clock);
    return;
  }
  if (story.model !== model.name) forget();
  story.model = model.name;
  document.title = `${model.name} · djl-trtllm`;
  header(server, model);
  const rows = model.rows.map((row) => Object.fromEntries(row.map((value, index) => [ROW[index], value])));
  lanes.empty.textContent = model.limits ? "No requests yet. Send one below." : model.failure ?? "The model is not loaded yet.";
  lanes.update(rows, clock);
  clients(model.clients.map((client) => Object.fromEntries(client.map((value, index) => [CLIENT[index], value]))));
  const live = rows.filter((row) => row.ended === null).length;
  $("shown").textContent = model.live > live ? `${live} of ${count(model.live)} live` : `${count(live)} live`;
  latest = { rows, clock };
  if (performance.now() - tabled > 900) table(rows, clock);
  remember(clock, model);
  charts(clock, model);
}

// The busiest first: who floods is one look.
function clients(rows) {
  $("clients").hidden = !rows.length;
  $("clients").replaceChildren(...rows.map(({ name, live, waiting, requests, tokens }) => {
    const item = document.createElement("li");
    item.append(Object.assign(document.createElement("b"), { textContent: name || "no name" }));
    item.append(` ${count(live)} live${waiting ? `, ${count(waiting)} queued` : ""}`);
    item.title = `${count(requests)} requests of late, ${count(tokens)} tokens`;
    return item;
  }));
}

function nothing(clock) {
  clients([]);
  forget();
  story.model = null;
  state("no model", "waiting");
  $("facts").replaceChildren();
  lanes.empty.textContent = "There is no model.";
  lanes.update([], clock);
  latest = { rows: [], clock };
  table([], clock);
  for (const put of Object.values(tiles)) put("–", "", "");
}

function forget() {
  past = [];
  occupancy.clear();
  cache.clear();
}

function state(text, kind) {
  $("state").textContent = text;
  $("state").dataset.state = kind;
}

function selector(models, name) {
  $("models").hidden = models.length < 2;
  $("name").hidden = models.length >= 2;
  $("name").textContent = name ?? "";
  const wanted = models.map((each) => `${each.name} (${each.state})`).join("\n");
  if ($("model").dataset.wanted !== wanted) {
    $("model").dataset.wanted = wanted;
    $("model").replaceChildren(...models.map((each) => new Option(each.state === "ready" ? each.name : `${each.name} (${each.state})`, each.name)));
  }
  if (document.activeElement !== $("model")) $("model").value = name ?? "";
}

function header(server, model) {
  state(model.state, model.state);
  $("state").title = model.failure ?? "";
  const { limits } = model;
  const facts = [
    ["engine", model.engine],
    ["workers", model.workers > 1 ? model.workers : null],
    ["restarts", count(model.restarts)],
    ["batch", limits && count(limits.batch)],
    ["queue", limits && count(limits.queue)],
    ["prompt", limits && `≤ ${count(limits.prompt)}`],
    ["sequence", limits && `≤ ${count(limits.sequence)}`],
    ["memory", model.memory ? bytes(model.memory) : null],
    ["version", server.version],
    ["up", uptime(server.uptime)],
  ].filter(([, value]) => value !== null && value !== undefined);
  $("facts").replaceChildren(...facts.map(([name, value]) => {
    const pair = document.createElement("div");
    pair.append(Object.assign(document.createElement("dt"), { textContent: name }));
    pair.append(Object.assign(document.createElement("dd"), { textContent: value }));
    return pair;
  }));
}

// Snapshots of the last minute, for rates and for the latencies of that minute.
function remember(clock, model) {
  const last = past.at(-1);
  // The model was unregistered and registered again: it counts from 0.
  if (last && (last.model.generated_tokens > model.generated_tokens || last.clock > clock)) forget();
  past.push({ clock, model: { ...model, rows: [] } });
  while (past[0].clock < clock - 60000) past.shift();
}

function rate(name, seconds = 5) {
  const last = past.at(-1), first = past.find((each) => each.clock >= last.clock - seconds * 1000 - 50);
  return first === last ? null : (last.model[name] - first.model[name]) / ((last.clock - first.clock) / 1000);
}

const number = (value) => (value === null ? "–" : compact(value));

function charts(clock, model) {
  const { limits, kv } = model, decode = model.running - model.prefill;
  const ended = Object.values(model.finished).reduce((sum, each) => sum + each, 0);
  const reused = model.prompt_tokens ? model.reused_prompt_tokens / model.prompt_tokens : null;
  tiles.running(count(model.running), limits ? `/ ${count(limits.batch)}` : "", `${count(decode)} decode, ${count(model.prefill)} prefill`, limits && model.running / limits.batch);
  tiles.waiting(count(model.waiting), limits ? `/ ${compact(limits.queue)}` : "", `${count(model.requests)} requests in all`, limits && limits.queue ? model.waiting / limits.queue : null);
  tiles.tokens(number(rate("generated_tokens")), "", `${compact(model.generated_tokens)} in all`);
  tiles.requests(number(rate("requests")), "", `${compact(ended)} ended`);
  tiles.kv(kv.usage === null ? "–" : percent(kv.usage), "", kv.blocks ? `${count(kv.used)} of ${count(kv.blocks)} blocks` : "", kv.usage);
  tiles.reused(reused === null ? "–" : percent(reused), "", `${compact(model.reused_prompt_tokens)} of ${compact(model.prompt_tokens)}`, reused);
  occupancy.limit = limits?.batch ?? 1;
  occupancy.add(clock, [decode, model.prefill, model.waiting]);
  const first = past[0].model, fresh = model.prompt_tokens - first.prompt_tokens;
  cache.add(clock, [kv.usage, fresh > 0 ? (model.reused_prompt_tokens - first.reused_prompt_tokens) / fresh : reused]);
  histograms();
}

function histograms() {
  if (!past.length) return;
  const minute = $("period").value === "minute", { model } = past.at(-1);
  for (const [name, panel] of Object.entries(latencies)) {
    const { bounds, counts } = model.latency[name], before = past[0].model.latency[name].counts;
    panel.update({ bounds, counts: minute ? counts.map((each, index) => each - before[index]) : counts });
  }
}

function table(rows, clock) {
  if ($("table").hidden) return;
  tabled = performance.now();
  $("table").querySelector("tbody").replaceChildren(...rows.map((row) => {
    const told = Object.fromEntries(describe(row, clock)), line = document.createElement("tr");
    const cells = [row.id, LABELS[stateOf(row)], told["Prompt tokens"], told["Of these reused"], told["Output tokens"], told.Queued, told["First token after"], told.Total, told.Client];
    for (const cell of cells) line.append(Object.assign(document.createElement("td"), { textContent: cell ?? "–" }));
    return line;
  }));
}

function press(button, pressed) {
  button.setAttribute("aria-pressed", String(pressed));
}

$("pause").addEventListener("click", () => {
  paused = !paused;
  press($("pause"), paused);
  link(connection);
});
$("as-table").addEventListener("click", () => {
  const open = $("table").hidden;
  $("table").hidden = !open;
  $("lanes").hidden = open;
  press($("as-table"), open);
  if (latest && open) table(latest.rows, latest.clock);
});
$("span").addEventListener("change", (event) => {
  lanes.setSpan(Number(event.target.value));
  lanes.draw(performance.now());
});
$("model").addEventListener("change", (event) => {
  events.model = event.target.value;
  events.open();
});
$("access").addEventListener("submit", (event) => {
  event.preventDefault();
  secrets.key = $("key").value;
  $("key").value = "";
  $("access").hidden = true;
  events.open();
});
$("period").addEventListener("change", histograms);
addEventListener("hashchange", () => location.reload()); // another link

function theme() {
  lanes.theme();
  occupancy.theme();
  cache.theme();
}
dark.addEventListener("change", theme);

// A page that nobody looks at leaves its place to another one.
let leaving = 0;
function attend() {
  clearTimeout(leaving);
  if (document.hidden) leaving = setTimeout(() => { events.close(); link("disconnected while hidden"); }, HIDDEN_SECONDS * 1000);
  else if (connection !== "live") events.open();
}
document.addEventListener("visibilitychange", attend);

events.model = new URLSearchParams(location.search).get("model");
theme();
attend();
