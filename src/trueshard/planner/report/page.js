"use strict";
// What all parts of the page share: the data, words for figures, colours, elements, axes.

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const KINDS = ["parameters", "optimizer", "inputs", "activations", "gradients", "gathered", "communication", "temporary"];

function element(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "line", "path", "rect", "circle", "text"].includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.setAttribute("class", value);
    else if (name === "style") made.style.cssText = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== ""));
  return made;
}

const swatch = (colour) => element("i", { class: "swatch", style: `background:${colour}`, "aria-hidden": "true" });
const themed = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
let probe = null;
function solid(colour) {
  if (!probe) document.body.append((probe = element("i", { hidden: "" })));
  probe.style.color = colour;
  return getComputedStyle(probe).color;
}
const kindColour = (kind) => `var(--${kind})`;
const GAPS = { waiting: "waiting for communication", host: "waiting for the host", ranks: "waiting for other ranks" };
const gapColour = (kind) => `var(--${kind === "host" ? "idle-host" : kind})`;
const groupColour = (group) => `var(--${group === "optimizer" ? "phase-optimizer" : group})`;

const SIZES = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];

function bytes(count) {
  for (const [unit, factor] of SIZES) {
    const value = count / factor;
    if (Math.abs(value) >= 1) return `${value.toFixed(value < 10 ? 2 : value < 1000 ? 1 : 0)} ${unit}`;
  }
  return `${count} B`;
}

const number = (value, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

function duration(seconds) {
  for (const [unit, factor] of [["s", 1], ["ms", 1e3], ["µs", 1e6]]) {
    const value = seconds * factor;
    if (value >= 0.9995 || unit === "µs") return `${number(value, value < 10 ? 3 : value < 100 ? 2 : 1)} ${unit}`;
  }
}

// Round values for an axis, with one unit for all of them: {values, word}.
function ticks(low, high, count, units, steps) {
  const [name, factor] = units.find(([, size]) => high / size >= 1) ?? units[units.length - 1];
  const rough = (high - low) / factor / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = steps.map((each) => each * power).find((each) => each >= rough * 0.999) ?? 10 * power;
  const digits = [0, 1, 2, 3, 4].find((each) => Math.abs(step * 10 ** each - Math.round(step * 10 ** each)) < 1e-6) ?? 5;
  const values = [];
  for (let n = Math.ceil(low / factor / step - 1e-6); n * step * factor <= high * (1 + 1e-9); n++) {
    values.push(n * step * factor || 0);
  }
  return { values, unit: name, word: (value) => number(value / factor, digits) };
}

const byteTicks = (low, high, count) => ticks(low, high, count, [...SIZES, ["B", 1]], [1, 2, 2.5, 5]);
const timeTicks = (low, high, count) => {
  const wide = high - low;
  const units = [["s", 1], ["ms", 1e-3], ["µs", 1e-6]];
  return ticks(low, high, count, [units.find(([, size]) => wide / size >= 0.5) ?? units[2]], [1, 2, 5]);
};

// Put a tip beside a point of a plot, inside of the plot's width.
function place(tip, plot, x, y) {
  tip.hidden = false;
  const width = tip.offsetWidth, height = tip.offsetHeight;
  const left = x + 16 + width <= plot.clientWidth ? x + 16 : Math.max(0, x - 16 - width);
  const top = Math.max(0, Math.min(y - height / 2, plot.clientHeight - height));
  tip.style.transform = `translate(${left}px, ${top}px)`;
}

// The head of every page; a page without a verdict leaves it out.
function heading(settings, verdict = "", isGood = true) {
  $("headline").textContent = data.headline;
  $("settings").textContent = settings;
  $("verdict").textContent = verdict;
  $("verdict").className = isGood ? "good" : "bad";
}

const place_name = (name) => name || "(root)";
