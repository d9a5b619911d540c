/* Functions of each number by itself. number: what the function takes; each kind says what. */

/* Run `call` for each number of a layer's input and output that is this member's; both have the
 * same planes, lines and units: `here` and `there` are where in them it lies. */
#define EACH(p, layer, ...) \
  const Value *in_ = &(p)->net->value[(layer)->in], *out_ = &(p)->net->value[(layer)->out]; \
  PLACES( \
      &(p)->team, in_->planes, in_->lines, in_->units, \
      const int64_t here = (int64_t)plane_ * in_->plane + (int64_t)line_ * in_->line + unit_; \
      const int64_t there = (int64_t)plane_ * out_->plane + (int64_t)line_ * out_->line + unit_; \
      __VA_ARGS__)

/* The two functions of a kind: y of x, and the gradient by x of y's gradient d. a and b are the
 * layer's numbers. */
#define FUNCTION(name, value, slope) \
  INTERNAL void name(const Pass *p, const Layer *layer) { \
    const F a = FILL(layer->number[0]), b = FILL(layer->number[1]); \
    const Vectors from = x_of(p, layer->in), to = x_of(p, layer->out); \
    (void)a, (void)b; \
    EACH(p, layer, const F x = from[here]; to[there] = value) \
  } \
  INTERNAL void name##_back(const Pass *p, const Layer *layer) { \
    const F a = FILL(layer->number[0]), b = FILL(layer->number[1]); \
    const Vectors from = x_of(p, layer->in), to = x_of(p, layer->out); \
    const Vectors d_from = d_of(p, layer->in), d_to = d_of(p, layer->out); \
    const int adds = layer->adds & 1; \
    (void)a, (void)b; \
    EACH(p, layer, const F x = from[here], y = to[there], d = d_to[there], dx = slope; \
         (void)x, (void)y; put(&d_from[here], dx, adds)) \
  }

INLINE F absolute(F x) { return FLOAT(BITS(x) & 0x7fffffffu); }
INLINE F signed_as(F magnitude, F x) {
  return FLOAT((BITS(magnitude) & 0x7fffffffu) | (BITS(x) & 0x80000000u));
}

INLINE F sigmoid_of(F x) {
  const F e = exponential(ZERO - absolute(x)), s = FILL(1.f) / (FILL(1.f) + e);
  return PICK(ABOVE(ZERO, x), e * s, s);
}

/* To 1e-7: a polynomial near 0, else by exp (Cephes). */
INLINE F tanh_of(F x) {
  static const float c[4] = {2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f,
                             -3.33332819422e-1f};
  const F size = absolute(x), z = x * x, e = exponential(ZERO - 2.f * size);
  F near = FILL(-5.70498872745e-3f);
  for (int i = 0; i < 4; i++) near = FMA(near, z, FILL(c[i]));
  near = FMA(near * z, x, x);
  return PICK(ABOVE(size, FILL(.625f)), signed_as((1.f - e) / (1.f + e), x), near);
}

/* The normal distribution's share below x, to 1e-7 (Abramowitz and Stegun, 7.1.26, of the tail). */
INLINE F normal_below(F x, F *density) {
  static const float c[4] = {-1.453152027f, 1.421413741f, -.284496736f, .254829592f};
  const F z = absolute(x) * .70710678f, e = exponential(ZERO - z * z),
          t = 1.f / FMA(FILL(.3275911f), z, FILL(1.f));
  F tail = FILL(1.061405429f);
  for (int i = 0; i < 4; i++) tail = FMA(tail, t, FILL(c[i]));
  tail = .5f * tail * t * e;
  *density = e * .39894228f;
  return PICK(ABOVE(ZERO, x), tail, 1.f - tail);
}
INLINE F gelu_of(F x) {
  F density;
  return x * normal_below(x, &density);
}
INLINE F gelu_slope(F x) {
  F density;
  const F below = normal_below(x, &density);
  return FMA(x, density, below);
}

/* GELU by tanh: x / 2 (1 + tanh(k (x + c x^3))). */
INLINE F inner_of(F x) { return .79788456f * FMA(.044715f * x * x, x, x); }
INLINE F gelu_tanh_of(F x) { return .5f * x * (1.f + tanh_of(inner_of(x))); }
INLINE F gelu_tanh_slope(F x) {
  const F t = tanh_of(inner_of(x)), by_x = .79788456f * FMA(FILL(.134145f), x * x, FILL(1.f));
  return FMA(.5f * x * (1.f - t * t), by_x, .5f * (1.f + t));
}

FUNCTION(relu, relu_of(x), PICK(ABOVE(y, ZERO), d, ZERO))
/* a is the slope below 0. */
FUNCTION(leaky_relu, PICK(ABOVE(x, ZERO), x, a * x), PICK(ABOVE(x, ZERO), d, a * d))
FUNCTION(squash, tanh_of(x), d * (1.f - y * y))
FUNCTION(sigmoid, sigmoid_of(x), d * (y * (1.f - y)))
FUNCTION(silu, x * sigmoid_of(x), d * FMA(y, 1.f - sigmoid_of(x), sigmoid_of(x)))
FUNCTION(gelu, gelu_of(x), d * gelu_slope(x))
FUNCTION(gelu_tanh, gelu_tanh_of(x), d * gelu_tanh_slope(x))
FUNCTION(line, FMA(a, x, b), a * d)
/* a (e^x - 1) below 0; not-a-number stays. */
FUNCTION(elu, PICK(ABOVE(ZERO, x), a * (exponential(x) - 1.f), x), PICK(ABOVE(ZERO, x), d * (y + a), d))
FUNCTION(root, ROOT(x), .5f * d / y)
FUNCTION(inverse, 1.f / x, ZERO - d * (y * y))
/* From a to b; the gradient at a and b goes through clamp, and not through hardtanh. */
FUNCTION(clamp, PICK(ABOVE(a, x), a, PICK(ABOVE(x, b), b, x)),
         PICK(ABOVE(a, x), ZERO, PICK(ABOVE(x, b), ZERO, d)))
FUNCTION(hardtanh, PICK(ABOVE(a, x), a, PICK(ABOVE(x, b), b, x)),
         PICK(ABOVE(x, a) | NO_NUMBER(x), PICK(ABOVE(b, x) | NO_NUMBER(x), d, ZERO), ZERO))
