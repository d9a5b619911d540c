/* The functions that Python calls on a CPU. Each computes many clients: one after the other, or by
 * several teams of threads at the same time. A task is the structure that describes one client's
 * work, such as Training. */

typedef void (*Compute)(Pass *, void *); /* computes one client's task */

typedef struct {
  const Net *net;
  Compute compute_one;
  uint8_t *tasks, *memory;
  int64_t size, count, next; /* bytes of a task; tasks; the next one that no team has taken */
  pthread_mutex_t forming;   /* locked until the teams are known */
} Call;

typedef struct {
  Call *call;
  Team team;
  void *memory;
  pthread_t thread;
} Worker;

static int64_t rounded(int64_t bytes) { return (bytes + 127) / 128 * 128; }

/* Return the bytes of a team's work space: the arena, a gradient, what members share, and the
 * private space of each member. The caller allocates it at a multiple of 64 bytes and fills it with
 * zeros, which the padding around values then keeps. */
PUBLIC int64_t NAME(space)(const Net *net, int64_t members) {
  return rounded(net->vectors * sizeof(Vec)) + rounded(net->width * sizeof(float)) +
         rounded(sizeof(Shared)) + members * rounded(net->private_vectors * sizeof(Vec));
}

/* Return a pass of one member in its team's work space. */
static Pass begin(const Net *net, const Team *team, void *memory) {
  uint8_t *place = memory;
  Pass p = {.team = *team, .net = net, .arena = memory};
  place += rounded(net->vectors * sizeof(Vec));
  p.gradient = (float *)place, place += rounded(net->width * sizeof(float));
  p.shared = (Shared *)place, place += rounded(sizeof(Shared));
  p.private_space = (Vectors)(place + team->member * rounded(net->private_vectors * sizeof(Vec)));
  return p;
}

/* The function of each thread: wait until the teams are known, then compute tasks, always the next
 * one that no team has taken, until there are none. */
static void *work(void *argument) {
  Worker *worker = argument;
  Call *call = worker->call;
  const Team *team = &worker->team;
  pthread_mutex_lock(&call->forming);
  pthread_mutex_unlock(&call->forming);
  while (team->members) { /* a thread that is left over has a team of 0 */
    Pass p = begin(call->net, team, worker->memory);
    if (is_first(team)) p.shared->task = __atomic_fetch_add(&call->next, 1, __ATOMIC_RELAXED);
    barrier(team);
    const int64_t task = p.shared->task;
    if (task >= call->count) break;
    call->compute_one(&p, call->tasks + task * call->size);
    barrier(team);
  }
  return NULL;
}

/* Compute all tasks of a call by `teams` teams of `members` threads; `memory` has a work space for
 * each team. If the system starts fewer threads, there are fewer teams, or one of fewer members. */
static void compute(Call *call, int64_t teams, int64_t members) {
  enum { MOST_THREADS = 1024 };
  const int64_t space = rounded(NAME(space)(call->net, members));
  Worker workers[MOST_THREADS];
  Barrier barriers[MOST_THREADS];
  if (members > MOST_THREADS) members = MOST_THREADS;
  if (teams > MOST_THREADS / members) teams = MOST_THREADS / members;
  if (teams > call->count) teams = call->count > 0 ? call->count : 1;
  int64_t started = 1; /* the calling thread is worker 0 */
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

/* Define a public function, verb_FORM, that runs verb##_one for each of `count` tasks. */
#define VERB(verb, Task) \
  static void verb##_any(Pass *p, void *task) { verb##_one(p, (Task *)task); } \
  PUBLIC void NAME(verb)(const Net *net, Task *tasks, int64_t count, int64_t teams, \
                         int64_t members, void *memory) { \
    Call call = {.net = net, \
                 .compute_one = verb##_any, \
                 .tasks = (uint8_t *)tasks, \
                 .memory = memory, \
                 .size = sizeof(Task), \
                 .count = count}; \
    compute(&call, teams, members); \
  }
