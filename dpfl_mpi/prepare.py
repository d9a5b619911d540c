"""Stage a data set once: `python -m dpfl_mpi.prepare cifar10` writes one checked HDF5 file that every run then reads.

Layout: `/train/images` uint8 or float32 [M,H,W,C], float32 [M,F] or int32 [M,L], `/train/labels` [M] and, for data with clients of their own,
`/train/clients` int32 [M]; the same under `/test`; `/class_names`, `/client_names`, `/mean` and `/std` (per channel, of uint8 scaled to 0..1).
Attributes: format, dataset, vocabulary (one more than the largest token, or 0), note, options, source (what it was made from), code (that read it,
of one's own), own (whether the data are anyone's own) and sha256 of the arrays, of one's own data also of class_names, mean, std and vocabulary.
"""

import contextlib
import hashlib
import io
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from dpfl_mpi.data.source import FORMAT, KINDS, Arrays, content_sha256, digest, in_file, made_by
from dpfl_mpi.errors import INTERRUPTED, UserError, complain, exit_with, in_a_sentence
from dpfl_mpi.plugins import admit, admitted, find, shipped, short
from dpfl_mpi.settings.command_line import Parser
from dpfl_mpi.settings.fields import choices, chosen, fields, types
from dpfl_mpi.settings.job import FILE_NAME, file_name
from dpfl_mpi.storage.files import (
    ABANDONED_S,
    check_apart,
    explained,
    reason,
    remove_leftovers,
    replacing,
)
from dpfl_mpi.storage.foreign import Hdf5, Unreadable, encodable, refused_as, sha256


@in_a_sentence
def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    out = None
    try:
        own = [name for name in arguments[:1] if not name.startswith("-")]
        if not own and not {"-h", "--help"} & {*arguments}:
            raise UserError("name a data set first, such as `python -m dpfl_mpi.prepare cifar10`; --help lists them")
        for name in own:
            admit("dataset", name)
            if not hasattr(find("dataset", name), "read"):
                raise UserError(f"{name} needs no file: it has no read(source); run it with --dataset {name}")
        known, odd = parser(own).parse_known_args(arguments)
        args, module = vars(known), find("dataset", known.dataset)
        if odd:
            names = ", ".join(f"--{name}" for name in args if name != "dataset")
            raise UserError(f"unrecognized arguments: {' '.join(odd)}; prepare {known.dataset} takes {names}")
        given = {f.name: args[f.name] for f in fields(module.Options) if args[f.name] is not None}
        options = chosen("", f"the data set {known.dataset}", module.Options, given)
        out = args["out"] or default_out(module, options)
        print(prepare(args["dataset"], args["source"], out, options, args["force"]))
    except KeyboardInterrupt:
        complain(f"interrupted: {out} is as it was")
        return INTERRUPTED
    except MemoryError:
        raise UserError("this machine has not enough memory for the whole data set; use a larger one") from None
    return 0


def parser(own: Sequence[str] = ()) -> Parser:
    """Return the command line: one subcommand per data set, shipped or admitted as one's own, with the options that its module names."""
    out = Parser(prog="python -m dpfl_mpi.prepare", description=str(__doc__).split("\n\n")[0])
    datasets = out.add_subparsers(dest="dataset", required=True, metavar="DATASET")
    for name in dict.fromkeys([*shipped("dataset"), *own]):
        module = find("dataset", name)
        if not hasattr(module, "read"):
            continue
        text = (module.__doc__ or "").split("\n\n")[0]
        sub = datasets.add_parser(name, help=text.split("\n")[0], description=text)
        missing = "default: download it" if hasattr(module, "DOWNLOAD") else "required"
        sub.add_argument("--source", type=Path, metavar="PATH", help=f"{module.SOURCE} ({missing})")
        sub.add_argument("--out", type=Path, metavar="FILE", help=f"file to write (default {module.DATA})")
        sub.add_argument("--force", action="store_true", help="write the file anew although it is there")
        for f in fields(module.Options):
            if f.name in ("source", "out", "force", "dataset", "help"):
                raise UserError(f"Options of the data set {short(name)} has {f.name}, a flag of prepare; rename it")
            kind, text = types(module.Options)[f.name], f"{f.metadata['help']} (default {f.default})"
            sub.add_argument(f"--{f.name}", metavar="|".join(choices(kind)) or "X", help=text.replace("%", "%%"))
    return out


def default_out(module: ModuleType, options: Mapping[str, Any]) -> Path:
    """Return the data set's own path; other options than the default ones are part of the name, so that no variant replaces another."""
    path = Path(module.DATA)
    odd = [str(options[f.name]).replace("/", "%2F") for f in fields(module.Options) if options[f.name] != f.default]
    return path.with_name("-".join([path.stem, *odd]) + path.suffix)


def prepare(dataset: str, source: Path | None, out: Path, options: dict[str, Any], force: bool = False) -> str:
    """Write the prepared file and return a sentence about it; where it is there already, from the same source, do nothing."""
    module = find("dataset", dataset)
    if source is None and not hasattr(module, "DOWNLOAD"):
        raise UserError(f"--source is missing: {module.NO_DOWNLOAD}")
    if source is not None and not os.path.exists(source):
        raise UserError(f"--source is {source}; there is no such file or folder")
    if not file_name(str(out)):
        raise UserError(f"--out is {str(out)!r}; allowed is {FILE_NAME}")
    check_apart(out, source)
    unwritable = f"--out is {out}; it cannot be written"
    with explained(unwritable):
        remove_leftovers(out)
    made = {"dataset": short(dataset), "options": json.dumps(options, sort_keys=True)}
    made |= {"code": admitted("dataset", dataset), "source": fingerprint(source, module)}
    if out.exists() and not force:
        return f"{already(out, dataset, made)} (--force writes it anew)"
    with explained(unwritable), contextlib.suppress(EOFError), replacing(out):  # known before an hour of download
        raise EOFError  # so that nothing is replaced
    source = source or download(module, out.parent / "downloads")
    arrays = made_by(dataset, module, "read", source, **options)
    for text in (*arrays.class_names, *arrays.client_names, arrays.note):
        if "\0" in text or not encodable(text):
            raise UserError(f"{source} holds the name {text!r}, which is not text in UTF-8; rename it")
    content = write(arrays, short(dataset), out, made, getattr(module, "OWN_DATA", False))
    x, train, test = arrays.train_images, len(arrays.train_labels), len(arrays.test_labels)
    size, clients = "x".join(map(str, x.shape[1:])), len(arrays.client_names)
    samples = f"images of {size}" if x.ndim == 4 else f"samples of {size} {KINDS[str(x.dtype)]}"
    counts = f"{len(arrays.class_names)} classes" + (f", {clients} clients" if clients else "")
    file = f"{out.stat().st_size / 1e6:.0f} MB, sha256 {content[:12]}"
    file += "" if out == Path(module.DATA) else f"; run it with --data {out}"
    return f"{out}: {train} training and {test} test {samples}, {counts}, {file}"


def already(out: Path, dataset: str, made: Mapping[str, str]) -> str:
    """Return a sentence that says the file is there, made from this very source; `UserError` where it is another one."""
    other = "choose another --out, or overwrite it with --force"
    unreadable = refused_as(f"--out is {out}, which is not a readable file of dpfl_mpi; {other}", (Unreadable,))
    with unreadable, Hdf5(out, "a readable file of dpfl_mpi") as file:
        if file.attribute("format", str, default="") != FORMAT:
            raise UserError(f"--out is {out}, which is not a file of dpfl_mpi; {other}")
        held = {name: file.attribute(name, str, default="") for name in made}
        train, test = (len(file.dataset(f"{part}/labels", "iu", (None,))) for part in ("train", "test"))
    sentences = {"dataset": f"holds {held['dataset']}", "options": f"was made with the options {held['options']}"}
    sentences |= {"code": f"was made by {dataset} before it was edited", "source": "was made from another source"}
    for name, sentence in sentences.items():
        if held[name] != made[name]:
            raise UserError(f"--out is {out}, which {sentence}; {other}")
    return f"{out} is there already: {train} training and {test} test samples, made from the same source"


def fingerprint(source: Path | None, module: ModuleType) -> str:
    """Return what names a source: the publisher's checksum, the SHA-256 of a file, or of all names, sizes and times of a folder."""
    if source is None:
        return str(module.DOWNLOAD[1])
    if not source.is_dir():
        return f"sha256:{sha256(source)}"
    sha = hashlib.sha256()
    for path in sorted(p for p in source.rglob("*") if p.is_file()):
        stat = path.stat()
        about = f"{path.relative_to(source).as_posix()}:{stat.st_size}:{stat.st_mtime_ns};"
        sha.update(about.encode("utf-8", "surrogateescape"))
    return f"folder:{sha.hexdigest()}"


def download(module: ModuleType, folder: Path) -> Path:
    """Return the publisher's archive, downloaded once, checked, and kept in `folder`."""
    import logging

    import pooch
    import requests

    url, checksum, size = module.DOWNLOAD
    archive = folder / url.rsplit("/", 1)[-1]
    if not archive.exists():
        for left in folder.glob("tmp*"):  # of downloads that were killed, under pooch's temporary names
            with contextlib.suppress(OSError):  # another user's, or none of pooch's
                if time.time() - left.stat().st_mtime > ABANDONED_S:
                    left.unlink()
        complain(f"downloading {url}, {size / 1e6:.0f} MB")
    pooch.get_logger().setLevel(logging.WARNING)
    downloader = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=60)
    try:
        return Path(pooch.retrieve(url, checksum, archive.name, folder, downloader=downloader))
    except (requests.RequestException, ConnectionError, TimeoutError) as error:
        instead = "compute nodes often have no network: prepare on the login node, or name a file with --source PATH"
        raise UserError(f"{url} cannot be reached ({type(error).__name__}); {instead}") from None
    except ValueError:
        raise UserError(f"{url} came with another checksum than {checksum}, and was thrown away: try again") from None
    except OSError as error:
        raise UserError(f"{folder} cannot hold the download: {reason(error)}") from None


def packed(arrays: Arrays, dataset: str, made: Mapping[str, str], own: bool) -> bytes:
    """Return a prepared file of one's `own` data or a publisher's: the same bytes by one version of h5py."""
    import h5py

    content = digest(arrays.stored().values(), arrays if own else None)
    image = io.BytesIO()  # on a disk that is full HDF5 would crash the process
    kinds = {"labels": "uint8" if len(arrays.class_names) <= 256 else "uint16", "clients": "int32"}
    with h5py.File(image, "w", libver="earliest") as file:
        for name, values in arrays.stored().items():
            kind = kinds.get(name.split("/")[1], values.dtype)
            file.create_dataset(name, data=values.astype(kind, copy=False))
        for name in ("class_names", "client_names"):
            if texts := getattr(arrays, name):
                file.create_dataset(name, data=list(texts), dtype=h5py.string_dtype())
        for name in ("mean", "std"):
            file.create_dataset(name, data=getattr(arrays, name), dtype="float64")
        file.attrs.update({"dataset": dataset, **made}, format=FORMAT, sha256=content, own=own)
        file.attrs.update(note=arrays.note, vocabulary=arrays.vocabulary)
    return image.getvalue()


def write(arrays: Arrays, dataset: str, out: Path, made: Mapping[str, str] | None = None, own: bool = False) -> str:
    """Write the prepared file, read it back, then rename it; return the SHA-256 of its content."""
    with explained(f"--out is {out}; it cannot be written"), replacing(out) as part:
        part.write_bytes(packed(arrays, dataset, made or {}, own))
        if content_sha256(source := in_file(part)) != source.sha256:
            raise UserError(f"--out is {out}; what was written reads back otherwise: is the disk full or failing?")
    return source.sha256


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a killed run takes its temporary files along
    exit_with(main)
