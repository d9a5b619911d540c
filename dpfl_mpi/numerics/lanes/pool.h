/* Pools: the greatest, or the mean, of windows. `table`: where the window of each row of outputs
 * starts and ends, and how many numbers it counts for; then of each column. Space of the greatest:
 * where it was, P Q numbers of each plane. */

/* Run `call` for each output: `out` is where it is, `number` which one; `first` is its plane's
 * input. */
#define WINDOWS(p, layer, ...) \
  const Value *in_ = &(p)->net->value[(layer)->in], *out_ = &(p)->net->value[(layer)->out]; \
  const int32_t *rows_ = (layer)->table, *columns_ = rows_ + 3 * out_->lines; \
  for (int32_t plane_ = 0; plane_ < out_->planes; plane_++) \
    for (int32_t y_ = 0; y_ < out_->lines; y_++) \
      for (int32_t x_ = 0; x_ < out_->units; x_++) { \
        const int64_t out = (int64_t)plane_ * out_->plane + (int64_t)y_ * out_->line + x_; \
        const int64_t first = (int64_t)plane_ * in_->plane; \
        const int64_t number = ((int64_t)plane_ * out_->lines + y_) * out_->units + x_; \
        const int32_t *row = rows_ + 3 * y_, *column = columns_ + 3 * x_; \
        (void)number; \
        __VA_ARGS__; \
      }
/* Within it, run `call` for each number of the window, which is `at`. */
#define WINDOW(...) \
  for (int32_t r_ = row[0]; r_ < row[1]; r_++) \
    for (int32_t c_ = column[0]; c_ < column[1]; c_++) { \
      const int64_t at = first + (int64_t)r_ * in_->line + c_; \
      __VA_ARGS__; \
    }

static void max_pool(const Pass *p, const Layer *layer) {
  const F *x = x_of(p, layer->in);
  F *y = x_of(p, layer->out), *chosen = p->arena + layer->space;
  WINDOWS(p, layer, {
    F best = x[first + (int64_t)row[0] * in_->line + column[0]], which = ZERO, i = ZERO;
    M second;
    WINDOW(best = greater(best, x[at], &second); which = PICK(second, i, which); i += 1.f)
    y[out] = best;
    chosen[number] = which;
  })
}

static void max_pool_back(const Pass *p, const Layer *layer) {
  F *dx = d_of(p, layer->in);
  const F *dy = d_of(p, layer->out), *chosen = p->arena + layer->space;
  if (!(layer->adds & 1)) clear_gradient(p, layer->in);
  WINDOWS(p, layer, {
    F i = ZERO;
    const F d = dy[out], which = chosen[number];
    WINDOW(dx[at] += PICK(ABOVE(which, i) | ABOVE(i, which), ZERO, d); i += 1.f)
  })
}

static void mean_pool(const Pass *p, const Layer *layer) {
  const F *x = x_of(p, layer->in);
  F *y = x_of(p, layer->out);
  WINDOWS(p, layer, {
    F sum[4] = {ZERO};
    int i = 0;
    WINDOW(sum[i & 3] += x[at]; i++)
    y[out] = together(sum) / (float)(row[2] * column[2]);
  })
}

static void mean_pool_back(const Pass *p, const Layer *layer) {
  F *dx = d_of(p, layer->in);
  const F *dy = d_of(p, layer->out);
  if (!(layer->adds & 1)) clear_gradient(p, layer->in);
  WINDOWS(p, layer, {
    const F d = dy[out] / (float)(row[2] * column[2]);
    WINDOW(dx[at] += d)
  })
}
