"""Paceline trains, validates and benchmarks convolutional image classifiers: the same recipe is the same run anywhere."""

__version__ = "0.1.0"
