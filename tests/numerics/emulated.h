/* What gpu.h asks of CUDA, on a CPU: C++ by g++, for tests.
 *
 * Threads are coroutines of one thread of the CPU. A block's run one after the other up to its next
 * barrier, and one block after the other up to the next barrier of all; in their order or backwards.
 * A number that one thread writes and another one reads without a barrier between them is then read
 * too early in one of the two orders.
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

/* Threads of a client, each with a stack, what each waits for, and what runs them in turn. */
enum { STACK_BYTES = 1 << 18 };
enum Wait { FOR_BLOCK, FOR_ALL, ENDED };
static struct {
  ucontext_t turn, thread[1024];
  Wait waits[1024];
  int now, teams;
} emulated;
#define TEAMS emulated.teams

/* The barriers of a block, and of all. */
static void wait_for(Wait what) {
  emulated.waits[emulated.now] = what;
  swapcontext(&emulated.thread[emulated.now], &emulated.turn);
}
static void __syncthreads() { wait_for(FOR_BLOCK); }
static void barrier_of_cluster() { wait_for(FOR_ALL); }

/* Run a block, whose first thread is `first`, up to its next barrier. */
static void run_block(int first, int block, bool backwards) {
  for (int i = 0; i < block; i++) {
    const int now = emulated.now = first + (backwards ? block - 1 - i : i);
    threadIdx.x = now % block, blockIdx.x = now / block;
    swapcontext(&emulated.turn, &emulated.thread[now]);
  }
}
/* Return what so many threads wait for, all of them the same. */
static Wait agreed(int first, int count) {
  for (int i = first; i < first + count; i++)
    if (emulated.waits[i] != emulated.waits[first]) {
      fprintf(stderr, "threads %d and %d wait at different barriers\n", first, i);
      abort();
    }
  return emulated.waits[first];
}

/* Run a kernel for one client by so many threads, in blocks of `block`. */
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
    makecontext(thread, [] { run(call), emulated.waits[emulated.now] = ENDED; }, 0);
  }
  do
    for (int i = 0; i < threads; i += block) {
      const int first = backwards ? threads - block - i : i;
      do run_block(first, block, backwards);
      while (agreed(first, block) == FOR_BLOCK);
    }
  while (agreed(0, threads) != ENDED);
  free(stacks);
}
