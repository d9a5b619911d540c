/* A convolution of 5x5, stride 1, without padding, then max-pool of 2x2 and ReLU, in one: the
 * stages of models/cnn.py.
 *
 * size: -. weight [O, C, 5, 5], bias [O]. space: [2, O, P, Q] masks. P Q pooled height and
 * width. Scratch: a vector for each weight and bias, and weights
 * in another order. Own: [4, O].
 */
typedef struct {
  int32_t W, C, plane, filters, P, Q, out_line, out_plane;
  Vectors x;
  /* [filters, P, Q] where in its 2 x 2 the greatest was: right, lower; a GPU has 1 + 2 in one */
#ifdef GPU
  Vectors where;
#else
  M *right, *lower;
#endif
} Stage;

INLINE Stage stage_of(const Pass *p, const Layer *layer) {
  const Value *in = &p->net->value[layer->in], *out = &p->net->value[layer->out];
  const Vectors space = p->arena + layer->space;
  const int32_t area = out->planes * out->lines * out->units;
  const Stage s = {in->line,         in->planes,    in->plane,         out->planes,
                   out->lines,       out->units,    out->line,         out->plane,
                   p->arena + in->x,
#ifdef GPU
                   space};
#else
                   (M *)space, (M *)(space + area)};
#endif
  return s;
}

#ifdef GPU
/* Weights as `pooled` reads them, [C, 5, 5, O], a line of O at a multiple of 16 bytes. */
INLINE int packed_line(const Stage *s) { return (s->filters + 3) / 4 * 4; }

INTERNAL float *pack_taps(const Pass *p, const Stage *s, const float *w) {
  float *packed = floats_at(scratch_of(p));
  SHARE_NUMBERS(&p->team, i, s->filters * s->C * 25)
    packed[i % (s->C * 25) * packed_line(s) + i / (s->C * 25)] = w[i];
  meet(&p->team);
  return packed;
}
#endif

/* Write y, `count` filters from `first` on at `wide` pooled positions side by side: four sums of a
 * filter and position, pool and ReLU. */
INLINE void pooled(const int count, const int wide, const Stage *s, const float *w, const float *b,
                   int32_t first, int32_t row, int32_t column, Vectors y) {
  F sum[8][2][4];
  UNROLL for (int i = 0; i < count; i++)
    UNROLL for (int j = 0; j < wide; j++) {
      F *four = sum[i][j];
      four[0] = four[1] = four[2] = four[3] = FILL(b[first + i]);
    }
  for (int32_t c = 0; c < s->C; c++)
    for (int32_t ky = 0; ky < 5; ky++) {
      const Vectors upper = s->x + (c * s->plane + (2 * row + ky) * s->W + 2 * column);
      const Vectors under = upper + s->W;
      F u[4], v[4];
      UNROLL for (int x = 0; x < 2 * wide - 1; x++) u[x] = upper[x], v[x] = under[x];
      UNROLL for (int kx = 0; kx < 5; kx++) {
        u[2 * wide - 1] = upper[kx + 2 * wide - 1], v[2 * wide - 1] = under[kx + 2 * wide - 1];
#ifdef GPU
        float taps[8];
        read_aligned(count, w + ((c * 5 + ky) * 5 + kx) * packed_line(s) + first, taps);
#else
        const float *tap = w + (first * s->C + c) * 25 + ky * 5 + kx;
#endif
        UNROLL for (int i = 0; i < count; i++) {
#ifdef GPU
          const F f = taps[i];
#else
          const F f = FILL(tap[i * s->C * 25]);
#endif
          UNROLL for (int j = 0; j < wide; j++) {
            F *four = sum[i][j];
            four[0] = FMA(f, u[2 * j], four[0]), four[1] = FMA(f, u[2 * j + 1], four[1]);
            four[2] = FMA(f, v[2 * j], four[2]), four[3] = FMA(f, v[2 * j + 1], four[3]);
          }
        }
        UNROLL for (int x = 0; x < 2 * wide - 1; x++) u[x] = u[x + 1], v[x] = v[x + 1];
      }
    }
  UNROLL for (int i = 0; i < count; i++)
    UNROLL for (int j = 0; j < wide; j++) {
      M above, below, low;
      const F *four = sum[i][j];
      const F top = greater(four[0], four[1], &above), bottom = greater(four[2], four[3], &below);
      const int32_t plane = first + i, at = (plane * s->P + row) * s->Q + column + j;
      y[plane * s->out_plane + row * s->out_line + column + j] =
          relu_of(greater(top, bottom, &low));
#ifdef GPU
      s->where[at] = FLOAT(EITHER(low, below, above) + 2u * low);
#else
      s->right[at] = EITHER(low, below, above);
      s->lower[at] = low;
#endif
    }
}

#define POOLED(filters_at_once, wide) \
  TILES(&p->team, filters_at_once, s.filters, s.P, s.Q / wide, \
        pooled(count, wide, &s, w, b, at, line_, unit_ * wide, y))

INTERNAL void stage(const Pass *p, const Layer *layer) {
  const Stage s = stage_of(p, layer);
  const float *b = p->row + layer->bias;
  const Vectors y = x_of(p, layer->out);
#ifdef GPU
  /* as large tiles as keep most members busy: reading, not adding, takes the time */
#define FITS(filters_at_once, wide) \
  (s.filters % filters_at_once == 0 && s.Q % wide == 0 && \
   are_busy(s.filters / filters_at_once * s.P * (s.Q / wide)))
  const float *w = pack_taps(p, &s, p->row + layer->weight);
  if (FITS(8, 1)) POOLED(8, 1)
  else if (FITS(6, 2)) POOLED(6, 2)
  else if (FITS(4, 2)) POOLED(4, 2)
  else POOLED(4, 1)
#else
  const float *w = p->row + layer->weight;
  POOLED(FILTERS, 1)
#endif
}

#ifdef GPU
/* sum [count, 5] = the gradient of a line of taps of `count` filters, for the channel and line x.
 * A window of two lines moves over x; in each pooled position one of four places has a gradient. */
INLINE void correlate(const int count, const Stage *s, Vectors x, Vectors d, Vectors where,
                      F (*sum)[5]) {
  const int area = s->P * s->Q;
  UNROLL for (int o = 0; o < count; o++)
    UNROLL for (int i = 0; i < 5; i++) sum[o][i] = ZERO;
  for (int p = 0; p < s->P; p++) {
    const Vectors upper = x + 2 * p * s->W, under = upper + s->W;
    F u[6], v[6];
    UNROLL for (int i = 0; i < 4; i++) u[i] = upper[i], v[i] = under[i];
    UNROLL_2 for (int q = 0; q < s->Q; q++) {
      UNROLL for (int i = 4; i < 6; i++) u[i] = upper[2 * q + i], v[i] = under[2 * q + i];
      UNROLL for (int o = 0; o < count; o++) {
        const U code = BITS(where[o * area + p * s->Q + q]);
        const F slope = d[o * s->out_plane + p * s->out_line + q];
        const F left = PICK(code & 1, ZERO, slope), right = PICK(code & 1, slope, ZERO);
        F line[6];
        UNROLL for (int i = 0; i < 6; i++) line[i] = PICK(code & 2, v[i], u[i]);
        UNROLL for (int i = 0; i < 5; i++) {
          sum[o][i] = FMA(left, line[i], sum[o][i]);
          sum[o][i] = FMA(right, line[i + 1], sum[o][i]);
        }
      }
      UNROLL for (int i = 0; i < 4; i++) u[i] = u[i + 2], v[i] = v[i + 2];
    }
  }
}

#define CORRELATE(filters_at_once) \
  TILES(&p->team, filters_at_once, s->filters, s->C, 5, { \
    F sum[count][5]; \
    correlate(count, s, s->x + (line_ * s->plane + unit_ * s->W), d + at * s->out_plane, \
              s->where + at * s->P * s->Q, sum); \
    UNROLL for (int o = 0; o < count; o++) \
      leave(5, p, g, sums, ((at + o) * s->C + line_) * 25 + 5 * unit_, sum[o]); \
  })
#else
/* sum [5, 5] at `count` columns = the gradient of a filter's taps, for one channel x. In each
 * pooled position one of four places has a gradient: x is moved to the right where it is there, and
 * the gradient up or down is 0. */
INLINE void correlate(const int count, const Stage *s, const F *x, const F *d, const M *right,
                      const M *lower, F *out) {
  F sum[5][5];
  UNROLL for (int line = 0; line < 5; line++)
    UNROLL for (int i = 0; i < count; i++) sum[line][i] = ZERO;
  for (int32_t p = 0; p < s->P; p++)
    for (int32_t q = 0; q < s->Q; q++) {
      const int32_t at = p * s->Q + q;
      const M r = right[at], low = lower[at];
      const F slope = d[p * s->out_line + q];
      const F up = PICK(low, ZERO, slope), down = PICK(low, slope, ZERO);
      UNROLL for (int line = 0; line < 6; line++) {
        const F *from = x + (2 * p + line) * s->W + 2 * q;
        F first = from[0];
        UNROLL for (int i = 0; i < count; i++) {
          const F next = held(from[i + 1], 2), v = PICK(r, next, first);
          if (line < 5) sum[line][i] = FMA(up, v, sum[line][i]);
          if (line > 0) sum[line - 1][i] = FMA(down, v, sum[line - 1][i]);
          first = next;
        }
      }
    }
  UNROLL for (int line = 0; line < 5; line++)
    UNROLL for (int i = 0; i < count; i++) out[5 * line + i] = sum[line][i];
}

#endif

/* The gradients of all taps. */
INTERNAL void stage_taps(const Pass *p, const Layer *layer, const Stage *s, Vectors d) {
  const int32_t area = s->P * s->Q;
  const Vectors sums = scratch_of(p);
  float *g = p->g + layer->weight;
#ifdef GPU
  /* as many filters at once as keep most members busy */
  const int lines = 5 * s->C * s->filters;
  if (s->filters % 4 == 0 && are_busy(lines / 4)) CORRELATE(4)
  else if (s->filters % 3 == 0 && are_busy(lines / 3)) CORRELATE(3)
  else if (s->filters % 2 == 0 && are_busy(lines / 2)) CORRELATE(2)
  else CORRELATE(1)
#else
  SHARE(&p->team, item, s->C * s->filters) {
    const int32_t o = item / s->C, c = item % s->C;
    F sum[25];
    BLOCKS(TAPS, 5,
           correlate(count, s, s->x + c * s->plane + at, d + o * s->out_plane, s->right + o * area,
                     s->lower + o * area, sum + at))
    leave(25, p, g, sums, item * 25, sum);
  }
#endif
  SHARE(&p->team, o, s->filters) {
    F total = ZERO;
    for (int32_t row = 0; row < s->P; row++)
      for (int32_t column = 0; column < s->Q; column++)
        total += d[o * s->out_plane + row * s->out_line + column];
    leave(1, p, p->g + layer->bias, sums + 25 * s->C * s->filters, o, &total);
  }
  collect(p, g, sums, 25 * s->C * s->filters);
  collect(p, p->g + layer->bias, sums + 25 * s->C * s->filters, s->filters);
}

#ifdef GPU
/* Weights as `spread_line` reads them: lines of 5, each at a multiple of 16 bytes. */
enum { LINE_OF_TAPS = 8 };
INLINE float *lines_of_taps(const Pass *p, const Stage *s) {
  return floats_at(scratch_of(p)) + s->filters * (25 * s->C + 1) * LANES;
}
/* [filters, P, Q, 4] the gradient of each pooled position where its four places are. */
INLINE Vectors places_of(const Pass *p, const Stage *s) {
  return scratch_of(p) + s->filters * (28 * s->C + 1);
}
INTERNAL void prepare_inputs(const Pass *p, const Layer *layer, const Stage *s, Vectors d) {
  float *packed = lines_of_taps(p, s);
  const float *w = p->row + layer->weight;
  const Vectors places = places_of(p, s);
  SHARE_NUMBERS(&p->team, i, s->filters * s->C * 25)
    packed[i / 5 * LINE_OF_TAPS + i % 5] = w[i];
  PLACES(&p->team, s->filters, s->P, s->Q, {
    const U code = BITS(s->where[of_]);
    const F slope = d[plane_ * s->out_plane + line_ * s->out_line + unit_];
    UNROLL for (int i = 0; i < 4; i++) places[4 * of_ + i] = PICK(code == i, slope, ZERO);
  })
}

/* Add to line `y` of the inputs' gradient dx, for `count` channels from `first` on, what comes from
 * the pooled positions whose windows of 6 x 6 it crosses, in the order of `spread`. */
INLINE void spread_line(const int count, const Pass *p, const Stage *s, int first, int y,
                        Vectors dx) {
  const float *w = lines_of_taps(p, s);
  const Vectors places = places_of(p, s);
  const int ahead = divisor(count == 1 ? 8 : 4, s->filters); /* filters that are read at once */
  for (int row = (y > 5 ? y - 4 : 0) / 2; row < s->P && 2 * row <= y; row++) {
    const int line = y - 2 * row;
    F sum[3][6];
    UNROLL for (int c = 0; c < count; c++)
      UNROLL for (int x = 0; x < 4; x++) sum[c][x] = dx[(first + c) * s->plane + y * s->W + x];
    for (int q = 0; q < s->Q; q++) {
      const Vectors to = dx + first * s->plane + y * s->W + 2 * q;
      UNROLL for (int c = 0; c < count; c++)
        UNROLL for (int x = 4; x < 6; x++) sum[c][x] = to[c * s->plane + x];
      for (int low = line > 4; low < 2 && low <= line; low++)
        for (int from = 0; from < s->filters; from += ahead) {
          F left[8], right[8];
          float taps[8][3][5];
          UNROLL for (int k = 0; k < ahead; k++) {
            const int o = from + k;
            const Vectors at = places + 4 * ((o * s->P + row) * s->Q + q) + 2 * low;
            left[k] = at[0], right[k] = at[1];
            UNROLL for (int c = 0; c < count; c++)
              read_aligned(5, w + ((o * s->C + first + c) * 5 + line - low) * LINE_OF_TAPS,
                           taps[k][c]);
          }
          UNROLL for (int k = 0; k < ahead; k++)
            UNROLL for (int c = 0; c < count; c++)
              UNROLL for (int kx = 0; kx < 5; kx++) {
                sum[c][kx] = FMA(taps[k][c][kx], left[k], sum[c][kx]);
                sum[c][kx + 1] = FMA(taps[k][c][kx], right[k], sum[c][kx + 1]);
              }
        }
      UNROLL for (int c = 0; c < count; c++) {
        UNROLL for (int x = 0; x < 2; x++) to[c * s->plane + x] = sum[c][x];
        UNROLL for (int x = 0; x < 4; x++) sum[c][x] = sum[c][x + 2];
      }
    }
    UNROLL for (int c = 0; c < count; c++)
      UNROLL for (int x = 0; x < 4; x++)
        dx[(first + c) * s->plane + y * s->W + 2 * s->Q + x] = sum[c][x];
  }
}

#define SPREAD(channels) \
  TILES(&p->team, channels, s->C, in->lines, 1, { \
    UNROLL for (int c = 0; c < count; c++) \
      for (int x = 0; x < in->units && !(layer->adds & 1); x++) \
        dx[(at + c) * s->plane + line_ * s->W + x] = ZERO; \
    spread_line(count, p, s, at, line_, dx); \
  })

/* The gradient of the inputs: some channels of a line each. */
INTERNAL void stage_inputs(const Pass *p, const Layer *layer, const Stage *s) {
  const Value *in = &p->net->value[layer->in];
  const Vectors dx = d_of(p, layer->in);
  if (are_busy(s->C / 3 * in->lines)) SPREAD(3)
  else SPREAD(1)
}
#else
/* d += what comes from one pooled position, for `count` channels of a stage's input: a window of 6
 * x 6. `places` [4, filters] is the gradient of the position where its four places are. */
INLINE void spread(const int count, const Stage *s, const float *w, const F *places, F *d) {
  for (int line = 0; line < 6; line++) {
    F sum[CHANNELS][6];
    UNROLL for (int c = 0; c < count; c++)
      UNROLL for (int x = 0; x < 6; x++) sum[c][x] = d[c * s->plane + line * s->W + x];
    for (int low = line > 4; low < 2 && low <= line; low++)
      for (int32_t o = 0; o < s->filters; o++) {
        const float *tap = w + (o * s->C * 5 + line - low) * 5;
        const F left = places[2 * low * s->filters + o],
                right = places[(2 * low + 1) * s->filters + o];
        UNROLL for (int kx = 0; kx < 5; kx++)
          UNROLL for (int c = 0; c < count; c++) {
            const F f = FILL(tap[c * 25 + kx]);
            sum[c][kx] = FMA(f, left, sum[c][kx]);
            sum[c][kx + 1] = FMA(f, right, sum[c][kx + 1]);
          }
      }
    UNROLL for (int c = 0; c < count; c++)
      UNROLL for (int x = 0; x < 6; x++) d[c * s->plane + line * s->W + x] = sum[c][x];
  }
}

/* The gradient of the inputs, for the channels of this member. */
INTERNAL void stage_inputs(const Pass *p, const Layer *layer, const Stage *s, Vectors d) {
  const int32_t area = s->P * s->Q;
  const int32_t first = part_of(&p->team, s->C, p->team.member);
  const int32_t channels = part_of(&p->team, s->C, p->team.member + 1) - first;
  F *dx = d_of(p, layer->in) + first * s->plane;
  F *places = p->own;
  const float *w = p->row + layer->weight + first * 25;
  if (!(layer->adds & 1)) clear_gradient(p, layer->in);
  meet(&p->team);
  for (int32_t row = 0; row < s->P; row++)
    for (int32_t column = 0; column < s->Q; column++) {
      for (int32_t o = 0; o < s->filters; o++) {
        const int32_t from = o * area + row * s->Q + column;
        const F slope = d[o * s->out_plane + row * s->out_line + column];
        const F left = PICK(s->right[from], ZERO, slope), right = PICK(s->right[from], slope, ZERO);
        places[o] = PICK(s->lower[from], ZERO, left);
        places[s->filters + o] = PICK(s->lower[from], ZERO, right);
        places[2 * s->filters + o] = PICK(s->lower[from], left, ZERO);
        places[3 * s->filters + o] = PICK(s->lower[from], right, ZERO);
      }
      F *window = dx + 2 * row * s->W + 2 * column;
      BLOCKS(CHANNELS, channels,
             spread(count, s, w + at * 25, places, window + at * s->plane))
    }
}
#endif

INTERNAL void stage_back(const Pass *p, const Layer *layer) {
  const Stage s = stage_of(p, layer);
  const Value *out = &p->net->value[layer->out];
  const Vectors d = d_of(p, layer->out), y = x_of(p, layer->out);
  EACH_OF(p, out, d[at] = PICK(ABOVE(y[at], ZERO), d[at], ZERO))
  meet(&p->team);
#ifdef GPU
  if (wanted(p, layer->in)) prepare_inputs(p, layer, &s, d);
#endif
  stage_taps(p, layer, &s, d);
#ifdef GPU
  if (wanted(p, layer->in)) stage_inputs(p, layer, &s);
#else
  if (wanted(p, layer->in)) stage_inputs(p, layer, &s, d);
#endif
}
