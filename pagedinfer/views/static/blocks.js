// Block map: SVG cells, changed one by one, for pools up to 2,048 blocks; a canvas up to 16,384; a density map above.
const MOST_SVG_BLOCKS = 2048, MOST_CELLS = 16384, ID_ROOM = 36;

function gridOf(numBlocks, width) {
  for (let columns = 8; ; columns += columns < 128 ? 8 : 64) {
    const w = clamp(Math.floor(width / columns), 3, 76), h = Math.min(w, 42), rows = Math.ceil(numBlocks / columns);
    if (rows * h <= 490 || w === 3) return { columns, w, h, rows };
  }
}

function blockPane(view) {
  const body = make("div", { class: "pi-map" }), head = make("span", { class: "pi-sub" }), host = make("p", { class: "pi-host", hidden: true });
  const key = make("div", {}), pane = view.card("blocks", "Block map", head, body, host, key);
  let painter = null, width = 0, focused = 0, shownKinds = "";

  const draw = () => {
    const { film, frame, pool } = view.state, room = Math.max(240, body.clientWidth || 560);
    if (!painter || Math.abs(room - width) > 8 || painter.numBlocks !== film.numBlocks) {
      width = room;
      painter = (film.numBlocks <= MOST_SVG_BLOCKS ? svgPainter : film.numBlocks <= MOST_CELLS ? canvasPainter : densityPainter)(view, room - ID_ROOM);
      body.replaceChildren(painter.node);
      focus(Math.min(focused, film.numBlocks - 1), false);
    }
    const { memory } = frame, idle = memory.cached / film.blockSize;
    head.textContent = `${fmt(memory.used)} of ${plural(film.numBlocks, "block")} in use, ${idle ? `${fmt(idle)} cached and idle, ` : ""}${plural(film.blockSize, "token")} each${painter.says ? `; ${painter.says(pool)}` : ""}`;
    host.hidden = !memory.host;
    host.textContent = memory.host ? `Host memory holds ${plural(memory.host, "block")}: ${[...frame.rows.values()].filter((r) => r.host.length).map((r) => `${film.lanes[r.lane].rid} ${r.host.length}`).join(", ")}` : "";
    const kinds = painter.kinds ?? blockKinds(film);
    if (kinds.join() !== shownKinds) { shownKinds = kinds.join(); key.replaceChildren(blockLegend(view.id, kinds)); }
    painter.paint(pool, view.linkedLanes(), view.selectedBlocks(), view.chainBlocks());
  };

  function focus(block, move = true) {
    focused = block;
    painter.focus(block, move);
  }
  body.addEventListener("keydown", (event) => {
    if (!event.target.closest("[data-block]")) return;
    const { columns } = painter.grid, { each = 1 } = painter.grid, last = view.state.film.numBlocks - 1;
    const by = { ArrowLeft: -each, ArrowRight: each, ArrowUp: -columns * each, ArrowDown: columns * each }[event.key];
    if (by !== undefined) { const to = focused + by; if (to >= 0 && to <= last) focus(to); }
    else if (event.key === "Home" || event.key === "End") focus(event.key === "Home" ? 0 : Math.floor(last / each) * each);
    else if (event.key === "Enter" || event.key === " ") view.select({ block: painter.pick?.(focused) ?? focused });
    else return;
    event.preventDefault(); event.stopPropagation();
  }, { signal: view.signal });
  body.addEventListener("pointerdown", (event) => {
    const block = painter.at(event);
    if (block < 0) return;
    event.preventDefault();  // focus stays where the arrow keys step through time
    view.takeKeys();
    painter.focus(focused = block, false);
    view.toggle({ block: painter.pick?.(block) ?? block });
  }, { signal: view.signal });
  const tell = (block) => painter.tell?.(block) ?? tellBlock(view.state.film, view.state.frame, view.state.pool, block);
  body.addEventListener("pointermove", (event) => {
    const block = painter.at(event);
    view.tip(block < 0 ? null : tell(block), event);
  }, { signal: view.signal });
  body.addEventListener("pointerleave", () => view.tip(null), { signal: view.signal });
  body.addEventListener("focusin", (event) => {
    const node = event.target.closest("[data-block]");
    if (node) view.tip(tell(+node.dataset.block), node);
  }, { signal: view.signal });
  body.addEventListener("focusout", () => view.tip(null), { signal: view.signal });
  return { name: "blocks", node: pane, draw, repaint: () => { painter = null; draw(); } };
}

// Kinds of block that this film has, for the legend: what never comes is not explained.
function blockKinds(film) {
  const kinds = ["free", "filled", "partly filled", "written in this step"];
  if (film.has("shared")) kinds.push("shared (× users)");
  if (film.has("cached")) kinds.push("cached, idle");
  if (film.has("reserved")) kinds.push("reserved, unused");
  return kinds;
}

function blockLegend(id, kinds) {
  const box = "M0 0h14v14h-14z", solid = [box, "pi-solid pi-c0"];
  const marks = {
    "free": [box, "pi-free"], "filled": solid, "partly filled": [box, "pi-tint pi-c0", "M0 7h14v7h-14z", "pi-solid pi-c0"],
    "written in this step": [...solid, "M7 0h7v7z", "pi-notch"], "shared (× users)": [...solid, "M3 3h8v8h-8z", "pi-twin pi-c0"],
    "cached, idle": [box, "pi-cached", "M-1 15L15 -1M-1 7L7 -1M7 15L15 7", "pi-cross-hatch"], "reserved, unused": ["M1 1h12v12h-12z", "pi-reserved pi-c0"],
    "none in use": [box, "pi-free"], "some": [box, "pi-free", "M0 9h14v5h-14z", "pi-live"], "all in use": [box, "pi-live"],
  };
  return legend(kinds.map((kind) => [kind, ...marks[kind]]));
}

const rowNumbers = ({ rows, columns, h, each = 1 }) => {
  const every = h >= 13 ? 1 : Math.ceil(14 / h);
  return Array.from({ length: Math.ceil(rows / every) }, (_, i) => [each > 1 ? short(i * every * columns * each) : String(i * every * columns), i * every * h + Math.min(h / 2 + 4, 12 + h / 8)]);
};

function legend(items) {
  return make("ul", { class: "pi-legend" }, ...items.map(([name, ...shapes]) => {
    const icon = make("svg:svg", { width: 14, height: 14, viewBox: "0 0 14 14", class: "pi-key", "aria-hidden": "true" });
    for (let i = 0; i < shapes.length; i += 2) icon.append(make("svg:path", { d: shapes[i], class: shapes[i + 1] }));
    return make("li", {}, icon, name);
  }));
}
