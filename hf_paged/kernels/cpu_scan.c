/* What mixers compute of a token and those before it: short convolutions, and scans over a state, a matrix a head.

   There is one formula for all tokens, one after the other: those of a prompt, computed together or part by part, and a
   generated one get the same bits. Lanes are channels or values, which are not summed over; sums over keys are in order.
   Called by cpu_scan.py, which holds the same structs. Everything is in float32 until it is stored. */
#include "cpu_element.h"

enum { BLOCK = 64 };             /* lanes: that much of a state, times its keys, stays in the first-level cache */
enum { MAX_WIDTH = 8, MAX_KEYS = 512 };
enum { MIN_PRODUCTS = 1 << 17 }; /* below, a second thread costs more than it saves */

#define INLINE static inline __attribute__((always_inline))
#define EACH(i) for (int i = 0; i < BLOCK; i++)

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* By the exponential that can't overflow. */
INLINE float silu(float x) {
  const float e = exp_negative(x < 0 ? x : -x);
  return x * (x < 0 ? e : 1.0f) / (1.0f + e);
}

struct convolution {
  const element *input;         /* [batch, channels, length], any strides */
  const element *weight, *bias; /* [channels, width], contiguous; [channels], or null */
  element *output;              /* [batch, length, channels], contiguous */
  int64_t batch, channels, length, width, row, channel, time, num_threads, is_silu;
};

void hf_paged_convolve(const struct convolution *a) {
  const int64_t blocks = (a->channels + BLOCK - 1) / BLOCK;
#pragma omp parallel for num_threads(a->num_threads) if (a->batch * a->channels * a->length * 8 >= MIN_PRODUCTS)
  for (int64_t part = 0; part < a->batch * blocks; part++) {
    const int64_t b = part / blocks, first = part % blocks * BLOCK, lanes = least(BLOCK, a->channels - first);
    const element *input = a->input + b * a->row + first * a->channel;
    float weight[MAX_WIDTH][BLOCK] = {{0}}, window[MAX_WIDTH][BLOCK] = {{0}}, bias[BLOCK] = {0}, sum[BLOCK];
    for (int64_t i = 0; i < lanes; i++) {
      for (int64_t k = 0; k < a->width; k++) weight[k][i] = to_float(a->weight[(first + i) * a->width + k]);
      if (a->bias) bias[i] = to_float(a->bias[first + i]);
    }
    for (int64_t t = 0, place = 0; t < a->length; t++) {
      for (int64_t i = 0; i < lanes; i++) window[place][i] = to_float(input[t * a->time + i * a->channel]);
      EACH(i) sum[i] = bias[i];
      for (int64_t k = 0; k < a->width; k++) {
        place = place + 1 < a->width ? place + 1 : 0; /* all around, from the oldest token to this one */
        EACH(i) sum[i] = MULTIPLY_ADD(window[place][i], weight[k][i], sum[i]);
      }
      place = place + 1 < a->width ? place + 1 : 0;
      if (a->is_silu) EACH(i) sum[i] = silu(sum[i]);
      element *to = a->output + (b * a->length + t) * a->channels + first;
      for (int64_t i = 0; i < lanes; i++) to[i] = from_float(sum[i]);
    }
  }
}

struct operand {
  const element *first; /* [batch, tokens, heads, dim], the last contiguous; may be null */
  int64_t row, token, head;
};

enum { DELTA, SUM, SELECTIVE };

struct scan {
  struct operand query, key, value, gate; /* a head of the first two serves heads / key_heads of the values' */
  const float *decay; /* [batch, tokens, heads, decays]: one, or one a key; SELECTIVE: [heads, value_dim, key_dim] */
  const float *step;  /* [batch, tokens, heads, steps]: one, or one a value */
  const float *skip;  /* [heads, value_dim], or null */
  float *state;       /* [batch, heads, key_dim, value_dim], any strides; changed in place */
  element *output;    /* [batch, tokens, heads, value_dim], contiguous */
  int64_t batch, tokens, heads, key_heads, key_dim, value_dim, decays, steps;
  int64_t state_row, state_head, state_key, state_value;
  int64_t kind, is_normed, num_threads; /* is_normed: queries and keys are divided by their norms */
  float scale;                          /* of queries */
};

INLINE const element *at(struct operand x, int64_t b, int64_t t, int64_t h) {
  return x.first + b * x.row + t * x.token + h * x.head;
}

/* Keys or queries of a head, zeros behind them. */
INLINE void load(const struct scan *a, const element *from, float scale, float *to) {
  for (int64_t k = 0; k < a->key_dim; k++) to[k] = to_float(from[k]);
  if (a->is_normed) {
    float sums[16] = {0}, sum = 1e-6f;
    for (int64_t k = 0; k < a->key_dim; k += 16)
      for (int i = 0; i < 16; i++) sums[i] = MULTIPLY_ADD(to[k + i], to[k + i], sums[i]);
    for (int i = 0; i < 16; i++) sum += sums[i];
    scale /= sqrtf(sum);
  }
  for (int64_t k = 0; k < a->key_dim; k++) to[k] *= scale;
}

/* Some columns of a head's state, over all tokens. */
INLINE void scan(const int kind, const struct scan *a, int64_t b, int64_t h, int64_t first) {
  const int64_t lanes = least(BLOCK, a->value_dim - first), key_head = h / (a->heads / a->key_heads);
  float *whole = a->state + b * a->state_row + h * a->state_head + first * a->state_value;
  float state[MAX_KEYS][BLOCK], rates[kind == SELECTIVE ? MAX_KEYS : 1][BLOCK];
  float key[MAX_KEYS] = {0}, query[MAX_KEYS] = {0}, decayed[MAX_KEYS];
  float value[BLOCK] = {0}, skip[BLOCK] = {0}, step[BLOCK] = {0}, gate[BLOCK] = {0}, added[BLOCK];
  for (int64_t k = 0; k < a->key_dim; k++) {
    EACH(i) state[k][i] = i < lanes ? whole[k * a->state_key + i * a->state_value] : 0;
    if (kind == SELECTIVE)
      EACH(i) rates[k][i] = i < lanes ? a->decay[(h * a->value_dim + first + i) * a->key_dim + k] : 0;
  }
  if (a->skip) for (int64_t i = 0; i < lanes; i++) skip[i] = a->skip[h * a->value_dim + first + i];
  for (int64_t t = 0; t < a->tokens; t++) {
    const int64_t place = (b * a->tokens + t) * a->heads + h, next = a->decays > 1;
    const element *v = at(a->value, b, t, h) + first;
    const float *decay = a->decay + place * a->decays;
    load(a, at(a->query, b, t, key_head), a->scale, query);
    load(a, at(a->key, b, t, key_head), 1, key);
    for (int64_t i = 0; i < lanes; i++) {
      value[i] = to_float(v[i]);
      step[i] = a->step[place * a->steps + (a->steps > 1 ? first + i : 0)];
    }
    EACH(i) added[i] = value[i];
    if (kind == DELTA) {
      float found[BLOCK] = {0};
      for (int64_t k = 0; k < a->key_dim; k++) decayed[k] = key[k] * decay[k * next];
      for (int64_t k = 0; k < a->key_dim; k++) EACH(i) found[i] = MULTIPLY_ADD(state[k][i], decayed[k], found[i]);
      EACH(i) added[i] -= found[i];
    }
    EACH(i) added[i] *= step[i];
    float sum[BLOCK] = {0};
    for (int64_t k = 0; k < a->key_dim; k++) {
      float kept[BLOCK];
      EACH(i) kept[i] = kind == SELECTIVE ? exp_negative(step[i] * rates[k][i]) : decay[k * next];
      EACH(i) {
        state[k][i] = MULTIPLY_ADD(key[k], added[i], state[k][i] * kept[i]);
        sum[i] = MULTIPLY_ADD(state[k][i], query[k], sum[i]);
      }
    }
    EACH(i) sum[i] = MULTIPLY_ADD(value[i], skip[i], sum[i]);
    if (a->gate.first) {
      const element *g = at(a->gate, b, t, h) + first;
      for (int64_t i = 0; i < lanes; i++) gate[i] = to_float(g[i]);
      EACH(i) sum[i] *= silu(gate[i]);
    }
    element *to = a->output + place * a->value_dim + first;
    for (int64_t i = 0; i < lanes; i++) to[i] = from_float(sum[i]);
  }
  for (int64_t k = 0; k < a->key_dim; k++)
    for (int64_t i = 0; i < lanes; i++) whole[k * a->state_key + i * a->state_value] = state[k][i];
}

void hf_paged_scan(const struct scan *a) {
  const int64_t blocks = (a->value_dim + BLOCK - 1) / BLOCK, parts = a->batch * a->heads * blocks;
#pragma omp parallel for num_threads(a->num_threads) if (parts * BLOCK * a->key_dim * a->tokens >= MIN_PRODUCTS)
  for (int64_t part = 0; part < parts; part++) {
    const int64_t b = part / blocks / a->heads, h = part / blocks % a->heads, first = part % blocks * BLOCK;
    if (a->kind == DELTA) scan(DELTA, a, b, h, first);
    else if (a->kind == SUM) scan(SUM, a, b, h, first);
    else scan(SELECTIVE, a, b, h, first);
  }
}
