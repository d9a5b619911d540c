"""Score the models that a run saved: `python -m dpfl_mpi.evaluate RESULT --data FILE`.

It needs torch, but no MPI.
"""

from pathlib import Path
from typing import Any

import numpy as np

from dpfl_mpi.data.source import Source
from dpfl_mpi.engine.saved import dealt, fill, network_of, source_of, with_code
from dpfl_mpi.errors import UserError, exit_with, in_a_sentence
from dpfl_mpi.plugins import short
from dpfl_mpi.results import Result
from dpfl_mpi.results.summary import fold
from dpfl_mpi.settings.command_line import Parser
from dpfl_mpi.storage.files import check_apart, write_csv

CHUNK_IMAGES = 256  # scored at once: activations of a small network fit a core's cache
# on what --on lets models be scored, in words
SAMPLES = {
    "own": "their own test samples",
    "all": "the whole test set",
    "classes": "all test samples of their classes",
}
ByClient = list[np.ndarray]  # of each client the rows of its test samples, or their weights


def samples(result: Result, source: Source, advice: str = "") -> ByClient:
    """Return each client's test samples; `advice` ends the sentence of an error."""
    partition = dealt(result, source, advice)
    return [partition.of("test", k) for k in range(partition.n)]


def of_classes(
    result: Result, source: Source, groups: np.ndarray | None = None
) -> tuple[ByClient, ByClient]:
    """Return for each client all clients' test images of its classes, and their weights.

    A class weighs as much as among the client's own images: if clients differ only in their
    classes, the expected accuracy is the same, with less variance. Clients of different
    `groups` `[N]` share no images. No client may have trained on them (`check_on`).
    """
    of_clients, labels = samples(result, source), source.labels["test"]
    if groups is None:
        groups = np.zeros(len(of_clients), np.int64)
    rows, weights = [], []
    for images, group in zip(of_clients, groups, strict=True):
        members = np.flatnonzero(groups == group)
        pool = np.unique(np.concatenate([of_clients[k] for k in members]))
        # how many images of each class the client has, and the pool
        own_counts = np.bincount(labels[images], minlength=source.classes)
        pool_counts = np.bincount(labels[pool], minlength=source.classes)
        shares = own_counts / max(len(images), 1)
        weight = (shares / np.maximum(pool_counts, 1))[labels[pool]]
        rows.append(pool[weight > 0])
        weights.append(weight[weight > 0])
    return rows, weights


def accuracies(
    result: Result, source: Source, rows: ByClient, device: Any, weights: ByClient | None = None
) -> np.ndarray:
    """Return the accuracy of every client's best model on these test images, 0 to 1, `[N]`.

    Without `weights` all images count alike. It is nan for a client that was never scored, and so
    has no model.
    """
    import torch

    model = network_of(result, source).to(device)
    out = np.full(len(rows), np.nan)
    last_rows = None
    for k in np.flatnonzero(result["best/round"] >= 0).tolist():
        fill(model, result, k)
        if rows[k] is not last_rows:  # with --on all clients share the rows: read them once
            images = torch.from_numpy(source.images("test", rows[k]))
            last_rows = rows[k]
        with torch.no_grad():
            chunks = images.split(CHUNK_IMAGES)
            predicted = torch.cat([model(chunk.to(device)).argmax(1).cpu() for chunk in chunks])
        right = predicted.numpy() == source.labels["test"][rows[k]]
        if weights is None:
            out[k] = right.sum() / max(len(right), 1)
        else:
            out[k] = right @ weights[k]
    return out


def report(result: Result, scores: np.ndarray, on: str) -> str:
    """Return what is printed: the scores, and how they compare with those in the result."""
    benign = int(result.benign.sum())
    scored = result.benign & np.isfinite(scores)
    scores = scores[scored]
    lines = []
    if len(scores) < benign:
        missing = benign - len(scores)
        lines.append(f"{missing} of {benign} clients have no model: they were never scored")
    if not len(scores):
        none = f"no client is scored on {SAMPLES[on]}: none counts in averages"
        return lines[0] if lines else none
    mean = f"mean {100 * scores.mean():.2f} %, std over clients {100 * scores.std():.2f}"
    ends = f"lowest {100 * scores.min():.1f} %, highest {100 * scores.max():.1f} %"
    lines.append(fold(f"{len(scores)} models on {SAMPLES[on]}: {mean}, {ends}"))
    if on == "own":
        stored = result["best/test_acc"][scored]
        equal = int((np.abs(stored - scores) < 1e-9).sum())
        mean = f"mean {100 * np.nanmean(stored):.2f} %"
        lines.append(f"in the result: {mean}; the same for {equal} of {len(scores)} clients")
        if result.run.metric == "batch":
            means = "means over mini-batches (--metric batch); these are over images"
            lines.append(f"the run took {means}")
    if not result.method.finetunes:
        name = short(result.run.method)
        lines.append(f"the run scored {name} by more than its models; these are the models alone")
    return "\n".join(lines)


def check_on(result: Result, source: Source, on: str) -> None:
    """Raise `UserError` if models cannot be scored on images of other clients."""
    partition = result.run.partition
    if on == "own":
        return
    if source.pooled:
        pool = f"--partition {partition} takes training and test samples from one pool"
        # classes of a client are known in the run's own data alone
        advice = ": name other data with --data" if on == "all" else ""
        raise UserError(f"--on is {on}; {pool}{advice}")
    if on == "classes" and partition.kind == "natural":
        differ = "clients of --partition natural differ in more than their classes"
        raise UserError(f"--on is classes; {differ}")


def parser() -> Parser:
    out = Parser(prog="python -m dpfl_mpi.evaluate", description=__doc__)
    add = out.add_argument
    add("result", metavar="RESULT", help="a result with models (--save_models)")
    for kind in ("model", "dataset"):
        add(f"--{kind}", metavar="FILE", help=f"the run's own {kind}, if it is not a shipped one")
    add("--data", type=Path, metavar="FILE", help="prepared data file (default: that of the run)")
    on = "a client's test samples (default), the whole test set, or all test samples of its classes"
    weighted = ", weighted by its shares of the classes"
    add("--on", choices=SAMPLES, default="own", help=on + weighted)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--out", type=Path, help="CSV file for client_id, samples, accuracy")
    return out


@in_a_sentence
def main(arguments: list[str] | None = None) -> None:
    try:
        from dpfl_mpi.numerics.device import pick_device
    except ImportError:
        raise UserError("scoring a model needs torch: pip install torch") from None
    args = parser().parse_args(arguments)
    with Result(args.result) as result:
        check_apart(args.out, args.result, args.data or result.run.data)
        if result.run.drift:
            why = f"--drift {result.run.drift} changed the classes of its samples"
            raise UserError(f"{args.result} cannot be scored: {why}")
        result.state_dict(0)  # refuses a result without models
        code = {"model": args.model}
        if args.dataset or not args.data:
            code["dataset"] = args.dataset
        result.run = with_code(result.run, code)
        source = source_of(result, args.data)
        check_on(result, source, args.on)
        weights = None
        if args.on == "classes":
            rows, weights = of_classes(result, source)
        elif args.on == "own":
            rows = samples(result, source, "; score on all with --on all")
        else:
            rows = [np.arange(len(source.labels["test"]))] * result.run.clients
        device = pick_device(args.device, "float32")
        scores = accuracies(result, source, rows, device, weights)
        print(report(result, scores, args.on))
        if args.out:
            pairs = zip(rows, scores, strict=True)
            table = ((k, len(r), repr(float(s))) for k, (r, s) in enumerate(pairs))
            write_csv(args.out, ("client_id", "samples", "accuracy"), table)
            print(args.out)


if __name__ == "__main__":
    exit_with(main)
