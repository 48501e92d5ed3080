/* A matrix product: inputs [rows, width] times the transpose of a weight [columns, width], plus a bias; of several
   weights of one input at once, the parts of one product, each with a result of its own. Weights are read where they
   lie, but for many rows on AVX2 (cpu_many.h).

   As in the kernels of matrix libraries, a tile of sums stays in registers: 4 rows times 6 vectors, so that 10 loads
   serve 24 multiplications; times one vector where rows are so few that memory is what limits them. Where the elements of
   a column lie side by side, a vector is along the width: lanes are elements of one column, and are added up by halves at
   the end. Where columns lie side by side, it is across it: each lane is a column.

   A sum is made in one order, whatever the tile, the rows beside it, the other parts and the threads: spans of the
   width one after the other, each summed by itself. */
#include "cpu_element.h"
#include "cpu_lanes.h"
#include <stdlib.h>
#if IS_BFLOAT16 && defined(__AVX512BF16__)
#include <immintrin.h>
#endif

/* Sums, the weight's vectors and one of a row fill the registers; pairs multiplied in two steps take two each. */
#if defined(__AVX512BF16__) || defined(__AVX512F__) && !IS_BFLOAT16
enum { VECTORS = 6 };
#elif defined(__AVX512F__)
enum { VECTORS = 4 };
#elif defined(__AVX__) && !IS_BFLOAT16
enum { VECTORS = 3 };
#else
enum { VECTORS = 2 };
#endif
enum { ROWS = 4, HALF = (VECTORS + 1) / 2 };
enum { PAIR = 4 / sizeof(element), STEP = LANES * PAIR }; /* elements in 4 bytes, and in a vector */
enum { SPAN = 4096 / sizeof(element), SPAN_ACROSS = 64 * PAIR }; /* what a tile reads stays in the first-level cache */
enum { BLOCK = 64, BLOCK_BYTES = 1 << 19 };                      /* rows, which stay in the second */
enum { AHEAD = 8192 / sizeof(element), LINES_INPUT = 1 << 14 };  /* elements; bytes */
enum { MIN_PRODUCTS = 1 << 19 };                                 /* below, a second thread costs more than it saves */

typedef element elements __attribute__((vector_size(LANES * sizeof(element)), aligned(sizeof(element))));

struct part {
  const element *weight, *bias; /* the bias [columns], or null */
  element *output;              /* [rows, columns], contiguous */
  int64_t columns;
  int64_t row;                  /* elements from a row of the weight to the next, as it lies */
  int64_t is_transposed;        /* whether it lies as [width, columns] */
};

struct linear {
  const element *input; /* [rows, width], contiguous */
  int64_t num_parts, rows, width, num_threads;
  struct part parts[];
};

/* What a tile multiplies: rows of inputs and of a weight, `row` elements apart. */
struct operand {
  const element *first;
  int64_t row;
};

/* sum + a * b, lane by lane; of pairs: of both. */
INLINE vector added(vector sum, bits a, bits b) {
#if IS_BFLOAT16 && defined(__AVX512BF16__)
  return (vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#elif IS_BFLOAT16
  sum = multiply_add((vector)(a << 16), (vector)(b << 16), sum);
  return multiply_add((vector)(a & 0xffff0000u), (vector)(b & 0xffff0000u), sum);
#else
  return multiply_add((vector)a, (vector)b, sum);
#endif
}

INLINE bits along(const element *from) {
  bits x;
  memcpy(&x, from, sizeof(x));
  return x;
}

/* Of LANES columns; a pair is of two rows of the weight. */
INLINE bits across(const element *from, int64_t row) {
  if (PAIR == 1) return along(from);
  elements first, second;
  memcpy(&first, from, sizeof(first)), memcpy(&second, from + row, sizeof(second));
  return __builtin_convertvector(first, bits) | __builtin_convertvector(second, bits) << 16;
}

/* The same elements of an input for all columns. */
INLINE bits everywhere(const element *from) {
  uint32_t x;
  memcpy(&x, from, sizeof(x));
  return (bits){0} + x;
}

/* From a step's first vector of a weight to another one, as far as fetching goes: each line of it once. */
INLINE int64_t offset_of(int64_t vector, int is_across, int64_t row) {
  return is_across ? vector % PAIR * row + vector / PAIR * STEP : vector * row;
}

/* A tile's sums over a span of the width, added to those over earlier ones; where `results` are wanted, their lanes added
   up. All that is `const int` is a constant after inlining. Of the vectors of a step, the first `fetched` behind `ahead`
   are brought to the second-level cache. */
INLINE void tile(const int rows, const int vectors, const int is_across, const int fetched, struct operand input,
                 struct operand weight, int64_t width, const element *ahead, vector *sums, int is_first,
                 float *results) {
  vector sum[ROWS][VECTORS];
  EACH(r, rows) EACH(v, vectors) sum[r][v] = (vector){0};
  for (int64_t k = 0; k < width; k += is_across ? PAIR : STEP) {
    const int64_t place = is_across ? k * weight.row : k;
    bits w[VECTORS];
    EACH(v, vectors)
      w[v] = is_across ? across(weight.first + place + v * LANES, weight.row)
                       : along(weight.first + place + v * weight.row);
    EACH(v, fetched) __builtin_prefetch(ahead + place + offset_of(v, is_across, weight.row), 0, 2);
    EACH(r, rows) {
      const element *from = input.first + r * input.row + k;
      const bits x = is_across ? everywhere(from) : along(from);
      EACH(v, vectors) sum[r][v] = added(sum[r][v], x, w[v]);
    }
  }
  if (!is_first) EACH(r, rows) EACH(v, vectors) sum[r][v] += sums[r * vectors + v];
  if (is_across || !results) {
    EACH(r, rows) EACH(v, vectors) sums[r * vectors + v] = sum[r][v];
    return;
  }
#define SUM(i) (i < rows * vectors ? sum[i / vectors % ROWS][i % vectors] : (vector){0})
  EACH(i, (rows * vectors + 3) / 4) {
    const four result = folded(SUM((4 * i)), SUM((4 * i + 1)), SUM((4 * i + 2)), SUM((4 * i + 3)));
    memcpy(results + 4 * i, &result, sizeof(result));
  }
#undef SUM
}

typedef void tile_function(struct operand, struct operand, int64_t, const element *, vector *, int, float *);
#define TILE(rows, name, ...)                                                                                          \
  static void name##rows(struct operand input, struct operand weight, int64_t width, const element *ahead,             \
                         vector *sums, int is_first, float *results) {                                                 \
    tile(rows, __VA_ARGS__, input, weight, width, ahead, sums, is_first, results);                                     \
  }
#define TILES(name, ...)                                                                                               \
  TILE(1, name, __VA_ARGS__) TILE(2, name, __VA_ARGS__) TILE(3, name, __VA_ARGS__) TILE(4, name, __VA_ARGS__)
#define ALL_ROWS(name) {name##1, name##2, name##3, name##4}
TILES(narrow_along, 1, 0, 0)
TILES(line, 1, 0, 1)
TILES(plain_along, VECTORS, 0, 0)
TILES(one_ahead_along, VECTORS, 0, 1)
TILES(two_ahead_along, VECTORS, 0, 2)
TILES(half_ahead_along, VECTORS, 0, HALF)
TILES(all_ahead_along, VECTORS, 0, VECTORS)
TILES(narrow_across, 1, 1, 0)
TILES(plain_across, VECTORS, 1, 0)
TILES(one_ahead_across, VECTORS, 1, 1)
TILES(two_ahead_across, VECTORS, 1, 2)
TILES(all_ahead_across, VECTORS, 1, VECTORS)
enum { NARROW, PLAIN, ONE_AHEAD, TWO_AHEAD, HALF_AHEAD, ALL_AHEAD };
#define ALL_KINDS(way, half)                                                                                           \
  {ALL_ROWS(narrow##way), ALL_ROWS(plain##way), ALL_ROWS(one_ahead##way), ALL_ROWS(two_ahead##way), ALL_ROWS(half),    \
   ALL_ROWS(all_ahead##way)}
static tile_function *const TILE_OF[2][6][ROWS] = {ALL_KINDS(_along, half_ahead_along),
                                                   ALL_KINDS(_across, all_ahead_across)};

INLINE void put(const float *from, int64_t columns, element *to, const element *bias) {
  if (bias)
    for (int64_t c = 0; c < columns; c++) to[c] = from_float(from[c] + to_float(bias[c]));
  else
    for (int64_t c = 0; c < columns; c++) to[c] = from_float(from[c]);
}

/* Writes the results of a tile whose sums are complete: `step` numbers lie from one row to the next. */
INLINE void finish(const struct part *part, int64_t row, int64_t column, int64_t rows, int64_t columns, int64_t step,
                   const float *results) {
  element *to = part->output + row * part->columns + column;
  const element *bias = part->bias ? part->bias + column : 0;
  for (int64_t r = 0; r < rows; r++) put(results + r * step, columns, to + r * part->columns, bias);
}

/* The same along the width; of a whole tile, rounded all at once. */
INLINE void finish_whole(const struct part *part, int64_t row, int64_t column, int64_t rows, const float *results) {
  if (!IS_BFLOAT16 || part->bias || rows < ROWS) return finish(part, row, column, rows, VECTORS, VECTORS, results);
  element all[ROWS * VECTORS], *to = part->output + row * part->columns + column;
  for (int i = 0; i < ROWS * VECTORS; i++) all[i] = from_float(results[i]);
  EACH(r, ROWS) memcpy(to + r * part->columns, all + r * VECTORS, VECTORS * sizeof(element));
}

/* A copy with zeros behind the `length` elements of each row. */
static struct operand padded(struct operand from, int64_t rows, int64_t length, element *to, int64_t row) {
  for (int64_t r = 0; r < rows; r++) {
    if (length) memcpy(to + r * row, from.first + r * from.row, length * sizeof(element));
    memset(to + r * row + length, 0, (row - length) * sizeof(element));
  }
  return (struct operand){to, row};
}

/* Up to BLOCK rows times `vectors`, 1 or VECTORS, of a weight from a column on. */
static void strip(const struct linear *a, const struct part *part, int64_t first_row, int64_t rows, int64_t column,
                  int vectors, int has_next) {
  const int is_across = part->is_transposed != 0;
  const int64_t step = is_across ? PAIR : STEP, most = is_across ? SPAN_ACROSS : SPAN, whole = a->width / step * step;
  const int64_t full = vectors * (is_across ? LANES : 1), left = part->columns - column;
  const int64_t columns = left < full ? left : full, tiles = (rows + ROWS - 1) / ROWS;
  /* What comes later is fetched by as many tiles as can share it: one vector of a step each, two, or half of them (not
     across, where two vectors share lines). */
  const int fetched = tiles >= VECTORS ? 1 : tiles >= HALF ? 2 : rows > ROWS + 1 && !is_across ? HALF : VECTORS;
  const int64_t every = tiles * fetched / VECTORS;
  vector sums[BLOCK * VECTORS];
  float results[ROWS * VECTORS];
  element edge[SPAN_ACROSS * LANES], tail[BLOCK * STEP];
  int64_t k = 0;
  do {
    const int64_t real = whole - k >= most ? most : k < whole ? whole - k : a->width - k; /* of the width */
    struct operand weight = {part->weight + (is_across ? k * part->row + column : column * part->row + k), part->row};
    struct operand input = {a->input + first_row * a->width + k, a->width};
    const element *ahead = 0;
    if (is_across && k + real < whole) ahead = weight.first + real * part->row;
    else if (has_next) ahead = is_across ? part->weight + column + full : weight.first + full * part->row;
    int64_t span = real;
    if (k == whole) { /* less than a step */
      if (is_across) memset(edge, 0, sizeof(edge));
      weight = is_across ? padded(weight, real, columns, edge, full) : padded(weight, full, real, edge, STEP);
      input = padded(input, rows, real, tail, step);
      span = step, ahead = 0;
    } else if (columns < full) {
      weight = padded(weight, real, columns, edge, full);
    }
    for (int64_t t = 0; t < tiles; t++) {
      const int64_t row = t * ROWS, n = rows - row < ROWS ? rows - row : ROWS;
      const element *own_ahead = ahead;
      int kind = vectors == 1 ? NARROW : PLAIN;
      if (kind == PLAIN && ahead && t % every == 0 && t / every * fetched < VECTORS) {
        kind = fetched == 1 ? ONE_AHEAD : fetched == 2 ? TWO_AHEAD : fetched == HALF ? HALF_AHEAD : ALL_AHEAD;
        own_ahead += offset_of(t / every * fetched, is_across, part->row);
      }
      vector *own = sums + row * vectors;
      const struct operand own_input = {input.first + row * input.row, input.row};
      const int is_last = k + real == a->width;
      TILE_OF[is_across][kind][n - 1](own_input, weight, span, own_ahead, own, !k, is_last ? results : 0);
      if (!is_last) continue;
      if (is_across) finish(part, first_row + row, column, n, columns, full, (const float *)own);
      else if (vectors == 1) finish(part, first_row + row, column, n, 1, 1, results);
      else finish_whole(part, first_row + row, column, n, results);
    }
    k += real;
  } while (k < a->width);
}

/* Columns one by one, each a span: what is read lies in one line, which a processor foresees best. */
static void lines(const struct linear *a, const struct part *part, int64_t first, int64_t end) {
  static tile_function *const LINE[ROWS] = ALL_ROWS(line);
  float results[ROWS];
  for (int64_t column = first; column < end; column++) {
    const struct operand weight = {part->weight + column * part->row, part->row};
    const element *bias = part->bias ? part->bias + column : 0;
    for (int64_t row = 0; row < a->rows; row += ROWS) {
      const int64_t rows = a->rows - row < ROWS ? a->rows - row : ROWS;
      const struct operand input = {a->input + row * a->width, a->width};
      tile_function *const own = row ? TILE_OF[0][NARROW][rows - 1] : LINE[rows - 1];
      own(input, weight, a->width, weight.first + AHEAD, 0, 1, results);
      for (int64_t r = 0; r < rows; r++)
        put(results + r, 1, part->output + (row + r) * part->columns + column, bias);
    }
  }
}

/* Whether few rows and a column of the weight fit into the first-level cache together, and leave no edges. */
static int are_lines(const struct linear *a, const struct part *part) {
  const int64_t width = a->width, size = a->rows * width * (int64_t)sizeof(element);
  const int fits = a->rows <= ROWS + 1 && size <= LINES_INPUT;
  return !part->is_transposed && 0 < width && width <= SPAN && width % STEP == 0 && fits;
}

static int64_t panel_of(const struct part *part) { return part->is_transposed ? VECTORS * LANES : VECTORS; }

#if !defined(__AVX2__) || defined(__AVX512F__)
static int64_t many(const struct linear *a, const struct part *part, int64_t first, int64_t end) { return first; }
#else
#include "cpu_many.h"
#endif

/* Of one part, columns from `first` to `end`. */
static void columns_of(const struct linear *a, const struct part *part, int64_t first, int64_t end) {
  if (are_lines(a, part)) return lines(a, part, first, end);
  first = many(a, part, first, end);
  const int64_t panel = panel_of(part), unit = panel / VECTORS;
  int64_t block = BLOCK_BYTES / (a->width * sizeof(element) + 1) / ROWS * ROWS;
  block = block < ROWS ? ROWS : block > BLOCK ? BLOCK : block;
  for (int64_t group = first; group < end; group += LANES * VECTORS) {
    const int64_t group_end = group + LANES * VECTORS < end ? group + LANES * VECTORS : end;
    for (int64_t row = 0; row < a->rows; row += block) {
      const int64_t rows = a->rows - row < block ? a->rows - row : block;
      int64_t column = group;
      for (; column + panel <= group_end; column += panel)
        strip(a, part, row, rows, column, VECTORS, !row && column + 2 * panel <= end);
      for (; column < group_end; column += unit) strip(a, part, row, rows, column, 1, 0);
    }
  }
}

void hf_paged_linear(const struct linear *a) {
  int64_t panels = 0, columns = 0;
  for (int64_t p = 0; p < a->num_parts; p++) {
    const int64_t panel = panel_of(&a->parts[p]);
    panels += (a->parts[p].columns + panel - 1) / panel, columns += a->parts[p].columns;
  }
#pragma omp parallel for schedule(static) num_threads(a->num_threads) if (a->rows * a->width * columns >= MIN_PRODUCTS)
  for (int64_t thread = 0; thread < a->num_threads; thread++) {
    int64_t first = panels * thread / a->num_threads, end = panels * (thread + 1) / a->num_threads;
    for (const struct part *part = a->parts; part < a->parts + a->num_parts; part++) {
      const int64_t panel = panel_of(part), own = (part->columns + panel - 1) / panel;
      if (end > 0 && first < own) {
        const int64_t last = end * panel < part->columns ? end * panel : part->columns;
        columns_of(a, part, first > 0 ? first * panel : 0, last);
      }
      first -= own, end -= own;
    }
  }
}
