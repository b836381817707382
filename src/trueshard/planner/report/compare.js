"use strict";
// Plans side by side: bars on one scale, and what differs.

const PARTS = { computing: "var(--backward)", waiting: "var(--waiting)", rest: "var(--idle-host)" };
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
const kinds = KINDS.filter((kind) => data.plans.some((plan) => plan.kinds.some(([name, value]) => name === kind && value)));
bars("memory-bars", (plan) => plan.kinds, Math.max(...data.plans.map((plan) => plan.live), 1), kindColour, bytes);
legend("memory-legend", kinds, kindColour, (name) => name);
bars("time-bars", (plan) => plan.parts, Math.max(...data.plans.map((plan) => plan.seconds)) || 1, (name) => PARTS[name], duration);
legend("time-legend", Object.keys(PARTS), (name) => PARTS[name], (name) => PART_WORDS[name]);
rows("figures", ["", ...data.names, "last over first"], data.figures.map((row) => [row.label, ...row.cells, row.change]));
$("settings-section").hidden = !data.settings.length;
rows("differing", ["", ...data.names], data.settings.map((row) => [row.label, ...row.cells]));
for (const [name, text] of data.differences) {
  $("differences").append(element("p", { class: "note" }, `${data.names[0]} → ${name}`), element("pre", {}, text));
}
