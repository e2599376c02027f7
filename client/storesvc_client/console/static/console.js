// What htmx does not do: the twigs of a tree close again, events arrive, plots and
// treemaps answer the pointer. Every page works without it.

// 1. The tree. htmx fetches the rows below a twig; a second click removes them.
function rowsBelow(row) {
  const depth = Number(row.dataset.depth);
  const below = [];
  for (let next = row.nextElementSibling; next; next = next.nextElementSibling) {
    if (Number(next.dataset.depth) <= depth) break;
    below.push(next);
  }
  return below;
}

document.addEventListener("htmx:beforeRequest", (event) => {
  const twig = event.target;
  if (!twig.matches(".twig")) return;
  const below = rowsBelow(twig.closest("tr"));
  if (twig.getAttribute("aria-expanded") !== "true") return;
  event.preventDefault();
  for (const row of below) row.remove();
  twig.setAttribute("aria-expanded", "false");
});

document.addEventListener("htmx:afterRequest", (event) => {
  const twig = event.target;
  if (twig.matches(".twig") && event.detail.successful) {
    twig.setAttribute("aria-expanded", "true");
  }
});

// 2. Events. Each message is a row that the server has made and escaped.
const SHOWN_EVENTS = 300;
const list = document.querySelector("[data-events]");
if (list) {
  const source = new EventSource(list.dataset.events);
  source.addEventListener("message", (message) => {
    list.insertAdjacentHTML("afterbegin", JSON.parse(message.data));
    list.firstElementChild.classList.add("new");
    while (list.childElementCount > SHOWN_EVENTS) list.lastElementChild.remove();
  });
  addEventListener("pagehide", () => source.close());
}

// 3. The plot of a metric. The picture of the server stays until the points are here.
function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// The picture of the checkpoints below has these margins at this width.
const PICTURE = { width: 1180, left: 84, right: 34 };

function draw(place, points, zoom) {
  const share = place.clientWidth / PICTURE.width;
  const axis = {
    stroke: colour("--soft"),
    grid: { stroke: colour("--line"), width: 1 },
    ticks: { stroke: colour("--line"), width: 1 },
  };
  const options = {
    width: place.clientWidth,
    height: 260,
    padding: [12, PICTURE.right * share, 0, 0],
    scales: { x: { time: false } },
    axes: [axis, { ...axis, size: PICTURE.left * share }],
    series: [
      { label: "step" },
      {
        label: place.dataset.metric,
        stroke: colour("--accent"),
        width: 2,
        points: { show: points.steps.length < 80, size: 6 },
      },
    ],
    cursor: { drag: { x: true, y: false } },
    hooks: { setSelect: [(plot) => zoom(plot.select.width > 0)] },
  };
  const plot = new uPlot(options, [points.steps, points.values], place);
  let pressed = null;
  plot.over.addEventListener("mousedown", (event) => (pressed = event.clientX));
  plot.over.addEventListener("click", (event) => {
    const at = plot.cursor.idx;
    if (at === null || Math.abs(event.clientX - pressed) > 2) return;
    location.href = `${place.dataset.run}@${points.steps[at]}`;
  });
  return plot;
}

async function enliven(place) {
  const answer = await fetch(place.dataset.plot);
  if (!answer.ok) return;
  const points = await answer.json();
  // the store sends numbers that are not finite as texts
  points.values = points.values.map((value) => (typeof value === "number" ? value : null));
  place.querySelector("svg").remove();
  place.setAttribute("role", "img");
  place.setAttribute("aria-label", `${place.dataset.metric} by step`);
  const panel = place.closest("section");
  const reset = panel.querySelector(".reset");
  panel.querySelector(".hint").hidden = false;
  const all = { min: Number(place.dataset.from), max: Number(place.dataset.to) };
  const zoom = (on) => (reset.hidden = !on);
  let plot;
  const again = () => {
    plot?.destroy();
    plot = draw(place, points, zoom);
    if (all.max > all.min) plot.setScale("x", all);
    zoom(false);
  };
  again();
  reset.addEventListener("click", again);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  let width = place.clientWidth;
  new ResizeObserver(() => {
    if (place.clientWidth === width) return;
    width = place.clientWidth;
    again();
  }).observe(place);
}

function enlivenAll() {
  for (const place of document.querySelectorAll("[data-plot]:not(.live)")) {
    place.classList.add("live");
    enliven(place);
  }
}

enlivenAll();
document.addEventListener("htmx:afterSettle", enlivenAll);

// 4. The treemap. A tile leads to its leaf, or to the tree below its key.
document.addEventListener("click", (event) => {
  const tile = event.target.closest("[data-tiles] [data-key]");
  if (!tile) return;
  const address = tile.closest("[data-tiles]").dataset.tiles;
  location.href = `${address}?key=${encodeURIComponent(tile.dataset.key)}`;
});
