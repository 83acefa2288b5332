// 800 cold ranges of as many 64 MiB objects at once, of a store that takes two seconds to answer.
import exec from 'k6/execution';
import { SECONDS, options as common, read, watch } from './lib.js';
export { watch };
export const options = common({
  misses: { executor: 'per-vu-iterations', vus: 800, iterations: 1, maxDuration: `${SECONDS}s`, exec: 'miss' },
});
export function miss() {
  const n = exec.scenario.iterationInTest;
  const start = (n * 65536) % 60000000;
  // What is refused is asked for again, as a client would.
  for (let tries = 0; tries < 5; tries++) {
    if (read(`size-67108864/miss-${n}`, start, 65536).status === 206) return;
  }
}
