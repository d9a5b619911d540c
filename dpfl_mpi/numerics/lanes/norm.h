/* GroupNorm, InstanceNorm, LayerNorm: each group of planes is brought to mean 0 and deviation 1,
 * then scaled and shifted. RMSNorm leaves the mean, and divides by the root of the mean square.
 *
 * size: groups, whether there is a scale and shift for each number of a group (else for each
 * plane), whether the mean is left. number[0]: added to the variance. weight and bias: either may be missing. Space: mean and
 * 1 / deviation of each group. Scratch: two vectors for each scale, and for each group.
 *
 * Sums of a group are one member's; what is done to each number is shared out by lines.
 */
enum { NORM_GROUPS, NORM_EACH, NORM_LEAVES_MEAN };

/* Run `call` for each number i of a line; k is i modulo 4, which the compiler knows. */
#define IN_FOURS(units, ...) \
  { \
    int32_t start_ = 0; \
    for (; start_ + 4 <= (units); start_ += 4) \
      UNROLL for (int k = 0; k < 4; k++) { const int32_t i = start_ + k; __VA_ARGS__; } \
    UNROLL for (int k = 0; k < 3; k++) \
      if (start_ + k < (units)) { const int32_t i = start_ + k; __VA_ARGS__; } \
  }

/* A layer's parameters and shape. */
typedef struct {
  const Value *in, *out;
  const float *scale, *shift;
  int32_t groups, planes, each; /* planes of a group */
} Norm;

INLINE Norm norm_of(const Pass *p, const Layer *layer) {
  const Value *in = &p->net->value[layer->in];
  const Norm n = {in, &p->net->value[layer->out],
                  layer->weight < 0 ? NULL : p->row + layer->weight,
                  layer->bias < 0 ? NULL : p->row + layer->bias, layer->size[NORM_GROUPS],
                  in->planes / layer->size[NORM_GROUPS], layer->size[NORM_EACH]};
  return n;
}

/* Return the number of the parameters of a number of the input. */
INLINE int64_t parameter_of(const Norm *n, int32_t plane, int32_t line, int32_t unit) {
  return n->each ? ((int64_t)(plane % n->planes) * n->in->lines + line) * n->in->units + unit
                 : plane;
}

/* Run `call` for each line of a group: `from` and `to` are where it lies in the input and output,
 * `first` is the number of its first parameter. */
#define GROUP_LINES(n, group, ...) \
  for (int32_t plane_ = 0; plane_ < (n).planes; plane_++) \
    for (int32_t line_ = 0; line_ < (n).in->lines; line_++) { \
      const int64_t of_ = (int64_t)(group) * (n).planes + plane_; \
      const int64_t from = of_ * (n).in->plane + (int64_t)line_ * (n).in->line; \
      const int64_t to = of_ * (n).out->plane + (int64_t)line_ * (n).out->line; \
      const int64_t first = \
          (n).each ? ((int64_t)plane_ * (n).in->lines + line_) * (n).in->units : of_; \
      (void)from, (void)to, (void)first; \
      __VA_ARGS__; \
    }

static void norm(const Pass *p, const Layer *layer) {
  const Norm n = norm_of(p, layer);
  const Vectors x = x_of(p, layer->in), y = x_of(p, layer->out), kept = p->arena + layer->space;
  const int32_t units = n.in->units;
  const float count = (float)n.planes * n.in->lines * units;
  SHARE(&p->team, g, n.groups) {
    F sum[4] = {ZERO, ZERO, ZERO, ZERO}, square[4] = {ZERO, ZERO, ZERO, ZERO};
    GROUP_LINES(n, g, IN_FOURS(units, sum[k] += x[from + i]))
    const F middle = layer->size[NORM_LEAVES_MEAN] ? ZERO : together(sum) / count;
    GROUP_LINES(n, g,
                IN_FOURS(units, const F v = x[from + i] - middle; square[k] = FMA(v, v, square[k])))
    kept[2 * g] = middle;
    kept[2 * g + 1] = 1.f / ROOT(together(square) / count + layer->number[0]);
  }
  meet(&p->team);
  EACH(p, layer, {
    const int64_t g = plane_ / n.planes, at = parameter_of(&n, plane_, line_, unit_);
    const F scale = n.scale ? FILL(n.scale[at]) : FILL(1.f);
    const F shift = n.shift ? FILL(n.shift[at]) : ZERO;
    y[there] = FMA((x[here] - kept[2 * g]) * kept[2 * g + 1], scale, shift);
  })
}

/* The gradients of a scale and shift for each number of a group, which all groups share: those of
 * this member's units. */
static void norm_parameters(const Pass *p, const Norm *n, Vectors x, Vectors dy, Vectors kept,
                            Vectors scales, Vectors shifts) {
  for (int32_t g = 0; g < n->groups; g++) {
    const F middle = kept[2 * g], by = kept[2 * g + 1];
    GROUP_LINES(*n, g, SHARE(&p->team, i, n->in->units) {
      const F v = (x[from + i] - middle) * by, d = dy[to + i];
      scales[first + i] = FMA(d, v, g ? scales[first + i] : ZERO);
      shifts[first + i] = (g ? shifts[first + i] : ZERO) + d;
    })
  }
}

static void norm_back(const Pass *p, const Layer *layer) {
  const Norm n = norm_of(p, layer);
  const Vectors x = x_of(p, layer->in), dy = d_of(p, layer->out), dx = d_of(p, layer->in);
  const Vectors kept = p->arena + layer->space;
  const int32_t units = n.in->units, adds = layer->adds & 1;
  const float count = (float)n.planes * n.in->lines * units;
  const int64_t parameters = n.each ? (int64_t)n.planes * n.in->lines * units : n.in->planes;
  const Vectors scales = scratch_of(p), shifts = scales + parameters; /* their gradients */
  const Vectors means = shifts + parameters; /* of d, and of d times the normed x, in each group */
  if (n.each && (n.scale || n.shift)) norm_parameters(p, &n, x, dy, kept, scales, shifts);
  SHARE(&p->team, g, n.groups) {
    const F middle = kept[2 * g], by = kept[2 * g + 1];
    F all = ZERO, moment = ZERO, of_plane = ZERO, moment_of_plane = ZERO;
    GROUP_LINES(n, g, {
      F sum[4] = {ZERO, ZERO, ZERO, ZERO}, product[4] = {ZERO, ZERO, ZERO, ZERO};
      const F scale = n.scale && !n.each ? FILL(n.scale[first]) : FILL(1.f);
      const float *own = n.each && n.scale ? n.scale + first : NULL;
      if (own)
        IN_FOURS(units, const F v = (x[from + i] - middle) * by, d = dy[to + i] * FILL(own[i]);
                 sum[k] += d; product[k] = FMA(d, v, product[k]))
      else
        IN_FOURS(units, const F v = (x[from + i] - middle) * by, d = dy[to + i]; sum[k] += d;
                 product[k] = FMA(d, v, product[k]))
      of_plane += together(sum), moment_of_plane += together(product);
      if (line_ + 1 == n.in->lines) {
        if (!n.each) scales[first] = moment_of_plane, shifts[first] = of_plane;
        all = FMA(scale, of_plane, all), moment = FMA(scale, moment_of_plane, moment);
        of_plane = moment_of_plane = ZERO;
      }
    })
    means[2 * g] = layer->size[NORM_LEAVES_MEAN] ? ZERO : all / count;
    means[2 * g + 1] = moment / count;
  }
  meet(&p->team);
  if (layer->weight >= 0) add_up(p, p->g + layer->weight, scales, parameters);
  if (layer->bias >= 0) add_up(p, p->g + layer->bias, shifts, parameters);
  if (!wanted(p, layer->in)) return;
  EACH(p, layer, {
    const int64_t g = plane_ / n.planes, at = parameter_of(&n, plane_, line_, unit_);
    const F by = kept[2 * g + 1], v = (x[here] - kept[2 * g]) * by;
    const F scale = n.scale ? FILL(n.scale[at]) : FILL(1.f);
    const F d = by * (FMA(scale, dy[there], ZERO - means[2 * g]) - v * means[2 * g + 1]);
    put(&dx[here], d, adds);
  })
}
