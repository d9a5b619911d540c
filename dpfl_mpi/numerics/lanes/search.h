/* The greedy search over models at hand, Algorithms 2 and 3: the same decisions to the bit as `consider` of
 * federation/greedy.py, whose line numbers these are. The averages are made and decided here, between two scorings. */
typedef double D __attribute__((vector_size(FORM / 8)));
typedef uint64_t B __attribute__((vector_size(FORM / 8)));
typedef float H __attribute__((vector_size(FORM / 16))); /* as many floats as D has numbers */
enum { HALF = LANES / 2 };

#if FORM == 512
#define FMA_D(a, b, c) ((D)_mm512_fmadd_pd(a, b, c))
#define WIDE(h) ((D)_mm512_cvtps_pd(h))
#define NARROW(d) ((H)_mm512_cvtpd_ps(d))
#elif FORM == 256
#define FMA_D(a, b, c) ((D)_mm256_fmadd_pd(a, b, c))
#define WIDE(h) ((D)_mm256_cvtps_pd(h))
#define NARROW(d) ((H)_mm256_cvtpd_ps(d))
#else
INLINE D FMA_D(D a, D b, D c) { return (D){fma(a[0], b[0], c[0]), fma(a[1], b[1], c[1])}; }
#define WIDE(h) ((D){(h)[0], (h)[1]})
#define NARROW(d) ((H){(float)(d)[0], (float)(d)[1]})
#endif

INLINE D all(double x) { return x - (D){0}; }

/* What float64 numbers s are divided by in a loop, before they are rounded to float32. s times `inverse` + `rest` is off by
 * at most 2^-103 of the quotient. That shows in the float32 only if a point half way between two doubles, one of which is
 * half way between two floats, is as near: total, as a whole number of 53 bits, would divide to within 17 of a multiple of
 * 2^53 by a number that is 1 or -1 modulo 2^29, so that it were itself within 17 of a multiple of 2^29, and no multiple of
 * 32. Such a total `divides`. `rest` is above 0, so -0 and infinity stay. */
typedef struct {
  D total, inverse, rest;
  int divides;
} Divisor;

static Divisor divisor(double total) {
  const uint64_t nearest = (1 << 29) - 1;
  double once = 1 / total;
  if (fma(-total, once, 1) < 0) once = nextafter(once, 0);
  const double left = fma(-total, once, 1);
  uint64_t low;
  memcpy(&low, &total, sizeof low);
  low &= nearest;
  const int strange = !(total > 0x1p-60 && total < 0x1p60) || (low && ((low + 31) & nearest) <= 62);
  return (Divisor){all(total), all(once), all((left > 0 ? left : 0x1p-200) * once), FORM == 128 || strange};
}

/* Write numbers / total in float64 and then float32. */
INLINE void divide(D s, const Divisor *by, float *out) {
  const H model = NARROW(by->divides ? s / by->total : FMA_D(s, by->inverse, s * by->rest));
  memcpy(out, &model, sizeof model);
}

/* p w of a model that one of the sums, x or y, lacks as yet: it is added where the sum is read next. */
typedef struct {
  double *sum, p;
  const float *w;
} Late;

/* Return and write what is in a sum from number i on, with what is late. */
INLINE D caught_up(const Late *late, int64_t i) {
  D sum;
  H model;
  memcpy(&sum, late->sum + i, sizeof sum);
  memcpy(&model, late->w + i, sizeof model);
  sum = FMA_D(all(late->p), WIDE(model), sum);
  memcpy(late->sum + i, &sum, sizeof sum);
  return sum;
}

/* Write into s->pair the averages (x + p w) / p_x and (y - p w) / p_y; without w x / p_x and y / p_y. */
static void average(const Search *s, Late late, const float *w, double p, double p_x, double p_y, int64_t width) {
  const D more = all(p), less = all(-p);
  const Divisor by_x = divisor(p_x), by_y = divisor(p_y);
  const double *sum_x = s->x, *sum_y = s->y;
  float *pair = s->pair;
  const int to_x = late.sum == sum_x, to_y = late.sum == sum_y;
  for (int64_t i = 0; i < width; i += HALF) {
    D x, y;
    H model;
    memcpy(&x, sum_x + i, sizeof x);
    memcpy(&y, sum_y + i, sizeof y);
    if (to_x) x = caught_up(&late, i);
    if (to_y) y = caught_up(&late, i);
    if (w) {
      memcpy(&model, w + i, sizeof model);
      x = FMA_D(more, WIDE(model), x);
      y = FMA_D(less, WIDE(model), y);
    }
    divide(x, &by_x, pair + i);
    divide(y, &by_y, pair + width + i);
  }
}

/* Return sum + x; what rounding takes away leaves its bits in `lost` (Knuth's two-sum). */
INLINE D plus_exactly(D sum, D x, B *lost) {
  const D high = sum + x, of_x = high - sum;
  *lost |= (B)(sum - (high - of_x)) | (B)(x - of_x);
  return high;
}

/* Return the sum of n losses as Python's math.fsum: exact, then rounded once, whatever their order. `part` are doubles
 * that do not overlap, the smallest first (Shewchuk 1997): multiples of 2^-149 below 2^161, so never more than 310. */
static double exact_sum(const float *v, int64_t n) {
  D sum = all(0);
  B lost = {0};
  for (int64_t i = 0; i < n; i += HALF) {
    H some = {0};
    memcpy(&some, v + i, sizeof(float) * (n - i < HALF ? n - i : HALF));
    sum = plus_exactly(sum, WIDE(some), &lost);
  }
  for (int l = 1; l < HALF; l++) sum = plus_exactly(sum, (D){sum[l]}, &lost);
  uint64_t left = 0;
  for (int l = 0; l < HALF; l++) left |= lost[l];
  if (!left) return sum[0];
  double part[311], strange = 0; /* what is not finite */
  int count = 0;
  for (int64_t i = 0; i < n; i++) {
    double x = v[i];
    int kept = 0;
    if (!isfinite(x)) {
      strange += x;
      continue;
    }
    for (int j = 0; j < count; j++) {
      const double y = part[j], high = x + y, of_y = high - x, low = (x - (high - of_y)) + (y - of_y);
      if (low != 0) part[kept++] = low;
      x = high;
    }
    if (x != 0) part[kept++] = x;
    count = kept;
  }
  if (strange != 0) return strange;
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
static void reward(const Net *net, const Search *s, const Images *images, int64_t n, const float *soon, double *r, void *memory) {
  NAME(score)(net, s->pair, net->width, 2, images, n, s->losses, NULL, NULL, NULL, soon, memory);
  for (int i = 0; i < 2; i++) r[i] = -(exact_sum(s->losses + i * n, n) / n);
}

/* Return max(difference, 0) as Python does: not-a-number stays, is not above 0, and its candidate is not added. */
INLINE double gain(double difference) { return 0 > difference ? 0 : difference; }

/* Decide `count` candidates in their order, until `most` of them are added: models [count] and their p, a coin each.
 * Write whether each was added; return how many were decided. */
PUBLIC int64_t NAME(search)(const Net *net, Search *s, const float *const *models, const double *p, const double *coins,
                            int64_t count, int64_t most, uint8_t *added, const Images *images, int64_t n,
                            void *memory) {
  static const int cases[4] = {2, 0, 1, 3}; /* neither gain is above 0, a alone, b alone, both: as GAINS of greedy.py */
  const int64_t width = net->width;
  Late late = {NULL, 0, NULL};
  double r[2];
  int64_t i = 0;
  if (!s->started && count > 0 && most > 0) {
    average(s, late, NULL, 0, s->p_x, s->p_y, width);
    reward(net, s, images, n, models[0], r, memory);
    s->r_x = r[0], s->r_y = r[1], s->started = 1;
  }
  for (; i < count && most > 0; i++) { /* line 2 */
    const double p_xj = s->p_x + p[i], p_yj = s->p_y - p[i];
    average(s, late, models[i], p[i], p_xj, p_yj, width);
    reward(net, s, images, n, i + 1 < count ? models[i + 1] : NULL, r, memory); /* R(X and j), R(Y without j): lines 4, 6 */
    const double a = gain(r[0] - s->r_x); /* line 7 */
    const double b = gain(r[1] - s->r_y); /* line 8 */
    added[i] = a + b == 0 || coins[i] < a / (a + b); /* line 9 */
    s->cases[cases[(a > 0) + 2 * (b > 0)]] += 1;
    if (added[i]) { /* line 10 */
      late = (Late){s->x, p[i], models[i]};
      s->p_x = p_xj, s->r_x = r[0], most--;
    } else { /* line 12 */
      late = (Late){s->y, -p[i], models[i]};
      s->p_y = p_yj, s->r_y = r[1];
    }
  }
  for (int64_t at = 0; late.sum && at < width; at += HALF) caught_up(&late, at);
  return i;
}
