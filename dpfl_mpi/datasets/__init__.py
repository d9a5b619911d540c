"""One file per data set, found by its name.

Each module says: `PAPER` (the paper's settings: defaults of `Run`), `AUTHORS_CODE` (where the authors' published code differs), `DATA` (the
prepared file, or None where nothing needs preparing), and either `load()` (data that needs no file) or `read(source, **options)`, which
`python -m dpfl_mpi.prepare` calls. Optional:

    SOURCE      what `--source` takes, for the help
    DOWNLOAD    (url, "md5:...", bytes): where `prepare` gets it without `--source`; without this one `NO_DOWNLOAD` says what to do instead
    Options     a dataclass whose fields become flags of `prepare` and keywords of `read`
    WEIGHTS     "train": p_k follows the samples left to train; otherwise those before the validation split
    OWN_DATA    True where the name says nothing about the content, so a Run is keyed by the file's content under any path

No module imports torch; Pillow and scikit-learn only inside the function that needs them. Files whose name starts with _ are helpers.
"""
