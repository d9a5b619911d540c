/* Convolutions of any kernel, stride, padding, dilation and groups, in one or two dimensions; also
 * a dense layer of the lines of a text. (net.h says what vectors, lines and the arena are.)
 *
 * The forward and the backward pass are both correlations: output channel m at a position is the
 * sum over input channels n and taps of w[m, n, tap] x[n, position + tap]. Backward, the gradients
 * of the outputs are the inputs. Padding lies in the arena as zeros around each image. With a
 * stride s the backward pass has a correlation for each remainder of a position divided by s.
 * `table` has all correlations one after the other, forward first, each as `Correlation` reads it.
 *
 * weight [O, I / groups, taps], bias [O] or none. Scratch memory that the team shares: a vector for
 * each weight and output. Of each member alone: a float for each weight of a group.
 */
enum { CONV_GROUPS, CONV_BACKS, CONV_OUT, CONV_IN, CONV_Y_STEP, CONV_X_STEP, CONV_PIECES };

typedef struct {
  int32_t rows, columns;          /* of the outputs */
  int32_t start;                  /* of the outputs, in vectors */
  int32_t y_row, y_column;        /* vectors from one output to the next */
  int32_t x_row, x_column;        /* and of the inputs that belong to them */
  int32_t taps;
  const int32_t *x_tap, *w_tap; /* where a tap's input and weight are */
} Correlation;

static Correlation correlation(const int32_t **table) {
  const int32_t *t = *table;
  const Correlation c = {t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t + 8, t + 8 + t[7]};
  *table += 8 + 2 * t[7];
  return c;
}

/* Output and input channels of a group; the steps from one channel to the next in y, x and w; and
 * the weights of a group. */
typedef struct {
  int32_t m, n, y_m, x_n, w_m, w_n, weights;
} Steps;

/* Of one group, forward. */
static Steps steps_of(const Layer *layer, int32_t taps) {
  const int32_t groups = layer->size[CONV_GROUPS], inputs = layer->size[CONV_IN] / groups;
  const int32_t outputs = layer->size[CONV_OUT] / groups, each = inputs * taps;
  const Steps s = {outputs, inputs, layer->size[CONV_Y_STEP], layer->size[CONV_X_STEP],
                   each,    taps,   outputs * each};
  return s;
}

#ifdef GPU
/* Run `call` on tiles of `high` output channels and `wide` of n columns, then on what is left one
 * by one, of each line of each group. In it: `group`, `line_`; `count` channels from `at` on;
 * `some` columns from `from` on. */
#define TILES_OF(t, groups, high, m, lines, wide, n, ...) \
  PART(t, groups, high, 0, (m) / (high), lines, wide, 0, (n) / (wide), __VA_ARGS__) \
  PART(t, groups, high, 0, (m) / (high), lines, 1, (n) - (n) % (wide), (n) % (wide), __VA_ARGS__) \
  PART(t, groups, 1, (m) - (m) % (high), (m) % (high), lines, wide, 0, (n) / (wide), __VA_ARGS__) \
  PART(t, groups, 1, (m) - (m) % (high), (m) % (high), lines, 1, (n) - (n) % (wide), (n) % (wide), \
       __VA_ARGS__)
#define PART(t, groups, high, top, blocks, lines, wide, left, columns, ...) \
  if ((blocks) > 0 && (columns) > 0) { \
    enum { count = high, some = wide }; \
    PLACES(t, (groups) * (blocks), lines, columns, { \
      const int group = plane_ / (blocks), at = (top) + plane_ % (blocks) * count, \
                from = (left) + unit_ * some; \
      __VA_ARGS__; \
    }) \
  }
#else
/* A member's part of the outputs: some blocks of channels with all their rows, or all blocks with
 * some of the rows. Blocks are counted through all groups. */
typedef struct {
  int32_t blocks, first, end; /* blocks of a group; this member's */
  int32_t low, high;          /* rows */
} Part;

/* Return a member's part of the outputs, as equal as possible. At a tie blocks are shared out, not
 * rows, because the rows of a block use the same weights. */
static Part part_of_groups(const Team *t, int32_t groups, int32_t blocks, int32_t rows) {
  const int64_t all = (int64_t)groups * blocks, k = t->members;
  const Team alone = {0, 1, NULL};
  const int by_rows = (rows + k - 1) / k * all < (all + k - 1) / k * rows;
  const Team *of_blocks = by_rows ? &alone : t, *of_rows = by_rows ? t : &alone;
  const Part part = {blocks, part_of(of_blocks, all, of_blocks->member),
                     part_of(of_blocks, all, of_blocks->member + 1),
                     part_of(of_rows, rows, of_rows->member),
                     part_of(of_rows, rows, of_rows->member + 1)};
  return part;
}
/* Run `call` for each group in a member's part, with its output channels from `top` to `bottom`.
 * A block has `size` channels, a group m. */
#define GROUPS_OF(part, size, m, ...) \
  for (int32_t group = (part).first / (part).blocks; group * (part).blocks < (part).end; \
       group++) { \
    const int32_t before = group * (part).blocks; \
    const int32_t top = (part).first > before ? ((part).first - before) * (size) : 0; \
    const int32_t bottom = \
        ((part).end - before) * (size) < (m) ? ((part).end - before) * (size) : (m); \
    __VA_ARGS__; \
  }
#endif

/* Compute y [count, some]: `count` output channels at `some` columns, whose inputs are `step`
 * apart. On a CPU w is packed as [n, taps, count], on a GPU it lies where the weights are. */
INLINE void tile(const int count, const int some, const int64_t step, const Correlation *c,
                 const Steps *s, Vectors x, const float *w, const float *b, Vectors y, int adds) {
  F sum[8][8];
  UNROLL for (int i = 0; i < count; i++)
    UNROLL for (int j = 0; j < some; j++)
      sum[i][j] = adds ? y[i * s->y_m + j * c->y_column] : b ? FILL(b[i]) : ZERO;
  const int32_t *first = c->x_tap, *last = first + c->taps;
  for (int32_t n = 0; n < s->n; n++, x += s->x_n)
    for (const int32_t *tap = first; tap < last; tap++) {
      const Vectors from = x + *tap;
      F weight[8];
#ifdef GPU
      const float *of = w + n * s->w_n + c->w_tap[tap - first];
      UNROLL for (int i = 0; i < count; i++) weight[i] = of[i * s->w_m];
#else
      UNROLL for (int i = 0; i < count; i++) weight[i] = FILL(w[i]);
      w += count;
#endif
      UNROLL for (int j = 0; j < some; j++) {
        const F v = held(from[j * step], count);
        UNROLL for (int i = 0; i < count; i++) sum[i][j] = FMA(weight[i], v, sum[i][j]);
      }
    }
  UNROLL for (int i = 0; i < count; i++)
    UNROLL for (int j = 0; j < some; j++) y[i * s->y_m + j * c->y_column] = sum[i][j];
}

#ifdef GPU
static void correlate_all(const Pass *p, int32_t groups, const Correlation *c, const Steps *s,
                          Vectors x, const float *w, const float *b, Vectors y, int adds) {
  TILES_OF(&p->team, groups, ROWS, s->m, c->rows, COLUMNS, c->columns, {
    const int m = group * s->m + at;
    tile(count, some, c->x_column, c, s,
         x + ((int64_t)group * s->n * s->x_n + line_ * c->x_row + from * c->x_column),
         w + (int64_t)group * s->weights + at * s->w_m, b ? b + m : NULL,
         y + ((int64_t)m * s->y_m + c->start + line_ * c->y_row + from * c->y_column), adds);
  })
}
#else
/* One row of `count` m. */
INLINE void tiles(const int rows, const Correlation *c, const Steps *s, F *x, const float *packed,
                  const float *b, F *y, int adds) {
  if (c->x_column == 1)
    BLOCKS(rows > 1 ? COLUMNS : 8, c->columns,
           tile(rows, count, 1, c, s, x + at, packed, b, y + at * c->y_column, adds))
  else
    BLOCKS(rows > 1 ? COLUMNS : 8, c->columns,
           tile(rows, count, c->x_column, c, s, x + at * c->x_column, packed, b,
                y + at * c->y_column, adds))
}

/* Weights of `count` m side by side, [n, taps, count]. */
INLINE void pack(const int count, const Correlation *c, const Steps *s, const float *w,
                 float *packed) {
  for (int32_t n = 0; n < s->n; n++)
    for (int32_t t = 0; t < c->taps; t++)
      UNROLL for (int i = 0; i < count; i++) *packed++ = w[i * s->w_m + n * s->w_n + c->w_tap[t]];
}

static void correlate_all(const Pass *p, int32_t groups, const Correlation *c, const Steps *s, F *x,
                          const float *w, const float *b, F *y, int adds) {
  const int32_t each = s->n * c->taps;
  const Part part = part_of_groups(&p->team, groups, (s->m + ROWS - 1) / ROWS, c->rows);
  float *packed = (float *)p->own;
  GROUPS_OF(part, ROWS, s->m, {
    const float *of_w = w + (int64_t)group * s->weights, *of_b = b ? b + group * s->m : NULL;
    F *of_x = x + (int64_t)group * s->n * s->x_n, *of_y = y + (int64_t)group * s->m * s->y_m;
    BLOCKS_FROM(top, ROWS, bottom,
                pack(count, c, s, of_w + at * s->w_m, packed + (at - top) * each))
    for (int32_t row = part.low; row < part.high; row++) {
      F *from = of_x + row * c->x_row, *to = of_y + c->start + row * c->y_row;
      BLOCKS_FROM(top, ROWS, bottom,
                  tiles(count, c, s, from, packed + (at - top) * each, of_b ? of_b + at : NULL,
                        to + at * s->y_m, adds))
    }
  })
}
#endif

static void conv(const Pass *p, const Layer *layer) {
  const int32_t *table = layer->table;
  const Correlation c = correlation(&table);
  const Steps s = steps_of(layer, c.taps);
  correlate_all(p, layer->size[CONV_GROUPS], &c, &s, x_of(p, layer->in), p->row + layer->weight,
                layer->bias < 0 ? NULL : p->row + layer->bias, x_of(p, layer->out), 0);
}

/* The gradient of `count` x `some` weights over `rows` rows of places, added to `sums`: [count,
 * some], `apart` vectors apart. */
INLINE void places(const int count, const int some, const int64_t x_step, const int64_t d_step,
                   const Correlation *c, const Steps *s, Vectors x, const int32_t *from, Vectors d,
                   int32_t rows, F *sums, int apart) {
  F sum[8][9];
  UNROLL for (int i = 0; i < count; i++)
    UNROLL for (int j = 0; j < some; j++) sum[i][j] = sums[i * apart + j];
  for (int32_t row = 0; row < rows; row++) {
    Vectors inputs[9], slopes[8];
    UNROLL for (int j = 0; j < some; j++) inputs[j] = x + row * c->x_row + from[j];
    UNROLL for (int i = 0; i < count; i++) slopes[i] = d + row * c->y_row + i * s->y_m;
    for (int64_t column = 0; column < c->columns; column++) {
      F f[8];
      UNROLL for (int i = 0; i < count; i++) f[i] = held(slopes[i][column * d_step], some);
      UNROLL for (int j = 0; j < some; j++) {
        const F v = held(inputs[j][column * x_step], count);
        UNROLL for (int i = 0; i < count; i++) sum[i][j] = FMA(f[i], v, sum[i][j]);
      }
    }
  }
  UNROLL for (int i = 0; i < count; i++)
    UNROLL for (int j = 0; j < some; j++) sums[i * apart + j] = sum[i][j];
}

#ifdef GPU
/* The weights' gradient. */
static void conv_weights(const Pass *p, const Layer *layer, const Correlation *c, const Steps *s,
                         Vectors x, Vectors d, float *g) {
  const int32_t groups = layer->size[CONV_GROUPS], weights = s->n * c->taps;
  TILES_OF(&p->team, groups, SLOPES, s->m, 1, TAPS_AT_ONCE, weights, {
    const int m = group * s->m + at;
    int32_t inputs[some]; /* where each weight's input is */
    F sum[count * some];
    UNROLL for (int j = 0; j < some; j++)
      inputs[j] = (from + j) / c->taps * s->x_n + c->x_tap[(from + j) % c->taps];
    UNROLL for (int i = 0; i < count * some; i++) sum[i] = ZERO;
    places(count, some, c->x_column, c->y_column, c, s, x + (int64_t)group * s->n * s->x_n, inputs,
           d + (int64_t)m * s->y_m, c->rows, sum, some);
    UNROLL for (int i = 0; i < count; i++)
      leave(some, p, g, scratch_of(p), (int64_t)(m + i) * weights + from, sum + i * some);
  })
}
#else
INLINE void places_of(const int rows_of, const Correlation *c, const Steps *s, F *x,
                      const int32_t *from, F *d, int32_t rows, F *sums, int32_t weights,
                      int32_t left, int32_t right) {
  const int at_once = rows_of > 1 ? TAPS_AT_ONCE : 9; /* a depthwise filter of 3 x 3 in one */
  if (c->x_column == 1 && c->y_column == 1)
    BLOCKS_FROM(left, at_once, right,
                places(rows_of, count, 1, 1, c, s, x, from + at, d, rows, sums + at, weights))
  else
    BLOCKS_FROM(left, at_once, right,
                places(rows_of, count, c->x_column, c->y_column, c, s, x, from + at, d, rows,
                       sums + at, weights))
}

/* The weights' gradient, in pieces of so many rows that what a piece reads stays in the first
 * cache. */
static void conv_weights(const Pass *p, const Layer *layer, const Correlation *c, const Steps *s,
                         F *x, F *d, float *g) {
  const int32_t weights = s->n * c->taps, piece = layer->size[CONV_PIECES];
  const Part part = part_of_groups(&p->team, layer->size[CONV_GROUPS], (s->m + SLOPES - 1) / SLOPES,
                                   (weights + TAPS_AT_ONCE - 1) / TAPS_AT_ONCE);
  const int32_t left = part.low * TAPS_AT_ONCE, end = part.high * TAPS_AT_ONCE;
  const int32_t right = end < weights ? end : weights, some = right - left;
  int32_t *from = (int32_t *)p->own; /* where each weight's input is */
  F *sums = NULL;                    /* of one group after the other */
  for (int32_t n = 0; n < s->n; n++)
    for (int32_t t = 0; t < c->taps; t++) from[n * c->taps + t] = n * s->x_n + c->x_tap[t];
  GROUPS_OF(part, SLOPES, s->m, {
    F *of_x = x + (int64_t)group * s->n * s->x_n, *of_d = d + (int64_t)group * s->m * s->y_m;
    float *of_g = g + (int64_t)group * s->weights;
    if (!sums) sums = scratch_of(p) + ((int64_t)group * s->m + top) * weights;
    for (int32_t m = top; m < bottom; m++)
      memset(sums + (int64_t)(m - top) * weights + left, 0, sizeof(F) * some);
    for (int32_t row = 0; row < c->rows; row += piece) {
      const int32_t rows = c->rows - row < piece ? c->rows - row : piece;
      BLOCKS_FROM(top, SLOPES, bottom,
                  places_of(count, c, s, of_x + row * c->x_row, from,
                            of_d + row * c->y_row + at * s->y_m, rows,
                            sums + (int64_t)(at - top) * weights, weights, left, right))
    }
    if (some == weights) add_up_of(of_g + top * weights, sums, (bottom - top) * weights, p->n);
    else
      for (int32_t m = top; m < bottom; m++)
        add_up_of(of_g + m * weights + left, sums + (int64_t)(m - top) * weights + left, some,
                  p->n);
  })
}
#endif

/* The gradient of `count` biases from number `at` on. */
INLINE void totals(const int count, const Pass *p, const Correlation *c, Vectors d, int32_t apart,
                   float *g, Vectors sums, int32_t at) {
  F sum[8];
  UNROLL for (int i = 0; i < count; i++) sum[i] = ZERO;
  for (int32_t row = 0; row < c->rows; row++)
    for (int64_t column = 0; column < c->columns; column++)
      UNROLL for (int i = 0; i < count; i++)
        sum[i] += d[(at + i) * apart + row * c->y_row + column * c->y_column];
  leave(count, p, g, sums, at, sum);
}

static void conv_back(const Pass *p, const Layer *layer) {
  const int32_t *table = layer->table, groups = layer->size[CONV_GROUPS];
  const Correlation c = correlation(&table);
  const Steps s = steps_of(layer, c.taps);
  const Steps turned = {s.n, s.m, s.x_n, s.y_m, s.w_n, s.w_m, s.weights};
  const int32_t weights = groups * s.weights, outputs = groups * s.m;
  const Vectors d = d_of(p, layer->out), sums = scratch_of(p);
  float *g = p->g + layer->weight, *of_bias = layer->bias < 0 ? NULL : p->g + layer->bias;
  conv_weights(p, layer, &c, &s, x_of(p, layer->in), d, g);
  if (of_bias)
    OUTPUTS(&p->team, UNITS_BACK, outputs,
            totals(count, p, &c, d, s.y_m, of_bias, sums + weights, at))
  for (int32_t i = 0; i < layer->size[CONV_BACKS] && wanted(p, layer->in); i++) {
    const Correlation back = correlation(&table);
    correlate_all(p, groups, &back, &turned, d, p->row + layer->weight, NULL, d_of(p, layer->in),
                  layer->adds & 1);
  }
  collect(p, g, sums, weights);
  if (of_bias) collect(p, of_bias, sums + weights, outputs);
}
