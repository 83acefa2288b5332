// The mixed load after a start on a full disk tier: what is read was on disk before.
import { LIMIT, SECONDS, mixedRange, options as common, read, watch } from './lib.js';
export { watch };
export const options = common({
  mixed: { executor: 'constant-vus', vus: 16, duration: `${SECONDS}s`, exec: 'mixed', gracefulStop: '30s' },
});
export function mixed() {
  const { key, start, length } = mixedRange(5 * LIMIT);
  read(key, start, length);
}
