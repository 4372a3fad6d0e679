// Memory over time: of one rank, and what all ranks hold at least and at most.

const MEMORY_HEIGHT = 200, MEMORY_TOP = 14;
const MANY = 24; // ranks; of more, their range is drawn and not a line for each

const curves = plan.memory.map((flat) => {
  const times = [], held = [];
  for (let i = 0; i < flat.length; i += 2) {
    times.push(flat[i]);
    held.push(flat[i + 1]);
  }
  return { times, held };
});
const peaks = plan.measured_memory; // GiB of every rank, or null
const most = Math.max(...plan.limits, ...(peaks || []), ...curves.map((curve) => curve.held.reduce((a, b) => Math.max(a, b), 0)));
let range = null;

// For each of many moments the least and most that any rank holds then.
function memoryRange(start, end, columns) {
  const key = `${start} ${end} ${columns}`;
  if (range && range.key === key) return range;
  const low = new Float64Array(columns).fill(Infinity), high = new Float64Array(columns).fill(0);
  const per = columns / (end - start);
  for (const { times, held } of curves) {
    for (let i = 0; i < times.length; i++) {
      const until = i + 1 < times.length ? times[i + 1] : planEnd;
      if (until < start || times[i] > end) continue;
      const to = Math.min(columns - 1, Math.floor((until - start) * per));
      for (let x = Math.max(0, Math.floor((times[i] - start) * per)); x <= to; x++) {
        low[x] = Math.min(low[x], held[i]);
        high[x] = Math.max(high[x], held[i]);
      }
    }
  }
  range = { key, low, high };
  return range;
}

function gib(value) {
  return `${+value.toPrecision(3)} GiB`;
}

function heldAt(curve, ms) {
  let held = 0;
  for (let i = 0; i < curve.times.length && curve.times[i] <= ms; i++) held = curve.held[i];
  return held;
}

function drawMemory() {
  const canvas = byId("memory"), chosen = plan.ranks.indexOf(view.rank), limit = plan.limits[chosen];
  const { context, width } = surface(canvas, MEMORY_HEIGHT);
  const bottom = MEMORY_HEIGHT - AXIS, right = width - RIGHT, perMs = scale(width);
  const y = (held) => bottom - ((bottom - MEMORY_TOP) * held) / (most * 1.05);
  context.fillStyle = style("--row");
  context.fillRect(LEFT, MEMORY_TOP, right - LEFT, bottom - MEMORY_TOP);
  drawAxis(context, width, MEMORY_TOP, bottom, true);
  context.textAlign = "right";
  context.textBaseline = "middle";
  const scaleTicks = ticks(0, most, 4);
  for (const tick of scaleTicks.found) {
    context.fillStyle = style("--quiet");
    context.fillText(`${+tick.toPrecision(6)} GiB`, LEFT - 8, y(tick));
  }
  context.save();
  context.beginPath();
  context.rect(LEFT, 0, right - LEFT, bottom);
  context.clip();
  if (plan.ranks.length > MANY) {
    const columns = Math.max(1, Math.round(right - LEFT));
    const { low, high } = memoryRange(view.start, view.end, columns);
    context.fillStyle = style("--band");
    for (let x = 0; x < columns; x++) {
      if (high[x] > 0) context.fillRect(LEFT + x, y(high[x]), 1, Math.max(1, y(low[x]) - y(high[x])));
    }
  } else {
    plan.ranks.forEach((rank, row) => drawCurve(context, curves[row], y, perMs, right, style("--band"), 1.5));
  }
  drawCurve(context, curves[chosen], y, perMs, right, style("--one"), 2);
  context.strokeStyle = style("--limit");
  context.setLineDash([6, 4]);
  context.lineWidth = 1.5;
  context.beginPath();
  context.moveTo(LEFT, y(limit));
  context.lineTo(right, y(limit));
  context.stroke();
  context.setLineDash([]);
  if (peaks) {
    context.strokeStyle = style("--accent");
    context.lineWidth = 2;
    context.setLineDash([2, 3]);
    context.beginPath();
    context.moveTo(LEFT, y(peaks[chosen]));
    context.lineTo(right, y(peaks[chosen]));
    context.stroke();
    context.setLineDash([]);
  }
  context.restore();
  if (peaks) {
    context.textAlign = "right";
    context.fillStyle = style("--accent");
    const above = y(peaks[chosen]) - 8;
    context.fillText(`measured peak ${gib(peaks[chosen])}${plan.whole_process ? ", whole process" : ""}`, right - 4, above);
  }
  context.textAlign = "left";
  context.fillStyle = style("--limit");
  context.fillText(`limit ${+limit.toPrecision(4)} GiB`, LEFT + 4, y(limit) - 8);
  byId("memory-rank").value = view.rank;
  const peak = curves[chosen].held.reduce((a, b) => Math.max(a, b), 0);
  const run = peaks ? `, measured ${gib(peaks[chosen])}${plan.whole_process ? " (the whole process, its libraries among it)" : ""}` : "";
  const says = `rank ${view.rank} holds at most ${+peak.toPrecision(3)} of ${+limit.toPrecision(4)} GiB, as planned${run}`;
  byId("memory-says").textContent = says + (plan.ranks.length > 1 ? "; the others are behind it, paler" : "");
  canvas.setAttribute("aria-label", says);
}

function drawCurve(context, curve, y, perMs, right, colour, width) {
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.beginPath();
  let begun = false;
  for (let i = 0; i < curve.times.length; i++) {
    const until = i + 1 < curve.times.length ? curve.times[i + 1] : planEnd;
    if (until < view.start || curve.times[i] > view.end) continue;
    const x = Math.max(LEFT - 2, LEFT + (curve.times[i] - view.start) * perMs);
    if (begun) context.lineTo(x, y(curve.held[i]));
    else context.moveTo(x, y(curve.held[i]));
    context.lineTo(Math.min(right + 2, LEFT + (until - view.start) * perMs), y(curve.held[i]));
    begun = true;
  }
  context.stroke();
}

function listenMemory() {
  byId("memory-rank").max = Math.max(...plan.ranks);
  byId("memory-rank").addEventListener("change", (event) => {
    const rank = Number(event.target.value);
    if (plan.ranks.includes(rank)) change({ rank });
    else schedule();
  });
  byId("memory").addEventListener("pointermove", (event) => {
    const place = event.target.getBoundingClientRect();
    const ms = view.start + (event.clientX - place.left - LEFT) / scale(place.width);
    if (ms < view.start || ms > view.end) return hideTip();
    const tip = byId("tip");
    tip.replaceChildren(element("strong", `rank ${view.rank}`), element("dt", "at"), element("dd", time(ms)),
      element("dt", "holds"), element("dd", `${+heldAt(curves[plan.ranks.indexOf(view.rank)], ms).toPrecision(3)} GiB`));
    tip.hidden = false;
    tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${event.clientY + 18}px`;
    return undefined;
  });
  byId("memory").addEventListener("pointerleave", hideTip);
}
