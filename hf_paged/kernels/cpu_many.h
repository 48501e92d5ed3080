/* A product of many rows with columns whose elements lie side by side, on AVX2. Rows that lie whole pages apart compete for
   the same places of a cache, and each tile would take pairs apart again: so a block of rows, and a group of columns, are
   copied as float32, in the order in which a tile reads them.

   A sum is made in the order of cpu_linear.c, which this is a part of, so its bits are the same. */

enum { MANY = 64, MOST_WIDTH = 1 << 14 };        /* least rows; a wider group's copies would take megabytes */
enum { PANEL = 3, GROUP = 48 * PANEL };          /* columns of a tile, and of a group */
enum { COPY_BYTES = 3 << 16, FEWEST = BLOCK / 4 }; /* of a block of rows, for the second-level cache; its least rows */
enum { PIECE = 1024 / STEP };                    /* steps after which a panel's copy fills the first-level cache */
_Static_assert(SPAN / STEP % PIECE == 0 && FEWEST % ROWS == 0 && ROWS * PANEL % 4 == 0, "pieces make up spans");

/* Keeps a vector in its register, where a compiler would load it again for each product. */
#if defined(__x86_64__)
#define HOLD(x) __asm__("" : "+x"(x))
#else
#define HOLD(x) (void)(x)
#endif

/* Some rows, a step of each side by side: what PAIR vectors of it multiply. */
INLINE void spread(const int rows, const element *const *from, int64_t steps, vector *to) {
  for (int64_t s = 0; s < steps; s++, to += rows * PAIR)
    EACH(r, rows) {
      const bits x = along(from[r] + s * STEP);
      if (PAIR == 1) to[r] = (vector)x;
      else to[r * PAIR] = (vector)(x << 16), to[r * PAIR + PAIR - 1] = (vector)(x & 0xffff0000u);
    }
}

/* The same of their whole width, with zeros behind it in a last step. The first row stands in for missing ones. */
INLINE void spread_all(const int rows, int64_t real_rows, struct operand from, int64_t width, vector *to) {
  const int64_t steps = width / STEP, rest = width % STEP;
  const element *row[ROWS];
  element edge[ROWS][STEP] = {{0}};
  EACH(r, rows) row[r] = from.first + (r < real_rows ? r : 0) * from.row;
  spread(rows, row, steps, to);
  if (!rest) return;
  EACH(r, rows) memcpy(edge[r], row[r] + steps * STEP, rest * sizeof(element)), row[r] = edge[r];
  spread(rows, row, 1, to + steps * rows * PAIR);
}

/* Sums of a tile that a piece of the width has not ended: over its span so far, and over earlier spans. */
struct pending {
  vector span[ROWS * PANEL], earlier[ROWS * PANEL];
};
enum { BEGINS_SPAN = 1, ENDS_SPAN = 2, HAS_EARLIER = 4, IS_LAST = 8 };

/* ROWS rows times PANEL columns over a piece of the width; with the last one, `results` [ROWS, PANEL]. */
static void tile_of_copies(const vector *input, const vector *weight, int64_t steps, int place, struct pending *own,
                           float *results) {
  vector sum[ROWS][PANEL];
  EACH(r, ROWS) EACH(v, PANEL) sum[r][v] = place & BEGINS_SPAN ? (vector){0} : own->span[r * PANEL + v];
  for (int64_t s = 0; s < steps; s++, input += ROWS * PAIR, weight += PANEL * PAIR)
    EACH(p, PAIR) {
      vector w[PANEL];
      EACH(v, PANEL) {
        w[v] = weight[v * PAIR + p];
        HOLD(w[v]);
      }
      EACH(r, ROWS) {
        const vector x = input[r * PAIR + p];
        EACH(v, PANEL) sum[r][v] = multiply_add(x, w[v], sum[r][v]);
      }
    }
  if (!(place & ENDS_SPAN)) {
    EACH(r, ROWS) EACH(v, PANEL) own->span[r * PANEL + v] = sum[r][v];
    return;
  }
  if (place & HAS_EARLIER) EACH(r, ROWS) EACH(v, PANEL) sum[r][v] += own->earlier[r * PANEL + v];
  if (!(place & IS_LAST)) {
    EACH(r, ROWS) EACH(v, PANEL) own->earlier[r * PANEL + v] = sum[r][v];
    return;
  }
#define SUM(i) sum[(i) / PANEL][(i) % PANEL]
  EACH(i, ROWS * PANEL / 4) {
    const four result = folded(SUM(4 * i), SUM(4 * i + 1), SUM(4 * i + 2), SUM(4 * i + 3));
    memcpy(results + 4 * i, &result, sizeof(result));
  }
#undef SUM
}

struct copies {
  vector *weight, *input; /* of a group's columns, panel by panel; of a block's rows, tile by tile */
  float *results;         /* [block, GROUP] */
  int64_t steps, block;
};

/* Bytes `from` to `to` of each column of a panel, brought to the second-level cache. */
INLINE void fetch(struct operand panel, int64_t from, int64_t to) {
  EACH(v, PANEL)
    for (int64_t at = from; at < to; at += 64)
      __builtin_prefetch((const char *)(panel.first + v * panel.row) + at, 0, 2);
}

/* Results of the first `tiles` of a block's rows and the panel that is copied to `weight`; what `next` points to, if
   it's not null, is fetched meanwhile. */
static void panel_of_copies(const struct linear *a, const struct copies *own, const vector *weight, int64_t tiles,
                            struct operand next, float *to) {
  const int64_t whole = a->width / STEP, bytes = a->width * sizeof(element);
  struct pending sums[BLOCK / ROWS];
  float results[ROWS * PANEL];
  int place = 0;
  for (int64_t s = 0, end; s < own->steps; s = end) {
    end = s + PIECE < whole ? s + PIECE : s < whole ? whole : own->steps;
    place = (place & HAS_EARLIER) | (s % (SPAN / STEP) == 0 || s == whole ? BEGINS_SPAN : 0);
    place |= (end % (SPAN / STEP) == 0 || end >= whole ? ENDS_SPAN : 0) | (end == own->steps ? IS_LAST : 0);
    for (int64_t t = 0; t < tiles; t++) {
      if (next.first && !s) fetch(next, t * bytes / tiles, (t + 1) * bytes / tiles);
      const vector *input = own->input + (t * own->steps + s) * ROWS * PAIR;
      tile_of_copies(input, weight + s * PANEL * PAIR, end - s, place, sums + t, results);
      if (place & IS_LAST)
        EACH(r, ROWS) memcpy(to + (t * ROWS + r) * GROUP, results + r * PANEL, PANEL * sizeof(float));
    }
    if (place & ENDS_SPAN) place |= HAS_EARLIER;
  }
}

/* All rows times columns from `first` to `end`, a whole number of panels. */
static void panels(const struct linear *a, const struct part *part, int64_t first, int64_t end, struct copies own) {
  for (int64_t group = first; group < end; group += GROUP) {
    const int64_t group_end = group + GROUP < end ? group + GROUP : end;
    for (int64_t row = 0; row < a->rows; row += own.block) {
      const int64_t rows = a->rows - row < own.block ? a->rows - row : own.block;
      for (int64_t r = 0; r < rows; r += ROWS) {
        const struct operand input = {a->input + (row + r) * a->width, a->width};
        spread_all(ROWS, rows - r, input, a->width, own.input + r * own.steps * PAIR);
      }
      for (int64_t column = group; column < group_end; column += PANEL) {
        vector *copy = own.weight + (column - group) * own.steps * PAIR;
        struct operand weight = {part->weight + column * part->row, part->row};
        if (!row) spread_all(PANEL, PANEL, weight, a->width, copy);
        weight.first = !row && column + 2 * PANEL <= end ? weight.first + PANEL * part->row : 0;
        panel_of_copies(a, &own, copy, (rows + ROWS - 1) / ROWS, weight, own.results + column - group);
      }
      finish(part, row, group, rows, group_end - group, GROUP, own.results);
    }
  }
}

/* The same as far as there are whole panels; returns the column behind them. */
static int64_t many(const struct linear *a, const struct part *part, int64_t first, int64_t end) {
  const int64_t whole = first + (end - first) / PANEL * PANEL, most = whole - first < GROUP ? whole - first : GROUP;
  if (a->rows < MANY || a->width == 0 || a->width > MOST_WIDTH || part->is_transposed || !most) return first;
  const int64_t steps = (a->width + STEP - 1) / STEP, row = steps * PAIR; /* vectors */
  int64_t block = COPY_BYTES / (row * (int64_t)sizeof(vector)) / ROWS * ROWS;
  block = block < FEWEST ? FEWEST : block > BLOCK ? BLOCK : block;
  vector *copies = aligned_alloc(64, ((most + block) * row + block * GROUP / LANES) * sizeof(vector) / 64 * 64 + 64);
  if (!copies) return first;
  vector *input = copies + most * row, *results = input + block * row;
  panels(a, part, first, whole, (struct copies){copies, input, (float *)results, steps, block});
  free(copies);
  return whole;
}
