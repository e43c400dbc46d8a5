// Beside the panes: what happened in this step and who waits why; and all about the selected block or request.
const MOST_LISTED = 64;
const more = (list) => (list.length > MOST_LISTED ? [make("p", { class: "pi-hint" }, `and ${fmt(list.length - MOST_LISTED)} more`)] : []);

function stepPane(view) {
  const list = make("div", { class: "pi-queues", tabindex: 0, role: "region", "aria-label": "Queues at this step" });
  const pane = view.card("step", "This step", null, list);
  const chip = (lane, extra) => {
    const { film } = view.state, { rid } = film.lanes[lane];
    return make("button", { type: "button", class: "pi-chip", "data-request": rid, "aria-pressed": view.linkedLanes().has(lane) },
      swatch(view.id, lane), rid, ...(extra ? [make("span", { class: "pi-more" }, extra)] : []));
  };
  const draw = () => {
    const { frame, film } = view.state, linked = view.linkedLanes();
    const row = (lane) => frame.rows.get(lane), parts = [];
    const important = frame.notes.filter((n) => !["admitted", "resumed"].includes(n.kind));
    for (const { kind, lane, text } of important)
      parts.push(make("p", { class: `pi-note pi-note-${kind}` }, make("b", {}, `${lane >= 0 ? film.lanes[lane].rid + " " : ""}${kind}`), `: ${text}`));
    parts.push(make("h4", {}, `Running: ${frame.running.length}`),
      make("div", { class: "pi-chips" }, ...frame.running.slice(0, MOST_LISTED).map((lane) => chip(lane, row(lane).scheduled ? `+${row(lane).scheduled}` : ""))), ...more(frame.running));
    for (const lane of frame.running) if (row(lane).why) parts.push(make("p", { class: "pi-why" }, make("b", {}, film.lanes[lane].rid), ` ${row(lane).why}`));
    parts.push(make("h4", {}, `Waiting: ${frame.waiting.length}`),
      make("ul", { class: "pi-waiting" }, ...frame.waiting.slice(0, MOST_LISTED).map((lane) => make("li", {}, chip(lane, row(lane).status === "preempted" ? "preempted" : ""), make("span", { class: "pi-why" }, row(lane).why)))), ...more(frame.waiting));
    const focused = list.contains(document.activeElement) ? document.activeElement.dataset.request : null;
    list.replaceChildren(...parts);
    list.querySelectorAll("[data-request]").forEach((node) => {
      node.classList.toggle("is-linked", linked.has(view.laneOf(node.dataset.request)));
      if (node.dataset.request === focused) node.focus({ preventScroll: true });
    });
  };
  list.addEventListener("click", (event) => {
    const node = event.target.closest("[data-request]");
    if (node) view.toggle({ request: node.dataset.request });
  }, { signal: view.signal });
  return { name: "step", node: pane, draw };
}

function selectedPane(view) {
  const box = make("div", { class: "pi-details", tabindex: 0, role: "region", "aria-label": "Details of the selection" });
  const pane = view.card("selected", "Selected", null, box), heading = pane.querySelector("h3");
  const facts = ({ rows }) => make("dl", {}, ...rows.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, String(value))]));
  let drawn = "";
  const draw = () => {
    const { film, frame, pool, selected, version } = view.state, key = JSON.stringify([frame.step, selected, version]);
    if (key === drawn) return;
    drawn = key;
    heading.textContent = selected.block === undefined && selected.request === undefined ? "Requests" : "Selected";
    if (selected.block === undefined && selected.request === undefined) {
      box.replaceChildren(make("p", { class: "pi-hint" }, "Click a block or a request, or Tab to one and press Enter."), ...requests(film, frame));
      return;
    }
    const parts = [], block = selected.block, lane = [...view.linkedLanes()][0];
    if (block !== undefined) { const told = tellBlock(film, frame, pool, block); parts.push(make("h4", {}, told.title), facts(told)); }
    if (lane !== undefined) {
      const told = tellRequest(film, frame, lane);
      parts.push(make("h4", {}, swatch(view.id, lane), " ", told.title), ...(block === undefined ? [facts(told)] : []), table(film, frame, lane, block));
    }
    box.replaceChildren(...parts);
  };
  function requests(film, frame) {
    const live = [...frame.running, ...frame.waiting];
    if (!live.length) return [];
    const lines = live.slice(0, MOST_LISTED).map((lane) => {
      const row = frame.rows.get(lane);
      return make("tr", { "data-pick": film.lanes[lane].rid }, make("td", {}, swatch(view.id, lane), film.lanes[lane].rid), make("td", {}, row.status),
        make("td", {}, `${row.computed} of ${row.tokens}`), make("td", {}, String(row.table.length)));
    });
    const head = make("tr", {}, ...["request", "state", "tokens", "blocks"].map((name) => make("th", { scope: "col" }, name)));
    return [make("table", { class: "pi-requests" }, make("thead", {}, head), make("tbody", {}, ...lines)), ...more(live)];
  }
  function table(film, frame, lane, block) {
    const row = frame.rows.get(lane), size = film.blockSize;
    if (!row?.table.length) return make("p", { class: "pi-hint" }, "It holds no block at this step.");
    const head = make("tr", {}, ...["logical", "physical", "tokens", "fill"].map((name) => make("th", { scope: "col" }, name)));
    const lines = row.table.slice(0, 512).map((id, logical) => {
      const fill = fillOf(row, logical, size), first = logical * size;
      const gauge = make("span", { class: `pi-gauge pi-c${colourOf(lane)}` }, make("span", { style: `width:${100 * fill / size}%` }));
      return make("tr", { "data-row-block": id, class: id === block ? "is-linked" : false }, make("td", {}, String(logical)), make("td", {}, String(id)),
        make("td", {}, fill ? `${first}–${first + fill - 1}` : "–"), make("td", {}, gauge, ` ${fill}/${size}`));
    });
    return make("table", {}, make("caption", {}, `Block table: ${plural(row.table.length, "block")}`), make("thead", {}, head), make("tbody", {}, ...lines));
  }
  box.addEventListener("click", (event) => {
    const row = event.target.closest("[data-row-block]");
    const pick = event.target.closest("[data-pick]");
    if (row) view.select({ block: +row.dataset.rowBlock });
    if (pick) view.select({ request: pick.dataset.pick });
  }, { signal: view.signal });
  return { name: "selected", node: pane, draw };
}
