/* Gradients, SGD and scores of small networks on one core: the mini-batch is the vector.
 *
 * A network is stages of 5x5 convolution, 2x2 max-pool and ReLU, then dense layers with ReLU between them: models/cnn.py has two stages and
 * three layers, models/mlp.py two layers. Its parameters are one row of floats in torch's order.
 *
 * Layout. Images are taken LANES at a time, a "pass". Every activation is a vector with one image in each lane: [channel][y][x][lane]. A
 * convolution is then a broadcast weight times a vector, and no window is ever copied. A last pass of fewer images repeats its first image in
 * the empty lanes, with weight 0. A mini-batch of more images than lanes is several passes, which add to one gradient.
 *
 * Forms. This file is compiled once for each width of vectors, FORM = 512 (AVX-512), 256 (AVX2) and 128 (any other processor), and once
 * without FORM for the function that says which of them this processor can run. All forms give the same bits, by four rules:
 *   - products are added by fused multiply-add, written out; the compiler must not contract or reorder (-ffp-contract=off, no -ffast-math);
 *   - sums over images go in the order of the images: one by one, or in fours (0 + 2) + (1 + 3), four after four;
 *   - every other sum has one order too, which the number of registers, and so the size of a block, does not change;
 *   - exp and log are fixed polynomials.
 * Not-a-number is passed on everywhere, so a client that diverges is found.
 *
 * Letters: H W C image, P Q pooled height and width, I inputs of a layer, O its outputs, D the row's width.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

/* What a caller describes. ------------------------------------------------------------------------------------------------------------- */
enum { MOST = 4 }; /* stages, and layers */

typedef struct {
  int32_t height, width, channels; /* of an image */
  int32_t stages, filters[MOST];   /* convolutions */
  int32_t layers, units[MOST];     /* dense layers; the last has one unit for each class */
  const float *scale, *shift;      /* [C] a byte b enters the network as b * scale + shift */
} Net;

typedef struct {
  const uint8_t *pixels; /* [M, rows, columns, C], of which a window of H x W is read */
  const int64_t *labels; /* [M] */
  const int32_t *order;  /* which images, one after the other; NULL: 0, 1, ... */
  const uint8_t *crop;   /* [3, total] first row of the window, first column, whether it is mirrored; NULL: corner, corner, no */
  int64_t total;         /* length of a line of `crop` */
  int32_t rows, columns, corner;
} Images;

typedef struct {
  float lr, momentum, decay, clip; /* clip = 0: no clipping */
  float mu;                        /* mu * (w - towards) is added to the gradient */
  const float *towards;            /* [D]; NULL: nothing is added */
  const uint8_t *trained;          /* [D] 0 for a frozen column; NULL: all columns are trained */
} Sgd;

#ifndef FORM
#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#endif
/* Return the widest form that processor and operating system can run. */
__attribute__((visibility("default"))) int32_t widest(void) {
#if defined(__x86_64__) || defined(__i386__)
  enum { FMA_ = 1 << 12, OSXSAVE = 1 << 27, AVX2 = 1 << 5, AVX512 = 1 << 16 | 1 << 17 | 1 << 30 | (int32_t)(1u << 31) }; /* F DQ BW VL */
  uint32_t a, b, c, d, saved, high;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & FMA_) || !(c & OSXSAVE)) return 128;
  __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0)); /* the registers that the operating system saves */
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & AVX2) || (saved & 0x6) != 0x6) return 128;
  return (b & (uint32_t)AVX512) == (uint32_t)AVX512 && (saved & 0xe6) == 0xe6 ? 512 : 256;
#else
  return 128;
#endif
}
#else

/* Vectors. ----------------------------------------------------------------------------------------------------------------------------- */
#define LANES (FORM / 32)
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define PUBLIC(name) __attribute__((visibility("default"))) JOIN(name, FORM)
#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
typedef float F __attribute__((vector_size(FORM / 8)));
typedef uint32_t U __attribute__((vector_size(FORM / 8)));

#if FORM == 512
#include <immintrin.h>
typedef __mmask16 M; /* a yes or no for each lane: a bit */
#define FILL(x) ((F)_mm512_set1_ps(x))
#define FMA(a, b, c) ((F)_mm512_fmadd_ps(a, b, c)) /* a * b + c */
#define PICK(m, a, b) ((F)_mm512_mask_blend_ps(m, b, a)) /* a where m, else b */
#define ABOVE(a, b) _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ)
#define NO_NUMBER(a) _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q)
enum { FILTERS = 6, TAPS = 5, CHANNELS = 4, COLUMNS = 4 }; /* sizes of blocks whose sums fit into 32 registers */
#elif FORM == 256
#include <immintrin.h>
typedef U M; /* all bits of a lane */
#define FILL(x) ((F)_mm256_set1_ps(x))
#define FMA(a, b, c) ((F)_mm256_fmadd_ps(a, b, c))
#define PICK(m, a, b) ((F)_mm256_blendv_ps(b, a, (F)(m)))
#define ABOVE(a, b) ((M)_mm256_cmp_ps(a, b, _CMP_GT_OQ))
#define NO_NUMBER(a) ((M)_mm256_cmp_ps(a, a, _CMP_UNORD_Q))
enum { FILTERS = 2, TAPS = 2, CHANNELS = 2, COLUMNS = 2 }; /* 16 registers */
#else
typedef U M;
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
enum { FILTERS = 6, TAPS = 5, CHANNELS = 4, COLUMNS = 4 };
#endif
#define ZERO ((F){0})
#define EITHER(m, a, b) ((M)(((m) & (a)) | (~(m) & (b)))) /* of masks: a where m, else b */

INLINE F load(const float *p) { F v; memcpy(&v, p, sizeof v); return v; } /* a layer starts anywhere in its row */
INLINE void store(float *p, F v) { memcpy(p, &v, sizeof v); }
INLINE F relu(F a) { return PICK(ABOVE(ZERO, a), ZERO, a); } /* not-a-number stays */

/* Return the greater and where it is b: a at a tie, not-a-number where there is one, as torch's max-pool. */
INLINE F greater(F a, F b, M *second) {
  *second = ABOVE(b, a) | NO_NUMBER(b);
  return PICK(*second, b, a);
}

/* e^x of x <= 0, to 1e-7. Adding 1.5 * 2^23 rounds to a whole number and leaves it in the low bits. Coefficients: Cephes. */
static F exponential(F x) {
  static const float c[6] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
  F shifted = FMA(x, FILL(1.44269504f), FILL(12582912.f)), n = shifted - 12582912.f, p = FILL(c[0]);
  F r = FMA(n, FILL(2.12194440e-4f), FMA(n, FILL(-0.693359375f), x)); /* x - n log 2 */
  for (int i = 1; i < 6; i++) p = FMA(p, r, FILL(c[i]));
  F y = FMA(p, r * r, r) + 1.f;
  return PICK(ABOVE(FILL(-87.f), x), ZERO, (F)((U)y + ((U)shifted << 23))); /* y 2^n */
}

/* log x of x >= 1, to 1e-7, as e log 2 + log m with m from sqrt(1/2) to sqrt(2). Coefficients: Cephes. */
static F logarithm(F x) {
  static const float c[9] = {7.0376836292e-2f,  -1.1514610310e-1f, 1.1676998740e-1f,  -1.2420140846e-1f, 1.4249322787e-1f,
                             -1.6668057665e-1f, 2.0000714765e-1f,  -2.4999993993e-1f, 3.3333331174e-1f};
  U bits = (U)x - 0x3f3504f3u;
  F e = (F)((bits >> 23) + 0x4b400000u) - 12582912.f, m = (F)((bits & 0x7fffffu) + 0x3f3504f3u) - 1.f, p = FILL(c[0]);
  for (int i = 1; i < 9; i++) p = FMA(p, m, FILL(c[i]));
  F y = FMA(FILL(-0.5f), m * m, FMA(e, FILL(-2.12194440e-4f), p * (m * m * m))) + m;
  return FMA(e, FILL(0.693359375f), y) + (x - x); /* x - x: not-a-number and infinity are passed on */
}

/* Memory of one pass. ------------------------------------------------------------------------------------------------------------------ */
typedef struct {
  int32_t height, width, channels; /* of a stage's input */
  int64_t weights;                 /* where its parameters start in the row: weights [F, C, 5, 5], then biases */
  F *x, *d;                        /* [C, H, W] input and its gradient */
  M *right, *lower;                /* [F, P, Q] where in its 2 x 2 the greatest was */
} Stage;

typedef struct {
  int32_t inputs, outputs;
  int64_t weights; /* [O, I], then biases */
  F *x, *d;        /* [I] */
} Dense;

typedef struct {
  Stage stage[MOST];
  Dense layer[MOST];
  F *out, *slope;        /* [classes] logits and their gradient */
  F *places;             /* [4, F] gradient at a pooled position's four places */
  float *turned;         /* [LANES, I] inputs of a layer, image by image */
  uint32_t *words;       /* [H W C / 4, LANES] four bytes of each image */
  uint8_t *bytes;        /* [LANES, H W C] cropped and mirrored images */
  int64_t pixels, width; /* bytes of an image, rounded up to 4; width of a row */
  int64_t size;          /* bytes of all of it */
} Work;

static void *take(Work *k, char *memory, int64_t bytes) {
  void *p = memory ? memory + k->size : NULL;
  k->size += (bytes + 63) / 64 * 64;
  return p;
}

/* Lay out the work space; with memory = NULL only count its bytes. */
static Work lay_out(const Net *net, char *memory) {
  Work k = {0};
  int32_t h = net->height, w = net->width, c = net->channels, most = 0, filters = 0;
  k.pixels = ((int64_t)h * w * c + 3) / 4 * 4;
  k.bytes = take(&k, memory, LANES * k.pixels);
  k.words = take(&k, memory, LANES * k.pixels);
  for (int i = 0; i < net->stages; i++) {
    Stage *s = &k.stage[i];
    int32_t f = net->filters[i], p = (h - 4) / 2, q = (w - 4) / 2;
    *s = (Stage){h, w, c, k.width, take(&k, memory, sizeof(F) * c * h * w), take(&k, memory, sizeof(F) * c * h * w), NULL, NULL};
    s->right = take(&k, memory, sizeof(M) * f * p * q);
    s->lower = take(&k, memory, sizeof(M) * f * p * q);
    k.width += f * (25 * c + 1);
    h = p, w = q, c = f;
    filters = f > filters ? f : filters;
  }
  int32_t inputs = c * h * w;
  for (int i = 0; i < net->layers; i++) {
    k.layer[i] = (Dense){inputs, net->units[i], k.width, take(&k, memory, sizeof(F) * inputs), take(&k, memory, sizeof(F) * inputs)};
    k.width += (int64_t)net->units[i] * (inputs + 1);
    most = inputs > most ? inputs : most;
    inputs = net->units[i];
  }
  k.width = (k.width + 15) / 16 * 16;
  k.out = take(&k, memory, sizeof(F) * inputs);
  k.slope = take(&k, memory, sizeof(F) * inputs);
  k.places = take(&k, memory, sizeof(F) * 4 * filters);
  k.turned = take(&k, memory, sizeof(F) * (most + LANES));
  return k;
}

/* Images into lanes: n of them from `first` on, cropped, mirrored, normalised. --------------------------------------------------------- */
static void load_images(const Net *net, Work *k, const Images *from, int64_t first, int n) {
  const int32_t h = net->height, w = net->width, c = net->channels;
  F *x = net->stages ? k->stage[0].x : k->layer[0].x;
  for (int l = 0; l < LANES; l++) {
    int64_t at = first + (l < n ? l : 0), image = from->order ? from->order[at] : at;
    int32_t y = from->crop ? from->crop[at] : from->corner, left = from->crop ? from->crop[from->total + at] : from->corner;
    int mirrored = from->crop && from->crop[2 * from->total + at];
    uint8_t *to = k->bytes + l * k->pixels;
    for (int32_t row = 0; row < h; row++, to += w * c) {
      const uint8_t *line = from->pixels + ((image * from->rows + y + row) * from->columns + left) * c;
      if (!mirrored) memcpy(to, line, w * c);
      else if (c == 3) for (int32_t i = 0; i < w; i++) memcpy(to + 3 * i, line + 3 * (w - 1 - i), 3);
      else for (int32_t i = 0; i < w; i++) memcpy(to + c * i, line + c * (w - 1 - i), c);
    }
  }
  for (int l = 0; l < LANES; l++)
    for (int64_t i = 0; i < k->pixels / 4; i++) memcpy(k->words + i * LANES + l, k->bytes + l * k->pixels + 4 * i, 4);
  int32_t channel = 0, pixel = 0;
  for (int64_t i = 0; i < (int64_t)h * w * c; i++) {
    U byte; /* a byte in the low bits of 2^23 is that number more */
    memcpy(&byte, k->words + i / 4 * LANES, sizeof byte);
    F value = (F)(((byte >> (8 * (i % 4))) & 255u) | 0x4b000000u) - 8388608.f;
    x[channel * h * w + pixel] = FMA(value, FILL(net->scale[channel]), FILL(net->shift[channel]));
    if (++channel == c) channel = 0, pixel++;
  }
}

/* Forward. ----------------------------------------------------------------------------------------------------------------------------- */
/* Apply `count` filters with pool and ReLU: four sums a filter for each pooled position. y [count, P, Q]. */
INLINE void convolve(const int count, const Stage *s, const float *w, const float *b, F *restrict y, M *right, M *lower) {
  const int32_t H = s->height, W = s->width, C = s->channels, P = (H - 4) / 2, Q = (W - 4) / 2;
  for (int32_t p = 0; p < P; p++)
    for (int32_t q = 0; q < Q; q++) {
      F sum[FILTERS][4];
      UNROLL for (int i = 0; i < count; i++) sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = FILL(b[i]);
      for (int32_t c = 0; c < C; c++)
        for (int32_t ky = 0; ky < 5; ky++) {
          const F *upper = s->x + (c * H + 2 * p + ky) * W + 2 * q, *under = upper + W;
          const float *tap = w + c * 25 + ky * 5;
          F a0 = upper[0], b0 = under[0];
          UNROLL for (int kx = 0; kx < 5; kx++) {
            F a1 = upper[kx + 1], b1 = under[kx + 1];
            UNROLL for (int i = 0; i < count; i++) {
              F f = FILL(tap[i * C * 25 + kx]);
              sum[i][0] = FMA(f, a0, sum[i][0]);
              sum[i][1] = FMA(f, a1, sum[i][1]);
              sum[i][2] = FMA(f, b0, sum[i][2]);
              sum[i][3] = FMA(f, b1, sum[i][3]);
            }
            a0 = a1, b0 = b1;
          }
        }
      for (int i = 0; i < count; i++) {
        M r0, r1, l;
        F upper = greater(sum[i][0], sum[i][1], &r0), under = greater(sum[i][2], sum[i][3], &r1);
        const int32_t at = (i * P + p) * Q + q;
        y[at] = relu(greater(upper, under, &l));
        right[at] = EITHER(l, r1, r0);
        lower[at] = l;
      }
    }
}

static void convolve_all(const Stage *s, int32_t filters, const float *row, F *y) {
  const int64_t each = 25 * s->channels, area = (int64_t)((s->height - 4) / 2) * ((s->width - 4) / 2);
  const float *w = row + s->weights, *b = w + filters * each;
  int32_t o = 0;
#define FROM_O s, w + o * each, b + o, y + o * area, s->right + o * area, s->lower + o * area
  for (; FILTERS >= 6 && o + 6 <= filters; o += 6) convolve(FILTERS, FROM_O);
  for (; FILTERS >= 4 && o + 4 <= filters; o += 4) convolve(FILTERS < 4 ? FILTERS : 4, FROM_O);
  for (; o + 2 <= filters; o += 2) convolve(2, FROM_O);
  for (; o < filters; o++) convolve(1, FROM_O);
}

/* y = W x + b of `count` units. */
INLINE void apply(const int count, int32_t inputs, const float *w, const float *b, const F *x, F *y, int rectify) {
  F sum[8];
  UNROLL for (int i = 0; i < count; i++) sum[i] = FILL(b[i]);
  for (int32_t j = 0; j < inputs; j++)
    UNROLL for (int i = 0; i < count; i++) sum[i] = FMA(FILL(w[i * inputs + j]), x[j], sum[i]);
  for (int i = 0; i < count; i++) y[i] = rectify ? relu(sum[i]) : sum[i];
}

static void apply_all(const Dense *d, const float *row, F *y, int rectify) {
  const float *w = row + d->weights, *b = w + (int64_t)d->inputs * d->outputs;
  int32_t o = 0;
#undef FROM_O
#define FROM_O d->inputs, w + (int64_t)o * d->inputs, b + o, d->x, y + o, rectify
  for (; o + 8 <= d->outputs; o += 8) apply(8, FROM_O);
  for (; o + 4 <= d->outputs; o += 4) apply(4, FROM_O);
  for (; o < d->outputs; o++) apply(1, FROM_O);
}

static void forward(const Net *net, Work *k, const float *row) {
  for (int i = 0; i < net->stages; i++)
    convolve_all(&k->stage[i], net->filters[i], row, i + 1 < net->stages ? k->stage[i + 1].x : k->layer[0].x);
  for (int i = 0; i < net->layers; i++) {
    const int last = i + 1 == net->layers;
    apply_all(&k->layer[i], row, last ? k->out : k->layer[i + 1].x, !last);
  }
}

/* Write each image's cross-entropy into `loss` [LANES]; with `slope` its derivative by the logits times `share`, 0 in empty lanes. */
static void cross_entropy(const F *out, int32_t classes, const int64_t *labels, int n, float share, float *loss, F *slope) {
  F most = out[0], total = ZERO, weight = ZERO;
  for (int32_t c = 1; c < classes; c++) most = PICK(ABOVE(out[c], most), out[c], most);
  for (int32_t c = 0; c < classes; c++) {
    F e = exponential(out[c] - most);
    total += e;
    if (slope) slope[c] = e;
  }
  F log_total = logarithm(total) + most;
  for (int l = 0; l < n; l++) loss[l] = log_total[l] - out[labels[l]][l], weight[l] = share;
  for (int32_t c = 0; slope && c < classes; c++) slope[c] /= total;
  for (int l = 0; slope && l < n; l++) slope[labels[l]][l] -= 1.f;
  for (int32_t c = 0; slope && c < classes; c++) slope[c] *= weight;
}

/* Way back: g [D] += the gradient of a pass. ------------------------------------------------------------------------------------------- */
/* g[i] += the sum over the images of v[i], in fours. */
static void add_up(float *g, const F *v, int count, int n) {
  for (int i = 0; i < count; i++) {
    float sum = g[i];
    for (int l = 0; l < n; l += 4) sum += (v[i][l] + v[i][l + 2]) + (v[i][l + 1] + v[i][l + 3]);
    g[i] = sum;
  }
}

/* g [rows, I] += slope x', image by image, for `columns` vectors of a layer's inputs. */
INLINE void outer(const int rows, const int columns, int32_t inputs, const F *slope, const float *turned, float *g, int n) {
  F sum[4][COLUMNS];
  UNROLL for (int i = 0; i < rows; i++) UNROLL for (int v = 0; v < columns; v++) sum[i][v] = load(g + i * inputs + v * LANES);
  for (int l = 0; l < n; l++) {
    F x[COLUMNS];
    UNROLL for (int v = 0; v < columns; v++) x[v] = load(turned + l * inputs + v * LANES);
    UNROLL for (int i = 0; i < rows; i++) {
      F d = FILL(((const float *)(slope + i))[l]);
      UNROLL for (int v = 0; v < columns; v++) sum[i][v] = FMA(d, x[v], sum[i][v]);
    }
  }
  UNROLL for (int i = 0; i < rows; i++) UNROLL for (int v = 0; v < columns; v++) store(g + i * inputs + v * LANES, sum[i][v]);
}

INLINE void outer_rows(const int rows, int32_t inputs, const F *slope, const float *turned, float *g, int n) {
  int32_t j = 0;
  for (; j + COLUMNS * LANES <= inputs; j += COLUMNS * LANES) outer(rows, COLUMNS, inputs, slope, turned + j, g + j, n);
  for (; j + LANES <= inputs; j += LANES) outer(rows, 1, inputs, slope, turned + j, g + j, n);
  for (; j < inputs; j++)
    for (int i = 0; i < rows; i++)
      for (int l = 0; l < n; l++) g[i * inputs + j] = fmaf(((const float *)(slope + i))[l], turned[l * inputs + j], g[i * inputs + j]);
}

/* d = W' slope, where x > 0, of `count` inputs. */
INLINE void apply_back(const int count, const Dense *layer, const float *w, const F *slope, const F *x, F *d) {
  F sum[8];
  UNROLL for (int j = 0; j < count; j++) sum[j] = ZERO;
  for (int32_t o = 0; o < layer->outputs; o++)
    UNROLL for (int j = 0; j < count; j++) sum[j] = FMA(FILL(w[(int64_t)o * layer->inputs + j]), slope[o], sum[j]);
  for (int j = 0; j < count; j++) d[j] = PICK(ABOVE(x[j], ZERO), sum[j], ZERO);
}

static void dense_gradient(Work *k, const Dense *d, const float *row, const F *slope, float *g, int n, int further) {
  float *to = g + d->weights;
  for (int32_t j = 0; j < d->inputs; j++)
    for (int l = 0; l < LANES; l++) k->turned[l * d->inputs + j] = ((const float *)(d->x + j))[l];
  int32_t o = 0, j = 0;
  for (; o + 4 <= d->outputs; o += 4) outer_rows(4, d->inputs, slope + o, k->turned, to + (int64_t)o * d->inputs, n);
  for (; o < d->outputs; o++) outer_rows(1, d->inputs, slope + o, k->turned, to + (int64_t)o * d->inputs, n);
  add_up(to + (int64_t)d->inputs * d->outputs, slope, d->outputs, n);
  if (!further) return;
  for (; j + 8 <= d->inputs; j += 8) apply_back(8, d, row + d->weights + j, slope, d->x + j, d->d + j);
  for (; j < d->inputs; j++) apply_back(1, d, row + d->weights + j, slope, d->x + j, d->d + j);
}

/* sum [rows * 5] = the gradient of `rows` lines of a filter's taps, for one channel. Of four places in a pool one has a gradient: the lines
 * of x are moved left or right to where it is (one of two vectors), and up or down is a gradient of 0. */
INLINE void correlate(const int rows, const F *x, int32_t W, int32_t P, int32_t Q, const F *d, const M *right, const M *lower, F *out) {
  F sum[25];
  UNROLL for (int i = 0; i < 5 * rows; i++) sum[i] = ZERO;
  for (int32_t p = 0; p < P; p++)
    for (int32_t q = 0; q < Q; q++) {
      const M r = right[p * Q + q], l = lower[p * Q + q];
      const F up = PICK(l, ZERO, d[p * Q + q]), down = PICK(l, d[p * Q + q], ZERO);
      UNROLL for (int line = 0; line <= rows; line++) {
        const F *at = x + (2 * p + line) * W + 2 * q;
        F here = at[0];
        UNROLL for (int kx = 0; kx < 5; kx++) {
          F next = at[kx + 1], v = PICK(r, next, here);
          if (line < rows) sum[line * 5 + kx] = FMA(up, v, sum[line * 5 + kx]);
          if (line > 0) sum[line * 5 - 5 + kx] = FMA(down, v, sum[line * 5 - 5 + kx]);
          here = next;
        }
      }
    }
  UNROLL for (int i = 0; i < 5 * rows; i++) out[i] = sum[i];
}

/* Add to the gradient of a stage's input what comes from one pooled position, for `count` channels: a window of 6 x 6. */
INLINE void spread(const int count, const Stage *s, int32_t filters, const float *w, const F *places, F *d) {
  const int32_t H = s->height, W = s->width, C = s->channels;
  for (int line = 0; line < 6; line++) {
    F sum[CHANNELS][6];
    UNROLL for (int c = 0; c < count; c++) UNROLL for (int x = 0; x < 6; x++) sum[c][x] = d[(c * H + line) * W + x];
    for (int low = 0; low < 2; low++) {
      const int ky = line - low;
      if (ky < 0 || ky > 4) continue;
      for (int32_t o = 0; o < filters; o++) {
        const float *tap = w + (o * C * 5 + ky) * 5;
        const F left = places[2 * low * filters + o], right = places[(2 * low + 1) * filters + o];
        UNROLL for (int kx = 0; kx < 5; kx++) UNROLL for (int c = 0; c < count; c++) {
          F f = FILL(tap[c * 25 + kx]);
          sum[c][kx] = FMA(f, left, sum[c][kx]);
          sum[c][kx + 1] = FMA(f, right, sum[c][kx + 1]);
        }
      }
    }
    UNROLL for (int c = 0; c < count; c++) UNROLL for (int x = 0; x < 6; x++) d[(c * H + line) * W + x] = sum[c][x];
  }
}

/* d [F, P, Q] is the gradient of the stage's outputs, 0 where the ReLU was. */
static void stage_gradient(Work *k, const Stage *s, int32_t filters, const float *row, const F *d, float *g, int n, int further) {
  const int32_t H = s->height, W = s->width, C = s->channels, P = (H - 4) / 2, Q = (W - 4) / 2;
  float *to = g + s->weights;
  for (int32_t o = 0; o < filters; o++) {
    const int64_t of = (int64_t)o * P * Q;
    for (int32_t c = 0; c < C; c++) {
      F sum[25];
      int line = 0;
      for (; line + TAPS <= 5; line += TAPS) correlate(TAPS, s->x + (c * H + line) * W, W, P, Q, d + of, s->right + of, s->lower + of, sum + 5 * line);
      for (; line < 5; line++) correlate(1, s->x + (c * H + line) * W, W, P, Q, d + of, s->right + of, s->lower + of, sum + 5 * line);
      add_up(to + (o * C + c) * 25, sum, 25, n);
    }
    F total = ZERO;
    for (int32_t i = 0; i < P * Q; i++) total += d[of + i];
    add_up(to + filters * C * 25 + o, &total, 1, n);
  }
  if (!further) return;
  memset(s->d, 0, sizeof(F) * C * H * W);
  for (int32_t p = 0; p < P; p++)
    for (int32_t q = 0; q < Q; q++) {
      for (int32_t o = 0; o < filters; o++) {
        const int32_t at = (o * P + p) * Q + q;
        const F left = PICK(s->right[at], ZERO, d[at]), right = PICK(s->right[at], d[at], ZERO);
        k->places[o] = PICK(s->lower[at], ZERO, left);
        k->places[filters + o] = PICK(s->lower[at], ZERO, right);
        k->places[2 * filters + o] = PICK(s->lower[at], left, ZERO);
        k->places[3 * filters + o] = PICK(s->lower[at], right, ZERO);
      }
      int32_t c = 0;
#define FROM_C s, filters, row + s->weights + c * 25, k->places, s->d + (c * H + 2 * p) * W + 2 * q
      for (; c + CHANNELS <= C; c += CHANNELS) spread(CHANNELS, FROM_C);
      for (; c + 2 <= C; c += 2) spread(2, FROM_C);
      for (; c < C; c++) spread(1, FROM_C);
    }
  for (int32_t i = 0; i < C * H * W; i++) s->d[i] = PICK(ABOVE(s->x[i], ZERO), s->d[i], ZERO);
}

static void backward(const Net *net, Work *k, const float *row, float *g, int n) {
  for (int i = net->layers - 1; i >= 0; i--)
    dense_gradient(k, &k->layer[i], row, i + 1 == net->layers ? k->slope : k->layer[i + 1].d, g, n, i > 0 || net->stages > 0);
  for (int i = net->stages - 1; i >= 0; i--)
    stage_gradient(k, &k->stage[i], net->filters[i], row, i + 1 == net->stages ? k->layer[0].d : k->stage[i + 1].d, g, n, i > 0);
}

static double add_gradient(const Net *net, Work *k, const float *row, float *g, const Images *images, int64_t first, int32_t count) {
  double loss = 0;
  float losses[LANES];
  int64_t labels[LANES];
  memset(g, 0, sizeof(float) * k->width);
  for (int32_t at = 0; at < count; at += LANES) {
    const int n = count - at < LANES ? count - at : LANES;
    load_images(net, k, images, first + at, n);
    for (int l = 0; l < n; l++) labels[l] = images->labels[images->order ? images->order[first + at + l] : first + at + l];
    forward(net, k, row);
    cross_entropy(k->out, net->units[net->layers - 1], labels, n, 1.f / count, losses, k->slope);
    for (int l = 0; l < n; l++) loss += losses[l];
    backward(net, k, row, g, n);
  }
  return loss / count;
}

/* SGD. --------------------------------------------------------------------------------------------------------------------------------- */
/* g gets its proximal term and loses its frozen columns; then clipping, decay and momentum as torch.optim.SGD. */
static void descend(float *restrict w, float *restrict m, float *restrict g, int64_t width, const Sgd *sgd) {
  float scale = 1, part[64] = {0};
  if (sgd->towards)
    for (int64_t i = 0; i < width; i++) g[i] = fmaf(sgd->mu, w[i] - sgd->towards[i], g[i]);
  if (sgd->trained)
    for (int64_t i = 0; i < width; i++) g[i] *= sgd->trained[i];
  if (sgd->clip > 0) { /* the norm's squares in 64 sums, whatever the form */
    double square = 0;
    int64_t i = 0;
    for (; i + 64 <= width; i += 64)
      for (int j = 0; j < 64; j++) part[j] = fmaf(g[i + j], g[i + j], part[j]);
    for (int j = 0; i + j < width; j++) part[j] = fmaf(g[i + j], g[i + j], part[j]);
    for (int j = 0; j < 64; j++) square += part[j];
    scale = sgd->clip / ((float)sqrt(square) + 1e-6f);
    if (scale > 1) scale = 1;
  }
  if (!sgd->trained)
    for (int64_t i = 0; i < width; i++) {
      m[i] = fmaf(sgd->momentum, m[i], fmaf(sgd->decay, w[i], scale * g[i]));
      w[i] = fmaf(-sgd->lr, m[i], w[i]);
    }
  else
    for (int64_t i = 0; i < width; i++) {
      const float moved = fmaf(sgd->momentum, m[i], fmaf(sgd->decay, w[i], scale * g[i]));
      m[i] = sgd->trained[i] ? moved : m[i];
      w[i] = sgd->trained[i] ? fmaf(-sgd->lr, moved, w[i]) : w[i];
    }
}

/* What a caller may call. `memory`: work space of `space` bytes, aligned to 64, one for each thread. ----------------------------------- */
int64_t PUBLIC(space)(const Net *net) {
  Work k = lay_out(net, NULL);
  return k.size + sizeof(float) * k.width;
}

/* Write into g [D] the gradient of the mean loss of images first, first + 1, ... and return the loss. */
double PUBLIC(gradient)(const Net *net, const float *w, float *g, const Images *images, int64_t first, int32_t count, void *memory) {
  Work k = lay_out(net, memory);
  return add_gradient(net, &k, w, g, images, first, count);
}

/* Take one step along g. */
void PUBLIC(step)(float *w, float *m, float *g, int64_t width, const Sgd *sgd) { descend(w, m, g, width, sgd); }

/* Train `epochs` epochs of n images in mini-batches of `batch`, the last of an epoch smaller; return the sum of the steps' losses. */
double PUBLIC(train)(const Net *net, float *w, float *m, const Images *images, int64_t n, int32_t epochs, int32_t batch, const Sgd *sgd, void *memory) {
  Work k = lay_out(net, memory);
  float *g = (float *)((char *)memory + k.size);
  double loss = 0;
  for (int32_t e = 0; e < epochs; e++)
    for (int64_t at = 0; at < n; at += batch) {
      loss += add_gradient(net, &k, w, g, images, e * n + at, n - at < batch ? n - at : batch);
      descend(w, m, g, k.width, sgd);
    }
  return loss;
}

/* Score r rows [r, stride] on n images: losses [r, n]; where not NULL predicted classes [r, n], logits [r, n, classes], features [r, n, I]. */
void PUBLIC(score)(const Net *net, const float *w, int64_t stride, int32_t r, const Images *images, int64_t n, float *losses, int64_t *predicted,
                   float *logits, float *features, void *memory) {
  Work k = lay_out(net, memory);
  const Dense *head = &k.layer[net->layers - 1];
  const int32_t classes = head->outputs;
  for (int64_t at = 0; at < n; at += LANES) {
    const int count = n - at < LANES ? n - at : LANES;
    int64_t labels[LANES];
    load_images(net, &k, images, at, count);
    for (int l = 0; l < count; l++) labels[l] = images->labels[images->order ? images->order[at + l] : at + l];
    for (int32_t row = 0; row < r; row++) {
      const int64_t to = row * n + at;
      float loss[LANES];
      forward(net, &k, w + row * stride);
      cross_entropy(k.out, classes, labels, count, 0, loss, NULL);
      memcpy(losses + to, loss, sizeof(float) * count);
      for (int l = 0; l < count; l++) {
        int32_t best = 0;
        for (int32_t c = 0; c < classes; c++) {
          if (k.out[c][l] > k.out[best][l]) best = c;
          if (logits) logits[(to + l) * classes + c] = k.out[c][l];
        }
        if (predicted) predicted[to + l] = best;
        for (int32_t i = 0; features && i < head->inputs; i++) features[(to + l) * head->inputs + i] = head->x[i][l];
      }
    }
  }
}
#endif
