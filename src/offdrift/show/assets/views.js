// What a reader does with a page: choose what is drawn, sort, filter, copy, recolor, read a token's numbers.
(() => {
  const { data } = page;
  const all = selector => [...document.querySelectorAll(selector)];

  // -- any metric, and any method's limits ------------------------------------------------------

  const choose = (id, use) => {
    const select = document.getElementById(id);
    if (!select) return;
    select.addEventListener("change", () => { use(select.value); });
    use(select.value);
  };

  choose("explore", name => {
    charts.put("explore", { x_title: "step", series: [{ name, ...data.explore[name], color: "arm-5", dash: "solid", kind: "line", group: "run", hover: ".4g" }] });
    const about = document.getElementById("explore-meaning");
    about.dataset.tip = data.meanings[name];
    about.setAttribute("aria-label", `About this metric: ${data.meanings[name]}`);
  });

  const pairColor = { mismatch: "arm-0", full: "arm-1", staleness: "arm-2" };
  choose("limits", name => {
    const limits = data.limits[name] || [];
    charts.put("ratios", { ...charts.get("ratios"), upright: limits.map(l => [l.x, "", pairColor[l.on] || "soft"]) });
    document.getElementById("limits-said").replaceChildren(...limits.map(l => {
      const item = document.createElement("li");
      item.textContent = `┆ ${l.on}: ${l.label}`;
      return item;
    }));
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

  const short = (x, digits = 3) => x == null ? "–" : Number(x.toPrecision(digits)).toString().replace("-", "−");
  const ofLog = (token, index) => {
    const heat = data.heat[Number(token.parentElement.dataset.sample)];
    const [l, logp, kl] = heat.values[index];
    const lines = heat.places ? [`token ${heat.first + index + 1}`] : [`${heat.ids ? "id" : "“"}${heat.ids ? " " : ""}${token.textContent}${heat.ids ? "" : "”"}  token ${heat.first + index + 1}`];
    if (l != null) lines.push(`log-ratio ${short(l)} nat, ratio ${short(Math.exp(l))}${heat.on ? ` (${heat.on})` : ""}`);
    if (logp != null) lines.push(`rollout log-prob ${short(logp)} nat, probability ${short(Math.exp(logp))}`);
    if (kl != null) lines.push(`KL ${short(kl)} nat`);
    return lines.join("\n");
  };
  const ofRun = (token, index) => {
    const [arm, sample] = token.parentElement.dataset.sample.split(",").map(Number);
    const [kl, tv, logp, weight] = data.samples[arm][sample][index];
    return `“${token.textContent}”  token ${index + 1}\nKL ${kl} nat\nTV ${tv}\nlog-prob (rollout) ${logp} nat\nweight ${weight}`;
  };
  page.tokens(data.samples ? ofRun : ofLog);

  // -- the page ------------------------------------------------------------------------------

  // A link to a place leads to it also where it is folded away; so does the address that the page was opened with.
  const unfold = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    for (let e = target; e; e = e.parentElement) if (e.matches("details")) e.open = true;
    target.scrollIntoView();
  };
  addEventListener("hashchange", unfold);
  page.ready.then(unfold);

  // The links of a table's rows are one stop of the Tab key; the arrows go from row to row.
  for (const body of all("tbody")) {
    const links = () => [...body.querySelectorAll("tr:not([hidden]) .anchor")];
    links().forEach((link, i) => { link.tabIndex = i ? -1 : 0; });
    body.addEventListener("keydown", event => {
      const from = links(), at = from.indexOf(event.target), to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: from.length - 1 }[event.key];
      if (at < 0 || to === undefined) return;
      event.preventDefault();
      const next = from[Math.max(0, Math.min(from.length - 1, to))];
      from[at].tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    });
  }

  // A printed page cannot be unfolded.
  const folded = [];
  addEventListener("beforeprint", () => { for (const d of all("details:not([open])")) { folded.push(d); d.open = true; } });
  addEventListener("afterprint", () => { while (folded.length) folded.pop().open = false; });

  // -- a page that is written again while its run goes on ----------------------------------------

  const renewed = document.querySelector("[data-renew]");
  if (renewed) {
    const seconds = Number(renewed.dataset.renew), written = Number(renewed.dataset.written);
    const memory = `offdrift ${location.pathname}`;
    // What a reader has opened stays open; where they have scrolled to, the browser knows.
    const remember = () => {
      try { sessionStorage.setItem(memory, JSON.stringify(all("details[open]").map(d => d.id))); } catch { /* no storage */ }
    };
    try {
      for (const id of JSON.parse(sessionStorage.getItem(memory) || "[]")) {
        const details = document.getElementById(id);
        if (details instanceof HTMLDetailsElement) details.open = true;
      }
    } catch { /* no storage */ }
    const age = document.getElementById("age");
    const tell = () => {
      const minutes = Math.floor((Date.now() / 1000 - written) / 60);
      const late = minutes >= 2;
      age.classList.toggle("flagged", late);
      age.textContent = late ? `not written for ${minutes} minutes: the watch may have ended` : `renews itself every ${seconds} s`;
    };
    tell();
    let due = false;
    const renew = () => {
      tell();
      due = document.hidden || !getSelection().isCollapsed; // not under the eyes of who copies something
      if (!due) location.reload();
    };
    addEventListener("pagehide", remember);
    setInterval(renew, 1000 * seconds);
    document.addEventListener("visibilitychange", () => { if (due && !document.hidden) renew(); });
  }
})();
