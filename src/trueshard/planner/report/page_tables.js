"use strict";
// Everything beside the step: the head, alternatives, tables, reasons. Starts the page.

function table(columns, rows, options = {}) {
  let sorted = options.sort ?? null, falling = true;
  const body = element("tbody");
  const heads = columns.map((column, i) => {
    const label = options.sortable && column.value
      ? element("button", { type: "button", onclick: () => sortBy(i) }, column.head)
      : column.head;
    return element("th", { scope: "col", class: column.number ? "number" : "" }, label);
  });
  function sortBy(i) {
    falling = sorted === i ? !falling : Boolean(columns[i].number);
    sorted = i;
    fill();
  }
  function fill() {
    let shown = [...rows];
    if (sorted !== null) {
      const value = columns[sorted].value;
      const order = (a, b) => (typeof a === "number" ? a - b : String(a).localeCompare(String(b)));
      shown.sort((a, b) => order(value(a), value(b)) * (falling ? -1 : 1));
      heads.forEach((head, i) =>
        i === sorted ? head.setAttribute("aria-sort", falling ? "descending" : "ascending") : head.removeAttribute("aria-sort"));
    }
    shown = shown.slice(0, options.limit ?? shown.length);
    body.replaceChildren(...shown.map((row) =>
      element("tr", { class: options.mark?.(row) ?? "" }, ...columns.map((column) =>
        element("td", { class: column.number ? "number" : column.wide ? "wide" : "" }, ...[column.cell(row)].flat())))));
  }
  fill();
  return element("table", {}, element("thead", {}, element("tr", {}, ...heads)), body);
}

function head() {
  heading(data.settings, data.verdict[0].toUpperCase() + data.verdict.slice(1), data.fits);
  $("tiles").append(...data.tiles.map((tile) =>
    element("div", {}, element("dt", {}, tile.label), element("dd", { class: "value" }, tile.value), element("dd", {}, tile.note))));
  if (memory.changes > COUNT) {
    $("thinned").textContent =
      `Of ${number(memory.changes)} changes, ${number(COUNT)} are kept: the highest and the lowest of every stretch.`;
  }
  stepParts();
  const groups = [...new Set(data.lanes.flatMap((lane) => lane.groups))];
  $("lane-legend").append(
    element("span", { class: "label" }, "Streams"),
    element("div", {},
      ...groups.map((group) => element("span", {}, swatch(groupColour(group)), group.replace("_", "-"))),
      ...Object.keys(GAPS).filter((kind) => data.gaps.some(([each]) => each === kind))
        .map((kind) => element("span", {}, swatch(gapColour(kind)), GAPS[kind]))));
}

// The parts of a step add up to it.
function stepParts() {
  const colour = (part) => (part.gap ? gapColour(part.name) : groupColour(part.name));
  const step = data.seconds_of_step || 1;
  $("parts").append(...data.parts.map((part) =>
    element("i", { style: `background:${colour(part)};width:${(100 * part.seconds) / step}%` })));
  const row = (part) => element("span", {}, swatch(colour(part)), part.gap ? GAPS[part.name] : part.name.replace("_", "-"),
    element("b", {}, `${duration(part.seconds)}, ${number((100 * part.seconds) / step, 1)}%`));
  $("parts-legend").append(
    element("span", { class: "label" }, duration(step)), element("div", {}, ...data.parts.map(row)));
}

function aboutPlan(plan) {
  return [
    element("p", {}, element("b", {}, plan.words)),
    element("table", {}, ...[
      ["reserved", bytes(plan.peak_reserved_bytes)],
      [`${data.counted}/s a rank`, number(plan.tokens_per_second_per_rank)],
      ["step", duration(plan.step_seconds)],
      ["MFU", `${number(plan.mfu * 100, 1)}%`],
    ].map(([name, value]) => element("tr", {}, element("td", {}, name), element("td", {}, value)))),
    element("p", { class: "dim" }, plan.fits ? (plan.on_front ? "fits; on the Pareto front" : "fits") : "does not fit"),
  ];
}

// A range with room around its values; from 0 where that costs little.
function range(values, extra = []) {
  let low = Math.min(...values), high = Math.max(...values);
  const near = extra.filter((value) => value <= high * 1.3 && value >= low * 0.7);
  low = Math.min(low, ...near);
  high = Math.max(high, ...near);
  const room = (high - low || high || 1) * 0.1;
  return [low < 0.45 * high ? 0 : Math.max(0, low - room), high + room];
}

function scatter() {
  const plans = data.alternatives;
  $("alternatives").hidden = plans.length < 2;
  if (plans.length < 2) return;
  const box = $("scatter"), wide = Math.max(box.clientWidth, 280), high = Math.max(280, Math.min(420, wide * 0.4));
  const [left, right, top, foot] = [76, 16, 14, 50];
  const [x0, x1] = range(plans.map((plan) => plan.peak_reserved_bytes), [data.budget]);
  const [y0, y1] = range(plans.map((plan) => plan.tokens_per_second_per_rank));
  const x = (value) => left + ((value - x0) / (x1 - x0)) * (wide - left - right);
  const y = (value) => high - foot - ((value - y0) / (y1 - y0)) * (high - top - foot);
  const marks = [];
  const across = byteTicks(x0, x1, Math.max(3, Math.floor(wide / 130)));
  for (const value of across.values) {
    marks.push(element("line", { class: "grid", x1: x(value), x2: x(value), y1: top, y2: high - foot }));
    marks.push(element("text", { x: x(value), y: high - foot + 18, "text-anchor": "middle" }, across.word(value)));
  }
  const up = ticks(y0, y1, 5, [["", 1]], [1, 2, 2.5, 5]);
  for (const value of up.values) {
    marks.push(element("line", { class: "grid", x1: left, x2: wide - right, y1: y(value), y2: y(value) }));
    marks.push(element("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, up.word(value)));
  }
  marks.push(element("text", { x: (left + wide - right) / 2, y: high - 8, "text-anchor": "middle" }, `reserved memory of a rank (${across.unit})`));
  marks.push(element("text", { x: -(top + high - foot) / 2, y: 14, transform: "rotate(-90)", "text-anchor": "middle" }, `${data.counted} a second and rank`));
  if (data.budget >= x0 && data.budget <= x1) {
    const at = x(data.budget), tight = wide - right - at < 120;
    marks.push(element("rect", { class: "beyond", x: at, y: top, width: wide - right - at, height: high - top - foot }));
    marks.push(element("line", { class: "budget", x1: at, x2: at, y1: top, y2: high - foot }));
    marks.push(element("text", { class: "budget-words", x: tight ? at - 6 : at + 6, y: high - foot - 8, "text-anchor": tight ? "end" : "start" }, `budget ${bytes(data.budget)}`));
  }
  const front = plans.filter((plan) => plan.on_front).sort((a, b) => a.peak_reserved_bytes - b.peak_reserved_bytes);
  if (front.length) {
    let path = `M${x(front[0].peak_reserved_bytes)},${high - foot}V${y(front[0].tokens_per_second_per_rank)}`;
    for (const plan of front.slice(1)) path += `H${x(plan.peak_reserved_bytes)}V${y(plan.tokens_per_second_per_rank)}`;
    marks.push(element("path", { class: "front", d: `${path}H${x(Math.max(Math.min(x1, data.budget), front.at(-1).peak_reserved_bytes))}` }));
  }
  const order = [...plans].reverse().sort((a, b) => Number(a.on_front) - Number(b.on_front));
  for (const plan of order) marks.push(dot(plan, x(plan.peak_reserved_bytes), y(plan.tokens_per_second_per_rank), front.indexOf(plan) + 1));
  box.replaceChildren(element("svg", { viewBox: `0 0 ${wide} ${high}`, role: "group", "aria-label": "Plans by memory and speed" }, ...marks));
}

function dot(plan, x, y, rank) {
  const chosen = plan === data.alternatives[0];
  const kind = `${plan.fits ? "" : "unfit"} ${plan.on_front ? "front-dot" : ""} ${chosen ? "chosen" : ""}`;
  const show = () => {
    $("scatter-tip").replaceChildren(...aboutPlan(plan));
    place($("scatter-tip"), $("scatter-plot"), x, y);
  };
  const hide = () => ($("scatter-tip").hidden = true);
  const said = `${plan.words}: ${bytes(plan.peak_reserved_bytes)}, ${number(plan.tokens_per_second_per_rank)} ${data.counted} a second, ${plan.fits ? "fits" : "does not fit"}`;
  const circle = element("circle", {
    class: `dot ${kind}`, cx: x, cy: y, r: plan.on_front || chosen ? 7 : 5, tabindex: 0, role: "img", "aria-label": said,
    onpointerenter: show, onpointerleave: hide, onfocus: show, onblur: hide,
  });
  const label = element("text", { class: "chosen-words", x: x + 12, y: y + 4.5 }, "this plan");
  const count = element("text", { class: "number-words", x, y: y - 12 }, rank);
  return element("g", {}, circle, rank ? count : "", chosen ? label : "");
}

function frontTable() {
  const rows = data.alternatives.filter((plan) => plan.on_front).sort((a, b) => a.peak_reserved_bytes - b.peak_reserved_bytes);
  if (!data.alternatives[0].on_front) rows.push(data.alternatives[0]);
  $("front").append(table([
    { head: "", cell: (row) => (row.on_front ? `${rows.indexOf(row) + 1}` : "") },
    { head: "Plan", wide: true, cell: (row) => row.words },
    { head: "Reserved", number: true, cell: (row) => bytes(row.peak_reserved_bytes) },
    { head: `${data.counted[0].toUpperCase()}${data.counted.slice(1)}/s a rank`, number: true, cell: (row) => number(row.tokens_per_second_per_rank) },
    { head: "Step", number: true, cell: (row) => duration(row.step_seconds) },
    { head: "MFU", number: true, cell: (row) => `${number(row.mfu * 100, 1)}%` },
  ], rows, { mark: (row) => (row === data.alternatives[0] ? "chosen" : "") }));
}

// Memory and time over the imbalance of experts: two panels with one axis.
function imbalances() {
  const rows = data.imbalances;
  $("imbalances-section").hidden = !rows.length;
  if (!rows.length) return;
  const box = $("imbalances-plot"), wide = Math.max(box.clientWidth, 280), high = 230;
  const [left, gap, right, top, foot] = [76, 88, 16, 26, 44];
  const panel = (wide - left - gap - right) / 2;
  const end = Math.max(...rows.map((row) => row.imbalance));
  const panels = [
    ["reserved memory of a rank", "peak_reserved_bytes", [data.budget], (low, most) => byteTicks(low, most, 4)],
    ["time of a step", "step_seconds", [], (low, most) => timeTicks(low, most, 4)],
  ];
  const marks = panels.flatMap(([title, key, extra, scale], i) => {
    const from = left + i * (panel + gap);
    const [low, most] = range(rows.map((row) => row[key]), extra);
    const x = (value) => from + ((value - 1) / (end - 1 || 1)) * panel;
    const y = (value) => high - foot - ((value - low) / (most - low)) * (high - top - foot);
    const up = scale(low, most);
    const drawn = up.values.flatMap((value) => [
      element("line", { class: "grid", x1: from, x2: from + panel, y1: y(value), y2: y(value) }),
      element("text", { x: from - 8, y: y(value) + 4, "text-anchor": "end" }, up.word(value)),
    ]);
    drawn.push(element("text", { x: from, y: 14 }, `${title} (${up.unit})`));
    if (extra[0] >= low && extra[0] <= most) {
      drawn.push(element("line", { class: "budget", x1: from, x2: from + panel, y1: y(extra[0]), y2: y(extra[0]) }));
      drawn.push(element("text", { class: "budget-words", x: from + panel, y: y(extra[0]) - 6, "text-anchor": "end" }, `budget ${bytes(extra[0])}`));
    }
    for (const value of ticks(1, end, 5, [["", 1]], [1, 2, 5]).values) {
      drawn.push(element("text", { x: x(value), y: high - foot + 18, "text-anchor": "middle" }, number(value)));
    }
    drawn.push(element("text", { x: from + panel / 2, y: high - 6, "text-anchor": "middle" }, "imbalance"));
    drawn.push(element("path", { class: "front", d: rows.map((row, at) => `${at ? "L" : "M"}${x(row.imbalance)},${y(row[key])}`).join("") }));
    for (const row of rows) {
      drawn.push(element("circle", { class: `dot front-dot ${row.fits ? "" : "unfit"}`, cx: x(row.imbalance), cy: y(row[key]), r: 5 }));
    }
    return drawn;
  });
  box.replaceChildren(element("svg", { viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": "Memory and time by imbalance, as in the table below" }, ...marks));
}

function imbalanceTable() {
  $("imbalances").append(table([
    { head: "Imbalance", number: true, cell: (row) => number(row.imbalance, 2) },
    { head: "Live", number: true, cell: (row) => bytes(row.peak_live_bytes) },
    { head: "Reserved", number: true, cell: (row) => bytes(row.peak_reserved_bytes) },
    { head: "Step", number: true, cell: (row) => duration(row.step_seconds) },
    { head: "", cell: (row) => (row.fits ? "" : "does not fit") },
  ], data.imbalances));
}

function phaseTable() {
  $("phases-of-step").hidden = !data.steps.length;
  $("phases-title").textContent = data.steps_title;
  const main = data.steps.some((row) => row.name === "update") ? "update" : "step";
  $("phases-note").textContent = `All else on this page is the ${main}.`;
  $("phases").append(table([
    { head: "Phase", cell: (row) => row.name },
    { head: "Live", number: true, cell: (row) => row.live },
    { head: "Time", number: true, cell: (row) => row.time },
    { head: "Of the time", number: true, cell: (row) => row.share },
    { head: "Takes", wide: true, cell: (row) => row.needs },
  ], data.steps));
}

function tables() {
  const most = Math.max(...data.tensors.map((row) => row.bytes * row.count), 1);
  const meter = (row) => element("i", {
    class: "meter", style: `background:${kindColour(row.kind)};width:${(100 * row.bytes * row.count) / most}%`, "aria-hidden": "true",
  });
  $("tensors").append(table([
    { head: "Tensor", wide: true, cell: (row) => row.what, value: (row) => row.what },
    { head: "Unit", wide: true, cell: (row) => row.unit, value: (row) => row.unit },
    { head: "Each", number: true, cell: (row) => bytes(row.bytes), value: (row) => row.bytes },
    { head: "Count", number: true, cell: (row) => number(row.count), value: (row) => row.count },
    { head: "Together", number: true, cell: (row) => [bytes(row.bytes * row.count), meter(row)], value: (row) => row.bytes * row.count },
    { head: "Kind", cell: (row) => [swatch(kindColour(row.kind)), row.kind], value: (row) => KINDS.indexOf(row.kind) },
    { head: "Shape", cell: (row) => row.shape },
    { head: "Dtype", cell: (row) => row.dtype },
  ], data.tensors, { sortable: true, sort: 2, limit: 25 }));
  $("units").append(table([
    { head: "Unit", cell: (row) => (row.count > 1 ? `${row.name} ×${row.count}` : row.name) },
    { head: "Parameters", number: true, cell: (row) => number(row.parameters) },
    { head: "Trainable", number: true, cell: (row) => (row.trainable === row.parameters ? "all" : number(row.trainable)) },
    { head: "Size", number: true, cell: (row) => bytes(row.bytes) },
    { head: "Dtype", cell: (row) => row.dtype },
    { head: "Reshard", cell: (row) => row.reshard },
    { head: "Recompute", cell: (row) => row.recompute },
    { head: "At the peak", number: true, cell: (row) => bytes(row.at_peak) },
    { head: "Received", number: true, cell: (row) => bytes(row.received) },
    { head: "Why it is a unit", wide: true, cell: (row) => row.why },
  ], data.units));
}

function lists() {
  for (const name of ["reasons", "assumptions", "failures"]) {
    $(name).append(...data[name].map((sentence) => element("li", {}, sentence)));
    $(name).parentElement.hidden = !data[name].length;
  }
  $("why").hidden = !data.reasons.length && !data.assumptions.length && !data.failures.length;
}

document.querySelector("main").hidden = false;
head();
legend();
frontTable();
imbalanceTable();
phaseTable();
sliders();
tables();
lists();
const redraw = () => (draw(), scatter(), imbalances());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
let drawnAt = 0;
new ResizeObserver(() => {
  if (width() !== drawnAt) {
    drawnAt = width();
    redraw();
  }
}).observe(plot);
redraw();
