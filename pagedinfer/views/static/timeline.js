// Batch timeline and memory chart: they share a left gutter and the scale, so that a step is one line through both.
const GUTTER = 96, MARGIN = 22, ROW = 20, TOP = 24, MOST_ROWS = 120, MEMORY = { top: 8, tall: 120, between: 18, strip: 36 };

function scaleOf(film, cursor, width) {
  const room = Math.max(60, width - GUTTER - MARGIN), fitting = Math.max(1, Math.floor(room / 7));
  let { first, last } = film;
  if (last - first + 1 > fitting) {
    const half = Math.max(1, Math.floor(fitting / 2));
    first = Math.max(first, Math.min(last - fitting + 1, first + (Math.floor((cursor - first) / half) - 1) * half));
    last = first + fitting - 1;
  }
  const column = Math.min(28, room / (last - first + 1));
  const x = (step) => GUTTER + (step - first) * column;
  const size = [1, 2, 5].flatMap((a) => [1, 10, 100, 1e3, 1e4, 1e5].map((b) => a * b)).sort((p, q) => p - q).find((s) => s * column >= 44);
  const ticks = [];
  for (let s = Math.ceil(first / size) * size; s <= last; s += size) ticks.push(s);
  return { first, last, column, x, ticks, at: (px) => clamp(first + Math.floor((px - GUTTER) / column), first, last), key: `${first}/${last}/${column}` };
}

function timelinePane(view) {
  const axis = make("svg:svg", { class: "pi-axis", height: TOP, "aria-hidden": "true" }), rowsSvg = make("svg:svg", { class: "pi-rows", role: "group", "aria-label": "Requests by step. Up and Down move between requests, Enter selects." });
  const scroll = make("div", { class: "pi-scroll" }, rowsSvg), head = make("span", { class: "pi-sub" });
  const body = make("div", { class: "pi-plot" }, axis, scroll);
  const bar = (did) => { const svg = make("svg:svg", { width: 24, height: 20, "aria-hidden": "true", class: "pi-c0" }); svg.append(...barOf(view.id, did, 1, 22, 0)); return svg; };
  const tick = () => make("svg:svg", { width: 14, height: 20, "aria-hidden": "true" }, make("svg:path", { class: "pi-tick", d: "M2 10l3 3.5l5 -7" }));
  const stop = () => make("svg:svg", { width: 14, height: 20, "aria-hidden": "true" }, make("svg:path", { class: "pi-stop", d: "M7 15l-5 -8h10z" }));
  const key = make("ul", { class: "pi-legend" });
  const explain = (film, marks) => [[bar(WAITING), "waiting"], [bar(PREFILL), "prefill (its tokens, where they fit)"], [bar(DECODE), "decode"], [bar(HELD), "running, no tokens"], [bar(PREEMPTED), "preempted, waiting again"],
    ...(film.has("host") ? [[bar(SWAPPED), "swapped out, waiting again"]] : []), [tick(), "finished"], ...(marks.length ? [[stop(), "a condition came true"]] : [])].map(([mark, name]) => make("li", {}, mark, name));
  const hidden = make("p", { class: "pi-hint pi-crowd", hidden: true }), hint = scrollHint(view, scroll), pane = view.card("timeline", "Batch timeline", head, body, hint.node, hidden, key);
  let drawn = "", rows = new Map(), scale = null, mark = null, axisMark = null, focused = -1, crowded = false;

  const draw = () => {
    const { film, frame } = view.state;
    scale = view.scale();
    const linked = view.linkedLanes(), marks = view.marks(), wanted = linked.size && [...linked].some((lane) => !rows.has(lane)) ? [...linked].join() : "";
    const key = `${scale.key}/${film.last}/${film.lines.length}/${view.state.version}/${marks.length}/${crowded ? `${Math.floor(frame.step / 10)}/${wanted}` : ""}`;
    if (key !== drawn) { drawn = key; build(film, linked, marks); }
    for (const m of [mark, axisMark]) set(m, { x: scale.x(frame.step), width: scale.column });
    for (const [lane, row] of rows) {
      row.classList.toggle("is-linked", linked.has(lane));
      row.setAttribute("aria-pressed", linked.has(lane));
    }
  };

  function build(film, linked, marks) {
    const last = Math.min(scale.last, film.last), all = film.lanes.filter((lane) => lane.from <= last && !(lane.did.at(-1)?.[1] === GONE && lane.did.at(-1)[0] <= scale.first) && film.runs(lane.number, scale.first, last).length);
    const shown = nearest(all, view.state.frame.step, linked);
    key.replaceChildren(...explain(film, marks));
    crowded = shown.length < all.length;
    hidden.hidden = !crowded;
    hidden.textContent = crowded ? `and ${fmt(all.length - shown.length)} more requests; shown are those nearest to the step` : "";
    const width = view.width(), height = Math.max(1, shown.length) * ROW + 2;
    head.textContent = `${plural(all.length, "request")}, steps ${scale.first} to ${last}${last < film.last ? ` of ${film.last}` : ""}`;
    set(axis, { width }); set(rowsSvg, { width, height });
    axis.replaceChildren(axisMark = make("svg:rect", { class: "pi-cursor", height: TOP }), make("svg:text", { x: GUTTER - 10, y: 15, class: "pi-end" }, "step"),
      ...scale.ticks.map((s) => make("svg:text", { x: scale.x(s + 0.5), y: 15, class: "pi-mid" }, String(s))),
      ...marks.filter(([s]) => s >= scale.first && s <= last).map(([s, cause]) => make("svg:path", { class: "pi-stop", "data-stop": s, d: `M${scale.x(s + 0.5)} ${TOP}l-5 -8h10z` }, make("svg:title", {}, `stop at step ${s}: ${cause}`))));
    rowsSvg.replaceChildren(mark = make("svg:rect", { class: "pi-cursor", height }));
    const notes = new Map();
    for (let s = scale.first; s <= last; s++)
      for (const [kind, lane, text] of film.line(s).e ?? []) notes.set(lane, [...(notes.get(lane) ?? []), [s, kind, film.texts[text]]]);
    rows = new Map(shown.map((lane, i) => [lane.number, rowOf(film, lane, i, last, notes.get(lane.number) ?? [])]));
    rowsSvg.append(...rows.values());
    hint.look();
    if (!rows.has(focused)) focused = shown[0]?.number ?? -1;
    rows.get(focused)?.setAttribute("tabindex", 0);
  }

  function rowOf(film, lane, index, last, notes) {
    const n = lane.number, id = view.id;
    const row = make("svg:g", { "data-request": lane.rid, "data-lane": n, role: "button", tabindex: -1, class: `pi-row pi-c${colourOf(n)}`, transform: `translate(0 ${index * ROW})` });
    row.append(make("svg:rect", { class: "pi-ring", x: 1, y: 0.5, width: scale.x(last + 1) + 2, height: ROW - 1, rx: 4 }),
      make("svg:rect", { x: 5, y: 4, width: 12, height: 12, rx: 3, fill: paintOf(id, n) }),
      make("svg:text", { x: 23, y: 14, class: "pi-rid" }, lane.rid.length * 6.6 > GUTTER - 28 ? lane.label : lane.rid));
    for (const [did, a, b] of film.runs(n, scale.first, last)) {
      const x = scale.x(a), w = (b - a + 1) * scale.column, tokens = did === PREFILL ? String(film.line(a).n[n]) : "";
      row.append(...barOf(id, did, x, w));
      if (tokens && tokens.length * 6.4 + 2 <= w) row.append(make("svg:text", { x: x + w / 2, y: 14, class: "pi-mid pi-on" }, tokens));
    }
    let says = `${lane.rid}, submitted at step ${lane.from}`;
    for (const [s, kind, text] of notes) {
      says += `, ${kind} at step ${s}: ${text}`;
      if (kind !== "finished") continue;
      const cross = /^(abort|error)/.test(text), x = scale.x(s + 1) + 3;
      row.append(make("svg:path", { class: cross ? "pi-cross" : "pi-tick", d: cross ? `M${x} 7l6 6m0 -6l-6 6` : `M${x} 10l3 3.5l5 -7` }));
    }
    row.setAttribute("aria-label", says);
    return row;
  }

  // At most MOST_ROWS of them, those first that live at the step or nearest to it, in their order.
  function nearest(lanes, step, linked) {
    if (lanes.length <= MOST_ROWS) return lanes;
    const far = (lane) => { const gone = lane.did.at(-1); return linked.has(lane.number) ? -1 : Math.max(lane.from - step, gone?.[1] === GONE ? step - gone[0] : 0, 0); };
    const distance = new Map(lanes.map((lane) => [lane, far(lane)]));
    return [...lanes].sort((a, b) => distance.get(a) - distance.get(b) || a.number - b.number).slice(0, MOST_ROWS).sort((a, b) => a.number - b.number);
  }

  const cellAt = (event) => {
    const row = event.target.closest?.("[data-lane]"), box = rowsSvg.getBoundingClientRect(), px = event.clientX - box.left;
    if (row) return { lane: +row.dataset.lane, px };
    const i = Math.floor((event.clientY - box.top) / ROW), lane = [...rows.keys()][i];
    return lane === undefined ? null : { lane, px };
  };
  rowsSvg.addEventListener("pointerdown", (event) => {
    const cell = cellAt(event);
    if (!cell) return;
    event.preventDefault();
    view.takeKeys();
    const lane = view.state.film.lanes[cell.lane].rid;
    if (cell.px < GUTTER) view.toggle({ request: lane });
    else { view.select({ request: lane }); view.go(Math.min(scale.at(cell.px), view.state.film.last)); }
  }, { signal: view.signal });
  rowsSvg.addEventListener("pointermove", (event) => {
    const cell = cellAt(event), { film, frame } = view.state;
    if (cell && cell.px >= GUTTER && event.buttons & 1) view.go(Math.min(scale.at(cell.px), film.last));
    if (!cell) view.tip(null);
    else if (cell.px < GUTTER) view.tip(tellRequest(film, frame, cell.lane), event);
    else view.tip(tellCell(film, cell.lane, Math.min(scale.at(cell.px), film.last)), event);
  }, { signal: view.signal });
  rowsSvg.addEventListener("pointerleave", () => view.tip(null), { signal: view.signal });
  axis.addEventListener("pointerdown", (event) => { event.preventDefault(); view.takeKeys(); view.go(Math.min(scale.at(event.offsetX), view.state.film.last)); }, { signal: view.signal });
  axis.addEventListener("pointermove", (event) => { if (event.buttons & 1) view.go(Math.min(scale.at(event.offsetX), view.state.film.last)); }, { signal: view.signal });
  rowsSvg.addEventListener("keydown", (event) => {
    const lanes = [...rows.keys()], i = lanes.indexOf(focused), by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (by && lanes[i + by] !== undefined) {
      rows.get(focused).setAttribute("tabindex", -1);
      focused = lanes[i + by];
      rows.get(focused).setAttribute("tabindex", 0);
      rows.get(focused).focus();
    } else if (event.key === "Enter" || event.key === " ") view.toggle({ request: view.state.film.lanes[focused].rid });
    else if (!by) return;
    event.preventDefault(); event.stopPropagation();
  }, { signal: view.signal });
  rowsSvg.addEventListener("focusin", (event) => {
    const row = event.target.closest("[data-lane]");
    if (row) view.tip(tellCell(view.state.film, +row.dataset.lane, view.state.frame.step), row);
  }, { signal: view.signal });
  rowsSvg.addEventListener("focusout", () => view.tip(null), { signal: view.signal });
  return { name: "timeline", node: pane, draw, repaint: () => { drawn = ""; draw(); } };
}

function barOf(id, did, x, w) {
  const inset = Math.min(0.75, w / 8), box = { x: x + inset, width: w - 2 * inset };
  if (did === WAITING) return [make("svg:path", { class: "pi-waits", d: `M${x + 2} 10.5H${x + w - 1}` })];
  if (did === PREEMPTED) return [make("svg:rect", { ...box, class: "pi-lost-bar", y: 5, height: 11, rx: 2, fill: `url(#${id}-lost)` }), make("svg:path", { class: "pi-alarm", d: `M${x} 1h8l-4 5z` })];
  if (did === SWAPPED) return [make("svg:rect", { ...box, class: "pi-lost-bar", y: 5, height: 11, rx: 2, fill: `url(#${id}-swapped)` }), make("svg:path", { class: "pi-alarm", d: `M${x} 19h8l-4 -5z` })];
  if (did === HELD) return [make("svg:rect", { ...box, class: "pi-held", y: 7, height: 7 })];
  return [make("svg:rect", { ...box, class: "pi-solid", rx: 2, ...(did === PREFILL ? { y: 2, height: 16 } : { y: 6.5, height: 8 }) })];
}
