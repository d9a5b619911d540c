/* Sums and products of two values, or of a value and a parameter. */

/* Two inputs number by number. size: dimensions, what is done, where in each input to start;
 * `table`: numbers in each dimension, then the steps in the first and in the second input (0: one
 * number for all). */
enum { JOIN_DIMENSIONS, JOIN_WHAT, JOIN_FIRST, JOIN_SECOND };
/* CHOOSE: the first where the second is not 0, else number[0] */
enum { ADD, SUBTRACT, MULTIPLY, DIVIDE, CHOOSE };

static void join(const Pass *p, const Layer *layer) {
  const F *a = x_of(p, layer->in) + layer->size[JOIN_FIRST],
          *b = x_of(p, layer->other) + layer->size[JOIN_SECOND];
  const F otherwise = FILL(layer->number[0]);
  F *y = x_of(p, layer->out);
  const int32_t what = layer->size[JOIN_WHAT];
  WALK(p, layer, 2, const F u = a[o.place[0]], v = b[o.place[1]];
       y[at] = what == ADD        ? u + v
               : what == SUBTRACT ? u - v
               : what == MULTIPLY ? u * v
               : what == DIVIDE   ? u / v
                                  : PICK(ABOVE(v, ZERO), u, otherwise))
}

static void join_back(const Pass *p, const Layer *layer) {
  const int32_t *size = layer->size, what = size[JOIN_WHAT];
  const int32_t first = size[JOIN_FIRST], second = size[JOIN_SECOND];
  const F *a = x_of(p, layer->in) + first, *b = x_of(p, layer->other) + second;
  const F *dy = d_of(p, layer->out);
  F *da = d_of(p, layer->in) + first, *db = d_of(p, layer->other) + second;
  const int to_a = wanted(p, layer->in), to_b = wanted(p, layer->other);
  WALK(p, layer, 2, {
    const F d = dy[at], u = a[o.place[0]], v = b[o.place[1]];
    if (to_a)
      da[o.place[0]] += what == ADD || what == SUBTRACT ? d
                        : what == MULTIPLY              ? d * v
                        : what == DIVIDE                ? d / v
                                                        : PICK(ABOVE(v, ZERO), d, ZERO);
    if (to_b && what != CHOOSE)
      db[o.place[1]] += what == ADD        ? d
                        : what == SUBTRACT ? ZERO - d
                        : what == MULTIPLY ? d * u
                                           : ZERO - d * (u / v) / v;
  })
}

/* The sum of two values of the same planes, lines and units. The first one's gradient may be the
 * output's own. */
static void sum(const Pass *p, const Layer *layer) {
  const F *a = x_of(p, layer->in), *b = x_of(p, layer->other);
  const Value *second = &p->net->value[layer->other];
  F *y = x_of(p, layer->out);
  EACH(p, layer,
       const int64_t of = (int64_t)plane_ * second->plane + (int64_t)line_ * second->line + unit_;
       y[there] = a[here] + b[of])
}

static void sum_back(const Pass *p, const Layer *layer) {
  const F *dy = d_of(p, layer->out);
  F *da = d_of(p, layer->in), *db = d_of(p, layer->other);
  const Value *second = &p->net->value[layer->other];
  const int to_a = wanted(p, layer->in) && da != dy, to_b = wanted(p, layer->other);
  const int adds = layer->adds;
  EACH(p, layer,
       const int64_t of = (int64_t)plane_ * second->plane + (int64_t)line_ * second->line + unit_;
       const F d = dy[there]; if (to_a) put(&da[here], d, adds & 1);
       if (to_b) put(&db[of], d, adds & 2))
}

/* A parameter for each number of the input, added to it (size[0] is 0) or multiplied with it.
 * Scratch: as many vectors. size[1]: numbers that share one; size[2]: parameters. */
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
    sums[of] += times ? dy[i] * x[i] : dy[i];
    const F d = times ? dy[i] * FILL(p->row[layer->weight + of]) : dy[i];
    if (to_x) put(&dx[i], d, layer->adds & 1);
  }
  add_up(p, p->g + layer->weight, sums, all);
}

/* Sums over some dimensions of a value with any steps, times number[0]. size: dimensions that stay,
 * dimensions that are summed, numbers that are summed into one, where to start; `table`: of those
 * that stay the numbers in each, then the steps in the input; of the others too. */
enum { TOTAL_STAYS, TOTAL_GONE, TOTAL_COUNT, TOTAL_OFFSET };

static void total(const Pass *p, const Layer *layer) {
  const int32_t stays = layer->size[TOTAL_STAYS], gone = layer->size[TOTAL_GONE];
  const int32_t count = layer->size[TOTAL_COUNT];
  const F *x = x_of(p, layer->in) + layer->size[TOTAL_OFFSET];
  F *y = x_of(p, layer->out);
  WALK(p, layer, 1, {
    F sum = ZERO;
    Odometer in = {0};
    for (int32_t j = 0; j < count; j++, next(&in, layer->table + 2 * stays, gone, 1))
      sum += x[o.place[0] + in.place[0]];
    y[at] = sum * layer->number[0];
  })
}

static void total_back(const Pass *p, const Layer *layer) {
  const int32_t stays = layer->size[TOTAL_STAYS], gone = layer->size[TOTAL_GONE];
  const int32_t count = layer->size[TOTAL_COUNT];
  F *dx = d_of(p, layer->in) + layer->size[TOTAL_OFFSET];
  const F *dy = d_of(p, layer->out);
  WALK(p, layer, 1, {
    const F d = dy[at] * layer->number[0];
    Odometer in = {0};
    for (int32_t j = 0; j < count; j++, next(&in, layer->table + 2 * stays, gone, 1))
      put(&dx[o.place[0] + in.place[0]], d, layer->adds & 1);
  })
}
