"use strict";
// A table of points, one of the closest comparisons, and texts.

const small = (value) => (value === null ? "∞" : value === 0 ? "0" : value.toExponential(1).replace("e+0", ""));
const excess = (row) => (row.relative === null ? Infinity : row.tolerance ? row.relative / row.tolerance : row.relative ? Infinity : 0);

function table(heads, rows) {
  return element("table", {},
    element("thead", {}, element("tr", {}, ...heads.map(([head, kind]) => element("th", { scope: "col", class: kind }, head)))),
    element("tbody", {}, ...rows.map((cells) =>
      element("tr", {}, ...cells.map((cell, i) => element("td", { class: heads[i][1] }, cell))))));
}

function status(word) {
  return element("span", { class: `status ${word.replace(" ", "-")}` }, word);
}

function share(row) {
  const part = Math.min(1, excess(row));
  return element("span", { class: "track" },
    element("span", { class: part >= 1 ? "share over" : "share", style: `width:${(100 * part).toFixed(1)}%` }));
}

heading(data.settings, data.verdict, data.held);
$("points").append(table([["", ""], ["point", ""], ["what was found", "wide"]],
  data.points.map((point) => [status(point.status), point.name, point.detail])));
$("closest").append(table(
  [["what", ""], ["tensor", "wide"], ["step", "number"], ["apart", "number"], ["allowed", "number"], ["share of it", ""]],
  data.closest.map((row) =>
    [row.kind, row.name || "(all)", String(row.step), row.words || small(row.relative), small(row.tolerance), share(row)])));
$("where").textContent = data.where;
$("notes").append(...data.notes.map((note) => element("li", {}, note)));
for (const name of ["trace", "plan"]) $(name).textContent = data[name];
for (const name of ["closest", "trace", "plan", "notes"]) $(`${name}-section`).hidden = data[name].length === 0;
document.querySelector("main").hidden = false;
