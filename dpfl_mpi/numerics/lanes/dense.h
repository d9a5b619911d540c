/* A dense layer of one vector per image: y = W x + b.
 *
 * weight [O, I], bias [O] or none. Scratch: I + 1 vectors.
 */

/* y [count] = W x + b, the inputs in two sums. */
INLINE void apply(const int count, int32_t inputs, const F *x, const float *w, const float *b,
                  F *y) {
  F even[8], odd[8];
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

static void dense(const Pass *p, const Layer *layer) {
  const int32_t inputs = p->net->value[layer->in].units, outputs = p->net->value[layer->out].units;
  const float *w = p->row + layer->weight, *b = layer->bias < 0 ? NULL : p->row + layer->bias;
  const F *x = x_of(p, layer->in);
  F *y = x_of(p, layer->out);
  BLOCKS(UNITS, outputs, apply(count, inputs, x, w + at * inputs, b ? b + at : NULL, y + at))
}

/* g [count, I] += slope x', image by image, for `some` columns of I; turned is x', [LANES, I]. */
INLINE void outer(const int count, const int some, int32_t inputs, const F *slope,
                  const float *turned, float *g, int n) {
  F sum[8] = {0};
  UNROLL for (int i = 0; i < count; i++) memcpy(&sum[i], g + i * inputs, sizeof(float) * some);
  for (int l = 0; l < n; l++) {
    const F x = load(turned + l * inputs);
    UNROLL for (int i = 0; i < count; i++) sum[i] = FMA(FILL(lane(slope + i, l)), x, sum[i]);
  }
  UNROLL for (int i = 0; i < count; i++) memcpy(g + i * inputs, &sum[i], sizeof(float) * some);
}

/* The same for all columns: whole vectors, and the columns that are left. */
INLINE void outer_rows(const int count, int32_t inputs, const F *slope, const float *turned,
                       float *g, int n) {
  int32_t j = 0;
  for (; j + LANES <= inputs; j += LANES) outer(count, LANES, inputs, slope, turned + j, g + j, n);
  if (j < inputs) outer(count, inputs - j, inputs, slope, turned + j, g + j, n);
}

/* d [count] = W' slope, or d + W' slope. */
INLINE void apply_back(const int count, int32_t inputs, int32_t outputs, const float *w,
                       const F *slope, F *d, int adds) {
  F sum[8];
  UNROLL for (int j = 0; j < count; j++) sum[j] = adds ? d[j] : ZERO;
  for (int32_t o = 0; o < outputs; o++)
    UNROLL for (int j = 0; j < count; j++) sum[j] = FMA(FILL(w[o * inputs + j]), slope[o], sum[j]);
  UNROLL for (int j = 0; j < count; j++) d[j] = sum[j];
}

static void dense_back(const Pass *p, const Layer *layer) {
  const int32_t inputs = p->net->value[layer->in].units, outputs = p->net->value[layer->out].units;
  const float *w = p->row + layer->weight;
  const F *x = x_of(p, layer->in), *slope = d_of(p, layer->out);
  F *d = d_of(p, layer->in);
  float *turned = (float *)scratch_of(p), *g = p->g + layer->weight;
  for (int32_t j = 0; j < inputs; j++)
    for (int l = 0; l < LANES; l++) turned[l * inputs + j] = lane(x + j, l);
  BLOCKS(8, outputs, outer_rows(count, inputs, slope + at, turned, g + at * inputs, p->n))
  if (layer->bias >= 0) add_up(p->g + layer->bias, slope, outputs, p->n);
  if (wanted(p, layer->in))
    BLOCKS(8, inputs, apply_back(count, inputs, outputs, w + at, slope, d + at, layer->adds & 1))
}
