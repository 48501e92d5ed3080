/* What adapters add behind a linear layer, each row its own: output += scale * (b (a input) + bias); of one with an
   output scale (DoRA): output = output_scale * (output - base bias + that) + base bias.

   Rows of one adapter are put together in tiles, wherever they lie, so that a tile reads `a` and `b` once. Both lie as
   PEFT has them. Lanes are elements of the width for products with `a`, added up by halves at the end; for products
   with `b` they are columns, a block of which is turned in registers. Summed in float32, and rounded once.

   A sum is made in one order, whatever the tile, the rows beside it and the threads: with `a` spans of the width one
   after the other, each summed by itself; with `b` one rank after another. Called by cpu_adapters.py, which holds the
   same structs. */
#include "cpu_element.h"
#include "cpu_lanes.h"

enum { ROWS = 4, TILE = 2 * ROWS, PIECE = 256 }; /* rows of a product, of a tile, and that tiles are made of at once */
enum { BLOCK = 32, VECTORS = BLOCK / LANES };    /* columns whose elements of `b` are turned at once */
enum { MAX_RANK = 512, AT_ONCE = 8, SPAN = 1024 }; /* ranks, and elements of the width: they stay in the caches */
enum { LINE = 64 };                              /* bytes */
enum { MIN_PRODUCTS = 1 << 19 };                 /* below, a second thread costs more than it saves */

struct adapter {
  const void *a, *b;         /* [rank, width], [columns, rank]; elements of a row side by side */
  const void *bias;          /* [columns], or null; of their type */
  const float *output_scale; /* [columns], or null */
  int64_t rank;              /* 0: there is none */
  int64_t a_row, b_row, is_bfloat16;
  float scale;
};

struct adapters {
  const element *input;        /* [rows, width], contiguous */
  element *output;             /* [rows, columns], contiguous; changed in place */
  const element *base_bias;    /* [columns], of the layer, or null */
  const int32_t *slots;        /* [rows], places in the table; below 0: no adapter. Null: none for all */
  const struct adapter *table; /* [num_slots] */
  int64_t num_slots, rows, width, columns, num_threads;
};

struct tile {
  const struct adapter *own;
  int64_t count;
  int64_t rows[TILE];
};

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Elements of an adapter as float32, and zeros behind them. */
static void widen(const void *from, int64_t first, int64_t count, int64_t is_bfloat16, float *to, int64_t all) {
  if (is_bfloat16)
    for (int64_t i = 0; i < count; i++) {
      union { uint32_t bits; float value; } number = {(uint32_t)((const uint16_t *)from)[first + i] << 16};
      to[i] = number.value;
    }
  else
    for (int64_t i = 0; i < count; i++) to[i] = ((const float *)from)[first + i];
  for (int64_t i = count; i < all; i++) to[i] = 0;
}

INLINE vector load(const float *from) { return *(const anywhere *)from; }
INLINE void store(vector x, float *to) { *(anywhere *)to = x; }

/* Products of some rows' span, whole vectors of it, with some ranks: added to `low`, or the first there. */
INLINE void dots(const int rows, const int ranks, const float *x, const float *a, int64_t a_row, int64_t span,
                 float *low, int is_first) {
  enum { MOST = ROWS * ROWS };
  vector sum[MOST];
  EACH(r, rows) EACH(j, ranks) sum[r * ranks + j] = (vector){0};
  for (int64_t k = 0; k < span; k += LANES) {
    vector w[AT_ONCE];
    EACH(j, ranks) w[j] = load(a + j * a_row + k);
    EACH(r, rows) {
      const vector own = load(x + r * SPAN + k);
      EACH(j, ranks) sum[r * ranks + j] = multiply_add(own, w[j], sum[r * ranks + j]);
    }
  }
  float results[MOST];
  for (int i = rows * ranks; i % 4; i++) sum[i] = (vector){0};
  EACH(i, (rows * ranks + 3) / 4) {
    const four result = folded(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]);
    memcpy(results + 4 * i, &result, sizeof result);
  }
  EACH(r, rows) EACH(j, ranks) {
    float *to = low + r * MAX_RANK + j;
    *to = is_first ? results[r * ranks + j] : *to + results[r * ranks + j];
  }
}

/* As many ranks at a time as give enough sums to add to, but not more than there are registers. */
#define DOTS(rows, ranks)                                                                                              \
  static void dots##rows(const float *x, const float *a, int64_t a_row, int64_t count, int64_t span, float *low,       \
                         int is_first) {                                                                               \
    int64_t j = 0;                                                                                                     \
    for (; j + ranks <= count; j += ranks) dots(rows, ranks, x, a + j * a_row, a_row, span, low + j, is_first);        \
    for (; j < count; j++) dots(rows, 1, x, a + j * a_row, a_row, span, low + j, is_first);                            \
  }
DOTS(1, 8) DOTS(2, 4) DOTS(3, 4) DOTS(4, 2)
typedef void dots_function(const float *, const float *, int64_t, int64_t, int64_t, float *, int);
static dots_function *const DOTS_OF[] = {dots1, dots2, dots3, dots4};

/* A tile's rows times `a`. */
static void shrink(const struct adapters *a, const struct tile *tile, float (*low)[MAX_RANK]) {
  const struct adapter *own = tile->own;
  float x[TILE][SPAN], copy[AT_ONCE][SPAN];
  for (int64_t k = 0; k < a->width; k += SPAN) {
    const int64_t real = least(SPAN, a->width - k), span = (real + LANES - 1) / LANES * LANES;
    for (int64_t r = 0; r < tile->count; r++) {
      const element *from = a->input + tile->rows[r] * a->width + k;
      for (int64_t i = 0; i < real; i++) x[r][i] = to_float(from[i]);
      for (int64_t i = real; i < span; i++) x[r][i] = 0;
    }
    const int is_copied = own->is_bfloat16 || real < span;
    for (int64_t j = 0; j < own->rank; j += AT_ONCE) {
      const int64_t count = least(AT_ONCE, own->rank - j);
      const int64_t first = j * own->a_row + k, row = is_copied ? SPAN : own->a_row;
      for (int64_t i = 0; is_copied && i < count; i++)
        widen(own->a, first + i * own->a_row, real, own->is_bfloat16, copy[i], span);
      const float *ranks = is_copied ? copy[0] : (const float *)own->a + first;
      for (int64_t r = 0; r < tile->count; r += ROWS)
        DOTS_OF[least(ROWS, tile->count - r) - 1](x[r], ranks, row, count, span, low[r] + j, !k);
    }
  }
}

/* 16 bytes of every fourth of so many rows. */
INLINE vector quads(const char *from, int64_t row) {
#if defined(__AVX512F__)
  const __m512 x = _mm512_castps128_ps512(_mm_loadu_ps((const float *)from));
  const __m512 y = _mm512_insertf32x4(x, _mm_loadu_ps((const float *)(from + 4 * row)), 1);
  const __m512 z = _mm512_insertf32x4(y, _mm_loadu_ps((const float *)(from + 8 * row)), 2);
  return (vector)_mm512_insertf32x4(z, _mm_loadu_ps((const float *)(from + 12 * row)), 3);
#elif defined(__AVX__)
  const __m256 x = _mm256_castps128_ps256(_mm_loadu_ps((const float *)from));
  return (vector)_mm256_insertf128_ps(x, _mm_loadu_ps((const float *)(from + 4 * row)), 1);
#else
  return load((const float *)from + 0 * row);
#endif
}

#if defined(__AVX512F__)
#define IN_QUADS(a, b, c, d)                                                                                           \
  a, b, c, d, a + 4, b + 4, c + 4, d + 4, a + 8, b + 8, c + 8, d + 8, a + 12, b + 12, c + 12, d + 12
#elif defined(__AVX__)
#define IN_QUADS(a, b, c, d) a, b, c, d, a + 4, b + 4, c + 4, d + 4
#else
#define IN_QUADS(a, b, c, d) a, b, c, d
#endif

/* 16 bytes of LANES rows as four columns. */
INLINE void turn(const char *from, int64_t row, vector *columns) {
  const vector a = quads(from, row), b = quads(from + row, row), c = quads(from + 2 * row, row);
  const vector d = quads(from + 3 * row, row);
  const vector ab = SHUFFLE(places, a, b, IN_QUADS(0, LANES, 1, LANES + 1));
  const vector cd = SHUFFLE(places, c, d, IN_QUADS(0, LANES, 1, LANES + 1));
  const vector ab_behind = SHUFFLE(places, a, b, IN_QUADS(2, LANES + 2, 3, LANES + 3));
  const vector cd_behind = SHUFFLE(places, c, d, IN_QUADS(2, LANES + 2, 3, LANES + 3));
  columns[0] = SHUFFLE(places, ab, cd, IN_QUADS(0, 1, LANES, LANES + 1));
  columns[1] = SHUFFLE(places, ab, cd, IN_QUADS(2, 3, LANES + 2, LANES + 3));
  columns[2] = SHUFFLE(places, ab_behind, cd_behind, IN_QUADS(0, 1, LANES, LANES + 1));
  columns[3] = SHUFFLE(places, ab_behind, cd_behind, IN_QUADS(2, 3, LANES + 2, LANES + 3));
}

/* A block's elements of `b` as they are, LANES columns at a time; the block behind it is fetched, if there is one. */
INLINE void turned(const int is_bfloat16, const struct adapter *own, int64_t column, int64_t ranks, int has_next,
                   float (*to)[BLOCK]) {
  const int64_t size = is_bfloat16 ? 2 : 4, row = own->b_row * size;
  for (int v = 0; v < VECTORS; v++) {
    const char *from = (const char *)own->b + (column + v * LANES) * row;
    for (int64_t j = 0; j < ranks; j += 16 / size) {
      if (has_next && j % (LINE / size) == 0)
        EACH(c, LANES) __builtin_prefetch(from + (BLOCK + c) * row + j * size);
      vector found[4];
      turn(from + j * size, row, found);
      EACH(i, 4) {
        if (is_bfloat16) { /* pairs */
          store((vector)((bits)found[i] << 16), to[j + 2 * i] + v * LANES);
          store((vector)((bits)found[i] & 0xffff0000u), to[j + 2 * i + 1] + v * LANES);
        } else {
          store(found[i], to[j + i] + v * LANES);
        }
      }
    }
  }
}

/* Some columns' elements of `b`, rank by rank, in float32. */
static void load_b(const struct adapter *own, int64_t column, int64_t columns, int has_next, float (*to)[BLOCK]) {
  const int64_t step = own->is_bfloat16 ? 8 : 4, whole = columns == BLOCK ? own->rank / step * step : 0;
  if (own->is_bfloat16) turned(1, own, column, whole, has_next, to);
  else turned(0, own, column, whole, has_next, to);
  for (int64_t j = whole; j < own->rank; j++)
    for (int64_t c = 0; c < BLOCK; c++) {
      to[j][c] = 0;
      if (c < columns) widen(own->b, (column + c) * own->b_row + j, 1, own->is_bfloat16, &to[j][c], 1);
    }
}

/* Some rows' sums over the ranks, for a block of columns, as many vectors at a time as there are registers for. */
INLINE void products(const int rows, const float *low, const float (*b)[BLOCK], int64_t rank, float (*to)[BLOCK]) {
  enum { MOST = VECTORS < 4 ? VECTORS : 4 };
  const int vectors = rows < 3 ? MOST : 2;
  for (int first = 0; first < VECTORS; first += vectors) {
    vector sum[ROWS][MOST];
    EACH(r, rows) EACH(v, vectors) sum[r][v] = (vector){0};
    for (int64_t j = 0; j < rank; j++) {
      vector w[MOST];
      EACH(v, vectors) w[v] = load(b[j] + (first + v) * LANES);
      EACH(r, rows) {
        const vector own = low[r * MAX_RANK + j] - (vector){0};
        EACH(v, vectors) sum[r][v] = multiply_add(own, w[v], sum[r][v]);
      }
    }
    EACH(r, rows) EACH(v, vectors) store(sum[r][v], to[r] + (first + v) * LANES);
  }
}

#define PRODUCTS(rows)                                                                                                 \
  static void products##rows(const float *low, const float (*b)[BLOCK], int64_t rank, float (*to)[BLOCK]) {            \
    products(rows, low, b, rank, to);                                                                                  \
  }
PRODUCTS(1) PRODUCTS(2) PRODUCTS(3) PRODUCTS(4)
typedef void products_function(const float *, const float (*)[BLOCK], int64_t, float (*)[BLOCK]);
static products_function *const PRODUCTS_OF[] = {products1, products2, products3, products4};

/* Adds a row's sums to its output. */
INLINE void put(int64_t columns, const struct adapter *own, const float *sums, const float *bias, const float *base,
                const float *output_scale, element *to) {
  if (output_scale)
    for (int64_t c = 0; c < columns; c++) {
      const float scaled = MULTIPLY_ADD(own->scale, sums[c] + bias[c], to_float(to[c]) - base[c]);
      to[c] = from_float(MULTIPLY_ADD(output_scale[c], scaled, base[c]));
    }
  else
    for (int64_t c = 0; c < columns; c++)
      to[c] = from_float(MULTIPLY_ADD(own->scale, sums[c] + bias[c], to_float(to[c])));
}

/* Adds a tile's rows times `a`, times `b`, to columns from `first` to `end`. */
static void expand(const struct adapters *a, const struct tile *tile, const float (*low)[MAX_RANK], int64_t first,
                   int64_t end) {
  const struct adapter *own = tile->own;
  float b[MAX_RANK][BLOCK], sums[TILE][BLOCK], bias[BLOCK] = {0}, base[BLOCK] = {0}, output_scale[BLOCK] = {0};
  for (int64_t column = first; column < end; column += BLOCK) {
    const int64_t columns = least(BLOCK, end - column);
    load_b(own, column, columns, column + 2 * BLOCK <= end, b);
    if (own->bias) widen(own->bias, column, columns, own->is_bfloat16, bias, columns);
    if (own->output_scale) widen(own->output_scale, column, columns, 0, output_scale, columns);
    if (a->base_bias) for (int64_t c = 0; c < columns; c++) base[c] = to_float(a->base_bias[column + c]);
    for (int64_t r = 0; r < tile->count; r += ROWS)
      PRODUCTS_OF[least(ROWS, tile->count - r) - 1](low[r], (const float (*)[BLOCK])b, own->rank, sums + r);
    const float *scales = own->output_scale ? output_scale : 0;
    for (int64_t r = 0; r < tile->count; r++) {
      element *to = a->output + tile->rows[r] * a->columns + column;
      if (columns == BLOCK) put(BLOCK, own, sums[r], bias, base, scales, to);
      else put(columns, own, sums[r], bias, base, scales, to);
    }
  }
}

/* Tiles of rows from `first` on, and how many; `products` counts what they take to multiply. */
static int64_t tiles_of(const struct adapters *a, int64_t first, int64_t rows, struct tile *tiles, int64_t *products) {
  int32_t slots[PIECE];      /* those that have occurred, */
  struct tile *last[PIECE];  /* and the tile of each that isn't full, or was the last */
  int64_t count = 0, num_slots = 0, group = 0;
  for (int64_t row = first; row < first + rows; row++) {
    const int32_t slot = a->slots[row];
    if (slot < 0 || slot >= a->num_slots || !a->table[slot].rank) continue;
    if (!num_slots || slots[group] != slot) /* neighbours mostly have the same */
      for (group = 0; group < num_slots && slots[group] != slot;) group++;
    const int is_new = group == num_slots;
    if (is_new || last[group]->count == TILE) {
      slots[group] = slot, num_slots += is_new;
      last[group] = tiles + count++, last[group]->own = a->table + slot, last[group]->count = 0;
    }
    last[group]->rows[last[group]->count++] = row;
    *products += a->table[slot].rank * (a->width + a->columns);
  }
  return count;
}

void hf_paged_adapters(const struct adapters *a) {
  const int64_t blocks = (a->columns + BLOCK - 1) / BLOCK;
  for (int64_t first = 0; a->slots && first < a->rows; first += PIECE) {
    struct tile tiles[PIECE];
    int64_t products = 0;
    const int64_t count = tiles_of(a, first, least(PIECE, a->rows - first), tiles, &products);
    if (!count) continue;
    /* With more threads than tiles some share one: each multiplies by all of `a`, and by its own part of `b`. */
    const int64_t parts = products < MIN_PRODUCTS ? 1 : least(blocks, (a->num_threads + count - 1) / count);
#pragma omp parallel for schedule(dynamic) num_threads(a->num_threads) if (products >= MIN_PRODUCTS)
    for (int64_t item = 0; item < count * parts; item++) {
      const int64_t part = item % parts, from = blocks * part / parts * BLOCK, to = blocks * (part + 1) / parts * BLOCK;
      float low[TILE][MAX_RANK];
      shrink(a, tiles + item / parts, low);
      expand(a, tiles + item / parts, (const float (*)[MAX_RANK])low, from, least(to, a->columns));
    }
  }
}

/* Whether each slot is in the table, or below 0. */
int64_t hf_paged_has_slots(const struct adapters *a) {
  int64_t is_outside = 0;
  for (int64_t row = 0; row < a->rows; row++) is_outside |= a->slots[row] >= a->num_slots;
  return !is_outside;
}
