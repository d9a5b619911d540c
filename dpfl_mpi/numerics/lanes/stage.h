/* stage: a convolution of 5x5 (stride 1, no padding), a max-pool of 2x2 and ReLU in one pass over
 * the image: the stages of models/cnn.py.
 *
 * A filter is an output channel; a tap is one position of its kernel. A pooled position is a place
 * of the output [filters, rows, columns]. Its pool chooses one of four candidates: the convolution
 * at (2 row, 2 column) and right of and below it. So it reads a window of 6x6 inputs.
 *
 * weight [filters, channels, 5, 5], bias [filters]. Space: which candidate each pooled position has
 * chosen. Scratch: a vector for each weight and bias; on a GPU also weights in another order and
 * dy at the candidates. Private space (CPU): [4, filters]. */
typedef struct {
  Vectors x;
  int32_t x_line_step, x_plane_step, y_line_step, y_plane_step; /* in vectors */
  int32_t channels, filters, rows, columns;
  /* [filters, rows, columns] whether the chosen candidate is a right one, and whether a lower one;
   * on a GPU one number, 1 for right + 2 for lower */
#ifdef GPU
  Vectors chosen;
#else
  Mask *right, *lower;
#endif
} Stage;

INLINE Stage stage_of(const Pass *p, const Layer *layer) {
  const Value *in = &p->net->value[layer->in], *out = &p->net->value[layer->out];
  Stage s = {p->arena + in->start, in->line_step, in->plane_step, out->line_step, out->plane_step,
             in->planes,           out->planes,   out->lines,     out->units};
#ifdef GPU
  s.chosen = p->arena + layer->space;
#else
  s.right = (Mask *)(p->arena + layer->space);
  s.lower = (Mask *)(p->arena + layer->space + out->planes * out->lines * out->units);
#endif
  return s;
}

/* Return where an input and an output lie, and the number of a pooled position. */
INLINE int32_t x_place(const Stage *s, int32_t channel, int32_t line, int32_t column) {
  return channel * s->x_plane_step + line * s->x_line_step + column;
}
INLINE int32_t y_place(const Stage *s, int32_t filter, int32_t row, int32_t column) {
  return filter * s->y_plane_step + row * s->y_line_step + column;
}
INLINE int32_t number_of(const Stage *s, int32_t filter, int32_t row, int32_t column) {
  return (filter * s->rows + row) * s->columns + column;
}

#ifdef GPU
/* Copy the weights as [channels, 5, 5, filters], as `pooled` reads them; the filters of a tap start
 * at a multiple of 16 bytes. */
INLINE int packed_line(const Stage *s) { return (s->filters + 3) / 4 * 4; }

INTERNAL float *pack_taps(const Pass *p, const Stage *s, const float *w) {
  float *packed = floats_at(scratch_of(p));
  SHARE_NUMBERS(&p->team, i, s->filters * s->channels * 25)
    packed[i % (s->channels * 25) * packed_line(s) + i / (s->channels * 25)] = w[i];
  barrier(&p->team);
  return packed;
}
#endif

/* Write y for `count` filters from `first` on at `wide` pooled positions side by side, and which
 * candidates they choose. */
INLINE void pooled(const int count, const int wide, const Stage *s, const float *w, const float *b,
                   int32_t first, int32_t row, int32_t column, Vectors y) {
  Vec sum[8][2][4]; /* of each filter and position, the four candidates */
  UNROLL for (int i = 0; i < count; i++)
    UNROLL for (int j = 0; j < wide; j++)
      UNROLL for (int k = 0; k < 4; k++) sum[i][j][k] = FILL(b[first + i]);
  for (int32_t c = 0; c < s->channels; c++)
    for (int32_t ky = 0; ky < 5; ky++) {
      /* tap line ky reads two lines of inputs, for the upper and the lower candidates; u and v have
       * the inputs that the current tap reads, and move right from tap to tap */
      const Vectors upper = s->x + x_place(s, c, 2 * row + ky, 2 * column);
      const Vectors lower = upper + s->x_line_step;
      Vec u[4], v[4];
      UNROLL for (int x = 0; x < 2 * wide - 1; x++) u[x] = upper[x], v[x] = lower[x];
      UNROLL for (int kx = 0; kx < 5; kx++) {
        u[2 * wide - 1] = upper[kx + 2 * wide - 1], v[2 * wide - 1] = lower[kx + 2 * wide - 1];
#ifdef GPU
        float taps[8];
        read_aligned(count, w + ((c * 5 + ky) * 5 + kx) * packed_line(s) + first, taps);
#else
        const float *tap = w + (first * s->channels + c) * 25 + ky * 5 + kx;
#endif
        UNROLL for (int i = 0; i < count; i++) {
#ifdef GPU
          const Vec weight = taps[i];
#else
          const Vec weight = FILL(tap[i * s->channels * 25]);
#endif
          UNROLL for (int j = 0; j < wide; j++) {
            Vec *four = sum[i][j];
            four[0] = FMA(weight, u[2 * j], four[0]), four[1] = FMA(weight, u[2 * j + 1], four[1]);
            four[2] = FMA(weight, v[2 * j], four[2]), four[3] = FMA(weight, v[2 * j + 1], four[3]);
          }
        }
        UNROLL for (int x = 0; x < 2 * wide - 1; x++) u[x] = u[x + 1], v[x] = v[x + 1];
      }
    }
  /* pool and ReLU */
  UNROLL for (int i = 0; i < count; i++)
    UNROLL for (int j = 0; j < wide; j++) {
      Mask top_right, bottom_right, is_lower;
      const Vec *four = sum[i][j];
      const Vec top = greater(four[0], four[1], &top_right);
      const Vec bottom = greater(four[2], four[3], &bottom_right);
      y[y_place(s, first + i, row, column + j)] = relu_of(greater(top, bottom, &is_lower));
      const Mask is_right = SELECT_MASK(is_lower, bottom_right, top_right);
      const int32_t number = number_of(s, first + i, row, column + j);
#ifdef GPU
      s->chosen[number] = AS_FLOAT(is_right + 2u * is_lower);
#else
      s->right[number] = is_right, s->lower[number] = is_lower;
#endif
    }
}

INTERNAL void stage(const Pass *p, const Layer *layer) {
  const Stage s = stage_of(p, layer);
  const float *b = bias_of(p, layer);
  const Vectors y = y_of(p, layer);
/* Members share tiles of some filters at `wide` pooled positions, by `pooled`. */
#define POOLED(filters_at_once, wide) \
  SHARE_TILES(&p->team, first, count, filters_at_once, s.filters, row, s.rows, tile, \
              s.columns / wide, pooled(count, wide, &s, w, b, first, row, tile * wide, y))
#ifdef GPU
/* Tiles as large as keep most members busy, because reading takes the time, not adding. */
#define FITS(filters_at_once, wide) \
  (s.filters % filters_at_once == 0 && s.columns % wide == 0 && \
   are_busy(s.filters / filters_at_once * s.rows * (s.columns / wide)))
  const float *w = pack_taps(p, &s, weight_of(p, layer));
  if (FITS(8, 1)) POOLED(8, 1)
  else if (s.filters == 6 && FITS(6, 2)) POOLED(6, 2) /* else blocks would not be aligned */
  else if (FITS(4, 2)) POOLED(4, 2)
  else POOLED(4, 1)
#else
  const float *w = weight_of(p, layer);
  POOLED(FILTERS, 1)
#endif
}

#ifdef GPU
/* sum [count, 5] = the gradient of one line of taps of `count` filters, for the channel with inputs
 * x from that line on. Only the candidate that a pooled position has chosen has a gradient. */
INLINE void correlate(const int count, const Stage *s, Vectors x, Vectors dy, Vectors chosen,
                      Vec (*sum)[5]) {
  UNROLL for (int o = 0; o < count; o++)
    UNROLL for (int i = 0; i < 5; i++) sum[o][i] = ZERO;
  for (int row = 0; row < s->rows; row++) {
    /* u and v: six inputs of the upper and the lower line, which move right by two */
    const Vectors upper = x + 2 * row * s->x_line_step, lower = upper + s->x_line_step;
    Vec u[6], v[6];
    UNROLL for (int i = 0; i < 4; i++) u[i] = upper[i], v[i] = lower[i];
    UNROLL_2 for (int column = 0; column < s->columns; column++) {
      UNROLL for (int i = 4; i < 6; i++) u[i] = upper[2 * column + i], v[i] = lower[2 * column + i];
      UNROLL for (int o = 0; o < count; o++) {
        const Bits code = AS_BITS(chosen[number_of(s, o, row, column)]);
        const Vec d = dy[y_place(s, o, row, column)];
        const Vec left = SELECT(code & 1, ZERO, d), right = SELECT(code & 1, d, ZERO);
        Vec line[6];
        UNROLL for (int i = 0; i < 6; i++) line[i] = SELECT(code & 2, v[i], u[i]);
        UNROLL for (int i = 0; i < 5; i++) {
          sum[o][i] = FMA(left, line[i], sum[o][i]);
          sum[o][i] = FMA(right, line[i + 1], sum[o][i]);
        }
      }
      UNROLL for (int i = 0; i < 4; i++) u[i] = u[i + 2], v[i] = v[i + 2];
    }
  }
}
#else
/* sums [5, 5] at `count` columns = the gradient of those taps of a filter, for one channel x. Only
 * the candidate that a pooled position has chosen has a gradient: if it is a right one, x is read
 * one place further right, and the gradient of the upper or the lower line (up, down) is 0. */
INLINE void correlate(const int count, const Stage *s, const Vec *x, const Vec *dy,
                      const Mask *right, const Mask *lower, Vec *sums) {
  Vec sum[5][5];
  UNROLL for (int line = 0; line < 5; line++)
    UNROLL for (int i = 0; i < count; i++) sum[line][i] = ZERO;
  for (int32_t row = 0; row < s->rows; row++)
    for (int32_t column = 0; column < s->columns; column++) {
      const int32_t number = number_of(s, 0, row, column);
      const Mask is_right = right[number], is_lower = lower[number];
      const Vec d = dy[y_place(s, 0, row, column)];
      const Vec up = SELECT(is_lower, ZERO, d), down = SELECT(is_lower, d, ZERO);
      UNROLL for (int line = 0; line < 6; line++) {
        const Vec *inputs = x + (2 * row + line) * s->x_line_step + 2 * column;
        Vec first = inputs[0];
        UNROLL for (int i = 0; i < count; i++) {
          const Vec next = in_register(inputs[i + 1], 2), v = SELECT(is_right, next, first);
          if (line < 5) sum[line][i] = FMA(up, v, sum[line][i]);
          if (line > 0) sum[line - 1][i] = FMA(down, v, sum[line - 1][i]);
          first = next;
        }
      }
    }
  UNROLL for (int line = 0; line < 5; line++)
    UNROLL for (int i = 0; i < count; i++) sums[5 * line + i] = sum[line][i];
}
#endif

/* Add the gradients of weights and biases. */
INTERNAL void stage_taps(const Pass *p, const Layer *layer, const Stage *s, Vectors dy) {
  const int32_t weights = 25 * s->channels * s->filters;
  const Vectors sums = scratch_of(p), bias_sums = sums + weights;
  float *g = p->gradient + layer->weight, *g_bias = p->gradient + layer->bias;
#ifdef GPU
/* Members share lines of taps of some filters, by `correlate`: as many filters at once as keep most
 * members busy. */
#define CORRELATE(at_once) \
  SHARE_TILES(&p->team, first, count, at_once, s->filters, channel, s->channels, line, 5, { \
    Vec sum[count][5]; \
    correlate(count, s, s->x + x_place(s, channel, line, 0), dy + y_place(s, first, 0, 0), \
              s->chosen + number_of(s, first, 0, 0), sum); \
    UNROLL for (int o = 0; o < count; o++) \
      begin_image_sums(5, p, g, sums, ((first + o) * s->channels + channel) * 25 + 5 * line, \
                       sum[o]); \
  })
  const int lines = weights / 5;
  if (s->filters % 4 == 0 && are_busy(lines / 4)) CORRELATE(4)
  else if (s->filters % 3 == 0 && are_busy(lines / 3)) CORRELATE(3)
  else if (s->filters % 2 == 0 && are_busy(lines / 2)) CORRELATE(2)
  else CORRELATE(1)
#else
  SHARE(&p->team, kernel, s->channels * s->filters) {
    const int32_t o = kernel / s->channels, channel = kernel % s->channels;
    Vec sum[25];
    const Mask *right = s->right + number_of(s, o, 0, 0), *lower = s->lower + number_of(s, o, 0, 0);
    FOR_BLOCKS(first, count, TAPS, 0, 5,
               correlate(count, s, s->x + x_place(s, channel, 0, first),
                         dy + y_place(s, o, 0, 0), right, lower, sum + first))
    begin_image_sums(25, p, g, sums, kernel * 25, sum);
  }
#endif
  SHARE(&p->team, o, s->filters) {
    Vec total = ZERO;
    for (int32_t row = 0; row < s->rows; row++)
      for (int32_t column = 0; column < s->columns; column++)
        total += dy[y_place(s, o, row, column)];
    begin_image_sums(1, p, g_bias, bias_sums, o, &total);
  }
  finish_image_sums(p, g, sums, weights);
  finish_image_sums(p, g_bias, bias_sums, s->filters);
}

#ifdef GPU
/* For the inputs' gradient, prepare_inputs copies two things to the scratch space: lines of 5 taps,
 * each at a multiple of 16 bytes; and [filters, rows, columns, 4], the gradient of each pooled
 * position at the candidate that it has chosen, and 0 at the other three. */
enum { LINE_OF_TAPS = 8 };
INLINE float *lines_of_taps(const Pass *p, const Stage *s) {
  return floats_at(scratch_of(p)) + s->filters * (25 * s->channels + 1) * LANES;
}
INLINE Vectors candidates_of(const Pass *p, const Stage *s) {
  return scratch_of(p) + s->filters * (28 * s->channels + 1);
}
INTERNAL void prepare_inputs(const Pass *p, const Layer *layer, const Stage *s, Vectors dy) {
  float *packed = lines_of_taps(p, s);
  const float *w = weight_of(p, layer);
  const Vectors candidates = candidates_of(p, s);
  SHARE_NUMBERS(&p->team, i, s->filters * s->channels * 25)
    packed[i / 5 * LINE_OF_TAPS + i % 5] = w[i];
  SHARE_PLACES(&p->team, o, s->filters, row, s->rows, column, s->columns, {
    const int number = number_of(s, o, row, column);
    const Bits code = AS_BITS(s->chosen[number]);
    const Vec d = dy[y_place(s, o, row, column)];
    UNROLL for (int i = 0; i < 4; i++) candidates[4 * number + i] = SELECT(code == i, d, ZERO);
  })
}

/* Add to line y of the inputs' gradient dx, for `count` channels from `first` on, what comes from
 * all pooled positions whose windows contain it. It adds in the order of `spread` on a CPU, so the
 * bits are the same. */
INLINE void spread_line(const int count, const Pass *p, const Stage *s, int first, int y,
                        Vectors dx) {
  const float *w = lines_of_taps(p, s);
  const Vectors candidates = candidates_of(p, s);
  const int ahead = divisor(count == 1 ? 8 : 4, s->filters); /* filters that are read at once */
  /* rows whose windows, lines 2 row to 2 row + 5, contain y */
  for (int row = (y > 5 ? y - 4 : 0) / 2; row < s->rows && 2 * row <= y; row++) {
    const int line = y - 2 * row; /* of the window */
    Vec sum[3][6];                /* of each channel, dx at the window's six columns of line y */
    UNROLL for (int c = 0; c < count; c++)
      UNROLL for (int x = 0; x < 4; x++) sum[c][x] = dx[x_place(s, first + c, y, x)];
    for (int column = 0; column < s->columns; column++) {
      const Vectors window = dx + x_place(s, first, y, 2 * column);
      UNROLL for (int c = 0; c < count; c++)
        UNROLL for (int x = 4; x < 6; x++) sum[c][x] = window[c * s->x_plane_step + x];
      /* tap line `line - lower` of the upper or lower candidates reads this line */
      for (int lower = line > 4; lower < 2 && lower <= line; lower++)
        for (int from = 0; from < s->filters; from += ahead) {
          Vec left[8], right[8];
          float taps[8][3][5];
          UNROLL for (int k = 0; k < ahead; k++) {
            const int o = from + k;
            const Vectors two = candidates + 4 * number_of(s, o, row, column) + 2 * lower;
            left[k] = two[0], right[k] = two[1];
            UNROLL for (int c = 0; c < count; c++) {
              const int tap_line = (o * s->channels + first + c) * 5 + line - lower;
              read_aligned(5, w + tap_line * LINE_OF_TAPS, taps[k][c]);
            }
          }
          UNROLL for (int k = 0; k < ahead; k++)
            UNROLL for (int c = 0; c < count; c++)
              UNROLL for (int kx = 0; kx < 5; kx++) {
                sum[c][kx] = FMA(taps[k][c][kx], left[k], sum[c][kx]);
                sum[c][kx + 1] = FMA(taps[k][c][kx], right[k], sum[c][kx + 1]);
              }
        }
      /* the first two places are complete; the window moves right by two */
      UNROLL for (int c = 0; c < count; c++) {
        UNROLL for (int x = 0; x < 2; x++) window[c * s->x_plane_step + x] = sum[c][x];
        UNROLL for (int x = 0; x < 4; x++) sum[c][x] = sum[c][x + 2];
      }
    }
    UNROLL for (int c = 0; c < count; c++)
      UNROLL for (int x = 0; x < 4; x++)
        dx[x_place(s, first + c, y, 2 * s->columns + x)] = sum[c][x];
  }
}

/* Compute the gradient of the inputs. Members share lines of some channels, by `spread_line`. */
INTERNAL void stage_inputs(const Pass *p, const Layer *layer, const Stage *s, Vectors dy) {
  const Value *in = &p->net->value[layer->in];
  const Vectors dx = dx_of(p, layer);
#define SPREAD(channels_at_once) \
  SHARE_TILES(&p->team, first, count, channels_at_once, s->channels, line, in->lines, unit, 1, { \
    UNROLL for (int c = 0; c < count; c++) \
      for (int x = 0; x < in->units && !(layer->adds & 1); x++) \
        dx[x_place(s, first + c, line, x)] = ZERO; \
    spread_line(count, p, s, first, line, dx); \
  })
  if (are_busy(s->channels / 3 * in->lines)) SPREAD(3)
  else SPREAD(1)
}
#else
/* Add to dx, for `count` channels, what comes from one pooled position; dx starts at its window of
 * 6x6 inputs. candidates [4, filters]: the position's gradient at the one it has chosen, else 0. */
INLINE void spread(const int count, const Stage *s, const float *w, const Vec *candidates,
                   Vec *dx) {
  for (int line = 0; line < 6; line++) {
    Vec sum[CHANNELS][6];
    UNROLL for (int c = 0; c < count; c++)
      UNROLL for (int x = 0; x < 6; x++) sum[c][x] = dx[x_place(s, c, line, x)];
    /* tap line `line - lower` of the upper or lower candidates reads this line */
    for (int lower = line > 4; lower < 2 && lower <= line; lower++)
      for (int32_t o = 0; o < s->filters; o++) {
        const float *tap = w + (o * s->channels * 5 + line - lower) * 5;
        const Vec left = candidates[2 * lower * s->filters + o];
        const Vec right = candidates[(2 * lower + 1) * s->filters + o];
        UNROLL for (int kx = 0; kx < 5; kx++)
          UNROLL for (int c = 0; c < count; c++) {
            const Vec weight = FILL(tap[c * 25 + kx]);
            sum[c][kx] = FMA(weight, left, sum[c][kx]);
            sum[c][kx + 1] = FMA(weight, right, sum[c][kx + 1]);
          }
      }
    UNROLL for (int c = 0; c < count; c++)
      UNROLL for (int x = 0; x < 6; x++) dx[x_place(s, c, line, x)] = sum[c][x];
  }
}

/* Compute the gradient of the inputs, for the channels of this member. */
INTERNAL void stage_inputs(const Pass *p, const Layer *layer, const Stage *s, Vectors dy) {
  const int32_t first = part_of(&p->team, s->channels, p->team.member), filters = s->filters;
  const int32_t channels = part_of(&p->team, s->channels, p->team.member + 1) - first;
  Vec *dx = dx_of(p, layer) + x_place(s, first, 0, 0), *candidates = p->private_space;
  const float *w = weight_of(p, layer) + first * 25;
  if (!(layer->adds & 1)) clear_gradient(p, layer->in);
  barrier(&p->team);
  for (int32_t row = 0; row < s->rows; row++)
    for (int32_t column = 0; column < s->columns; column++) {
      for (int32_t o = 0; o < filters; o++) {
        const int32_t number = number_of(s, o, row, column);
        const Mask is_right = s->right[number], is_lower = s->lower[number];
        const Vec d = dy[y_place(s, o, row, column)];
        const Vec left = SELECT(is_right, ZERO, d), right = SELECT(is_right, d, ZERO);
        candidates[o] = SELECT(is_lower, ZERO, left);
        candidates[filters + o] = SELECT(is_lower, ZERO, right);
        candidates[2 * filters + o] = SELECT(is_lower, left, ZERO);
        candidates[3 * filters + o] = SELECT(is_lower, right, ZERO);
      }
      FOR_BLOCKS(c, count, CHANNELS, 0, channels,
                 spread(count, s, w + c * 25, candidates, dx + x_place(s, c, 2 * row, 2 * column)))
    }
}
#endif

INTERNAL void stage_back(const Pass *p, const Layer *layer) {
  const Stage s = stage_of(p, layer);
  const Value *out = &p->net->value[layer->out];
  const Vectors dy = dy_of(p, layer), y = y_of(p, layer);
  /* ReLU: where y is 0, dy becomes 0 */
  SHARE_PLACES(&p->team, plane, out->planes, line, out->lines, unit, out->units, {
    const int64_t place = place_in(out, plane, line, unit);
    dy[place] = SELECT(ABOVE(y[place], ZERO), dy[place], ZERO);
  })
  barrier(&p->team);
#ifdef GPU
  if (needs_gradient(p, layer->in)) prepare_inputs(p, layer, &s, dy);
#endif
  stage_taps(p, layer, &s, dy); /* on a GPU with a barrier, after which stage_inputs may read */
  if (needs_gradient(p, layer->in)) stage_inputs(p, layer, &s, dy);
}
