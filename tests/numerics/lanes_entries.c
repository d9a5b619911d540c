/* Calls every entry of lanes.c on networks that plan.py described, and mini-batches of awkward
 * sizes, and prints losses to the last bit: run by tests/numerics/test_lanes_library.py under
 * sanitizers (all arrays are allocated here to the byte, and gaps of the arena are poisoned) and
 * emulators. Each argument is a file of one network (test_lanes_library.py). */
#include <stdio.h>
#include <stdlib.h>

#include "lanes.c"

static uint32_t state = 1;
static int drawn(void) {
  return (state = state * 1664525u + 1013904223u) >> 8;
} /* the same on every system */
static void *get(size_t bytes) {
  return aligned_alloc(64, (bytes + 63) / 64 * 64);
} /* rows and work space */

static void *filled(int count, int size, int below) {
  uint8_t *p = calloc(count, size);
  for (int i = 0; i < count; i++)
    p[i * size] = drawn() % below; /* little endian: int32 and int64 as well */
  return p;
}

static void *pixels_of(const Net *net, int count) {
  if (net->samples != FLOATS)
    return filled(count, net->samples == BYTES ? 1 : 4, net->samples == BYTES ? 256 : 9);
  float *p = malloc(4 * count);
  for (int i = 0; i < count; i++) p[i] = drawn() / 16777216.f;
  return p;
}

static void check(Net net, int n, int border, int batch, const int64_t *pieces, int count) {
  float scale[64], shift[64];
  for (int i = 0; i < 64; i++) scale[i] = .01f, shift[i] = i % 2 ? -1 : -.5f;
  net.scale = scale, net.shift = shift;
  const size_t space = NAME(space)(&net);
  char *memory = get(space);
  memset(memory, 0, space);
#ifdef __SANITIZE_ADDRESS__
  void __asan_poison_memory_region(void const volatile *, size_t);
  for (int i = 0; i < count; i++) {
    const int64_t end = pieces[2 * i] + pieces[2 * i + 1],
                  next = i + 1 < count ? pieces[2 * i + 2] : net.vectors;
    __asan_poison_memory_region(memory + end * sizeof(F), (next - end) * sizeof(F));
  }
#endif
  const int classes = net.value[net.logits].units, read = net.value[net.features].units,
            width = net.width;
  const int rows = net.height + 2 * border, columns = net.wide + 2 * border;
  float *w = get(8 * width), *m = get(4 * width), *g = get(4 * width); /* w: two rows */
  float *moments = calloc(2 * width + 1, 4), *m_v = calloc(2 * width + 1, 4), sums[2] = {0};
  float *v = calloc(width, 4), *row = calloc(width, 4), *pair = malloc(8 * width);
  double *x = malloc(8 * width), *x_j = malloc(8 * width), *y_j = malloc(8 * width);
  uint8_t *trained = filled(width, 1, 2), *crop = filled(3 * n, 1, 2 * border + 1);
  void *pixels = pixels_of(&net, n * rows * columns * net.channels);
  int64_t *labels = filled(n, 8, classes), *keys = filled(n, 8, 256);
  int32_t *order = filled(n, 4, n);
  for (int i = 0; i < 2 * width; i++) w[i] = (drawn() / 16777216.f - .5f) * .2f;
  memset(m, 0, 4 * width);
  float *corrections = malloc(8 * n);
  for (int i = 0; i < 2 * n; i++) corrections[i] = .5f + i / (4.f * n);
  crop[0] = crop[n] = 2 * border; /* the last corner, of the last image */
  order[0] = n - 1;
  float *losses = malloc(8 * n), *logits = malloc(8 * n * classes),
        *features = malloc(8 * n * read);
  int64_t *predicted = malloc(16 * n);
  for (int with = 0; with < 2; with++) {
    const Images images = {pixels,  labels, order, with ? crop : NULL, n, rows,
                           columns, border, keys};
    const Sgd sgd = {.01f, .9f, 1e-3f, 20, .5f, with ? w + width : NULL, with ? trained : NULL};
    const double total = NAME(train)(&net, w, m, &images, n, 1, batch, &sgd, memory);
    const double loss = NAME(gradient)(&net, w, g, &images, n, memory);
    NAME(step)(w, m, g, width, &sgd, 0);
    Sgd adam = sgd;
    adam.corrections = corrections, adam.decoupled = with;
    adam.take = .1f, adam.keep = .99f, adam.add = .01f, adam.eps = 1e-3f;
    NAME(mix)(&net, w, moments, v, m_v, row, .3f, &images, n, 1, batch, &adam, sums, memory);
    NAME(ahead)(&net, v, m_v, row, .02f, &images, n, 1, batch, &adam, sums, memory);
    NAME(descents)(&net, v, row, .5f, .01f, 2, &images, batch < n ? batch : n, sums, memory);
    printf("%.9g %.9g %.9g ", sums[0], sums[1], v[width / 2]);
    NAME(score)(&net, w, width, 2, &images, n, losses, predicted, logits, features, memory);
    NAME(score)(&net, w, width, 1, &images, n, losses, NULL, NULL, NULL, memory);
    for (int i = 0; i < width; i++) x[i] = w[i] / 3.;
    NAME(candidate)(x, x, w, .1, .3, .7, x_j, y_j, pair, width);
    printf("%.9g %.9g %.9g", total, loss, losses[n - 1]);
    double cases[4] = {0}, p[3] = {.1, .2, .3}, coins[3] = {.4, .5, .6};
    const float *models[3] = {w, w + width, w};
    Search s = {x, x_j, .5, .9, 0, 0, pair, losses, cases, 0};
    uint8_t *added = malloc(3);
    const int64_t decided =
        NAME(search)(&net, &s, models, p, coins, 3, 1 + with, added, &images, n, memory);
    printf(" %d %.17g %.17g %.17g", (int)decided, s.r_x, s.r_y, x[0]);
    const int64_t ends[3] = {0, 2, 3};
    const double whole[2] = {.3, .3 * with};
    int64_t *exact = malloc(8 * width);
    NAME(means)(models, p, ends, whole, 2, pair, width);
    NAME(fixed)(models, p, 3, exact, width);
    printf(" %.9g %.9g %lld", pair[width / 2], pair[3 * width / 2], (long long)exact[width / 2]);
    printf(" %.17g %.17g %.9g\n", x_j[width / 2], y_j[width / 2],
           pair[width / 2] + pair[3 * width / 2]);
  }
}

static void *take(FILE *file, size_t bytes) {
  void *p = malloc(bytes + 1);
  if (fread(p, 1, bytes, file) != bytes) exit(1);
  return p;
}

int main(int argc, char **argv) {
  for (int i = 1; i < argc; i++) {
    FILE *file = fopen(argv[i], "rb");
    int32_t *head =
        take(file, 6 * 4); /* images, border, batch; values, numbers in tables, pieces */
    Net *net = take(file, sizeof(Net));
    net->value = take(file, sizeof(Value) * head[3]);
    Layer *layer = take(file, sizeof(Layer) * net->layers);
    int32_t *starts = take(file, 4 * net->layers), *table = take(file, 4 * head[4]);
    for (int l = 0; l < net->layers; l++) layer[l].table = table + starts[l];
    net->layer = layer;
    check(*net, head[0], head[1], head[2], take(file, 16 * head[5]), head[5]);
    fclose(file);
  }
  return 0;
}
