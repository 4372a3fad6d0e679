// What part of the plan is seen, what is picked and what is filtered; everything is drawn again when it changes.

const LEFT = 72, RIGHT = 16, AXIS = 24;
const PANEL = 420; // px, at most, of one timeline's rows
const ROWS = { least: 0.25, most: 30 };

const view = {
  start: 0, end: planEnd, // ms
  top: 0, // first row seen
  row: 1, // px of a row
  picked: null, // a cascade's number
  matches: null, // numbers of the cascades that pass the filter, or null for all
  critical: true,
  colourBy: "length", // or "stage"
  rank: plan.ranks[0], // whose memory is shown
};
const listeners = [];

function fittingRow() {
  return Math.max(ROWS.least, Math.min(26, PANEL / plan.ranks.length));
}

function change(what) {
  Object.assign(view, what);
  const length = Math.max(planEnd * 1e-7, Math.min(planEnd, view.end - view.start));
  view.start = Math.max(0, Math.min(planEnd - length, view.start));
  view.end = view.start + length;
  view.row = Math.max(fittingRow(), Math.min(Math.max(ROWS.most, fittingRow()), view.row));
  view.top = Math.max(0, Math.min(plan.ranks.length - panelHeight() / view.row, view.top));
  schedule();
}

let scheduled = false;
function schedule() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(() => {
    scheduled = false;
    for (const listener of listeners) listener();
  });
}

function panelHeight() {
  return Math.min(PANEL, plan.ranks.length * view.row);
}

function fit() {
  change({ start: 0, end: planEnd, top: 0, row: fittingRow() });
}

// Around a moment; a factor below 1 zooms in.
function zoom(factor, around) {
  const at = around === undefined ? (view.start + view.end) / 2 : around;
  const length = Math.min(planEnd, (view.end - view.start) * factor);
  const start = at - ((at - view.start) / (view.end - view.start)) * length;
  change({ start, end: start + length });
}

function rows(factor, around) {
  const row = Math.max(fittingRow(), Math.min(ROWS.most, view.row * factor));
  const at = around === undefined ? view.top + panelHeight() / view.row / 2 : around;
  change({ row, top: at - ((at - view.top) * view.row) / row });
}

function pan(milliseconds, rowsDown) {
  const length = view.end - view.start;
  const start = Math.max(0, Math.min(planEnd - length, view.start + milliseconds));
  change({ start, end: start + length, top: view.top + rowsDown });
}

function show(start, end, rowsFlat) {
  const margin = Math.max((end - start) * 0.5, planEnd * 1e-3);
  const from = Math.max(0, start - margin);
  const row = Math.max(view.row, Math.min(8, PANEL / Math.max(1, rowsFlat[1] - rowsFlat[0] + 1)));
  change({ start: from, end: Math.min(planEnd, end + margin), row });
  const middle = (rowsFlat[0] + rowsFlat[1] + 1) / 2;
  change({ top: middle - panelHeight() / view.row / 2 });
}

function rowsOf(what) {
  const at = new Map(plan.ranks.map((rank, row) => [rank, row]));
  return cascades[what].ranks.map((rank) => at.get(rank));
}

function pick(what, andShow) {
  change({ picked: what, rank: what === null ? view.rank : cascades[what].ranks[0] });
  if (what !== null && andShow) {
    const found = cascades[what].spans.find(Boolean);
    if (found) show(found.start, found.end, rowsOf(what));
  }
}

const inOrder = cascades.filter((row) => row.spans[0])
  .sort((a, b) => a.spans[0].start - b.spans[0].start || a.ranks[0] - b.ranks[0]).map((row) => row.index);

function neighbour(step) {
  const among = view.matches ? inOrder.filter((index) => view.matches.has(index)) : inOrder;
  if (!among.length) return;
  const at = among.indexOf(view.picked);
  pick(among[at < 0 ? (step > 0 ? 0 : among.length - 1) : (at + step + among.length) % among.length], false);
  bringIntoView(view.picked);
}

function bringIntoView(what) {
  const found = cascades[what].spans.find(Boolean);
  const [first, last] = rowsOf(what);
  const length = view.end - view.start, seen = panelHeight() / view.row;
  if (found.end < view.start || found.start > view.end) {
    const start = Math.max(0, (found.start + found.end) / 2 - length / 2);
    change({ start, end: start + length });
  }
  if (last < view.top || first > view.top + seen) change({ top: (first + last) / 2 - seen / 2 });
}
