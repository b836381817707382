"use strict";
// The page around the diagrams: runs, controls, pointer and keys. Starts it.

const HALVES = [0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000];
const floats = (values) => Float64Array.from(values, (value) => (value === null ? NaN : value));

data.runs.forEach((run, i) => {
  run.colour = `var(--run-${i % 8})`;
  run.dash = i < 8 ? [] : [7, 4];
  for (const curve of Object.values(run.curves)) {
    for (const key of ["step", "tokens", "mean", "low", "high", "count"]) if (curve[key]) curve[key] = floats(curve[key]);
  }
});
const charts = data.panels.map((panel, i) => new Chart(panel, i === 0));

function whole() {
  const curves = data.runs.filter((run) => !view.off.has(run)).flatMap((run) => Object.values(run.curves));
  const from = Math.min(...curves.map((curve) => curve[view.x][0]), Infinity);
  const to = Math.max(...curves.map((curve) => curve[view.x].at(-1)), -Infinity);
  return from < to ? [from, to] : from === to ? [from - 1, to + 1] : [0, 1];
}

let asked = false;
function redraw() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => {
    asked = false;
    if (view.whole) [view.from, view.to] = whole();
    $("zoom-all").disabled = view.whole;
    for (const chart of charts) chart.draw();
  });
}

function zoom(from, to) {
  const [first, last] = whole();
  const wide = Math.max(to - from, (last - first) / 2000, view.x === "step" ? 1 : 1e-9);
  view.whole = wide >= last - first;
  if (!view.whole) {
    view.from = Math.max(first, Math.min(from, last - wide));
    view.to = view.from + wide;
  }
  redraw();
}

const unzoom = () => ((view.whole = true), redraw());
const scaleBy = (factor) => {
  const around = view.cursor ?? (view.from + view.to) / 2;
  zoom(around - (around - view.from) * factor, around + (view.to - around) * factor);
};

function hide() {
  view.cursor = null;
  for (const chart of charts) chart.tip.hidden = true;
  redraw();
}

function move(chart, place) {
  view.cursor = Math.max(view.from, Math.min(view.to, place));
  chart.show(chart.high / 2);
  $("say").textContent = [...chart.tip.querySelectorAll("p, tr")].map((each) => each.textContent).join("; ");
  redraw();
}

function keys(chart, event) {
  const start = view.cursor ?? (view.from + view.to) / 2, one = (view.to - view.from) / (event.shiftKey ? 10 : 100);
  const hop = Math.max(one, view.x === "step" ? 1 : 0);
  const done = {
    ArrowRight: () => move(chart, start + hop), ArrowLeft: () => move(chart, start - hop),
    "+": () => scaleBy(0.5), "=": () => scaleBy(0.5), "-": () => scaleBy(2), "0": unzoom, Escape: hide,
  }[event.key];
  if (!done || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  done();
}

function listen(chart) {
  const { canvas } = chart;
  const where = (event) => {
    const box = canvas.getBoundingClientRect();
    return [Math.max(GUTTER, Math.min(event.clientX - box.left, chart.wide - RIGHT)), event.clientY - box.top];
  };
  canvas.addEventListener("keydown", (event) => keys(chart, event));
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = where(event);
    view.cursor = chart.at(x);
    if (view.drag) view.drag.to = view.cursor;
    for (const other of charts) if (other !== chart) other.tip.hidden = true;
    chart.show(y);
    redraw();
  });
  canvas.addEventListener("pointerdown", (event) => {
    if (event.pointerType !== "mouse" || event.button !== 0) return;
    const at = chart.at(where(event)[0]);
    view.drag = { from: at, to: at };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => {
    const drag = view.drag;
    view.drag = null;
    if (!drag) return;
    if (Math.abs(chart.xOf(drag.to) - chart.xOf(drag.from)) > 5) zoom(Math.min(drag.from, drag.to), Math.max(drag.from, drag.to));
    else redraw();
  });
  canvas.addEventListener("pointercancel", () => ((view.drag = null), hide()));
  canvas.addEventListener("pointerleave", () => !view.drag && hide());
  canvas.addEventListener("blur", hide);
  canvas.addEventListener("dblclick", unzoom);
}

// Head, key, words, what it is.
const COLUMNS = [
  ["Steps", "steps", number],
  ["Tokens", "tokens", compact, "that the model has read"],
  ["Reward", "reward", (value) => number(value, 3), "mean of the last 20 steps"],
  ["Best evaluation", "best_evaluation_reward", (value) => number(value, 3), "largest reward of an evaluation"],
  ["Loss", "loss", (value) => number(value, 4), "mean of the last 20 steps"],
  ["Best evaluation", "best_evaluation_loss", (value) => number(value, 4), "smallest loss of an evaluation"],
  ["Tokens/s", "rate", compact, "median of the steps"],
  ["MFU", "mfu", (value) => `${number(value * 100, 1)}%`, "median of the steps"],
  ["Memory", "memory", bytes, "the most that the fullest rank had"],
  ["Time", "seconds", clock, "spent in steps, without evaluations and checkpoints"],
];

function runsTable() {
  const given = (value) => value !== null && value !== undefined;
  const columns = COLUMNS.filter(([, key]) => data.runs.some((run) => given(run[key])));
  const rows = data.runs.map((run) => {
    const toggle = element("input", { type: "checkbox", checked: "", onchange: () => {
      view.off[toggle.checked ? "delete" : "add"](run);
      row.className = toggle.checked ? "" : "off";
      redraw();
    } });
    const only = (which) => () => ((view.only = which), redraw());
    const row = element("tr", { onpointerenter: only(run), onpointerleave: only(null) },
      element("td", {}, element("label", {}, data.runs.length > 1 ? toggle : "", lineOf(run), run.name)),
      ...columns.map(([, key, words]) => element("td", { class: "number" }, given(run[key]) ? words(run[key]) : "")));
    return row;
  });
  const heads = columns.map(([head, , , what]) => element("th", { scope: "col", class: "number", title: what }, head));
  $("runs").append(element("table", {},
    element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "Run"), ...heads)), element("tbody", {}, ...rows)));
}

function clock(seconds) {
  if (seconds < 60) return duration(seconds);
  const whole = Math.round(seconds), pad = (value) => String(value).padStart(2, "0");
  return `${Math.floor(whole / 3600)}:${pad(Math.floor(whole / 60) % 60)}:${pad(whole % 60)}`;
}

function controls() {
  const half = $("half-life");
  half.max = HALVES.length - 1;
  half.value = HALVES.indexOf(data.half_life);
  const smoothBy = () => {
    view.half = HALVES[half.value];
    $("half-life-words").textContent = view.half ? `half-life ${number(view.half)} step${view.half > 1 ? "s" : ""}` : "none";
    redraw();
  };
  half.addEventListener("input", smoothBy);
  smoothBy();
  for (const radio of document.getElementsByName("x")) {
    radio.addEventListener("change", () => {
      [view.x, view.whole] = [radio.value, true];
      hide();
    });
  }
  for (const radio of document.getElementsByName("scale")) {
    radio.addEventListener("change", () => ((view.scale = radio.value), redraw()));
  }
  $("across").hidden = !data.tokens;
  $("zoom-all").onclick = unzoom;
}

document.querySelector("main").hidden = false;
heading(`drawn ${data.drawn}`);
const most = Math.max(...data.runs.flatMap((run) => Object.values(run.curves).flatMap((curve) => (curve.count ? [...curve.count] : [1]))));
if (most > 1) $("thinned").textContent = `A point stands for up to ${number(most)} steps: their mean, with the lowest and the highest around it.`;
$("panels").append(...charts.map((chart) => chart.section));
runsTable();
controls();
charts.forEach(listen);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
new ResizeObserver(redraw).observe($("panels"));
redraw();
