// Batch, queue and KV cache over two minutes (uPlot), and histograms of latencies.
import { bound, count, milliseconds, percent } from "./format.js";

const SECONDS = 120;
const GAP = 3000; // milliseconds without a snapshot: nothing is drawn there
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// What lies above the batch's limit is the queue's part of the picture, with a scale of its own.
const BATCH_SHARE = 0.68;
const TOPS = [0.1, 0.2, 0.5, 1];

class TimePlot {
  constructor(panel) {
    this.box = panel.querySelector(".plot");
    this.legend = panel.querySelector(".legend");
    this.when = panel.querySelector(".when");
    this.usual = this.when.textContent;
    this.points = [];
    this.items = this.series().map(([name]) => this.legend.appendChild(Object.assign(document.createElement("li"), { className: name })));
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(this.box);
    this.box.addEventListener("keydown", (event) => this.move(event));
    this.box.addEventListener("blur", () => this.plot?.setCursor({ left: -10, top: -10 }));
  }

  size() { return { width: this.box.clientWidth, height: this.box.clientHeight }; }

  theme() {
    this.plot?.destroy();
    const axis = { stroke: colour("muted"), font: "10px system-ui, sans-serif", ticks: { show: false }, grid: { stroke: colour("grid"), width: 1 } };
    const time = {
      ...axis, size: 16, gap: 2, space: 60,
      values: (_, values) => values.map((value) => (Math.abs(value) < 1 ? "now" : value < 0 ? `−${-value} s` : "")),
      splits: () => [-90, -60, -30, 0],
    };
    this.plot = new uPlot({
      ...this.size(), legend: { show: false }, padding: [6, 12, 0, 0],
      cursor: { y: false, drag: { x: false, y: false }, points: { show: false } },
      scales: { x: { time: false, range: () => [-SECONDS, 0] }, ...this.scales() },
      series: [{}, ...this.series().map(([, options]) => ({ points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }), ...options }))],
      axes: [time, ...this.axes(axis)],
      hooks: { draw: [(plot) => this.draws(plot)], setCursor: [(plot) => this.tell(plot.cursor.idx)] },
    }, this.data(), this.box);
  }

  draws() {}

  add(at, values) {
    const before = this.points.at(-1)?.[0];
    if (at - before > GAP) this.points.push([before + 1]);
    this.points.push([at, ...values]);
    const first = this.points.findIndex((point) => point[0] >= at - SECONDS * 1000 - 1000);
    if (first > 0) this.points.splice(0, first);
    if (!this.plot) this.theme();
    this.plot.setData(this.data());
    this.tell(this.plot.cursor.idx);
  }

  clear() {
    this.points = [];
    this.plot?.setData(this.data());
  }

  data() {
    const last = this.points.at(-1)?.[0] ?? 0;
    return [this.points.map((point) => (point[0] - last) / 1000), ...this.columns()];
  }

  tell(index) {
    const point = this.points[index ?? this.points.length - 1] ?? this.points.at(-1);
    if (!point) return;
    const past = (this.points.at(-1)[0] - point[0]) / 1000;
    this.when.textContent = past > 0.4 ? `${past.toFixed(0)} s ago` : this.usual;
    const texts = point.length > 1 ? this.texts(point) : ["not watched"];
    this.items.forEach((item, index) => {
      item.textContent = texts[index] ?? "";
      item.hidden = !texts[index];
    });
    this.box.setAttribute("aria-label", texts.filter(Boolean).join(", "));
  }

  move(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !this.plot) return;
    const { left } = this.plot.cursor, width = this.plot.over.clientWidth;
    const next = (left < 0 ? width : left) + (step * width) / 60;
    this.plot.setCursor({ left: Math.max(0, Math.min(width, next)), top: 5 });
    event.preventDefault();
  }
}

export class Occupancy extends TimePlot {
  limit = 1;

  // The area of prefill is drawn first, up to the sum, and that of decode over it.
  series() {
    return [
      ["decode", { scale: "batch", fill: () => colour("prefill"), width: 0 }],
      ["prefill", { scale: "batch", fill: () => colour("decode"), width: 0 }],
      ["queued", { scale: "queue", fill: () => colour("queued"), width: 0, fillTo: 0 }],
    ];
  }

  columns() {
    return [(p) => p[1] + p[2], (p) => p[1], (p) => p[3]].map((of) => this.points.map((p) => (p.length > 1 ? of(p) : null)));
  }

  most() { return Math.max(4, ...this.points.map((point) => point[3] ?? 0)); }

  scales() {
    const above = (1 - BATCH_SHARE) * 0.88;
    return {
      batch: { range: () => [0, this.limit / BATCH_SHARE] },
      queue: { range: () => [(-this.most() * BATCH_SHARE) / above, (this.most() * (1 - BATCH_SHARE)) / above] },
    };
  }

  axes(axis) {
    const middle = () => [0, ...(this.limit > 1 ? [Math.round(this.limit / 2)] : []), this.limit];
    return [
      { ...axis, scale: "batch", size: 34, splits: middle },
      { ...axis, scale: "queue", side: 1, size: 40, grid: { show: false }, splits: () => [0, this.most()], values: (_, v) => v.map(count) },
    ];
  }

  draws(plot) {
    const y = Math.round(plot.valToPos(this.limit, "batch", true)), { left, width } = plot.bbox, pen = plot.ctx;
    pen.save();
    pen.strokeStyle = colour("text");
    pen.setLineDash([5, 4]);
    pen.beginPath();
    pen.moveTo(left, y);
    pen.lineTo(left + width, y);
    pen.stroke();
    pen.fillStyle = colour("muted");
    pen.textAlign = "left";
    pen.fillText(`limit ${count(this.limit)}`, left + 4 * devicePixelRatio, y - 5 * devicePixelRatio);
    pen.restore();
  }

  texts([, decode, prefill, waiting]) {
    return [`${count(decode)} decode`, `${count(prefill)} prefill of ${count(this.limit)}`, `${count(waiting)} queued`];
  }
}

export class Cache extends TimePlot {
  blocks = null;

  series() {
    return [
      ["used", { scale: "share", fill: () => colour("decode"), width: 0 }],
      ["reused", { scale: "share", stroke: () => colour("reused"), width: 2 }],
    ];
  }

  columns() { return [1, 2].map((place) => this.points.map((point) => point[place] ?? null)); }

  top() {
    const most = Math.max(...this.points.flatMap((point) => [point[1] ?? 0, point[2] ?? 0]));
    return TOPS.find((top) => most <= top) ?? 1;
  }

  scales() { return { share: { range: () => [0, this.top()] } }; }

  axes(axis) {
    const splits = () => [0, this.top() / 2, this.top()];
    return [{ ...axis, scale: "share", size: 40, splits, values: (_, values) => values.map(percent) }];
  }

  texts([, used, reused]) {
    return [used === null ? null : `${percent(used)} used`, reused === null ? "no prompts yet" : `${percent(reused)} of prompts reused`];
  }
}

// The value below which a share of the observations lies, as Prometheus computes it: [seconds, position in buckets].
export function quantile({ bounds, counts }, share) {
  const total = counts.reduce((sum, each) => sum + each, 0);
  if (!total) return null;
  let below = 0;
  for (let index = 0; index < counts.length; index += 1) {
    if (counts[index] && below + counts[index] >= share * total) {
      const part = (share * total - below) / counts[index], low = index ? bounds[index - 1] : 0;
      if (index === bounds.length) return [low, index, true];
      return [low + (bounds[index] - low) * part, index + part, false];
    }
    below += counts[index];
  }
  return null;
}

export class HistogramPanel {
  constructor(panel) {
    this.panel = panel;
    this.figures = panel.querySelector(".figures");
    this.bars = panel.appendChild(Object.assign(document.createElement("div"), { className: "bars" }));
    this.bars.setAttribute("role", "img");
    this.bounds = panel.appendChild(Object.assign(document.createElement("div"), { className: "bounds" }));
    this.bounds.setAttribute("aria-hidden", "true");
    this.drawn = "";
  }

  update(histogram) {
    const key = histogram.counts.join();
    if (key === this.drawn) return;
    this.drawn = key;
    const { bounds, counts } = histogram, most = Math.max(1, ...counts);
    const filled = counts.flatMap((each, index) => (each ? [index] : []));
    // At least ten buckets, so that a single one is not as wide as the panel.
    let first = Math.max(0, (filled[0] ?? 3) - 1), last = Math.min(counts.length - 1, (filled.at(-1) ?? 12) + 1);
    while (last - first < 9 && (first || last < counts.length - 1)) {
      if (last < counts.length - 1) last += 1;
      if (last - first < 9 && first) first -= 1;
    }
    const shown = counts.slice(first, last + 1);
    const bars = shown.map((each, index) => {
      const bar = document.createElement("i"), upper = bounds[first + index];
      bar.style.height = `${(each / most) * 82}%`;
      bar.className = each ? "" : "none";
      bar.title = `${upper === undefined ? `above ${bound(bounds.at(-1))}` : `up to ${bound(upper)}`}: ${count(each)}`;
      return bar;
    });
    const every = Math.ceil(shown.length / 8);
    this.bounds.replaceChildren(...shown.map((_, index) => {
      const upper = bounds[first + index];
      return Object.assign(document.createElement("span"), { textContent: upper !== undefined && (shown.length - 1 - index) % every === 0 ? bound(upper) : "" });
    }));
    const texts = this.percentiles(histogram, bars, first, shown.length);
    this.bars.replaceChildren(...bars);
    const total = counts.reduce((sum, each) => sum + each, 0);
    this.bars.setAttribute("aria-label", total ? `${texts.join(", ")}, of ${count(total)}` : "none yet");
  }

  percentiles(histogram, bars, first, shown) {
    const texts = [];
    this.figures.querySelectorAll("span").forEach((each) => each.remove());
    for (const [name, share] of [["p50", 0.5], ["p90", 0.9], ["p99", 0.99]]) {
      const found = quantile(histogram, share), item = this.figures.appendChild(Object.assign(document.createElement("span"), { className: name }));
      item.append(name, Object.assign(document.createElement("b"), { textContent: found ? (found[2] ? "> " : "") + milliseconds(found[0] * 1000) : "–" }));
      if (!found) continue;
      texts.push(`${name} ${milliseconds(found[0] * 1000)}`);
      const place = (found[1] - first) / shown;
      const line = Object.assign(document.createElement("u"), { className: name + (place > 0.88 ? " left" : "") });
      line.style.left = `${place * 100}%`;
      bars.push(line);
    }
    return texts;
  }
}
