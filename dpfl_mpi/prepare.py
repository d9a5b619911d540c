"""Stage a data set once: `python -m dpfl_mpi.prepare cifar10` writes one checked HDF5 file that every run then reads.

Layout: `/train/images` uint8 [M,H,W,C], `/train/labels` [M] and, for data with clients of their own, `/train/clients` int32 [M]; the same
under `/test`; `/client_names`. Attributes: format, dataset, class_names, mean, std (per channel, of pixels scaled to 0..1), note, options,
source (what it was made from), code (that read it, of one's own) and sha256 of the content. Format 2 has float32 [M,H,W,C] or [M,F], or int32
[M,L] in the place of images, with `vocabulary`, one more than the largest token. Format 3 is the same of anyone's own data: its sha256 is over
class_names, mean and std as well. Where these have more than 1,000 entries, they are arrays of that name.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_type_hints

import numpy as np

from dpfl_mpi.data.source import FORMATS, KINDS, MOST_LISTED, Arrays, digest, made_by
from dpfl_mpi.errors import UserError, exit_with
from dpfl_mpi.plugins import admit, admitted, find, is_path, names, shipped, short
from dpfl_mpi.settings.job import FILE_NAME, file_name
from dpfl_mpi.storage.files import check_apart, explained, new_hdf5, reason, remove_leftovers, replacing, temporary
from dpfl_mpi.storage.foreign import Hdf5, Unreadable, encodable, is_there, open_regular, sha256

STORED = {
    "dataset": "none",
    "options": "{}",
    "source": "",
    "source_stat": "",
    "code": "",
}  # attributes, and what those of old files are


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, write the file, return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        own = [name for name in arguments[:1] if is_path(name) or ":" in name or name in names("dataset")]
        for name in own:
            admit("dataset", name)
            if not hasattr(find("dataset", name), "read"):
                raise UserError(f"{name} needs no file: it has no read(source); run it with --dataset {name}")
        args = vars(parser(own).parse_args(arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    module = find("dataset", args["dataset"])
    options = {f.name: args[f.name] for f in dataclasses.fields(module.Options)} if hasattr(module, "Options") else {}
    out = args["out"] or default_out(module, options)
    try:
        print(prepare(args["dataset"], args["source"], out, options, args["force"]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted: {out} is as it was", file=sys.stderr)
        return 130
    except MemoryError:
        print("error: this machine has not enough memory for the whole data set; use a larger one", file=sys.stderr)
        return 2
    return 0


def parser(own: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the command line: one subcommand per data set, shipped or admitted as one's own, with the options that its module names."""
    assert __doc__ is not None
    out = argparse.ArgumentParser(
        prog="python -m dpfl_mpi.prepare", description=__doc__.split("\n\n")[0], allow_abbrev=False
    )
    datasets = out.add_subparsers(dest="dataset", required=True, metavar="DATASET")
    for name in dict.fromkeys([*shipped("dataset"), *own]):
        module = find("dataset", name)
        if not hasattr(module, "read"):
            continue
        text = (module.__doc__ or "").split("\n\n")[0]
        sub = datasets.add_parser(name, help=text.split("\n")[0], description=text, allow_abbrev=False)
        missing = "default: download it" if hasattr(module, "DOWNLOAD") else "required"
        sub.add_argument("--source", type=Path, help=f"{module.SOURCE} ({missing})")
        sub.add_argument("--out", type=Path, help=f"file to write (default {module.DATA})")
        sub.add_argument("--force", action="store_true", help="write the file anew although it is there")
        if hasattr(module, "Options"):
            hints = get_type_hints(module.Options)
            for f in dataclasses.fields(module.Options):
                allowed = get_args(hints[f.name]) or None
                kind = str if allowed else hints[f.name]
                text = f"{f.metadata['help']} (default {f.default})"
                sub.add_argument(f"--{f.name}", type=kind, choices=allowed, default=f.default, help=text)
    return out


def default_out(module: ModuleType, options: dict[str, Any]) -> Path:
    """Return the data set's own path; other options than the default ones are part of the name, so that no variant replaces another."""
    path = Path(module.DATA)
    odd = [
        str(options[f.name])
        for f in (dataclasses.fields(module.Options) if options else ())
        if options[f.name] != f.default
    ]
    return path.with_name("-".join([path.stem, *odd]) + path.suffix)


def prepare(dataset: str, source: Path | None, out: Path, options: dict[str, Any], force: bool = False) -> str:
    """Write the prepared file and return a sentence about it; where it is there already, from the same source, do nothing.

    Raises:
        UserError: there is no such source, it is damaged, or the file is there from another source.
    """
    module = find("dataset", dataset)
    if source is None and not hasattr(module, "DOWNLOAD"):
        raise UserError(f"--source is missing: {module.NO_DOWNLOAD}")
    if source is not None and not is_there(source):
        raise UserError(f"--source is {source}; there is no such file or folder")
    if not file_name(str(out)):
        raise UserError(f"--out is {str(out)!r}; allowed is {FILE_NAME}")
    check_apart(out, source)
    remove_leftovers(out)
    if out.exists() and not force:
        return f"{already(out, dataset, source, options)} (--force writes it anew)"
    check_writable(out)
    if source is None:
        source = download(module, out.parent / "downloads")
        origin = fingerprint(None, module)
    else:
        origin = fingerprint(source, module)
    if not source.is_dir():
        open_regular(source).close()  # a pipe or a device has no end
    arrays = made_by(dataset, "read", source, **options)
    for text in (*arrays.class_names, *arrays.client_names, arrays.note):
        if "\0" in text or not encodable(text):
            raise UserError(f"{source} holds the name {text!r}, which is not text in UTF-8; rename it")
    extra = {"options": json.dumps(options, sort_keys=True), "code": admitted("dataset", dataset), **origin}
    content = write(arrays, short(dataset), out, extra, getattr(module, "OWN_DATA", False))
    return f"{summary(out, arrays)}, sha256 {content[:12]}"


def summary(out: Path, arrays: Arrays) -> str:
    """Return a sentence about a file just written."""
    clients = f", {len(arrays.client_names)} clients" if arrays.client_names else ""
    x = arrays.train_images
    size = "x".join(map(str, x.shape[1:]))
    samples = f"{KINDS['uint8']} of {size}" if x.ndim == 4 else f"samples of {size} {KINDS[str(x.dtype)]}"
    return (
        f"{out}: {len(arrays.train_labels)} training and {len(arrays.test_labels)} test {samples}, {len(arrays.class_names)} classes"
        f"{clients}, {out.stat().st_size / 1e6:.0f} MB"
    )


def already(out: Path, dataset: str, source: Path | None, options: dict[str, Any]) -> str:
    """Return a sentence that says the file is there, made from this very source.

    Raises:
        UserError: it is another file, or made from another source or with other options.
    """
    other = "choose another --out, or overwrite it with --force"
    try:
        with Hdf5(out, "a readable file of dpfl_mpi") as file:
            if file.attribute("format", str, default="none") not in FORMATS:
                raise UserError(f"--out is {out}, which is not a file of dpfl_mpi; {other}")
            attrs = {name: file.attribute(name, str, default=default) for name, default in STORED.items()}
            train, test = (len(file.dataset(f"{part}/labels", "iu", (None,))) for part in ("train", "test"))
            options_then = json.loads(attrs["options"])
    except (Unreadable, ValueError, RecursionError):
        raise UserError(f"--out is {out}, which is not a readable file of dpfl_mpi; {other}") from None
    if attrs["dataset"] != short(dataset):
        raise UserError(f"--out is {out}, which holds {attrs['dataset']}; {other}")
    if options_then != options:
        raise UserError(f"--out is {out}, which was made with the options {attrs['options']}; {other}")
    if attrs["code"] not in ("", admitted("dataset", dataset)):
        raise UserError(f"--out is {out}, which was made by {dataset} before it was edited; {other}")
    stat = "" if source is None else stat_of(source)
    if stat != attrs["source_stat"] or source is None:
        mine = fingerprint(source, find("dataset", dataset))["source"]
        if mine != attrs["source"]:
            raise UserError(f"--out is {out}, which was made from another source; {other}")
    return f"{out} is there already: {train} training and {test} test samples, made from the same source"


def fingerprint(source: Path | None, module: ModuleType) -> dict[str, str]:
    """Return what names a source: the publisher's checksum, else the SHA-256 of a file, or of all names, sizes and times of a folder.

    `source_stat` (size and time, no path) saves hashing a file again.
    """
    if source is None:
        return {"source": str(module.DOWNLOAD[1])}
    if source.is_dir():
        return {"source": f"folder:{stat_of(source)}", "source_stat": stat_of(source)}
    return {"source": f"sha256:{sha256(source)}", "source_stat": stat_of(source)}


def stat_of(source: Path) -> str:
    """Return a hash of size and time of a file, or of the name, size and time of every file of a folder."""
    sha = hashlib.sha256()
    for path in sorted(p for p in source.rglob("*") if p.is_file()) if source.is_dir() else [source]:
        name = path.relative_to(source).as_posix() if source.is_dir() else ""
        sha.update(f"{name}:{path.stat().st_size}:{path.stat().st_mtime_ns};".encode("utf-8", "surrogateescape"))
    return sha.hexdigest()


def download(module: ModuleType, folder: Path) -> Path:
    """Return the publisher's archive, downloaded once, checked, and kept in `folder`."""
    import logging

    import pooch
    import requests

    url, checksum, size = module.DOWNLOAD
    archive = folder / url.rsplit("/", 1)[-1]
    if archive.is_file() and pooch.file_hash(str(archive), "md5") == checksum.removeprefix("md5:"):
        return archive
    pooch.get_logger().setLevel(logging.WARNING)
    partial = temporary(archive)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(archive)
        print(f"downloading {url}, {size / 1e6:.0f} MB", file=sys.stderr)
        got = pooch.retrieve(
            url, checksum, fname=archive.name, path=partial, downloader=pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=60)
        )  # fmt: skip
        os.replace(got, archive)
    except (requests.RequestException, ConnectionError, TimeoutError) as error:
        raise UserError(
            f"{url} cannot be reached ({type(error).__name__}); compute nodes often have no network: run this on the login node, or "
            "bring the archive here and name it with --source PATH"
        ) from None
    except ValueError:
        raise UserError(
            f"{url} came with another checksum than {checksum}; the file was thrown away: try again later"
        ) from None
    except OSError as error:
        raise UserError(f"{folder} cannot hold the download: {reason(error)}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return archive


class Tried(Exception):
    """What ends a trial of writing a file."""


def check_writable(out: Path) -> None:
    """Raise `UserError` where the file cannot be written: known before an hour of download, not after it."""
    with explained(f"--out is {out}; it cannot be written"), contextlib.suppress(Tried), replacing(out):
        raise Tried


def write(arrays: Arrays, dataset: str, out: Path, extra: dict[str, str] | None = None, own: bool = False) -> str:
    """Write the prepared file, of one's `own` data or a publisher's, under a temporary name, read it back, then rename it; return its SHA-256.

    A killed run leaves no half a file under the real name.
    """
    import h5py

    content = digest(arrays, own)
    kind = "uint8" if len(arrays.class_names) <= 256 else "uint16"
    with explained(f"--out is {out}; it cannot be written"), replacing(out) as part:
        with new_hdf5(part, libver="earliest") as file:
            for name in ("train", "test"):
                file.create_dataset(f"{name}/images", data=getattr(arrays, f"{name}_images"))
                file.create_dataset(f"{name}/labels", data=getattr(arrays, f"{name}_labels").astype(kind))
                clients = getattr(arrays, f"{name}_clients")
                if clients is not None:
                    file.create_dataset(f"{name}/clients", data=clients.astype("int32"))
            if arrays.client_names:
                file.create_dataset("client_names", data=list(arrays.client_names), dtype=h5py.string_dtype())
            facts: dict[str, Any] = {name: list(getattr(arrays, name)) for name in ("class_names", "mean", "std")}
            for name in [name for name, values in facts.items() if len(values) > MOST_LISTED]:
                of = h5py.string_dtype() if name == "class_names" else "float64"
                file.create_dataset(name, data=facts.pop(name), dtype=of)
            file.attrs.update(
                format=FORMATS[2 if own else int(arrays.train_images.dtype != np.uint8)],
                **({"vocabulary": arrays.vocabulary} if arrays.vocabulary else {}),
                dataset=dataset,
                sha256=content,
                **facts,
                note=arrays.note,
                **(extra or {}),
            )
        if digest(read_back(part, arrays), own) != content:
            raise UserError(
                f"--out is {out}; what was written does not read back the same: is the disk full or failing?"
            )
    return content


def read_back(path: Path, arrays: Arrays) -> Arrays:
    """Return what a file just written holds."""
    import h5py

    with h5py.File(path, "r", locking=False) as file:
        got = {
            f"{part}_{name}": file[part][name][:] if name == "images" else file[part][name][:].astype(np.int64)
            for part in ("train", "test")
            for name in file[part]
        }
    return dataclasses.replace(arrays, **got)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a killed run takes its temporary files along
    exit_with(main)
