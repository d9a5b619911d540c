/* The greedy search, Algorithms 2 and 3: the same decisions to the bit as federation/search.py,
 * whose line numbers these are. */

/* Write into s->pair the averages (x + p w) / p_x and (y - p w) / p_y; without w x / p_x and y /
 * p_y. */
INTERNAL void average(const Pass *pass, const Search *s, const float *w, double p, double p_x,
                    double p_y) {
  const double *restrict x = s->x, *restrict y = s->y;
  const int64_t width = pass->net->width;
  float *restrict pair = s->pair;
  SHARE_AMONG_TEAMS(&pass->team, i, width) {
    pair[i] = (float)((w ? fma(p, (double)w[i], x[i]) : x[i]) / p_x);
    pair[width + i] = (float)((w ? fma(-p, (double)w[i], y[i]) : y[i]) / p_y);
  }
  meet_teams(&pass->team);
}

/* Return the sum of n losses as Python's math.fsum: exact, then rounded once, whatever their order.
 * They are kept as doubles that do not overlap, the smallest first (Shewchuk 1997): multiples of
 * 2^-149 below 2^161, so never more than 310; `part` has room for them. */
INTERNAL double exact_sum(const float *losses, int64_t n, double *part) {
  double rounded = 0;
  int count = 0;
  for (int64_t i = 0; i < n; i++) rounded += losses[i];
  if (!isfinite(rounded)) return rounded;
  for (int64_t i = 0; i < n; i++) {
    double x = losses[i];
    int parts = 0;
    for (int j = 0; j < count; j++) { /* Knuth's two-sum: high + low is x + y exactly */
      const double y = part[j], high = x + y, of_y = high - x;
      const double low = (x - (high - of_y)) + (y - of_y);
      if (low != 0) part[parts++] = low;
      x = high;
    }
    if (x != 0) part[parts++] = x;
    count = parts;
  }
  double high = 0, low = 0;
  while (count && low == 0) {
    const double x = high, y = part[--count];
    high = x + y;
    low = y - (high - x);
  }
  /* half way between two doubles: what is left says which is nearer */
  if (count && ((low < 0 && part[count - 1] < 0) || (low > 0 && part[count - 1] > 0))) {
    const double up = high + 2 * low;
    if (up - high == 2 * low) high = up;
  }
  return high;
}

/* Write R = -validation loss of the two models of s->pair into p->shared. */
INTERNAL void rewards(Pass *p, const Search *s) {
  const Scoring two = {.rows = s->pair, .stride = p->net->width, .r = 2, .n = s->n,
                       .images = s->images, .losses = s->losses};
  score_one(p, &two);
  meet_teams(&p->team);
  SHARE_AMONG_TEAMS(&p->team, at, 2 * WARP) if (at % WARP == 0) {
    const int i = at / WARP;
    p->shared->rewards[i] = -(exact_sum(s->losses + i * s->n, s->n, p->shared->parts[i]) / s->n);
  }
  meet_teams(&p->team);
}

/* Return max(difference, 0) as Python does: not-a-number stays, is not above 0, and its candidate
 * is not added. */
INLINE double gain(double difference) { return 0 > difference ? 0 : difference; }

/* Decide candidates in their order, until s->most of them, the room that is left, are added. */
INTERNAL void search_one(Pass *p, Search *s) {
  if (s->count == 0) return;
  for (int32_t i = s->started ? 0 : -1; i < s->count && s->most > 0; i++) { /* line 2 */
    const float *w = i < 0 ? NULL : s->models[i]; /* first R(X), R(Y) without a candidate */
    const double of_w = i < 0 ? 0 : s->p[i], p_xj = s->p_x + of_w, p_yj = s->p_y - of_w;
    average(p, s, w, of_w, p_xj, p_yj);
    rewards(p, s); /* R(X and j), R(Y without j): lines 3 to 6 */
    if (leads_teams(&p->team)) {
      const double *r = p->shared->rewards;
      if (i < 0) s->r_x = r[0], s->r_y = r[1], s->started = 1;
      else {
        const double a = gain(r[0] - s->r_x);                  /* line 7 */
        const double b = gain(r[1] - s->r_y);                  /* line 8 */
        s->added[i] = a + b == 0 || s->coins[i] < a / (a + b); /* line 9 */
        /* a alone is above 0, b alone, neither, both: the order of graph.CASES */
        s->cases[a > 0 ? (b > 0 ? 3 : 0) : (b > 0 ? 1 : 2)] += 1;
        if (s->added[i]) s->p_x = p_xj, s->r_x = r[0], s->most--; /* line 10 */
        else s->p_y = p_yj, s->r_y = r[1];                        /* line 12 */
        s->decided = i + 1;
      }
    }
    meet_teams(&p->team);
    if (i < 0) continue;
    const int added = s->added[i];
    double *sum = added ? s->x : s->y;
    SHARE_AMONG_TEAMS(&p->team, at, p->net->width)
      sum[at] = fma(added ? of_w : -of_w, (double)w[at], sum[at]);
  }
}

/* Add the first candidate to X and take it from Y; write both averages, over p_x and p_y. It is a
 * step of a search that Python decides. */
INTERNAL void candidate_one(Pass *p, Search *s) {
  const float *restrict w = s->models[0];
  double *restrict x = s->x, *restrict y = s->y;
  const double of_w = s->p[0];
  average(p, s, w, of_w, s->p_x, s->p_y);
  SHARE_AMONG_TEAMS(&p->team, i, p->net->width) {
    x[i] = fma(of_w, (double)w[i], x[i]);
    y[i] = fma(-of_w, (double)w[i], y[i]);
  }
}
