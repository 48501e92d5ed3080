/* A matrix product: inputs [rows, width] times the transpose of a weight [columns, width], plus a bias; of several weights
   of one input at once, the parts of one product, each with a result of its own. Weights are read where they lie.

   As in the kernels of matrix libraries, a tile of sums stays in registers: of a few rows times a few columns. Where a
   column's elements lie side by side, each sum is a vector of lanes along the width, and lanes are added up at the end, by
   halves. Where it is the columns that lie side by side, lanes are columns, and each is summed element by element. Either
   way a result's sums are made in one order, whatever the tile, the rows beside it, the parts and the threads. */
#include "cpu_element.h"
#if IS_BFLOAT16 && defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
enum { LANES = 16, ROWS = 4, COLUMNS = 6 }; /* sums are in 24 of 32 registers */
#elif defined(__AVX__)
enum { LANES = 8, ROWS = 2, COLUMNS = 4 }; /* in 8 of 16 */
#else
enum { LANES = 4, ROWS = 2, COLUMNS = 4 };
#endif
enum { VECTORS = COLUMNS, PANEL = LANES * VECTORS }; /* where columns lie side by side */
enum { STEP = LANES * 4 / sizeof(element) };          /* elements of the width in a vector */
enum { SPAN = 256 };             /* of the width, summed by itself where a lane is a column: rounding errors grow with the longest sum */
enum { LINE = 64 };
enum { MIN_PRODUCTS = 1 << 19 }; /* below, a second thread costs more than it saves */

typedef float vector __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint32_t bits __attribute__((vector_size(LANES * 4), aligned(4)));
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

/* sum + a * b, lane by lane; of pairs: of both. */
static inline __attribute__((always_inline)) vector added(vector sum, bits a, bits b) {
#if IS_BFLOAT16 && defined(__AVX512BF16__)
  return (vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#elif IS_BFLOAT16
  sum += (vector)(a << 16) * (vector)(b << 16);
  return sum + (vector)(a & 0xffff0000u) * (vector)(b & 0xffff0000u);
#else
  return sum + (vector)a * (vector)b;
#endif
}

/* The first elements of a vector, and zeros: nothing is read beyond them. */
static inline __attribute__((always_inline)) bits loaded(const element *from, int64_t count) {
  bits x = {0};
  if (count < STEP)
    memcpy(&x, from, count * sizeof(element));
  else
    memcpy(&x, from, sizeof(x));
  return x;
}

/* All lanes, added up by halves. */
static inline __attribute__((always_inline)) float folded(vector sum) {
  float lanes[LANES];
  memcpy(lanes, &sum, sizeof(lanes));
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
  return lanes[0];
}

/* A tile of `rows` times `columns`, both constants after inlining, of a weight whose columns lie one behind the other. */
static inline __attribute__((always_inline)) void tile(const int rows, const int columns, const struct linear *a,
                                                       const struct part *part, int64_t row, int64_t column,
                                                       const char *ahead) {
  const element *input = a->input + row * a->width, *weight = part->weight + column * part->row;
  vector sum[ROWS][COLUMNS];
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < columns; c++) sum[r][c] = (vector){0};
  for (int64_t k = 0; k < a->width; k += STEP) {
    bits w[COLUMNS];
    for (int c = 0; c < columns; c++) w[c] = loaded(weight + c * part->row + k, a->width - k);
    if (ahead)
      for (int c = 0; c < columns; c++) __builtin_prefetch(ahead + (c * part->row + k) * sizeof(element), 0, 2);
    for (int r = 0; r < rows; r++) {
      const bits x = loaded(input + r * a->width + k, a->width - k);
      for (int c = 0; c < columns; c++) sum[r][c] = added(sum[r][c], x, w[c]);
    }
  }
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < columns; c++)
      part->output[(row + r) * part->columns + column + c] =
          from_float(folded(sum[r][c]) + (part->bias ? to_float(part->bias[column + c]) : 0));
}

/* The same of a weight whose columns lie side by side: up to PANEL of them. */
static inline __attribute__((always_inline)) void panel(const int rows, const struct linear *a, const struct part *part,
                                                        int64_t row, int64_t column) {
  const int64_t left = part->columns - column, columns = left < PANEL ? left : PANEL;
  vector total[ROWS][VECTORS];
  memset(total, 0, sizeof(total));
  for (int64_t first = 0; first < a->width; first += SPAN) {
    const int64_t end = first + SPAN < a->width ? first + SPAN : a->width;
    vector sum[ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
      for (int v = 0; v < VECTORS; v++) sum[r][v] = (vector){0};
    for (int64_t k = first; k < end; k++) {
      element w[PANEL];
      memcpy(w, part->weight + k * part->row + column, columns * sizeof(element));
      for (int r = 0; r < rows; r++) {
        const float x = to_float(a->input[(row + r) * a->width + k]);
        for (int v = 0; v < VECTORS; v++)
          for (int i = 0; i < LANES; i++) sum[r][v][i] += x * to_float(w[v * LANES + i]);
      }
    }
    for (int r = 0; r < rows; r++)
      for (int v = 0; v < VECTORS; v++) total[r][v] += sum[r][v];
  }
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < columns; c++)
      part->output[(row + r) * part->columns + column + c] =
          from_float(total[r][c / LANES][c % LANES] + (part->bias ? to_float(part->bias[column + c]) : 0));
}

static void strip(const struct linear *a, const struct part *part, int64_t column) {
  const int64_t left = part->columns - column;
  if (part->is_transposed) {
    for (int64_t row = 0; row < a->rows; row++) panel(1, a, part, row, column);
  } else if (left >= COLUMNS) {
    int64_t row = 0;
    for (; row + ROWS <= a->rows; row += ROWS) tile(ROWS, COLUMNS, a, part, row, column, 0);
    for (; row < a->rows; row++) tile(1, COLUMNS, a, part, row, column, 0);
  } else {
    for (int64_t row = 0; row < a->rows; row++)
      for (int64_t c = 0; c < left; c++) tile(1, 1, a, part, row, column + c, 0);
  }
}

static int64_t strips_of(const struct part *part) {
  const int64_t size = part->is_transposed ? PANEL : COLUMNS;
  return (part->columns + size - 1) / size;
}

void hf_paged_linear(const struct linear *a) {
  int64_t strips = 0, columns = 0;
  for (int64_t p = 0; p < a->num_parts; p++) strips += strips_of(&a->parts[p]), columns += a->parts[p].columns;
#pragma omp parallel for schedule(static) num_threads(a->num_threads) if (a->rows * a->width * columns >= MIN_PRODUCTS)
  for (int64_t index = 0; index < strips; index++) {
    const struct part *part = a->parts;
    int64_t own = index;
    while (own >= strips_of(part)) own -= strips_of(part++);
    strip(a, part, own * (part->is_transposed ? PANEL : COLUMNS));
  }
}
