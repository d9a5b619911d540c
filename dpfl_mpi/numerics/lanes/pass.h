/* A pass: up to LANES images on their way forward through a network and back. This file has what a
 * layer's functions are called with, and how they find values and gradients.
 *
 * In all layers x and y are the input and output; d, dx and dy are gradients of the loss by them;
 * w, b and g are weights, biases and gradients of parameters. */

/* What the members of a team share; it lies behind the team's arena and gradient. */
typedef struct {
  float losses[16], sums[64]; /* of the pass's images; of squares (step.h) */
  double loss, rewards[2];    /* of the last mini-batch; of two averages (search.h) */
  double parts[2][312];       /* work space of two exact sums (search.h) */
  int64_t task;               /* number of the client that the team computes */
} Shared;

typedef struct {
  Team team;
  const Net *net;
  Vectors arena;
  Shared *shared;
  const float *parameters; /* [width] the row */
  float *gradient;         /* [width] of the row, to which the backward pass adds */
  int64_t lowest;          /* columns before this one are not trained */
  int32_t first;           /* index of the first image in its mini-batch */
  int n;                   /* images; the other lanes repeat the first image, with weight 0 */
  int drops;               /* whether dropout drops; */
  uint64_t key;            /* its random numbers */
  int32_t labels[LANES_HELD];
#ifndef GPU
  Vectors private_space; /* work space of this member */
#endif
} Pass;

/* Return a copy whose addresses the compiler knows nothing about (FORGET in gpu.h says why). */
INLINE Pass fresh_copy(const Pass *p) {
  Pass q = *p;
  FORGET(q.arena.at);
  FORGET(q.parameters);
  FORGET(q.gradient);
  FORGET_THREAD(q.team.thread);
  return q;
}

/* Return where a value's vectors start, and those of its gradient; of a layer: the input x, the
 * output y and their gradients; its weight; its bias, NULL if it has none. */
INLINE Vectors vectors_of(const Pass *p, int32_t value) {
  return p->arena + p->net->value[value].start;
}
INLINE Vectors gradient_of(const Pass *p, int32_t value) {
  return p->arena + p->net->value[value].gradient_start;
}
INLINE Vectors x_of(const Pass *p, const Layer *layer) { return vectors_of(p, layer->in); }
INLINE Vectors y_of(const Pass *p, const Layer *layer) { return vectors_of(p, layer->out); }
INLINE Vectors dx_of(const Pass *p, const Layer *layer) { return gradient_of(p, layer->in); }
INLINE Vectors dy_of(const Pass *p, const Layer *layer) { return gradient_of(p, layer->out); }
INLINE const float *weight_of(const Pass *p, const Layer *layer) {
  return p->parameters + layer->weight;
}
INLINE const float *bias_of(const Pass *p, const Layer *layer) {
  return layer->bias < 0 ? NULL : p->parameters + layer->bias;
}
/* Return whether a value depends on anything trained, so that its gradient is needed. */
INLINE int needs_gradient(const Pass *p, int32_t value) {
  return p->net->value[value].upstream > p->lowest;
}
INLINE Vectors scratch_of(const Pass *p) { return p->arena + p->net->scratch; }

/* Return how many vectors lie between a value's start and one of its vectors. */
INLINE int64_t place_in(const Value *value, int64_t plane, int64_t line, int32_t unit) {
  return plane * value->plane_step + line * value->line_step + unit;
}

/* Set the gradient of a value to 0. */
INTERNAL void clear_gradient(const Pass *p, int32_t number) {
  const Value *value = &p->net->value[number];
  const Vectors d = gradient_of(p, number);
  SHARE_PLACES(&p->team, plane, value->planes, line, value->lines, unit, value->units,
               d[place_in(value, plane, line, unit)] = ZERO)
}

/* g [count] += the sum of each vector over its images, for those that are this member's. */
INTERNAL void add_image_sums(const Pass *p, float *g, Vectors v, int64_t count) {
#ifdef GPU
  SHARE_NUMBERS(&p->team, i, count) {
    const float4 *x = (const float4 *)floats_at(v + i);
    float sum = g[i];
    UNROLL for (int l = 0; l < LANES / 4; l++)
      if (4 * l < p->n) sum += (x[l].x + x[l].z) + (x[l].y + x[l].w);
    g[i] = sum;
  }
#else
  /* members have multiples of four, which add_lanes sums at once */
  const int64_t fours = (count + 3) / 4, first = 4 * part_of(&p->team, fours, p->team.member);
  const int64_t end = 4 * part_of(&p->team, fours, p->team.member + 1);
  add_lanes(g + first, v + first, (end < count ? end : count) - first, p->n);
#endif
}

/* Add to g the sums over the images of `count` vectors v, the gradients of parameters `first` ...
 * of g. A GPU only stores the vectors in `sums`, until finish_image_sums. */
INLINE void begin_image_sums(const int count, const Pass *p, float *g, Vectors sums, int64_t first,
                             const Vec *v) {
#ifdef GPU
  UNROLL for (int i = 0; i < count; i++) sums[first + i] = v[i];
#else
  add_lanes(g + first, v, count, p->n);
#endif
}

/* On a GPU, add to g [count] what begin_image_sums stored. */
INTERNAL void finish_image_sums(const Pass *p, float *g, Vectors sums, int64_t count) {
#ifdef GPU
  barrier(&p->team);
  add_image_sums(p, g, sums, count);
#endif
}
