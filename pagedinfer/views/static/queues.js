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

const isTold = (kind) => !["admitted", "resumed"].includes(kind);  // those that came in are in the list

// Finds the step with the most to list. What was counted is kept as long as its last line is still the film's.
function fullestStep() {
  let sizes, most, step, count = 0, last = null;
  return (film) => {
    if (!count || film.lines[count - 1] !== last) [sizes, most, step, count] = [[0, 0, 0], -1, film.first, 0];
    for (const { q, e, s } of film.lines.slice(count)) {
      if (q) sizes = sizes.map((n, i) => n + (q[i] ? q[i][1].length - q[i][0].length : 0));
      const lines = Math.max(sizes[0] / 4, sizes[1]) + sizes[2] + (e ?? []).filter(([kind]) => isTold(kind)).length;
      if (lines > most) [most, step] = [lines, s];
    }
    [count, last] = [film.lines.length, film.lines.at(-1)];
    return step;
  };
}

const QUEUE_ROOM = 180;  // pixels at most; the rest is scrolled to

function queuesPane(view) {
  const list = make("div", { class: "pi-queues", tabindex: 0, role: "region", "aria-label": "Queues at this step" }), head = make("span", { class: "pi-sub" });
  const hint = scrollHint(view, list), fullest = fullestStep();
  const pane = view.card("queues", "Queues", head, list, hint.node);
  let kept = "";

  function partsOf(film, frame) {
    const row = (lane) => frame.rows.get(lane), parts = [];
    for (const { kind, lane, text } of frame.notes.filter((n) => isTold(n.kind)))
      parts.push(make("p", { class: `pi-note pi-note-${kind}` }, make("b", {}, `${lane >= 0 ? film.lanes[lane].rid + " " : ""}${kind}`), `: ${text}`));
    const running = frame.running.slice(0, MOST_LISTED);
    const part = (queue, name, ...content) => make("div", { class: "pi-queue" }, make("h4", {}, `${name}: ${queue.length}`), ...content, ...more(queue));
    const listed = (queue, name) => part(queue, name, make("ul", { class: "pi-waiting" }, ...queue.slice(0, MOST_LISTED).map((lane) =>
      make("li", {}, chipOf(view, lane, row(lane).status === "preempted" ? "preempted" : ""), make("span", { class: "pi-why" }, row(lane).why)))));
    parts.push(make("div", { class: "pi-queue-row" }, part(frame.running, "Running",
      make("div", { class: "pi-chips" }, ...running.map((lane) => chipOf(view, lane, row(lane).scheduled ? `+${row(lane).scheduled}` : ""))),
      ...running.filter((lane) => row(lane).why).map((lane) => make("p", { class: "pi-why" }, make("b", {}, film.lanes[lane].rid), ` ${row(lane).why}`))),
      listed(frame.waiting, "Waiting"), ...(frame.swapped.length ? [listed(frame.swapped, "Swapped out")] : [])));
    return parts;
  }

  // The list is as high as the fullest step needs, at all steps: nothing below it moves.
  function keepRoom(film) {
    const step = fullest(film), now = `${step}/${list.clientWidth}`;
    if (now === kept || !list.clientWidth) return;
    kept = now;
    list.style.height = "auto";
    list.replaceChildren(...partsOf(film, film.frame(step)));
    hint.node.hidden = list.scrollHeight <= QUEUE_ROOM;
    list.style.setProperty("--pi-room", `${Math.min(QUEUE_ROOM, list.scrollHeight)}px`);
    list.style.height = "";
  }

  const draw = () => {
    const { frame, film } = view.state, counts = [[frame.running, "running"], [frame.waiting, "waiting"], [frame.swapped, "swapped out"]];
    head.textContent = counts.filter(([queue, name]) => queue.length || name !== "swapped out").map(([queue, name]) => `${fmt(queue.length)} ${name}`).join(", ");
    const focused = list.contains(document.activeElement) ? document.activeElement.dataset.request : null, top = list.scrollTop;
    keepRoom(film);
    list.replaceChildren(...partsOf(film, frame));
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
