/* A dense layer of one vector per image: y = W x + b.
 *
 * weight [O, I], bias [O] or none. Scratch: I + 1 vectors.
 */

/* y [count] = W x + b, the inputs in two sums. */
INLINE void apply(const int count, int32_t inputs, Vectors x, const float *w, const float *b,
                  Vectors y) {
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
  const Vectors x = x_of(p, layer->in), y = x_of(p, layer->out);
  OUTPUTS(&p->team, UNITS, outputs,
          apply(count, inputs, x, w + at * inputs, b ? b + at : NULL, y + at))
}

#ifdef GPU
/* g [O, I] += slope x', image by image: one weight of a thread. */
static void dense_weights(const Pass *p, int32_t inputs, int32_t outputs, Vectors x, Vectors slope,
                          float *g) {
  SHARE_NUMBERS(&p->team, i, inputs * outputs) {
    const float4 *u = (const float4 *)floats_at(slope + i / inputs);
    const float4 *v = (const float4 *)floats_at(x + i % inputs);
    float sum = g[i];
    UNROLL for (int l = 0; l < LANES / 4; l++) {
      const float4 a = u[l], b = v[l];
      if (4 * l < p->n) sum = FMA(a.x, b.x, sum);
      if (4 * l + 1 < p->n) sum = FMA(a.y, b.y, sum);
      if (4 * l + 2 < p->n) sum = FMA(a.z, b.z, sum);
      if (4 * l + 3 < p->n) sum = FMA(a.w, b.w, sum);
    }
    g[i] = sum;
  }
}
#else
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

static void dense_weights(const Pass *p, int32_t inputs, int32_t outputs, Vectors x, Vectors slope,
                          float *g) {
  float *turned = (float *)scratch_of(p);
  SHARE(&p->team, j, inputs)
    for (int l = 0; l < LANES; l++) turned[l * inputs + j] = lane(x + j, l);
  meet(&p->team);
  OUTPUTS(&p->team, 8, outputs,
          outer_rows(count, inputs, slope + at, turned, g + at * inputs, p->n))
}
#endif

/* d [count] = W' slope, or d + W' slope. */
INLINE void apply_back(const int count, int32_t inputs, int32_t outputs, const float *w,
                       Vectors slope, Vectors d, int adds) {
  F sum[8];
  UNROLL for (int j = 0; j < count; j++) sum[j] = adds ? d[j] : ZERO;
  for (int32_t o = 0; o < outputs; o++)
    UNROLL for (int j = 0; j < count; j++) sum[j] = FMA(FILL(w[o * inputs + j]), slope[o], sum[j]);
  UNROLL for (int j = 0; j < count; j++) d[j] = sum[j];
}

static void dense_back(const Pass *p, const Layer *layer) {
  const int32_t inputs = p->net->value[layer->in].units, outputs = p->net->value[layer->out].units;
  const float *w = p->row + layer->weight;
  const Vectors x = x_of(p, layer->in), slope = d_of(p, layer->out), d = d_of(p, layer->in);
  dense_weights(p, inputs, outputs, x, slope, p->g + layer->weight);
  if (layer->bias >= 0) add_up(p, p->g + layer->bias, slope, outputs);
  if (wanted(p, layer->in))
    OUTPUTS(&p->team, UNITS_BACK, inputs,
            apply_back(count, inputs, outputs, w + at, slope, d + at, layer->adds & 1))
}
