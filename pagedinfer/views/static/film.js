// The film: twin of views/film.py. Lines come in as JSON lines; a frame is what there was at the end of a step.
const GONE = 0, WAITING = 1, PREFILL = 2, DECODE = 3, HELD = 4, PREEMPTED = 5;
const DID = ["gone", "waiting", "prefill", "decode", "running, no tokens", "preempted, waiting again"];
const STATUS = ["waiting", "running", "preempted"];
const KEYFRAME_STEPS = 32;

function createFilm() {
  const film = { first: 0, last: -1, numBlocks: 0, blockSize: 1, lines: [], lanes: [], texts: [], marks: [] };
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
  }

  film.line = (step) => film.lines[step - film.first];
  film.frame = (step) => {
    if (newest?.step === step) return newest;
    let known = newest && newest.step < step && step - newest.step < KEYFRAME_STEPS ? newest : null;
    if (!known) for (let s = step; s >= film.first && !(known = keyframes.get(s)); s--);
    const frame = known ? copyFrame(known) : emptyFrame();
    for (let s = known ? known.step + 1 : film.first; s <= step; s++) {
      applyLine(frame, film.line(s), film.texts);
      if (s % KEYFRAME_STEPS === 0) keyframes.set(s, copyFrame(frame));
    }
    return (newest = frame);
  };

  // What a lane did in a step, and the runs of one lane between two steps. Prefill chunks stay apart.
  film.didAt = (lane, step) => {
    let did = GONE;
    for (const [s, d] of film.lanes[lane].did) { if (s > step) break; did = d; }
    return did;
  };
  film.runs = (lane, first, last) => {
    const runs = [], changes = film.lanes[lane].did;
    for (let i = 0; i < changes.length; i++) {
      const did = changes[i][1], a = Math.max(first, changes[i][0]), b = Math.min(last, (changes[i + 1]?.[0] ?? film.last + 1) - 1);
      if (did === GONE || b < a) continue;
      if (did !== PREFILL) runs.push([did, a, b]);
      else for (let s = a; s <= b; s++) runs.push([did, s, s]);
    }
    return runs;
  };
  return film;
}

const emptyFrame = () => ({ step: -1, budget: 0, rows: new Map(), running: [], waiting: [], scheduled: {}, notes: [], memory: [0, 0, 0, 0], behind: "", say: "" });

const copyFrame = (f) => ({ ...f, rows: new Map([...f.rows].map(([lane, row]) => [lane, { ...row, table: row.table.slice() }])) });

function applyLine(frame, line, texts) {
  const row = (lane) => frame.rows.get(+lane);
  for (const lane of line.gone ?? []) frame.rows.delete(lane);
  for (const [lane, [tokens, computed, status]] of Object.entries(line.r ?? {})) {
    if (!row(lane)) frame.rows.set(+lane, { lane: +lane, table: [], ownWhy: "" });
    Object.assign(row(lane), { tokens, computed, status: STATUS[status] });
  }
  for (const [lane, [keep, added]] of Object.entries(line.t ?? {})) { row(lane).table.length = keep; row(lane).table.push(...added); }
  if (line.q) [frame.running, frame.waiting] = [frame.running, frame.waiting].map((queue, i) => changedQueue(queue, line.q[i]));
  if ("h" in line) frame.behind = texts[line.h] ?? "";
  for (const [lane, text] of Object.entries(line.w ?? {})) row(lane).ownWhy = texts[text] ?? "";
  frame.scheduled = line.n ?? {};
  for (const [lane, r] of frame.rows) { r.scheduled = frame.scheduled[lane] ?? 0; r.why = r.ownWhy || (r.status !== "running" && !r.scheduled ? frame.behind : ""); }
  frame.notes = (line.e ?? []).map(([kind, lane, text]) => ({ kind, lane, text: texts[text] }));
  Object.assign(frame, { step: line.s, budget: line.b, memory: line.m, say: line.say });
}

// A queue after a change: lanes taken out, then [position, lane] put in, front to back.
function changedQueue(queue, [out, added]) {
  const gone = new Set(out), now = queue.filter((lane) => !gone.has(lane));
  for (const [position, lane] of added) now.splice(position, 0, lane);
  return now;
}

const fillOf = (row, logical, size) => Math.max(0, Math.min(size, row.computed - logical * size));

// The pool at the end of a step, as arrays by block: lane (-1 free), logical block, tokens, ref count, written now.
function poolOf(film, frame) {
  const n = film.numBlocks, size = film.blockSize;
  const pool = { lane: new Int32Array(n).fill(-1), logical: new Int32Array(n), fill: new Uint16Array(n), refs: new Uint16Array(n), written: new Uint8Array(n), owners: new Map() };
  for (const row of frame.rows.values()) {
    const start = row.computed - row.scheduled;
    row.table.forEach((block, logical) => {
      if (!pool.refs[block]++) { pool.lane[block] = row.lane; pool.logical[block] = logical; }
      else pool.owners.set(block, [...(pool.owners.get(block) ?? [pool.lane[block]]), row.lane]);
      pool.fill[block] = Math.max(pool.fill[block], fillOf(row, logical, size));
      if (row.scheduled && start < (logical + 1) * size && row.computed > logical * size) pool.written[block] = 1;
    });
  }
  return pool;
}

const ownersOf = (pool, block) => pool.lane[block] < 0 ? [] : pool.owners.get(block) ?? [pool.lane[block]];

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
