// What is operated by mouse is operated by key: boxes that scroll, and the labels that the theme gives to its drawer.
"use strict";

// The theme wraps tables, and sets and takes the tab stops of code, once the page is loaded and whenever it changes width.
let later = 0;
const settle = () => {
  clearTimeout(later);
  later = setTimeout(() => {
    for (const box of document.querySelectorAll(".md-typeset pre > code, .md-typeset__scrollwrap, .formula")) {
      if (box.scrollWidth > box.clientWidth + 1) box.tabIndex = 0;
      else box.removeAttribute("tabindex");
    }
  }, 150);
};
addEventListener("resize", settle);
addEventListener("load", settle);
document.addEventListener("toggle", settle, true); // a fold was opened

for (const label of document.querySelectorAll("label.md-header__button, label.md-nav__link, label.md-nav__title")) {
  label.tabIndex = 0;
  label.setAttribute("role", "button");
  if (!label.textContent.trim() && !label.hasAttribute("aria-label")) {
    const name = { __drawer: "Navigation", __search: "Search" }[label.htmlFor];
    if (name) label.setAttribute("aria-label", name);
  }
  label.addEventListener("keydown", (event) => {
    if (event.key !== " ") return; // the theme itself clicks on a label by Enter
    event.preventDefault();
    label.click();
  });
}
