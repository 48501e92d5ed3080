/* Vectors of float32 as wide as the processor's, and the sums of their lanes. */
#include <stdint.h>
#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif

#define INLINE static inline __attribute__((always_inline))
#define EACH(i, count) _Pragma("GCC unroll 8") for (int i = 0; i < count; i++)

typedef float four __attribute__((vector_size(16), aligned(4), may_alias));
typedef float eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef float vector __attribute__((vector_size(LANES * 4), aligned(4)));
typedef float anywhere __attribute__((vector_size(LANES * 4), aligned(1), may_alias)); /* in memory */
typedef uint32_t bits __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t four_places __attribute__((vector_size(16)));
typedef int32_t places __attribute__((vector_size(LANES * 4)));

/* Lanes of two vectors by their numbers, those of the second behind those of the first. */
#ifdef __clang__
#define SHUFFLE(places, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(places, a, b, ...) __builtin_shuffle(a, b, (places){__VA_ARGS__})
#endif

/* a * b + c, of which the product isn't rounded where a processor can do that. */
INLINE vector multiply_add(vector a, vector b, vector c) {
#if defined(__AVX512F__)
  return (vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

/* The lanes of a sum, added up by halves until four are left. */
INLINE four quarter(const vector *sum) {
#if defined(__AVX512F__)
  const eight half = ((const eight *)sum)[0] + ((const eight *)sum)[1];
  return ((const four *)&half)[0] + ((const four *)&half)[1];
#elif defined(__AVX__)
  return ((const four *)sum)[0] + ((const four *)sum)[1];
#else
  return *sum;
#endif
}

/* The lanes of each of four sums, added up. */
INLINE four folded(const vector *sums) {
  four a = quarter(sums), b = quarter(sums + 1), c = quarter(sums + 2), d = quarter(sums + 3);
  a = SHUFFLE(four_places, a, b, 0, 4, 1, 5) + SHUFFLE(four_places, a, b, 2, 6, 3, 7);
  c = SHUFFLE(four_places, c, d, 0, 4, 1, 5) + SHUFFLE(four_places, c, d, 2, 6, 3, 7);
  return SHUFFLE(four_places, a, c, 0, 1, 4, 5) + SHUFFLE(four_places, a, c, 2, 3, 6, 7);
}
