"""Fused forms of what networks compute, each with a plain twin in torch that gives the same numbers."""
