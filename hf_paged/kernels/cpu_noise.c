/* Exponential noise as torch's generator for CPUs draws it, bit for bit.

   An element is -log(1 - u) in float64, rounded to float32; u is k / 2^53, where k is the low 53 bits of two outputs of
   a Mersenne Twister of 32 bits, the high half first (ATen: CPUGeneratorImpl.cpp, MT19937RNGEngine.h,
   TransformationHelper.h). The twister and a logarithm of its own go by vectors; where this logarithm may round another
   way than libm's, which torch calls, that decides. Called by cpu_noise.py. */
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { SIZE = 624, SHIFT = 397 };
#ifndef DOUBT
#define DOUBT 256 /* of the 2^29 values of the bits that rounding drops, to either side: 2^-44 of a number */
#endif

/* As `Generator.get_state` has it, and as far as it is needed. */
struct state {
  uint64_t seed;
  int32_t left, seeded; /* one more than outputs of this round that were not taken */
  uint64_t next;        /* the first of these */
  uint64_t words[SIZE];
};

static inline uint32_t twist(uint32_t one, uint32_t next) {
  return (((one & 0x80000000u) | (next & 0x7fffffffu)) >> 1) ^ (-(next & 1u) & 0x9908b0dfu);
}

static void next_round(uint32_t *w) {
  for (int i = 0; i < SIZE - SHIFT; i++) w[i] = w[i + SHIFT] ^ twist(w[i], w[i + 1]);
#pragma omp simd safelen(64) /* what is read was written SIZE - SHIFT before */
  for (int i = SIZE - SHIFT; i < SIZE - 1; i++) w[i] = w[i + SHIFT - SIZE] ^ twist(w[i], w[i + 1]);
  w[SIZE - 1] = w[SHIFT - 1] ^ twist(w[SIZE - 1], w[0]);
}

static void temper(const uint32_t *words, uint32_t *outputs) {
  for (int i = 0; i < SIZE; i++) {
    uint32_t y = words[i];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    outputs[i] = y ^ (y >> 18);
  }
}

/* -log(x / 2^53) for x of 1 to 2^53. With x = 2^k z and z around 1, log z is 2 artanh s, s = (z - 1) / (z + 1): ten
   terms of its series are good to 2^-50. */
static inline double minus_log(int64_t x) {
  static const double LN2 = 0.693147180559945309417;
  const double wide = (double)x;
  int64_t bits, k;
  double z;
  memcpy(&bits, &wide, 8);
  k = (bits - 0x3fe6a09e667f3bcdll) >> 52; /* of the square root of 1/2 */
  bits -= (int64_t)((uint64_t)k << 52);
  memcpy(&z, &bits, 8);
  const double s = (z - 1.0) / (z + 1.0), t = s * s;
  double sum = 1.0 / 19;
  sum = sum * t + 1.0 / 17, sum = sum * t + 1.0 / 15, sum = sum * t + 1.0 / 13;
  sum = sum * t + 1.0 / 11, sum = sum * t + 1.0 / 9, sum = sum * t + 1.0 / 7;
  sum = sum * t + 1.0 / 5, sum = sum * t + 1.0 / 3;
  return 0.0 - ((double)(k - 53) * LN2 + (2.0 * s + 2.0 * s * t * sum));
}

/* Some elements of consecutive pairs of outputs, high half first. */
static void noise_of(const uint32_t *outputs, float *noise, int count) {
  enum { HALF = 1 << 28 };
  uint32_t in_doubt = 0;
  for (int i = 0; i < count; i++) {
    const uint64_t k = ((uint64_t)(outputs[2 * i] & 0x1fffffu) << 32) | outputs[2 * i + 1];
    const double value = minus_log((int64_t)((1ull << 53) - k));
    uint64_t bits;
    memcpy(&bits, &value, 8);
    const uint32_t dropped = (uint32_t)bits & (2 * HALF - 1);
    in_doubt |= dropped - (uint32_t)(HALF - DOUBT) < 2u * DOUBT;
    noise[i] = (float)value;
  }
  if (!in_doubt) return;
  for (int i = 0; i < count; i++) {
    const uint64_t k = ((uint64_t)(outputs[2 * i] & 0x1fffffu) << 32) | outputs[2 * i + 1];
    noise[i] = (float)(-1.0 * log1p(-((double)k / (double)(1ull << 53))));
  }
}

/* Draws `count` elements, and leaves the state as torch would. */
void hf_paged_exponential(struct state *state, float *noise, int64_t count) {
  if (!count) return;
  uint32_t words[SIZE], outputs[SIZE + 1]; /* one of the round before may be left, if a round began at an odd place */
  for (int i = 0; i < SIZE; i++) words[i] = (uint32_t)state->words[i];
  temper(words, outputs + 1);
  int next = SIZE + 1 - state->left;
  while (count) {
    const int pairs = (SIZE - next) / 2, own = count < pairs ? (int)count : pairs;
    noise_of(outputs + 1 + next, noise, own);
    noise += own, count -= own, next += 2 * own;
    if (!count) break;
    outputs[0] = outputs[SIZE];
    const int rest = SIZE - next; /* 0 or 1 */
    next_round(words);
    temper(words, outputs + 1);
    next = -rest;
  }
  for (int i = 0; i < SIZE; i++) state->words[i] = words[i];
  state->next = (uint64_t)next, state->left = SIZE - next + 1;
}
