// The cascades' table: sorted by a column, filtered by words and comparisons, a page at a time.

const PAGE_ROWS = 50;
const measured = timelines.length > 1 ? timelines.length - 1 : null;
const span0 = (row, key) => (row.spans[0] ? row.spans[0][key] : null);
const spanM = (row, key) => (measured !== null && row.spans[measured] ? row.spans[measured][key] : null);

const toPlanned = (row) => (spanM(row, "ms") === null || !span0(row, "ms") ? null : spanM(row, "ms") / span0(row, "ms"));
const FAR = 2; // measured over planned, or planned over measured, beyond which a cell stands out

// head, the number or text that it sorts and filters by, how it is written
const COLUMNS = [
  ["cascade", (row) => row.index, (row) => nameOf(row.index)],
  ["stage", (row) => plan.stages[row.stage].name],
  ["phase", (row) => row.phase],
  ["clips", (row) => row.clips[0], (row) => clipText(row.clips), "wide"],
  ["batch", (row) => row.batch],
  ["tokens", tokensOf, (row) => (tokensOf(row) === null ? "" : `${row.tokens}`)],
  ["text", (row) => row.text],
  ["degree", (row) => row.degree],
  ["attention", attention],
  ["ranks", (row) => row.ranks[0], (row) => ranges(row.ranks), "wide"],
  ["start", (row) => span0(row, "start"), (row) => time(span0(row, "start"))],
  ["end", (row) => span0(row, "end"), (row) => time(span0(row, "end"))],
  ["ms", (row) => span0(row, "ms"), (row) => time(span0(row, "ms"))],
  ...(measured === null ? [] : [
    ["measured", (row) => spanM(row, "ms"), (row) => time(spanM(row, "ms"))],
    ["to planned", toPlanned, (row) => (toPlanned(row) === null ? "" : `${toPlanned(row).toFixed(2)}x`)],
  ]),
  ["memory", (row) => row.memory, (row) => (row.memory ? `${+row.memory.toPrecision(3)} GiB` : "")],
  ["recompute", (row) => (row.recompute === "all" ? Infinity : row.recompute), (row) => `${row.recompute || ""}`],
].map(([head, key, write, kind]) => ({ head, key, write: write || ((row) => `${key(row)}`), kind }));
const NUMERIC = new Set(["batch", "tokens", "text", "degree", "start", "end", "ms", "measured", "to planned", "memory"]);

const table = { by: null, down: false, page: 0, rows: cascades };

// One word of the filter as a test of a row.
function condition(word) {
  const clip = /^clip=(.+)$/.exec(word);
  if (clip) return (row) => has(row.clips, Number(clip[1])) || ids(row.clips, Infinity).some((id) => plan.clips.name[clipAt.get(id)]?.toLowerCase() === clip[1]);
  const compared = /^([a-z]+)(<=|>=|=|<|>)(-?[0-9.]+)$/.exec(word);
  if (compared) {
    const [, name, sign, text] = compared;
    const value = Number(text);
    if (name === "rank" && sign === "=") return (row) => has(row.ranks, value);
    const column = COLUMNS.find((each) => each.head === name && NUMERIC.has(name));
    if (column) {
      const holds = { "<=": (a) => a <= value, ">=": (a) => a >= value, "=": (a) => a === value, "<": (a) => a < value, ">": (a) => a > value }[sign];
      return (row) => column.key(row) !== null && holds(column.key(row));
    }
  }
  if (word === "critical") return (row) => timelines.some((timeline) => timeline.on.has(row.index));
  if (word === "recompute") return (row) => row.recompute !== 0;
  return (row) => words(row).includes(word);
}

function words(row) {
  if (!row.words) row.words = `${nameOf(row.index)} @${plan.stages[row.stage].name} ${row.phase} ${clipText(row.clips, Infinity)}`.toLowerCase();
  return row.words;
}

function filter(text) {
  const tests = text.toLowerCase().split(/\s+/).filter(Boolean).map(condition);
  table.rows = cascades.filter((row) => tests.every((test) => test(row)));
  table.page = 0;
  sort();
  change({ matches: tests.length ? new Set(table.rows.map((row) => row.index)) : null });
  drawTable();
}

function sort() {
  const column = COLUMNS.find((each) => each.head === table.by) || COLUMNS[0];
  const order = table.down ? -1 : 1;
  table.rows.sort((a, b) => {
    const [left, right] = [column.key(a), column.key(b)];
    if (left === null || right === null) return left === right ? a.index - b.index : left === null ? 1 : -1;
    return order * (left < right ? -1 : left > right ? 1 : a.index - b.index);
  });
}

function makeTable() {
  const head = element("tr");
  for (const column of COLUMNS) {
    const cell = element("th", undefined, NUMERIC.has(column.head) ? "number" : ""), button = element("button", column.head);
    button.type = "button";
    button.addEventListener("click", () => {
      table.down = table.by === column.head && !table.down;
      table.by = column.head;
      table.page = 0;
      sort();
      drawTable();
    });
    cell.scope = "col";
    cell.append(button);
    head.append(cell);
  }
  byId("cascades").tHead.append(head);
  byId("filter").addEventListener("input", (event) => filter(event.target.value));
  byId("previous").addEventListener("click", () => turn(-1));
  byId("next").addEventListener("click", () => turn(1));
  table.rows = [...cascades];
  drawTable();
}

function turn(step) {
  table.page = Math.max(0, Math.min(Math.ceil(table.rows.length / PAGE_ROWS) - 1, table.page + step));
  drawTable();
}

function drawTable() {
  const first = table.page * PAGE_ROWS, seen = table.rows.slice(first, first + PAGE_ROWS);
  [...byId("cascades").tHead.rows[0].cells].forEach((cell, index) => {
    const sorted = COLUMNS[index].head === table.by;
    cell.setAttribute("aria-sort", sorted ? (table.down ? "descending" : "ascending") : "none");
    cell.firstChild.textContent = COLUMNS[index].head + (sorted ? (table.down ? " ▾" : " ▴") : "");
  });
  byId("cascades").tBodies[0].replaceChildren(...seen.map(tableRow));
  const number = table.rows.length;
  const part = number > PAGE_ROWS ? `, ${first + 1} to ${first + seen.length} shown` : "";
  byId("count").textContent = `${number} of ${cascades.length}${part}`;
  byId("previous").disabled = table.page === 0;
  byId("next").disabled = first + PAGE_ROWS >= number;
}

function tableRow(row) {
  const line = element("tr", undefined, timelines[timelines.length - 1].on.has(row.index) ? "critical" : "");
  line.dataset.cascade = row.index;
  line.tabIndex = 0;
  for (const column of COLUMNS) {
    const kind = NUMERIC.has(column.head) ? "number" : column.kind || "";
    const text = column.write(row), cell = element("td", text, kind);
    if (kind === "wide") cell.title = text;
    const times = column.head === "to planned" ? toPlanned(row) : null;
    if (times !== null && (times > FAR || times < 1 / FAR)) cell.classList.add("far");
    line.append(cell);
  }
  line.addEventListener("click", () => pick(row.index, true));
  line.addEventListener("keydown", (event) => {
    if (event.key === "Enter") pick(row.index, true);
  });
  return line;
}

function markRow() {
  for (const line of byId("cascades").tBodies[0].rows) {
    line.classList.toggle("picked", Number(line.dataset.cascade) === view.picked);
  }
}
