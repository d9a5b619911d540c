/* The structures that a caller passes: a network, and one task for each client. Python describes
 * them (plan.py, kernels.py); numerics/lanes/declared.py reads their fields from here.
 *
 * row: all parameters of one model, one after the other, in `width` columns.
 * vector: one number of each of LANES images. The arena is an array of vectors.
 * value: an input or output of a layer: an array [planes, lines, units] of vectors of the arena,
 *   which for images are channels, height and width. The caller has planned where each value and
 *   its gradient (of the loss by the value) lie. Places and steps are counted in vectors. */
typedef struct {
  int64_t start, gradient_start; /* where in the arena the value and its gradient start */
  int64_t upstream;              /* it depends on no column of the row from this one on */
  int32_t planes, lines, units;
  int32_t plane_step, line_step; /* vectors from one plane, and from one line, to the next */
} Value;

typedef struct {
  int32_t kind;           /* its number in KINDS of lanes.c */
  int32_t in, other, out; /* numbers of values: its inputs (one or two) and its output */
  int32_t adds;           /* bit 0: the gradient of `in` is added, else written; bit 1: `other` */
  int32_t size[12];       /* settings that are whole numbers: the kind's file says which */
  float number[2];        /* its other settings: the kind's file says which */
  int64_t weight, bias;   /* columns of the row where its parameters start; -1: it has none */
  int64_t space;          /* place in the arena of what it keeps from forward to backward */
  const int32_t *table;   /* settings of any length: the kind's file says which */
} Layer;

enum { BYTES, FLOATS, TOKENS }; /* what samples are stored as */

typedef struct {
  int32_t layers, samples;         /* how many layers; BYTES, FLOATS or TOKENS */
  int32_t height, wide, channels;  /* of a sample; a vector has 1, 1, n, a text 1, n, 1 */
  int32_t logits;                  /* number of the value that is the output */
  const Value *value;              /* the first is the sample */
  const Layer *layer;              /* in the order of the forward pass */
  const float *scale, *shift;      /* [channels] n of a sample enters as n * scale + shift */
  int64_t vectors, scratch, width; /* of the arena; where in it layers work; columns of a row */
  int64_t private_vectors;         /* work space of each member of a team */
} Net;

typedef struct {
  const void *pixels;    /* [all, rows, columns, channels] of which a window is read */
  const int64_t *labels; /* [all] */
  const int32_t *order;  /* numbers of the client's images, one after the other */
  const uint8_t *crop;   /* [3, stride] of each: first row and column of its window, mirrored? */
  int64_t stride;        /* crop NULL: all windows start at row and column `corner` */
  int32_t rows, columns, corner;
  const int64_t *keys; /* of each mini-batch, for dropout; NULL: nothing is dropped */
} Images;

typedef struct {
  float lr, momentum, decay, clip; /* clip = 0: no clipping */
  float mu;                        /* mu * (w - towards) is added to the gradient */
  const float *towards;            /* [width]; NULL: nothing is added */
  const uint8_t *trained;          /* [width] 0 for a frozen column; NULL: all are trained */
  const float *corrections;        /* [steps, 2] Adam's, of means that start from 0; NULL: SGD */
  float one_minus_beta1, beta2, one_minus_beta2, eps; /* Adam's */
  int32_t decoupled;                                  /* the decay is AdamW's */
} Sgd;

/* One client's task in the verbs gradient, step, train, mix, ahead and descents (lanes.c). */
typedef struct {
  float *w, *m;        /* [width] its row, and the momentum; Adam's m has its means (step.h) */
  float *v, *m_v;      /* the same of its second row (mix) */
  float *row;          /* [width] a third row, where a second gradient is taken (mix, ahead) */
  float *g;            /* [width] the gradient, written by `gradient` and used up by `step` */
  float share;         /* of v in row (mix); rate of the step from w to row (ahead) */
  int32_t epochs, batch;
  int64_t n;           /* images of an epoch */
  Images images;
  Sgd sgd;
  double loss;         /* `gradient` writes it; `train` adds the loss of each mini-batch to it */
  float losses[2];     /* to these mix adds (at w; at row); ahead and descents add to the first */
} Training;

/* Rows that are scored on one client's images. */
typedef struct {
  const float *rows;
  int64_t stride;  /* floats from one row to the next */
  int32_t r, read; /* how many rows; number of the value that `features` shows */
  int64_t n;       /* images */
  Images images;
  float *losses;      /* [r, n] */
  int64_t *predicted; /* [r, n] classes; NULL: they are not written */
  float *logits;      /* [r, n, classes], likewise */
  float *features;    /* [r, n, units of the value], likewise */
} Scoring;

/* A client's greedy search for the models to average, by sets X (grows) and Y (shrinks); and the
 * candidates that are decided next. */
typedef struct {
  double *x, *y;             /* [width] sums of p_i w_i over X and over Y */
  double p_x, p_y, r_x, r_y; /* sums of p_i; rewards of the averages, once it has started */
  double cases[4];           /* candidates, counted by which gain was above 0 */
  float *pair, *losses;      /* [2, width] the averages scored next; [2, n] */
  int64_t started, n;        /* whether r_x and r_y are known; validation images */
  Images images;
  const float *const *models; /* [count] the candidates' rows, */
  const double *p, *coins;    /* [count] their weights, and a random number of each, below 1 */
  uint8_t *added;             /* [count] written: whether each was added to X */
  int64_t count, budget_left; /* candidates; how many of them may be added */
  int64_t decided;            /* written: how many candidates are decided */
} Search;
