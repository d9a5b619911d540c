/* Tokens (whole numbers in lanes, which have no gradient), embeddings and dropout. */

/* token: a function of each token. size[0] = 0: 1.0 where it is above size[1], else 0.0; size[0] =
 * 1: its remainder by size[1], as a token. */
static void token(const Pass *p, const Layer *layer) {
  const Value *in = &p->net->value[layer->in];
  const int32_t by = layer->size[1], remainder = layer->size[0];
  const Vectors x = x_of(p, layer), y = y_of(p, layer);
  SHARE(&p->team, i, in->planes * in->lines * in->units) {
    Bits v = AS_BITS(x[i]);
    FOR_LANES(l) {
      const int32_t t = LANE(v, l);
      LANE(v, l) = remainder ? (t % by + by) % by : t > by ? 0x3f800000 : 0; /* the bits of 1.0 */
    }
    y[i] = AS_FLOAT(v);
  }
}

static void token_back(const Pass *p, const Layer *layer) {}

/* embed: y [lines, units] = those rows of the weight [rows, units] that the tokens of x name. size:
 * how many rows, and a row whose gradient is not taken (-1: none). */
static void embed(const Pass *p, const Layer *layer) {
  const Value *out = &p->net->value[layer->out];
  const int32_t units = out->units;
  const float *w = weight_of(p, layer);
  const Vectors x = x_of(p, layer), y = y_of(p, layer);
  SHARE_PLACES(&p->team, plane, 1, line, out->lines, unit, units, {
    const Bits t = AS_BITS(x[line]);
    Vec v = ZERO;
    FOR_LANES(l) LANE(v, l) = w[(int64_t)LANE(t, l) * units + unit];
    y[line * out->line_step + unit] = v;
  })
}

/* Members share the columns of the weight; each adds image by image, which is the same order in
 * every form. */
static void embed_back(const Pass *p, const Layer *layer) {
  const Value *out = &p->net->value[layer->out];
  const int32_t units = out->units;
  float *g = p->gradient + layer->weight;
  const Vectors x = x_of(p, layer), dy = dy_of(p, layer);
  for (int l = 0; l < p->n; l++)
    for (int32_t line = 0; line < out->lines; line++) {
      const float bits = lane(x + line, l);
      int32_t t;
      memcpy(&t, &bits, 4);
      if (t == layer->size[1]) continue;
      SHARE_NUMBERS(&p->team, i, units)
        g[(int64_t)t * units + i] += lane(dy + (line * out->line_step + i), l);
    }
}

/* Return the output function of the generator splitmix64. */
INLINE uint64_t mixed(uint64_t z) {
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

/* drop: dropout, with the random numbers of numerics/dropout.py. size: the number of
 * this mask in a forward pass (from 1); how many neighbouring numbers are dropped together; the
 * smallest random number, of 0 ... 2^24 - 1, that keeps them. number[0]: the factor of what is
 * kept. Space: the factor of each random number. */
static void drop(const Pass *p, const Layer *layer) {
  const Vectors x = x_of(p, layer), y = y_of(p, layer), factors = p->arena + layer->space;
  const int32_t share = layer->size[1], draws = p->net->value[layer->in].units / share;
  const uint64_t golden = 0x9e3779b97f4a7c15u;
  const uint64_t start = mixed(p->key + golden * (uint64_t)layer->size[0]);
  SHARE(&p->team, i, draws) {
    Vec factor = FILL(1.f);
    FOR_LANES(l) if (p->drops) {
      const uint64_t counter = (uint64_t)(((int64_t)p->first + l) * draws + i + 1);
      const int32_t draw = (int32_t)(mixed(start + counter * golden) >> 40);
      LANE(factor, l) = draw >= layer->size[2] ? layer->number[0] : 0.f;
    }
    factors[i] = factor;
    const Mask kept = ABOVE(factor, ZERO);
    for (int32_t j = i * share; j < (i + 1) * share; j++) y[j] = SELECT(kept, x[j] * factor, ZERO);
  }
}

static void drop_back(const Pass *p, const Layer *layer) {
  const Vectors dy = dy_of(p, layer), dx = dx_of(p, layer), factors = p->arena + layer->space;
  const int32_t share = layer->size[1], draws = p->net->value[layer->in].units / share;
  SHARE(&p->team, i, draws) {
    const Vec factor = factors[i];
    const Mask kept = ABOVE(factor, ZERO);
    for (int32_t j = i * share; j < (i + 1) * share; j++)
      write_or_add(&dx[j], SELECT(kept, dy[j] * factor, ZERO), layer->adds & 1);
  }
}
