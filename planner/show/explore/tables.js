"use strict";
// Tables of the page, whose numbers planner/show/explore/data.py has written.

// Expand run-length encoded rows: in a run, the last number increases by 1 from row to row.
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

// Return the layout of a state's stages on the devices; arrays are by stage, or by 4 * stage + kind.
const layoutOf = ({ data }, { schedule, chunks }) => data.layouts[data.schedules[schedule].layouts[chunks]];

const cutsOf = (balance) => balance.reduce((cuts, layers) => [...cuts, cuts[cuts.length - 1] + layers], [0]);

// Return the table row of a stage, and of the boundary after it.
const cellOf = (memo, layout, k, first, end) => memo.cells.get(`${layout.speeds[k]},${first},${end}`);
const crossingOf = (memo, layout, k, end) => memo.crossings.get(`${layout.links[k]},${end}`);

// Move the cut before stage k towards a layer, one layer at a time, while the tables have the resulting stages.
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

// Return for each device the table rows of its order, and for actions the index 4 * stage + kind and the micro-batch.
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
