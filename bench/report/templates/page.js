"use strict";
(() => {
  const get = id => document.getElementById(id);
  const folds = [...document.querySelectorAll("details.fold")];
  const unfold = get("unfold");
  unfold.hidden = false;
  unfold.addEventListener("click", () => {
    const open = folds.some(fold => !fold.open);
    folds.forEach(fold => fold.open = open);
    unfold.textContent = open ? "Fold all" : "Unfold all";
  });
  for (const cell of document.querySelectorAll(".scroll td:has(strong)")) {
    const box = cell.closest(".scroll");  // what is recommended is in view
    box.scrollLeft = Math.max(box.scrollLeft, cell.offsetLeft + cell.offsetWidth - box.clientWidth);
  }
  let opened = [];  // for the print, by browsers that do not print what is folded
  addEventListener("beforeprint", () => {
    opened = folds.filter(fold => !fold.open);
    opened.forEach(fold => fold.open = true);
  });
  addEventListener("afterprint", () => opened.forEach(fold => fold.open = false));
  const reveal = () => {  // browsers differ in whether a link opens what it leads to
    const target = get(decodeURIComponent(location.hash.slice(1)));
    for (let node = target; node; node = node.parentElement) if (node.matches("details")) node.open = true;
    if (target) target.scrollIntoView();
  };
  addEventListener("hashchange", reveal);
  reveal();
})();
