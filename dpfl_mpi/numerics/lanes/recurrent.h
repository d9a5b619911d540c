/* recurrent: LSTM (four gates, in PyTorch's order), GRU (three) or a plain tanh (one), over the
 * lines of a value, which are the time steps, from a state of zeros.
 *
 * The input [lines, gates * units] is W x + b of each line, which a dense layer before computed.
 * The output [lines, units] is the state h after each line. weight [gates * units, units] and bias
 * are those that h is multiplied with. size: 1, 1 (the batch of `products`, attention.h), whether
 * the last line comes first. Space: for each step its gates, which the backward pass replaces by
 * their gradients; then the cell state c (LSTM), or the term that the reset gate multiplies (GRU).
 * Scratch: what the backward pass carries from step to step, the gradients of h and c; then those
 * of weight and bias. */
enum { RECURRENT_REVERSED = 2 };

typedef struct {
  int32_t lines, gates, units, in_line_step, out_line_step, reversed;
  const float *w, *b;
  Vectors space;
} Recurrence;

INLINE Recurrence recurrence_of(const Pass *p, const Layer *layer) {
  const Value *in = &p->net->value[layer->in], *out = &p->net->value[layer->out];
  const Recurrence r = {out->lines, in->units / out->units, out->units, in->line_step,
                        out->line_step, layer->size[RECURRENT_REVERSED], weight_of(p, layer),
                        bias_of(p, layer), p->arena + layer->space};
  return r;
}
/* Return which line step t reads, and where in the space the numbers of that step are. */
INLINE int32_t line_of(const Recurrence *r, int32_t t) {
  return r->reversed ? r->lines - 1 - t : t;
}
INLINE Vectors step_of(const Recurrence *r, int32_t t) {
  return r->space + (int64_t)t * (r->gates + 1) * r->units;
}

static void recurrent(const Pass *p, const Layer *layer) {
  const Recurrence r = recurrence_of(p, layer);
  const int32_t units = r.units, all = r.gates * units;
  for (int32_t t = 0; t < r.lines; t++) {
    const Vectors x = x_of(p, layer) + line_of(&r, t) * r.in_line_step;
    const Vectors s = step_of(&r, t), y = y_of(p, layer) + line_of(&r, t) * r.out_line_step;
    const Vectors h = y_of(p, layer) + line_of(&r, t ? t - 1 : 0) * r.out_line_step;
    /* what the state before this step adds to each gate */
    if (t)
      SHARE_BLOCKS(&p->team, first, count, UNITS, all,
                   apply(count, units, h, r.w + first * units, r.b ? r.b + first : NULL, s + first))
    else
      SHARE(&p->team, i, all) s[i] = r.b ? FILL(r.b[i]) : ZERO;
    barrier(&p->team);
    /* The gates and the new state; x and s have the arguments of all gates, one after the other.
     * LSTM: input i, forget f, cell g and output o. GRU: reset, update z and new n. */
    SHARE(&p->team, j, units) {
      const int64_t j1 = units + j, j2 = 2 * units + j, j3 = 3 * units + j;
      if (r.gates == 4) {
        const Vec i = sigmoid_of(x[j] + s[j]), f = sigmoid_of(x[j1] + s[j1]);
        const Vec g = tanh_of(x[j2] + s[j2]), o = sigmoid_of(x[j3] + s[j3]);
        const Vec c = t ? FMA(f, step_of(&r, t - 1)[all + j], i * g) : i * g;
        s[j] = i, s[j1] = f, s[j2] = g, s[j3] = o, s[all + j] = c;
        y[j] = o * tanh_of(c);
      } else if (r.gates == 3) {
        const Vec reset = sigmoid_of(x[j] + s[j]), z = sigmoid_of(x[j1] + s[j1]);
        const Vec term = s[j2], n = tanh_of(FMA(reset, term, x[j2]));
        s[j] = reset, s[j1] = z, s[j2] = n, s[all + j] = term;
        y[j] = FMA(z, (t ? h[j] : ZERO) - n, n);
      } else {
        y[j] = s[j] = tanh_of(x[j] + s[j]);
      }
    }
    barrier(&p->team);
  }
}

/* Return the gradient of the argument of a sigmoid or tanh, whose value is y and gradient d. */
INLINE Vec by_sigmoid(Vec d, Vec y) { return d * (y * (1.f - y)); }
INLINE Vec by_tanh(Vec d, Vec y) { return d * (1.f - y * y); }

static void recurrent_back(const Pass *p, const Layer *layer) {
  const Recurrence r = recurrence_of(p, layer);
  const int32_t units = r.units, all = r.gates * units, adds = layer->adds & 1;
  const Vectors dh = scratch_of(p), dc = dh + units;
  const Vectors weights = dc + units, biases = weights + all * units; /* their gradients */
  SHARE(&p->team, j, units) dh[j] = dc[j] = ZERO;
  for (int32_t t = r.lines - 1; t >= 0; t--) {
    const Vectors dx = dx_of(p, layer) + line_of(&r, t) * r.in_line_step;
    const Vectors dy = dy_of(p, layer) + line_of(&r, t) * r.out_line_step;
    const Vectors h = y_of(p, layer) + line_of(&r, t ? t - 1 : 0) * r.out_line_step;
    const Vectors s = step_of(&r, t);
    barrier(&p->team);
    /* the gates' gradients replace the gates */
    SHARE(&p->team, j, units) {
      const int64_t j1 = units + j, j2 = 2 * units + j, j3 = 3 * units + j;
      const Vec d = dy[j] + dh[j];
      if (r.gates == 4) {
        const Vec i = s[j], f = s[j1], g = s[j2], o = s[j3], u = tanh_of(s[all + j]);
        const Vec d_cell = dc[j] + by_tanh(d * o, u);
        dc[j] = d_cell * f;
        s[j] = by_sigmoid(d_cell * g, i), s[j2] = by_tanh(d_cell * i, g);
        s[j1] = t ? by_sigmoid(d_cell * step_of(&r, t - 1)[all + j], f) : ZERO;
        s[j3] = by_sigmoid(d * u, o);
      } else if (r.gates == 3) {
        const Vec reset = s[j], z = s[j1], n = s[j2], dn = by_tanh(d * (1.f - z), n);
        s[j] = by_sigmoid(dn * s[all + j], reset);
        s[j1] = by_sigmoid(d * ((t ? h[j] : ZERO) - n), z);
        s[j2] = dn * reset;
        dh[j] = d * z;
        write_or_add(&dx[j2], dn, adds);
      } else {
        s[j] = by_tanh(d, s[j]);
      }
      for (int32_t k = 0; k < (r.gates == 3 ? 2 : r.gates); k++)
        write_or_add(&dx[k * units + j], s[k * units + j], adds);
    }
    barrier(&p->team);
    if (t)
      SHARE_BLOCKS(&p->team, first, count, UNITS_BACK, units,
                   apply_back(count, 0, units, all, r.w + first, s, dh + first, r.gates == 3))
  }
  /* The weights' gradients: the gates' gradients times the state before, summed over the steps. The
   * four numbers are those that `batch` of attention.h takes. */
  const int32_t gate_steps[4] = {0, 0, 1, (r.gates + 1) * units};
  const int32_t weight_steps[4] = {0, 0, units, 1};
  const int32_t state_steps[4] = {0, 0, r.reversed ? -r.out_line_step : r.out_line_step, 1};
  const Vectors states = y_of(p, layer) + line_of(&r, 0) * r.out_line_step;
  products(p, layer, all, units, r.lines - 1, batch(step_of(&r, 1), gate_steps),
           batch(states, state_steps), batch(weights, weight_steps), 0);
  SHARE(&p->team, i, all) {
    Vec sum = ZERO;
    for (int32_t t = 0; t < r.lines; t++) sum += step_of(&r, t)[i];
    biases[i] = sum;
  }
  barrier(&p->team);
  add_image_sums(p, p->gradient + layer->weight, weights, (int64_t)all * units);
  if (r.b) add_image_sums(p, p->gradient + layer->bias, biases, all);
}
