/* norm: GroupNorm, InstanceNorm or LayerNorm. The planes of a value are split into groups, each of
 * which is brought to mean 0 and deviation 1, then scaled and shifted. RMSNorm leaves the mean and
 * divides by the root of the mean square.
 *
 * size: groups; whether each number of a group has a scale and shift, which all groups share (else
 * each plane has one); whether the mean is left. number[0]: added to the variance. weight (the
 * scales) and bias (the shifts) may be missing. Space: mean and 1 / deviation of each group.
 * Scratch: two vectors for each scale, and for each group.
 *
 * One member computes the sums of a group; all share the places of what is done to each number. */
enum { NORM_GROUPS, NORM_EACH, NORM_LEAVES_MEAN };

/* Run a statement, the last argument, for each i below `units`. The caller names i and k, which is
 * i modulo 4 and a constant for the compiler: the partial sum to which number i goes. */
#define FOR_IN_FOURS(i, k, units, ...) \
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
  const float *scale, *shift;   /* or NULL */
  int32_t groups, planes, each; /* groups; planes of a group; NORM_EACH */
} Norm;

INLINE Norm norm_of(const Pass *p, const Layer *layer) {
  const Value *in = &p->net->value[layer->in];
  const float *scale = layer->weight < 0 ? NULL : weight_of(p, layer);
  const int32_t groups = layer->size[NORM_GROUPS];
  const Norm n = {in, &p->net->value[layer->out], scale, bias_of(p, layer), groups,
                  in->planes / groups, layer->size[NORM_EACH]};
  return n;
}

/* Return which scale and shift belong to a number of the input. */
INLINE int64_t parameter_of(const Norm *n, int32_t plane, int32_t line, int32_t unit) {
  return n->each ? ((int64_t)(plane % n->planes) * n->in->lines + line) * n->in->units + unit
                 : plane;
}

/* Run a statement, the last argument, for each line of a group. The caller names four variables:
 * the line's number in its plane; where it starts in the input and output; and its first scale. */
#define FOR_GROUP_LINES(n, group, line, in_x, in_y, parameter, ...) \
  for (int32_t i_ = 0; i_ < (n).planes; i_++) \
    for (int32_t line = 0; line < (n).in->lines; line++) { \
      const int64_t plane_ = (int64_t)(group) * (n).planes + i_; \
      const int64_t in_x = place_in((n).in, plane_, line, 0); \
      const int64_t in_y = place_in((n).out, plane_, line, 0); \
      const int64_t parameter = parameter_of(&(n), plane_, line, 0); \
      __VA_ARGS__; \
    }

static void norm(const Pass *p, const Layer *layer) {
  const Norm n = norm_of(p, layer);
  const Vectors x = x_of(p, layer), y = y_of(p, layer);
  const Vectors moments = p->arena + layer->space; /* mean and 1 / deviation of each group */
  const int32_t units = n.in->units;
  const float count = (float)n.planes * n.in->lines * units;
  SHARE(&p->team, g, n.groups) {
    Vec sum[4] = {ZERO, ZERO, ZERO, ZERO}, square[4] = {ZERO, ZERO, ZERO, ZERO};
    FOR_GROUP_LINES(n, g, line, in_x, in_y, parameter,
                    FOR_IN_FOURS(i, k, units, sum[k] += x[in_x + i]))
    const Vec mean = layer->size[NORM_LEAVES_MEAN] ? ZERO : sum_of_four(sum) / count;
    FOR_GROUP_LINES(n, g, line, in_x, in_y, parameter, FOR_IN_FOURS(i, k, units, {
      const Vec v = x[in_x + i] - mean;
      square[k] = FMA(v, v, square[k]);
    }))
    moments[2 * g] = mean;
    moments[2 * g + 1] = 1.f / SQRT(sum_of_four(square) / count + layer->number[0]);
  }
  barrier(&p->team);
  SHARE_PLACES(&p->team, plane, n.in->planes, line, n.in->lines, unit, units, {
    const int64_t g = plane / n.planes, parameter = parameter_of(&n, plane, line, unit);
    const Vec scale = n.scale ? FILL(n.scale[parameter]) : FILL(1.f);
    const Vec shift = n.shift ? FILL(n.shift[parameter]) : ZERO;
    const Vec v = x[place_in(n.in, plane, line, unit)] - moments[2 * g];
    y[place_in(n.out, plane, line, unit)] = FMA(v * moments[2 * g + 1], scale, shift);
  })
}

/* Write the gradients of the scales and shifts that all groups share, for this member's units. */
static void norm_parameters(const Pass *p, const Norm *n, Vectors x, Vectors dy, Vectors moments,
                            Vectors scales, Vectors shifts) {
  for (int32_t g = 0; g < n->groups; g++) {
    const Vec mean = moments[2 * g], by = moments[2 * g + 1];
    FOR_GROUP_LINES(*n, g, line, in_x, in_y, parameter, SHARE(&p->team, i, n->in->units) {
      const Vec v = (x[in_x + i] - mean) * by, d = dy[in_y + i];
      scales[parameter + i] = FMA(d, v, g ? scales[parameter + i] : ZERO);
      shifts[parameter + i] = (g ? shifts[parameter + i] : ZERO) + d;
    })
  }
}

/* With v the normed x: dx = (scale dy - mean of scale dy - v * mean of scale dy v) / deviation. */
static void norm_back(const Pass *p, const Layer *layer) {
  const Norm n = norm_of(p, layer);
  const Vectors x = x_of(p, layer), dx = dx_of(p, layer);
  const Vectors dy = dy_of(p, layer), moments = p->arena + layer->space;
  const int32_t units = n.in->units, adds = layer->adds & 1;
  const float count = (float)n.planes * n.in->lines * units;
  const int64_t parameters = n.each ? (int64_t)n.planes * n.in->lines * units : n.in->planes;
  const Vectors scales = scratch_of(p), shifts = scales + parameters; /* their gradients */
  const Vectors means = shifts + parameters; /* of each group's scale dy, and scale dy v */
  if (n.each && (n.scale || n.shift)) norm_parameters(p, &n, x, dy, moments, scales, shifts);
  SHARE(&p->team, g, n.groups) {
    const Vec mean = moments[2 * g], by = moments[2 * g + 1];
    /* sums of dy and dy v over a plane, then of scale dy and scale dy v over the group */
    Vec plane_sum = ZERO, plane_product = ZERO, group_sum = ZERO, group_product = ZERO;
    FOR_GROUP_LINES(n, g, line, in_x, in_y, parameter, {
      Vec sum[4] = {ZERO, ZERO, ZERO, ZERO}, product[4] = {ZERO, ZERO, ZERO, ZERO};
      const float *each = n.each && n.scale ? n.scale + parameter : NULL;
      FOR_IN_FOURS(i, k, units, {
        const Vec v = (x[in_x + i] - mean) * by;
        const Vec d = each ? dy[in_y + i] * FILL(each[i]) : dy[in_y + i];
        sum[k] += d, product[k] = FMA(d, v, product[k]);
      })
      plane_sum += sum_of_four(sum), plane_product += sum_of_four(product);
      if (line + 1 == n.in->lines) { /* the plane's last */
        const Vec scale = n.scale && !n.each ? FILL(n.scale[parameter]) : FILL(1.f);
        if (!n.each) scales[parameter] = plane_product, shifts[parameter] = plane_sum;
        group_sum = FMA(scale, plane_sum, group_sum);
        group_product = FMA(scale, plane_product, group_product);
        plane_sum = plane_product = ZERO;
      }
    })
    means[2 * g] = layer->size[NORM_LEAVES_MEAN] ? ZERO : group_sum / count;
    means[2 * g + 1] = group_product / count;
  }
  barrier(&p->team);
  if (layer->weight >= 0) add_image_sums(p, p->gradient + layer->weight, scales, parameters);
  if (layer->bias >= 0) add_image_sums(p, p->gradient + layer->bias, shifts, parameters);
  if (!needs_gradient(p, layer->in)) return;
  /* dx = (scale dy - mean - v * mean) / deviation */
  SHARE_PLACES(&p->team, plane, n.in->planes, line, n.in->lines, unit, units, {
    const int64_t g = plane / n.planes, parameter = parameter_of(&n, plane, line, unit);
    const int64_t in_x = place_in(n.in, plane, line, unit);
    const Vec by = moments[2 * g + 1], v = (x[in_x] - moments[2 * g]) * by;
    const Vec scale = n.scale ? FILL(n.scale[parameter]) : FILL(1.f);
    const Vec d = dy[place_in(n.out, plane, line, unit)];
    const Vec slope = FMA(scale, d, ZERO - means[2 * g]) - v * means[2 * g + 1];
    write_or_add(&dx[in_x], by * slope, adds);
  })
}
