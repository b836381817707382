"use strict";
// Plans side by side: bars on one scale, and what differs.

const PARTS = { computing: "var(--backward)", waiting: "var(--waiting)", rest: "var(--idle-host)" };
const kindsOf = (plan) => KINDS.map((kind) => [kind, plan.peak_by_kind[kind] ?? 0]);
function partsOf(plan) {
  const { step_seconds: step, compute_seconds: computing, exposed_communication_seconds: waiting } = plan;
  return Object.entries({ computing, waiting, rest: Math.max(step - computing - waiting, 0) });
}
const PART_WORDS = { computing: "computing", waiting: GAPS.waiting, rest: "waiting for host and other ranks" };

function bars(box, values, most, colour, words) {
  data.plans.forEach((plan, i) => {
    const pieces = values(plan).filter(([, value]) => value > 0).map(([name, value]) =>
      element("i", { style: `background:${colour(name)};width:${(100 * value) / most}%`, title: `${name}: ${words(value)}` }));
    const sum = values(plan).reduce((total, [, value]) => total + value, 0);
    $(box).append(
      element("p", { class: "note" }, element("b", {}, data.names[i]), ` · ${plan.where} · ${words(sum)}`),
      element("div", { class: "parts" }, ...pieces));
  });
}

function legend(box, names, colour, words) {
  $(box).append(element("div", {}, ...names.map((name) => element("span", {}, swatch(colour(name)), words(name)))));
}

function rows(box, head, lines) {
  const cells = (tag, line) => line.map((word, i) => element(tag, { class: i ? "number" : "wide" }, word));
  $(box).append(element("table", {},
    element("thead", {}, element("tr", {}, ...cells("th", head))),
    element("tbody", {}, ...lines.map((line) => element("tr", {}, ...cells("td", line))))));
}

document.querySelector("main").hidden = false;
heading(data.names.join(" · "), data.plans.map((plan, i) => `${data.names[i]} ${plan.verdict}`).join("; "),
  data.plans.every((plan) => plan.fits));
const kinds = KINDS.filter((kind) => data.plans.some((plan) => plan.peak_by_kind[kind]));
bars("memory-bars", kindsOf, Math.max(...data.plans.map((plan) => plan.peak_live_bytes), 1), kindColour, bytes);
legend("memory-legend", kinds, kindColour, (name) => name);
bars("time-bars", partsOf, Math.max(...data.plans.map((plan) => plan.step_seconds)) || 1, (name) => PARTS[name], duration);
legend("time-legend", Object.keys(PARTS), (name) => PARTS[name], (name) => PART_WORDS[name]);
const change = (first, last) => {
  const percent = 100 * (last / first - 1);
  return first ? `${percent < 0 ? "" : "+"}${percent.toFixed(1)}%` : "";
};
rows("figures", ["", ...data.names, "last over first"], data.figures[0].map(([label, value], i) =>
  [label, ...data.figures.map((plan) => plan[i][2]), change(value, data.figures[data.figures.length - 1][i][1])]));
const differing = Object.keys(data.settings[0]).filter((key) => new Set(data.settings.map((plan) => plan[key])).size > 1);
$("settings-section").hidden = !differing.length;
rows("differing", ["", ...data.names], differing.map((key) => [key, ...data.settings.map((plan) => plan[key])]));
for (const [name, text] of data.differences) {
  $("differences").append(element("p", { class: "note" }, `${data.names[0]} → ${name}`), element("pre", {}, text));
}
