// Numbers as text, in the same form as planner/core/values/units.py.

const threeDigits = (value) =>
  [2, 1].map((digits) => value.toFixed(digits)).find((text) => text.replace(/[-.]/g, "").length <= 3) || value.toFixed(0);

function inUnits(value, step, units) {
  let index = 0;
  while (index < units.length - 1 && Math.abs(Number(threeDigits(value))) >= step) { value /= step; index++; }
  return (units[index] === "B" ? value.toFixed(0) : threeDigits(value)) + " " + units[index];
}

const formatBytes = (bytes) => inUnits(bytes, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
const formatUs = (us) => inUnits(us, 1000, ["us", "ms", "s"]);
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
