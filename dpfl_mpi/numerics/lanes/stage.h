/* A convolution of 5x5, stride 1, without padding, then max-pool of 2x2 and ReLU, in one: the
 * stages of models/cnn.py.
 *
 * size: -. weight [O, C, 5, 5], bias [O]. space: [2, O, P, Q] masks and [4, O] vectors. P Q pooled
 * height and width.
 */
typedef struct {
  int32_t W, C, plane, filters, P, Q, out_line, out_plane;
  const F *x;
  F *places; /* [4, filters] the gradient of one pooled position, where its four places are */
  M *right, *lower; /* [filters, P, Q] where in its 2 x 2 the greatest was */
} Stage;

static Stage stage_of(const Pass *p, const Layer *layer) {
  const Value *in = &p->net->value[layer->in], *out = &p->net->value[layer->out];
  F *space = p->arena + layer->space;
  const int32_t area = out->planes * out->lines * out->units;
  return (Stage){in->line,         in->planes,       in->plane,  out->planes,
                 out->lines,       out->units,       out->line,  out->plane,
                 p->arena + in->x, space + 2 * area, (M *)space, (M *)(space + area)};
}

/* y [count, P, Q] = `count` filters, pool and ReLU: four sums of a filter for each pooled position.
 */
INLINE void stage_block(const int count, const Stage *s, const float *w, const float *b, F *y,
                        M *right, M *lower) {
  for (int32_t p = 0; p < s->P; p++)
    for (int32_t q = 0; q < s->Q; q++) {
      F sum[8][4];
      UNROLL for (int i = 0; i < count; i++)
        sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = FILL(b[i]);
      for (int32_t c = 0; c < s->C; c++)
        for (int32_t ky = 0; ky < 5; ky++) {
          const F *upper = s->x + c * s->plane + (2 * p + ky) * s->W + 2 * q, *under = upper + s->W;
          const float *tap = w + c * 25 + ky * 5;
          F u = upper[0], v = under[0];
          UNROLL for (int kx = 0; kx < 5; kx++) {
            const F next_u = upper[kx + 1], next_v = under[kx + 1];
            UNROLL for (int i = 0; i < count; i++) {
              const F f = FILL(tap[i * s->C * 25 + kx]);
              sum[i][0] = FMA(f, u, sum[i][0]);
              sum[i][1] = FMA(f, next_u, sum[i][1]);
              sum[i][2] = FMA(f, v, sum[i][2]);
              sum[i][3] = FMA(f, next_v, sum[i][3]);
            }
            u = next_u, v = next_v;
          }
        }
      UNROLL for (int i = 0; i < count; i++) {
        M above, below, low;
        const F top = greater(sum[i][0], sum[i][1], &above);
        const F bottom = greater(sum[i][2], sum[i][3], &below);
        const int32_t at = (i * s->P + p) * s->Q + q;
        y[i * s->out_plane + p * s->out_line + q] = relu_of(greater(top, bottom, &low));
        right[at] = EITHER(low, below, above);
        lower[at] = low;
      }
    }
}

static void stage(const Pass *p, const Layer *layer) {
  const Stage s = stage_of(p, layer);
  const int32_t each = 25 * s.C, area = s.P * s.Q;
  const float *w = p->row + layer->weight, *b = p->row + layer->bias;
  F *y = x_of(p, layer->out);
  BLOCKS(FILTERS, s.filters,
         stage_block(count, &s, w + at * each, b + at, y + at * s.out_plane, s.right + at * area,
                     s.lower + at * area))
}

/* sum [5, 5] at `count` columns = the gradient of a filter's taps, for one channel x. In each
 * pooled position one of four places has a gradient: x is moved to the right where it is there, and
 * the gradient up or down is 0. */
INLINE void correlate(const int count, const Stage *s, const F *x, const F *d, const M *right,
                      const M *lower, F *out) {
  F sum[5][5];
  UNROLL for (int line = 0; line < 5; line++) UNROLL
    for (int i = 0; i < count; i++) sum[line][i] = ZERO;
  for (int32_t p = 0; p < s->P; p++)
    for (int32_t q = 0; q < s->Q; q++) {
      const int32_t at = p * s->Q + q;
      const M r = right[at];
      const F slope = d[p * s->out_line + q];
      const F up = PICK(lower[at], ZERO, slope), down = PICK(lower[at], slope, ZERO);
      UNROLL for (int line = 0; line < 6; line++) {
        const F *from = x + (2 * p + line) * s->W + 2 * q;
        F here = from[0];
        UNROLL for (int i = 0; i < count; i++) {
          const F next = held(from[i + 1], 2), v = PICK(r, next, here);
          if (line < 5) sum[line][i] = FMA(up, v, sum[line][i]);
          if (line > 0) sum[line - 1][i] = FMA(down, v, sum[line - 1][i]);
          here = next;
        }
      }
    }
  UNROLL for (int line = 0; line < 5; line++) UNROLL
    for (int i = 0; i < count; i++) out[5 * line + i] = sum[line][i];
}

/* d += what comes from one pooled position, for `count` channels of a stage's input: a window of 6
 * x 6. */
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

static void stage_back(const Pass *p, const Layer *layer) {
  const Stage s = stage_of(p, layer);
  const Value *out = &p->net->value[layer->out];
  const int32_t area = s.P * s.Q;
  F *d = d_of(p, layer->out), *dx = d_of(p, layer->in);
  const F *y = x_of(p, layer->out);
  LINES(out, for (int32_t i = 0; i < out->units; i++) d[at + i] =
                 PICK(ABOVE(y[at + i], ZERO), d[at + i], ZERO))
  for (int32_t o = 0; o < s.filters; o++) {
    const F *slope = d + o * s.out_plane;
    const M *right = s.right + o * area, *lower = s.lower + o * area;
    F total = ZERO, sum[25];
    for (int32_t c = 0; c < s.C; c++) {
      BLOCKS(TAPS, 5, correlate(count, &s, s.x + c * s.plane + at, slope, right, lower, sum + at))
      add_up(p->g + layer->weight + (o * s.C + c) * 25, sum, 25, p->n);
    }
    for (int32_t row = 0; row < s.P; row++)
      for (int32_t column = 0; column < s.Q; column++) total += slope[row * s.out_line + column];
    add_up(p->g + layer->bias + o, &total, 1, p->n);
  }
  if (!wanted(p, layer->in)) return;
  if (!(layer->adds & 1)) clear_gradient(p, layer->in);
  F *places = s.places;
  for (int32_t row = 0; row < s.P; row++)
    for (int32_t column = 0; column < s.Q; column++) {
      for (int32_t o = 0; o < s.filters; o++) {
        const int32_t from = o * area + row * s.Q + column;
        const F slope = d[o * s.out_plane + row * s.out_line + column];
        const F left = PICK(s.right[from], ZERO, slope), right = PICK(s.right[from], slope, ZERO);
        places[o] = PICK(s.lower[from], ZERO, left),
        places[s.filters + o] = PICK(s.lower[from], ZERO, right);
        places[2 * s.filters + o] = PICK(s.lower[from], left, ZERO);
        places[3 * s.filters + o] = PICK(s.lower[from], right, ZERO);
      }
      F *window = dx + 2 * row * s.W + 2 * column;
      BLOCKS(CHANNELS, s.C,
             spread(count, &s, p->row + layer->weight + at * 25, places, window + at * s.plane))
    }
}
