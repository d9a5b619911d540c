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

/* Bytes, by lines: cropped and mirrored, then turned four bytes at a time. */
static void read_bytes(const Pass *p, const Images *images, Windows at) {
  const Net *net = p->net;
  const Value *value = &net->value[0];
  const int32_t h = net->height, w = net->wide, c = net->channels, line = w * c, words = (line + 3) / 4;
  uint8_t *bytes = (uint8_t *)scratch_of(p);                    /* [LANES, W C] one line of each image */
  uint32_t *turned = (uint32_t *)(scratch_of(p) + words); /* [W C / 4, LANES] four bytes of each at a time */
  for (int32_t row = 0; row < h; row++) {
    for (int l = 0; l < LANES; at.from[l] += images->columns * c, l++) {
      const uint8_t *from = (const uint8_t *)images->pixels + at.from[l];
      if (!at.mirrored[l]) memcpy(bytes + l * words * 4, from, line);
      else if (c == 3) mirror(bytes + l * words * 4, from, w, 3);
      else mirror(bytes + l * words * 4, from, w, c);
    }
    for (int32_t i = 0; i < words; i++)
      for (int l = 0; l < LANES; l++) memcpy(turned + i * LANES + l, bytes + (l * words + i) * 4, 4);
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

/* Numbers of four bytes, floats or tokens as they are, by lines: the numbers of each image are written into its lane. */
static void read_numbers(const Pass *p, const Images *images, Windows at) {
  const Net *net = p->net;
  const Value *value = &net->value[0];
  const int32_t c = net->channels, w = net->wide;
  for (int32_t row = 0; row < net->height; row++) {
    F *x = p->arena + value->x + row * value->line;
    for (int l = 0; l < LANES; at.from[l] += (int64_t)images->columns * c, l++) {
      const float *from = (const float *)images->pixels + at.from[l] + (at.mirrored[l] ? (w - 1) * c : 0);
      const int64_t step = at.mirrored[l] ? -c : c;
      for (int32_t channel = 0; channel < c; channel++)
        for (int32_t pixel = 0; pixel < w; pixel++)
          memcpy((float *)(x + channel * value->plane + pixel) + l, from + pixel * step + channel, 4);
    }
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
