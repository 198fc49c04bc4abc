// The live page: follows the server's feed and keeps every figure on it current.

import { BlockMap } from "./blocks.js";
import { histogram, seconds, Sparkline } from "./charts.js";
import { Chat } from "./chat.js";
import { events, headers } from "./events.js";

const $ = (id) => document.getElementById(id);
const blocks = new BlockMap($("blocks"), $("legend"), $("block-tip"));
const spark = new Sparkline($("spark"));
let snapshot = null;

const model = () => snapshot?.models.find((item) => item.name === $("model").value) ?? snapshot?.models[0];
new Chat(model);

// Theme: the system's until the user chooses.
const dark = matchMedia("(prefers-color-scheme: dark)");
const stored = () => {
  try {
    return localStorage.getItem("plancast-theme");
  } catch {
    return null;
  }
};
function paint() {
  document.documentElement.dataset.theme = stored() ?? (dark.matches ? "dark" : "light");
  blocks.draw();
}
dark.addEventListener("change", paint);
$("theme").addEventListener("click", () => {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try {
    localStorage.setItem("plancast-theme", next);
  } catch {
    document.documentElement.dataset.theme = next;
  }
  paint();
});
paint();

const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");
/** Two sizes in the larger one's unit: "19 of 300 MiB". */
function sizes(part, whole) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(units.length - 1, Math.floor(Math.log2(Math.max(1, whole)) / 10));
  const digits = whole / 2 ** (10 * power) < 10 ? 1 : 0;
  const [used, all] = [part, whole].map((n) => (n / 2 ** (10 * power)).toFixed(digits));
  return `${used} of ${all} ${units[power]}`;
}

function showModels(models) {
  const names = models.map((item) => item.name);
  const select = $("model");
  if ([...select.options].map((option) => option.value).join("\n") === names.join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
}

function show() {
  showModels(snapshot.models);
  const current = model();
  if (!current) return;
  $("facts").textContent = `${current.backend} · ${current.context.toLocaleString()} tokens of context`;
  $("rate").textContent = snapshot.tokens_per_second.toFixed(snapshot.tokens_per_second < 10 ? 1 : 0);
  $("running").textContent = current.running;
  $("waiting").textContent = `${current.waiting} waiting`;
  const used = current.blocks - current.free;
  $("kv").textContent = percent(used, current.blocks);
  $("kv-detail").textContent = sizes(used * current.bytes_per_block, current.blocks * current.bytes_per_block);
  $("prefix").textContent = percent(current.prefix_hits, current.prefix_queries);
  $("prefix-detail").textContent = current.prefix_queries ? `${current.prefix_hits.toLocaleString()} tokens` : "no lookup yet";
  $("spec").textContent = percent(current.accepted_tokens, current.draft_tokens);
  $("spec-detail").textContent = drafts(current);
  blocks.update(current.map, current.block_size);
  showRequests(snapshot.requests.filter((request) => request.model === current.name));
  histogram($("ttft"), $("ttft-p"), snapshot.ttft);
  histogram($("tpot"), $("tpot-p"), snapshot.tpot);
}

function drafts(current) {
  if (!current.drafts) return current.speculation ? "no drafts yet" : "no drafts";
  const mean = 1 + current.accepted_tokens / current.drafts;
  return `${mean.toFixed(2)} tokens a verification · ${percent(current.draft_share, 1)} of the time`;
}

// Rows are kept by id, so that a bar glides instead of being made anew.
const rows = new Map();

function showRequests(requests) {
  const seen = new Set();
  for (const request of requests) {
    seen.add(request.id);
    let row = rows.get(request.id);
    if (!row) {
      row = $("requests").insertRow();
      for (let i = 0; i < 5; i++) row.insertCell();
      row.cells[0].textContent = request.id;
      row.cells[0].title = `${request.route}, at most ${request.max} tokens`;
      row.cells[1].innerHTML = '<span class="state"></span>';
      row.cells[2].className = row.cells[3].className = "num";
      row.cells[4].innerHTML = '<span class="progress"><i></i><span></span></span>';
      rows.set(request.id, row);
    }
    const state = row.cells[1].firstChild;
    state.textContent = request.running ? "running" : "waiting";
    state.classList.toggle("running", request.running);
    row.cells[2].textContent = seconds(request.age);
    row.cells[3].textContent = request.cached ? `${request.prompt} (${request.cached} cached)` : request.prompt;
    row.cells[4].firstChild.style.setProperty("--share", request.max ? request.output / request.max : 0);
    row.cells[4].firstChild.lastChild.textContent = `${request.output} / ${request.max}`;
  }
  for (const [id, row] of rows) {
    if (seen.has(id)) continue;
    row.remove();
    rows.delete(id);
  }
  const hidden = snapshot.in_flight - requests.length;
  $("requests-count").textContent = requests.length ? `${snapshot.in_flight} in flight${hidden > 0 ? `, ${hidden} not shown` : ""}` : "";
}

function status(state, text) {
  $("status").dataset.state = state;
  $("status").textContent = text;
}

// Follow the feed for as long as the page is open; after a break try again, ever less often.
async function follow() {
  for (let delay = 500; ; delay = Math.min(8000, delay * 2)) {
    try {
      for await (const data of events("live", { headers: headers() })) {
        snapshot = JSON.parse(data);
        delay = 500;
        status(snapshot.draining ? "draining" : "live", snapshot.draining ? "shutting down" : "live");
        spark.push(snapshot.tokens_per_second);
        show();
      }
      status("lost", "reconnecting");
    } catch (error) {
      if (error.status === 401) {
        status("lost", "needs an API key");
        $("controls").open = true;
        await new Promise((resolve) => $("key").addEventListener("change", resolve, { once: true }));
        continue;
      }
      status("lost", "reconnecting");
    }
    await new Promise((resolve) => setTimeout(resolve, delay));
  }
}

$("model").addEventListener("change", () => snapshot && show());
follow();
$("prompt").focus({ preventScroll: true });
