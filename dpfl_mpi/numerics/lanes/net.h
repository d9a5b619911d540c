/* What a caller describes: a network as a list of layers over values in one arena.
 * numerics/lanes/declared.py reads these structures.
 *
 * A value is an array [planes, lines, units] of vectors, one image in each lane. Its vectors, and
 * those of its gradient, lie in the arena, which the caller has planned: all places are counted in
 * vectors, so they are the same in every form.
 */
typedef struct {
  int64_t x, d;                 /* where its first vector is, and that of its gradient */
  int64_t upstream;             /* its numbers depend on the columns of the row before this one */
  int32_t planes, lines, units; /* an image's are channels, height, width */
  int32_t plane, line;          /* vectors from one plane, and from one line, to the next */
} Value;

typedef struct {
  int32_t kind;           /* a place in the kinds of lanes.c */
  int32_t in, other, out; /* values */
  int32_t adds;           /* bit 0: the gradient of `in` is added, else written; bit 1: `other` */
  int32_t size[12];       /* what the kind says */
  float number[2];
  int64_t weight, bias; /* where its parameters start in the row; -1: it has none */
  int64_t space;        /* where it has vectors of its own */
  const int32_t *table; /* numbers of its own */
} Layer;

enum { BYTES, FLOATS, TOKENS }; /* what samples are stored as */

typedef struct {
  int32_t layers, samples;           /* how many; what samples are stored as */
  int32_t height, wide, channels;    /* of a sample: 1, 1, F of a vector, 1, L, 1 of a text */
  int32_t logits;                    /* a value */
  const Value *value;                /* the first is the sample */
  const Layer *layer;                /* in the order of the way forward */
  const float *scale, *shift;        /* [C] a sample's n enters as n * scale + shift */
  int64_t vectors, scratch, width;   /* of the arena; where in it layers work; numbers of a row */
  int64_t own;                       /* vectors that a member of a team has for itself */
} Net;

typedef struct {
  const void *pixels;    /* [M, rows, columns, C], of which a window [H, W] is read */
  const int64_t *labels; /* [M] */
  const int32_t *order;  /* which images, one after the other */
  const uint8_t *crop;   /* [3, stride] first row and column of its window, mirrored? */
  int64_t stride;        /* crop NULL: all windows start at row and column `corner` */
  int32_t rows, columns, corner;
  const int64_t *keys; /* of each mini-batch, for dropout; NULL: nothing is dropped */
} Images;

typedef struct {
  float lr, momentum, decay, clip; /* clip = 0: no clipping */
  float mu;                        /* mu * (w - towards) is added to the gradient */
  const float *towards;            /* [D]; NULL: nothing is added */
  const uint8_t *trained;          /* [D] 0 for a frozen column; NULL: all columns are trained */
  const float *corrections;        /* [steps, 2] Adam's, of means that start from 0; NULL: SGD */
  float take, keep, add, eps;      /* 1 - beta_1, beta_2, 1 - beta_2 */
  int32_t decoupled;               /* the decay is AdamW's */
} Sgd;

/* One client's training, along the gradients of mini-batches. */
typedef struct {
  float *w, *m;        /* [D] its row, and the momentum's or Adam's */
  float *v, *m_v;      /* those of its second row (mix) */
  float *row;          /* [D] where else a gradient is taken (mix, ahead) */
  float *g;            /* [D] the gradient, written by `gradient` and used up by `step` */
  float share;         /* of v in row (mix); rate of the step from w to row (ahead) */
  int32_t epochs, batch;
  int64_t n;           /* images of an epoch */
  Images images;
  Sgd sgd;
  double loss;         /* written by `gradient`; `train` adds the mini-batches' losses to it, */
  float losses[2];     /* other verbs in float32 to these: at w and at row (mix), else the first */
} Training;

/* Rows of parameters that are scored on one client's images. */
typedef struct {
  const float *rows;
  int64_t stride; /* floats from one row to the next */
  int32_t r, read; /* rows; the value that `features` shows */
  int64_t n;
  Images images;
  float *losses;      /* [r, n] */
  int64_t *predicted; /* [r, n] classes, where it is not NULL */
  float *logits;      /* [r, n, classes], likewise */
  float *features;    /* [r, n, I], likewise */
} Scoring;

/* A client's greedy search: (X, w^X) and (Y, w^Y), and the candidates that are decided next. */
typedef struct {
  double *x, *y;             /* [D] sums of p_i w_i over X and over Y */
  double p_x, p_y, r_x, r_y; /* sums of p_i; rewards of the averages, once it has started */
  double cases[4];           /* candidates by which gain was above 0 */
  float *pair, *losses;      /* [2, D] the averages scored next; [2, n] */
  int64_t started, n;
  Images images;
  const float *const *models; /* [count] the candidates' rows, */
  const double *p, *coins;    /* [count] their weights, and a coin each */
  uint8_t *added;             /* [count] written: whether each was added to X */
  int64_t count, most;        /* candidates; how many of them may be added */
  int64_t decided;            /* written */
} Search;
