/* Tokens: whole numbers in lanes, which have no gradient; the rows of an embedding that they name;
 * dropout by key. */

/* size[0]: 0 for 1.0 where a token is above size[1], else 0.0; 1 for the remainder of a token by
 * size[1] (in whole numbers). */
static void token(const Pass *p, const Layer *layer) {
  const Value *in = &p->net->value[layer->in];
  const int32_t by = layer->size[1], remainder = layer->size[0];
  const Vectors x = x_of(p, layer->in), y = x_of(p, layer->out);
  SHARE(&p->team, i, in->planes * in->lines * in->units) {
    U v = BITS(x[i]);
    EACH_LANE(l) {
      const int32_t t = ON(v, l);
      ON(v, l) = remainder ? (t % by + by) % by : t > by ? 0x3f800000 : 0; /* the bits of 1.0 */
    }
    y[i] = FLOAT(v);
  }
}

static void token_back(const Pass *p, const Layer *layer) { (void)p, (void)layer; }

/* y [L, D] = the rows of weight [rows, D] that L tokens name. size: rows, and a row whose gradient
 * is not taken (-1: none). */
static void embed(const Pass *p, const Layer *layer) {
  const Value *out = &p->net->value[layer->out];
  const int32_t width = out->units;
  const float *w = p->row + layer->weight;
  const Vectors x = x_of(p, layer->in), y = x_of(p, layer->out);
  PLACES(&p->team, 1, out->lines, width, {
    const U t = BITS(x[line_]);
    F v = ZERO;
    EACH_LANE(l) ON(v, l) = w[(int64_t)ON(t, l) * width + unit_];
    y[line_ * out->line + unit_] = v;
  })
}

/* Columns of the embedding are shared out. */
static void embed_back(const Pass *p, const Layer *layer) {
  const Value *out = &p->net->value[layer->out];
  const int32_t width = out->units;
  float *g = p->g + layer->weight;
  const Vectors x = x_of(p, layer->in), dy = d_of(p, layer->out);
  for (int l = 0; l < p->n; l++) /* image by image: the same order in every form */
    for (int32_t i = 0; i < out->lines; i++) {
      const float number = lane(x + i, l);
      int32_t t;
      memcpy(&t, &number, 4);
      if (t == layer->size[1]) continue;
      SHARE_NUMBERS(&p->team, j, width)
        g[(int64_t)t * width + j] += lane(dy + (i * out->line + j), l);
    }
}

/* splitmix64's output function. */
INLINE uint64_t mixed(uint64_t z) {
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

/* Dropout as numerics/dropout.py draws it. size: which mask of the step this is (from 1), numbers
 * that share a draw, the first draw that keeps, of 2^24. number[0]: what is kept is multiplied by
 * it. Space: a factor for each draw. */
static void drop(const Pass *p, const Layer *layer) {
  const Vectors x = x_of(p, layer->in), y = x_of(p, layer->out), factors = p->arena + layer->space;
  const int32_t share = layer->size[1], draws = p->net->value[layer->in].units / share;
  const uint64_t golden = 0x9e3779b97f4a7c15u;
  const uint64_t start = mixed(p->key + golden * (uint64_t)layer->size[0]);
  SHARE(&p->team, i, draws) {
    F factor = FILL(1.f);
    EACH_LANE(l) if (p->drops) {
      const uint64_t place = (uint64_t)(((int64_t)p->first + l) * draws + i + 1);
      const int32_t draw = (int32_t)(mixed(start + place * golden) >> 40);
      ON(factor, l) = draw >= layer->size[2] ? layer->number[0] : 0.f;
    }
    factors[i] = factor;
    const M kept = ABOVE(factor, ZERO);
    for (int32_t j = i * share; j < (i + 1) * share; j++) y[j] = PICK(kept, x[j] * factor, ZERO);
  }
}

static void drop_back(const Pass *p, const Layer *layer) {
  const Vectors dy = d_of(p, layer->out), dx = d_of(p, layer->in),
                factors = p->arena + layer->space;
  const int32_t share = layer->size[1], draws = p->net->value[layer->in].units / share;
  SHARE(&p->team, i, draws) {
    const F factor = factors[i];
    const M kept = ABOVE(factor, ZERO);
    for (int32_t j = i * share; j < (i + 1) * share; j++)
      put(&dx[j], PICK(kept, dy[j] * factor, ZERO), layer->adds & 1);
  }
}
