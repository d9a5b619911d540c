"""Rows as models: stacked parameters, samples on the device, recorded steps."""

BORDER = 4  # pixels around an image before a random crop
