"use strict";
// The tables that the page brings along: planner/show/explore/data.py wrote every number of them.

// Every row of runs: all but the last number, and the rows that the last one counts through.
function rowsOf(runs, width) {
  const rows = new Map();
  for (let n = 0; n < runs.length; n += width + 1) {
    const group = runs.slice(n, n + width - 1).join();
    for (let last = runs[n + width - 1]; last <= runs[n + width]; last++) rows.set(`${group},${last}`, rows.size);
  }
  return rows;
}

const NOTHING = -1;
const numberAt = ({ rows, columns }, column, row) => (column === NOTHING ? 0 : columns[column][rows ? rows[row] : row]);

const explorer = (data) => ({ data, cells: rowsOf(data.cells, 3), crossings: rowsOf(data.crossings, 2), orders: {} });

// The layout of a state's stages on the devices: by stage, or by 4 * stage + kind.
const layoutOf = ({ data }, { schedule, chunks }) => data.layouts[data.schedules[schedule].layouts[chunks]];

const cutsOf = (balance) => balance.reduce((cuts, layers) => [...cuts, cuts[cuts.length - 1] + layers], [0]);

// The row of a stage, and of the boundary behind it.
const cellOf = (memo, layout, k, first, end) => memo.cells.get(`${layout.speeds[k]},${first},${end}`);
const crossingOf = (memo, layout, k, end) => memo.crossings.get(`${layout.links[k]},${end}`);

// How near to a layer the cut of stage k can be moved, one layer at a time, within the numbers that there are.
function reach(memo, state, k, layer) {
  const layout = layoutOf(memo, state), cuts = cutsOf(state.balance);
  const wanted = Math.max(cuts[k - 1] + 1, Math.min(cuts[k + 1] - 1, layer)), step = Math.sign(wanted - cuts[k]);
  const isKnown = (at) => cellOf(memo, layout, k - 1, cuts[k - 1], at) !== undefined
    && cellOf(memo, layout, k, at, cuts[k + 1]) !== undefined;
  let at = cuts[k];
  while (at !== wanted && isKnown(at + step)) at += step;
  return { at, isEnd: at !== wanted };
}

// ---- action orders

const numberOfStep = (character) => {
  const code = character.charCodeAt(0);
  return code < 128 ? code - 35 - (code > 60) - (code > 92) : code - 161 + 90;
};

// Per device its steps, and of those that are actions the place 4 * stage + kind and the micro-batch.
function ordersOf(memo, state) {
  const { data } = memo, { schedule, chunks, micro_batches: M } = state, key = `${schedule}/${chunks}/${M}`;
  if (memo.orders[key]) return memo.orders[key];
  const [ways, devices] = data.schedules[schedule].orders[chunks][M], layout = layoutOf(memo, state), stages = [];
  layout.devices.forEach((device, stage) => (stages[device] ||= []).push(stage));
  const rows = devices.map(([text, micros], device) => {
    const steps = Uint16Array.from(text, numberOfStep), next = new Int32Array(4 * stages[device].length);
    const codes = Array.from(steps, (step) => data.steps[step][0]).filter((code) => code >= 0);
    const at = codes.map((code) => 4 * stages[device][code >> 2] + (code & 3));
    return { steps, at, micros: micros || codes.map((code) => next[code]++) };
  });
  return (memo.orders[key] = { rows, ways, stages, layout, M, K: data.devices, S: layout.devices.length });
}
