/* A pass: up to LANES images on their way through a network and back. */
typedef struct {
  const Net *net;
  F *arena;
  const float *row; /* [D] parameters */
  float *g;         /* [D] their gradient, to which the way back adds */
  int64_t lowest;   /* columns before this one are not trained */
  int64_t first;    /* place of the first image in its mini-batch */
  int n;            /* images; the other lanes repeat the first image, with weight 0 */
  int drops;        /* whether dropout drops, */
  uint64_t key;     /* by this key */
  int64_t labels[LANES];
} Pass;

INLINE F *x_of(const Pass *p, int32_t value) { return p->arena + p->net->value[value].x; }
INLINE F *d_of(const Pass *p, int32_t value) { return p->arena + p->net->value[value].d; }
/* Return whether anything trained lies before a value, so that its gradient is asked for. */
INLINE int wanted(const Pass *p, int32_t value) {
  return p->net->value[value].upstream > p->lowest;
}
INLINE F *scratch_of(const Pass *p) { return p->arena + p->net->scratch; }

/* Run `call` for each line of a value: `at` is where in its planes and lines the line starts. */
#define LINES(value, ...) \
  for (int32_t plane_ = 0; plane_ < (value)->planes; plane_++) \
    for (int32_t line_ = 0; line_ < (value)->lines; line_++) { \
      int64_t at = (int64_t)plane_ * (value)->plane + (int64_t)line_ * (value)->line; \
      __VA_ARGS__; \
    }

/* Set the gradient of a value to 0. */
static void clear_gradient(const Pass *p, int32_t value) {
  const Value *v = &p->net->value[value];
  LINES(v, memset(p->arena + v->d + at, 0, sizeof(F) * v->units))
}
