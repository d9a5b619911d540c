/* Reads the images, vectors or tokens of a pass into the first value of the network: number i of
 * each sample becomes a vector, with one sample in each lane. lanes.c calls load_images. */

/* For each lane: where its sample's window starts, in numbers, and whether it is mirrored. */
typedef struct {
  int64_t start[LANES_HELD];
  int mirrored[LANES_HELD];
} Windows;

/* Return the windows of the pass's images, from number `first` of the client's order on, and write
 * their labels into p. Lanes without an image have the first one. */
INTERNAL Windows windows_of(Pass *p, const Images *images, int64_t first) {
  const uint8_t *crop = images->crop;
  Windows windows;
  FOR_LANES(l) {
    const int64_t i = first + (l < p->n ? l : 0), image = images->order[i];
    p->labels[HELD_INDEX(l)] = images->labels[image];
    const int64_t top = crop ? crop[i] : images->corner;
    const int64_t left = crop ? crop[images->stride + i] : images->corner;
    windows.start[HELD_INDEX(l)] =
        ((image * images->rows + top) * images->columns + left) * p->net->channels;
    windows.mirrored[HELD_INDEX(l)] = crop && crop[2 * images->stride + i];
  }
  return windows;
}

#ifdef GPU
/* Read images of bytes. A member reads PIXELS pixels of a line at a time, as aligned words of four
 * bytes, which takes fewer reads. A line may start inside a word: then each four bytes come from
 * two words. */
INTERNAL void read_bytes(const Pass *p, const Images *images, Windows windows) {
  enum { PIXELS = 8 };
  const Net *net = p->net;
  const Value *value = &net->value[0];
  const int channels = net->channels, width = net->wide;
  SHARE_PLACES(&p->team, plane, 1, line, net->height, part, (width + PIXELS - 1) / PIXELS, {
    const int first = part * PIXELS; /* pixel */
    const int bytes = (width - first < PIXELS ? width - first : PIXELS) * channels;
    const int64_t start = windows.start[0] + ((int64_t)line * images->columns + first) * channels;
    const uint64_t address = (uint64_t)images->pixels + start;
    const uint32_t *words = (const uint32_t *)(address & ~(uint64_t)3);
    const int skipped = address & 3; /* bytes of the first word */
    const Vectors x = p->arena + value->start + line * value->line_step;
    uint32_t word = words[0], next;
    UNROLL for (int i = 0; i < PIXELS * channels; i += 4, word = next) {
      next = skipped + bytes - i > 4 ? words[i / 4 + 1] : 0;
      uint32_t four = skipped ? word >> 8 * skipped | next << (32 - 8 * skipped) : word;
      UNROLL for (int k = i; k < i + 4; k++, four >>= 8)
        if (k < bytes) {
          const int pixel = first + k / channels, channel = k % channels;
          const int column = windows.mirrored[0] ? width - 1 - pixel : pixel;
          x[channel * value->plane_step + column] =
              FMA(number(four & 255u), net->scale[channel], net->shift[channel]);
        }
    }
  })
}
#else
/* Transpose lines of bytes, one for each lane: word i (4 bytes) of all lanes becomes vector i. */
INTERNAL void transpose(const uint8_t *bytes, int32_t words, Vec *to) {
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

/* Read images of bytes, line by line: crop and mirror the line of each image, transpose them, four
 * bytes at a time, and split these into vectors of single bytes. */
INTERNAL void read_bytes(const Pass *p, const Images *images, Windows windows) {
  const Net *net = p->net;
  const Value *value = &net->value[0];
  const int32_t width = net->wide, channels = net->channels, line = width * channels;
  const int32_t words = (line + 3) / 4;
  uint8_t *bytes = (uint8_t *)p->private_space; /* [LANES, 4 * words] one line of each image */
  Vec *transposed = p->private_space + words;   /* [words] */
  SHARE(&p->team, row, net->height) {
    for (int l = 0; l < LANES; l++) {
      const uint8_t *from = (const uint8_t *)images->pixels + windows.start[l] +
                            (int64_t)row * images->columns * channels;
      uint8_t *to = bytes + l * words * 4;
      if (!windows.mirrored[l]) memcpy(to, from, line);
      for (int32_t i = 0; windows.mirrored[l] && i < width; i++)
        for (int32_t k = 0; k < channels; k++)
          to[i * channels + k] = from[(width - 1 - i) * channels + k];
    }
    transpose(bytes, words, transposed);
    for (int32_t channel = 0; channel < channels; channel++) {
      const Vec scale = FILL(net->scale[channel]), shift = FILL(net->shift[channel]);
      Vec *x = p->arena + value->start + channel * value->plane_step + row * value->line_step;
      for (int32_t i = channel, pixel = 0; pixel < width; pixel++, i += channels) {
        const Bits byte = (((const Bits *)transposed)[i / 4] >> (8 * (i % 4))) & 255u;
        x[pixel] = FMA(number(byte), scale, shift);
      }
    }
  }
}
#endif

/* Read samples of four bytes a number: floats, which are scaled, or tokens. */
INTERNAL void read_numbers(const Pass *p, const Images *images, Windows windows) {
  const Net *net = p->net;
  const Value *value = &net->value[0];
  const int32_t channels = net->channels, width = net->wide;
#ifdef GPU
  SHARE_PLACES(&p->team, channel, channels, line, net->height, pixel, width, {
    const int64_t place =
        windows.start[0] + ((int64_t)line * images->columns + pixel) * channels + channel;
    const Vec x = ((const float *)images->pixels)[place];
    const int column = windows.mirrored[0] ? width - 1 - pixel : pixel;
    p->arena[value->start + place_in(value, channel, line, column)] =
        net->samples == FLOATS ? FMA(x, net->scale[channel], net->shift[channel]) : x;
  })
#else
  SHARE(&p->team, row, net->height) {
    Vec *x = p->arena + value->start + row * value->line_step;
    for (int l = 0; l < LANES; l++) {
      const float *from =
          (const float *)images->pixels + windows.start[l] + row * images->columns * channels;
      for (int32_t pixel = 0; pixel < width; pixel++) {
        Vec *to = x + (windows.mirrored[l] ? width - 1 - pixel : pixel);
        for (int32_t channel = 0; channel < channels; channel++, to += value->plane_step)
          memcpy((float *)to + l, from++, 4);
      }
    }
    for (int32_t channel = 0; channel < channels && net->samples == FLOATS; channel++) {
      const Vec scale = FILL(net->scale[channel]), shift = FILL(net->shift[channel]);
      Vec *line = x + channel * value->plane_step;
      for (int32_t pixel = 0; pixel < width; pixel++) line[pixel] = FMA(line[pixel], scale, shift);
    }
  }
#endif
}

/* Load the pass's samples and labels, from number `first` of the client's order on. */
INTERNAL void load_images(Pass *p, const Images *images, int64_t first) {
  const Windows windows = windows_of(p, images, first);
  if (p->net->samples == BYTES) read_bytes(p, images, windows);
  else read_numbers(p, images, windows);
  barrier(&p->team);
}
