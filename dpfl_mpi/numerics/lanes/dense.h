/* A dense layer of one vector per image: y = W x + b.
 *
 * weight [O, I], bias [O] or none. Scratch: I + 1 vectors.
 */

/* Whether a GPU reads weights four at a time: their lines start at multiples of 16 bytes. */
INLINE int is_aligned(const Layer *layer, int32_t inputs) {
#ifdef GPU
  return layer->weight % 4 == 0 && inputs % 4 == 0;
#else
  (void)layer, (void)inputs;
  return 0;
#endif
}

#ifdef GPU
/* y [count] = W x + b as below, the weights read four at a time, `ahead` fours before they are
 * used: a read takes hundreds of cycles. */
INLINE void apply_fours(const int count, const int ahead, int inputs, Vectors x, const float *w,
                        const float *b, Vectors y) {
  F even[4], odd[4];
  UNROLL for (int i = 0; i < count; i++) even[i] = b ? b[i] : ZERO, odd[i] = ZERO;
  for (int from = 0; from < inputs; from += 4 * ahead) {
    float four[4][4][4];
    F v[4][4];
    UNROLL for (int k = 0; k < ahead; k++) {
      const int j = from + 4 * k;
      UNROLL for (int i = 0; i < count; i++) read_aligned(4, w + i * inputs + j, four[k][i]);
      UNROLL for (int l = 0; l < 4; l++) v[k][l] = x[j + l];
    }
    UNROLL for (int k = 0; k < ahead; k++)
      UNROLL for (int i = 0; i < count; i++) {
        const float *of = four[k][i];
        even[i] = FMA(of[0], v[k][0], even[i]), odd[i] = FMA(of[1], v[k][1], odd[i]);
        even[i] = FMA(of[2], v[k][2], even[i]), odd[i] = FMA(of[3], v[k][3], odd[i]);
      }
  }
  UNROLL for (int i = 0; i < count; i++) y[i] = even[i] + odd[i];
}
#endif

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

/* y = W x + b. OUTPUTS shares the outputs among the team: it declares `at`, the first of some
 * neighbouring ones, and `count`, how many. Fewer are computed at once where some members would
 * have none. */
INTERNAL void dense(const Pass *p, const Layer *layer) {
  const int32_t inputs = p->net->value[layer->in].units, outputs = p->net->value[layer->out].units;
  const float *w = p->row + layer->weight, *b = layer->bias < 0 ? NULL : p->row + layer->bias;
  const Vectors x = x_of(p, layer->in), y = x_of(p, layer->out);
#ifdef GPU
#define FOURS(units) \
  OUTPUTS(&p->team, units, outputs, \
          apply_fours(count, divisor(4, inputs / 4), inputs, x, w + at * inputs, \
                      b ? b + at : NULL, y + at))
  if (is_aligned(layer, inputs)) {
    if (outputs > 2 * MEMBERS) FOURS(4)
    else if (outputs > MEMBERS) FOURS(2)
    else FOURS(1)
    return;
  }
#endif
  OUTPUTS(&p->team, UNITS, outputs,
          apply(count, inputs, x, w + at * inputs, b ? b + at : NULL, y + at))
}

/* g [count, I] += slope x', image by image, for `some` columns of I; turned is x', [LANES, I]. */
#ifdef GPU
INLINE void outer(const int count, int inputs, int column, Vectors slope, const float *turned,
                  float *g, int n) {
  const int j = column + own_lane();
  if (j >= inputs) return;
  F sum[8];
  UNROLL for (int i = 0; i < count; i++) sum[i] = g[i * inputs + j];
  UNROLL for (int l = 0; l < LANES; l += 4) {
    F x[4];
    UNROLL for (int k = 0; k < 4; k++) x[k] = turned[(l + k) * inputs + j];
    UNROLL for (int i = 0; i < count; i++) {
      float four[4];
      read_aligned(4, floats_at(slope + i) + l, four);
      UNROLL for (int k = 0; k < 4; k++)
        if (l + k < n) sum[i] = FMA(four[k], x[k], sum[i]);
    }
  }
  UNROLL for (int i = 0; i < count; i++) g[i * inputs + j] = sum[i];
}
#else
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
#endif

INTERNAL void dense_weights(const Pass *p, int32_t inputs, int32_t outputs, Vectors x,
                            Vectors slope, float *g) {
  float *turned = floats_at(scratch_of(p));
  SHARE(&p->team, j, inputs) EACH_LANE(l) turned[l * inputs + j] = ON(x[j], l);
  meet(&p->team);
#ifdef GPU
  TILES(&p->team, 8, outputs, 1, (inputs + LANES - 1) / LANES,
        outer(count, inputs, unit_ * LANES, slope + at, turned, g + at * inputs, p->n))
#else
  OUTPUTS(&p->team, 8, outputs,
          outer_rows(count, inputs, slope + at, turned, g + at * inputs, p->n))
#endif
}

/* d [count] = W' slope, or d + W' slope. */
INLINE void apply_back(const int count, const int aligned, int32_t inputs, int32_t outputs,
                       const float *w, Vectors slope, Vectors d, int adds) {
  F sum[8];
  UNROLL for (int j = 0; j < count; j++) sum[j] = adds ? d[j] : ZERO;
#ifdef GPU
  const int ahead = divisor(8, outputs);
  for (int from = 0; from < outputs && aligned; from += ahead) {
    float weights[8][4];
    F of[8];
    UNROLL for (int k = 0; k < ahead; k++) {
      read_aligned(count, w + (from + k) * inputs, weights[k]);
      of[k] = slope[from + k];
    }
    UNROLL for (int k = 0; k < ahead; k++)
      UNROLL for (int j = 0; j < count; j++) sum[j] = FMA(weights[k][j], of[k], sum[j]);
  }
#endif
  for (int32_t o = 0; o < outputs && !aligned; o++)
    UNROLL for (int j = 0; j < count; j++) sum[j] = FMA(FILL(w[o * inputs + j]), slope[o], sum[j]);
  UNROLL for (int j = 0; j < count; j++) d[j] = sum[j];
}

INTERNAL void dense_back(const Pass *p, const Layer *layer) {
  const int32_t inputs = p->net->value[layer->in].units, outputs = p->net->value[layer->out].units;
  const float *w = p->row + layer->weight;
  const Vectors x = x_of(p, layer->in), slope = d_of(p, layer->out), d = d_of(p, layer->in);
  dense_weights(p, inputs, outputs, x, slope, p->g + layer->weight);
  if (layer->bias >= 0) add_up(p, p->g + layer->bias, slope, outputs);
  if (wanted(p, layer->in))
    OUTPUTS(&p->team, UNITS_BACK, inputs,
            apply_back(count, count % 4 == 0 && is_aligned(layer, inputs), inputs, outputs, w + at,
                       slope, d + at, layer->adds & 1))
}
