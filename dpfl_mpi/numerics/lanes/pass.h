/* A pass: up to LANES images on their way through a network and back. */

/* What a team's members share, behind its arena and gradient. */
typedef struct {
  float losses[16], sums[64];
  double loss, rewards[2]; /* of the last mini-batch; of two averages */
  double parts[2][312];    /* of an exact sum each */
  int64_t task;
} Shared;

typedef struct {
  Team team;
  const Net *net;
  Vectors arena;
  Shared *shared;
  const float *row; /* [D] parameters */
  float *g;         /* [D] their gradient, to which the way back adds */
  int64_t lowest;   /* columns before this one are not trained */
  int32_t first;    /* place of the first image in its mini-batch */
  int n;            /* images; the other lanes repeat the first image, with weight 0 */
  int drops;        /* whether dropout drops, */
  uint64_t key;     /* by this key */
  int32_t labels[OWN];
#ifndef GPU
  Vectors own; /* work space of this member */
#endif
} Pass;

/* Return the pass with addresses and a thread that the compiler has not seen. */
INLINE Pass anew(const Pass *p) {
  Pass q = *p;
  FORGET(q.arena.at);
  FORGET(q.row);
  FORGET(q.g);
  FORGET_THREAD(q.team.thread);
  return q;
}

INLINE Vectors x_of(const Pass *p, int32_t value) { return p->arena + p->net->value[value].x; }
INLINE Vectors d_of(const Pass *p, int32_t value) { return p->arena + p->net->value[value].d; }
/* Return whether anything trained lies before a value, so that its gradient is asked for. */
INLINE int wanted(const Pass *p, int32_t value) {
  return p->net->value[value].upstream > p->lowest;
}
INLINE Vectors scratch_of(const Pass *p) { return p->arena + p->net->scratch; }

/* Run `call` for each number of a value that is this member's: `at` is where it is. */
#define EACH_OF(p, value, ...) \
  PLACES(&(p)->team, (value)->planes, (value)->lines, (value)->units, \
         const int64_t at = \
             (int64_t)plane_ * (value)->plane + (int64_t)line_ * (value)->line + unit_; \
         __VA_ARGS__)

/* Set the gradient of a value to 0. */
INTERNAL void clear_gradient(const Pass *p, int32_t value) {
  const Value *v = &p->net->value[value];
  const Vectors d = p->arena + v->d;
  EACH_OF(p, v, d[at] = ZERO)
}

/* g[i] += the sum over the images of vector i, for those that are this member's. */
INTERNAL void add_up(const Pass *p, float *g, Vectors v, int64_t count) {
#ifdef GPU
  SHARE_NUMBERS(&p->team, i, count) {
    const float4 *x = (const float4 *)floats_at(v + i);
    float sum = g[i];
    UNROLL for (int l = 0; l < LANES / 4; l++)
      if (4 * l < p->n) sum += (x[l].x + x[l].z) + (x[l].y + x[l].w);
    g[i] = sum;
  }
#else
  const int64_t fours = (count + 3) / 4, from = 4 * part_of(&p->team, fours, p->team.member);
  const int64_t end = 4 * part_of(&p->team, fours, p->team.member + 1);
  add_up_of(g + from, v + from, (end < count ? end : count) - from, p->n);
#endif
}

/* What `leave` left of a member's sums is added to the gradient. */
INTERNAL void collect(const Pass *p, float *g, Vectors sums, int64_t count) {
#ifdef GPU
  meet(&p->team);
  add_up(p, g, sums, count);
#endif
  (void)p, (void)g, (void)sums, (void)count;
}

/* The sums over the images of `count` weights from number `at` on: a CPU adds them to the gradient
 * at once, a GPU leaves them in `sums` until `collect`. */
INLINE void leave(const int count, const Pass *p, float *g, Vectors sums, int64_t at, const F *v) {
#ifdef GPU
  UNROLL for (int i = 0; i < count; i++) sums[at + i] = v[i];
#else
  add_up_of(g + at, v, count, p->n);
  (void)sums;
#endif
}
