// Prefix chains: cached blocks as they follow each other. A row goes on where its chain does; a branch begins a row of its own.
const CHAIN = { w: 46, h: 24, rows: 24 };

// Rows of [depth, blocks]: the trie of cached blocks, its first child in line with its parent. Twin of views/chains.py.
function chainRows(cached) {
  const holder = new Map(), children = new Map(), roots = [], rows = [];
  for (const block of Int32Array.from(cached.keys()).sort()) if (!holder.has(cached.get(block)[0])) holder.set(cached.get(block)[0], block);
  for (const [key, block] of holder) {
    const parent = cached.get(block)[1];
    if (!holder.has(parent)) roots.push(block);
    else if (children.has(parent)) children.get(parent).push(block);
    else children.set(parent, [block]);
  }
  const open = roots.sort((a, b) => a - b).reverse().map((block) => [0, block]);
  while (open.length) {
    const [depth, first] = open.pop(), row = [], branches = [];
    for (let block = first; block !== undefined;) {
      row.push(block);
      const [next, ...others] = (children.get(cached.get(block)[0]) ?? []).sort((a, b) => a - b);
      branches.push(...others.map((other) => [depth + row.length, other]));
      block = next;
    }
    open.push(...branches);
    rows.push([depth, row]);
  }
  return rows;
}

// The cached blocks before and after one, itself included.
function chainOf(cached, block) {
  const chain = new Set();
  if (!cached.has(block)) return chain;
  const at = new Map([...cached].map(([b, [key]]) => [key, b])), after = new Map();
  for (const [b, [, parent]] of cached) after.set(parent, [...(after.get(parent) ?? []), b]);
  for (let b = block; b !== undefined && !chain.has(b); b = at.get(cached.get(b)[1])) chain.add(b);
  const open = [block];
  while (open.length) for (const b of after.get(cached.get(open.pop())[0]) ?? []) if (!chain.has(b)) { chain.add(b); open.push(b); }
  return chain;
}

function chainsPane(view) {
  const svg = make("svg:svg", { class: "pi-chains", role: "group", "aria-label": "Prefix chains. Arrow keys move, Enter selects." }), head = make("span", { class: "pi-sub" });
  const scroll = make("div", { class: "pi-scroll pi-plot" }, svg), pane = view.card("chains", "Prefix chains", head, scroll, make("p", { class: "pi-hint" }, "A cell is a cached block with its users; the next cell holds the tokens that follow."));
  let cells = new Map(), order = [], focused = -1, drawn = "", said = "", lines = [], rows = [], rowsAt = [];

  const draw = () => {
    const { frame, pool } = view.state, width = view.widthOf(scroll), key = `${frame.step}/${width}/${view.state.version}`;
    if (key !== drawn) { drawn = key; build(width); }
    const linked = view.linkedLanes(), chosen = view.selectedBlocks(), chain = view.chainBlocks();
    head.textContent = said;
    for (const [block, node] of cells) {
      const mine = linked.size > 0 && ownersOf(pool, block).some((lane) => linked.has(lane)), pressed = `${chosen.has(block)}`;
      node.classList.toggle("is-linked", mine);
      node.classList.toggle("is-chained", chain.has(block));
      if (node.getAttribute("aria-pressed") !== pressed) node.setAttribute("aria-pressed", pressed);
    }
  };

  // Finding the rows takes a while in a large cache: not in a step that left it alone.
  function findRows() {
    const { film, frame, version } = view.state, [step, known] = rowsAt, line = film.line(Math.max(frame.step, step ?? 0));
    if (version !== known || Math.abs(frame.step - step) !== 1 || line.k || line.u) rows = chainRows(frame.cached);
    rowsAt = [frame.step, version];
  }

  // A row is drawn anew only when something in it has changed.
  function build(width) {
    findRows();
    const { frame, pool } = view.state, shown = rows.slice(0, CHAIN.rows), before = new Map(lines.map((line) => [line.key, line]));
    const longest = Math.max(0, ...shown.flatMap(([, row]) => row.map((block) => nameOf(pool, block).length))), cell = Math.max(CHAIN.w, 20 + 8 * longest);
    const fits = Math.max(3, Math.floor((width - 8) / cell)), tall = CHAIN.h + 6;
    said = rows.length ? `${plural(frame.cached.size, "cached block")} in ${plural(rows.length, "chain")}` : "no block is cached at this step";
    const old = cells.get(focused)?.contains(document.activeElement);
    lines = shown.map(([depth, row], i) => {
      const up = depth ? i - shown.findLastIndex(([other], j) => j < i && other < depth) : 0;  // to the row that it branches off
      const key = [cell, fits, i, depth, up, row.length, ...row.slice(0, fits).map((block) => `${block}:${ownersOf(pool, block)}:${pool.refs[block]}`)].join();
      return before.get(key) ?? { key, ...rowOf(depth, row, up * tall - CHAIN.h / 2, i * tall + 2, cell, fits) };
    });
    cells = new Map(lines.flatMap((line) => line.cells));
    order = [...cells.keys()];
    const more = rows.length - shown.length, height = Math.max(1, shown.length * tall) + (more ? 18 : 0);
    const nodes = [...lines.map((line) => line.node), make("svg:text", { x: 2, y: height - 4, class: "pi-start" }, more ? `and ${fmt(more)} more chains` : "")];
    if (svg.getAttribute("height") !== `${height}` || svg.getAttribute("width") !== `${width}`) set(svg, { width, height });
    while (svg.children.length > nodes.length) svg.lastChild.remove();
    nodes.forEach((node, i) => { if (svg.children[i] !== node) if (svg.children[i]) svg.children[i].replaceWith(node); else svg.append(node); });
    if (!cells.has(focused)) focused = order[0] ?? -1;
    cells.get(focused)?.setAttribute("tabindex", 0);
    if (old) cells.get(focused)?.focus({ preventScroll: true });
  }

  function rowOf(depth, row, down, y, cell, fits) {
    const { film, pool } = view.state, start = Math.min(depth, fits - 2), room = fits - start, shown = row.length > room ? row.slice(0, room - 1) : row, node = make("svg:g");
    if (depth) node.append(make("svg:path", { class: "pi-branch", d: `M${start * cell - 10} ${y + CHAIN.h / 2 - down}v${down}h10` }));
    const cells = shown.map((block, j) => [block, cellOf(film, pool, block, (start + j) * cell, y, depth + j, cell - 4)]);
    node.append(...cells.map(([, drawn]) => drawn));
    if (shown.length < row.length) node.append(make("svg:text", { x: (start + shown.length) * cell + 4, y: y + 16, class: "pi-start" }, `+${row.length - shown.length}`));
    return { node, cells };
  }

  const nameOf = (pool, block) => (pool.refs[block] > 1 ? `${block}×${pool.refs[block]}` : `${block}`);
  function cellOf(film, pool, block, x, y, depth, w) {
    const lane = pool.lane[block], idle = lane < 0;
    const node = make("svg:g", { "data-chain": block, role: "button", tabindex: -1, "aria-pressed": "false", transform: `translate(${x} ${y})`, class: `pi-link${lane < 0 ? "" : ` pi-c${colourOf(lane)}`}`,
      "aria-label": `${tellShort(film, pool, block)}, place ${depth} of its prefix` });
    node.append(make("svg:rect", { class: idle ? "pi-cached" : "pi-tint", width: w, height: CHAIN.h, rx: 3 }), ...(idle ? [make("svg:rect", { width: w, height: CHAIN.h, rx: 3, fill: `url(#${view.id}-cached)` })] : []),
      ...(lane < 0 ? [] : [make("svg:rect", { width: 8, height: CHAIN.h, rx: 3, fill: paintOf(view.id, lane) })]),
      ...(idle ? [make("svg:rect", { class: "pi-plate", x: 4, y: 4, width: w - 8, height: CHAIN.h - 8, rx: 2 })] : []),
      make("svg:text", { x: w / 2 + (lane < 0 ? 0 : 4), y: 16, class: "pi-name" }, nameOf(pool, block)));
    return node;
  }

  const cellAt = (event) => event.target.closest?.("[data-chain]");
  svg.addEventListener("pointerdown", (event) => {
    const node = cellAt(event);
    if (!node) return;
    event.preventDefault(); view.takeKeys(); view.toggle({ block: +node.dataset.chain });
  }, { signal: view.signal });
  svg.addEventListener("pointermove", (event) => { const node = cellAt(event), s = view.state; view.tip(node ? tellBlock(s.film, s.frame, s.pool, +node.dataset.chain) : null, event); }, { signal: view.signal });
  svg.addEventListener("pointerleave", () => view.tip(null), { signal: view.signal });
  svg.addEventListener("keydown", (event) => {
    const by = { ArrowUp: -1, ArrowLeft: -1, ArrowDown: 1, ArrowRight: 1 }[event.key], to = order[order.indexOf(focused) + by];
    if (to !== undefined) { cells.get(focused)?.setAttribute("tabindex", -1); focused = to; cells.get(to).setAttribute("tabindex", 0); cells.get(to).focus(); }
    else if (event.key === "Enter" || event.key === " ") view.toggle({ block: focused });
    else if (!by) return;
    event.preventDefault(); event.stopPropagation();
  }, { signal: view.signal });
  svg.addEventListener("focusin", (event) => {
    const node = cellAt(event), s = view.state;
    if (node) view.tip(tellBlock(s.film, s.frame, s.pool, (focused = +node.dataset.chain)), node);
  }, { signal: view.signal });
  svg.addEventListener("focusout", () => view.tip(null), { signal: view.signal });
  return { name: "chains", node: pane, draw };
}
