"""pFedMe: personal models by Moreau envelopes (T. Dinh et al., NeurIPS 2020, Algorithm 1).

Shared: w.
Personal: theta_i, which minimises f_i(theta_i) + (lambda / 2) ||theta_i - w_i||^2.
Scored: theta_i after the round.

Paper: solves for theta_i to an accuracy nu; here K steps of plain gradient descent on the
    mini-batch, from the last theta_i, as in its code (without its decay of 0.001). A local round
    is a mini-batch of the tau_train epochs, so a round takes K times as many gradients.
Paper: all clients train and a sample is averaged; here absent clients do not train.
"""

from dataclasses import dataclass

from dpfl_mpi.methods import Federation, Method, State, fedavg
from dpfl_mpi.settings import option

CITATION = """@inproceedings{dinh2020pfedme,
  title = {Personalized Federated Learning with {Moreau} Envelopes},
  author = {T. Dinh, Canh and Tran, Nguyen H. and Nguyen, Tuan Dung},
  booktitle = {Advances in Neural Information Processing Systems (NeurIPS)}, year = {2020}
}"""
METHOD = Method(
    "pFedMe",
    CITATION,
    topology="server",
    optimizers=("sgd",),  # of which w_i uses the rate alone
    elementwise=True,
    look="#D55E00 -.",
)


@dataclass(frozen=True)
class Options:
    # lambda, K and beta are those of its published commands for MNIST
    lam: float = option(15.0, "lambda, the weight of the pull of theta_i to w_i", above=0)
    steps: int = option(
        5, "K, steps of theta_i per mini-batch: each is a gradient", low=1, high=1000
    )
    personal_lr: float = option(0.01, "rate of theta_i's steps", above=0)
    beta: float = option(1.0, "beta, how far the server goes to the clients' mean", above=0)


def init(fed: Federation) -> State:
    return fedavg.personal(fed, "theta")


def round(fed: Federation, state: State, t: int) -> State:
    """Return the state after round t; lines of Algorithm 1. An absent client keeps its theta_i."""
    lam, steps = fed.options["lam"], fed.options["steps"]
    rate, beta = fed.options["personal_lr"], fed.options["beta"]
    w = state["shared"]["w"]
    active = fed.column(fed.active[fed.ids]) > 0
    w_i = fed.copies(w)  # lines 3, 5: w_i,0 = w
    theta_i = w_i.where(active, state["client"]["theta"])  # the search for theta_i begins at w
    models = {"w": w_i, "theta": theta_i}
    for batch, w_r, theta in fed.batches(fed.run.tau_train, models):  # lines 6, 7
        fed.descents(theta, batch, steps, rate, w_r.w, lam)
        w_r.w.sub_(fed.lr * lam * (w_r.w - theta.w))  # line 8
    fed.evaluate(theta_i)
    mean = fed.mean(w_i)  # line 9
    w = mean if beta == 1 else beta * (mean - w) + w  # line 10
    return {"client": {"theta": theta_i}, "shared": {"w": w}}
