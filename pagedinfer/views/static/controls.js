// Buttons, slider, speed and keys; the browser ticks, the kernel steps.
const SPEEDS = [1, 2, 5, 10, 30, 100], FRAME_MS = 100, PATIENCE_MS = 5000;
let lastSpeed = "5";

function controlBar(view) {
  const icon = (d) => make("svg:svg", { width: 16, height: 16, viewBox: "0 0 16 16", "aria-hidden": "true" }, make("svg:path", { d }));
  const button = (label, d, act) => {
    const node = make("button", { type: "button", class: "pi-button", title: label, "aria-label": label }, icon(d));
    node.addEventListener("click", act, { signal: view.signal });
    return node;
  };
  const PLAY = "M4 2.5v11l9.5-5.5z", PAUSE = "M4 2.5h3v11h-3zM9 2.5h3v11h-3z";
  const back = button("Step back", "M12 2.5v11l-7-5.5zM3.5 2.5h2v11h-2z", () => view.move(-1));
  const play = button("Play", PLAY, () => view.togglePlay());
  const step = button("Step forward", "M4 2.5v11l7-5.5zM10.5 2.5h2v11h-2z", () => view.move(1));
  const slider = make("input", { type: "range", class: "pi-slider", min: 0, max: 0, value: 0, step: 1, "aria-label": "Step" });
  slider.addEventListener("input", () => { view.pause(); view.go(+slider.value); }, { signal: view.signal });
  const count = make("output", { class: "pi-count" });
  const speed = make("select", { class: "pi-speed", "aria-label": "Speed, steps per second" }, ...SPEEDS.map((n) => make("option", { value: n }, `${n} steps/s`)));
  speed.value = lastSpeed;
  speed.addEventListener("change", () => (lastSpeed = speed.value), { signal: view.signal });
  const live = make("span", { class: "pi-live-badge" }, "live");
  const node = make("div", { class: "pi-controls", role: "group", "aria-label": "Time" }, back, play, step, slider, count, speed, live);
  const draw = () => {
    const { film, frame, isLive } = view.state, playing = view.isPlaying();
    set(slider, { min: film.first, max: Math.max(film.first, film.last), "aria-valuetext": `step ${frame.step} of ${film.last}` });
    slider.value = frame.step;
    count.textContent = `step ${frame.step} of ${film.last}`;
    disable(view.root, back, frame.step <= film.first);
    disable(view.root, step, !isLive && frame.step >= film.last);
    set(play, { title: playing ? "Pause" : "Play", "aria-label": playing ? "Pause" : "Play" });
    play.firstChild.firstChild.setAttribute("d", playing ? PAUSE : PLAY);
    live.hidden = !isLive;
    live.textContent = view.state.isIdle ? "live, idle" : "live";
  };
  return { node, draw, speed: () => +speed.value };
}

function keys(view) {
  // Lumino asks whatever has the focus, before it asks us: whoever gets it in here says no to Jupyter's own keys.
  view.root.addEventListener("focusin", ({ target }) => target.setAttribute("data-lm-suppress-shortcuts", "true"), { signal: view.signal });
  view.root.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { film } = view.state, tag = event.target.tagName, by = event.shiftKey ? 10 : 1;
    if (tag === "SELECT" || (tag === "INPUT" && event.target.type !== "range")) return;
    if (event.key === " " && (tag === "BUTTON" || event.target.getAttribute("role") === "button")) return;
    const acts = { ArrowRight: () => view.move(by), ArrowLeft: () => view.move(-by), ".": () => view.move(1), ",": () => view.move(-1),
      Home: () => view.go(film.first), End: () => view.go(film.last), " ": () => view.togglePlay(),
      Escape: () => { view.select({}); view.root.focus(); } };
    if (!acts[event.key]) return;
    event.preventDefault(); event.stopPropagation();
    acts[event.key]();
  }, { signal: view.signal });
}
