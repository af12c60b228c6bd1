// Draws the charts of a page, each from the columns that its series name, and hides what the legend's buttons say.
const charts = (() => {
  const { root, data, dark, color } = page;
  const touch = matchMedia("(pointer: coarse)").matches;
  const config = { responsive: true, displaylogo: false, displayModeBar: false, showTips: false };
  const hidden = new Set();
  const column = place => place === undefined ? [] : data.columns[place];

  // -- long series: of what is seen, the lowest and the highest of every stretch ------------------

  const zoomed = new Map(); // from the name of a chart to the part of its axes that is looked at
  const onAxis = (chart, v) => chart.log_x ? Math.log10(v) : v;

  // Rows of a series within a part of the x axis, and one beyond either end, so that its line leads out of the plot.
  const within = (chart, x, part) => {
    if (!part || typeof x[0] !== "number") return [0, x.length];
    const [low, high] = part.map(v => chart.log_x ? 10 ** v : v);
    const first = x.findIndex(v => v >= low), last = x.findLastIndex(v => v <= high);
    return first < 0 || last < first ? [0, 0] : [Math.max(0, first - 1), Math.min(x.length, last + 2)];
  };

  // As `extreme_rows` of charts.py does, so that a spike of one step among ten thousand stays visible.
  const extremes = (values, start, end, limit) => {
    const kept = new Set([start, end - 1]), stretches = Math.max(1, Math.floor(limit / 2) - 1);
    for (let s = 0; s < stretches; s++) {
      const from = start + Math.round(s * (end - start) / stretches), to = start + Math.round((s + 1) * (end - start) / stretches);
      let low = -1, high = -1;
      for (let i = from; i < to; i++) {
        if (values[i] == null) continue;
        if (low < 0 || values[i] < values[low]) low = i;
        if (high < 0 || values[i] > values[high]) high = i;
      }
      if (low < 0 && to > from) kept.add(from); else { kept.add(low); kept.add(high); }
    }
    kept.delete(-1);
    return [...kept].sort((a, b) => a - b);
  };

  // The columns of a series that are drawn: the lowest and the highest of every second pixel and more.
  const seen = (chart, series, width) => {
    const all = Object.fromEntries(["x", "y", "low", "high", "texts", "labels"].map(key => [key, column(series[key])]));
    const limit = Math.max(300, Math.round(1.2 * width));
    const [start, end] = within(chart, all.x, zoomed.get(chart.id)?.x);
    const every = end - start <= limit, whole = end - start === all.x.length;
    if (every && whole) return { ...all, shown: end, count: end };
    const rows = every ? Array.from({ length: end - start }, (_, i) => start + i) : extremes(all.y.length ? all.y : all.high, start, end, limit);
    for (const key in all) if (all[key].length) all[key] = rows.map(i => all[key][i]);
    return { ...all, shown: rows.length, count: end - start };
  };

  // Below a chart of long series: how many of their points are drawn.
  const say = (chart, counts) => {
    const note = document.getElementById(`detail-${chart.id}`);
    if (!note) return;
    const [longest] = counts.sort((a, b) => b.count - a.count), all = Math.max(...chart.series.map(s => s.of ?? 0));
    const few = n => n.toLocaleString("en");
    const drawn = longest.shown < longest.count ? `extremes of ${few(longest.count)} points` : `all ${few(longest.count)} points`;
    const kept = all ? `; the page keeps the extremes of ${few(all)}` : "";
    note.textContent = zoomed.has(chart.id) || longest.shown < longest.count || all ? `${drawn} a line${kept}` : "";
  };

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

  const traces = (series, { x, y, low, high, texts, labels }, span) => {
    const ink = color(`--${series.color}`);
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

  // The smallest and the largest number in some columns of a chart, each column looked through once.
  const ends = new Map();
  const endsOf = place => {
    if (!ends.has(place)) {
      let low = Infinity, high = -Infinity;
      for (const v of column(place)) if (typeof v === "number") { if (v < low) low = v; if (v > high) high = v; }
      ends.set(place, [low, high]);
    }
    return ends.get(place);
  };
  const extent = (chart, keys) => chart.series.flatMap(s => keys.map(key => endsOf(s[key]))).reduce(([a, b], [low, high]) => [Math.min(a, low), Math.max(b, high)], [Infinity, -Infinity]);
  const whole = chart => chart.series.every(s => column(s.x).every(v => v == null || Number.isInteger(v)));

  // Within two decades an axis that hugs its values could end up without a single tick.
  const decades = (low, high) => {
    if (high >= 100 * low) return { type: "log", dtick: 1 };
    const floor = Math.floor(Math.log10(low)), ceiling = Math.max(Math.ceil(Math.log10(high)), floor + 1);
    return { type: "log", dtick: "D2", range: [floor, ceiling] };
  };

  const yAxis = chart => {
    const axis = { ...base(), automargin: "left" };
    const [low, high] = extent(chart, ["y", "low", "high"]);
    if (chart.y_range) return { ...axis, ...(chart.log && { type: "log", dtick: 1 }), range: chart.log ? chart.y_range.map(Math.log10) : chart.y_range };
    if (chart.share) return { ...axis, range: [0, Math.max(1.04, high * 1.04)], tickformat: ".0%" };
    if (!chart.log || low > high) return low >= 0 ? { ...axis, rangemode: low < high / 2 ? "tozero" : "nonnegative" } : axis;
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
    const [low, high] = extent(chart, ["x"]);
    if (chart.log_x) return { ...axis, type: "log", ...(high >= 100 * low && { dtick: 1 }) };
    // There is no update 1.5.
    if (high - low <= 8 && whole(chart)) axis.dtick = 1;
    return low >= 0 ? { ...axis, rangemode: "nonnegative" } : axis;
  };

  const layout = chart => {
    const part = zoomed.get(chart.id) ?? {}, soft = color("--soft");
    const [x, y] = [xAxis(chart), yAxis(chart)].map((axis, i) => {
      const range = [part.x, part.y][i];
      return range ? { ...axis, range: [...range], autorange: false, dtick: undefined } : axis;
    });
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
  const box = id => document.getElementById(`chart-${id}`);
  const draw = id => {
    const chart = all.get(id), plot = box(id), span = extent(chart, ["x"]);
    const drawn = chart.series.map(series => seen(chart, series, plot.clientWidth));
    say(chart, [...drawn]);
    return Plotly.react(plot, chart.series.flatMap((series, i) => traces(series, drawn[i], span)), layout(chart), config);
  };
  const drawAll = () => { for (const id of all.keys()) draw(id); };

  // Add a chart, or change one; it is drawn at once if the others are.
  const put = (id, chart) => {
    all.set(id, { id, lines: [], upright: [], categories: [], x_ticks: [], ...chart });
    zoomed.delete(id);
    if (root.dataset.drawn !== undefined) draw(id);
  };

  // -- to look closer: by dragging across a chart, or by its keys ---------------------------------

  const look = (id, part) => {
    if (part) zoomed.set(id, part); else zoomed.delete(id);
    draw(id);
  };

  // After a drag or a double click, which have already moved the axes.
  const followed = id => event => {
    if (!Object.keys(event).some(key => key.startsWith("xaxis") || key.startsWith("yaxis"))) return;
    const { xaxis, yaxis } = box(id).layout, over = xaxis.autorange === false;
    const up = Object.keys(event).some(key => key.startsWith("yaxis.range")) ? [...yaxis.range] : over ? zoomed.get(id)?.y : undefined;
    look(id, over || up ? { x: over ? [...xaxis.range] : undefined, y: up } : undefined);
  };

  // Keys of a chart that has the focus: how far its middle moves and how wide it becomes, in shares of what is seen.
  const keys = { "+": [0, .5], "=": [0, .5], "-": [0, 2], ArrowLeft: [-.25, 1], ArrowRight: [.25, 1] };
  const pressed = id => event => {
    const chart = all.get(id);
    if (event.ctrlKey || event.metaKey || event.altKey || chart.categories.length) return;
    if (event.key === "0") { look(id); return; }
    if (!(event.key in keys) || (event.key.startsWith("Arrow") && !zoomed.has(id))) return;
    event.preventDefault();
    const whole = extent(chart, ["x"]).map(v => onAxis(chart, v));
    const [low, high] = zoomed.get(id)?.x ?? whole, [move, width] = keys[event.key];
    const half = width * (high - low) / 2, middle = (low + high) / 2 + move * (high - low);
    if (2 * half >= whole[1] - whole[0]) { look(id); return; }
    const at = Math.max(whole[0] + half, Math.min(whole[1] - half, middle));
    look(id, { x: [at - half, at + half] });
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

  // What is on the screen first; then the others in slices, so that the page answers meanwhile.
  const SLICE = 60; // ms
  const begin = async () => {
    const near = new Set([...all.keys()].filter(id => box(id).getBoundingClientRect().top < innerHeight));
    let since = performance.now();
    const next = async () => {
      await new Promise(done => setTimeout(done));
      since = performance.now();
    };
    for (const id of [...near, ...[...all.keys()].filter(id => !near.has(id))]) {
      if (!near.has(id) && root.dataset.begun === undefined) {
        root.dataset.begun = near.size;
        await next();
      }
      if (performance.now() - since > SLICE) await next();
      if (!box(id).data) draw(id);
      box(id).on("plotly_relayout", followed(id));
      box(id).addEventListener("keydown", pressed(id));
    }
    root.dataset.begun ??= near.size;
    root.dataset.drawn = all.size;
  };
  const failed = error => {
    for (const plot of document.querySelectorAll(".plot")) plot.textContent = "This browser cannot draw the chart: it lacks DecompressionStream or runs no scripts.";
    throw error;
  };
  // Once every script of the page has run.
  setTimeout(() => page.ready.then(begin, failed));
  dark.addEventListener("change", drawAll);
  // Paper is white, whatever the theme, and of another width: a drawing is scaled to it as a whole.
  const print = paper => {
    root.classList.toggle("paper", paper);
    if (root.dataset.drawn === undefined) return;
    if (dark.matches) drawAll();
    for (const plot of [...all.keys()].map(box)) {
      plot.style.aspectRatio = paper ? `${plot.clientWidth} / ${plot.clientHeight}` : "";
      for (const drawing of plot.querySelectorAll(".main-svg")) {
        if (paper) drawing.setAttribute("viewBox", `0 0 ${plot.clientWidth} ${plot.clientHeight}`); else drawing.removeAttribute("viewBox");
      }
    }
  };
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
  return { get: id => all.get(id), put };
})();
