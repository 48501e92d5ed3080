/* The paged operations on CPU: new keys and values to their slots, and attention of decode rows over block tables.

   Compiled at first use for cpu.py, which defines the constants and holds the same structs. The pool is [num_blocks,
   num_layers, 2, num_kv_heads, block_size, HEAD_DIM], and VALUE_DIM is HEAD_DIM; where it IS_LATENT, [num_blocks,
   num_layers, 1, 1, block_size, HEAD_DIM], whole rows being keys and their first VALUE_DIM elements values. Offsets and
   strides count elements. Linked against no OpenMP runtime: torch has loaded one, whose threads these loops share. */
#include "cpu_element.h"
#include "cpu_tile.h"

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
  const int32_t *order;         /* [num_seqs], sequences; those that begin with the same blocks are side by side */
  const int32_t *items;         /* [num_items, 3]: the first of some in `order`, how many, tokens that they share */
  int64_t num_items;            /* 0: each sequence by itself */
  const int32_t *query_starts;  /* of prompts: [sequences + 1], the first new token of each among the queries */
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

/* The first token that the new token of a sequence sees. */
static inline int64_t first_seen(const struct decode *a, int64_t sequence) {
  const int64_t end = a->seq_lens[sequence];
  return a->window > 0 && end > a->window ? end - a->window : 0;
}

/* One sequence and `heads` query heads of one key/value head: online softmax over tiles of the sequence's blocks, in
   float32. From token `start` on; what lies before it rows `first_row` on of `begun` have seen. Always inlined, so that
   a constant number of heads unrolls the loops. */
static inline __attribute__((always_inline)) void attend(const struct decode *a, int64_t sequence, int64_t kv_head,
                                                         int64_t first_head, const int64_t heads, int64_t start,
                                                         const struct tile *begun, int64_t first_row) {
  const int64_t block_size = a->block_size;
  float query[heads][HEAD_DIM], sum[heads][VALUE_DIM], scores[heads][TILE], largest[heads], total[heads];
  for (int64_t h = 0; h < heads; h++) {
    const element *from = a->query + sequence * a->query_token + (first_head + h) * a->query_head;
    for (int d = 0; d < HEAD_DIM; d++) query[h][d] = to_float(from[d]) * a->scale;
    memset(sum[h], 0, sizeof sum[h]);
    /* A sink is a score without a value. */
    largest[h] = a->sinks ? a->sinks[first_head + h] : -INFINITY;
    total[h] = a->sinks ? 1.0f : 0.0f;
    if (begun) take_row(begun, first_row + h, &largest[h], &total[h], sum[h]);
  }
  const int32_t *table = a->tables + sequence * a->table_width;
  const int64_t end = a->seq_lens[sequence];
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

static __attribute__((noinline)) void attend_alone(const struct decode *a, int64_t sequence, int64_t kv_head, int64_t first_head, int64_t heads,
                         int64_t start, const struct tile *begun, int64_t first_row) {
  switch (heads) {
#define CASE(n) case n: attend(a, sequence, kv_head, first_head, n, start, begun, first_row); break;
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(8)
    default: attend(a, sequence, kv_head, first_head, heads, start, begun, first_row);
  }
}

/* Where a sequence's keys lie from token `start` on, and the token behind those of the same block, `end` at most. */
static inline const element *run_of(const struct decode *a, int64_t sequence, int64_t kv_head, int64_t start,
                                    int64_t *end) {
  const int64_t offset = start % a->block_size, next = start - offset + a->block_size;
  if (next < *end) *end = next;
  const int64_t block = a->tables[sequence * a->table_width + start / a->block_size];
  return a->pool + block * a->block_stride + (kv_head * a->block_size + offset) * HEAD_DIM;
}

#define MOST_AHEAD 524288 /* bytes of keys and values that a processor's cache holds until they are used */

/* From a token's key to its value. */
static inline int64_t to_values(const struct decode *a) {
  return IS_LATENT ? 0 : a->num_kv_heads * a->block_size * HEAD_DIM;
}

/* The sequence's tokens from `*next` on, `end` at most: the `i`-th run that is brought from memory meanwhile. */
static inline void fetch_run(const struct decode *a, struct tile *tile, int i, int64_t sequence, int64_t kv_head,
                             int64_t *next, int64_t end) {
  tile->ahead[i] = (const char *)run_of(a, sequence, kv_head, *next, &end);
  tile->num_bytes[i] = (end - *next) * HEAD_DIM * (int64_t)sizeof(element);
  *next = end;
}

/* Some sequences that share their first tokens, and where it has come to: the tokens behind these that are fetched. */
struct rest {
  const int32_t *sequences;
  int64_t num_seqs, first, end;
  int64_t number, next; /* a sequence's number, and the next of its tokens */
};

/* What is fetched while a tile is multiplied: keys of the next one, tokens `next` to `end`; then of the rest. */
static void look_ahead(const struct decode *a, struct tile *tile, int64_t sequence, int64_t kv_head, int64_t next,
                       int64_t end, struct rest *rest) {
  int i = 0;
  while (i < RUNS && next < end) fetch_run(a, tile, i++, sequence, kv_head, &next, end);
  while (rest && i < RUNS && rest->number < rest->num_seqs) {
    const int64_t own = rest->sequences[rest->number], own_end = a->seq_lens[own] < rest->end ? a->seq_lens[own] : rest->end;
    if (rest->next < own_end) fetch_run(a, tile, i++, own, kv_head, &rest->next, own_end);
    else rest->number++, rest->next = rest->first;
  }
  for (; i < RUNS; i++) tile->num_bytes[i] = 0;
}

/* A tile's rows and tokens `start` to `end` of a sequence, of which all rows see those from `all_from` to `all_to`. */
static __attribute__((noinline)) void attend_tokens(const struct decode *a, struct tile *tile, int64_t sequence, int64_t kv_head, int64_t start,
                          int64_t end, int64_t all_from, int64_t all_to, struct rest *rest) {
  for (int64_t next; start < end; start = next) {
    next = start + KEYS < end ? start + KEYS : end;
    for (int64_t t = start, run_end; t < next; t = run_end) {
      run_end = next;
      const element *keys = run_of(a, sequence, kv_head, t, &run_end);
      read_keys(tile, t - start, run_end - t, keys, keys + to_values(a));
    }
    if (next < start + KEYS) end_keys(tile, next - start);
    look_ahead(a, tile, sequence, kv_head, next, next + KEYS < end ? next + KEYS : end, rest);
    attend_keys(tile, start, start < all_from || start + KEYS > all_to, a->softcap);
  }
}

/* Some sequences that share their first tokens: these all together, then of each the rest. */
static void attend_together(const struct decode *a, const int32_t *sequences, int64_t num_seqs, int64_t num_shared,
                            int64_t kv_head, int64_t first_head, int64_t heads) {
  struct tile tile;
  clear_tile(&tile, num_seqs * heads, (const char *)a->pool, to_values(a) * (int64_t)sizeof(element));
  int64_t start = num_shared, all_from = 0;
  for (int64_t r = 0; r < num_seqs * heads; r++) {
    const int64_t sequence = sequences[r / heads], head = first_head + r % heads, first = first_seen(a, sequence);
    const element *query = a->query + sequence * a->query_token + head * a->query_head;
    add_row(&tile, r, query, a->scale, first, num_shared, a->sinks ? a->sinks + head : NULL);
    if (first < start) start = first;
    if (first > all_from) all_from = first;
  }
  const int64_t most = MOST_AHEAD / (num_seqs * 2 * HEAD_DIM * (int64_t)sizeof(element));
  struct rest rest = {sequences, num_seqs, num_shared, num_shared + most, 0, num_shared};
  attend_tokens(a, &tile, sequences[0], kv_head, start, num_shared, all_from, num_shared, &rest);
  for (int64_t i = 0; i < num_seqs; i++) {
    const int64_t first = first_seen(a, sequences[i]);
    attend_alone(a, sequences[i], kv_head, first_head, heads, first > num_shared ? first : num_shared, &tile, i * heads);
  }
}

/* Some new tokens of a sequence, from its `first` on. */
static void attend_prompt(const struct decode *a, int64_t sequence, int64_t first, int64_t kv_head) {
  const int64_t heads = a->heads_per_kv, token = a->query_starts[sequence] + first;
  const int64_t left = a->query_starts[sequence + 1] - token, most = ROWS / heads, num_tokens = left < most ? left : most;
  const int64_t position = a->seq_lens[sequence] - left, end = position + num_tokens;
  struct tile tile;
  clear_tile(&tile, num_tokens * heads, (const char *)a->pool, to_values(a) * (int64_t)sizeof(element));
  for (int64_t r = 0; r < num_tokens * heads; r++) {
    const int64_t head = kv_head * heads + r % heads, seen = position + r / heads + 1;
    const element *query = a->query + (token + r / heads) * a->query_token + head * a->query_head;
    const int64_t from = a->window > 0 && seen > a->window ? seen - a->window : 0;
    add_row(&tile, r, query, a->scale, from, seen, a->sinks ? a->sinks + head : NULL);
  }
  const int64_t start = a->window > 0 && position + 1 > a->window ? position + 1 - a->window : 0;
  const int64_t all_from = a->window > 0 && end > a->window ? end - a->window : 0;
  attend_tokens(a, &tile, sequence, kv_head, start, end, all_from, position + 1, NULL);
  for (int64_t r = 0; r < num_tokens * heads; r++) {
    const int64_t row = (token + r / heads) * a->num_kv_heads * heads + kv_head * heads + r % heads;
    float largest, total, sum[VALUE_DIM];
    take_row(&tile, r, &largest, &total, sum);
    for (int d = 0; d < VALUE_DIM; d++) a->output[row * VALUE_DIM + d] = from_float(sum[d] / total);
  }
}

#define MIN_PRODUCTS 65536 /* below, a second thread costs more than it saves */

int64_t hf_paged_rows(void) { return ROWS; }

void hf_paged_decode(const struct decode *a) {
  /* Heads of a task: all that share a head's keys, or of those that share latents as many as the caches hold. */
  const int64_t most = IS_LATENT ? LATENT_HEADS : a->heads_per_kv, num_parts = (a->heads_per_kv + most - 1) / most;
  const int64_t num_tasks = (a->num_items ? a->num_items : a->num_seqs) * a->num_kv_heads * num_parts;
  int64_t num_keys = 0;
  for (int64_t i = 0; i < a->num_seqs; i++) num_keys += a->seq_lens[i] - first_seen(a, i);
  const int is_large = num_keys * a->num_kv_heads * a->heads_per_kv * HEAD_DIM >= MIN_PRODUCTS;
#pragma omp parallel for schedule(dynamic, 1) num_threads(a->num_threads) if (is_large)
  for (int64_t task = 0; task < num_tasks; task++) {
    const int64_t number = task / num_parts / a->num_kv_heads, kv_head = task / num_parts % a->num_kv_heads;
    const int64_t skipped = task % num_parts * most, first_head = kv_head * a->heads_per_kv + skipped;
    const int64_t left = a->heads_per_kv - skipped, heads = left < most ? left : most;
    const int32_t *item = a->items + number * 3; /* if there are any */
    const int64_t sequence = a->num_items ? a->order[item[0]] : number;
    if (a->num_items && item[1] > 1)
      attend_together(a, a->order + item[0], item[1], item[2], kv_head, first_head, heads);
    else
      attend_alone(a, sequence, kv_head, first_head, heads, first_seen(a, sequence), NULL, 0);
  }
}

/* New tokens of prompts: `items` are [num_items, 2], a sequence and the first of as many of its new tokens as have ROWS
   queries of a key/value head. */
void hf_paged_prompt(const struct decode *a) {
  const int64_t num_tasks = a->num_items * a->num_kv_heads;
  int64_t num_keys = 0;
  for (int64_t i = 0; i < a->num_items; i++) num_keys += a->seq_lens[a->items[i * 2]];
  const int is_large = num_keys * a->num_kv_heads * ROWS * HEAD_DIM >= MIN_PRODUCTS;
#pragma omp parallel for schedule(dynamic, 1) num_threads(a->num_threads) if (is_large)
  for (int64_t task = 0; task < num_tasks; task++) {
    const int32_t *item = a->items + task % a->num_items * 2;
    attend_prompt(a, item[0], item[1], task / a->num_items);
  }
}
