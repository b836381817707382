"use strict";
// What a model will see of the data: counts, warnings, lengths, and samples token by token.

let at = 0;

function tiles() {
  const counts = Object.entries(data.counts).map(([noun, count]) => [noun, number(count)]);
  if (data.counts.targets) counts.push(["targets of all tokens", `${number((100 * data.counts.targets) / data.counts.tokens, 1)}%`]);
  $("tiles").append(...counts.map(([noun, value]) => element("div", {}, element("dt", {}, noun), element("dd", { class: "value" }, value))));
  $("tiles").hidden = !counts.length;
}

function lengths() {
  const most = Math.max(...data.lengths.map(([, , count]) => count)), high = 24 * data.lengths.length;
  const wide = Math.max(260, $("lengths").clientWidth), room = wide - 210;
  const rows = data.lengths.flatMap(([first, last, count], row) => [
    element("text", { x: 132, y: 24 * row + 16, "text-anchor": "end" }, `${number(first)} to ${number(last)}`),
    element("rect", { class: "length", x: 140, y: 24 * row + 3, width: Math.max(1, (room * count) / most), height: 17, rx: 3 }),
    element("text", { x: 146 + (room * count) / most, y: 24 * row + 16 }, number(count))]);
  const words = `Documents by their number of tokens: ${data.lengths.map(([first, last, count]) => `${count} of ${first} to ${last}`).join(", ")}`;
  $("lengths").replaceChildren(data.lengths.length
    ? element("svg", { viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": words }, ...rows)
    : element("p", { class: "note" }, "Not known: these data become tokens with their batches."));
}

function shownPart(part) {
  const tokens = part.pieces.flatMap((piece, i) => {
    const target = part.counts[i] === "1";
    const token = element("span", { class: target ? "target" : "read", title: `token ${i + 1}, ${target ? "a target" : "only read"}` }, piece || "∅");
    return part.breaks.includes(i) ? [element("i", { class: "turn" }), token] : [token];
  });
  const parts = tokens.length ? [element("div", { class: "document", tabindex: 0 }, ...tokens)] : [];
  if (part.cut) parts.push(element("p", { class: "border cut" }, "cut at train.sequence_length"));
  if (part.padding) parts.push(element("p", { class: "border" }, `padding × ${number(part.padding)}`));
  return parts;
}

function show(index) {
  const { samples } = data;
  at = Math.max(0, Math.min(samples.length - 1, index));
  $("samples-title").textContent = samples.length ? `Sample ${at + 1} of ${samples.length}` : "No samples";
  $("before").disabled = at === 0;
  $("after").disabled = at >= samples.length - 1;
  $("where").textContent = samples.length ? samples[at].where : "";
  $("documents").replaceChildren(...(samples.length ? samples[at].parts.flatMap(shownPart) : []));
}

heading(`${data.noun}, sequences of ${number(data.length)} tokens`,
  data.warnings.length ? `${data.warnings.length} warning${data.warnings.length > 1 ? "s" : ""}` : "no warnings", !data.warnings.length);
document.querySelector("main").hidden = false;
tiles();
$("warnings").hidden = !data.warnings.length;
$("warned").append(...data.warnings.map((text) => element("li", {}, text)));
$("files").append(...data.files.map(([name, count, place]) => element("tr", {},
  element("td", {}, name), element("td", { class: "number" }, number(count)), element("td", { class: "wide" }, place))));
$("before").addEventListener("click", () => show(at - 1));
$("after").addEventListener("click", () => show(at + 1));
lengths();
addEventListener("resize", lengths);
show(0);
