// Numbers as people read them. Every function takes null for "not known".

const NOTHING = "–";
const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

function significant(value, digits = 3) {
  if (value === 0) return "0";
  const rounded = Number(value.toPrecision(digits));
  return Math.abs(rounded) >= 1000 ? rounded.toLocaleString("en") : String(rounded);
}

export function count(value) {
  return known(value) ? Math.round(value).toLocaleString("en") : NOTHING;
}

export function number(value) {
  return known(value) ? significant(value) : NOTHING;
}

export function seconds(value) {
  if (!known(value)) return NOTHING;
  if (value < 0.0009995) return `${significant(value * 1e6)} µs`;
  return value < 0.9995 ? `${significant(value * 1e3)} ms` : `${significant(value)} s`;
}

export function bytes(value) {
  if (!known(value)) return NOTHING;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${significant(value)} ${units[unit]}`;
}

export const bytesPerSecond = (value) => (known(value) ? `${bytes(value)}/s` : NOTHING);

export function share(value) {
  if (!known(value)) return NOTHING;
  const percent = value * 100;
  // Never rounded up to "all of them".
  return `${percent > 99 && percent < 100 ? Math.floor(percent * 10) / 10 : Number(percent.toPrecision(3))}%`;
}

export function clock(at) {
  return new Date(at).toLocaleTimeString("en-GB");
}

export const words = (reason) => reason.replaceAll("_", " ");
