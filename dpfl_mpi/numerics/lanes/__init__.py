"""The CPU kernels: what a module computes as a list of layers (`trace`, `layers`), their places in one arena (`plan`), and the layers in C."""
