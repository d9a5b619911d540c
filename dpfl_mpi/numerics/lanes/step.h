/* Steps along a gradient: what is computed on rows alone. */

/* For each LANES numbers of a row from number i on that are this member's. */
#define SHARE_ROW(p, i, ...) \
  UNROLL_8 SHARE(&(p)->team, piece_, (p)->net->width / LANES) { \
    const int64_t i = (int64_t)piece_ * LANES; \
    __VA_ARGS__; \
  }

/* Write the squares of g in 64 sums, whatever the form: number i goes to sum i modulo 64. */
INTERNAL void square_sums(const Pass *p, const float *g, float *sums) {
  const int64_t width = p->net->width;
#ifdef GPU
  enum { AHEAD = 64 }; /* numbers that are read while others are added */
  SHARE(&p->team, j, 64 / LANES) {
    F sum = ZERO;
    for (int i = j * LANES; i < width; i += 64 * AHEAD) {
      F v[AHEAD];
      UNROLL
      for (int k = 0; k < AHEAD; k++) v[k] = i + 64 * k < width ? load(g + i + 64 * k) : ZERO;
      UNROLL for (int k = 0; k < AHEAD; k++) sum = FMA(v[k], v[k], sum);
    }
    store(sums + j * LANES, sum);
  }
  meet(&p->team);
#else
  /* one member after the other adds a part, mostly its own: to fetch what others wrote takes longer
   * than to wait for a few */
  const int64_t members = p->team.members, parts = members < 8 ? members : 8;
  const int64_t lines = (width + 63) / 64;
  for (int64_t turn = 0; turn < parts; turn++) {
    if (turn == p->team.member) {
      F part[64 / LANES] = {0};
      if (turn > 0) memcpy(part, sums, sizeof part);
      for (int64_t i = lines * turn / parts * 64, end = lines * (turn + 1) / parts * 64; i < end;
           i += 64)
        for (int j = 0; j < 64 / LANES && i + j * LANES < width; j++) {
          const F v = load(g + i + j * LANES);
          part[j] = FMA(v, v, part[j]);
        }
      memcpy(sums, part, sizeof part);
    }
    meet(&p->team);
  }
#endif
}

/* Apply the proximal term and the mask to g in place; return what clipping scales it by. */
INTERNAL float prepare(const Pass *p, const float *restrict w, float *restrict g, const Sgd *sgd) {
  const F mu = FILL(sgd->mu);
  float scale = 1;
  if (sgd->towards)
    SHARE_ROW(p, i, store(g + i, FMA(mu, load(w + i) - load(sgd->towards + i), load(g + i))))
  if (sgd->trained) SHARE_ROW(p, i, store(g + i, load(g + i) * numbers(sgd->trained + i)))
  if (sgd->clip > 0) {
    double square = 0;
    float *sums = p->shared->sums;
    meet(&p->team); /* all of g */
    square_sums(p, g, sums);
    for (int j = 0; j < 64; j++) square += sums[j];
    scale = sgd->clip / ((float)sqrt(square) + 1e-6f);
    if (scale > 1) scale = 1; /* not where it is not a number */
  }
  return scale;
}

/* Step as torch.optim.Adam or AdamW, each operation rounded where PyTorch's are. m [2 D + 1]: mean
 * gradient, mean squared gradient, steps. */
INTERNAL void adam(const Pass *p, float *restrict w, float *restrict m, const float *restrict g,
                 const Sgd *sgd, const float *correction, float scale) {
  float *means = m, *squares = m + p->net->width;
  const F take = FILL(sgd->take), keep = FILL(sgd->keep), add = FILL(sgd->add);
  const F decay = FILL(sgd->decay);
  const F first = FILL(correction[0]), second = FILL(correction[1]), lr = FILL(sgd->lr);
  SHARE_ROW(p, i, {
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
  })
  if (is_first(&p->team)) m[2 * p->net->width]++;
}

/* Take step number `at` of a call along g, which is changed; clipping, decay and momentum are as in
 * torch.optim. */
INTERNAL void step_along(const Pass *p, float *restrict w, float *restrict m, float *restrict g,
                       const Sgd *sgd, int64_t at) {
  FORGET(w);
  FORGET(m);
  FORGET(g);
  const float scale = prepare(p, w, g, sgd);
  if (sgd->corrections) {
    adam(p, w, m, g, sgd, sgd->corrections + 2 * at, scale);
    return;
  }
  const F momentum = FILL(sgd->momentum), decay = FILL(sgd->decay), lr = FILL(sgd->lr);
#ifdef GPU
  if (!sgd->trained) { /* many numbers are read before the first is written */
    enum { AHEAD = 8 };
    const int pieces = p->net->width / LANES;
    for (int from = member_of(&p->team); from < pieces; from += AHEAD * MEMBERS) {
      F old[AHEAD], moved[AHEAD], slope[AHEAD];
      UNROLL for (int k = 0; k < AHEAD; k++) {
        const int piece = from + k * MEMBERS, i = piece < pieces ? piece * LANES : 0;
        old[k] = load(w + i), moved[k] = load(m + i), slope[k] = load(g + i);
      }
      UNROLL for (int k = 0; k < AHEAD; k++) {
        const int piece = from + k * MEMBERS, i = piece * LANES;
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
    const F old = load(w + i);
    const F moved = FMA(momentum, load(m + i), FMA(decay, old, scale * load(g + i)));
    const M frozen = sgd->trained ? ABOVE(FILL(1.f), numbers(sgd->trained + i)) : ABOVE(ZERO, ZERO);
    store(m + i, PICK(frozen, load(m + i), moved));
    store(w + i, PICK(frozen, old, FMA(ZERO - lr, moved, old)));
  })
}
