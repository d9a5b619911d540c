"""The kernels: a module as a list of layers (`trace`), their places (`plan`), and C."""
