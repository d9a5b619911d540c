/* The kernels of a GPU on a CPU, for a team of TEAM threads: g++ -std=c++20 -fPIC -shared
 * -ffp-contract=off -DGPU -DEMULATED -DTEAM=64. The caller gives `plan.h`: emulated_plan.h, whose
 * network is set while it runs, or one network's own. */
#include "lanes.c"

/* Run a kernel of launch.h for one client after the other, by so many teams, whose threads run in
 * their order or backwards. */
extern "C" void launch(void (*kernel)(void *, int64_t, int32_t *, uint8_t *, int64_t),
                       int32_t backwards, int32_t teams, void *tasks, int64_t count, int32_t *next,
                       uint8_t *memory, int64_t stride) {
  TEAMS = teams;
  launch_emulated(THREADS * TEAMS, TEAM, backwards, kernel, tasks, count, next, memory, stride);
}
