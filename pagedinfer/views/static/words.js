// What blocks, requests and cells of the timeline say, on hover, in the details and to screen readers.
const KIND = { free: "free", used: "in use", shared: "shared", reserved: "reserved, holds no token yet", pinned: "held by a pin", cached: "cached, idle: nobody uses it" };

function tellBlock(film, frame, pool, block) {
  const lane = pool.lane[block], size = film.blockSize, fill = pool.fill[block], kind = stateOf(pool, block), users = pool.refs[block];
  const key = pool.key[block] < 0 ? [] : [["cached as", `key ${pool.key[block]}${parentOf(frame, block)}`]];
  if (lane < 0) return { title: `block ${block}`, rows: [["state", KIND[kind]], ...(users ? [["ref count", users]] : []), ...key], say: `block ${block}: ${KIND[kind]}` };
  const logical = pool.logical[block], first = logical * size, owners = ownersOf(pool, block).map((o) => film.lanes[o].rid).join(" and ");
  const state = `${kind === "used" ? "" : `${KIND[kind]}, `}${fill < size ? "partly filled" : "full"}`, written = pool.written[block] ? ", written in this step" : "";
  const tokens = fill ? `${first} to ${first + fill - 1}` : "none yet";
  return {
    title: `block ${block}`,
    rows: [["state", state + written], [kind === "shared" ? "owners" : "owner", owners], ["logical block", logical], ["tokens", tokens],
      ["fill", `${fill} of ${size} slots`], ["ref count", users], ...key, ["allocated at", `step ${heldSince(film, block, lane, logical, frame.step)}`]],
    say: `block ${block}: ${owners}, logical block ${logical}, ${fill ? `tokens ${tokens}, ` : ""}${fill} of ${size} slots filled, ref count ${users}${written}`,
  };
}
const parentOf = (frame, block) => { const parent = frame.cached.get(block)?.[1] ?? -1; return parent < 0 ? ", the start of a prompt" : `, after key ${parent}`; };

function tellShort(film, pool, block) {
  const lane = pool.lane[block], kind = stateOf(pool, block);
  if (lane < 0) return `block ${block}, ${KIND[kind]}`;
  return `block ${block}, ${film.lanes[lane].rid}, ${pool.fill[block]} of ${film.blockSize}${pool.refs[block] > 1 ? `, ${pool.refs[block]} users` : ""}`;
}

function tellRequest(film, frame, number) {
  const lane = film.lanes[number], row = frame.rows.get(number), note = frame.notes.filter((n) => n.lane === number);
  const rows = [];
  if (!row) rows.push(["state", frame.step < lane.from ? "not submitted yet" : "finished"]);
  else {
    rows.push(["state", DID[film.didAt(number, frame.step)] + (row.scheduled ? `, ${plural(row.scheduled, "token")} in this step` : "")]);
    rows.push(["tokens", `${fmt(row.computed)} of ${fmt(row.tokens)} computed`], ["prompt", plural(lane.prompt, "token")], ["blocks", fmt(row.table.length)], ...(row.host.length ? [["host blocks", row.host.length]] : []));
    if (row.why) rows.push(["waits because", row.why]);
  }
  for (const { kind, text } of note) rows.push([kind, text]);
  return { title: lane.rid, rows, say: `${lane.rid}: ${rows.map(([k, v]) => `${k} ${v}`).join(", ")}` };
}

function tellCell(film, number, step) {
  const lane = film.lanes[number], did = film.didAt(number, step), line = film.line(step), n = film.tokensAt(number, step);
  const rows = [["step", step], ["did", DID[did]]];
  if (n) {
    const end = film.frame(step).rows.get(number)?.computed;
    rows.push(["tokens", end ? `${n}, positions ${end - n} to ${end - 1}` : n]);
  }
  const why = film.frame(step).rows.get(number)?.why;
  if (why) rows.push(["because", why]);
  for (const [kind, who, text] of line.e ?? []) if (who === number) rows.push([kind, film.texts[text]]);
  return { title: lane.rid, rows };
}
