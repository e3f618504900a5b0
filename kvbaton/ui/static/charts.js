// Time series of the frames, drawn by plotly. Each figure has a caption, its own legend, a label that says the last
// values, and the values as a table; without the library the table is what remains.

import { element } from "./dom.js";

const MOST_SPAN_S = 300;
const LEAST_SPAN_S = 60;
const TABLE_ROWS = 10;
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function loadLibrary() {
  return new Promise((resolve, reject) => {
    const script = element("script", { src: "vendor/plotly.min.js" });
    script.onload = () => resolve();
    script.onerror = () => reject(new Error("the charting library did not load"));
    document.head.append(script);
  });
}

export class Chart {
  // series: [{name, color, read(frame) -> number or null}]; level: () -> [{value, name}], lines to stay below;
  // band: () -> {low, high} or null; log: whether the axis is logarithmic; step: 1024 for bytes, otherwise 10.
  constructor(id, { title, aside = "", series, format, level = () => [], band = () => null, log = false, step = 10 }) {
    Object.assign(this, { title, series, format, level, band, log, step });
    this.figure = document.getElementById(id);
    this.plot = element("div", { cls: "plot", role: "img" });
    this.keys = element("ul", { cls: "keys", "aria-hidden": "true" });
    this.body = element("tbody");
    this.details = element("details", {}, element("summary", { text: `${title} as a table` }));
    this.details.append(element("div", { cls: "scroll" }, element("table", {}, this.#tableHead(), this.body)));
    this.details.addEventListener("toggle", () => this.#fillTable());
    const caption = element("figcaption", { text: title });
    if (aside) caption.append(" ", element("span", { cls: "quiet", text: aside }));
    this.figure.append(caption, this.keys, this.plot, this.details);
    this.frames = [];
  }

  #tableHead() {
    const cells = this.series.map(({ name }) => element("th", { scope: "col", cls: "n", text: name }));
    return element("thead", {}, element("tr", {}, element("th", { scope: "col", text: "ago" }), ...cells));
  }

  shown() {
    return this.series.filter(({ read }) => this.frames.some((frame) => read(frame) !== null));
  }

  update(frames, nowS) {
    this.frames = frames;
    this.nowS = nowS;
    const last = frames.at(-1);
    const said = this.series.map(({ name, read }) => `${name} ${last ? this.format(read(last)) : "not known"}`);
    this.plot.setAttribute("aria-label", `${this.title}: ${said.join(", ")}`);
    this.#fillKeys();
    this.#fillTable();
    if (window.Plotly) this.#draw();
  }

  #fillKeys() {
    const names = [...this.shown().map(({ name, color: of }) => [name, `var(${of})`])];
    for (const { name } of this.level()) names.push([name, "var(--bad)"]);
    if (this.band()) names.push(["planned band", "var(--good)"]);
    const wanted = names.map(([name]) => name).join();
    if (this.keys.dataset.names === wanted) return;
    this.keys.dataset.names = wanted;
    this.keys.replaceChildren(
      ...names.map(([name, of]) => {
        const mark = element("i", { cls: of === "var(--bad)" ? "level" : "" });
        if (of !== "var(--bad)") mark.style.background = of;
        return element("li", {}, mark, name);
      }),
    );
  }

  #fillTable() {
    if (!this.details.open) return;
    const step = Math.max(1, Math.ceil(this.frames.length / TABLE_ROWS));
    const chosen = this.frames.filter((_, i) => (this.frames.length - 1 - i) % step === 0).reverse();
    this.body.replaceChildren(
      ...chosen.map((frame) => {
        const ago = element("th", { scope: "row", text: `${Math.round(this.nowS - frame.at_s)} s` });
        const cells = this.series.map(({ read }) => element("td", { cls: "n", text: this.format(read(frame)) }));
        return element("tr", {}, ago, ...cells);
      }),
    );
  }

  #draw() {
    const x = this.frames.map((frame) => frame.at_s - this.nowS);
    const shown = this.shown();
    const traces = shown.map(({ name, color: of, read }) => {
      const y = this.frames.map((frame) => read(frame));
      const text = y.map((value) => this.format(value));
      return {
        name, x, y, text, type: "scatter", mode: "lines", line: { color: color(of), width: 2 },
        hovertemplate: "%{text}<extra>%{fullData.name}</extra>",
      };
    });
    const band = this.band();
    const levels = this.level();
    const reach = [...levels.map(({ value }) => value), ...(band ? [band.low, band.high] : [])];
    const values = traces.flatMap(({ y }) => y).filter((value) => value !== null);
    const line = { color: color("--line"), gridcolor: color("--line"), zeroline: false, fixedrange: true };
    const layout = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, dragmode: false,
      hovermode: "x", margin: { l: 66, r: 22, t: 8, b: 26 }, autosize: true,
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: color("--quiet") },
      hoverlabel: { bgcolor: color("--card"), font: { color: color("--text") }, bordercolor: color("--line") },
      xaxis: {
        ...line, ...timeAxis(-(x[0] ?? 0)), showgrid: false, tickfont: { color: color("--quiet") }, showspikes: false,
      },
      yaxis: { ...line, tickfont: { color: color("--quiet") }, ...this.#axis(values, reach) },
      shapes: levels.map(({ value }) => ({
        type: "line", xref: "paper", x0: 0, x1: 1, y0: value, y1: value,
        line: { color: color("--bad"), width: 1.5, dash: "dash" },
      })),
    };
    if (band) {
      layout.shapes.push({
        type: "rect", xref: "paper", x0: 0, x1: 1, y0: band.low, y1: band.high, layer: "below", line: { width: 0 },
        fillcolor: color("--good"), opacity: 0.16,
      });
    }
    window.Plotly.react(this.plot, traces, layout, { displayModeBar: false, responsive: true, scrollZoom: false });
  }

  #axis(values, reach) {
    if (this.log) {
      const positive = [...values, ...reach].filter((value) => value > 0);
      const low = Math.min(...positive, 1) / 1.6;
      const high = Math.max(...positive, 0.01) * 1.6;
      const ticks = logTicks(low, high);
      return { type: "log", range: [Math.log10(low), Math.log10(high)], tickvals: ticks, ticktext: ticks.map(this.format) };
    }
    const high = Math.max(...values, ...reach, 0) * 1.12 || 1;
    const ticks = niceTicks(high, this.step);
    return { range: [0, high], tickvals: ticks, ticktext: ticks.map(this.format) };
  }
}

// As long as there is something to show, in whole minutes.
function timeAxis(known) {
  const span = Math.min(MOST_SPAN_S, Math.max(LEAST_SPAN_S, Math.ceil(known / 60) * 60));
  const step = span > 120 ? 60 : span / 4;
  const tickvals = [];
  for (let ago = Math.floor((span - 1) / step) * step; ago >= 0; ago -= step) tickvals.push(-ago);
  const ticktext = tickvals.map((at) => (at === 0 ? "now" : at % 60 ? `−${-at} s` : `−${-at / 60} min`));
  return { range: [-span, 0], tickvals, ticktext };
}

export function logTicks(low, high) {
  const decades = Math.log10(high / low);
  const steps = decades > 3 ? [1] : decades > 1.5 ? [1, 3] : [1, 2, 5];
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
    ticks.push(...steps.map((step) => Number((step * 10 ** power).toPrecision(3))));
  }
  return ticks.filter((tick) => tick >= low && tick <= high);
}

export function niceTicks(high, step = 10) {
  const unit = step === 1024 ? 1024 ** Math.max(0, Math.floor(Math.log(high) / Math.log(1024))) : 1;
  const rough = high / unit / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough) * unit;
  const ticks = [];
  for (let tick = 0; tick <= high; tick += size) ticks.push(tick);
  return ticks;
}
