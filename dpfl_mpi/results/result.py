"""The results file: one HDF5 file per Run. `Recorder` writes it on root, `Result` reads it, finished or running.

Written with libver="earliest" and flushed each round, read with locking=False: after a kill at any moment the file opens. Every array has
a checksum per chunk (HDF5's fletcher32), and so have the attributes: what was damaged later is an error. `layout` says what each array may be.

Layout (N clients, C classes, T rounds, E edges of all rounds; row 0 of a T+1 axis is after preprocessing):

    / attrs              run (JSON of the resolved Run), key (JSON of `Run.key`: files by their content), schema,
                         state running|finished|stopped, dataset, partition, method, budget, seed, rounds_done,
                         declared (JSON: what code that is not shipped says of itself), test_acc (mean over benign clients of /best/test_acc)
    /meta/starts         one row of JSON per start: time, hosts, ranks, devices, CPU, versions, commit
    /meta attrs          numerics, data_sha256, class_names, mean and std (JSON), partition_sha256, parameters (D)
    /round/number        [T+1]
    /round/{epochs,gradient_steps}                                      [T+1] local epochs of a client, gradient steps of all, so far
    /round/{train_loss,val_loss,val_acc,test_loss,test_acc}             [T+1, N] where a method scores twice: of the last models
    /round/best_test_acc                                                [T+1, N] of the best model by validation so far
    /mixed/{val_acc,test_acc}                                           [T+1, N] with --mixed: after mixing
    /best/{round,val_acc,test_acc} [N], /best/confusion [N, C, C], /last/test_acc [N]      true class by predicted class
    /finetune/{val_acc,test_acc} [E+1, N], /finetune/{epochs,gradient_steps} [E+1]    with --finetune_epochs: row 0 = the best model of the
                         rounds, from which tuning starts; /best is then over rows 1 to E (its round counts on), /last is row E
    /client/{p,budget,flipped,diverged_round,epochs,n_train,n_val,n_test} [N], /client/class_counts [N, C]
    /client/of_data [N]                                                 with --partition natural: which of the data's own clients,
                         a row of /client_names of the prepared file
    /client/{liars,newcomers,drifted,stopped_round} [N], /client/drift_classes [2]     with --attack, --newcomers, --drift, --patience
    /newcomers/{val_acc,test_acc,models_received,evaluations} [E, N], /newcomers/epochs [E]     with --newcomers: after E epochs of their own
    /attack/success [N]                                                 with --attack backdoor: marked test images taken for class 0
    /graph/reach/{indptr [N+1], senders [E]}                            with --reach: receiver k can receive from these
    /graph/omega/{indptr [N+1], senders [E]}, /graph/chosen/{indptr [T+1, N+1], senders [E]}    receiver k of round t takes
                         senders[indptr[t, k] : indptr[t, k+1]], indptr running on over rounds; row 0 = Omega.
                         A round that averages nothing (--ggc_off_rounds skip) repeats the one before
    /graph/cases [T+1, N, 4] in the order of `graph.CASES`, /graph/evaluations [T+1, N] of the reward
    /traffic/models_received [T+1, N]                                   what a real network would carry (row 0: Algorithm 3, and line 4 of Algorithm 1)
    /traffic/{bytes_rma,bytes_collective} [T+1]                         what MPI carried here, all ranks together
    /seconds/{train,graph,exchange,wait,evaluate,write} [T+1, 3]        min, mean, max over ranks (wait: before the opening Fence)
    /model/best [N, D], attrs names and shapes                          with --save_models
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from dpfl_mpi.errors import UserError
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.results import schema
from dpfl_mpi.results.schema import EXEMPT, SCHEMA
from dpfl_mpi.results.scores import of_result
from dpfl_mpi.storage.foreign import is_there


class Result:
    """A results file as arrays by the names of the layout: `result["round/test_acc"]`, `result.graph(t)`."""

    def __init__(self, path: str | os.PathLike[str]):
        """Open a finished, stopped or running file for reading.

        Raises:
            UserError: there is no such file, or it is not a result.
        """
        self.path = Path(path)
        if not is_there(self.path):
            raise UserError(f"{self.path}: there is no such result file")
        self.hdf5, self.run, self.key = schema.open_result(self.path, SCHEMA)
        self.file = self.hdf5.file

    @property
    def state(self) -> str:
        """ "finished", "stopped after round t" or "running, round t"."""
        state, done = schema.state(self.hdf5), self.hdf5.attribute("rounds_done", int)
        return {"running": f"running, round {done}", "stopped": f"stopped after round {done}"}.get(state, state)

    @property
    def finished(self) -> bool:
        """Whether all rounds are there."""
        return schema.state(self.hdf5) == "finished"

    @property
    def test_acc(self) -> float:
        """Mean over benign clients of /best/test_acc in the last round that is recorded, nan before there is one."""
        return float(self.hdf5.attribute("test_acc", float, default=float("nan")))

    @property
    def benign(self) -> np.ndarray:
        """Which clients averages are over, bool `[N]`: no flipped labels (--flip_share), no liars (--attack), no --newcomers."""
        out = np.ones(len(self["client/p"]), bool)
        for name in ("client/flipped", "client/liars", "client/newcomers"):
            if name in self:
                out &= ~self[name].astype(bool)
        return out

    def scored(self, name: str = "best/test_acc") -> np.ndarray:
        """Return accuracies `[N]` in percent, those of benign clients that were scored alone: there may be none."""
        values = 100 * self[name][self.benign]
        return values[np.isfinite(values)]

    def __contains__(self, name: str) -> bool:
        return name in self.hdf5

    def __getitem__(self, name: str) -> np.ndarray:
        """Return an array by its name in the layout; errors as in `part`."""
        return self.part(name)

    def part(self, name: str, rows: slice | None = None) -> np.ndarray:
        """Return some rows of an array by its name in the layout, without `rows` all of it.

        Raises:
            UserError: it is not there, or damaged: of another type or shape, out of its range, or its checksum does not fit.
        """
        if name not in self.hdf5 or (name not in schema.ARRAYS and name not in self.names()):
            raise UserError(f"{self.path} has no {name}; it has {', '.join(sorted(self.names()))}")
        return schema.array(self.hdf5, name, self.run, self.finished, rows)

    def names(self) -> list[str]:
        """Return the names of all arrays."""
        return self.hdf5.names()

    def fact(self, name: str) -> str:
        """Return a fact of the run, an attribute of /meta, as text: data_sha256, partition_sha256, numerics."""
        with self.hdf5.reading(f"the attribute {name} of meta"):
            return str(self.file["meta"].attrs[name])

    def listed(self, name: str) -> list[Any]:
        """Return class_names, mean or std of the data, attributes of /meta; empty in a result that does not hold them."""
        held: list[Any] = self.hdf5.json(name, list, "meta", "[]")
        return held

    def omega(self) -> CollaborationGraph:
        """Return Omega, the graph of preprocessing."""
        return schema.graph(self.hdf5, "graph/omega", self["graph/omega/indptr"], self["graph/omega/senders"])

    def chosen(self, t: int) -> CollaborationGraph:
        """Return the graph of round t; round 0 is Omega."""
        return schema.chosen(self.hdf5, self.run, t)

    def graph(self, t: int) -> np.ndarray:
        """Return bool `[N, N]`: element (k, j) says that in round t client k averaged with client j (with --ggc_off_rounds skip: when it last did)."""
        return self.chosen(t).matrix()

    @property
    def last_round(self) -> int:
        """Number of the last round that is recorded completely, -1 before there is one."""
        return schema.last_round(self.hdf5)

    def mean(self, name: str) -> np.ndarray:
        """Return the mean over clients of an array `[T+1, N]`, of the finite values of benign clients; nan where there is none."""
        values = self[name][: self.last_round + 1, self.benign]
        finite = np.isfinite(values)
        count = finite.sum(1)
        return np.where(count, np.where(finite, values, 0).sum(1) / np.maximum(count, 1), np.nan)

    def met_liars(self) -> np.ndarray:
        """Return for each edge to a benign client in rounds 1 to T whether its sender lies (--attack), bool `[edges]`: empty without liars or edges."""
        if "client/liars" not in self:
            return np.zeros(0, bool)
        liars, benign = self["client/liars"].astype(bool), self.benign
        graphs = [self.chosen(t) for t in range(1, self.last_round + 1)]
        return np.concatenate([np.zeros(0, bool), *(liars[g.senders[benign[g.receivers()]]] for g in graphs)])

    def score(self, metric: str) -> np.ndarray:
        """Return a score of each client's best model on its test images, 0 to 1, `[N]`: see `metrics.of_result`."""
        return of_result(self, metric)

    def state_dict(self, client: int) -> dict[str, np.ndarray]:
        """Return a client's best model by layer name, float32: `module.load_state_dict({k: torch.from_numpy(v) ...})` takes it."""
        if "model/best" not in self:
            raise UserError(f"{self.path} holds no models; run with --save_models")
        rows = self.hdf5.dataset("model/best", "f", (int(self.run.clients), None))
        if not 0 <= client < len(rows):
            raise UserError(f"client {client} is not in {self.path}; allowed are 0 to {len(rows) - 1}")
        layers = schema.layers(self.hdf5)
        with self.hdf5.reading("model/best"):
            row, ends = rows[client], np.cumsum([int(np.prod(shape)) for _, shape in layers])
            return {n: row[end - int(np.prod(s)) : end].reshape(s) for (n, s), end in zip(layers, ends, strict=True)}

    def starts(self) -> list[dict[str, Any]]:
        """Return one description per start of the run: time, hosts, ranks, devices, CPU, versions."""
        return schema.starts(self.hdf5)

    def close(self) -> None:
        """Close the file."""
        self.hdf5.close()

    def __enter__(self) -> Result:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @staticmethod
    def differences(a: Result, b: Result) -> list[str]:
        """Return the names of the arrays that are not bitwise equal in two results (provenance is exempt)."""
        mine, theirs = ({n for n in r.names() if not n.startswith(EXEMPT)} for r in (a, b))
        out = sorted(mine ^ theirs)
        for name in sorted(mine & theirs):
            x, y = a[name], b[name]
            if x.shape != y.shape or x.dtype != y.dtype or x.tobytes() != y.tobytes():
                out.append(name)
        return out

    @staticmethod
    def same_numbers(a: Result, b: Result) -> bool:
        """Return whether two results hold the same numbers to the bit, whatever ranks and hosts computed them."""
        return a.key == b.key and not Result.differences(a, b)
