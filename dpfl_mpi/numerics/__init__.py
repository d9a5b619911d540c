"""Rows as models: stacked parameters, samples on the device, recorded steps."""
