/* A team: the threads that compute one client, on a CPU. gpu.h has the same for a GPU.
 *
 * The members of a team share the outputs of a layer out among them, by the SHARE macros: each runs
 * the same loop over its own part of all things. What one member writes and another one reads lies
 * on different sides of a barrier. */
#include <pthread.h>
#include <sched.h>

#ifndef SPINS
#define SPINS 4096 /* before other threads get the core: there may be fewer cores than members */
#endif

typedef struct {
  int32_t arrived, round; /* members that wait; how often all have met */
} Barrier;

typedef struct {
  int32_t member, members; /* this thread's number; how many there are */
  Barrier *barrier;
} Team;

/* Wait until all members wait. They spin: a layer takes microseconds, to sleep takes longer. */
static void wait_for_all(const Team *t) {
  const int32_t round = __atomic_load_n(&t->barrier->round, __ATOMIC_RELAXED);
  if (__atomic_add_fetch(&t->barrier->arrived, 1, __ATOMIC_ACQ_REL) == t->members) {
    __atomic_store_n(&t->barrier->arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&t->barrier->round, round + 1, __ATOMIC_RELEASE);
    return;
  }
  for (int64_t spins = 1; __atomic_load_n(&t->barrier->round, __ATOMIC_ACQUIRE) == round; spins++)
    if (spins % SPINS == 0) sched_yield();
}
INLINE void barrier(const Team *t) {
  if (t->members > 1) wait_for_all(t);
}
INLINE int is_first(const Team *t) { return t->member == 0; }
INLINE int is_first_member(const Team *t) { return t->member == 0; }

/* Return where a member's part of n things starts. */
INLINE int64_t part_of(const Team *t, int64_t n, int32_t member) {
  return t->members == 1 ? n * member : n * member / t->members;
}
/* Loop over this member's part of 0 ... n - 1, with the loop variable `i`. */
#define SHARE(t, i, n) \
  for (int64_t i = part_of(t, n, (t)->member), i##_end = part_of(t, n, (t)->member + 1); \
       i < i##_end; i++)
/* The same for loops over floats: a member of a GPU's team is 16 threads, which share these. */
#define SHARE_NUMBERS SHARE
/* A client has one team here; on a GPU it may have several. */
enum { TEAMS = 1, WARP = 1 };
#define team_of_client() 0
#define leads_teams is_first
#define barrier_of_teams barrier
#define SHARE_AMONG_TEAMS SHARE

/* In the macros below the last argument is a statement, and the lower-case names (`plane`, `first`,
 * `count` ...) are the caller's names for variables that the macro declares for it. */

/* Run a statement for each place (plane, line, unit) of an array [planes, lines, units] that is
 * this member's. A member has whole lines. */
#define SHARE_PLACES(t, plane, planes, line, lines, unit, units, ...) \
  for (int64_t at_ = part_of(t, (int64_t)(planes) * (lines), (t)->member), \
               end_ = part_of(t, (int64_t)(planes) * (lines), (t)->member + 1), \
               plane = at_ / (lines), line = at_ % (lines); \
       at_ < end_; at_++, line = line + 1 < (lines) ? line + 1 : (plane++, 0)) \
    for (int32_t unit = 0; unit < (units); unit++) { __VA_ARGS__; }

/* Run a statement on FOR_BLOCKS of this member's part of `total` things. */
#define SHARE_BLOCKS(t, first, count, largest, total, ...) \
  FOR_BLOCKS(first, count, largest, part_of(t, total, (t)->member), \
             part_of(t, total, (t)->member + 1), __VA_ARGS__)
/* Run a statement on FOR_BLOCKS of `total` things, for each of this member's places (line, unit) of
 * an array [lines, units]. */
#define SHARE_TILES(t, first, count, largest, total, line, lines, unit, units, ...) \
  FOR_BLOCKS( \
      first, count, largest, 0, total, SHARE(t, place_, (int64_t)(lines) * (units)) { \
        const int32_t line = (int32_t)place_ / (units), unit = (int32_t)place_ % (units); \
        __VA_ARGS__; \
      })
