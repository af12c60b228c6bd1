// Draws the charts of a page, each from the columns that its series name, and hides what the legend's buttons say.
const charts = (() => {
  const { root, data, dark, color } = page;
  const touch = matchMedia("(pointer: coarse)").matches;
  const config = { responsive: true, displaylogo: false, displayModeBar: false, showTips: false };
  const hidden = new Set();
  const column = place => place === undefined ? [] : data.columns[place];

  // One closed outline for every run of points without a gap.
  const outline = (x, low, high) => {
    const outer = { x: [], y: [] };
    for (let i = 0; i < x.length; i++) {
      if (low[i] == null) continue;
      let j = i;
      while (j + 1 < x.length && low[j + 1] != null) j++;
      for (let k = i; k <= j; k++) { outer.x.push(x[k]); outer.y.push(high[k]); }
      for (let k = j; k >= i; k--) { outer.x.push(x[k]); outer.y.push(low[k]); }
      outer.x.push(null); outer.y.push(null);
      i = j;
    }
    return outer;
  };

  // A label may not leave the plot, so that it leans inwards at its sides; of two that are close, the left one is below.
  const beside = (x, y, labels, [low, high]) => {
    const shown = labels.map((_, i) => i).filter(i => labels[i]).sort((a, b) => x[a] - x[b]);
    const close = (i, j) => j !== undefined && x[j] - x[i] < .15 * (high - low) && Math.abs(y[j] - y[i]) < .12 * Math.max(y[i], y[j]);
    const side = v => v < low + .2 * (high - low) ? "right" : v > low + .8 * (high - low) ? "left" : "center";
    const below = new Set(shown.filter((i, n) => close(i, shown[n + 1])));
    return {
      mode: "markers+text", text: labels, textfont: { size: innerWidth < 640 ? 9 : 11, color: color("--ink") },
      textposition: x.map((v, i) => `${below.has(i) ? "bottom" : "top"} ${side(v)}`),
    };
  };

  const traces = (series, span) => {
    const ink = color(`--${series.color}`);
    const [x, y, low, high, texts, labels] = [series.x, series.y, series.low, series.high, series.texts, series.labels].map(column);
    const dots = series.kind === "dots", steps = series.kind === "steps", band = low.length > 0;
    const common = { type: "scatter", name: series.name, visible: !hidden.has(series.group) };
    const drawn = [];
    if (band && !dots) drawn.push({ ...common, ...outline(x, low, high), mode: "none", fill: "toself", fillcolor: `${ink}29`, hoverinfo: "skip" });
    if (!y.length) return drawn;
    const value = `%{y:${series.hover}}`;
    const main = {
      ...common, x, y, text: texts.length ? texts : undefined,
      hovertemplate: texts.length ? "%{text}" : band ? `${value}  (%{customdata[0]:.4g} to %{customdata[1]:.4g})` : value,
      ...(band && { customdata: low.map((end, i) => [end, high[i]]) }),
    };
    if (series.kind === "bars") return [{ ...main, type: "bar", textposition: "none", marker: { color: ink } }];
    const alone = y.filter(v => v != null).length === 1;
    drawn.push({
      ...main, cliponaxis: false,
      mode: dots || alone ? "markers" : series.kind === "points" ? "lines+markers" : "lines",
      opacity: series.faint ? .35 : series.strong && !dots ? .5 : 1,
      line: { color: ink, width: series.strong ? 5 : series.faint ? 1 : steps ? 1.5 : 1.9, dash: series.dash, shape: steps ? "hv" : "linear" },
      marker: { color: ink, size: dots ? (series.strong ? 15 : 9) : 6, symbol: series.symbol, line: { width: dots ? 1.2 : 0, color: color("--card") } },
      // Across a gap a filled outline would show a slope where there is nothing.
      ...(steps && !y.includes(null) && { fill: "tozeroy", fillcolor: `${ink}22` }),
      ...(labels.length && { ...beside(x, y, labels, span), hovertext: texts, hovertemplate: "%{hovertext}" }),
      ...(series.faint && { hoverinfo: "skip", hovertemplate: undefined }),
      ...(band && dots && { error_y: {
        type: "data", symmetric: false, color: ink, thickness: 1.2, width: 3,
        array: y.map((v, i) => v == null || high[i] == null ? 0 : high[i] - v),
        arrayminus: y.map((v, i) => v == null || low[i] == null ? 0 : v - low[i]),
      } }),
    });
    return drawn;
  };

  const base = () => ({ gridcolor: color("--grid"), linecolor: color("--rule"), zeroline: false, fixedrange: touch, exponentformat: "power" });
  const numbers = (chart, keys) => chart.series.flatMap(s => keys.flatMap(key => column(s[key]))).filter(v => typeof v === "number");

  const extent = values => values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);

  // Within two decades an axis that hugs its values could end up without a single tick.
  const decades = (low, high) => {
    if (high >= 100 * low) return { type: "log", dtick: 1 };
    const floor = Math.floor(Math.log10(low)), ceiling = Math.max(Math.ceil(Math.log10(high)), floor + 1);
    return { type: "log", dtick: "D2", range: [floor, ceiling] };
  };

  const yAxis = chart => {
    const axis = { ...base(), automargin: "left" };
    const values = numbers(chart, ["y", "low", "high"]);
    const [low, high] = extent(values);
    if (chart.y_range) return { ...axis, ...(chart.log && { type: "log", dtick: 1 }), range: chart.log ? chart.y_range.map(Math.log10) : chart.y_range };
    if (chart.share) return { ...axis, range: [0, Math.max(1.04, high * 1.04)], tickformat: ".0%" };
    if (!chart.log || !values.length) return low >= 0 ? { ...axis, rangemode: low < high / 2 ? "tozero" : "nonnegative" } : axis;
    // What lies eight decades below the largest is rounding: it may not press the rest into a line.
    if (high >= 1e8 * low) return { ...axis, type: "log", dtick: 1, range: [Math.log10(high) - 8, Math.log10(high) + .3] };
    return { ...axis, ...decades(low, high) };
  };

  const xAxis = chart => {
    const axis = { ...base(), title: { text: chart.x_title, standoff: 4, font: { size: 11 } } };
    if (chart.categories.length) return { ...axis, automargin: "bottom+right", type: "category", categoryorder: "array", categoryarray: chart.categories };
    axis.automargin = "bottom";
    if (chart.x_ticks.length) {
      // A narrow screen has room for every second tick, the middle one among them.
      const middle = (chart.x_ticks.length - 1) / 2;
      const ticks = chart.x_ticks.filter((_, i) => innerWidth >= 640 || (i - middle) % 2 === 0);
      return { ...axis, tickmode: "array", tickangle: 0, tickvals: ticks.map(t => t[0]), ticktext: ticks.map(t => t[1]) };
    }
    const values = numbers(chart, ["x"]);
    const [low, high] = extent(values);
    if (chart.log_x) return { ...axis, type: "log", ...(high >= 100 * low && { dtick: 1 }) };
    // There is no update 1.5.
    if (values.length && high - low <= 8 && values.every(Number.isInteger)) axis.dtick = 1;
    return low >= 0 ? { ...axis, rangemode: "nonnegative" } : axis;
  };

  const layout = chart => {
    const x = xAxis(chart), y = yAxis(chart), soft = color("--soft");
    const on = (axis, place) => axis.type === "log" ? Math.log10(place) : place;
    const line = { type: "line", line: { width: 1.3, dash: "dash", color: soft } };
    const label = { showarrow: false, bgcolor: color("--card"), borderpad: 0, font: { size: 10, color: soft } };
    return {
      font: { family: getComputedStyle(document.body).fontFamily, size: 11, color: soft },
      margin: { l: 46, r: 12, t: 10, b: 38 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      showlegend: false, dragmode: touch ? false : "zoom",
      hoverlabel: { bgcolor: color("--card"), bordercolor: color("--rule"), font: { color: color("--ink") }, namelength: -1 },
      xaxis: x, yaxis: y, barmode: "group", bargap: .35,
      // A bar of a histogram, or a point of a cloud, belongs to one series, not to all at x.
      hovermode: chart.series.some(s => s.kind === "steps") || chart.series.every(s => s.kind === "dots" || s.faint) ? "closest" : "x unified",
      shapes: [
        ...chart.lines.map(([at]) => ({ ...line, xref: "paper", x0: 0, x1: 1, y0: at, y1: at })),
        ...chart.upright.map(([at, , name]) => ({ ...line, yref: "paper", y0: 0, y1: 1, x0: at, x1: at, line: { ...line.line, color: name ? color(`--${name}`) : soft } })),
      ],
      annotations: [
        ...chart.lines.map(([at, text]) => ({ ...label, text, xref: "paper", x: .005, xanchor: "left", yanchor: "bottom", y: on(y, at) })),
        ...chart.upright.filter(([, text]) => text).map(([at, text]) => ({ ...label, text, yref: "paper", y: 1, xanchor: "right", yanchor: "top", x: on(x, at) })),
      ],
    };
  };

  const all = new Map(data.charts.map(chart => [chart.id, chart]));
  const draw = id => {
    const chart = all.get(id);
    return Plotly.react(`chart-${id}`, chart.series.flatMap(series => traces(series, extent(numbers(chart, ["x"])))), layout(chart), config);
  };
  const drawAll = () => Promise.all([...all.keys()].map(draw));

  // Add a chart, or change one; it is drawn at once if the others are.
  const put = (id, chart) => {
    all.set(id, { lines: [], upright: [], categories: [], x_ticks: [], ...chart });
    if (root.dataset.drawn) draw(id);
  };

  for (const button of document.querySelectorAll(".legend button")) {
    button.addEventListener("click", () => {
      const group = button.dataset.group;
      if (!hidden.delete(group)) hidden.add(group);
      for (const same of document.querySelectorAll(".legend button")) {
        if (same.dataset.group === group) same.setAttribute("aria-pressed", String(!hidden.has(group)));
      }
      drawAll();
    });
  }

  // Once every script of the page has run.
  setTimeout(() => drawAll().then(() => { root.dataset.drawn = all.size; }));
  dark.addEventListener("change", drawAll);
  return { get: id => all.get(id), put };
})();
