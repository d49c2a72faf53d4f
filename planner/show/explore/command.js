// Commands that make or check a plan with the selected state, and notes on what the commands cannot express.

const capOf = (scale, bytes) => (scale === 0 ? bytes : shortBytes(bytes * 2 ** (scale / 25)));
const capsOf = (data, state) => data.places.map((place) => capOf(state.scale, data.memory_bytes[place]));

function memoryWords(data, { scale }) {
  const every = data.memory_bytes.map((bytes) => capOf(scale, bytes));
  return "--mem " + (new Set(every).size === 1 ? every.slice(0, 1) : every).map(bytesOption).join(",");
}

function solveWords(data, state, { recompute }) {
  const { name } = data.schedules[state.schedule], used = new Set(recompute);
  return [
    ...data.command, memoryWords(data, state), `--schedule ${name}`, `--chunks ${state.chunks}`,
    `--micro-batches ${state.micro_batches}`, `--recompute ${used.size === 1 ? recompute[0] : "auto"}`,
    `--balance ${state.balance.join(",")}`,
  ].join(" ");
}

// `check` can only change the cuts and memory limits of the plan, so there is no command if anything else was changed.
function checkWords(data, state) {
  const isSame = ["schedule", "chunks", "micro_batches"].every((name) => state[name] === data.start[name]);
  if (!isSame || state.recompute !== data.policy) return null;
  const caps = state.scale === 0 ? "" : " " + memoryWords(data, state);
  return `gpipe-plan check ${data.place} --balance ${state.balance.join(",")}${caps}`;
}

function commandsOf(data, state, answer) {
  const isOwn = data.schedules[state.schedule].is_own, check = checkWords(data, state), caveats = [];
  const caps = capsOf(data, state), over = answer.memory.flatMap((items, k) => (total(items) > caps[k] ? [k] : []));
  const which = over.length > 8 ? counted(over.length, "device") : "device " + over.join(", ");
  if (over.length) caveats.push(`Over the memory limit: ${which}. \`solve\` refuses this plan, and reports which limit would fit.`);
  if (state.isEven) caveats.push("These cuts give all stages about equal times. `solve` without `--balance` searches for the best cuts.");
  if (isOwn) caveats.push("The plan has its own action orders, which `solve` cannot take as an option. `check` evaluates other cuts under these orders.");
  else caveats.push(...data.caveats);
  if (isOwn && !check) caveats.push("No command changes the recomputation under these orders: edit `stages[].recompute` in the plan.");
  // With one stage per device, `solve` makes the same choice: the fastest recomputation that fits.
  if (new Set(answer.recompute).size > 1 && !isOwn && (state.chunks > 1 || Array.isArray(asked(data, state).recompute))) {
    caveats.push("`solve` chooses the recomputation of each stage itself, so its plan may differ from this one.");
  }
  return { lines: [...(isOwn ? [] : [solveWords(data, state, answer)]), ...(check ? [check] : [])], caveats };
}

// Convert the state of the controls to the input of `evaluate`.
const OWN = "as in the plan";
const asked = (data, state) =>
  ({ ...state, caps: capsOf(data, state), recompute: state.recompute === OWN ? data.recompute : state.recompute });
