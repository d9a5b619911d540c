/* Products of matrices that both depend on the sample, and softmax.
 *
 * y [batch, I, J] = a [batch, I, K] b [batch, K, J]. size: outer and inner batch, I, J, K, where a
 * and b start, whether the gradients have numbers in common; `table`: steps of a (outer, inner, i,
 * k), b (outer, inner, k, j) and y (outer, inner, i, j). Gradients are added to.
 */
enum {
  PRODUCT_OUTER,
  PRODUCT_INNER,
  PRODUCT_I,
  PRODUCT_J,
  PRODUCT_K,
  PRODUCT_A,
  PRODUCT_B,
  PRODUCT_COMMON
};

/* A matrix of vectors: the vectors from one row, and from one column, to the next. */
typedef struct {
  Vectors at;
  int32_t row, column;
} Matrix;

#define NUMBER_AT(m, i, j) (m).at[(i) * (m).row + (j) * (m).column]

INLINE Matrix matrix(Vectors at, int32_t row, int32_t column) {
  const Matrix m = {at, row, column};
  return m;
}
INLINE Matrix from(Matrix m, int32_t i, int32_t j) {
  return matrix(m.at + (i * m.row + j * m.column), m.row, m.column);
}
INLINE Matrix transposed(Matrix m) { return matrix(m.at, m.column, m.row); }

/* y [count, some] (+)= a b: a sum of k products each. */
INLINE void product_tile(const int count, const int some, int32_t k, Matrix a, Matrix b, Matrix y,
                         int adds) {
  F sum[8][8];
  UNROLL for (int i = 0; i < count; i++)
    UNROLL for (int j = 0; j < some; j++) sum[i][j] = adds ? NUMBER_AT(y, i, j) : ZERO;
  for (int32_t at = 0; at < k; at++) {
    F u[8];
    UNROLL for (int i = 0; i < count; i++) u[i] = held(NUMBER_AT(a, i, at), some);
    UNROLL for (int j = 0; j < some; j++) {
      const F v = held(NUMBER_AT(b, at, j), count);
      UNROLL for (int i = 0; i < count; i++) sum[i][j] = FMA(u[i], v, sum[i][j]);
    }
  }
  UNROLL for (int i = 0; i < count; i++)
    UNROLL for (int j = 0; j < some; j++) NUMBER_AT(y, i, j) = sum[i][j];
}

INLINE void product_rows(const int rows, int32_t j, int32_t k, Matrix a, Matrix b, Matrix y,
                         int adds) {
  BLOCKS(COLUMNS, j, product_tile(rows, count, k, a, from(b, 0, at), from(y, 0, at), adds))
}

/* A pair of matrices in each of a batch: where the first one starts, and the steps to the next,
 * outer and inner. */
typedef struct {
  Matrix first;
  int32_t outer, inner;
} Batch;

INLINE Matrix one_of(Batch b, int32_t outer, int32_t inner) {
  return matrix(b.first.at + (outer * b.outer + inner * b.inner), b.first.row, b.first.column);
}
INLINE Batch batch(Vectors at, const int32_t *steps) {
  const Batch b = {matrix(at, steps[2], steps[3]), steps[0], steps[1]};
  return b;
}
INLINE Batch turned_all(Batch b) {
  const Batch turned = {transposed(b.first), b.outer, b.inner};
  return turned;
}

/* y [batch, I, J] (+)= a [batch, I, K] b [batch, K, J], shared out by tiles. */
static void products(const Pass *p, const Layer *layer, int32_t i, int32_t j, int32_t k, Batch a,
                     Batch b, Batch y, int adds) {
  const int32_t *size = layer->size, down = (i + ROWS - 1) / ROWS,
                right = (j + COLUMNS - 1) / COLUMNS;
  const int32_t all = size[PRODUCT_OUTER] * size[PRODUCT_INNER] * down * right;
  SHARE_UNLESS(&p->team, adds && size[PRODUCT_COMMON], tile, all) {
    const int32_t of = tile / (down * right), outer = of / size[PRODUCT_INNER];
    const int32_t inner = of % size[PRODUCT_INNER];
    const int32_t row = tile / right % down * ROWS, column = tile % right * COLUMNS;
    const int32_t rows = i - row < ROWS ? i - row : ROWS;
    const int32_t columns = j - column < COLUMNS ? j - column : COLUMNS;
    const Matrix A = from(one_of(a, outer, inner), row, 0),
                 B = from(one_of(b, outer, inner), 0, column);
    const Matrix Y = from(one_of(y, outer, inner), row, column);
    BLOCKS(ROWS, rows, product_rows(count, columns, k, from(A, at, 0), B, from(Y, at, 0), adds))
  }
}

static void product(const Pass *p, const Layer *layer) {
  const int32_t *s = layer->size, *t = layer->table;
  products(p, layer, s[PRODUCT_I], s[PRODUCT_J], s[PRODUCT_K],
           batch(x_of(p, layer->in) + s[PRODUCT_A], t),
           batch(x_of(p, layer->other) + s[PRODUCT_B], t + 4), batch(x_of(p, layer->out), t + 8),
           0);
}

static void product_back(const Pass *p, const Layer *layer) {
  const int32_t *s = layer->size, *t = layer->table;
  const int32_t i = s[PRODUCT_I], j = s[PRODUCT_J], k = s[PRODUCT_K];
  const Batch a = batch(x_of(p, layer->in) + s[PRODUCT_A], t);
  const Batch b = batch(x_of(p, layer->other) + s[PRODUCT_B], t + 4);
  const Batch dy = batch(d_of(p, layer->out), t + 8);
  if (wanted(p, layer->in))
    products(p, layer, i, k, j, dy, turned_all(b), batch(d_of(p, layer->in) + s[PRODUCT_A], t), 1);
  if (wanted(p, layer->other))
    products(p, layer, k, j, i, turned_all(a), dy,
             batch(d_of(p, layer->other) + s[PRODUCT_B], t + 4), 1);
}

/* Of each line, e^x over their sum, or (size[0]) the logarithm of that; lines are shared out. */
static void softmax(const Pass *p, const Layer *layer) {
  const Value *in = &p->net->value[layer->in], *out = &p->net->value[layer->out];
  SHARE(&p->team, line, in->lines) {
    const Vectors x = x_of(p, layer->in) + line * in->line,
                  y = x_of(p, layer->out) + line * out->line;
    F most = x[0], sum = ZERO;
    for (int32_t i = 1; i < in->units; i++) most = PICK(ABOVE(x[i], most), x[i], most);
    for (int32_t i = 0; i < in->units; i++) sum += y[i] = exponential(x[i] - most);
    if (layer->size[0]) {
      const F log_sum = logarithm(sum);
      for (int32_t i = 0; i < in->units; i++) y[i] = (x[i] - most) - log_sum;
    } else {
      for (int32_t i = 0; i < in->units; i++) y[i] /= sum;
    }
  }
}

static void softmax_back(const Pass *p, const Layer *layer) {
  const Value *in = &p->net->value[layer->in], *out = &p->net->value[layer->out];
  SHARE(&p->team, line, in->lines) {
    const Vectors y = x_of(p, layer->out) + line * out->line;
    const Vectors dy = d_of(p, layer->out) + line * out->line;
    const Vectors dx = d_of(p, layer->in) + line * in->line;
    F sum = ZERO;
    if (layer->size[0]) {
      for (int32_t i = 0; i < in->units; i++) sum += dy[i];
      for (int32_t i = 0; i < in->units; i++)
        put(&dx[i], dy[i] - exponential(y[i]) * sum, layer->adds & 1);
    } else {
      for (int32_t i = 0; i < in->units; i++) sum = FMA(dy[i], y[i], sum);
      for (int32_t i = 0; i < in->units; i++) put(&dx[i], y[i] * (dy[i] - sum), layer->adds & 1);
    }
  }
}
