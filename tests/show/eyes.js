// Faults that a reader sees: returns a list of sentences, empty where there are none.
(() => {
  const faults = [];
  const root = document.documentElement;
  const styles = new Map();
  const style = (e) => {
    if (!styles.has(e)) styles.set(e, getComputedStyle(e));
    return styles.get(e);
  };
  const name = (e) => {
    const words = (e.textContent || e.id || "").trim().replace(/\s+/g, " ").slice(0, 40);
    const kind = typeof e.className === "string" ? e.className.trim().split(/\s+/).join(".") : "";
    return `${e.localName}${kind ? "." + kind : ""} “${words}”`;
  };

  // -- sizes ------------------------------------------------------------------------------------------
  if (root.scrollWidth > root.clientWidth) faults.push(`the page is ${root.scrollWidth} wide in a window of ${root.clientWidth}`);
  const clips = (value) => value === "hidden" || value === "clip";
  const held = new Map();
  // Whether an element scrolls, or stands in one that does, in that direction: what is outside the window can be reached.
  const scrolls = (e) => {
    if (!e || e === document.body || e === root) return false;
    if (!held.has(e)) held.set(e, /auto|scroll/.test(style(e).overflowX) || scrolls(e.parentElement));
    return held.get(e);
  };

  // -- colours ----------------------------------------------------------------------------------------
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const parsed = new Map();
  const color = (text) => {
    if (!parsed.has(text)) {
      const plain = text.match(/^rgba?\(([\d.]+), ([\d.]+), ([\d.]+)(?:, ([\d.]+))?\)$/);
      if (plain) parsed.set(text, [+plain[1], +plain[2], +plain[3], plain[4] === undefined ? 1 : +plain[4]]);
      else {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = text;
        canvas.fillRect(0, 0, 1, 1);
        const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
        parsed.set(text, [r, g, b, a / 255]);
      }
    }
    return parsed.get(text);
  };
  const over = ([r, g, b, a], [s, t, u]) => [r * a + s * (1 - a), g * a + t * (1 - a), b * a + u * (1 - a), 1];
  const grounds = new Map();
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const ground = (e) => {
    if (!e) return dark && style(root).colorScheme.includes("dark") ? [18, 18, 18, 1] : [255, 255, 255, 1];
    if (!grounds.has(e)) {
      const own = color(style(e).backgroundColor);
      grounds.set(e, own[3] === 1 ? own : over(own, ground(e.parentElement)));
    }
    return grounds.get(e);
  };
  const light = ([r, g, b]) => {
    const part = (x) => (x /= 255) <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const contrast = (a, b) => {
    const [low, high] = [light(a), light(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const opacity = (e) => (e && e !== root ? +style(e).opacity * opacity(e.parentElement) : 1);

  // -- every text -------------------------------------------------------------------------------------
  const said = new Set();
  const say = (key, words) => {
    if (!said.has(key)) faults.push(words);
    said.add(key);
  };
  const shown = new Map();
  const visible = (e) => {
    if (!shown.has(e)) {
      // Off the screen on purpose: a skip link before it has the focus, words for a screen reader, a closed drawer.
      shown.set(e, e.checkVisibility({ opacityProperty: true, visibilityProperty: true }) && !e.closest(".katex-mathml, .unseen"));
    }
    return shown.get(e);
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const range = document.createRange();
  const parents = new Set();
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement;
    if (!node.data.trim() || parents.has(parent) || parent.closest("script, style, noscript, template, select")) continue;
    parents.add(parent);
    if (!visible(parent)) continue;
    range.selectNodeContents(node);
    const box = range.getBoundingClientRect();
    if (!box.width || box.right + scrollX <= 0 || box.bottom + scrollY <= 0) continue;
    const s = style(parent);
    const svg = parent instanceof SVGElement;
    if (box.left > root.clientWidth && !scrolls(parent)) continue; // a drawer that is closed
    if (box.right > root.clientWidth + 1 && !scrolls(parent)) say(`out ${parent.className}`, `sticks out of the window: ${name(parent)}`);
    if (!svg) {
      for (let e = parent; e && e !== document.body; e = e.parentElement) {
        const t = style(e);
        if (t.display === "inline") continue;
        const c = e.getBoundingClientRect();
        if (/auto|scroll/.test(t.overflowX + t.overflowY)) break;
        if (clips(t.overflowX) && (box.right > c.right + 1 || box.left < c.left - 1)) say(`cut ${e.className}`, `cut at the side: ${name(parent)} in ${name(e)}`);
        if (clips(t.overflowY) && (box.bottom > c.bottom + 3 || box.top < c.top - 3)) say(`low ${e.className}`, `cut below: ${name(parent)} in ${name(e)}`);
      }
    }
    const ink = color(svg ? s.fill : s.color);
    if (ink[3] === 0) continue;
    const back = ground(svg ? parent.closest("svg").parentElement : parent);
    const alpha = ink[3] * opacity(parent) * (svg ? +s.fillOpacity : 1);
    const ratio = contrast(over([ink[0], ink[1], ink[2], alpha], back), back);
    // A mark that is no letter and no digit is a drawing: three is enough.
    const least = /[\p{L}\p{N}]/u.test(node.data) ? 4.5 : 3;
    if (ratio < least) say(`ink ${parent.localName}${parent.getAttribute("class")}${s.color}${back}`, `contrast ${ratio.toFixed(2)}: ${name(parent)}`);
  }

  // -- everything that is operated --------------------------------------------------------------------
  const controls = [...document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex], [role=button], [role=tab]")];
  const kinds = new Set();
  const before = document.activeElement;
  before.blur(); // what has the focus already would look the same with it
  for (const e of controls) {
    if (!visible(e) || e.disabled || e.closest("[inert]")) continue;
    if (e.tabIndex < 0) {
      // One of a group that arrow keys go through may be left out by Tab.
      if (!e.matches("[role=tab], [tabindex='-1']")) say(`tab ${e.className}`, `not reached by Tab: ${name(e)}`);
      continue;
    }
    const kind = `${e.localName} ${e.getAttribute("class")} ${e.parentElement.getAttribute("class")}`;
    if (kinds.has(kind)) continue;
    kinds.add(kind);
    const look = () => {
      const t = getComputedStyle(e);
      const ring = t.outlineStyle !== "none" && parseFloat(t.outlineWidth) > 0 && color(t.outlineColor)[3] > 0 ? `${t.outlineStyle} ${t.outlineWidth} ${t.outlineColor}` : "";
      return [ring, t.boxShadow, t.backgroundColor, t.color, t.borderColor, t.textDecorationLine].join("|");
    };
    const calm = look();
    e.focus({ focusVisible: true, preventScroll: true });
    if (document.activeElement === e && look() === calm) say(`ring ${kind}`, `focus cannot be seen: ${name(e)}`);
    e.blur();
  }
  if (before && before !== document.body) before.focus({ preventScroll: true });

  // -- what scrolls is reached by key -----------------------------------------------------------------
  for (const e of document.querySelectorAll("pre, table, div, code, figure, section")) {
    if (e.scrollWidth <= e.clientWidth + 1 || !/auto|scroll/.test(style(e).overflowX) || !visible(e) || !e.clientWidth) continue;
    const inside = e.querySelector("a[href], button, input, select, summary, [tabindex='0']");
    if (e.tabIndex < 0 && !inside) say(`scroll ${e.className}`, `scrolls, and not by key: ${name(e)}`);
  }
  return faults;
})()
