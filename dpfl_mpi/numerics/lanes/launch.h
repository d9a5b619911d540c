/* The kernels that a GPU launches: each team takes clients from a queue until it is empty. */

/* Return where the parts of a team's work space start: the gradient behind the arena, and what
 * members share behind that. Each starts at a multiple of 128 bytes. */
INLINE int64_t behind_arena(void) { return NET.vectors * LANES * 4; }
INLINE int64_t behind_gradient(void) { return behind_arena() + (NET.width * 4 + 127) / 128 * 128; }

/* Write how many bytes a team's work space has, for the caller to allocate. */
extern "C" __global__ void team_bytes(int64_t *bytes) {
  *bytes = behind_gradient() + (sizeof(Shared) + 127) / 128 * 128;
}

/* Return a pass in the work space of this thread's team; spaces are `stride` bytes apart. All teams
 * of a client use the shared part of the first team's space. */
INLINE Pass begin(uint8_t *memory, int64_t stride) {
  Pass p = {};
  uint8_t *space = memory + stride * (blockIdx.x / CLUSTER);
  p.team.thread = thread_of_team();
  p.net = &NET;
  p.arena = vectors_at(space);
  p.gradient = (float *)(space + behind_arena());
  p.shared = (Shared *)(space - stride * team_of_client() + behind_gradient());
  return p;
}

/* Define a kernel that runs verb##_one for each of `count` tasks, one for each client. *next, which
 * starts as 0, is the first task that no team has taken. */
#define VERB(verb, Task) \
  extern "C" __global__ void __launch_bounds__(TEAM, 1) \
      verb(Task *tasks, int64_t count, int32_t *next, uint8_t *memory, int64_t stride) { \
    SPILL_TO_SHARED; \
    for (;;) { \
      Pass p = begin(memory, stride); \
      if (leads_teams(&p.team)) p.shared->task = atomicAdd(next, 1); \
      barrier_of_teams(&p.team); \
      const int64_t task = p.shared->task; \
      if (task >= count) return; \
      verb##_one(&p, tasks + task); \
      barrier_of_teams(&p.team); \
    } \
  }
