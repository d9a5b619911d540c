"""Stage a data set once: `python -m dpfl_mpi.prepare cifar10` writes one checked HDF5 file.

Every run then reads that file. Its arrays: `/train/images` uint8 or float32 [M,H,W,C], float32
[M,F] or int32 [M,L], `/train/labels` [M] and, for data with clients of their own, `/train/clients`
int32 [M]; the same under `/test`; `/class_names`, `/client_names`, `/client_groups`, `/mean` and
`/std`. Its attributes: format, dataset, vocabulary (one more than the largest token, or 0), note,
options, source (what it was made from), code (hash of the user's code that read it), own (whether
they are the user's own data), and sha256 of the arrays, of own data also of class_names, mean, std
and vocabulary.
"""

import contextlib
import hashlib
import io
import json
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from dpfl_mpi.data.source import FORMAT, KINDS, NAMES, Arrays, digest, in_file, made_by
from dpfl_mpi.datasets._archives import files_in
from dpfl_mpi.errors import INTERRUPTED, UserError, complain, exit_with, in_a_sentence
from dpfl_mpi.plugins import admit, admitted, find, shipped, short
from dpfl_mpi.settings.command_line import Parser
from dpfl_mpi.settings.fields import choices, field_types, fields, options_given
from dpfl_mpi.settings.job import FILE_NAME, file_name
from dpfl_mpi.storage.files import check_apart, explained, reason, remove_leftovers, replacing
from dpfl_mpi.storage.foreign import Hdf5, Unreadable, refused_as, sha256

FLAGS = ("source", "out", "force")  # of every data set, beside its own options


@in_a_sentence
def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    named = [name for name in arguments[:1] if not name.startswith("-")]
    for name in named:
        admit("dataset", name)
        if hasattr(find("dataset", name), "load"):
            raise UserError(f"{name} has load() and needs no file: run --dataset {name}")
    args = vars(parser(named).parse_args(arguments))
    module = find("dataset", args["dataset"])
    given = {f.name: args[f.name] for f in fields(module.Options) if args[f.name] is not None}
    options = options_given("", f"the data set {args['dataset']}", module.Options, given)
    out = args["out"] or default_out(module, options)
    try:
        print(prepare(args["dataset"], args["source"], out, options, args["force"]))
    except KeyboardInterrupt:
        complain(f"interrupted: {out} is as it was")
        return INTERRUPTED
    except MemoryError:
        raise UserError("the data exceed this machine's memory; use a larger machine") from None
    return 0


def parser(named: Sequence[str] = ()) -> Parser:
    """Return the command line: a subcommand for each data set, shipped or `named` by the user."""
    text = str(__doc__).split("\n\n")[0] + " DATASET is a name below, or your own file NAME.py."
    out = Parser(prog="python -m dpfl_mpi.prepare", description=text)
    datasets = out.add_subparsers(dest="dataset", required=True, metavar="DATASET")
    for name in dict.fromkeys([*shipped("dataset"), *named]):
        module = find("dataset", name)
        if not hasattr(module, "read"):
            continue
        text = (module.__doc__ or "").split("\n\n")[0]
        command = datasets.add_parser(name, help=text.split("\n")[0], description=text)
        add = command.add_argument
        missing = "default: download it" if hasattr(module, "DOWNLOAD") else "required"
        add("--source", type=Path, metavar="PATH", help=f"{module.SOURCE} ({missing})")
        add("--out", type=Path, metavar="FILE", help=f"file to write (default {module.DATA})")
        add("--force", action="store_true", help="overwrite an existing file")
        for f in fields(module.Options):
            if f.name in (*FLAGS, "dataset", "help"):
                taken = f"has {f.name}, a flag of prepare; rename it"
                raise UserError(f"Options of the data set {short(name)} {taken}")
            values = "|".join(choices(field_types(module.Options)[f.name])) or "X"
            text = f"{f.metadata['help']} (default {f.default})".replace("%", "%%")
            add(f"--{f.name}", metavar=values, help=text)
    return out


def default_out(module: ModuleType, options: Mapping[str, Any]) -> Path:
    """Return the usual path of a data set, with options that are not the default in its name."""
    path = Path(module.DATA)
    changed = [f.name for f in fields(module.Options) if options[f.name] != f.default]
    words = [path.stem, *(str(options[name]).replace("/", "%2F") for name in changed)]
    return path.with_name("-".join(words) + path.suffix)


def prepare(
    dataset: str, source: Path | None, out: Path, options: dict[str, Any], force: bool = False
) -> str:
    """Write the prepared file, unless it is there, made from the same source."""
    # returns a sentence about it
    module = find("dataset", dataset)
    if source is None and not hasattr(module, "DOWNLOAD"):
        raise UserError(f"--source is missing: {module.NO_DOWNLOAD}")
    if source is not None and not os.path.exists(source):
        raise UserError(f"--source is {source}; there is no such file or folder")
    if not file_name(str(out)):
        raise UserError(f"--out is {str(out)!r}; allowed is {FILE_NAME}")
    # a file in the source's folder is read, too, but for an earlier prepared one
    inside = source is not None and source.resolve() in out.resolve().parents
    check_apart(out, source, dataset, out if inside and out.suffix != ".h5" else None)
    unwritable = f"--out is {out}; it cannot be written"
    with explained(unwritable):
        remove_leftovers(out)
    origin = {
        "dataset": short(dataset),
        "options": json.dumps(options, sort_keys=True),
        "code": admitted("dataset", dataset),
        "source": fingerprint(source, module),
    }
    if out.exists() and not force:
        check_same(out, origin)
        return f"{out} is there already, made from the same source (--force writes it anew)"
    # try to write before an hour of download; the error makes `replacing` leave the file as it is
    with explained(unwritable), contextlib.suppress(EOFError), replacing(out):
        raise EOFError
    source = source or download(module, out.parent / "downloads")
    arrays = made_by(dataset, module, "read", source, **options)
    sha = write(arrays, short(dataset), out, origin, getattr(module, "OWN_DATA", False))
    # the sentence
    x, clients = arrays.train_images, len(arrays.client_names)
    counts = f"{len(x)} training and {len(arrays.test_images)} test"
    size = "x".join(map(str, x.shape[1:]))
    what = f"images of {size}" if x.ndim == 4 else f"samples of {size} {KINDS[str(x.dtype)]}"
    facts = [f"{counts} {what}", f"{len(arrays.class_names)} classes"]
    groups = len({*arrays.client_groups})
    facts += [f"{clients} clients" + (f" in {groups} groups" if groups else "")] if clients else []
    facts += [f"{out.stat().st_size / 1e6:.0f} MB", f"sha256 {sha[:12]}"]
    how_to_run = "" if out == Path(module.DATA) else f"; run it with --data {shlex.quote(str(out))}"
    return f"{out}: {', '.join(facts)}{how_to_run}"


def check_same(out: Path, origin: Mapping[str, str]) -> None:
    """Raise `UserError` if the file that is there has another origin than a new one would have."""
    mend = "choose another --out, or overwrite it with --force"
    what = f"--out is {out}, which is not a readable file of dpfl_mpi; {mend}"
    with refused_as(what, (Unreadable,)), Hdf5(out, "a readable file of dpfl_mpi") as file:
        if file.attribute("format", str, default="") != FORMAT:
            raise UserError(what)
        for name, value in origin.items():
            found = file.attribute(name, str, default="")
            if found != value:
                other = f"which was made with other {name} ({found})"
                raise UserError(f"--out is {out}, {other}; {mend}")


def fingerprint(source: Path | None, module: ModuleType) -> str:
    """Return a text that tells sources apart.

    It is the publisher's checksum, the SHA-256 of a file, or that of all names, sizes and times of
    a folder.
    """
    if source is None:
        return str(module.DOWNLOAD[1])
    if not source.is_dir():
        return f"sha256:{sha256(source)}"
    sha = hashlib.sha256()
    for path in files_in(source):
        stat = path.stat()
        line = f"{path.relative_to(source).as_posix()}:{stat.st_size}:{stat.st_mtime_ns};"
        sha.update(line.encode("utf-8", "surrogateescape"))
    return f"folder:{sha.hexdigest()}"


def download(module: ModuleType, folder: Path) -> Path:
    """Return the publisher's archive, downloaded once, checked, and kept in `folder`."""
    import logging

    import pooch
    import requests

    url, checksum, size = module.DOWNLOAD
    archive = folder / url.rsplit("/", 1)[-1]
    if not archive.exists():
        complain(f"downloading {url}, {size / 1e6:.0f} MB")
    pooch.get_logger().setLevel(logging.WARNING)
    downloader = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=60)
    try:
        return Path(pooch.retrieve(url, checksum, archive.name, folder, downloader=downloader))
    except (requests.RequestException, ConnectionError, TimeoutError) as error:
        why = "compute nodes often have no network"
        mend = "prepare on the login node, or name a file with --source PATH"
        failed = f"{url} cannot be reached ({type(error).__name__})"
        raise UserError(f"{failed}; {why}: {mend}") from None
    except ValueError:
        other = f"came with another checksum than {checksum}, and was thrown away"
        raise UserError(f"{url} {other}: try again") from None
    except OSError as error:
        raise UserError(f"{folder} cannot hold the download: {reason(error)}") from None


def packed(arrays: Arrays, dataset: str, origin: Mapping[str, str], own: bool) -> bytes:
    """Return the bytes of a prepared file; `own` says whether the data are the user's."""
    import h5py

    sha = digest(arrays.stored().values(), arrays, own)
    file_bytes = io.BytesIO()  # on a full disk HDF5 would crash the process
    kinds = {"labels": "uint8" if len(arrays.class_names) <= 256 else "uint16", "clients": "int32"}
    with h5py.File(file_bytes, "w", libver="earliest") as file:
        for name, values in arrays.stored().items():
            kind = kinds.get(name.split("/")[1], values.dtype)
            file.create_dataset(name, data=values.astype(kind, copy=False))
        for name in NAMES:
            if texts := getattr(arrays, name):
                file.create_dataset(name, data=list(texts), dtype=h5py.string_dtype())
        for name in ("mean", "std"):
            file.create_dataset(name, data=getattr(arrays, name), dtype="float64")
        file.attrs.update({"dataset": dataset, **origin}, format=FORMAT, sha256=sha, own=own)
        file.attrs.update(note=arrays.note, vocabulary=arrays.vocabulary)
    return file_bytes.getvalue()


def write(
    arrays: Arrays,
    dataset: str,
    out: Path,
    origin: Mapping[str, str] | None = None,
    own: bool = False,
) -> str:
    """Write the prepared file beside its place, read it back, and rename it; return its SHA-256."""
    with explained(f"--out is {out}; it cannot be written"), replacing(out) as part:
        part.write_bytes(packed(arrays, dataset, origin or {}, own))
        return in_file(part).sha256


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # temporary files are removed
    exit_with(main)
