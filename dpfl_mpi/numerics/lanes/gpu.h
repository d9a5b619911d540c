/* What vectors.h and team.h declare, for a GPU: each thread holds one lane of a vector of 16 lanes,
 * and a member of the team is 16 neighbouring threads. A team is a block,
 * or a cluster of blocks; or the blocks of a cluster are teams that share the images of a client.
 *
 * With EMULATED, C++ on a CPU does the same: a thread of the CPU is a thread of the block.
 */
#ifndef EMULATED
typedef unsigned char uint8_t;
typedef int int32_t;
typedef unsigned uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#define NULL 0
#else
#include "emulated.h"
#endif
#define restrict __restrict__
#define INLINE static __forceinline__
#define INTERNAL INLINE /* so that the sizes of a network are known in it */
#ifdef __CUDACC_RTC__
#define UNROLL _Pragma("unroll")
#define UNROLL_2 _Pragma("unroll 2")
#define UNROLL_8 _Pragma("unroll 8")
#else
#define UNROLL _Pragma("GCC unroll 32")
#define UNROLL_2
#define UNROLL_8
#endif
#ifndef CLUSTER
#define CLUSTER 1 /* blocks of a team */
#endif
#ifndef TEAMS
#define TEAMS 1 /* of a client, a block each */
#endif

enum { LANES = 16, OWN = 1 }; /* OWN: lanes of which a thread holds the numbers */
typedef float F;
typedef uint32_t U;
typedef bool M;

/* Vectors in memory, of which a thread reads and writes its own lane. */
struct Vectors {
  float *at;
  __forceinline__ float &operator[](int64_t i) const { return at[i * LANES]; }
};
INLINE Vectors operator+(Vectors v, int64_t i) { return {v.at + i * LANES}; }
INLINE Vectors &operator+=(Vectors &v, int64_t i) { return v.at += i * LANES, v; }
INLINE bool operator!=(Vectors a, Vectors b) { return a.at != b.at; }

/* Sizes of blocks whose sums fit into the registers. */
enum { UNITS = 4, UNITS_BACK = 4 };
enum { ROWS = 4, COLUMNS = 4, SLOPES = 4, TAPS_AT_ONCE = 4 };

#define PICK(m, a, b) ((m) ? (a) : (b))
#define EITHER(m, a, b) ((m) ? (a) : (b))
#define ABOVE(a, b) ((a) > (b))
#define NO_NUMBER(a) ((a) != (a))
#define FILL(x) ((F)(x))
#define FMA(a, b, c) __fmaf_rn(a, b, c)
#define ROOT(a) __fsqrt_rn(a)
#define ZERO 0.f
#define BITS(x) __float_as_uint(x)
#define FLOAT(u) __uint_as_float(u)

INLINE int own_lane(void) { return threadIdx.x % LANES; }
#define EACH_LANE(l) for (int l = own_lane(), l##_ = 1; l##_; l##_ = 0)
#define ON(v, l) (v) /* lane l of a vector */
INLINE Vectors vectors_at(void *memory) { return {(float *)memory + own_lane()}; }
INLINE float *floats_at(Vectors v) { return v.at - own_lane(); }
INLINE F held(F v, int) { return v; }
INLINE F load(const float *p) { return p[own_lane()]; }
INLINE void store(float *p, F v) { p[own_lane()] = v; }
INLINE F number(U whole) { return (F)whole; }
INLINE F numbers(const uint8_t *p) { return (F)p[own_lane()]; }
#define OWNED(l) 0 /* index of a lane in a thread's array [OWN] */
/* Read `count` neighbouring numbers; the first lies at a multiple of 16 bytes. */
INLINE void read_aligned(const int count, const float *from, float *to) {
  UNROLL for (int i = 0; i + 4 <= count; i += 4) {
    const float4 four = *(const float4 *)(from + i);
    to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
  }
  if (count % 4 >= 2) {
    const float2 two = *(const float2 *)(from + count / 4 * 4);
    to[count / 4 * 4] = two.x, to[count / 4 * 4 + 1] = two.y;
  }
  if (count % 2) to[count - 1] = from[count - 1];
}
/* A number of one lane of a vector in memory. */
INLINE float lane(Vectors v, int l) { return floats_at(v)[l]; }

/* Run `call` on blocks of `largest` of `total` things, then on single ones. In it `at` is the
 * block's first and `count` its size, which the compiler knows. */
#define BLOCKS(largest, total, ...) \
  { \
    { \
      enum { count = largest }; \
      for (int32_t at = 0; at + count <= (total); at += count) { __VA_ARGS__; } \
    } \
    { \
      enum { count = 1 }; \
      for (int32_t at = (total) - (total) % (largest); at < (total); at++) { __VA_ARGS__; } \
    } \
  }

/* The team. */
enum { THREADS = TEAM * CLUSTER, MEMBERS = THREADS / LANES, WARP = 32 };
typedef struct {
  int thread; /* of the team's */
} Team;
/* Take an address as a new one: else the compiler would keep what it computes from it for all
 * layers and steps in registers, of which there are not enough. */
#ifdef __CUDACC_RTC__
#define FORGET(pointer) \
  asm volatile("" : "+l"(pointer)); \
  __builtin_assume(__isGlobal(pointer))
#define FORGET_THREAD(n) \
  asm volatile("" : "+r"(n)); \
  __builtin_assume(n >= 0 && n < THREADS)
/* What finds no register goes to the block's shared memory. */
#define SPILL_TO_SHARED asm volatile(".pragma \"enable_smem_spilling\";")
#else
#define FORGET(pointer)
#define FORGET_THREAD(n)
#define SPILL_TO_SHARED
#endif
/* Return which of 8, 4, 2 and 1, none above `most`, divides a number. */
INLINE int divisor(const int most, int number) {
  return most >= 8 && number % 8 == 0 ? 8 : number % 4 == 0 ? 4 : number % 2 == 0 ? 2 : 1;
}
/* Whether so many things keep three of four members busy. */
INLINE int are_busy(int things) { return 4 * things >= 3 * MEMBERS; }
INLINE int member_of(const Team *t) { return t->thread / LANES; }
INLINE int is_first(const Team *t) { return t->thread == 0; }
INLINE int is_first_member(const Team *t) { return t->thread < LANES; }
/* Warps are numbered through all blocks in turn: fewer things than members keep all blocks busy. */
INLINE int thread_of_team(void) {
  return (threadIdx.x / WARP * CLUSTER + blockIdx.x % CLUSTER) * WARP + threadIdx.x % WARP;
}
INLINE int team_of_client(void) { return blockIdx.x / CLUSTER % TEAMS; }
INLINE int leads_teams(const Team *t) { return is_first(t) && team_of_client() == 0; }
#ifdef __CUDACC_RTC__
INLINE void meet_cluster(void) {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
#endif
/* Of the team; of all teams of the client. */
INLINE void meet(const Team *) {
  if (CLUSTER > 1) meet_cluster();
  else __syncthreads();
}
INLINE void meet_teams(const Team *) {
  if (CLUSTER * TEAMS > 1) meet_cluster();
  else __syncthreads();
}
#define SHARE_AMONG_TEAMS(t, i, n) \
  for (int i = team_of_client() * THREADS + (t)->thread, i##_n = (n); i < i##_n; \
       i += TEAMS * THREADS)
#define SHARE(t, i, n) for (int i = member_of(t), i##_n = (n); i < i##_n; i += MEMBERS)
#define SHARE_NUMBERS(t, i, n) for (int i = (t)->thread, i##_n = (n); i < i##_n; i += THREADS)
#define PLACES(t, planes, lines, units, ...) \
  SHARE(t, of_, (planes) * (lines) * (units)) { \
    const int plane_ = of_ / ((lines) * (units)), line_ = of_ / (units) % (lines), \
              unit_ = of_ % (units); \
    (void)plane_, (void)line_, (void)unit_; \
    __VA_ARGS__; \
  }
#define TILES(t, largest, total, lines, units, ...) \
  { \
    { \
      enum { count = largest }; \
      PLACES(t, (total) / (largest), lines, units, const int at = plane_ * count; __VA_ARGS__) \
    } \
    if ((total) % (largest)) { \
      enum { count = 1 }; \
      PLACES(t, (total) % (largest), lines, units, \
             const int at = (total) - (total) % (largest) + plane_; __VA_ARGS__) \
    } \
  }
#define OUTPUTS(t, largest, total, ...) TILES(t, largest, total, 1, 1, __VA_ARGS__)
