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

/* The lanes of each of four sums, added up: by halves. */
#if defined(__AVX512F__)
INLINE four folded(vector a, vector b, vector c, vector d) {
#define HALVES(x, y, low, high) \
  _mm512_add_ps(_mm512_shuffle_f32x4((__m512)x, (__m512)y, low), _mm512_shuffle_f32x4((__m512)x, (__m512)y, high))
#define AGAIN(x, order) _mm512_add_ps(x, _mm512_shuffle_ps(x, x, order))
  const __m512 ab = HALVES(a, b, 0x44, 0xee), cd = HALVES(c, d, 0x44, 0xee), all = HALVES(ab, cd, 0x88, 0xdd);
  const __m512 pairs = AGAIN(all, 0x4e), sums = AGAIN(pairs, 0xb1);
  const __m512i ends = _mm512_castsi128_si512(_mm_setr_epi32(0, 4, 8, 12));
  return (four)_mm512_castps512_ps128(_mm512_permutexvar_ps(ends, sums));
#undef HALVES
#undef AGAIN
}
#else
INLINE four quarter(vector sum) {
#if defined(__AVX__)
  return (four)(_mm256_castps256_ps128((__m256)sum) + _mm256_extractf128_ps((__m256)sum, 1));
#else
  return sum;
#endif
}

INLINE four folded(vector first, vector second, vector third, vector fourth) {
  four a = quarter(first), b = quarter(second), c = quarter(third), d = quarter(fourth);
  a = SHUFFLE(four_places, a, b, 0, 4, 1, 5) + SHUFFLE(four_places, a, b, 2, 6, 3, 7);
  c = SHUFFLE(four_places, c, d, 0, 4, 1, 5) + SHUFFLE(four_places, c, d, 2, 6, 3, 7);
  return SHUFFLE(four_places, a, c, 0, 1, 4, 5) + SHUFFLE(four_places, a, c, 2, 3, 6, 7);
}
#endif
