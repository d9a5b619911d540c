/* dense: a fully connected layer of one vector x of inputs for each image: y = W x + b.
 *
 * weight W [outputs, inputs], bias b [outputs] or none. Scratch: a copy of x, transposed. apply and
 * apply_back also compute the gates of recurrent.h. */

/* Return whether rows of W start at multiples of 16 bytes, so a GPU can read 4 weights at once. */
INLINE int is_aligned(const Layer *layer, int32_t inputs) {
#ifdef GPU
  return layer->weight % 4 == 0 && inputs % 4 == 0;
#else
  return 0;
#endif
}

#ifdef GPU
/* The same as `apply` below, with weights read four at a time, and `ahead` such fours before they
 * are used, because a read takes hundreds of cycles. */
INLINE void apply_fours(const int count, const int ahead, int inputs, Vectors x, const float *w,
                        const float *b, Vectors y) {
  Vec even[4], odd[4];
  UNROLL for (int i = 0; i < count; i++) even[i] = b ? b[i] : ZERO, odd[i] = ZERO;
  for (int first = 0; first < inputs; first += 4 * ahead) {
    float weights[4][4][4];
    Vec v[4][4];
    UNROLL for (int k = 0; k < ahead; k++) {
      const int j = first + 4 * k;
      UNROLL for (int i = 0; i < count; i++) read_aligned(4, w + i * inputs + j, weights[k][i]);
      UNROLL for (int l = 0; l < 4; l++) v[k][l] = x[j + l];
    }
    UNROLL for (int k = 0; k < ahead; k++)
      UNROLL for (int i = 0; i < count; i++) {
        const float *four = weights[k][i];
        even[i] = FMA(four[0], v[k][0], even[i]), odd[i] = FMA(four[1], v[k][1], odd[i]);
        even[i] = FMA(four[2], v[k][2], even[i]), odd[i] = FMA(four[3], v[k][3], odd[i]);
      }
  }
  UNROLL for (int i = 0; i < count; i++) y[i] = even[i] + odd[i];
}
#endif

/* y [count] = W x + b. Even and odd inputs have sums of their own, which can be computed at the
 * same time. */
INLINE void apply(const int count, int32_t inputs, Vectors x, const float *w, const float *b,
                  Vectors y) {
  Vec even[8], odd[8];
  UNROLL for (int i = 0; i < count; i++) even[i] = b ? FILL(b[i]) : ZERO, odd[i] = ZERO;
  for (int32_t j = 0; j + 1 < inputs; j += 2)
    UNROLL for (int i = 0; i < count; i++) {
      even[i] = FMA(FILL(w[i * inputs + j]), x[j], even[i]);
      odd[i] = FMA(FILL(w[i * inputs + j + 1]), x[j + 1], odd[i]);
    }
  UNROLL for (int i = 0; i < count; i++) {
    if (inputs % 2) even[i] = FMA(FILL(w[i * inputs + inputs - 1]), x[inputs - 1], even[i]);
    y[i] = even[i] + odd[i];
  }
}

/* y = W x + b. Members share blocks of `count` outputs from number `first` on. */
INTERNAL void dense(const Pass *p, const Layer *layer) {
  const int32_t inputs = p->net->value[layer->in].units, outputs = p->net->value[layer->out].units;
  const float *w = weight_of(p, layer), *b = bias_of(p, layer);
  const Vectors x = x_of(p, layer), y = y_of(p, layer);
#ifdef GPU
#define FOURS(units) \
  SHARE_BLOCKS(&p->team, first, count, units, outputs, \
               apply_fours(count, divisor(4, inputs / 4), inputs, x, w + first * inputs, \
                           b ? b + first : NULL, y + first))
  /* the largest blocks of which all members get one */
  if (is_aligned(layer, inputs)) {
    if (outputs > 2 * MEMBERS) FOURS(4)
    else if (outputs > MEMBERS) FOURS(2)
    else FOURS(1)
    return;
  }
#endif
  SHARE_BLOCKS(&p->team, first, count, UNITS, outputs,
               apply(count, inputs, x, w + first * inputs, b ? b + first : NULL, y + first))
}

/* g [count, inputs] += dy x', image by image, for the columns of g in one vector: from `column` on
 * (GPU), or the first `columns` (CPU). xt [LANES, inputs] is x, transposed. */
#ifdef GPU
INLINE void outer(const int count, int inputs, int column, Vectors dy, const float *xt, float *g,
                  int n) {
  const int j = column + own_lane();
  if (j >= inputs) return;
  Vec sum[8];
  UNROLL for (int i = 0; i < count; i++) sum[i] = g[i * inputs + j];
  UNROLL for (int l = 0; l < LANES; l += 4) {
    Vec x[4];
    UNROLL for (int k = 0; k < 4; k++) x[k] = xt[(l + k) * inputs + j];
    UNROLL for (int i = 0; i < count; i++) {
      float four[4];
      read_aligned(4, floats_at(dy + i) + l, four);
      UNROLL for (int k = 0; k < 4; k++)
        if (l + k < n) sum[i] = FMA(four[k], x[k], sum[i]);
    }
  }
  UNROLL for (int i = 0; i < count; i++) g[i * inputs + j] = sum[i];
}
#else
INLINE void outer(const int count, const int columns, int32_t inputs, const Vec *dy,
                  const float *xt, float *g, int n) {
  Vec sum[8] = {0};
  UNROLL for (int i = 0; i < count; i++) memcpy(&sum[i], g + i * inputs, sizeof(float) * columns);
  for (int l = 0; l < n; l++) {
    const Vec x = load(xt + l * inputs);
    UNROLL for (int i = 0; i < count; i++) sum[i] = FMA(FILL(lane(dy + i, l)), x, sum[i]);
  }
  UNROLL for (int i = 0; i < count; i++) memcpy(g + i * inputs, &sum[i], sizeof(float) * columns);
}

/* The same for all columns: whole vectors, then the columns that are left. */
INLINE void outer_rows(const int count, int32_t inputs, const Vec *dy, const float *xt, float *g,
                       int n) {
  int32_t j = 0;
  for (; j + LANES <= inputs; j += LANES) outer(count, LANES, inputs, dy, xt + j, g + j, n);
  if (j < inputs) outer(count, inputs - j, inputs, dy, xt + j, g + j, n);
}
#endif

/* Add the gradient of the weights to g [outputs, inputs]. */
INTERNAL void dense_weights(const Pass *p, int32_t inputs, int32_t outputs, Vectors x, Vectors dy,
                            float *g) {
  float *xt = floats_at(scratch_of(p));
  SHARE(&p->team, j, inputs) FOR_LANES(l) xt[l * inputs + j] = LANE(x[j], l);
  barrier(&p->team);
#ifdef GPU
  SHARE_TILES(&p->team, first, count, 8, outputs, line, 1, block, (inputs + LANES - 1) / LANES,
              outer(count, inputs, block * LANES, dy + first, xt, g + first * inputs, p->n))
#else
  SHARE_BLOCKS(&p->team, first, count, 8, outputs,
               outer_rows(count, inputs, dy + first, xt, g + first * inputs, p->n))
#endif
}

/* dx [count] = W' dy, or dx + W' dy, for the columns of W from w on; `aligned` as is_aligned. */
INLINE void apply_back(const int count, const int aligned, int32_t inputs, int32_t outputs,
                       const float *w, Vectors dy, Vectors dx, int adds) {
  Vec sum[8];
  UNROLL for (int j = 0; j < count; j++) sum[j] = adds ? dx[j] : ZERO;
#ifdef GPU
  const int ahead = divisor(8, outputs); /* outputs that are read before they are used */
  for (int first = 0; first < outputs && aligned; first += ahead) {
    float weights[8][4];
    Vec d[8];
    UNROLL for (int k = 0; k < ahead; k++) {
      read_aligned(count, w + (first + k) * inputs, weights[k]);
      d[k] = dy[first + k];
    }
    UNROLL for (int k = 0; k < ahead; k++)
      UNROLL for (int j = 0; j < count; j++) sum[j] = FMA(weights[k][j], d[k], sum[j]);
  }
#endif
  for (int32_t o = 0; o < outputs && !aligned; o++)
    UNROLL for (int j = 0; j < count; j++) sum[j] = FMA(FILL(w[o * inputs + j]), dy[o], sum[j]);
  UNROLL for (int j = 0; j < count; j++) dx[j] = sum[j];
}

INTERNAL void dense_back(const Pass *p, const Layer *layer) {
  const int32_t inputs = p->net->value[layer->in].units, outputs = p->net->value[layer->out].units;
  const float *w = weight_of(p, layer);
  const Vectors x = x_of(p, layer), dx = dx_of(p, layer), dy = dy_of(p, layer);
  const int aligned = is_aligned(layer, inputs);
  dense_weights(p, inputs, outputs, x, dy, p->gradient + layer->weight);
  if (layer->bias >= 0) add_image_sums(p, p->gradient + layer->bias, dy, outputs);
  if (needs_gradient(p, layer->in))
    SHARE_BLOCKS(&p->team, first, count, UNITS_BACK, inputs,
                 apply_back(count, count % 4 == 0 && aligned, inputs, outputs, w + first, dy,
                            dx + first, layer->adds & 1))
}
