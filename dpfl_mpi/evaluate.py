"""Scores the models that a run saved: `python -m dpfl_mpi.evaluate RESULT --data FILE` (needs torch, no MPI; the run needs --save_models).

Each client's best model by validation is scored on the client's own samples, dealt anew from the Run, or with `--on all` on the whole test set,
which may also be that of other data with the same images and classes.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpfl_mpi.data.partition import PARTS
from dpfl_mpi.data.recipes import deal
from dpfl_mpi.data.source import Source, deals_test, in_file, open_source, pooled, verify
from dpfl_mpi.data.validation import search_first
from dpfl_mpi.errors import UserError, exit_with
from dpfl_mpi.models import make
from dpfl_mpi.plugins import admit, admitted, codes, short
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Resolved
from dpfl_mpi.storage.files import check_apart, explained, replacing
from dpfl_mpi.storage.foreign import Hdf5, Unreadable, is_there

if TYPE_CHECKING:
    from dpfl_mpi.numerics.raw import RawImages

CHUNK = 2048  # images scored at once


def with_code(run: Resolved, given: Mapping[str, str | None]) -> Resolved:
    """Return the run with its own model and data set as they are `given` here, by kind: a result's own paths are never executed.

    Raises:
        UserError: one that is needed is not given, or it is other code than the run's.
    """
    for kind, name in given.items():
        held = run.contents.get(kind, "")
        if name is not None and admit(kind, name) != held:
            of = "other code than the run's" if held else f"the run has the shipped {getattr(run, kind)}"
            raise UserError(f"--{kind} is {name}; {of}")
        if held and name is None and kind == "model":
            raise UserError(
                f"the run's model is code of its own; name it with --model ({run.model}), in Python model(k, code=...)"
            )
    named: dict[str, Any] = {kind: name for kind, name in given.items() if name is not None}
    return dataclasses.replace(run, **named)


def source_of(result: Result, data: Path | None) -> Source:
    """Return the data to score on: those of the run, wherever its file now lies, or those of `--data`."""
    if data is None:
        if codes(result.run.contents).get("dataset", "") != admitted("dataset", result.run.dataset):
            raise UserError(
                f"the run's data set is code of its own; name it with --dataset ({result.run.dataset}), or other data with --data"
            )
        return open_source(result.run)
    name = short(result.run.dataset)
    if is_there(data):
        with contextlib.suppress(Unreadable), Hdf5(data, "an HDF5 file") as file:  # in_file says what is wrong
            name = file.attribute("dataset", str, default=name)
    source = in_file(data, name)
    return pooled(source) if one_pool(result, source) else as_trained(result, source)


def as_trained(result: Result, source: Source) -> Source:
    """Return other data, normalised as those that the models were trained on.

    Raises:
        UserError: their classes have other names, so that a label would mean another class.
    """
    names = result.listed("class_names")
    if source.sha256 == result.fact("data_sha256") or len(names) not in (0, source.classes):
        return source  # the very same, or no fit: `network_of` says so
    odd = [(i, a, b) for i, (a, b) in enumerate(zip(names, source.class_names, strict=False)) if a != b]
    if odd:
        i, trained, here = odd[0]
        raise UserError(
            f"--data {source.path}: class {i} is {here}, and {trained} in the run; both must have the same classes"
        )
    held = {name: result.listed(name) for name in ("mean", "std")}
    if any(len(values) != len(source.mean) for values in held.values()):
        print(
            "note: the result does not say how its images were normalised; these are by their own mean and deviation",
            file=sys.stderr,
        )
        return source
    return dataclasses.replace(source, mean=tuple(held["mean"]), std=tuple(held["std"]))


def one_pool(result: Result, source: Source) -> bool:
    """Return whether these are the run's data and it dealt training and test samples out of one pool of them."""
    return source.sha256 == result.fact("data_sha256") and deals_test(result.run)


def samples(result: Result, source: Source, part: str) -> list[np.ndarray]:
    """Return each client's samples of one part, dealt anew as the run dealt them.

    Raises:
        UserError: these are other data than the run's.
    """
    if source.sha256 != result.fact("data_sha256"):
        raise UserError(
            "these are not the data of the run, so no client has samples in them; score on all with --on all"
        )
    partition = deal(result.run, source)
    if partition.sha256() != result.fact("partition_sha256"):
        raise UserError(
            "this version of dpfl_mpi deals the data differently from the one that made the result; score on all with --on all"
        )
    if part == "val" and result.run.search_share < 1:  # scored were those that the search did not see
        partition, searched = search_first(result.run, source.labels["train"], partition)
        return [partition.of("val", k)[searched[k] :] for k in range(partition.n)]
    return [partition.of(part, k) for k in range(len(result["client/p"]))]


def network_of(result: Result, source: Source) -> RawImages:
    """Return the network of a run's clients, for raw images of this source; `fill` puts a client's weights into it.

    Raises:
        UserError: the run saved no models, or they do not fit these data.
    """
    from dpfl_mpi.numerics.raw import RawImages

    shapes = {name: values.shape for name, values in result.state_dict(0).items()}
    if codes(result.run.contents).get("model", "") != admitted("model", str(result.run.model)):
        raise UserError(
            f"the run's model is code of its own; name the very same, with --model or by admit ({result.run.model})"
        )
    network = make(result.run, source).module
    if {name: tuple(p.shape) for name, p in network.named_parameters()} != shapes:
        raise UserError(f"the saved models do not fit these data (samples of {source.size}, {source.classes} classes)")
    return RawImages(network, source.mean, source.std, source.dtype).eval()


def fill(model: RawImages, result: Result, client: int) -> RawImages:
    """Put the weights of a client's best model into a network of the run, and return it."""
    import torch

    model.network.load_state_dict(
        {name: torch.from_numpy(values) for name, values in result.state_dict(client).items()},
        strict=False,  # buffers stay as the model was built with them
    )
    return model


def accuracies(result: Result, source: Source, rows: list[np.ndarray], part: str, device: str) -> np.ndarray:
    """Return every client's accuracy, 0 to 1, `[N]`, of its best model on its rows of the test or training images."""
    import torch

    model = network_of(result, source).to(device)
    pool = "test" if part == "test" else "train"
    out = np.empty(len(rows))
    held: tuple[np.ndarray, np.ndarray] | None = None
    for k, chosen in enumerate(rows):
        fill(model, result, k)
        if held is None or held[0] is not chosen:  # with --on all every client has the same rows: read once
            held = chosen, source.images(pool, chosen)
        right = 0
        for start in range(0, len(chosen), CHUNK):
            with torch.no_grad():
                logits = model(torch.from_numpy(held[1][start : start + CHUNK]).to(device))
            predicted = logits.argmax(1).cpu().numpy()
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
    for kind in ("model", "dataset"):
        parser.add_argument(f"--{kind}", metavar="PATH", help=f"the run's own {kind}, where it is not a shipped one")
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
        check_apart(args.out, Path(args.result), args.data)
        with Result(args.result) as result:
            n = len(result["client/p"])
            if result.run.drift:
                raise UserError(
                    f"{args.result} is of a run with --drift {result.run.drift}, whose classes changed their names: it is not scored here"
                )
            result.state_dict(0)  # says so at once where no models were saved
            result.run = with_code(result.run, {"model": args.model, "dataset": args.dataset})
            source = source_of(result, args.data)
            verify(source)
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
    if not len(scores):
        return f"no client is scored on {where}: all have flipped labels, lie or come later"
    lines = [
        f"{len(scores)} models on {where}: mean {100 * scores.mean():.2f} %, std over clients {100 * scores.std():.2f}, "
        f"lowest {100 * scores.min():.1f} %, highest {100 * scores.max():.1f} %"
    ]
    if stored is not None and np.isfinite(stored).any():
        lines.append(
            f"stored in the result: mean {100 * np.nanmean(stored):.2f} %; the same for {int((np.abs(stored - scores) < 1e-9).sum())} of "
            f"{len(scores)} clients"
        )
    if result.run.metric == "batch" and stored is not None:
        lines.append("the run took means over mini-batches (--metric batch): these are means over images")
    if not result.method.finetunes:
        lines.append(
            f"{short(result.run.method)} is scored by more than its models in the run: these are the models alone"
        )
    return "\n".join(lines)


def write(out: Path, rows: list[np.ndarray], scores: np.ndarray) -> None:
    """Write client_id, samples, accuracy as CSV."""
    said = explained(f"--out is {out}; it cannot be written")
    with said, replacing(out) as part, open(part, "w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["client_id", "samples", "accuracy"])
        table.writerows([k, len(r), repr(float(s))] for k, (r, s) in enumerate(zip(rows, scores, strict=True)))


if __name__ == "__main__":
    exit_with(main)
