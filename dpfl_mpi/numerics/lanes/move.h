/* Two kinds of layer that compute nothing.
 *
 * move: the output is the numbers of a view of the input (such as a transposed one), one after the
 * other. size: the view's dimensions, and where in the input it starts. `table`: the size of each
 * dimension, then its step, in vectors. The backward pass adds where the input has other readers.
 * If the view reads numbers several times, size[2] input numbers have a gradient. The table then
 * goes on with three lists: where each of them is; where its readers start in the third list, and
 * that list's end; and all readers, i.e. where in the output they are. The backward pass adds the
 * gradients of the readers, in their order.
 *
 * clear: the backward pass sets a gradient to 0 to which others add. */
enum { MOVE_DIMENSIONS, MOVE_OFFSET, MOVE_GATHERED };
enum { MOST_DIMENSIONS = 8 };

/* A number of a view: its index in each dimension, and where it is in the input. */
typedef struct {
  int32_t index[MOST_DIMENSIONS];
  int64_t number, place;
} Odometer;

/* Go to a number of a view. On a CPU the next number takes fewer operations than others. */
INLINE void go_to(Odometer *o, int64_t number, const int32_t *table, int32_t dimensions) {
  const int is_next = number == o->number + 1;
  o->number = number;
#ifndef GPU
  for (int32_t i = dimensions - 1; is_next && i >= 0; i--) {
    const int32_t step = table[dimensions + i];
    o->place += step;
    if (++o->index[i] < table[i]) return;
    o->place -= (int64_t)step * table[i];
    o->index[i] = 0;
  }
#endif
  o->place = 0;
  for (int32_t i = dimensions - 1; i >= 0; i--) {
    o->index[i] = number % table[i];
    number /= table[i];
    o->place += (int64_t)o->index[i] * table[dimensions + i];
  }
}

/* Run a statement, the last argument, for each number of a move's output that is this member's. The
 * caller names two variables for it: where the number is in the output, and in the view. */
#define SHARE_MOVED(p, layer, out_place, in_place, ...) \
  const Value *out_ = &(p)->net->value[(layer)->out]; \
  Odometer odometer_ = {{0}, -2, 0}; \
  SHARE_PLACES(&(p)->team, plane_, out_->planes, line_, out_->lines, unit_, out_->units, { \
    go_to(&odometer_, (plane_ * out_->lines + line_) * out_->units + unit_, (layer)->table, \
          (layer)->size[MOVE_DIMENSIONS]); \
    const int64_t out_place = place_in(out_, plane_, line_, unit_); \
    const int64_t in_place = odometer_.place; \
    __VA_ARGS__; \
  })

static void move(const Pass *p, const Layer *layer) {
  const Vectors x = x_of(p, layer) + layer->size[MOVE_OFFSET], y = y_of(p, layer);
  SHARE_MOVED(p, layer, out_place, in_place, y[out_place] = x[in_place])
}

static void move_back(const Pass *p, const Layer *layer) {
  const Vectors dy = dy_of(p, layer), dx = dx_of(p, layer) + layer->size[MOVE_OFFSET];
  const int32_t gathered = layer->size[MOVE_GATHERED], adds = layer->adds & 1;
  if (!gathered) {
    SHARE_MOVED(p, layer, out_place, in_place, write_or_add(&dx[in_place], dy[out_place], adds))
    return;
  }
  const int32_t *places = layer->table + 2 * layer->size[MOVE_DIMENSIONS];
  const int32_t *starts = places + gathered, *readers = starts + gathered + 1;
  SHARE(&p->team, i, gathered) {
    Vec sum = dx[places[i]];
    for (int32_t j = starts[i]; j < starts[i + 1]; j++) sum += dy[readers[j]];
    dx[places[i]] = sum;
  }
}

static void clear(const Pass *p, const Layer *layer) {}
static void clear_back(const Pass *p, const Layer *layer) { clear_gradient(p, layer->out); }
