/* What gpu.h asks of CUDA, on a CPU: C++ by g++, for tests.
 *
 * A block's threads are coroutines of one thread of the CPU, which run one after the other between
 * two barriers, in their order or backwards. A number that one thread writes and another one reads
 * without a barrier between them is then read too early in one of the two orders.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define __device__
#define __global__
#define __launch_bounds__(threads, blocks)
#define __forceinline__ inline __attribute__((always_inline))

struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct Place {
  int x;
};
static Place threadIdx, blockIdx;

static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static float __fsqrt_rn(float a) { return sqrtf(a); }
static uint32_t __float_as_uint(float a) {
  uint32_t u;
  memcpy(&u, &a, sizeof u);
  return u;
}
static float __uint_as_float(uint32_t u) {
  float a;
  memcpy(&a, &u, sizeof a);
  return a;
}
static int32_t atomicAdd(int32_t *at, int32_t more) { return (*at += more) - more; }

/* Threads of a team, each with a stack, and what runs them in turn. */
enum { STACK_BYTES = 1 << 18 };
static struct {
  ucontext_t turn, thread[1024];
  bool ended[1024];
  int now;
} emulated;

/* A barrier: the other threads are run up to theirs. */
static void __syncthreads() { swapcontext(&emulated.thread[emulated.now], &emulated.turn); }

/* Run a kernel by one team of so many threads, in blocks of `block`. */
template <class Kernel, class... Arguments>
static void launch_emulated(int threads, int block, bool backwards, Kernel kernel,
                            Arguments... arguments) {
  static void (*run)(void *);
  static void *call;
  auto one = [=] { kernel(arguments...); };
  run = [](void *of) { (*(decltype(one) *)of)(); };
  call = &one;
  char *stacks = (char *)malloc((size_t)threads * STACK_BYTES);
  for (int i = 0; i < threads; i++) {
    ucontext_t *thread = &emulated.thread[i];
    getcontext(thread);
    thread->uc_stack.ss_sp = stacks + (size_t)i * STACK_BYTES;
    thread->uc_stack.ss_size = STACK_BYTES;
    thread->uc_link = &emulated.turn;
    emulated.ended[i] = false;
    makecontext(thread, [] { run(call), emulated.ended[emulated.now] = true; }, 0);
  }
  for (int ended = 0; !ended;) {
    for (int i = 0; i < threads; i++) {
      const int now = emulated.now = backwards ? threads - 1 - i : i;
      threadIdx.x = now % block, blockIdx.x = now / block;
      swapcontext(&emulated.turn, &emulated.thread[now]);
      ended += emulated.ended[now];
    }
    if (ended && ended < threads) {
      fprintf(stderr, "%d of %d threads ended while the others wait at a barrier\n", ended,
              threads);
      abort();
    }
  }
  free(stacks);
}
