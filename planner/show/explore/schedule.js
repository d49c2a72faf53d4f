"use strict";
// What a schedule makes devices do, from the lists of actions that the page brings along: the same as
// planner/core/schedule/program.py (order, transfers) and planner/core/cost/moments.py (what is there meanwhile).
//
// An action is a whole number, (micro-batch * S + stage) * 4 + kind, with S stages; a kind is its place in `kinds`.

const PARTS = [
  "gradients", "input_backward_gradients", "casts", "held", "kept", "weight_held",
  "input", "output_gradient", "input_gradient",
  "forward", "last_forward", "first_backward", "backward", "last_backward",
  "first_input_backward", "input_backward", "last_input_backward",
  "first_weight_backward", "weight_backward", "message", "weight_message", "optimizer_step",
];
const PLACE = Object.fromEntries(PARTS.map((name, place) => [name, place]));
const RUN = 0, SEND = 1, RECEIVE = 2;

const deviceOf = (stage, K, placement) => {
  const chunk = Math.floor(stage / K), place = stage % K;
  return placement === "v" && chunk % 2 ? K - 1 - place : place;
};

const chunksOf = (device, K, V, placement) =>
  Array.from({ length: V }, (_, v) => v * K + (placement === "v" && v % 2 ? K - 1 - device : device));

// A list is a text with a letter per action, which says chunk and kind: every kind of a chunk goes through the
// micro-batches in order. Where a schedule does not, it is an array with the actions themselves.
function actionsOf(lists, K, V, placement) {
  const S = K * V;
  return lists.map((list, device) => {
    if (typeof list !== "string") return list;
    const stages = chunksOf(device, K, V, placement), next = new Int32Array(4 * V);
    return Array.from(list, (letter) => {
      const code = letter.charCodeAt(0) - 65;
      return (next[code]++ * S + stages[code >> 2]) * 4 + (code & 3);
    });
  });
}

// Which stage an action of each kind hears from and tells, whatever device that is on; -1 at the ends of the chain.
function neighbours(kinds, S) {
  const heard = [], told = [];
  const inside = (other, stage) => (other !== stage && other >= 0 && other < S ? other : -1);
  for (let stage = 0; stage < S; stage++) {
    kinds.forEach(({ direction }, kind) => {
      heard[stage * 4 + kind] = inside(stage - direction, stage);
      told[stage * 4 + kind] = inside(stage + direction, stage);
    });
  }
  return { heard, told };
}

// All actions in an order in which each comes after what it waits for, and per device its instructions.
function programOf(kinds, lists, { K, V, M, placement }) {
  const S = K * V, rows = actionsOf(lists, K, V, placement), { heard, told } = neighbours(kinds, S);
  const device = Array.from({ length: S }, (_, stage) => deviceOf(stage, K, placement));
  const over = new Uint8Array(2 * S * M), position = new Int32Array(K);
  const order = [], instructions = rows.map(() => []);
  // What must be over before an action: a message, or what the kind follows on the same stage.
  const isReady = (action) => {
    const at = action % (4 * S), micro = Math.floor(action / (4 * S)), kind = kinds[at & 3];
    if (heard[at] >= 0 && kind.flow >= 0) return over[(kind.flow * S + heard[at]) * M + micro];
    return kind.follows < 0 || over[(kind.follows * S + (at >> 2)) * M + micro];
  };
  const left = rows.reduce((sum, row) => sum + row.length, 0);
  while (order.length < left) {
    const turn = [];
    rows.forEach((row, k) => {
      if (position[k] < row.length && isReady(row[position[k]])) turn.push(row[position[k]++]);
    });
    if (!turn.length) throw new Error("the devices wait for each other");
    for (const action of turn) {
      const at = action % (4 * S), micro = Math.floor(action / (4 * S)), stage = at >> 2, { flow } = kinds[at & 3];
      order.push(action);
      instructions[device[stage]].push(RUN, action);
      if (flow < 0) continue;
      over[(flow * S + stage) * M + micro] = 1;
      const target = told[at];
      if (target < 0 || device[target] === device[stage]) continue;
      instructions[device[stage]].push(SEND, (micro * S + stage) * 4 + flow);
      instructions[device[target]].push(RECEIVE, (micro * S + target) * 4 + flow);
    }
  }
  return { K, V, M, S, placement, rows, order, instructions, device, heard, told };
}

// ---- how many of every part there are, while each action runs

// The moments that can be a device's peak: for each of its chunks, [part, count, part, count, …] of what is there.
// Those are left out in which others have as much of everything; such others run the same.
function momentsOf(program, device, kinds) {
  const { V, M, S } = program, P = PARTS.length, last = M - 1;
  const stages = chunksOf(device, program.K, V, program.placement);
  const now = new Uint16Array(V * P), backwardsLeft = new Int32Array(V).fill(M), highest = new Map();
  const letter = (action) => kinds[action & 3].letter;
  stages.forEach((stage, v) => {
    const ways = new Set(program.rows[device].filter((a) => (a % (4 * S)) >> 2 === stage).map(letter));
    now[v * P + PLACE.casts] = Math.max(1, ways.has("B") + ways.has("I"));
  });
  const hasAll = (one, other) => {
    for (let n = 0; n < one.length; n++) if (one[n] < other[n]) return false;
    return true;
  };
  const note = (base, running) => {
    const place = base + PLACE[running], alike = highest.get(place) || [];
    now[place] = 1;
    if (!alike.some((other) => hasAll(other, now))) {
      highest.set(place, [...alike.filter((other) => !hasAll(now, other)), now.slice()]);
    }
    now[place] = 0;
  };
  const instructions = program.instructions[device];
  for (let n = 0; n < instructions.length; n += 2) {
    const action = instructions[n + 1], v = Math.floor(((action % (4 * S)) >> 2) / program.K), base = v * P;
    const kind = letter(action), isLast = Math.floor(action / (4 * S)) === last;
    if (instructions[n] === RUN) {
      const running = begin(now, base, kind, isLast);
      note(base, running);
      if (kind === "B" || kind === "W") {
        // Gradients go out to other replicas when the last of a stage are made.
        if (!--backwardsLeft[v]) note(base, kind === "B" ? "message" : "weight_message");
      }
      end(now, base, kind, isLast);
    } else if (instructions[n] === SEND) {
      if (kind !== "B") continue;
      for (let w = 0; w < V; w++) now[w * P + PLACE.input_gradient] = 0;
      now[base + PLACE.input_gradient] = 1;
    } else now[base + PLACE[kind === "F" ? "input" : "output_gradient"]]++;
  }
  for (let v = 0; v < V; v++) {
    now.fill(0);
    for (let w = 0; w < V; w++) now[w * P + PLACE.gradients] = 1;
    note(v * P, "optimizer_step");
  }
  const every = [...highest.values()].flat();
  return every.map((counts) => stages.map((_, v) => present(counts.subarray(v * P, (v + 1) * P))));
}

const present = (counts) => Array.from(counts).flatMap((count, part) => (count ? [part, count] : []));

// Takes away what the micro-batch brings along; the part that is there while it runs.
function begin(now, base, kind, isLast) {
  const takeOne = (name) => { if (now[base + PLACE[name]]) now[base + PLACE[name]]--; };
  const has = (name) => now[base + PLACE[name]] > 0;
  if (kind === "F") {
    takeOne("input");
    return isLast ? "last_forward" : "forward";
  }
  if (kind === "W") {
    takeOne("weight_held");
    return has("gradients") ? "weight_backward" : "first_weight_backward";
  }
  takeOne("output_gradient");
  takeOne(isLast ? "kept" : "held");
  if (kind === "B") {
    if (!has("gradients")) {
      now[base + PLACE.input_backward_gradients] = 0;
      return "first_backward";
    }
    return isLast ? "last_backward" : "backward";
  }
  if (!has("gradients") && !has("input_backward_gradients")) return "first_input_backward";
  return isLast ? "last_input_backward" : "input_backward";
}

function end(now, base, kind, isLast) {
  if (kind === "F") now[base + PLACE[isLast ? "kept" : "held"]]++;
  else if (kind === "I") {
    now[base + PLACE.weight_held]++;
    now[base + PLACE.input_backward_gradients] = 1 - now[base + PLACE.gradients];
  } else {
    now[base + PLACE.gradients] = 1;
    now[base + PLACE.input_backward_gradients] = 0;
  }
}

// Most micro-batches that wait on a device for their backward, or run.
function inFlight(program, device, kinds) {
  let waiting = 0, most = 0;
  for (const action of program.rows[device]) most = Math.max(most, waiting += kinds[action & 3].direction);
  return most;
}
