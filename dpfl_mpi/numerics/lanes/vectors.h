/* Vectors of one number of each image on a CPU. gpu.h says the same for a GPU. */
#define LANES (FORM / 32)
#define OWN LANES /* lanes that a thread has numbers of */
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
typedef float F __attribute__((vector_size(FORM / 8)));
typedef uint32_t U __attribute__((vector_size(FORM / 8)));
typedef F *Vectors; /* in memory */

/* Sizes of blocks whose sums fit into the registers: 32 of AVX-512, 16 of AVX2. M: yes or no for
 * each lane. */
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
#define BITS(x) ((U)(x))
#define FLOAT(u) ((F)(u))
/* A GPU's compiler needs these. */
#define UNROLL_8
#define FORGET(pointer)
#define FORGET_THREAD(n)
#define EACH_LANE(l) for (int l = 0; l < LANES; l++)
#define ON(v, l) ((v)[l]) /* lane l of a vector */
#define OWNED(l) (l)      /* place of a lane in an array [OWN] */
INLINE Vectors vectors_at(void *memory) { return memory; }
INLINE float *floats_at(Vectors v) { return (float *)v; }
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
/* A number of one lane of a vector in memory. */
INLINE float lane(const F *v, int l) { return ((const float *)v)[l]; }

/* Run `call` on blocks of 9, 8, 6, 5, 4, 2 and 1 of `total` things, none above `largest`. In it
 * `at` is the block's first and `count` its size, which the compiler knows, so that the sums of a
 * block are registers. */
#define BLOCK(size, largest, total, ...) \
  if (size <= (largest) && at + size <= (total)) { \
    enum { count = size }; \
    __VA_ARGS__; \
    at += size; \
    continue; \
  }
#define BLOCKS_FROM(first, largest, total, ...) \
  for (int32_t at = (first); at < (total);) { \
    BLOCK(9, largest, total, __VA_ARGS__) \
    BLOCK(8, largest, total, __VA_ARGS__) \
    BLOCK(6, largest, total, __VA_ARGS__) \
    BLOCK(5, largest, total, __VA_ARGS__) \
    BLOCK(4, largest, total, __VA_ARGS__) \
    BLOCK(2, largest, total, __VA_ARGS__) \
    BLOCK(1, largest, total, __VA_ARGS__) \
  }
#define BLOCKS(largest, total, ...) BLOCKS_FROM(0, largest, total, __VA_ARGS__)

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
static void add_up_of(float *g, const F *v, int64_t count, int n) {
  int64_t i = 0;
#if FORM >= 256
  for (; i + 4 <= count; i += 4) add_four(g + i, v + i, n);
#endif
  for (; i < count; i++)
    for (int l = 0; l < n; l += 4)
      g[i] += (lane(v + i, l) + lane(v + i, l + 2)) + (lane(v + i, l + 1) + lane(v + i, l + 3));
}
