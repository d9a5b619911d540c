/* Trains and scores many small networks, one client (i.e. one model) at a time on each team of
 * threads: gradients, SGD steps, scores and greedy searches.
 *
 * A network is a list of layers (net.h). A kind of layer is two functions: forward, and backward,
 * which adds to the gradient of its parameters and writes, or adds to, that of its inputs.
 *
 * Vectors run over images: LANES images are computed at a time, a "pass", one in each lane, so a
 * convolution is a broadcast weight times a vector. A last pass of fewer images repeats its first
 * one in the empty lanes, with weight 0.
 *
 * On a CPU this file is compiled once for each width of vectors, FORM = 512 (AVX-512), 256 (AVX2),
 * 128 (any processor), and once without FORM. On a GPU it is compiled with one network in it
 * (gpu.h). All forms and any number of threads give the same bits, because
 *   - products are added by fused multiply-add, written out; the compiler neither contracts
 *     (-ffp-contract=off) nor reorders (-fno-fast-math);
 *   - sums over images go one by one, or in fours (0 + 2) + (1 + 3), four lanes at a time;
 *   - the order of every other sum does not depend on the number of registers;
 *   - exp and log are fixed polynomials.
 * Not-a-number is passed on everywhere, so a client that diverges is found. */
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
/* Return the digest of the sources that this library was built from, for the caller to compare. */
PUBLIC const char *source(void) { return SOURCE; }

/* Return the widest form that the processor and the operating system can run. */
PUBLIC int32_t widest(void) {
#if defined(__x86_64__)
  const uint32_t fma = 1u << 12, saves = 1u << 27, avx2 = 1u << 5;
  const uint32_t avx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31; /* F, DQ, BW, VL */
  uint32_t a, b, c, d, saved, high; /* registers; `saved`: those that the system saves */
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & fma) || !(c & saves)) return 128;
  __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
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

/* All kinds of layers. `name` has the functions name and name_back; its number, Layer.kind, is its
 * position in this list, which declared.py reads. */
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

INLINE void layer_forward(const Pass *copy, const Layer *layer) {
  const Pass fresh = fresh_copy(copy), *p = &fresh;
  switch (layer->kind) { KINDS(FORWARD) }
  barrier(&p->team);
}

/* Run a layer's backward pass, unless nobody needs the gradients that it computes. */
INLINE void layer_back(const Pass *copy, const Layer *layer) {
  const Pass fresh = fresh_copy(copy), *p = &fresh;
  const int trains = layer->weight >= 0 || layer->bias >= 0;
  const int needs_inputs = needs_gradient(p, layer->in) || needs_gradient(p, layer->other);
  if (!needs_gradient(p, layer->out) || (!trains && !needs_inputs)) return;
  switch (layer->kind) { KINDS(BACK) }
  barrier(&p->team);
}

#ifdef UNROLLED_NET
/* Unrolled loops over layers: each layer is code of its own, with the numbers of NET in it. */
template<int number> INLINE void forward_from(const Pass *p) {
  if constexpr (number < NET.layers)
    layer_forward(p, NET.layer + number), forward_from<number + 1>(p);
}
template<int number> INLINE void back_from(const Pass *p) {
  if constexpr (number >= 0) layer_back(p, NET.layer + number), back_from<number - 1>(p);
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

/* Write each image's cross-entropy. If `share` is not 0, also write its gradient by the logits,
 * times `share`, and 0 in empty lanes. */
INTERNAL void cross_entropy(const Pass *p, float share, float *loss) {
  const int32_t classes = p->net->value[p->net->logits].units;
  const Vectors logits = vectors_of(p, p->net->logits), slope = gradient_of(p, p->net->logits);
  Vec greatest = logits[0], total = ZERO, weight = ZERO;
  for (int32_t c = 1; c < classes; c++)
    greatest = SELECT(ABOVE(logits[c], greatest), logits[c], greatest);
  for (int32_t c = 0; c < classes; c++) total += slope[c] = exponential(logits[c] - greatest);
  const Vec log_total = logarithm(total);
  FOR_LANES(l) if (l < p->n) {
    const int32_t label = p->labels[HELD_INDEX(l)];
    loss[l] = LANE(log_total, l) + (LANE(greatest, l) - LANE(logits[label], l));
  }
  if (share == 0) return;
  FOR_LANES(l) if (l < p->n) LANE(weight, l) = share;
  for (int32_t c = 0; c < classes; c++) slope[c] /= total;
  FOR_LANES(l) if (l < p->n) LANE(slope[p->labels[HELD_INDEX(l)]], l) -= 1.f;
  for (int32_t c = 0; c < classes; c++) slope[c] *= weight;
}

/* Write into p->gradient the gradient at p->parameters of the mean loss of mini-batch number
 * `step`: `count` images from number `first` of the client's order on; and that loss into
 * p->shared->loss, for the first member. */
INTERNAL void batch_gradient(Pass *p, const Images *images, int64_t first, int32_t count,
                             int32_t step) {
  if (is_first(&p->team)) p->shared->loss = 0;
  if (images->keys) p->drops = 1, p->key = images->keys[step];
  float *g = fresh_copy(p).gradient;
  SHARE_ROW(p, i, store(g + i, ZERO))
  for (p->first = 0; p->first < count; p->first += LANES) {
    p->n = count - p->first < LANES ? count - p->first : LANES;
    load_images(p, images, first + p->first);
    forward(p);
    if (is_first_member(&p->team)) cross_entropy(p, 1.f / count, p->shared->losses);
    barrier(&p->team);
    if (is_first(&p->team))
      for (int l = 0; l < p->n; l++) p->shared->loss += p->shared->losses[l];
    backward(p);
  }
  if (is_first(&p->team)) p->shared->loss /= count;
}

/* Add the loss of the last mini-batch to a sum. */
INLINE void add_loss(const Pass *p, float *to) {
  if (is_first(&p->team)) *to += (float)p->shared->loss;
}

/* Run a statement, the last argument, for each mini-batch of a client's epochs. The caller names
 * three variables for it: the mini-batch's number `step`, its first image and its size, which is
 * smaller for the last one of an epoch. */
#define MINI_BATCHES(c, step, first, size, ...) \
  int64_t first = 0; \
  for (int32_t step = 0, size; first < (c)->epochs * (c)->n; first += size, step++) { \
    const int64_t left_ = (c)->n - first % (c)->n; /* of the epoch */ \
    size = left_ < (c)->batch ? left_ : (c)->batch; \
    __VA_ARGS__; \
  }

/* Each function name_one below computes one client's task; VERB at the end makes of it the function
 * `name`, which Python calls with the tasks of many clients. */

/* gradient: write into g the gradient of the mean loss of the first n images. */
INTERNAL void gradient_one(Pass *p, Training *c) {
  p->parameters = c->w, p->gradient = c->g;
  batch_gradient(p, &c->images, 0, c->n, 0);
  if (is_first(&p->team)) c->loss = p->shared->loss;
}

/* step: take one step of w along g. */
INTERNAL void step_one(Pass *p, Training *c) { step_along(p, c->w, c->m, c->g, &c->sgd, 0); }

/* train: train w in mini-batches. */
INTERNAL void train_one(Pass *p, Training *c) {
  const uint8_t *trained = c->sgd.trained;
  p->parameters = c->w;
  /* the first trained column: nothing below it needs a gradient */
  while (trained && p->lowest < p->net->width && !trained[p->lowest]) p->lowest++;
  MINI_BATCHES(c, step, first, size, {
    batch_gradient(p, &c->images, first, size, step);
    if (is_first(&p->team)) c->loss += p->shared->loss;
    step_along(p, c->w, c->m, p->gradient, &c->sgd, step);
  })
}

/* mix: train two rows, as APFL does. After each step of w, step v on the same mini-batch along the
 * gradient at row = share v + (1 - share) w, times share. */
INTERNAL void mix_one(Pass *p, Training *c) {
  const Vec share = FILL(c->share), rest = FILL(1.f - c->share);
  MINI_BATCHES(c, step, first, size, {
    p->parameters = c->w;
    batch_gradient(p, &c->images, first, size, step);
    add_loss(p, &c->losses[0]);
    step_along(p, c->w, c->m, p->gradient, &c->sgd, step);
    SHARE_ROW(p, i, store(c->row + i, share * load(c->v + i) + rest * load(c->w + i)))
    p->parameters = c->row;
    batch_gradient(p, &c->images, first, size, step);
    add_loss(p, &c->losses[1]);
    SHARE_ROW(p, i, store(p->gradient + i, share * load(p->gradient + i)))
    step_along(p, c->v, c->m_v, p->gradient, &c->sgd, step);
  })
}

/* ahead: train w by pairs of mini-batches, as Per-FedAvg does: along the gradient of the second at
 * row = w - share * (gradient of the first). A last mini-batch without a second is not used. */
INTERNAL void ahead_one(Pass *p, Training *c) {
  const Vec rate = FILL(c->share);
  MINI_BATCHES(c, step, first, size, {
    const int second = step % 2;
    p->parameters = second ? c->row : c->w;
    batch_gradient(p, &c->images, first, size, step);
    if (second) {
      add_loss(p, c->losses);
      step_along(p, c->w, c->m, p->gradient, &c->sgd, step / 2);
    } else {
      SHARE_ROW(p, i, store(c->row + i, load(c->w + i) - rate * load(p->gradient + i)))
    }
  })
}

/* descents: take steps of plain gradient descent from w on one mini-batch, with mu (w - towards)
 * added to the gradient; unlike in `step_along`, that term is rounded before it is added. */
INTERNAL void descents_one(Pass *p, Training *c) {
  const Vec minus_lr = FILL(-c->sgd.lr), mu = FILL(c->sgd.mu);
  p->parameters = c->w;
  for (int32_t step = 0; step < c->epochs; step++) {
    batch_gradient(p, &c->images, 0, c->n, 0);
    add_loss(p, c->losses);
    SHARE_ROW(p, i, {
      const Vec old = load(c->w + i), pull = mu * (old - load(c->sgd.towards + i));
      const Vec slope = load(p->gradient + i) + pull + ZERO; /* -0 becomes 0, as in a step */
      store(c->w + i, FMA(minus_lr, slope, old));
    })
  }
}

/* score: score rows on a client's images. A pass of a row is one pass of images through the network
 * with its parameters. They are ordered so that images are read once for all rows, and each team of
 * the client has a part of them. */
INTERNAL void score_one(Pass *p, const Scoring *c) {
  const int32_t classes = p->net->value[p->net->logits].units;
  const int32_t features = c->features ? p->net->value[c->read].units : 0;
  const Vectors logits = vectors_of(p, p->net->logits), read = vectors_of(p, c->read);
  const int32_t passes = (c->n + LANES - 1) / LANES * c->r, team = team_of_client();
  const int32_t first = (int64_t)passes * team / TEAMS;
  const int32_t end = (int64_t)passes * (team + 1) / TEAMS;
  for (int32_t pass = first; pass < end; pass++) {
    const int32_t row = pass % c->r;
    const int64_t image = pass / c->r * LANES, out = row * c->n + image; /* the pass's first */
    if (row == 0 || pass == first) {
      p->n = c->n - image < LANES ? c->n - image : LANES;
      load_images(p, &c->images, image);
    }
    p->parameters = c->rows + row * c->stride;
    forward(p);
    if (is_first_member(&p->team)) {
      cross_entropy(p, 0, c->losses + out);
      FOR_LANES(l) if (l < p->n && c->predicted) {
        int32_t best = 0;
        for (int32_t i = 1; i < classes; i++)
          best = lane(logits + i, l) > lane(logits + best, l) ? i : best;
        c->predicted[out + l] = best;
      }
      FOR_LANES(l)
      if (l < p->n && c->logits)
        for (int32_t i = 0; i < classes; i++)
          c->logits[(out + l) * classes + i] = lane(logits + i, l);
    }
    SHARE(&p->team, i, features)
      FOR_LANES(l) if (l < p->n) c->features[(out + l) * features + i] = lane(read + i, l);
    barrier(&p->team);
  }
}

#include "search.h"

#ifdef GPU
#include "launch.h"
#else
#include "calls.h"
#include "averages.h"
#endif

/* The functions that Python calls, and the structure of one client's task. */
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
