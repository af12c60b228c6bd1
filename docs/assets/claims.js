/* The claims of the evidence page, searched: every word must stand in a card; a verdict without cards loses its heading. */
(() => {
  "use strict";
  const field = document.getElementById("claim-search"), count = document.getElementById("claim-count");
  const groups = [...document.querySelectorAll(".claims")];
  const cards = [...document.querySelectorAll(".claim")].map((card) => [card, card.textContent.toLowerCase()]);
  const filter = () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const [card, text] of cards) card.hidden = !words.every((word) => text.includes(word));
    for (const group of groups) group.previousElementSibling.hidden = !group.querySelector(".claim:not([hidden])");
    count.textContent = `${cards.filter(([card]) => !card.hidden).length} of ${cards.length} claims`;
  };
  field.addEventListener("input", () => {
    history.replaceState(null, "", field.value ? `#q=${encodeURIComponent(field.value)}` : "#");
    filter();
  });
  if (location.hash.startsWith("#q=")) field.value = decodeURIComponent(location.hash.slice(3));
  filter();
})();
