/* The random numbers of clients' epochs: order of samples, crops, and keys for dropout. They are
 * those that NumPy's generator, from `stream` of streams.py, gives by `permutation(n)` and
 * `integers`, number for number. numerics/draws.py calls this file, and computes the same, slower,
 * without it.
 *
 * A stream is a sequence of random 64-bit words, or of their 32-bit halves, the lower one first.
 * The generator Philox makes blocks of four words; several at once, as their products overlap in
 * time. */
enum { BLOCKS = 4, HALVES = 8 * BLOCKS };

typedef struct {
  uint64_t key[2], counter; /* NumPy's counter has 256 bits; the upper ones stay 0 */
  uint64_t word[4 * BLOCKS];
  int32_t next; /* the first half that is not used yet */
} Stream;

/* Write the next words: Philox 4x64-10 (Salmon et al., 2011). */
static void refill(Stream *s) {
  uint64_t x[4][BLOCKS] = {0}, key[2] = {s->key[0], s->key[1]};
  for (int b = 0; b < BLOCKS; b++) x[0][b] = ++s->counter;
  for (int round = 0; round < 10; round++) {
    for (int b = 0; b < BLOCKS; b++) {
      const unsigned __int128 first = (unsigned __int128)x[0][b] * 0xD2E7470EE14C6C93;
      const unsigned __int128 second = (unsigned __int128)x[2][b] * 0xCA5A826395121157;
      x[0][b] = (uint64_t)(second >> 64) ^ x[1][b] ^ key[0], x[1][b] = (uint64_t)second;
      x[2][b] = (uint64_t)(first >> 64) ^ x[3][b] ^ key[1], x[3][b] = (uint64_t)first;
    }
    key[0] += 0x9E3779B97F4A7C15, key[1] += 0xBB67AE8584CAA73B;
  }
  for (int b = 0; b < BLOCKS; b++)
    for (int i = 0; i < 4; i++) s->word[4 * b + i] = x[i][b];
  s->next = 0;
}

/* Two functions of NumPy's SeedSequence. Each call of `hash` sets the factor for the next one. */
static uint32_t hash(uint32_t word, uint32_t *factor, uint32_t growth) {
  word ^= *factor;
  *factor *= growth;
  word *= *factor;
  return word ^ word >> 16;
}

static void mix_into(uint32_t *pool, uint32_t word, uint32_t *factor) {
  const uint32_t mixed = 0xCA01F9DD * *pool - 0x4973F715 * hash(word, factor, 0x931E8875);
  *pool = mixed ^ mixed >> 16;
}

/* Return the stream of (seed, purpose, client, counter). NumPy's SeedSequence mixes the 32-bit
 * words of these numbers, the lowest of each first, in a pool of four, and hashes the pool to
 * Philox's key. */
static Stream stream(const uint32_t *seed, int64_t words, int64_t purpose, int64_t client,
                     int64_t counter) {
  const uint64_t number[3] = {purpose, client, counter};
  uint32_t other[6], pool[4], factor = 0x43B0D7E5;
  int64_t count = 0; /* of words after the seed's */
  for (int i = 0; i < 3; i++) {
    other[count++] = (uint32_t)number[i];
    if (number[i] >> 32) other[count++] = (uint32_t)(number[i] >> 32);
  }
  for (int i = 0; i < 4; i++)
    pool[i] = hash(i < words ? seed[i] : other[i - words], &factor, 0x931E8875);
  for (int from = 0; from < 4; from++)
    for (int to = 0; to < 4; to++)
      if (to != from) mix_into(pool + to, pool[from], &factor);
  for (int64_t i = 4; i < words + count; i++)
    for (int to = 0; to < 4; to++)
      mix_into(pool + to, i < words ? seed[i] : other[i - words], &factor);
  Stream s = {.next = HALVES};
  factor = 0x8B51F9DD;
  for (int i = 0; i < 4; i++)
    s.key[i / 2] |= (uint64_t)hash(pool[i], &factor, 0x58F38DED) << 32 * (i % 2);
  return s;
}

static inline uint32_t next_half(Stream *s) {
  if (s->next == HALVES) refill(s);
  const uint64_t word = s->word[s->next / 2];
  return (uint32_t)(s->next++ % 2 ? word >> 32 : word);
}

/* Return a uniform number below n, n > 1 (Lemire, 2019). */
static inline uint32_t below(Stream *s, uint32_t n) {
  uint64_t scaled = (uint64_t)next_half(s) * n;
  if ((uint32_t)scaled < n) { /* as n > bound, this test spares most calls the division */
    const uint32_t bound = -n % n;
    while ((uint32_t)scaled < bound) scaled = (uint64_t)next_half(s) * n;
  }
  return (uint32_t)(scaled >> 32);
}

/* Write start ... start + n - 1 in random order, by swaps of the last element with a random one. A
 * number above `last` is drawn again; to avoid a branch that no processor can predict, it swaps the
 * last element with itself. */
static void permutation(Stream *s, int64_t start, int64_t n, int32_t *order) {
  for (int64_t i = 0; i < n; i++) order[i] = (int32_t)(start + i);
  for (int64_t last = n - 1; last > 0;) {
    const uint32_t mask = 0xFFFFFFFF >> __builtin_clz((uint32_t)last);
    for (const int64_t next_mask = mask / 2; last > next_mask;) { /* until a smaller mask fits */
      const uint32_t drawn = next_half(s) & mask;
      const int64_t fits = drawn <= last, other = fits ? drawn : last;
      const int32_t swapped = order[last];
      order[last] = order[other], order[other] = swapped;
      last -= fits;
    }
  }
}

/* What one client's numbers are drawn for; numerics/draws.py fills it in. */
typedef struct {
  int64_t client, epoch; /* its number; the first of its epochs */
  int64_t n;             /* samples, or steps, of an epoch */
  int64_t start;         /* its first sample, or where its keys are written */
} Drawn;

/* Write what `count` clients train on in `epochs` epochs, one client after the other. order
 * [epochs, n]: the client's samples in random order, by streams of the purpose `ordering`. crop
 * [3, epochs, n], unless it is NULL: first row and column of each sample's window, both below
 * `corners`, and whether it is mirrored, by streams of the purpose `cropping`. */
PUBLIC void schedules(const uint32_t *seed, int64_t words, int64_t ordering, int64_t cropping,
                      int64_t corners, const Drawn *drawn, int64_t count, int64_t epochs,
                      int32_t *order, uint8_t *crop) {
  for (const Drawn *d = drawn; d < drawn + count; d++) {
    for (int64_t e = 0; e < epochs; e++) {
      Stream s = stream(seed, words, ordering, d->client, d->epoch + e);
      permutation(&s, d->start, d->n, order + e * d->n);
      if (!crop) continue;
      s = stream(seed, words, cropping, d->client, d->epoch + e);
      for (int64_t part = 0; part < 3; part++)
        for (int64_t j = 0; j < d->n; j++)
          crop[(part * epochs + e) * d->n + j] = (uint8_t)below(&s, part < 2 ? corners : 2);
    }
    order += epochs * d->n;
    if (crop) crop += 3 * epochs * d->n;
  }
}

/* Write a random number below 2^63 for each step [epochs, n] of each client, by streams of
 * `purpose`. */
PUBLIC void keys(const uint32_t *seed, int64_t words, int64_t purpose, const Drawn *drawn,
                 int64_t count, int64_t epochs, int64_t *keys) {
  for (const Drawn *d = drawn; d < drawn + count; d++)
    for (int64_t e = 0; e < epochs; e++) {
      Stream s = stream(seed, words, purpose, d->client, d->epoch + e);
      for (int64_t j = 0; j < d->n; j++, s.next += 2) {
        if (s.next == HALVES) refill(&s);
        keys[d->start + e * d->n + j] = (int64_t)(s.word[s.next / 2] >> 1);
      }
    }
}
