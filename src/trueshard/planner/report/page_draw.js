"use strict";
// The step on its canvas: memory, stacked, above the streams; one column a device pixel.

function draw() {
  const ratio = window.devicePixelRatio || 1;
  canvas.style.height = `${HEIGHT}px`;
  canvas.width = Math.round(width() * ratio);
  canvas.height = Math.round(HEIGHT * ratio);
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width(), HEIGHT);
  pen.font = "12.5px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
  pen.textBaseline = "middle";
  drawAxes();
  pen.save();
  pen.beginPath();
  pen.rect(GUTTER, 0, inner(), HEIGHT);
  pen.clip();
  drawMemory(Math.max(1, Math.round(inner() * ratio)));
  drawLanes(ratio);
  drawPhases();
  drawMarks();
  pen.restore();
}

function line(x1, y1, x2, y2, colour, dash = []) {
  pen.strokeStyle = colour;
  pen.setLineDash(dash);
  pen.beginPath();
  pen.moveTo(x1, y1);
  pen.lineTo(x2, y2);
  pen.stroke();
  pen.setLineDash([]);
}

function words(text, x, y, colour, align = "left", halo = false) {
  pen.textAlign = align;
  if (halo) {
    pen.strokeStyle = themed("--card");
    pen.lineWidth = 4;
    pen.lineJoin = "round";
    pen.strokeText(text, x, y);
    pen.lineWidth = 1;
  }
  pen.fillStyle = colour;
  pen.fillText(text, x, y);
}

function drawAxes() {
  const soft = themed("--soft"), grid = themed("--grid");
  pen.lineWidth = 1;
  const vertical = byteTicks(0, ceiling, 6);
  for (const value of vertical.values) {
    const y = Math.round(yOf(value)) + 0.5;
    line(GUTTER, y, width() - RIGHT, y, grid);
    words(value ? `${vertical.word(value)} ${vertical.unit}` : "0", GUTTER - 8, y, soft, "right");
  }
  const below = HEIGHT - FOOT;
  const horizontal = timeTicks(view.from, view.to, Math.max(2, Math.floor(inner() / 110)));
  for (const value of horizontal.values) {
    const x = Math.round(xOf(value)) + 0.5;
    line(x, HEAD, x, below + 5, grid);
    const edge = x > width() - RIGHT - 26 ? "right" : "center";
    words(`${horizontal.word(value)} ${horizontal.unit}`, edge === "right" ? width() - RIGHT : x, below + 16, soft, edge);
  }
  data.lanes.forEach((lane, i) => {
    words(lane.stream.replace("_", "-"), GUTTER - 8, LANES_TOP + LANE * (i + 0.5), soft, "right");
  });
}

function drawMemory(count) {
  view.columns = columnsOf(count);
  const base = new Float64Array(count);
  const wide = inner() / count;
  const edge = themed("--card");
  for (const part of parts()) {
    pen.globalAlpha = view.only === null || view.only === part.name ? 1 : 0.18;
    pen.fillStyle = solid(part.colour);
    pen.beginPath();
    pen.moveTo(GUTTER, yOf(base[0]));
    const tops = new Float64Array(count);
    for (let i = 0; i < count; i++) {
      tops[i] = base[i] + part.values[view.columns[i]];
      const y = yOf(tops[i]);
      pen.lineTo(GUTTER + i * wide, y);
      pen.lineTo(GUTTER + (i + 1) * wide, y);
    }
    for (let i = count - 1; i >= 0; i--) {
      const y = yOf(base[i]);
      pen.lineTo(GUTTER + (i + 1) * wide, y);
      pen.lineTo(GUTTER + i * wide, y);
      base[i] = tops[i];
    }
    pen.fill();
    pen.globalAlpha = view.by === "kinds" ? 0.7 : 0.18;
    pen.strokeStyle = edge;
    pen.lineWidth = 0.6;
    pen.stroke();
    pen.lineWidth = 1;
  }
  pen.globalAlpha = 1;
}

function drawLanes(ratio) {
  const grid = themed("--grid");
  data.lanes.forEach((lane, i) => {
    const top = LANES_TOP + LANE * i + 4, high = LANE - 8;
    pen.fillStyle = grid;
    pen.fillRect(GUTTER, top, xOf(SECONDS) - GUTTER, high);
    for (const [kind, start, end] of lane.stream === "compute" ? data.gaps : []) {
      if (end < view.from || start > view.to) continue;
      pen.fillStyle = solid(gapColour(kind));
      pen.fillRect(xOf(start), top, xOf(end) - xOf(start), high);
    }
    const colours = lane.groups.map((group) => solid(groupColour(group)));
    for (const [start, end, , , , group] of lane.spans) {
      if (end < view.from || start > view.to) continue;
      const x = xOf(start), wide = Math.max(xOf(end) - x, 1 / ratio);
      pen.fillStyle = colours[group];
      pen.fillRect(x, top, wide > 3 ? wide - 0.7 : wide, high);
    }
  });
}

function drawPhases() {
  const soft = themed("--soft"), axis = themed("--line");
  let free = GUTTER;
  for (const phase of data.phases) {
    const start = Math.max(xOf(phase.start), GUTTER), end = Math.min(xOf(phase.end), width() - RIGHT);
    if (end <= start) continue;
    line(Math.round(start) + 0.5, 6, Math.round(start) + 0.5, LANES_TOP - 8, axis);
    const long = pen.measureText(phase.name).width + 12;
    if (end - start < long || start < free) continue;
    words(phase.name, start + 6, 13, soft);
    free = start + long;
  }
}

function level(count, text, colour, dash, above) {
  const y = Math.round(yOf(count)) + 0.5;
  line(GUTTER, y, width() - RIGHT, y, colour, dash);
  words(text, GUTTER + 8, y + (above ? -9 : 10), colour, "left", true);
}

function drawMarks() {
  const ink = themed("--ink");
  const close = Math.abs(yOf(data.reserved) - yOf(data.budget)) < 22 && data.budget < data.reserved;
  level(data.reserved, `reserved at most ${bytes(data.reserved)}`, ink, [2, 3], !close && data.reserved > data.budget);
  if (data.budget <= ceiling) {
    level(data.budget, `budget ${bytes(data.budget)}`, themed("--bad"), [6, 4], data.budget >= data.reserved);
  }
  const x = xOf(AT[memory.peak]), y = yOf(TOTAL[memory.peak]);
  if (x >= GUTTER && x <= width() - RIGHT) {
    line(x, y, x, LANES_TOP - 8, ink, [3, 3]);
    pen.fillStyle = ink;
    pen.beginPath();
    pen.arc(x, y, 4.5, 0, 7);
    pen.fill();
    const label = `peak ${bytes(TOTAL[memory.peak])}`;
    const left = x + 12 + pen.measureText(label).width > width() - RIGHT;
    words(label, left ? x - 10 : x + 10, Math.max(y + (yOf(data.reserved) > y - 14 ? 22 : -2), HEAD + 8), ink, left ? "right" : "left", true);
  }
  if (view.drag) {
    pen.globalAlpha = 0.18;
    pen.fillStyle = solid("var(--accent)");
    pen.fillRect(Math.min(view.drag.x, view.drag.to), HEAD, Math.abs(view.drag.to - view.drag.x), HEIGHT - FOOT - HEAD);
    pen.globalAlpha = 1;
  }
  if (view.cursor !== null) {
    const at = Math.round(xOf(view.cursor)) + 0.5;
    line(at, HEAD - 8, at, HEIGHT - FOOT, ink);
  }
}
