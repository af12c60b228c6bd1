// Formulas of this page, drawn by KaTeX. Without this script their TeX stays readable.
"use strict";

for (const box of document.querySelectorAll(".formula")) {
  katex.render(box.textContent, box, { displayMode: box.localName === "div", throwOnError: false });
}
