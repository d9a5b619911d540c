/* What vectors.h and team.h declare, for a GPU; their comments hold here, too.
 *
 * A vector has 16 lanes, each held by one thread, so 16 neighbouring threads are one member of the
 * team. The caller defines TEAM, the threads of a block. To train, one team of CLUSTER blocks
 * computes a client. To score, TEAMS teams of one block each share a client's images.
 *
 * With EMULATED, the tests compile this as C++ for a CPU (tests/numerics/emulated.h). */
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
#define TEAMS 1 /* teams of a client */
#endif

enum { LANES = 16, LANES_HELD = 1 }; /* of a vector; by a thread */
typedef float Vec;
typedef uint32_t Bits;
typedef bool Mask;

/* Vectors in memory, of which a thread reads and writes its own lane. */
struct Vectors {
  float *at;
  __forceinline__ float &operator[](int64_t i) const { return at[i * LANES]; }
};
INLINE Vectors operator+(Vectors v, int64_t i) { return {v.at + i * LANES}; }
INLINE Vectors &operator+=(Vectors &v, int64_t i) { return v.at += i * LANES, v; }
INLINE bool operator!=(Vectors a, Vectors b) { return a.at != b.at; }

/* How many things are computed at once, so that their sums fit into the registers (vectors.h). */
enum { UNITS = 4, UNITS_BACK = 4 };
enum { ROWS = 4, COLUMNS = 4, SLOPES = 4, TAPS_AT_ONCE = 4 };

#define SELECT(m, a, b) ((m) ? (a) : (b))
#define SELECT_MASK(m, a, b) ((m) ? (a) : (b))
#define ABOVE(a, b) ((a) > (b))
#define IS_NAN(a) ((a) != (a))
#define FILL(x) ((Vec)(x))
#define FMA(a, b, c) __fmaf_rn(a, b, c)
#define SQRT(a) __fsqrt_rn(a)
#define ZERO 0.f
#define AS_BITS(x) __float_as_uint(x)
#define AS_FLOAT(u) __uint_as_float(u)

INLINE int own_lane(void) { return threadIdx.x % LANES; }
#define FOR_LANES(l) for (int l = own_lane(), l##_ = 1; l##_; l##_ = 0)
#define LANE(v, l) (v) /* lane l of a vector */
INLINE Vectors vectors_at(void *memory) { return {(float *)memory + own_lane()}; }
INLINE float *floats_at(Vectors v) { return v.at - own_lane(); }
INLINE Vec in_register(Vec v, int) { return v; }
INLINE Vec load(const float *p) { return p[own_lane()]; }
INLINE void store(float *p, Vec v) { p[own_lane()] = v; }
INLINE Vec number(Bits whole) { return (Vec)whole; }
INLINE Vec numbers(const uint8_t *p) { return (Vec)p[own_lane()]; }
#define HELD_INDEX(l) 0 /* index of lane l in an array [LANES_HELD] */
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
/* Return lane l of a vector in memory, which another thread may hold. */
INLINE float lane(Vectors v, int l) { return floats_at(v)[l]; }

/* Split the things start ... end - 1 into blocks of `largest`, then single ones (vectors.h says
 * what the names `first` and `count` are). */
#define FOR_BLOCKS(first, count, largest, start, end, ...) \
  {{enum {count = largest}; \
  for (int32_t first = (start); first + count <= (end); first += count) { __VA_ARGS__; } \
  } \
  { \
    enum { count = 1 }; \
    for (int32_t first = (end) - ((end) - (start)) % (largest); first < (end); first++) { \
      __VA_ARGS__; \
    } \
  } \
  }

enum { THREADS = TEAM * CLUSTER, MEMBERS = THREADS / LANES }; /* of a team */
enum { WARP = 32 };                                           /* threads */
typedef struct {
  int thread; /* number of this thread in its team */
} Team;
/* Hide from the compiler where an address comes from: else it would compute addresses of all layers
 * and steps in advance and keep them in registers, of which there are not enough. */
#ifdef __CUDACC_RTC__
#define FORGET(pointer) \
  asm volatile("" : "+l"(pointer)); \
  __builtin_assume(__isGlobal(pointer))
#define FORGET_THREAD(n) \
  asm volatile("" : "+r"(n)); \
  __builtin_assume(n >= 0 && n < THREADS)
/* What finds no register goes to the block's shared memory, which is faster than the GPU's. */
#define SPILL_TO_SHARED asm volatile(".pragma \"enable_smem_spilling\";")
#else
#define FORGET(pointer)
#define FORGET_THREAD(n)
#define SPILL_TO_SHARED
#endif
/* Return the largest of 8 (if `largest` allows it), 4, 2 and 1 that divides a number. */
INLINE int divisor(const int largest, int number) {
  return largest >= 8 && number % 8 == 0 ? 8 : number % 4 == 0 ? 4 : number % 2 == 0 ? 2 : 1;
}
/* Return whether so many things keep at least three quarters of the members busy. */
INLINE int are_busy(int things) { return 4 * things >= 3 * MEMBERS; }
INLINE int member_of(const Team *t) { return t->thread / LANES; }
INLINE int is_first(const Team *t) { return t->thread == 0; }
INLINE int is_first_member(const Team *t) { return t->thread < LANES; }
/* Return this thread's number in its team. Warps are numbered in turn through all blocks, so that
 * few things, which the first members take, keep all blocks busy. */
INLINE int thread_of_team(void) {
  return (threadIdx.x / WARP * CLUSTER + blockIdx.x % CLUSTER) * WARP + threadIdx.x % WARP;
}
INLINE int team_of_client(void) { return blockIdx.x / CLUSTER % TEAMS; }
INLINE int leads_teams(const Team *t) { return is_first(t) && team_of_client() == 0; }
#ifdef __CUDACC_RTC__
INLINE void barrier_of_cluster(void) {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
#endif
/* Wait for all threads of the team; or of all teams of the client. */
INLINE void barrier(const Team *) {
  if (CLUSTER > 1) barrier_of_cluster();
  else __syncthreads();
}
INLINE void barrier_of_teams(const Team *) {
  if (CLUSTER * TEAMS > 1) barrier_of_cluster();
  else __syncthreads();
}
#define SHARE_AMONG_TEAMS(t, i, n) \
  for (int i = team_of_client() * THREADS + (t)->thread, i##_n = (n); i < i##_n; \
       i += TEAMS * THREADS)
#define SHARE(t, i, n) for (int i = member_of(t), i##_n = (n); i < i##_n; i += MEMBERS)
#define SHARE_NUMBERS(t, i, n) for (int i = (t)->thread, i##_n = (n); i < i##_n; i += THREADS)
/* As in team.h, but a member has single places and blocks, not whole lines of them. */
#define SHARE_PLACES(t, plane, planes, line, lines, unit, units, ...) \
  SHARE(t, place_, (planes) * (lines) * (units)) { \
    const int plane = place_ / ((lines) * (units)), line = place_ / (units) % (lines), \
              unit = place_ % (units); \
    __VA_ARGS__; \
  }
#define SHARE_TILES(t, first, count, largest, total, line, lines, unit, units, ...) \
  { \
    { \
      enum { count = largest }; \
      SHARE_PLACES(t, block_, (total) / (largest), line, lines, unit, units, \
                   const int first = block_ * count; \
                   __VA_ARGS__) \
    } \
    if ((total) % (largest)) { \
      enum { count = 1 }; \
      SHARE_PLACES(t, block_, (total) % (largest), line, lines, unit, units, \
                   const int first = (total) - (total) % (largest) + block_; \
                   __VA_ARGS__) \
    } \
  }
#define SHARE_BLOCKS(t, first, count, largest, total, ...) \
  SHARE_TILES(t, first, count, largest, total, line_, 1, unit_, 1, __VA_ARGS__)
