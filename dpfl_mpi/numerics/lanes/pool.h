/* Pools: the greatest number, or the mean, of windows of each plane.
 *
 * `table`, first part: for each row of outputs where its windows start and end in the rows of
 * inputs, and the height that a mean divides by; then the same of columns. Second part: for each
 * row of inputs the first and the end of the rows of outputs whose windows contain it; then of
 * columns. Space of max_pool: which number of its window each output is. */
typedef struct {
  const Value *in, *out;
  const int32_t *rows, *columns, *row_readers, *column_readers; /* parts of the table */
} Pool;

INLINE Pool pool_of(const Pass *p, const Layer *layer) {
  const Value *in = &p->net->value[layer->in], *out = &p->net->value[layer->out];
  const int32_t *columns = layer->table + 3 * out->lines, *readers = columns + 3 * out->units;
  const Pool pool = {in, out, layer->table, columns, readers, readers + 2 * in->lines};
  return pool;
}

/* The window of one output. */
typedef struct {
  int64_t in_y, number;        /* where the output lies; its number among all outputs */
  int64_t in_x;                /* where the window's plane starts in the input */
  const int32_t *row, *column; /* start, end and divisor of its rows and columns */
} Window;

INLINE Window window_of(const Pool *pool, int64_t plane, int64_t line, int32_t unit) {
  const Value *out = pool->out;
  const Window w = {place_in(out, plane, line, unit),
                    (plane * out->lines + line) * out->units + unit, plane * pool->in->plane_step,
                    pool->rows + 3 * line, pool->columns + 3 * unit};
  return w;
}

/* Run a statement, the last argument, for each output that is this member's; the caller names the
 * variable for its window. */
#define SHARE_WINDOWS(p, pool, window, ...) \
  SHARE_PLACES(&(p)->team, plane_, (pool).out->planes, line_, (pool).out->lines, unit_, \
               (pool).out->units, const Window window = window_of(&(pool), plane_, line_, unit_); \
               __VA_ARGS__)
/* Run a statement for each number of a window; the caller names where in the input it lies. */
#define FOR_WINDOW(pool, window, place, ...) \
  for (int32_t row_ = window.row[0]; row_ < window.row[1]; row_++) \
    for (int32_t column_ = window.column[0]; column_ < window.column[1]; column_++) { \
      const int64_t place = window.in_x + (int64_t)row_ * (pool).in->line_step + column_; \
      __VA_ARGS__; \
    }
/* Write the gradients dx of this member's inputs. A statement, the last argument, adds to `sum`,
 * the gradient of the input at (line, unit), what comes from one window that contains it. The
 * caller names these variables. */
#define SHARE_GRADIENTS(p, layer, pool, dx, sum, line, unit, window, ...) \
  SHARE_PLACES(&(p)->team, plane_, (pool).in->planes, line, (pool).in->lines, unit, \
               (pool).in->units, { \
                 const int32_t *rows_ = (pool).row_readers + 2 * line; \
                 const int32_t *columns_ = (pool).column_readers + 2 * unit; \
                 const int64_t place_ = place_in((pool).in, plane_, line, unit); \
                 Vec sum = (layer)->adds & 1 ? dx[place_] : ZERO; \
                 for (int32_t row_ = rows_[0]; row_ < rows_[1]; row_++) \
                   for (int32_t column_ = columns_[0]; column_ < columns_[1]; column_++) { \
                     const Window window = window_of(&(pool), plane_, row_, column_); \
                     __VA_ARGS__; \
                   } \
                 dx[place_] = sum; \
               })

static void max_pool(const Pass *p, const Layer *layer) {
  const Pool pool = pool_of(p, layer);
  const Vectors x = x_of(p, layer), y = y_of(p, layer), chosen = p->arena + layer->space;
  SHARE_WINDOWS(p, pool, window, {
    Vec greatest = x[window.in_x + (int64_t)window.row[0] * pool.in->line_step + window.column[0]];
    Vec which = ZERO, i = ZERO;
    Mask second;
    FOR_WINDOW(pool, window, place, greatest = greater(greatest, x[place], &second);
               which = SELECT(second, i, which); i += 1.f)
    y[window.in_y] = greatest;
    chosen[window.number] = which;
  })
}

/* An output's gradient goes to the number of its window that was the greatest. */
static void max_pool_back(const Pass *p, const Layer *layer) {
  const Pool pool = pool_of(p, layer);
  const Vectors dx = dx_of(p, layer), dy = dy_of(p, layer), chosen = p->arena + layer->space;
  SHARE_GRADIENTS(p, layer, pool, dx, sum, line, unit, window, {
    const int32_t width = window.column[1] - window.column[0];
    const int32_t number = (line - window.row[0]) * width + unit - window.column[0];
    const Vec i = FILL((float)number), which = chosen[window.number];
    sum += SELECT(ABOVE(which, i) | ABOVE(i, which), ZERO, dy[window.in_y]);
  })
}

static void mean_pool(const Pass *p, const Layer *layer) {
  const Pool pool = pool_of(p, layer);
  const Vectors x = x_of(p, layer), y = y_of(p, layer);
  SHARE_WINDOWS(p, pool, window, {
    Vec sum[4] = {ZERO}; /* added to in turn, so that additions overlap */
    int i = 0;
    FOR_WINDOW(pool, window, place, sum[i & 3] += x[place]; i++)
    y[window.in_y] = sum_of_four(sum) / (float)(window.row[2] * window.column[2]);
  })
}

/* Each output's gradient is divided once, in its place, for all inputs of its window. */
static void mean_pool_back(const Pass *p, const Layer *layer) {
  const Pool pool = pool_of(p, layer);
  const Vectors dx = dx_of(p, layer), dy = dy_of(p, layer);
  SHARE_WINDOWS(p, pool, window,
                dy[window.in_y] = dy[window.in_y] / (float)(window.row[2] * window.column[2]))
  barrier(&p->team);
  SHARE_GRADIENTS(p, layer, pool, dx, sum, line, unit, window, sum += dy[window.in_y])
}
