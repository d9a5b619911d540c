"""Scores the models that a run saved: `python -m dpfl_mpi.evaluate RESULT --data FILE` (needs torch, no MPI; the run needs --save_models).

Each client's best model by validation is scored on the client's own samples, dealt anew from the Run, or with `--on all` on the whole test set,
which may also be that of other data with the same images and classes.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

import numpy as np

from dpfl_mpi.data.partition import PARTS
from dpfl_mpi.data.recipes import deal
from dpfl_mpi.data.source import Source, deals_test, in_file, open_source, pooled
from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins import find
from dpfl_mpi.results import Result
from dpfl_mpi.storage.files import explained

CHUNK = 2048  # images scored at once


def source_of(result: Result, data: Path | None) -> Source:
    """Return the data to score on: those of the run, wherever its file now lies, or those of `--data`."""
    if data is None:
        return open_source(result.run)
    import h5py

    try:
        with h5py.File(data, "r", locking=False) as file:
            name = str(file.attrs.get("dataset", result.run.dataset))
    except OSError:
        name = result.run.dataset  # in_file says what is wrong
    source = in_file(data, name)
    return pooled(source) if one_pool(result, source) else source


def one_pool(result: Result, source: Source) -> bool:
    """Return whether these are the run's data and it dealt training and test samples out of one pool of them."""
    return source.sha256 == str(result.file["meta"].attrs["data_sha256"]) and deals_test(result.run)


def samples(result: Result, source: Source, part: str) -> list[np.ndarray]:
    """Return each client's samples of one part, dealt anew as the run dealt them.

    Raises:
        UserError: these are other data than the run's.
    """
    meta = result.file["meta"].attrs
    if source.sha256 != str(meta["data_sha256"]):
        raise UserError(
            "these are not the data of the run, so no client has samples in them; score on all with --on all"
        )
    partition = deal(result.run, source)
    if partition.sha256() != str(meta["partition_sha256"]):
        raise UserError(
            "this version of dpfl_mpi deals the data differently from the one that made the result; score on all with --on all"
        )
    return [partition.of(part, k) for k in range(len(result["client/p"]))]


def accuracies(result: Result, source: Source, rows: list[np.ndarray], part: str, device: str) -> np.ndarray:
    """Return every client's accuracy, 0 to 1, `[N]`, of its best model on its rows of the test or training images."""
    import torch

    from dpfl_mpi.numerics.ensemble import Ensemble

    shapes = {name: values.shape for name, values in result.state_dict(0).items()}
    module = find("model", str(result.run.model)).build(source.shape, source.classes).to(device).eval()
    if {name: tuple(p.shape) for name, p in module.named_parameters()} != shapes:
        raise UserError(
            f"the saved models do not fit these data (images {source.shape[0]}x{source.shape[1]}x{source.shape[2]}, {source.classes} classes)"
        )
    images = Ensemble(module, source.mean, source.std, torch.device(device))  # for its normalisation
    pool = "test" if part == "test" else "train"
    out = np.empty(len(rows))
    held: tuple[np.ndarray, np.ndarray] | None = None
    for k, chosen in enumerate(rows):
        module.load_state_dict({name: torch.from_numpy(values) for name, values in result.state_dict(k).items()})
        if held is None or held[0] is not chosen:  # with --on all every client has the same rows: read once
            held = chosen, source.images(pool, chosen)
        right = 0
        for start in range(0, len(chosen), CHUNK):
            x = images.normalise(torch.from_numpy(held[1][start : start + CHUNK]).to(device)).movedim(-1, 1)
            with torch.no_grad():
                predicted = module(x).argmax(1).cpu().numpy()
            right += int((predicted == source.labels[pool][chosen[start : start + CHUNK]]).sum())
        out[k] = right / max(len(chosen), 1)
    return out


def pick(device: str) -> str:
    """Return the device of `--device`."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device is cuda; PyTorch sees no GPU here")
    return "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, score, print, return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m dpfl_mpi.evaluate", description=__doc__.split("\n\n")[0], allow_abbrev=False
    )
    parser.add_argument("result", metavar="RESULT", help="result of a run with --save_models")
    parser.add_argument("--data", type=Path, help="prepared data file (default: the one of the run)")
    parser.add_argument(
        "--set", choices=PARTS, default="test", dest="part", help="which of a client's own samples (default test)"
    )
    parser.add_argument(
        "--on",
        choices=("own", "all"),
        default="own",
        help="a client's own samples, or the whole test set (default own)",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--out", type=Path, help="CSV file for client_id, samples, accuracy")
    args = parser.parse_args(arguments)
    try:
        with Result(args.result) as result:
            n = len(result["client/p"])
            result.state_dict(0)  # says so at once where no models were saved
            source = source_of(result, args.data)
            if args.on == "all" and one_pool(result, source):
                raise UserError(
                    f"--on is all; --partition {result.run.partition} takes training and test samples from one pool: name other data with --data"
                )
            if args.on == "all":
                part, rows = "test", [np.arange(len(source.labels["test"]))] * n
            else:
                part, rows = args.part, samples(result, source, args.part)
            scores = accuracies(result, source, rows, part, pick(args.device))
            print(report(result, scores, args.on, part))
            if args.out:
                write(args.out, rows, scores)
                print(args.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def report(result: Result, scores: np.ndarray, on: str, part: str) -> str:
    """Return the sentences that are printed."""
    where = "the whole test set" if on == "all" else f"their own {part} samples"
    stored = result[f"best/{part}_acc"][result.benign] if on == "own" and part in ("test", "val") else None
    scores = scores[result.benign]
    lines = [
        f"{len(scores)} models on {where}: mean {100 * scores.mean():.2f} %, std over clients {100 * scores.std():.2f}, "
        f"lowest {100 * scores.min():.1f} %, highest {100 * scores.max():.1f} %"
    ]
    if stored is not None:
        lines.append(
            f"stored in the result: mean {100 * np.nanmean(stored):.2f} %; the same for {int((np.abs(stored - scores) < 1e-9).sum())} of "
            f"{len(scores)} clients"
        )
    if not find("method", result.run.method).finetunes:
        lines.append(f"{result.run.method} is scored by more than its models in the run: these are the models alone")
    return "\n".join(lines)


def write(out: Path, rows: list[np.ndarray], scores: np.ndarray) -> None:
    """Write client_id, samples, accuracy as CSV."""
    with explained(f"--out is {out}; it cannot be written"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(out, "w", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(["client_id", "samples", "accuracy"])
            table.writerows([k, len(r), repr(float(s))] for k, (r, s) in enumerate(zip(rows, scores, strict=True)))


if __name__ == "__main__":
    sys.exit(main())
