// Block map: SVG cells, changed one by one, for pools up to 2,048 blocks; a canvas above.
const MOST_SVG_BLOCKS = 2048, ID_ROOM = 36;

function gridOf(numBlocks, width) {
  for (let columns = 8; ; columns += columns < 128 ? 8 : 64) {
    const w = clamp(Math.floor(width / columns), 3, 76), h = Math.min(w, 42), rows = Math.ceil(numBlocks / columns);
    if (rows * h <= 490 || w === 3) return { columns, w, h, rows };
  }
}

function blockPane(view) {
  const body = make("div", { class: "pi-map" }), head = make("span", { class: "pi-sub" });
  const pane = view.card("blocks", "Block map", head, body, legend([
    ["free", "M0 0h14v14h-14z", "pi-free"], ["filled", "M0 0h14v14h-14z", "pi-solid pi-c0"],
    ["partly filled", "M0 0h14v14h-14z", "pi-tint pi-c0", "M0 7h14v7h-14z", "pi-solid pi-c0"],
    ["written in this step", "M0 0h14v14h-14z", "pi-solid pi-c0", "M7 0h7v7z", "pi-notch"],
  ]));
  let painter = null, width = 0, focused = 0;

  const draw = () => {
    const { film, frame, pool } = view.state, room = Math.max(240, body.clientWidth || 560);
    if (!painter || Math.abs(room - width) > 8 || painter.numBlocks !== film.numBlocks) {
      width = room;
      const grid = gridOf(film.numBlocks, room - ID_ROOM);
      painter = (film.numBlocks <= MOST_SVG_BLOCKS ? svgPainter : canvasPainter)(view, grid);
      body.replaceChildren(painter.node);
      focus(Math.min(focused, film.numBlocks - 1), false);
    }
    head.textContent = `${fmt(frame.memory[3])} of ${plural(film.numBlocks, "block")} in use, ${plural(film.blockSize, "token")} each`;
    painter.paint(pool, view.linkedLanes(), view.state.selected.block ?? -1);
  };

  function focus(block, move = true) {
    focused = block;
    painter.focus(block, move);
  }
  body.addEventListener("keydown", (event) => {
    if (!event.target.closest("[data-block]")) return;
    const { columns } = painter.grid, last = view.state.film.numBlocks - 1;
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
    if (by !== undefined) { const to = focused + by; if (to >= 0 && to <= last) focus(to); }
    else if (event.key === "Home" || event.key === "End") focus(event.key === "Home" ? 0 : last);
    else if (event.key === "Enter" || event.key === " ") view.select({ block: focused });
    else return;
    event.preventDefault(); event.stopPropagation();
  }, { signal: view.signal });
  body.addEventListener("pointerdown", (event) => {
    const block = painter.at(event);
    if (block < 0) return;
    event.preventDefault();  // focus stays where the arrow keys step through time
    view.takeKeys();
    painter.focus(focused = block, false);
    view.toggle({ block });
  }, { signal: view.signal });
  body.addEventListener("pointermove", (event) => {
    const block = painter.at(event);
    view.tip(block < 0 ? null : tellBlock(view.state.film, view.state.frame, view.state.pool, block), event);
  }, { signal: view.signal });
  body.addEventListener("pointerleave", () => view.tip(null), { signal: view.signal });
  body.addEventListener("focusin", (event) => {
    const node = event.target.closest("[data-block]");
    if (node) view.tip(tellBlock(view.state.film, view.state.frame, view.state.pool, +node.dataset.block), node);
  }, { signal: view.signal });
  body.addEventListener("focusout", () => view.tip(null), { signal: view.signal });
  return { name: "blocks", node: pane, draw, repaint: () => { painter = null; draw(); } };
}

function svgPainter(view, grid) {
  const { film } = view.state, { columns, w, h, rows } = grid, numBlocks = film.numBlocks;
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
    return { node, back, key: "", says: "", linked: false, pressed: false };
  });
  let current = 0;

  function paintCell(cell, block, pool) {
    const lane = pool.lane[block], fill = pool.fill[block], written = pool.written[block], refs = pool.refs[block];
    const key = `${lane}/${fill}/${written}/${refs}`;
    if (key === cell.key) return;
    cell.key = key;
    const { back, node } = cell, share = fill / film.blockSize, tall = b * share;
    node.classList.value = lane < 0 ? "" : `pi-c${colourOf(lane)}` + (cell.linked ? " is-linked" : "");
    while (back.nextSibling) back.nextSibling.remove();
    back.setAttribute("class", lane < 0 ? "pi-free" : "pi-tint");
    node.setAttribute("data-owner", lane < 0 ? "" : film.lanes[lane].rid);
    node.setAttribute("data-fill", fill);
    if (lane < 0) return;
    if (tall) node.append(make("svg:rect", { y: b - tall, width: a, height: tall, rx: Math.min(r, tall / 2), fill: paintOf(view.id, lane) }));
    if (written) node.append(make("svg:path", { class: "pi-notch", d: `M${a - notch} 0h${notch}v${notch}z` }));
    if (labelled) {
      const y = share >= 1 ? b / 2 + 4 : share >= 0.5 ? b - 5 : 12.5;
      node.append(make("svg:text", { x: a / 2, y, class: share >= 0.5 ? "pi-name pi-on" : "pi-name" }, film.lanes[lane].label + (refs > 1 ? ` ×${refs}` : "")));
    }
  }
  function paint(pool, linked, selected) {
    svg.classList.toggle("has-selection", selected >= 0 || pool.lane.some((lane) => linked.has(lane)));
    cells.forEach((cell, block) => {
      const was = cell.key, mine = pool.lane[block] >= 0 && ownersOf(pool, block).some((lane) => linked.has(lane));
      paintCell(cell, block, pool);
      if (cell.linked !== mine) cell.node.classList.toggle("is-linked", (cell.linked = mine));
      if (cell.pressed !== (block === selected)) {
        cell.pressed = block === selected;
        cell.node.setAttribute("aria-pressed", cell.pressed);
      }
      if (was !== cell.key) {
        const lane = pool.lane[block];
        cell.node.setAttribute("aria-label", `block ${block}, ` + (lane < 0 ? "free" : `${film.lanes[lane].rid}, ${pool.fill[block]} of ${film.blockSize}`));
      }
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

const rowNumbers = ({ rows, columns, h }) => {
  const every = h >= 13 ? 1 : Math.ceil(14 / h);
  return Array.from({ length: Math.ceil(rows / every) }, (_, i) => [String(i * every * columns), i * every * h + Math.min(h / 2 + 4, 12 + h / 8)]);
};

function canvasPainter(view, grid) {
  const { film } = view.state, { columns, w, h, rows } = grid, numBlocks = film.numBlocks, ratio = window.devicePixelRatio || 1;
  const canvas = make("canvas", { class: "pi-canvas", role: "img", "aria-label": `Block map of ${numBlocks} blocks` });
  canvas.width = columns * w * ratio; canvas.height = rows * h * ratio;
  set(canvas, { style: `width:${columns * w}px;height:${rows * h}px` });
  const spot = make("div", { class: "pi-spot", role: "button", tabindex: 0 });
  const ids = make("div", { class: "pi-ids", "aria-hidden": "true" });
  rowNumbers(grid).forEach(([text, y]) => ids.append(make("span", { style: `top:${y - 11}px` }, text)));
  const node = make("div", { class: "pi-canvas-box", style: `padding-left:${ID_ROOM}px` }, ids, canvas, spot);
  const pen = canvas.getContext("2d"), style = getComputedStyle(view.root);
  const tones = view.laneTones(), free = tones.free, accent = tones.accent;
  let before = null, pool = null, current = 0;
  pen.scale(ratio, ratio);

  function paint(now, linked, selected) {
    pool = now;
    const key = [...linked].join() + "/" + selected, full = !before || before.key !== key;
    for (let i = 0; i < numBlocks; i++) {
      if (!full && before.lane[i] === now.lane[i] && before.fill[i] === now.fill[i]) continue;
      const x = (i % columns) * w, y = Math.floor(i / columns) * h, lane = now.lane[i], tall = (h - 1) * now.fill[i] / film.blockSize;
      pen.globalAlpha = linked.size && lane >= 0 && !ownersOf(now, i).some((l) => linked.has(l)) ? 0.35 : 1;
      pen.clearRect(x, y, w, h);
      pen.fillStyle = lane < 0 ? free : tones.tint[colourOf(lane)];
      pen.fillRect(x, y, w - 1, h - 1);
      if (tall) { pen.fillStyle = tones.solid[colourOf(lane)]; pen.fillRect(x, y + h - 1 - tall, w - 1, tall); }
      pen.globalAlpha = 1;
      if (i === selected) { pen.strokeStyle = accent; pen.lineWidth = 2; pen.strokeRect(x, y, w - 1, h - 1); }
    }
    before = { key, lane: now.lane, fill: now.fill };
    label();
  }
  function label() {
    set(spot, { "data-block": current, "aria-label": pool ? tellBlock(film, view.state.frame, pool, current).say : `block ${current}`,
      style: `left:${ID_ROOM + (current % columns) * w - 1}px;top:${Math.floor(current / columns) * h - 1}px;width:${w + 1}px;height:${h + 1}px` });
    spot.classList.toggle("is-linked", !!pool && ownersOf(pool, current).some((lane) => view.linkedLanes().has(lane)));
  }
  return {
    node, grid, numBlocks, paint,
    at(event) {
      const box = canvas.getBoundingClientRect(), x = Math.floor((event.clientX - box.left) / w), y = Math.floor((event.clientY - box.top) / h);
      const block = y * columns + x;
      return x >= 0 && x < columns && y >= 0 && block < numBlocks ? block : -1;
    },
    focus(block, move) { current = block; label(); if (move) { spot.blur(); spot.focus(); } },
  };
}

function legend(items) {
  return make("ul", { class: "pi-legend" }, ...items.map(([name, ...shapes]) => {
    const icon = make("svg:svg", { width: 14, height: 14, viewBox: "0 0 14 14", "aria-hidden": "true" });
    for (let i = 0; i < shapes.length; i += 2) icon.append(make("svg:path", { d: shapes[i], class: shapes[i + 1] }));
    return make("li", {}, icon, name);
  }));
}
