// The plan's numbers, and how they are said.

const plan = JSON.parse(document.getElementById("plan").textContent);
const byId = (id) => document.getElementById(id);

const cascades = plan.cascades.name.map((name, index) => {
  const row = { index, name };
  for (const column of ["stage", "phase", "clips", "batch", "tokens", "text", "degree", "ranks", "ulysses", "ring",
    "recompute", "memory", "length", "inputs"]) {
    row[column] = plan.cascades[column][index];
  }
  const spans = plan.cascades.spans[index];
  row.spans = plan.timelines.map((_, number) =>
    spans[3 * number] === null ? null : { start: spans[3 * number], end: spans[3 * number + 1], ms: spans[3 * number + 2] });
  return row;
});
const clipAt = new Map(plan.clips.id.map((id, index) => [id, index]));

const timelines = plan.timelines.map((timeline) => {
  const boxes = [];
  for (let i = 0; i < timeline.boxes.length; i += 6) {
    const [op, what, first, last, start, end] = timeline.boxes.slice(i, i + 6);
    boxes.push({ op: plan.ops[op], what, first, last, start, end });
  }
  const critical = timeline.critical.map(([what, ops, because, waited, gap, start, end, rows]) =>
    ({ what, ops, because, waited, gap, start, end, rows }));
  return { title: timeline.title, end: timeline.end, boxes, critical, on: new Set(critical.map((link) => link.what)) };
});
const planEnd = Math.max(...timelines.map((timeline) => timeline.end)) || 1;

function time(ms) {
  if (ms === null || ms === undefined) return "";
  const size = Math.abs(ms);
  if (size >= 1000) return `${+(ms / 1000).toPrecision(4)} s`;
  return `${+ms.toPrecision(3)} ms`;
}

function ranges(flat) {
  const parts = [];
  for (let i = 0; i < flat.length; i += 2) parts.push(flat[i] === flat[i + 1] ? `${flat[i]}` : `${flat[i]}-${flat[i + 1]}`);
  return parts.join(", ");
}

function has(flat, number) {
  for (let i = 0; i < flat.length; i += 2) if (flat[i] <= number && number <= flat[i + 1]) return true;
  return false;
}

function ids(flat, most) {
  const found = [];
  for (let i = 0; i < flat.length; i += 2) for (let id = flat[i]; id <= flat[i + 1] && found.length < most; id++) found.push(id);
  return found;
}

function length(flat) {
  let sum = 0;
  for (let i = 0; i < flat.length; i += 2) sum += flat[i + 1] - flat[i] + 1;
  return sum;
}

// Clips by name; of rows without a file, which have numbers, `clip 3`.
function clipText(flat, most = 4) {
  const named = ids(flat, most).map((id) => {
    const at = clipAt.get(id);
    return at === undefined ? `${id}` : plan.clips.name[at];
  });
  const all = length(flat), more = all > named.length ? ` and ${all - named.length} more` : "";
  const numbers = named.length && named.every((name) => /^[0-9]+$/.test(name));
  return `${numbers ? (all > 1 ? "clips " : "clip ") : ""}${named.join(", ")}${more}`;
}

// Clips and tokens of each; of a stage that reads captions alone, those of captions.
function sizeOf(row) {
  return plan.stages[row.stage].text && row.phase === "encode" ? `${row.batch} x ${row.text} text` : `${row.batch} x ${row.tokens}`;
}

function tokensOf(row) {
  return plan.stages[row.stage].text && row.phase === "encode" ? null : row.tokens;
}

function nameOf(what) {
  return what >= 0 ? `%${cascades[what].name}` : `@${plan.stages[-1 - what].name}`;
}

function attention(row) {
  return [["ulysses", row.ulysses], ["ring", row.ring]].filter(([, n]) => n > 1).map(([name, n]) => `${name} ${n}`).join(" x ");
}

// What is known of a cascade, or of a stage's reduce or step, as pairs of a word and a text.
function facts(what, box) {
  if (what < 0) {
    const where = box ? ranges([box.first, box.last].map((row) => plan.ranks[row])) : "";
    return [[box ? box.op : "stage", nameOf(what)], ...(box ? [["ranks", where], ["time", span(box)]] : [])];
  }
  const row = cascades[what];
  const found = [
    ["stage", `@${plan.stages[row.stage].name}`],
    ["phase", row.phase + (box && box.op !== row.phase ? ` (here ${box.op})` : "")],
    ["clips", clipText(row.clips)],
    ["tokens", sizeOf(row) + (row.text && tokensOf(row) !== null ? `, caption of ${row.text}` : "")],
    ["degree", row.degree + (attention(row) ? ` (${attention(row)})` : "")],
    ["ranks", ranges(row.ranks)],
  ];
  timelines.forEach((timeline, number) => {
    if (row.spans[number]) found.push([timeline.title, `${time(row.spans[number].ms)} (${span(row.spans[number])})`]);
  });
  if (row.memory) found.push(["memory", `${+row.memory.toPrecision(3)} GiB per rank` + (row.recompute ? `, recomputes ${row.recompute} blocks in backward` : "")]);
  const first = clipAt.get(row.clips[0]);
  if (first !== undefined) {
    found.push(["size", plan.clips.size[first]]);
    if (plan.clips.caption[first]) found.push(["caption", plan.clips.caption[first]]);
    if (plan.clips.path[first]) found.push(["video", plan.clips.path[first]]);
  }
  return found;
}

function span(box) {
  return `${time(box.start)} to ${time(box.end)}`;
}

// Text only ever comes into the page here: never as markup.
function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function describe(into, what, box) {
  into.replaceChildren(element("strong", nameOf(what)));
  for (const [word, text] of facts(what, box)) into.append(element("dt", word), element("dd", text));
}
