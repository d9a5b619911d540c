/* A team: the threads that compute one client, on a CPU. gpu.h says the same for a GPU.
 *
 * The outputs of a layer are shared out among its members. What one member writes and another one
 * reads lies between two meetings.
 */
#include <pthread.h>
#include <sched.h>

#ifndef SPINS
#define SPINS 4096 /* before other threads get the core: there may be fewer cores than members */
#endif

typedef struct {
  int32_t arrived, meeting;
} Barrier;

typedef struct {
  int32_t member, members;
  Barrier *barrier;
} Team;

/* Wait until all members are here. They spin: a layer takes microseconds, sleep takes more. */
static void wait_for_all(const Team *t) {
  const int32_t meeting = __atomic_load_n(&t->barrier->meeting, __ATOMIC_RELAXED);
  if (__atomic_add_fetch(&t->barrier->arrived, 1, __ATOMIC_ACQ_REL) == t->members) {
    __atomic_store_n(&t->barrier->arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&t->barrier->meeting, meeting + 1, __ATOMIC_RELEASE);
    return;
  }
  for (int64_t spins = 1; __atomic_load_n(&t->barrier->meeting, __ATOMIC_ACQUIRE) == meeting;
       spins++)
    if (spins % SPINS == 0) sched_yield();
}
INLINE void meet(const Team *t) {
  if (t->members > 1) wait_for_all(t);
}
INLINE int is_first(const Team *t) { return t->member == 0; }
INLINE int is_first_member(const Team *t) { return t->member == 0; }

/* Return where a member's part of n things starts. */
INLINE int64_t part_of(const Team *t, int64_t n, int32_t member) {
  return t->members == 1 ? n * member : n * member / t->members;
}
/* For each i below n that is this member's. */
#define SHARE(t, i, n) \
  for (int64_t i = part_of(t, n, (t)->member), i##_end = part_of(t, n, (t)->member + 1); \
       i < i##_end; i++)
/* For each number i below n that is this thread's: for loops over single numbers. */
#define SHARE_NUMBERS SHARE
/* A client has one team; on a GPU it may have several. */
enum { TEAMS = 1, WARP = 1 };
#define team_of_client() 0
#define leads_teams is_first
#define meet_teams meet
#define SHARE_AMONG_TEAMS SHARE

/* Run `call` for each unit of the lines of this member: `plane_`, `line_` and `unit_`. */
#define PLACES(t, planes, lines, units, ...) \
  for (int64_t of_ = part_of(t, (int64_t)(planes) * (lines), (t)->member), \
               end_ = part_of(t, (int64_t)(planes) * (lines), (t)->member + 1), \
               plane_ = of_ / (lines), line_ = of_ % (lines); \
       of_ < end_; of_++, line_ = line_ + 1 < (lines) ? line_ + 1 : (plane_++, 0)) \
    for (int32_t unit_ = 0; unit_ < (units); unit_++) { __VA_ARGS__; }

/* Run `call` on BLOCKS of the things of this member. */
#define OUTPUTS(t, largest, total, ...) \
  BLOCKS_FROM(part_of(t, total, (t)->member), largest, part_of(t, total, (t)->member + 1), \
              __VA_ARGS__)
/* Run `call` on BLOCKS of things at each place of lines [lines, units] that is this member's. */
#define TILES(t, largest, total, lines, units, ...) \
  BLOCKS(largest, total, SHARE(t, of_, (int64_t)(lines) * (units)) { \
    const int32_t line_ = (int32_t)of_ / (units), unit_ = (int32_t)of_ % (units); \
    __VA_ARGS__; \
  })
