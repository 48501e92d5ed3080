/* The paged operations on CPU: new keys and values to their slots, and attention of new tokens over block tables.

   Compiled at first use for cpu.py, which defines the constants and holds the same structs. The pool is [num_blocks,
   num_layers, 2, num_kv_heads, block_size, HEAD_DIM], and VALUE_DIM is HEAD_DIM; where it IS_LATENT, [num_blocks,
   num_layers, 1, 1, block_size, HEAD_DIM], whole rows being keys and their first VALUE_DIM elements values. Where it holds
   codes and scales, each head's part of a block is block_size * (HEAD_DIM + SCALE_BYTES) bytes. Offsets and strides count
   elements, in the pool what it holds. Linked against no OpenMP runtime: torch has loaded one, whose threads these loops share. */
#include "cpu_element.h"
#include "cpu_stored.h"
#include "cpu_tile.h"
#include "cpu_few.h"

struct write {
  const element *key, *value; /* [num_tokens, num_kv_heads, HEAD_DIM], any strides of the first two; or what comes first
                                 in a row of latents, VALUE_DIM wide, and the rest */
  stored *pool;               /* at its first block's keys of the layer */
  const int64_t *slots;       /* [num_tokens]; below 0: not written */
  int64_t num_tokens, num_kv_heads, block_size, block_stride;
  int64_t key_token, key_head, value_token, value_head;
  int64_t num_threads;
};

/* From the row at an offset of a block to its scale. */
static inline float *scale_of(const stored *row, int64_t offset, int64_t block_size) {
  return (float *)(row + (block_size - offset) * HEAD_DIM) + offset;
}

void hf_paged_write(const struct write *w) {
  const int64_t head_stride = w->block_size * (HEAD_DIM + SCALE_BYTES), to_values = w->num_kv_heads * head_stride;
#pragma omp parallel for num_threads(w->num_threads) if (w->num_tokens > 64)
  for (int64_t t = 0; t < w->num_tokens; t++) {
    const int64_t slot = w->slots[t];
    if (slot < 0) continue;
    const int64_t offset = slot % w->block_size;
    stored *to = w->pool + slot / w->block_size * w->block_stride + offset * HEAD_DIM;
    if (IS_LATENT) {
      store_row(w->key + t * w->key_token, to, NULL, VALUE_DIM);
      store_row(w->value + t * w->value_token, to + VALUE_DIM, NULL, HEAD_DIM - VALUE_DIM);
      continue;
    }
    for (int64_t h = 0; h < w->num_kv_heads; h++, to += head_stride) {
      float *scale = IS_SCALED ? scale_of(to, offset, w->block_size) : NULL;
      store_row(w->key + t * w->key_token + h * w->key_head, to, scale, HEAD_DIM);
      if (IS_SCALED) scale = scale_of(to + to_values, offset, w->block_size);
      store_row(w->value + t * w->value_token + h * w->value_head, to + to_values, scale, HEAD_DIM);
    }
  }
}

struct attend {
  const element *query;         /* [tokens, heads, HEAD_DIM], any strides of the first two */
  element *output;              /* [tokens, heads, VALUE_DIM] */
  const stored *pool;           /* at its first block's keys of the layer */
  const int32_t *tables;        /* [num_seqs, table_width] */
  const int32_t *seq_lens;      /* [num_seqs], at least 1 */
  const int32_t *query_starts;  /* [num_seqs + 1], the first new token of each among the queries */
  const float *sinks;           /* [heads], or NULL */
  const int32_t *order;         /* sequences; those that begin with the same blocks are side by side; or NULL */
  const int32_t *items;         /* with `order` [num_items, 3]: the first of some in it, how many, and the tokens that
                                   they share; without it [num_items, 2]: a sequence, and the first of as many of its
                                   new tokens as a tile has rows for; of a sequence the last first */
  int64_t num_items;
  int64_t query_token, query_head;
  int64_t num_kv_heads, heads_per_kv, block_size, table_width, block_stride;
  int64_t heads;                /* query heads of a key/value head that a tile has rows for, ROWS at most */
  int64_t window;               /* tokens a query sees, itself included; 0: all */
  int64_t num_threads;
  const float *bias;            /* [heads, bias_width], added to scores of keys so far before a query, or NULL */
  int64_t bias_width;           /* the last one is for all that are farther */
  float scale, softcap;         /* softcap 0: none */
};

/* The first token that the query of a place in a sequence sees. */
static inline int64_t first_seen(const struct attend *a, int64_t place) {
  return a->window > 0 && place + 1 > a->window ? place + 1 - a->window : 0;
}

/* Tiles of keys begin at fixed places of a sequence, whatever reads them. */
static inline int64_t tile_of(int64_t token) { return token / KEYS * KEYS; }

/* What is added to the scores of a head's query at a place. */
static inline struct by_distance bias_of(const struct attend *a, int64_t head, int64_t place) {
  return (struct by_distance){a->bias ? a->bias + head * a->bias_width : NULL, a->bias_width - 1, place};
}

/* Where a sequence's keys lie from token `start` on, and the token behind those of the same block, `end` at most. */
static inline const stored *run_of(const struct attend *a, int64_t sequence, int64_t kv_head, int64_t start,
                                   int64_t *end) {
  const int64_t offset = start % a->block_size, next = start - offset + a->block_size;
  if (next < *end) *end = next;
  const int64_t block = a->tables[sequence * a->table_width + start / a->block_size];
  return a->pool + block * a->block_stride + kv_head * a->block_size * (HEAD_DIM + SCALE_BYTES) + offset * HEAD_DIM;
}

#define MOST_AHEAD 524288 /* bytes of keys and values that a processor's cache holds until they are used */

/* From a token's key to its value. */
static inline int64_t to_values(const struct attend *a) {
  return IS_LATENT ? 0 : a->num_kv_heads * a->block_size * (HEAD_DIM + SCALE_BYTES);
}

/* The sequence's tokens from `*next` on, `end` at most: the `i`-th run that is brought from memory meanwhile. */
static inline void fetch_run(const struct attend *a, struct keys *keys, int i, int64_t sequence, int64_t kv_head,
                             int64_t *next, int64_t end) {
  keys->ahead[i] = (const char *)run_of(a, sequence, kv_head, *next, &end);
  keys->num_bytes[i] = (end - *next) * HEAD_DIM * (int64_t)sizeof(stored);
  *next = end;
}

/* Some sequences that share their first tokens, and where it has come to: the tokens behind these that are fetched. */
struct rest {
  const int32_t *sequences;
  int64_t num_seqs, first, end;
  int64_t number, next; /* a sequence's number, and the next of its tokens */
};

/* What is fetched while keys are multiplied: the next ones, tokens `next` to `end`; then of the rest. */
static void look_ahead(const struct attend *a, struct keys *keys, int64_t sequence, int64_t kv_head, int64_t next,
                       int64_t end, struct rest *rest) {
  int i = 0;
  while (i < RUNS && next < end) fetch_run(a, keys, i++, sequence, kv_head, &next, end);
  while (rest && i < RUNS && rest->number < rest->num_seqs) {
    const int64_t own = rest->sequences[rest->number], own_end = a->seq_lens[own] < rest->end ? a->seq_lens[own] : rest->end;
    if (rest->next < own_end) fetch_run(a, keys, i++, own, kv_head, &rest->next, own_end);
    else rest->number++, rest->next = rest->first;
  }
  for (; i < RUNS; i++) keys->num_bytes[i] = 0;
}

/* The scales of `count` tokens of a block from `start` on, whose first key this is. */
static inline void read_scales(const struct attend *a, const stored *key, int64_t start, int64_t count, float *of_keys,
                               float *of_values) {
  const int64_t offset = start % a->block_size;
  memcpy(of_keys, scale_of(key, offset, a->block_size), count * sizeof(float));
  memcpy(of_values, scale_of(key + to_values(a), offset, a->block_size), count * sizeof(float));
}

/* Tiles of rows, one behind the other in a sequence, and the tokens that each of them wants. */
static __attribute__((noinline)) void attend_tokens(const struct attend *a, struct tile *tiles, int num_tiles,
                                                    int64_t sequence, int64_t kv_head, struct rest *rest) {
  struct keys keys;
  clear_keys(&keys, (const char *)a->pool, to_values(a) * (int64_t)sizeof(stored));
  const int64_t end = tiles[num_tiles - 1].stop;
  for (int64_t start = tiles->start, next; start < end; start = next) {
    next = start + KEYS < end ? start + KEYS : end;
    for (int64_t t = start, run_end; t < next; t = run_end) {
      run_end = next;
      const stored *run = run_of(a, sequence, kv_head, t, &run_end);
      read_keys(&keys, t - start, run_end - t, run, run + to_values(a));
      if (IS_SCALED) read_scales(a, run, t, run_end - t, keys.key_scale + t - start, keys.value_scale + t - start);
    }
    if (next < start + KEYS) end_keys(&keys, next - start);
    look_ahead(a, &keys, sequence, kv_head, next, next + KEYS < end ? next + KEYS : end, rest);
    for (int i = 0; i < num_tiles; i++)
      if (tiles[i].start <= start && start < tiles[i].stop) {
        attend_keys(tiles + i, &keys, start, a->softcap);
        memset(keys.num_bytes, 0, sizeof keys.num_bytes); /* the first one has fetched it */
      }
  }
}

/* Sets where the keys of a sequence's tokens `start` on lie, of KEYS at most, before `end`: in the order in which they lie,
   of each run in a block head by head, from one on. */
static void find_keys(const struct attend *a, int64_t sequence, int64_t kv_head, int heads, int64_t start, int64_t end,
                      const stored **keys) {
  if (start + KEYS < end) end = start + KEYS;
  for (int64_t run_end; start < end; start = run_end) {
    run_end = end;
    const stored *own = run_of(a, sequence, kv_head, start, &run_end);
    for (int h = 0; h < heads; h++, own += a->block_size * (HEAD_DIM + SCALE_BYTES)) {
      if (IS_SCALED) { /* of use before the next tile alone: this one's are read at once */
        __builtin_prefetch(scale_of(own, start % a->block_size, a->block_size), 0, 2);
        __builtin_prefetch(scale_of(own + to_values(a), start % a->block_size, a->block_size), 0, 2);
      }
      for (int64_t t = 0; t < run_end - start; t++) *keys++ = own + t * HEAD_DIM;
    }
  }
}

/* The scales of the keys and values that are set, of tokens `start` on, before `end`; zeros behind it. */
static void find_scales(const struct attend *a, struct few *few, int64_t start, int64_t end) {
  if (start + KEYS < end) end = start + KEYS;
  memset(few->key_scale, 0, sizeof few->key_scale), memset(few->value_scale, 0, sizeof few->value_scale);
  for (int64_t t = start, next; t < end; t = next) {
    next = t - t % a->block_size + a->block_size;
    if (next > end) next = end;
    read_scales(a, few->keys[t - start], t, next - t, few->key_scale + t - start, few->value_scale + t - start);
  }
}

/* Sets one head's keys and values of tokens `start` on, before `end`; zeros behind it. */
static void set_keys(const struct attend *a, struct few *few, int64_t sequence, int64_t kv_head, int64_t start, int64_t end) {
  static const stored none[HEAD_DIM];
  find_keys(a, sequence, kv_head, 1, start, end, few->keys);
  for (int64_t k = end - start; k < KEYS; k++) few->keys[k] = none;
  for (int k = 0; k < KEYS; k++) few->values[k] = few->keys[k] == none ? none : few->keys[k] + to_values(a);
  if (IS_SCALED) find_scales(a, few, start, end);
}

/* `attend_tokens` of a few rows of each of some heads. */
static void attend_few(const struct attend *a, struct few *few, int rows, int64_t sequence, int64_t kv_head, int heads,
                       int64_t start, int64_t end) {
  few_function *attend_keys_of_few = NULL;
  const stored *next[HEADS * KEYS];
  for (int i = 0; i < HEADS * KEYS; i++) next[i] = a->pool; /* anywhere: they are only fetched */
  for (int h = 0; h < heads; h++) attend_keys_of_few = few_keys_of(few + h, rows);
  for (; start < end; start += KEYS) {
    for (int h = 0; h < heads; h++) set_keys(a, few + h, sequence, kv_head + h, start, end);
    find_keys(a, sequence, kv_head, heads, start + KEYS, end, next);
    attend_keys_of_few(few, heads, next, to_values(a), start, a->softcap);
  }
}

/* Some of a sequence's new tokens: the first among the queries, and in the sequence; how many rows they are, and the
   tokens that they see. */
struct piece {
  int64_t sequence, token, place, rows, start, end;
};

/* As many as a tile has rows for, from the `first` on; what lies before token `begun_to` they have seen. */
static struct piece piece_of(const struct attend *a, int64_t sequence, int64_t first, int64_t heads, int64_t begun_to) {
  const int64_t token = a->query_starts[sequence] + first, left = a->query_starts[sequence + 1] - token;
  const int64_t most = ROWS / a->heads, num_new = left < most ? left : most, place = a->seq_lens[sequence] - left;
  const int64_t start = tile_of(first_seen(a, place));
  return (struct piece){sequence, token, place, num_new * heads, start < begun_to ? begun_to : start, place + num_new};
}

/* Row `r` of a piece for the heads from `first_head` on. */
static inline const element *query_of(const struct attend *a, const struct piece *own, int64_t r, int64_t first_head,
                                      int64_t heads) {
  return a->query + (own->token + r / heads) * a->query_token + (first_head + r % heads) * a->query_head;
}

static inline element *output_of(const struct attend *a, const struct piece *own, int64_t r, int64_t first_head,
                                 int64_t heads) {
  const int64_t num_heads = a->num_kv_heads * a->heads_per_kv;
  return a->output + ((own->token + r / heads) * num_heads + first_head + r % heads) * VALUE_DIM;
}

/* A piece of few rows, for `kv_heads` key/value heads from one on. Rows `first_row` on of `begun`, if there is one, are
   what its rows have come to. */
static void attend_piece(const struct attend *a, const struct piece *own, int64_t kv_head, int kv_heads,
                         int64_t first_head, int64_t heads, const struct tile *begun, int64_t first_row) {
  struct few few[HEADS];
  for (int64_t i = 0; i < kv_heads * own->rows; i++) {
    const int64_t h = i / own->rows, r = i % own->rows, place = own->place + r / heads;
    const int64_t of_kv = first_head + h * a->heads_per_kv, head = of_kv + r % heads;
    add_few(few + h, r, query_of(a, own, r, of_kv, heads), a->scale, first_seen(a, place), place + 1,
            a->sinks ? a->sinks + head : NULL, begun, first_row + r);
    few[h].bias[r] = bias_of(a, head, place);
  }
  attend_few(a, few, own->rows, own->sequence, kv_head, kv_heads, own->start, own->end);
  for (int64_t i = 0; i < kv_heads * own->rows; i++) {
    const int64_t h = i / own->rows, r = i % own->rows;
    take_few(few + h, r, output_of(a, own, r, first_head + h * a->heads_per_kv, heads));
  }
}

/* Pieces that are one behind the other, for one key/value head: each a tile, and all read its keys together. */
static void attend_pieces(const struct attend *a, const struct piece *pieces, int num_pieces, int64_t kv_head,
                          int64_t first_head, int64_t heads, const struct tile *begun, int64_t first_row) {
  struct tile tiles[TILES];
  for (int i = 0; i < num_pieces; i++) {
    const struct piece *own = pieces + i;
    struct tile *tile = tiles + i;
    clear_tile(tile, own->rows);
    for (int64_t r = 0; r < own->rows; r++) {
      const int64_t head = first_head + r % heads, place = own->place + r / heads;
      add_row(tile, r, query_of(a, own, r, first_head, heads), a->scale, first_seen(a, place), place + 1,
              a->sinks ? a->sinks + head : NULL, begun, first_row + r);
      tile->bias[r] = bias_of(a, head, place);
    }
    tile->start = own->start, tile->stop = own->end;
    tile->all_from = first_seen(a, own->end - 1), tile->all_to = own->place + 1;
  }
  attend_tokens(a, tiles, num_pieces, pieces->sequence, kv_head, NULL);
  for (int i = 0; i < num_pieces; i++)
    for (int64_t r = 0; r < pieces[i].rows; r++) take_row(tiles + i, r, output_of(a, pieces + i, r, first_head, heads));
}

/* One piece or several, for `kv_heads` key/value heads from one on. */
static void attend_new(const struct attend *a, const struct piece *pieces, int num_pieces, int64_t kv_head, int kv_heads,
                       int64_t first_head, int64_t heads, const struct tile *begun, int64_t first_row) {
  if (num_pieces == 1 && pieces->rows <= FEW)
    attend_piece(a, pieces, kv_head, kv_heads, first_head, heads, begun, first_row);
  else
    for (int h = 0; h < kv_heads; h++)
      attend_pieces(a, pieces, num_pieces, kv_head + h, first_head + h * a->heads_per_kv, heads, begun, first_row);
}

/* Some sequences with a new token each that share their first tokens: these all together, then of each the rest. */
static void attend_together(const struct attend *a, const int32_t *sequences, int64_t num_seqs, int64_t num_shared,
                            int64_t kv_head, int64_t first_head, int64_t heads) {
  struct tile tile;
  clear_tile(&tile, num_seqs * heads);
  const int64_t shared = tile_of(num_shared);
  int64_t start = shared, all_from = 0;
  for (int64_t r = 0; r < num_seqs * heads; r++) {
    const int64_t sequence = sequences[r / heads], head = first_head + r % heads;
    const int64_t first = first_seen(a, a->seq_lens[sequence] - 1);
    const element *query = a->query + a->query_starts[sequence] * a->query_token + head * a->query_head;
    add_row(&tile, r, query, a->scale, first, shared, a->sinks ? a->sinks + head : NULL, NULL, 0);
    tile.bias[r] = bias_of(a, head, a->seq_lens[sequence] - 1);
    if (first < start) start = first;
    if (first > all_from) all_from = first;
  }
  const int64_t most = MOST_AHEAD / (num_seqs * 2 * HEAD_DIM * (int64_t)sizeof(stored));
  struct rest rest = {sequences, num_seqs, shared, shared + most, 0, shared};
  tile.start = tile_of(start), tile.stop = shared, tile.all_from = all_from, tile.all_to = shared;
  attend_tokens(a, &tile, 1, sequences[0], kv_head, &rest);
  for (int64_t i = 0; i < num_seqs; i++) {
    const struct piece own = piece_of(a, sequences[i], 0, heads, shared);
    attend_new(a, &own, 1, kv_head, 1, first_head, heads, &tile, i * heads);
  }
}

/* Items from `first` to `end`, the last one first: those of one sequence that are one behind the other at once. */
static void attend_items(const struct attend *a, int64_t first, int64_t end, int64_t kv_head, int kv_heads,
                         int64_t first_head, int64_t heads) {
  struct piece pieces[TILES];
  int count = 0;
  for (int64_t i = end; i-- > first;) {
    const int32_t *item = a->items + 2 * i;
    pieces[count++] = piece_of(a, item[0], item[1], heads, 0);
    if (i > first && item[-2] == item[0]) continue;
    attend_new(a, pieces, count, kv_head, kv_heads, first_head, heads, NULL, 0);
    count = 0;
  }
}

#define MIN_PRODUCTS 65536 /* below, a second thread costs more than it saves */

int64_t hf_paged_rows(void) { return ROWS; }

void hf_paged_attend(const struct attend *a) {
  const int64_t num_parts = (a->heads_per_kv + a->heads - 1) / a->heads;
  const int64_t width = a->order ? 3 : 2;
  int64_t num_keys = 0, most_keys = 0; /* of all rows, about; of the largest item */
  int has_few = 0, has_runs = 0; /* of items of one sequence */
  for (int64_t i = 0; i < a->num_items; i++) {
    const int32_t *item = a->items + i * width;
    const int64_t sequence = a->order ? a->order[item[0]] : item[0], length = a->seq_lens[sequence];
    const int64_t own = (length - first_seen(a, length - 1)) * (a->order ? item[1] : 1);
    const int64_t left = a->query_starts[sequence + 1] - a->query_starts[sequence] - item[1];
    has_runs |= !a->order && i && item[0] == item[-2];
    has_few |= (a->order ? item[1] : left) * a->heads_per_kv <= FEW;
    num_keys += own, most_keys = own > most_keys ? own : most_keys;
  }
  const int is_large = num_keys * a->num_kv_heads * a->heads_per_kv * HEAD_DIM >= MIN_PRODUCTS;
  /* Items and key/value heads of a task: as many as leave each thread work for two of the largest tasks. */
  const int64_t least = is_large && a->num_threads > 1 ? 2 * a->num_threads * most_keys : 0;
  int of_items = has_runs ? TILES : 1, at_once = has_few && num_parts == 1 ? HEADS : 1;
#define IS_TOO_MUCH (num_keys * a->num_kv_heads < least * at_once * of_items)
  while (of_items > 1 && IS_TOO_MUCH) of_items /= 2;
  while (at_once > 1 && (a->num_kv_heads % at_once || IS_TOO_MUCH)) at_once /= 2;
#undef IS_TOO_MUCH
  const int64_t num_groups = (a->num_items + of_items - 1) / of_items;
  const int64_t num_tasks = num_groups * a->num_kv_heads / at_once * num_parts;
#pragma omp parallel for schedule(dynamic, 1) num_threads(a->num_threads) if (is_large)
  for (int64_t task = 0; task < num_tasks; task++) {
    const int64_t first = task % num_groups * of_items, end = first + of_items;
    const int64_t kv_head = task / num_groups / num_parts * at_once, skipped = task / num_groups % num_parts * a->heads;
    const int64_t first_head = kv_head * a->heads_per_kv + skipped, left = a->heads_per_kv - skipped;
    const int64_t heads = left < a->heads ? left : a->heads;
    if (!a->order) {
      attend_items(a, first, end < a->num_items ? end : a->num_items, kv_head, at_once, first_head, heads);
      continue;
    }
    const int32_t *item = a->items + 3 * first, *sequences = a->order + item[0];
    const struct piece own = piece_of(a, sequences[0], 0, heads, 0);
    if (item[1] == 1) attend_new(a, &own, 1, kv_head, at_once, first_head, heads, NULL, 0);
    else
      for (int h = 0; h < at_once; h++)
        attend_together(a, sequences, item[1], item[2], kv_head + h, first_head + h * a->heads_per_kv, heads);
  }
}
