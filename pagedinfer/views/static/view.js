// The view: one film, one cursor, one selection; panes that draw them. `model` is anywidget's, or the export page's.
const DISCONNECTED = "This view is disconnected from its kernel: run its cell again.";
let views = 0;
const owners = new WeakMap();  // bytes of a film -> the view drawn last from them: when Jupyter draws that anew, it goes on with what it had

function render({ model, el }) {
  const abort = new AbortController(), { signal } = abort, owner = owners.get(model.get("film")), before = owner?.root.isConnected ? null : owner, film = before?.film ?? createFilm();
  before?.leave();  // Jupyter lets go of the old view late; two may not add to one film
  const root = make("div", { class: "pi-view", tabindex: 0, role: "group", "data-testid": "pi-view", "data-lm-suppress-shortcuts": "true", "data-links": model.get("links"),
    "aria-label": `${model.get("title")}. Left and Right step, Shift for ten, Home and End, Space plays.` });
  const tell = teller(model, () => complain(DISCONNECTED)), view = { id: `pi${Date.now().toString(36)}${views++}`, root, signal };
  const state = (view.state = { film, frame: emptyFrame(), pool: null, selected: {}, playing: false, isLive: false, isIdle: false, version: 0 });
  let ask = 0, timer = 0, wanted = 0, grown = false, unseen = false, opening = null;  // ask: number of the request the kernel has not answered yet; opening: the step to show once its line is here

  // -- parts ------------------------------------------------------------------------------------------------
  view.card = (name, title, head, ...content) => make("section", { class: `pi-card pi-card-${name}`, "aria-label": title },
    make("header", {}, make("h3", {}, title), ...(head ? [head] : [])), ...content);
  const say = make("p", { class: "pi-say", "aria-live": "polite" }), trouble = make("p", { class: "pi-trouble", role: "alert", hidden: true });
  const tipBox = make("div", { class: "pi-tip", hidden: true, "aria-hidden": "true" }), controls = controlBar(view), breaks = breaksBar(view, model), notice = make("p", { class: "pi-notice", role: "status", hidden: true });
  const makers = { blocks: blockPane, queues: queuesPane, budget: budgetPane, timeline: timelinePane, memory: memoryPane, chains: chainsPane, details: detailsPane };
  const names = model.get("panes"), panes = names.map((name) => makers[name](view)), has = (name) => names.includes(name);
  // Blocks, budget and queues stand beside the details, all else below.
  const column = make("div", { class: "pi-column" }), grid = make("div", { class: `pi-panes${has("details") && ["blocks", "budget", "queues"].some(has) ? " pi-two" : ""}` });
  for (const pane of panes) (["blocks", "budget", "queues"].includes(pane.name) ? column : grid).append(pane.node);
  if (column.children.length) grid.prepend(column);
  if (grid.classList.contains("pi-two")) column.after(panes.find((pane) => pane.name === "details").node);
  const textures = make("svg:svg", { class: "pi-textures", width: 0, height: 0, "aria-hidden": "true" }, patternDefs(view.id));
  root.append(textures, make("div", { class: "pi-top" }, controls.node, breaks.node, notice, say, trouble), grid, tipBox);

  // -- geometry -----------------------------------------------------------------------------------------------
  view.width = () => Math.max(240, (grid.querySelector(":is(.pi-card-timeline,.pi-card-memory) .pi-plot")?.clientWidth || 0) || root.clientWidth - 30);
  view.widthOf = (node) => Math.max(240, node.closest(".pi-plot")?.clientWidth || root.clientWidth - 30);
  view.scale = () => scaleOf(film, state.frame.step, view.width());
  view.laneTones = () => {
    const probe = make("span", { hidden: true }), solid = [], tint = [];
    root.append(probe);
    const read = (name) => { probe.style.color = `var(${name})`; return getComputedStyle(probe).color; };
    for (let c = 0; c < NUM_COLOURS; c++) { probe.className = `pi-c${c}`; solid.push(read("--pi-lane")); tint.push(read("--pi-tint")); }
    const tones = { solid, tint };
    for (const name of ["free", "accent", "cached", "page", "ink", "live"]) tones[name] = read(`--pi-${name}`);
    probe.remove();
    return tones;
  };

  // After a click the arrow keys step through time, wherever the click was.
  view.takeKeys = () => takeKeys(root);

  // -- selection ----------------------------------------------------------------------------------------------
  view.laneOf = (rid) => film.lanes.findLast((lane) => lane.rid === rid && lane.from <= state.frame.step)?.number ?? film.lanes.findLast((lane) => lane.rid === rid)?.number;
  view.linkedLanes = () => {
    const { selected, pool } = state;
    if (selected.request !== undefined) { const lane = view.laneOf(selected.request); return new Set(lane === undefined ? [] : [lane]); }
    return new Set(selected.block !== undefined && pool && selected.block < film.numBlocks ? ownersOf(pool, selected.block) : []);
  };
  const chosen = () => (state.selected.block !== undefined && state.pool && state.selected.block < film.numBlocks ? state.selected.block : -1);
  view.selectedBlocks = () => new Set(chosen() < 0 ? [] : [chosen()]);
  view.chainBlocks = () => (chosen() < 0 || !state.frame.cached.size ? new Set() : chainOf(state.frame.cached, chosen()));
  view.select = (selected) => {
    state.selected = selected;
    tell({ selected });
    draw();
  };
  view.toggle = (selected) => view.select(JSON.stringify(selected) === JSON.stringify(state.selected) ? {} : selected);

  // -- time ---------------------------------------------------------------------------------------------------
  view.marks = () => marksOf(model);
  view.go = (step, mine = true) => {
    const to = clamp(step, film.first, film.last);
    if (to === state.frame.step && state.pool) return;
    state.frame = film.frame(to);
    state.pool = poolOf(film, state.frame);
    draw();
    if (mine) tell({ cursor: to });
  };
  view.move = (by) => {
    const to = state.frame.step + by;
    if (to > film.last && state.isLive) { if (state.frame.step < film.last) view.go(film.last); advance(to - film.last); }
    else view.go(to);
  };
  view.isPlaying = () => state.playing || !!model.get("driving");
  view.togglePlay = () => (view.isPlaying() ? view.pause() : begin());
  view.pause = () => {
    if (model.get("driving")) request(0, { pause: true });
    if (!state.playing) return;
    state.playing = false;
    clearInterval(timer);
    if (grown) keep();
    controls.draw();
  };
  function begin() {
    if (!state.isLive && state.frame.step >= film.last) view.go(film.first);
    state.playing = true;
    let due = performance.now();
    timer = setInterval(() => {
      const now = performance.now(), steps = Math.floor(((now - due) / 1000) * controls.speed() + 1e-6);
      if (!root.isConnected) return view.pause();
      if (steps < 1 || ask) return;
      due = Math.max(due + (steps * 1000) / controls.speed(), now - 1000);
      const from = state.frame.step, to = Math.min(from + steps, film.last), stop = view.marks().find(([step]) => step > from && step <= to);
      if (stop) { view.pause(); view.go(stop[0]); }
      else if (from < film.last) view.go(to);
      else if (state.isLive) advance(steps);
      else view.pause();
    }, FRAME_MS);
    controls.draw();
  }

  // -- the kernel ---------------------------------------------------------------------------------------------
  function advance(steps) {
    wanted = Math.min(wanted + steps, 100);
    if (!ask) { request(wanted); wanted = 0; }
  }
  function request(steps, more = {}) {
    ask = Math.max(ask + 1, Date.now());
    tell({ ask: { id: ask, steps, have: film.last, ...more } }, true);
    watch();
  }
  view.request = (more) => request(0, more);
  function watch() {
    const id = ask;
    setTimeout(() => {
      if (ask !== id || signal.aborted) return;
      complain(`No answer from the kernel for ${PATIENCE_MS / 1000} seconds: it is busy, or this view is disconnected (run its cell again after a restart).`);
    }, PATIENCE_MS);
  }
  function complain(text) {
    trouble.textContent = text;
    trouble.hidden = !text;
    root.toggleAttribute("data-trouble", !!text);
  }
  function answered() {
    const answer = model.get("answer") ?? {};
    if (answer.more !== undefined) state.isIdle = answer.more === false && !answer.stop;
    if (answer.id && answer.id === ask) {
      ask = 0;
      complain(answer.error ?? "");
      breaks.answered(answer.watch);
      if (answer.error || answer.more === false) view.pause();
      if (wanted && !answer.error && answer.more !== false) request(wanted);
      wanted = 0;
    } else if (answer.error) complain(answer.error);
    controls.draw();
    breaks.draw();
  }

  function absorb(name) {
    const before = film.last;
    if (!film.add(model.get(name))) { if (!ask) request(0); return; }
    state.version++;
    grown ||= film.last > before;
    if (ask) complain("");
    const at = opening ?? model.get("cursor");  // the kernel says who goes along
    opening = null;
    state.frame = film.frame(clamp(at, film.first, film.last));
    state.pool = poolOf(film, state.frame);
    draw();
    if (model.get("driving")) tell({ seen: film.last }, true);  // the next frame may come
  }

  // The picture that a saved notebook shows: the kernel puts it into the output, which Jupyter then draws anew.
  function keep() {
    grown = false;
    if (!state.isLive) return;
    const output = root.closest(".jp-OutputArea-output");
    if (output) {  // the page stays where it is meanwhile
      output.style.minHeight = `${output.offsetHeight}px`;
      setTimeout(() => (output.style.minHeight = ""), 2000);
    }
    mine.hadKeys = root.contains(document.activeElement);
    request(0, { keep: true });
  }
  root.addEventListener("focusout", (event) => { if (grown && !view.isPlaying() && !ask && leaves(root, event)) keep(); }, { signal });

  // -- drawing ------------------------------------------------------------------------------------------------
  function draw() {
    if (!film.lines.length) return;
    if (root.dataset.step !== String(state.frame.step)) tipBox.hidden = true;  // it told of another step
    root.dataset.step = state.frame.step;
    root.dataset.last = film.last;
    root.classList.toggle("has-selection", view.linkedLanes().size > 0);
    const stop = view.marks().find(([step]) => step === state.frame.step), why = stop ? `Stop at step ${stop[0]}: ${stop[1]}` : "";
    if (notice.textContent !== why) notice.textContent = why;
    notice.hidden = !why;
    breaks.draw();
    say.setAttribute("aria-live", view.isPlaying() ? "off" : "polite");  // ten sentences a second help nobody
    if (say.textContent !== state.frame.say) say.textContent = state.frame.say;
    controls.draw();
    if (unseen) return;  // and drawn when it comes into sight
    for (const pane of panes) {
      if (pane.name === "chains") pane.node.hidden = panes.length > 1 && !film.has("chains");
      if (!pane.node.hidden) pane.draw();
    }
  }
  view.tip = (told, near) => {
    tipBox.hidden = !told;
    if (!told) return;
    tipBox.replaceChildren(make("b", {}, told.title), make("dl", {}, ...told.rows.flatMap(([k, v]) => [make("dt", {}, k), make("dd", {}, String(v))])));
    const box = root.getBoundingClientRect(), at = near.getBoundingClientRect ? near.getBoundingClientRect() : { right: near.clientX, bottom: near.clientY };
    const x = Math.min(at.right - box.left + 12, box.width - tipBox.offsetWidth - 8), below = at.bottom - box.top + 14;
    const y = below + tipBox.offsetHeight > box.height ? Math.max(4, below - tipBox.offsetHeight - 28) : below;
    set(tipBox, { style: `left:${Math.max(4, x)}px;top:${y}px` });
  };

  const mine = { film, root, leave, hadKeys: false };
  owners.set(model.get("film"), mine);
  keys(view);
  const on = { "change:tail": () => absorb("tail"), "change:answer": answered, "change:driving": () => controls.draw(),
    "change:live": sync, "change:cursor": () => { if (model.get("cursor") !== state.frame.step) view.go(model.get("cursor"), false); },
    "change:breaks": draw, "change:watching": draw, "change:selected": () => { state.selected = model.get("selected") ?? {}; draw(); } };
  function sync() { state.isLive = !!model.get("live"); controls.draw(); }
  el.append(root);
  if (!before) film.add(model.get("film"));
  const whole = film.add(model.get("tail"));
  state.isLive = !!model.get("live");
  state.selected = model.get("selected") ?? {};
  view.go(model.get("cursor") ?? film.last, false);
  if (!whole || !film.lines.length) { opening = model.get("cursor"); request(0); }
  for (const [name, act] of Object.entries(on)) model.on(name, act);
  followScheme(root, () => { if (state.pool) for (const pane of panes) pane.repaint?.(); }, signal);
  let seen = root.clientWidth;
  const sizes = new ResizeObserver(() => { if (Math.abs(root.clientWidth - seen) > 4) { seen = root.clientWidth; draw(); } });
  sizes.observe(root);
  const sight = new IntersectionObserver((entries) => { const was = unseen; unseen = !entries.at(-1).isIntersecting; if (was && !unseen) draw(); }, { rootMargin: "300px" });
  sight.observe(root);
  if (before?.hadKeys) requestAnimationFrame(() => { before.hadKeys = false; if (document.activeElement === document.body) view.takeKeys(); });
  function leave() {
    abort.abort();
    clearInterval(timer);
    sizes.disconnect();
    sight.disconnect();
    for (const [name, act] of Object.entries(on)) model.off(name, act);
  }
  return leave;
}
