"""Packs: a data set stored for fast decoding, and conversion to other formats."""
