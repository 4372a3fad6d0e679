// The timelines, below each other on one axis.

const LEAST_NODE = 10; // px
const FADED = 0.13;
const charts = [];

function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name);
}

// A canvas cleared and scaled to the screen's own pixels, for drawing in CSS pixels.
function surface(canvas, height) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.style.height = `${height}px`;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, Helvetica, Arial, sans-serif";
  return { context, width };
}

// The fill of a box by its cascade, or of what belongs to no cascade; its ink is the same name with `-ink`.
function fillName(cascade) {
  if (!cascade) return "--sync";
  return view.colourBy === "stage" ? `--stage-${plan.stages[cascade.stage].colour}` : `--length-${cascade.length}`;
}

// Colours as they are now, looked up once each: light or dark.
function theme() {
  const found = new Map(), styles = getComputedStyle(document.documentElement);
  return (name) => {
    if (!found.has(name)) found.set(name, styles.getPropertyValue(name));
    return found.get(name);
  };
}

// The lines that say what is done, as a pattern in the ground's colour; undefined for what is solid.
function textures(context, ground) {
  const ratio = window.devicePixelRatio || 1, found = {};
  for (const [op, path] of Object.entries(plan.textures)) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = Math.round(plan.tile * ratio);
    const pen = tile.getContext("2d");
    pen.scale(tile.width / plan.tile, tile.width / plan.tile);
    pen.strokeStyle = ground;
    pen.lineWidth = 1.5;
    pen.lineCap = "round";
    pen.stroke(new Path2D(path));
    found[op] = context.createPattern(tile, "repeat");
    found[op].setTransform(new DOMMatrix().scale(plan.tile / tile.width));
  }
  return found;
}

function scale(width) {
  return (width - LEFT - RIGHT) / (view.end - view.start);
}

function ticks(start, end, most) {
  const wanted = (end - start) / most;
  const power = 10 ** Math.floor(Math.log10(wanted));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= wanted * (1 - 1e-9));
  const found = [];
  for (let i = Math.ceil(start / step - 1e-9); i * step <= end + step * 1e-9; i++) found.push(i * step);
  return { found, step };
}

function tickText(ms, step) {
  const digits = (unit) => Math.max(0, -Math.floor(Math.log10(step / unit) + 1e-9));
  return view.end >= 1000 ? `${(ms / 1000).toFixed(digits(1000))} s` : `${ms.toFixed(digits(1))} ms`;
}

function drawAxis(context, width, top, bottom, labels) {
  const { found, step } = ticks(view.start, view.end, Math.max(2, Math.floor((width - LEFT) / 110)));
  context.textAlign = "center";
  context.textBaseline = "top";
  for (const ms of found) {
    const x = LEFT + (ms - view.start) * scale(width);
    context.fillStyle = style("--line");
    context.fillRect(x - 0.5, top, 1, bottom - top);
    if (labels && x < width - RIGHT - 14) {
      context.fillStyle = style("--quiet");
      context.fillText(tickText(ms, step), x, bottom + 6);
    }
  }
}

function drawChart({ canvas, timeline, number, last }) {
  const height = panelHeight();
  const { context, width } = surface(canvas, height + AXIS);
  const right = width - RIGHT, perMs = scale(width);
  const from = Math.floor(view.top), to = Math.min(plan.ranks.length, Math.ceil(view.top + height / view.row));
  context.save();
  context.beginPath();
  context.rect(0, 0, width, height);
  context.clip();
  drawRows(context, from, to, right);
  drawAxis(context, width, 0, height, false);
  context.beginPath();
  context.rect(LEFT, 0, right - LEFT, height);
  context.clip();
  const colour = theme(), ground = colour("--ground"), over = textures(context, ground);
  for (const box of timeline.boxes) {
    if (box.last < from || box.first >= to || box.end < view.start) continue;
    if (box.start > view.end) break; // they are in order of their start
    const x = LEFT + (box.start - view.start) * perMs, y = (box.first - view.top) * view.row;
    const wide = Math.max(0.5, (box.end - box.start) * perMs), tall = (box.last - box.first + 1) * view.row;
    const inset = view.row >= 8 ? 1 : 0;
    const cascade = box.what >= 0 ? cascades[box.what] : null, fill = fillName(cascade);
    const faded = cascade && view.matches && !view.matches.has(box.what);
    context.globalAlpha = faded ? FADED : 1;
    context.fillStyle = colour(fill);
    context.fillRect(x, y + inset, wide, tall - 2 * inset);
    if (over[box.op] && wide >= 1.5) {
      context.fillStyle = over[box.op];
      context.fillRect(x, y + inset, wide, tall - 2 * inset);
    }
    context.globalAlpha = 1;
    if (wide > 3 && tall >= 3) {
      context.strokeStyle = ground;
      context.lineWidth = 0.6;
      context.strokeRect(x, y + inset, wide, tall - 2 * inset);
    }
    if (!faded && tall >= 14) drawLabel(context, box, cascade, colour, x, y + tall / 2, wide, right);
  }
  drawNodes(context, from, to, right);
  if (view.critical) drawCritical(context, timeline, perMs);
  if (view.picked !== null) outline(context, timeline, number, perMs);
  context.restore();
  if (last) drawAxis(context, width, height, height, true);
}

function drawRows(context, from, to, right) {
  context.textAlign = "right";
  context.textBaseline = "middle";
  const every = labelled();
  // rows of a node alternate in shade; where a row is too thin to see, whole nodes do
  const block = view.row >= 6 ? 1 : plan.gpus;
  for (let row = from; row < to; row++) {
    const y = (row - view.top) * view.row;
    context.fillStyle = style(Math.floor(row / block) % 2 ? "--other-row" : "--row");
    context.fillRect(LEFT, y, right - LEFT, view.row);
    if (row % every === 0) {
      context.fillStyle = style("--quiet");
      context.fillText(`rank ${plan.ranks[row]}`, LEFT - 8, y + (every > 1 ? 7 : view.row / 2));
    }
  }
}

// Whether nodes are tall enough for lines between them.
function nodesShown() {
  return plan.nodes.length > 0 && plan.gpus * view.row >= LEAST_NODE;
}

// A line where another node begins.
function drawNodes(context, from, to, right) {
  if (!nodesShown()) return;
  context.fillStyle = style("--quiet");
  for (const row of plan.nodes) {
    if (row > from && row < to) context.fillRect(LEFT, (row - view.top) * view.row - 0.5, right - LEFT, 1);
  }
}

// Every how many ranks one is named: where there is no room for each, 2, 4, or whole nodes.
function labelled() {
  const wanted = 14 / view.row;
  const whole = plan.gpus * 2 ** Math.max(0, Math.ceil(Math.log2(wanted / plan.gpus)));
  return [1, 2, 4].find((each) => each >= wanted && each < plan.gpus) || (wanted <= 1 ? 1 : whole);
}

function drawLabel(context, box, cascade, colour, x, y, wide, right) {
  const left = Math.max(x, LEFT), seen = Math.min(x + wide, right) - left;
  if (seen < 14) return;
  const size = cascade && sizeOf(cascade), clips = cascade && clipText(cascade.clips);
  const choices = cascade
    ? [`${clips} ${box.op}, ${size} tokens`, `${clips}, ${size}`, clips, nameOf(box.what)]
    : [`${box.op} ${nameOf(box.what)}`, box.op];
  const label = choices.find((text) => context.measureText(text).width + 6 <= seen);
  if (!label) return;
  const fill = fillName(cascade), pad = context.measureText(label).width + 6;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillStyle = colour(fill);
  context.fillRect(left + (seen - pad) / 2, y - 7, pad, 14);
  context.fillStyle = colour(`${fill}-ink`);
  context.fillText(label, left + seen / 2, y);
}

function rectangle(start, end, rowsFlat, i, perMs) {
  return [
    LEFT + (start - view.start) * perMs, (rowsFlat[i] - view.top) * view.row,
    Math.max(1, (end - start) * perMs), (rowsFlat[i + 1] - rowsFlat[i] + 1) * view.row,
  ];
}

// A line that stands out from any fill: on a wider one in the ground's colour.
function twice(context, colour, width, draw) {
  for (const [each, wide] of [[style("--ground"), width + 2], [style(colour), width]]) {
    context.strokeStyle = each;
    context.lineWidth = wide;
    draw();
  }
}

// Outlines of the links, and a line from where each one's wait ended to its start.
function drawCritical(context, timeline, perMs) {
  let before = null;
  for (const link of timeline.critical) {
    twice(context, "--accent", 2, () => {
      for (let i = 0; i < link.rows.length; i += 2) {
        const [x, y, wide, tall] = rectangle(link.start, link.end, link.rows, i, perMs);
        context.strokeRect(x + 1, y + 1, Math.max(0.5, wide - 2), Math.max(0.5, tall - 2));
      }
    });
    if (before) {
      const [from, to] = [before, link];
      twice(context, "--accent", 1.5, () => line(context, perMs, from.end, from.rows[0], to.start, to.rows[0]));
    }
    before = link;
  }
}

// From one moment of a row to one of another.
function line(context, perMs, start, startRow, end, endRow) {
  context.beginPath();
  context.moveTo(LEFT + (start - view.start) * perMs, (startRow + 0.5 - view.top) * view.row);
  context.lineTo(LEFT + (end - view.start) * perMs, (endRow + 0.5 - view.top) * view.row);
  context.stroke();
}

// The picked cascade, and dotted lines to what it reads and to what reads it.
function outline(context, timeline, number, perMs) {
  const picked = cascades[view.picked];
  twice(context, "--text", 2, () => {
    for (const box of timeline.boxes) {
      if (box.what === view.picked) context.strokeRect(...rectangle(box.start, box.end, [box.first, box.last], 0, perMs));
    }
  });
  const readers = cascades.filter((row) => row.inputs.includes(view.picked));
  const pairs = [...picked.inputs.map((input) => [cascades[input], picked]), ...readers.map((reader) => [picked, reader])];
  context.setLineDash([3, 3]);
  for (const [maker, reader] of pairs) {
    const [made, read] = [maker.spans[number], reader.spans[number]];
    if (!made || !read) continue;
    twice(context, "--text", 1.5, () =>
      line(context, perMs, made.end, rowsOf(maker.index)[0], read.start, rowsOf(reader.index)[0]));
  }
  context.setLineDash([]);
}

function makeCharts() {
  timelines.forEach((timeline, number) => {
    const figure = element("figure"), caption = element("figcaption", timeline.title);
    caption.append(element("span", time(timeline.end)));
    const canvas = element("canvas");
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "application");
    canvas.setAttribute("aria-label", `timeline, ${timeline.title}: n and p go through the cascades`);
    figure.append(caption, canvas);
    byId("charts").append(figure);
    const chart = { canvas, timeline, number, last: number === timelines.length - 1 };
    charts.push(chart);
    listen(chart);
  });
  makeLegend();
}

const legends = []; // a canvas each, and how it is filled

// What is drawn and how: operations on grey, since no colour tells them apart, and lines.
function makeLegend() {
  const seen = new Set(timelines.flatMap((timeline) => timeline.boxes.map((box) => box.op)));
  const alike = new Map(); // operations of the same texture have one entry
  for (const op of plan.ops) {
    if (!seen.has(op)) continue;
    const texture = plan.textures[op] || "";
    alike.set(texture, [...(alike.get(texture) || []), op]);
  }
  for (const ops of alike.values()) entry("marks", ops.join(", "), "--sync", ops[0]);
  entry("marks", "critical path", "--accent", null, true);
  if (plan.nodes.length) entry("marks", "next node", "--quiet", null, true);
}

function entry(place, text, fill, op, isLine) {
  const found = element("span"), canvas = element("canvas");
  canvas.setAttribute("aria-hidden", "true");
  found.append(canvas, text);
  byId(place).append(found);
  legends.push({ canvas, fill, op, isLine, place });
}

let legendOf = "";
function drawLegends() {
  if (legendOf !== view.colourBy) {
    legendOf = view.colourBy;
    byId("colours").replaceChildren(element("span", legendOf === "stage" ? "stage:" : "tokens of a clip:"));
    legends.splice(0, legends.length, ...legends.filter((each) => each.place !== "colours"));
    if (legendOf === "stage") for (const stage of plan.stages) entry("colours", stage.name, `--stage-${stage.colour}`);
    else plan.lengths.forEach((label, number) => entry("colours", label, `--length-${number}`));
  }
  for (const { canvas, fill, op, isLine } of legends) {
    const { context, width } = surface(canvas, 12);
    context.fillStyle = style(fill);
    context.fillRect(0, isLine ? 5 : 0, width, isLine ? 2 : 12);
    const over = op && textures(context, style("--ground"))[op];
    if (!over) continue;
    context.fillStyle = over;
    context.fillRect(0, 0, width, 12);
  }
}

function at(canvas, timeline, event) {
  const place = canvas.getBoundingClientRect();
  const x = event.clientX - place.left, y = event.clientY - place.top;
  const ms = view.start + (x - LEFT) / scale(canvas.clientWidth), row = Math.floor(view.top + y / view.row);
  const inside = x >= LEFT && x <= canvas.clientWidth - RIGHT && y >= 0 && y < panelHeight();
  const near = 1.5 / scale(canvas.clientWidth); // thin boxes can be hit too
  let found = null;
  if (inside) {
    for (const box of timeline.boxes) {
      if (box.first <= row && row <= box.last && box.start - near <= ms && ms <= box.end + near) {
        if (!found || (box.start <= ms && ms <= box.end)) found = box;
      }
    }
  }
  return { ms, row, box: found, inside };
}

function listen({ canvas, timeline }) {
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, y: event.clientY, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (drag) {
      const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
      if (!drag.moved && Math.abs(dx) + Math.abs(dy) < 4) return;
      pan(-dx / scale(canvas.clientWidth), -dy / view.row);
      drag = { x: event.clientX, y: event.clientY, moved: true };
      canvas.classList.add("dragging");
      hideTip();
      return;
    }
    const { box } = at(canvas, timeline, event);
    if (box) showTip(box, event);
    else hideTip();
  });
  canvas.addEventListener("pointerup", (event) => {
    const clicked = drag && !drag.moved;
    drag = null;
    canvas.classList.remove("dragging");
    if (!clicked) return;
    const { box, row, inside } = at(canvas, timeline, event);
    pick(box && box.what >= 0 ? box.what : null, false);
    if (inside && row < plan.ranks.length) change({ rank: plan.ranks[row] });
  });
  canvas.addEventListener("pointercancel", () => { drag = null; });
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("dblclick", (event) => {
    const { box } = at(canvas, timeline, event);
    if (box) show(box.start, box.end, [box.first, box.last]);
  });
  canvas.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      zoom(Math.exp(event.deltaY * 0.002), at(canvas, timeline, event).ms);
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      pan((event.deltaX || event.deltaY) / scale(canvas.clientWidth), 0);
    } else {
      const top = view.top;
      pan(0, event.deltaY / view.row);
      if (view.top !== top) event.preventDefault(); // at the last row the page scrolls on
    }
    hideTip();
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const step = (view.end - view.start) / 10, seen = panelHeight() / view.row;
    const keys = {
      ArrowLeft: () => pan(-step, 0), ArrowRight: () => pan(step, 0),
      ArrowUp: () => pan(0, -Math.max(1, seen / 10)), ArrowDown: () => pan(0, Math.max(1, seen / 10)),
      "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: fit, Home: fit,
      "]": () => rows(1.5), "[": () => rows(1 / 1.5), n: () => neighbour(1), p: () => neighbour(-1),
      Enter: () => view.picked !== null && pick(view.picked, true), Escape: () => pick(null, false),
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
}

function showTip(box, event) {
  const tip = byId("tip");
  describe(tip, box.what, box);
  tip.hidden = false;
  const { offsetWidth: wide, offsetHeight: tall } = tip;
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, window.innerWidth - wide - 8))}px`;
  tip.style.top = `${event.clientY + 18 + tall > window.innerHeight ? Math.max(4, event.clientY - tall - 12) : event.clientY + 18}px`;
}

function hideTip() {
  byId("tip").hidden = true;
}
