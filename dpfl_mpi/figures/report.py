"""One self-contained HTML page to explore one run or several; it needs no network.

It shows summary and settings, learning curves, the collaboration graph as a matrix and as a force
layout with a slider over rounds, a sortable table of clients, seconds by phase and traffic, and a
comparison of several runs. plotly.js, which draws it, is inside the page.
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
from dpfl_mpi.figures.frames import Frames, clients
from dpfl_mpi.figures.graph_evolution import blocks_of
from dpfl_mpi.figures.style import looks, over_repetitions
from dpfl_mpi.figures.tables import deviation
from dpfl_mpi.graph import asymmetry, sparsity, within
from dpfl_mpi.results.summary import shown_groups, slowest_seconds
from dpfl_mpi.results.table import in_words, texts
from dpfl_mpi.settings import Run
from dpfl_mpi.settings.fields import as_dict
from dpfl_mpi.settings.run import REPEATED

RUNS = [Run(), Run(method="local")]
MPI = {"one-sided": "rma", "collective": "collective"}  # in traffic/bytes_..., by title
DASHES = {"-": "solid", "--": "dash", "-.": "dashdot", ":": "dot"}  # plotly's names
PAGE = Path(__file__).with_name("report.html")  # with {{NAME}} where `draw` puts the data


def rounded(values: Iterable[float], digits: int = 4) -> list[Any]:
    """Return values for JSON: rounded, None if not finite."""
    return [round(float(v), digits) if np.isfinite(v) else None for v in values]


def layout(weights: np.ndarray) -> np.ndarray:
    """Return positions `[N, 2]` in the unit square, a force layout of symmetric weights."""
    graph = nx.from_numpy_array(weights)
    # "energy" pulls every component to the middle, so that lone clients leave room for the others
    positions = nx.spring_layout(graph, iterations=300, method="energy", seed=0)
    xy = np.array(list(positions.values()))
    low, high = xy.min(0), xy.max(0)
    return (xy - low) / np.maximum(high - low, 1e-9)


def describe(line: Any) -> dict[str, Any]:
    """Return all that the page shows of one run, a line of `runs`, for JSON."""
    result, rounds = line.result, slice(0, line.result.last_round + 1)
    order, block, block_names = blocks_of(clients(result), result)
    names = result.named().get("name")
    accuracies = pd.DataFrame(100 * result["round/test_acc"][rounds, result.benign])
    by_group = {f"{name}, test accuracy, %": mean for name, mean in shown_groups(result).items()}
    summary = texts(in_words(result) | by_group).items()
    return {
        "name": f"{line.row}, seed {line.seed}",
        "file": result.path.name,
        "setting": line.setting,
        "state": result.state,
        "settings": {k: str(v) for k, v in as_dict(result.run).items() if v not in (None, {})},
        "start": {k: str(v) for k, v in result.starts()[-1].items()},
        "summary": {
            name: None if text == "-" else rounded([float(text)])[0] for name, text in summary
        },
        "epochs": result.local_epochs()[rounds].tolist(),
        "curves": {
            "test accuracy, %": rounded(100 * result.mean("round/test_acc"), 3),
            "validation accuracy, %": rounded(100 * result.mean("round/val_acc"), 3),
            "training loss": rounded(result.mean("round/train_loss")),
            "validation loss": rounded(result.mean("round/val_loss")),
        },
        "low": rounded(accuracies.quantile(0.1, axis=1), 2),
        "high": rounded(accuracies.quantile(0.9, axis=1), 2),
        "client_curves": [rounded(100 * row, 1) for row in result["round/test_acc"][rounds].T],
        "order": order.tolist(),
        "classes": result.class_names,
        "names": None if names is None else names.tolist(),
        "by": "most frequent class" if result.groups is None else "group",
        "block": block.tolist(),
        "blocks": block_names,
        "counts": result["client/class_counts"].tolist(),
        "omega_until": line.omega_until,
        **graph_data(result),
        "clients": {
            "best test %": rounded(100 * result["best/test_acc"], 2),
            "best val %": rounded(100 * result["best/val_acc"], 2),
            "best round": result["best/round"].tolist(),
            "last test %": rounded(100 * result["last/test_acc"], 2),
            "train samples": result["client/n_train"].tolist(),
            "test samples": result["client/n_test"].tolist(),
        },
        "seconds": {phase: rounded(s, 3) for phase, s in slowest_seconds(result).items()},
        "received": rounded(result["traffic/models_received"][rounds].mean(1), 2),
        "mpi": {
            n: rounded(result[f"traffic/bytes_{b}"][rounds] / 2**20, 3) for n, b in MPI.items()
        },
    }


def graph_data(result: Any) -> dict[str, list[Any]]:
    """Return Omega, each round's edges and measures, and the layout; all [] without a graph."""
    names = ("omega", "omega_indptr", "edges", "sparsity", "asymmetry", "inside", "positions")
    if not len(result["graph/chosen/senders"]):
        return {name: [] for name in names}
    omega, graphs = result.omega(), [result.chosen(t) for t in range(result.last_round + 1)]
    grouped = graphs if result.groups is not None else []
    # the share of rounds in which each edge is there, [N, N]
    share = sum(graph.matrix().astype(float) for graph in graphs) / len(graphs)
    return {
        "omega": omega.senders.tolist(),
        "omega_indptr": omega.indptr.tolist(),
        "edges": [np.stack([g.receivers(), g.senders], 1).ravel().tolist() for g in graphs],
        "sparsity": [round(100 * sparsity(g), 2) for g in graphs],
        "asymmetry": [round(100 * asymmetry(g)[0], 2) for g in graphs],
        "inside": rounded((100 * within(graph, result.groups)[0] for graph in grouped), 1),
        "positions": np.round(layout(np.maximum(share, share.T)), 4).tolist(),
    }


def compared(frames: Frames, runs: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the comparison, the best first."""
    # `runs` are what `describe` returns of each Run, by the path of its result
    out = []
    for line, look in zip(frames.rows.itertuples(), looks(frames.rows), strict=True):
        first = runs[line.run]
        curves = frames.of("curves", line.setting, line.row)
        percent = 100 * over_repetitions(curves, "test_acc")  # mean and std of each round
        results = frames.of("runs", line.setting, line.row)["result"]
        outcomes = pd.DataFrame(map(in_words, results))
        means = dict(zip(outcomes, rounded(outcomes.mean(skipna=False), 2), strict=True))
        spread = rounded([deviation(outcomes["test accuracy, %"].to_numpy())], 2)[0]
        summary = {
            "seeds": len(outcomes),
            "test accuracy, %": means["test accuracy, %"],
            "\u00b1 over seeds": spread,
        }
        out.append({
            "name": line.row, "setting": line.setting,
            "colour": look["color"], "dash": DASHES[look["ls"]],
            "epochs": first["epochs"][: len(percent)],
            "mean": rounded(percent["mean"], 3),
            "spread": rounded(percent["std"], 3) if len(outcomes) > 1 else [],
            "settings": {k: v for k, v in first["settings"].items() if k not in REPEATED},
            "summary": summary | means,
        })  # fmt: skip
    return sorted(out, key=lambda row: -(row["summary"]["test accuracy, %"] or 0.0))


def for_page(data: Any) -> str:
    """Return data as JSON in ASCII, in which no text can end the page's script."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return re.sub("[<>&]", lambda match: f"\\u{ord(match[0]):04x}", text)


def title(frames: Frames) -> str:
    rows = list(frames.runs["row"].unique())
    methods = f"{len(rows)} methods"
    if len(rows) < 5:
        methods = " and ".join(filter(None, [", ".join(rows[:-1]), rows[-1]]))
    return f"{methods} on {', '.join(sorted({*frames.runs['setting']}))}"


def draw(frames: Frames) -> Drawing:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError("plotly is not installed; pip install plotly") from None
    lines, runs = list(frames.files.itertuples()), set(frames.runs["run"])
    shown = {line.run: describe(line) for line in lines if line.run in runs}
    parts = {
        "TITLE": html.escape(title(frames)),
        "PLOTLY": get_plotlyjs(),
        "DATA": for_page(list(shown.values())),
        "GROUPS": for_page(compared(frames, shown)),
    }
    # all at once: a title may look like the name of another part
    page = re.sub(r"\{\{([A-Z]+)\}\}", lambda match: parts[match[1]], PAGE.read_text())
    data = []
    for line in lines:
        names = {"run": line.result.path.stem, "setting": line.setting}
        data.append(names | in_words(line.result))
    return Drawing(pd.DataFrame(data), html=page)
