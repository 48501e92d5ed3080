/* Elements of either type, and exp, for the C kernels. IS_BFLOAT16 is defined by the compiler call. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if IS_BFLOAT16
typedef uint16_t element;

static inline float to_float(element x) {
  union { uint32_t bits; float value; } number = {(uint32_t)x << 16};
  return number.value;
}

/* Rounds to the nearest, ties to even; a NaN stays one. */
static inline element from_float(float x) {
  union { float value; uint32_t bits; } number = {x};
  const uint32_t rounded = (number.bits + 0x7fff + ((number.bits >> 16) & 1)) >> 16;
  return (element)((number.bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}
#else
typedef float element;

static inline float to_float(element x) { return x; }
static inline element from_float(float x) { return x; }
#endif

/* a * b + c, of which the product isn't rounded where a processor can do that. */
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define MULTIPLY_ADD(a, b, c) __builtin_fmaf(a, b, c)
#else
#define MULTIPLY_ADD(a, b, c) ((a) * (b) + (c))
#endif

/* exp(x) for x <= 0 or NaN, within 2 ulp down to -87, where it stops: the polynomial and the two parts of log(2) are
   Cephes' (expf.c). Written out so that loops over it are vectorised. */
static inline float exp_negative(float x) {
  x = x < -87.0f ? -87.0f : x;
  const float n = rintf(x * 1.44269504088896341f);
  const float r = MULTIPLY_ADD(n, 2.12194440e-4f, MULTIPLY_ADD(n, -0.693359375f, x));
  float p = 1.9875691500e-4f;
  p = MULTIPLY_ADD(p, r, 1.3981999507e-3f);
  p = MULTIPLY_ADD(p, r, 8.3334519073e-3f);
  p = MULTIPLY_ADD(p, r, 4.1665795894e-2f);
  p = MULTIPLY_ADD(p, r, 1.6666665459e-1f);
  p = MULTIPLY_ADD(p, r, 5.0000001201e-1f);
  p = MULTIPLY_ADD(p * r, r, r) + 1.0f;
  union { uint32_t bits; float value; } power = {(uint32_t)((int32_t)n + 127) << 23}; /* of a NaN: anything */
  return p * power.value;
}
