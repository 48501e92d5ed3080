/* Layers between the matrix products, one pass over memory each: RMSNorm, the gate of gated MLPs, activations, rotary
   embeddings, residual sums; and calls of kernels one after another.

   Called by cpu_layers.py, which holds the same structs, and by cpu_decoder.py. Sums and products in float32; where the
   model's own code rounds to the element type in between, so does this. Strides count elements. */
#include "cpu_element.h"

#define AT_ONCE 64         /* squares that are summed side by side */
#define MIN_ELEMENTS 32768 /* below, a second thread costs more than it saves */

struct rms_norm {
  const element *input, *weight; /* [rows, dim], contiguous; [dim] */
  element *output;               /* [rows, dim] */
  int64_t rows, dim, num_threads;
  int64_t rounds_first;          /* whether the normed row is rounded before it is multiplied by the weight */
  float eps, offset;             /* offset: added to the weight */
};

/* The sum of a row's squares: of every AT_ONCE-th one, and these by halves. */
static inline float squares_of(const element *row, int64_t dim) {
  float sums[AT_ONCE] = {0};
  int64_t d = 0;
  for (; d + AT_ONCE <= dim; d += AT_ONCE)
    for (int i = 0; i < AT_ONCE; i++) sums[i] = MULTIPLY_ADD(to_float(row[d + i]), to_float(row[d + i]), sums[i]);
  for (int i = 0; d + i < dim; i++) sums[i] = MULTIPLY_ADD(to_float(row[d + i]), to_float(row[d + i]), sums[i]);
  for (int half = AT_ONCE / 2; half; half /= 2)
    for (int i = 0; i < half; i++) sums[i] += sums[i + half];
  return sums[0];
}

void hf_paged_rms_norm(const struct rms_norm *a) {
#pragma omp parallel for num_threads(a->num_threads) if (a->rows * a->dim >= MIN_ELEMENTS)
  for (int64_t row = 0; row < a->rows; row++) {
    const element *from = a->input + row * a->dim;
    element *to = a->output + row * a->dim;
    const float factor = 1.0f / sqrtf(squares_of(from, a->dim) / a->dim + a->eps);
    if (a->rounds_first)
      for (int64_t d = 0; d < a->dim; d++)
        to[d] = from_float(to_float(from_float(to_float(from[d]) * factor)) * (to_float(a->weight[d]) + a->offset));
    else
      for (int64_t d = 0; d < a->dim; d++)
        to[d] = from_float(to_float(from[d]) * factor * (to_float(a->weight[d]) + a->offset));
  }
}

struct gate {
  const element *gate, *up; /* [rows, dim], rows any distance apart */
  element *output;          /* [rows, dim], contiguous */
  int64_t rows, dim, gate_row, up_row, num_threads;
  float linear, cubic;      /* the activation is x * sigmoid(linear * x + cubic * x^3) */
};

/* factor * sigmoid(linear * x + cubic * x^3), by the exponential that can't overflow. */
static inline float active(float factor, float x, float linear, float cubic) {
  const float v = cubic == 0 ? linear * x : linear * x + cubic * x * x * x; /* 0 * inf would be NaN */
  const float e = exp_negative(v < 0 ? v : -v);
  return factor * (v < 0 ? e : 1.0f) / (1.0f + e);
}

void hf_paged_gate(const struct gate *a) {
#pragma omp parallel for num_threads(a->num_threads) if (a->rows * a->dim >= MIN_ELEMENTS)
  for (int64_t row = 0; row < a->rows; row++) {
    const element *gate = a->gate + row * a->gate_row, *up = a->up + row * a->up_row;
    element *to = a->output + row * a->dim;
    for (int64_t d = 0; d < a->dim; d++) {
      const float x = to_float(gate[d]);
      to[d] = from_float(to_float(from_float(active(x, x, a->linear, a->cubic))) * to_float(up[d]));
    }
  }
}

/* `size` elements, contiguous; times x if it `multiplies`. */
void hf_paged_activate(const element *restrict input, element *restrict output, int64_t size, int64_t num_threads,
                       int64_t multiplies, float linear, float cubic) {
#pragma omp parallel for num_threads(num_threads) if (size >= MIN_ELEMENTS)
  for (int64_t i = 0; i < size; i++) {
    const float x = to_float(input[i]);
    output[i] = from_float(active(multiplies ? x : 1.0f, x, linear, cubic));
  }
}

struct rotary {
  const element *query, *key; /* [tokens, heads, dim], any strides of the first two */
  const element *cos, *sin;   /* [tokens, rotary_dim], contiguous */
  element *to_query, *to_key; /* [tokens, heads, dim], contiguous */
  int64_t tokens, query_heads, key_heads, dim, rotary_dim;
  int64_t query_token, query_head, key_token, key_head, num_threads;
  int64_t interleaved;        /* whether element 2i is rotated with 2i + 1, or i with i + rotary_dim / 2 */
  int64_t rounds;             /* whether both products are rounded before they are added */
};

static inline float added(float x, float y, const int rounds) {
  return rounds ? to_float(from_float(x)) + to_float(from_float(y)) : x + y;
}

/* One token's heads, `head` elements apart. What is `const int` is a constant after inlining, or no vectors are made. */
static inline __attribute__((always_inline)) void rotate_heads(const struct rotary *a, const int interleaved,
                                                               const int rounds, const element *from, element *to,
                                                               int64_t heads, int64_t head, const element *cos,
                                                               const element *sin) {
  const int64_t half = a->rotary_dim / 2, step = interleaved ? 2 : 1, apart = interleaved ? 1 : half;
  for (int64_t h = 0; h < heads; h++, from += head, to += a->dim) {
#pragma GCC ivdep
    for (int64_t i = 0; i < half; i++) {
      const int64_t first = i * step, second = first + apart;
      const float x = to_float(from[first]), y = to_float(from[second]);
      to[first] = from_float(added(x * to_float(cos[first]), -y * to_float(sin[first]), rounds));
      to[second] = from_float(added(y * to_float(cos[second]), x * to_float(sin[second]), rounds));
    }
    for (int64_t i = a->rotary_dim; i < a->dim; i++) to[i] = from[i];
  }
}

static void rotate(const struct rotary *a, const element *from, element *to, int64_t heads, int64_t head,
                   const element *cos, const element *sin) {
  if (a->interleaved && a->rounds) rotate_heads(a, 1, 1, from, to, heads, head, cos, sin);
  else if (a->interleaved) rotate_heads(a, 1, 0, from, to, heads, head, cos, sin);
  else if (a->rounds) rotate_heads(a, 0, 1, from, to, heads, head, cos, sin);
  else rotate_heads(a, 0, 0, from, to, heads, head, cos, sin);
}

void hf_paged_rotary(const struct rotary *a) {
  const int64_t num_elements = a->tokens * (a->query_heads + a->key_heads) * a->dim;
#pragma omp parallel for num_threads(a->num_threads) if (num_elements >= MIN_ELEMENTS)
  for (int64_t t = 0; t < a->tokens; t++) {
    const element *cos = a->cos + t * a->rotary_dim, *sin = a->sin + t * a->rotary_dim;
    element *to_query = a->to_query + t * a->query_heads * a->dim, *to_key = a->to_key + t * a->key_heads * a->dim;
    rotate(a, a->query + t * a->query_token, to_query, a->query_heads, a->query_head, cos, sin);
    rotate(a, a->key + t * a->key_token, to_key, a->key_heads, a->key_head, cos, sin);
  }
}

struct add {
  const element *first, *second;
  element *output;
  int64_t size, num_threads;
};

void hf_paged_add(const struct add *a) {
#pragma omp parallel for simd num_threads(a->num_threads) if (a->size >= MIN_ELEMENTS)
  for (int64_t i = 0; i < a->size; i++) a->output[i] = from_float(to_float(a->first[i]) + to_float(a->second[i]));
}

struct call {
  void (*kernel)(const void *);
  const void *arguments;
};

void hf_paged_run(const struct call *calls, int64_t count) {
  for (int64_t i = 0; i < count; i++) calls[i].kernel(calls[i].arguments);
}
