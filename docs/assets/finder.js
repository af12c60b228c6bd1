/* The method table, searched and filtered: assets/methods.js has the rows, the address has the choice, nothing is loaded. */
(() => {
  "use strict";
  const { rows: BY_NAME, words: WORDS, situations: SITUATIONS } = window.OFFDRIFT_METHODS;
  const ROWS = Object.values(BY_NAME);
  const list = (value) => (value === null || value === undefined || value === "" ? [] : [].concat(value));

  /** What a row must be given beside the log-probs of rollout and current policy. */
  const needs = (row) =>
    row.kind === "system" ? [] : [
      ...list(row.needs),
      ...(row.needs_old ? ["logp_old"] : []),
      ...(row.needs_reference ? ["logp_ref"] : []),
      ...(row.needs_divergences ? ["whole distributions"] : []),
      ...(list(row.needs).length || row.needs_old || row.needs_reference || row.needs_divergences ? [] : ["nothing else"]),
    ];
  /** Where it acts when something runs. */
  const acts = (row) =>
    row.kind === "method" ? ["in any loss"] : row.command ? ["a recipe here runs it"] : ["elsewhere: nothing here runs it"];

  const FILTERS = [
    ["kind", "kind", (row) => [row.kind]],
    ["family", "family", (row) => [row.family]],
    ["reads", "reads", (row) => (row.kind === "system" ? [] : row.ratio.length ? row.ratio : ["none"])],
    ["level", "level", (row) => row.unit],
    ["evidence", "evidence it needs", (row) => row.evidence],
    ["needs", "also needs", needs],
    ["acts", "acts in a run", acts],
    ["sign", "sign of the advantage", (row) => list(row.sign)],
    ["certifies", "certifies", (row) => list(row.certifies)],
    ["bias", "bias of the gradient", (row) => (row.kind === "system" ? [] : [row.bias || "not known"])],
    ["aggregate", "aggregate", (row) => (row.kind === "system" ? [] : list(row.aggregate))],
    ["status", "formula from", (row) => list(row.status)],
  ];
  const TEXT = new Map(
    ROWS.map((row) => [row, [row.name, row.title, row.summary, row.family, row.mechanism, row.is_treatment, row.target, row.fails,
      row.reference, row.formula, row.where].filter(Boolean).join(" ").toLowerCase()]),
  );

  const make = (tag, properties = {}, ...children) => {
    const node = Object.assign(document.createElement(tag), properties);
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  };

  const root = document.getElementById("method-finder");
  const search = make("input", { type: "search", id: "finder-search", placeholder: "word of name, formula, failure or source: DeepSeek, 2512.23075, variance", autocomplete: "off" });
  const selects = new Map(FILTERS.map(([key]) => [key, make("select", { id: `finder-${key}` })]));
  const audit = make("select", { id: "finder-audit" },
    make("option", { value: "", textContent: "nothing yet: show all" }),
    ...Object.entries(SITUATIONS).map(([name, about]) => make("option", { value: name, textContent: about.audit })));
  const advice = make("div", { className: "finder-advice", hidden: true });
  const count = make("p", { className: "finder-count" });
  count.setAttribute("aria-live", "polite");
  const clear = make("button", { type: "button", className: "md-button finder-clear", textContent: "Clear all" });
  const results = make("div", { className: "finder-results" });
  const boxes = FILTERS.map(([key, label]) => make("label", { htmlFor: `finder-${key}` }, label, selects.get(key)));
  root.append(
    make("label", { htmlFor: "finder-audit", className: "finder-audit" }, "what did the audit say?", audit),
    advice,
    make("label", { htmlFor: "finder-search", className: "finder-search" }, "search", search),
    make("div", { className: "finder-filters" }, ...boxes),
    make("div", { className: "finder-bar" }, count, clear),
    results,
  );

  const state = { audit: "", q: "", open: "" };
  const fromAddress = () => {
    const given = new URLSearchParams(location.hash.slice(1));
    state.audit = SITUATIONS[given.get("audit")] ? given.get("audit") : "";
    state.q = given.get("q") || "";
    state.open = given.get("open") || "";
    for (const [key] of FILTERS) state[key] = given.get(key) || "";
    search.value = state.q;
    audit.value = state.audit;
  };
  const toAddress = () => {
    const filled = Object.entries(state).filter(([, value]) => value);
    history.replaceState(null, "", filled.length ? `#${new URLSearchParams(filled)}` : location.pathname + location.search);
  };

  /** Whether a row is left by every filter but one, whose counts are then of what choosing it would leave. */
  const passes = (row, except) =>
    (!state.audit || SITUATIONS[state.audit].methods.includes(row.name)) &&
    state.q.toLowerCase().split(/\s+/).every((word) => TEXT.get(row).includes(word)) &&
    FILTERS.every(([key, , values]) => key === except || !state[key] || values(row).includes(state[key]));

  const explained = (key, value) => {
    const words = { reads: RATIOS, level: WORDS.unit, evidence: WORDS.evidence, sign: WORDS.sign, certifies: WORDS.certifies, bias: WORDS.bias, aggregate: WORDS.aggregate, status: WORDS.status }[key];
    return (words && words[value]) || "";
  };
  const RATIOS = {
    full: "current to rollout policy",
    mismatch: "old to rollout policy: two engines at the same weights",
    staleness: "current to old policy: two versions in one engine",
    none: "no ratio at all",
  };

  const fill = () => {
    for (const [key, , values] of FILTERS) {
      const tally = new Map();
      for (const row of ROWS) for (const value of values(row)) tally.set(value, tally.get(value) || 0);
      for (const row of ROWS) if (passes(row, key)) for (const value of new Set(values(row))) tally.set(value, tally.get(value) + 1);
      const select = selects.get(key);
      const options = [...tally].map(([value, n]) =>
        make("option", { value, textContent: `${value} (${n})`, disabled: !n && state[key] !== value, title: explained(key, value) }));
      select.replaceChildren(make("option", { value: "", textContent: "any" }), ...options);
      select.value = state[key];
      select.parentElement.classList.toggle("chosen", Boolean(state[key]));
    }
  };

  const pair = (term, ...content) => (content.filter(Boolean).length ? [make("dt", { textContent: term }), make("dd", {}, ...content)] : []);
  const code = (text) => (text ? make("code", { textContent: text }) : null);
  const meaning = (key, values) => list(values).map((value) => (explained(key, value) ? `${value}: ${explained(key, value)}` : value)).join("; ");

  const shownAt = ({ scale, models, source }) =>
    source ? `${scale}, ${models === "both" ? "dense models and MoE" : `${models} models`} (${source})` : `${scale} in a source that was read`;

  const card = (row) => {
    const chips = row.kind === "system"
      ? ["system", row.model_class === "both" ? null : row.model_class]
      : [...(row.ratio.length ? row.ratio : ["no ratio"]), ...row.unit, row.bias && `bias ${row.bias}`];
    const head = make("summary", {},
      make("span", { className: "finder-name", textContent: row.name }),
      ...chips.filter(Boolean).map((text) => make("span", { className: `chip chip-${text.split(" ")[0]}`, textContent: text })),
      list(row.used_by).length ? make("span", { className: "chip chip-used", textContent: `★ ${row.used_by.length} frameworks`, title: row.used_by.join(", ") }) : null,
      row.experimental ? make("span", { className: "chip chip-warn", textContent: "experimental" }) : null,
      make("span", { className: "finder-summary", textContent: row.title ? `${row.title}: ${row.summary}` : row.summary }));
    const body = make("dl", {},
      ...pair("formula", code(row.formula)),
      ...pair("against", row.target),
      ...pair("mechanism", row.mechanism),
      ...pair("importance", row.is_treatment),
      ...pair("fails", row.fails),
      ...pair("reads", meaning("reads", row.ratio)),
      ...pair("level", meaning("level", row.unit)),
      ...pair("evidence", meaning("evidence", row.evidence)),
      ...pair("also needs", needs(row).join(", ")),
      ...pair("bias", row.kind === "system" ? "" : meaning("bias", row.bias || "not known")),
      ...pair("certifies", meaning("certifies", row.certifies)),
      ...pair("trained return", row.trained_return && row.trained_return.words),
      ...pair("where", row.where),
      ...pair("watch", list(row.watch).join(", ")),
      ...pair("correct with", list(row.related).join(", ")),
      ...pair("shown at", row.shown_at && shownAt(row.shown_at)),
      ...pair("used by", list(row.used_by).join(", ")),
      ...pair("source", row.reference, row.status ? ` (${meaning("status", row.status)})` : ""),
      ...pair("run it", code(row.command)));
    const box = make("details", { id: `method-${row.name}`, open: state.open === row.name }, head, body);
    box.addEventListener("toggle", () => {
      if (box.open) state.open = row.name;
      else if (state.open === row.name) state.open = "";
      toAddress();
    });
    return box;
  };

  /** Three methods to begin with, and what speaks for each. */
  const advise = () => {
    const about = SITUATIONS[state.audit];
    advice.hidden = !about;
    advice.replaceChildren(...(about ? [make("p", { textContent: "Begin with" }), make("ol", {}, ...about.suggested.map((row) =>
      make("li", {}, make("a", { href: `#method-${row.method}`, className: "finder-name", textContent: row.method,
        onclick: (event) => { event.preventDefault(); state.open = row.method; toAddress(); show(); document.getElementById(`method-${row.method}`)?.scrollIntoView(); } }),
      ` ${row.evidence} (${row.where})`)))] : []));
  };

  const show = () => {
    advise();
    const left = ROWS.filter((row) => passes(row));
    const methods = left.filter((row) => row.kind === "method").length;
    count.textContent = left.length ? `${methods} of ${ROWS.filter((row) => row.kind === "method").length} methods, ${left.length - methods} of ${ROWS.filter((row) => row.kind === "system").length} systems` : "Nothing is left: take a filter back.";
    results.replaceChildren(...left.map(card));
    fill();
  };
  const change = () => {
    toAddress();
    show();
  };

  audit.addEventListener("change", () => { state.audit = audit.value; change(); });
  search.addEventListener("input", () => { state.q = search.value.trim(); change(); });
  for (const [key, select] of selects) select.addEventListener("change", () => { state[key] = select.value; change(); });
  clear.addEventListener("click", () => {
    for (const key of Object.keys(state)) state[key] = "";
    search.value = "";
    audit.value = "";
    change();
    search.focus();
  });
  window.addEventListener("hashchange", () => { fromAddress(); show(); });
  fromAddress();
  show();
  if (state.open) document.getElementById(`method-${state.open}`)?.scrollIntoView();
})();
