// Numbers as people read them.
const WHOLE = new Intl.NumberFormat("en"), ONE = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const count = (value) => (Math.abs(value) < 10 ? ONE : WHOLE).format(Math.abs(value) < 10 ? value : Math.round(value));
export const compact = (value) => (value < 100000 ? count(value) : COMPACT.format(value));
export const percent = (share) => `${share > 0 && share < 0.0995 ? ONE.format(share * 100) : Math.round(share * 100)} %`;

export function milliseconds(value) {
  if (value < 10) return `${ONE.format(Math.max(0, value))} ms`;
  if (value < 1000) return `${Math.round(value)} ms`;
  return value < 60000 ? `${(value / 1000).toFixed(value < 10000 ? 2 : 1)} s` : ago(value);
}

export function ago(value) {
  const seconds = Math.max(0, Math.round(value / 1000)), minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
  if (seconds < 60) return `${seconds} s`;
  if (minutes < 60) return seconds % 60 ? `${minutes} min ${seconds % 60} s` : `${minutes} min`;
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} days ${hours % 24} h`;
}

export function bytes(value) {
  return value < 1e9 ? `${WHOLE.format(Math.round(value / 1048576))} MiB` : `${ONE.format(value / 1073741824)} GiB`;
}

// A bound of a histogram's bucket, in seconds: as short as can be.
export const bound = (seconds) => (seconds < 1 ? `${ONE.format(seconds * 1000)}ms` : `${ONE.format(seconds)}s`);

export const uptime = (seconds) => ago((seconds < 60 ? seconds : Math.floor(seconds / 60) * 60) * 1000);
