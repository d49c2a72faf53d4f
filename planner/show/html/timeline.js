"use strict";
// Timeline of a step on the canvas of the page's `.live` box, with zoom, tooltips and keys. `load` shows another step.
function timeline(live) {
  const canvas = live.querySelector("canvas"), output = live.querySelector("output");
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  document.body.append(tip);

  const AXIS = 26, TOP = 4;
  const context = canvas.getContext("2d");
  const view = { from: 0, to: 1 };
  let width = 0, left = 0, right = 0, chosen = null, queued = false;
  let data, rows, K, rowHeight, unit, KINDS, LABELS, RECEIVE, OPTIMIZER, FORTH, BACK;

  // Labels begin with the kinds of actions, whose colors and letters are in the data.
  function load(step) {
    const isWhole = !data || (view.from === 0 && view.to === data.end);
    data = step;
    KINDS = data.kinds;
    LABELS = data.labels;
    RECEIVE = LABELS.indexOf("receive");
    OPTIMIZER = LABELS.indexOf("optimizer step");
    FORTH = LABELS.indexOf("send forward");
    BACK = LABELS.indexOf("send backward");
    K = data.rows.length;
    rowHeight = Math.max(6, Math.min(30, 560 / K));
    unit = data.end < 1e4 ? ["us", 10] : data.end < 1e8 ? ["ms", 1e4] : ["s", 1e7];
    const spared = new Set(data.spared);
    rows = data.rows.map((flat, device) => boxesOf(flat, device, spared));
    chosen = null;
    if (isWhole) show(0, data.end); else show(view.from, view.to);
  }
  const paper = (box) => KINDS[box.kind].paper[box.chunk % KINDS[box.kind].paper.length];

  // Return the boxes of a row by start: actions, and sends in a list of their own.
  function boxesOf(flat, device, spared) {
    const boxes = { compute: [], sends: [] };
    let at = 0;
    for (let n = 0; n < flat.length; n += 4) {
      at += flat[n + 2];
      const kind = flat[n] % LABELS.length, chunk = Math.floor(flat[n] / LABELS.length);
      const stage = data.places[device][chunk], micro = flat[n + 1];
      const again = data.redone.includes(kind) && !(micro === data.last && spared.has(stage)) ? data.again[stage] || 0 : 0;
      const box = { device, kind, chunk, stage, micro, start: at, end: at + flat[n + 3], again };
      (kind === FORTH || kind === BACK ? boxes.sends : boxes.compute).push(box);
    }
    return boxes;
  }

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const x = (time) => left + (time - view.from) / (view.to - view.from) * (width - left - right);
  const timeAt = (px) => view.from + (px - left) / (width - left - right) * (view.to - view.from);

  function hatch() {
    const tile = document.createElement("canvas"), size = 6 * devicePixelRatio;
    tile.width = tile.height = size;
    const c = tile.getContext("2d");
    c.strokeStyle = css("--hatch");
    c.lineWidth = 1.5 * devicePixelRatio;
    c.beginPath();
    for (const shift of [-size, 0, size]) { c.moveTo(shift, size); c.lineTo(shift + size, 0); }
    c.stroke();
    const pattern = context.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix().scale(1 / devicePixelRatio));
    return pattern;
  }

  function draw() {
    queued = false;
    width = canvas.clientWidth;
    if (!width || !data) return;
    const height = TOP + K * rowHeight + AXIS, ratio = devicePixelRatio || 1;
    canvas.style.height = height + "px";
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const font = getComputedStyle(document.body).fontFamily;
    context.font = "11px " + font;
    left = context.measureText(data.row + " " + (K - 1)).width + 12;
    if (width < 560) left = Math.max(28, context.measureText(String(K - 1)).width + 10);
    right = Math.max(...data.bubbles.map((text) => context.measureText(text).width)) + 12;
    context.textBaseline = "middle";
    axis();
    const every = rowHeight >= 11 ? 1 : rowHeight >= 8 ? 4 : 8;
    for (let device = 0; device < K; device += every) {
      context.fillStyle = css("--ink");
      context.textAlign = "right";
      const name = width < 560 ? String(device) : data.row + " " + device;
      context.fillText(name, left - 7, TOP + (device + 0.5) * rowHeight);
      context.fillStyle = css("--soft");
      context.fillText(data.bubbles[device], width - 3, TOP + (device + 0.5) * rowHeight);
    }
    context.save();
    context.beginPath();
    context.rect(left, 0, width - left - right + 1, TOP + K * rowHeight);
    context.clip();
    const colors = { r: css("--r"), o: css("--o"), s: css("--s"), again: hatch() };
    rows.forEach((row, device) => drawRow(row, TOP + device * rowHeight, colors));
    context.restore();
  }

  function axis() {
    const span = view.to - view.from, most = Math.max(2, Math.floor((width - left - right) / 90));
    const power = 10 ** Math.floor(Math.log10(span / most));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => span / s <= most) || 10 * power;
    context.strokeStyle = css("--line");
    context.fillStyle = css("--soft");
    context.textAlign = "center";
    const bottom = TOP + K * rowHeight;
    for (let n = Math.ceil(view.from / step); n * step <= view.to; n++) {
      const px = Math.round(x(n * step)) + 0.5;
      context.beginPath();
      context.moveTo(px, 0);
      context.lineTo(px, bottom + 4);
      context.stroke();
      const label = String(Number((n * step / unit[1]).toPrecision(8)));
      context.fillText(label, Math.min(px, width - context.measureText(label).width / 2), bottom + 14);
    }
    context.textAlign = "right";
    context.fillText(unit[0], left - 7, bottom + 14);
  }

  const firstAfter = (boxes, time) => {
    let low = 0, high = boxes.length;
    while (low < high) { const mid = (low + high) >> 1; if (boxes[mid].end < time) low = mid + 1; else high = mid; }
    return low;
  };

  function drawRow(row, y, colors) {
    const lane = rowHeight >= 11 ? 3 : 0, top = y + lane + 0.5, tall = rowHeight - 2 * lane - 1;
    for (let n = firstAfter(row.compute, view.from); n < row.compute.length && row.compute[n].start < view.to; n++) {
      const box = row.compute[n], from = x(box.start), room = x(box.end) - from;
      const wide = Math.max(0.3, room - Math.min(0.8, room * 0.12));
      context.fillStyle = KINDS[box.kind] ? paper(box) : box.kind === RECEIVE ? colors.r : colors.o;
      context.fillRect(from, top, wide, tall);
      const redone = box.again ? x(box.start + box.again) - from : 0;
      if (redone > 0.4) {
        // A narrow box gets a plain shade, because hatching would be too small and is slow.
        context.fillStyle = redone > 2 ? colors.again : "#6d3b0680";
        context.fillRect(from, top, redone, tall);
      }
      if (box === chosen) {
        context.strokeStyle = css("--ink");
        context.lineWidth = 2;
        context.strokeRect(from + 1, top + 1, Math.max(2, wide - 2), tall - 2);
        context.lineWidth = 1;
      }
      if (tall >= 10 && KINDS[box.kind]) label(box, from, room, redone, y);
    }
    if (!lane) return;
    context.fillStyle = colors.s;
    for (const box of row.sends) {
      if (box.end < view.from || box.start > view.to) continue;
      context.fillRect(x(box.start), box.kind === FORTH ? y + rowHeight - 3 : y, Math.max(0.5, x(box.end) - x(box.start)), 2.5);
    }
  }

  function label(box, from, room, redone, y) {
    const longest = String(data.last).length + (data.chunks > 1 ? 2 : 0);
    if (room - 3 < 6.3 * longest) return;
    const name = box.micro + (data.chunks > 1 ? "." + box.chunk : "");
    const text = room - 3 >= 6.3 * (longest + 1.4) ? KINDS[box.kind].letter + name : name;
    context.textAlign = "center";
    context.fillStyle = KINDS[box.kind].ink;
    // Write the number next to the hatching if there is space, otherwise on a plain patch.
    const beside = room - redone >= 6.3 * text.length + 2;
    const middle = beside ? from + (redone + room) / 2 : from + room / 2;
    if (redone && !beside) {
      const wide = 6.3 * text.length + 3;
      context.fillStyle = paper(box);
      context.fillRect(middle - wide / 2, y + rowHeight / 2 - 6, wide, 12);
      context.fillStyle = KINDS[box.kind].ink;
    }
    context.fillText(text, middle, y + rowHeight / 2 + 0.5);
  }

  const redraw = () => { if (!queued) { queued = true; requestAnimationFrame(draw); } };

  function show(from, to) {
    const span = Math.min(data.end, Math.max(data.end / 5e4, to - from));
    view.from = Math.max(0, Math.min(from, data.end - span));
    view.to = view.from + span;
    redraw();
  }
  const zoom = (factor, around) => show(around - (around - view.from) / factor, around + (view.to - around) / factor);

  const time = (value) => (value / unit[1]).toFixed(unit[0] === "us" ? 1 : 2) + " " + unit[0];
  function words(box) {
    const isOwn = box.kind === OPTIMIZER;
    const micro = isOwn ? "" : ", micro-batch " + box.micro;
    const where = isOwn ? data.row + " " + box.device : "stage " + box.stage;
    const chunk = data.chunks > 1 && !isOwn ? " (device " + box.device + ", chunk " + box.chunk + ")" : "";
    const lines = [LABELS[box.kind] + micro, where + chunk + ": " + time(box.end - box.start)];
    if (box.again) lines.push("of it recompute " + time(box.again));
    lines.push("from " + time(box.start) + " to " + time(box.end));
    if (KINDS[box.kind]) lines.push(data.stages[box.stage]);
    return lines;
  }

  function boxAt(px, py) {
    const device = Math.floor((py - TOP) / rowHeight), at = timeAt(px), slack = (view.to - view.from) / width;
    if (px < left || px > width - right || device < 0 || device >= K) return null;
    const inRow = (py - TOP) / rowHeight - device, row = rows[device];
    const covers = (box) => box.start - slack <= at && at <= box.end + slack;
    const kind = rowHeight < 11 ? null : inRow < 0.14 ? BACK : inRow > 0.86 ? FORTH : null;
    const send = kind !== null && row.sends.find((box) => box.kind === kind && covers(box));
    if (send) return send;
    const box = row.compute[firstAfter(row.compute, at)];
    return box && box.start <= at ? box : null;
  }

  function hover(event) {
    const box = boxAt(event.offsetX, event.offsetY);
    tip.hidden = !box;
    if (!box) return;
    tip.textContent = words(box).join("\n");
    tip.style.left = Math.max(6, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)) + "px";
    const below = event.clientY + 18;
    tip.style.top = (below + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : below) + "px";
  }

  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    drag = { px: event.clientX, from: view.from, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) { hover(event); return; }
    const shift = (drag.px - event.clientX) / (width - left - right) * (view.to - view.from);
    drag.moved ||= Math.abs(drag.px - event.clientX) > 3;
    show(drag.from + shift, drag.from + shift + view.to - view.from);
    tip.hidden = true;
  });
  canvas.addEventListener("pointerup", (event) => {
    if (drag && !drag.moved) { choose(boxAt(event.offsetX, event.offsetY)); hover(event); }
    drag = null;
  });
  canvas.addEventListener("pointercancel", () => { drag = null; });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("dblclick", (event) => zoom(event.shiftKey ? 1 / 3 : 3, timeAt(event.offsetX)));
  canvas.addEventListener("wheel", (event) => {
    // Without Ctrl, the wheel scrolls the page.
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(Math.exp(-event.deltaY / 300), timeAt(event.offsetX));
  }, { passive: false });

  function choose(box) {
    chosen = box;
    output.textContent = box ? words(box).join(" · ") : "";
    if (box && (box.start < view.from || box.end > view.to)) {
      const half = (view.to - view.from) / 2, middle = (box.start + box.end) / 2;
      show(middle - half, middle + half);
    }
    redraw();
  }

  const middle = () => chosen ? (chosen.start + chosen.end) / 2 : (view.from + view.to) / 2;
  const commands = { in: () => zoom(2, middle()), out: () => zoom(0.5, middle()), all: () => show(0, data.end) };
  live.querySelectorAll("[data-do]").forEach((b) => b.addEventListener("click", commands[b.dataset.do]));

  function walk(key) {
    const device = chosen ? chosen.device : 0, row = rows[device].compute;
    if (!chosen || chosen.kind === FORTH || chosen.kind === BACK) return row[0];
    if (key === "Home") return row[0];
    if (key === "End") return row[row.length - 1];
    const place = row.indexOf(chosen);
    if (key === "ArrowRight") return row[Math.min(place + 1, row.length - 1)];
    if (key === "ArrowLeft") return row[Math.max(place - 1, 0)];
    const other = rows[Math.max(0, Math.min(K - 1, device + (key === "ArrowDown" ? 1 : -1)))].compute;
    return other.find((b) => b.kind === chosen.kind && b.micro === chosen.micro && b.chunk === chosen.chunk) || other[0];
  }
  canvas.addEventListener("keydown", (event) => {
    const keys = { "+": "in", "=": "in", "-": "out", 0: "all" };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (keys[event.key]) commands[keys[event.key]]();
    else if (/^(Arrow(Left|Right|Up|Down)|Home|End)$/.test(event.key)) choose(walk(event.key));
    else if (event.key === "Escape") choose(null);
    else return;
    event.preventDefault();
  });

  // Drawing sets the height, so only a new width needs a redraw.
  new ResizeObserver(() => { if (canvas.clientWidth !== width) redraw(); }).observe(canvas.parentElement);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  return { load };
}
