/* What the pool holds: elements, or codes of 8 bits. STORED is ELEMENTS, or SCALED: int8, with a float32 scale for each row
   behind the codes of a block (see scaled_rows.py), or the fp8 formats E4M3 and E5M2. STORED is defined by the compiler
   call.

   Needs cpu_element.h. */
enum { ELEMENTS, SCALED, E4M3, E5M2 };
enum { IS_SCALED = STORED == SCALED, SCALE_BYTES = IS_SCALED ? sizeof(float) : 0 };
enum { MANTISSA = STORED == E4M3 ? 3 : 2, BIAS = STORED == E4M3 ? 7 : 15, DROPPED = 23 - MANTISSA };
/* Of the bits behind the sign, where float32 has its own: from the first of a number with an implicit bit on, from the
   first that is none on, and of the largest number. */
enum { LEAST_NORMAL = 1 << 23, NO_NUMBER = STORED == E4M3 ? 0x7f << 20 : 0x7c << 21 };
enum { TOP = STORED == E4M3 ? 15 : 31, LARGEST = STORED == E4M3 ? 0x43e00000 : 0x47600000 };

#if STORED == 0
typedef element stored;
#elif STORED == 1
typedef int8_t stored;
#else
typedef uint8_t stored;
#endif

static inline int32_t bits_of(float x) {
  union { float value; int32_t bits; } number = {x};
  return number.bits;
}

static inline float number_of(int32_t bits) {
  union { int32_t bits; float value; } number = {bits};
  return number.value;
}

/* The number behind a code, of int8 yet to be multiplied by its scale. */
static inline float from_stored(stored x) {
#if STORED == 0
  return to_float(x);
#elif STORED == 1
  return x;
#else
  const int32_t size = (x & 0x7f) << DROPPED;
  const float small = number_of(size + ((128 - BIAS) << 23)) - number_of((128 - BIAS) << 23);
  const int32_t other = size + (size < NO_NUMBER ? (127 - BIAS) << 23 : (255 - TOP) << 23);
  return number_of((size < LEAST_NORMAL ? bits_of(small) : other) | (int32_t)((uint32_t)(x & 0x80) << 24));
#endif
}

#if STORED > 1
/* The nearest code, ties to even; beyond the largest number that one, of NaN NaN. */
static inline stored code_of(float x) {
  const int32_t bits = bits_of(x), all = bits & 0x7fffffff, size = all < LARGEST ? all : LARGEST;
  const int32_t magic = (24 - BIAS - MANTISSA + 127) << 23; /* added, it has float32's own rounding drop the right bits */
  const int32_t small = bits_of(number_of(size) + number_of(magic)) - magic;
  const int32_t normal = ((size + (1 << (DROPPED - 1)) - 1 + (size >> DROPPED & 1)) >> DROPPED) - ((127 - BIAS) << MANTISSA);
  const int32_t code = all > 0x7f800000 ? 0x7f : size < (128 - BIAS) << 23 ? small : normal;
  return code | (bits >> 24 & 0x80);
}
#endif

/* `count` elements that lie side by side, to a row of the pool and (of int8) its scale. */
static inline void store_row(const element *from, stored *to, float *scale, const int count) {
#if STORED == 0
  memcpy(to, from, count * sizeof(stored));
#elif STORED == 1
  int32_t most = 0; /* as an integer, so that NaN is the largest */
  for (int d = 0; d < count; d++) {
    const int32_t size = bits_of(to_float(from[d])) & 0x7fffffff;
    most = size > most ? size : most;
  }
  const float largest = number_of(most), magic = 12582912.0f; /* behind which float32 has no fractions */
  const int is_usual = largest >= 1e-30f && largest < INFINITY;
  const float factor = is_usual ? 127.0f / largest : 0;
  *scale = largest < 1e-30f ? 0 : largest * (1.0f / 127.0f);
  for (int d = 0; d < count; d++) {
    const int32_t code = bits_of(to_float(from[d]) * factor + magic) - bits_of(magic);
    to[d] = is_usual ? code : 0;
  }
#else
  for (int d = 0; d < count; d++) to[d] = code_of(to_float(from[d]));
#endif
}
