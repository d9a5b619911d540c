"""One file per model, found by its name: `build(shape, classes) -> torch.nn.Module` and `HEAD`, the name of its last layer.

Any module works whose forward takes `[S, C, H, W]` floats and keeps no batch statistics. A module's own class may offer `stacked()`,
kernels that compute many clients' models at once (without them `Ensemble` uses `torch.func`), and `lanes()`, what lanes.c computes it from.
"""
