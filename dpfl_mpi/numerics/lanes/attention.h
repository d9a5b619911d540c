/* Products of matrices that both depend on the sample, and softmax.
 *
 * y [batch, I, J] = a [batch, I, K] b [batch, K, J]. size: outer and inner batch, I, J, K, where a
 * and b start; `table`: steps of a (outer, inner, i, k), b (outer, inner, k, j) and y (outer,
 * inner, i, j). Gradients are added to.
 */
enum { PRODUCT_OUTER, PRODUCT_INNER, PRODUCT_I, PRODUCT_J, PRODUCT_K, PRODUCT_A, PRODUCT_B };

/* A matrix of vectors: the vectors from one row, and from one column, to the next. */
typedef struct {
  F *at;
  int32_t row, column;
} Matrix;

INLINE Matrix from(Matrix m, int32_t i, int32_t j) {
  return (Matrix){m.at + i * m.row + j * m.column, m.row, m.column};
}

/* y [count, some] (+)= a b: a sum of k products each. */
INLINE void product_tile(const int count, const int some, int32_t k, Matrix a, Matrix b, Matrix y,
                         int adds) {
  F sum[8][8];
  UNROLL for (int i = 0; i < count; i++)
    UNROLL for (int j = 0; j < some; j++) sum[i][j] = adds ? *from(y, i, j).at : ZERO;
  for (int32_t at = 0; at < k; at++) {
    F u[8];
    UNROLL for (int i = 0; i < count; i++) u[i] = held(*from(a, i, at).at, some);
    UNROLL for (int j = 0; j < some; j++) {
      const F v = held(*from(b, at, j).at, count);
      UNROLL for (int i = 0; i < count; i++) sum[i][j] = FMA(u[i], v, sum[i][j]);
    }
  }
  UNROLL for (int i = 0; i < count; i++)
    UNROLL for (int j = 0; j < some; j++) *from(y, i, j).at = sum[i][j];
}

INLINE void product_rows(const int rows, int32_t j, int32_t k, Matrix a, Matrix b, Matrix y,
                         int adds) {
  BLOCKS(COLUMNS, j, product_tile(rows, count, k, a, from(b, 0, at), from(y, 0, at), adds))
}

/* y [I, J] (+)= a [I, K] b [K, J]. */
static void product_of(int32_t i, int32_t j, int32_t k, Matrix a, Matrix b, Matrix y, int adds) {
  BLOCKS(ROWS, i, product_rows(count, j, k, from(a, at, 0), b, from(y, at, 0), adds))
}

static Matrix turned(Matrix a) { return (Matrix){a.at, a.column, a.row}; }

/* Multiply each pair of matrices, or write the gradients of their product. */
static void products(const Pass *p, const Layer *layer, int back) {
  const int32_t *s = layer->size, *t = layer->table;
  const int32_t i = s[PRODUCT_I], j = s[PRODUCT_J], k = s[PRODUCT_K];
  F *y = back ? d_of(p, layer->out) : x_of(p, layer->out);
  for (int32_t o = 0; o < s[PRODUCT_OUTER]; o++)
    for (int32_t n = 0; n < s[PRODUCT_INNER]; n++) {
      const int64_t in_a = s[PRODUCT_A] + o * t[0] + n * t[1];
      const int64_t in_b = s[PRODUCT_B] + o * t[4] + n * t[5];
      const Matrix A = {x_of(p, layer->in) + in_a, t[2], t[3]};
      const Matrix dA = {d_of(p, layer->in) + in_a, t[2], t[3]};
      const Matrix B = {x_of(p, layer->other) + in_b, t[6], t[7]};
      const Matrix dB = {d_of(p, layer->other) + in_b, t[6], t[7]};
      const Matrix Y = {y + o * t[8] + n * t[9], t[10], t[11]};
      if (!back) product_of(i, j, k, A, B, Y, 0);
      if (back && wanted(p, layer->in)) product_of(i, k, j, Y, turned(B), dA, 1);
      if (back && wanted(p, layer->other)) product_of(k, j, i, turned(A), Y, dB, 1);
    }
}
static void product(const Pass *p, const Layer *layer) { products(p, layer, 0); }
static void product_back(const Pass *p, const Layer *layer) { products(p, layer, 1); }

/* Of each line, e^x over their sum. */
static void softmax(const Pass *p, const Layer *layer) {
  const Value *in = &p->net->value[layer->in], *out = &p->net->value[layer->out];
  const F *x = x_of(p, layer->in);
  F *y = x_of(p, layer->out);
  for (int32_t line = 0; line < in->lines; line++, x += in->line, y += out->line) {
    F most = x[0], sum = ZERO;
    for (int32_t i = 1; i < in->units; i++) most = PICK(ABOVE(x[i], most), x[i], most);
    for (int32_t i = 0; i < in->units; i++) sum += y[i] = exponential(x[i] - most);
    for (int32_t i = 0; i < in->units; i++) y[i] /= sum;
  }
}

static void softmax_back(const Pass *p, const Layer *layer) {
  const Value *in = &p->net->value[layer->in], *out = &p->net->value[layer->out];
  const F *y = x_of(p, layer->out), *dy = d_of(p, layer->out);
  F *dx = d_of(p, layer->in);
  for (int32_t line = 0; line < in->lines;
       line++, y += out->line, dy += out->line, dx += in->line) {
    F sum = ZERO;
    for (int32_t i = 0; i < in->units; i++) sum = FMA(dy[i], y[i], sum);
    for (int32_t i = 0; i < in->units; i++) put(&dx[i], y[i] * (dy[i] - sum), layer->adds & 1);
  }
}
