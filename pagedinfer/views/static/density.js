// The block map of a huge pool: a cell stands for many blocks, filled as high as its slots are used.
const DENSITY_CELLS = 2048;

function densityPainter(view, width) {
  const { film } = view.state, numBlocks = film.numBlocks, each = eachOf(numBlocks), count = Math.ceil(numBlocks / each);
  const grid = { ...gridOf(count, width), each }, { columns, w, h } = grid;
  const { node, pen, spot, cellAt, moveSpot } = canvasGrid(view, grid, `Density of ${fmt(numBlocks)} blocks, ${each} in a cell`), tones = view.laneTones();
  let cells = null, current = 0, pool = null;

  function paint(now, linked, selected) {
    if (now !== pool) cells = densityOf((pool = now), film.blockSize, each, numBlocks);
    const mine = linked.size ? blocksOf(view.state.frame, linked) : null, hit = new Set(), picked = new Set([...selected].map((block) => Math.floor(block / each)));
    for (const block of mine ?? []) hit.add(Math.floor(block / each));
    for (let i = 0; i < count; i++) {
      const x = (i % columns) * w, y = Math.floor(i / columns) * h, a = w - 1, b = h - 1, tall = b * cells.live[i] / cells.slots[i], idle = b * cells.cached[i] / cells.slots[i];
      pen.clearRect(x, y, w, h);
      pen.globalAlpha = mine && !hit.has(i) ? 0.4 : 1;
      pen.fillStyle = tones.free; pen.fillRect(x, y, a, b);
      pen.fillStyle = tones.live; pen.fillRect(x, y + b - tall, a, tall);
      pen.fillStyle = tones.cached; pen.fillRect(x, y + b - tall - idle, a, idle);
      pen.globalAlpha = 1;
      if (hit.has(i) || picked.has(i)) { pen.strokeStyle = tones.accent; pen.lineWidth = picked.has(i) ? 3 : 2; pen.strokeRect(x + 1, y + 1, a - 2, b - 2); }
    }
    label();
  }
  const tell = (block) => {
    const i = Math.floor(block / each), last = Math.min(numBlocks, (i + 1) * each) - 1, share = `${Math.round(100 * cells.live[i] / cells.slots[i])}\u00a0%`;
    return { title: `blocks ${fmt(i * each)} to ${fmt(last)}`, say: `blocks ${i * each} to ${last}: ${share} of token slots live, ${cells.used[i]} in use`,
      rows: [["in use", `${fmt(cells.used[i])} of ${fmt(last - i * each + 1)} blocks`], ["live", `${fmt(cells.live[i])} of ${fmt(cells.slots[i])} token slots, ${share}`], ["cached, idle", plural(cells.cached[i] / film.blockSize, "block")]] };
  };
  function label() {
    const i = Math.floor(current / each);
    moveSpot(i, { "data-block": i * each, "aria-label": cells ? tell(current).say : `blocks from ${i * each}` });
  }
  return {
    node, grid, numBlocks, paint, tell, kinds: ["none in use", "some", "all in use"],
    says: (now) => {
      if (now !== pool) cells = densityOf((pool = now), film.blockSize, each, numBlocks);
      let low = 1, sum = 0, high = 0;
      for (let i = 0; i < count; i++) { const share = cells.live[i] / cells.slots[i]; low = Math.min(low, share); high = Math.max(high, share); sum += share; }
      const share = (x) => `${Math.round(100 * x)}\u00a0%`;
      return `${fmt(each)} blocks a cell, live slots in a cell: least ${share(low)}, mean ${share(sum / count)}, most ${share(high)}`;
    },
    at: (event) => { const cell = cellAt(event, count); return cell < 0 ? -1 : cell * each; },
    pick: (block) => { for (let i = block; i < Math.min(numBlocks, block + each); i++) if (pool.lane[i] >= 0) return i; return block; },  // the first block in use
    focus(block, move) { current = block; label(); if (move) { spot.blur(); spot.focus(); } },
  };
}

// Blocks in a cell: the power of two that makes at most DENSITY_CELLS cells.
function eachOf(numBlocks) {
  let each = 1;
  while (numBlocks / each > DENSITY_CELLS) each *= 2;
  return each;
}

function densityOf(pool, size, each, numBlocks) {
  const count = Math.ceil(numBlocks / each), cells = { live: new Float64Array(count), used: new Uint32Array(count), cached: new Float64Array(count), slots: new Float64Array(count) };
  for (let i = 0; i < count; i++) {
    const end = Math.min(numBlocks, (i + 1) * each);
    let live = 0, used = 0, cached = 0;
    for (let block = i * each; block < end; block++) {
      if (pool.refs[block]) { live += pool.fill[block]; used++; }
      else if (pool.key[block] >= 0) cached += size;
    }
    cells.live[i] = live; cells.used[i] = used; cells.cached[i] = cached; cells.slots[i] = (end - i * each) * size;
  }
  return cells;
}
