"""Optimisers: how a gradient becomes a step."""
