// The mixed load before a disk that writes 20 MB/s (where the cgroup can throttle it): a full queue drops writes, not reads.
import { LIMIT, SECONDS, mixedRange, options as common, read, watch } from './lib.js';
export { watch };
export const options = common({
  mixed: { executor: 'constant-vus', vus: 32, duration: `${SECONDS}s`, exec: 'mixed', gracefulStop: '30s' },
});
export function mixed() {
  const { key, start, length } = mixedRange(5 * LIMIT);
  read(key, start, length);
}
