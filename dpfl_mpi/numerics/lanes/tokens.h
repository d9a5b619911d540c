/* Tokens: whole numbers in lanes, which have no gradient; the rows of an embedding that they name;
 * dropout by key. */

/* size[0]: 0 for 1.0 where a token is above size[1], else 0.0; 1 for the remainder of a token by
 * size[1] (in whole numbers). */
static void token(const Pass *p, const Layer *layer) {
  const Value *in = &p->net->value[layer->in];
  const int32_t by = layer->size[1];
  const F *x = x_of(p, layer->in);
  F *y = x_of(p, layer->out);
  for (int64_t i = 0; i < (int64_t)in->planes * in->lines * in->units; i++) {
    int32_t t[LANES];
    memcpy(t, &x[i], sizeof t);
    for (int l = 0; l < LANES; l++) {
      const float above = t[l] > by;
      if (layer->size[0]) t[l] = (t[l] % by + by) % by;
      else memcpy(&t[l], &above, 4);
    }
    memcpy(&y[i], t, sizeof t);
  }
}

static void token_back(const Pass *p, const Layer *layer) { (void)p, (void)layer; }

/* y [L, D] = the rows of weight [rows, D] that L tokens name. size: rows, and a row whose gradient
 * is not taken (-1: none). */
static void embed(const Pass *p, const Layer *layer) {
  const Value *out = &p->net->value[layer->out];
  const int32_t width = out->units;
  const float *w = p->row + layer->weight;
  const F *x = x_of(p, layer->in);
  F *y = x_of(p, layer->out);
  for (int64_t i = 0; i < out->lines; i++) {
    int32_t t[LANES];
    memcpy(t, &x[i], sizeof t);
    for (int32_t j = 0; j < width; j++) {
      F v;
      for (int l = 0; l < LANES; l++) v[l] = w[(int64_t)t[l] * width + j];
      y[i * out->line + j] = v;
    }
  }
}

static void embed_back(const Pass *p, const Layer *layer) {
  const Value *out = &p->net->value[layer->out];
  const int32_t width = out->units;
  float *g = p->g + layer->weight;
  const F *x = x_of(p, layer->in), *dy = d_of(p, layer->out);
  for (int l = 0; l < p->n; l++) /* image by image: the same order in every form */
    for (int64_t i = 0; i < out->lines; i++) {
      int32_t t;
      memcpy(&t, (const float *)&x[i] + l, 4);
      if (t == layer->size[1]) continue;
      for (int32_t j = 0; j < width; j++)
        g[(int64_t)t * width + j] += lane(dy + i * out->line + j, l);
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
  const F *x = x_of(p, layer->in);
  F *y = x_of(p, layer->out), *factor = p->arena + layer->space;
  const int64_t units = p->net->value[layer->in].units;
  const int64_t share = layer->size[1], draws = units / share;
  const uint64_t golden = 0x9e3779b97f4a7c15u;
  const uint64_t start = mixed(p->key + golden * (uint64_t)layer->size[0]);
  for (int64_t i = 0; i < draws; i++)
    for (int l = 0; l < LANES; l++) {
      const uint64_t place = (uint64_t)((p->first + l) * draws + i + 1);
      const int32_t draw =
          p->drops ? (int32_t)(mixed(start + place * golden) >> 40) : layer->size[2];
      factor[i][l] = !p->drops ? 1.f : draw >= layer->size[2] ? layer->number[0] : 0.f;
    }
  for (int64_t i = 0; i < units; i++)
    y[i] = PICK(ABOVE(factor[i / share], ZERO), x[i] * factor[i / share], ZERO);
}

static void drop_back(const Pass *p, const Layer *layer) {
  const F *dy = d_of(p, layer->out), *factor = p->arena + layer->space;
  F *dx = d_of(p, layer->in);
  const int64_t units = p->net->value[layer->in].units, share = layer->size[1];
  for (int64_t i = 0; i < units; i++) {
    const F by = factor[i / share];
    put(&dx[i], PICK(ABOVE(by, ZERO), dy[i] * by, ZERO), layer->adds & 1);
  }
}
