// A view with a cursor: the drawings of all steps, made by Python, shown one at a time. Parts that carry data-k and
// move between two steps glide there. `model` is anywidget's, or the page's.
const GLIDE_MS = 450;

function render({ model, el }) {
  const abort = new AbortController(), { signal } = abort, tell = teller(model, () => {});  // without a kernel it shows all the same
  const sheet = JSON.parse(new TextDecoder().decode(model.get("film"))), { steps } = sheet;
  const root = make("div", { class: "pi-view pi-sheet", tabindex: 0, role: "group", "data-testid": "pi-sheet", "data-lm-suppress-shortcuts": "true",
    "aria-label": `${model.get("title")}. Left and Right step, Shift for ten, Home and End, Space plays.` });
  const film = { first: steps[0], last: steps[steps.length - 1] };
  const view = { root, signal, state: { film, frame: { step: film.first }, isLive: false, isIdle: false } };
  let at = -1, size = null, shown = [], timer = 0;

  const say = make("p", { class: "pi-say", "aria-live": "polite" }), controls = controlBar(view);
  const picture = make("div", { class: "pi-picture" });
  root.append(make("div", { class: "pi-top" }, controls.node, say), picture);
  if (sheet.note) root.append(make("p", { class: "pi-note-steps" }, sheet.note));
  root.classList.toggle("is-still", steps.length < 2);

  // -- time -------------------------------------------------------------------------------------------------------
  const nearest = (step) => {
    let low = 0, high = steps.length - 1;
    while (low < high) { const mid = (low + high + 1) >> 1; if (steps[mid] <= step) low = mid; else high = mid - 1; }
    return low;
  };
  const goTo = (index, mine = true) => {
    const to = clamp(index, 0, steps.length - 1), glide = Math.abs(to - at) === 1;
    if (to === at) return;
    at = to;
    view.state.frame.step = steps[at];
    draw(glide);
    if (mine) tell({ cursor: steps[at] });
  };
  view.go = (step) => goTo(nearest(step));
  view.move = (by) => goTo(at + by);
  view.select = () => {};
  view.isPlaying = () => timer !== 0;
  view.pause = () => {
    if (!timer) return;
    clearInterval(timer);
    timer = 0;
    queueMicrotask(controls.draw);  // not now: it would put the slider back before its new place is read
  };
  view.togglePlay = () => {
    if (timer) return view.pause();
    if (at >= steps.length - 1) goTo(0);
    let due = performance.now();
    timer = setInterval(() => {
      const count = Math.floor(((performance.now() - due) / 1000) * controls.speed() + 1e-6);
      if (!root.isConnected || at >= steps.length - 1) return view.pause();
      if (count < 1) return;
      due += (count * 1000) / controls.speed();
      goTo(at + count);
    }, FRAME_MS);
    controls.draw();
  };

  // -- drawing ----------------------------------------------------------------------------------------------------
  function layersOf(index) {  // a layer that says 0 is the one of the frame before
    const layers = size.frames[index][1];
    return layers.map((layer, i) => { for (let k = index; ; k--) { const found = size.frames[k][1][i]; if (found) return found; } });
  }
  function fitted() {
    const room = root.clientWidth - 24, fits = sheet.sizes.filter(({ width }) => width <= Math.max(room, 1));
    return fits.length ? fits.reduce((a, b) => (b.width > a.width ? b : a)) : sheet.sizes.reduce((a, b) => (b.width < a.width ? b : a));
  }
  const places = () => new Map([...picture.querySelectorAll("[data-k]")].map((node) => [node.dataset.k, [+node.getAttribute("data-x"), +node.getAttribute("data-y") || 0]]));
  function draw(glide) {
    const now = fitted(), before = glide ? places() : null;
    if (now !== size) {
      size = now;
      shown = [];
      picture.replaceChildren(make("svg:svg", { width: size.width, role: "img", style: `width:min(100%,${1.3 * size.width}px)` }));
    }
    const svg = picture.firstChild, [height] = size.frames[at], layers = layersOf(at);
    set(svg, { viewBox: `0 0 ${size.width} ${height}`, height, "aria-label": model.get("title") + ". " + sheet.say[at] });
    while (svg.children.length > layers.length) { svg.lastChild.remove(); shown.pop(); }
    layers.forEach(([y, parts], i) => {
      const node = svg.children[i] ?? svg.appendChild(make("svg:g")), key = parts.join();
      node.setAttribute("transform", `translate(0 ${y})`);
      if (shown[i] === key) return;
      shown[i] = key;
      node.innerHTML = parts.map((part) => sheet.parts[part]).join("");
    });
    root.dataset.step = steps[at];
    say.setAttribute("aria-live", timer ? "off" : "polite");
    say.textContent = sheet.say[at];
    controls.draw();
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
  goTo(nearest(model.get("cursor") ?? film.last), false);
  const follow = () => goTo(nearest(model.get("cursor")), false);
  model.on("change:cursor", follow);
  const sizes = new ResizeObserver(() => { if (fitted() !== size) draw(false); });
  sizes.observe(root);
  return () => { abort.abort(); clearInterval(timer); sizes.disconnect(); model.off("change:cursor", follow); };
}
