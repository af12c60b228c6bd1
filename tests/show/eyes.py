"""What a reader sees wrong on a page, in both themes, on a wide and on a narrow screen."""

from pathlib import Path

from tests.show.browser import Browser

FAULTS = Path(__file__).with_name("eyes.js").read_text("utf-8")
SCREENS = ((1280, 800), (390, 844))
STILL = """(() => {
  const sheet = new CSSStyleSheet();
  sheet.replaceSync("*, ::before, ::after { transition: none !important; animation: none !important }");
  document.adoptedStyleSheets = [sheet];
})()"""
"""Nothing moves: colours are those at the end."""
SETTLED = """new Promise((done) => {
  const root = document.documentElement;
  let left = 40;
  const look = () => (root.scrollWidth > root.clientWidth && left-- ? setTimeout(look, 50) : done());
  requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(look, 250)));
})"""
"""Charts follow a change of width: two seconds at most."""


def faults(chrome: Browser) -> list[str]:
    """Return what is wrong with the page that is open, each with the screen on which it was seen first."""
    seen: dict[str, str] = {}
    chrome.run(STILL)
    chrome.send("Emulation.setFocusEmulationEnabled", enabled=True)
    for dark in (False, True):
        for width, height in SCREENS:
            chrome.resize(width, height)
            chrome.media(dark=dark)
            chrome.run(SETTLED)
            for fault in chrome.run(FAULTS):
                seen.setdefault(fault, f"{width} pixels, {'dark' if dark else 'light'}: {fault}")
    return list(seen.values())


WATCHED = """(() => {
  window.reached = new Set();
  window.unseenFocus = [];
  document.addEventListener("focusin", ({ target }) => {
    if (reached.has(target)) return;
    reached.add(target);
    const box = target.getBoundingClientRect();
    const inside = box.right > 0 && box.bottom > 0 && box.left < innerWidth && box.top < innerHeight;
    const words = `${target.localName} “${target.textContent.trim().slice(0, 40)}”`;
    if (!inside || !target.checkVisibility({ visibilityProperty: true })) unseenFocus.push(words);
  });
  document.activeElement.blur();
  window.scrollTo(0, 0);
})()"""
MISSED = """(() => {
  const seen = (e) => e.checkVisibility({ visibilityProperty: true }) && e.getClientRects().length && !e.closest("[inert]");
  const named = (e) => `${e.localName} “${e.textContent.trim().slice(0, 40)}”`;
  const wanted = [...document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex='0']")];
  // Of a group of radio buttons the one that is chosen is reached, and arrow keys go on from there.
  const groups = new Set([...reached].filter((e) => e.type === "radio").map((e) => e.name));
  return wanted.filter((e) => seen(e) && !e.disabled && e.tabIndex >= 0 && !reached.has(e) && !groups.has(e.name)).map(named);
})()"""


def walk(chrome: Browser, most: int = 600) -> tuple[list[str], list[str], int]:
    """Go through the page that is open by Tab, from its beginning to its end.

    Returns: controls that were not reached, controls whose focus was not on the screen, and how many were reached.
    """
    chrome.run(WATCHED)
    for pressed in range(most):
        chrome.press("Tab")
        if pressed % 20 == 19 and not chrome.run(MISSED):
            break
    return chrome.run(MISSED), chrome.run("unseenFocus"), chrome.run("reached.size")
