/* A convolution of 5x5, stride 1, without padding, then max-pool of 2x2 and ReLU, in one: the
 * stages of models/cnn.py.
 *
 * size: -. weight [O, C, 5, 5], bias [O]. space: [2, O, P, Q] masks. P Q pooled height and
 * width. Scratch: a vector for each weight and bias. Own: [4, O].
 */
typedef struct {
  int32_t W, C, plane, filters, P, Q, out_line, out_plane;
  Vectors x;
  Masks right, lower; /* [filters, P, Q] where in its 2 x 2 the greatest was */
} Stage;

INLINE Stage stage_of(const Pass *p, const Layer *layer) {
  const Value *in = &p->net->value[layer->in], *out = &p->net->value[layer->out];
  const Vectors space = p->arena + layer->space;
  const int32_t area = out->planes * out->lines * out->units;
  const Stage s = {in->line,         in->planes,    in->plane,         out->planes,
                   out->lines,       out->units,    out->line,         out->plane,
                   p->arena + in->x, MASKS(space), MASKS(space + area)};
  return s;
}

/* Write y, `count` filters at one pooled position: four sums of a filter, pool and ReLU. */
INLINE void pooled(const int count, const Stage *s, const float *w, const float *b, int32_t first,
                   int32_t row, int32_t column, Vectors y) {
  F sum[8][4];
  UNROLL for (int i = 0; i < count; i++)
    sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = FILL(b[i]);
  for (int32_t c = 0; c < s->C; c++)
    for (int32_t ky = 0; ky < 5; ky++) {
      const Vectors upper = s->x + (c * s->plane + (2 * row + ky) * s->W + 2 * column);
      const Vectors under = upper + s->W;
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
    const int32_t at = ((first + i) * s->P + row) * s->Q + column;
    y[(first + i) * s->out_plane + row * s->out_line + column] = relu_of(greater(top, bottom, &low));
    s->right[at] = EITHER(low, below, above);
    s->lower[at] = low;
  }
}

static void stage(const Pass *p, const Layer *layer) {
  const Stage s = stage_of(p, layer);
  const int32_t each = 25 * s.C;
  const float *w = p->row + layer->weight, *b = p->row + layer->bias;
  const Vectors y = x_of(p, layer->out);
  TILES(&p->team, FILTERS, s.filters, s.P, s.Q,
        pooled(count, &s, w + at * each, b + at, at, line_, unit_, y))
}

/* sum [lines, columns] = the gradient of that many lines and columns of a filter's taps, for one
 * channel x. In each pooled position one of four places has a gradient: x is moved to the right
 * where it is there, and the gradient up or down is 0. */
INLINE void correlate(const int lines, const int columns, const Stage *s, Vectors x, Vectors d,
                      Masks right, Masks lower, F *out) {
  F sum[5][5];
  UNROLL for (int line = 0; line < lines; line++)
    UNROLL for (int i = 0; i < columns; i++) sum[line][i] = ZERO;
  for (int32_t p = 0; p < s->P; p++)
    for (int32_t q = 0; q < s->Q; q++) {
      const int32_t at = p * s->Q + q;
      const M r = right[at], low = lower[at];
      const F slope = d[p * s->out_line + q];
      const F up = PICK(low, ZERO, slope), down = PICK(low, slope, ZERO);
      UNROLL for (int line = 0; line <= lines; line++) {
        const Vectors from = x + ((2 * p + line) * s->W + 2 * q);
        F first = from[0];
        UNROLL for (int i = 0; i < columns; i++) {
          const F next = held(from[i + 1], 2), v = PICK(r, next, first);
          if (line < lines) sum[line][i] = FMA(up, v, sum[line][i]);
          if (line > 0) sum[line - 1][i] = FMA(down, v, sum[line - 1][i]);
          first = next;
        }
      }
    }
  UNROLL for (int line = 0; line < lines; line++)
    UNROLL for (int i = 0; i < columns; i++) out[columns * line + i] = sum[line][i];
}

/* The gradients of all taps. */
static void stage_taps(const Pass *p, const Layer *layer, const Stage *s, Vectors d) {
  const int32_t area = s->P * s->Q;
  const Vectors sums = scratch_of(p);
  float *g = p->g + layer->weight;
#ifdef GPU
  /* a line of taps each: neighbours have the same channel and line of other filters */
  SHARE(&p->team, item, 5 * s->C * s->filters) {
    const int o = item % s->filters, c = item / s->filters / 5, line = item / s->filters % 5;
    F sum[5];
    correlate(1, 5, s, s->x + (c * s->plane + line * s->W), d + o * s->out_plane,
              s->right + o * area, s->lower + o * area, sum);
    leave(5, p, g, sums, (o * s->C + c) * 25 + 5 * line, sum);
  }
#else
  SHARE(&p->team, item, s->C * s->filters) {
    const int32_t o = item / s->C, c = item % s->C;
    F sum[25];
    BLOCKS(TAPS, 5, {
      F part[25];
      correlate(5, count, s, s->x + c * s->plane + at, d + o * s->out_plane, s->right + o * area,
                s->lower + o * area, part);
      UNROLL for (int line = 0; line < 5; line++)
        UNROLL for (int i = 0; i < count; i++) sum[5 * line + at + i] = part[count * line + i];
    })
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
/* The gradient of the inputs, of each by itself: what `spread` adds to it, in that order. */
static void stage_inputs(const Pass *p, const Layer *layer, const Stage *s, Vectors d) {
  const Value *in = &p->net->value[layer->in];
  const Vectors dx = d_of(p, layer->in);
  const float *w = p->row + layer->weight;
  PLACES(&p->team, s->C, in->lines, in->units, {
    const int to = plane_ * s->plane + line_ * s->W + unit_;
    F sum = layer->adds & 1 ? dx[to] : ZERO;
    for (int row = (line_ > 5 ? line_ - 4 : 0) / 2; row < s->P && 2 * row <= line_; row++)
      for (int q = (unit_ > 5 ? unit_ - 4 : 0) / 2; q < s->Q && 2 * q <= unit_; q++) {
        const int line = line_ - 2 * row, u = unit_ - 2 * q;
        for (int low = line > 4; low < 2 && low <= line; low++)
          for (int o = 0; o < s->filters; o++) {
            const int from = (o * s->P + row) * s->Q + q;
            const F slope = d[o * s->out_plane + row * s->out_line + q];
            const F of_line = (s->lower[from] != 0) == low ? slope : ZERO;
            const float *tap = w + (o * s->C + plane_) * 25 + (line - low) * 5;
            if (u > 0) sum = FMA(tap[u - 1], PICK(s->right[from], of_line, ZERO), sum);
            if (u < 5) sum = FMA(tap[u], PICK(s->right[from], ZERO, of_line), sum);
          }
      }
    dx[to] = sum;
  })
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
static void stage_inputs(const Pass *p, const Layer *layer, const Stage *s, Vectors d) {
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

static void stage_back(const Pass *p, const Layer *layer) {
  const Stage s = stage_of(p, layer);
  const Value *out = &p->net->value[layer->out];
  const Vectors d = d_of(p, layer->out), y = x_of(p, layer->out);
  EACH_OF(p, out, d[at] = PICK(ABOVE(y[at], ZERO), d[at], ZERO))
  meet(&p->team);
  stage_taps(p, layer, &s, d);
  if (wanted(p, layer->in)) stage_inputs(p, layer, &s, d);
}
