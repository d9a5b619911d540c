/* Pools: the greatest, or the mean, of windows. `table`: where the window of each row of outputs
 * starts and ends, and how many numbers it counts for; then of each column. Then of each row of
 * inputs the first and the end of the rows of outputs whose windows have it; then of each column.
 * Space of the greatest: where in its window it was, P Q numbers of each plane.
 */
typedef struct {
  const Value *in, *out;
  const int32_t *rows, *columns, *row_readers, *column_readers;
} Pool;

INLINE Pool pool_of(const Pass *p, const Layer *layer) {
  const Value *in = &p->net->value[layer->in], *out = &p->net->value[layer->out];
  const int32_t *columns = layer->table + 3 * out->lines, *readers = columns + 3 * out->units;
  const Pool pool = {in, out, layer->table, columns, readers, readers + 2 * in->lines};
  return pool;
}

/* Run `call` for each output that is this member's: `out` is where it is, `number` which one;
 * `first` is its plane's input. */
#define WINDOWS(p, pool, ...) \
  PLACES(&(p)->team, (pool).out->planes, (pool).out->lines, (pool).out->units, { \
    const int64_t out = (int64_t)plane_ * (pool).out->plane + line_ * (pool).out->line + unit_; \
    const int64_t first = (int64_t)plane_ * (pool).in->plane; \
    const int64_t number = \
        ((int64_t)plane_ * (pool).out->lines + line_) * (pool).out->units + unit_; \
    const int32_t *row = (pool).rows + 3 * line_, *column = (pool).columns + 3 * unit_; \
    (void)first, (void)number; \
    __VA_ARGS__; \
  })
/* Within it, run `call` for each number of the window, which is `at`. */
#define WINDOW(pool, ...) \
  for (int32_t r_ = row[0]; r_ < row[1]; r_++) \
    for (int32_t c_ = column[0]; c_ < column[1]; c_++) { \
      const int64_t at = first + (int64_t)r_ * (pool).in->line + c_; \
      __VA_ARGS__; \
    }
/* Write the gradient of each input that is this member's: in `call` `sum`, that of the input at
 * line_ and unit_, grows by what comes from one window that has it, `out` and `number` as above. A
 * member is a place on a GPU, which gathers; on a CPU it has whole lines, where it scatters. */
#ifdef GPU
#define UNITS_SHARED(units) (units)
#define UNITS_OWN(units)
#define READERS(pool) \
  for (int32_t c_ = (pool).column_readers[2 * unit_]; \
       c_ < (pool).column_readers[2 * unit_ + 1]; c_++)
#else
#define UNITS_SHARED(units) 1
#define UNITS_OWN(units) for (int32_t unit_ = 0; unit_ < (units); unit_++)
#define READERS(pool) \
  for (int32_t c_ = 0; c_ < (pool).out->units; c_++) \
    for (int32_t unit_ = (pool).columns[3 * c_], end_ = (pool).columns[3 * c_ + 1]; unit_ < end_; \
         unit_++)
#endif
#define GRADIENTS(p, layer, pool, dx, ...) \
  PLACES(&(p)->team, (pool).in->planes, (pool).in->lines, UNITS_SHARED((pool).in->units), { \
    const int32_t *readers_ = (pool).row_readers + 2 * line_; \
    const int64_t line_of_in_ = (int64_t)plane_ * (pool).in->plane + line_ * (pool).in->line; \
    if (!((layer)->adds & 1)) UNITS_OWN((pool).in->units) dx[line_of_in_ + unit_] = ZERO; \
    for (int32_t r_ = readers_[0]; r_ < readers_[1]; r_++) { \
      const int64_t line_of_out_ = (int64_t)plane_ * (pool).out->plane + r_ * (pool).out->line; \
      const int64_t numbers_ = ((int64_t)plane_ * (pool).out->lines + r_) * (pool).out->units; \
      const int32_t *row = (pool).rows + 3 * r_; \
      (void)numbers_, (void)row; \
      READERS(pool) { \
        const int32_t *column = (pool).columns + 3 * c_; \
        const int64_t out = line_of_out_ + c_, number = numbers_ + c_; \
        F sum = dx[line_of_in_ + unit_]; \
        (void)column, (void)number; \
        __VA_ARGS__; \
        dx[line_of_in_ + unit_] = sum; \
      } \
    } \
  })

static void max_pool(const Pass *p, const Layer *layer) {
  const Pool pool = pool_of(p, layer);
  const Vectors x = x_of(p, layer->in), y = x_of(p, layer->out), chosen = p->arena + layer->space;
  WINDOWS(p, pool, {
    F best = x[first + (int64_t)row[0] * pool.in->line + column[0]], which = ZERO, i = ZERO;
    M second;
    WINDOW(pool, best = greater(best, x[at], &second); which = PICK(second, i, which); i += 1.f)
    y[out] = best;
    chosen[number] = which;
  })
}

static void max_pool_back(const Pass *p, const Layer *layer) {
  const Pool pool = pool_of(p, layer);
  const Vectors dx = d_of(p, layer->in), dy = d_of(p, layer->out), chosen = p->arena + layer->space;
  GRADIENTS(p, layer, pool, dx, {
    const F i = FILL((float)((line_ - row[0]) * (column[1] - column[0]) + unit_ - column[0]));
    const F which = chosen[number];
    sum += PICK(ABOVE(which, i) | ABOVE(i, which), ZERO, dy[out]);
  })
}

static void mean_pool(const Pass *p, const Layer *layer) {
  const Pool pool = pool_of(p, layer);
  const Vectors x = x_of(p, layer->in), y = x_of(p, layer->out);
  WINDOWS(p, pool, {
    F sum[4] = {ZERO};
    int i = 0;
    WINDOW(pool, sum[i & 3] += x[at]; i++)
    y[out] = together(sum) / (float)(row[2] * column[2]);
  })
}

/* The outputs' gradient is used up: each window's is divided once, for all its inputs. */
static void mean_pool_back(const Pass *p, const Layer *layer) {
  const Pool pool = pool_of(p, layer);
  const Vectors dx = d_of(p, layer->in), dy = d_of(p, layer->out);
  WINDOWS(p, pool, dy[out] = dy[out] / (float)(row[2] * column[2]))
  meet(&p->team);
  GRADIENTS(p, layer, pool, dx, sum += dy[out])
}
