"""Scores the models that a run saved: `python -m dpfl_mpi.evaluate RESULT --data FILE` (needs torch, no MPI)."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from dpfl_mpi.data.partition import PARTS, search_first
from dpfl_mpi.data.source import Source
from dpfl_mpi.engine.saved import dealt, fill, network_of, one_pool, source_of, with_code
from dpfl_mpi.errors import UserError, exit_with, in_a_sentence
from dpfl_mpi.plugins import short
from dpfl_mpi.results import Result
from dpfl_mpi.storage.files import check_apart, write_csv

CHUNK = 256  # images scored at once: what a small network makes of them fits a core's cache
WHERE = {"all": "the whole test set", "classes": "all test samples of their classes", "own": "their own {} samples"}
OfClients = list[np.ndarray]  # of each client its samples, or what each of them counts


def samples(result: Result, source: Source, part: str) -> OfClients:
    """Return each client's samples of one part, dealt anew as the run dealt them."""
    partition = dealt(result, source, "; score on all with --on all")
    searched = np.zeros(partition.n, np.int64)
    if part == "val" and result.run.search_share < 1:  # scored were those that the search did not see
        partition, searched = search_first(result.run, source.labels["train"], partition)
    return [partition.of(part, k)[searched[k] :] for k in range(partition.n)]


def of_classes(result: Result, source: Source, groups: np.ndarray | None = None) -> tuple[OfClients, OfClients]:
    """Return for each client all clients' test images of its classes, and what each counts, so that a class counts as much as among its own.

    Where clients differ in nothing but their classes, an accuracy on these is expected to be that on its own, and has less of chance. Clients of
    different `groups` `[N]` share no images. Images that other clients train on must not be among them (`one_pool`).
    """
    partition, labels = dealt(result, source), source.labels["test"]
    own = [partition.of("test", k) for k in range(partition.n)]
    groups = np.zeros(partition.n, np.int64) if groups is None else groups
    pools = {g: np.unique(np.concatenate([own[k] for k in np.flatnonzero(groups == g)])) for g in np.unique(groups)}
    rows, weights = [], []
    for mine, pool in zip(own, (pools[g] for g in groups), strict=True):
        counts, there = (np.bincount(labels[some], minlength=source.classes) for some in (mine, pool))
        each = (counts / max(len(mine), 1) / np.maximum(there, 1))[labels[pool]]
        rows.append(pool[each > 0])
        weights.append(each[each > 0])
    return rows, weights


def accuracies(
    result: Result, source: Source, rows: OfClients, part: str, device: Any, weights: OfClients | None = None
) -> np.ndarray:
    """Return every client's accuracy, 0 to 1, `[N]`, of its best model on its rows of the test or training images; each counts its weight, or as much.

    It is nan where a client has no model, as it was never scored.
    """
    import torch

    model = network_of(result, source).to(device)
    pool = "test" if part == "test" else "train"
    out, read = np.full(len(rows), np.nan), None
    for k in np.flatnonzero(result["best/round"] >= 0).tolist():
        chosen = rows[k]
        fill(model, result, k)
        if chosen is not read:  # with --on all every client has the same rows: read once
            read = chosen
            images = torch.from_numpy(source.images(pool, chosen))
        with torch.no_grad():
            found = torch.cat([model(part.to(device)).argmax(1).cpu() for part in images.split(CHUNK)])
        right = found.numpy() == source.labels[pool][chosen]
        out[k] = right.sum() / max(len(chosen), 1) if weights is None else right @ weights[k]
    return out


def report(result: Result, scores: np.ndarray, on: str, part: str) -> str:
    where = WHERE[on].format(part)
    benign, there = int(result.benign.sum()), result.benign & np.isfinite(scores)
    stored = result[f"best/{part}_acc"][there] if on == "own" and part in ("test", "val") else None
    scores = scores[there]
    if not benign:
        return f"no client is scored on {where}: all have flipped labels, lie or come later"
    missing = f"{benign - len(scores)} of {benign} clients have no model: they were never scored"
    if not len(scores):
        return missing
    lines = [missing] * (len(scores) < benign) + [
        f"{len(scores)} models on {where}: mean {100 * scores.mean():.2f} %, std over clients {100 * scores.std():.2f}, "
        f"lowest {100 * scores.min():.1f} %, highest {100 * scores.max():.1f} %"
    ]
    if stored is not None and np.isfinite(stored).any():
        same = int((np.abs(stored - scores) < 1e-9).sum())
        mean = f"mean {100 * np.nanmean(stored):.2f} %"
        lines.append(f"stored in the result: {mean}; the same for {same} of {len(scores)} clients")
    if result.run.metric == "batch" and stored is not None:
        lines.append("the run took means over mini-batches (--metric batch): these are means over images")
    if not result.method.finetunes:
        name = short(result.run.method)
        lines.append(f"{name} is scored by more than its models in the run: these are the models alone")
    return "\n".join(lines)


@in_a_sentence
def main(arguments: list[str] | None = None) -> None:
    from dpfl_mpi.numerics.device import pick_device

    parser = argparse.ArgumentParser("python -m dpfl_mpi.evaluate", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("result", metavar="RESULT", help="result of a run that saved its models (small ones are, else --save_models)")
    for code in ("model", "dataset"):
        add(f"--{code}", metavar="PATH", help=f"the run's own {code}, where it is not a shipped one")
    add("--data", type=Path, help="prepared data file (default: the one of the run)")
    add("--set", choices=PARTS, default="test", dest="part", help="which of a client's own samples (default test)")
    on = "its own samples; the whole test set; or its samples of the client's classes, each class weighted as its own are (default own)"
    add("--on", choices=("own", "all", "classes"), default="own", help=on)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--out", type=Path, help="CSV file for client_id, samples, accuracy")
    args = parser.parse_args(arguments)
    if args.on != "own" and args.part != "test":
        raise UserError(f"--set is {args.part}; --on {args.on} takes test samples: allowed is test")
    with Result(args.result) as result:
        check_apart(args.out, args.result, args.data or result.run.data)
        if drift := result.run.drift:
            raise UserError(f"{args.result} is of a run with --drift {drift}, which changed classes: it is not scored")
        result.state_dict(0)  # says so at once where no models were saved
        needed = {"model": args.model} | ({} if args.data and not args.dataset else {"dataset": args.dataset})
        result.run = with_code(result.run, needed)
        source = source_of(result, args.data)
        kind = result.run.partition
        if args.on != "own" and one_pool(result, source):
            pool = f"--partition {kind} takes training and test samples from one pool"
            advice = ": name other data with --data" * (args.on == "all")  # nobody has classes of its own in other data
            raise UserError(f"--on is {args.on}; {pool}{advice}")
        if args.on == "classes" and kind.kind == "natural":
            raise UserError("--on is classes; clients of --partition natural differ in more than their classes")
        rows, weights = [np.arange(len(source.labels["test"]))] * result.run.clients, None
        if args.on == "classes":
            rows, weights = of_classes(result, source)
        elif args.on == "own":
            rows = samples(result, source, args.part)
        scores = accuracies(result, source, rows, args.part, pick_device(args.device, "float32", 0), weights)
        print(report(result, scores, args.on, args.part))
        if args.out:
            table = ((k, len(r), repr(float(s))) for k, (r, s) in enumerate(zip(rows, scores, strict=True)))
            write_csv(args.out, ("client_id", "samples", "accuracy"), table)
            print(args.out)


if __name__ == "__main__":
    exit_with(main)
