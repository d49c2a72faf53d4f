// What a stage holds: planner/core/cost/stages.py and parts.py, for one stage at a time.
//
// A chain is the costs of L layers at one micro-batch size: arrays with a number per layer. Stages are layers f … e-1,
// the last of them is l. Levels are counted from the beginning of the chain, as in planner/core/cost/chain_costs.py.

const ITEMS = ["parameters", "gradients", "optimizer", "buffers", "casts", "in_flight", "transfer", "working"];
const FORWARDS = ["forward", "last_forward"];
const BACKWARDS = ["first_backward", "backward", "last_backward"];
const INPUT_BACKWARDS = ["first_input_backward", "input_backward", "last_input_backward"];
const WEIGHT_BACKWARDS = ["first_weight_backward", "weight_backward"];
const WITH_BACKWARDS = [...BACKWARDS, "message", ...INPUT_BACKWARDS];
const WITH_INPUT = ["held", "kept", ...FORWARDS, ...WITH_BACKWARDS];
const RUNNING = [...FORWARDS, ...WITH_BACKWARDS, ...WEIGHT_BACKWARDS, "weight_message"];

// Halves go to the even number, as numpy has it.
const rint = (x) => {
  const whole = Math.round(x);
  return Math.abs(x % 1) === 0.5 && whole % 2 ? whole - 1 : whole;
};

// A record of arrays as the page brings it: a number stands for an array that has it everywhere.
function chainOf(fixed, size, L) {
  const chain = { L, sums: {} };
  for (const [name, values] of [...Object.entries(fixed), ...Object.entries(size)]) {
    const isPerLayer = typeof values === "number" && !["size", "target"].includes(name);
    chain[name] = isPerLayer ? new Array(L).fill(values) : values;
  }
  chain.hasCasts = chain.casts.some((bytes) => bytes > 0);
  return chain;
}

// Sums over the layers in front of each layer, and over all of them.
function before(c, name) {
  if (!c.sums[name]) {
    let sum = 0;
    c.sums[name] = [0, ...c[name].map((value) => (sum += value))];
  }
  return c.sums[name];
}
const sumOf = (c, name, f, e) => before(c, name)[e] - before(c, name)[f];
const behind = (c, name, l) => before(c, name)[c.L] - before(c, name)[l + 1];

function highest(f, e, level) {
  let most = -Infinity;
  for (let n = f; n < e; n++) most = Math.max(most, level(n));
  return most;
}

// ---- what passes by (planner/core/cost/passing.py), and what waits (waiting.py)

// Spans are [first layer, last layer, bytes kept by readers, by the maker, by nobody] of storages that cross them all.
function passingOf(c, f, e) {
  const l = e - 1, isReceived = c.copied_input[f] === 0;
  const spanning = (n, bytesOf) =>
    c.spans.reduce((sum, span) => sum + (span[0] <= f && span[1] >= n ? bytesOf(span) : 0), 0);
  const unkept = (n) => (isReceived ? spanning(n, (span) => span[4]) : 0);
  return {
    unkept,
    all: (n) => (isReceived ? unkept(n) + spanning(n, (span) => span[2] + span[3]) : 0),
    kept: c.spans.reduce((sum, span) => sum + (span[0] > f && span[0] <= l && span[1] >= l ? span[2] : 0), 0),
  };
}

// Gradients that the stage receives and its layers hand on as they are, down to layer n.
const relayed = (c, n, l) =>
  c.relays.reduce((sum, [first, last, bytes]) => sum + (first <= n && last >= l ? bytes : 0), 0);

// Gradients of shared parameters that wait for one another while the backward of layer n runs.
function waiting(c, which, f, n, l) {
  let bytes = 0;
  for (const tie of c.ties) {
    if (tie.first < f || tie.second > l) continue;
    if (which === "first" && n < tie.first) bytes -= rint(tie.gradient_bytes);
    if (which === "later" && n >= tie.first && n < tie.second) bytes += rint(tie.gradient_bytes);
    const isUsedAgain = c.ties.some((other) => other.first === tie.second && other.second <= l);
    const share = Math.min(1, tie.gradient_bytes / Math.max(1, c.gradients[tie.second]));
    if (which === "later" && n === tie.second && !isUsedAgain) bytes += rint(c.staying[n] * share);
  }
  return bytes;
}

function highestBackward(c, f, e, passing, tops, endTwice, which) {
  const l = e - 1;
  const inFront = highest(f, l, (n) => tops[n] - relayed(c, n, l) + (which ? waiting(c, which, f, n, l) : 0));
  const most = Math.max(inFront, tops[l] - endTwice[l] - passing.kept + waiting(c, which, f, l, l)) - passing.all(l);
  return most - before(c, "saved")[f];
}

// ---- stages

// Sums in which parameters that layers of the stage share count once.
function tied(c, name, bytes, f, e) {
  const shared = c.ties.reduce((sum, tie) => sum + (f <= tie.first && e > tie.second ? tie[bytes] : 0), 0);
  return sumOf(c, name, f, e) - shared;
}

function stageOf(c, f, e, M, fixed) {
  const l = e - 1, isLast = e === c.L, passing = passingOf(c, f, e);
  const output = c.output[l], copied = c.copied_input[f], input = f > 0 ? c.input[f] : 0;
  const crossing = isLast ? 0 : output, passed = passing.all(l);
  const saved = sumOf(c, "saved", f, e) + c.unsaved_output[l] - passing.unkept(l) + copied;
  const gradients = tied(c, "gradients", "gradient_bytes", f, e);
  const s = {
    M, saved, gradients, input, output, exact: fixed.exact,
    parameters: tied(c, "parameters", "parameter_bytes", f, e),
    optimizer: tied(c, "optimizer", "optimizer_bytes", f, e),
    optimizerPeak: fixed.peaks_add
      ? sumOf(c, "optimizer_peak", f, e)
      : highest(f, e, (n) => Math.max(c.optimizer_peak[n], n > f ? c.optimizer_boundary_peak[n] : 0)),
    buffers: sumOf(c, "buffers", f, e) + sumOf(c, "attributes", f, e),
    casts: tied(c, "casts", "cast_bytes", f, e),
    rewritten: sumOf(c, "rewritten", f, e),
    renewed: sumOf(c, "renewed", f, e),
    data: M * ((f === 0 ? c.input[0] : 0) + (isLast ? c.target : 0)),
    copied,
    ownOutput: output - passed,
    sentOutput: passed > 0 ? crossing : Math.min(crossing, saved),
    outputGradient: c.has_backward[l] && !isLast ? c.boundary_output_gradient[l] : 0,
    inputGradient: f > 0 && c.has_backward[f - 1] ? c.boundary_input_gradient[f] : 0,
    forwardOnly: !c.has_backward[l],
    message: fixed.bucket_bytes ? Math.min(fixed.bucket_bytes, gradients) : 0,
  };
  s.peaks = (fixed.exact ? exactPeaks : transients)(c, f, e, s, passing, fixed);
  s.halves = halvesOf(c, f, e, s, passing, fixed);
  s.looped = c.programs && {
    straight: highest(f, e, (n) => c.programs.level[n]) - c.programs.carried_before[f],
    narrowed: c.programs.narrowed_before[e] - c.programs.narrowed_before[f]
      + M * (c.programs.narrowed_input_before[e] - c.programs.narrowed_input_before[f]),
    padding: c.programs.padding_before[e] - c.programs.padding_before[f],
    waiting: c.programs.waiting_before[e] - c.programs.waiting_before[f],
  };
  return s;
}

function exactPeaks(c, f, e, s, passing, fixed) {
  const l = e - 1, held = before(c, "saved")[f];
  // What the stage received is counted as that, whichever of its layers it goes into.
  const unkept = (n) => (n === f ? c.unkept_input[f] : passing.unkept(n - 1));
  const alive = (n) => (n === f ? c.input_alive[f] : passing.all(n - 1));
  const top = (tops, endTwice, which) => highestBackward(c, f, e, passing, tops, endTwice, which) + s.output;
  let later = top(c.backward, c.end_twice, "later") - behind(c, "casts", l);
  const first = top(c.first_backward, c.end_twice_first, "first") - behind(c, "gradients", l);
  let again = first;
  if (c.hasCasts) {
    const copies = sumOf(c, "casts", f, e), waits = highest(f, e, (n) => c.cast_peaks[n]);
    const copied = top(c.cast_level, c.end_twice, null) - (c.cast_through[c.L - 1] - c.cast_through[l]);
    again = Math.min(first, Math.max(copied, sumOf(c, "gradients", f, e) + waits / 2 + s.ownOutput));
    later = Math.max(later, copies > 0 ? waits + copies + s.ownOutput : 0);
  }
  return {
    forward: highest(f, e, (n) => c.forward[n] - unkept(n)) - held,
    noGrad: highest(f, e, (n) => c.no_grad[n] - alive(n)),
    first, again, later,
    ...messagePeaks(c, f, l, s, { first, later, held }, fixed),
  };
}

// The levels of the backwards in which gradients go out to other replicas: all of a small stage's together.
function messagePeaks(c, f, l, s, { first, later, held }, fixed) {
  if (!fixed.bucket_bytes || c.hasCasts || s.gradients > fixed.bucket_bytes) {
    return { firstMessage: first, message: later };
  }
  let at = f;
  while (at < c.L - 1 && !(c.gradients[at] > 0)) at++;
  const waits = c.ties.reduce((sum, t) => sum + (at === t.first && l >= t.second ? t.gradient_bytes : 0), 0);
  return {
    firstMessage: Math.min(first, c.first_backward[at] - held - behind(c, "gradients", l) + s.output),
    message: Math.min(later, c.backward[at] - held + s.output + waits),
  };
}

function transients(c, f, e) {
  const all = highest(f, e, (n) => Math.max(c.forward[n], c.backward[n]));
  const forward = c.programs ? highest(f, e, (n) => c.forward[n]) : all;
  const backward = c.programs ? highest(f, e, (n) => c.backward[n]) : all;
  const both = { first: backward, again: backward, later: backward, firstMessage: backward, message: backward };
  return { forward, noGrad: forward, ...both, transient: all };
}

function halvesOf(c, f, e, s, passing, fixed) {
  const l = e - 1, held = fixed.halves_assumed ? s.input + s.saved : sumOf(c, "half_held", f, e);
  if (!fixed.exact) {
    const most = s.peaks.transient;
    return { held, gradients: 0, firstInput: most, input: most, firstWeight: most, weight: most };
  }
  const above = s.output - behind(c, "half_held", l);
  const top = (tops, endTwice) => highestBackward(c, f, e, passing, tops, endTwice, null) + above;
  let firstWeight = highestWeight(c, f, e, c.first_weight, "first") - behind(c, "weight_waiting", l);
  let weight = highestWeight(c, f, e, c.weight, "later") - behind(c, "casts", l);
  firstWeight -= before(c, "half_held")[f];
  weight -= before(c, "half_held")[f];
  if (c.hasCasts) {
    const copies = sumOf(c, "casts", f, e);
    const made = sumOf(c, "weight_gradients", f, e) + highest(f, e, (n) => c.casts[n]);
    firstWeight = Math.max(firstWeight, made);
    weight = Math.max(weight, copies > 0 ? copies + highest(f, e, (n) => c.turning[n]) : 0);
  }
  return {
    held,
    gradients: sumOf(c, "input_gradients", f, e),
    firstInput: top(c.first_input, c.end_first_input) - behind(c, "input_gradients", l),
    input: top(c.later_input, c.end_input),
    firstWeight, weight,
  };
}

function highestWeight(c, f, e, tops, which) {
  const most = highest(f, e, (n) => tops[n] + waiting(c, which, f, n, e - 1));
  return c.ties.some((tie) => tie.first >= f && tie.gradient_bytes > 0) ? Math.max(most, 0) : most;
}

// ---- parts: bytes by item

const running = (inFlight, working, transfer) =>
  (transfer === undefined ? { in_flight: inFlight, working } : { in_flight: inFlight, working, transfer });

const repeated = (names, size) => Object.fromEntries(names.map((name) => [name, size]));

// The parts of a stage. `alone`: it has a device to itself, on which N micro-batches wait or run at most.
function partsOf(s, recompute, alone) {
  const effective = s.forwardOnly || (recompute === "except-last" && s.M === 1) ? "never" : recompute;
  if (alone && s.looped) return compiledParts(s, effective, alone.inFlight);
  const parts = (s.exact ? exactParts : additiveParts)(s, effective);
  // A bound on everything at once: whatever runs, gradients may be on their way.
  if (alone && !s.exact && s.message) Object.assign(parts.sizes, repeated([...FORWARDS, ...BACKWARDS], parts.sizes.message));
  return parts;
}

function exactParts(s, recompute) {
  const { input: I, ownOutput: O, copied: D, rewritten: J, renewed: R, peaks, outputGradient } = s;
  const A = I + s.saved + R, E = I + O + J, isAlways = recompute === "always", redoes = recompute !== "never";
  let held = { in_flight: A }, kept = held;
  let forward = running(I + D, peaks.forward), lastForward = forward;
  let first = makingGradients(s, I + D, peaks.first, s.gradients);
  let backward = running(I + D, peaks.later, outputGradient), lastBackward = backward;
  if (redoes) {
    // A recomputed micro-batch runs forward once more, with the state as it was.
    const again = peaks.forward + J;
    held = { in_flight: E };
    forward = running(I, peaks.noGrad + J + D);
    first = makingGradients(s, I + O, Math.max(again, peaks.again) + R + D, s.gradients);
    backward = running(I + O, Math.max(again, peaks.later) + R + D, outputGradient);
  }
  if (recompute === "except-last") lastForward = running(I, peaks.forward + D);
  else { kept = held; lastForward = forward; lastBackward = backward; }
  const sizes = {
    forward, last_forward: lastForward, first_backward: first, backward, last_backward: lastBackward,
    ...exactHalves(s, recompute),
  };
  if (s.message) sizes.message = messageSize(s, isAlways ? I + O + D : I + D);
  return allParts(s, { held, kept, outputGradient, sizes });
}

function exactHalves(s, recompute) {
  const { input: I, ownOutput: O, copied: D, rewritten: J, halves, outputGradient, peaks } = s;
  let first = makingGradients(s, I + D, halves.firstInput, halves.gradients);
  let each = running(I + D, halves.input, outputGradient), last = each;
  if (recompute !== "never") {
    const again = peaks.forward + J;
    first = makingGradients(s, I + O, Math.max(again, halves.firstInput) + D, halves.gradients);
    each = running(I + O, Math.max(again, halves.input) + D, outputGradient);
    if (recompute === "always") last = each;
  }
  const made = s.gradients - halves.gradients;
  const firstWeight = { gradients: made, working: Math.max(halves.firstWeight - made, 0) };
  const sizes = {
    weight_held: { in_flight: halves.held },
    input_backward_gradients: { gradients: halves.gradients },
    first_input_backward: first, input_backward: each, last_input_backward: last,
    first_weight_backward: firstWeight, weight_backward: { working: halves.weight },
  };
  if (s.message) {
    const lastWeight = s.M === 1 ? firstWeight : sizes.weight_backward;
    sizes.weight_message = { ...lastWeight, transfer: s.message };
  }
  return sizes;
}

function makingGradients(s, held, level, most) {
  const gradients = Math.min(most, level);
  return { ...running(held, level - gradients, s.outputGradient), gradients };
}

function messageSize(s, held) {
  const transfer = s.outputGradient + s.message;
  if (s.M > 1) return running(held, s.peaks.message, transfer);
  return { ...makingGradients(s, held, s.peaks.firstMessage, s.gradients), transfer };
}

function additiveParts(s, recompute) {
  const A = s.input + s.saved, E = s.input + s.output + s.rewritten, keeps = recompute === "never";
  const held = { in_flight: keeps ? A : E }, transfer = s.sentOutput + s.inputGradient, between = s.halves.held;
  const every = running(held.in_flight, s.peaks.transient + s.casts + (keeps ? 0 : s.saved), transfer);
  const weight = running(between, s.halves.weight + s.casts);
  const sizes = {
    ...repeated([...FORWARDS, ...BACKWARDS], every),
    ...repeated(INPUT_BACKWARDS, { ...every, in_flight: Math.max(between, every.in_flight) }),
    ...repeated(WEIGHT_BACKWARDS, weight),
    weight_held: { in_flight: between },
  };
  if (s.message) {
    sizes.message = { ...every, transfer: transfer + s.message };
    sizes.weight_message = { ...weight, transfer: s.message };
  }
  const kept = recompute === "except-last" ? { in_flight: Math.max(A, E) } : held;
  return allParts(s, { held, kept, outputGradient: s.sentOutput, sizes });
}

function compiledParts(s, recompute, inFlight) {
  const A = s.input + s.saved, E = s.input + s.output, keeps = recompute === "never", loops = inFlight > 1;
  const held = { in_flight: keeps ? A : E }, { looped } = s;
  const around = looped.padding + (loops ? looped.narrowed : 0);
  const transfer = s.sentOutput + s.inputGradient + s.message;
  let forward = running(keeps ? s.input : E, looped.straight + around, transfer), backward = forward;
  if (keeps && loops) {
    forward = running(A, s.peaks.forward + looped.padding + s.saved + looped.waiting, s.message);
    backward = running(A, s.peaks.later + around, transfer);
  }
  const kept = recompute === "except-last" ? { in_flight: Math.max(A, E) } : held;
  const sizes = { ...repeated(FORWARDS, forward), ...repeated(BACKWARDS, backward) };
  return allParts(s, { held, kept, outputGradient: s.sentOutput, sizes });
}

function allParts(s, { held, kept, outputGradient, sizes }) {
  const always = { parameters: s.parameters, optimizer: s.optimizer, buffers: s.buffers, in_flight: s.data };
  const shared = {
    casts: { casts: s.casts }, held, kept, input: { in_flight: s.input },
    output_gradient: { transfer: outputGradient }, input_gradient: { transfer: s.inputGradient },
    optimizer_step: { working: s.optimizerPeak },
  };
  // Only exact records tell when gradients appear.
  if (s.exact) shared.gradients = { gradients: s.gradients };
  else always.gradients = s.gradients;
  return { always, sizes: { ...sizes, ...shared } };
}
