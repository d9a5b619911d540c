/* Images, vectors and tokens into lanes: the first value of a network. */

/* Where each lane's window starts, counted in numbers, and whether it is mirrored. */
typedef struct {
  int64_t from[OWN];
  int mirrored[OWN];
} Windows;

INTERNAL Windows windows_of(Pass *p, const Images *images, int64_t first) {
  const uint8_t *crop = images->crop;
  Windows at;
  EACH_LANE(l) {
    const int64_t i = first + (l < p->n ? l : 0), image = images->order[i];
    p->labels[OWNED(l)] = images->labels[image];
    const int64_t top = crop ? crop[i] : images->corner;
    const int64_t left = crop ? crop[images->stride + i] : images->corner;
    at.from[OWNED(l)] =
        ((image * images->rows + top) * images->columns + left) * p->net->channels;
    at.mirrored[OWNED(l)] = crop && crop[2 * images->stride + i];
  }
  return at;
}

#ifdef GPU
/* Bytes, a few pixels of a line at a time: words of four bytes, which may start anywhere in one. */
INTERNAL void read_bytes(const Pass *p, const Images *images, Windows at) {
  enum { PIXELS = 8 };
  const Net *net = p->net;
  const Value *value = &net->value[0];
  const int c = net->channels, w = net->wide;
  PLACES(&p->team, 1, net->height, (w + PIXELS - 1) / PIXELS, {
    const int first = unit_ * PIXELS, bytes = (w - first < PIXELS ? w - first : PIXELS) * c;
    const int64_t from = at.from[0] + ((int64_t)line_ * images->columns + first) * c;
    const uint64_t address = (uint64_t)images->pixels + from;
    const uint32_t *words = (const uint32_t *)(address & ~(uint64_t)3);
    const int apart = address & 3;
    const Vectors x = p->arena + value->x + line_ * value->line;
    uint32_t word = words[0], next;
    UNROLL for (int i = 0; i < PIXELS * c; i += 4, word = next) {
      next = apart + bytes - i > 4 ? words[i / 4 + 1] : 0;
      uint32_t four = apart ? word >> 8 * apart | next << (32 - 8 * apart) : word;
      UNROLL for (int k = i; k < i + 4; k++, four >>= 8)
        if (k < bytes) {
          const int column = at.mirrored[0] ? w - 1 - first - k / c : first + k / c;
          x[k % c * value->plane + column] =
              FMA(number(four & 255u), net->scale[k % c], net->shift[k % c]);
        }
    }
  })
}
#else
/* Write word i of each lane's line, four bytes, to the lanes of vector i. */
INTERNAL void turn(const uint8_t *bytes, int32_t words, F *to) {
  const float *lines = (const float *)bytes;
  int32_t i = 0;
#if FORM >= 256
  for (; i + 4 <= words; i += 4)
    for (int l = 0; l < LANES; l += 4) {
      __m128 four[4];
      for (int k = 0; k < 4; k++) four[k] = _mm_loadu_ps(lines + (l + k) * words + i);
      _MM_TRANSPOSE4_PS(four[0], four[1], four[2], four[3]);
      for (int k = 0; k < 4; k++) _mm_store_ps((float *)(to + i + k) + l, four[k]);
    }
#endif
  for (; i < words; i++)
    for (int l = 0; l < LANES; l++) memcpy((float *)(to + i) + l, lines + l * words + i, 4);
}

/* Bytes, by lines: cropped and mirrored, then turned four bytes at a time. */
INTERNAL void read_bytes(const Pass *p, const Images *images, Windows at) {
  const Net *net = p->net;
  const Value *value = &net->value[0];
  const int32_t w = net->wide, c = net->channels, line = w * c,
                words = (line + 3) / 4;
  uint8_t *bytes = (uint8_t *)p->own; /* [LANES, W C] one line of each image */
  F *turned = p->own + words;         /* [W C / 4, LANES] four bytes of each at a time */
  SHARE(&p->team, row, net->height) {
    for (int l = 0; l < LANES; l++) {
      const uint8_t *from =
          (const uint8_t *)images->pixels + at.from[l] + (int64_t)row * images->columns * c;
      uint8_t *to = bytes + l * words * 4;
      if (!at.mirrored[l]) memcpy(to, from, line);
      for (int32_t i = 0; at.mirrored[l] && i < w; i++)
        for (int32_t k = 0; k < c; k++) to[i * c + k] = from[(w - 1 - i) * c + k];
    }
    turn(bytes, words, turned);
    for (int32_t channel = 0; channel < c; channel++) {
      const F scale = FILL(net->scale[channel]), shift = FILL(net->shift[channel]);
      F *x = p->arena + value->x + channel * value->plane + row * value->line;
      for (int32_t i = channel, pixel = 0; pixel < w; pixel++, i += c) {
        const U byte = (((const U *)turned)[i / 4] >> (8 * (i % 4))) & 255u;
        x[pixel] = FMA(number(byte), scale, shift);
      }
    }
  }
}
#endif

/* Numbers of four bytes, floats or tokens as they are. */
INTERNAL void read_numbers(const Pass *p, const Images *images, Windows at) {
  const Net *net = p->net;
  const Value *value = &net->value[0];
  const int32_t c = net->channels, w = net->wide;
#ifdef GPU
  PLACES(&p->team, c, net->height, w, {
    const int64_t number = at.from[0] + ((int64_t)line_ * images->columns + unit_) * c + plane_;
    const F x = ((const float *)images->pixels)[number];
    const int column = at.mirrored[0] ? w - 1 - unit_ : unit_;
    p->arena[value->x + plane_ * value->plane + line_ * value->line + column] =
        net->samples == FLOATS ? FMA(x, net->scale[plane_], net->shift[plane_]) : x;
  })
#else
  SHARE(&p->team, row, net->height) {
    F *x = p->arena + value->x + row * value->line;
    for (int l = 0; l < LANES; l++) {
      const float *from = (const float *)images->pixels + at.from[l] + row * images->columns * c;
      for (int32_t pixel = 0; pixel < w; pixel++) {
        F *to = x + (at.mirrored[l] ? w - 1 - pixel : pixel);
        for (int32_t channel = 0; channel < c; channel++, to += value->plane)
          memcpy((float *)to + l, from++, 4);
      }
    }
    for (int32_t channel = 0; channel < c && net->samples == FLOATS; channel++) {
      const F scale = FILL(net->scale[channel]), shift = FILL(net->shift[channel]);
      F *line = x + channel * value->plane;
      for (int32_t pixel = 0; pixel < w; pixel++) line[pixel] = FMA(line[pixel], scale, shift);
    }
  }
#endif
}

/* Load the pass's images and labels, from number `first` of the order on. */
INTERNAL void load_images(Pass *p, const Images *images, int64_t first) {
  const Windows at = windows_of(p, images, first);
  if (p->net->samples == BYTES) read_bytes(p, images, at);
  else read_numbers(p, images, at);
  meet(&p->team);
}
