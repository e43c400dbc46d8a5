// Budget bar: the step's tokens by request. Low pieces decode, tall ones prefill, as in the timeline; the rest is unused.
const BUDGET = { tall: 34, low: 17 };

// The pieces in drawing order: [lane, tokens, whether they are prefill].
const piecesOf = (film, frame) => Object.entries(frame.scheduled).map(([lane, n]) => [+lane, n, film.didAt(+lane, frame.step) === PREFILL])
  .sort((a, b) => a[2] - b[2] || a[0] - b[0]);

function budgetWords(film, frame) {
  const pieces = piecesOf(film, frame), sum = (list) => list.reduce((total, [, n]) => total + n, 0), prefill = pieces.filter((p) => p[2]), decode = pieces.filter((p) => !p[2]);
  const part = (list, name) => (list.length ? [`${fmt(sum(list))} ${name} (${plural(list.length, "request")})`] : []), all = sum(pieces);
  return [`${fmt(all)} of ${plural(frame.budget, "token")}`, ...part(decode, "decode"), ...part(prefill, "prefill"), `${fmt(Math.max(0, frame.budget - all))} unused`].join(", ");
}

function budgetPane(view) {
  const svg = make("svg:svg", { class: "pi-budget", height: BUDGET.tall + 20, role: "group" }), head = make("span", { class: "pi-sub" }), box = "M0 0h14v14h-14z";
  const pane = view.card("budget", "Token budget", head, make("div", { class: "pi-plot" }, svg), legend([["decode", "M0 6h14v8h-14z", "pi-solid pi-c0"], ["prefill", box, "pi-solid pi-c0"], ["unused", box, "pi-free"]]));
  let nodes = [], focused = 0;

  const draw = () => {
    const { film, frame } = view.state, pieces = piecesOf(film, frame), width = view.widthOf(svg), used = pieces.reduce((sum, p) => sum + p[1], 0);
    const total = Math.max(frame.budget, used, 1), unit = (width - 2) / total, had = svg.contains(document.activeElement);
    head.textContent = budgetWords(film, frame);
    set(svg, { width, "aria-label": `Tokens of step ${frame.step} by request: ${head.textContent}. Up and Down move, Enter selects.` });
    let x = 1;
    nodes = pieces.map(([lane, n, prefill]) => {
      const w = n * unit, node = pieceOf(film, lane, n, prefill, x, w);
      x += w;
      return node;
    });
    const axis = [0, total].map((n, i) => make("svg:text", { x: i ? width - 1 : 1, y: BUDGET.tall + 15, class: i ? "pi-end" : "pi-start" }, i ? plural(n, "token") : "0"));
    svg.replaceChildren(make("svg:rect", { class: "pi-free", x: 1, y: 0.5, width: width - 2, height: BUDGET.tall - 1, rx: 3 }), ...nodes, ...axis);
    focused = clamp(focused, 0, Math.max(0, nodes.length - 1));
    nodes[focused]?.setAttribute("tabindex", 0);
    if (had) nodes[focused]?.focus({ preventScroll: true });
  };

  function pieceOf(film, lane, n, prefill, x, w) {
    const { rid, label } = film.lanes[lane], linked = view.linkedLanes().has(lane), high = prefill ? BUDGET.tall - 2 : BUDGET.low, y = BUDGET.tall - 1 - high, gap = w > 4 ? 1 : 0;
    const node = make("svg:g", { "data-request": rid, "data-lane": lane, "data-tokens": n, role: "button", tabindex: -1, "aria-pressed": linked, class: `pi-piece pi-c${colourOf(lane)}${linked ? " is-linked" : ""}`,
      "aria-label": `${rid}, ${plural(n, "token")} of ${prefill ? "prefill" : "decode"}` });
    node.append(make("svg:rect", { x, y, width: Math.max(w - gap, 0.5), height: high, rx: w > 6 ? 2 : 0, fill: paintOf(view.id, lane) }));
    const text = [`${label} ${n}`, label].find((t) => t.length * 6.6 + 4 <= w);
    if (text && prefill) node.append(make("svg:text", { x: x + (w - gap) / 2, y: BUDGET.tall / 2 + 4, class: "pi-name pi-on" }, text));
    else if (text) node.append(make("svg:text", { x: x + (w - gap) / 2, y: BUDGET.tall - 6, class: "pi-name pi-on" }, text));
    return node;
  }

  const pieceAt = (event) => event.target.closest?.("[data-lane]");
  svg.addEventListener("pointerdown", (event) => {
    const node = pieceAt(event);
    if (!node) return;
    event.preventDefault();
    view.takeKeys();
    view.toggle({ request: node.dataset.request });
  }, { signal: view.signal });
  const tell = (node) => tellCell(view.state.film, +node.dataset.lane, view.state.frame.step);
  svg.addEventListener("pointermove", (event) => { const node = pieceAt(event); view.tip(node ? tell(node) : null, event); }, { signal: view.signal });
  svg.addEventListener("pointerleave", () => view.tip(null), { signal: view.signal });
  svg.addEventListener("keydown", (event) => {
    const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (by && nodes[focused + by]) { nodes[focused].setAttribute("tabindex", -1); nodes[(focused += by)].setAttribute("tabindex", 0); nodes[focused].focus(); }
    else if (event.key === "Enter" || event.key === " ") view.toggle({ request: nodes[focused].dataset.request });
    else if (!by) return;
    event.preventDefault(); event.stopPropagation();
  }, { signal: view.signal });
  svg.addEventListener("focusin", (event) => { const node = pieceAt(event); if (node) { focused = nodes.indexOf(node); view.tip(tell(node), node); } }, { signal: view.signal });
  svg.addEventListener("focusout", () => view.tip(null), { signal: view.signal });
  return { name: "budget", node: pane, draw };
}
