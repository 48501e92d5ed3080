/* A matrix product for few rows: [rows, width] times the transpose of a weight [columns, width], plus a bias; of several
   weights at once, the parts of one product, each where it lies and with a result of its own.

   Called by cpu_linear.py, which lays weights out: panels of as many columns as a tile of sums holds, and in a panel
   one column beside the other for each element of the width. A panel is read from memory once for all rows, and stays in
   the second-level cache while tile after tile of rows goes over it; meanwhile the next one is fetched. A row's sums are
   made in the same order, however many rows there are. */
#include "cpu_element.h"
#if IS_BFLOAT16 && defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define ROWS 8 /* 24 of 32 registers hold sums */
enum { LANES = 16 };
#elif defined(__AVX__)
#define ROWS 4 /* 12 of 16 */
enum { LANES = 8 };
#else
#define ROWS 8
enum { LANES = 4 };
#endif
enum { VECTORS = 3, PANEL = LANES * VECTORS, LINE = 64 };
enum { SPAN = 256 };           /* of the width, summed by itself: rounding errors grow with the longest sum */
enum { MIN_PRODUCTS = 1 << 19 }; /* below, a second thread costs more than it saves */

typedef float vector __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint32_t bits __attribute__((vector_size(LANES * 4), aligned(4)));

#if IS_BFLOAT16
enum { DEPTH = 2 }; /* elements of the width that lie side by side, in one column of a panel */
typedef uint32_t group;
#else
enum { DEPTH = 1 };
typedef float group;
#endif

struct part {
  const group *weight;  /* [panels, width / DEPTH, PANEL] */
  const element *bias;  /* [columns], or null */
  element *output;      /* [rows, columns], contiguous */
  int64_t columns;
};

struct linear {
  const element *input; /* [rows, width], contiguous */
  const struct part *parts;
  int64_t num_parts, rows, width, num_threads;
};

int64_t hf_paged_panel(void) { return PANEL; }

/* sum += a * x; of pairs: of both. */
static inline __attribute__((always_inline)) vector added(vector sum, group a, bits x) {
#if IS_BFLOAT16 && defined(__AVX512BF16__)
  return (vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(a - (bits){0}), (__m512bh)x);
#elif IS_BFLOAT16
  const union { uint32_t bits; float value; } first = {a << 16}, second = {a & 0xffff0000u};
  return sum + first.value * (vector)(x << 16) + second.value * (vector)(x & 0xffff0000u);
#else
  return sum + a * (vector)x;
#endif
}

/* Sums of `rows` rows, a constant after inlining, over one panel. `ahead`: what to fetch meanwhile. */
static inline __attribute__((always_inline)) void tile(const int rows, const group *input, int64_t depth,
                                                       const group *weight, const char *ahead, int64_t num_lines,
                                                       vector *sums) {
  for (int64_t first = 0; first < depth; first += SPAN) {
    const int64_t end = first + SPAN < depth ? first + SPAN : depth;
    vector sum[ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
      for (int v = 0; v < VECTORS; v++) sum[r][v] = (vector){0};
    for (int64_t k = first; k < end; k++) {
      bits x[VECTORS];
      for (int v = 0; v < VECTORS; v++) memcpy(&x[v], weight + k * PANEL + v * LANES, sizeof(bits));
      if (k < num_lines) __builtin_prefetch(ahead + k * LINE, 0, 2);
      for (int r = 0; r < rows; r++) {
        group a;
        memcpy(&a, input + r * depth + k, sizeof(a));
        for (int v = 0; v < VECTORS; v++) sum[r][v] = added(sum[r][v], a, x[v]);
      }
    }
    for (int r = 0; r < rows; r++)
      for (int v = 0; v < VECTORS; v++)
        sums[r * VECTORS + v] = first ? sums[r * VECTORS + v] + sum[r][v] : sum[r][v];
  }
}

static void sums_of(int64_t rows, const group *input, int64_t depth, const group *weight, const char *ahead,
                    int64_t num_lines, vector *sums) {
  switch (rows) {
#define CASE(n) case n: tile(n, input, depth, weight, ahead, num_lines, sums); break;
    CASE(1) CASE(2) CASE(3) CASE(4)
#if ROWS > 4
    CASE(5) CASE(6) CASE(7) CASE(8)
#endif
  }
}

static int64_t panels_of(const struct part *part) { return (part->columns + PANEL - 1) / PANEL; }

/* The part that a panel is of, null behind the last; the panel becomes that part's own. */
static const struct part *part_of(const struct linear *a, int64_t *panel) {
  for (int64_t p = 0; p < a->num_parts; p++) {
    const int64_t panels = panels_of(&a->parts[p]);
    if (*panel < panels) return &a->parts[p];
    *panel -= panels;
  }
  return 0;
}

void hf_paged_linear(const struct linear *a) {
  if (!a->rows) return;
  int64_t panels = 0;
  for (int64_t p = 0; p < a->num_parts; p++) panels += panels_of(&a->parts[p]);
  const int64_t depth = a->width / DEPTH, size = depth * PANEL, tiles = (a->rows + ROWS - 1) / ROWS;
  const int64_t lines = (size * sizeof(group)) / LINE, lines_a_tile = (lines + tiles - 1) / tiles;
#pragma omp parallel for schedule(static) num_threads(a->num_threads) if (a->rows * a->width * panels * PANEL >= MIN_PRODUCTS)
  for (int64_t index = 0; index < panels; index++) {
    int64_t panel = index, following = index + 1;
    const struct part *part = part_of(a, &panel), *next = part_of(a, &following);
    const group *weight = part->weight + panel * size;
    const char *ahead = next ? (const char *)(next->weight + following * size) : 0;
    const int64_t column = panel * PANEL, columns = part->columns - column < PANEL ? part->columns - column : PANEL;
    for (int64_t t = 0; t < tiles; t++) {
      const int64_t row = t * ROWS, rows = a->rows - row < ROWS ? a->rows - row : ROWS;
      const int64_t first_line = t * lines_a_tile, left = ahead ? lines - first_line : 0;
      vector sums[ROWS * VECTORS];
      sums_of(rows, (const group *)a->input + row * depth, depth, weight, ahead ? ahead + first_line * LINE : 0,
              left < lines_a_tile ? left : lines_a_tile, sums);
      for (int64_t r = 0; r < rows; r++) {
        const float *from = (const float *)(sums + r * VECTORS);
        element *to = part->output + (row + r) * part->columns + column;
        if (part->bias)
          for (int64_t c = 0; c < columns; c++) to[c] = from_float(from[c] + to_float(part->bias[column + c]));
        else
          for (int64_t c = 0; c < columns; c++) to[c] = from_float(from[c]);
      }
    }
  }
}
