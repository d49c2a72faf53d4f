// Numbers as text, in the same form as planner/core/values/units.py.

const threeDigits = (value) =>
  [2, 1].map((digits) => value.toFixed(digits)).find((text) => text.replace(/[-.]/g, "").length <= 3) || value.toFixed(0);

// Return a value in its largest suitable unit, and this unit's name and size.
function unitOf(value, step, units) {
  let index = 0, size = 1;
  while (index < units.length - 1 && Math.abs(Number(threeDigits(value / size))) >= step) { size *= step; index++; }
  return [value / size, units[index], size];
}
const inUnits = ([value, unit]) => (unit === "B" ? value.toFixed(0) : threeDigits(value)) + " " + unit;
const unitOfBytes = (bytes) => unitOf(bytes, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
const formatBytes = (bytes) => inUnits(unitOfBytes(bytes));
const formatUs = (us) => inUnits(unitOf(us, 1000, ["us", "ms", "s"]));
const percent = (share, digits = 1) => (share * 100).toFixed(digits) + " %";
const counted = (count, noun, plural = "s") => `${count} ${noun}${count === 1 ? "" : plural}`;
const rate = (perS) => {
  const digits = perS < 1000 ? 1 : 0;
  return perS.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
};

const DECIMAL = [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]];

// Return an exact size as the value of an option: the shortest text with at most two decimals.
function bytesOption(bytes) {
  const binary = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
  const units = [...DECIMAL, ...binary].filter(([, factor]) => bytes >= factor && (bytes * 100) % factor === 0);
  const texts = [...units.map(([name, factor]) => bytes / factor + name), bytes + "B"];
  return texts.reduce((shortest, text) => (text.length < shortest.length ? text : shortest));
}

// Return the nearest size that has at most two decimals as the value of an option.
function shortBytes(bytes) {
  const unit = DECIMAL.find(([, factor]) => bytes >= factor);
  return unit ? Math.round((bytes / unit[1]) * 100) * (unit[1] / 100) : Math.round(bytes);
}

const layerRange = (names, f, e) =>
  (e - f === 1 ? names[f] : `${names[f]} … ${names[e - 1]}`) + ` (${e - f})`;

// ---- error ranges, as in planner/show/views/certainty.py; empty if no similar run was measured

// Return the number of decimals that are certain in a range; negative for tens, hundreds, ….
function certainDecimals(low, high) {
  const half = (high - low) / 2, power = Math.floor(Math.log10(half));
  return half > 0 ? Math.min(9, Number(half < 3.545 * 10 ** power) - power) : 9;
}
const rounded = (value, end, whole) =>
  (whole(Number((value * 10 ** end).toFixed(6))) / 10 ** end).toLocaleString("en-US",
    { minimumFractionDigits: Math.max(0, end), maximumFractionDigits: Math.max(0, end) });
const rangeWords = (low, high, most) => {
  const end = Math.min(most, certainDecimals(low, high));
  return `(${rounded(low, end, Math.floor)} to ${rounded(high, end, Math.ceil)})`;
};

function stepRange({ step_ratios: ratios }, us) {
  const [value] = unitOf(us, 1000, ["us", "ms", "s"]);
  return ratios && us ? rangeWords(value * ratios[0], value * ratios[1], 2) : "";
}
const rateRange = ({ step_ratios: ratios }, { samples_per_s: perS }) =>
  ratios && perS ? rangeWords(perS / ratios[1], perS / ratios[0], 1) : "";

function peakBound({ peak_bound: bound }, bytes) {
  if (!bound) return "";
  const [value, , size] = unitOfBytes(bytes), most = (bytes * bound[0] + bound[1]) / size;
  return `(at most ${rounded(most, Math.min(2, certainDecimals(value, most)), Math.ceil)})`;
}
