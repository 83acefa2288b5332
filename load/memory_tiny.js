// Ranges of 8 to 64 bytes, each another one: what an entry costs beside its payload is most of it.
import exec from 'k6/execution';
import { SECONDS, options as common, read, watch } from './lib.js';
export { watch };
const RANGES = Number(__ENV.RANGES || 2000000);
export const options = common({
  tiny: {
    executor: 'shared-iterations', vus: 32, iterations: RANGES, maxDuration: `${SECONDS}s`, exec: 'tiny',
    gracefulStop: '1s',
  },
});
export function tiny() {
  const n = exec.scenario.iterationInTest;
  read(`size-67108864/tiny-${n % 512}`, Math.floor(n / 512) * 64, 8 + (n % 57));
}
