/* Images, vectors and tokens into lanes: the first value of a network. */
INLINE void mirror(uint8_t *to, const uint8_t *from, int32_t pixels, const int32_t channels) {
  for (int32_t i = 0; i < pixels; i++)
    for (int32_t c = 0; c < channels; c++) to[i * channels + c] = from[(pixels - 1 - i) * channels + c];
}

/* Where each lane's window starts, counted in numbers, and whether it is mirrored. */
typedef struct {
  int64_t from[LANES];
  int mirrored[LANES];
} Windows;

static Windows windows_of(Pass *p, const Images *images, int64_t first) {
  const uint8_t *crop = images->crop;
  Windows at;
  for (int l = 0; l < LANES; l++) {
    const int64_t i = first + (l < p->n ? l : 0), image = images->order[i];
    p->labels[l] = images->labels[image];
    const int64_t top = crop ? crop[i] : images->corner, left = crop ? crop[images->stride + i] : images->corner;
    at.from[l] = ((image * images->rows + top) * images->columns + left) * p->net->channels;
    at.mirrored[l] = crop && crop[2 * images->stride + i];
  }
  return at;
}

/* Write number i of the `count` numbers of four bytes at each lane's `from` to vector i / c of plane i % c. */
static void turn(const void *const *from, int32_t count, int32_t c, int64_t plane, F *to) {
  int32_t i = 0, channel = 0;
#if FORM >= 256
  for (; i + 4 <= count; i += 4) {
    float *place[4];
    for (int k = 0; k < 4; k++) {
      place[k] = (float *)(to + channel * plane);
      if (++channel == c) channel = 0, to++;
    }
    for (int l = 0; l < LANES; l += 4) {
      __m128 four[4];
      for (int k = 0; k < 4; k++) four[k] = _mm_loadu_ps((const float *)from[l + k] + i);
      _MM_TRANSPOSE4_PS(four[0], four[1], four[2], four[3]);
      for (int k = 0; k < 4; k++) _mm_store_ps(place[k] + l, four[k]);
    }
  }
#endif
  for (; i < count; i++) {
    for (int l = 0; l < LANES; l++) memcpy((float *)(to + channel * plane) + l, (const float *)from[l] + i, 4);
    if (++channel == c) channel = 0, to++;
  }
}

/* Bytes, by lines: cropped and mirrored, then turned four bytes at a time. */
static void read_bytes(const Pass *p, const Images *images, Windows at) {
  const Net *net = p->net;
  const Value *value = &net->value[0];
  const int32_t h = net->height, w = net->wide, c = net->channels, line = w * c, words = (line + 3) / 4;
  uint8_t *bytes = (uint8_t *)scratch_of(p); /* [LANES, W C] one line of each image */
  F *turned = scratch_of(p) + words;         /* [W C / 4, LANES] four bytes of each at a time */
  const void *lines[LANES];
  for (int l = 0; l < LANES; l++) lines[l] = bytes + l * words * 4;
  for (int32_t row = 0; row < h; row++) {
    for (int l = 0; l < LANES; at.from[l] += images->columns * c, l++) {
      const uint8_t *from = (const uint8_t *)images->pixels + at.from[l];
      if (!at.mirrored[l]) memcpy(bytes + l * words * 4, from, line);
      else if (c == 3) mirror(bytes + l * words * 4, from, w, 3);
      else mirror(bytes + l * words * 4, from, w, c);
    }
    turn(lines, words, 1, 0, turned);
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

/* Numbers of four bytes, floats or tokens as they are, by lines. */
static void read_numbers(const Pass *p, const Images *images, Windows at) {
  const Net *net = p->net;
  const Value *value = &net->value[0];
  const int32_t c = net->channels, w = net->wide;
  const void *lines[LANES];
  for (int32_t row = 0; row < net->height; row++) {
    F *x = p->arena + value->x + row * value->line;
    for (int l = 0; l < LANES; at.from[l] += (int64_t)images->columns * c, l++)
      lines[l] = (const float *)images->pixels + at.from[l];
    turn(lines, w * c, c, value->plane, x);
    for (int l = 0; l < LANES; l++)
      for (int32_t i = 0; at.mirrored[l] && i < w * c; i++)
        memcpy((float *)(x + i % c * value->plane + w - 1 - i / c) + l, (const float *)lines[l] + i, 4);
    for (int32_t channel = 0; channel < c && net->samples == FLOATS; channel++) {
      const F scale = FILL(net->scale[channel]), shift = FILL(net->shift[channel]);
      F *line = x + channel * value->plane;
      for (int32_t pixel = 0; pixel < w; pixel++) line[pixel] = FMA(line[pixel], scale, shift);
    }
  }
}

/* Load the pass's images and labels, from number `first` of the order on. */
static void load_images(Pass *p, const Images *images, int64_t first) {
  const Windows at = windows_of(p, images, first);
  if (p->net->samples == BYTES) read_bytes(p, images, at);
  else read_numbers(p, images, at);
}
