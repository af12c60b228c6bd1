// Draws the charts of an audit, a check or a comparison, and lets the reader sort, filter, copy and recolor.
(() => {
  const { root, data, dark, color, config } = page;
  const columns = data.columns || {};
  const hidden = new Set();
  const all = selector => [...document.querySelectorAll(selector)];
  const column = name => columns[name] || [];

  // -- charts --------------------------------------------------------------------------------

  // One closed outline for every run of points without a gap.
  const outline = series => {
    const [x, low, high] = [series.x, series.low, series.high].map(column);
    const outer = { x: [], y: [] };
    for (let i = 0; i < x.length; i++) {
      if (low[i] == null || high[i] == null) continue;
      let j = i;
      while (j + 1 < x.length && low[j + 1] != null && high[j + 1] != null) j++;
      for (let k = i; k <= j; k++) { outer.x.push(x[k]); outer.y.push(high[k]); }
      for (let k = j; k >= i; k--) { outer.x.push(x[k]); outer.y.push(low[k]); }
      outer.x.push(null); outer.y.push(null);
      i = j;
    }
    return outer;
  };

  const trace = series => {
    const ink = color(`--${series.color}`);
    const common = { name: series.name, visible: !hidden.has(series.group), hovertemplate: series.texts ? "%{text}" : `%{y:${series.hover}}` };
    if (series.low) return { ...common, ...outline(series), type: "scatter", mode: "none", fill: "toself", fillcolor: `${ink}29`, hoverinfo: "skip", hovertemplate: undefined };
    const x = column(series.x), y = column(series.y), text = series.texts ? column(series.texts) : undefined;
    if (series.kind === "bars") return { ...common, x, y, text, textposition: "none", type: "bar", marker: { color: ink } };
    const steps = series.kind === "steps";
    const alone = y.filter(v => v != null).length === 1;
    return {
      ...common, x, y, text, type: "scatter", cliponaxis: false,
      mode: series.kind === "dots" ? "markers" : series.kind === "points" || alone ? "lines+markers" : "lines",
      line: { color: ink, width: steps ? 1.5 : 1.75, dash: series.dash, shape: steps ? "hv" : "linear" },
      marker: { color: ink, size: series.kind === "dots" ? 10 : 6 },
      ...(steps && { fill: "tozeroy", fillcolor: `${ink}22` }),
    };
  };

  const yAxis = chart => {
    const axis = { ...page.axis(), automargin: "left", exponentformat: "power" };
    const values = chart.series.flatMap(s => [s.y, s.low, s.high].flatMap(name => name ? column(name) : [])).filter(v => v != null);
    const low = Math.min(...values), high = Math.max(...values);
    if (chart.share) return { ...axis, range: [0, Math.max(1.04, high * 1.04)], tickformat: ".0%" };
    if (!chart.log || !values.length) return low >= 0 ? { ...axis, rangemode: "nonnegative" } : axis;
    // What lies eight decades below the largest is rounding: it may not press the rest into a line.
    if (high >= 1e8 * low) return { ...axis, type: "log", dtick: 1, range: [Math.log10(high) - 8, Math.log10(high) + .3] };
    if (high >= 100 * low) return { ...axis, type: "log", dtick: 1 };
    // Within two decades an axis that hugs its values could end up without a single tick.
    const floor = Math.floor(Math.log10(low)), ceiling = Math.max(Math.ceil(Math.log10(high)), floor + 1);
    return { ...axis, type: "log", dtick: "D2", range: [floor, ceiling] };
  };

  // Ticks of its own that a narrow screen has room for: every second one, the middle among them.
  const spaced = axis => {
    if (!axis.tickvals || innerWidth >= 640) return axis;
    const middle = (axis.tickvals.length - 1) / 2, kept = (_, i) => (i - middle) % 2 === 0;
    return { ...axis, tickvals: axis.tickvals.filter(kept), ticktext: axis.ticktext.filter(kept) };
  };

  const layout = chart => {
    const y = yAxis(chart), soft = color("--soft");
    const lines = [...chart.lines.map(([value, label]) => ({ across: value, label })), ...(chart.upright || [])];
    const line = { width: 1.3, dash: "dash", color: soft };
    const own = spaced(chart.layout.xaxis || {});
    return {
      ...page.look(),
      margin: { l: 46, r: 12, t: 10, b: 38 },
      xaxis: { ...page.axis(), automargin: chart.categories ? "bottom+right" : "bottom", ...(chart.categories ? { type: "category", categoryorder: "array", categoryarray: column(chart.categories) } : {}), ...own, title: { text: chart.x_title, standoff: 4, font: { size: 11 } } },
      yaxis: y, barmode: "group", bargap: .35,
      // A histogram's hover belongs to one bar of one series, not to all at x.
      hovermode: chart.id === "ratios" ? "closest" : "x unified",
      shapes: lines.map(l => l.across === undefined
        ? { type: "line", yref: "paper", y0: 0, y1: 1, x0: l.x, x1: l.x, line: { ...line, color: color(`--${l.color}`) } }
        : { type: "line", xref: "paper", x0: 0, x1: 1, y0: l.across, y1: l.across, line }),
      annotations: lines.filter(l => l.across !== undefined).map(l => ({
        text: l.label, showarrow: false, xref: "paper", x: .005, xanchor: "left", yanchor: "bottom", bgcolor: color("--card"), borderpad: 0,
        y: y.type === "log" ? Math.log10(l.across) : l.across, font: { size: 10, color: soft },
      })),
    };
  };

  const charts = new Map((data.charts || []).map(chart => [chart.id, chart]));
  const draw = id => {
    const chart = charts.get(id);
    return Plotly.react(`chart-${id}`, chart.series.map(trace), layout(chart), config);
  };
  const drawAll = () => Promise.all([...charts.keys()].map(draw));

  for (const button of all(".legend button")) {
    button.addEventListener("click", () => {
      const group = button.dataset.group;
      if (!hidden.delete(group)) hidden.add(group);
      button.setAttribute("aria-pressed", String(!hidden.has(group)));
      drawAll();
    });
  }

  // -- any metric, and any method's limits ------------------------------------------------------

  const choose = (id, use) => {
    const select = document.getElementById(id);
    if (!select) return;
    select.addEventListener("change", () => { use(select.value); });
    use(select.value);
  };

  choose("explore", name => {
    const series = data.explore[name] ? [{ name, x: "step", y: data.explore[name], color: "arm-5", dash: "solid", kind: "line", group: "run", hover: ".4g" }] : [];
    charts.set("explore", { id: "explore", series, lines: [], layout: {}, x_title: "step" });
    const about = document.getElementById("explore-meaning");
    about.dataset.tip = data.meanings[name];
    about.setAttribute("aria-label", `About this metric: ${data.meanings[name]}`);
    if (root.dataset.drawn) draw("explore");
  });

  const pairColor = { mismatch: "arm-0", full: "arm-1", staleness: "arm-2" };
  choose("limits", name => {
    const limits = data.limits[name] || [];
    charts.get("ratios").upright = limits.map(l => ({ x: l.x, color: pairColor[l.on] || "soft" }));
    document.getElementById("limits-said").replaceChildren(...limits.map(l => {
      const item = document.createElement("li");
      item.textContent = `┆ ${l.on}: ${l.label}`;
      return item;
    }));
    if (root.dataset.drawn) draw("ratios");
  });

  // -- tables: sort and filter ---------------------------------------------------------------

  const value = (row, at) => row.children[at].dataset.sort ?? row.children[at].textContent;
  const compare = (a, b) => {
    const [x, y] = [Number(a), Number(b)];
    return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b) : x - y;
  };

  const sort = (heading, order) => {
    const at = [...heading.parentElement.children].indexOf(heading);
    const body = heading.closest("table").tBodies[0];
    const sign = order === "ascending" ? 1 : -1;
    // What has no number stands at the end in either order.
    body.append(...[...body.rows].sort((a, b) => {
      const [x, y] = [value(a, at), value(b, at)];
      return x === "" || y === "" ? (x === "") - (y === "") : sign * compare(x, y);
    }));
    for (const other of heading.parentElement.children) if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", order);
  };

  for (const button of all(".sort")) {
    const heading = button.parentElement;
    const first = heading.classList.contains("text") ? "ascending" : "descending";
    const second = first === "ascending" ? "descending" : "ascending";
    button.addEventListener("click", () => sort(heading, heading.getAttribute("aria-sort") === first ? second : first));
  }

  for (const input of all("[data-filter]")) {
    const rows = [...document.getElementById(input.dataset.filter).tBodies[0].rows];
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of rows) row.hidden = !words.every(word => row.dataset.words.toLowerCase().includes(word));
      const left = rows.filter(row => !row.hidden).length;
      document.getElementById("filter-count").textContent = left === rows.length ? `${left} methods` : `${left} of ${rows.length} methods`;
    });
  }

  // -- snippets: tabs and copy ---------------------------------------------------------------

  const open = tab => {
    for (const other of tab.parentElement.children) {
      const chosen = other === tab;
      other.setAttribute("aria-selected", String(chosen));
      other.tabIndex = chosen ? 0 : -1;
      document.getElementById(other.getAttribute("aria-controls")).hidden = !chosen;
    }
  };

  for (const tab of all("[role=tab]")) tab.addEventListener("click", () => open(tab));
  const step = { ArrowRight: 1, ArrowLeft: -1 };
  document.addEventListener("keydown", event => {
    const tab = event.target.closest("[role=tab]");
    if (!tab || !(event.key in step)) return;
    event.preventDefault();
    const tabs = [...tab.parentElement.children];
    const next = tabs[(tabs.indexOf(tab) + step[event.key] + tabs.length) % tabs.length];
    open(next);
    next.focus();
  });

  const copy = async panel => {
    try { await navigator.clipboard.writeText(panel.textContent); return true; } catch { /* not allowed here */ }
    getSelection().selectAllChildren(panel);
    return document.execCommand("copy");
  };

  for (const button of all(".copy")) {
    button.addEventListener("click", async () => {
      const panel = button.closest(".snippets").querySelector("[role=tabpanel]:not([hidden])");
      button.textContent = await copy(panel) ? "Copied" : "Select and copy";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  }

  // -- tokens: their colors and numbers ---------------------------------------------------------

  const level = (edges, x) => edges.filter(edge => x >= edge).length;
  const classes = {
    ratio: ([l]) => { const i = l == null ? 0 : level(data.heat_edges.ratio, Math.abs(l)); return i ? `${l < 0 ? "n" : "p"}${i}` : "k0"; },
    kl: ([, , kl]) => `k${kl == null ? 0 : level(data.heat_edges.kl, kl)}`,
  };

  for (const input of all("input[name=mode]")) {
    input.addEventListener("change", () => {
      for (const scale of all(".scale")) scale.hidden = scale.dataset.mode !== input.value;
      for (const box of all(".tokens")) {
        const { values } = data.heat[Number(box.dataset.sample)];
        [...box.children].forEach((token, i) => { token.className = classes[input.value](values[i]); });
      }
    });
  }

  const said = (x, digits = 3) => x == null ? "–" : Number(x.toPrecision(digits)).toString().replace("-", "−");
  page.tokens((token, index) => {
    const heat = data.heat[Number(token.parentElement.dataset.sample)];
    const [l, logp, kl] = heat.values[index];
    const lines = [`${heat.ids ? "id" : "“"}${heat.ids ? " " : ""}${token.textContent}${heat.ids ? "" : "”"}  token ${heat.first + index + 1}`];
    if (l != null) lines.push(`log-ratio ${said(l)} nat, ratio ${said(Math.exp(l))}${heat.on ? ` (${heat.on})` : ""}`);
    if (logp != null) lines.push(`rollout log-prob ${said(logp)} nat, probability ${said(Math.exp(logp))}`);
    if (kl != null) lines.push(`KL ${said(kl)} nat`);
    return lines.join("\n");
  });

  // -- the page ------------------------------------------------------------------------------

  // A printed page cannot be unfolded.
  const folded = [];
  addEventListener("beforeprint", () => { for (const d of all("details:not([open])")) { folded.push(d); d.open = true; } });
  addEventListener("afterprint", () => { while (folded.length) folded.pop().open = false; });

  drawAll().then(() => { root.dataset.drawn = charts.size; });
  dark.addEventListener("change", drawAll);
})();
