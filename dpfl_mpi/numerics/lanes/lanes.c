/* Gradients, SGD and scores of networks on one core: the mini-batch is the vector.
 *
 * A network is a list of layers (net.h). A kind of layer is two functions: forward, and the way
 * back, which adds to the gradient of its parameters and writes, or adds to, that of its inputs.
 *
 * Images are taken LANES at a time, a "pass": a vector has the same number of each image, one in
 * each lane. A convolution is then a broadcast weight times a vector. A last pass of fewer images
 * repeats its first one in the empty lanes, with weight 0.
 *
 * A team of threads computes one client (team.h). A call takes many clients.
 *
 * This file is compiled once for each width of vectors, FORM = 512 (AVX-512), 256 (AVX2), 128 (any
 * processor), and once without FORM; and for a GPU (gpu.h), with one network in it. All forms and
 * teams give the same bits:
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
#ifndef GPU
#include <math.h>
#include <stdint.h>
#include <string.h>
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "images are read four bytes at a time, the first one lowest"
#endif
#endif

#define PUBLIC __attribute__((visibility("default")))

#if !defined(FORM) && !defined(GPU)
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

#include "draws.h"
#else
#ifdef GPU
#include "gpu.h"
#include "net.h"
#include "plan.h"
#else
#include "net.h"
#include "vectors.h"
#include "team.h"
#endif
#include "numbers.h"
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
#include "recurrent.h"
#include "tokens.h"
#include "step.h"

/* A kind of layer has two functions of its name. Its number is its place here; tokens have no
 * gradient. */
#define KINDS(kind) \
  kind(stage) kind(dense) kind(conv) kind(move) kind(clear) kind(relu) kind(squash) kind(sigmoid) \
  kind(silu) kind(gelu) kind(gelu_tanh) kind(leaky_relu) kind(line) kind(clamp) kind(hardtanh) \
  kind(max_pool) kind(mean_pool) kind(norm) kind(join) kind(sum) kind(plus) kind(total) \
  kind(product) kind(softmax) kind(token) kind(embed) kind(drop) kind(elu) kind(root) \
  kind(inverse) kind(given) kind(recurrent)
#define NUMBER(name) OF_##name,
#define FORWARD(name) case OF_##name: name(p, layer); break;
#define BACK(name) case OF_##name: name##_back(p, layer); break;
enum { KINDS(NUMBER) };

INLINE void forward_of(const Pass *p, const Layer *layer) {
  switch (layer->kind) { KINDS(FORWARD) }
}
INLINE void back_of(const Pass *p, const Layer *layer) {
  switch (layer->kind) { KINDS(BACK) }
}

INLINE void layer_forward(const Pass *p, const Layer *layer) {
  const Pass q = anew(p);
  forward_of(&q, layer);
  meet(&p->team);
}

/* A layer without parameters whose inputs nobody asks for has no way back. */
INLINE void layer_back(const Pass *p, const Layer *layer) {
  if (!wanted(p, layer->out)) return;
  if (layer->weight < 0 && layer->bias < 0 && !wanted(p, layer->in) && !wanted(p, layer->other))
    return;
  const Pass q = anew(p);
  back_of(&q, layer);
  meet(&p->team);
}

#ifdef UNROLLED_NET
/* Each layer is code of its own, with the numbers of NET in it. */
template <int I>
INLINE void forward_from(const Pass *p) {
  if constexpr (I < NET.layers) layer_forward(p, NET.layer + I), forward_from<I + 1>(p);
}
template <int I>
INLINE void back_from(const Pass *p) {
  if constexpr (I >= 0) layer_back(p, NET.layer + I), back_from<I - 1>(p);
}
INLINE void forward(const Pass *p) { forward_from<0>(p); }
INLINE void backward(const Pass *p) { back_from<NET.layers - 1>(p); }
#else
INTERNAL void forward(const Pass *p) {
  for (int32_t i = 0; i < p->net->layers; i++) layer_forward(p, &p->net->layer[i]);
}
INTERNAL void backward(const Pass *p) {
  for (int32_t i = p->net->layers - 1; i >= 0; i--) layer_back(p, &p->net->layer[i]);
}
#endif

/* Write each image's cross-entropy; with `share` also its gradient by the logits, times share and 0
 * in empty lanes. */
INTERNAL void cross_entropy(const Pass *p, float share, float *loss) {
  const int32_t classes = p->net->value[p->net->logits].units;
  const Vectors logits = x_of(p, p->net->logits), slope = d_of(p, p->net->logits);
  F greatest = logits[0], total = ZERO, weight = ZERO;
  for (int32_t c = 1; c < classes; c++)
    greatest = PICK(ABOVE(logits[c], greatest), logits[c], greatest);
  for (int32_t c = 0; c < classes; c++) total += slope[c] = exponential(logits[c] - greatest);
  const F log_total = logarithm(total);
  EACH_LANE(l) if (l < p->n)
    loss[l] = ON(log_total, l) + (ON(greatest, l) - ON(logits[p->labels[OWNED(l)]], l));
  if (share == 0) return;
  EACH_LANE(l) if (l < p->n) ON(weight, l) = share;
  for (int32_t c = 0; c < classes; c++) slope[c] /= total;
  EACH_LANE(l) if (l < p->n) ON(slope[p->labels[OWNED(l)]], l) -= 1.f;
  for (int32_t c = 0; c < classes; c++) slope[c] *= weight;
}

/* Write into p->g the gradient of the mean loss of mini-batch number `step`: `count` images from
 * number `first` on; and that loss into p->shared, for the first member. */
INTERNAL void gradient_of(Pass *p, const Images *images, int64_t first, int32_t count,
                        int32_t step) {
  if (is_first(&p->team)) p->shared->loss = 0;
  if (images->keys) p->drops = 1, p->key = images->keys[step];
  float *g = anew(p).g;
  SHARE_ROW(p, i, store(g + i, ZERO))
  for (p->first = 0; p->first < count; p->first += LANES) {
    p->n = count - p->first < LANES ? count - p->first : LANES;
    load_images(p, images, first + p->first);
    forward(p);
    if (is_first_member(&p->team)) cross_entropy(p, 1.f / count, p->shared->losses);
    meet(&p->team);
    if (is_first(&p->team))
      for (int l = 0; l < p->n; l++) p->shared->loss += p->shared->losses[l];
    backward(p);
  }
  if (is_first(&p->team)) p->shared->loss /= count;
}

/* Add the loss of the last mini-batch. */
INLINE void add_loss(const Pass *p, float *to) {
  if (is_first(&p->team)) *to += (float)p->shared->loss;
}

/* Run `call` for each mini-batch of a client's epochs: number `step`, `size` images from number
 * `first` on. The last one of an epoch is smaller. */
#define MINI_BATCHES(c, ...) \
  int64_t first = 0; \
  for (int32_t step = 0, size; first < (c)->epochs * (c)->n; first += size, step++) { \
    size = (c)->n - first % (c)->n < (c)->batch ? (c)->n - first % (c)->n : (c)->batch; \
    __VA_ARGS__; \
  }

/* Write into g the gradient of the mean loss of the first n images. */
INTERNAL void gradient_one(Pass *p, Training *c) {
  p->row = c->w, p->g = c->g;
  gradient_of(p, &c->images, 0, c->n, 0);
  if (is_first(&p->team)) c->loss = p->shared->loss;
}

/* Take one step of w along g. */
INTERNAL void step_one(Pass *p, Training *c) { step_along(p, c->w, c->m, c->g, &c->sgd, 0); }

/* Train in mini-batches. */
INTERNAL void train_one(Pass *p, Training *c) {
  const uint8_t *trained = c->sgd.trained;
  p->row = c->w;
  /* the first trained column: nothing below it needs a gradient */
  while (trained && p->lowest < p->net->width && !trained[p->lowest]) p->lowest++;
  MINI_BATCHES(c, {
    gradient_of(p, &c->images, first, size, step);
    if (is_first(&p->team)) c->loss += p->shared->loss;
    step_along(p, c->w, c->m, p->g, &c->sgd, step);
  })
}

/* Train w, and v along share times the gradient at row = share v + (1 - share) w, after each step
 * of w on the same mini-batch (APFL). */
INTERNAL void mix_one(Pass *p, Training *c) {
  const F own = FILL(c->share), others = FILL(1.f - c->share);
  MINI_BATCHES(c, {
    p->row = c->w;
    gradient_of(p, &c->images, first, size, step);
    add_loss(p, &c->losses[0]);
    step_along(p, c->w, c->m, p->g, &c->sgd, step);
    SHARE_ROW(p, i, store(c->row + i, own * load(c->v + i) + others * load(c->w + i)))
    p->row = c->row;
    gradient_of(p, &c->images, first, size, step);
    add_loss(p, &c->losses[1]);
    SHARE_ROW(p, i, store(p->g + i, own * load(p->g + i)))
    step_along(p, c->v, c->m_v, p->g, &c->sgd, step);
  })
}

/* Train w by pairs of mini-batches, along the gradient that the second has at row = w - share
 * (gradient of the first) (Per-FedAvg); a last one alone is not used. */
INTERNAL void ahead_one(Pass *p, Training *c) {
  const F by = FILL(c->share);
  MINI_BATCHES(c, {
    const int second = step % 2;
    p->row = second ? c->row : c->w;
    gradient_of(p, &c->images, first, size, step);
    if (second) add_loss(p, c->losses), step_along(p, c->w, c->m, p->g, &c->sgd, step / 2);
    else SHARE_ROW(p, i, store(c->row + i, load(c->w + i) - by * load(p->g + i)))
  })
}

/* Take steps of plain descent from w on one mini-batch, pulled to `towards` by mu (w - towards),
 * which is rounded before it is added. */
INTERNAL void descents_one(Pass *p, Training *c) {
  const F back = FILL(-c->sgd.lr), by = FILL(c->sgd.mu);
  p->row = c->w;
  for (int32_t step = 0; step < c->epochs; step++) {
    gradient_of(p, &c->images, 0, c->n, 0);
    add_loss(p, c->losses);
    SHARE_ROW(p, i, {
      const F old = load(c->w + i), away = by * (old - load(c->sgd.towards + i));
      store(c->w + i,
            FMA(back, load(p->g + i) + away + ZERO, old)); /* -0 becomes 0, as in a step */
    })
  }
}

/* Score rows on a client's images, which are read once for all rows. Each team of the client has a
 * part of the passes of rows. */
INTERNAL void score_one(Pass *p, const Scoring *c) {
  const int32_t classes = p->net->value[p->net->logits].units;
  const int32_t inputs = c->features ? p->net->value[c->read].units : 0;
  const Vectors y = x_of(p, p->net->logits), x = x_of(p, c->read);
  const int32_t all = (c->n + LANES - 1) / LANES * c->r, team = team_of_client();
  const int32_t first = (int64_t)all * team / TEAMS, end = (int64_t)all * (team + 1) / TEAMS;
  for (int32_t pass = first; pass < end; pass++) {
    const int32_t row = pass % c->r;
    const int64_t at = pass / c->r * LANES, to = row * c->n + at;
    if (row == 0 || pass == first) {
      p->n = c->n - at < LANES ? c->n - at : LANES;
      load_images(p, &c->images, at);
    }
    p->row = c->rows + row * c->stride;
    forward(p);
    if (is_first_member(&p->team)) {
      cross_entropy(p, 0, c->losses + to);
      EACH_LANE(l) if (l < p->n && c->predicted) {
        int32_t best = 0;
        for (int32_t i = 1; i < classes; i++) best = lane(y + i, l) > lane(y + best, l) ? i : best;
        c->predicted[to + l] = best;
      }
      EACH_LANE(l) if (l < p->n && c->logits)
        for (int32_t i = 0; i < classes; i++) c->logits[(to + l) * classes + i] = lane(y + i, l);
    }
    SHARE(&p->team, i, inputs)
      EACH_LANE(l) if (l < p->n) c->features[(to + l) * inputs + i] = lane(x + i, l);
    meet(&p->team);
  }
}

#include "search.h"

#ifdef GPU
#include "launch.h"
#else
#include "calls.h"
#include "averages.h"
#endif

VERB(train, Training)
VERB(mix, Training)
VERB(ahead, Training)
VERB(descents, Training)
VERB(gradient, Training)
VERB(step, Training)
VERB(score, Scoring)
VERB(search, Search)
VERB(candidate, Search)
#endif
