/* Products of matrices that both depend on the sample, and softmax.
 *
 * y [batch, I, J] = a [batch, I, K] b [batch, K, J]. size: outer and inner batch, I, J, K, where a and b start; `table`:
 * steps of a (outer, inner, i, k), b (outer, inner, k, j) and y (outer, inner, i, j). Gradients are added to.
 */
enum { PRODUCT_OUTER, PRODUCT_INNER, PRODUCT_I, PRODUCT_J, PRODUCT_K, PRODUCT_A, PRODUCT_B };

/* y [count, some] (+)= the sum over k. */
INLINE void product_tile(const int count, const int some, int32_t k, const F *a, int32_t a_i, int32_t a_k, const F *b,
                         int32_t b_k, int32_t b_j, F *y, int32_t y_i, int32_t y_j, int adds) {
  F sum[8][8];
  UNROLL for (int i = 0; i < count; i++)
    UNROLL for (int j = 0; j < some; j++) sum[i][j] = adds ? y[i * y_i + j * y_j] : ZERO;
  for (int32_t at = 0; at < k; at++) {
    F u[8];
    UNROLL for (int i = 0; i < count; i++) u[i] = held(a[i * a_i + at * a_k], some);
    UNROLL for (int j = 0; j < some; j++) {
      const F v = held(b[at * b_k + j * b_j], count);
      UNROLL for (int i = 0; i < count; i++) sum[i][j] = FMA(u[i], v, sum[i][j]);
    }
  }
  UNROLL for (int i = 0; i < count; i++)
    UNROLL for (int j = 0; j < some; j++) y[i * y_i + j * y_j] = sum[i][j];
}

INLINE void product_rows(const int rows, int32_t j, int32_t k, const F *a, int32_t a_i, int32_t a_k, const F *b,
                         int32_t b_k, int32_t b_j, F *y, int32_t y_i, int32_t y_j, int adds) {
  BLOCKS(COLUMNS, j, product_tile(rows, count, k, a, a_i, a_k, b + at * b_j, b_k, b_j, y + at * y_j, y_i, y_j, adds))
}

static void product_of(int32_t i, int32_t j, int32_t k, const F *a, int32_t a_i, int32_t a_k, const F *b, int32_t b_k,
                       int32_t b_j, F *y, int32_t y_i, int32_t y_j, int adds) {
  BLOCKS(ROWS, i, product_rows(count, j, k, a + at * a_i, a_i, a_k, b, b_k, b_j, y + at * y_i, y_i, y_j, adds))
}

static void product(const Pass *p, const Layer *layer) {
  const int32_t *s = layer->size, *t = layer->table;
  const F *a = x_of(p, layer->in) + s[PRODUCT_A], *b = x_of(p, layer->other) + s[PRODUCT_B];
  F *y = x_of(p, layer->out);
  for (int32_t o = 0; o < s[PRODUCT_OUTER]; o++)
    for (int32_t n = 0; n < s[PRODUCT_INNER]; n++)
      product_of(s[PRODUCT_I], s[PRODUCT_J], s[PRODUCT_K], a + o * t[0] + n * t[1], t[2], t[3],
                 b + o * t[4] + n * t[5], t[6], t[7], y + o * t[8] + n * t[9], t[10], t[11], 0);
}

static void product_back(const Pass *p, const Layer *layer) {
  const int32_t *s = layer->size, *t = layer->table;
  const F *a = x_of(p, layer->in) + s[PRODUCT_A], *b = x_of(p, layer->other) + s[PRODUCT_B];
  const F *d = d_of(p, layer->out);
  F *da = d_of(p, layer->in) + s[PRODUCT_A], *db = d_of(p, layer->other) + s[PRODUCT_B];
  for (int32_t o = 0; o < s[PRODUCT_OUTER]; o++)
    for (int32_t n = 0; n < s[PRODUCT_INNER]; n++) {
      const F *slope = d + o * t[8] + n * t[9];
      if (wanted(p, layer->in))
        product_of(s[PRODUCT_I], s[PRODUCT_K], s[PRODUCT_J], slope, t[10], t[11], b + o * t[4] + n * t[5], t[7], t[6],
                   da + o * t[0] + n * t[1], t[2], t[3], 1);
      if (wanted(p, layer->other))
        product_of(s[PRODUCT_K], s[PRODUCT_J], s[PRODUCT_I], a + o * t[0] + n * t[1], t[3], t[2], slope, t[10], t[11],
                   db + o * t[4] + n * t[5], t[6], t[7], 1);
    }
}

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
  for (int32_t line = 0; line < in->lines; line++, y += out->line, dy += out->line, dx += in->line) {
    F sum = ZERO;
    for (int32_t i = 0; i < in->units; i++) sum = FMA(dy[i], y[i], sum);
    for (int32_t i = 0; i < in->units; i++) {
      const F d = y[i] * (dy[i] - sum);
      dx[i] = layer->adds & 1 ? dx[i] + d : d;
    }
  }
}
