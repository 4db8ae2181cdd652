// The requests on a canvas, one row each: live ones and those that ended lately.
import { ago, count, milliseconds } from "./format.js";

const HEIGHTS = [18, 14, 11, 9, 8, 7, 6, 5, 4, 3];
const SPANS = [10, 30, 120, 600]; // seconds
const AXIS = 16;
const READABLE = 6; // rows of requests that have ended are left out before rows become lower than this

export const LABELS = {
  queued: "queued", prefill: "prefill", decode: "decoding", finished: "finished", cancelled: "cancelled", failed: "failed",
};

export function stateOf(row) {
  if (row.ended !== null) return row.reason === "cancelled" ? "cancelled" : row.reason === "error" ? "failed" : "finished";
  return row.first !== null ? "decode" : row.started !== null ? "prefill" : "queued";
}

// What there is to say about a request: pairs of a name and a value.
export function describe(row, now) {
  const end = row.ended ?? now, state = stateOf(row);
  const seconds = row.first === null ? 0 : (end - row.first) / 1000;
  return [
    ["State", LABELS[state] + (row.ended !== null && row.reason ? `: ${row.reason}` : "")],
    ["Client", row.client || null],
    ["Prompt tokens", count(row.prompt)],
    ["Of these reused", count(row.reused)],
    ["Images", row.images ? `${count(row.images)} of ${count(row.pictured)} tokens` : null],
    ["Output tokens", count(row.output)],
    ["Of these proposed by a draft", row.accepted === null ? null : count(row.accepted)],
    ["Sequences", row.sequences > 1 ? count(row.sequences) : null],
    ["Queued", milliseconds((row.started ?? end) - row.arrived)],
    ["First token after", row.first === null ? null : milliseconds(row.first - row.arrived)],
    ["Tokens per second", seconds > 0.05 && row.output > 1 ? count((row.output - 1) / seconds) : null],
    ["Total", milliseconds(end - row.arrived)],
    ["Arrived", `${ago(now - row.arrived)} ago`],
  ].filter(([, value]) => value !== null);
}

export class Lanes {
  constructor(box, said, still) {
    this.box = box;
    this.canvas = box.querySelector("canvas");
    this.detail = box.querySelector("#detail");
    this.empty = box.querySelector(".empty");
    this.said = said;
    this.still = still; // prefers-reduced-motion
    this.rows = [];
    this.own = null; // the id of the request that this page has sent
    this.seconds = SPANS[0];
    this.fits = true; // the time shown follows the requests
    this.chosen = null;
    this.places = new Map(); // where each row is drawn, by number
    this.offset = null;
    this.paused = false;
    this.colours = {};
    new ResizeObserver(() => this.resize()).observe(box);
    this.resize();
    this.listen();
    const frame = (time) => {
      if (!this.still.matches && !document.hidden && !this.paused && time - (this.drawn ?? 0) > 45) this.draw(time);
      requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  // `clock`: the server's milliseconds, as the times of the rows are.
  update(rows, clock) {
    const offset = performance.now() - clock;
    // Snapshots come late, never early.
    this.offset = this.offset === null || Math.abs(offset - this.offset) > 2000 ? offset : Math.min(offset, this.offset + 5);
    this.rows = rows;
    if (this.fits) this.fit();
    this.empty.hidden = rows.length > 0;
    const there = new Set(rows.map((row) => row.number));
    for (const number of this.places.keys()) if (!there.has(number)) this.places.delete(number);
    if (this.chosen !== null && !there.has(this.chosen)) this.choose(null);
    if (this.still.matches) this.draw(performance.now());
    this.show();
  }

  // After a pause, time goes on with the next snapshot.
  now() { return this.paused || this.offset === null ? this.stopped ?? 0 : performance.now() - this.offset; }

  pause(paused) {
    if (paused === this.paused) return;
    this.stopped = this.now();
    this.paused = paused;
    if (!paused) this.offset = null;
  }

  // Show this many seconds; 0: what the requests that have room need.
  setSpan(seconds) {
    this.fits = !seconds;
    if (seconds) this.seconds = seconds;
    else this.fit();
  }

  fit() {
    const now = this.now(), rows = this.rows.slice(-Math.floor(this.height / READABLE));
    const ages = rows.map((row) => (now - row.arrived) / 1000).sort((a, b) => a - b);
    const needed = ages[Math.floor(ages.length * 0.8)] ?? 0;
    const span = SPANS.find((each) => needed <= each) ?? SPANS.at(-1);
    // It shrinks late, so that it does not go back and forth.
    if (span > this.seconds || needed < span * 0.6) this.seconds = span;
  }

  theme() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["text", "muted", "grid", "panel", "track", ...Object.keys(LABELS)]) {
      this.colours[name] = style.getPropertyValue(`--${name}`).trim();
    }
    this.draw(performance.now());
  }

  resize() {
    const { width, height } = this.box.getBoundingClientRect(), ratio = devicePixelRatio || 1;
    this.width = width;
    this.height = height;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    this.draw(performance.now());
  }

  // The rows that have room, the oldest first, and how high they are.
  layout() {
    const room = Math.max(20, this.height - AXIS - 4);
    const since = this.now() - this.seconds * 1000;
    const seen = this.rows.filter((row) => row.ended === null || row.ended > since);
    const all = seen.filter((row) => row.ended === null), ended = seen.filter((row) => row.ended !== null);
    const wanted = Math.max(all.length, Math.min(seen.length, Math.floor(room / READABLE)));
    const height = HEIGHTS.find((each) => each * wanted <= room) ?? HEIGHTS.at(-1);
    const fit = Math.floor(room / height), live = all.slice(0, fit);
    const kept = [...ended.slice(Math.max(0, ended.length - (fit - live.length))), ...live];
    return { rows: kept.sort((a, b) => a.number - b.number), height, since };
  }

  draw(time) {
    const pen = this.canvas.getContext("2d"), { width, colours } = this;
    if (!width || !colours.text) return;
    const glide = this.still.matches ? 1 : 1 - Math.exp(-Math.min(200, time - (this.drawn ?? time)) / 90);
    this.drawn = time;
    const { rows, height, since } = this.layout();
    const now = this.now(), scale = width / (this.seconds * 1000);
    const x = (at) => Math.max(-4, (at - since) * scale);
    pen.clearRect(0, 0, width, this.height);
    this.axis(pen, scale);
    this.visible = rows;
    rows.forEach((row, index) => {
      const before = this.places.get(row.number), target = index * height;
      const y = before === undefined ? target : before + (target - before) * glide;
      this.places.set(row.number, Math.abs(target - y) < 0.3 ? target : y);
      this.lane(pen, row, x, y + 2, Math.max(1.5, height - (height > 6 ? 3 : 1)), now);
    });
    this.rowHeight = height;
  }

  axis(pen, scale) {
    const { width, height, colours, seconds } = this, step = seconds <= 10 ? 2 : seconds <= 30 ? 5 : seconds <= 120 ? 20 : 120;
    pen.font = "10px system-ui, sans-serif";
    pen.lineWidth = 1;
    for (let back = 0; back < seconds; back += step) {
      const x = Math.round(width - back * 1000 * scale) - 0.5;
      pen.strokeStyle = colours.grid;
      pen.beginPath();
      pen.moveTo(x, 0);
      pen.lineTo(x, height - AXIS);
      pen.stroke();
      pen.fillStyle = colours.muted;
      pen.textAlign = back ? "center" : "right";
      pen.fillText(back ? `−${ago(back * 1000)}` : "now", back ? x : x - 1, height - 4);
    }
  }

  lane(pen, row, x, y, height, now) {
    const { colours } = this, state = stateOf(row), middle = y + height / 2;
    const end = row.ended ?? now, started = row.started ?? end, first = row.first ?? end;
    if (row.number === this.chosen || (this.own !== null && row.id === this.own)) {
      pen.fillStyle = colours.track;
      pen.fillRect(0, y - 1.5, this.width, height + 3);
    }
    pen.globalAlpha = row.ended === null || row.number === this.chosen ? 1 : 0.55;
    const bar = (colour, from, to, thickness) => {
      if (to <= from) return;
      pen.fillStyle = colours[colour];
      pen.fillRect(x(from), middle - thickness / 2, Math.max(1, x(to) - x(from)), thickness);
    };
    bar("queued", row.arrived, started, Math.max(1, height * 0.3));
    bar("prefill", started, first, height);
    bar("decode", first, end, height);
    // The share of tokens that a draft proposed.
    if (row.accepted && row.output) bar("reused", first, first + ((end - first) * row.accepted) / row.output, height / 2);
    // It has images: a frame at its beginning.
    if (row.images) {
      pen.strokeStyle = colours.prefill;
      pen.strokeRect(x(row.arrived) + 0.5, y + 0.5, Math.max(3, height - 1), Math.max(2, height - 1));
    }
    pen.globalAlpha = 1;
    if (row.ended !== null) this.mark(pen, state, x(end), middle, height);
  }

  // How it ended: a bar, a cross, a diamond.
  mark(pen, state, x, y, height) {
    const size = Math.max(2, Math.min(5, height / 2));
    pen.fillStyle = pen.strokeStyle = this.colours[state];
    pen.beginPath();
    if (state === "finished") pen.fillRect(x, y - height / 2, 2.5, height);
    else if (state === "failed") {
      pen.moveTo(x, y - size); pen.lineTo(x + size, y); pen.lineTo(x, y + size); pen.lineTo(x - size, y);
      pen.fill();
    } else {
      pen.lineWidth = 2;
      pen.moveTo(x - size, y - size); pen.lineTo(x + size, y + size);
      pen.moveTo(x + size, y - size); pen.lineTo(x - size, y + size);
      pen.stroke();
    }
  }

  listen() {
    const at = (event) => {
      const top = event.clientY - this.box.getBoundingClientRect().top;
      return this.visible?.[Math.floor((top - 2) / this.rowHeight)]?.number ?? null;
    };
    this.box.addEventListener("pointermove", (event) => this.choose(at(event), event));
    this.box.addEventListener("pointerdown", (event) => this.choose(at(event), event));
    this.box.addEventListener("pointerleave", () => this.choose(null));
    this.box.addEventListener("blur", () => this.choose(null));
    this.box.addEventListener("keydown", (event) => {
      const rows = this.visible ?? [], index = rows.findIndex((row) => row.number === this.chosen), last = rows.length - 1;
      const moves = { ArrowDown: index + 1, ArrowUp: index < 0 ? last : index - 1, Home: 0, End: last };
      if (event.key === "Escape") this.choose(null);
      else if (event.key in moves && rows.length) {
        this.choose(rows[Math.max(0, Math.min(last, moves[event.key]))].number);
        this.said.textContent = this.text();
        event.preventDefault();
      }
    });
  }

  text() {
    const row = this.rows.find((each) => each.number === this.chosen);
    return row ? `Request ${row.id}. ${describe(row, this.now()).map((pair) => pair.join(" ")).join(", ")}` : "";
  }

  choose(number, event = null) {
    this.chosen = number;
    this.pointer = event && event.clientX - this.box.getBoundingClientRect().left;
    this.show();
    if (this.still.matches || this.paused) this.draw(performance.now());
  }

  show() {
    const row = this.rows.find((each) => each.number === this.chosen), { detail } = this;
    detail.hidden = !row;
    if (!row) return;
    const title = document.createElement("b"), list = document.createElement("dl");
    title.textContent = row.id;
    for (const [name, value] of describe(row, this.now())) {
      list.append(Object.assign(document.createElement("dt"), { textContent: name }));
      list.append(Object.assign(document.createElement("dd"), { textContent: value }));
    }
    detail.replaceChildren(title, list);
    const y = this.places.get(row.number) ?? 0, { offsetWidth, offsetHeight } = detail;
    const left = Math.max(4, Math.min(this.width - offsetWidth - 4, (this.pointer ?? this.width * 0.5) + 14));
    const below = y + this.rowHeight + 8;
    const top = below + offsetHeight < this.height ? below : Math.max(2, y - offsetHeight - 8);
    detail.style.left = `${left}px`;
    detail.style.top = `${top}px`;
  }
}
