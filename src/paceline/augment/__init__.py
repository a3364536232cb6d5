"""Augmentations: the numbers drawn for an image and what they do to its pixels, one file each."""
