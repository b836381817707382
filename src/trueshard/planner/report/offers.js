"use strict";
// Offers side by side: a table, and what a run costs on those that fit.

const fitting = data.offers.filter((offer) => offer.bill && !offer.lacking_bytes);
const withMoney = fitting.some((offer) => offer.bill.money !== null);
const costOf = (offer) => (withMoney ? offer.bill.money : offer.bill.device_hours);

function line(tag, words, isBest) {
  return element("tr", isBest ? { style: "font-weight:600" } : {}, ...words.map((word, i) =>
    element(tag, { class: i > 2 && i < words.length - 1 ? "number" : "" }, word)));
}

document.querySelector("main").hidden = false;
const best = data.offers[0].serves ? data.offers[0] : null;
heading(data.notes[0], best ? best.cells.slice(1, 3).join(" · ") : "no offer serves", Boolean(best));
for (const note of data.notes.slice(1)) $("answer").append(element("p", { class: "note" }, note));
$("answer").parentElement.hidden = data.notes.length < 2;
$("offers").append(element("table", {},
  element("thead", {}, line("th", data.head, false)),
  element("tbody", {}, ...data.offers.map((offer) => line("td", offer.cells, offer === best)))));
$("costs-section").hidden = !fitting.length;
$("costs-title").textContent = withMoney ? "Money for the run" : "GPU hours for the run";
const most = Math.max(...fitting.map(costOf), 0) || 1;
for (const offer of fitting) {
  const [mark, name, method] = offer.cells;
  const colour = offer.serves ? "var(--backward)" : "var(--idle-host)";
  $("costs").append(
    element("p", { class: "note" }, element("b", {}, `${method} on ${name}`), ` ${mark} · ${number(costOf(offer))}${offer.serves ? "" : ", too late"}`),
    element("div", { class: "parts" }, element("i", { style: `background:${colour};width:${(100 * costOf(offer)) / most}%`, title: number(costOf(offer), 2) })));
}
