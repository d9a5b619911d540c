/* Kernels of a GPU: a team takes clients from a queue. */
/* Return where each part of a team's work space starts, which starts at a multiple of 128. */
INLINE int64_t behind_arena(void) { return NET.vectors * LANES * 4; }
INLINE int64_t behind_row(void) { return behind_arena() + (NET.width * 4 + 127) / 128 * 128; }

/* Write how many bytes it has. */
extern "C" __global__ void team_bytes(int64_t *bytes) {
  *bytes = behind_row() + (sizeof(Shared) + 127) / 128 * 128;
}

/* The teams of a client share what the first one's space has. */
INLINE Pass begin(uint8_t *memory, int64_t stride) {
  Pass p = {};
  uint8_t *own = memory + stride * (blockIdx.x / CLUSTER);
  p.team.thread = thread_of_team();
  p.net = &NET;
  p.arena = vectors_at(own);
  p.g = (float *)(own + behind_arena());
  p.shared = (Shared *)(own - stride * team_of_client() + behind_row());
  return p;
}

/* Compute a task for each client, the first ones first. *next is 0 at first. */
#define VERB(verb, Task) \
  extern "C" __global__ void __launch_bounds__(TEAM, 1) \
      verb(Task *tasks, int64_t count, int32_t *next, uint8_t *memory, int64_t stride) { \
    SPILL_TO_SHARED; \
    for (;;) { \
      Pass p = begin(memory, stride); \
      if (leads_teams(&p.team)) p.shared->task = atomicAdd(next, 1); \
      meet_teams(&p.team); \
      const int64_t task = p.shared->task; \
      if (task >= count) return; \
      verb##_one(&p, tasks + task); \
      meet_teams(&p.team); \
    } \
  }
