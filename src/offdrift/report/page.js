"use strict";
// Draws the charts and shows the numbers of a token. All data comes from the JSON block; text is
// only ever set as text, never as markup.
(() => {
  const root = document.documentElement;
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)").matches;
  const color = name => getComputedStyle(root).getPropertyValue(name).trim();
  const hidden = new Set();

  // -- charts --------------------------------------------------------------------------------

  const colored = trace => {
    const arm = color(`--arm-${trace.meta.arm % 8}`);
    const marker = { ...trace.marker, color: arm };
    if (marker.line) marker.line = { ...marker.line, color: color("--card") };
    return { ...trace, line: { ...trace.line, color: arm }, marker, visible: !hidden.has(trace.meta.arm) };
  };

  const layout = chart => {
    const axis = { gridcolor: color("--grid"), linecolor: color("--rule"), zeroline: false, automargin: true, fixedrange: touch };
    return {
      ...chart.layout,
      xaxis: { ...axis, ...chart.layout.xaxis, title: { text: "update", standoff: 4, font: { size: 11 } } },
      yaxis: { ...axis, ...chart.layout.yaxis, exponentformat: "power" },
      shapes: (chart.layout.shapes || []).map(s => ({ ...s, line: { ...s.line, color: color("--soft") } })),
      font: { family: getComputedStyle(document.body).fontFamily, size: 11, color: color("--soft") },
      margin: { l: 44, r: 10, t: 8, b: 34 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      showlegend: false, hovermode: "x unified", dragmode: touch ? false : "zoom",
      hoverlabel: { bgcolor: color("--card"), bordercolor: color("--rule"), font: { color: color("--ink") }, namelength: -1 },
    };
  };

  const config = { responsive: true, displaylogo: false, displayModeBar: false, showTips: false };
  const draw = () => Promise.all(data.charts.map(
    chart => Plotly.react(`chart-${chart.id}`, chart.data.map(colored), layout(chart), config)));

  draw().then(() => { root.dataset.drawn = data.charts.length; });
  dark.addEventListener("change", draw);

  for (const button of document.querySelectorAll(".legend button")) {
    button.addEventListener("click", () => {
      const arm = Number(button.dataset.arm);
      if (!hidden.delete(arm)) hidden.add(arm);
      button.setAttribute("aria-pressed", String(!hidden.has(arm)));
      draw();
    });
  }

  // -- the tip: what a column means, what a token's numbers are ------------------------------

  const tip = document.getElementById("tip");
  let marked = null;

  const hide = () => {
    tip.hidden = true;
    if (marked) marked.classList.remove("now");
    marked = null;
  };

  const place = anchor => {
    const at = anchor.getClientRects()[0] || anchor.getBoundingClientRect();
    const size = tip.getBoundingClientRect();
    const below = at.bottom + 8 + size.height < innerHeight;
    tip.style.top = `${below ? at.bottom + 8 : Math.max(4, at.top - size.height - 8)}px`;
    tip.style.left = `${Math.max(12, Math.min(at.left, innerWidth - size.width - 12))}px`;
  };

  const show = (anchor, text) => {
    tip.textContent = text;
    tip.hidden = false;
    place(anchor);
  };

  const showToken = token => {
    const [arm, sample] = token.parentElement.dataset.sample.split(",").map(Number);
    const index = Array.prototype.indexOf.call(token.parentElement.children, token);
    const [kl, tv, logp, weight] = data.samples[arm][sample][index];
    hide();
    marked = token;
    token.classList.add("now");
    show(token, `“${token.textContent}”  token ${index + 1}\nKL ${kl} nat\nTV ${tv}\nlog-prob (rollout) ${logp} nat\nweight ${weight}`);
  };

  const react = target => {
    if (!(target instanceof Element)) return false;
    const hint = target.closest("[data-tip]"), token = target.closest(".tokens > span");
    if (hint) { hide(); show(hint, hint.dataset.tip); }
    if (token) showToken(token);
    return Boolean(hint || token);
  };

  for (const name of ["pointerover", "focusin", "click"]) {
    document.addEventListener(name, event => { if (!react(event.target)) hide(); });
  }
  document.addEventListener("scroll", () => { if (marked) place(marked); else hide(); }, true);

  const step = { ArrowRight: 1, ArrowLeft: -1 };
  document.addEventListener("keydown", event => {
    if (event.key === "Escape") hide();
    const box = event.target;
    if (!(event.key in step) || !box.matches(".tokens")) return;
    event.preventDefault();
    const tokens = box.children, from = marked && marked.parentElement === box ? Array.prototype.indexOf.call(tokens, marked) : -1;
    const next = tokens[Math.max(0, Math.min(tokens.length - 1, from + step[event.key]))];
    if (!next) return;
    next.scrollIntoView({ block: "nearest" });
    showToken(next);
  });
})();
