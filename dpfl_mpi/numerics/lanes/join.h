/* Sums and products of two values, of a value and parameters, and along dimensions of a value.
 *
 * Here an array may have any stride along each dimension, as a transposed or broadcast tensor does.
 * Strides count vectors; with stride 0 all indices share one number. `size` and `table` are the
 * fields of Layer. */

/* Where one number lies in each of up to three arrays of the same shape. */
typedef struct {
  int64_t in[3];
} Spot;

/* Return where number i lies. `table`: the size of each dimension, then for each array the step of
 * each dimension. */
INLINE Spot spot_of(const int32_t *table, int32_t dimensions, const int arrays, int32_t i) {
  Spot spot = {{0, 0, 0}};
  for (int32_t k = dimensions - 1; k >= 0; k--) {
    const int32_t index = k ? i % table[k] : i;
    if (k) i /= table[k];
    UNROLL for (int v = 0; v < arrays; v++)
      spot.in[v] += (int64_t)index * table[(v + 1) * dimensions + k];
  }
  return spot;
}

/* SHARE; but if `alone` the first member does everything, because several indices add to the same
 * number. */
#define SHARE_UNLESS(t, alone, i, n) \
  SHARE(t, i##_part, (alone) ? 1 : (n)) \
    for (int64_t i = (alone) ? 0 : i##_part, i##_last = (alone) ? (n) : i##_part + 1; \
         i < i##_last; i++)

/* join: y of two inputs a and b, number by number. Members share the numbers of some outer
 * dimensions, in which no two write the same gradient, and each loops over the inner ones.
 * size: the operation; where a and b start; how many outer dimensions, and numbers in them; the
 * same of inner dimensions. `table`: as spot_of reads it, of outer, then of inner dimensions, with
 * steps in y, a and b. */
enum { JOIN_WHAT, JOIN_A, JOIN_B, JOIN_OUTER, JOIN_OUTER_COUNT, JOIN_INNER, JOIN_INNER_COUNT };
/* CHOOSE: a where b is above 0, else number[0] */
enum { ADD, SUBTRACT, MULTIPLY, DIVIDE, CHOOSE };

/* Run a statement, the last argument, for each number of y that is this member's. The caller names
 * three variables for it: where the number lies in y, a and b. */
#define SHARE_JOINED(p, layer, in_y, in_a, in_b, ...) \
  const int32_t *size_ = (layer)->size; \
  const int32_t *inner_ = (layer)->table + 4 * size_[JOIN_OUTER]; \
  SHARE(&(p)->team, i_, size_[JOIN_OUTER_COUNT]) { \
    const Spot start_ = spot_of((layer)->table, size_[JOIN_OUTER], 3, i_); \
    for (int32_t j_ = 0; j_ < size_[JOIN_INNER_COUNT]; j_++) { \
      const Spot more_ = spot_of(inner_, size_[JOIN_INNER], 3, j_); \
      const int64_t in_y = start_.in[0] + more_.in[0], in_a = start_.in[1] + more_.in[1]; \
      const int64_t in_b = start_.in[2] + more_.in[2]; \
      __VA_ARGS__; \
    } \
  }

static void join(const Pass *p, const Layer *layer) {
  const Vectors a = x_of(p, layer) + layer->size[JOIN_A], y = y_of(p, layer);
  const Vectors b = vectors_of(p, layer->other) + layer->size[JOIN_B];
  const Vec otherwise = FILL(layer->number[0]);
  const int32_t what = layer->size[JOIN_WHAT];
  SHARE_JOINED(p, layer, in_y, in_a, in_b, {
    const Vec u = a[in_a], v = b[in_b];
    y[in_y] = what == ADD        ? u + v
              : what == SUBTRACT ? u - v
              : what == MULTIPLY ? u * v
              : what == DIVIDE   ? u / v
                                 : SELECT(ABOVE(v, ZERO), u, otherwise);
  })
}

static void join_back(const Pass *p, const Layer *layer) {
  const int32_t a_start = layer->size[JOIN_A], b_start = layer->size[JOIN_B];
  const int32_t what = layer->size[JOIN_WHAT];
  const Vectors a = x_of(p, layer) + a_start, b = vectors_of(p, layer->other) + b_start;
  const Vectors da = dx_of(p, layer) + a_start;
  const Vectors db = gradient_of(p, layer->other) + b_start, dy = dy_of(p, layer);
  const int needs_da = needs_gradient(p, layer->in), needs_db = needs_gradient(p, layer->other);
  SHARE_JOINED(p, layer, in_y, in_a, in_b, {
    const Vec d = dy[in_y], u = a[in_a], v = b[in_b];
    if (needs_da)
      da[in_a] += what == ADD || what == SUBTRACT ? d
                  : what == MULTIPLY              ? d * v
                  : what == DIVIDE                ? d / v
                                                  : SELECT(ABOVE(v, ZERO), d, ZERO);
    if (needs_db && what != CHOOSE)
      db[in_b] += what == ADD        ? d
                  : what == SUBTRACT ? ZERO - d
                  : what == MULTIPLY ? d * u
                                     : ZERO - d * (u / v) / v;
  })
}

/* sum: y = a + b of two values of the same planes, lines and units. The gradient of a may lie where
 * that of y does; then it is already there. */
static void sum(const Pass *p, const Layer *layer) {
  const Value *in_a = &p->net->value[layer->in], *in_b = &p->net->value[layer->other];
  const Value *in_y = &p->net->value[layer->out];
  const Vectors a = x_of(p, layer), b = vectors_of(p, layer->other), y = y_of(p, layer);
  SHARE_PLACES(&p->team, plane, in_a->planes, line, in_a->lines, unit, in_a->units,
               y[place_in(in_y, plane, line, unit)] =
                   a[place_in(in_a, plane, line, unit)] + b[place_in(in_b, plane, line, unit)])
}

static void sum_back(const Pass *p, const Layer *layer) {
  const Value *in_a = &p->net->value[layer->in], *in_b = &p->net->value[layer->other];
  const Value *in_y = &p->net->value[layer->out];
  const Vectors dy = dy_of(p, layer), da = dx_of(p, layer), db = gradient_of(p, layer->other);
  const int needs_da = needs_gradient(p, layer->in) && da != dy, adds = layer->adds;
  const int needs_db = needs_gradient(p, layer->other);
  SHARE_PLACES(&p->team, plane, in_a->planes, line, in_a->lines, unit, in_a->units, {
    const Vec d = dy[place_in(in_y, plane, line, unit)];
    if (needs_da) write_or_add(&da[place_in(in_a, plane, line, unit)], d, adds & 1);
    if (needs_db) write_or_add(&db[place_in(in_b, plane, line, unit)], d, adds & 2);
  })
}

/* plus: y = x + w or x * w, with parameters w that repeat along x: PLUS_REPEAT neighbouring numbers
 * share one, the next ones the next, and after PLUS_COUNT of them the first one follows again.
 * Scratch: the gradient of each. */
enum { PLUS_TIMES, PLUS_REPEAT, PLUS_COUNT };

static void plus(const Pass *p, const Layer *layer) {
  const Vectors x = x_of(p, layer), y = y_of(p, layer);
  const int32_t units = p->net->value[layer->in].units, times = layer->size[PLUS_TIMES];
  const int32_t repeat = layer->size[PLUS_REPEAT], count = layer->size[PLUS_COUNT];
  SHARE(&p->team, k, count) {
    const Vec w = FILL(p->parameters[layer->weight + k]);
    for (int32_t first = k * repeat; first < units; first += repeat * count)
      for (int32_t i = first; i < first + repeat; i++) y[i] = times ? x[i] * w : x[i] + w;
  }
}

static void plus_back(const Pass *p, const Layer *layer) {
  const Vectors x = x_of(p, layer), sums = scratch_of(p);
  const Vectors dx = dx_of(p, layer), dy = dy_of(p, layer);
  const int32_t units = p->net->value[layer->in].units, times = layer->size[PLUS_TIMES];
  const int32_t repeat = layer->size[PLUS_REPEAT], count = layer->size[PLUS_COUNT];
  const int32_t needs_dx = needs_gradient(p, layer->in), adds = layer->adds & 1;
  SHARE(&p->team, k, count) {
    const Vec w = FILL(p->parameters[layer->weight + k]);
    Vec sum = ZERO;
    for (int32_t first = k * repeat; first < units; first += repeat * count)
      for (int32_t i = first; i < first + repeat; i++) {
        const Vec d = dy[i];
        sum += times ? d * x[i] : d;
        if (needs_dx) write_or_add(&dx[i], times ? d * w : d, adds);
      }
    sums[k] = sum;
  }
  barrier(&p->team);
  add_image_sums(p, p->gradient + layer->weight, sums, count);
}

/* given: y has the same numbers for all images: parameters, or (weight -1) constants, whose bits
 * `table` has. */
static void given(const Pass *p, const Layer *layer) {
  const Vectors y = y_of(p, layer);
  SHARE(&p->team, i, p->net->value[layer->out].units) {
    if (layer->weight < 0) y[i] = AS_FLOAT(AS_BITS(ZERO) + (uint32_t)layer->table[i]);
    else y[i] = FILL(p->parameters[layer->weight + i]);
  }
}

static void given_back(const Pass *p, const Layer *layer) {
  const int32_t count = p->net->value[layer->out].units;
  add_image_sums(p, p->gradient + layer->weight, dy_of(p, layer), count);
}

/* total: y = number[0] times the sum of x over some of its dimensions. size: the other dimensions,
 * which y keeps, and the numbers of y; the summed dimensions, and how many numbers are added up;
 * where x starts; whether a number of x goes into several of y. `table`: as spot_of reads it, of
 * the kept dimensions with steps in x, then of the summed ones. */
enum { TOTAL_KEPT, TOTAL_OUTPUTS, TOTAL_SUMMED, TOTAL_COUNT, TOTAL_OFFSET, TOTAL_COMMON };

static void total(const Pass *p, const Layer *layer) {
  const int32_t *size = layer->size, *summed = layer->table + 2 * size[TOTAL_KEPT];
  const Vectors x = x_of(p, layer) + size[TOTAL_OFFSET], y = y_of(p, layer);
  SHARE(&p->team, i, size[TOTAL_OUTPUTS]) {
    const Vectors first = x + spot_of(layer->table, size[TOTAL_KEPT], 1, i).in[0];
    Vec sum = ZERO;
    for (int32_t j = 0; j < size[TOTAL_COUNT]; j++)
      sum += first[spot_of(summed, size[TOTAL_SUMMED], 1, j).in[0]];
    y[i] = sum * layer->number[0];
  }
}

static void total_back(const Pass *p, const Layer *layer) {
  const int32_t *size = layer->size, *summed = layer->table + 2 * size[TOTAL_KEPT];
  const Vectors dx = dx_of(p, layer) + size[TOTAL_OFFSET], dy = dy_of(p, layer);
  SHARE_UNLESS(&p->team, size[TOTAL_COMMON], i, size[TOTAL_OUTPUTS]) {
    const Vectors first = dx + spot_of(layer->table, size[TOTAL_KEPT], 1, i).in[0];
    const Vec d = dy[i] * layer->number[0];
    for (int32_t j = 0; j < size[TOTAL_COUNT]; j++)
      write_or_add(&first[spot_of(summed, size[TOTAL_SUMMED], 1, j).in[0]], d, layer->adds & 1);
  }
}
