"""Optimizers: how a gradient becomes a step."""
