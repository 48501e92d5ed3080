/* The paged operations on CPU: new keys and values to their slots, and attention of decode rows over block tables.

   Compiled at first use for cpu.py, which defines the constants and holds the same structs. The pool is [num_blocks,
   num_layers, 2, num_kv_heads, block_size, HEAD_DIM], and VALUE_DIM is HEAD_DIM; where it IS_LATENT, [num_blocks,
   num_layers, 1, 1, block_size, HEAD_DIM], whole rows being keys and their first VALUE_DIM elements values. Offsets and
   strides count elements. Linked against no OpenMP runtime: torch has loaded one, whose threads these loops share. */
#include "cpu_element.h"

#define TILE 16 /* tokens between two looks at the running maximum */

struct write {
  const element *key, *value; /* [num_tokens, num_kv_heads, HEAD_DIM], any strides of the first two; or what comes first
                                 in a row of latents, VALUE_DIM wide, and the rest */
  element *pool;              /* at its first block's keys of the layer */
  const int64_t *slots;       /* [num_tokens]; below 0: not written */
  int64_t num_tokens, num_kv_heads, block_size, block_stride;
  int64_t key_token, key_head, value_token, value_head;
  int64_t num_threads;
};

void hf_paged_write(const struct write *w) {
  const int64_t head_stride = w->block_size * HEAD_DIM;
#pragma omp parallel for num_threads(w->num_threads) if (w->num_tokens > 64)
  for (int64_t t = 0; t < w->num_tokens; t++) {
    const int64_t slot = w->slots[t];
    if (slot < 0) continue;
    element *to = w->pool + slot / w->block_size * w->block_stride + slot % w->block_size * HEAD_DIM;
    if (IS_LATENT) {
      memcpy(to, w->key + t * w->key_token, VALUE_DIM * sizeof(element));
      memcpy(to + VALUE_DIM, w->value + t * w->value_token, (HEAD_DIM - VALUE_DIM) * sizeof(element));
      continue;
    }
    for (int64_t h = 0; h < w->num_kv_heads; h++, to += head_stride) {
      memcpy(to, w->key + t * w->key_token + h * w->key_head, HEAD_DIM * sizeof(element));
      memcpy(to + w->num_kv_heads * head_stride, w->value + t * w->value_token + h * w->value_head,
             HEAD_DIM * sizeof(element));
    }
  }
}

struct decode {
  const element *query;         /* [num_seqs, heads, HEAD_DIM], any strides of the first two */
  element *output;              /* [num_seqs, heads, VALUE_DIM] */
  const element *pool;          /* at its first block's keys of the layer */
  const int32_t *tables;        /* [num_seqs, table_width] */
  const int32_t *seq_lens;      /* [num_seqs], at least 1 */
  const float *sinks;           /* [heads], or NULL */
  int64_t query_token, query_head;
  int64_t num_seqs, num_kv_heads, heads_per_kv, block_size, table_width, block_stride;
  int64_t window;               /* tokens a query sees, itself included; 0: all */
  int64_t num_threads;
  float scale, softcap;         /* softcap 0: none */
};

/* Brings a token's row of the next tile into the second-level cache while this one is computed: blocks lie anywhere, no
   processor foresees the next. */
static inline void fetch(const element *row) {
  for (int d = 0; d < HEAD_DIM; d += 64 / (int)sizeof(element)) __builtin_prefetch(row + d, 0, 2);
}

/* One sequence and `heads` query heads of one key/value head: online softmax over tiles of the sequence's blocks, in
   float32. Always inlined, so that a constant number of them unrolls the loops. */
static inline __attribute__((always_inline)) void attend(const struct decode *a, int64_t sequence, int64_t kv_head,
                                                         int64_t first_head, const int64_t heads) {
  const int64_t block_size = a->block_size;
  float query[heads][HEAD_DIM], sum[heads][VALUE_DIM], scores[heads][TILE], largest[heads], total[heads];
  for (int64_t h = 0; h < heads; h++) {
    const element *from = a->query + sequence * a->query_token + (first_head + h) * a->query_head;
    for (int d = 0; d < HEAD_DIM; d++) query[h][d] = to_float(from[d]) * a->scale;
    memset(sum[h], 0, sizeof sum[h]);
    /* A sink is a score without a value. */
    largest[h] = a->sinks ? a->sinks[first_head + h] : -INFINITY;
    total[h] = a->sinks ? 1.0f : 0.0f;
  }
  const int32_t *table = a->tables + sequence * a->table_width;
  const int64_t end = a->seq_lens[sequence];
  int64_t start = a->window > 0 && end > a->window ? end - a->window : 0;
  for (int64_t next; start < end; start = next) {
    const int64_t offset = start % block_size;
    next = start + (block_size - offset < TILE ? block_size - offset : TILE);
    if (next > end) next = end;
    const int count = (int)(next - start);
    const element *keys = a->pool + table[start / block_size] * a->block_stride;
    keys += (kv_head * block_size + offset) * HEAD_DIM;
    const element *values = IS_LATENT ? keys : keys + a->num_kv_heads * block_size * HEAD_DIM;
    const int64_t ahead = next < end ? next : start;
    const element *next_keys = a->pool + table[ahead / block_size] * a->block_stride;
    next_keys += (kv_head * block_size + ahead % block_size) * HEAD_DIM;
    const element *next_values = next_keys + a->num_kv_heads * block_size * HEAD_DIM;
    for (int t = 0; t < count; t++) {
      fetch(next_keys + t * HEAD_DIM);
      float key[HEAD_DIM];
      for (int d = 0; d < HEAD_DIM; d++) key[d] = to_float(keys[t * HEAD_DIM + d]);
      for (int64_t h = 0; h < heads; h++) {
        float product = 0;
#pragma omp simd reduction(+ : product)
        for (int d = 0; d < HEAD_DIM; d++) product += query[h][d] * key[d];
        scores[h][t] = product;
      }
    }
    for (int64_t h = 0; h < heads; h++) {
      float *row = scores[h], top = largest[h], added = 0;
      if (a->softcap > 0)
        for (int t = 0; t < count; t++) row[t] = tanhf(row[t] / a->softcap) * a->softcap;
      for (int t = 0; t < count; t++) top = row[t] > top || row[t] != row[t] ? row[t] : top;
      if (top == -INFINITY) { /* nothing to see yet; -inf less -inf would be NaN */
        for (int t = 0; t < count; t++) row[t] = 0;
        continue;
      }
      for (int t = count; t < TILE; t++) row[t] = top; /* full tiles only, so that the loop is vectorised */
      for (int t = 0; t < TILE; t++) row[t] = exp_negative(row[t] - top);
      for (int t = 0; t < count; t++) added += row[t];
      const float factor = largest[h] == -INFINITY ? 0.0f : exp_negative(largest[h] - top);
      largest[h] = top;
      total[h] = total[h] * factor + added;
      if (factor != 1.0f)
        for (int d = 0; d < VALUE_DIM; d++) sum[h][d] *= factor;
    }
    for (int t = 0; t < count; t++) {
      if (!IS_LATENT) fetch(next_values + t * HEAD_DIM);
      float value[VALUE_DIM];
      for (int d = 0; d < VALUE_DIM; d++) value[d] = to_float(values[t * HEAD_DIM + d]);
      for (int64_t h = 0; h < heads; h++) {
        const float weight = scores[h][t];
        for (int d = 0; d < VALUE_DIM; d++) sum[h][d] += weight * value[d];
      }
    }
  }
  for (int64_t h = 0; h < heads; h++) {
    element *to = a->output + (sequence * a->num_kv_heads * a->heads_per_kv + first_head + h) * VALUE_DIM;
    for (int d = 0; d < VALUE_DIM; d++) to[d] = from_float(sum[h][d] / total[h]);
  }
}

#define LATENT_HEADS 8
#define MIN_PRODUCTS 65536 /* below, a second thread costs more than it saves */

void hf_paged_decode(const struct decode *a) {
  /* Heads of a task: all that share a head's keys, or of those that share latents as many as the caches hold. */
  const int64_t most = IS_LATENT ? LATENT_HEADS : a->heads_per_kv, num_parts = (a->heads_per_kv + most - 1) / most;
  const int64_t num_tasks = a->num_seqs * a->num_kv_heads * num_parts;
  int64_t num_keys = 0;
  for (int64_t i = 0; i < a->num_seqs; i++)
    num_keys += a->window > 0 && a->seq_lens[i] > a->window ? a->window : a->seq_lens[i];
  const int is_large = num_keys * a->num_kv_heads * a->heads_per_kv * HEAD_DIM >= MIN_PRODUCTS;
#pragma omp parallel for schedule(dynamic, 1) num_threads(a->num_threads) if (is_large)
  for (int64_t task = 0; task < num_tasks; task++) {
    const int64_t sequence = task / num_parts / a->num_kv_heads, kv_head = task / num_parts % a->num_kv_heads;
    const int64_t skipped = task % num_parts * most, first = kv_head * a->heads_per_kv + skipped;
    const int64_t left = a->heads_per_kv - skipped, heads = left < most ? left : most;
    switch (heads) {
      case 1: attend(a, sequence, kv_head, first, 1); break;
      case 2: attend(a, sequence, kv_head, first, 2); break;
      case 3: attend(a, sequence, kv_head, first, 3); break;
      case 4: attend(a, sequence, kv_head, first, 4); break;
      case 8: attend(a, sequence, kv_head, first, 8); break;
      default: attend(a, sequence, kv_head, first, heads);
    }
  }
}
