// Drawing of an evaluated plan: columns of layers, bars of memory, table of stages, and data for the timeline.

const make = (tag, values = {}, ...content) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(values)) {
    if (name === "style") Object.assign(made.style, value); else if (value !== null) made.setAttribute(name, value);
  }
  made.append(...content);
  return made;
};
// From this number on, rows scroll, and not all stages are labelled.
const MANY = 24;

const share = (part) => (part * 100).toFixed(3) + "%";

// Draw a column per layer, with its backward on top of its forward; the highest column fills the height.
function columns([forwards, backwards]) {
  const xml = "http://www.w3.org/2000/svg", picture = document.createElementNS(xml, "svg");
  picture.setAttribute("viewBox", `0 0 ${forwards.length} 100`);
  picture.setAttribute("preserveAspectRatio", "none");
  picture.setAttribute("aria-hidden", "true");
  const path = { "l-f": "", "l-b": "" };
  forwards.forEach((thousandths, n) => {
    const forward = thousandths * 0.096, backward = backwards[n] * 0.096;
    path["l-f"] += `M${n + 0.06} 100v${-forward}h.88v${forward}z`;
    path["l-b"] += `M${n + 0.06} ${100 - forward}v${-backward}h.88v${backward}z`;
  });
  for (const [look, d] of Object.entries(path)) {
    const drawn = document.createElementNS(xml, "path");
    drawn.setAttribute("class", look);
    drawn.setAttribute("d", d);
    picture.append(drawn);
  }
  return picture;
}

function memoryRow(name, items, cap, full) {
  const track = make("div", { class: "track" }), need = total(items), isOver = need > cap;
  let edge = 0;
  for (const kind of Object.keys(items)) {
    if (!items[kind]) continue;
    const words = kind.replace("_", " "), wide = items[kind] / full;
    const part = make("i", {
      class: "m-" + kind, title: `${words} ${formatBytes(items[kind])}`,
      style: { left: share(edge / full), width: share(wide) },
    });
    if (wide >= 0.13) part.append(make("span", {}, words));
    track.append(part);
    edge += items[kind];
  }
  if (cap <= full) track.append(make("i", { class: "cap", title: "limit " + formatBytes(cap), style: { left: share(cap / full) } }));
  const words = `${formatBytes(need)} of ${formatBytes(cap)}, ${percent(need / cap, 0)}${isOver ? " ! over" : ""}`;
  return make("div", { class: "bar" }, make("b", {}, name), track, make("span", isOver ? { class: "over" } : {}, words));
}

function memoryBars(bars, memory, caps, placeWord) {
  const needs = memory.map(total), most = Math.max(...needs), cap = Math.max(...caps);
  const full = Math.max(1, most, most * 4 >= cap ? cap : 0);
  bars.className = "bars" + (memory.length > MANY ? " many" : "");
  bars.parentElement.classList.toggle("tall", memory.length > MANY);
  bars.replaceChildren(...memory.map((items, k) => memoryRow(`${placeWord} ${k}`, items, caps[k], full)));
}

function stageTable(table, data, answer) {
  const { times, forward_us: forward, backward_us: backward, recompute, cuts, orders } = answer;
  const pair = forward.map((us, k) => us + backward[k]), slowest = pair.indexOf(Math.max(...pair));
  const cells = (tag, row) => make("tr", {}, ...row.map((text, n) => make(tag, n > 3 ? { class: "n" } : {}, text)));
  table.tHead.replaceChildren(cells("th", ["stage", "layers", "recompute", "device", "forward", "backward", "sends"]));
  table.tBodies[0].replaceChildren(...forward.map((us, k) => cells("td", [
    k + (k === slowest && forward.length > 1 ? " ◀" : ""), layerRange(data.names, cuts[k], cuts[k + 1]), recompute[k],
    String(data.places[orders.layout.devices[k]]), formatUs(us), formatUs(backward[k]),
    times.send[k] ? formatUs(times.send[k]) : "-",
  ])));
  return slowest;
}

// Return the step in the format of planner/show/html/timeline.py, with times in tenths of a microsecond.
function stepOf(data, answer) {
  const { orders, time, times, own, recompute, cuts } = answer, { K, M, S, layout, stages } = orders, hasLanes = K <= 50;
  const { kinds, labels, redone } = data.timeline, rows = stages.map(() => []), busy = new Float64Array(K);
  const [receive, optimizer, forth, back] =
    ["receive", "optimizer step", "send forward", "send backward"].map((label) => labels.indexOf(label));
  const add = (device, kind, stage, micro, from, until) =>
    rows[device].push([kind + labels.length * Math.floor(stage / K), micro, Math.round(from * 10), Math.round(until * 10)]);
  time.at.forEach((at, n) => {
    const stage = at >> 2, device = layout.devices[stage], micro = time.micro[n], begin = time.start[n], end = time.end[n];
    const over = layout.received[at];
    if (over >= 0 && times.blocking[over]) add(device, receive, stage, micro, begin - times.send[over], begin);
    add(device, at & 3, stage, micro, begin, end);
    busy[device] += end - begin;
    if (time.sent[n] < 0 || !hasLanes) return;
    add(device, layout.makes[at] < S ? forth : back, stage, micro, time.sent[n], time.sent[n] + times.send[layout.sent[at]]);
  });
  own.forEach((us, k) => { if (us > 0) add(k, optimizer, k, 0, time.ends[k], time.ends[k] + us); });
  const bubble = (k) => { const whole = time.ends[k] - time.begins[k]; return whole > 0 ? Math.max(0, 1 - busy[k] / whole) : 0; };
  return {
    kinds, labels, redone, row: S === K ? "stage" : "device", chunks: S / K, last: M - 1,
    end: rows.reduce((most, row) => row.reduce((latest, span) => Math.max(latest, span[3]), most), 0),
    places: stages,
    bubbles: rows.map((_, k) => percent(bubble(k))),
    stages: recompute.map((_, k) => layerRange(data.names, cuts[k], cuts[k + 1])),
    again: Object.fromEntries(recompute.map((_, k) => [k, Math.round(againUs(data, times, k) * 10)]).filter(([, us]) => us > 0)),
    spared: recompute.flatMap((choice, k) => (choice === "except-last" ? [k] : [])),
    rows: rows.map(flattened),
  };
}

// Return the recomputation time within a stage's backward.
const againUs = ({ redone }, { again }, k) => Math.max(...redone.map((kind) => again[2 * (4 * k + kind)]));

// Encode each span as four numbers: kind and chunk, micro-batch, time from the previous start, duration.
function flattened(spans) {
  const flat = new Array(4 * spans.length);
  let before = 0, n = 0;
  for (const [code, micro, from, until] of spans.sort((a, b) => a[2] - b[2])) {
    [flat[n], flat[n + 1], flat[n + 2], flat[n + 3]] = [code, micro, from - before, until - from];
    before = from;
    n += 4;
  }
  return flat;
}

// Return the style class and label of everything that the timeline shows.
function timelineLegend(data, answer) {
  const { orders, time, times, own } = answer, { K, S } = orders, looks = [];
  const chunks = Math.min(S / K, data.timeline.kinds[0].paper.length), there = new Set(time.at.map((at) => at & 3));
  data.timeline.kinds.forEach(({ letter }, kind) => {
    for (let chunk = 0; there.has(kind) && chunk < chunks; chunk++) {
      looks.push([letter.toLowerCase() + chunk, data.timeline.labels[kind] + (chunks > 1 ? ", chunk " + chunk : "")]);
    }
  });
  const redone = data.redone.find((kind) => there.has(kind));
  if (times.again.some((us) => us > 0)) looks.push([`${data.timeline.kinds[redone].letter.toLowerCase()}0 again`, "recompute, within its backward"]);
  if (times.send.some((us, k) => us && !times.blocking[k]) && K <= 50) looks.push(["s", "transfer"]);
  if (times.send.some((us, k) => us && times.blocking[k])) looks.push(["r", "transfer that keeps its receiver busy"]);
  if (own.some((us) => us > 0)) looks.push(["o", "optimizer"]);
  return looks.map(([look, words]) => make("li", {}, make("i", { class: "key " + look }), words));
}
