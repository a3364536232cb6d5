// What a report does in a browser: draws the curves, orders pictures and tables, and hands out relabel.csv.
"use strict";

const COLORS = ["#3b7dd8", "#e0803a", "#35a06c", "#c9518f", "#8a6fd1", "#b3922a", "#2f9fb3", "#8b8f96"];
const FORMATS = { percent: ".2%", number: ".4~g", loss: ".4~g", count: ",.0f", bytes: ".3~g" };

const PRINTED = { width: 335, height: 205 };

function plain(text) {
  // Plotly takes names for a little HTML of its own.
  return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

function trace(series, unit) {
  const color = COLORS[series.color % COLORS.length];
  const thin = series.style === "training";
  return {
    type: "scatter", mode: series.style === "validation" || series.x.length === 1 ? "lines+markers" : "lines",
    name: plain(series.name), x: series.x, y: series.y, customdata: series.step,
    line: { color, width: thin ? 1.5 : 2.2, dash: series.style === "second" ? "dot" : "solid" },
    opacity: thin && series.paired ? 0.75 : 1, marker: { color, size: 5 },
    hovertemplate: `%{y:${FORMATS[unit]}}  <span>step %{customdata:,}</span>`,
  };
}

function draw(place, figure) {
  const paired = new Set(figure.series.map((series) => series.style)).size > 1;
  const traces = figure.series.map((series) => trace({ ...series, paired }, figure.unit));
  const largest = Math.max(...figure.series.flatMap((series) => series.y.map(Math.abs)));
  const tickformat = figure.unit === "percent" ? "~%" : largest >= 1e4 ? "~s" : "~g";
  const axis = { automargin: false, zeroline: false, ticks: "", showline: false };
  const layout = {
    margin: { l: 48, r: 10, t: 8, b: 40 }, showlegend: false, hovermode: "x unified", hoverdistance: -1,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12 },
    xaxis: { ...axis, showgrid: false, title: { text: "epoch", font: { size: 12 }, standoff: 4 }, hoverformat: ".4~g" },
    yaxis: { ...axis, nticks: 6, tickformat },
  };
  if (figure.unit !== "loss") layout.yaxis.rangemode = "tozero";
  if (figure.log) Object.assign(layout.yaxis, { type: "log", dtick: 1 });
  const config = {
    responsive: true, displaylogo: false,
    modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d", "zoomIn2d", "zoomOut2d", "pan2d", "zoom2d"],
  };
  Plotly.newPlot(place, traces, layout, config);
}

function orderPictures(block) {
  const grid = block.querySelector(".pictures");
  for (const button of block.querySelectorAll("[data-order]")) {
    button.addEventListener("click", () => {
      const key = button.dataset.order;
      const figures = [...grid.children].sort((a, b) => Number(b.dataset[key]) - Number(a.dataset[key]));
      grid.append(...figures);
      for (const other of block.querySelectorAll("[data-order]")) other.classList.toggle("chosen", other === button);
    });
  }
}

function cell(text) {
  return /[",;\t]|^\s|\s$/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
}

function offerRelabels(block, number) {
  const download = block.querySelector(".download");
  if (!download) return;
  block.querySelector("datalist").id = `classes-${number}`;
  const ticks = [...block.querySelectorAll("[data-file]")];
  const classOf = (tick) => tick.closest("label").querySelector("input[type=text]");
  for (const tick of ticks) {
    classOf(tick).setAttribute("list", `classes-${number}`);
    tick.addEventListener("change", () => {
      classOf(tick).disabled = !tick.checked;
      const count = ticks.filter((one) => one.checked).length;
      download.disabled = count === 0;
      download.textContent = count ? `relabel.csv (${count})` : "relabel.csv";
    });
  }
  download.addEventListener("click", () => {
    const chosen = ticks.filter((tick) => tick.checked);
    const lines = chosen.map((tick) => `${cell(tick.dataset.file)},${cell(classOf(tick).value)}`);
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([["file,class", ...lines, ""].join("\n")], { type: "text/csv" }));
    link.download = "relabel.csv";
    link.click();
    URL.revokeObjectURL(link.href);
  });
}

function sortable(table) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    let down = true;
    head.addEventListener("click", () => {
      const value = (row) => row.cells[column].textContent;
      const size = (row) => parseFloat(value(row).replace(/,/g, ""));
      const numbers = column > 0;
      const rows = [...body.rows].sort((a, b) =>
        numbers ? (size(a) || 0) - (size(b) || 0) : value(a).localeCompare(value(b), undefined, { numeric: true }));
      down = !down;
      body.append(...(down ? rows.reverse() : rows));
    });
  });
}

const figures = document.getElementById("figures");
if (figures && typeof Plotly !== "undefined") {
  const drawn = JSON.parse(figures.textContent);
  const places = [...document.querySelectorAll("[data-figure]")];
  for (const place of places) draw(place, drawn[Number(place.dataset.figure)]);
  // On paper two charts stand side by side, and nothing there can be opened.
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    for (const place of places) Plotly.relayout(place, PRINTED);
    for (const one of closed) one.open = true;
  });
  addEventListener("afterprint", () => {
    for (const place of places) Plotly.relayout(place, { width: null, height: null, autosize: true });
    for (const one of closed) one.open = false;
  });
}
document.querySelectorAll(".mistakes").forEach((block, number) => {
  orderPictures(block);
  offerRelabels(block, number);
});
document.querySelectorAll(".sortable").forEach(sortable);
