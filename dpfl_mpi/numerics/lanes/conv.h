/* conv: a convolution with any kernel, stride, padding, dilation and groups, in one or two
 * dimensions; also a dense layer on each line of a text. net.h says what vectors and the arena are.
 *
 * A tap is one position of the kernel. The forward and the backward pass are both correlations:
 * each output of channel m is the sum over input channels n and taps of w[m, n, tap] times the
 * input that the tap reads there. Backward, the outputs' gradients are the inputs. With a stride s
 * the backward pass has one correlation for each remainder of a position divided by s. Padding lies
 * in the arena as zeros around each image. `table` has all correlations, forward first.
 *
 * weight [outputs, inputs / groups, taps], bias [outputs] or none. Scratch: a vector for each of
 * these. Private space of each member: a float for each weight of a group. */
enum { CONV_GROUPS, CONV_BACKS, CONV_OUT, CONV_IN, CONV_Y_STEP, CONV_X_STEP, CONV_PIECES };

/* The outputs y of a correlation, and the inputs x that each needs. All steps and offsets but
 * w_offsets are in vectors. */
typedef struct {
  int32_t rows, columns;             /* of y */
  int32_t start;                     /* where y starts */
  int32_t y_row_step, y_column_step; /* from one output to the next below it, and beside it */
  int32_t x_row_step, x_column_step; /* and between the inputs that they read */
  int32_t taps;
  const int32_t *x_offsets, *w_offsets; /* [taps] of each tap's input, and of its weight */
} Correlation;

/* Read the correlation where *table is, and move *table behind it. */
static Correlation correlation(const int32_t **table) {
  const int32_t *t = *table;
  const Correlation c = {t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t + 8, t + 8 + t[7]};
  *table += 8 + 2 * t[7];
  return c;
}

/* The filters of one group, between `inputs` and `outputs` channels. Steps lead from one channel to
 * the next: in y and x in vectors, in w in floats. */
typedef struct {
  int32_t outputs, inputs, y_step, x_step, w_output_step, w_input_step;
  int32_t weights; /* of a group */
} Filters;

/* Return the filters of the forward pass. */
static Filters filters_of(const Layer *layer, int32_t taps) {
  const int32_t groups = layer->size[CONV_GROUPS], inputs = layer->size[CONV_IN] / groups;
  const int32_t outputs = layer->size[CONV_OUT] / groups, w_step = inputs * taps;
  const Filters f = {outputs, inputs, layer->size[CONV_Y_STEP], layer->size[CONV_X_STEP],
                     w_step,  taps,   outputs * w_step};
  return f;
}

#ifdef GPU
/* Split an array [groups, outputs, rows, columns] into tiles of `high` outputs x `wide` columns,
 * with tiles of 1 at the edges, and run a statement, the last argument, for each tile that is this
 * member's. The caller names six variables for it: the tile's group and row; its first output m and
 * their number m_count; its first column and their number column_count. */
#define SHARE_GROUP_TILES(t, group, groups, m, m_count, high, outputs, row, rows, column, \
                          column_count, wide, columns, ...) \
  GROUP_TILES(t, group, groups, m, m_count, high, outputs, row, rows, column, column_count, wide, \
              0, (columns) / (wide), __VA_ARGS__) \
  GROUP_TILES(t, group, groups, m, m_count, high, outputs, row, rows, column, column_count, 1, \
              (columns) - (columns) % (wide), (columns) % (wide), __VA_ARGS__)
#define GROUP_TILES(t, group, groups, m, m_count, high, outputs, row, rows, column, column_count, \
                    wide, left, across, ...) \
  if ((across) > 0) \
    SHARE_TILES(t, m, m_count, high, outputs, line_, (groups) * (rows), tile_, across, { \
      enum { column_count = wide }; \
      const int group = line_ / (rows), row = line_ % (rows), column = (left) + tile_ * (wide); \
      __VA_ARGS__; \
    })
#else
/* A member's part of an array [groups, outputs, rows]: some blocks of outputs with all their rows,
 * or all blocks with some of the rows. Blocks are counted through all groups. */
typedef struct {
  int32_t group_blocks;       /* blocks of a group */
  int32_t first, end;         /* blocks of this member */
  int32_t first_row, end_row; /* rows of this member */
} Part;

/* Return a member's part, as equal as possible. At a tie blocks are shared, not rows, because the
 * rows of a block use the same weights. */
static Part part_of_groups(const Team *t, int32_t groups, int32_t group_blocks, int32_t rows) {
  const int64_t blocks = (int64_t)groups * group_blocks, members = t->members;
  const int64_t most_rows = (rows + members - 1) / members; /* of a member, if rows are shared */
  const int64_t most_blocks = (blocks + members - 1) / members;
  Part part = {group_blocks, 0, blocks, 0, rows};
  if (most_rows * blocks < most_blocks * rows) {
    part.first_row = part_of(t, rows, t->member), part.end_row = part_of(t, rows, t->member + 1);
  } else {
    part.first = part_of(t, blocks, t->member), part.end = part_of(t, blocks, t->member + 1);
  }
  return part;
}
/* Run a statement, the last argument, for each group in a member's part. The caller names three
 * variables for it: the group, and where the member's outputs in it start and end. A block has
 * `size` outputs, a group `outputs`. */
#define FOR_GROUPS(part, group, top, bottom, size, outputs, ...) \
  for (int32_t group = (part).first / (part).group_blocks; \
       group * (part).group_blocks < (part).end; group++) { \
    const int32_t before_ = group * (part).group_blocks; \
    const int32_t end_ = ((part).end - before_) * (size); \
    const int32_t top = (part).first > before_ ? ((part).first - before_) * (size) : 0; \
    const int32_t bottom = end_ < (outputs) ? end_ : (outputs); \
    __VA_ARGS__; \
  }
#endif

/* Compute y [count, columns], or add to it: `count` output channels at `columns` positions of a
 * row. On a CPU w is packed as [inputs, taps, count]; on a GPU it lies as in the parameters. */
INLINE void tile(const int count, const int columns, const int64_t x_column_step,
                 const Correlation *c, const Filters *f, Vectors x, const float *w, const float *b,
                 Vectors y, int adds) {
  Vec sum[8][8];
  UNROLL for (int i = 0; i < count; i++)
    UNROLL for (int j = 0; j < columns; j++)
      sum[i][j] = adds ? y[i * f->y_step + j * c->y_column_step] : b ? FILL(b[i]) : ZERO;
  const int32_t *first = c->x_offsets, *end = first + c->taps;
  for (int32_t n = 0; n < f->inputs; n++, x += f->x_step)
    for (const int32_t *tap = first; tap < end; tap++) {
      const Vectors inputs = x + *tap;
      Vec weight[8];
#ifdef GPU
      const float *weights = w + n * f->w_input_step + c->w_offsets[tap - first];
      UNROLL for (int i = 0; i < count; i++) weight[i] = weights[i * f->w_output_step];
#else
      UNROLL for (int i = 0; i < count; i++) weight[i] = FILL(w[i]);
      w += count;
#endif
      UNROLL for (int j = 0; j < columns; j++) {
        const Vec v = in_register(inputs[j * x_column_step], count);
        UNROLL for (int i = 0; i < count; i++) sum[i][j] = FMA(weight[i], v, sum[i][j]);
      }
    }
  UNROLL for (int i = 0; i < count; i++)
    UNROLL for (int j = 0; j < columns; j++) y[i * f->y_step + j * c->y_column_step] = sum[i][j];
}

/* Compute a correlation y of x, or add it to y, for all groups. */
#ifdef GPU
static void correlate_all(const Pass *p, int32_t groups, const Correlation *c, const Filters *f,
                          Vectors x, const float *w, const float *b, Vectors y, int adds) {
  SHARE_GROUP_TILES(&p->team, group, groups, m, m_count, ROWS, f->outputs, row, c->rows, column,
                    column_count, COLUMNS, c->columns, {
    const int channel = group * f->outputs + m;
    const int x_place = row * c->x_row_step + column * c->x_column_step;
    const int y_place = c->start + row * c->y_row_step + column * c->y_column_step;
    tile(m_count, column_count, c->x_column_step, c, f,
         x + ((int64_t)group * f->inputs * f->x_step + x_place),
         w + (int64_t)group * f->weights + m * f->w_output_step, b ? b + channel : NULL,
         y + ((int64_t)channel * f->y_step + y_place), adds);
  })
}
#else
/* Compute one row of `count` output channels. The step 1 is passed as a constant, for speed. */
INLINE void row_of_tiles(const int count, const Correlation *c, const Filters *f, Vec *x,
                         const float *packed, const float *b, Vec *y, int adds) {
  if (c->x_column_step == 1)
    FOR_BLOCKS(j, columns, count > 1 ? COLUMNS : 8, 0, c->columns,
               tile(count, columns, 1, c, f, x + j, packed, b, y + j * c->y_column_step, adds))
  else
    FOR_BLOCKS(j, columns, count > 1 ? COLUMNS : 8, 0, c->columns,
               tile(count, columns, c->x_column_step, c, f, x + j * c->x_column_step, packed, b,
                    y + j * c->y_column_step, adds))
}

/* Copy the weights of `count` output channels side by side, as [inputs, taps, count]. */
INLINE void pack(const int count, const Correlation *c, const Filters *f, const float *w,
                 float *packed) {
  for (int32_t n = 0; n < f->inputs; n++)
    for (int32_t t = 0; t < c->taps; t++)
      UNROLL for (int i = 0; i < count; i++)
        *packed++ = w[i * f->w_output_step + n * f->w_input_step + c->w_offsets[t]];
}

static void correlate_all(const Pass *p, int32_t groups, const Correlation *c, const Filters *f,
                          Vec *x, const float *w, const float *b, Vec *y, int adds) {
  const int32_t weights = f->inputs * c->taps; /* of an output channel */
  const Part part = part_of_groups(&p->team, groups, (f->outputs + ROWS - 1) / ROWS, c->rows);
  float *packed = (float *)p->private_space;
  FOR_GROUPS(part, group, top, bottom, ROWS, f->outputs, {
    const float *group_w = w + (int64_t)group * f->weights;
    const float *group_b = b ? b + group * f->outputs : NULL;
    Vec *group_x = x + (int64_t)group * f->inputs * f->x_step;
    Vec *group_y = y + (int64_t)group * f->outputs * f->y_step;
    FOR_BLOCKS(m, count, ROWS, top, bottom,
               pack(count, c, f, group_w + m * f->w_output_step, packed + (m - top) * weights))
    for (int32_t row = part.first_row; row < part.end_row; row++) {
      Vec *from = group_x + row * c->x_row_step, *to = group_y + c->start + row * c->y_row_step;
      FOR_BLOCKS(m, count, ROWS, top, bottom,
                 row_of_tiles(count, c, f, from, packed + (m - top) * weights,
                              group_b ? group_b + m : NULL, to + m * f->y_step, adds))
    }
  })
}
#endif

static void conv(const Pass *p, const Layer *layer) {
  const int32_t *table = layer->table;
  const Correlation c = correlation(&table);
  const Filters f = filters_of(layer, c.taps);
  const float *w = weight_of(p, layer), *b = bias_of(p, layer);
  correlate_all(p, layer->size[CONV_GROUPS], &c, &f, x_of(p, layer), w, b, y_of(p, layer), 0);
}

/* Add to sums [count, taps], lines of which are sums_step apart, the gradient of `taps` weights of
 * each of `count` output channels, over `rows` rows of outputs; x_offsets: where the inputs are. */
INLINE void weight_tile(const int count, const int taps, const int64_t x_step, const int64_t y_step,
                        const Correlation *c, const Filters *f, Vectors x, const int32_t *x_offsets,
                        Vectors dy, int32_t rows, Vec *sums, int sums_step) {
  Vec sum[8][9];
  UNROLL for (int i = 0; i < count; i++)
    UNROLL for (int j = 0; j < taps; j++) sum[i][j] = sums[i * sums_step + j];
  for (int32_t row = 0; row < rows; row++) {
    Vectors inputs[9], slopes[8];
    UNROLL for (int j = 0; j < taps; j++) inputs[j] = x + row * c->x_row_step + x_offsets[j];
    UNROLL for (int i = 0; i < count; i++) slopes[i] = dy + row * c->y_row_step + i * f->y_step;
    for (int64_t column = 0; column < c->columns; column++) {
      Vec d[8];
      UNROLL for (int i = 0; i < count; i++) d[i] = in_register(slopes[i][column * y_step], taps);
      UNROLL for (int j = 0; j < taps; j++) {
        const Vec v = in_register(inputs[j][column * x_step], count);
        UNROLL for (int i = 0; i < count; i++) sum[i][j] = FMA(d[i], v, sum[i][j]);
      }
    }
  }
  UNROLL for (int i = 0; i < count; i++)
    UNROLL for (int j = 0; j < taps; j++) sums[i * sums_step + j] = sum[i][j];
}

/* Add the gradient of the weights to g. */
#ifdef GPU
static void conv_weights(const Pass *p, const Layer *layer, const Correlation *c, const Filters *f,
                         Vectors x, Vectors dy, float *g) {
  const int32_t groups = layer->size[CONV_GROUPS], weights = f->inputs * c->taps;
  SHARE_GROUP_TILES(&p->team, group, groups, m, m_count, SLOPES, f->outputs, row, 1, weight,
                    weight_count, TAPS_AT_ONCE, weights, {
    const int channel = group * f->outputs + m;
    int32_t x_offsets[weight_count];
    Vec sum[m_count * weight_count];
    UNROLL for (int j = 0; j < weight_count; j++)
      x_offsets[j] = (weight + j) / c->taps * f->x_step + c->x_offsets[(weight + j) % c->taps];
    UNROLL for (int i = 0; i < m_count * weight_count; i++) sum[i] = ZERO;
    weight_tile(m_count, weight_count, c->x_column_step, c->y_column_step, c, f,
                x + (int64_t)group * f->inputs * f->x_step, x_offsets,
                dy + (int64_t)channel * f->y_step, c->rows, sum, weight_count);
    UNROLL for (int i = 0; i < m_count; i++)
      begin_image_sums(weight_count, p, g, scratch_of(p),
                       (int64_t)(channel + i) * weights + weight, sum + i * weight_count);
  })
}
#else
/* The gradients of the weights left ... right - 1 of `count` output channels, by weight_tile. */
INLINE void row_of_weight_tiles(const int count, const Correlation *c, const Filters *f, Vec *x,
                                const int32_t *x_offsets, Vec *dy, int32_t rows, Vec *sums,
                                int32_t sums_step, int32_t left, int32_t right) {
  const int wide = count > 1 ? TAPS_AT_ONCE : 9; /* a depthwise filter of 3 x 3 at once */
  if (c->x_column_step == 1 && c->y_column_step == 1)
    FOR_BLOCKS(j, taps, wide, left, right,
               weight_tile(count, taps, 1, 1, c, f, x, x_offsets + j, dy, rows, sums + j,
                           sums_step))
  else
    FOR_BLOCKS(j, taps, wide, left, right,
               weight_tile(count, taps, c->x_column_step, c->y_column_step, c, f, x, x_offsets + j,
                           dy, rows, sums + j, sums_step))
}

/* Rows of outputs are taken in pieces, so that what a piece reads stays in the first cache. */
static void conv_weights(const Pass *p, const Layer *layer, const Correlation *c, const Filters *f,
                         Vec *x, Vec *dy, float *g) {
  const int32_t weights = f->inputs * c->taps, piece = layer->size[CONV_PIECES];
  /* the "rows" that members share are blocks of weights of an output channel */
  const Part part =
      part_of_groups(&p->team, layer->size[CONV_GROUPS], (f->outputs + SLOPES - 1) / SLOPES,
                     (weights + TAPS_AT_ONCE - 1) / TAPS_AT_ONCE);
  const int32_t left = part.first_row * TAPS_AT_ONCE, end = part.end_row * TAPS_AT_ONCE;
  const int32_t right = end < weights ? end : weights, count_weights = right - left;
  int32_t *x_offsets = (int32_t *)p->private_space; /* of each weight's input */
  Vec *sums = NULL;                                 /* this member's, for one group at a time */
  for (int32_t n = 0; n < f->inputs; n++)
    for (int32_t t = 0; t < c->taps; t++)
      x_offsets[n * c->taps + t] = n * f->x_step + c->x_offsets[t];
  FOR_GROUPS(part, group, top, bottom, SLOPES, f->outputs, {
    Vec *group_x = x + (int64_t)group * f->inputs * f->x_step;
    Vec *group_dy = dy + (int64_t)group * f->outputs * f->y_step;
    float *group_g = g + (int64_t)group * f->weights;
    if (!sums) sums = scratch_of(p) + ((int64_t)group * f->outputs + top) * weights;
    for (int32_t m = top; m < bottom; m++)
      memset(sums + (int64_t)(m - top) * weights + left, 0, sizeof(Vec) * count_weights);
    for (int32_t row = 0; row < c->rows; row += piece) {
      const int32_t rows = c->rows - row < piece ? c->rows - row : piece;
      Vec *piece_x = group_x + row * c->x_row_step, *piece_dy = group_dy + row * c->y_row_step;
      FOR_BLOCKS(m, count, SLOPES, top, bottom,
                 row_of_weight_tiles(count, c, f, piece_x, x_offsets, piece_dy + m * f->y_step,
                                     rows, sums + (int64_t)(m - top) * weights, weights, left,
                                     right))
    }
    for (int32_t m = top; m < bottom; m++)
      add_lanes(group_g + m * weights + left, sums + (int64_t)(m - top) * weights + left,
                count_weights, p->n);
  })
}
#endif

/* Begin the gradients of `count` biases from number `first` on: sums of dy over all outputs. */
INLINE void begin_bias_sums(const int count, const Pass *p, const Correlation *c, Vectors dy,
                            int32_t y_step, float *g, Vectors sums, int32_t first) {
  Vec sum[8];
  UNROLL for (int i = 0; i < count; i++) sum[i] = ZERO;
  for (int32_t row = 0; row < c->rows; row++)
    for (int64_t column = 0; column < c->columns; column++)
      UNROLL for (int i = 0; i < count; i++)
        sum[i] += dy[(first + i) * y_step + row * c->y_row_step + column * c->y_column_step];
  begin_image_sums(count, p, g, sums, first, sum);
}

static void conv_back(const Pass *p, const Layer *layer) {
  const int32_t *table = layer->table, groups = layer->size[CONV_GROUPS];
  const Correlation c = correlation(&table);
  const Filters f = filters_of(layer, c.taps);
  const int32_t weights = groups * f.weights, outputs = groups * f.outputs;
  const Vectors dy = dy_of(p, layer), dx = dx_of(p, layer);
  const Vectors sums = scratch_of(p), bias_sums = sums + weights;
  float *g = p->gradient + layer->weight;
  float *g_bias = layer->bias < 0 ? NULL : p->gradient + layer->bias;
  conv_weights(p, layer, &c, &f, x_of(p, layer), dy, g);
  if (g_bias)
    SHARE_BLOCKS(&p->team, first, count, UNITS_BACK, outputs,
                 begin_bias_sums(count, p, &c, dy, f.y_step, g_bias, bias_sums, first))
  /* backward, inputs and outputs change places */
  const Filters back = {f.inputs,       f.outputs,       f.x_step, f.y_step,
                        f.w_input_step, f.w_output_step, f.weights};
  for (int32_t i = 0; i < layer->size[CONV_BACKS] && needs_gradient(p, layer->in); i++) {
    const Correlation one = correlation(&table);
    correlate_all(p, groups, &one, &back, dy, weight_of(p, layer), NULL, dx, layer->adds & 1);
  }
  finish_image_sums(p, g, sums, weights);
  if (g_bias) finish_image_sums(p, g_bias, bias_sums, outputs);
}
