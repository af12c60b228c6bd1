"use strict";
// Draws the panels of a figure. All data comes from the JSON block; colors from the style sheet.
(() => {
  const root = document.documentElement;
  const panels = JSON.parse(document.getElementById("figure-data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)").matches;
  const color = name => getComputedStyle(root).getPropertyValue(name).trim();
  const hidden = new Set();

  const colored = trace => {
    const own = color(`--arm-${trace.meta.color}`);
    const { line, marker, error_y } = trace;
    return {
      ...trace,
      visible: !hidden.has(trace.meta.series),
      ...(line && { line: { ...line, color: own } }),
      ...(marker && { marker: { ...marker, color: own, line: { width: 1, color: color("--card") } } }),
      ...(error_y && { error_y: { ...error_y, color: own } }),
      ...(trace.fill && { fillcolor: `${own}29` }),
    };
  };

  const layout = panel => {
    const axis = { gridcolor: color("--grid"), linecolor: color("--rule"), zeroline: false, automargin: true, fixedrange: touch, exponentformat: "power" };
    const soft = color("--soft");
    return {
      xaxis: { ...axis, ...panel.layout.xaxis },
      yaxis: { ...axis, ...panel.layout.yaxis },
      shapes: panel.layout.shapes.map(s => ({ ...s, line: { width: 1.3, dash: "dash", color: soft } })),
      annotations: panel.layout.annotations.map(a => ({ ...a, font: { color: soft }, bgcolor: color("--card") })),
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: soft },
      margin: { l: 56, r: 14, t: 10, b: 46 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      showlegend: false, hovermode: "x unified", dragmode: touch ? false : "zoom",
      hoverlabel: { bgcolor: color("--card"), bordercolor: color("--rule"), font: { color: color("--ink") }, namelength: -1 },
    };
  };

  const config = { responsive: true, displaylogo: false, displayModeBar: false, showTips: false };
  const draw = () => Promise.all(panels.map(
    (panel, i) => Plotly.react(`panel-${i}`, panel.data.map(colored), layout(panel), config)));

  draw().then(() => { root.dataset.drawn = panels.length; });
  dark.addEventListener("change", draw);

  for (const button of document.querySelectorAll(".legend button")) {
    button.addEventListener("click", () => {
      const series = Number(button.dataset.series);
      if (!hidden.delete(series)) hidden.add(series);
      button.setAttribute("aria-pressed", String(!hidden.has(series)));
      draw();
    });
  }
})();
