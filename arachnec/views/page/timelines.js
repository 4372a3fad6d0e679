// The timelines, below each other on one axis.

const OPACITY = { forward: 0.62, backward: 0.95, weight: 0.8, encode: 0.85, denoise: 0.85, decode: 0.6, reduce: 0.9, norm: 0.5, step: 0.5 };
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

function drawChart({ canvas, timeline, last }) {
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
  const colours = plan.stages.map((stage) => stage.colour), sync = style("--sync"), ground = style("--ground");
  for (const box of timeline.boxes) {
    if (box.last < from || box.first >= to || box.end < view.start) continue;
    if (box.start > view.end) break; // they are in order of their start
    const x = LEFT + (box.start - view.start) * perMs, y = (box.first - view.top) * view.row;
    const wide = Math.max(0.5, (box.end - box.start) * perMs), tall = (box.last - box.first + 1) * view.row;
    const inset = view.row >= 8 ? 1 : 0;
    const cascade = box.what >= 0 ? cascades[box.what] : null;
    const faded = cascade && view.matches && !view.matches.has(box.what);
    context.globalAlpha = faded ? FADED : OPACITY[box.op];
    context.fillStyle = cascade ? colours[cascade.stage] : sync;
    context.fillRect(x, y + inset, wide, tall - 2 * inset);
    context.globalAlpha = 1;
    if (wide > 3 && tall >= 3) {
      context.strokeStyle = ground;
      context.lineWidth = 0.6;
      context.strokeRect(x, y + inset, wide, tall - 2 * inset);
    }
    if (!faded && tall >= 12) drawLabel(context, box, cascade, x, y + tall / 2, wide, right);
  }
  if (view.critical) drawCritical(context, timeline, perMs);
  if (view.picked !== null) outline(context, timeline, perMs);
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

// Every how many ranks one is named: where there is no room for each, 2, 4, or whole nodes.
function labelled() {
  const wanted = 14 / view.row;
  const whole = plan.gpus * 2 ** Math.max(0, Math.ceil(Math.log2(wanted / plan.gpus)));
  return [1, 2, 4].find((each) => each >= wanted && each < plan.gpus) || (wanted <= 1 ? 1 : whole);
}

function drawLabel(context, box, cascade, x, y, wide, right) {
  const left = Math.max(x, LEFT), seen = Math.min(x + wide, right) - left;
  if (seen < 14) return;
  const size = cascade && (cascade.tokens >= 1000 ? `${+(cascade.tokens / 1000).toPrecision(3)}k` : `${cascade.tokens}`);
  const choices = cascade
    ? [`${nameOf(box.what)} ${box.op}, ${size} tokens`, `${nameOf(box.what)} · ${size}`, nameOf(box.what)]
    : [`${box.op} ${nameOf(box.what)}`, box.op];
  const label = choices.find((text) => context.measureText(text).width + 6 <= seen);
  if (!label) return;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillStyle = "#ffffff";
  context.shadowColor = "#000000cc";
  context.shadowBlur = 3;
  context.fillText(label, left + seen / 2, y);
  context.shadowBlur = 0;
}

function rectangle(start, end, rowsFlat, i, perMs) {
  return [
    LEFT + (start - view.start) * perMs, (rowsFlat[i] - view.top) * view.row,
    Math.max(1, (end - start) * perMs), (rowsFlat[i + 1] - rowsFlat[i] + 1) * view.row,
  ];
}

// Outlines of the links, and a line from where each one's wait ended to its start.
function drawCritical(context, timeline, perMs) {
  context.strokeStyle = style("--accent");
  let before = null;
  for (const link of timeline.critical) {
    context.lineWidth = 2;
    for (let i = 0; i < link.rows.length; i += 2) {
      const [x, y, wide, tall] = rectangle(link.start, link.end, link.rows, i, perMs);
      context.strokeRect(x + 1, y + 1, Math.max(0.5, wide - 2), Math.max(0.5, tall - 2));
    }
    if (before) {
      context.lineWidth = 1.5;
      context.beginPath();
      context.moveTo(LEFT + (before.end - view.start) * perMs, (before.rows[0] + 0.5 - view.top) * view.row);
      context.lineTo(LEFT + (link.start - view.start) * perMs, (link.rows[0] + 0.5 - view.top) * view.row);
      context.stroke();
    }
    before = link;
  }
}

function outline(context, timeline, perMs) {
  context.strokeStyle = style("--text");
  context.lineWidth = 2;
  for (const box of timeline.boxes) {
    if (box.what !== view.picked) continue;
    context.strokeRect(...rectangle(box.start, box.end, [box.first, box.last], 0, perMs));
  }
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
    const chart = { canvas, timeline, last: number === timelines.length - 1 };
    charts.push(chart);
    listen(chart);
  });
  for (const stage of plan.stages) legend(stage.name, stage.colour);
  legend("reduce, step", "var(--sync)");
  legend("critical path", "var(--accent)");
}

function legend(text, colour) {
  const entry = element("span"), mark = element("i");
  mark.style.background = colour;
  entry.append(mark, text);
  byId("legend").append(entry);
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
