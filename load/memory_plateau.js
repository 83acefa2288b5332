// The mixed load for half an hour: resident memory is level over the last two thirds (`load/run` fits the slope).
import { LIMIT, SECONDS, mixedRange, options as common, read, watch } from './lib.js';
export { watch };
export const options = common({
  mixed: { executor: 'constant-vus', vus: 32, duration: `${SECONDS}s`, exec: 'mixed', gracefulStop: '30s' },
});
export function mixed() {
  const { key, start, length } = mixedRange(5 * LIMIT);
  read(key, start, length);
}
