/* LSTM (four gates, in PyTorch's order), GRU (three) and a plain tanh (one) over the lines, which
 * are the time steps, from a zero state.
 *
 * in [L, G H]: W x + b of each line. weight [G H, H] and bias are those of the state h. out [L, H]:
 * h of each line. size: 1, 1 (of `products`), whether the last line comes first. Each step keeps
 * its gates, then the cell state c (LSTM) or the term that the reset gate multiplies (GRU); in the
 * backward pass the gates' gradients. Scratch: what is carried from step to step (2 H), sums for
 * the weights and biases.
 */
enum { RECURRENT_REVERSED = 2 };

typedef struct {
  int32_t lines, gates, units, in_line, out_line, reversed;
  const float *w, *b;
  Vectors steps;
} Recurrence;

INLINE Recurrence recurrence_of(const Pass *p, const Layer *layer) {
  const Value *in = &p->net->value[layer->in], *out = &p->net->value[layer->out];
  const Recurrence r = {out->lines, in->units / out->units, out->units, in->line, out->line,
                        layer->size[RECURRENT_REVERSED], p->row + layer->weight,
                        layer->bias < 0 ? NULL : p->row + layer->bias, p->arena + layer->space};
  return r;
}
/* Return which line step t reads, and where the numbers of that step are. */
INLINE int32_t line_of(const Recurrence *r, int32_t t) {
  return r->reversed ? r->lines - 1 - t : t;
}
INLINE Vectors step_of(const Recurrence *r, int32_t t) {
  return r->steps + (int64_t)t * (r->gates + 1) * r->units;
}

static void recurrent(const Pass *p, const Layer *layer) {
  const Recurrence r = recurrence_of(p, layer);
  const int32_t H = r.units, all = r.gates * H;
  for (int32_t t = 0; t < r.lines; t++) {
    const Vectors x = x_of(p, layer->in) + line_of(&r, t) * r.in_line, s = step_of(&r, t);
    const Vectors h = x_of(p, layer->out) + line_of(&r, t ? t - 1 : 0) * r.out_line;
    const Vectors y = x_of(p, layer->out) + line_of(&r, t) * r.out_line;
    if (t)
      OUTPUTS(&p->team, UNITS, all,
              apply(count, H, h, r.w + at * H, r.b ? r.b + at : NULL, s + at))
    else
      SHARE(&p->team, i, all) s[i] = r.b ? FILL(r.b[i]) : ZERO;
    meet(&p->team);
    SHARE(&p->team, j, H) {
      if (r.gates == 4) {
        const F i = sigmoid_of(x[j] + s[j]), f = sigmoid_of(x[H + j] + s[H + j]);
        const F g = tanh_of(x[2 * H + j] + s[2 * H + j]);
        const F o = sigmoid_of(x[3 * H + j] + s[3 * H + j]);
        const F c = t ? FMA(f, step_of(&r, t - 1)[all + j], i * g) : i * g;
        s[j] = i, s[H + j] = f, s[2 * H + j] = g, s[3 * H + j] = o, s[all + j] = c;
        y[j] = o * tanh_of(c);
      } else if (r.gates == 3) {
        const F reset = sigmoid_of(x[j] + s[j]), z = sigmoid_of(x[H + j] + s[H + j]);
        const F from = s[2 * H + j], n = tanh_of(FMA(reset, from, x[2 * H + j]));
        s[j] = reset, s[H + j] = z, s[2 * H + j] = n, s[all + j] = from;
        y[j] = FMA(z, (t ? h[j] : ZERO) - n, n);
      } else {
        y[j] = s[j] = tanh_of(x[j] + s[j]);
      }
    }
    meet(&p->team);
  }
}

/* The gradient through a gate: of a sigmoid, or of tanh, y. */
INLINE F by_sigmoid(F d, F y) { return d * (y * (1.f - y)); }
INLINE F by_tanh(F d, F y) { return d * (1.f - y * y); }

static void recurrent_back(const Pass *p, const Layer *layer) {
  const Recurrence r = recurrence_of(p, layer);
  const int32_t H = r.units, all = r.gates * H, adds = layer->adds & 1;
  const Vectors carried = scratch_of(p), sums = carried + 2 * H, of_biases = sums + all * H;
  SHARE(&p->team, j, H) carried[j] = carried[H + j] = ZERO;
  for (int32_t t = r.lines - 1; t >= 0; t--) {
    const Vectors dx = d_of(p, layer->in) + line_of(&r, t) * r.in_line, s = step_of(&r, t);
    const Vectors h = x_of(p, layer->out) + line_of(&r, t ? t - 1 : 0) * r.out_line;
    const Vectors dy = d_of(p, layer->out) + line_of(&r, t) * r.out_line;
    meet(&p->team);
    SHARE(&p->team, j, H) {
      const F d = dy[j] + carried[j];
      if (r.gates == 4) {
        const F i = s[j], f = s[H + j], g = s[2 * H + j], o = s[3 * H + j];
        const F u = tanh_of(s[all + j]), dc = carried[H + j] + by_tanh(d * o, u);
        carried[H + j] = dc * f;
        s[j] = by_sigmoid(dc * g, i), s[2 * H + j] = by_tanh(dc * i, g);
        s[H + j] = t ? by_sigmoid(dc * step_of(&r, t - 1)[all + j], f) : ZERO;
        s[3 * H + j] = by_sigmoid(d * u, o);
      } else if (r.gates == 3) {
        const F reset = s[j], z = s[H + j], n = s[2 * H + j], dn = by_tanh(d * (1.f - z), n);
        s[j] = by_sigmoid(dn * s[all + j], reset);
        s[H + j] = by_sigmoid(d * ((t ? h[j] : ZERO) - n), z);
        s[2 * H + j] = dn * reset;
        carried[j] = d * z;
        put(&dx[2 * H + j], dn, adds);
      } else {
        s[j] = by_tanh(d, s[j]);
      }
      for (int32_t k = 0; k < (r.gates == 3 ? 2 : r.gates); k++)
        put(&dx[k * H + j], s[k * H + j], adds);
    }
    meet(&p->team);
    if (t)
      OUTPUTS(&p->team, UNITS_BACK, H,
              apply_back(count, 0, H, all, r.w + at, s, carried + at, r.gates == 3))
  }
  /* the weights' gradients: the gates' times the state before, summed over steps; the four numbers
   * are steps in memory along outer, inner, row and column */
  const int32_t gates[4] = {0, 0, 1, (r.gates + 1) * H}, turned[4] = {0, 0, H, 1};
  const int32_t states[4] = {0, 0, r.reversed ? -r.out_line : r.out_line, 1};
  products(p, layer, all, H, r.lines - 1, batch(step_of(&r, 1), gates),
           batch(x_of(p, layer->out) + line_of(&r, 0) * r.out_line, states), batch(sums, turned),
           0);
  SHARE(&p->team, i, all) {
    F sum = ZERO;
    for (int32_t t = 0; t < r.lines; t++) sum += step_of(&r, t)[i];
    of_biases[i] = sum;
  }
  meet(&p->team);
  add_up(p, p->g + layer->weight, sums, (int64_t)all * H);
  if (r.b) add_up(p, p->g + layer->bias, of_biases, all);
}
