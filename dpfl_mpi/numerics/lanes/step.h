/* Steps of SGD and Adam along a gradient. lanes.c calls step_along after each mini-batch. Here a
 * vector has LANES neighbouring columns of a row, not one number of each image. */

/* Run a statement, the last argument, for each LANES columns of a row that are this member's. The
 * caller names i, the first of these columns. */
#define SHARE_ROW(p, i, ...) \
  UNROLL_8 SHARE(&(p)->team, piece_, (p)->net->width / LANES) { \
    const int64_t i = (int64_t)piece_ * LANES; \
    __VA_ARGS__; \
  }

/* Write the sum of squares of g as 64 partial sums, in every form: column i goes to sum i % 64. */
INTERNAL void square_sums(const Pass *p, const float *g, float *sums) {
  const int64_t width = p->net->width;
#ifdef GPU
  enum { AHEAD = 64 }; /* numbers that are read before the first is added, to overlap the reads */
  SHARE(&p->team, j, 64 / LANES) {
    Vec sum = ZERO;
    for (int i = j * LANES; i < width; i += 64 * AHEAD) {
      Vec v[AHEAD];
      UNROLL for (int k = 0; k < AHEAD; k++)
        v[k] = i + 64 * k < width ? load(g + i + 64 * k) : ZERO;
      UNROLL for (int k = 0; k < AHEAD; k++) sum = FMA(v[k], v[k], sum);
    }
    store(sums + j * LANES, sum);
  }
  barrier(&p->team);
#else
  /* up to eight members add a part each, mostly what they wrote themselves, one after the other: to
   * fetch what others wrote would take longer than to wait */
  const int64_t members = p->team.members, parts = members < 8 ? members : 8;
  const int64_t lines = (width + 63) / 64;
  for (int64_t turn = 0; turn < parts; turn++) {
    if (turn == p->team.member) {
      Vec part[64 / LANES] = {0};
      if (turn > 0) memcpy(part, sums, sizeof part);
      for (int64_t i = lines * turn / parts * 64, end = lines * (turn + 1) / parts * 64; i < end;
           i += 64)
        for (int j = 0; j < 64 / LANES && i + j * LANES < width; j++) {
          const Vec v = load(g + i + j * LANES);
          part[j] = FMA(v, v, part[j]);
        }
      memcpy(sums, part, sizeof part);
    }
    barrier(&p->team);
  }
#endif
}

/* Add the proximal term mu (w - towards) to g and set frozen columns to 0; return the factor by
 * which clipping scales g. */
INTERNAL float prepare(const Pass *p, const float *restrict w, float *restrict g, const Sgd *sgd) {
  const Vec mu = FILL(sgd->mu);
  float scale = 1;
  if (sgd->towards)
    SHARE_ROW(p, i, store(g + i, FMA(mu, load(w + i) - load(sgd->towards + i), load(g + i))))
  if (sgd->trained) SHARE_ROW(p, i, store(g + i, load(g + i) * numbers(sgd->trained + i)))
  if (sgd->clip > 0) {
    double square = 0;
    float *sums = p->shared->sums;
    barrier(&p->team); /* until all of g is written */
    square_sums(p, g, sums);
    for (int j = 0; j < 64; j++) square += sums[j];
    scale = sgd->clip / ((float)sqrt(square) + 1e-6f);
    if (scale > 1) scale = 1; /* so not-a-number stays */
  }
  return scale;
}

/* Step as torch.optim.Adam or AdamW, each operation rounded where PyTorch's are. m [2 width + 1]:
 * mean gradient, mean squared gradient, number of steps. correction: 1 - beta1^t and
 * sqrt(1 - beta2^t) of step t. */
INTERNAL void adam(const Pass *p, float *restrict w, float *restrict m, const float *restrict g,
                 const Sgd *sgd, const float *correction, float scale) {
  float *means = m, *squares = m + p->net->width;
  const float rate = sgd->one_minus_beta1; /* of the moving mean */
  const Vec beta2 = FILL(sgd->beta2), one_minus_beta2 = FILL(sgd->one_minus_beta2);
  const Vec decay = FILL(sgd->decay), lr = FILL(sgd->lr);
  const Vec correction1 = FILL(correction[0]), correction2 = FILL(correction[1]);
  SHARE_ROW(p, i, {
    const Vec trained = sgd->trained ? numbers(sgd->trained + i) : FILL(1.f);
    const Mask frozen = ABOVE(FILL(1.f), trained);
    const Vec old = load(w + i), decayed = old * trained, scaled = scale * load(g + i);
    const Vec slope = sgd->decoupled ? scaled : FMA(decay, decayed, scaled);
    const Vec old_mean = load(means + i), old_square = load(squares + i), change = slope - old_mean;
    /* the mean is computed from the nearer of both ends, as PyTorch does */
    const Vec new_mean =
        rate < .5f ? FMA(FILL(rate), change, old_mean) : FMA(FILL(rate) - 1.f, change, slope);
    const Vec new_square = FMA(one_minus_beta2 * slope, slope, beta2 * old_square);
    const Vec mean = SELECT(frozen, old_mean, new_mean);
    const Vec square = SELECT(frozen, old_square, new_square);
    Vec step = mean / ((SQRT(square) / correction2 + sgd->eps) * correction1);
    if (sgd->decoupled) step = FMA(decay, decayed, step);
    store(means + i, mean);
    store(squares + i, square);
    store(w + i, SELECT(frozen, old, FMA(ZERO - lr, step, old)));
  })
  if (is_first(&p->team)) m[2 * p->net->width]++;
}

/* Move w along g, which is changed; clipping, decay and momentum are as in PyTorch. `number` counts
 * the steps of a client in this call. */
INTERNAL void step_along(const Pass *p, float *restrict w, float *restrict m, float *restrict g,
                         const Sgd *sgd, int64_t number) {
  FORGET(w);
  FORGET(m);
  FORGET(g);
  const float scale = prepare(p, w, g, sgd);
  if (sgd->corrections) {
    adam(p, w, m, g, sgd, sgd->corrections + 2 * number, scale);
    return;
  }
  const Vec momentum = FILL(sgd->momentum), decay = FILL(sgd->decay), lr = FILL(sgd->lr);
#ifdef GPU
  if (!sgd->trained) { /* as below, but AHEAD pieces are read before the first is written */
    enum { AHEAD = 8 };
    const int pieces = p->net->width / LANES;
    for (int first = member_of(&p->team); first < pieces; first += AHEAD * MEMBERS) {
      Vec old[AHEAD], moved[AHEAD], slope[AHEAD];
      UNROLL for (int k = 0; k < AHEAD; k++) {
        const int piece = first + k * MEMBERS, i = piece < pieces ? piece * LANES : 0;
        old[k] = load(w + i), moved[k] = load(m + i), slope[k] = load(g + i);
      }
      UNROLL for (int k = 0; k < AHEAD; k++) {
        const int piece = first + k * MEMBERS, i = piece * LANES;
        if (piece >= pieces) break;
        moved[k] = FMA(momentum, moved[k], FMA(decay, old[k], scale * slope[k]));
        store(m + i, moved[k]);
        store(w + i, FMA(ZERO - lr, moved[k], old[k]));
      }
    }
    return;
  }
#endif
  SHARE_ROW(p, i, {
    const Vec trained = sgd->trained ? numbers(sgd->trained + i) : FILL(1.f);
    const Mask frozen = ABOVE(FILL(1.f), trained);
    const Vec old = load(w + i), old_m = load(m + i);
    const Vec moved = FMA(momentum, old_m, FMA(decay, old, scale * load(g + i)));
    store(m + i, SELECT(frozen, old_m, moved));
    store(w + i, SELECT(frozen, old, FMA(ZERO - lr, moved, old)));
  })
}
