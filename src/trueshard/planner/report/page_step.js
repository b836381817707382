"use strict";
// One step on a shared axis of time: what is shown of it, and what pointer and keys do.

const memory = data.memory;
const SECONDS = data.seconds || 1;
const AT = memory.seconds;
const COUNT = AT.length;

function expand(runs) {
  const values = new Float64Array(COUNT);
  for (let i = 0; i < runs.length; i += 2) {
    values.fill(runs[i + 1], runs[i], i + 2 < runs.length ? runs[i + 2] : COUNT);
  }
  return values;
}

for (const part of [...memory.kinds, ...memory.units]) part.values = expand(part.bytes);
memory.kinds.forEach((part) => (part.colour = kindColour(part.name)));
memory.units.forEach((part, i) => {
  const hue = 205 + (300 * i) / Math.max(memory.units.length, 6);
  part.colour = `hsl(${hue % 360} var(--unit-strong) calc(var(--unit-light) + ${i % 2 ? 7 : -3}%))`;
});
const TOTAL = new Float64Array(COUNT);
for (const part of memory.kinds) part.values.forEach((value, i) => (TOTAL[i] += value));

const GUTTER = 104, RIGHT = 14, HEAD = 26, PLOT = 320, GAP = 22, LANE = 30, FOOT = 34;
const HEIGHT = HEAD + PLOT + GAP + LANE * data.lanes.length + FOOT;
const LANES_TOP = HEAD + PLOT + GAP;
const canvas = $("step"), pen = canvas.getContext("2d"), plot = $("step-plot"), tip = $("step-tip");
const view = { from: 0, to: SECONDS, by: "kinds", only: null, cursor: null, drag: null, columns: [] };

const parts = () => memory[view.by];
const width = () => plot.clientWidth;
const inner = () => width() - GUTTER - RIGHT;
const xOf = (seconds) => GUTTER + ((seconds - view.from) / (view.to - view.from)) * inner();
const secondsOf = (x) => view.from + ((x - GUTTER) / inner()) * (view.to - view.from);
const ceiling = Math.max(...TOTAL, data.reserved, data.budget <= 1.5 * data.reserved ? data.budget : 0, 1) * 1.06;
const yOf = (count) => HEAD + PLOT * (1 - count / ceiling);

// The index of the last point at or before a time.
function indexAt(seconds) {
  let low = 0, high = COUNT - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (AT[middle] <= seconds) low = middle;
    else high = middle - 1;
  }
  return low;
}

// For each column of device pixels the point with the most memory that is alive in it.
function columnsOf(count) {
  const found = new Int32Array(count);
  const step = (view.to - view.from) / count;
  let index = indexAt(view.from);
  for (let column = 0; column < count; column++) {
    let best = index;
    const end = view.from + (column + 1) * step;
    while (index + 1 < COUNT && AT[index + 1] < end) {
      index++;
      if (TOTAL[index] > TOTAL[best]) best = index;
    }
    found[column] = best;
  }
  return found;
}

function point() {
  const column = Math.floor(((view.cursor - view.from) / (view.to - view.from)) * view.columns.length);
  return view.columns[Math.max(0, Math.min(view.columns.length - 1, column))];
}

function spanAt(lane, seconds) {
  const near = ((view.to - view.from) / inner()) * 2;
  let best = null, far = near;
  for (const span of lane.spans) {
    const away = seconds < span[0] ? span[0] - seconds : seconds > span[1] ? seconds - span[1] : 0;
    if (away === 0) return span;
    if (away < far) [best, far] = [span, away];
  }
  return best;
}

function memoryTip(index) {
  const rows = parts().map((part) => [part, part.values[index]]).filter(([, value]) => value > 0);
  rows.sort((a, b) => b[1] - a[1]);
  const rest = rows.splice(9);
  const cells = rows.map(([part, value]) =>
    element("tr", {}, element("td", {}, swatch(part.colour), ` ${part.name}`), element("td", {}, bytes(value))));
  if (rest.length) {
    const sum = rest.reduce((total, [, value]) => total + value, 0);
    cells.push(element("tr", { class: "dim" }, element("td", {}, `${rest.length} more`), element("td", {}, bytes(sum))));
  }
  return [
    element("p", {}, element("b", {}, `${bytes(TOTAL[index])} live`), ` at ${duration(AT[index])}`),
    element("p", { class: "dim" }, `${memory.phase_names[memory.phase[index]]} · ${place_name(memory.unit_names[memory.unit[index]])}`),
    element("table", {}, ...cells),
  ];
}

function laneTip(lane, seconds) {
  const span = spanAt(lane, seconds);
  if (!span) {
    const gap = lane.stream === "compute" && data.gaps.find(([, start, end]) => start <= seconds && seconds <= end);
    const idle = gap ? GAPS[gap[0]] : "idle";
    return [element("p", {}, element("b", {}, lane.stream.replace("_", "-"))), element("p", { class: "dim" }, `${idle} at ${duration(seconds)}`)];
  }
  const [start, end, busy, count, name, group, unit] = span;
  const title = count > 1 ? `${number(count)} operations, most of it ${lane.names[name]}` : lane.names[name];
  const part = count > 1 && end - start - busy > 1e-8 ? `, busy ${duration(busy)}` : "";
  return [
    element("p", {}, element("b", {}, title)),
    element("p", { class: "dim" }, `${lane.groups[group].replace("_", "-")} · ${place_name(lane.units[unit])}`),
    element("p", {}, `${duration(end - start)}${part}, from ${duration(start)}`),
  ];
}

function show(x, y, spoken) {
  const number_of = Math.floor((y - LANES_TOP) / LANE);
  const lane = y >= LANES_TOP - 4 ? data.lanes[Math.max(0, Math.min(number_of, data.lanes.length - 1))] : null;
  tip.replaceChildren(...(lane ? laneTip(lane, view.cursor) : memoryTip(point())));
  place(tip, plot, x, y);
  if (spoken) $("step-say").textContent = [...tip.querySelectorAll("p, tr")].map((each) => each.textContent).join("; ");
  draw();
}

function hide() {
  view.cursor = null;
  tip.hidden = true;
  draw();
}

function zoom(from, to) {
  const least = SECONDS / 20000;
  const wide = Math.min(Math.max(to - from, least), SECONDS);
  view.from = Math.max(0, Math.min(from, SECONDS - wide));
  view.to = view.from + wide;
  draw();
}

function scale(factor, around = view.cursor ?? (view.from + view.to) / 2) {
  zoom(around - (around - view.from) * factor, around + (view.to - around) * factor);
}

function toPeak() {
  const at = AT[memory.peak], wide = Math.min(view.to - view.from, SECONDS / 8);
  zoom(at - wide / 2, at + wide / 2);
  move(at);
}

function move(seconds) {
  view.cursor = Math.max(0, Math.min(SECONDS, seconds));
  const wide = view.to - view.from;
  if (view.cursor < view.from || view.cursor > view.to) zoom(view.cursor - wide / 2, view.cursor + wide / 2);
  draw();
  show(xOf(view.cursor), HEAD + PLOT / 2, true);
}

function next(direction) {
  const now = view.cursor ?? view.from;
  let index = indexAt(now);
  if (direction < 0 && AT[index] >= now) index--;
  while (direction > 0 && index < COUNT && AT[index] <= now) index++;
  while (direction < 0 && index > 0 && AT[index] === AT[index - 1]) index--;
  return AT[Math.max(0, Math.min(COUNT - 1, index))];
}

const KEYS = {
  ArrowRight: (event) => move(event.shiftKey ? next(1) : (view.cursor ?? view.from) + (view.to - view.from) / 100),
  ArrowLeft: (event) => move(event.shiftKey ? next(-1) : (view.cursor ?? view.to) - (view.to - view.from) / 100),
  "+": () => scale(0.5), "=": () => scale(0.5), "-": () => scale(2), "0": () => zoom(0, SECONDS),
  p: toPeak, P: toPeak, Escape: hide,
};

function where(event) {
  const box = canvas.getBoundingClientRect();
  return [Math.max(GUTTER, Math.min(event.clientX - box.left, width() - RIGHT)), event.clientY - box.top];
}

canvas.addEventListener("keydown", (event) => {
  if (!KEYS[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  KEYS[event.key](event);
});
canvas.addEventListener("pointermove", (event) => {
  const [x, y] = where(event);
  view.cursor = Math.abs(x - xOf(AT[memory.peak])) < 4 ? AT[memory.peak] : secondsOf(x);
  if (view.drag) view.drag.to = x;
  show(x, y, false);
});
canvas.addEventListener("pointerdown", (event) => {
  if (event.pointerType === "mouse" && event.button === 0) {
    const [x] = where(event);
    view.drag = { x, to: x };
    canvas.setPointerCapture(event.pointerId);
  }
});
canvas.addEventListener("pointerup", () => {
  const drag = view.drag;
  view.drag = null;
  if (!drag) return;
  if (Math.abs(drag.to - drag.x) > 5) zoom(secondsOf(Math.min(drag.x, drag.to)), secondsOf(Math.max(drag.x, drag.to)));
  else draw();
});
canvas.addEventListener("pointercancel", () => ((view.drag = null), hide()));
canvas.addEventListener("pointerleave", () => !view.drag && hide());
canvas.addEventListener("blur", hide);
canvas.addEventListener("dblclick", () => zoom(0, SECONDS));
canvas.addEventListener("wheel", (event) => {
  const wide = view.to - view.from;
  if (event.ctrlKey || event.metaKey) scale(event.deltaY > 0 ? 1.25 : 0.8, secondsOf(where(event)[0]));
  else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    const shift = ((event.deltaX || event.deltaY) / inner()) * wide;
    zoom(view.from + shift, view.to + shift);
  } else return;
  event.preventDefault();
}, { passive: false });
$("zoom-in").onclick = () => scale(0.5);
$("zoom-out").onclick = () => scale(2);
$("zoom-all").onclick = () => zoom(0, SECONDS);
$("zoom-peak").onclick = toPeak;

function legend() {
  const shown = parts().map((part) => {
    const highlight = (name) => () => ((view.only = name), draw());
    return element("button", {
      type: "button", onpointerenter: highlight(part.name), onpointerleave: highlight(null),
      onfocus: highlight(part.name), onblur: highlight(null),
    }, swatch(part.colour), element("span", {}, part.name), element("b", {}, bytes(part.values[memory.peak])));
  });
  $("memory-legend").replaceChildren(element("span", { class: "label" }, "At the peak"), element("div", {}, ...shown));
}

for (const radio of document.getElementsByName("by")) {
  radio.addEventListener("change", () => {
    view.by = radio.value;
    legend();
    draw();
  });
}
