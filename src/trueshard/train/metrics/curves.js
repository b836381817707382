"use strict";
// The page around the diagrams: runs, controls, pointer and keys. Starts it.

const HALVES = [0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000];
const floats = (values) => Float64Array.from(values, (value) => (value === null ? NaN : value));

const charts = [];

// Take over figures that have come: those of the page or, while runs go on, newer ones.
function arrive() {
  data.runs.forEach((run, i) => {
    run.colour = `var(--run-${i % 8})`;
    run.dash = i < 8 ? [] : [7, 4];
    for (const curve of Object.values(run.curves)) {
      for (const key of ["step", "tokens", "mean", "low", "high", "count"]) if (curve[key]) curve[key] = floats(curve[key]);
    }
  });
  if (charts.map((chart) => JSON.stringify(chart.panel)).join() !== data.panels.map((panel) => JSON.stringify(panel)).join()) {
    charts.splice(0, charts.length, ...data.panels.map((panel, i) => new Chart(panel, i === 0)));
    $("panels").replaceChildren(...charts.map((chart) => chart.section));
    charts.forEach(listen);
  }
  const most = data.runs.flatMap((run) => Object.values(run.curves)).reduce((top, { count }) => Math.max(top, ...(count ?? [])), 1);
  $("thinned").textContent = most > 1 ? `A point stands for up to ${number(most)} steps: their mean, with the lowest and the highest around it.` : "";
  $("across").hidden = !data.tokens;
  runsTable();
  if (!view.chosen) smoothBy(data.half_life);
  redraw();
}

function whole() {
  const curves = data.runs.filter((run) => !view.off.has(run.name)).flatMap((run) => Object.values(run.curves));
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
  ["State", "now", String],
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
  for (const run of data.runs) if (run.state) run.now = run.at ? `${run.state}, last step ${ago(run.at)} ago` : run.state;
  const given = (value) => value !== null && value !== undefined;
  const columns = COLUMNS.filter(([, key]) => data.runs.some((run) => given(run[key])));
  const rows = data.runs.map((run) => {
    const toggle = element("input", { type: "checkbox", onchange: () => {
      view.off[toggle.checked ? "delete" : "add"](run.name);
      row.className = toggle.checked ? "" : "off";
      redraw();
    } });
    toggle.checked = !view.off.has(run.name);
    const only = (which) => () => ((view.only = which), redraw());
    const row = element("tr", { class: toggle.checked ? "" : "off", onpointerenter: only(run.name), onpointerleave: only(null) },
      element("td", {}, element("label", {}, data.runs.length > 1 ? toggle : "", lineOf(run), run.name)),
      ...columns.map(([, key, words]) => element("td", { class: "number" }, given(run[key]) ? words(run[key]) : "")));
    return row;
  });
  const focused = [...$("runs").querySelectorAll("input")].indexOf(document.activeElement);
  const heads = columns.map(([head, , , what]) => element("th", { scope: "col", class: "number", title: what }, head));
  $("runs").replaceChildren(element("table", {},
    element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "Run"), ...heads)), element("tbody", {}, ...rows)));
  if (focused >= 0) $("runs").querySelectorAll("input")[focused].focus();
}

function clock(seconds) {
  if (seconds < 60) return duration(seconds);
  const whole = Math.round(seconds), pad = (value) => String(value).padStart(2, "0");
  return `${Math.floor(whole / 3600)}:${pad(Math.floor(whole / 60) % 60)}:${pad(whole % 60)}`;
}

function smoothBy(steps) {
  view.half = steps;
  $("half-life").value = HALVES.indexOf(steps);
  $("half-life-words").textContent = steps ? `half-life ${number(steps)} step${steps > 1 ? "s" : ""}` : "none";
  redraw();
}

function controls() {
  const half = $("half-life");
  half.max = HALVES.length - 1;
  half.addEventListener("input", () => ((view.chosen = true), smoothBy(HALVES[half.value])));
  for (const radio of document.getElementsByName("x")) {
    radio.addEventListener("change", () => {
      [view.x, view.whole] = [radio.value, true];
      hide();
    });
  }
  for (const radio of document.getElementsByName("scale")) {
    radio.addEventListener("change", () => ((view.scale = radio.value), redraw()));
  }
  $("zoom-all").onclick = unzoom;
}

function ago(at) {
  const seconds = Math.max(1, Math.round(Date.now() / 1000 - at));
  return seconds < 60 ? `${seconds} s` : clock(seconds);
}

// What a page that is served has beyond curves: incidents, answers and the log of each run.
function logs() {
  $("live").hidden = !data.live;
  if ($("logs").childElementCount !== data.runs.length) {
    $("logs").replaceChildren(...data.runs.map((run) => element("details", { open: data.runs.length === 1 ? "" : null },
      element("summary", {}, lineOf(run), " ", run.name), element("p"), element("pre", { tabindex: 0 }))));
  }
  data.runs.forEach((run, i) => {
    const [, said, log] = $("logs").children[i].children, lost = run.incidents.map(([step, what]) => `Step ${number(step)}: ${what}. `);
    said.replaceChildren(...lost, run.samples ? element("a", { href: run.samples }, "Answers of the model") : "");
    const text = run.log.join("\n"), isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
    if (log.textContent !== text) log.textContent = text;
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  });
}

async function poll(tag) {
  let words = `updated ${new Date().toLocaleTimeString()}`;
  try {
    const answer = await fetch("data.json", { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
    if (answer.status === 200) {
      Object.assign(data, await answer.json());
      tag = answer.headers.get("ETag");
      arrive();
      logs();
    } else if (answer.status === 304) runsTable();
    else words = `the watch answers ${answer.status}`;
  } catch {
    words = "the watch has ended; these are its last figures";
  }
  heading(words);
  setTimeout(poll, 2000, tag);
}

document.querySelector("main").hidden = false;
heading(`drawn ${data.drawn}`);
controls();
arrive();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
new ResizeObserver(redraw).observe($("panels"));
if (data.live) {
  logs();
  poll("");
}
