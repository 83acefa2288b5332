// `load/run` holds 200 clients open beside this, each reading a 64 MiB object at 1 KiB/s; here are the fast ones, some of
// them on the same objects.
import { LIMIT, SECONDS, mixedRange, options as common, read, watch } from './lib.js';
export { watch };
export const options = common(
  { fast: { executor: 'constant-vus', vus: 8, duration: `${SECONDS}s`, exec: 'fast', gracefulStop: '30s' } },
  { failed_reads: ['count==0'] },
);
export function fast() {
  if (Math.random() < 0.5) {
    const { key, start, length } = mixedRange(2 * LIMIT);
    read(key, start, length);
  } else {
    read(`size-67108864/slow-${Math.floor(Math.random() * 200)}`, Math.floor(Math.random() * 60) * 1048576, 1048576);
  }
}
