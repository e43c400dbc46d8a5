// Small helpers for elements, numbers and colours.
const SVG = "http://www.w3.org/2000/svg";

function make(tag, attrs = {}, ...children) {
  const svg = tag.startsWith("svg:");
  const node = svg ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  return set(node, attrs, ...children);
}
function set(node, attrs, ...children) {
  for (const [name, value] of Object.entries(attrs))
    if (value === null || value === undefined || value === false) node.removeAttribute(name);
    else node.setAttribute(name, value === true ? "" : value);
  node.append(...children);
  return node;
}

// Whether the focus leaves `root` for something that is no view of the same run.
function leaves(root, { relatedTarget: to }) {
  const names = (node) => (node.dataset.links ?? "").split(" "), view = to?.closest(".pi-view");
  return !!to && view !== root && !(view && names(view).some((name) => names(root).includes(name)));
}
const takeKeys = (root) => root.focus({ preventScroll: true, focusVisible: false });
// A button that can do nothing (any more) lets go of the keys.
function disable(root, button, off) {
  if (off && button === document.activeElement) takeKeys(root);
  button.disabled = off;
}

// Tells the kernel what was done here, by messages of our own: at once, or soon after the one before. (A trait that
// ipywidgets syncs waits for the end of the message before it, and ipykernel 7.4 tells none while a cell awaits.)
// `lost` is called when there is no kernel any more.
const SOON_MS = 50;
function teller(model, lost) {
  let state = {}, timer = 0;
  const tell = (values, now = false) => {
    for (const [name, value] of Object.entries(values)) model.set(name, value);
    Object.assign(state, values);
    if (timer && !now) return;
    const told = state;
    state = {};
    try { model.send({ state: told }); } catch (error) { lost(error); }
    timer ||= setTimeout(() => { timer = 0; if (Object.keys(state).length) tell({}); }, SOON_MS);
  };
  return tell;
}

// Short enough for an axis: 950, 28.7k, 16M.
const short = (n) => (n < 10000 ? fmt(n) : n < 1e5 ? `${+(n / 1000).toFixed(1)}k` : n < 1e6 ? `${Math.round(n / 1000)}k` : `${+(n / 1e6).toFixed(1)}M`);
const fmt = (n) => n.toLocaleString("en-US");
// A share in per cent with one decimal, halves up: as views/memory.py rounds.
function percent(part, whole) {
  const tenths = whole ? Math.floor((2000 * part + whole) / (2 * whole)) : 0;
  return `${Math.floor(tenths / 10)}.${tenths % 10}\u00a0%`;
}
const plural = (n, word) => `${fmt(n)} ${word}${n === 1 ? "" : "s"}`;
const clamp = (x, low, high) => Math.min(high, Math.max(low, x));

const NUM_COLOURS = 8, NUM_TEXTURES = 4;
const colourOf = (lane) => lane % NUM_COLOURS;
const textureOf = (lane) => (lane + Math.floor(lane / NUM_COLOURS)) % NUM_TEXTURES;

// One pattern per colour and texture, named by `id`; a lane is painted with paintOf(id, lane).
const paintOf = (id, lane) => `url(#${id}-${colourOf(lane)}-${textureOf(lane)})`;
function patternDefs(id) {
  const shapes = ["", "M-1 7L7 -1M2 10L10 2M-4 4L4 -4", "M2 2h.01M6 6h.01", "M-1 1L7 9M2 -2L10 6M-4 4L4 12"];
  const defs = make("svg:defs");
  for (let c = 0; c < NUM_COLOURS; c++)
    for (let t = 0; t < NUM_TEXTURES; t++)
      defs.append(make("svg:pattern", { id: `${id}-${c}-${t}`, class: `pi-c${c}`, width: 8, height: 8, patternUnits: "userSpaceOnUse" },
        make("svg:rect", { width: 8, height: 8, class: "pi-solid" }),
        make("svg:path", { d: shapes[t], class: "pi-hatch", "stroke-width": t === 2 ? 2.2 : 1.6 })));
  const lost = make("svg:pattern", { id: `${id}-lost`, width: 5, height: 5, patternUnits: "userSpaceOnUse" },
    make("svg:path", { class: "pi-lost", d: "M-1 6L6 -1", "stroke-width": 1.3 }));
  const tail = make("svg:pattern", { id: `${id}-tail`, width: 6, height: 6, patternUnits: "userSpaceOnUse" },
    make("svg:rect", { width: 6, height: 6, class: "pi-slack" }),
    make("svg:path", { class: "pi-tail", d: "M-1 7L7 -1M2 10L10 2M-4 4L4 -4", "stroke-width": 1.4 }));
  const pattern = (name, size, shape, cls, width) => make("svg:pattern", { id: `${id}-${name}`, width: size, height: size, patternUnits: "userSpaceOnUse" },
    make("svg:path", { class: cls, d: shape, "stroke-width": width }));
  defs.append(lost, tail, pattern("cached", 8, "M-1 9L9 -1M-1 1L1 -1M7 9L9 7", "pi-cross-hatch", 1.2), pattern("shared", 6, "M3 3h.01", "pi-dot", 2.2), pattern("reserved", 5, "M2.5 0v5", "pi-upright", 1.2),
    pattern("swapped", 6, "M0 3h6", "pi-lost", 1.6));
  return defs;
}
const swatch = (id, lane) => make("svg:svg", { class: "pi-swatch", width: 12, height: 12, "aria-hidden": "true" },
  make("svg:rect", { width: 12, height: 12, rx: 3, fill: paintOf(id, lane) }));

// The scheme of the page around us: JupyterLab, VS Code and Colab say it; elsewhere the browser decides.
function pageScheme() {
  const body = document.body, lab = body.dataset.jpThemeLight;
  if (lab) return lab === "true" ? "light" : "dark";
  if (body.classList.contains("vscode-dark") || document.documentElement.getAttribute("theme") === "dark") return "dark";
  if (body.classList.contains("vscode-light") || document.documentElement.getAttribute("theme") === "light") return "light";
  return "light dark";
}
function followScheme(root, changed, signal) {
  const follow = () => {
    const scheme = pageScheme();
    if (root.style.colorScheme !== scheme) root.style.colorScheme = scheme;
    changed();
  };
  const watch = new MutationObserver(follow);
  watch.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "class"] });
  watch.observe(document.documentElement, { attributes: true, attributeFilter: ["theme"] });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", follow, { signal });
  signal.addEventListener("abort", () => watch.disconnect());
  follow();
}

const inflated = async (bytes) => new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
