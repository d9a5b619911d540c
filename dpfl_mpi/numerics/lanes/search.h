/* The greedy search of one client, Algorithms 2 and 3 of the paper: the same decisions to the bit
 * as federation/search.py. Line numbers are those of Algorithm 2.
 *
 * X and Y are two sets of models, of which X starts small and Y with all. Each candidate j in turn
 * is added to X or taken from Y, depending on which of the two weighted averages gains more reward
 * R = -(validation loss). s->x and s->y are the sums of p_i w_i over X and Y, s->p_x and s->p_y
 * those of p_i; the averages are x / p_x and y / p_y. lanes.c defines the verbs `search` and
 * `candidate` from search_one and candidate_one. */

/* Write into s->pair the averages (x + p w) / p_x and (y - p w) / p_y, where p_x and p_y count the
 * change by p already; without w (NULL) x / p_x and y / p_y. */
INTERNAL void average(const Pass *pass, const Search *s, const float *w, double p, double p_x,
                      double p_y) {
  const double *restrict x = s->x, *restrict y = s->y;
  const int64_t width = pass->net->width;
  float *restrict pair = s->pair;
  SHARE_AMONG_TEAMS(&pass->team, i, width) {
    pair[i] = (float)((w ? fma(p, (double)w[i], x[i]) : x[i]) / p_x);
    pair[width + i] = (float)((w ? fma(-p, (double)w[i], y[i]) : y[i]) / p_y);
  }
  barrier_of_teams(&pass->team);
}

/* Return the sum of n losses as Python's math.fsum does: exact, then rounded once, whatever their
 * order. `part` keeps the exact sum as doubles that do not overlap, the smallest first (Shewchuk
 * 1997): multiples of 2^-149 below 2^161, so it needs room for at most 310. */
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
  /* add the parts from the largest on, until one of them no longer changes the sum */
  double high = 0, low = 0;
  while (count && low == 0) {
    const double x = high, y = part[--count];
    high = x + y;
    low = y - (high - x);
  }
  /* half way between two doubles: the next part says which is nearer */
  if (count && ((low < 0 && part[count - 1] < 0) || (low > 0 && part[count - 1] > 0))) {
    const double up = high + 2 * low;
    if (up - high == 2 * low) high = up;
  }
  return high;
}

/* Write the rewards of the two averages in s->pair into p->shared. */
INTERNAL void rewards(Pass *p, const Search *s) {
  const Scoring two = {.rows = s->pair, .stride = p->net->width, .r = 2, .n = s->n,
                       .images = s->images, .losses = s->losses};
  score_one(p, &two);
  barrier_of_teams(&p->team);
  /* two threads compute one sum each; on a GPU they are in different warps */
  SHARE_AMONG_TEAMS(&p->team, thread, 2 * WARP)
    if (thread % WARP == 0) {
      const int i = thread / WARP;
      p->shared->rewards[i] = -(exact_sum(s->losses + i * s->n, s->n, p->shared->parts[i]) / s->n);
    }
  barrier_of_teams(&p->team);
}

/* Return max(difference, 0) as Python does: not-a-number stays. As it is not above 0, its candidate
 * is not added. */
INLINE double gain(double difference) { return 0 > difference ? 0 : difference; }

/* Decide candidates in their order, until as many are added as the budget allows. */
INTERNAL void search_one(Pass *p, Search *s) {
  if (s->count == 0) return;
  /* round -1, at the start of a search, only computes the rewards of X and Y */
  for (int32_t j = s->started ? 0 : -1; j < s->count && s->budget_left > 0; j++) { /* line 2 */
    const float *w = j < 0 ? NULL : s->models[j];
    const double p_j = j < 0 ? 0 : s->p[j], p_x = s->p_x + p_j, p_y = s->p_y - p_j;
    average(p, s, w, p_j, p_x, p_y);
    rewards(p, s); /* of X and j together, and of Y without j: lines 3 to 6 */
    if (leads_teams(&p->team)) {
      const double *r = p->shared->rewards;
      if (j < 0) s->r_x = r[0], s->r_y = r[1], s->started = 1;
      else {
        const double a = gain(r[0] - s->r_x);                  /* line 7 */
        const double b = gain(r[1] - s->r_y);                  /* line 8 */
        s->added[j] = a + b == 0 || s->coins[j] < a / (a + b); /* line 9 */
        /* a alone is above 0, b alone, neither, both: the order of graph.CASES */
        s->cases[a > 0 ? (b > 0 ? 3 : 0) : (b > 0 ? 1 : 2)] += 1;
        if (s->added[j]) s->p_x = p_x, s->r_x = r[0], s->budget_left--; /* line 10 */
        else s->p_y = p_y, s->r_y = r[1];                               /* line 12 */
        s->decided = j + 1;
      }
    }
    barrier_of_teams(&p->team);
    if (j < 0) continue;
    /* the sum that has changed: x + p_j w, or y - p_j w */
    const int added = s->added[j];
    double *sum = added ? s->x : s->y;
    SHARE_AMONG_TEAMS(&p->team, i, p->net->width)
      sum[i] = fma(added ? p_j : -p_j, (double)w[i], sum[i]);
  }
}

/* One step of a search that Python decides: write into s->pair the averages of X with the first
 * candidate and of Y without it, and change both sums. The caller has changed p_x and p_y. */
INTERNAL void candidate_one(Pass *p, Search *s) {
  const float *restrict w = s->models[0];
  double *restrict x = s->x, *restrict y = s->y;
  const double p_j = s->p[0];
  average(p, s, w, p_j, s->p_x, s->p_y);
  SHARE_AMONG_TEAMS(&p->team, i, p->net->width) {
    x[i] = fma(p_j, (double)w[i], x[i]);
    y[i] = fma(-p_j, (double)w[i], y[i]);
  }
}
