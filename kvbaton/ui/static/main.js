// The page: asks for the state once a second while it is looked at, and shows it.

import { Chart, loadLibrary } from "./charts.js";
import { blocksBar, element, row, setClass, setText, sync, text } from "./dom.js";
import { bytes, bytesPerSecond, clock, count, number, seconds, share, words } from "./format.js";

const PERIOD_MS = 1000;
const DEADLINE_MS = 5000;
const MOST_FRAMES = 301;
const MOST_ROWS = 100;
const get = (id) => document.getElementById(id);

const known = { head: null, frames: [], rows: [], decisionsAfter: 0, framesAfter: 0, heardAt: 0, paused: false };
let charts = [];
let timer = 0;

// -- asking ---------------------------------------------------------------------------------------------------------

async function ask() {
  clearTimeout(timer);
  if (known.paused || document.hidden) return;
  try {
    const query = `decisions_after=${known.decisionsAfter}&frames_after=${known.framesAfter}`;
    const response = await fetch(`state?${query}`, { signal: AbortSignal.timeout(DEADLINE_MS) });
    if (!response.ok) throw new Error(`the router answered ${response.status}`);
    take(await response.json());
    if (known.paused) return;
    await show();
    setText(get("trouble"), "");
    get("trouble").hidden = true;
  } catch (error) {
    const since = known.heardAt ? ` What is below is from ${clock(known.heardAt)}.` : "";
    setText(get("trouble"), `No answer from the router: ${error.message}.${since}`);
    get("trouble").hidden = false;
    setText(get("fleet-state"), "no answer");
    setClass(get("fleet-state"), "badge bad");
  }
  timer = setTimeout(ask, PERIOD_MS);
}

function take({ head, frames, decisions }) {
  if (decisions.next < known.decisionsAfter || (frames.at(-1)?.number ?? Infinity) < known.framesAfter) {
    known.frames = []; // another life of the router
    known.rows = [];
  }
  known.head = head;
  known.heardAt = Date.now();
  known.frames = [...known.frames, ...frames].slice(-MOST_FRAMES);
  known.framesAfter = known.frames.at(-1)?.number ?? 0;
  known.decisionsAfter = decisions.next;
  const rows = decisions.rows.map((each) => ({ ...each, at: known.heardAt - (head.now_s - each.at_s) * 1000 }));
  known.rows = [...rows.reverse(), ...known.rows].slice(0, MOST_ROWS);
  get("missed").hidden = decisions.missed === 0;
  if (decisions.missed) setText(get("missed"), `${decisions.missed} more ended since the last look than are kept.`);
}

// -- showing --------------------------------------------------------------------------------------------------------

async function show() {
  const { head, frames } = known;
  if (!charts.length) await begin(head);
  document.title = `${head.model} · kvbaton`;
  setText(get("model"), head.model);
  setText(get("fleet-state"), head.state);
  setClass(get("fleet-state"), `badge ${head.state === "serving" ? "good" : "warn"}`);
  setText(get("inflight"), count(head.inflight));
  setText(get("queued"), count(head.queued));
  setText(get("window"), `over the last ${number(head.window_s)} s`);
  showTiles(head, frames.at(-1));
  showPools(head);
  showLatency(head);
  showFlow(head);
  showDecisions(head);
  showDrift(head);
  for (const chart of charts) chart.update(frames, head.now_s);
  document.body.dataset.frame = String(known.framesAfter);
}

async function begin(head) {
  get("no-charts").hidden = head.charts;
  document.body.classList.toggle("no-library", !head.charts);
  if (head.charts && !window.Plotly) await loadLibrary();
  charts = makeCharts();
}

const kept = (spread, gate) => (spread === null ? "" : spread.p99_s <= gate ? "good" : "bad");

function gateText(spread, gate) {
  if (spread === null) return `no samples · gate ${seconds(gate)}`;
  const mark = spread.p99_s <= gate ? "✓" : "✗";
  return `${mark} ${share(spread.met)} within ${seconds(gate)}`;
}

function showTiles(head, frame) {
  const { ttft, tpot, itl } = head.latency;
  const { aims } = head;
  const placed = { inside: "good", above: "bad", below: "bad", unknown: "" }[head.place];
  const tiles = [
    ["Requests", `${number(frame?.requests_per_s)}/s`, head.num_failed ? `✗ ${count(head.num_failed)} failed` : "none failed",
      head.num_failed ? "bad" : ""],
    ["TTFT, p99", seconds(ttft?.p99_s), gateText(ttft, aims.ttft_s), kept(ttft, aims.ttft_s)],
    ["TPOT, p99", seconds(tpot?.p99_s), gateText(tpot, aims.tpot_s), kept(tpot, aims.tpot_s)],
    ["ITL, p99", seconds(itl?.p99_s), itl ? `p50 ${seconds(itl.p50_s)}` : "no samples", ""],
    ["KV moved", bytesPerSecond(frame?.moved_bytes_per_s), "between workers", ""],
    ["Prompt : output", number(head.ratio), driftAside(head), placed],
  ];
  sync(get("tiles"), tiles, ([name]) => name, ([name]) => {
    const value = element("dd", { cls: "value" });
    const aside = element("dd", { cls: "aside" });
    return {
      node: element("div", { cls: "tile" }, element("dt", { text: name }), value, aside),
      update: ([, shown, beside, cls]) => {
        setText(value, shown);
        setText(aside, beside);
        setClass(aside, `aside ${cls}`);
      },
    };
  });
}

function driftAside({ aims, place }) {
  if (!aims.band) return "no plan given";
  const range = `${number(aims.band.low)} to ${number(aims.band.high)}`;
  return { inside: `✓ planned ${range}`, above: `✗ above ${range}`, below: `✗ below ${range}`, unknown: `planned ${range}` }[place];
}

const STATES = { up: "good", draining: "warn", down: "bad", mismatch: "bad", unknown: "" };

function showPools(head) {
  sync(get("pool-cards"), head.pools, (pool) => pool.role, (pool) => {
    const up = element("span", { cls: "quiet" });
    const bar = element("div");
    const facts = element("dl");
    const title = element("h3", {}, element("span", { cls: `role ${pool.role}`, text: pool.role }), up);
    return {
      node: element("div", { cls: `pool ${pool.role}` }, title, bar, facts),
      update: (now) => {
        setText(up, `${now.num_up} of ${now.num_workers} up`);
        blocksBar(bar, now.blocks);
        const listed = [
          ["running", count(now.num_running)],
          ["waiting", count(now.num_waiting)],
          ["prompt tokens waiting", count(now.waiting_prompt_tokens)],
          ["blocks pinned", count(now.blocks.pinned)],
          ["blocks cached", count(now.blocks.cached)],
          ["blocks free", count(now.blocks.free)],
          ["KV sent", bytesPerSecond(now.sent_bytes_per_s)],
          ["KV received", bytesPerSecond(now.received_bytes_per_s)],
        ];
        sync(facts, listed, ([name]) => name, ([name]) => {
          const value = element("dd");
          const node = element("div", {}, element("dt", { text: name }), value);
          return { node, update: ([, shown]) => setText(value, shown) };
        });
      },
    };
  });
  sync(get("workers"), head.workers, (worker) => worker.name, () => row([
    ["worker", "title", (cell, worker) => {
      setText(cell, worker.name);
      setClass(cell, `title role ${worker.role}`);
    }],
    ["state", "wide", (cell, worker) => {
      if (!cell.firstChild) cell.append(element("span"), " ", element("span", { cls: "under" }));
      setText(cell.firstChild, worker.state);
      setClass(cell.firstChild, `badge ${STATES[worker.state] ?? ""}`);
      setText(cell.lastChild, worker.state === "up" ? "" : worker.reason);
    }],
    ["running", "n", text((worker) => count(worker.num_running))],
    ["waiting", "n", text((worker) => count(worker.num_waiting))],
    ["prompt tokens waiting", "n wide", text((worker) => count(worker.waiting_prompt_tokens))],
    ["KV blocks", "wide", (cell, worker) => blocksBar(cell, worker.blocks)],
    ["pinned", "n", text((worker) => count(worker.blocks.pinned))],
    ["cached", "n", text((worker) => count(worker.blocks.cached))],
    ["KV out", "n", text((worker) => bytesPerSecond(worker.sent_bytes_per_s))],
    ["KV in", "n", text((worker) => bytesPerSecond(worker.received_bytes_per_s))],
    ["failures", "n", text((worker) => count(worker.num_failures))],
  ]));
  const leftOut = head.num_workers - head.workers.length;
  get("left-out").hidden = leftOut === 0;
  setText(get("left-out"), `${leftOut} more workers are in the sums, but not in the table.`);
}

function showLatency({ latency, aims }) {
  const rows = [["TTFT", latency.ttft, aims.ttft_s], ["TPOT", latency.tpot, aims.tpot_s], ["ITL", latency.itl, null]];
  sync(get("percentiles"), rows, ([name]) => name, () => row([
    ["", "", text(([name]) => name)],
    ["p50", "n", text(([, spread]) => seconds(spread?.p50_s))],
    ["p90", "n", text(([, spread]) => seconds(spread?.p90_s))],
    ["p99", "n", text(([, spread]) => seconds(spread?.p99_s))],
    ["gate", "n", text(([, , gate]) => seconds(gate))],
    ["within", "n", text(([, spread]) => share(spread?.met))],
    ["samples", "n", text(([, spread]) => count(spread?.num ?? 0))],
  ]));
}

function showFlow({ links }) {
  get("no-links").hidden = links.length > 0;
  const most = Math.max(...links.map((link) => link.bytes_per_s), 1);
  sync(get("links"), links, (link) => `${link.prefill} ${link.decode}`, () => row([
    ["from", "role prefill", text((link) => link.prefill)],
    ["to", "", (cell, link) => {
      if (!cell.firstChild) cell.append(element("span", { cls: "role decode" }));
      setText(cell.firstChild, link.decode);
    }],
    ["rate", "", (cell, link) => {
      if (!cell.firstChild) cell.append(element("div", { cls: "bar" }, element("span", { cls: "used" })), element("span", { cls: "under" }));
      cell.firstChild.firstChild.style.width = `${(100 * link.bytes_per_s) / most}%`;
      setText(cell.lastChild, bytesPerSecond(link.bytes_per_s));
    }],
    ["requests", "n", text((link) => count(link.num_requests))],
  ]));
}

const OUTCOMES = { ok: "good", error: "bad", rejected: "warn", cancelled: "" };

function showDecisions(head) {
  sync(get("reasons"), head.reasons, (reason) => reason.reason, () => {
    const num = element("b");
    const name = element("span");
    const what = element("span", { cls: "what" });
    return {
      node: element("li", {}, element("span", {}, num, name), what),
      update: (reason) => {
        setText(num, count(reason.num));
        setText(name, words(reason.reason));
        setText(what, reason.meaning);
      },
    };
  });
  get("no-rows").hidden = known.rows.length > 0;
  sync(get("rows"), known.rows, (each) => each.number, () => row([
    ["ended", "title", text((each) => clock(each.at))],
    ["decision", "wide", text((each) => words(each.reason) + (each.failed ? ` (after: ${words(each.failed)})` : ""))],
    ["where", "wide", text((each) => (each.prefill ? `${each.prefill} → ${each.decode}` : each.decode ?? "–"))],
    ["outcome", "", (cell, each) => {
      if (!cell.firstChild) cell.append(element("span"));
      setText(cell.firstChild, each.outcome);
      setClass(cell.firstChild, `badge ${OUTCOMES[each.outcome] ?? ""}`);
    }],
    ["prompt", "n", text((each) => count(each.prompt_tokens))],
    ["cached", "n", text((each) => count(each.cached_tokens))],
    ["output", "n", text((each) => count(each.output_tokens))],
    ["KV moved", "n", text((each) => (each.transfer_bytes ? bytes(each.transfer_bytes) : "–"))],
    ["TTFT", "n", text((each) => seconds(each.ttft_s))],
    ["whole", "n", text((each) => seconds(each.total_s))],
  ]));
}

function showDrift({ aims, place, ratio }) {
  const said = ratio === null ? "Nothing was generated in the last five minutes." :
    `Over the last five minutes, ${number(ratio)} prompt tokens were computed for each output token.`;
  const planned = aims.band ? `${number(aims.band.low)} to ${number(aims.band.high)}` : "";
  const judged = {
    inside: ` The plan was made for ${planned}: it still fits.`,
    above: ` The plan was made for ${planned}: prefill is short. Plan again with today's traffic.`,
    below: ` The plan was made for ${planned}: decode is short. Plan again with today's traffic.`,
    unknown: aims.band ? ` The plan was made for ${planned}.` : " No plan was given to compare it with (--plan-band LOW,HIGH).",
  }[place];
  setText(get("drift-text"), said + judged);
}

function makeCharts() {
  const gate = (name) => () => [{ value: known.head.aims[name], name: `gate ${seconds(known.head.aims[name])}` }];
  const pooled = (read) => ["prefill", "decode", "both"].map((role) => ({
    name: role, color: `--${role}`, read: (frame) => (frame.pools[role] ? read(frame.pools[role]) : null),
  }));
  const percentiles = (name) => ["p50", "p90", "p99"].map((which) => ({
    name: which, color: `--${which}`, read: (frame) => frame[name]?.[`${which}_s`] ?? null,
  }));
  return [
    new Chart("chart-waiting", { title: "Prompt tokens waiting", series: pooled((pool) => pool.waiting_prompt_tokens), format: count }),
    new Chart("chart-running", { title: "Running batch", aside: "sequences", series: pooled((pool) => pool.num_running), format: number }),
    new Chart("chart-ttft", { title: "TTFT", aside: "request to first token", series: percentiles("ttft"), format: seconds, level: gate("ttft_s"), log: true }),
    new Chart("chart-tpot", { title: "TPOT", aside: "mean gap after it", series: percentiles("tpot"), format: seconds, level: gate("tpot_s"), log: true }),
    new Chart("chart-itl", { title: "ITL", aside: "every gap", series: percentiles("itl"), format: seconds, log: true }),
    new Chart("chart-flow", { title: "KV between workers", series: [{ name: "moved", color: "--used", read: (frame) => frame.moved_bytes_per_s }], format: bytesPerSecond, step: 1024 }),
    new Chart("chart-ratio", { title: "Prompt : output", aside: "over five minutes", series: [{ name: "ratio", color: "--p50", read: (frame) => frame.ratio }], format: number, band: () => known.head.aims.band, log: true }),
    new Chart("chart-tokens", { title: "Tokens per second", series: [
      { name: "prompt, computed", color: "--prefill", read: (frame) => frame.prompt_tokens_per_s },
      { name: "output", color: "--decode", read: (frame) => frame.output_tokens_per_s },
    ], format: count }),
  ];
}

// -- the reader -----------------------------------------------------------------------------------------------------

get("pause").addEventListener("click", () => {
  known.paused = !known.paused;
  get("pause").setAttribute("aria-pressed", String(known.paused));
  setText(get("pause"), known.paused ? "Go on" : "Pause");
  setText(get("heard"), known.paused ? `paused at ${clock(Date.now())}` : "");
  ask();
});
document.addEventListener("visibilitychange", ask);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const chart of charts) chart.update(known.frames, known.head.now_s);
});
ask();
