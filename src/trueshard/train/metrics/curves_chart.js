"use strict";
// One diagram on its canvas: axes, curves, and what lies under a point. All diagrams share what is shown: `view`.

const GUTTER = 72, RIGHT = 14, HEAD = 10, FOOT = 26, FEW = 40;
const view = { x: "step", scale: "linear", half: 0, from: 0, to: 1, whole: true, cursor: null, only: null, off: new Set(), drag: null };

const trimmed = (value, digits = 6) => String(Number(value.toPrecision(digits)));

function compact(value, digits = 4) {
  const size = Math.abs(value);
  if (size && size < 1e-3) return Number(value.toPrecision(digits)).toExponential().replace("-", "−");
  for (const [word, factor] of [["B", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (size >= factor * (word === "k" ? 10 : 1)) return `${trimmed(value / factor, digits)}${word}`;
  }
  return trimmed(value, digits);
}

const WORDS = { bytes, count: (value) => compact(value), signed: (value) => trimmed(value, 4), part: (value) => `${trimmed(value * 100, 4)}%`, rate: (value) => compact(value), nats: (value) => trimmed(value, 5) };
const exponential = (value) => (value ? Number(value.toPrecision(4)).toExponential().replace("-", "−") : "0");

// The index of the point nearest to a place across.
function nearestAt(across, place) {
  let low = 0, high = across.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (across[middle] < place) low = middle + 1;
    else high = middle;
  }
  return low > 0 && place - across[low - 1] < across[low] - place ? low - 1 : low;
}

// The mean of the points around each, of which one that lies half a life of steps away counts half; near the beginning
// that is a tenth of the steps so far, so that the line keeps to a steep fall. Points that are no number stay so.
function smooth(curve, half) {
  const { step, mean, count } = curve, length = mean.length;
  const weight = mean.map((value, i) => (Number.isNaN(value) ? 0 : count ? count[i] : 1));
  const sum = mean.map((value, i) => (weight[i] ? value * weight[i] : 0));
  const decay = step.map((at, i) => (i ? 0.5 ** ((at - step[i - 1]) / Math.min(half, Math.max(at - step[0], 1) / 10)) : 1));
  const around = (values) => {
    const found = new Float64Array(length);
    for (let i = 0, total = 0; i < length; i++) found[i] = total = total * decay[i] + values[i];
    for (let i = length - 2, total = values[length - 1]; i >= 0; i--) {
      total *= decay[i + 1];
      found[i] += total;
      total += values[i];
    }
    return found;
  };
  const weights = around(weight);
  return around(sum).map((value, i) => (Number.isNaN(mean[i]) ? NaN : value / weights[i]));
}

class Chart {
  constructor(panel, first) {
    this.panel = panel;
    this.high = first ? 380 : 230;
    this.words = panel.key === "lr" ? exponential : WORDS[panel.unit] ?? compact;
    this.mayBeLog = panel.unit === "nats" || panel.unit === "";
    const unit = panel.unit === "nats" ? element("small", {}, "nats a token") : "";
    const note = panel.note ? element("small", {}, panel.note) : "";
    this.canvas = element("canvas", { id: panel.key, tabindex: 0, role: "application", "aria-labelledby": `${panel.key}-title` });
    this.tip = element("div", { class: "tip", hidden: "" });
    this.plot = element("div", { class: "plot" }, this.canvas, this.tip);
    this.section = element("section", { class: first ? "first" : "", "aria-labelledby": `${panel.key}-title` },
      element("h2", { id: `${panel.key}-title` }, panel.title, unit, note), this.plot);
    this.pen = this.canvas.getContext("2d");
  }

  get wide() { return this.plot.clientWidth; }
  get inner() { return this.wide - GUTTER - RIGHT; }
  get log() { return this.panel.log || (this.mayBeLog && view.scale === "log" && this.panel.key !== "lr"); }
  xOf(value) { return GUTTER + ((value - view.from) / (view.to - view.from)) * this.inner; }
  at(x) { return view.from + ((x - GUTTER) / this.inner) * (view.to - view.from); }
  yOf(value) {
    const part = this.log
      ? (Math.log(value) - Math.log(this.low)) / (Math.log(this.top) - Math.log(this.low))
      : (value - this.low) / (this.top - this.low);
    return HEAD + (this.high - HEAD - FOOT) * (1 - part);
  }

  // [run, curve] of what is drawn, the highlighted one last.
  drawn() {
    const found = data.runs.filter((run) => !view.off.has(run.name) && run.curves[this.panel.key]);
    return found.sort((a, b) => (a.name === view.only) - (b.name === view.only)).map((run) => [run, run.curves[this.panel.key]]);
  }

  // [run, curve, index] of the points nearest to the cursor, of the curves that reach there.
  under() {
    const near = (8 / this.inner) * (view.to - view.from);
    const found = this.drawn().map(([run, curve]) => [run, curve, nearestAt(curve[view.x], view.cursor)]);
    return found.filter(([, { [view.x]: across }]) => view.cursor >= across[0] - near && view.cursor <= across.at(-1) + near);
  }

  smoothed(curve) {
    if (!this.panel.noisy || !view.half) return curve.mean;
    if (curve.half !== view.half) [curve.half, curve.smooth] = [view.half, smooth(curve, view.half)];
    return curve.smooth;
  }

  // [low, high] around the smoothed line of a run, and the band's curve; null without a band.
  around(run, curve) {
    const half = run.curves[this.panel.band];
    if (!half) return null;
    const line = this.smoothed(curve), width = this.smoothed(half);
    const middle = half.step === curve.step ? line : Float64Array.from(half.step, (step) => line[nearestAt(curve.step, step)]);
    return { ...half, low: middle.map((value, i) => value - width[i]), high: middle.map((value, i) => value + width[i]) };
  }

  // The range of values: of the lines that are drawn strong, and of all but the rarest of the faint ones.
  measure() {
    const strong = [], faint = [];
    for (const [run, curve] of this.drawn()) {
      const line = this.smoothed(curve), across = curve[view.x];
      for (let i = 0; i < line.length; i++) {
        if (across[i] < view.from || across[i] > view.to || Number.isNaN(line[i])) continue;
        strong.push(line[i]);
        faint.push(curve.mean[i]);
      }
      const dashed = run.curves[this.panel.dashed], band = this.around(run, curve);
      const seen = ({ [view.x]: there }, values) => values.filter((_, i) => there[i] >= view.from && there[i] <= view.to);
      if (dashed) strong.push(...seen(dashed, this.smoothed(dashed)));
      if (band) strong.push(...seen(band, band.low), ...seen(band, band.high));
    }
    const known = (values) => values.filter((value) => !Number.isNaN(value) && (!this.log || value > 0));
    const most = known(strong), rest = known(faint).sort((a, b) => a - b);
    let low = Math.min(...most, rest[Math.floor(rest.length * 0.01)] ?? Infinity);
    let top = Math.max(...most, rest[Math.floor(rest.length * 0.99)] ?? -Infinity);
    if (low > top) [low, top] = [this.log ? 0.1 : 0, 1];
    if (this.log) {
      const room = Math.max((top / low) ** 0.06, 1.02);
      [this.low, this.top] = [low / room, top * room];
    } else {
      const zero = ["bytes", "part", "rate", "count"].includes(this.panel.unit) || this.panel.key === "lr";
      const room = (top - low || Math.abs(top) || 1) * 0.06;
      [this.low, this.top] = [zero && low >= 0 ? 0 : low - room, top + (zero ? top * 0.06 || room : room)];
    }
  }

  draw() {
    const ratio = window.devicePixelRatio || 1, pen = this.pen;
    this.canvas.style.height = `${this.high}px`;
    this.canvas.width = Math.round(this.wide * ratio);
    this.canvas.height = Math.round(this.high * ratio);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.font = "12px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
    pen.textBaseline = "middle";
    this.measure();
    this.axes();
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER - 4, HEAD - 6, this.inner + 8, this.high - HEAD - FOOT + 12);
    pen.clip();
    for (const [run, curve] of this.drawn()) {
      if (view.x === "step") this.incidents(run);
      this.curve(run, curve);
    }
    this.marks();
    pen.restore();
  }

  axes() {
    const pen = this.pen, below = this.high - FOOT, soft = themed("--soft");
    pen.strokeStyle = themed("--grid");
    pen.fillStyle = soft;
    pen.lineWidth = 1;
    const stroke = (x1, y1, x2, y2) => (pen.beginPath(), pen.moveTo(x1, y1), pen.lineTo(x2, y2), pen.stroke());
    pen.textAlign = "right";
    for (const value of this.marksUp()) {
      const y = Math.round(this.yOf(value)) + 0.5;
      stroke(GUTTER, y, this.wide - RIGHT, y);
      pen.fillText(this.words(value), GUTTER - 8, y);
    }
    const across = ticks(view.from, view.to, Math.max(2, Math.floor(this.inner / 100)), [["", 1]], [1, 2, 5]).values;
    for (const value of across) {
      if (view.x === "step" && value % 1) continue;
      const x = Math.round(this.xOf(value)) + 0.5, edge = x > this.wide - RIGHT - 16;
      stroke(x, HEAD, x, below + 4);
      pen.textAlign = edge ? "right" : "center";
      pen.fillText(compact(value), edge ? this.wide - RIGHT : x, below + 15);
    }
  }

  marksUp() {
    const count = Math.max(3, Math.floor(this.high / 55));
    if (!this.log) {
      if (this.panel.unit === "bytes") return byteTicks(this.low, this.top, count).values;
      return ticks(this.low, this.top, count, [["", 1]], [1, 2, 2.5, 5]).values;
    }
    const decades = Math.log10(this.top / this.low);
    if (decades < 0.7) return ticks(this.low, this.top, count, [["", 1]], [1, 2, 2.5, 5]).values;
    const digits = decades > 4 ? [1] : decades > 2 ? [1, 3] : decades > 1.3 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 7];
    const found = [];
    for (let power = Math.floor(Math.log10(this.low)); power <= Math.log10(this.top); power++) {
      found.push(...digits.map((digit) => digit * 10 ** power).filter((value) => value >= this.low && value <= this.top));
    }
    return found;
  }

  // A dotted line at each step before which a process of the run was lost, or that was taken again.
  incidents(run) {
    const pen = this.pen;
    pen.strokeStyle = solid(run.colour);
    pen.lineWidth = 1;
    pen.setLineDash([2, 3]);
    for (const [step] of run.incidents) {
      pen.beginPath();
      pen.moveTo(this.xOf(step), HEAD);
      pen.lineTo(this.xOf(step), this.high - FOOT);
      pen.stroke();
    }
    pen.setLineDash([]);
  }

  curve(run, curve) {
    const pen = this.pen, line = this.smoothed(curve), dim = view.only && view.only !== run.name ? 0.18 : 1;
    pen.strokeStyle = pen.fillStyle = solid(run.colour);
    pen.lineJoin = "round";
    const around = this.around(run, curve);
    if (around) {
      pen.globalAlpha = 0.15 * dim;
      this.fill(around);
    }
    if (line !== curve.mean) {
      if (curve.low && !around) {
        pen.globalAlpha = 0.13 * dim;
        this.band(curve);
      }
      pen.globalAlpha = 0.32 * dim;
      pen.lineWidth = 1;
      this.path(curve, curve.mean);
    }
    pen.globalAlpha = dim;
    pen.lineWidth = 2;
    pen.setLineDash(run.dash);
    const points = this.path(curve, line);
    pen.setLineDash([]);
    if (points.length <= FEW && line === curve.mean) for (const point of points) this.dot(...point, 3);
    const dashed = run.curves[this.panel.dashed];
    if (dashed) {
      pen.setLineDash([5, 4]);
      pen.lineWidth = 1.5;
      this.path(dashed, this.smoothed(dashed));
      pen.setLineDash([]);
    }
    pen.globalAlpha = 1;
  }

  // Draw a line through values; what is no number is a gap. Returns the points that can be seen.
  path(curve, values) {
    const pen = this.pen, across = curve[view.x], seen = [];
    let open = false;
    pen.beginPath();
    for (let i = 0; i < values.length; i++) {
      if (Number.isNaN(values[i]) || (this.log && values[i] <= 0)) {
        open = false;
        continue;
      }
      const x = this.xOf(across[i]), y = this.yOf(values[i]);
      if (open) pen.lineTo(x, y);
      else pen.moveTo(x, y);
      open = true;
      if (across[i] >= view.from && across[i] <= view.to) seen.push([x, y]);
    }
    pen.stroke();
    return seen;
  }

  band(curve) {
    const pen = this.pen, across = curve[view.x];
    const least = this.log ? this.low : -Infinity;
    for (let i = 1; i < across.length; i++) {
      if (Number.isNaN(curve.low[i]) || across[i] < view.from || across[i - 1] > view.to) continue;
      const x = this.xOf(across[i - 1]), y = this.yOf(Math.max(curve.high[i], least));
      pen.fillRect(x, y, this.xOf(across[i]) - x, this.yOf(Math.max(curve.low[i], least)) - y);
    }
  }

  fill(curve) {
    const pen = this.pen, across = curve[view.x];
    const known = [...across.keys()].filter((i) => !Number.isNaN(curve.low[i] + curve.high[i]));
    pen.beginPath();
    for (const i of known) pen.lineTo(this.xOf(across[i]), this.yOf(curve.high[i]));
    for (const i of known.reverse()) pen.lineTo(this.xOf(across[i]), this.yOf(curve.low[i]));
    pen.fill();
  }

  dot(x, y, size) {
    this.pen.beginPath();
    this.pen.arc(x, y, size, 0, 7);
    this.pen.fill();
  }

  marks() {
    const pen = this.pen;
    if (view.drag) {
      const [a, b] = [this.xOf(view.drag.from), this.xOf(view.drag.to)];
      pen.globalAlpha = 0.16;
      pen.fillStyle = solid("var(--accent)");
      pen.fillRect(Math.min(a, b), HEAD, Math.abs(b - a), this.high - HEAD - FOOT);
      pen.globalAlpha = 1;
    }
    if (view.cursor === null) return;
    const x = Math.round(this.xOf(view.cursor)) + 0.5;
    pen.strokeStyle = themed("--faint");
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(x, HEAD);
    pen.lineTo(x, this.high - FOOT);
    pen.stroke();
    for (const [run, curve, i] of this.under()) {
      const value = this.smoothed(curve)[i];
      if (Number.isNaN(value) || (this.log && value <= 0)) continue;
      pen.fillStyle = themed("--card");
      this.dot(this.xOf(curve[view.x][i]), this.yOf(value), 5);
      pen.fillStyle = solid(run.colour);
      this.dot(this.xOf(curve[view.x][i]), this.yOf(value), 3.5);
    }
  }

  // What is said of the place under the cursor: a row a run, the highest value first.
  rows() {
    const found = this.under().map(([run, curve, i]) => {
      const line = this.smoothed(curve);
      const also = (key) => (run.curves[key] ? this.smoothed(run.curves[key])[nearestAt(run.curves[key].step, curve.step[i])] : NaN);
      return {
        run, step: curve.step[i], tokens: curve.tokens[i], value: line[i], raw: line === curve.mean ? null : curve.mean[i],
        dashed: also(this.panel.dashed), half: also(this.panel.band),
      };
    });
    return found.sort((a, b) => (Number.isNaN(b.value) ? -1 : b.value) - (Number.isNaN(a.value) ? -1 : a.value));
  }

  show(y) {
    const rows = this.rows();
    if (!rows.length) return (this.tip.hidden = true);
    const say = (value) => (Number.isNaN(value) ? "not finite" : this.words(value));
    const [{ step, tokens }] = rows, same = rows.every((row) => row.step === step);
    const more = same && !Number.isNaN(tokens) ? element("span", { class: "dim" }, ` · ${compact(tokens, 4)} tokens`) : "";
    const place_words = view.x === "step" ? `step ${number(Math.round(view.cursor))}` : `${compact(Math.round(view.cursor))} tokens`;
    const head = same ? `step ${number(step)}` : place_words;
    this.tip.replaceChildren(
      element("p", {}, element("b", {}, head), more),
      element("table", {}, ...rows.map((row) => element("tr", {},
        element("td", {}, lineOf(row.run), data.runs.length > 1 ? row.run.name : this.panel.title),
        element("td", {}, element("b", {}, say(row.value)), Number.isNaN(row.half) ? "" : ` ± ${say(row.half)}`),
        Number.isNaN(row.dashed) ? "" : element("td", { class: "faint" }, `${this.panel.dashed_name} ${say(row.dashed)}`),
        this.panel.noisy && view.half ? element("td", { class: "faint" }, row.raw === null ? "" : say(row.raw)) : "",
        same ? "" : element("td", { class: "faint" }, `at ${number(row.step)}`)))));
    place(this.tip, this.plot, this.xOf(view.cursor), y);
  }
}

const lineOf = (run) => element("i", { class: "line", style: `border-color:${run.colour};border-top-style:${run.dash.length ? "dashed" : "solid"}`, "aria-hidden": "true" });
