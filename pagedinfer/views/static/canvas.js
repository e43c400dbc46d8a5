// The block map of a large pool: a canvas, hit-testing by arithmetic, and one element that stands for the focused block.
function canvasGrid(view, grid, name) {
  const { columns, w, h, rows } = grid, ratio = window.devicePixelRatio || 1;
  const canvas = make("canvas", { class: "pi-canvas", role: "img", "aria-label": name });
  canvas.width = columns * w * ratio; canvas.height = rows * h * ratio;
  set(canvas, { style: `width:${columns * w}px;height:${rows * h}px` });
  const spot = make("div", { class: "pi-spot", role: "button", tabindex: 0 });
  const ids = make("div", { class: "pi-ids", "aria-hidden": "true" });
  rowNumbers(grid).forEach(([text, y]) => ids.append(make("span", { style: `top:${y - 11}px` }, text)));
  const node = make("div", { class: "pi-canvas-box", style: `padding-left:${ID_ROOM}px` }, ids, canvas, spot), pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  return {
    node, pen, spot,
    cellAt(event, count) {
      const box = canvas.getBoundingClientRect(), x = Math.floor((event.clientX - box.left) / w), y = Math.floor((event.clientY - box.top) / h);
      return x >= 0 && x < columns && y >= 0 && y * columns + x < count ? y * columns + x : -1;
    },
    moveSpot: (cell, attrs) => set(spot, { ...attrs, style: `left:${ID_ROOM + (cell % columns) * w - 1}px;top:${Math.floor(cell / columns) * h - 1}px;width:${w + 1}px;height:${h + 1}px` }),
  };
}

function canvasPainter(view, width) {
  const { film } = view.state, grid = gridOf(film.numBlocks, width), { columns, w, h } = grid, numBlocks = film.numBlocks;
  const { node, pen, spot, cellAt, moveSpot } = canvasGrid(view, grid, `Block map of ${fmt(numBlocks)} blocks`), tones = view.laneTones();
  let before = null, pool = null, current = 0;

  function paintCell(i, now, dim, selected) {
    const x = (i % columns) * w, y = Math.floor(i / columns) * h, lane = now.lane[i], a = w - 1, b = h - 1, tall = b * now.fill[i] / film.blockSize, kind = stateOf(now, i);
    pen.globalAlpha = dim ? 0.35 : 1;
    pen.clearRect(x, y, w, h);
    pen.fillStyle = lane >= 0 ? tones.tint[colourOf(lane)] : kind === "free" ? tones.free : tones.cached;
    pen.fillRect(x, y, a, b);
    if (lane >= 0 && tall) { pen.fillStyle = tones.solid[colourOf(lane)]; pen.fillRect(x, y + b - tall, a, tall); }
    if (kind === "shared" && a >= 4) { pen.fillStyle = tones.page; pen.fillRect(x + a / 2 - a / 6, y + b / 2 - b / 6, a / 3, b / 3); }
    if ((kind === "cached" || kind === "pinned") && a >= 4) line(tones.ink, x, y + b, x + a, y);
    if (kind === "reserved" && a >= 4) { pen.strokeStyle = tones.solid[colourOf(lane)]; pen.lineWidth = 1; pen.strokeRect(x + 0.5, y + 0.5, a - 1, b - 1); }
    pen.globalAlpha = 1;
    if (selected) { pen.strokeStyle = tones.accent; pen.lineWidth = selected; pen.strokeRect(x, y, a, b); }
  }
  function line(tone, x1, y1, x2, y2) {
    pen.strokeStyle = tone; pen.lineWidth = 1;
    pen.beginPath(); pen.moveTo(x1, y1); pen.lineTo(x2, y2); pen.stroke();
  }
  function paint(now, linked, selected, chained) {
    pool = now;
    const key = [...linked].join() + "/" + [...selected].join() + "/" + [...chained].join(), full = !before || before.key !== key, mine = linked.size ? blocksOf(view.state.frame, linked) : null;
    for (let i = 0; i < numBlocks; i++) {
      if (!full && before.lane[i] === now.lane[i] && before.fill[i] === now.fill[i] && before.refs[i] === now.refs[i] && before.key_[i] === now.key[i]) continue;
      paintCell(i, now, mine && now.lane[i] >= 0 && !mine.has(i), selected.has(i) ? 2 : chained.has(i) ? 1 : 0);
    }
    before = { key, lane: now.lane, fill: now.fill, refs: now.refs, key_: now.key };
    label();
  }
  function label() {
    moveSpot(current, { "data-block": current, "aria-label": pool ? tellBlock(film, view.state.frame, pool, current).say : `block ${current}` });
    spot.classList.toggle("is-linked", !!pool && ownersOf(pool, current).some((lane) => view.linkedLanes().has(lane)));
  }
  return {
    node, grid, numBlocks, paint, at: (event) => cellAt(event, numBlocks),
    focus(block, move) { current = block; label(); if (move) { spot.blur(); spot.focus(); } },
  };
}

// All blocks in the tables of these lanes.
function blocksOf(frame, lanes) {
  const mine = new Set();
  for (const lane of lanes) for (const row of [frame.rows.get(lane)]) for (const table of row ? [row.table, ...row.more] : []) for (const block of table) mine.add(block);
  return mine;
}
