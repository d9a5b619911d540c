/* Activations and other functions of each number by itself, such as ReLU. lanes.c calls the two
 * functions that FUNCTION defines for each kind. layer->number: the constants a and b of a kind. */

/* Define the forward and backward pass of a kind, by two expressions: `y_of_x`, the output y of an
 * input x; and `dx_of_d`, the gradient of the loss by x, from x, y and d, the gradient by y. Both
 * may use a and b. The input and output have the same planes, lines and units. */
#define FUNCTION(kind, y_of_x, dx_of_d) \
  INTERNAL void kind(const Pass *p, const Layer *layer) { \
    const Value *in = &p->net->value[layer->in], *out = &p->net->value[layer->out]; \
    const Vec a = FILL(layer->number[0]), b = FILL(layer->number[1]); \
    const Vectors inputs = x_of(p, layer), outputs = y_of(p, layer); \
    SHARE_PLACES(&p->team, plane, in->planes, line, in->lines, unit, in->units, { \
      const int64_t in_place = place_in(in, plane, line, unit); \
      const int64_t out_place = place_in(out, plane, line, unit); \
      const Vec x = inputs[in_place]; \
      outputs[out_place] = y_of_x; \
    }) \
  } \
  INTERNAL void kind##_back(const Pass *p, const Layer *layer) { \
    const Value *in = &p->net->value[layer->in], *out = &p->net->value[layer->out]; \
    const Vec a = FILL(layer->number[0]), b = FILL(layer->number[1]); \
    const Vectors inputs = x_of(p, layer), outputs = y_of(p, layer); \
    const Vectors dx = dx_of(p, layer), dy = dy_of(p, layer); \
    const int adds = layer->adds & 1; \
    SHARE_PLACES(&p->team, plane, in->planes, line, in->lines, unit, in->units, { \
      const int64_t in_place = place_in(in, plane, line, unit); \
      const int64_t out_place = place_in(out, plane, line, unit); \
      const Vec x = inputs[in_place], y = outputs[out_place], d = dy[out_place]; \
      write_or_add(&dx[in_place], dx_of_d, adds); \
    }) \
  }

/* |x|; the size of `magnitude` with the sign of x. */
INLINE Vec absolute(Vec x) { return AS_FLOAT(AS_BITS(x) & 0x7fffffffu); }
INLINE Vec signed_as(Vec magnitude, Vec x) {
  return AS_FLOAT((AS_BITS(magnitude) & 0x7fffffffu) | (AS_BITS(x) & 0x80000000u));
}

INLINE Vec sigmoid_of(Vec x) {
  const Vec e = exponential(ZERO - absolute(x)), s = FILL(1.f) / (FILL(1.f) + e);
  return SELECT(ABOVE(ZERO, x), e * s, s);
}

/* tanh to 1e-7: a polynomial near 0, else by e^-2|x| (Cephes). */
INLINE Vec tanh_of(Vec x) {
  static const float c[4] = {2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f,
                             -3.33332819422e-1f};
  const Vec size = absolute(x), z = x * x, e = exponential(ZERO - 2.f * size);
  Vec near = FILL(-5.70498872745e-3f);
  for (int i = 0; i < 4; i++) near = FMA(near, z, FILL(c[i]));
  near = FMA(near * z, x, x);
  return SELECT(ABOVE(size, FILL(.625f)), signed_as((1.f - e) / (1.f + e), x), near);
}

/* Return the probability that a standard normal variable is below x, to 1e-7 (Abramowitz and
 * Stegun, 7.1.26, for the tail), and write the density at x. */
INLINE Vec normal_below(Vec x, Vec *density) {
  static const float c[4] = {-1.453152027f, 1.421413741f, -.284496736f, .254829592f};
  const Vec z = absolute(x) * .70710678f, e = exponential(ZERO - z * z),
            t = 1.f / FMA(FILL(.3275911f), z, FILL(1.f));
  Vec tail = FILL(1.061405429f);
  for (int i = 0; i < 4; i++) tail = FMA(tail, t, FILL(c[i]));
  tail = .5f * tail * t * e;
  *density = e * .39894228f;
  return SELECT(ABOVE(ZERO, x), tail, 1.f - tail);
}
INLINE Vec gelu_of(Vec x) {
  Vec density;
  return x * normal_below(x, &density);
}
INLINE Vec gelu_slope(Vec x) {
  Vec density;
  const Vec below = normal_below(x, &density);
  return FMA(x, density, below);
}

/* GELU by tanh: x / 2 (1 + tanh(k (x + c x^3))). */
INLINE Vec inner_of(Vec x) { return .79788456f * FMA(.044715f * x * x, x, x); }
INLINE Vec gelu_tanh_of(Vec x) { return .5f * x * (1.f + tanh_of(inner_of(x))); }
INLINE Vec gelu_tanh_slope(Vec x) {
  const Vec t = tanh_of(inner_of(x)), by_x = .79788456f * FMA(FILL(.134145f), x * x, FILL(1.f));
  return FMA(.5f * x * (1.f - t * t), by_x, .5f * (1.f + t));
}

/* In each FUNCTION, x is the input, y the output and d its gradient; a and b are constants. */
FUNCTION(relu, relu_of(x), SELECT(ABOVE(y, ZERO), d, ZERO))
/* a is the slope below 0. */
FUNCTION(leaky_relu, SELECT(ABOVE(x, ZERO), x, a *x), SELECT(ABOVE(x, ZERO), d, a *d))
FUNCTION(squash, tanh_of(x), d * (1.f - y * y))
FUNCTION(sigmoid, sigmoid_of(x), d * (y * (1.f - y)))
FUNCTION(silu, x * sigmoid_of(x), d * FMA(y, 1.f - sigmoid_of(x), sigmoid_of(x)))
FUNCTION(gelu, gelu_of(x), d * gelu_slope(x))
FUNCTION(gelu_tanh, gelu_tanh_of(x), d * gelu_tanh_slope(x))
FUNCTION(line, FMA(a, x, b), a * d)
/* a (e^x - 1) below 0, with that slope at 0, as PyTorch's; not-a-number stays. */
FUNCTION(elu, SELECT(ABOVE(ZERO, x), a *(exponential(x) - 1.f), x),
         SELECT(ABOVE(x, ZERO), d, d *(y + a)))
FUNCTION(root, SQRT(x), .5f * d / y)
FUNCTION(inverse, 1.f / x, ZERO - d * (y * y))
/* x limited to a ... b. At a and b the gradient goes through clamp, and not through hardtanh. */
FUNCTION(clamp, SELECT(ABOVE(a, x), a, SELECT(ABOVE(x, b), b, x)),
         SELECT(ABOVE(a, x), ZERO, SELECT(ABOVE(x, b), ZERO, d)))
FUNCTION(hardtanh, SELECT(ABOVE(a, x), a, SELECT(ABOVE(x, b), b, x)),
         SELECT(ABOVE(x, a) | IS_NAN(x), SELECT(ABOVE(b, x) | IS_NAN(x), d, ZERO), ZERO))
