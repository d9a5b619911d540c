/* Weighted averages of models, on a CPU; numerics/cpu.py calls these functions. */
enum { PIECE = 16 }; /* a row's width is a multiple of this */

/* Write into row k of out [count, width] the average of the models ends[k] ... ends[k + 1] - 1: the
 * sum of p w in float64, in their order, divided by p_sums[k]. If p_sums[k] is not above 0, the row
 * stays as it is. */
PUBLIC void NAME(means)(const float *const *models, const double *p, const int64_t *ends,
                        const double *p_sums, int64_t count, float *out, int64_t width) {
  for (int64_t k = 0; k < count; k++, out += width)
    for (int64_t i = 0; p_sums[k] > 0 && i < width; i += PIECE) {
      double sum[PIECE];
      for (int l = 0; l < PIECE; l++) sum[l] = p[ends[k]] * models[ends[k]][i + l];
      for (int64_t j = ends[k] + 1; j < ends[k + 1]; j++)
        for (int l = 0; l < PIECE; l++) sum[l] += p[j] * models[j][i + l];
      for (int l = 0; l < PIECE; l++) out[i + l] = (float)(sum[l] / p_sums[k]);
    }
}

/* Write into out the sum of 2^50 p w of `count` models, each term rounded to a whole number: so the
 * result is the same in any order. */
PUBLIC void NAME(fixed)(const float *const *models, const double *p, int64_t count, int64_t *out,
                        int64_t width) {
  for (int64_t i = 0; i < width; i += PIECE) {
    int64_t sum[PIECE] = {0};
    for (int64_t j = 0; j < count; j++) {
      const double scale = p[j] * 0x1p50;
      for (int l = 0; l < PIECE; l++) sum[l] += (int64_t)rint(models[j][i + l] * scale);
    }
    for (int l = 0; l < PIECE; l++) out[i + l] = sum[l];
  }
}
