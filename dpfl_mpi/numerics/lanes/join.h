/* Sums and products of two values, or of a value and a parameter. */

/* Where a number lies in three values. */
typedef struct {
  int64_t of[3];
} Spot;

/* Return where number i lies; `table`: numbers in each dimension, then for each value the vectors
 * from one to the next. */
INLINE Spot spot_of(const int32_t *table, int32_t dimensions, const int values, int32_t i) {
  Spot spot = {{0, 0, 0}};
  for (int32_t k = dimensions - 1; k >= 0; k--) {
    const int32_t at = k ? i % table[k] : i;
    if (k) i /= table[k];
    UNROLL for (int v = 0; v < values; v++)
      spot.of[v] += (int64_t)at * table[(v + 1) * dimensions + k];
  }
  return spot;
}

/* SHARE, or where `alone` all for the first member: what members would write is the same numbers.
 */
#define SHARE_UNLESS(t, alone, i, n) \
  SHARE(t, i##_part, (alone) ? 1 : (n)) \
    for (int64_t i = (alone) ? 0 : i##_part, i##_last = (alone) ? (n) : i##_part + 1; \
         i < i##_last; i++)

/* Two inputs number by number. size: what is done, where in each input to start; then dimensions
 * and numbers that members share, in which different numbers lie apart in all inputs that have a
 * gradient; then those of the others. `table`: of the ones and of the others the numbers in each,
 * then the steps in the output, in the first and in the second input (0: one number for all). */
enum { JOIN_WHAT, JOIN_FIRST, JOIN_SECOND, JOIN_SHARED, JOIN_ITEMS, JOIN_OTHERS, JOIN_EACH };
/* CHOOSE: the first where the second is not 0, else number[0] */
enum { ADD, SUBTRACT, MULTIPLY, DIVIDE, CHOOSE };

/* Run `call` for each number that is this member's: `at`, `first` and `second` are where it is in
 * the output and in both inputs. */
#define JOINED(p, layer, ...) \
  const int32_t *size_ = (layer)->size; \
  const int32_t *others_ = (layer)->table + 4 * size_[JOIN_SHARED]; \
  SHARE(&(p)->team, i_, size_[JOIN_ITEMS]) { \
    const Spot from_ = spot_of((layer)->table, size_[JOIN_SHARED], 3, i_); \
    for (int32_t j_ = 0; j_ < size_[JOIN_EACH]; j_++) { \
      const Spot by_ = spot_of(others_, size_[JOIN_OTHERS], 3, j_); \
      const int64_t at = from_.of[0] + by_.of[0], first = from_.of[1] + by_.of[1]; \
      const int64_t second = from_.of[2] + by_.of[2]; \
      __VA_ARGS__; \
    } \
  }

static void join(const Pass *p, const Layer *layer) {
  const Vectors a = x_of(p, layer->in) + layer->size[JOIN_FIRST];
  const Vectors b = x_of(p, layer->other) + layer->size[JOIN_SECOND], y = x_of(p, layer->out);
  const F otherwise = FILL(layer->number[0]);
  const int32_t what = layer->size[JOIN_WHAT];
  JOINED(p, layer, const F u = a[first], v = b[second];
         y[at] = what == ADD        ? u + v
                 : what == SUBTRACT ? u - v
                 : what == MULTIPLY ? u * v
                 : what == DIVIDE   ? u / v
                                    : PICK(ABOVE(v, ZERO), u, otherwise))
}

static void join_back(const Pass *p, const Layer *layer) {
  const int32_t in_a = layer->size[JOIN_FIRST], in_b = layer->size[JOIN_SECOND];
  const int32_t what = layer->size[JOIN_WHAT];
  const Vectors a = x_of(p, layer->in) + in_a, b = x_of(p, layer->other) + in_b;
  const Vectors da = d_of(p, layer->in) + in_a, db = d_of(p, layer->other) + in_b;
  const Vectors dy = d_of(p, layer->out);
  const int to_a = wanted(p, layer->in), to_b = wanted(p, layer->other);
  JOINED(p, layer, {
    const F d = dy[at], u = a[first], v = b[second];
    if (to_a)
      da[first] += what == ADD || what == SUBTRACT ? d
                   : what == MULTIPLY              ? d * v
                   : what == DIVIDE                ? d / v
                                                   : PICK(ABOVE(v, ZERO), d, ZERO);
    if (to_b && what != CHOOSE)
      db[second] += what == ADD        ? d
                    : what == SUBTRACT ? ZERO - d
                    : what == MULTIPLY ? d * u
                                       : ZERO - d * (u / v) / v;
  })
}

/* The sum of two values of the same planes, lines and units. The first one's gradient may be the
 * output's own. */
static void sum(const Pass *p, const Layer *layer) {
  const Vectors a = x_of(p, layer->in), b = x_of(p, layer->other), y = x_of(p, layer->out);
  const Value *second = &p->net->value[layer->other];
  EACH(p, layer,
       const int64_t of = (int64_t)plane_ * second->plane + (int64_t)line_ * second->line + unit_;
       y[there] = a[here] + b[of])
}

static void sum_back(const Pass *p, const Layer *layer) {
  const Vectors dy = d_of(p, layer->out), da = d_of(p, layer->in), db = d_of(p, layer->other);
  const Value *second = &p->net->value[layer->other];
  const int to_a = wanted(p, layer->in) && da != dy, to_b = wanted(p, layer->other);
  const int adds = layer->adds;
  EACH(p, layer,
       const int64_t of = (int64_t)plane_ * second->plane + (int64_t)line_ * second->line + unit_;
       const F d = dy[there]; if (to_a) put(&da[here], d, adds & 1);
       if (to_b) put(&db[of], d, adds & 2))
}

/* A parameter for each number of the input, added to it (size[0] is 0) or multiplied with it.
 * Scratch: as many vectors. size[1]: numbers that share one, side by side; size[2]: parameters. */

/* Run `call` for each parameter that is this member's, number `of`, on each number i that has it,
 * in their order. */
#define WITH_PARAMETERS(p, layer, start, call, end) \
  const int32_t share_ = (layer)->size[1], all_ = (layer)->size[2]; \
  const int32_t units_ = (p)->net->value[(layer)->in].units; \
  SHARE(&(p)->team, of, all_) { \
    start; \
    for (int32_t first_ = of * share_; first_ < units_; first_ += share_ * all_) \
      for (int32_t i = first_; i < first_ + share_; i++) { call; } \
    end; \
  }

static void plus(const Pass *p, const Layer *layer) {
  const Vectors x = x_of(p, layer->in), y = x_of(p, layer->out);
  const int32_t times = layer->size[0];
  WITH_PARAMETERS(p, layer, const F w = FILL(p->row[layer->weight + of]),
                  y[i] = times ? x[i] * w : x[i] + w, )
}

static void plus_back(const Pass *p, const Layer *layer) {
  const Vectors x = x_of(p, layer->in), dy = d_of(p, layer->out), dx = d_of(p, layer->in);
  const Vectors sums = scratch_of(p);
  const int32_t times = layer->size[0], to_x = wanted(p, layer->in), adds = layer->adds & 1;
  WITH_PARAMETERS(p, layer, const F w = FILL(p->row[layer->weight + of]);
                  F sum = ZERO, const F d = dy[i]; sum += times ? d * x[i] : d;
                  if (to_x) put(&dx[i], times ? d * w : d, adds), sums[of] = sum)
  meet(&p->team);
  add_up(p, p->g + layer->weight, sums, layer->size[2]);
}

/* The same numbers for all images: parameters, or (weight -1) those whose bits `table` has. */
static void given(const Pass *p, const Layer *layer) {
  const Vectors y = x_of(p, layer->out);
  SHARE(&p->team, i, p->net->value[layer->out].units) {
    if (layer->weight < 0) y[i] = FLOAT(BITS(ZERO) + (uint32_t)layer->table[i]);
    else y[i] = FILL(p->row[layer->weight + i]);
  }
}

static void given_back(const Pass *p, const Layer *layer) {
  const int32_t count = p->net->value[layer->out].units;
  add_up(p, p->g + layer->weight, d_of(p, layer->out), count);
}

/* Sums over some dimensions of a value with any steps, times number[0]. size: dimensions that stay,
 * outputs; dimensions that are summed, numbers that are summed into one; where to start; whether
 * outputs have numbers in common. `table`: of the dimensions that stay the numbers in each, then
 * the steps in the input; of the others too. */
enum { TOTAL_STAYS, TOTAL_OUTPUTS, TOTAL_GONE, TOTAL_COUNT, TOTAL_OFFSET, TOTAL_COMMON };

static void total(const Pass *p, const Layer *layer) {
  const int32_t *size = layer->size, *gone = layer->table + 2 * size[TOTAL_STAYS];
  const Vectors x = x_of(p, layer->in) + size[TOTAL_OFFSET], y = x_of(p, layer->out);
  SHARE(&p->team, i, size[TOTAL_OUTPUTS]) {
    const Vectors from = x + spot_of(layer->table, size[TOTAL_STAYS], 1, i).of[0];
    F sum = ZERO;
    for (int32_t j = 0; j < size[TOTAL_COUNT]; j++)
      sum += from[spot_of(gone, size[TOTAL_GONE], 1, j).of[0]];
    y[i] = sum * layer->number[0];
  }
}

static void total_back(const Pass *p, const Layer *layer) {
  const int32_t *size = layer->size, *gone = layer->table + 2 * size[TOTAL_STAYS];
  const Vectors dx = d_of(p, layer->in) + size[TOTAL_OFFSET], dy = d_of(p, layer->out);
  SHARE_UNLESS(&p->team, size[TOTAL_COMMON], i, size[TOTAL_OUTPUTS]) {
    const Vectors to = dx + spot_of(layer->table, size[TOTAL_STAYS], 1, i).of[0];
    const F d = dy[i] * layer->number[0];
    for (int32_t j = 0; j < size[TOTAL_COUNT]; j++)
      put(&to[spot_of(gone, size[TOTAL_GONE], 1, j).of[0]], d, layer->adds & 1);
  }
}
