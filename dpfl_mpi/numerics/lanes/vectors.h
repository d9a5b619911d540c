/* Vectors of one number of each image, and functions of them: the same bits in every form. */
#define LANES (FORM / 32)
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define NAME(name) JOIN(name, FORM)
#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 32")
/* it would keep a window's vectors for the next window: more than there are registers */
#pragma GCC optimize("no-predictive-commoning")
#endif
typedef float F __attribute__((vector_size(FORM / 8)));
typedef uint32_t U __attribute__((vector_size(FORM / 8)));

/* Sizes of blocks whose sums fit into the registers: 32 of AVX-512, 16 of AVX2. M: yes or no for
 * each lane. */
#if FORM == 256
enum { FILTERS = 2, UNITS = 4, CHANNELS = 2, TAPS = 2 };
enum { ROWS = 2, COLUMNS = 6, SLOPES = 2, TAPS_AT_ONCE = 6 };
#else
enum { FILTERS = 6, UNITS = 8, CHANNELS = 4, TAPS = 5 };
enum { ROWS = 4, COLUMNS = 4, SLOPES = 4, TAPS_AT_ONCE = 4 };
#endif

#if FORM >= 256
#include <immintrin.h>
#if FORM == 512
typedef __mmask16 M; /* a bit */
#define MM(name) _mm512_##name
#define PICK(m, a, b) ((F)_mm512_mask_blend_ps(m, b, a)) /* a where m, else b */
#define ABOVE(a, b) _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ)
#define NO_NUMBER(a) _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q)
#else
typedef U M; /* all bits of a lane */
#define MM(name) _mm256_##name
#define PICK(m, a, b) ((F)_mm256_blendv_ps(b, a, (F)(m)))
#define ABOVE(a, b) ((M)_mm256_cmp_ps(a, b, _CMP_GT_OQ))
#define NO_NUMBER(a) ((M)_mm256_cmp_ps(a, a, _CMP_UNORD_Q))
#endif
#define FILL(x) ((F)MM(set1_ps)(x))
#define FMA(a, b, c) ((F)MM(fmadd_ps)(a, b, c)) /* a * b + c */
#define ROOT(a) ((F)MM(sqrt_ps)(a))
#else
typedef U M;
#define FILL(x) ((F){(x), (x), (x), (x)})
#ifdef __aarch64__
#include <arm_neon.h>
#define FMA(a, b, c) ((F)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#else
INLINE F FMA(F a, F b, F c) {
  return (F){fmaf(a[0], b[0], c[0]), fmaf(a[1], b[1], c[1]), fmaf(a[2], b[2], c[2]),
             fmaf(a[3], b[3], c[3])};
}
#endif
INLINE F ROOT(F a) { return (F){sqrtf(a[0]), sqrtf(a[1]), sqrtf(a[2]), sqrtf(a[3])}; }
#define PICK(m, a, b) ((F)(((m) & (U)(a)) | (~(m) & (U)(b))))
#define ABOVE(a, b) ((M)((a) > (b)))
#define NO_NUMBER(a) ((M)((a) != (a)))
#endif
#define ZERO ((F){0})
#define EITHER(m, a, b) ((M)(((m) & (a)) | (~(m) & (b)))) /* of masks: a where m, else b */

/* In a register where it is used more than once: GCC would read it again for every use. */
INLINE F held(F v, const int uses) {
#if FORM >= 256
  if (uses > 1) __asm__("" : "+v"(v));
#endif
  (void)uses;
  return v;
}
/* A layer starts anywhere in its row. */
INLINE F load(const float *p) {
  F v;
  memcpy(&v, p, sizeof v);
  return v;
}
INLINE void store(float *p, F v) { memcpy(p, &v, sizeof v); }
/* A small whole number as a float: in the low bits of 2^23 it is that much more. */
INLINE F number(U whole) { return (F)(whole | 0x4b000000u) - 8388608.f; }
INLINE F numbers(const uint8_t *p) {
  U v;
  for (int l = 0; l < LANES; l++) v[l] = p[l];
  return number(v);
}
/* Write a gradient, or add it to what is there. */
INLINE void put(F *to, F d, int adds) { *to = adds ? *to + d : d; }
/* What the four sums of a mean come to. */
INLINE F together(const F *sum) { return (sum[0] + sum[2]) + (sum[1] + sum[3]); }
INLINE float lane(const F *v, int l) { return ((const float *)v)[l]; }
INLINE F relu_of(F a) { return PICK(ABOVE(ZERO, a), ZERO, a); } /* not-a-number stays */

/* Return the greater and where it is b: a at a tie, not-a-number where there is one, as torch's
 * max-pool. */
INLINE F greater(F a, F b, M *second) {
  *second = ABOVE(b, a) | NO_NUMBER(b);
  return PICK(*second, b, a);
}

/* Return e^x of x <= 0, to 1e-7. Adding 1.5 * 2^23 rounds and leaves the whole number in the low
 * bits (Cephes). Below -50 it is 0: as gradients, 1e-22 and less would become subnormal numbers on
 * their way back, which take 100 times as long. */
static F exponential(F x) {
  static const float c[5] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                             5.0000001201e-1f};
  const F shifted = FMA(x, FILL(1.44269504f), FILL(12582912.f)), n = shifted - 12582912.f;
  const F r = FMA(n, FILL(2.12194440e-4f), FMA(n, FILL(-0.693359375f), x)); /* x - n log 2 */
  F p = FILL(1.9875691500e-4f);
  for (int i = 0; i < 5; i++) p = FMA(p, r, FILL(c[i]));
  const F y = FMA(p, r * r, r) + 1.f;
  return PICK(ABOVE(FILL(-50.f), x), ZERO, (F)((U)y + ((U)shifted << 23))); /* y 2^n */
}

/* Return log x of x >= 1, to 1e-7 (Cephes): e log 2 + log(1 + m), 1 + m in sqrt(1/2) ... sqrt(2).
 */
static F logarithm(F x) {
  static const float c[8] = {-1.1514610310e-1f, 1.1676998740e-1f,  -1.2420140846e-1f,
                             1.4249322787e-1f,  -1.6668057665e-1f, 2.0000714765e-1f,
                             -2.4999993993e-1f, 3.3333331174e-1f};
  const U bits = (U)x - 0x3f3504f3u;
  const F e = (F)((bits >> 23) + 0x4b400000u) - 12582912.f;
  const F m = (F)((bits & 0x7fffffu) + 0x3f3504f3u) - 1.f;
  F p = FILL(7.0376836292e-2f);
  for (int i = 0; i < 8; i++) p = FMA(p, m, FILL(c[i]));
  const F y = FMA(FILL(-0.5f), m * m, FMA(e, FILL(-2.12194440e-4f), p * (m * m * m))) + m;
  return FMA(e, FILL(0.693359375f), y) + (x - x); /* x - x passes on not-a-number and infinity */
}

/* Run `call` on blocks of 9, 8, 6, 5, 4, 2 and 1 of `total` things, none above `largest`. In it
 * `at` is the block's first and `count` its size, which the compiler knows, so that the sums of a
 * block are registers. */
#define BLOCK(size, largest, total, call) \
  if (size <= (largest) && at + size <= (total)) { \
    enum { count = size }; \
    call; \
    at += size; \
    continue; \
  }
#define BLOCKS(largest, total, call) \
  for (int32_t at = 0; at < (total);) { \
    BLOCK(9, largest, total, call) BLOCK(8, largest, total, call) BLOCK(6, largest, total, call) \
    BLOCK(5, largest, total, call) BLOCK(4, largest, total, call) BLOCK(2, largest, total, call) \
    BLOCK(1, largest, total, call) \
  }

/* g [4] += the sums of four vectors over the images, four after four. */
#if FORM >= 256
INLINE void add_four(float *g, const F *v, int n) {
  /* 0 + 2 and 1 + 3 of two vectors each */
  const F p = MM(unpacklo_ps)(v[0], v[1]) + MM(unpackhi_ps)(v[0], v[1]);
  const F q = MM(unpacklo_ps)(v[2], v[3]) + MM(unpackhi_ps)(v[2], v[3]);
  const F sum = MM(shuffle_ps)(p, q, 0x44) + MM(shuffle_ps)(p, q, 0xee);
  __m128 total = _mm_loadu_ps(g);
  for (int l = 0; l < n; l += 4) total += _mm_loadu_ps((const float *)&sum + l);
  _mm_storeu_ps(g, total);
}
#endif

/* g[i] += the sum of v[i] over the images, four after four. */
static void add_up(float *g, const F *v, int64_t count, int n) {
  int64_t i = 0;
#if FORM >= 256
  for (; i + 4 <= count; i += 4) add_four(g + i, v + i, n);
#endif
  for (; i < count; i++)
    for (int l = 0; l < n; l += 4)
      g[i] += (lane(v + i, l) + lane(v + i, l + 2)) + (lane(v + i, l + 1) + lane(v + i, l + 3));
}
