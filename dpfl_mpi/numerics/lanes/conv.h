/* Convolutions of any kernel, stride, padding, dilation and groups, in one or two dimensions; a
 * dense layer of many lines.
 *
 * Forward and the way back are both correlations: y[m] = sum over n and taps of w[m,n,tap]
 * x[n,place+tap]. What lies outside of an image is zeros around it in the arena. The way back has
 * one correlation for each remainder of a place by the stride. `table` has the correlations one
 * after the other, forward first, each as `Correlation` reads it.
 *
 * weight [O, I / groups, taps], bias [O] or none.
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
  *table += 8 + 2 * t[7];
  return (Correlation){t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t + 8, t + 8 + t[7]};
}

/* From one of the sums' m, and of the inputs' n, to the next. */
typedef struct {
  int32_t m, n, y_m, x_n, w_m, w_n;
} Steps;

/* y [count, some]: outputs of `count` m at `some` columns, whose inputs are `step` apart; `packed`
 * is [n, taps, count]. */
INLINE void tile(const int count, const int some, const int64_t step, const Correlation *c,
                 const Steps *s, const F *x, const float *packed, const float *b, F *y, int adds) {
  F sum[8][8];
  UNROLL for (int i = 0; i < count; i++)
    UNROLL for (int j = 0; j < some; j++)
      sum[i][j] = adds ? y[i * s->y_m + j * c->y_column] : b ? FILL(b[i]) : ZERO;
  const int32_t *first = c->x_tap, *last = first + c->taps;
  for (int32_t n = 0; n < s->n; n++, x += s->x_n)
    for (const int32_t *tap = first; tap < last; tap++, packed += count) {
      const F *from = x + *tap;
      F weight[8];
      UNROLL for (int i = 0; i < count; i++) weight[i] = FILL(packed[i]);
      UNROLL for (int j = 0; j < some; j++) {
        const F v = held(from[j * step], count);
        UNROLL for (int i = 0; i < count; i++) sum[i][j] = FMA(weight[i], v, sum[i][j]);
      }
    }
  UNROLL for (int i = 0; i < count; i++)
    UNROLL for (int j = 0; j < some; j++) y[i * s->y_m + j * c->y_column] = sum[i][j];
}

/* One row of `count` m. */
INLINE void tiles(const int rows, const Correlation *c, const Steps *s, const F *x,
                  const float *packed, const float *b, F *y, int adds) {
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

/* Scratch: a float for each weight. */
static void correlate_all(const Correlation *c, const Steps *s, const F *x, const float *w,
                          const float *b, F *y, int adds, float *packed) {
  const int32_t each = s->n * c->taps;
  BLOCKS(ROWS, s->m, pack(count, c, s, w + at * s->w_m, packed + at * each))
  for (int32_t row = 0; row < c->rows; row++) {
    const F *from = x + row * c->x_row;
    F *to = y + c->start + row * c->y_row;
    BLOCKS(ROWS, s->m,
           tiles(count, c, s, from, packed + at * each, b ? b + at : NULL, to + at * s->y_m, adds))
  }
}

/* Of one group, forward. */
static Steps steps_of(const Layer *layer, int32_t taps) {
  const int32_t *size = layer->size, inputs = size[CONV_IN] / size[CONV_GROUPS];
  return (Steps){size[CONV_OUT] / size[CONV_GROUPS], inputs, size[CONV_Y_STEP], size[CONV_X_STEP],
                 inputs * taps, taps};
}

static void conv(const Pass *p, const Layer *layer) {
  const int32_t *table = layer->table;
  const Correlation c = correlation(&table);
  const Steps s = steps_of(layer, c.taps);
  const F *x = x_of(p, layer->in);
  F *y = x_of(p, layer->out);
  for (int32_t g = 0; g < layer->size[CONV_GROUPS]; g++)
    correlate_all(&c, &s, x + (int64_t)g * s.n * s.x_n,
                  p->row + layer->weight + (int64_t)g * s.m * s.w_m,
                  layer->bias < 0 ? NULL : p->row + layer->bias + g * s.m,
                  y + (int64_t)g * s.m * s.y_m, 0, (float *)scratch_of(p));
}

/* The gradient of `count` x `some` weights over `rows` rows of places, added to `sums`: [count,
 * some], `apart` vectors apart. */
INLINE void places(const int count, const int some, const int64_t x_step, const int64_t d_step,
                   const Correlation *c, const Steps *s, const F *x, const int32_t *from,
                   const F *d, int32_t rows, F *sums, int apart) {
  F sum[8][9];
  UNROLL for (int i = 0; i < count; i++)
    UNROLL for (int j = 0; j < some; j++) sum[i][j] = sums[i * apart + j];
  for (int32_t row = 0; row < rows; row++) {
    const F *inputs[9], *slopes[8];
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

INLINE void places_of(const int rows_of, const Correlation *c, const Steps *s, const F *x,
                      const int32_t *from, const F *d, int32_t rows, F *sums, int32_t weights) {
  const int at_once = rows_of > 1 ? TAPS_AT_ONCE : 9; /* a depthwise filter of 3 x 3 in one */
  if (c->x_column == 1 && c->y_column == 1)
    BLOCKS(at_once, weights,
           places(rows_of, count, 1, 1, c, s, x, from + at, d, rows, sums + at, weights))
  else
    BLOCKS(at_once, weights,
           places(rows_of, count, c->x_column, c->y_column, c, s, x, from + at, d, rows, sums + at,
                  weights))
}

/* Weights' gradient of one group, in pieces of so many rows that what a piece reads stays in the
 * first cache. */
static void conv_weights(const Pass *p, const Layer *layer, const Correlation *c, const Steps *s,
                         const F *x, const F *d, float *g) {
  const int32_t weights = s->n * c->taps, piece = layer->size[CONV_PIECES];
  F *sums = scratch_of(p);
  int32_t *from = (int32_t *)(sums + (int64_t)s->m * weights); /* where each weight's input is */
  memset(sums, 0, sizeof(F) * s->m * weights);
  for (int32_t n = 0; n < s->n; n++)
    for (int32_t t = 0; t < c->taps; t++) from[n * c->taps + t] = n * s->x_n + c->x_tap[t];
  for (int32_t row = 0; row < c->rows; row += piece) {
    const int32_t rows = c->rows - row < piece ? c->rows - row : piece;
    BLOCKS(SLOPES, s->m,
           places_of(count, c, s, x + row * c->x_row, from, d + row * c->y_row + at * s->y_m, rows,
                     sums + (int64_t)at * weights, weights))
  }
  add_up(p, g, sums, s->m * weights);
}

/* The gradient of `count` biases. */
INLINE void totals(const int count, const Correlation *c, const F *d, int32_t apart, float *g,
                   int n) {
  F sum[8] = {0};
  for (int32_t row = 0; row < c->rows; row++)
    for (int64_t column = 0; column < c->columns; column++)
      UNROLL for (int i = 0; i < count; i++)
        sum[i] += d[i * apart + row * c->y_row + column * c->y_column];
  add_up_of(g, sum, count, n);
}

static void conv_back(const Pass *p, const Layer *layer) {
  const int32_t *table = layer->table;
  const Correlation c = correlation(&table);
  const Steps s = steps_of(layer, c.taps);
  const Steps turned = {s.n, s.m, s.x_n, s.y_m, s.w_n, s.w_m};
  for (int32_t g = 0; g < layer->size[CONV_GROUPS]; g++) {
    const int64_t of_w = layer->weight + (int64_t)g * s.m * s.w_m;
    const int64_t of_x = (int64_t)g * s.n * s.x_n;
    const F *x = x_of(p, layer->in) + of_x, *d = d_of(p, layer->out) + (int64_t)g * s.m * s.y_m;
    conv_weights(p, layer, &c, &s, x, d, p->g + of_w);
    if (layer->bias >= 0)
      BLOCKS(8, s.m,
             totals(count, &c, d + at * s.y_m, s.y_m, p->g + layer->bias + g * s.m + at, p->n))
    const int32_t *next = table;
    for (int32_t i = 0; i < layer->size[CONV_BACKS] && wanted(p, layer->in); i++) {
      const Correlation back = correlation(&next);
      correlate_all(&back, &turned, d, p->row + of_w, NULL, d_of(p, layer->in) + of_x,
                    layer->adds & 1, (float *)scratch_of(p));
    }
  }
}
