// Memory chart: what the pool's token slots are used for over steps, stacked, and the KV waste in a strip below.
const SLOTS = [  // from the bottom up: part, its name, slots of it, how it is painted (fill class, pattern)
  ["live", "live tokens", (m) => m.live - m.shared, "pi-live", ""],
  ["shared", "live, shared by several requests", (m) => m.shared, "pi-live", "shared"],
  ["slack", "tail slack: allocated, holds no token", (m) => m.slack, "pi-slack", "tail"],
  ["reserved", "reserved, unused", (m) => m.reserved, "pi-page", "reserved"],
  ["cached", "cached, idle", (m) => m.cached, "pi-cached", "cached"],
];

// As views/memory.py says it.
function memoryWords(m) {
  const part = (n, name) => (n ? [`${fmt(n)} ${name}`] : []);
  const parts = [`${fmt(m.live)} live${m.shared ? ` (${fmt(m.shared)} shared)` : ""}`, `${fmt(m.slack)} tail slack`, ...part(m.reserved, "reserved"), ...part(m.cached, "cached and idle")];
  return `${parts.join(", ")}, ${fmt(m.free)} free of ${fmt(m.slots)} token slots; KV waste ${percent(m.wasted, m.allocated)}${m.host ? `; ${plural(m.host, "block")} in host memory` : ""}`;
}

function memoryPane(view) {
  const { top, tall, between, strip } = MEMORY, bottom = top + tall + between + strip, base = bottom - strip;
  const svg = make("svg:svg", { class: "pi-memory", height: bottom + 22, role: "img" }), head = make("span", { class: "pi-sub" }), key = make("div", {});
  const pane = view.card("memory", "Memory", head, make("div", { class: "pi-plot" }, svg), key);
  let drawn = "", keyed = "", scale = null, mark = null;

  const draw = () => {
    const { film, frame } = view.state;
    scale = view.scale();
    const now = `${scale.key}/${film.last}/${film.lines.length}/${view.state.version}`;
    if (now !== drawn) { drawn = now; build(film); }
    set(mark, { x: scale.x(frame.step), width: scale.column });
    head.textContent = memoryWords(frame.memory);
    svg.setAttribute("aria-label", `Memory over steps. At step ${frame.step}: ${head.textContent}`);
  };
  const partsOf = (film) => SLOTS.filter(([part]) => part === "live" || part === "slack" || film.has(part));

  function build(film) {
    const parts = partsOf(film), total = Math.max(1, film.numBlocks * film.blockSize), memory = film.lines.slice(scale.first - film.first, scale.last + 1 - film.first).map((l) => memoryOf(l.m));
    const waste = memory.map((m) => (m.allocated ? 100 * m.wasted / m.allocated : 0)), most = [10, 25, 50, 100].find((m) => waste.every((w) => w <= m)), right = scale.x(scale.first + memory.length);
    const y = (share) => top + tall * (1 - share), areas = [];
    function stairs(values, from = top, high = tall) {
      return `M${GUTTER} ${from + high * (1 - (values[0] ?? 0))}` + values.map((v, i) => `V${from + high * (1 - v)}H${scale.x(scale.first + i + 1)}`).join("");
    }
    let under = memory.map(() => 0);
    for (const [part, , of, cls, pattern] of parts) {
      const over = memory.map((m, i) => under[i] + of(m) / total), back = under.map((v, i) => `V${y(v)}H${scale.x(scale.first + i)}`).reverse().join(""), d = `${stairs(over)}${back}Z`;
      areas.push(make("svg:path", { class: cls, d, "data-part": part }), ...(pattern ? [make("svg:path", { d, fill: `url(#${view.id}-${pattern})` })] : []));
      under = over;
    }
    const label = (x, at, text, cls = "pi-end") => make("svg:text", { x, y: at, class: cls }, text);
    const rule = (at) => make("svg:path", { class: "pi-rule", d: `M${GUTTER} ${at}H${right}` });
    set(svg, { width: view.width() });
    svg.replaceChildren(make("svg:rect", { class: "pi-free", x: GUTTER, y: top, width: right - GUTTER, height: tall }), ...areas,
      ...[0, 0.5, 1].flatMap((share) => [rule(y(share)), label(GUTTER - 8, y(share) + 4, short(Math.round(total * share)))]),
      label(5, top + tall / 2 - 18, "token", "pi-start"), label(5, top + tall / 2 - 4, "slots", "pi-start"),
      rule(base), rule(bottom), make("svg:path", { class: "pi-waste", d: stairs(waste.map((w) => w / most), base, strip) }),
      label(5, base + 14, "KV", "pi-start"), label(5, base + 28, "waste", "pi-start"), label(GUTTER - 8, base + 8, `${most} %`), label(GUTTER - 8, bottom + 2, "0 %"),
      (mark = make("svg:rect", { class: "pi-cursor", y: top, height: bottom - top })),
      ...scale.ticks.map((s) => label(scale.x(s + 0.5), bottom + 16, String(s), "pi-mid")));
    const names = parts.map((p) => p[0]).join();
    if (keyed !== names) { keyed = names; key.replaceChildren(keyOf(parts)); }
  }
  const keyOf = (parts) => {
    const box = { x: 0, y: 1, width: 14, height: 12, rx: 2 }, row = (name, cls, pattern) => make("li", {}, make("svg:svg", { width: 14, height: 14, class: "pi-key", "aria-hidden": "true" },
      make("svg:rect", { ...box, class: cls }), ...(pattern ? [make("svg:rect", { ...box, fill: `url(#${view.id}-${pattern})` })] : [])), name);
    return make("ul", { class: "pi-legend" }, ...parts.map(([, name, , cls, pattern]) => row(name, cls, pattern)), row("free", "pi-free", ""));
  };

  const stepAt = (event) => Math.min(scale.at(event.clientX - svg.getBoundingClientRect().left), view.state.film.last);
  svg.addEventListener("pointerdown", (event) => { event.preventDefault(); view.takeKeys(); view.go(stepAt(event)); }, { signal: view.signal });
  svg.addEventListener("pointermove", (event) => {
    const step = stepAt(event), { film } = view.state, m = memoryOf(film.line(step).m);
    if (event.buttons & 1) view.go(step);
    view.tip({ title: `step ${step}`, rows: [...partsOf(film).map(([part, , of]) => [part === "slack" ? "tail slack" : part, `${fmt(of(m))} token slots`]), ["free", fmt(m.free)],
      ["blocks in use", fmt(m.used)], ["KV waste", percent(m.wasted, m.allocated)]] }, event);
  }, { signal: view.signal });
  svg.addEventListener("pointerleave", () => view.tip(null), { signal: view.signal });
  return { name: "memory", node: pane, draw, repaint: () => { drawn = ""; draw(); } };
}
