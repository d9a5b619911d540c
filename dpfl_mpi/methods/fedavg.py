"""FedAvg: one global model (McMahan et al., AISTATS 2017, Algorithm 1).

Shared: w.
Personal: nothing.
Scored: w after aggregation.
"""

from dpfl_mpi.methods import Federation, Gradient, Method, Predict, State, Tensor

CITATION = """@inproceedings{mcmahan2017fedavg,
  title = {Communication-Efficient Learning of Deep Networks from Decentralized Data},
  author = {McMahan, Brendan and Moore, Eider and Ramage, Daniel and Hampson, Seth and
            Ag{\\"u}era y Arcas, Blaise},
  booktitle = {International Conference on Artificial Intelligence and
            Statistics (AISTATS)}, year = {2017}
}"""
METHOD = Method("FedAvg", CITATION, topology="server", elementwise=True, look="#009E73 s")


def init(fed: Federation, predict: Predict | None = None) -> State:
    w = fed.initial_row()
    fed.evaluate(fed.copies(w), predict=predict)
    return {"client": {}, "shared": {"w": w}}


def personal(fed: Federation, own: str, shared: str = "w") -> State:
    """Return the common initial row under two names: the clients' `own` and what is `shared`."""
    w = init(fed)["shared"]["w"]
    return {"client": {own: fed.copies(w)}, "shared": {shared: w}}


def round(fed: Federation, state: State, t: int, gradient: Gradient | None = None) -> State:
    w = update(fed, state["shared"]["w"], gradient)
    fed.evaluate(fed.copies(w))
    return {"client": {}, "shared": {"w": w}}


def update(fed: Federation, w: Tensor, gradient: Gradient | None = None) -> Tensor:
    """Return the next global row `[W]`: every client trains from w, the server averages by p."""
    w_i = fed.copies(w)
    w_i = fed.local_opt(w_i, epochs=fed.run.tau_train, gradient=gradient)  # ClientUpdate(i, w)
    return fed.mean(w_i)
