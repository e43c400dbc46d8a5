// The film: twin of views/film.py. Lines come in as JSON lines; a frame is what there was at the end of a step.
const GONE = 0, WAITING = 1, PREFILL = 2, DECODE = 3, HELD = 4, PREEMPTED = 5, SWAPPED = 6;
const DID = ["gone", "waiting", "prefill", "decode", "running, no tokens", "preempted, waiting again", "swapped out, waiting again"];
const STATUS = ["waiting", "running", "preempted", "swapped"];
const PARTS = ["shared", "cached", "reserved", "host"];  // what a film may have and many have not
const KEYFRAME_STEPS = 32;

function createFilm() {
  const film = { first: 0, last: -1, numBlocks: 0, blockSize: 1, lines: [], lanes: [], texts: [], marks: [], parts: new Set() };
  let keyframes = new Map(), newest = null;

  // Take in encoded lines. Lines we have from the header's "from" on are replaced. False: lines before it are missing.
  film.add = (data) => {
    if (!data || !data.byteLength) return true;
    const rows = new TextDecoder().decode(data).split("\n").map((row) => JSON.parse(row)), head = rows.shift();
    if (film.lines.length && head.from > film.last + 1) return false;
    if (!film.lines.length && head.from !== head.first) return false;
    Object.assign(film, { first: head.first, numBlocks: head.num_blocks, blockSize: head.block_size });
    truncate(head.from - head.first);
    for (const line of rows) append(line);
    return true;
  };

  function truncate(count) {
    if (count >= film.lines.length) return;
    const mark = film.marks[count];
    film.lines.length = film.marks.length = count;
    film.texts.length = mark.texts;
    film.lanes.length = mark.lanes;
    film.last = film.first + count - 1;
    for (const lane of film.lanes) while (lane.did.length && lane.did.at(-1)[0] > film.last) lane.did.pop();
    keyframes = new Map([...keyframes].filter(([step]) => step <= film.last));
    newest = null;
  }

  function append(line) {
    film.marks.push({ texts: film.texts.length, lanes: film.lanes.length });
    film.texts.push(...(line.x ?? []));
    for (const [rid, label, prompt] of line.new ?? [])
      film.lanes.push({ number: film.lanes.length, rid, label, prompt, did: [], from: line.s, to: Infinity });
    for (const [lane, did] of Object.entries(line.c ?? {})) film.lanes[lane].did.push([line.s, did]);
    film.lines.push(line);
    film.last = line.s;
    for (const [i, name] of PARTS.entries()) if (line.m[4 + i]) film.parts.add(name);
    if (line.k) film.parts.add("chains");
  }
  film.has = (part) => film.parts.has(part);

  film.line = (step) => film.lines[step - film.first];
  film.frame = (step) => {
    if (newest?.step === step) return newest;
    let known = newest && newest.step < step && step - newest.step < KEYFRAME_STEPS ? newest : null;
    if (!known) for (let s = step; s >= film.first && !(known = keyframes.get(s)); s--);
    const frame = known ? copyFrame(known) : emptyFrame();
    for (let s = known ? known.step + 1 : film.first; s <= step; s++) {
      applyChanges(frame, film.line(s), film.texts);
      if (s % KEYFRAME_STEPS === 0 && !keyframes.has(s)) keyframes.set(s, copyFrame(frame));
    }
    settle(frame, film.line(step), film.texts);
    return (newest = frame);
  };

  // What a lane did in a step, and the runs of one lane between two steps. Prefill chunks stay apart.
  const changeAt = (did, step) => {  // index of the last change up to `step`, -1 for none
    let low = 0, high = did.length;
    while (low < high) { const mid = (low + high) >> 1; if (did[mid][0] <= step) low = mid + 1; else high = mid; }
    return low - 1;
  };
  film.tokensAt = (lane, step) => film.line(step).n?.[lane] ?? (film.didAt(lane, step) === DECODE ? 1 : 0);
  film.didAt = (lane, step) => film.lanes[lane].did[changeAt(film.lanes[lane].did, step)]?.[1] ?? GONE;
  film.runs = (lane, first, last) => {
    const runs = [], changes = film.lanes[lane].did;
    for (let i = Math.max(0, changeAt(changes, first)); i < changes.length && changes[i][0] <= last; i++) {
      const did = changes[i][1], a = Math.max(first, changes[i][0]), b = Math.min(last, (changes[i + 1]?.[0] ?? film.last + 1) - 1);
      if (did === GONE || b < a) continue;
      if (did !== PREFILL) runs.push([did, a, b]);
      else for (let s = a; s <= b; s++) runs.push([did, s, s]);
    }
    return runs;
  };
  return film;
}

const emptyFrame = () => ({ step: -1, budget: 0, rows: new Map(), running: [], waiting: [], swapped: [], scheduled: {}, notes: [], memory: memoryOf([]), behind: "",
  cached: new Map(), pins: new Map(), decoding: new Set(), say: "" });

// Tables are never changed in place, so frames share them.
const copyFrame = (f) => ({ ...f, rows: new Map([...f.rows].map(([lane, row]) => [lane, { ...row }])), cached: new Map(f.cached), pins: new Map(f.pins), decoding: new Set(f.decoding) });

function memoryOf([live = 0, slack = 0, free = 0, used = 0, shared = 0, cached = 0, reserved = 0, host = 0]) {
  const wasted = slack + cached + reserved, allocated = live + wasted;
  return { live, slack, free, used, shared, cached, reserved, host, wasted, allocated, slots: allocated + free };
}

// What lasts beyond the step.
function applyChanges(frame, line, texts) {
  const row = (lane) => frame.rows.get(+lane);
  for (const [lane, did] of Object.entries(line.c ?? {})) if (did === DECODE) frame.decoding.add(+lane); else frame.decoding.delete(+lane);
  for (const lane of line.gone ?? []) frame.rows.delete(lane);
  eachScheduled(frame, line, (lane, n) => {
    const r = frame.rows.get(lane);
    if (!r) return;
    r.computed += n;
    if (r.computed === r.tokens) r.tokens++;  // all are computed: one more is sampled
  });
  for (const [lane, [tokens, computed, status]] of Object.entries(line.r ?? {})) {
    if (!row(lane)) frame.rows.set(+lane, { lane: +lane, table: [], more: [], host: [], ownWhy: "" });
    Object.assign(row(lane), { tokens, computed, status: STATUS[status] });
  }
  for (const [lane, [keep, added]] of Object.entries(line.t ?? {})) row(lane).table = [...row(lane).table.slice(0, keep), ...added];
  for (const [lane, tables] of Object.entries(line.g ?? {})) row(lane).more = tables;
  for (const [lane, slots] of Object.entries(line.o ?? {})) row(lane).host = slots;
  if (line.q) for (const [i, name] of ["running", "waiting", "swapped"].entries()) frame[name] = changedQueue(frame[name], line.q[i] ?? [[], []]);
  if ("h" in line) frame.behind = texts[line.h] ?? "";
  for (const [lane, text] of Object.entries(line.w ?? {})) row(lane).ownWhy = texts[text] ?? "";
  for (const block of line.u ?? []) frame.cached.delete(block);
  for (const [block, key, parent] of line.k ?? []) frame.cached.set(block, [key, parent]);
  for (const [block, pins] of line.i ?? []) if (pins) frame.pins.set(block, pins); else frame.pins.delete(block);
  Object.assign(frame, { step: line.s, budget: line.b });
}

// Who got tokens in a step, and how many; the line leaves out who decoded one.
function eachScheduled(frame, line, act) {
  for (const lane of frame.decoding) if (!(line.n && lane in line.n)) act(lane, 1);
  for (const lane in line.n) act(+lane, line.n[lane]);
}

// What belongs to one step alone.
function settle(frame, line, texts) {
  frame.scheduled = {};
  eachScheduled(frame, line, (lane, n) => { frame.scheduled[lane] = n; });
  for (const [lane, r] of frame.rows) { r.scheduled = frame.scheduled[lane] ?? 0; r.why = r.ownWhy || (r.status !== "running" && !r.scheduled ? frame.behind : ""); }
  frame.notes = (line.e ?? []).map(([kind, lane, text]) => ({ kind, lane, text: texts[text] }));
  Object.assign(frame, { memory: memoryOf(line.m), say: line.say });
}

// A queue after a change: lanes taken out, then [position, lane] put in, front to back.
function changedQueue(queue, [out, added]) {
  const gone = new Set(out), now = queue.filter((lane) => !gone.has(lane));
  for (const [position, lane] of added) now.splice(position, 0, lane);
  return now;
}

const fillOf = (row, logical, size) => Math.max(0, Math.min(size, row.computed - logical * size));

// The pool at the end of a step, as arrays by block: lane (-1: in no table), logical block, tokens, users, key (-1: not
// cached), written now. A block that only the prefix cache keeps has a key and no users.
function poolOf(film, frame) {
  const n = film.numBlocks, size = film.blockSize;
  const pool = { lane: new Int32Array(n).fill(-1), logical: new Int32Array(n), fill: new Uint16Array(n), refs: new Uint16Array(n), key: new Float64Array(n).fill(-1),
    written: new Uint8Array(n), owners: new Map() };
  for (const row of frame.rows.values()) {
    const { lane, computed, scheduled } = row, start = computed - scheduled;
    for (const table of [row.table, ...row.more]) for (let logical = 0; logical < table.length; logical++) {
      const block = table[logical];
      if (block < 0) continue;  // a sliding window has left it
      if (!pool.refs[block]++) { pool.lane[block] = lane; pool.logical[block] = logical; }
      else if (pool.owners.has(block)) pool.owners.get(block).push(lane);
      else pool.owners.set(block, [pool.lane[block], lane]);
      pool.fill[block] = Math.max(pool.fill[block], fillOf(row, logical, size));
      if (scheduled && start < (logical + 1) * size && computed > logical * size) pool.written[block] = 1;
    }
  }
  for (const [block, pins] of frame.pins) pool.refs[block] += pins;
  for (const [block, [key]] of frame.cached) {
    pool.key[block] = key;
    if (pool.lane[block] < 0) pool.fill[block] = size;  // only full blocks are cached
  }
  return pool;
}

const ownersOf = (pool, block) => pool.lane[block] < 0 ? [] : pool.owners.get(block) ?? [pool.lane[block]];

// "free", "used", "shared" (several users), "reserved" (held, no token yet), "pinned" (users, no table) or "cached" (idle).
function stateOf(pool, block) {
  if (pool.lane[block] >= 0) return pool.refs[block] > 1 ? "shared" : pool.fill[block] ? "used" : "reserved";
  return pool.refs[block] ? "pinned" : pool.key[block] >= 0 ? "cached" : "free";
}

// The first step of the unbroken time that a block has belonged to its owner.
function heldSince(film, block, lane, logical, step) {
  let since = step;
  for (let s = step; s >= film.first; s--) {
    const t = film.line(s).t?.[lane];
    since = s;
    if (t && t[0] <= logical && t[1][logical - t[0]] === block) return since;
  }
  return since;
}
