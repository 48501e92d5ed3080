/* Attention of a tile of query rows that read the same keys: each lane of a vector is a row, so that a key's element is
   loaded once for all of them and no sum crosses lanes. Online softmax over tiles of keys, in float32.

   A row's result has one order of sums, whatever other rows the tile has: over a head's elements one after another, of
   the weights of KEYS tokens by halves, over values one token after another. The compiler may neither reorder nor contract
   (see c_compiler.py); what is contracted is written so.

   A row of codes is multiplied as it lies; its scale goes to the score, or to the weight.

   Where a processor multiplies bfloat16 two by two, so does attention, in the order of the instruction: queries with keys
   by pairs of elements, scaled afterwards; and weights with values by pairs of tokens. For that weights are rounded to
   bfloat16, after their sum was taken unrounded.

   Needs cpu_stored.h, HEAD_DIM and VALUE_DIM. */
#if defined(__AVX__)
#include <immintrin.h>
#endif
#if defined(__AVX512F__)
enum { LANES = 16, AT_ONCE = 8 }; /* sums of two vectors are in 16 of 32 registers */
#elif defined(__AVX__)
enum { LANES = 8, AT_ONCE = 4 }; /* in 8 of 16 */
#else
enum { LANES = 4, AT_ONCE = 8 };
#endif
enum { VECTORS = 2, ROWS = VECTORS * LANES, KEYS = 32, VALUES = (VALUE_DIM + AT_ONCE - 1) / AT_ONCE * AT_ONCE };
enum { RUNS = KEYS / AT_ONCE, LINE = 64 };

typedef float vector __attribute__((vector_size(LANES * 4)));
typedef int32_t numbers __attribute__((vector_size(LANES * 4)));

/* What is added to the scores of a row whose query is at a place: by a key's distance, the last for all farther ones. */
struct by_distance {
  const float *bias; /* NULL: nothing */
  int64_t last, place;
};

/* KEYS scores, `step` apart, of keys from token `start` on. */
static inline void add_bias(const struct by_distance *own, float *scores, int64_t step, int64_t start) {
  if (!own->bias) return;
  for (int64_t k = 0, away = own->place - start; k < KEYS; k++, away--)
    scores[k * step] += own->bias[away < 0 ? 0 : away < own->last ? away : own->last];
}

#if defined(__AVX512BF16__) && IS_BFLOAT16 && STORED == 0 && HEAD_DIM % 2 == 0
#define IS_BY_PAIRS 1
enum { TOKENS = 2 }; /* whose values are multiplied at once */
/* Adds both products of two elements, in one order, to each lane. */
static inline vector multiply_pairs(numbers a, numbers b, vector c) {
  return (vector)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
}

/* Lanes rounded to elements. */
static inline __m256i rounded(vector x) { return (__m256i)_mm512_cvtneps_pbh((__m512)x); }

/* The same of two vectors, lane by lane side by side. */
static inline numbers paired(vector first, vector second) {
  return (numbers)_mm512_cvtepu16_epi32(rounded(first)) | (numbers)_mm512_cvtepu16_epi32(rounded(second)) << 16;
}
#else
#define IS_BY_PAIRS 0
enum { TOKENS = 1 };
#endif

/* Of `vectors` vectors of rows; those of one dimension (or a pair), or one key, lie side by side. */
struct tile {
  union {
    vector query[HEAD_DIM * VECTORS]; /* times the scale; zeros where there is no row */
    element pairs[HEAD_DIM * VECTORS * LANES]; /* as they are, in the first half */
  };
  vector sum[VALUES * VECTORS];
  vector scores[KEYS * VECTORS], largest[VECTORS], total[VECTORS];
  numbers first[VECTORS], end[VECTORS]; /* tokens that a row sees */
  float scale;
  struct by_distance bias[ROWS];
  int64_t vectors;
  int64_t start, stop;      /* tokens that are multiplied: from where a tile of keys begins */
  int64_t all_from, all_to; /* of them, those that all rows see */
};
/* TILES tiles, which read the same keys, stay in a second-level cache beside them. */
enum { FIT = (160 << 10) / sizeof(struct tile), TILES = FIT < 1 ? 1 : FIT < 8 ? FIT : 8 };

/* KEYS keys and values, as tiles multiply them. */
struct keys {
  union { float keys[KEYS][HEAD_DIM]; element key_pairs[KEYS][HEAD_DIM]; };
  union { float values[KEYS][VALUES]; element value_pairs[KEYS / 2][VALUES][2]; }; /* pairs of tokens */
  float key_scale[KEYS], value_scale[KEYS]; /* of codes */
  /* What comes next, brought from memory meanwhile: runs of keys, bytes of a run, from a run's keys to its values. */
  const char *ahead[RUNS];
  int64_t num_bytes[RUNS], to_values;
};

/* a * b + c, of which the product isn't rounded where a processor can do that. */
static inline vector multiply_add(float a, vector b, vector c) {
#if defined(__AVX512F__)
  return (vector)_mm512_fmadd_ps(_mm512_set1_ps(a), (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vector)_mm256_fmadd_ps(_mm256_set1_ps(a), (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

static inline vector choose(numbers mask, vector yes, vector no) {
  return (vector)((mask & (numbers)yes) | (~mask & (numbers)no));
}

/* None yet, and nothing to fetch. `pool`: anywhere in it; `to_values`: bytes from a token's key to its value. */
static void clear_keys(struct keys *keys, const char *pool, int64_t to_values) {
  for (int i = 0; i < RUNS; i++) keys->ahead[i] = pool, keys->num_bytes[i] = 0;
  keys->to_values = to_values;
  if (VALUES > VALUE_DIM) memset(keys->values, 0, sizeof keys->values);
}

/* A tile without rows, for up to so many. */
static void clear_tile(struct tile *tile, int64_t rows) {
  const int64_t vectors = tile->vectors = rows > LANES ? VECTORS : 1;
  memset(tile->query, 0, HEAD_DIM * vectors * sizeof(vector));
  memset(tile->sum, 0, VALUES * vectors * sizeof(vector));
  for (int v = 0; v < VECTORS; v++) {
    tile->largest[v] = (vector){0} - INFINITY, tile->total[v] = (vector){0};
    tile->first[v] = (numbers){0}, tile->end[v] = (numbers){0} + INT32_MAX;
  }
  memset(tile->bias, 0, sizeof tile->bias);
}

/* What a row begins with: a sink, or what a row of another tile has come to; `sum` NULL: zeros. */
struct row {
  float largest, total;
  const float *sum; /* elements `step` apart */
  int64_t step;
};

static inline struct row begin_row(const float *sink, const struct tile *begun, int64_t r) {
  if (!begun) return (struct row){sink ? *sink : -INFINITY, sink ? 1.0f : 0.0f, NULL, 0};
  const int64_t v = r / LANES, lane = r % LANES;
  return (struct row){begun->largest[v][lane], begun->total[v][lane], (const float *)begun->sum + r, begun->vectors * LANES};
}

/* Row `r`: its query, the tokens it sees, and its head's sink (or NULL): a score without a value. It goes on from what a
   row of another tile, if there is one, has come to. */
static void add_row(struct tile *tile, int64_t r, const element *query, float scale, int64_t first, int64_t end,
                    const float *sink, const struct tile *begun, int64_t begun_row) {
  float *to = (float *)tile->query + r;
  const int64_t lanes = tile->vectors * LANES;
  tile->scale = scale;
  if (IS_BY_PAIRS)
    for (int d = 0; d < HEAD_DIM; d += 2) memcpy(tile->pairs + d * lanes + 2 * r, query + d, 2 * sizeof(element));
  else
    for (int d = 0; d < HEAD_DIM; d++) to[d * lanes] = to_float(query[d]) * scale;
  tile->first[r / LANES][r % LANES] = (int32_t)first;
  tile->end[r / LANES][r % LANES] = (int32_t)end;
  struct row row = begin_row(sink, begun, begun_row);
  tile->largest[r / LANES][r % LANES] = row.largest;
  tile->total[r / LANES][r % LANES] = row.total;
  if (row.sum)
    for (int d = 0; d < VALUE_DIM; d++) ((float *)tile->sum)[d * tile->vectors * LANES + r] = row.sum[d * row.step];
}

/* Row `r`'s result. */
static inline void take_row(const struct tile *tile, int64_t r, element *to) {
  const float *sum = (const float *)tile->sum + r, total = tile->total[r / LANES][r % LANES];
  for (int d = 0; d < VALUE_DIM; d++) to[d] = from_float(sum[d * tile->vectors * LANES] / total);
}

/* Some of the next KEYS keys and values, which lie side by side, to place `at`. */
static inline void read_keys(struct keys *to, int64_t at, int64_t count, const stored *keys, const stored *values) {
  for (int64_t t = 0; t < count; t++)
    if (IS_BY_PAIRS) memcpy(to->key_pairs[at + t], keys + t * HEAD_DIM, HEAD_DIM * sizeof(element));
    else
      for (int d = 0; d < HEAD_DIM; d++) to->keys[at + t][d] = from_stored(keys[t * HEAD_DIM + d]);
  for (int64_t t = 0; t < count; t++, values += HEAD_DIM)
    if (!IS_BY_PAIRS) {
      for (int d = 0; d < VALUE_DIM; d++) to->values[at + t][d] = from_stored(values[d]);
    } else if ((at + t) % 2 == 0 && t + 1 < count) {
      element(*pairs)[2] = to->value_pairs[(at + t) / 2];
      for (int d = 0; d < VALUE_DIM; d++) pairs[d][0] = values[d], pairs[d][1] = values[HEAD_DIM + d];
      t++, values += HEAD_DIM;
    } else {
      for (int d = 0; d < VALUE_DIM; d++) to->value_pairs[(at + t) / 2][d][(at + t) % 2] = values[d];
    }
}

/* Zeros behind the last `count` that were read: what is masked is multiplied all the same. */
static inline void end_keys(struct keys *to, int64_t count) {
  if (IS_BY_PAIRS) memset(to->key_pairs[count], 0, (KEYS - count) * sizeof to->key_pairs[0]);
  else memset(to->keys[count], 0, (KEYS - count) * sizeof to->keys[0]);
  if (IS_BY_PAIRS) {
    for (int d = 0; d < VALUE_DIM && count % 2; d++) to->value_pairs[count / 2][d][1] = 0;
    memset(to->value_pairs[(count + 1) / 2], 0, (KEYS - count) / 2 * sizeof to->value_pairs[0]);
  } else {
    memset(to->values[count], 0, (KEYS - count) * sizeof to->values[0]);
  }
  memset(to->key_scale + count, 0, (KEYS - count) * sizeof(float));
  memset(to->value_scale + count, 0, (KEYS - count) * sizeof(float));
}

static inline __attribute__((always_inline)) void multiply_keys(struct tile *tile, const struct keys *keys,
                                                                const int vectors) {
  for (int k = 0; k < KEYS; k += AT_ONCE) {
    const char *ahead = keys->ahead[k / AT_ONCE];
    const int64_t num_bytes = keys->num_bytes[k / AT_ONCE];
    vector score[AT_ONCE][VECTORS];
    for (int i = 0; i < AT_ONCE; i++)
      for (int v = 0; v < vectors; v++) score[i][v] = (vector){0};
#if IS_BY_PAIRS
    for (int d = 0; d < HEAD_DIM / 2; d++) {
      for (int line = 2 * d; line < 2 * d + 2; line++)
        if (line * LINE < num_bytes) __builtin_prefetch(ahead + line * LINE, 0, 2);
      for (int i = 0; i < AT_ONCE; i++) {
        int32_t key;
        memcpy(&key, keys->key_pairs[k + i] + 2 * d, sizeof key);
        for (int v = 0; v < vectors; v++)
          score[i][v] = multiply_pairs((numbers)tile->query[d * vectors + v], (numbers){0} + key, score[i][v]);
      }
    }
    for (int i = 0; i < AT_ONCE; i++)
      for (int v = 0; v < vectors; v++) score[i][v] *= tile->scale;
#else
    for (int d = 0; d < HEAD_DIM; d++) {
      vector query[VECTORS];
      for (int v = 0; v < vectors; v++) query[v] = tile->query[d * vectors + v];
      if (d * LINE < num_bytes) __builtin_prefetch(ahead + d * LINE, 0, 2);
      for (int i = 0; i < AT_ONCE; i++) {
        const float key = keys->keys[k + i][d];
        for (int v = 0; v < vectors; v++) score[i][v] = multiply_add(key, query[v], score[i][v]);
      }
    }
#endif
    for (int i = 0; i < AT_ONCE; i++)
      for (int v = 0; v < vectors; v++)
        tile->scores[(k + i) * vectors + v] = IS_SCALED ? score[i][v] * keys->key_scale[k + i] : score[i][v];
  }
}

/* Scores to weights. `start`: the tile's first token. */
static inline __attribute__((always_inline)) void weigh(struct tile *tile, const struct keys *keys,
                                                        const int vectors, int64_t start, int is_masked, float softcap,
                                                        vector *factor) {
  const numbers minus_infinity = (numbers)((vector){0} - INFINITY);
  float *scores = (float *)tile->scores;
  if (softcap > 0)
    for (int i = 0; i < KEYS * vectors * LANES; i++) scores[i] = tanhf(scores[i] / softcap) * softcap;
  for (int r = 0; r < vectors * LANES; r++) add_bias(&tile->bias[r], scores + r, vectors * LANES, start);
  vector top[VECTORS];
  for (int v = 0; v < vectors; v++) top[v] = tile->largest[v];
  if (is_masked)
    for (int k = 0; k < KEYS; k++)
      for (int v = 0; v < vectors; v++) {
        const numbers token = (numbers){0} + (int32_t)(start + k);
        const numbers is_seen = (token >= tile->first[v]) & (token < tile->end[v]);
        tile->scores[k * vectors + v] = choose(is_seen, tile->scores[k * vectors + v], (vector)minus_infinity);
      }
  for (int k = 0; k < KEYS; k++)
    for (int v = 0; v < vectors; v++) {
      const vector score = tile->scores[k * vectors + v];
      top[v] = choose(score > top[v], score, top[v]);
    }
  for (int v = 0; v < vectors; v++) {
    /* A row that has seen nothing yet: -inf less -inf would be NaN. */
    const numbers is_new = (numbers)tile->largest[v] == minus_infinity;
    const vector shift = choose((numbers)top[v] == minus_infinity, (vector){0}, top[v]);
    factor[v] = tile->largest[v] - shift;
    for (int r = 0; r < LANES; r++) factor[v][r] = exp_negative(factor[v][r]);
    factor[v] = choose(is_new, (vector){0}, factor[v]);
    tile->largest[v] = top[v];
    tile->total[v] *= factor[v];
    for (int k = 0; k < KEYS; k++) tile->scores[k * vectors + v] -= shift;
  }
  for (int i = 0; i < KEYS * vectors * LANES; i++) scores[i] = scores[i] == -INFINITY ? 0 : exp_negative(scores[i]);
  vector sum[KEYS / 2];
  for (int v = 0; v < vectors; v++) {
    for (int k = 0; k < KEYS / 2; k++)
      sum[k] = tile->scores[k * vectors + v] + tile->scores[(k + KEYS / 2) * vectors + v];
    for (int half = KEYS / 4; half; half /= 2)
      for (int k = 0; k < half; k++) sum[k] += sum[k + half];
    tile->total[v] += sum[0];
  }
  if (IS_SCALED)
    for (int k = 0; k < KEYS; k++)
      for (int v = 0; v < vectors; v++) tile->scores[k * vectors + v] *= keys->value_scale[k];
}

static inline __attribute__((always_inline)) void multiply_values(struct tile *tile, const struct keys *keys,
                                                                  const int vectors, const vector *factor) {
#if IS_BY_PAIRS
  numbers pairs[KEYS / 2 * VECTORS];
  for (int k = 0; k < KEYS / 2; k++)
    for (int v = 0; v < vectors; v++)
      pairs[k * vectors + v] = paired(tile->scores[2 * k * vectors + v], tile->scores[(2 * k + 1) * vectors + v]);
#endif
  for (int d = 0; d < VALUES; d += AT_ONCE) {
    const int line = d / AT_ONCE * KEYS, run = line / VALUES; /* one each time, as keys' */
    const char *ahead = keys->ahead[run] + keys->to_values;
    const int64_t num_bytes = keys->num_bytes[run];
    vector sum[AT_ONCE][VECTORS];
    for (int i = 0; i < AT_ONCE; i++)
      for (int v = 0; v < vectors; v++) sum[i][v] = tile->sum[(d + i) * vectors + v] * factor[v];
    for (int k = 0; k < KEYS; k += TOKENS) {
      for (int t = k; t < k + TOKENS; t++) {
        const int64_t at = (line % VALUES + t) * LINE;
        if (at < num_bytes) __builtin_prefetch(ahead + at, 0, 2);
      }
#if IS_BY_PAIRS
      for (int i = 0; i < AT_ONCE; i++) {
        int32_t value;
        memcpy(&value, keys->value_pairs[k / 2][d + i], sizeof value);
        for (int v = 0; v < vectors; v++)
          sum[i][v] = multiply_pairs(pairs[k / 2 * vectors + v], (numbers){0} + value, sum[i][v]);
      }
#else
      vector weight[VECTORS];
      for (int v = 0; v < vectors; v++) weight[v] = tile->scores[k * vectors + v];
      for (int i = 0; i < AT_ONCE; i++) {
        const float value = keys->values[k][d + i];
        for (int v = 0; v < vectors; v++) sum[i][v] = multiply_add(value, weight[v], sum[i][v]);
      }
#endif
    }
    for (int i = 0; i < AT_ONCE; i++)
      for (int v = 0; v < vectors; v++) tile->sum[(d + i) * vectors + v] = sum[i][v];
  }
}

/* Keys and values, of which token `start` is the first; those that no row sees are masked. */
static inline __attribute__((always_inline)) void attend_keys_of(struct tile *tile, const struct keys *keys,
                                                                 const int vectors, int64_t start, int is_masked,
                                                                 float softcap) {
  vector factor[VECTORS];
  multiply_keys(tile, keys, vectors);
  weigh(tile, keys, vectors, start, is_masked, softcap, factor);
  multiply_values(tile, keys, vectors, factor);
}

static void attend_keys(struct tile *tile, const struct keys *keys, int64_t start, float softcap) {
  const int is_masked = start < tile->all_from || start + KEYS > tile->all_to;
  if (tile->vectors == 1) attend_keys_of(tile, keys, 1, start, is_masked, softcap);
  else attend_keys_of(tile, keys, VECTORS, start, is_masked, softcap);
}
