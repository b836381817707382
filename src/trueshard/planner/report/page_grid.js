"use strict";
// Sliders over points that were simulated.

function gridPoint(at) {
  let index = 0;
  data.grid.axes.forEach((axis, i) => (index = index * axis.values.length + at[i]));
  return data.grid.points[index];
}

function showGrid(at) {
  const point = gridPoint(at);
  const most = Math.max(...data.grid.points.map((each) => each.peak_live_bytes || 0), ...data.grid.points.map((each) => each.peak_reserved_bytes || 0), 1);
  $("grid-bar").replaceChildren(...Object.entries(point.peak_by_kind ?? {}).filter(([, value]) => value > 0).map(([kind, value]) =>
    element("i", { style: `background:${kindColour(kind)};width:${(100 * value) / most}%` })));
  $("grid-say").textContent = point.problem
    ? `No forecast: ${point.problem}`
    : `${bytes(point.peak_live_bytes)} live, ${bytes(point.peak_reserved_bytes)} reserved of ${bytes(point.budget_bytes)}: ${point.fits ? "fits" : "does not fit"}. `
      + `${number(point.tokens_per_second_per_rank)} ${data.counted} a second and rank; a step of ${duration(point.step_seconds)}, `
      + `${number((100 * point.exposed_communication_seconds) / (point.step_seconds || 1), 1)}% of it waiting for communication; MFU ${number(point.mfu * 100, 1)}%.`;
  $("grid-say").className = point.problem || !point.fits ? "unfit" : "";
}

function sliders() {
  $("grid-section").hidden = !data.grid;
  if (!data.grid) return;
  const at = [...data.grid.start];
  data.grid.axes.forEach((axis, i) => {
    const said = element("output", {}, number(axis.values[at[i]]));
    const input = element("input", {
      type: "range", min: 0, max: axis.values.length - 1, step: 1, value: at[i], id: `slide-${axis.name}`,
      oninput: (event) => {
        at[i] = Number(event.target.value);
        said.textContent = number(axis.values[at[i]]);
        input.setAttribute("aria-valuetext", said.textContent);
        showGrid(at);
      },
    });
    $("sliders").append(element("label", { class: "slider" }, element("span", {}, axis.name), input, said));
  });
  const used = KINDS.filter((kind) => data.grid.points.some((point) => Object.entries(point.peak_by_kind ?? {}).some(([name, value]) => name === kind && value)));
  $("grid-legend").append(element("div", {}, ...used.map((kind) => element("span", {}, swatch(kindColour(kind)), kind))));
  showGrid(at);
}
