/* Calls on a CPU: clients one after the other, or by several teams of threads. */

typedef void (*One)(Pass *, void *); /* computes a client's task */

typedef struct {
  const Net *net;
  One one;
  uint8_t *tasks, *memory;
  int64_t size, count, next; /* bytes of a task; tasks, and the next one that nobody has */
  pthread_mutex_t forming;   /* held until the teams are known */
} Call;

typedef struct {
  Call *call;
  Team team;
  void *memory;
  pthread_t thread;
} Worker;

static int64_t rounded(int64_t bytes) { return (bytes + 127) / 128 * 128; }

/* Return the bytes of a team's work space: the arena, a gradient, what members share, and what
 * each has for itself. It starts at a multiple of 64, and is zeros at first: what lies around
 * padded values stays so. */
PUBLIC int64_t NAME(space)(const Net *net, int64_t members) {
  return rounded(net->vectors * sizeof(F)) + rounded(net->width * sizeof(float)) +
         rounded(sizeof(Shared)) + members * rounded(net->own * sizeof(F));
}

static Pass begin(const Net *net, const Team *team, void *memory) {
  uint8_t *at = memory;
  Pass p = {.team = *team, .net = net, .arena = memory};
  at += rounded(net->vectors * sizeof(F));
  p.g = (float *)at, at += rounded(net->width * sizeof(float));
  p.shared = (Shared *)at, at += rounded(sizeof(Shared));
  p.own = (Vectors)(at + team->member * rounded(net->own * sizeof(F)));
  return p;
}

/* Take tasks, the first that nobody has, until there are none. */
static void *work(void *of) {
  Worker *worker = of;
  Call *call = worker->call;
  const Team *team = &worker->team;
  pthread_mutex_lock(&call->forming);
  pthread_mutex_unlock(&call->forming);
  while (team->members) {
    Pass p = begin(call->net, team, worker->memory);
    if (is_first(team)) p.shared->task = __atomic_fetch_add(&call->next, 1, __ATOMIC_RELAXED);
    meet(team);
    const int64_t task = p.shared->task;
    if (task >= call->count) break;
    call->one(&p, call->tasks + task * call->size);
    meet(team);
  }
  return NULL;
}

/* Compute `count` tasks by `teams` of so many members; `memory` has a work space for each team.
 * Where the system starts fewer threads, there are fewer teams, or one of fewer members. */
static void compute(Call *call, int64_t teams, int64_t members) {
  enum { MOST = 1024 };
  const int64_t space = rounded(NAME(space)(call->net, members));
  Worker workers[MOST];
  Barrier barriers[MOST];
  if (members > MOST) members = MOST;
  if (teams > MOST / members) teams = MOST / members;
  if (teams > call->count) teams = call->count > 0 ? call->count : 1;
  int64_t started = 1;
  pthread_mutex_init(&call->forming, NULL);
  pthread_mutex_lock(&call->forming);
  for (; started < teams * members; started++) {
    workers[started].call = call;
    if (pthread_create(&workers[started].thread, NULL, work, &workers[started])) break;
  }
  workers[0].call = call;
  if (started < members) members = started;
  teams = started / members;
  for (int64_t i = 0; i < started; i++) {
    const int64_t team = i / members;
    Worker *worker = &workers[i];
    worker->memory = call->memory + team * space;
    worker->team = (Team){i % members, team < teams ? members : 0, &barriers[team]};
    if (i % members == 0) barriers[team] = (Barrier){0, 0};
  }
  pthread_mutex_unlock(&call->forming);
  work(&workers[0]);
  for (int64_t i = 1; i < started; i++) pthread_join(workers[i].thread, NULL);
}

/* verb(net, tasks, count, teams, members, memory): compute a task for each client, the first ones
 * first. */
#define VERB(verb, Task) \
  static void verb##_any(Pass *p, void *task) { verb##_one(p, (Task *)task); } \
  PUBLIC void NAME(verb)(const Net *net, Task *tasks, int64_t count, int64_t teams, \
                         int64_t members, void *memory) { \
    Call call = {.net = net, .one = verb##_any, .tasks = (uint8_t *)tasks, .memory = memory, \
                 .size = sizeof(Task), .count = count}; \
    compute(&call, teams, members); \
  }
