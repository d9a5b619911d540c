"""One self-contained HTML page to explore a run, or several: it opens from disk and needs no network.

Summary and settings, learning curves with hover, the collaboration graph as a matrix and as a force layout with a slider over rounds, a sortable
table of clients, phases and traffic, and a comparison where there are several runs. Drawn by plotly.js, which is inside the page.
"""

import html
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pandas as pd

from dpfl_mpi.errors import UserError
from dpfl_mpi.figures.command import Drawing
from dpfl_mpi.figures.frames import Frames, client_order, ranked_classes
from dpfl_mpi.figures.names import class_names
from dpfl_mpi.figures.style import looks, over
from dpfl_mpi.figures.tables import deviation
from dpfl_mpi.graph import asymmetry, sparsity
from dpfl_mpi.results.summary import outcome, seconds, texts
from dpfl_mpi.settings import Run
from dpfl_mpi.settings.fields import as_dict
from dpfl_mpi.settings.run import REPEATED

RUNS = [Run(), Run(method="local")]
MPI = {"one-sided": "rma", "collective": "collective"}
DASHES = {"-": "solid", "--": "dash", "-.": "dashdot", ":": "dot"}  # as plotly names them
PAGE = Path(__file__).with_name("report.html")


def rounded(values: Iterable[float], digits: int = 4) -> list[Any]:
    return [None if not np.isfinite(v) else round(float(v), digits) for v in values]


def layout(weights: np.ndarray) -> np.ndarray:
    """Return positions `[N, 2]` in the unit square of a force layout of a symmetric matrix of weights; the same matrix, the same picture."""
    graph = nx.from_numpy_array(weights)
    # "energy" pulls every component to the middle: clients without edges do not press the others into a point
    xy = np.array(list(nx.spring_layout(graph, iterations=300, method="energy", seed=0).values()))
    low, high = xy.min(0), xy.max(0)
    return (xy - low) / np.maximum(high - low, 1e-9)


def describe(line: Any) -> dict[str, Any]:
    """Return all that the page shows of one run, a line of `runs`, for JSON."""
    result, rounds = line.result, slice(0, line.result.last_round + 1)
    order, dominant = client_order(ranked_classes(result))
    some = len(result["graph/chosen/senders"]) > 0
    graphs, omega = [result.graph(t) for t in range(rounds.stop)] if some else [], result.omega()
    scored = pd.DataFrame(100 * result["round/test_acc"][rounds, result.benign])  # of nobody: nan, without a warning
    share = np.mean(graphs, axis=0) if some else np.zeros(0)  # of the rounds in which each edge is there
    return {
        "name": f"{line.row}, seed {line.seed}",
        "file": result.path.name,
        "setting": line.setting,
        "state": result.state,
        "settings": {k: str(v) for k, v in as_dict(result.run).items() if v not in (None, {})},
        "start": {k: str(v) for k, v in result.starts()[-1].items()},
        "summary": {
            n: rounded([np.nan if text == "-" else float(text)])[0] for n, text in texts(outcome(result)).items()
        },
        "epochs": result.local_epochs()[rounds].tolist(),
        "curves": {
            "test accuracy, %": rounded(100 * result.mean("round/test_acc"), 3),
            "validation accuracy, %": rounded(100 * result.mean("round/val_acc"), 3),
            "training loss": rounded(result.mean("round/train_loss")),
            "validation loss": rounded(result.mean("round/val_loss")),
        },
        "low": rounded(scored.quantile(0.1, axis=1), 2),
        "high": rounded(scored.quantile(0.9, axis=1), 2),
        "client_curves": [rounded(100 * row, 1) for row in result["round/test_acc"][rounds].T],
        "order": order.tolist(),
        "classes": class_names(result),
        "dominant": dominant.tolist(),
        "counts": result["client/class_counts"].tolist(),
        "omega": omega.senders.tolist() if some else [],
        "omega_indptr": omega.indptr.tolist() if some else [],
        "omega_until": line.omega_until,
        "edges": [np.argwhere(g).ravel().tolist() for g in graphs],  # receiver, sender, receiver, sender, ...
        "sparsity": [round(100 * sparsity(g), 2) for g in graphs],
        "asymmetry": [round(100 * asymmetry(g)[0], 2) for g in graphs],
        "positions": np.round(layout(np.maximum(share, share.T)), 4).tolist() if some else [],
        "clients": {
            "best test %": rounded(100 * result["best/test_acc"], 2),
            "best val %": rounded(100 * result["best/val_acc"], 2),
            "best round": result["best/round"].tolist(),
            "last test %": rounded(100 * result["last/test_acc"], 2),
            **{f"{part} samples": result[f"client/n_{part}"].tolist() for part in ("train", "test")},
        },
        "seconds": {phase: rounded(each, 3) for phase, each in seconds(result).items()},
        "received": rounded(result["traffic/models_received"][rounds].mean(1), 2),
        "mpi": {n: rounded(result[f"traffic/bytes_{a}"][rounds] / 2**20, 3) for n, a in MPI.items()},
    }


def compared(frames: Frames, runs: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what the comparison shows of each row, for JSON: means over seeds, the best accuracy first; `runs` are what `describe` said, by path."""
    out = []
    for line, look in zip(frames.rows.itertuples(), looks(frames.rows), strict=True):
        first, each = runs[line.run], 100 * over(frames.of("curves", line.setting, line.row), "test_acc")
        figures = pd.DataFrame(map(outcome, frames.of("runs", line.setting, line.row)["result"]))
        mean_of = dict(zip(figures, rounded(figures.mean(skipna=False), 2), strict=True))
        deviates = rounded([deviation(figures["test accuracy, %"].to_numpy())], 2)[0]
        best = {"test accuracy, %": mean_of["test accuracy, %"], "\u00b1 over seeds": deviates}
        group = {"name": line.row, "setting": line.setting, "colour": look["color"], "dash": DASHES[look["ls"]]}
        group |= {"epochs": first["epochs"][: len(each)], "mean": rounded(each["mean"], 3)}
        group |= {"spread": rounded(each["std"], 3) if len(figures) > 1 else []}
        group |= {"settings": {k: v for k, v in first["settings"].items() if k not in REPEATED}}
        out.append(group | {"summary": {"seeds": len(figures), **best, **mean_of}})
    return sorted(out, key=lambda g: -(g["summary"]["test accuracy, %"] or 0.0))


def for_page(data: Any) -> str:  # JSON in ASCII, of which nothing ends a script early
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", text)


def draw(frames: Frames) -> Drawing:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError("plotly is not installed; pip install plotly") from None
    lines, runs = list(frames.files.itertuples()), set(frames.runs["run"])
    shown = {line.run: describe(line) for line in lines if line.run in runs}
    rows = list(frames.runs["row"].unique())
    told = " and ".join(filter(None, [", ".join(rows[:-1]), rows[-1]])) if len(rows) < 5 else f"{len(rows)} methods"
    parts = {  # filled in at once: a title may look like the name of another part
        "TITLE": html.escape(f"{told} on {', '.join(sorted({*frames.runs['setting']}))}"),
        "PLOTLY": get_plotlyjs(),
        "DATA": for_page(list(shown.values())),
        "GROUPS": for_page(compared(frames, shown)),
    }
    page = re.sub(r"\{\{([A-Z]+)\}\}", lambda found: parts[found[1]], PAGE.read_text())
    data = [{"run": line.result.path.stem, "setting": line.setting, **outcome(line.result)} for line in lines]
    return Drawing(pd.DataFrame(data), html=page)
