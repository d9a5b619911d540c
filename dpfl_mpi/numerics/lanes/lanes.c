/* Gradients, SGD and scores of networks on one core: the mini-batch is the vector.
 *
 * A network is a list of layers (net.h). A kind of layer is two functions: forward, and the way
 * back, which adds to the gradient of its parameters and writes, or adds to, that of its inputs.
 *
 * Images are taken LANES at a time, a "pass": a vector has the same number of each image, one in
 * each lane. A convolution is then a broadcast weight times a vector. A last pass of fewer images
 * repeats its first one in the empty lanes, with weight 0.
 *
 * This file is compiled once for each width of vectors, FORM = 512 (AVX-512), 256 (AVX2), 128 (any
 * processor), and once without FORM. All forms give the same bits:
 *   - products are added by fused multiply-add, written out; the compiler neither contracts
 *     (-ffp-contract=off) nor reorders (-fno-fast-math);
 *   - sums over images go one by one, or in fours (0 + 2) + (1 + 3), four after four;
 *   - the order of every other sum does not depend on the number of registers;
 *   - exp and log are fixed polynomials.
 * Not-a-number is passed on everywhere, so a client that diverges is found.
 *
 * Letters: H W C image, P Q height and width of outputs, I inputs of a layer, O its outputs,
 * D the row's width.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "images are read four bytes at a time, the first one lowest"
#endif

#define PUBLIC __attribute__((visibility("default")))

#ifndef FORM
#if defined(__x86_64__)
#include <cpuid.h>
#endif
/* Return the digest of the sources that this library was built from. */
PUBLIC const char *source(void) { return SOURCE; }

/* Return the widest form that the processor and the operating system can run. */
PUBLIC int32_t widest(void) {
#if defined(__x86_64__)
  const uint32_t fma = 1u << 12, saves = 1u << 27, avx2 = 1u << 5;
  const uint32_t avx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31; /* F, DQ, BW, VL */
  uint32_t a, b, c, d, saved, high;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & fma) || !(c & saves)) return 128;
  __asm__ volatile("xgetbv"
                   : "=a"(saved), "=d"(high)
                   : "c"(0)); /* the registers that the system saves */
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & avx2) || (saved & 0x06) != 0x06) return 128;
  return (b & avx512) == avx512 && (saved & 0xe6) == 0xe6 ? 512 : 256;
#else
  return 128;
#endif
}
#else
#include "net.h"
#include "vectors.h"
#include "pass.h"
#include "input.h"
#include "stage.h"
#include "dense.h"
#include "conv.h"
#include "move.h"
#include "each.h"
#include "pool.h"
#include "norm.h"
#include "join.h"
#include "attention.h"
#include "tokens.h"
#include "step.h"

typedef struct {
  void (*forward)(const Pass *, const Layer *), (*back)(const Pass *, const Layer *);
} Kind;
/* A kind's number is its place here, its name that of its first function; tokens have no gradient.
 */
static const Kind kinds[] = {
    {stage, stage_back},       {dense, dense_back},         {conv, conv_back},
    {move, move_back},         {clear, clear_back},         {relu, relu_back},
    {squash, squash_back},     {sigmoid, sigmoid_back},     {silu, silu_back},
    {gelu, gelu_back},         {gelu_tanh, gelu_tanh_back}, {leaky_relu, leaky_relu_back},
    {line, line_back},         {clamp, clamp_back},         {hardtanh, hardtanh_back},
    {max_pool, max_pool_back}, {mean_pool, mean_pool_back}, {norm, norm_back},
    {join, join_back},         {sum, sum_back},             {plus, plus_back},
    {total, total_back},       {product, product_back},     {softmax, softmax_back},
    {token, NULL},             {embed, embed_back},         {drop, drop_back},
};

static void forward(const Pass *p) {
  const Net *net = p->net;
  for (int32_t i = 0; i < net->layers; i++) kinds[net->layer[i].kind].forward(p, &net->layer[i]);
}

/* A layer without parameters whose inputs nobody asks for has no way back. */
static void backward(const Pass *p) {
  const Net *net = p->net;
  for (const Layer *layer = net->layer + net->layers - 1; layer >= net->layer; layer--)
    if (wanted(p, layer->out) &&
        (layer->weight >= 0 || layer->bias >= 0 || wanted(p, layer->in) || wanted(p, layer->other)))
      kinds[layer->kind].back(p, layer);
}

/* Write each image's cross-entropy; with `share` also its gradient by the logits, times share and 0
 * in empty lanes. */
static void cross_entropy(const Pass *p, float share, float *loss) {
  const int32_t classes = p->net->value[p->net->logits].units;
  const F *logits = x_of(p, p->net->logits);
  F *slope = d_of(p, p->net->logits), greatest = logits[0], total = ZERO, weight = ZERO;
  for (int32_t c = 1; c < classes; c++)
    greatest = PICK(ABOVE(logits[c], greatest), logits[c], greatest);
  for (int32_t c = 0; c < classes; c++) total += slope[c] = exponential(logits[c] - greatest);
  const F log_total = logarithm(total);
  for (int l = 0; l < p->n; l++)
    loss[l] = log_total[l] + (greatest[l] - lane(logits + p->labels[l], l));
  if (share == 0) return;
  for (int l = 0; l < p->n; l++) weight[l] = share;
  for (int32_t c = 0; c < classes; c++) slope[c] /= total;
  for (int l = 0; l < p->n; l++) slope[p->labels[l]][l] -= 1.f;
  for (int32_t c = 0; c < classes; c++) slope[c] *= weight;
}

/* Return a pass in a caller's memory: the arena, and behind it a gradient. */
static Pass begin(const Net *net, void *memory) {
  return (Pass){.net = net, .arena = memory, .g = (float *)((F *)memory + net->vectors)};
}

/* Write into p->g the gradient of the mean loss of mini-batch number `step`: `count` images from
 * number `first` on. Return that loss. */
static double gradient(Pass *p, const Images *images, int64_t first, int32_t count, int64_t step) {
  double loss = 0;
  if (images->keys) p->drops = 1, p->key = images->keys[step];
  memset(p->g, 0, sizeof(float) * p->net->width);
  for (p->first = 0; p->first < count; p->first += LANES) {
    p->n = count - p->first < LANES ? count - p->first : LANES;
    float losses[LANES];
    load_images(p, images, first + p->first);
    forward(p);
    cross_entropy(p, 1.f / count, losses);
    for (int l = 0; l < p->n; l++) loss += losses[l];
    backward(p);
  }
  return loss / count;
}

/* The functions for callers. `memory` is work space of space() bytes, aligned to 64, for this net
 * and thread alone. It is zeros at first: what lies around padded values stays so. */

PUBLIC int64_t NAME(space)(const Net *net) {
  return net->vectors * sizeof(F) + net->width * sizeof(float);
}

/* Write into g [D] the gradient of the mean loss of the first n images; return that loss. */
PUBLIC double NAME(gradient)(const Net *net, const float *w, float *g, const Images *images,
                             int32_t n, void *memory) {
  Pass p = begin(net, memory);
  p.row = w, p.g = g;
  return gradient(&p, images, 0, n, 0);
}

/* Run `call` for each mini-batch of `epochs` epochs of n images: number `step`, `size` images from
 * number `first` on. The last one of an epoch is smaller. */
#define MINI_BATCHES(...) \
  for (int64_t step = 0, first = 0, size; first < epochs * n; first += size, step++) { \
    size = n - first % n < batch ? n - first % n : batch; \
    __VA_ARGS__; \
  }

/* Train in mini-batches; return the sum of their losses. */
PUBLIC double NAME(train)(const Net *net, float *w, float *m, const Images *images, int64_t n,
                          int32_t epochs, int32_t batch, const Sgd *sgd, void *memory) {
  Pass p = begin(net, memory);
  p.row = w;
  /* the first trained column: nothing below it needs a gradient */
  while (sgd->trained && p.lowest < net->width && !sgd->trained[p.lowest]) p.lowest++;
  double loss = 0;
  MINI_BATCHES({
    loss += gradient(&p, images, first, size, step);
    NAME(step)(w, m, p.g, net->width, sgd, step);
  })
  return loss;
}

/* Train w, and v along share times the gradient at row = share v + (1 - share) w, after each step
 * of w on the same mini-batch (APFL). The losses at w and at row are added to losses [2] in
 * float32. */
PUBLIC void NAME(mix)(const Net *net, float *w, float *m_w, float *v, float *m_v, float *row,
                      float share, const Images *images, int64_t n, int32_t epochs, int32_t batch,
                      const Sgd *sgd, float *losses, void *memory) {
  Pass p = begin(net, memory);
  const F own = FILL(share), others = FILL(1.f - share);
  MINI_BATCHES({
    p.row = w;
    losses[0] += (float)gradient(&p, images, first, size, step);
    NAME(step)(w, m_w, p.g, net->width, sgd, step);
    for (int64_t i = 0; i < net->width; i += LANES)
      store(row + i, own * load(v + i) + others * load(w + i));
    p.row = row;
    losses[1] += (float)gradient(&p, images, first, size, step);
    for (int64_t i = 0; i < net->width; i += LANES) store(p.g + i, own * load(p.g + i));
    NAME(step)(v, m_v, p.g, net->width, sgd, step);
  })
}

/* Train w by pairs of mini-batches, along the gradient that the second has at row = w - inner
 * (gradient of the first) (Per-FedAvg); a last one alone is not used. The losses of the second ones
 * are added to *loss in float32. */
PUBLIC void NAME(ahead)(const Net *net, float *w, float *m, float *row, float inner,
                        const Images *images, int64_t n, int32_t epochs, int32_t batch,
                        const Sgd *sgd, float *loss, void *memory) {
  Pass p = begin(net, memory);
  const F by = FILL(inner);
  MINI_BATCHES({
    const int second = step % 2;
    p.row = second ? row : w;
    const float found = gradient(&p, images, first, size, step);
    if (second) *loss += found, NAME(step)(w, m, p.g, net->width, sgd, step / 2);
    for (int64_t i = 0; !second && i < net->width; i += LANES)
      store(row + i, load(w + i) - by * load(p.g + i));
  })
}

/* Take `steps` steps of plain descent from w on one mini-batch of n images, pulled to `towards` by
 * pull (w - towards), which is rounded before it is added. The losses are added to *loss in
 * float32. */
PUBLIC void NAME(descents)(const Net *net, float *w, const float *towards, float pull, float rate,
                           int32_t steps, const Images *images, int32_t n, float *loss,
                           void *memory) {
  Pass p = begin(net, memory);
  const F back = FILL(-rate), by = FILL(pull);
  p.row = w;
  for (int32_t step = 0; step < steps; step++) {
    *loss += (float)gradient(&p, images, 0, n, 0);
    for (int64_t i = 0; i < net->width; i += LANES) {
      const F old = load(w + i), away = by * (old - load(towards + i));
      store(w + i, FMA(back, load(p.g + i) + away + ZERO, old)); /* -0 becomes 0, as in a step */
    }
  }
}

/* Score r rows, `stride` floats apart, on n images: losses [r, n] and, where they are not NULL,
 * predicted classes [r, n], logits [r, n, classes] and what the last layer reads [r, n, I]. */
PUBLIC void NAME(score)(const Net *net, const float *rows, int64_t stride, int32_t r,
                        const Images *images, int64_t n, float *losses, int64_t *predicted,
                        float *logits, float *features, void *memory) {
  Pass p = begin(net, memory);
  const Value *head = &net->value[net->features];
  const int32_t classes = net->value[net->logits].units;
  const F *y = x_of(&p, net->logits), *x = x_of(&p, net->features);
  for (int64_t at = 0; at < n; at += LANES) {
    p.n = n - at < LANES ? n - at : LANES;
    load_images(&p, images, at);
    for (int32_t row = 0; row < r; row++) {
      p.row = rows + row * stride;
      forward(&p);
      cross_entropy(&p, 0, losses + row * n + at);
      for (int l = 0; l < p.n; l++) {
        const int64_t to = row * n + at + l;
        int32_t best = 0;
        for (int32_t c = 1; c < classes; c++) best = lane(y + c, l) > lane(y + best, l) ? c : best;
        if (predicted) predicted[to] = best;
        for (int32_t c = 0; logits && c < classes; c++) logits[to * classes + c] = lane(y + c, l);
        for (int32_t i = 0; features && i < head->units; i++)
          features[to * head->units + i] = lane(x + i, l);
      }
    }
  }
}

#include "search.h"
#endif
