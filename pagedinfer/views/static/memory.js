// Memory chart: token slots live, tail slack and free over steps, and the KV waste in a strip below.
const wasteOf = ([live, slack]) => (live + slack ? slack / (live + slack) : 0);

function memoryPane(view) {
  const { top, tall, between, strip } = MEMORY, bottom = top + tall + between + strip, base = bottom - strip;
  const svg = make("svg:svg", { class: "pi-memory", height: bottom + 22, role: "img" }), head = make("span", { class: "pi-sub" });
  const square = "M0 1h14v12h-14z";
  const pane = view.card("memory", "Memory", head, make("div", { class: "pi-plot" }, svg), legend([
    ["live tokens", square, "pi-live"], ["tail slack: allocated, holds no token", square, "pi-slack", "M1 8L7 1M3 13L13 2M9 13L14 8", "pi-tail"], ["free", square, "pi-free"]]));
  let drawn = "", scale = null, mark = null;

  const draw = () => {
    const { film, frame } = view.state, [live, slack, free] = frame.memory;
    scale = view.scale();
    const key = `${scale.key}/${film.last}/${film.lines.length}/${view.state.version}`;
    if (key !== drawn) { drawn = key; build(film); }
    set(mark, { x: scale.x(frame.step), width: scale.column });
    head.textContent = `${fmt(live)} live, ${fmt(slack)} tail slack, ${fmt(free)} free of ${fmt(live + slack + free)} token slots; KV waste ${percent(slack, live + slack)}`;
    svg.setAttribute("aria-label", `Memory over steps. At step ${frame.step}: ${head.textContent}`);
  };

  function build(film) {
    const lines = film.lines.slice(scale.first - film.first, scale.last + 1 - film.first), total = Math.max(1, film.numBlocks * film.blockSize);
    const lives = lines.map((l) => l.m[0] / total), tops = lines.map((l) => (l.m[0] + l.m[1]) / total), waste = lines.map((l) => 100 * wasteOf(l.m));
    const most = [10, 25, 50, 100].find((m) => waste.every((w) => w <= m)), right = scale.x(scale.first + lines.length);
    const y = (share) => top + tall * (1 - share), up = stairs(lives), under = lives.map((v, i) => `V${y(v)}H${scale.x(scale.first + i)}`).reverse().join("");
    function stairs(values, from = top, high = tall) {
      return `M${GUTTER} ${from + high * (1 - (values[0] ?? 0))}` + values.map((v, i) => `V${from + high * (1 - v)}H${scale.x(scale.first + i + 1)}`).join("");
    }
    const label = (x, at, text, cls = "pi-end") => make("svg:text", { x, y: at, class: cls }, text);
    const rule = (at) => make("svg:path", { class: "pi-rule", d: `M${GUTTER} ${at}H${right}` });
    set(svg, { width: view.width() });
    svg.replaceChildren(make("svg:rect", { class: "pi-free", x: GUTTER, y: top, width: right - GUTTER, height: tall }),
      make("svg:path", { class: "pi-live", d: `${up}V${y(0)}H${GUTTER}Z` }),
      make("svg:path", { fill: `url(#${view.id}-tail)`, d: `${stairs(tops)}${under}Z` }),
      ...[0, 0.5, 1].flatMap((share) => [rule(y(share)), label(GUTTER - 8, y(share) + 4, fmt(Math.round(total * share)))]),
      label(5, top + tall / 2 - 18, "token", "pi-start"), label(5, top + tall / 2 - 4, "slots", "pi-start"),
      rule(base), rule(bottom), make("svg:path", { class: "pi-waste", d: stairs(waste.map((w) => w / most), base, strip) }),
      label(5, base + 14, "KV", "pi-start"), label(5, base + 28, "waste", "pi-start"), label(GUTTER - 8, base + 8, `${most} %`), label(GUTTER - 8, bottom + 2, "0 %"),
      (mark = make("svg:rect", { class: "pi-cursor", y: top, height: bottom - top })),
      ...scale.ticks.map((s) => label(scale.x(s + 0.5), bottom + 16, String(s), "pi-mid")));
  }

  const stepAt = (event) => Math.min(scale.at(event.clientX - svg.getBoundingClientRect().left), view.state.film.last);
  svg.addEventListener("pointerdown", (event) => { event.preventDefault(); view.takeKeys(); view.go(stepAt(event)); }, { signal: view.signal });
  svg.addEventListener("pointermove", (event) => {
    const step = stepAt(event), [live, slack, free, used] = view.state.film.line(step).m;
    view.tip({ title: `step ${step}`, rows: [["live", `${fmt(live)} token slots`], ["tail slack", fmt(slack)], ["free", fmt(free)],
      ["blocks in use", fmt(used)], ["KV waste", percent(slack, live + slack)]] }, event);
  }, { signal: view.signal });
  svg.addEventListener("pointerleave", () => view.tip(null), { signal: view.signal });
  return { name: "memory", node: pane, draw, repaint: () => { drawn = ""; draw(); } };
}
