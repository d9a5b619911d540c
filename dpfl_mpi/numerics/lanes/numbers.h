/* Functions of vectors: the same bits in every form. */

/* Write a gradient, or add it to what is there. */
INLINE void write_or_add(Vec *to, Vec d, int adds) { *to = adds ? *to + d : d; }
/* Return the sum of four partial sums, to which numbers were added in turn. */
INLINE Vec sum_of_four(const Vec *sum) { return (sum[0] + sum[2]) + (sum[1] + sum[3]); }
INLINE Vec relu_of(Vec a) { return SELECT(ABOVE(ZERO, a), ZERO, a); } /* not-a-number stays */

/* Return the greater of a and b, and write where it is b. As in PyTorch's max-pool it is a where
 * they are equal, and not-a-number where one of them is. */
INLINE Vec greater(Vec a, Vec b, Mask *second) {
  *second = ABOVE(b, a) | IS_NAN(b);
  return SELECT(*second, b, a);
}

/* Return e^x of x <= 0, to 1e-7 (Cephes): 2^n e^r, where x = n log 2 + r. To add 1.5 * 2^23 rounds
 * to a whole number n and leaves it in the low bits. Below -50 the result is 0: gradients of 1e-22
 * and less would become subnormal numbers in the backward pass, which take 100 times as long. */
INTERNAL Vec exponential(Vec x) {
  static const float c[5] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                             5.0000001201e-1f};
  const Vec shifted = FMA(x, FILL(1.44269504f), FILL(12582912.f));
  const Vec n = shifted - 12582912.f;
  const Vec r = FMA(n, FILL(2.12194440e-4f), FMA(n, FILL(-0.693359375f), x));
  Vec p = FILL(1.9875691500e-4f);
  for (int i = 0; i < 5; i++) p = FMA(p, r, FILL(c[i]));
  const Vec y = FMA(p, r * r, r) + 1.f; /* e^r */
  const Vec scaled = AS_FLOAT(AS_BITS(y) + (AS_BITS(shifted) << 23));
  /* a GPU's not-a-number, plus the bits of n, would be a number */
  return SELECT(IS_NAN(x), x, SELECT(ABOVE(FILL(-50.f), x), ZERO, scaled));
}

/* Return log x of x >= 1, to 1e-7 (Cephes): e log 2 + log(1 + m), 1 + m in sqrt(.5) ... sqrt(2). */
INTERNAL Vec logarithm(Vec x) {
  static const float c[8] = {-1.1514610310e-1f, 1.1676998740e-1f,  -1.2420140846e-1f,
                             1.4249322787e-1f,  -1.6668057665e-1f, 2.0000714765e-1f,
                             -2.4999993993e-1f, 3.3333331174e-1f};
  const Bits bits = AS_BITS(x) - 0x3f3504f3u;
  const Vec e = AS_FLOAT((bits >> 23) + 0x4b400000u) - 12582912.f;
  const Vec m = AS_FLOAT((bits & 0x7fffffu) + 0x3f3504f3u) - 1.f;
  Vec p = FILL(7.0376836292e-2f);
  for (int i = 0; i < 8; i++) p = FMA(p, m, FILL(c[i]));
  const Vec rest = FMA(e, FILL(-2.12194440e-4f), p * (m * m * m));
  const Vec y = FMA(FILL(-0.5f), m * m, rest) + m;
  /* x - x passes on not-a-number and infinity */
  return FMA(e, FILL(0.693359375f), y) + (x - x);
}
