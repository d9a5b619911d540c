/* Calls every entry of lanes.c on nets and mini-batches of awkward sizes, and prints losses to the last bit: run by
 * tests/numerics/test_lanes_library.py under sanitizers (all arrays are allocated here to the byte) and emulators. */
#include <stdio.h>
#include <stdlib.h>

#include "lanes.c"

static uint32_t state = 1;
static int drawn(void) { return (state = state * 1664525u + 1013904223u) >> 8; } /* the same on every system */
static void *get(size_t bytes) { return aligned_alloc(64, (bytes + 63) / 64 * 64); } /* rows and work space */

static void *filled(int count, int size, int below) {
  uint8_t *p = calloc(count, size);
  for (int i = 0; i < count; i++) p[i * size] = drawn() % below; /* little endian: int32 and int64 as well */
  return p;
}

static void check(Net net, int n, int border, int batch) {
  const float scale[4] = {.01f, .02f, .01f, .01f}, shift[4] = {-1, -1, -1, -1};
  net.scale = scale, net.shift = shift;
  void *memory = get(NAME(space)(&net));
  const Work k = lay_out(&net, NULL);
  const int classes = net.units[net.layers - 1], read = k.layer[net.layers - 1].inputs;
  const int rows = net.height + 2 * border, columns = net.width + 2 * border;
  float *w = get(8 * k.width), *m = get(4 * k.width), *g = get(4 * k.width); /* w: two rows */
  float *pair = malloc(8 * k.width);
  double *x = malloc(8 * k.width), *x_j = malloc(8 * k.width), *y_j = malloc(8 * k.width);
  uint8_t *trained = filled(k.width, 1, 2), *pixels = filled(n * rows * columns * net.channels, 1, 256);
  uint8_t *crop = filled(3 * n, 1, 2 * border + 1);
  int64_t *labels = filled(n, 8, classes);
  int32_t *order = filled(n, 4, n);
  for (int i = 0; i < 2 * k.width; i++) w[i] = (drawn() / 16777216.f - .5f) * .2f;
  memset(m, 0, 4 * k.width);
  crop[0] = crop[n] = 2 * border; /* the last corner, of the last image */
  order[0] = n - 1;
  float *losses = malloc(8 * n), *logits = malloc(8 * n * classes), *features = malloc(8 * n * read);
  int64_t *predicted = malloc(16 * n);
  for (int with = 0; with < 2; with++) {
    const Images images = {pixels, labels, order, with ? crop : NULL, n, rows, columns, border};
    const Sgd sgd = {.01f, .9f, 1e-3f, 20, .5f, with ? w + k.width : NULL, with ? trained : NULL};
    const double total = NAME(train)(&net, w, m, &images, n, 1, batch, &sgd, memory);
    const double loss = NAME(gradient)(&net, w, g, &images, n, memory);
    NAME(step)(w, m, g, k.width, &sgd);
    NAME(score)(&net, w, k.width, 2, &images, n, losses, predicted, logits, features, memory);
    NAME(score)(&net, w, k.width, 1, &images, n, losses, NULL, NULL, NULL, memory);
    for (int i = 0; i < k.width; i++) x[i] = w[i] / 3.;
    NAME(candidate)(x, x, w, .1, .3, .7, x_j, y_j, pair, k.width);
    printf("%.9g %.9g %.9g", total, loss, losses[n - 1]);
    printf(" %.17g %.17g %.9g\n", x_j[k.width / 2], y_j[k.width / 2], pair[k.width / 2] + pair[3 * k.width / 2]);
  }
  void *all[] = {pair, x, x_j, y_j, memory, w, m, g, trained, pixels, crop, labels, order, losses, logits, features, predicted};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

int main(void) {
  check((Net){32, 32, 3, 2, {6, 16}, 3, {120, 84, 10}, 0, 0}, 21, 4, 16);
  check((Net){17, 18, 3, 2, {6, 16}, 3, {120, 84, 4}, 0, 0}, 19, 4, 8);
  check((Net){19, 23, 2, 2, {5, 7}, 3, {13, 9, 3}, 0, 0}, 5, 2, 5);
  check((Net){16, 16, 1, 2, {1, 1}, 3, {1, 1, 2}, 0, 0}, 3, 0, 1);
  check((Net){3, 5, 4, 0, {0}, 2, {7, 2}, 0, 0}, 33, 1, 32);
  return 0;
}
