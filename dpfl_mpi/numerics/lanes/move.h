/* Numbers that lie apart are brought together. size: dimensions of the source, and where in it they
 * start; `table`: numbers in each dimension, then vectors from one to the next. The way back adds
 * where the source has other readers.
 *
 * Where a number of the source is several of the output, size[2] numbers of it have a gradient: the
 * table goes on with where each is, where its part of a list starts, and the list's end; then the
 * list, which says where in the output its numbers are, in their order. The way back adds to these.
 */
enum { MOVE_DIMENSIONS, MOVE_OFFSET, MOVE_GATHERED };
enum { MOST_DIMENSIONS = 8 };

/* A number of a view: its place in each dimension, and where it is in the source. */
typedef struct {
  int32_t at[MOST_DIMENSIONS];
  int64_t place;
} Odometer;

/* From 0, go to number `number`. `table`: numbers in each dimension, then vectors from one to the
 * next. */
INLINE void seek(Odometer *o, int64_t number, const int32_t *table, int32_t dimensions) {
  for (int32_t i = dimensions - 1; i >= 0; i--) {
    o->at[i] = number % table[i];
    number /= table[i];
    o->place += (int64_t)o->at[i] * table[dimensions + i];
  }
}

/* Run `call` for each number of a layer's output that is this member's: `at` is where it is,
 * o.place where it comes from. */
#ifdef GPU
#define WALK(p, layer, ...) \
  const Value *out_ = &(p)->net->value[(layer)->out]; \
  EACH_OF(p, out_, { \
    Odometer o = {}; \
    seek(&o, of_, (layer)->table, (layer)->size[MOVE_DIMENSIONS]); \
    __VA_ARGS__; \
  })
#else
/* Go to the next number. */
INLINE void next(Odometer *o, const int32_t *table, int32_t dimensions) {
  for (int32_t i = dimensions - 1; i >= 0; i--) {
    const int32_t step = table[dimensions + i];
    o->place += step;
    if (++o->at[i] < table[i]) return;
    o->place -= (int64_t)step * table[i];
    o->at[i] = 0;
  }
}

#define WALK(p, layer, ...) \
  const Value *out_ = &(p)->net->value[(layer)->out]; \
  const int64_t first_ = \
      part_of(&(p)->team, (int64_t)out_->planes * out_->lines, (p)->team.member) * out_->units; \
  Odometer o = {{0}, 0}; \
  seek(&o, first_, (layer)->table, (layer)->size[MOVE_DIMENSIONS]); \
  EACH_OF(p, out_, __VA_ARGS__; next(&o, (layer)->table, (layer)->size[MOVE_DIMENSIONS]))
#endif

static void move(const Pass *p, const Layer *layer) {
  const Vectors x = x_of(p, layer->in) + layer->size[MOVE_OFFSET], y = x_of(p, layer->out);
  WALK(p, layer, y[at] = x[o.place])
}

static void move_back(const Pass *p, const Layer *layer) {
  const Vectors dy = d_of(p, layer->out), dx = d_of(p, layer->in) + layer->size[MOVE_OFFSET];
  const int32_t gathered = layer->size[MOVE_GATHERED];
  if (gathered) {
    const int32_t *places = layer->table + 2 * layer->size[MOVE_DIMENSIONS];
    const int32_t *starts = places + gathered, *from = starts + gathered + 1;
    SHARE(&p->team, i, gathered) {
      F sum = dx[places[i]];
      for (int32_t j = starts[i]; j < starts[i + 1]; j++) sum += dy[from[j]];
      dx[places[i]] = sum;
    }
  } else {
    const int adds = layer->adds & 1;
    WALK(p, layer, put(&dx[o.place], dy[at], adds))
  }
}

/* A gradient that no layer writes as a whole starts from 0. */
static void clear(const Pass *p, const Layer *layer) { (void)p, (void)layer; }
static void clear_back(const Pass *p, const Layer *layer) { clear_gradient(p, layer->out); }
