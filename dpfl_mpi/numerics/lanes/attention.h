/* Products of two matrices that both depend on the sample, as in attention; and softmax.
 *
 * product: y [outer, inner, I, J] = a [outer, inner, I, K] b [outer, inner, K, J], of which outer
 * and inner are a batch: one product for each. size: as the enum says; A and B are where a and b
 * start. `table`: the steps in vectors from one number to the next along a's four dimensions, b's
 * and y's. The backward pass adds to the gradients. If PRODUCT_COMMON, several numbers of a or b
 * are the same vector, so that one member adds up their gradients. */
enum { PRODUCT_OUTER, PRODUCT_INNER, PRODUCT_I, PRODUCT_J, PRODUCT_K };
enum { PRODUCT_A = 5, PRODUCT_B, PRODUCT_COMMON };

/* A matrix of vectors. */
typedef struct {
  Vectors start;
  int32_t row_step, column_step;
} Matrix;

#define NUMBER_AT(m, i, j) (m).start[(i) * (m).row_step + (j) * (m).column_step]

INLINE Matrix matrix(Vectors start, int32_t row_step, int32_t column_step) {
  const Matrix m = {start, row_step, column_step};
  return m;
}
/* Return the part of a matrix from row i and column j on. */
INLINE Matrix part_from(Matrix m, int32_t i, int32_t j) {
  return matrix(m.start + (i * m.row_step + j * m.column_step), m.row_step, m.column_step);
}

/* y [count, columns] = a b, or y + a b: each number a sum of k products. */
INLINE void product_tile(const int count, const int columns, int32_t k, Matrix a, Matrix b,
                         Matrix y, int adds) {
  Vec sum[8][8];
  UNROLL for (int i = 0; i < count; i++)
    UNROLL for (int j = 0; j < columns; j++) sum[i][j] = adds ? NUMBER_AT(y, i, j) : ZERO;
  for (int32_t inner = 0; inner < k; inner++) {
    Vec u[8];
    UNROLL for (int i = 0; i < count; i++) u[i] = in_register(NUMBER_AT(a, i, inner), columns);
    UNROLL for (int j = 0; j < columns; j++) {
      const Vec v = in_register(NUMBER_AT(b, inner, j), count);
      UNROLL for (int i = 0; i < count; i++) sum[i][j] = FMA(u[i], v, sum[i][j]);
    }
  }
  UNROLL for (int i = 0; i < count; i++)
    UNROLL for (int j = 0; j < columns; j++) NUMBER_AT(y, i, j) = sum[i][j];
}

/* The same for any number of columns, a few at once. */
INLINE void product_rows(const int rows, int32_t columns, int32_t k, Matrix a, Matrix b, Matrix y,
                         int adds) {
  FOR_BLOCKS(first, count, COLUMNS, 0, columns,
             product_tile(rows, count, k, a, part_from(b, 0, first), part_from(y, 0, first), adds))
}

/* A batch of matrices: its first one, and the steps to the next one along both dimensions. */
typedef struct {
  Matrix first;
  int32_t outer_step, inner_step;
} Batch;

/* Return a batch, by the steps along its four dimensions. */
INLINE Batch batch(Vectors start, const int32_t *steps) {
  const Batch b = {matrix(start, steps[2], steps[3]), steps[0], steps[1]};
  return b;
}
INLINE Matrix matrix_of(Batch b, int32_t outer, int32_t inner) {
  return matrix(b.first.start + (outer * b.outer_step + inner * b.inner_step), b.first.row_step,
                b.first.column_step);
}
INLINE Batch transposed(Batch b) {
  const Batch out = {matrix(b.first.start, b.first.column_step, b.first.row_step), b.outer_step,
                     b.inner_step};
  return out;
}

/* y [outer, inner, i, j] = a b, or y + a b. Members share tiles of ROWS x COLUMNS numbers of y. */
static void products(const Pass *p, const Layer *layer, int32_t i, int32_t j, int32_t k, Batch a,
                     Batch b, Batch y, int adds) {
  const int32_t *size = layer->size;
  const int32_t down = (i + ROWS - 1) / ROWS, across = (j + COLUMNS - 1) / COLUMNS; /* tiles */
  const int32_t tiles = size[PRODUCT_OUTER] * size[PRODUCT_INNER] * down * across;
  SHARE_UNLESS(&p->team, adds && size[PRODUCT_COMMON], tile, tiles) {
    const int32_t product = tile / (down * across);
    const int32_t outer = product / size[PRODUCT_INNER], inner = product % size[PRODUCT_INNER];
    const int32_t row = tile / across % down * ROWS, column = tile % across * COLUMNS;
    const int32_t rows = i - row < ROWS ? i - row : ROWS;
    const int32_t columns = j - column < COLUMNS ? j - column : COLUMNS;
    const Matrix a_part = part_from(matrix_of(a, outer, inner), row, 0);
    const Matrix b_part = part_from(matrix_of(b, outer, inner), 0, column);
    const Matrix y_part = part_from(matrix_of(y, outer, inner), row, column);
    FOR_BLOCKS(first, count, ROWS, 0, rows,
               product_rows(count, columns, k, part_from(a_part, first, 0), b_part,
                            part_from(y_part, first, 0), adds))
  }
}

static void product(const Pass *p, const Layer *layer) {
  const int32_t *s = layer->size, *steps = layer->table;
  const Batch a = batch(x_of(p, layer) + s[PRODUCT_A], steps);
  const Batch b = batch(vectors_of(p, layer->other) + s[PRODUCT_B], steps + 4);
  const Batch y = batch(y_of(p, layer), steps + 8);
  products(p, layer, s[PRODUCT_I], s[PRODUCT_J], s[PRODUCT_K], a, b, y, 0);
}

/* da += dy b', db += a' dy. */
static void product_back(const Pass *p, const Layer *layer) {
  const int32_t *s = layer->size, *steps = layer->table;
  const int32_t i = s[PRODUCT_I], j = s[PRODUCT_J], k = s[PRODUCT_K];
  const Batch a = batch(x_of(p, layer) + s[PRODUCT_A], steps);
  const Batch b = batch(vectors_of(p, layer->other) + s[PRODUCT_B], steps + 4);
  const Batch da = batch(dx_of(p, layer) + s[PRODUCT_A], steps);
  const Batch db = batch(gradient_of(p, layer->other) + s[PRODUCT_B], steps + 4);
  const Batch dy = batch(dy_of(p, layer), steps + 8);
  if (needs_gradient(p, layer->in)) products(p, layer, i, k, j, dy, transposed(b), da, 1);
  if (needs_gradient(p, layer->other)) products(p, layer, k, j, i, transposed(a), dy, db, 1);
}

/* softmax: of each line, e^x over the sum of e^x, or if size[0] the logarithm of that. Members
 * share the lines. */
static void softmax(const Pass *p, const Layer *layer) {
  const Value *in = &p->net->value[layer->in], *out = &p->net->value[layer->out];
  SHARE(&p->team, line, in->lines) {
    const Vectors x = x_of(p, layer) + line * in->line_step;
    const Vectors y = y_of(p, layer) + line * out->line_step;
    Vec greatest = x[0], sum = ZERO;
    for (int32_t i = 1; i < in->units; i++)
      greatest = SELECT(ABOVE(x[i], greatest), x[i], greatest);
    if (layer->size[1]) { /* as in attention: of numbers that are all minus infinity it is 0 */
      const Mask none = ABOVE(FILL(-0x1.fffffep127f), greatest);
      greatest = SELECT(none, ZERO, greatest), sum = SELECT(none, FILL(1.f), ZERO);
    }
    for (int32_t i = 0; i < in->units; i++) sum += y[i] = exponential(x[i] - greatest);
    if (layer->size[0]) {
      const Vec log_sum = logarithm(sum);
      for (int32_t i = 0; i < in->units; i++) y[i] = (x[i] - greatest) - log_sum;
    } else {
      for (int32_t i = 0; i < in->units; i++) y[i] /= sum;
    }
  }
}

static void softmax_back(const Pass *p, const Layer *layer) {
  const Value *in = &p->net->value[layer->in], *out = &p->net->value[layer->out];
  const int adds = layer->adds & 1;
  SHARE(&p->team, line, in->lines) {
    const Vectors y = y_of(p, layer) + line * out->line_step;
    const Vectors dy = dy_of(p, layer) + line * out->line_step;
    const Vectors dx = dx_of(p, layer) + line * in->line_step;
    Vec sum = ZERO;
    if (layer->size[0]) {
      for (int32_t i = 0; i < in->units; i++) sum += dy[i];
      for (int32_t i = 0; i < in->units; i++)
        write_or_add(&dx[i], dy[i] - exponential(y[i]) * sum, adds);
    } else {
      for (int32_t i = 0; i < in->units; i++) sum = FMA(dy[i], y[i], sum);
      for (int32_t i = 0; i < in->units; i++) write_or_add(&dx[i], y[i] * (dy[i] - sum), adds);
    }
  }
}
