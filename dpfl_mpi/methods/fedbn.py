"""FedBN: personal normalisation layers (Li et al., ICLR 2021).

Shared: all layers but the normalisation.
Personal: scale and shift of GroupNorm, LayerNorm and the like.
Scored: client i's whole model after training.

Paper: batch normalisation, with local running statistics. Models here keep no statistics, so the
    layers are those that need none.
"""

from dpfl_mpi.errors import UserError
from dpfl_mpi.methods import Federation, Method, State, fedavg

CITATION = """@inproceedings{li2021fedbn,
  title = {{FedBN}: Federated Learning on Non-{IID} Features via Local Batch Normalization},
  author = {Li, Xiaoxiao and Jiang, Meirui and Zhang, Xiaofei and Kamp, Michael and Dou, Qi},
  booktitle = {International Conference on Learning Representations (ICLR)}, year = {2021}
}"""
METHOD = Method("FedBN", CITATION, topology="server", elementwise=True, look="#56B4E9 -.")


def init(fed: Federation) -> State:
    if not fed.columns("normalisation").any():
        needs = "--method fedbn needs GroupNorm, LayerNorm or the like"
        raise UserError(f"{needs}; --model {fed.run.model} has none")
    return fedavg.personal(fed, "w")


def round(fed: Federation, state: State, t: int) -> State:
    own = fed.columns("normalisation")
    w_i = state["client"]["w"].where(own, state["shared"]["w"])
    w_i = fed.local_opt(w_i, epochs=fed.run.tau_train)
    fed.evaluate(w_i)
    return {"client": {"w": w_i}, "shared": {"w": fed.mean(w_i)}}
