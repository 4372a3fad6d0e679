// The page put together.

function makeHeader() {
  document.title = `${plan.name} - arachnec`;
  byId("title").textContent = plan.name;
  byId("about").textContent = plan.about.map(([word, text]) => `${word} ${text}`).join(" · ");
  for (const [word, text] of plan.tiles) {
    const tile = element("div");
    tile.append(element("dt", word), element("dd", text));
    byId("tiles").append(tile);
  }
  for (const line of plan.notes) byId("notes").append(element("p", line));
  for (const [title, lines] of plan.sentences) {
    if (title) byId("sentences").append(element("h3", title));
    for (const line of lines) byId("sentences").append(element("p", line));
  }
}

function makeChain() {
  timelines.forEach((timeline, number) => {
    const option = element("option", timeline.title);
    option.value = number;
    byId("critical-of").append(option);
  });
  byId("critical-choice").hidden = timelines.length < 2;
  byId("critical-of").value = timelines.length - 1;
  byId("critical-of").addEventListener("change", (event) => listCritical(timelines[event.target.value]));
  listCritical(timelines[timelines.length - 1]);
}

function listCritical({ critical }) {
  byId("critical").replaceChildren(...critical.map((link) => {
    const item = element("li"), button = element("button");
    button.type = "button";
    button.append(element("b", nameOf(link.what)), ` ${link.ops.replaceAll("+", " and ")}, ${size(link)}${span(link)}: ${reason(link)}`);
    button.addEventListener("click", () => {
      if (link.what >= 0) change({ picked: link.what, rank: cascades[link.what].ranks[0] });
      show(link.start, link.end, link.rows);
    });
    item.append(button);
    return item;
  }));
}

function size(link) {
  if (link.what < 0) return "";
  const row = cascades[link.what];
  return `${clipText(row.clips)}, ${sizeOf(row)} tokens on ${row.degree === 1 ? "rank" : "ranks"} ${ranges(row.ranks)}, `;
}

function reason(link) {
  const gap = link.gap > planEnd / 1000 ? `, ${time(link.gap)} later` : "";
  if (link.because === "start" || link.waited === null) return "the first there is to do";
  if (link.because === "input") return `reads what ${nameOf(link.waited)} made${gap}`;
  const link0 = link.rows.length === 2 && link.rows[0] === link.rows[1] ? "its rank was" : "its last rank was";
  return `${link0} in ${nameOf(link.waited)} until then${gap}`;
}

function drawAll() {
  for (const chart of charts) drawChart(chart);
  drawLegends();
  drawMemory();
  markRow();
  const seen = panelHeight() / view.row, first = Math.floor(view.top);
  const lastRow = Math.min(plan.ranks.length - 1, Math.ceil(view.top + seen - 1e-6) - 1);
  byId("window").textContent =
    `${time(view.start)} to ${time(view.end)} of ${time(planEnd)}, ranks ${plan.ranks[first]} to ${plan.ranks[lastRow]} of ${plan.ranks.length}` +
    (nodesShown() ? `; lines between rows separate ${plan.nodes.length + 1} nodes` : "");
  const details = byId("details");
  if (view.picked === null) details.replaceChildren();
  else if (details.dataset.of !== `${view.picked}` || !details.firstChild) {
    const list = element("dl");
    describe(list, view.picked, null);
    details.replaceChildren(list);
  }
  details.dataset.of = `${view.picked}`;
}

byId("zoom-in").addEventListener("click", () => zoom(0.5));
byId("zoom-out").addEventListener("click", () => zoom(2));
byId("fit").addEventListener("click", fit);
byId("taller").addEventListener("click", () => rows(1.5));
byId("flatter").addEventListener("click", () => rows(1 / 1.5));
byId("colour-by").addEventListener("change", (event) => change({ colourBy: event.target.value }));
byId("show-critical").addEventListener("change", (event) => change({ critical: event.target.checked }));
window.addEventListener("resize", schedule);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", schedule);

makeHeader();
makeCharts();
makeChain();
makeTable();
listenMemory();
listeners.push(drawAll);
fit();
