// Draws the figures that the page carries as data. All text in them was escaped for Plotly where it was made.
(function () {
  "use strict";
  const figures = JSON.parse(document.getElementById("figures").textContent);
  // No tool bar: a double click undoes a zoom, and some of the bar's tools would send data elsewhere.
  const config = { responsive: true, displayModeBar: false, showSendToCloud: false, showEditInChartStudio: false };
  // On a touch screen a finger on a chart scrolls the page.
  const touch = window.matchMedia("(pointer: coarse)").matches;

  function draw(element) {
    const figure = figures[element.dataset.chart];
    element.style.height = figure.height + "px";
    if (touch) figure.layout.dragmode = false;
    return Plotly.newPlot(element, figure.data, figure.layout, config);
  }

  // A chart inside a closed <details> has no size yet: it is drawn when it is first opened.
  const waiting = new Map();
  const drawing = [];
  for (const element of document.querySelectorAll("[data-chart]")) {
    const folded = element.closest("details:not([open])");
    if (folded) {
      waiting.set(folded, (waiting.get(folded) || []).concat(element));
    } else {
      drawing.push(draw(element));
    }
  }
  for (const [folded, elements] of waiting) {
    folded.addEventListener("toggle", () => elements.forEach(draw), { once: true });
  }
  Promise.all(drawing).then(() => document.documentElement.setAttribute("data-drawn", String(drawing.length)));

  // Paper has its own width; charts are fitted to it and back.
  function fit() {
    for (const element of document.querySelectorAll(".js-plotly-plot")) Plotly.Plots.resize(element);
  }
  window.addEventListener("beforeprint", () => {
    document.documentElement.classList.add("printing");
    fit();
  });
  window.addEventListener("afterprint", () => {
    document.documentElement.classList.remove("printing");
    fit();
  });
})();
