// The block map of a small pool: one SVG group per block, changed only where the block changed.
function svgPainter(view, width) {
  const { film } = view.state, grid = gridOf(film.numBlocks, width), { columns, w, h, rows } = grid, numBlocks = film.numBlocks;
  const gap = Math.min(w, h) >= 12 ? 2 : 1, a = w - gap, b = h - gap, r = Math.min(a, b) >= 18 ? 4 : Math.min(a, b) >= 9 ? 2 : 0;
  const labelled = a >= 26 && b >= 20, notch = Math.max(3, Math.min(a, b) * 0.26);
  const svg = make("svg:svg", { class: "pi-grid", width: ID_ROOM + columns * w, height: rows * h, role: "group",
    "aria-label": `Blocks of the pool, ${numBlocks}. Arrow keys move, Enter selects.` });
  rowNumbers(grid).forEach(([text, y]) => svg.append(make("svg:text", { x: ID_ROOM - 8, y, class: "pi-id", "aria-hidden": "true" }, text)));
  const cells = Array.from({ length: numBlocks }, (_, block) => {
    const x = ID_ROOM + (block % columns) * w, y = Math.floor(block / columns) * h;
    const node = make("svg:g", { "data-block": block, role: "button", tabindex: -1, transform: `translate(${x} ${y})`, "aria-pressed": "false" });
    const back = make("svg:rect", { class: "pi-free", width: a, height: b, rx: r });
    node.append(back);
    svg.append(node);
    return { node, back, key: "", linked: false, pressed: false, chained: false };
  });
  let current = 0;

  function paintCell(cell, block, pool) {
    const lane = pool.lane[block], fill = pool.fill[block], written = pool.written[block], refs = pool.refs[block], known = pool.key[block];
    const key = `${lane}/${fill}/${written}/${refs}/${known}`;
    if (key === cell.key) return;
    cell.key = key;
    const { back, node } = cell, share = fill / film.blockSize, tall = b * share, kind = stateOf(pool, block);
    node.classList.value = lane < 0 ? "" : `pi-c${colourOf(lane)}` + (cell.linked ? " is-linked" : "");
    node.classList.toggle("is-chained", cell.chained);
    while (back.nextSibling) back.nextSibling.remove();
    back.setAttribute("class", { free: "pi-free", cached: "pi-cached", pinned: "pi-cached", reserved: "pi-reserved" }[kind] ?? "pi-tint");
    set(node, { "data-owner": lane < 0 ? "" : film.lanes[lane].rid, "data-fill": lane < 0 ? 0 : fill, "data-state": kind, "aria-label": tellShort(film, pool, block) });
    if (kind === "free") return;
    if (lane < 0) {
      node.append(make("svg:rect", { width: a, height: b, rx: r, fill: `url(#${view.id}-cached)` }));
      if (labelled) node.append(...tag(kind === "pinned" ? "pin" : "cache"));
      return;
    }
    if (tall) node.append(make("svg:rect", { y: b - tall, width: a, height: tall, rx: Math.min(r, tall / 2), fill: paintOf(view.id, lane) }));
    if (kind === "shared" && Math.min(a, b) >= 8) node.append(make("svg:rect", { class: "pi-twin", x: 3, y: 3, width: a - 6, height: b - 6, rx: Math.max(0, r - 2) }));
    if (written) node.append(make("svg:path", { class: "pi-notch", d: `M${a - notch} 0h${notch}v${notch}z` }));
    if (labelled) {
      const y = share >= 1 || kind === "shared" ? b / 2 + 4 : share >= 0.5 ? b - 5 : 12.5;
      node.append(make("svg:text", { x: a / 2, y, class: share >= 0.5 ? "pi-name pi-on" : "pi-name" }, nameFor(film.lanes[lane].label, refs)));
    }
  }
  // With the number of users where the frame of a shared block has room for both.
  const nameFor = (label, refs) => (refs < 2 ? label : [`${label} ×${refs}`, `${label}×${refs}`].find((name) => 7.6 * name.length <= a - 10) ?? label);
  // A word on a hatched block stands on a plate of its own.
  const tag = (word) => [make("svg:rect", { class: "pi-plate", x: a / 2 - 3.3 * word.length, y: b / 2 - 7, width: 6.6 * word.length, height: 14, rx: 2 }),
    make("svg:text", { x: a / 2, y: b / 2 + 4, class: "pi-name" }, word)];

  function paint(pool, linked, selected, chained) {
    svg.classList.toggle("has-selection", selected.size > 0 || linked.size > 0);
    cells.forEach((cell, block) => {
      paintCell(cell, block, pool);
      const mine = linked.size > 0 && ownersOf(pool, block).some((lane) => linked.has(lane));
      if (cell.linked !== mine) cell.node.classList.toggle("is-linked", (cell.linked = mine));
      if (cell.pressed !== selected.has(block)) {
        cell.pressed = selected.has(block);
        cell.node.setAttribute("aria-pressed", cell.pressed);
      }
      if (cell.chained !== chained.has(block)) cell.node.classList.toggle("is-chained", (cell.chained = chained.has(block)));
    });
  }
  return {
    node: svg, grid, numBlocks, paint,
    at: (event) => +(event.target.closest?.("[data-block]")?.dataset.block ?? -1),
    focus(block, move) {
      cells[current]?.node.setAttribute("tabindex", -1);
      cells[(current = block)].node.setAttribute("tabindex", 0);
      if (move) cells[block].node.focus();
    },
  };
}
