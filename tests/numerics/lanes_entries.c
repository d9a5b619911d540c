/* Calls every entry of lanes.c on networks that plan.py described, and mini-batches of awkward
 * sizes, by teams of MEMBERS threads, and prints losses to the last bit: run by
 * tests/numerics/test_lanes_library.py under sanitizers (all arrays are allocated here to the byte,
 * and gaps of the arena are poisoned) and emulators. Each argument is a file of one network
 * (test_lanes_library.py). */
#include <stdio.h>
#include <stdlib.h>

#ifdef FEWER /* none, one, two, three, four of the threads that a call asks for are started */
#include <errno.h>
#include <pthread.h>
static int start(pthread_t *thread, const void *how, void *(*run)(void *), void *of) {
  static int most, left;
  if (left-- > 0) return pthread_create(thread, how, run, of);
  left = most = (most + 1) % 5;
  return EAGAIN;
}
#define pthread_create start
#endif
#include "lanes.c"

#ifndef MEMBERS
#define MEMBERS 1 /* of a team */
#endif

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

/* Clients that train, one on all of the images, the others on fewer. */
enum { CLIENTS = 3 };

static void check(Net net, int n, int border, int batch, const int64_t *pieces, int count) {
  float scale[64], shift[64];
  for (int i = 0; i < 64; i++) scale[i] = .01f, shift[i] = i % 2 ? -1 : -.5f;
  net.scale = scale, net.shift = shift;
  const int teams = MEMBERS > 1 ? 2 : 1;
  const size_t space = NAME(space)(&net, MEMBERS);
  char *memory = get(space * teams);
  memset(memory, 0, space * teams);
#ifdef __SANITIZE_ADDRESS__
  void __asan_poison_memory_region(void const volatile *, size_t);
  for (int i = 0; i < count; i++) {
    const int64_t end = pieces[2 * i] + pieces[2 * i + 1],
                  next = i + 1 < count ? pieces[2 * i + 2] : net.vectors;
    __asan_poison_memory_region(memory + end * sizeof(Vec), (next - end) * sizeof(Vec));
  }
#endif
  const int classes = net.value[net.logits].units, width = net.width;
  const int read = net.layer[net.layers - 1].in, units = net.value[read].units;
  const int rows = net.height + 2 * border, columns = net.wide + 2 * border;
  const size_t row = 4 * width;
  uint8_t *trained = filled(width, 1, 2), *crop = filled(3 * n, 1, 2 * border + 1);
  void *pixels = pixels_of(&net, n * rows * columns * net.channels);
  int64_t *labels = filled(n, 8, classes), *keys = filled(n, 8, 256);
  int32_t *order = filled(n, 4, n);
  float *corrections = malloc(8 * n);
  for (int i = 0; i < 2 * n; i++) corrections[i] = .5f + i / (4.f * n);
  crop[0] = crop[n] = 2 * border; /* the last corner, of the last image */
  order[0] = n - 1;
  for (int with = 0; with < 2; with++) {
    const Images images = {pixels,  labels, order, with ? crop : NULL, n, rows,
                           columns, border, keys};
    float *w = get(2 * row); /* two rows */
    for (int i = 0; i < 2 * width; i++) w[i] = (drawn() / 16777216.f - .5f) * .2f;
    const Sgd sgd = {.01f, .9f, 1e-3f, 20, .5f, with ? w + width : NULL, with ? trained : NULL};
    Sgd adam = sgd;
    adam.corrections = corrections, adam.decoupled = with;
    adam.one_minus_beta1 = .1f, adam.beta2 = .99f, adam.one_minus_beta2 = .01f;
    adam.eps = 1e-3f;
    Training clients[CLIENTS];
    for (int i = 0; i < CLIENTS; i++) {
      Training *c = &clients[i];
      *c = (Training){.w = get(row), .m = get(8 * width + 4), .v = get(row), .row = get(row),
                      .m_v = get(8 * width + 4), .g = get(row), .share = .3f, .epochs = 1,
                      .batch = batch, .n = n - i, .images = images, .sgd = sgd};
      memcpy(c->w, w, row), memset(c->m, 0, 8 * width + 4), memset(c->m_v, 0, 8 * width + 4);
      memset(c->v, 0, row);
    }
#define CALL(verb, tasks, count) NAME(verb)(&net, tasks, count, teams, MEMBERS, memory)
#define FOR_EACH(...) for (Training *c = clients; c < clients + CLIENTS; c++) { __VA_ARGS__; }
    CALL(train, clients, CLIENTS);
    FOR_EACH(printf("%.9g ", c->loss))
    CALL(gradient, clients, CLIENTS);
    CALL(step, clients, CLIENTS);
    FOR_EACH(printf("%.9g ", c->loss); c->sgd = adam; memset(c->m, 0, 8 * width + 4))
    CALL(mix, clients, CLIENTS);
    FOR_EACH(printf("%.9g %.9g ", c->losses[0], c->losses[1]); c->share = .02f)
    CALL(ahead, clients, CLIENTS);
    FOR_EACH(printf("%.9g ", c->losses[0]); c->epochs = 2, c->n = batch < n ? batch : n;
             c->sgd = (Sgd){.lr = .01f, .mu = .5f, .towards = c->row})
    CALL(descents, clients, CLIENTS);
    FOR_EACH(printf("%.9g %.9g ", c->losses[0], c->w[width / 2]))
    float *losses = malloc(8 * n), *logits = malloc(8 * n * classes), *pair = get(2 * row);
    float *features = malloc(8 * n * units);
    int64_t *predicted = malloc(16 * n);
    Scoring scores[2] = {{w, width, 2, read, n, images, losses, predicted, logits, features},
                         {w, width, 1, read, n, images, malloc(4 * n)}};
    CALL(score, scores, 2);
    double *x = malloc(8 * width), *y = malloc(8 * width);
    for (int i = 0; i < width; i++) x[i] = w[i] / 3., y[i] = .9 * w[i];
    const double p[3] = {.1, .2, .3}, coins[3] = {.4, .5, .6};
    const float *models[3] = {w, w + width, w};
    uint8_t *added = malloc(3);
    Search s = {.x = x, .y = y, .p_x = .5, .p_y = .9, .pair = pair, .losses = losses, .n = n,
                .images = images, .models = models, .p = p, .coins = coins, .added = added,
                .count = 3, .budget_left = 1 + with};
    CALL(candidate, &s, 1);
    printf("%.17g %.17g %.9g ", x[width / 2], y[width / 2], pair[width / 2] + pair[3 * width / 2]);
    CALL(search, &s, 1);
    printf("%.9g %d %.17g %.17g %.17g", scores[1].losses[n - 1], (int)s.decided, s.r_x, s.r_y,
           x[0]);
    const int64_t ends[3] = {0, 2, 3};
    const double whole[2] = {.3, .3 * with};
    int64_t *exact = malloc(8 * width);
    NAME(means)(models, p, ends, whole, 2, pair, width);
    NAME(fixed)(models, p, 3, exact, width);
    printf(" %.9g %.9g %lld\n", pair[width / 2], pair[3 * width / 2], (long long)exact[width / 2]);
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
