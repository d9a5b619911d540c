/* Functions of vectors: the same bits in every form. */

/* Write a gradient, or add it to what is there. */
INLINE void put(F *to, F d, int adds) { *to = adds ? *to + d : d; }
/* What the four sums of a mean come to. */
INLINE F together(const F *sum) { return (sum[0] + sum[2]) + (sum[1] + sum[3]); }
INLINE F relu_of(F a) { return PICK(ABOVE(ZERO, a), ZERO, a); } /* not-a-number stays */

/* Return the greater and where it is b: a at a tie, not-a-number where there is one, as torch's
 * max-pool. */
INLINE F greater(F a, F b, M *second) {
  *second = ABOVE(b, a) | NO_NUMBER(b);
  return PICK(*second, b, a);
}

/* Return e^x of x <= 0, to 1e-7. Adding 1.5 * 2^23 rounds and leaves the whole number in the low
 * bits (Cephes). Below -50 it is 0: as gradients, 1e-22 and less would become subnormal numbers on
 * their way back, which take 100 times as long. */
INTERNAL F exponential(F x) {
  static const float c[5] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                             5.0000001201e-1f};
  const F shifted = FMA(x, FILL(1.44269504f), FILL(12582912.f)), n = shifted - 12582912.f;
  const F r = FMA(n, FILL(2.12194440e-4f), FMA(n, FILL(-0.693359375f), x)); /* x - n log 2 */
  F p = FILL(1.9875691500e-4f);
  for (int i = 0; i < 5; i++) p = FMA(p, r, FILL(c[i]));
  const F y = FMA(p, r * r, r) + 1.f;
  return PICK(ABOVE(FILL(-50.f), x), ZERO, FLOAT(BITS(y) + (BITS(shifted) << 23))); /* y 2^n */
}

/* Return log x of x >= 1, to 1e-7 (Cephes): e log 2 + log(1 + m), 1 + m in sqrt(1/2) ... sqrt(2).
 */
INTERNAL F logarithm(F x) {
  static const float c[8] = {-1.1514610310e-1f, 1.1676998740e-1f,  -1.2420140846e-1f,
                             1.4249322787e-1f,  -1.6668057665e-1f, 2.0000714765e-1f,
                             -2.4999993993e-1f, 3.3333331174e-1f};
  const U bits = BITS(x) - 0x3f3504f3u;
  const F e = FLOAT((bits >> 23) + 0x4b400000u) - 12582912.f;
  const F m = FLOAT((bits & 0x7fffffu) + 0x3f3504f3u) - 1.f;
  F p = FILL(7.0376836292e-2f);
  for (int i = 0; i < 8; i++) p = FMA(p, m, FILL(c[i]));
  const F y = FMA(FILL(-0.5f), m * m, FMA(e, FILL(-2.12194440e-4f), p * (m * m * m))) + m;
  return FMA(e, FILL(0.693359375f), y) + (x - x); /* x - x passes on not-a-number and infinity */
}

