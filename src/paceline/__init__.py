"""Paceline trains, validates and benchmarks image classifiers: the same recipe is the same run on every placement."""

__version__ = "0.1.0"
