"use strict";
// The page around the answers: prompts, steps, the rewards of a prompt. Starts it.

const SHOWN = 300;
const worded = (text) => text.replace("reward", data.score);
const rewards = data.prompts.flatMap((prompt) => prompt.groups.flatMap((group) => group.rewards)).filter(known);
const RANGE = rewards.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
const mean = (values) => {
  const given = values.filter(known);
  return given.length ? given.reduce((sum, value) => sum + value, 0) / given.length : NaN;
};

for (const prompt of data.prompts) {
  for (const group of prompt.groups) group.mean = mean(group.rewards);
  prompt.mean = mean(prompt.groups.flatMap((group) => group.rewards));
  prompt.gain = prompt.groups.at(-1).mean - prompt.groups[0].mean;
  prompt.last = prompt.groups.at(-1).step;
}
const now = { prompt: data.prompts[0], index: 0, cards: [] };
const steps = (prompt) => new Set(prompt.groups.map((group) => group.step)).size;
const fixed = (value) => (Number.isNaN(value) ? "–" : minus(value.toFixed(2)));

// The list of prompts

const ORDERS = {
  number: (a, b) => a.number - b.number, low: (a, b) => a.mean - b.mean, high: (a, b) => b.mean - a.mean,
  gain: (a, b) => b.gain - a.gain, loss: (a, b) => a.gain - b.gain, late: (a, b) => b.last - a.last,
};

function has(prompt, words) {
  const text = (each) => each.toLowerCase().includes(words);
  const step = words.match(/^step (\d+)$/);
  if (step) return prompt.groups.some((group) => group.step === Number(step[1]));
  return String(prompt.number) === words || prompt.name.toLowerCase() === words || text(prompt.text) || text(prompt.target ?? "")
    || prompt.groups.some((group) => group.answers.some((answer) => text(answer.pieces.join(""))));
}

function spark(prompt) {
  const groups = prompt.groups.filter((group) => !Number.isNaN(group.mean));
  if (groups.length < 2) return "";
  const [first, last] = [groups[0].step, groups.at(-1).step], wide = RANGE[1] - RANGE[0] || 1, apart = last - first || 1;
  const points = groups.map(({ step, mean: value }) =>
    `${(((step - first) / apart) * 62 + 1).toFixed(1)},${(15 - ((value - RANGE[0]) / wide) * 14).toFixed(1)}`);
  return element("svg", { viewBox: "0 0 64 16", "aria-hidden": "true" }, element("path", { class: "spark", d: `M${points.join("L")}` }));
}

function list() {
  const words = $("search").value.trim().toLowerCase();
  const found = data.prompts.filter((prompt) => !words || has(prompt, words)).sort(ORDERS[$("order").value]);
  $("list").replaceChildren(...found.slice(0, SHOWN).map((prompt) => element("li", {},
    element("button", { type: "button", "aria-current": String(prompt === now.prompt), onclick: () => choose(prompt) },
      element("span", { class: "words" }, prompt.text.trim().split("\n").at(-1) || "(no text)"),
      element("span", { class: "mean" }, fixed(prompt.mean)),
      element("span", { class: "dim" }, `${prompt.name} · ${steps(prompt) === 1 ? `step ${prompt.last}` : `${steps(prompt)} steps`}`),
      spark(prompt)))));
  $("more").textContent = found.length > SHOWN ? `${number(found.length - SHOWN)} more: search for them.` : found.length ? "" : "No prompt has these words.";
}

// Rewards of the prompt over the steps

function drawRewards() {
  const wide = $("rewards").clientWidth, high = 150, { groups } = now.prompt, [from, to] = [data.steps[0], data.steps.at(-1)];
  const room = RANGE[1] - RANGE[0] || 1, low = RANGE[0] - room * 0.05, top = RANGE[1] + room * 0.05;
  const x = (step) => 44 + (from === to ? 0.5 : (step - from) / (to - from)) * (wide - 56);
  const y = (value) => 8 + (1 - (value - low) / (top - low)) * (high - 34);
  const parts = ticks(low, top, 3, [["", 1]], [1, 2, 2.5, 5]).values.flatMap((value) => [
    element("line", { class: "grid", x1: 44, x2: wide - 12, y1: y(value), y2: y(value) }),
    element("text", { x: 38, y: y(value) + 4, "text-anchor": "end" }, short(value))]);
  const across = from === to ? [from] : ticks(from, to, Math.floor(wide / 110), [["", 1]], [1, 2, 5]).values.filter((value) => value % 1 === 0);
  parts.push(...across.map((value) => element("text", { x: x(value), y: high - 6, "text-anchor": "middle" }, number(value))));
  const here = groups[now.index].step;
  parts.push(element("line", { class: "now", x1: x(here), x2: x(here), y1: 4, y2: high - 24 }));
  for (const group of groups) {
    for (const [value, count] of counted(group.rewards.filter(known))) {
      const size = 2 + 1.5 * Math.sqrt(count / group.rewards.length);
      parts.push(element("circle", { class: group.used ? "answer" : "unused", cx: x(group.step), cy: y(value), r: size.toFixed(2) }));
    }
  }
  const line = groups.filter((group) => !Number.isNaN(group.mean)).map((group) => `${x(group.step).toFixed(1)},${y(group.mean).toFixed(1)}`);
  if (line.length > 1) parts.push(element("path", { class: "mean", d: `M${line.join("L")}` }));
  const words = `${data.score === "reward" ? "Rewards" : data.score} over the steps: mean ${fixed(groups[0].mean)} at step ${groups[0].step}, ${fixed(groups.at(-1).mean)} at step ${groups.at(-1).step}`;
  $("rewards").replaceChildren(element("svg", { viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": words }, ...parts));
  now.stepAt = (place) => groups.reduce((best, group, i) => (Math.abs(x(group.step) - place) < Math.abs(x(groups[best].step) - place) ? i : best), 0);
}

function counted(values) {
  const found = new Map();
  for (const value of values) found.set(value, (found.get(value) ?? 0) + 1);
  return found;
}

// Prompt, step, answers

function choose(prompt) {
  const step = now.prompt.groups[now.index].step;
  now.prompt = prompt;
  $("prompt-title").textContent = `Prompt ${prompt.name}`;
  $("prompt-mean").textContent = worded(`mean reward ${fixed(prompt.mean)}`);
  $("prompt-text").textContent = prompt.text;
  $("prompt-text").hidden = !prompt.text;
  $("target").textContent = prompt.target ?? "";
  $("target").hidden = $("target-title").hidden = prompt.target === null;
  $("step").max = prompt.groups.length - 1;
  $("steps").hidden = $("rewards").hidden = prompt.groups.length < 2;
  for (const button of $("list").querySelectorAll("[aria-current=true]")) button.setAttribute("aria-current", "false");
  list();
  const near = prompt.groups.map((group) => Math.abs(group.step - step));
  go(near.indexOf(Math.min(...near)));
}

function go(index) {
  const { groups } = now.prompt;
  now.index = Math.max(0, Math.min(index, groups.length - 1));
  const group = groups[now.index], count = group.rewards.length;
  $("step").value = now.index;
  const beside = groups.filter((each) => each.step === group.step); // a prompt may come more than once in a step
  const which = beside.length > 1 ? `, group ${beside.indexOf(group) + 1} of ${beside.length}` : "";
  $("step").setAttribute("aria-valuetext", `step ${group.step}${which}`);
  [$("before").disabled, $("after").disabled] = [now.index === 0, now.index === groups.length - 1];
  $("step-words").textContent = `step ${number(group.step)} of ${number(data.steps.at(-1))}${which}`;
  $("answers-title").textContent = `Answers at step ${number(group.step)}${which}`;
  const said = [`${count} answer${count === 1 ? "" : "s"}`, worded(`mean reward ${fixed(group.mean)}`)];
  if (group.answers.length < count) said.push(`${group.answers.length} shown`);
  if (known(group.version) && group.version !== group.step - 1) said.push(`weights after step ${number(group.version)}`);
  $("group").replaceChildren(
    group.used ? "" : element("span", { class: "chip mark", title: "A group without differences gives no gradient." }, "equal rewards: not trained on"),
    element("span", {}, said.join(" · ")));
  now.cards = ranked(group.answers).map(([answer, label]) => new Answer(answer, label, group));
  $("answers").replaceChildren(...now.cards.map((each) => each.card));
  drawRewards();
}

// The best beside the worst, then the others, best first.
function ranked(answers) {
  if (answers.length < 2) return answers.map((answer) => [answer, "Only answer"]);
  if (answers[0].reward === answers.at(-1).reward) return answers.map((answer, i) => [answer, `${i + 1}.`]);
  const others = answers.slice(1, -1).map((answer, i) => [answer, `${i + 2}.`]);
  return [[answers[0], "Best"], [answers.at(-1), "Worst"], ...others];
}

function shade(by) {
  shading.by = by;
  for (const each of now.cards) each.shade();
  const ends = { mismatch: ["0", "1 nat between engine and trainer"], probability: ["likely", "unlikely"] }[by];
  const colour = `rgb(var(--shade-${by}) / var(--shade-most))`;
  $("key").replaceChildren(...(ends ? [ends[0], element("i", { style: `background:linear-gradient(90deg, transparent, ${colour})` }), ends[1]] : []));
}

function leftOut() {
  const { answers, groups, tokens } = data.left_out, said = [];
  const count = (value, word) => `${number(value)} ${word}${value === 1 ? "" : "s"}`;
  if (data.steps.length < data.total) said.push(`${number(data.total - data.steps.length)} of ${count(data.total, "step")}`);
  if (groups) said.push(`${count(groups, "group")} of the steps shown`);
  if (answers) said.push(`${count(answers, "answer")} between the best and the worst`);
  if (tokens) said.push(`the ends of long answers (${count(tokens, "token")})`);
  $("left-out").hidden = !said.length;
  $("left-out").textContent = `Left out to keep this page small: ${said.join(", ")}. samples.jsonl has everything. Mean rewards are of the steps shown.`;
}

function start() {
  const every = data.prompts.flatMap((prompt) => prompt.groups.flatMap((group) => group.answers));
  const most = every.reduce((top, answer) => answer.differences.reduce((high, value) => Math.max(high, Math.abs(value ?? 0)), top), -1);
  const first = most >= 0.01 ? "mismatch" : "probability";
  for (const radio of document.getElementsByName("shade")) {
    radio.checked = radio.value === first;
    radio.addEventListener("change", () => shade(radio.value));
    if (radio.value === "mismatch" && most < 0) radio.parentElement.hidden = true;
  }
  for (const option of $("order").options) option.textContent = worded(option.textContent);
  $("search").addEventListener("input", list);
  $("order").addEventListener("change", list);
  $("step").addEventListener("input", () => go(Number($("step").value)));
  $("before").onclick = () => go(now.index - 1);
  $("after").onclick = () => go(now.index + 1);
  $("rewards").addEventListener("click", (event) => go(now.stepAt(event.clientX - $("rewards").getBoundingClientRect().left)));
  new ResizeObserver(drawRewards).observe($("rewards"));
  now.index = now.prompt.groups.length - 1;
  choose(now.prompt);
  shade(first);
}

document.querySelector("main").hidden = false;
const shownSteps = `${number(data.total)} step${data.total === 1 ? "" : "s"}`;
heading(`${shownSteps} · ${number(data.prompts.length)} prompt${data.prompts.length === 1 ? "" : "s"} · drawn ${data.drawn}`);
leftOut();
if (now.prompt) start();
else $("room").hidden = true;
