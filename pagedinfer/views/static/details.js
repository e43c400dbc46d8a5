// Details: all about the selected block or request; without a selection, the requests.
function detailsPane(view) {
  const box = make("div", { class: "pi-details", tabindex: 0, role: "region", "aria-label": "Details of the selection" });
  const pane = view.card("details", "Details", null, box), heading = pane.querySelector("h3");
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
    const parts = [], chain = view.chainBlocks(), block = selected.block, lane = [...view.linkedLanes()][0];
    if (block !== undefined) { const told = tellBlock(film, frame, pool, block); parts.push(make("h4", {}, told.title), facts(told)); }
    if (chain.size > 1) parts.push(make("p", { class: "pi-hint" }, `Its prefix chain: ${plural(chain.size, "cached block")}.`));
    if (lane !== undefined) {
      const told = tellRequest(film, frame, lane);
      parts.push(make("h4", {}, swatch(view.id, lane), " ", told.title), ...(block === undefined ? [facts(told)] : []), table(film, frame, lane, block));
    }
    box.replaceChildren(...parts);
  };
  function requests(film, frame) {
    const live = [...frame.running, ...frame.waiting, ...frame.swapped];
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
    if (row?.host.length) return make("p", { class: "pi-hint" }, `Swapped out: host slots ${row.host.join(", ")}.`);
    if (!row?.table.length) return make("p", { class: "pi-hint" }, "It holds no block at this step.");
    const head = make("tr", {}, ...["logical", "physical", "tokens", "fill"].map((name) => make("th", { scope: "col" }, name)));
    const lines = row.table.slice(0, 512).map((id, logical) => {
      const fill = fillOf(row, logical, size), first = logical * size;
      const gauge = make("span", { class: `pi-gauge pi-c${colourOf(lane)}` }, make("span", { style: `width:${100 * fill / size}%` }));
      if (id < 0) return make("tr", {}, make("td", {}, String(logical)), make("td", {}, "–"), make("td", {}, "–"), make("td", {}, "left by the window"));
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
  return { name: "details", node: pane, draw };
}
