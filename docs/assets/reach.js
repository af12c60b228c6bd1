// What is operated by mouse is operated by key: boxes that scroll, and the labels that the theme gives to its drawer.
"use strict";

const boxes = ".md-typeset pre > code, .md-typeset__scrollwrap, .formula";
const watched = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (target.scrollWidth > target.clientWidth + 1) target.tabIndex = 0;
    else target.removeAttribute("tabindex");
  }
});
for (const box of document.querySelectorAll(boxes)) watched.observe(box);
// The theme wraps tables after it has started.
new MutationObserver((changes) => {
  for (const { addedNodes } of changes) {
    for (const node of addedNodes) if (node.matches?.(".md-typeset__scrollwrap")) watched.observe(node);
  }
}).observe(document.querySelector(".md-content") ?? document.body, { childList: true, subtree: true });

for (const label of document.querySelectorAll("label.md-header__button, label.md-nav__link, label.md-nav__title")) {
  label.tabIndex = 0;
  label.setAttribute("role", "button");
  if (!label.textContent.trim() && !label.hasAttribute("aria-label")) {
    const name = { __drawer: "Navigation", __search: "Search" }[label.htmlFor];
    if (name) label.setAttribute("aria-label", name);
  }
  label.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    label.click();
  });
}
