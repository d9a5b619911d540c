/* Gradients, SGD and scores of small networks on one core: the mini-batch is the vector.
 *
 * A network is stages of 5x5 convolution, 2x2 max-pool and ReLU, then dense layers with ReLU between them: two stages
 * and three layers (models/cnn.py), or two layers (models/mlp.py). Its parameters are one row, in the order of torch.
 *
 * Layout. Images are taken LANES at a time, a "pass". Every activation is a vector with one image in each lane:
 * [channel][y][x][lane]. A convolution is then a broadcast weight times a vector, and no window is ever copied. A last
 * pass of fewer images repeats its first image in the empty lanes, with weight 0. A mini-batch of more images than
 * lanes is several passes, which add to one gradient.
 *
 * Forms. This file is compiled once for each width of vectors, FORM = 512 (AVX-512), 256 (AVX2), 128 (any processor),
 * and once without FORM for the function that says which of them a processor can run. All forms give the same bits:
 *   - products are added by fused multiply-add, written out; the compiler must neither contract (-ffp-contract=off) nor
 *     reorder (-fno-fast-math);
 *   - sums over images go in the order of the images: one by one, or in fours (0 + 2) + (1 + 3), four after four;
 *   - every other sum has one order too, which the size of a block, and so the number of registers, does not change;
 *   - exp and log are fixed polynomials.
 * Not-a-number is passed on everywhere, so a client that diverges is found.
 *
 * Letters: H W C image, P Q pooled height and width, I inputs of a layer, O its outputs, D the row's width.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "images are read four bytes at a time, the first one lowest"
#endif

/* What a caller describes. --------------------------------------------------------------------------------------- */
enum { MOST = 4 }; /* stages, and layers */

typedef struct {
  int32_t height, width, channels; /* of an image */
  int32_t stages, filters[MOST];
  int32_t layers, units[MOST]; /* the last layer has one unit for each class */
  const float *scale, *shift;  /* [C] a byte b enters the network as b * scale + shift */
} Net;

typedef struct {
  const uint8_t *pixels; /* [M, rows, columns, C], of which a window of H x W is read */
  const int64_t *labels; /* [M] */
  const int32_t *order;  /* which images, one after the other */
  const uint8_t *crop;   /* [3, stride] of each its window's first row and column, and whether it is mirrored; */
  int64_t stride;        /* NULL: no window is mirrored, and all start at row and column `corner` */
  int32_t rows, columns, corner;
} Images;

typedef struct {
  float lr, momentum, decay, clip; /* clip = 0: no clipping */
  float mu;                        /* mu * (w - towards) is added to the gradient */
  const float *towards;            /* [D]; NULL: nothing is added */
  const uint8_t *trained;          /* [D] 0 for a frozen column; NULL: all columns are trained */
} Sgd;

#define PUBLIC __attribute__((visibility("default")))

#ifndef FORM
#if defined(__x86_64__)
#include <cpuid.h>
#endif
/* Return of which source this is the library. */
PUBLIC const char *source(void) { return SOURCE; }

/* Return the widest form that the processor and the operating system can run. */
PUBLIC int32_t widest(void) {
#if defined(__x86_64__)
  const uint32_t fma = 1u << 12, saves = 1u << 27, avx2 = 1u << 5;
  const uint32_t avx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31; /* F, DQ, BW, VL */
  uint32_t a, b, c, d, saved, high;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & fma) || !(c & saves)) return 128;
  __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0)); /* the registers that the system saves */
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & avx2) || (saved & 0x06) != 0x06) return 128;
  return (b & avx512) == avx512 && (saved & 0xe6) == 0xe6 ? 512 : 256;
#else
  return 128;
#endif
}
#else

/* Vectors. ------------------------------------------------------------------------------------------------------- */
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

#if FORM == 512
#include <immintrin.h>
typedef __mmask16 M;                                     /* yes or no for each lane: a bit */
enum { FILTERS = 6, UNITS = 8, CHANNELS = 4, TAPS = 5 }; /* blocks whose sums fit into 32 registers */
#define FILL(x) ((F)_mm512_set1_ps(x))
#define FMA(a, b, c) ((F)_mm512_fmadd_ps(a, b, c))       /* a * b + c */
#define PICK(m, a, b) ((F)_mm512_mask_blend_ps(m, b, a)) /* a where m, else b */
#define ABOVE(a, b) _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ)
#define NO_NUMBER(a) _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q)
#elif FORM == 256
#include <immintrin.h>
typedef U M; /* all bits of a lane */
enum { FILTERS = 2, UNITS = 4, CHANNELS = 2, TAPS = 2 }; /* 16 registers */
#define FILL(x) ((F)_mm256_set1_ps(x))
#define FMA(a, b, c) ((F)_mm256_fmadd_ps(a, b, c))
#define PICK(m, a, b) ((F)_mm256_blendv_ps(b, a, (F)(m)))
#define ABOVE(a, b) ((M)_mm256_cmp_ps(a, b, _CMP_GT_OQ))
#define NO_NUMBER(a) ((M)_mm256_cmp_ps(a, a, _CMP_UNORD_Q))
#else
typedef U M;
enum { FILTERS = 6, UNITS = 8, CHANNELS = 4, TAPS = 5 };
#define FILL(x) ((F){(x), (x), (x), (x)})
#ifdef __aarch64__
#include <arm_neon.h>
#define FMA(a, b, c) ((F)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#else
INLINE F FMA(F a, F b, F c) {
  return (F){fmaf(a[0], b[0], c[0]), fmaf(a[1], b[1], c[1]), fmaf(a[2], b[2], c[2]), fmaf(a[3], b[3], c[3])};
}
#endif
#define PICK(m, a, b) ((F)(((m) & (U)(a)) | (~(m) & (U)(b))))
#define ABOVE(a, b) ((M)((a) > (b)))
#define NO_NUMBER(a) ((M)((a) != (a)))
#endif
#define ZERO ((F){0})
#define EITHER(m, a, b) ((M)(((m) & (a)) | (~(m) & (b)))) /* of masks: a where m, else b */

INLINE F load(const float *p) { F v; memcpy(&v, p, sizeof v); return v; } /* a layer starts anywhere in its row */
INLINE void store(float *p, F v) { memcpy(p, &v, sizeof v); }
/* A small whole number as a float: in the low bits of 2^23 it is that much more. */
INLINE F number(U whole) { return (F)(whole | 0x4b000000u) - 8388608.f; }
INLINE F numbers(const uint8_t *p) {
  U v;
  for (int l = 0; l < LANES; l++) v[l] = p[l];
  return number(v);
}
INLINE float lane(const F *v, int l) { return ((const float *)v)[l]; }
INLINE F relu(F a) { return PICK(ABOVE(ZERO, a), ZERO, a); } /* not-a-number stays */

/* Return the greater and where it is b: a at a tie, not-a-number where there is one, as torch's max-pool. */
INLINE F greater(F a, F b, M *second) {
  *second = ABOVE(b, a) | NO_NUMBER(b);
  return PICK(*second, b, a);
}

/* Return e^x of x <= 0, to 1e-7. Adding 1.5 * 2^23 rounds and leaves the whole number in the low bits (Cephes). */
static F exponential(F x) {
  static const float c[5] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
  const F shifted = FMA(x, FILL(1.44269504f), FILL(12582912.f)), n = shifted - 12582912.f;
  const F r = FMA(n, FILL(2.12194440e-4f), FMA(n, FILL(-0.693359375f), x)); /* x - n log 2 */
  F p = FILL(1.9875691500e-4f);
  for (int i = 0; i < 5; i++) p = FMA(p, r, FILL(c[i]));
  const F y = FMA(p, r * r, r) + 1.f;
  return PICK(ABOVE(FILL(-87.f), x), ZERO, (F)((U)y + ((U)shifted << 23))); /* y 2^n */
}

/* Return log x of x >= 1, to 1e-7: e log 2 + log(1 + m), 1 + m from sqrt(1/2) to sqrt(2) (Cephes). */
static F logarithm(F x) {
  static const float c[8] = {-1.1514610310e-1f, 1.1676998740e-1f,  -1.2420140846e-1f, 1.4249322787e-1f,
                             -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f};
  const U bits = (U)x - 0x3f3504f3u;
  const F e = (F)((bits >> 23) + 0x4b400000u) - 12582912.f, m = (F)((bits & 0x7fffffu) + 0x3f3504f3u) - 1.f;
  F p = FILL(7.0376836292e-2f);
  for (int i = 0; i < 8; i++) p = FMA(p, m, FILL(c[i]));
  const F y = FMA(FILL(-0.5f), m * m, FMA(e, FILL(-2.12194440e-4f), p * (m * m * m))) + m;
  return FMA(e, FILL(0.693359375f), y) + (x - x); /* x - x passes on not-a-number and infinity */
}

/* Run `call` on blocks of 8, 6, 5, 4, 2 and 1 of `total` things, none above `largest`. In it `at` is the block's first
 * and `count` its size, which the compiler knows, so that the sums of a block are registers. */
#define BLOCK(size, largest, total, call) \
  if (size <= largest && at + size <= (total)) { enum { count = size }; call; at += size; continue; }
#define BLOCKS(largest, total, call) \
  for (int32_t at = 0; at < (total);) { \
    BLOCK(8, largest, total, call) BLOCK(6, largest, total, call) BLOCK(5, largest, total, call) \
    BLOCK(4, largest, total, call) BLOCK(2, largest, total, call) BLOCK(1, largest, total, call) \
  }

/* Memory of a pass. ---------------------------------------------------------------------------------------------- */
typedef struct {
  int32_t H, W, C, filters, P, Q;
  int64_t weights; /* where its parameters start in the row: weights [filters, C, 5, 5], then biases */
  F *x, *d;        /* [C, H, W] inputs and their gradient */
  F *places;       /* [4, filters] the gradient of one pooled position, where its four places are */
  M *right, *lower; /* [filters, P, Q] where in its 2 x 2 the greatest was */
} Stage;

typedef struct {
  int32_t inputs, outputs;
  int64_t weights; /* [O, I], then biases */
  F *x, *d;        /* [I] inputs and their gradient */
} Layer;

typedef struct {
  int stages, layers;
  Stage stage[MOST];
  Layer layer[MOST];
  F *logits, *slope; /* [classes] and their gradient */
  float *turned;     /* [LANES, I] inputs of a layer, image by image */
  uint8_t *bytes;    /* [LANES, W C] one line of each image, cropped and mirrored */
  uint32_t *words;   /* [W C / 4, LANES] four bytes of each image at a time */
  int64_t labels[LANES];
  float *g;          /* [D] */
  int64_t width;     /* D */
  int64_t size;      /* bytes of all of it */
} Work;

static void *take(Work *k, char *memory, int64_t bytes) {
  void *p = memory ? memory + k->size : NULL;
  k->size += (bytes + 63) / 64 * 64;
  return p;
}

/* Lay out the work space; where memory is NULL only count its bytes. */
static Work lay_out(const Net *net, char *memory) {
  Work k = {.stages = net->stages, .layers = net->layers};
  int32_t h = net->height, w = net->width, c = net->channels, widest = 0;
#define TAKE(type, count) take(&k, memory, sizeof(type) * (count))
  k.bytes = TAKE(uint8_t, LANES * (w * c + 4));
  k.words = TAKE(uint32_t, LANES * (w * c + 4) / 4);
  for (int i = 0; i < k.stages; i++) {
    Stage s = {h, w, c, net->filters[i], (h - 4) / 2, (w - 4) / 2, k.width, TAKE(F, c * h * w), NULL, NULL, NULL, NULL};
    s.d = TAKE(F, i ? c * h * w : 0); /* nothing is asked of the images' gradient */
    h = s.P, w = s.Q, c = s.filters;
    s.places = TAKE(F, 4 * c);
    s.right = TAKE(M, c * h * w);
    s.lower = TAKE(M, c * h * w);
    k.width += s.filters * (25 * s.C + 1);
    k.stage[i] = s;
  }
  int32_t inputs = c * h * w;
  for (int i = 0; i < k.layers; i++) {
    k.layer[i] = (Layer){inputs, net->units[i], k.width, TAKE(F, inputs), TAKE(F, inputs)};
    k.width += net->units[i] * (inputs + (int64_t)1);
    widest = inputs > widest ? inputs : widest;
    inputs = net->units[i];
  }
  k.width = (k.width + 15) / 16 * 16;
  k.logits = TAKE(F, inputs);
  k.slope = TAKE(F, inputs);
  k.turned = TAKE(F, widest + LANES);
  k.g = TAKE(float, k.width);
  return k;
}

/* Images into lanes. --------------------------------------------------------------------------------------------- */
INLINE void mirror(uint8_t *to, const uint8_t *from, int32_t pixels, const int32_t channels) {
  for (int32_t i = 0; i < pixels; i++)
    for (int32_t c = 0; c < channels; c++) to[i * channels + c] = from[(pixels - 1 - i) * channels + c];
}

/* Load n images and labels from number `first` on, by lines: cropped and mirrored, then turned four bytes at a time. */
static void load_images(const Net *net, Work *k, const Images *images, int64_t first, int n) {
  const int32_t h = net->height, w = net->width, c = net->channels, line = w * c, words = (line + 3) / 4;
  const int32_t columns = images->columns;
  const uint8_t *from[LANES], *crop = images->crop;
  int mirrored[LANES];
  F *x = k->stages ? k->stage[0].x : k->layer[0].x;
  for (int l = 0; l < LANES; l++) {
    const int64_t at = first + (l < n ? l : 0), image = images->order[at];
    k->labels[l] = images->labels[image];
    const int64_t top = crop ? crop[at] : images->corner, left = crop ? crop[images->stride + at] : images->corner;
    from[l] = images->pixels + ((image * images->rows + top) * columns + left) * c;
    mirrored[l] = crop && crop[2 * images->stride + at];
  }
  for (int32_t row = 0; row < h; row++) {
    for (int l = 0; l < LANES; l++, from[l - 1] += columns * c)
      if (!mirrored[l]) memcpy(k->bytes + l * words * 4, from[l], line);
      else if (c == 3) mirror(k->bytes + l * words * 4, from[l], w, 3);
      else mirror(k->bytes + l * words * 4, from[l], w, c);
    for (int32_t i = 0; i < words; i++)
      for (int l = 0; l < LANES; l++) memcpy(k->words + i * LANES + l, k->bytes + (l * words + i) * 4, 4);
    for (int32_t channel = 0; channel < c; channel++) {
      const F scale = FILL(net->scale[channel]), shift = FILL(net->shift[channel]);
      for (int32_t i = channel, pixel = 0; pixel < w; pixel++, i += c) {
        const U byte = (((const U *)k->words)[i / 4] >> (8 * (i % 4))) & 255u;
        x[(channel * h + row) * w + pixel] = FMA(number(byte), scale, shift);
      }
    }
  }
}

/* Forward. ------------------------------------------------------------------------------------------------------- */
/* y [count, P, Q] = `count` filters, pool and ReLU: four sums of a filter for each pooled position. */
INLINE void convolve(const int count, const Stage *s, const float *w, const float *b, F *y, M *right, M *lower) {
  for (int32_t p = 0; p < s->P; p++)
    for (int32_t q = 0; q < s->Q; q++) {
      F sum[8][4];
      UNROLL for (int i = 0; i < count; i++) sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = FILL(b[i]);
      for (int32_t c = 0; c < s->C; c++)
        for (int32_t ky = 0; ky < 5; ky++) {
          const F *upper = s->x + (c * s->H + 2 * p + ky) * s->W + 2 * q, *under = upper + s->W;
          const float *tap = w + c * 25 + ky * 5;
          F u = upper[0], v = under[0];
          UNROLL for (int kx = 0; kx < 5; kx++) {
            const F next_u = upper[kx + 1], next_v = under[kx + 1];
            UNROLL for (int i = 0; i < count; i++) {
              const F f = FILL(tap[i * s->C * 25 + kx]);
              sum[i][0] = FMA(f, u, sum[i][0]);
              sum[i][1] = FMA(f, next_u, sum[i][1]);
              sum[i][2] = FMA(f, v, sum[i][2]);
              sum[i][3] = FMA(f, next_v, sum[i][3]);
            }
            u = next_u, v = next_v;
          }
        }
      UNROLL for (int i = 0; i < count; i++) {
        M above, below, low;
        const F top = greater(sum[i][0], sum[i][1], &above), bottom = greater(sum[i][2], sum[i][3], &below);
        const int32_t at = (i * s->P + p) * s->Q + q;
        y[at] = relu(greater(top, bottom, &low));
        right[at] = EITHER(low, below, above);
        lower[at] = low;
      }
    }
}

/* y [count] = W x + b, the inputs in two sums. */
INLINE void apply(const int count, const Layer *layer, const float *w, const float *b, F *y, int last) {
  const int32_t inputs = layer->inputs;
  const F *x = layer->x;
  F even[8], odd[8];
  UNROLL for (int i = 0; i < count; i++) even[i] = FILL(b[i]), odd[i] = ZERO;
  for (int32_t j = 0; j + 1 < inputs; j += 2)
    UNROLL for (int i = 0; i < count; i++) {
      even[i] = FMA(FILL(w[i * inputs + j]), x[j], even[i]);
      odd[i] = FMA(FILL(w[i * inputs + j + 1]), x[j + 1], odd[i]);
    }
  UNROLL for (int i = 0; i < count; i++) {
    if (inputs % 2) even[i] = FMA(FILL(w[i * inputs + inputs - 1]), x[inputs - 1], even[i]);
    even[i] += odd[i];
    y[i] = last ? even[i] : relu(even[i]);
  }
}

static void forward(Work *k, const float *row) {
  for (int i = 0; i < k->stages; i++) {
    const Stage *s = &k->stage[i];
    const int32_t each = 25 * s->C, area = s->P * s->Q;
    const float *w = row + s->weights, *b = w + s->filters * each;
    F *y = i + 1 < k->stages ? k->stage[i + 1].x : k->layer[0].x;
    BLOCKS(FILTERS, s->filters,
           convolve(count, s, w + at * each, b + at, y + at * area, s->right + at * area, s->lower + at * area))
  }
  for (int i = 0; i < k->layers; i++) {
    const Layer *layer = &k->layer[i];
    const int last = i + 1 == k->layers;
    const float *w = row + layer->weights, *b = w + layer->inputs * layer->outputs;
    F *y = last ? k->logits : k->layer[i + 1].x;
    BLOCKS(UNITS, layer->outputs, apply(count, layer, w + at * layer->inputs, b + at, y + at, last))
  }
}

/* Write each image's cross-entropy; with `share` also its gradient by the logits, times share and 0 in empty lanes. */
static void cross_entropy(Work *k, int n, float share, float *loss) {
  const int32_t classes = k->layer[k->layers - 1].outputs;
  F greatest = k->logits[0], total = ZERO, weight = ZERO;
  for (int32_t c = 1; c < classes; c++) greatest = PICK(ABOVE(k->logits[c], greatest), k->logits[c], greatest);
  for (int32_t c = 0; c < classes; c++) total += k->slope[c] = exponential(k->logits[c] - greatest);
  const F log_total = logarithm(total);
  for (int l = 0; l < n; l++) loss[l] = log_total[l] + (greatest[l] - lane(k->logits + k->labels[l], l));
  if (share == 0) return;
  for (int l = 0; l < n; l++) weight[l] = share;
  for (int32_t c = 0; c < classes; c++) k->slope[c] /= total;
  for (int l = 0; l < n; l++) k->slope[k->labels[l]][l] -= 1.f;
  for (int32_t c = 0; c < classes; c++) k->slope[c] *= weight;
}

/* Way back: add the gradient of a pass of n images to g. --------------------------------------------------------- */
/* g[i] += the sum of v[i] over the images, four after four. */
static void add_up(float *g, const F *v, int count, int n) {
  for (int i = 0; i < count; i++)
    for (int l = 0; l < n; l += 4)
      g[i] += (lane(v + i, l) + lane(v + i, l + 2)) + (lane(v + i, l + 1) + lane(v + i, l + 3));
}

/* g [count, I] += slope x', image by image, for `some` columns of I; turned is x', [LANES, I]. */
INLINE void outer(const int count, const int some, int32_t inputs, const F *slope, const float *turned, float *g,
                  int n) {
  F sum[8] = {0};
  UNROLL for (int i = 0; i < count; i++) memcpy(&sum[i], g + i * inputs, sizeof(float) * some);
  for (int l = 0; l < n; l++) {
    const F x = load(turned + l * inputs);
    UNROLL for (int i = 0; i < count; i++) sum[i] = FMA(FILL(lane(slope + i, l)), x, sum[i]);
  }
  UNROLL for (int i = 0; i < count; i++) memcpy(g + i * inputs, &sum[i], sizeof(float) * some);
}

/* The same for all columns: whole vectors, and the columns that are left. */
INLINE void outer_rows(const int count, int32_t inputs, const F *slope, const float *turned, float *g, int n) {
  int32_t j = 0;
  for (; j + LANES <= inputs; j += LANES) outer(count, LANES, inputs, slope, turned + j, g + j, n);
  if (j < inputs) outer(count, inputs - j, inputs, slope, turned + j, g + j, n);
}

/* d [count] = W' slope where x > 0. */
INLINE void apply_back(const int count, const Layer *layer, const float *w, const F *slope, const F *x, F *d) {
  F sum[8];
  UNROLL for (int j = 0; j < count; j++) sum[j] = ZERO;
  for (int32_t o = 0; o < layer->outputs; o++)
    UNROLL for (int j = 0; j < count; j++) sum[j] = FMA(FILL(w[o * layer->inputs + j]), slope[o], sum[j]);
  UNROLL for (int j = 0; j < count; j++) d[j] = PICK(ABOVE(x[j], ZERO), sum[j], ZERO);
}

static void layer_gradient(Work *k, const Layer *layer, const float *row, const F *slope, float *g, int n,
                           int further) {
  const int32_t inputs = layer->inputs;
  const float *w = row + layer->weights;
  for (int32_t j = 0; j < inputs; j++)
    for (int l = 0; l < LANES; l++) k->turned[l * inputs + j] = lane(layer->x + j, l);
  BLOCKS(8, layer->outputs, outer_rows(count, inputs, slope + at, k->turned, g + layer->weights + at * inputs, n))
  add_up(g + layer->weights + inputs * layer->outputs, slope, layer->outputs, n);
  if (further) BLOCKS(8, inputs, apply_back(count, layer, w + at, slope, layer->x + at, layer->d + at))
}

/* sum [count, 5] = the gradient of `count` lines of a filter's taps, for one channel x. In each pooled position one of
 * four places has a gradient: x is moved to the right where it is there, and the gradient up or down is 0. */
INLINE void correlate(const int count, const Stage *s, const F *x, const F *d, const M *right, const M *lower, F *out) {
  F sum[25];
  UNROLL for (int i = 0; i < 5 * count; i++) sum[i] = ZERO;
  for (int32_t p = 0; p < s->P; p++)
    for (int32_t q = 0; q < s->Q; q++) {
      const int32_t at = p * s->Q + q;
      const M r = right[at];
      const F up = PICK(lower[at], ZERO, d[at]), down = PICK(lower[at], d[at], ZERO);
      UNROLL for (int line = 0; line <= count; line++) {
        const F *from = x + (2 * p + line) * s->W + 2 * q;
        F here = from[0];
        UNROLL for (int kx = 0; kx < 5; kx++) {
          const F next = from[kx + 1], v = PICK(r, next, here);
          if (line < count) sum[line * 5 + kx] = FMA(up, v, sum[line * 5 + kx]);
          if (line > 0) sum[line * 5 - 5 + kx] = FMA(down, v, sum[line * 5 - 5 + kx]);
          here = next;
        }
      }
    }
  UNROLL for (int i = 0; i < 5 * count; i++) out[i] = sum[i];
}

/* d += what comes from one pooled position, for `count` channels of a stage's input: a window of 6 x 6. */
INLINE void spread(const int count, const Stage *s, const float *w, const F *places, F *d) {
  for (int line = 0; line < 6; line++) {
    F sum[CHANNELS][6];
    UNROLL for (int c = 0; c < count; c++)
      UNROLL for (int x = 0; x < 6; x++) sum[c][x] = d[(c * s->H + line) * s->W + x];
    for (int low = line > 4; low < 2 && low <= line; low++)
      for (int32_t o = 0; o < s->filters; o++) {
        const float *tap = w + (o * s->C * 5 + line - low) * 5;
        const F left = places[2 * low * s->filters + o], right = places[(2 * low + 1) * s->filters + o];
        UNROLL for (int kx = 0; kx < 5; kx++)
          UNROLL for (int c = 0; c < count; c++) {
            const F f = FILL(tap[c * 25 + kx]);
            sum[c][kx] = FMA(f, left, sum[c][kx]);
            sum[c][kx + 1] = FMA(f, right, sum[c][kx + 1]);
          }
      }
    UNROLL for (int c = 0; c < count; c++)
      UNROLL for (int x = 0; x < 6; x++) d[(c * s->H + line) * s->W + x] = sum[c][x];
  }
}

/* d [filters, P, Q] is the gradient of the stage's outputs, 0 where its ReLU was. */
static void stage_gradient(const Stage *s, const float *row, const F *d, float *g, int n, int further) {
  const int32_t area = s->P * s->Q, plane = s->H * s->W;
  for (int32_t o = 0; o < s->filters; o++) {
    const F *slope = d + o * area;
    const M *right = s->right + o * area, *lower = s->lower + o * area;
    F total = ZERO, sum[25];
    for (int32_t c = 0; c < s->C; c++) {
      BLOCKS(TAPS, 5, correlate(count, s, s->x + c * plane + at * s->W, slope, right, lower, sum + 5 * at))
      add_up(g + s->weights + (o * s->C + c) * 25, sum, 25, n);
    }
    for (int32_t i = 0; i < area; i++) total += slope[i];
    add_up(g + s->weights + s->filters * s->C * 25 + o, &total, 1, n);
  }
  if (!further) return;
  memset(s->d, 0, sizeof(F) * s->C * plane);
  for (int32_t p = 0; p < s->P; p++)
    for (int32_t q = 0; q < s->Q; q++) {
      F *places = s->places;
      for (int32_t o = 0; o < s->filters; o++) {
        const int32_t from = o * area + p * s->Q + q;
        const F left = PICK(s->right[from], ZERO, d[from]), right = PICK(s->right[from], d[from], ZERO);
        places[o] = PICK(s->lower[from], ZERO, left), places[s->filters + o] = PICK(s->lower[from], ZERO, right);
        places[2 * s->filters + o] = PICK(s->lower[from], left, ZERO);
        places[3 * s->filters + o] = PICK(s->lower[from], right, ZERO);
      }
      F *window = s->d + 2 * p * s->W + 2 * q;
      BLOCKS(CHANNELS, s->C, spread(count, s, row + s->weights + at * 25, places, window + at * plane))
    }
  for (int32_t i = 0; i < s->C * plane; i++) s->d[i] = PICK(ABOVE(s->x[i], ZERO), s->d[i], ZERO);
}

/* Write into g the gradient of the mean loss of `count` images from number `first` on, of the columns from `lowest` on,
 * and return that loss. */
static double gradient(const Net *net, Work *k, const float *row, float *g, const Images *images, int64_t first,
                       int32_t count, int64_t lowest) {
  double loss = 0;
  memset(g, 0, sizeof(float) * k->width);
  for (int32_t done = 0; done < count; done += LANES) {
    const int n = count - done < LANES ? count - done : LANES;
    float losses[LANES];
    load_images(net, k, images, first + done, n);
    forward(k, row);
    cross_entropy(k, n, 1.f / count, losses);
    for (int l = 0; l < n; l++) loss += losses[l];
    const F *slope = k->slope;
    int64_t from = k->width;
    for (int i = k->layers - 1; i >= 0 && from > lowest; i--, slope = k->layer[i + 1].d) {
      from = k->layer[i].weights;
      layer_gradient(k, &k->layer[i], row, slope, g, n, from > lowest);
    }
    for (int i = k->stages - 1; i >= 0 && from > lowest; i--, slope = k->stage[i + 1].d) {
      from = k->stage[i].weights;
      stage_gradient(&k->stage[i], row, slope, g, n, from > lowest);
    }
  }
  return loss / count;
}

/* What a caller calls. `memory` is work space of space() bytes, aligned to 64, one for each thread. --------------- */
PUBLIC int64_t NAME(space)(const Net *net) { return lay_out(net, NULL).size; }

/* Write into g [D] the gradient of the mean loss of the first n images of the order; return that loss. */
PUBLIC double NAME(gradient)(const Net *net, const float *w, float *g, const Images *images, int32_t n, void *memory) {
  Work k = lay_out(net, memory);
  return gradient(net, &k, w, g, images, 0, n, 0);
}

/* Take one step along g, to which the proximal term and the mask are applied in place; then clipping, decay and
 * momentum as in torch.optim.SGD. */
PUBLIC void NAME(step)(float *restrict w, float *restrict m, float *restrict g, int64_t width, const Sgd *sgd) {
  const F mu = FILL(sgd->mu), momentum = FILL(sgd->momentum), decay = FILL(sgd->decay), lr = FILL(sgd->lr);
  float scale = 1;
  for (int64_t i = 0; sgd->towards && i < width; i += LANES)
    store(g + i, FMA(mu, load(w + i) - load(sgd->towards + i), load(g + i)));
  for (int64_t i = 0; sgd->trained && i < width; i += LANES) store(g + i, load(g + i) * numbers(sgd->trained + i));
  if (sgd->clip > 0) { /* the norm's squares in 64 sums, whatever the form */
    F part[64 / LANES] = {0};
    double square = 0;
    for (int64_t i = 0; i < width; i += 64)
      for (int j = 0; j < 64 / LANES && i + j * LANES < width; j++) {
        const F v = load(g + i + j * LANES);
        part[j] = FMA(v, v, part[j]);
      }
    for (int j = 0; j < 64; j++) square += lane(part, j);
    scale = sgd->clip / ((float)sqrt(square) + 1e-6f);
    if (scale > 1) scale = 1; /* not where it is not a number */
  }
  for (int64_t i = 0; i < width; i += LANES) {
    const F old = load(w + i), moved = FMA(momentum, load(m + i), FMA(decay, old, scale * load(g + i)));
    const M frozen = sgd->trained ? ABOVE(FILL(1.f), numbers(sgd->trained + i)) : ABOVE(ZERO, ZERO);
    store(m + i, PICK(frozen, load(m + i), moved));
    store(w + i, PICK(frozen, old, FMA(ZERO - lr, moved, old)));
  }
}

/* Train `epochs` epochs of n images in mini-batches, the last of an epoch smaller; return the sum of their losses. */
PUBLIC double NAME(train)(const Net *net, float *w, float *m, const Images *images, int64_t n, int32_t epochs,
                          int32_t batch, const Sgd *sgd, void *memory) {
  Work k = lay_out(net, memory);
  int64_t lowest = 0; /* the first trained column: nothing below it needs a gradient */
  while (sgd->trained && lowest < k.width && !sgd->trained[lowest]) lowest++;
  double loss = 0;
  for (int64_t start = 0; start < epochs * n; start += n)
    for (int64_t at = 0; at < n; at += batch) {
      loss += gradient(net, &k, w, k.g, images, start + at, n - at < batch ? n - at : batch, lowest);
      NAME(step)(w, m, k.g, k.width, sgd);
    }
  return loss;
}

/* Score r rows, `stride` floats apart, on n images: losses [r, n] and, where they are not NULL, predicted classes
 * [r, n], logits [r, n, classes] and what the last layer reads [r, n, I]. */
PUBLIC void NAME(score)(const Net *net, const float *rows, int64_t stride, int32_t r, const Images *images, int64_t n,
                        float *losses, int64_t *predicted, float *logits, float *features, void *memory) {
  Work k = lay_out(net, memory);
  const Layer *head = &k.layer[k.layers - 1];
  for (int64_t at = 0; at < n; at += LANES) {
    const int count = n - at < LANES ? n - at : LANES;
    load_images(net, &k, images, at, count);
    for (int32_t row = 0; row < r; row++) {
      forward(&k, rows + row * stride);
      cross_entropy(&k, count, 0, losses + row * n + at);
      for (int l = 0; l < count; l++) {
        const int64_t to = row * n + at + l;
        int32_t best = 0;
        for (int32_t c = 1; c < head->outputs; c++) best = lane(k.logits + c, l) > lane(k.logits + best, l) ? c : best;
        if (predicted) predicted[to] = best;
        for (int32_t c = 0; logits && c < head->outputs; c++) logits[to * head->outputs + c] = lane(k.logits + c, l);
        for (int32_t i = 0; features && i < head->inputs; i++) features[to * head->inputs + i] = lane(head->x + i, l);
      }
    }
  }
}

/* A candidate of the greedy search: write the sums x_j = x + p w and y_j = y - p w, rounded once, and into pair
 * [2, width] the averages x_j / p_x and y_j / p_y. No element meets another: the compiler makes the vectors. */
PUBLIC void NAME(candidate)(const double *restrict x, const double *restrict y, const float *restrict w, double p,
                            double p_x, double p_y, double *restrict x_j, double *restrict y_j, float *restrict pair,
                            int64_t width) {
  for (int64_t i = 0; i < width; i++) {
    x_j[i] = fma(p, w[i], x[i]);
    y_j[i] = fma(-p, w[i], y[i]);
    pair[i] = (float)(x_j[i] / p_x);
    pair[width + i] = (float)(y_j[i] / p_y);
  }
}
#endif
