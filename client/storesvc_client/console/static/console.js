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
    localise();
    while (list.childElementCount > SHOWN_EVENTS) list.lastElementChild.remove();
  });
  addEventListener("pagehide", () => source.close());
}

// 3. Times are in the zone of the viewer; their title has them in UTC, too. An age keeps
// its text.
function localise() {
  for (const time of document.querySelectorAll("time[datetime]:not([data-utc])")) {
    const isAge = time.title !== "";
    const utc = isAge ? time.title : time.textContent;
    const local = new Date(time.dateTime).toLocaleString("sv"); // 2026-11-28 21:38:00
    time.dataset.utc = utc;
    time.title = isAge ? `${local} (${utc})` : utc;
    if (!isAge) time.textContent = local;
  }
}

localise();
document.addEventListener("htmx:afterSettle", localise);

// 4. The plot of a metric. The picture of the server stays until the points are here.
function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// The picture of the checkpoints below has these margins at this width.
const PICTURE = { width: 1180, left: 84, right: 34 };

// Distances between ticks of steps.
const STEPS = Array.from({ length: 48 }, (_, at) => [1, 2, 5][at % 3] * 10 ** Math.floor(at / 3));

// The value under the pointer, else the newest one.
function shownValue(plot, value, series) {
  return (value ?? plot.data[series].at(-1) ?? "").toLocaleString();
}

function draw(place, points, zoom) {
  const share = place.clientWidth / PICTURE.width;
  const axis = {
    stroke: colour("--soft"),
    grid: { stroke: colour("--line"), width: 1 },
    ticks: { stroke: colour("--line"), width: 1 },
  };
  // as the picture of the checkpoints has them, unless a part is shown, or on a phone
  const { from, to, tick } = place.dataset;
  const hasRoom = Number(tick) > 0 && place.clientWidth > 640;
  const isPart = (low, high) => !hasRoom || high - low < to - from;
  const steps = {
    ...axis,
    incrs: (_plot, _axis, low, high) => (isPart(low, high) ? STEPS : [Number(tick)]),
    space: (_plot, _axis, low, high) => (isPart(low, high) ? 60 : 1),
  };
  const options = {
    width: place.clientWidth,
    height: 260,
    padding: [12, Math.max(PICTURE.right * share, 26), 0, 0],
    scales: { x: { time: false } },
    axes: [steps, { ...axis, size: Math.max(PICTURE.left * share, 44) }],
    series: [
      { label: "step", value: shownValue },
      {
        label: place.dataset.metric,
        value: shownValue,
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

// 5. The treemap. A tile leads to its leaf, or to the tree below its key.
document.addEventListener("click", (event) => {
  const tile = event.target.closest("[data-tiles] [data-key]");
  if (!tile) return;
  const address = tile.closest("[data-tiles]").dataset.tiles;
  location.href = `${address}?key=${encodeURIComponent(tile.dataset.key)}`;
});
