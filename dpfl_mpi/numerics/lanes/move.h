/* Numbers that lie apart are brought together. size: dimensions of the source, and where in it they
 * start; `table`: numbers in each dimension, then vectors from one to the next. The way back adds
 * where the source has other readers. */
enum { MOVE_DIMENSIONS, MOVE_OFFSET };
enum { MOST_DIMENSIONS = 8 };

/* Where the same number is in one value or two, number after number. */
typedef struct {
  int32_t at[MOST_DIMENSIONS];
  int64_t place[2];
} Odometer;

/* Go to the next number. `table`: numbers in each dimension, then for each value the vectors from
 * one to the next. */
INLINE void next(Odometer *o, const int32_t *table, int32_t dimensions, const int values) {
  for (int32_t i = dimensions - 1; i >= 0; i--) {
    const int32_t *step = table + dimensions + i;
    for (int v = 0; v < values; v++) o->place[v] += step[v * dimensions];
    if (++o->at[i] < table[i]) return;
    for (int v = 0; v < values; v++) o->place[v] -= (int64_t)step[v * dimensions] * table[i];
    o->at[i] = 0;
  }
}

/* Run `call` for each number of an output: `at` is where it is, `o` where it comes from in so many
 * values, whose numbers in each of size[0] dimensions, and then steps, `table` begins with. */
#define LINES(value, ...) \
  for (int32_t plane_ = 0; plane_ < (value)->planes; plane_++) \
    for (int32_t line_ = 0; line_ < (value)->lines; line_++) { \
      int64_t at = (int64_t)plane_ * (value)->plane + (int64_t)line_ * (value)->line; \
      __VA_ARGS__; \
    }
#define WALK(p, layer, values, ...) \
  const Value *out_ = &(p)->net->value[(layer)->out]; \
  Odometer o = {0}; \
  LINES( \
      out_, for (int32_t i_ = 0; i_ < out_->units; \
                 i_++, at++, next(&o, (layer)->table, (layer)->size[0], values)) { __VA_ARGS__; })

static void move(const Pass *p, const Layer *layer) {
  const F *x = x_of(p, layer->in) + layer->size[MOVE_OFFSET];
  F *y = x_of(p, layer->out);
  WALK(p, layer, 1, y[at] = x[o.place[0]])
}

static void move_back(const Pass *p, const Layer *layer) {
  const F *dy = d_of(p, layer->out);
  F *dx = d_of(p, layer->in) + layer->size[MOVE_OFFSET];
  const int adds = layer->adds & 1;
  WALK(p, layer, 1, put(&dx[o.place[0]], dy[at], adds))
}

/* A gradient that no layer writes as a whole starts from 0. */
static void clear(const Pass *p, const Layer *layer) { (void)p, (void)layer; }
static void clear_back(const Pass *p, const Layer *layer) { clear_gradient(p, layer->out); }
