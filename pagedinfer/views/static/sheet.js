// A view with a cursor: the drawings of many steps, made by Python, shown one at a time. Parts that carry data-k and
// move between two steps glide there; parts that carry data-rid or data-blocks can be selected. `model` is anywidget's,
// or the page's. Where there is a kernel (`exact`), it draws the steps that the film does not hold (`tail`).
const GLIDE_MS = 450;
let sheets = 0;

async function render({ model, el }) {
  const film_ = () => inflated(model.get("film")).then((bytes) => JSON.parse(new TextDecoder().decode(bytes)));
  const abort = new AbortController(), { signal } = abort, read = (name) => { const bytes = model.get(name); return bytes?.byteLength ? JSON.parse(new TextDecoder().decode(bytes)) : null; };
  const tell = teller(model, () => { exact = false; });  // without a kernel it shows what it holds
  const root = make("div", { class: "pi-view pi-sheet", tabindex: 0, role: "group", "data-testid": "pi-sheet", "data-lm-suppress-shortcuts": "true", "data-links": model.get("links"),
    "aria-label": `${model.get("title")}. Left and Right step, Shift for ten, Home and End, Space plays.` });
  let sheet = await film_(), tail = null, exact = !!model.get("exact"), grown = false, asked = 0;
  const id = `pi${Date.now().toString(36)}${sheets++}`;  // of patterns: those of another view may be in a cell that Jupyter does not draw
  let at = -1, drawn = null, width = 0, shown = [], timer = 0, unseen = false, selected = model.get("selected") ?? {};
  const film = { first: 0, last: 0 }, view = { root, signal, state: { film, frame: { step: 0 }, isLive: false, isIdle: false } };

  const say = make("p", { class: "pi-say", "aria-live": "polite" }), trouble = make("p", { class: "pi-trouble", role: "alert", hidden: true });
  const pick = make("select", { class: "pi-speed pi-pick", "aria-label": "Select" }), controls = controlBar(view);
  const picture = make("div", { class: "pi-picture" }), note = make("p", { class: "pi-note-steps", hidden: true });
  controls.node.append(pick);
  root.append(make("div", { class: "pi-top" }, controls.node, say, trouble), picture, note);

  // -- time -------------------------------------------------------------------------------------------------------
  const nearest = (steps, step) => {
    let low = 0, high = steps.length - 1;
    while (low < high) { const mid = (low + high + 1) >> 1; if (steps[mid] <= step) low = mid; else high = mid - 1; }
    return low;
  };
  // The newest drawing of the step that is here, else the nearest one.
  function found(step) {
    if (tail && tail.steps[0] === step && tail.version >= sheet.version) return { of: tail, index: 0 };
    return { of: sheet, index: nearest(sheet.steps, step) };
  }
  function learn() {
    const newest = tail && tail.version > sheet.version ? tail : sheet;
    [film.first, film.last] = newest.range;
    note.textContent = exact ? "" : sheet.note;
    note.hidden = !note.textContent;
    root.dataset.last = film.last;
    root.classList.toggle("is-still", film.last === film.first && !model.get("live"));
  }
  const goTo = (step, mine = true) => {
    const to = clamp(step, film.first, film.last), glide = Math.abs(to - at) === 1;
    at = view.state.frame.step = to;
    draw(glide);
    if (mine) tell({ cursor: at });
  };
  view.go = (step) => { if (clamp(step, film.first, film.last) !== at) goTo(step); };
  view.move = (by) => {
    if (!exact) return view.go(sheet.steps[clamp(nearest(sheet.steps, at) + by, 0, sheet.steps.length - 1)]);
    if (at + by > film.last && model.get("live")) { if (at < film.last) goTo(film.last); advance(at + by - film.last); }
    else view.go(at + by);
  };
  view.isPlaying = () => timer !== 0;
  view.pause = () => {
    if (!timer) return;
    clearInterval(timer);
    timer = 0;
    queueMicrotask(controls.draw);  // not now: it would put the slider back before its new place is read
  };
  view.togglePlay = () => {
    if (timer) return view.pause();
    if (at >= film.last && !model.get("live")) goTo(film.first);
    let due = performance.now();
    timer = setInterval(() => {
      const count = Math.floor(((performance.now() - due) / 1000) * controls.speed() + 1e-6);
      if (!root.isConnected || (at >= film.last && !model.get("live"))) return view.pause();
      if (count < 1 || asked) return;
      due += (count * 1000) / controls.speed();
      if (at < film.last) goTo(Math.min(at + count, film.last));
      else advance(count);
    }, FRAME_MS);
    controls.draw();
  };

  // -- the kernel -------------------------------------------------------------------------------------------------
  function advance(steps) {
    if (asked) return;
    asked = Math.max(asked + 1, Date.now());
    const mine = asked, before = film.last;
    tell({ ask: { id: asked, steps } }, true);
    setTimeout(() => { if (asked === mine) { asked = 0; if (film.last === before) view.pause(); } }, PATIENCE_MS);
  }
  function answered() {  // after an advance comes a drawing, an error, or nothing because the run is over
    const answer = model.get("answer") ?? {};
    if (answer.id !== asked) return;
    asked = 0;
    if (!answer.more) view.pause();
    trouble.textContent = answer.error ?? "";
    trouble.hidden = !trouble.textContent;
    controls.draw();
  }
  function absorb() {
    if (unseen) return;
    const new_ = read("tail"), before = film.last;
    if (!new_) return;
    tail = new_;
    learn();
    grown ||= film.last > before;
    goTo(model.get("cursor"), false);
    tell({ seen: tail.number }, true);
  }
  function follow() { if (!unseen && model.get("cursor") !== at) goTo(model.get("cursor"), false); }
  root.addEventListener("focusout", (event) => {
    if (!grown || timer || !leaves(root, event)) return;
    grown = false;
    tell({ ask: { id: Date.now(), keep: true } }, true);
  }, { signal });

  // -- selection --------------------------------------------------------------------------------------------------
  const marked = () => [...picture.querySelectorAll("[data-rid],[data-blocks]")];
  const blocksOf = (node) => node.dataset.blocks?.split(" ").map(Number) ?? [];
  const meaning = (node) => (node.dataset.rid !== undefined ? { request: node.dataset.rid } : { block: blocksOf(node)[0] });
  const same = (a, b) => a.request === b.request && a.block === b.block;
  view.select = (to) => { selected = to; mark(); tell({ selected }); };
  function relatives() {
    const rids = new Set(), blocks = new Set(), tables = new Map(drawn.tables.map((number) => drawn.of.parts[number].split("\t")));
    if (selected.request !== undefined) { rids.add(selected.request); for (const b of (tables.get(selected.request) ?? "").split(" ")) if (b) blocks.add(+b); }
    if (selected.block !== undefined) { blocks.add(selected.block); for (const [rid, table] of tables) if (table.split(" ").includes(String(selected.block))) rids.add(rid); }
    return { rids, blocks };
  }
  function mark() {
    const { rids, blocks } = relatives(), nodes = marked(), by = selected.request !== undefined ? "rid" : "blocks";
    const belongs = (node) => {
      const asRid = node.dataset.blocks === undefined || (by === "rid" && node.dataset.rid !== undefined);
      return asRid ? rids.has(node.dataset.rid) : blocksOf(node).some((b) => blocks.has(b));
    };
    const linked = new Set(nodes.filter(belongs)), holdsNone = by === "rid" && !blocks.size;  // then blocks have no say
    for (const node of nodes) {
      node.classList.toggle("is-linked", linked.has(node));
      node.classList.toggle("pi-dim", linked.size > 0 && !linked.has(node) && !(holdsNone && node.dataset.rid === undefined));
    }
    const running = drawn.tables.map((number) => ({ request: drawn.of.parts[number].split("\t")[0] }));
    const names = new Map([...nodes.map((node) => { const one = meaning(node); return [JSON.stringify(one), one.request ?? `block ${one.block}`]; }), ...running.map((one) => [JSON.stringify(one), one.request])]);
    const mine = JSON.stringify(selected), options = [["{}", "nothing selected"], ...names];
    if (Object.keys(selected).length && !names.has(mine)) options.push([mine, selected.request ?? `block ${selected.block}`]);
    const key = JSON.stringify(options);
    if (pick.dataset.key !== key) {
      pick.dataset.key = key;
      pick.replaceChildren(...options.map(([value, name]) => make("option", { value }, name)));
    }
    pick.value = mine;
    pick.hidden = options.length < 2;
  }
  pick.addEventListener("change", () => view.select(JSON.parse(pick.value)), { signal });
  function under({ target, clientX: x, clientY: y }) {  // the smallest whose box has the place: rows have gaps
    const size = (box) => box.width * box.height, inside = (box) => box.left <= x && x <= box.right && box.top <= y && y <= box.bottom;
    const near = marked().map((node) => [node, node.getBoundingClientRect()]).filter(([, box]) => inside(box));
    return target.closest("[data-rid],[data-blocks]") ?? near.sort((a, b) => size(a[1]) - size(b[1]))[0]?.[0];
  }
  picture.addEventListener("click", (event) => {
    const node = under(event), to = node ? meaning(node) : {};
    view.select(same(to, selected) ? {} : to);
    takeKeys(root);
  }, { signal });

  // -- drawing ----------------------------------------------------------------------------------------------------
  function sizeOf({ sizes }) {
    const room = root.clientWidth - 24, fits = sizes.filter(({ width }) => width <= Math.max(room, 1));
    return fits.length ? fits.reduce((a, b) => (b.width > a.width ? b : a)) : sizes.reduce((a, b) => (b.width < a.width ? b : a));
  }
  const frameOf = ({ of, index }) => {  // a layer that says 0 is the one of the frame before
    const { width, frames } = sizeOf(of), [height, layers] = frames[index];
    const held = (pick) => { for (let k = index; ; k--) { const value = pick(frames[k]); if (value) return value; } };
    return { of, index, width, height, layers: layers.map((_, i) => held((frame) => frame[1][i])), tables: held((frame) => frame[2]) };
  };
  const places = () => new Map([...picture.querySelectorAll("[data-k]")].map((node) => [node.dataset.k, [+node.getAttribute("data-x"), +node.getAttribute("data-y") || 0]]));
  function draw(glide) {
    drawn = frameOf(found(at));
    const before = glide ? places() : null, words = drawn.of.say[drawn.index];
    if (drawn.width !== width) {
      width = drawn.width;
      shown = [];
      picture.replaceChildren(make("svg:svg", { width, role: "img", style: `width:min(100%,${1.3 * width}px)` }));
    }
    const svg = picture.firstChild;
    set(svg, { viewBox: `0 0 ${width} ${drawn.height}`, height: drawn.height, "aria-label": model.get("title") + ". " + words });
    while (svg.children.length > drawn.layers.length) { svg.lastChild.remove(); shown.pop(); }
    drawn.layers.forEach(([y, parts], i) => {
      const node = svg.children[i] ?? svg.appendChild(make("svg:g")), body = parts.map((part) => drawn.of.parts[part]).join("").replaceAll(/(id="|url\(#)pi-/g, `$1${id}-`);
      node.setAttribute("transform", `translate(0 ${y})`);
      if (shown[i] === body) return;
      shown[i] = body;
      node.innerHTML = body;
    });
    root.dataset.step = drawn.of.steps[drawn.index];
    say.setAttribute("aria-live", timer ? "off" : "polite");
    say.textContent = words;
    view.state.isLive = !!model.get("live");
    controls.draw();
    mark();
    if (before && !matchMedia("(prefers-reduced-motion: reduce)").matches) glideFrom(before);
  }
  function glideFrom(before) {
    for (const [key, [x, y]] of places()) {
      const [x0, y0] = before.get(key) ?? [x, y], node = picture.querySelector(`[data-k="${CSS.escape(key)}"]`);
      if (x0 !== x || y0 !== y) node.animate([{ transform: `translate(${x0 - x}px,${y0 - y}px)` }, { transform: "none" }], { duration: GLIDE_MS, easing: "ease-in-out" });
    }
  }

  keys(view);
  el.append(root);
  const scheme = () => {
    const said = root.style.colorScheme, dark = said === "dark" || (said !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
    root.classList.toggle("is-dark", dark);
    root.classList.toggle("is-light", !dark);
  };
  followScheme(root, scheme, signal);
  scheme();
  tail = read("tail");
  learn();
  goTo(model.get("cursor") ?? film.last, false);
  if (tail) tell({ seen: tail.number }, true);
  const on = { "change:cursor": follow, "change:tail": absorb, "change:answer": answered, "change:live": () => { learn(); controls.draw(); },
    "change:selected": () => { selected = model.get("selected") ?? {}; if (!unseen) mark(); },
    "change:film": async () => { sheet = await film_(); learn(); goTo(model.get("cursor"), false); } };
  for (const [name, act] of Object.entries(on)) model.on(name, act);
  // What nobody sees is drawn when it comes into sight.
  const sight = new IntersectionObserver((entries) => {
    const was = unseen;
    unseen = !entries.at(-1).isIntersecting;
    if (was && !unseen) { absorb(); follow(); mark(); }
  }, { rootMargin: "300px" });
  sight.observe(root);
  const sizes = new ResizeObserver(() => { if (sizeOf(drawn.of).width !== width) draw(false); });
  sizes.observe(root);
  return () => { abort.abort(); clearInterval(timer); sizes.disconnect(); sight.disconnect(); for (const [name, act] of Object.entries(on)) model.off(name, act); };
}
