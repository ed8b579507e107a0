"use strict";
(() => {
  const PAGE = 50, WHOLE = 300;  // rows of a page; tables up to WHOLE are not paged
  const columns = JSON.parse(document.getElementById("data").textContent);
  const rows = columns.length ? columns[0].cells.length : 0;
  const get = id => document.getElementById(id);
  const text = (column, row) => {
    const cell = column.cells[row];
    return column.names ? column.names[cell] : cell;
  };
  const number = written => written === "" ? NaN : Number(written.replace(/[≈,]/g, ""));
  let order = Array.from({length: rows}, (_, row) => row);
  let shown = order, page = 0, sorted = null, descending = false;

  const element = (name, content, className) => {
    const made = document.createElement(name);
    made.textContent = content;
    if (className) made.className = className;
    return made;
  };
  let heads = [];  // of the columns shown: [index of the column, its cell]
  const visible = () => columns.map((_, index) => index).filter(index => !columns[index].more || get("more").checked);
  function drawHeads() {
    heads = visible().map(index => {
      const column = columns[index], cell = element("th", "", column.number ? "n" : "");
      cell.scope = "col";
      if (column.help) cell.title = column.help;
      const button = element("button", column.label);
      button.type = "button";
      button.addEventListener("click", () => sort(index));
      cell.append(button);
      return [index, cell];
    });
    const row = document.createElement("tr");
    row.append(...heads.map(([_, cell]) => cell));
    get("table").tHead.replaceChildren(row);
    markSorted();
  }

  function markSorted() {
    heads.forEach(([index, cell]) => cell.setAttribute("aria-sort",
      index !== sorted ? "none" : descending ? "descending" : "ascending"));
  }

  function sort(index) {
    descending = sorted === index && !descending;
    sorted = index;
    const column = columns[index], way = descending ? -1 : 1;
    const keys = Array.from({length: rows}, (_, row) =>
      column.number ? number(text(column, row)) : text(column, row));
    const compare = column.number
      ? (a, b) => Number.isNaN(keys[a]) - Number.isNaN(keys[b]) || way * (keys[a] - keys[b]) || a - b
      : (a, b) => way * (keys[a] < keys[b] ? -1 : keys[a] > keys[b] ? 1 : 0) || a - b;
    order.sort(compare);
    markSorted();
    filter();
  }

  let searched = null;  // each row as one lower-case line, made when first asked for
  function filter() {
    const words = get("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    if (words.length && !searched) {
      searched = order.map(() => "");
      const told = columns.filter(column => column.names);  // not the readings: 2.512 is no batch of 512
      for (let row = 0; row < rows; row++)
        searched[row] = told.map(column => text(column, row)).join(" ").toLowerCase();
    }
    shown = words.length ? order.filter(row => words.every(word => searched[row].includes(word))) : order;
    page = 0;
    draw();
  }

  function draw() {
    const size = rows > WHOLE ? PAGE : WHOLE;
    const pages = Math.max(1, Math.ceil(shown.length / size));
    const part = shown.slice(page * size, (page + 1) * size);
    const body = get("table").tBodies[0];
    body.replaceChildren(...part.map(row => {
      const line = document.createElement("tr");
      line.append(...heads.map(([index]) => {
        const column = columns[index], content = text(column, row);
        return element("td", content, column.number ? "n" : content.length > 40 ? "long" : "");
      }));
      return line;
    }));
    const from = page * size + 1, grouped = n => n.toLocaleString("en");
    get("count").textContent = !shown.length ? `No record of ${grouped(rows)} matches.`
      : pages > 1 ? `Records ${grouped(from)} to ${grouped(from + part.length - 1)} of ${grouped(shown.length)}` +
        (shown.length < rows ? `, filtered from ${grouped(rows)}.` : ".")
      : shown.length < rows ? `${grouped(shown.length)} of ${grouped(rows)} records.` : `${grouped(rows)} records.`;
    document.querySelector(".pager").hidden = pages === 1;
    get("page").textContent = `Page ${grouped(page + 1)} of ${grouped(pages)}`;
    get("previous").disabled = page === 0;
    get("next").disabled = page === pages - 1;
  }

  get("filter").addEventListener("input", filter);
  get("more").addEventListener("change", () => { drawHeads(); draw(); });
  get("more").closest("label").hidden = !columns.some(column => column.more);
  get("previous").addEventListener("click", () => { page--; draw(); });
  get("next").addEventListener("click", () => { page++; draw(); });
  document.querySelector(".controls").hidden = false;
  drawHeads();
  draw();

  const folds = [...document.querySelectorAll("details.fold")];
  const unfold = get("unfold");
  unfold.hidden = false;
  unfold.addEventListener("click", () => {
    const open = folds.some(fold => !fold.open);
    folds.forEach(fold => fold.open = open);
    unfold.textContent = open ? "Fold all" : "Unfold all";
  });
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
