// State of the controls as the part of the page's address after `#`, so that a view can be sent and undone.

// Return the text of a state: `schedule=1f1b&chunks=1&m=8&recompute=auto&limit=0&cuts=3,4,5`.
const textOfState = (data, state) => [
  ["schedule", data.schedules[state.schedule].name], ["chunks", state.chunks], ["m", state.micro_batches],
  ["recompute", state.recompute === OWN ? "plan" : state.recompute], ["limit", state.scale], ["cuts", state.balance],
].map((pair) => pair.join("=")).join("&");

// Return the state of a text, or null if the page cannot show it.
function stateOfText(memo, text) {
  const { data } = memo, fields = new URLSearchParams(text), balance = (fields.get("cuts") || "").split(",").map(Number);
  const schedule = data.schedules.findIndex(({ name }) => name === fields.get("schedule"));
  const [chunks, micro_batches, scale] = ["chunks", "m", "limit"].map((name) => Number(fields.get(name)));
  const recompute = fields.get("recompute") === "plan" ? OWN : fields.get("recompute");
  if (!data.schedules[schedule]?.orders[chunks]?.[micro_batches]) return null;
  const stages = data.devices * chunks, state = { schedule, chunks, micro_batches, balance, recompute, scale };
  const isWhole = balance.length === stages && balance.every((layers) => Number.isInteger(layers) && layers > 0);
  if (!isWhole || sumOf(balance) !== data.names.length || !(Math.abs(scale) <= 100)) return null;
  const isOwn = recompute === OWN && stages === data.recompute.length && !data.recompute.includes("layers");
  const policies = data.may_recompute ? ["auto", ...data.recomputes] : ["never"];
  if (!isOwn && !policies.includes(recompute)) return null;
  const layout = layoutOf(memo, state), cuts = cutsOf(balance);
  return balance.every((_, k) => cellOf(memo, layout, k, cuts[k], cuts[k + 1]) !== undefined) ? state : null;
}
