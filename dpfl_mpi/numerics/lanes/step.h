/* Steps along a gradient, and averages: what is computed on rows alone. */

/* Apply the proximal term and the mask to g in place; return what clipping scales it by. */
static float prepare(const float *restrict w, float *restrict g, int64_t width, const Sgd *sgd) {
  const F mu = FILL(sgd->mu);
  float scale = 1;
  for (int64_t i = 0; sgd->towards && i < width; i += LANES)
    store(g + i, FMA(mu, load(w + i) - load(sgd->towards + i), load(g + i)));
  for (int64_t i = 0; sgd->trained && i < width; i += LANES)
    store(g + i, load(g + i) * numbers(sgd->trained + i));
  if (sgd->clip > 0) { /* the norm's squares in 64 sums, whatever the form */
    F part[64 / LANES] = {0};
    double square = 0;
    for (int64_t i = 0; i < width; i += 64)
      for (int j = 0; j < 64 / LANES && i + j * LANES < width; j++) {
        const F v = load(g + i + j * LANES);
        part[j] = FMA(v, v, part[j]);
      }
    for (int j = 0; j < 64; j++) square += lane(part, j);
    scale = sgd->clip / ((float)sqrt(square) + 1e-6f);
    if (scale > 1) scale = 1; /* not where it is not a number */
  }
  return scale;
}

/* Step as torch.optim.Adam or AdamW, each operation rounded where PyTorch's are. m [2 D + 1]: mean
 * gradient, mean squared gradient, steps. */
static void adam(float *restrict w, float *restrict m, const float *restrict g, int64_t width,
                 const Sgd *sgd, const float *correction, float scale) {
  float *means = m, *squares = m + width;
  const F take = FILL(sgd->take), keep = FILL(sgd->keep), add = FILL(sgd->add);
  const F decay = FILL(sgd->decay);
  const F first = FILL(correction[0]), second = FILL(correction[1]), lr = FILL(sgd->lr);
  for (int64_t i = 0; i < width; i += LANES) {
    const F ones = sgd->trained ? numbers(sgd->trained + i) : FILL(1.f);
    const F old = load(w + i), decayed = old * ones;
    const F slope = sgd->decoupled ? scale * load(g + i) : FMA(decay, decayed, scale * load(g + i));
    const F before = load(means + i), apart = slope - before;
    /* from the nearer end */
    const F mean = sgd->take < .5f ? FMA(take, apart, before) : FMA(take - 1.f, apart, slope);
    const F square = FMA(add * slope, slope, keep * load(squares + i));
    const M frozen = ABOVE(FILL(1.f), ones);
    const F kept_mean = PICK(frozen, before, mean);
    const F kept_square = PICK(frozen, load(squares + i), square);
    F step = kept_mean / ((ROOT(kept_square) / second + sgd->eps) * first);
    if (sgd->decoupled) step = FMA(decay, decayed, step);
    store(means + i, kept_mean);
    store(squares + i, kept_square);
    store(w + i, PICK(frozen, old, FMA(ZERO - lr, step, old)));
  }
  m[2 * width]++;
}

/* Take step number `at` of a call along g, which is changed; clipping, decay and momentum are as in
 * torch.optim. */
PUBLIC void NAME(step)(float *restrict w, float *restrict m, float *restrict g, int64_t width,
                       const Sgd *sgd, int64_t at) {
  const float scale = prepare(w, g, width, sgd);
  if (sgd->corrections) {
    adam(w, m, g, width, sgd, sgd->corrections + 2 * at, scale);
    return;
  }
  const F momentum = FILL(sgd->momentum), decay = FILL(sgd->decay), lr = FILL(sgd->lr);
  for (int64_t i = 0; i < width; i += LANES) {
    const F old = load(w + i);
    const F moved = FMA(momentum, load(m + i), FMA(decay, old, scale * load(g + i)));
    const M frozen = sgd->trained ? ABOVE(FILL(1.f), numbers(sgd->trained + i)) : ABOVE(ZERO, ZERO);
    store(m + i, PICK(frozen, load(m + i), moved));
    store(w + i, PICK(frozen, old, FMA(ZERO - lr, moved, old)));
  }
}

enum { PIECE = 16 }; /* a row is padded to so many */

/* Write into each of `count` rows of out the average of its models, [ends[k], ends[k + 1]): their
 * sum of p w in float64, in their order, over whole[k]; a row whose whole is not above 0 stays. */
PUBLIC void NAME(means)(const float *const *models, const double *p, const int64_t *ends,
                        const double *whole, int64_t count, float *out, int64_t width) {
  for (int64_t k = 0; k < count; k++, out += width)
    for (int64_t i = 0; whole[k] > 0 && i < width; i += PIECE) {
      double sum[PIECE];
      for (int l = 0; l < PIECE; l++) sum[l] = p[ends[k]] * models[ends[k]][i + l];
      for (int64_t j = ends[k] + 1; j < ends[k + 1]; j++)
        for (int l = 0; l < PIECE; l++) sum[l] += p[j] * models[j][i + l];
      for (int l = 0; l < PIECE; l++) out[i + l] = (float)(sum[l] / whole[k]);
    }
}

/* Write into out 2^50 times the sum of p w of `count` models, of rounded terms: exact in any order.
 */
PUBLIC void NAME(fixed)(const float *const *models, const double *p, int64_t count, int64_t *out,
                        int64_t width) {
  for (int64_t i = 0; i < width; i += PIECE) {
    int64_t sum[PIECE] = {0};
    for (int64_t j = 0; j < count; j++) {
      const double scale = p[j] * 0x1p50;
      for (int l = 0; l < PIECE; l++) sum[l] += (int64_t)rint(models[j][i + l] * scale);
    }
    for (int l = 0; l < PIECE; l++) out[i + l] = sum[l];
  }
}

/* A candidate of the greedy search: write the sums x_j = x + p w and y_j = y - p w, rounded once,
 * and into pair [2, width] the averages x_j / p_x and y_j / p_y. No element meets another: the
 * compiler makes the vectors. */
PUBLIC void NAME(candidate)(const double *restrict x, const double *restrict y,
                            const float *restrict w, double p, double p_x, double p_y,
                            double *restrict x_j, double *restrict y_j, float *restrict pair,
                            int64_t width) {
  for (int64_t i = 0; i < width; i++) {
    x_j[i] = fma(p, w[i], x[i]);
    y_j[i] = fma(-p, w[i], y[i]);
    pair[i] = (float)(x_j[i] / p_x);
    pair[width + i] = (float)(y_j[i] / p_y);
  }
}
