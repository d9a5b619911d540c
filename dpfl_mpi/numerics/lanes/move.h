/* Numbers that lie apart are brought together. size: dimensions of the source, and where in it they start; `table`: numbers
 * in each dimension, then vectors from one to the next. The way back adds where the source has other readers. */
enum { MOVE_DIMENSIONS, MOVE_OFFSET, MOST_DIMENSIONS = 8 };

/* Where in the source a run of numbers starts, number after number. */
typedef struct {
  int32_t at[MOST_DIMENSIONS];
  int64_t place;
} Odometer;

INLINE void next(Odometer *o, const Layer *layer) {
  const int32_t dimensions = layer->size[MOVE_DIMENSIONS], *shape = layer->table, *step = shape + dimensions;
  for (int32_t i = dimensions - 1; i >= 0; i--) {
    o->place += step[i];
    if (++o->at[i] < shape[i]) return;
    o->place -= (int64_t)step[i] * shape[i];
    o->at[i] = 0;
  }
}

static void move(const Pass *p, const Layer *layer) {
  const Value *out = &p->net->value[layer->out];
  const F *x = x_of(p, layer->in) + layer->size[MOVE_OFFSET];
  F *y = x_of(p, layer->out);
  Odometer o = {0};
  LINES(out, for (int32_t i = 0; i < out->units; i++, next(&o, layer)) y[at + i] = x[o.place])
}

static void move_back(const Pass *p, const Layer *layer) {
  const Value *out = &p->net->value[layer->out];
  const F *dy = d_of(p, layer->out);
  F *dx = d_of(p, layer->in) + layer->size[MOVE_OFFSET];
  const int adds = layer->adds & 1;
  Odometer o = {0};
  LINES(out, for (int32_t i = 0; i < out->units; i++, next(&o, layer))
               dx[o.place] = adds ? dx[o.place] + dy[at + i] : dy[at + i])
}

/* A gradient that no layer writes as a whole starts from 0. */
static void nothing(const Pass *p, const Layer *layer) { (void)p, (void)layer; }
static void clear(const Pass *p, const Layer *layer) {
  const Value *v = &p->net->value[layer->out];
  LINES(v, memset(d_of(p, layer->out) + at, 0, sizeof(F) * v->units))
}
