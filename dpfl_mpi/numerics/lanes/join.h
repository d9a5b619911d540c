/* What is made of two values, or of parts: sums and products with any steps, parameters that are added, parts side by side. */

/* Two inputs number by number. size: what is done, dimensions, where in each input to start; `table`: numbers in each
 * dimension, then the steps in the output, in the first and in the second input (0: one number for all). */
enum { JOIN_WHAT, JOIN_DIMENSIONS, JOIN_FIRST, JOIN_SECOND };
enum { ADD, SUBTRACT, MULTIPLY, DIVIDE, CHOOSE }; /* the last: the first where the second is not 0, else number[0] */

/* Where in three values the same number is. */
typedef struct {
  int32_t at[MOST_DIMENSIONS];
  int64_t place[3];
} Three;

INLINE int next_three(Three *t, const int32_t *table, int32_t dimensions) {
  for (int32_t i = dimensions - 1; i >= 0; i--) {
    for (int v = 0; v < 3; v++) t->place[v] += table[(v + 1) * dimensions + i];
    if (++t->at[i] < table[i]) return 1;
    for (int v = 0; v < 3; v++) t->place[v] -= (int64_t)table[(v + 1) * dimensions + i] * table[i];
    t->at[i] = 0;
  }
  return 0;
}

static void join(const Pass *p, const Layer *layer) {
  const F *a = x_of(p, layer->in) + layer->size[JOIN_FIRST], *b = x_of(p, layer->other) + layer->size[JOIN_SECOND];
  const F otherwise = FILL(layer->number[0]);
  F *y = x_of(p, layer->out);
  const int32_t what = layer->size[JOIN_WHAT], dimensions = layer->size[JOIN_DIMENSIONS];
  Three t = {{0}, {0}};
  do {
    const F u = a[t.place[1]], v = b[t.place[2]];
    y[t.place[0]] = what == ADD        ? u + v
                    : what == SUBTRACT ? u - v
                    : what == MULTIPLY ? u * v
                    : what == DIVIDE   ? u / v
                                       : PICK(ABOVE(v, ZERO), u, otherwise);
  } while (next_three(&t, layer->table, dimensions));
}

static void join_back(const Pass *p, const Layer *layer) {
  const int32_t first = layer->size[JOIN_FIRST], second = layer->size[JOIN_SECOND];
  const F *a = x_of(p, layer->in) + first, *b = x_of(p, layer->other) + second;
  const F *dy = d_of(p, layer->out);
  F *da = d_of(p, layer->in) + first, *db = d_of(p, layer->other) + second;
  const int32_t what = layer->size[JOIN_WHAT], dimensions = layer->size[JOIN_DIMENSIONS];
  const int to_a = wanted(p, layer->in), to_b = wanted(p, layer->other);
  Three t = {{0}, {0}};
  do {
    const F d = dy[t.place[0]], u = a[t.place[1]], v = b[t.place[2]];
    if (to_a)
      da[t.place[1]] += what == ADD || what == SUBTRACT ? d
                        : what == MULTIPLY              ? d * v
                        : what == DIVIDE                ? d / v
                                                        : PICK(ABOVE(v, ZERO), d, ZERO);
    if (to_b && what != CHOOSE)
      db[t.place[2]] += what == ADD        ? d
                        : what == SUBTRACT ? ZERO - d
                        : what == MULTIPLY ? d * u
                                           : ZERO - d * (u / v) / v;
  } while (next_three(&t, layer->table, dimensions));
}

/* The sum of two values of the same planes, lines and units. The first one's gradient may be the output's own. */
static void sum(const Pass *p, const Layer *layer) {
  const F *a = x_of(p, layer->in), *b = x_of(p, layer->other);
  const Value *second = &p->net->value[layer->other];
  F *y = x_of(p, layer->out);
  EACH(p, layer, const int64_t of = (int64_t)plane_ * second->plane + (int64_t)line_ * second->line + i_;
       y[there] = a[here] + b[of])
}

static void sum_back(const Pass *p, const Layer *layer) {
  const F *dy = d_of(p, layer->out);
  F *da = d_of(p, layer->in), *db = d_of(p, layer->other);
  const Value *second = &p->net->value[layer->other];
  const int to_a = wanted(p, layer->in) && da != dy, to_b = wanted(p, layer->other), adds = layer->adds;
  EACH(p, layer, const int64_t of = (int64_t)plane_ * second->plane + (int64_t)line_ * second->line + i_;
       const F d = dy[there];
       if (to_a) da[here] = adds & 1 ? da[here] + d : d;
       if (to_b) db[of] = adds & 2 ? db[of] + d : d)
}

/* A parameter for each number of the input, added to it (size[0] is 0) or multiplied with it. Scratch: as many vectors.
 * size[1]: numbers that share one; size[2]: parameters. */
static void plus(const Pass *p, const Layer *layer) {
  const F *x = x_of(p, layer->in);
  F *y = x_of(p, layer->out);
  const int32_t times = layer->size[0], share = layer->size[1], all = layer->size[2];
  for (int64_t i = 0, units = p->net->value[layer->in].units; i < units; i++) {
    const F w = FILL(p->row[layer->weight + i / share % all]);
    y[i] = times ? x[i] * w : x[i] + w;
  }
}

static void plus_back(const Pass *p, const Layer *layer) {
  const F *x = x_of(p, layer->in), *dy = d_of(p, layer->out);
  F *dx = d_of(p, layer->in), *sums = scratch_of(p);
  const int32_t times = layer->size[0], share = layer->size[1], all = layer->size[2];
  const int to_x = wanted(p, layer->in);
  memset(sums, 0, sizeof(F) * all);
  for (int64_t i = 0, units = p->net->value[layer->in].units; i < units; i++) {
    const int64_t of = i / share % all;
    const F d = times ? dy[i] * FILL(p->row[layer->weight + of]) : dy[i];
    sums[of] += times ? dy[i] * x[i] : dy[i];
    if (to_x) dx[i] = layer->adds & 1 ? dx[i] + d : d;
  }
  add_up(p->g + layer->weight, sums, all, p->n);
}

/* A part of the output. size: its first plane and unit there. */
static void put(const Pass *p, const Layer *layer) {
  const F *x = x_of(p, layer->in);
  const Value *out = &p->net->value[layer->out];
  F *y = x_of(p, layer->out) + (int64_t)layer->size[0] * out->plane + layer->size[1];
  EACH(p, layer, y[there] = x[here])
}

static void put_back(const Pass *p, const Layer *layer) {
  F *dx = d_of(p, layer->in);
  const Value *out = &p->net->value[layer->out];
  const F *dy = d_of(p, layer->out) + (int64_t)layer->size[0] * out->plane + layer->size[1];
  EACH(p, layer, dx[here] = layer->adds & 1 ? dx[here] + dy[there] : dy[there])
}

/* The walks of a `total` over the dimensions that stay and, for each, over those that are summed; return the numbers that
 * are summed into one. */
static int64_t split(const Layer *layer, Layer *outer, Layer *inner) {
  int64_t count = 1;
  *outer = *inner = *layer; /* the first dimensions, of which size and table speak, are those that stay */
  inner->table += 2 * layer->size[0], inner->size[MOVE_DIMENSIONS] = layer->size[1];
  for (int32_t i = 0; i < layer->size[1]; i++) count *= inner->table[i];
  return count;
}

/* Sums over some dimensions of a value with any steps, times number[0]. size: dimensions that stay, dimensions that are
 * summed, where to start; `table`: of those that stay the numbers in each, then the steps in the input; of the others too. */
static void total(const Pass *p, const Layer *layer) {
  const F *x = x_of(p, layer->in) + layer->size[2];
  F *y = x_of(p, layer->out);
  Layer outer, inner;
  const int64_t count = split(layer, &outer, &inner), of = p->net->value[layer->out].units;
  Odometer o = {0};
  for (int64_t i = 0; i < of; i++, next(&o, &outer)) {
    F sum = ZERO;
    Odometer in = {0};
    for (int64_t j = 0; j < count; j++, next(&in, &inner)) sum += x[o.place + in.place];
    y[i] = sum * layer->number[0];
  }
}

static void total_back(const Pass *p, const Layer *layer) {
  F *dx = d_of(p, layer->in) + layer->size[2];
  const F *dy = d_of(p, layer->out);
  Layer outer, inner;
  const int64_t count = split(layer, &outer, &inner), of = p->net->value[layer->out].units;
  Odometer o = {0};
  for (int64_t i = 0; i < of; i++, next(&o, &outer)) {
    const F d = dy[i] * layer->number[0];
    Odometer in = {0};
    for (int64_t j = 0; j < count; j++, next(&in, &inner)) {
      F *to = &dx[o.place + in.place];
      *to = layer->adds & 1 ? *to + d : d;
    }
  }
}
