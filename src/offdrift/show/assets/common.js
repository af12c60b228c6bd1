"use strict";
// What every page does: its data, the colors of its theme, and the tip. All data comes
// from the JSON block; text is only ever set as text, never as markup.
// A page is read on the screen in the theme of its reader, and printed in the light one.
const page = (() => {
  const root = document.documentElement;
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const styles = getComputedStyle(root); // stays up to date
  const color = name => styles.getPropertyValue(name).trim();

  // -- what is stored packed: columns of numbers, and the script that draws ----------------------

  const inflated = async text => {
    const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
  };

  // All first bytes of the numbers stand before all second ones; see packed.py.
  const unpacked = async ({ points, sums, packed }) => {
    const planes = new Uint8Array(await inflated(packed)), bytes = new Uint8Array(8 * points);
    for (let i = 0; i < points; i++) for (let k = 0; k < 8; k++) bytes[8 * i + k] = planes[k * points + i];
    const numbers = Array.from(new Float64Array(bytes.buffer), v => Number.isNaN(v) ? null : v);
    if (sums) for (let i = 1; i < points; i++) numbers[i] += numbers[i - 1];
    return numbers;
  };

  const drawing = async () => {
    const script = document.createElement("script");
    script.textContent = new TextDecoder().decode(await inflated(document.getElementById("plotly").textContent));
    document.head.append(script); // runs at once; the policy knows its hash
  };

  // Whatever is drawn waits for this. A page without charts needs no script to draw them.
  const ready = (async () => {
    data.columns = await Promise.all(data.columns.map(column => Array.isArray(column) ? column : unpacked(column)));
    if (document.querySelector(".plot")) await drawing();
  })();

  // -- the tip: what a hint means, what a token's numbers are --------------------------------

  const tip = document.getElementById("tip");
  const index = token => Array.prototype.indexOf.call(token.parentElement.children, token);
  let marked = null;
  let describe = () => "";

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
    hide();
    marked = token;
    token.classList.add("now");
    show(token, describe(token, index(token)));
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
    const tokens = box.children, from = marked && marked.parentElement === box ? index(marked) : -1;
    const next = tokens[Math.max(0, Math.min(tokens.length - 1, from + step[event.key]))];
    if (!next) return;
    next.scrollIntoView({ block: "nearest" });
    showToken(next);
  });

  // Say what a token's tip reads: a function of the token's element and its index.
  const tokens = words => { describe = words; };
  return { root, data, dark, color, tokens, ready };
})();
