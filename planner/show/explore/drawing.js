// What the page shows of an answer: columns of layers, bars of memory, the table of stages, the step for the timeline.

const make = (tag, values = {}, ...content) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(values)) {
    if (name === "style") Object.assign(made.style, value); else if (value !== null) made.setAttribute(name, value);
  }
  made.append(...content);
  return made;
};
// So many rows scroll, and so many stages are not all labelled.
const MANY = 24;

const share = (part) => (part * 100).toFixed(3) + "%";

// Forward and backward of every layer, one above the other; the highest column fills the height.
function columns(chain) {
  const xml = "http://www.w3.org/2000/svg", L = chain.L;
  const picture = document.createElementNS(xml, "svg"), most = highest(0, L, (n) => chain.forward_us[n] + chain.backward_us[n]);
  picture.setAttribute("viewBox", `0 0 ${L} 100`);
  picture.setAttribute("preserveAspectRatio", "none");
  picture.setAttribute("aria-hidden", "true");
  const path = { "l-f": "", "l-b": "" };
  for (let n = 0; n < L; n++) {
    const scale = most > 0 ? 96 / most : 0, forward = chain.forward_us[n] * scale, backward = chain.backward_us[n] * scale;
    path["l-f"] += `M${n + 0.06} 100v${-forward}h.88v${forward}z`;
    path["l-b"] += `M${n + 0.06} ${100 - forward}v${-backward}h.88v${backward}z`;
  }
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
  for (const kind of [...ITEMS, "reserve"]) {
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
  if (cap <= full) track.append(make("i", { class: "cap", title: "cap " + formatBytes(cap), style: { left: share(cap / full) } }));
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
  const { times, backward_us: backward, recompute, cuts, program } = answer;
  const pair = times.map((stage, k) => stage.F + backward[k]), slowest = pair.indexOf(Math.max(...pair));
  const cells = (tag, row) => make("tr", {}, ...row.map((text, n) => make(tag, n > 3 ? { class: "n" } : {}, text)));
  table.tHead.replaceChildren(cells("th", ["stage", "layers", "recompute", "device", "forward", "backward", "sends"]));
  table.tBodies[0].replaceChildren(...times.map((stage, k) => cells("td", [
    k + (k === slowest && times.length > 1 ? " ◀" : ""), layerRange(data.names, cuts[k], cuts[k + 1]), recompute[k],
    String(data.places[program.device[k]]), formatUs(stage.F), formatUs(backward[k]),
    stage.send ? formatUs(stage.send) : "-",
  ])));
  return slowest;
}

// The step as the timeline takes it: planner/show/html/timeline.py, in tenths of a microsecond.
function stepOf(data, answer) {
  const { program, clocks: time, times, own, recompute, cuts } = answer, { K, V, M, S } = program;
  const { kinds, labels, redone } = data.timeline, rows = Array.from({ length: K }, () => []);
  const [receive, optimizer, forth, back] =
    ["receive", "optimizer step", "send forward", "send backward"].map((label) => labels.indexOf(label));
  const add = (device, kind, stage, micro, from, until) =>
    rows[device].push([kind + labels.length * Math.floor(stage / K), micro, Math.round(from * 10), Math.round(until * 10)]);
  const busy = new Float64Array(K), hasLanes = K <= 50;
  program.order.forEach((action, n) => {
    const at = action % (4 * S), stage = at >> 2, micro = Math.floor(action / (4 * S)), device = program.device[stage];
    const from = program.heard[at], over = from < 0 ? null : times[Math.min(from, stage)];
    if (over && over.blocking && K > 1) add(device, receive, stage, micro, time.start[n] - over.send, time.start[n]);
    add(device, at & 3, stage, micro, time.start[n], time.end[n]);
    busy[device] += time.end[n] - time.start[n];
    if (time.sent[n] < 0 || !hasLanes) return;
    const told = program.told[at], { flow } = data.kinds[at & 3];
    add(device, flow ? back : forth, stage, micro, time.sent[n], time.sent[n] + times[Math.min(stage, told)].send);
  });
  own.forEach((us, k) => { if (us > 0) add(k, optimizer, k, 0, time.ends[k], time.ends[k] + us); });
  const isBubble = (k) => { const whole = time.ends[k] - time.begins[k]; return whole > 0 ? Math.max(0, 1 - busy[k] / whole) : 0; };
  return {
    kinds, labels, redone, row: V === 1 ? "stage" : "device", chunks: V, last: M - 1,
    end: rows.reduce((most, row) => row.reduce((latest, span) => Math.max(latest, span[3]), most), 0),
    places: rows.map((_, k) => chunksOf(k, K, V, program.placement)),
    bubbles: rows.map((_, k) => percent(isBubble(k))),
    stages: cuts.slice(0, -1).map((f, k) => layerRange(data.names, f, cuts[k + 1])),
    again: Object.fromEntries(times.map((stage, k) => [k, Math.round(stage.again * 10)]).filter(([, us]) => us > 0)),
    spared: recompute.flatMap((choice, k) => (choice === "except-last" ? [k] : [])),
    rows: rows.map(flattened),
  };
}

// Kind with chunk, micro-batch, gap behind the start of the one before, duration.
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

// Look and words of everything that the timeline shows.
function timelineLegend(data, answer) {
  const { program, times, own } = answer, chunks = Math.min(program.V, data.timeline.kinds[0].paper.length);
  const there = new Set(program.order.map((action) => action & 3)), looks = [];
  data.timeline.kinds.forEach(({ letter }, kind) => {
    for (let chunk = 0; there.has(kind) && chunk < chunks; chunk++) {
      looks.push([letter.toLowerCase() + chunk, data.timeline.labels[kind] + (chunks > 1 ? ", chunk " + chunk : "")]);
    }
  });
  if (times.some((stage) => stage.again > 0)) looks.push([(there.has(1) ? "b0" : "i0") + " again", "recompute, within its backward"]);
  if (times.some((stage) => stage.send && !stage.blocking) && program.K <= 50) looks.push(["s", "transfer"]);
  if (times.some((stage) => stage.send && stage.blocking)) looks.push(["r", "transfer that keeps its receiver busy"]);
  if (own.some((us) => us > 0)) looks.push(["o", "optimizer"]);
  return looks.map(([look, words]) => make("li", {}, make("i", { class: "key " + look }), words));
}
