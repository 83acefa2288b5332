// What the scenarios share: the addresses, the watch over memory, and reads whose bytes are checked.
import http from 'k6/http';
import { check, sleep } from 'k6';
import { Counter, Trend } from 'k6/metrics';

export const DATA = __ENV.DATA;
export const ADMIN = __ENV.ADMIN;
export const LIMIT = Number(__ENV.LIMIT);
export const SECONDS = Number(__ENV.SECONDS);
const MIB = 1 << 20;

const rssOverLimit = new Trend('rss_over_limit');
const payloadOverLimit = new Trend('payload_over_limit');
const accountedRatio = new Trend('accounted_ratio');
const healthz = new Trend('healthz_ms', true);
const wrong = new Counter('wrong_bytes');
const failed = new Counter('failed_reads');
const refused = new Counter('refused_reads');

http.setResponseCallback(http.expectedStatuses({ min: 200, max: 599 }));

// Every scenario fails when resident memory was above the limit once (the peak is the kernel's own, no sample misses it),
// when a byte is wrong, or when health takes too long. `more` adds scenarios and thresholds of its own.
export function options(scenarios, thresholds = {}) {
  return {
    scenarios: {
      ...scenarios,
      watch: { executor: 'constant-vus', vus: 1, duration: `${SECONDS}s`, exec: 'watch', gracefulStop: '5s' },
    },
    thresholds: {
      rss_over_limit: ['max<=1'],
      wrong_bytes: ['count==0'],
      // The machine's own pauses are in it too: k6, store and server share its cores.
      healthz_ms: ['p(95)<100'],
      ...thresholds,
    },
    summaryTrendStats: ['min', 'med', 'avg', 'p(95)', 'max', 'count'],
  };
}

export function watch() {
  const memory = http.get(`${ADMIN}/debug/memory`, { tags: { name: 'memory' } }).json();
  rssOverLimit.add(memory.process.peak_rss_bytes / memory.limit_bytes);
  payloadOverLimit.add(memory.buffers.live_bytes / memory.limit_bytes);
  accountedRatio.add(memory.accounted_ratio);
  healthz.add(http.get(`${ADMIN}/healthz`, { tags: { name: 'healthz' } }).timings.duration);
  sleep(0.2);
}

// Reads a range and checks its first and last byte; a refusal (503) is counted apart, and is followed by a pause.
export function read(key, start, length, timeout = '60s') {
  const response = http.get(`${DATA}/s/${key}`, {
    headers: { Range: `bytes=${start}-${start + length - 1}` },
    responseType: 'binary',
    timeout,
    tags: { name: 'read' },
  });
  if (response.status === 503) {
    refused.add(1);
    sleep(0.5);
    return response;
  }
  if (response.status !== 206) {
    failed.add(1);
    return response;
  }
  const bytes = new Uint8Array(response.body);
  let shift = 0;
  for (let i = 0; i < key.length; i++) shift += key.charCodeAt(i);
  const right = bytes.length === length
    && bytes[0] === (start + shift) % 251
    && bytes[length - 1] === (start + length - 1 + shift) % 251;
  if (!right) wrong.add(1);
  check(response, { 'bytes are right': () => right });
  return response;
}

// A rank of 0 to n - 1 where small ones are common: log-uniform, which is a Zipf law of exponent 1.
export function zipf(n) {
  return Math.min(n - 1, Math.floor(Math.exp(Math.random() * Math.log(n + 1))) - 1);
}

// A length of `least` to `most`, each size class as common as any other.
export function logUniform(least, most) {
  return Math.floor(least * Math.exp(Math.random() * Math.log(most / least)));
}

// Ranges of a working set of `bytes`: lengths of 100 B to 8 MiB, fixed for each place so that a place read again is a hit.
export function mixedRange(bytes) {
  const size = 64 * MIB;
  const objects = Math.max(1, Math.floor(bytes / size));
  const places = objects * 96;
  const place = zipf(places);
  // The order of ranks is scattered over objects, and a place's length follows from its number.
  const scattered = (place * 2654435761) % places;
  const object = scattered % objects;
  const slot = Math.floor(scattered / objects);
  const noise = ((scattered * 40503) % 65536) / 65536;
  const length = Math.floor(100 * Math.exp(noise * Math.log((8 * MIB) / 100)));
  const start = Math.min(size - length, Math.floor((slot / 96) * size));
  return { key: `size-${size}/${object}`, start, length };
}
