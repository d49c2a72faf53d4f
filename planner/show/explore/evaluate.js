// A question with an answer judged by the cost model: planner/core/cost/evaluate.py, with the clocks of simulate.py
// and the recomputation that planner/core/judge/recut.py chooses, so that all figures are those of `gpipe-plan check`.

const RECOMPUTE = ["never", "except-last", "always"];

// ---- how long stages are busy (planner/core/cost/stage_time.py)

const transferUs = ([latencyUs, bytesPerS], bytes) => latencyUs + (bytesPerS ? (bytes / bytesPerS) * 1e6 : 0);

// The link between the devices of a stage and the next one; within a device nothing costs.
function linkBetween(data, device, neighbour) {
  if (device === neighbour) return [0, 0, false];
  return data.links[device === neighbour + 1 ? neighbour : device];
}

function stageTimes(data, chain, program, cuts, recompute, splits) {
  return program.device.map((device, k) => {
    const f = cuts[k], e = cuts[k + 1], speed = data.speeds[device], overhead = data.overhead_us;
    const forward = sumOf(chain, "forward_us", f, e) / speed, backward = sumOf(chain, "backward_us", f, e) / speed;
    const again = recompute[k] !== "never" && chain.has_backward[e - 1] ? forward : 0;
    const lastAgain = recompute[k] === "except-last" ? 0 : again;
    const crosses = e < chain.L, link = crosses ? linkBetween(data, device, program.device[k + 1]) : [0, 0, false];
    const inputUs = splits ? sumOf(chain, "input_us", f, e) / speed + overhead : 0;
    return {
      F: forward + overhead, B: backward + again + overhead, lastB: backward + lastAgain + overhead,
      I: splits ? inputUs + again : 0, lastI: splits ? inputUs + lastAgain : 0,
      W: splits ? sumOf(chain, "weight_us", f, e) / speed + overhead : 0,
      again, lastAgain,
      send: crosses ? transferUs(link, chain.output[e - 1]) : 0, blocking: crosses && link[2],
    };
  });
}

// What follows a device's last backward: gradients summed over the replicas, then its optimizer's steps. Where backwards
// come in halves, a chunk that is done early has its gradients summed meanwhile.
function updatesUs(data, chain, program, cuts, { ends, splits }) {
  const own = new Array(program.K).fill(0), sums = sumsUs(data, chain, program, cuts);
  program.device.forEach((device, k) => {
    own[device] += sumOf(chain, "optimizer_us", cuts[k], cuts[k + 1]) / data.speeds[device] + sums[k];
  });
  if (!splits || data.replicas === 1) return own;
  const early = summedEarlyUs(program, ends, sums);
  return own.map((us, k) => us - early[k]);
}

// What replicas sum of each stage, in the order of the chain.
function sumsUs(data, chain, program, cuts) {
  return program.device.map((_, k) => {
    const bytes = tied(chain, "gradients", "gradient_bytes", cuts[k], cuts[k + 1]);
    if (!data.allreduce || data.replicas === 1 || bytes <= 0) return 0;
    return 2 * (data.replicas - 1) * transferUs(data.allreduce, bytes / data.replicas);
  });
}

// What of that is done when a device's last action ends: one stage after the other, each from its own last action on.
function summedEarlyUs({ K, S, order, device }, ends, sums) {
  const last = new Float64Array(S), early = new Array(K).fill(0);
  order.forEach((action, n) => { last[(action % (4 * S)) >> 2] = ends[n]; });
  for (let k = 0; k < K; k++) {
    const stages = sums.map((_, s) => s).filter((s) => device[s] === k).sort((a, b) => last[a] - last[b]);
    let left = 0, before = last[stages[0]];
    for (const s of stages) {
      left = Math.max(left - (last[s] - before), 0) + sums[s];
      [before, early[k]] = [last[s], early[k] + sums[s]];
    }
    early[k] -= left;
  }
  return early;
}

function optimizerTailUs(own, times) {
  let tail = 0;
  for (let k = own.length - 1; k >= 0; k--) {
    const hidden = times[k].F + times[k].lastB - times[k].lastAgain + 2 * times[k].send;
    tail = Math.max(own[k], tail - hidden);
  }
  return tail;
}

// ---- clocks

// When every action of the program begins and ends, and every transfer; when every device does.
function clocks(program, kinds, times) {
  const { K, M, S, order, device, heard, told } = program;
  const free = new Float64Array(K), begins = new Array(K).fill(null), links = new Map();
  const arrived = new Float64Array(2 * S * M), start = new Float64Array(order.length), end = new Float64Array(order.length);
  const sent = new Float64Array(order.length).fill(-1);
  const takesTime = times.slice(0, -1).some((stage) => stage.send !== 0);
  const other = (stage, neighbour) => (neighbour < 0 || device[neighbour] === device[stage] ? -1 : neighbour);
  order.forEach((action, n) => {
    const at = action % (4 * S), stage = at >> 2, micro = Math.floor(action / (4 * S)), kind = kinds[at & 3];
    const k = device[stage], source = other(stage, heard[at]), target = other(stage, told[at]);
    let from = free[k];
    if (source >= 0) {
      const over = times[Math.min(stage, source)];
      from = Math.max(from, arrived[(kind.flow * S + source) * M + micro]);
      if (over.blocking) from += over.send;
    }
    begins[k] ??= from;
    const { letter } = kind, isLast = micro === M - 1 && (letter === "B" || letter === "I");
    start[n] = from;
    end[n] = free[k] = from + times[stage][isLast ? "last" + letter : letter];
    if (target < 0) return;
    let arrival = end[n];
    const over = times[Math.min(stage, target)];
    if (takesTime && !over.blocking) {
      const link = k * K + device[target];
      sent[n] = Math.max(end[n], links.get(link) ?? 0);
      links.set(link, (arrival = sent[n] + over.send));
      if (over.send === 0) sent[n] = -1;
    }
    arrived[(kind.flow * S + stage) * M + micro] = arrival;
  });
  return { start, end, sent, begins: begins.map((time) => time ?? 0), ends: free };
}

function stepUs({ begins, ends }, own, times, splits) {
  if (splits) return Math.max(...own.map((us, k) => ends[k] - begins[k] + us));
  return Math.max(...ends) + optimizerTailUs(own, times);
}

// ---- memory of a device (planner/core/cost/memory.py, device_memory.py)

// What the stages of a device share: parameters with what comes with them, and what one hands to the next in place.
function sharedBytes(data, chain, program, cuts) {
  const { device, S } = program;
  const shared = device.map(() => ({ parameters: 0, gradients: 0, optimizer: 0, casts: 0, received: 0 }));
  const stageOfLayer = (layer) => { let k = 0; while (cuts[k + 1] <= layer) k++; return k; };
  for (const tie of chain.ties) {
    if (!tie.these_alone) continue;
    const second = stageOfLayer(tie.second);
    // The nearest on the same device; in one stage it is counted.
    const layer = [tie.first, ...tie.earlier.slice().reverse()].find((n) => device[stageOfLayer(n)] === device[second]);
    if (layer === undefined || stageOfLayer(layer) === second) continue;
    const there = shared[stageOfLayer(layer)];
    there.parameters += rint(tie.parameter_bytes);
    there.gradients += rint(tie.gradient_bytes);
    there.optimizer += rint(tie.optimizer_bytes);
    there.casts += rint(tie.cast_bytes);
  }
  for (let k = 1; k < S; k++) if (device[k] === device[k - 1]) shared[k].received = rint(chain.input[cuts[k]]);
  return shared;
}

// A chunk in whole bytes: what is always there by item, and every part.
function chunkMemory(stage, recompute, shared) {
  const { always, sizes } = partsOf(stage, recompute, null), isExact = stage.exact;
  const items = Object.fromEntries(Object.entries(always).map(([name, bytes]) => [name, rint(bytes)]));
  items.parameters -= shared.parameters;
  items.optimizer -= shared.optimizer;
  if (!isExact) items.gradients -= shared.gradients;
  const bytes = PARTS.map((name) => (sizes[name] ? rint(total(sizes[name])) : 0));
  bytes[PLACE.casts] -= shared.casts;
  if (isExact) {
    bytes[PLACE.gradients] -= shared.gradients;
    for (const name of WITH_INPUT) bytes[PLACE[name]] = Math.max(bytes[PLACE[name]] - shared.received, 0);
  }
  return { always: items, bytes };
}

const total = (items) => Object.values(items).reduce((sum, bytes) => sum + bytes, 0);

// Bytes by item at the highest of a device's moments: each chunk's parts in whole bytes, as a plan shows them.
function peakOfChunks(chunks, moments) {
  const at = (moment) => moment.reduce((sum, present, v) => {
    for (let n = 0; n < present.length; n += 2) sum += present[n + 1] * chunks[v].bytes[present[n]];
    return sum;
  }, 0);
  const peak = moments.reduce((best, moment) => (at(moment) > at(best) ? moment : best));
  const items = Object.fromEntries(ITEMS.map((name) => [name, 0]));
  peak.forEach((present, v) => addItems(items, chunks[v], present));
  return items;
}

function addItems(items, { always, bytes }, present) {
  const there = Object.fromEntries(PARTS.map((name) => [name, 0]));
  for (let n = 0; n < present.length; n += 2) there[PARTS[present[n]]] = present[n + 1] * bytes[present[n]];
  const sum = (names) => names.reduce((bytesOf, name) => bytesOf + there[name], 0);
  const runs = sum(RUNNING), isBackward = WITH_BACKWARDS.some((name) => present.some((p, n) => !(n & 1) && PARTS[p] === name));
  // Of the micro-batch that runs, what it would hold if it waited counts as in flight.
  const waits = Math.min(bytes[PLACE.held], runs);
  const received = isBackward ? Math.min(bytes[PLACE.output_gradient], runs - waits) : 0;
  for (const [name, size] of Object.entries(always)) items[name] += size;
  items.gradients += there.gradients + there.input_backward_gradients;
  items.casts += there.casts;
  items.in_flight += sum(["held", "kept", "weight_held", "input"]) + waits;
  items.transfer += there.output_gradient + there.input_gradient + received;
  items.working += runs - waits - received + there.optimizer_step;
}

// The same of a stage with a device to itself, whose items are rounded at every moment.
function peakOfStage(stage, recompute, moments, alone) {
  const { always, sizes } = partsOf(stage, recompute, alone);
  const parts = PARTS.map((name) => Object.entries(sizes[name] || {}));
  let best = null, most = -1;
  for (const [present] of moments) {
    const items = Object.fromEntries(ITEMS.map((name) => [name, always[name] || 0]));
    for (let n = 0; n < present.length; n += 2) {
      for (const [item, bytes] of parts[present[n]]) items[item] += present[n + 1] * bytes;
    }
    for (const item of ITEMS) items[item] = rint(items[item]);
    if (total(items) > most) [best, most] = [items, total(items)];
  }
  return best;
}

// ---- all of it

// What was worked out for other edits of the same page: chains by M, programs by schedule, chunks and M.
const explorer = (data) => ({ data, chains: {}, programs: {} });

function chainAt(memo, M) {
  const { data } = memo;
  return (memo.chains[M] ??= chainOf(data.fixed, data.sizes[M], data.names.length));
}

function programAt(memo, { schedule, chunks, micro_batches: M }) {
  const { data } = memo, key = `${schedule}/${chunks}/${M}`;
  if (!memo.programs[key]) {
    const { placement, lists } = data.schedules[schedule];
    const program = programOf(data.kinds, lists[chunks][M], { K: data.devices, V: chunks, M, placement });
    program.moments = Array.from({ length: data.devices }, (_, k) => momentsOf(program, k, data.kinds));
    program.inFlight = program.rows.map((_, k) => inFlight(program, k, data.kinds));
    memo.programs[key] = program;
  }
  return memo.programs[key];
}

// Per device its bytes by item; `recompute` is a choice for each stage.
function memoryOf(memo, state, stages, shared, recompute) {
  const { data } = memo, program = programAt(memo, state), { K, V, placement } = program;
  const isAlone = data.schedules[state.schedule].knows_moments;
  return Array.from({ length: K }, (_, k) => {
    const moments = program.moments[k];
    const items = isAlone
      ? peakOfStage(stages[k], recompute[k], moments, { inFlight: program.inFlight[k] })
      : peakOfChunks(chunksOf(k, K, V, placement).map((s) => chunkMemory(stages[s], recompute[s], shared[s])), moments);
    return { ...items, reserve: data.reserve_bytes };
  });
}

// Of the choices that are allowed, each device takes the fastest that fits, or the one that needs least.
function fitted(memo, state, stages, shared) {
  const program = programAt(memo, state);
  if (Array.isArray(state.recompute)) return { recompute: state.recompute, memory: null };
  const allowed = RECOMPUTE.filter((choice) => state.recompute === choice || state.recompute === "auto");
  const needs = allowed.map((choice) => memoryOf(memo, state, stages, shared, stages.map(() => choice)));
  const chosen = state.caps.map((cap, k) => {
    const bytes = needs.map((memory) => total(memory[k]));
    const fits = bytes.findIndex((need) => need <= cap);
    return fits >= 0 ? fits : bytes.indexOf(Math.min(...bytes));
  });
  return { recompute: program.device.map((k) => allowed[chosen[k]]), memory: chosen.map((choice, k) => needs[choice][k]) };
}

// A state is { schedule, chunks, micro_batches, balance, recompute, caps }: the schedule by its place in the data,
// recomputation as a policy or stage by stage, caps of the pipeline's devices in bytes.
function evaluate(memo, state) {
  const { data } = memo, M = state.micro_batches, chain = chainAt(memo, M), program = programAt(memo, state);
  const splits = data.schedules[state.schedule].splits, cuts = [0];
  for (const layers of state.balance) cuts.push(cuts[cuts.length - 1] + layers);
  const stages = state.balance.map((_, k) => stageOf(chain, cuts[k], cuts[k + 1], M, data.traits));
  const shared = sharedBytes(data, chain, program, cuts);
  const { recompute, memory } = fitted(memo, state, stages, shared);
  const times = stageTimes(data, chain, program, cuts, recompute, splits);
  const time = clocks(program, data.kinds, times), own = updatesUs(data, chain, program, cuts, { ends: time.end, splits });
  const step = stepUs(time, own, times, splits);
  // Without the optimizers' steps.
  const pipeline = splits ? Math.max(...Array.from(time.ends, (us, k) => us - time.begins[k])) : Math.max(...time.ends);
  const busy = busyUs(program, data.kinds, times, splits);
  return {
    step_us: step,
    samples_per_s: step ? ((M * chain.size * data.replicas) / step) * 1e6 : 0,
    bubble: pipeline ? 1 - busy.all / (data.devices * pipeline) : 0,
    recompute_share: busy.all ? busy.again / busy.all : 0,
    recompute, times, own, cuts,
    backward_us: times.map((stage) => (splits ? stage.I + stage.W : stage.B)),
    memory: memory || memoryOf(memo, state, stages, shared, recompute),
    program, clocks: time,
  };
}

// How long all stages compute in a step, and how much of that is computing activations again.
function busyUs({ M, S, rows }, kinds, times, splits) {
  const counts = times.map(() => ({ F: 0, B: 0, I: 0, W: 0 }));
  for (const row of rows) for (const action of row) counts[(action % (4 * S)) >> 2][kinds[action & 3].letter]++;
  let all = 0, again = 0;
  times.forEach((stage, k) => {
    again += (M - 1) * stage.again + stage.lastAgain;
    const spared = stage.again - stage.lastAgain;
    all += splits
      ? M * stage.F + counts[k].I * (stage.I + stage.W) + counts[k].B * stage.B - spared
      : M * (stage.F + stage.B) - stage.B + stage.lastB;
  });
  return { all, again };
}
