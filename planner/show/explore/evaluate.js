// Figures of a state: sums and maxima of numbers from the page's tables.

const total = (items) => Object.values(items).reduce((sum, bytes) => sum + bytes, 0);
// Round halves to even numbers, as Python does.
const rint = (value) => { const near = Math.round(value); return near - (near - value === 0.5 && near % 2 !== 0); };
const sumOf = (numbers) => numbers.reduce((sum, number) => sum + number, 0);

// ---- times

// Return the times of all stages. Actions have two numbers at 2 * (4 * stage + kind): for other micro-batches, then for the last.
function stageTimes(memo, { layout, M }, cuts, recompute) {
  const { data } = memo, size = data.sizes[M], choices = recompute.map((choice) => data.recomputes.indexOf(choice));
  const cells = layout.devices.map((_, k) => cellOf(memo, layout, k, cuts[k], cuts[k + 1]));
  const ofStages = (column) => cells.map((cell) => numberAt(data.times, column, cell));
  const ofActions = (columns) =>
    Float64Array.from(cells.flatMap((cell, k) => columns[choices[k]].map((column) => numberAt(data.times, column, cell))));
  const crossings = layout.links.map((link, k) => (link < 0 ? NOTHING : crossingOf(memo, layout, k, cuts[k + 1])));
  const ofCrossings = (column) =>
    crossings.map((row) => (row === NOTHING ? 0 : numberAt(data.sends, column, row)));
  return {
    durations: ofActions(size.durations), again: ofActions(size.again),
    optimizer: ofStages(size.optimizer), summed: ofStages(size.summed),
    hides: ofStages(size.hides), send: [...ofCrossings(size.send), 0], sendHides: [...ofCrossings(size.send_hides), 0],
    blocking: layout.links.map((link) => link >= 0 && data.blocking[link]),
  };
}

// Return when actions begin and end. An action begins when its device is free and its input has arrived.
function clocks({ rows, layout, M, K, S }, times) {
  const length = sumOf(rows.map(({ at }) => at.length)), { needs, makes, received, sent, devices } = layout;
  const time = {
    at: new Int32Array(length), micro: new Int32Array(length), begins: new Array(K).fill(0), ends: new Array(K).fill(0),
    start: new Float64Array(length), end: new Float64Array(length), sent: new Float64Array(length).fill(-1),
    stageEnds: new Float64Array(S),
  };
  const arrived = new Float64Array(2 * S * M).fill(-1), links = new Map(), next = new Array(K).fill(0);
  let n = 0;
  const run = (k, at, micro) => {
    const over = received[at], [stage, place] = [at >> 2, 2 * at + (micro === M - 1)];
    let start = time.ends[k];
    if (over >= 0) start = Math.max(start, arrived[needs[at] * M + micro]);
    if (next[k] === 0) time.begins[k] = start;
    if (over >= 0 && times.blocking[over]) start += times.send[over];
    const end = start + times.durations[place], across = sent[at];
    time.ends[k] = time.stageEnds[stage] = end;
    let arrival = end;
    if (across >= 0 && !times.blocking[across]) {
      const link = k * K + devices[across === stage ? stage + 1 : across], begin = Math.max(end, links.get(link) ?? 0);
      links.set(link, (arrival = begin + times.send[across]));
      if (times.send[across] > 0) time.sent[n] = begin;
    }
    if (makes[at] >= 0) arrived[makes[at] * M + micro] = arrival;
    [time.at[n], time.micro[n], time.start[n], time.end[n]] = [at, micro, start, end];
    n++;
  };
  while (n < length) {
    const before = n;
    rows.forEach(({ at, micros }, k) => {
      for (; next[k] < at.length; next[k]++) {
        const place = at[next[k]], micro = micros[next[k]];
        if (needs[place] >= 0 && arrived[needs[place] * M + micro] < 0) break;
        run(k, place, micro);
      }
    });
    if (n === before) throw new Error("the devices wait for each other");
  }
  return time;
}

// Return the time after each device's last action: all-reduce over replicas, stage by stage, and optimizer step.
function updatesUs({ stages }, times, time, { splits }) {
  return stages.map((own, k) => {
    const inTurn = splits ? [...own].sort((a, b) => time.stageEnds[a] - time.stageEnds[b]) : own;
    const done = inTurn.reduce((us, s) => Math.max(us, splits ? time.stageEnds[s] : time.ends[k]) + times.summed[s], 0);
    return done - time.ends[k] + sumOf(own.map((s) => times.optimizer[s]));
  });
}

function stepUs(time, own, times, { splits }) {
  if (splits) return Math.max(...own.map((us, k) => time.ends[k] - time.begins[k] + us));
  const tail = own.reduceRight((us, ownUs, k) => Math.max(ownUs, us - times.hides[k] - times.sendHides[k]), 0);
  return Math.max(...time.ends) + tail;
}

// ---- memory

// Return the memory of a stage by allocation and component; the first row is memory that exists during the whole step.
function stageBytes(memo, columns, cell) {
  const { data } = memo, I = data.items.length, bytes = new Float64Array((data.num_allocations + 1) * I);
  for (let n = 0; n < columns.length; n += 3) {
    bytes[(columns[n] + 1) * I + columns[n + 1]] = numberAt(data.bytes, columns[n + 2], cell);
  }
  return bytes;
}

// Count parameters that stages of one device share only once: subtract them from one of these stages.
function takeShared({ data }, { layout }, cuts, stages) {
  const stageOf = (layer) => cuts.findIndex((cut) => cut > layer) - 1, I = data.items.length;
  for (const [second, layers, sizes] of data.ties) {
    const later = stageOf(second), device = layout.devices[later];
    const earlier = layers.map(stageOf).find((stage) => layout.devices[stage] === device);
    if (earlier === undefined || earlier === later) continue;
    for (let n = 0; n < sizes.length; n += 3) stages[earlier][(sizes[n] + 1) * I + sizes[n + 1]] -= sizes[n + 2];
  }
}

// Return the memory of a device by component, at its first peak. Each action changes the counts of the allocations.
function peakOf({ data }, { steps }, chunks) {
  const P = data.num_allocations, I = data.items.length, counts = new Int32Array(chunks.length * P);
  const sizes = Float64Array.from(counts, (_, place) => {
    const begin = ((place % P) + 1) * I;
    return sumOf(chunks[Math.floor(place / P)].subarray(begin, begin + I));
  });
  let there = 0, most = -1, peak = [0, 0];
  steps.forEach((step, n) => {
    const [, before, running, after] = data.steps[step];
    for (let c = 0; c < before.length; c += 2) there += before[c + 1] * sizes[before[c]];
    for (const place of running) {
      if (there + sizes[place] > most) [most, peak] = [there + sizes[place], [n, place]];
    }
    for (let c = 0; c < after.length; c += 2) there += after[c + 1] * sizes[after[c]];
  });
  const add = (changes) => { for (let c = 0; c < changes.length; c += 2) counts[changes[c]] += changes[c + 1]; };
  for (let n = 0; n <= peak[0]; n++) {
    add(data.steps[steps[n]][1]);
    if (n < peak[0]) add(data.steps[steps[n]][3]);
  }
  counts[peak[1]]++;
  const items = data.items.map((name, i) => {
    const always = sumOf(chunks.map((bytes) => bytes[i]));
    return [name, rint(counts.reduce(
      (sum, count, place) => sum + count * chunks[Math.floor(place / P)][((place % P) + 1) * I + i], always))];
  });
  return { ...Object.fromEntries(items), reserve: data.reserve_bytes };
}

// Return the memory of each device by component; `recompute` has a choice for each stage.
function memoryOf(memo, orders, cuts, recompute) {
  const { data } = memo, { rows, stages, layout, ways, M } = orders, { bytes } = data.sizes[M];
  const ofStages = layout.devices.map((_, k) =>
    stageBytes(memo, bytes[ways[k]][data.recomputes.indexOf(recompute[k])], cellOf(memo, layout, k, cuts[k], cuts[k + 1])));
  takeShared(memo, orders, cuts, ofStages);
  return rows.map((row, k) => peakOf(memo, row, stages[k].map((stage) => ofStages[stage])));
}

// ---- figures

// Choose for each device the fastest allowed recomputation that fits, or the one that needs least memory.
function fitted(memo, orders, cuts, state) {
  if (Array.isArray(state.recompute)) return { recompute: state.recompute, memory: memoryOf(memo, orders, cuts, state.recompute) };
  const allowed = memo.data.recomputes.filter((choice) => state.recompute === choice || state.recompute === "auto");
  const needs = allowed.map((choice) => memoryOf(memo, orders, cuts, orders.layout.devices.map(() => choice)));
  const chosen = state.caps.map((cap, k) => {
    const bytes = needs.map((memory) => total(memory[k])), fits = bytes.findIndex((need) => need <= cap);
    return fits >= 0 ? fits : bytes.indexOf(Math.min(...bytes));
  });
  const recompute = orders.layout.devices.map((k) => allowed[chosen[k]]);
  return { recompute, memory: chosen.map((choice, k) => needs[choice][k]) };
}

// Evaluate a state { schedule, chunks, micro_batches, balance, recompute, caps }: the schedule as an index into the data,
// recomputation as a policy or a choice per stage, and memory limits (caps) of the pipeline's devices in bytes.
function evaluate(memo, state) {
  const { data } = memo, schedule = data.schedules[state.schedule], orders = ordersOf(memo, state);
  const cuts = cutsOf(state.balance), { recompute, memory } = fitted(memo, orders, cuts, state);
  const times = stageTimes(memo, orders, cuts, recompute), time = clocks(orders, times);
  const own = updatesUs(orders, times, time, schedule), step = stepUs(time, own, times, schedule);
  // Time of the pipeline without optimizer steps.
  const pipeline = Math.max(...time.ends.map((us, k) => us - (schedule.splits ? time.begins[k] : 0)));
  let busy = 0, again = 0;
  for (let n = 0; n < time.at.length; n++) {
    busy += time.end[n] - time.start[n];
    again += times.again[2 * time.at[n] + (time.micro[n] === orders.M - 1)];
  }
  const ofKinds = (kinds) => orders.layout.devices.map((_, k) => sumOf(kinds.map((kind) => times.durations[2 * (4 * k + kind)])));
  return {
    step_us: step, samples_per_s: step ? (data.batch / step) * 1e6 : 0,
    bubble: pipeline ? 1 - busy / (data.devices * pipeline) : 0, recompute_share: busy ? again / busy : 0,
    recompute, cuts, own, times, time, orders, memory,
    forward_us: ofKinds(schedule.forward), backward_us: ofKinds(schedule.backward),
  };
}
