/* Vectors on a CPU, and blocks of things that are computed at once. gpu.h has the same for a GPU.
 *
 * Vec: a vector in a register: one number of each of LANES images. Bits: the same bits as whole
 * numbers. Mask: yes or no for each lane. Vectors: an array of vectors in memory. */
#define LANES (FORM / 32)
#define LANES_HELD LANES /* on a GPU a thread holds one lane only */
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define NAME(name) JOIN(name, FORM)
#define INLINE static inline __attribute__((always_inline))
#define INTERNAL static /* a function of this file */
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 32")
/* it would keep a window's vectors for the next window: more than there are registers */
#pragma GCC optimize("no-predictive-commoning")
#endif
typedef float Vec __attribute__((vector_size(FORM / 8)));
typedef uint32_t Bits __attribute__((vector_size(FORM / 8)));
typedef Vec *Vectors; /* in memory */

/* How many things are computed at once, so that their sums fit into the registers (32 of AVX-512,
 * 16 of AVX2). stage.h: FILTERS forward, TAPS and CHANNELS backward. dense.h: UNITS forward and
 * UNITS_BACK. conv.h: output channels ROWS x COLUMNS positions, and for the weights' gradient
 * output channels SLOPES x TAPS_AT_ONCE weights. */
#if FORM == 256
enum { FILTERS = 2, UNITS = 4, CHANNELS = 2, TAPS = 2 };
enum { ROWS = 2, COLUMNS = 6, SLOPES = 2, TAPS_AT_ONCE = 6 };
#else
enum { FILTERS = 6, UNITS = 8, CHANNELS = 4, TAPS = 5 };
enum { ROWS = 4, COLUMNS = 4, SLOPES = 4, TAPS_AT_ONCE = 4 };
#endif
enum { UNITS_BACK = 8 };

#if FORM >= 256
#include <immintrin.h>
#if FORM == 512
typedef __mmask16 Mask; /* a bit */
#define MM(name) _mm512_##name
#define SELECT(m, a, b) ((Vec)_mm512_mask_blend_ps(m, b, a)) /* in each lane a where m, else b */
#define ABOVE(a, b) _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ)     /* a > b */
#define IS_NAN(a) _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q)
#else
typedef Bits Mask; /* all bits of a lane */
#define MM(name) _mm256_##name
#define SELECT(m, a, b) ((Vec)_mm256_blendv_ps(b, a, (Vec)(m)))
#define ABOVE(a, b) ((Mask)_mm256_cmp_ps(a, b, _CMP_GT_OQ))
#define IS_NAN(a) ((Mask)_mm256_cmp_ps(a, a, _CMP_UNORD_Q))
#endif
#define FILL(x) ((Vec)MM(set1_ps)(x))
#define FMA(a, b, c) ((Vec)MM(fmadd_ps)(a, b, c)) /* a * b + c */
#define SQRT(a) ((Vec)MM(sqrt_ps)(a))
#else
typedef Bits Mask;
#define FILL(x) ((Vec){(x), (x), (x), (x)})
#ifdef __aarch64__
#include <arm_neon.h>
#define FMA(a, b, c) ((Vec)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#else
INLINE Vec FMA(Vec a, Vec b, Vec c) {
  return (Vec){fmaf(a[0], b[0], c[0]), fmaf(a[1], b[1], c[1]), fmaf(a[2], b[2], c[2]),
               fmaf(a[3], b[3], c[3])};
}
#endif
INLINE Vec SQRT(Vec a) { return (Vec){sqrtf(a[0]), sqrtf(a[1]), sqrtf(a[2]), sqrtf(a[3])}; }
#define SELECT(m, a, b) ((Vec)(((m) & (Bits)(a)) | (~(m) & (Bits)(b))))
#define ABOVE(a, b) ((Mask)((a) > (b)))
#define IS_NAN(a) ((Mask)((a) != (a)))
#endif
#define ZERO ((Vec){0})
#define AS_BITS(x) ((Bits)(x))
#define AS_FLOAT(u) ((Vec)(u))
/* Only a GPU's compiler needs these. */
#define UNROLL_8
#define FORGET(pointer)
#define FORGET_THREAD(n)
#define FOR_LANES(l) for (int l = 0; l < LANES; l++)
#define LANE(v, l) ((v)[l])
#define HELD_INDEX(l) (l) /* index of lane l in an array [LANES_HELD] */
INLINE float *floats_at(Vectors v) { return (float *)v; }
/* SELECT of two masks. */
#define SELECT_MASK(m, a, b) ((Mask)(((m) & (a)) | (~(m) & (b))))

/* Return v in a register if it has several uses: GCC would read it again for each. */
INLINE Vec in_register(Vec v, const int uses) {
#if FORM >= 256
  if (uses > 1) __asm__("" : "+v"(v));
#endif
  return v;
}
/* Read and write LANES floats of a row, at any address. */
INLINE Vec load(const float *p) {
  Vec v;
  memcpy(&v, p, sizeof v);
  return v;
}
INLINE void store(float *p, Vec v) { memcpy(p, &v, sizeof v); }
/* Return small whole numbers as floats: the float 2^23 + n has n in its low bits. */
INLINE Vec number(Bits whole) { return (Vec)(whole | 0x4b000000u) - 8388608.f; }
INLINE Vec numbers(const uint8_t *p) {
  Bits v;
  for (int l = 0; l < LANES; l++) v[l] = p[l];
  return number(v);
}
/* Return lane l of a vector in memory. */
INLINE float lane(const Vec *v, int l) { return ((const float *)v)[l]; }

/* Split the things start ... end - 1 into blocks of 9, 8, 6, 5, 4, 2 and 1, none above `largest`,
 * and run a statement, the last argument, on each. The first two arguments are names that it may
 * use: `first`, the block's first thing, and `count`, its size. The size is a constant, so the
 * compiler unrolls loops over the block and keeps its sums in registers. */
#define FOR_BLOCKS(first, count, largest, start, end, ...) \
  for (int32_t first = (start); first < (end);) { \
    BLOCK(first, count, 9, largest, end, __VA_ARGS__) \
    BLOCK(first, count, 8, largest, end, __VA_ARGS__) \
    BLOCK(first, count, 6, largest, end, __VA_ARGS__) \
    BLOCK(first, count, 5, largest, end, __VA_ARGS__) \
    BLOCK(first, count, 4, largest, end, __VA_ARGS__) \
    BLOCK(first, count, 2, largest, end, __VA_ARGS__) \
    BLOCK(first, count, 1, largest, end, __VA_ARGS__) \
  }
#define BLOCK(first, count, size, largest, end, ...) \
  if (size <= (largest) && first + size <= (end)) { \
    enum { count = size }; \
    __VA_ARGS__; \
    first += size; \
    continue; \
  }

/* g [4] += the sums of four vectors over their n images, four lanes at a time. */
#if FORM >= 256
INLINE void add_lanes_of_four(float *g, const Vec *v, int n) {
  /* p and q: lanes 0 + 2 and 1 + 3 (of each four lanes) of two vectors each */
  const Vec p = MM(unpacklo_ps)(v[0], v[1]) + MM(unpackhi_ps)(v[0], v[1]);
  const Vec q = MM(unpacklo_ps)(v[2], v[3]) + MM(unpackhi_ps)(v[2], v[3]);
  const Vec sum = MM(shuffle_ps)(p, q, 0x44) + MM(shuffle_ps)(p, q, 0xee);
  __m128 total = _mm_loadu_ps(g);
  for (int l = 0; l < n; l += 4) total += _mm_loadu_ps((const float *)&sum + l);
  _mm_storeu_ps(g, total);
}
#endif

/* g [count] += the sum of each vector over its n images, four lanes at a time: (0 + 2) + (1 + 3). */
static void add_lanes(float *g, const Vec *v, int64_t count, int n) {
  int64_t i = 0;
#if FORM >= 256
  for (; i + 4 <= count; i += 4) add_lanes_of_four(g + i, v + i, n);
#endif
  for (; i < count; i++)
    for (int l = 0; l < n; l += 4)
      g[i] += (lane(v + i, l) + lane(v + i, l + 2)) + (lane(v + i, l + 1) + lane(v + i, l + 3));
}
