"""Log a run to MLflow: `python -m dpfl_mpi --callback examples/to_mlflow.py`.

It needs `pip install mlflow`; MLFLOW_TRACKING_URI says where to.
"""

import mlflow

from dpfl_mpi.settings.fields import as_dict


def on_round(result, t):
    """Log round t. A run that was stopped goes on under its tag."""
    if mlflow.active_run() is None:
        start(result)
    mlflow.log_metrics({name: values[t] for name, values in result.by_round().items()}, step=t)


def start(result):
    """Open the MLflow run of this result, a new one if there is none."""
    name = result.path.stem
    mlflow.set_experiment("dpfl_mpi")
    known = mlflow.search_runs(filter_string=f"tags.result = '{name}'", output_format="list")
    run_id = known[0].info.run_id if known else None
    mlflow.start_run(run_id=run_id, run_name=name, tags={"result": name})
    if not known:
        mlflow.log_params(as_dict(result.run))
