/* The greedy search, Algorithms 2 and 3: the same decisions to the bit as federation/search.py,
 * whose line numbers these are. */

/* Write into s->pair the averages (x + p w) / p_x and (y - p w) / p_y; without w x / p_x and y /
 * p_y. */
static void average(const Search *s, const float *w, double p, double p_x, double p_y,
                    int64_t width) {
  const double *restrict x = s->x, *restrict y = s->y;
  float *restrict pair = s->pair;
  for (int64_t i = 0; i < width; i++) {
    pair[i] = (float)((w ? fma(p, w[i], x[i]) : x[i]) / p_x);
    pair[width + i] = (float)((w ? fma(-p, w[i], y[i]) : y[i]) / p_y);
  }
}

/* Return the sum of n losses as Python's math.fsum: exact, then rounded once, whatever their order.
 * `part` are doubles that do not overlap, the smallest first (Shewchuk 1997): multiples of 2^-149
 * below 2^161, so never more than 310. */
static double exact_sum(const float *losses, int64_t n) {
  double part[311], rounded = 0;
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

/* Write R = -validation loss of the two models of s->pair. */
static void rewards(const Net *net, const Search *s, const Images *images, int64_t n, double *r,
                    void *memory) {
  NAME(score)(net, s->pair, net->width, 2, images, n, s->losses, NULL, NULL, NULL, memory);
  for (int i = 0; i < 2; i++) r[i] = -(exact_sum(s->losses + i * n, n) / n);
}

/* Return max(difference, 0) as Python does: not-a-number stays, is not above 0, and its candidate
 * is not added. */
INLINE double gain(double difference) { return 0 > difference ? 0 : difference; }

/* Decide `count` candidates in their order, until `most` of them are added: models [count] and
 * their p, a coin each. Write whether each was added; return how many were decided. */
PUBLIC int64_t NAME(search)(const Net *net, Search *s, const float *const *models, const double *p,
                            const double *coins, int64_t count, int64_t most, uint8_t *added,
                            const Images *images, int64_t n, void *memory) {
  static const int cases[4] = {
      2, 0, 1, 3}; /* neither gain is above 0, a alone, b alone, both: graph.CASES */
  const int64_t width = net->width;
  double r[2];
  int64_t i = 0;
  if (!s->started && count > 0 && most > 0) {
    average(s, NULL, 0, s->p_x, s->p_y, width);
    rewards(net, s, images, n, r, memory); /* R(X), R(Y): lines 3, 5 */
    s->r_x = r[0], s->r_y = r[1], s->started = 1;
  }
  for (; i < count && most > 0; i++) { /* line 2 */
    const float *w = models[i];
    const double p_xj = s->p_x + p[i], p_yj = s->p_y - p[i];
    average(s, w, p[i], p_xj, p_yj, width);
    rewards(net, s, images, n, r, memory); /* R(X and j), R(Y without j): lines 4, 6 */
    const double a = gain(r[0] - s->r_x); /* line 7 */
    const double b = gain(r[1] - s->r_y); /* line 8 */
    added[i] = a + b == 0 || coins[i] < a / (a + b); /* line 9 */
    s->cases[cases[(a > 0) + 2 * (b > 0)]] += 1;
    if (added[i]) { /* line 10 */
      for (int64_t at = 0; at < width; at++) s->x[at] = fma(p[i], w[at], s->x[at]);
      s->p_x = p_xj, s->r_x = r[0], most--;
    } else { /* line 12 */
      for (int64_t at = 0; at < width; at++) s->y[at] = fma(-p[i], w[at], s->y[at]);
      s->p_y = p_yj, s->r_y = r[1];
    }
  }
  return i;
}
