// Queues: what happened in this step, who runs, who waits and why.
const MOST_LISTED = 64;
const more = (list, most = MOST_LISTED) => (list.length > most ? [make("p", { class: "pi-hint" }, `and ${fmt(list.length - most)} more`)] : []);

// A request as a button, in any pane.
function chipOf(view, lane, extra) {
  const { rid } = view.state.film.lanes[lane], linked = view.linkedLanes().has(lane);
  return make("button", { type: "button", class: `pi-chip${linked ? " is-linked" : ""}`, "data-request": rid, "aria-pressed": linked },
    swatch(view.id, lane), rid, ...(extra ? [make("span", { class: "pi-more" }, extra)] : []));
}

// Says that a list goes on below; its room stays, so that nothing moves.
function scrollHint(view, list) {
  const node = make("p", { class: "pi-hint pi-scroll-hint", "aria-hidden": "true" }, "scroll for more ↓");
  const look = () => { node.style.visibility = list.scrollHeight - list.scrollTop - list.clientHeight < 8 ? "hidden" : "visible"; };
  list.addEventListener("scroll", look, { signal: view.signal, passive: true });
  return { node, look };
}

function queuesPane(view) {
  const list = make("div", { class: "pi-queues", tabindex: 0, role: "region", "aria-label": "Queues at this step" }), head = make("span", { class: "pi-sub" });
  const hint = scrollHint(view, list);
  const pane = view.card("queues", "Queues", head, list, hint.node);
  const draw = () => {
    const { frame, film } = view.state, row = (lane) => frame.rows.get(lane), parts = [];
    const counts = [[frame.running, "running"], [frame.waiting, "waiting"], [frame.swapped, "swapped out"]];
    head.textContent = counts.filter(([queue, name]) => queue.length || name !== "swapped out").map(([queue, name]) => `${fmt(queue.length)} ${name}`).join(", ");
    for (const { kind, lane, text } of frame.notes.filter((n) => !["admitted", "resumed"].includes(n.kind)))
      parts.push(make("p", { class: `pi-note pi-note-${kind}` }, make("b", {}, `${lane >= 0 ? film.lanes[lane].rid + " " : ""}${kind}`), `: ${text}`));
    const running = frame.running.slice(0, MOST_LISTED);
    const part = (queue, name, ...content) => make("div", { class: "pi-queue" }, make("h4", {}, `${name}: ${queue.length}`), ...content, ...more(queue));
    const listed = (queue, name) => part(queue, name, make("ul", { class: "pi-waiting" }, ...queue.slice(0, MOST_LISTED).map((lane) =>
      make("li", {}, chipOf(view, lane, row(lane).status === "preempted" ? "preempted" : ""), make("span", { class: "pi-why" }, row(lane).why)))));
    parts.push(make("div", { class: "pi-queue-row" }, part(frame.running, "Running",
      make("div", { class: "pi-chips" }, ...running.map((lane) => chipOf(view, lane, row(lane).scheduled ? `+${row(lane).scheduled}` : ""))),
      ...running.filter((lane) => row(lane).why).map((lane) => make("p", { class: "pi-why" }, make("b", {}, film.lanes[lane].rid), ` ${row(lane).why}`))),
      listed(frame.waiting, "Waiting"), ...(frame.swapped.length ? [listed(frame.swapped, "Swapped out")] : [])));
    const focused = list.contains(document.activeElement) ? document.activeElement.dataset.request : null, top = list.scrollTop;
    list.replaceChildren(...parts);
    list.scrollTop = top;
    if (focused) list.querySelector(`[data-request="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
    hint.look();
  };
  list.addEventListener("click", (event) => {
    const node = event.target.closest("[data-request]");
    if (node) view.toggle({ request: node.dataset.request });
  }, { signal: view.signal });
  return { name: "queues", node: pane, draw };
}
