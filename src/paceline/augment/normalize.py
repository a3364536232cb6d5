"""Normalizes 8-bit images to numbers around zero, in training, validation, prediction and export alike."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn

from paceline.augment.exact_mean import exact_mean
from paceline.settings.data import Data


class Normalize(nn.Module):
    """Images from 0 to 255 as the network takes them, in the module's dtype."""

    mean: Tensor
    std: Tensor

    def __init__(self, data: Data) -> None:
        super().__init__()
        self._kind = data.normalize
        for name, color in (("mean", data.mean), ("std", data.std)):
            values = torch.tensor(color, dtype=torch.float64) * 255
            self.register_buffer(name, values.view(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Images [images, channels, rows, columns], normalized."""
        if self._kind == "mean-std" and _by_kernel(images, self.mean.dtype):
            from paceline.augment.normalize_cuda import normalize  # noqa: PLC0415 - Triton comes with torch for CUDA only

            return normalize(images, self.mean, self.std)
        pixels = images.to(self.mean.dtype)
        match self._kind:
            case "mean-std":
                return (pixels - self.mean) / self.std
            case "mean":
                return pixels - self.mean
            case "unit":
                return pixels / 127.5 - 1
            case "image":
                return standardize(pixels)


def _by_kernel(images: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernel for CUDA takes these images and gives this type."""
    return (
        images.is_cuda
        and (images.dtype, dtype) == (torch.uint8, torch.float32)
        and images.is_contiguous(memory_format=torch.channels_last)
        and not torch.compiler.is_compiling()
        and importlib.util.find_spec("triton") is not None
    )


def standardize(images: Tensor) -> Tensor:
    """Each image minus its mean, divided by its standard deviation, which counts as at least 1 / sqrt(its size)."""
    distance = images - exact_mean(images, (1, 2, 3))
    std = exact_mean(distance * distance, (1, 2, 3)).sqrt()
    return distance / std.clamp(min=images[0].numel() ** -0.5)
