/* Attention of a few query rows of one sequence, in the order of sums of cpu_tile.h and so with its bits: where rows would
   fill few lanes of a tile, lanes are keys for scores, and elements of values for sums.

   Needs cpu_tile.h. A lane holds 4 bytes: of bfloat16 a pair of elements, of codes four, which are sums of their own. */
enum { FEW = 8, PAIR = 4 / sizeof(stored), STEP = LANES * PAIR, PARTS = KEYS / LANES };
enum { MOST_STEPS = 4, SUMS = LANES < 16 ? 8 : 16 }; /* that registers hold at once */
/* Key/value heads that are read together: memory gives more, the longer a piece of it is (measured on AVX2). */
enum { HEADS = LANES < 16 && !IS_LATENT ? 2 : 1 };
enum { KEY_STEPS = (HEAD_DIM + STEP - 1) / STEP, VALUE_STEPS = (VALUE_DIM + STEP - 1) / STEP };

struct few {
  union {                                               /* zeros behind it */
    float query[FEW][KEY_STEPS * STEP];                 /* times the scale */
    element pairs[FEW][KEY_STEPS * STEP];
  };
  float scale;
  element weights[FEW][KEYS];                           /* of a tile, rounded */
  vector sum[FEW][VALUE_STEPS][PAIR];                   /* of first, of second... elements */
  float largest[FEW], total[FEW];
  int64_t first[FEW], end[FEW];                         /* tokens that a row sees */
  float key_scale[KEYS], value_scale[KEYS];             /* of codes */
  struct by_distance bias[FEW];
  const stored *keys[KEYS], *values[KEYS];              /* of a tile */
};

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (numbers){__VA_ARGS__})
#endif
#if defined(__AVX512F__)
#define LOW(a, b) SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define HIGH(a, b) SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#elif defined(__AVX__)
#define LOW(a, b) SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define HIGH(a, b) SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#else
#define LOW(a, b) SHUFFLE(a, b, 0, 4, 1, 5)
#define HIGH(a, b) SHUFFLE(a, b, 2, 6, 3, 7)
#endif
#define INLINE static inline __attribute__((always_inline))
#define EACH(i, count) _Pragma("GCC unroll 16") for (int i = 0; i < count; i++)

INLINE void riffle(vector *rows) {
  vector next[LANES];
  EACH(i, LANES / 2) next[2 * i] = LOW(rows[i], rows[i + LANES / 2]), next[2 * i + 1] = HIGH(rows[i], rows[i + LANES / 2]);
  EACH(i, LANES) rows[i] = next[i];
}

/* LANES rows as so many columns: riffled once for each bit of a lane's number. */
INLINE void transpose(vector *rows) {
  riffle(rows), riffle(rows);
  if (LANES > 4) riffle(rows);
  if (LANES > 8) riffle(rows);
}

/* Up to STEP elements, and zeros, as they lie. */
INLINE vector load(const stored *from, const int count) {
  vector x = {0};
  memcpy(&x, from, (count < STEP ? count : STEP) * sizeof(stored));
  return x;
}

/* As `from_stored`, the first elements of pairs or fours, the second... */
INLINE vector element_of(vector lanes, const int which) {
#if STORED == 0
  if (PAIR == 1) return lanes;
  return which ? (vector)((numbers)lanes & (int32_t)0xffff0000) : (vector)((numbers)lanes << 16);
#elif STORED == 1
  return __builtin_convertvector((numbers)lanes << (24 - 8 * which) >> 24, vector);
#else
  const numbers code = (numbers)lanes >> 8 * which, size = (code & 0x7f) << DROPPED;
  const vector least = (vector)((numbers){0} + ((128 - BIAS) << 23)), small = (vector)(size + (numbers)least) - least;
  const numbers offset = (numbers)choose(size < NO_NUMBER, (vector)((numbers){0} + ((127 - BIAS) << 23)),
                                         (vector)((numbers){0} + ((255 - TOP) << 23)));
  return (vector)((numbers)choose(size < LEAST_NORMAL, small, (vector)(size + offset)) | (code & 0x80) << 24);
#endif
}

/* The sum of KEYS numbers by halves, or the largest of them. */
INLINE float folded(const float *from, const int is_sum) {
  vector x[PARTS];
  EACH(i, PARTS) memcpy(x + i, from + i * LANES, sizeof *x); /* each at once, or they are read in halves */
  _Pragma("GCC unroll 4") for (int half = PARTS / 2; half; half /= 2)
    EACH(i, half) x[i] = is_sum ? x[i] + x[i + half] : choose(x[i] > x[i + half], x[i], x[i + half]);
  _Pragma("GCC unroll 4") for (int n = 1; n < LANES; n *= 2) {
    const vector low = LOW(x[0], x[0]), high = HIGH(x[0], x[0]);
    x[0] = is_sum ? low + high : choose(low > high, low, high);
  }
  return x[0][0];
}

/* As `add_row`. */
static void add_few(struct few *few, int64_t r, const element *query, float scale, int64_t first, int64_t end,
                    const float *sink, const struct tile *begun, int64_t begun_row) {
  const struct row row = begin_row(sink, begun, begun_row);
  few->scale = scale;
  for (int d = 0; d < KEY_STEPS * STEP; d++)
    if (IS_BY_PAIRS) few->pairs[r][d] = d < HEAD_DIM ? query[d] : 0;
    else few->query[r][d] = d < HEAD_DIM ? to_float(query[d]) * scale : 0;
  few->first[r] = first, few->end[r] = end, few->largest[r] = row.largest, few->total[r] = row.total;
  memset(few->sum[r], 0, sizeof few->sum[r]);
  if (row.sum)
    for (int d = 0; d < VALUE_DIM; d++) few->sum[r][d / STEP][d % PAIR][d % STEP / PAIR] = row.sum[d * row.step];
}

static inline void take_few(const struct few *few, int64_t r, element *to) {
  for (int d = 0; d < VALUE_DIM; d++)
    to[d] = from_float(few->sum[r][d / STEP][d % PAIR][d % STEP / PAIR] / few->total[r]);
}

/* Brings a part, number `part` of so many, of KEYS of the next tile's rows into the second-level cache: blocks lie
   anywhere, no processor foresees the next. `behind`: from keys, to keys or to values. */
INLINE void fetch(const stored *const *next, int64_t behind, const int part, const int parts) {
  for (int k = part * KEYS / parts; k < (part + 1) * KEYS / parts; k++)
    for (int d = 0; d < HEAD_DIM; d += LINE / (int)sizeof(stored)) __builtin_prefetch(next[k] + behind + d, 0, 2);
}

/* Elements `s * STEP` on, `count` of them, of LANES keys: as many columns of PAIR elements each. */
INLINE void columns_of(const stored *const *keys, int s, const int count, vector *column) {
#if defined(__AVX__) && !defined(__AVX512F__)
  if (count == STEP) { /* halves of rows come from memory to where they belong, and are not shuffled there */
    EACH(half, 2) {
      __m256 row[4], first[2], last[2];
      EACH(i, 4) {
        const float *low = (const float *)(keys[i] + s * STEP), *high = (const float *)(keys[i + 4] + s * STEP);
        row[i] = _mm256_castps128_ps256(_mm_loadu_ps(low + 4 * half));
        row[i] = _mm256_insertf128_ps(row[i], _mm_loadu_ps(high + 4 * half), 1);
      }
      EACH(i, 2) {
        first[i] = _mm256_unpacklo_ps(row[2 * i], row[2 * i + 1]);
        last[i] = _mm256_unpackhi_ps(row[2 * i], row[2 * i + 1]);
      }
      column[4 * half] = (vector)_mm256_shuffle_ps(first[0], first[1], 0x44);
      column[4 * half + 1] = (vector)_mm256_shuffle_ps(first[0], first[1], 0xee);
      column[4 * half + 2] = (vector)_mm256_shuffle_ps(last[0], last[1], 0x44);
      column[4 * half + 3] = (vector)_mm256_shuffle_ps(last[0], last[1], 0xee);
    }
    return;
  }
#endif
  EACH(i, LANES) column[i] = load(keys[i] + s * STEP, count);
  transpose(column);
}

#if defined(__AVX512F__)
#define EACH_COLUMN(i) EACH(i, LANES)
#else /* columns go by way of memory: for all of them there are too few registers */
#define EACH_COLUMN(i) _Pragma("GCC unroll 1") for (int i = 0; i < LANES; i++)
#endif

/* Adds products with elements `s * STEP` on, `count` of them, to the scores of LANES keys each of `parts` parts, from part
   `p` on. */
INLINE void multiply_few(const struct few *few, const int rows, int p, const int parts, int s, const int count,
                         vector (*score)[PARTS]) {
  vector key[LANES][PARTS], sum[FEW][PARTS];
  for (int q = 0; q < parts; q++) {
    vector column[LANES];
    columns_of(few->keys + (p + q) * LANES, s, count, column);
    EACH(i, LANES) key[i][q] = column[i];
  }
  if (parts > 1) __asm__ volatile("" ::: "memory"); /* or the loops above and below are merged, and sums leave their registers */
  EACH(r, rows) EACH(q, parts) sum[r][q] = score[r][p + q];
#if IS_BY_PAIRS
  EACH(i, LANES) EACH(r, rows) {
    int32_t pair;
    memcpy(&pair, few->pairs[r] + s * STEP + 2 * i, sizeof pair);
    EACH(q, parts) sum[r][q] = multiply_pairs((numbers){0} + pair, (numbers)key[i][q], sum[r][q]);
  }
#else
  EACH_COLUMN(i) EACH(which, PAIR) EACH(q, parts) {
    const vector own = element_of(key[i][q], which);
    EACH(r, rows) sum[r][q] = multiply_add(few->query[r][s * STEP + i * PAIR + which], own, sum[r][q]);
  }
#endif
  EACH(r, rows) EACH(q, parts) score[r][p + q] = sum[r][q];
}

#if IS_BY_PAIRS
/* First or second elements of two rows, side by side. */
INLINE numbers both_of(vector first, vector second, const int which) {
  const numbers a = which ? (numbers)first >> 16 : (numbers)first, b = which ? (numbers)second : (numbers)second << 16;
  return (numbers)_mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)a, (__m512i)b);
}
#endif

/* Adds up to STEP elements of the values, `steps` times, from step `s` on: of their fours, `at_once` from `first` on.
   As pass number `pass` of so many, it fetches its part of what is next: memory is busy all the time. */
INLINE void add_some(struct few *few, const int rows, int s, const int steps, const int count, const int first,
                     const int at_once, float (*weight)[KEYS], const float *factor, const stored *const *next,
                     int64_t to_values, const int pass, const int passes) {
  vector sum[FEW][MOST_STEPS][PAIR]; /* of constant sizes, or they would not stay in registers */
  EACH(r, rows) EACH(i, steps) EACH(w, at_once) sum[r][i][w] = few->sum[r][s + i][first + w] * factor[r];
  _Pragma("GCC unroll 4") for (int k = 0; k < KEYS; k += TOKENS) {
    if (k % 4 == 0 && first == 0) fetch(next, to_values, pass * (KEYS / 4) + k / 4, passes * (KEYS / 4));
    EACH(i, steps) {
      const vector value = load(few->values[k] + (s + i) * STEP, count);
#if IS_BY_PAIRS
      const vector other = load(few->values[k + 1] + (s + i) * STEP, count);
      EACH(w, at_once) {
        const numbers own = both_of(value, other, first + w);
        EACH(r, rows) {
          int32_t pair;
          memcpy(&pair, few->weights[r] + k, sizeof pair);
          sum[r][i][w] = multiply_pairs((numbers){0} + pair, own, sum[r][i][w]);
        }
      }
#else
      EACH(w, at_once) {
        const vector own = element_of(value, first + w);
        EACH(r, rows) sum[r][i][w] = multiply_add(weight[r][k], own, sum[r][i][w]);
      }
#endif
    }
  }
  EACH(r, rows) EACH(i, steps) EACH(w, at_once) few->sum[r][s + i][first + w] = sum[r][i][w];
}

/* All of them: as many at once as there are registers for. */
INLINE void add_values(struct few *few, const int rows, int s, const int steps, const int count, float (*weight)[KEYS],
                       const float *factor, const stored *const *next, int64_t to_values, const int pass,
                       const int passes) {
  const int at_once = rows * PAIR > SUMS ? SUMS / rows : PAIR;
  EACH(part, PAIR / at_once)
    add_some(few, rows, s, steps, count, part * at_once, at_once, weight, factor, next, to_values, pass, passes);
}

/* Scores of one row's keys to weights. */
INLINE float weigh_few(struct few *few, int r, float *row, int64_t start, float softcap) {
  if (softcap > 0)
    for (int k = 0; k < KEYS; k++) row[k] = tanhf(row[k] / softcap) * softcap;
  add_bias(&few->bias[r], row, 1, start);
  const int64_t first = few->first[r] - start, end = few->end[r] - start;
  if (first > 0 || end < KEYS)
    for (int k = 0; k < KEYS; k++) row[k] = k >= first && k < end ? row[k] : -INFINITY;
  const float most = folded(row, 0), before = few->largest[r], top = most > before ? most : before;
  const float shift = top == -INFINITY ? 0 : top, factor = before == -INFINITY ? 0 : exp_negative(before - shift);
  for (int k = 0; k < KEYS; k++) row[k] -= shift;
  for (int k = 0; k < KEYS; k++) row[k] = row[k] == -INFINITY ? 0 : exp_negative(row[k]);
  few->largest[r] = top;
  few->total[r] = few->total[r] * factor + folded(row, 1);
  return factor;
}

/* Scores of the tile's keys to weights, of which token `start` is the first, and to what sums so far are multiplied by. */
INLINE void weigh_tile(struct few *few, const int rows, int64_t start, float softcap, float (*weight)[KEYS], float *factor) {
  for (int r = 0; r < rows; r++) {
    if (IS_SCALED)
      for (int k = 0; k < KEYS; k++) weight[r][k] *= few->key_scale[k];
    factor[r] = weigh_few(few, r, weight[r], start, softcap);
    if (IS_SCALED)
      for (int k = 0; k < KEYS; k++) weight[r][k] *= few->value_scale[k];
#if IS_BY_PAIRS
    for (int k = 0; k < KEYS; k += LANES) {
      vector own;
      memcpy(&own, weight[r] + k, sizeof own);
      const __m256i elements = rounded(own);
      memcpy(few->weights[r] + k, &elements, sizeof elements);
    }
#endif
  }
}

/* The tile of keys and values that is set for so many heads, of which token `start` is the first: scores of all, then all
   sums, for keys of all heads lie together, and values elsewhere. `next`: the next tile's keys [heads * KEYS] in the order
   in which they lie. */
INLINE void attend_few_keys(struct few *few, const int rows, int heads, const stored *const *next, int64_t to_values,
                            int64_t start, float softcap) {
  float weight[HEADS][FEW][KEYS] __attribute__((aligned(64))), factor[HEADS][FEW];
  const int parts = LANES == 16 || rows >= SUMS ? 1 : SUMS / rows < PARTS ? SUMS / rows : PARTS;
  for (int h = 0; h < heads; h++) {
    vector score[FEW][PARTS];
    EACH(r, rows) EACH(p, PARTS) score[r][p] = (vector){0};
    for (int p = 0; p < PARTS; p += parts)
      for (int s = 0; s < KEY_STEPS; s++) {
        fetch(next + h * KEYS, 0, p / parts * KEY_STEPS + s, PARTS / parts * KEY_STEPS);
        if (HEAD_DIM % STEP == 0 || s < KEY_STEPS - 1) multiply_few(few + h, rows, p, parts, s, STEP, score);
        else multiply_few(few + h, rows, p, parts, s, HEAD_DIM % STEP, score);
      }
    if (IS_BY_PAIRS) EACH(r, rows) EACH(p, PARTS) score[r][p] *= few[h].scale;
    EACH(r, rows) EACH(p, PARTS) memcpy(weight[h][r] + p * LANES, &score[r][p], sizeof(vector));
    weigh_tile(few + h, rows, start, softcap, weight[h], factor[h]);
  }
  enum { WHOLE = VALUE_DIM / STEP, REST = VALUE_DIM % STEP };
  const int fit = LANES < 16 ? SUMS / (rows * PAIR) : rows > 4 || rows * PAIR > 8 ? 1 : rows * PAIR > 2 ? 2 : 4;
  const int most = fit < 1 ? 1 : fit < MOST_STEPS ? fit : MOST_STEPS, steps = most < WHOLE ? most : WHOLE ? WHOLE : 1;
  const int passes = WHOLE / steps + WHOLE % steps + (REST > 0);
#define ADD(s, steps, count, pass) \
  add_values(few + h, rows, s, steps, count, weight[h], factor[h], next + h * KEYS, to_values, pass, passes)
  for (int h = 0; h < heads; h++) {
    int s = 0, pass = 0;
    for (; s + steps <= WHOLE; s += steps) ADD(s, steps, STEP, pass++);
    for (; s < WHOLE; s++) ADD(s, 1, STEP, pass++);
    if (REST) ADD(s, 1, REST, pass);
  }
#undef ADD
}

typedef void few_function(struct few *, int, const stored *const *, int64_t, int64_t, float);
#define OF_ROWS(n)                                                                                                     \
  static void attend_few_keys##n(struct few *few, int heads, const stored *const *next, int64_t to_values,             \
                                 int64_t start, float softcap) {                                                       \
    attend_few_keys(few, n, heads, next, to_values, start, softcap);                                                   \
  }
OF_ROWS(1) OF_ROWS(2) OF_ROWS(4) OF_ROWS(8)

/* For so many rows; those up to a power of two see nothing. */
static few_function *few_keys_of(struct few *few, int rows) {
  const int all = rows > 4 ? 8 : rows > 2 ? 4 : rows;
  for (int r = rows; r < all; r++) {
    if (IS_BY_PAIRS) memset(few->pairs[r], 0, sizeof few->pairs[r]);
    else memset(few->query[r], 0, sizeof few->query[r]);
    memset(few->sum[r], 0, sizeof few->sum[r]);
    few->largest[r] = -INFINITY, few->total[r] = 0, few->first[r] = few->end[r] = 0;
    few->bias[r].bias = NULL;
  }
  return all == 8 ? attend_few_keys8 : all == 4 ? attend_few_keys4 : all == 2 ? attend_few_keys2 : attend_few_keys1;
}
