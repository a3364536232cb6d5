"""The published recipes are what was published: numbers written down by hand, against what the pages plan."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from functools import cache
from pathlib import Path

import pytest

from conftest import make_plan
from paceline import schedule
from paceline.command.recipes import placements_of, row, run
from paceline.job import make_job, read_placement, read_recipe
from paceline.machine import Machine
from paceline.model import tables
from paceline.planning import Plan
from paceline.reconcile import make_plan as reconcile
from paceline.settings import shipped
from paceline.settings.augment import AutoAugment, Crop, LogarithmicCut, RandAugment, UniformCut
from paceline.settings.build import build
from paceline.settings.configurations import configurations
from paceline.settings.data import Center, Files, Squash
from paceline.settings.duration import Duration
from paceline.settings.model import ResNet
from paceline.settings.optimizer import Lamb, Lars, RmsProp, WeightDecay
from paceline.settings.recipe import BatchNorm, GroupNorm, Recipe
from paceline.settings.schedule import Cosine, Exponential, Polynomial

DOCS = Path(__file__).parents[2] / "docs"
IMAGES = 1_281_167
NO_ACCELERATOR = Machine(cores=8, memory=16 << 30)
OWN = {
    "cifar10/efficientnet-cifar", "cifar10/resnet18", "cifar10/resnet20", "cifar10/resnext29", "cifar10/vgg16-bn",
    "images/resnet18", "images/resnet50-finetune", "images/efficientnet-lite0-finetune",
}  # fmt: skip
"""Recipes of Paceline's own."""

PUBLISHED = """
# recipe                                  batch norm ep. optim. momentum peak, schedule  warm decay smooth area sides
graphcore/resnet8                            32  32  10 sgd     0        0.5      stepped      5 1e-6     0 -    32
# Graphcore TF1, releases 2.2 to 3.0
graphcore/resnet50-momentum-2304           2304  32  44 sgd     0.9      4.588    polynomial   5 2.5e-5 0.1 0.05 224
graphcore/resnet50-momentum-1920           1920  40  40 sgd     0.9      3.824    polynomial   5 2.5e-5 0.1 0.05 224
graphcore/resnet50-momentum-1920-44epochs  1920  40  44 sgd     0.9      3.824    polynomial   5 2.5e-5 0.1 0.05 224
graphcore/resnet50-momentum-2560           2560  40  41 sgd     0.9      5.098    polynomial   5 2.5e-5 0.1 0.05 224
graphcore/resnet50-momentum-2560-45epochs  2560  40  45 sgd     0.9      5.098    polynomial   5 2.5e-5 0.1 0.05 224
graphcore/resnet50-momentum-2048           2048  32  41 sgd     0.9      4.078    polynomial   5 2.5e-5 0.1 0.05 224
graphcore/resnet50-momentum-5120           5120  40  41 sgd     0.9      4.078    polynomial   5 2.5e-5 0.1 0.05 224
graphcore/resnet50-lars-1920               1920  40  38 lars    0.9      7.3      polynomial   2 5e-5   0.1 0.05 224
graphcore/resnet50-lars-2560               2560  40  40 lars    0.9      9        polynomial   2 5e-5   0.1 0.05 224
graphcore/resnet50-lars-3584               3584  28  44 lars    0.9      10.5     polynomial   2 5e-5   0.1 0.05 224
graphcore/resnet50-lars-3200               3200  40  38 lars    0.9      10.72    polynomial   2 5e-5   0.1 0.05 224
graphcore/resnet50-lars-3840               3840  40  38 lars    0.9      12.15    polynomial   2 5e-5   0.1 0.05 224
graphcore/resnet50-lars-5120               5120  40  41 lars    0.9      12.1     polynomial   2 5e-5   0.1 0.05 224
graphcore/resnet50-lars-10240             10240  40  45 lars    0.9      20.2     polynomial   2 5e-5   0.1 0.05 224
graphcore/resnet50-lars-3520               3520  44  38 lars    0.9      10.72    polynomial   2 5e-5   0.1 0.05 224
graphcore/resnet50-lars-4224               4224  44  38 lars    0.9      11.42    polynomial   2 5e-5   0.1 0.05 224
graphcore/resnet50-lars-5120-40epochs      5120  40  40 lars    0.9      14.225   polynomial   2 5e-5   0.1 0.05 224
graphcore/resnet50-group-norm-1024         1024   -  65 sgd     0.9      0.5      cosine       5 1e-4   0.1 0.05 224
graphcore/resnet50-momentum-16384         16384  16 100 sgd     0.9      2.0      cosine       5 1e-4   0.1 0.05 224
graphcore/resnext101                        768   - 120 sgd     0.9      0.375    cosine       5 1e-4   0.1 0.05 224
graphcore/efficientnet-b4                   768   - 350 rmsprop 0.9      0.046875 exponential  5 1e-5   0.1 0.05 380
graphcore/efficientnet-b4-g16-800           800   - 350 rmsprop 0.9      0.04882812 exponential  5 1e-5   0.1 0.05 380
graphcore/efficientnet-b4-g16-640           640   - 350 rmsprop 0.9      0.0390625 exponential  5 1e-5   0.1 0.05 380
graphcore/efficientnet-b4-g16-lars-3040    3040   - 350 lars    0.9      4.198447 polynomial  50 0      0.1 0.05 380
graphcore/efficientnet-b4-g16-lars-6144    6144   - 350 lars    0.885    8.485281 polynomial  70 0      0.1 0.05 380
graphcore/efficientnet-b4-lars-6144        6144  48 350 lars    0.885    6.0      polynomial  70 0      0.1 0.05 380
# Graphcore PyTorch, releases 2.0 to 3.4
graphcore/resnet50-pytorch-1024            1024   -  80 sgd     0.85     0.5      cosine       5 1e-4   0.1 0.08 224
graphcore/resnet50-pytorch-1056            1056   - 100 sgd     0.85     0.5      cosine      16 1e-4   0.1 0.08 224
graphcore/resnet50-pytorch-1024-100epochs  1024   - 100 sgd     0.85     0.5      cosine      16 1e-4   0.1 0.08 224
graphcore/resnet50-pytorch-16384          16384  16 100 sgd     0.9      2.0      cosine       0 1e-4   0.1 0.08 224
graphcore/resnet50-pytorch-16416          16416  18 100 sgd     0.9      2.0      cosine       5 1e-4   0.1 0.08 224
graphcore/resnet50-pytorch-16128          16128  18 100 sgd     0.9      2.0      cosine       5 1e-4   0.1 0.08 224
graphcore/resnet50-bench                   1056   -   2 sgd     0.85     0.01     constant     0 1e-4     0 0.08 224
graphcore/efficientnet-b0-256               256   - 350 rmsprop 0.9      0.1      exponential  5 1e-5   0.1 0.08 224
graphcore/efficientnet-b0-2048             2048   - 350 rmsprop 0.9      0.1      exponential  5 1e-5   0.1 0.08 224
graphcore/efficientnet-b0-g16-768           768   - 350 rmsprop 0.9      0.0483   exponential  5 1e-5   0.1 0.08 224
graphcore/efficientnet-b0-g16-800           800   - 350 rmsprop 0.9      0.05     exponential  5 1e-5   0.1 0.08 224
graphcore/efficientnet-b4-g16-pytorch-768   768   - 350 rmsprop 0.9      0.0483   exponential  5 1e-5   0.1 0.08 380
graphcore/efficientnet-b4-g16-pytorch-2048 2048   - 350 rmsprop 0.9      0.1      exponential  5 1e-5   0.1 0.08 380
graphcore/efficientnet-b4-pytorch           768   - 350 rmsprop 0.9      0.0483   exponential  5 1e-5   0.1 0.08 380
graphcore/efficientnet-b4-g16-bench        1024   -   2 rmsprop 0        0.01     constant     0 1e-4     0 0.08 380
graphcore/mobilenet-v3-small               1024  32 360 sgd     0.9      0.52     cosine       5 3e-5   0.1 0.08 224
graphcore/mobilenet-v3-large               1024  32 360 sgd     0.9      0.52     cosine       5 3e-5   0.1 0.08 224
# nvcnn
nvcnn/resnet50                             2048 256  90 larc    0.9      2.0      polynomial   0 1e-4     0 0.1  224
nvcnn/resnet101                              64  64 100 larc    0.9      0.0625   polynomial   0 1e-4     0 0.1  224
nvcnn/resnet152                              64  64 100 larc    0.9      0.0625   polynomial   0 1e-4     0 0.1  224
nvcnn/resnext50                              64  64 100 larc    0.9      0.1      polynomial   0 1e-4     0 0.1  224
nvcnn/resnext101                             64  64 100 larc    0.9      0.1      polynomial   0 1e-4     0 0.1  224
nvcnn/resnext152                             64  64 100 larc    0.9      0.1      polynomial   0 1e-4     0 0.1  224
nvcnn/alexnet                                64   - 100 larc    0.9      0.03     polynomial   0 1e-4     0 0.1  227
nvcnn/vgg11                                  64   - 100 larc    0.9      0.02     polynomial   0 1e-4     0 0.1  224
nvcnn/vgg13                                  64   - 100 larc    0.9      0.02     polynomial   0 1e-4     0 0.1  224
nvcnn/vgg16                                  64   - 100 larc    0.9      0.02     polynomial   0 1e-4     0 0.1  224
nvcnn/vgg19                                  64   - 100 larc    0.9      0.02     polynomial   0 1e-4     0 0.1  224
nvcnn/googlenet                              64   - 100 larc    0.9      0.04     polynomial   0 1e-4     0 0.1  224
nvcnn/inception-v3                           64  64 100 larc    0.9      0.2      polynomial   0 1e-4     0 0.1  299
nvcnn/inception-v4                           64  64 100 larc    0.9      0.045    polynomial   0 1e-4     0 0.1  299
nvcnn/inception-resnet-v2                    64  64 100 larc    0.9      0.045    polynomial   0 1e-4     0 0.1  299
# Habana and NVIDIA
habana/resnet50                             256 256  90 sgd     0.875    0.256    cosine       0 2^-15  0.1 0.08 224
habana/resnet50-128                         128 128  90 sgd     0.875    0.128    cosine       0 2^-15  0.1 0.08 224
habana/resnet50-2048                       2048 256  90 sgd     0.875    2.048    cosine       5 2^-15  0.1 0.08 224
habana/resnet50-1024                       1024 128  90 sgd     0.875    1.024    cosine       5 2^-15  0.1 0.08 224
habana/resnet50-250epochs                   256 256 250 sgd     0.875    0.256    cosine       0 2^-15  0.1 0.08 224
nvidia/resnet50                            2048 256  90 sgd     0.875    2.048    cosine       8 2^-15  0.1 0.08 224
nvidia/resnet50-250epochs                  2048 256 250 sgd     0.875    2.048    cosine       8 2^-15  0.1 0.08 224
nvidia/resnet50-896                         896 112  90 sgd     0.875    0.896    cosine       8 2^-14  0.1 0.08 224
nvidia/resnet50-4096                       4096 256  50 sgd     0.875    4.096    cosine      16 2^-15  0.1 0.08 224
nvidia/resnext101                          1024 128  90 sgd     0.875    1.024    cosine       8 2^-14  0.1 0.08 224
nvidia/resnext101-250epochs                1024 128 250 sgd     0.875    1.024    cosine       8 2^-14  0.1 0.08 224
nvidia/efficientnet-b0                     4096 256 400 rmsprop 0.9      0.08     cosine      16 1e-5   0.1 0.08 224
nvidia/efficientnet-b4                     4096 128 400 rmsprop 0.9      0.16     cosine      16 5e-6   0.1 0.08 380
# the MLPerf reference convergence points; LARS decays by itself, NVIDIA's the bias of the dense layer beside it
mlperf/resnet50-1632                       1632 204  37 lars    0.9      7.4      polynomial   2 5e-5   0.1 0.05 224
mlperf/resnet50-3264                       3264 204  37 lars    0.9      10.5     polynomial   2 5e-5   0.1 0.05 224
mlperf/resnet50-4096                       4096  64  42 lars    0.9      10       polynomial   5 0      0.1 0.05 224
mlperf/resnet50-8192                       8192  64  44 lars    0.9      17       polynomial   5 0      0.1 0.05 224
mlperf/resnet50-13056                     13056 204  48 lars    0.9      12.8     polynomial   9 2.5e-5 0.1 0.05 224
mlperf/resnet50-32768                     32768 128  58 lars    0.94     21.2     polynomial  16 0      0.1 0.05 224
mlperf/resnet50-49152                     49152 256  71 lars    0.951807 19.405   polynomial  24 1e-4   0.1 0.05 224
mlperf/resnet50-58880                     58880 230  82 lars    0.951807 23.246   polynomial  29 1e-4   0.1 0.05 224
mlperf/resnet50-65536                     65536 128  89 lars    0.951807 24.699   polynomial  31 0      0.1 0.05 224
mlperf/resnet50-67840                     67840 424  91 lars    0.951807 24.699   polynomial  31 1e-4   0.1 0.05 224
# FFCV and timm
ffcv/resnet50-16                           4096 512  16 sgd     0.9      1.7      polynomial   2 1e-4   0.1 0.08 192/256
ffcv/resnet50-24                           4096 512  24 sgd     0.9      1.7      polynomial   2 1e-4   0.1 0.08 192/256
ffcv/resnet50-32                           4096 512  32 sgd     0.9      1.7      polynomial   2 1e-4   0.1 0.08 192/256
ffcv/resnet50-40                           4096 512  40 sgd     0.9      1.7      polynomial   2 1e-4   0.1 0.08 192/256
ffcv/resnet50-56                           4096 512  56 sgd     0.9      1.7      polynomial   2 1e-4   0.1 0.08 192/256
ffcv/resnet50-88                           4096 512  88 sgd     0.9      1.7      polynomial   2 1e-4   0.1 0.08 192/256
timm/resnet50-a3                           2048 512 100 lamb    -        0.008    cosine       5 0.02     0 0.08 160/224
"""

PLACED = """
# placement                              recipe                     micro-batch x accumulation x replicas, loss scale
graphcore/mk2-resnet8-test                          graphcore/resnet8                       32   1   1  128
graphcore/mk2-resnet50-mlperf-pod16                 graphcore/resnet50-momentum-2304        16   9  16  128
graphcore/mk2-resnet50-mlperf-pod16-bs20            graphcore/resnet50-momentum-1920        20   6  16  128
graphcore/mk2-resnet50-mlperf-pod16-bs20            graphcore/resnet50-momentum-1920-44epochs  20   6  16  128
graphcore/mk2-resnet50-mlperf-pod4-bs20             graphcore/resnet50-momentum-1920-44epochs  20  24   4  128
graphcore/mk2-resnet50-mlperf-pod64-bs20            graphcore/resnet50-momentum-2560        20   2  64  128
graphcore/mk2-resnet50-mlperf-pod64-bs20            graphcore/resnet50-momentum-2560-45epochs  20   2  64  128
graphcore/mk2-resnet50-mlperf-pod128-bs16           graphcore/resnet50-momentum-2048        16   1 128  128
graphcore/mk2-resnet50-mlperf-pod128-bs20           graphcore/resnet50-momentum-5120        20   2 128  128
graphcore/mk2-resnet50-mlperf-pod16-lars            graphcore/resnet50-lars-1920            20   6  16  128
graphcore/mk2-resnet50-mlperf-pod64-lars            graphcore/resnet50-lars-2560            20   2  64  128
graphcore/mk2-resnet50-mlperf-pod128-lars-bs14      graphcore/resnet50-lars-3584            14   2 128  128
graphcore/mk2-resnet50-mlperf-pod16-lars            graphcore/resnet50-lars-3200            20  10  16  128
graphcore/mk2-resnet50-mlperf-pod64-lars            graphcore/resnet50-lars-3840            20   3  64  128
graphcore/mk2-resnet50-mlperf-pod128-lars           graphcore/resnet50-lars-5120            20   2 128  128
graphcore/mk2-resnet50-mlperf-pod256-lars           graphcore/resnet50-lars-10240           20   2 256  128
graphcore/resnet50-mlperf-pod16-lars-bs22           graphcore/resnet50-lars-3520            22  10  16  128
graphcore/resnet50-mlperf-pod32-lars-bs22           graphcore/resnet50-lars-4224            22   6  32  128
graphcore/mk2-resnet50-mlperf-pod64-lars            graphcore/resnet50-lars-5120-40epochs   20   4  64  128
graphcore/mk2-resnet50-gn-16ipus                    graphcore/resnet50-group-norm-1024       8   8  16  128
graphcore/mk2-resnet50-gn-64ipus                    graphcore/resnet50-group-norm-1024       8   2  64  128
graphcore/mk1-resnet50-16ipus                       graphcore/resnet50-group-norm-1024       4  64   4  128
graphcore/mk2-resnet50-bn-16ipus                    graphcore/resnet50-momentum-16384       16 256   4  128
graphcore/mk2-resnet50-bn-32ipus                    graphcore/resnet50-momentum-16384       16 128   8  128
graphcore/mk2-resnet50-bn-64ipus                    graphcore/resnet50-momentum-16384       16  64  16  128
graphcore/mk2-resnet50-bn-128ipus                   graphcore/resnet50-momentum-16384       16  32  32  128
graphcore/mk2-resnext101-16ipus                     graphcore/resnext101                     6  16   8  128
graphcore/mk2-efficientnet-b4-g1-16ipus             graphcore/efficientnet-b4                3  64   4  128
graphcore/mk2-efficientnet-b4-g1-32ipus             graphcore/efficientnet-b4                3  32   8  128
graphcore/mk2-efficientnet-b4-g1-64ipus             graphcore/efficientnet-b4                3  16  16  128
graphcore/mk2-efficientnet-b4-g16-16ipus            graphcore/efficientnet-b4-g16-800        5  40   4  128
graphcore/mk2-efficientnet-b4-g16-64ipus            graphcore/efficientnet-b4-g16-640        5   8  16  128
graphcore/mk2-efficientnet-b4-g16-64ipus            graphcore/efficientnet-b4-g16-lars-3040   5  38  16  128
graphcore/efficientnet-b4-g16-16ipus                graphcore/efficientnet-b4-g16-lars-6144   3 256   8  128
graphcore/efficientnet-b4-g16-32ipus                graphcore/efficientnet-b4-g16-lars-6144   3 128  16  128
graphcore/efficientnet-b4-g16-64ipus                graphcore/efficientnet-b4-g16-lars-6144   3  64  32  128
graphcore/efficientnet-b4-g16-128ipus               graphcore/efficientnet-b4-g16-lars-6144   3  32  64  128
graphcore/efficientnet-b4-g16-256ipus               graphcore/efficientnet-b4-g16-lars-6144   3  16 128  128
graphcore/efficientnet-b4-g1-with-batch-norm-16ipus graphcore/efficientnet-b4-lars-6144      6  64  16  128
graphcore/efficientnet-b4-g1-with-batch-norm-64ipus graphcore/efficientnet-b4-lars-6144      6  16  64  128
graphcore/resnet50-16ipu-mk1                        graphcore/resnet50-pytorch-1024          4  64   4  128
graphcore/resnet50-16ipu-mk2                        graphcore/resnet50-pytorch-1056          6  11  16  64..512
graphcore/resnet50-16ipu-mk2-recompute              graphcore/resnet50-pytorch-1024-100epochs   8   8  16  64..512
graphcore/resnet50-mk2-pipelined                    graphcore/resnet50-pytorch-16384        16 256   4  128
graphcore/resnet50                                  graphcore/resnet50-pytorch-16416        18  57  16  128
graphcore/resnet50-pod4                             graphcore/resnet50-pytorch-16416        18 228   4  128
graphcore/resnet50-pod64                            graphcore/resnet50-pytorch-16128        18  14  64  128
graphcore/resnet50-4ipu-mk2                         graphcore/resnet50-bench                 6  44   4  1
graphcore/resnet50-16ipu-mk2-bench                  graphcore/resnet50-bench                 6  11  16  1
graphcore/efficientnet-b0-16ipu-mk1                 graphcore/efficientnet-b0-256            2 128   1  128
graphcore/efficientnet-b0-16ipu-mk2                 graphcore/efficientnet-b0-2048          16 128   1  128
graphcore/efficientnet-b0-g16-gn                    graphcore/efficientnet-b0-g16-768       12   8   8  128
graphcore/efficientnet-b0-g16-gn-pod16              graphcore/efficientnet-b0-g16-800       20   5   8  128
graphcore/efficientnet-b4-g16-gn                    graphcore/efficientnet-b4-g16-pytorch-768   6  32   4  128
graphcore/efficientnet-b4-g16-gn-pod16              graphcore/efficientnet-b4-g16-pytorch-2048   4  64   8  128
graphcore/efficientnet-b4-g16-gn-pod64              graphcore/efficientnet-b4-g16-pytorch-2048   4  16  32  128
graphcore/efficientnet-b4-g1-gn-pod16               graphcore/efficientnet-b4-pytorch        4  48   4  128
graphcore/efficientnet-b4-g16-4ipu-mk2              graphcore/efficientnet-b4-g16-bench      4 256   1  1
graphcore/efficientnet-b4-g16-16ipu-mk2             graphcore/efficientnet-b4-g16-bench      4  64   4  1
graphcore/mobilenet-v3-small                        graphcore/mobilenet-v3-small            32  32   1  128
graphcore/mobilenet-v3-small-pod4                   graphcore/mobilenet-v3-small            32   8   4  128
graphcore/mobilenet-v3-large                        graphcore/mobilenet-v3-large            32  32   1  128
graphcore/mobilenet-v3-large-pod16                  graphcore/mobilenet-v3-large            32   8   4  128
nvcnn/8gpu                                          nvcnn/resnet50                         256   1   8  128
nvcnn/1gpu                                          nvcnn/resnet101                         64   1   1  -
nvcnn/1gpu                                          nvcnn/resnet152                         64   1   1  -
nvcnn/1gpu                                          nvcnn/resnext50                         64   1   1  -
nvcnn/1gpu                                          nvcnn/resnext101                        64   1   1  -
nvcnn/1gpu                                          nvcnn/resnext152                        64   1   1  -
nvcnn/1gpu                                          nvcnn/alexnet                           64   1   1  -
nvcnn/1gpu                                          nvcnn/vgg11                             64   1   1  -
nvcnn/1gpu                                          nvcnn/vgg13                             64   1   1  -
nvcnn/1gpu                                          nvcnn/vgg16                             64   1   1  -
nvcnn/1gpu                                          nvcnn/vgg19                             64   1   1  -
nvcnn/1gpu                                          nvcnn/googlenet                         64   1   1  -
nvcnn/1gpu                                          nvcnn/inception-v3                      64   1   1  -
nvcnn/1gpu                                          nvcnn/inception-v4                      64   1   1  -
nvcnn/1gpu                                          nvcnn/inception-resnet-v2               64   1   1  -
habana/1card-bf16                                   habana/resnet50                        256   1   1  -
habana/1card-bf16                                   habana/resnet50-250epochs              256   1   1  -
habana/1card-fp32                                   habana/resnet50-128                    128   1   1  -
habana/8cards-bf16                                  habana/resnet50-2048                   256   1   8  -
habana/8cards-fp32                                  habana/resnet50-1024                   128   1   8  -
nvidia/dgx-a100-amp                                 nvidia/resnet50                        256   1   8  128
nvidia/dgx-a100-tf32                                nvidia/resnet50-250epochs              256   1   8  -
nvidia/dgx1-fp32                                    nvidia/resnet50-896                    112   1   8  -
nvidia/dgx2-amp                                     nvidia/resnet50-4096                   256   1  16  128
nvidia/dgx-a100-amp-128                             nvidia/resnext101                      128   1   8  128
nvidia/dgx-a100-tf32-128                            nvidia/resnext101-250epochs            128   1   8  -
nvidia/dgx-a100-amp                                 nvidia/efficientnet-b0                 256   2   8  128
nvidia/dgx-a100-amp-128                             nvidia/efficientnet-b4                 128   4   8  128
ffcv/8gpu                                           ffcv/resnet50-16                       512   1   8  dynamic
timm/a3-4gpu                                        timm/resnet50-a3                       512   1   4  dynamic
"""

FIRST_JUDGED = {
    "graphcore/resnet50-momentum-2560": 1, "graphcore/resnet50-momentum-2560-45epochs": 1,
    "graphcore/resnet50-lars-3200": 2, "graphcore/resnet50-lars-3840": 2, "graphcore/resnet50-lars-5120": 3,
    "graphcore/resnet50-lars-10240": 3,
}  # fmt: skip
"""The epoch from which every fourth was judged, where it was not the fourth."""


def rows(table: str) -> list[list[str]]:
    return [line.split() for line in table.strip().splitlines() if not line.startswith("#")]


@cache
def plan_of(name: str, page: str | None = None) -> Plan:
    """The plan of a shipped recipe on a shipped placement, on a machine without accelerators."""
    recipe, _ = read_recipe(name, [])
    placement, _ = read_placement(page, [])
    assert recipe.data is not None
    network = tables.network_facts(recipe.model, recipe.data.facts)
    return reconcile(recipe, placement, NO_ACCELERATOR, network)


def named(part: str) -> list[str]:
    """The published recipes with this in their name."""
    return [cells[0] for cells in rows(PUBLISHED) if part in cells[0]]


def test_every_shipped_recipe_and_placement_is_in_the_tables() -> None:
    assert {cells[0] for cells in rows(PUBLISHED)} == set(shipped.names("recipes")) - OWN - {"shapes/resnet8"}
    assert {cells[0] for cells in rows(PLACED)} == set(shipped.names("placements")) - {
        "float64", "reproducible", "graphcore/inference",
    }  # fmt: skip


@pytest.mark.parametrize("cells", rows(PUBLISHED), ids=lambda cells: cells[0])
def test_a_recipe_has_the_published_numbers(cells: list[str]) -> None:
    name, batch, norm, epochs, optimizer, momentum, peak, fall, warm, decay, smooth, area, sides = cells
    plan = plan_of(name)
    recipe = plan.recipe
    assert recipe.global_batch == int(batch)
    assert plan.norm_batch == (None if norm == "-" else int(norm))
    assert recipe.epochs == float(epochs)
    assert recipe.optimizer.name == optimizer
    assert getattr(recipe.optimizer, "momentum", None) == (None if momentum == "-" else float(momentum))
    assert plan.peak_lr == pytest.approx(float(peak), rel=1e-6)
    assert recipe.schedule.name == fall
    assert plan.images_in(recipe.schedule.warmup) == int(warm) * plan.epoch_images
    assert recipe.weight_decay.rate == (2.0 ** int(decay[2:]) if decay.startswith("2^") else float(decay))
    assert recipe.loss.label_smoothing == float(smooth)
    side, _, judged = sides.partition("/")
    assert plan.facts.side == int(side)
    assert (plan.facts.evaluation_side or plan.facts.side) == int(judged or side)
    if area == "-":
        assert recipe.augment.crop == Crop()
    else:
        assert recipe.augment.crop.area == (float(area), 1)
        assert (plan.facts.images, plan.facts.validation_images, plan.facts.classes) == (IMAGES, 50_000, 1000)
        whole = Fraction(epochs) * IMAGES // int(batch)
        assert plan.steps == (int(epochs) * (IMAGES // int(batch)) if recipe.drop_last else whole)


@pytest.mark.parametrize("cells", rows(PLACED), ids=lambda cells: f"{cells[0]}-{cells[1]}")
def test_a_recipe_on_its_placement_has_the_published_product(cells: list[str]) -> None:
    page, name, micro_batch, accumulation, replicas, loss_scale = cells
    plan = plan_of(name, page)
    assert (plan.micro_batch, plan.rounds, plan.replicas) == (int(micro_batch), int(accumulation), int(replicas))
    assert plan.micro_batch * plan.rounds * plan.replicas == plan.global_batch
    if loss_scale == "64..512":
        scales = [schedule.loss_scale(plan, math.ceil(share * plan.steps)) for share in (0, 0.26, 0.51, 0.76)]
        if plan.recipe.epochs == 100:  # a short one never comes to the later ones
            assert scales == [8, 16, 32, 64]
    elif loss_scale == "dynamic":
        assert plan.placement.loss_scale == "dynamic"
    else:  # of a mean over the micro-batch, so S / micro-batch of a sum, as a power of two
        scale = int(loss_scale) / plan.micro_batch if loss_scale != "-" else 1
        assert schedule.loss_scale(plan, 0) == pytest.approx(scale, rel=math.sqrt(2) - 1)
        assert (plan.placement.precision == "fp16") == (loss_scale != "-")


@pytest.mark.parametrize("name", [name for name in shipped.names("recipes") if name not in OWN])
def test_a_recipe_says_where_it_comes_from(name: str) -> None:
    recipe, _ = read_recipe(name, [])
    if name != "shapes/resnet8":
        assert recipe.source
    assert recipe.source or not recipe.published


@pytest.mark.parametrize("name", shipped.names("recipes"))
def test_the_list_of_recipes_shows_what_their_pages_say(name: str) -> None:
    recipe = build(Recipe, shipped.tree("recipes", name))
    shown = row(name)
    assert shown == {
        "name": name,
        "model": recipe.model.name,
        "data": recipe.data.name if recipe.data else "any",
        "global_batch": recipe.global_batch,
        "epochs": recipe.epochs,
        "published": recipe.published,
        "source": recipe.source,
        "placements": placements_of(name),
    }


def test_the_list_of_recipes_has_each_name_whole_and_batches_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    run(None, everything=True, as_json=False)
    lines = capsys.readouterr().out.partition("\n\n")[0].splitlines()[1:]
    listed = [line.split()[0] for line in lines if not line.startswith(" ")]  # more placements have lines of their own
    assert sorted(listed) == shipped.names("recipes")
    assert listed.index("graphcore/resnet50-lars-3200") < listed.index("graphcore/resnet50-lars-10240")
    run(None, everything=True, as_json=True)
    assert [each["name"] for each in json.loads(capsys.readouterr().out)] == listed


def test_a_newcomer_sees_the_recipes_of_paceline_and_how_to_list_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    run(None, everything=False, as_json=True)
    assert {each["name"] for each in json.loads(capsys.readouterr().out)} == OWN | {"shapes/resnet8"}
    run(None, everything=False, as_json=False)
    assert "paceline recipes --all, or: paceline recipes nvidia" in capsys.readouterr().out
    run("nvidia", everything=False, as_json=True)
    assert all(each["name"].startswith("nvidia/") for each in json.loads(capsys.readouterr().out))


@pytest.mark.parametrize("cells", rows(PUBLISHED), ids=lambda cells: cells[0])
def test_the_documents_list_every_published_recipe(cells: list[str]) -> None:
    shown = row(cells[0])
    line = f"| `{shown['name']}` | {shown['global_batch']:,} | {shown['epochs']} | {shown['published']} |"
    text = (DOCS / "recipes.md").read_text()
    assert line in text
    for page, name, *_ in rows(PLACED):
        if name == shown["name"]:
            assert f"`{page}`" in text[text.index(line) :].partition("\n")[0]


@pytest.mark.parametrize("name", sorted({cells[0] for cells in rows(PLACED)}))
def test_the_documents_list_every_published_placement(name: str) -> None:
    placement, _ = read_placement(name, [])
    weights = "" if placement.weights == "auto" else f", weights {placement.weights}"
    stages = f", {placement.stages} stages" if placement.stages > 1 else ""
    layout = f"{placement.replicas} x {placement.micro_batch}{stages} | {placement.precision}{weights}"
    line = f"| `{name}` | {layout} | {placement.about} |"
    assert line in (DOCS / "placements.md").read_text()


@pytest.mark.parametrize(
    ("name", "own"),
    [
        (name, 1e-4)
        for name in ("graphcore/resnet50-lars-1920", "graphcore/resnet50-lars-2560", "graphcore/resnet50-lars-3584")
    ]
    + [(name, 5e-5) for name in named("resnet50-lars-") if name.split("-")[2] not in ("1920", "2560", "3584")]
    + [("graphcore/efficientnet-b4-g16-lars-3040", 1e-5)]
    + [(name, 2.5e-6) for name in ("graphcore/efficientnet-b4-g16-lars-6144", "graphcore/efficientnet-b4-lars-6144")],
)
def test_graphcore_lars_decays_inside_its_ratio_too(name: str, own: float) -> None:
    lars = plan_of(name).recipe.optimizer
    assert isinstance(lars, Lars)
    assert (lars.trust_coefficient, lars.decay, lars.epsilon, lars.momentum_correction) == (0.001, own, 0, False)
    assert lars.skip_names == ("norm", "bias")


@pytest.mark.parametrize("name", named("resnet50-momentum-")[:7] + named("resnet50-lars-") + named("mlperf/"))
def test_recipes_for_mlperf_end_at_its_rate_and_are_judged_when_they_were(name: str) -> None:
    """Graphcore gave the first epoch to be judged; MLPerf's own points are judged up to their last."""
    plan = plan_of(name)
    fall = plan.recipe.schedule
    assert isinstance(fall, Polynomial)
    assert (fall.power, fall.end) == (2, 1e-4)
    assert plan.recipe.norm == BatchNorm(name="batch", momentum=0.1, epsilon=1e-5)
    evaluate = plan.recipe.evaluate
    often = 1 if name in ("graphcore/resnet50-momentum-2048", "graphcore/resnet50-momentum-5120") else 4
    assert isinstance(evaluate.every, Duration)
    assert plan.images_in(evaluate.every) == often * IMAGES
    first = plan.epochs % 4 if "mlperf" in name else FIRST_JUDGED.get(name, 0)
    assert plan.images_in(evaluate.offset) == first * IMAGES


@pytest.mark.parametrize(
    ("batch", "decay", "steps"),
    [
        (1632, 5e-5, 27476), (3264, 5e-5, 14523), (4096, 2e-4, 13137), (8192, 2e-4, 6095), (13056, 2.5e-5, 4710),
        (32768, 2.5e-5, 2267), (49152, 1e-4, 1846), (58880, 1e-4, 1785), (65536, 1e-4, 1133), (67840, 1e-4, 1133),
    ],
)  # fmt: skip
def test_mlperf_recipes_keep_the_rules(batch: int, decay: float, steps: int) -> None:
    plan = plan_of(f"mlperf/resnet50-{batch}")
    lars, fall = plan.recipe.optimizer, plan.recipe.schedule
    assert isinstance(lars, Lars)
    assert isinstance(fall, Polynomial)
    assert (lars.decay, lars.trust_coefficient, lars.epsilon) == (decay, 0.001, 0)
    assert math.log2(lars.decay / 1e-4) == pytest.approx(round(math.log2(lars.decay / 1e-4)), abs=1e-12)
    # Published decay steps are those of the whole run, or of its fall: whichever ends soon after it converged.
    assert min(abs(plan.steps - steps), abs(plan.steps - plan.warm_steps - steps)) <= 0.003 * steps
    reference = batch in (4096, 8192, 32768, 65536)
    only_the_dense_bias = WeightDecay(rate=decay, skip_names=("norm",), skip_dimensions=(2, 4))
    assert plan.recipe.weight_decay == (WeightDecay() if reference else only_the_dense_bias)
    assert (fall.first, fall.extra_steps, lars.momentum_correction) == ((0, 1, False) if reference else (1, 0, True))
    assert isinstance(plan.data, Files)
    assert plan.data.normalize == ("mean" if reference else "mean-std")


@pytest.mark.parametrize("name", named("resnet50-lars-") + named("resnet50-momentum-") + named("b4-g16-lars"))
def test_graphcore_tensorflow_crops_and_smooths_like_tensorflow(name: str) -> None:
    plan = plan_of(name)
    crop = plan.recipe.augment.crop
    assert (crop.aspect, crop.distribution, crop.tries, crop.otherwise) == ((0.75, 1.33), "uniform", 100, "whole")
    assert crop.object_fraction == 0.1
    assert plan.recipe.loss.smooth_over == "others"
    assert isinstance(plan.data, Files)
    side = plan.facts.side
    assert plan.data.evaluation == Center(name="center", short=side * 256 // 224)


@pytest.mark.parametrize(
    ("name", "decay"),
    [
        ("graphcore/efficientnet-b4", 0.953125),
        ("graphcore/efficientnet-b4-g16-800", 0.951171875),
        ("graphcore/efficientnet-b4-g16-640", 0.9609375),
    ],
)
def test_graphcore_efficientnets_are_mixed_averaged_and_forget_by_their_batch(name: str, decay: float) -> None:
    plan = plan_of(name)
    recipe = plan.recipe
    assert isinstance(recipe.optimizer, RmsProp)
    assert (recipe.optimizer.decay, recipe.optimizer.form, recipe.optimizer.epsilon) == (decay, "tensorflow", 1e-3)
    assert decay == 1 - plan.global_batch * 2.0**-14
    assert isinstance(recipe.schedule, Exponential)
    assert recipe.schedule.factor == 0.97
    assert 146 * plan.images_in(recipe.schedule.every) == 350 * IMAGES
    assert recipe.norm == GroupNorm(name="group", groups=4, epsilon=1e-3)
    assert recipe.mix.mixup == 0.2
    assert recipe.mix.cutmix == LogarithmicCut(name="logarithmic", kept=0.85)
    assert recipe.ema.decay == 0.97
    assert plan.images_in(recipe.ema.every) == IMAGES


@pytest.mark.parametrize("name", [*named("b4-g16-pytorch"), "graphcore/efficientnet-b4-pytorch"])
def test_graphcore_pytorch_efficientnets_are_mixed_and_fall_as_published(name: str) -> None:
    plan = plan_of(name)
    recipe = plan.recipe
    assert recipe.mix.mixup == 0.2
    assert recipe.mix.cutmix == UniformCut(name="uniform", low=0.65, high=1.0)
    assert recipe.mix.cutmix_probability == 1 - 0.35
    assert isinstance(recipe.schedule, Exponential)
    assert float(plan.images_in(recipe.schedule.every)) == pytest.approx(IMAGES / 0.424)


def test_the_first_graphcore_pytorch_efficientnets_fall_by_two_percent_an_epoch() -> None:
    plan = plan_of("graphcore/efficientnet-b0-2048")
    for epoch in (50, 100, 200):
        step = epoch * IMAGES // 2048
        held = math.floor(step * 2048 / IMAGES * 0.416) / 0.416
        assert schedule.lr(plan, step) == pytest.approx(0.1 * 0.98**held, rel=1e-4)


@pytest.mark.parametrize("name", named("nvcnn/"))
def test_nvcnn_crops_squashes_and_falls_as_published(name: str) -> None:
    plan = plan_of(name)
    assert isinstance(plan.data, Files)
    assert plan.data.evaluation == Squash(name="squash", fraction=0.875)
    assert plan.data.normalize == "unit"
    assert plan.recipe.augment.crop.aspect == (0.8, 1.25)
    assert not plan.recipe.weight_decay.skip_names
    assert not plan.recipe.weight_decay.skip_dimensions
    third = plan.steps // 3
    assert schedule.lr(plan, third) == pytest.approx(plan.peak_lr * (1 - third / plan.steps) ** 2)


@pytest.mark.parametrize(
    ("name", "warm"), [(name, 16 if "efficientnet" in name or "4096" in name else 8) for name in named("nvidia/")]
)
def test_nvidia_changes_the_rate_once_an_epoch(name: str, warm: int) -> None:
    plan = plan_of(name)
    epochs, steps = int(plan.epochs), IMAGES // plan.global_batch
    for epoch in (0, 1, warm - 1, warm, warm + 1, epochs // 2, epochs - 1):
        climbing = plan.peak_lr * (epoch + 1) / warm
        falling = plan.peak_lr * (1 + math.cos(math.pi * (epoch - warm) / (epochs - warm))) / 2
        expected = climbing if epoch < warm else falling
        for step in (epoch * steps, epoch * steps + steps - 1):
            assert schedule.lr(plan, step) == pytest.approx(expected, rel=1e-12)


def test_graphcore_pytorch_changes_the_rate_sixteen_times_an_epoch() -> None:
    plan = plan_of("graphcore/resnet50-pytorch-1024")
    for step in (0, 10, 5 * IMAGES // 1024 - 1, 20_000, 70_000):
        held = math.floor(step * 1024 / IMAGES * 16) / 16
        expected = 0.5 * (1 + math.cos(math.pi * held / 80)) / 2 * min(1, held / 5)
        assert schedule.lr(plan, step) == pytest.approx(expected, rel=1e-12)


def test_a_cosine_may_call_its_first_step_one() -> None:
    words = ("data.images=160", "epochs=10", "optimizer.lr=1")
    rates = [
        [schedule.lr(plan, step) for step in range(100)]
        for plan in (make_plan(*words, f"schedule={{name: cosine, warmup: 2 epochs, first: {n}}}") for n in (0, 1))
    ]
    cosine = [(1 + math.cos(math.pi * step / 100)) / 2 for step in range(100)]
    for n, found in enumerate(rates):
        assert found == pytest.approx([min(1, (step + n) / 20) * value for step, value in enumerate(cosine)], rel=1e-12)


@pytest.mark.parametrize("epochs", [16, 24, 32, 40, 56, 88])
def test_ffcv_climbs_to_epoch_two_and_grows_its_images_as_published(epochs: int) -> None:
    plan = plan_of(f"ffcv/resnet50-{epochs}")
    steps = IMAGES // 4096
    for epoch in (1, 2, epochs // 2, epochs - 1):
        expected = 1.7 * ((1 + 1e-4) / 2 if epoch < 2 else (epochs - epoch) / (epochs - 2))
        assert schedule.lr(plan, epoch * steps) == pytest.approx(expected)
    ramps = {16: (11, 13), 24: (17, 20), 32: (23, 27), 40: (29, 34), 56: (41, 48), 88: (65, 76)}
    start, end = ramps[epochs]
    for epoch in range(epochs):
        share = min(1, max(0, (epoch - start) / (end - start)))
        assert schedule.side(plan, epoch * steps) == round((160 + 32 * share) / 32) * 32


def test_statistics_that_moved_with_every_micro_batch_move_as_far_in_one_step() -> None:
    """Running statistics of torch take a share of each of a replica's micro-batches; here once a step."""
    pages = {"nvidia/": 0.01, "resnet50-pytorch-16": 0.1, "mobilenet-v3": 0.1}
    done: set[str] = set()
    for page, name, _, accumulation, *_ in rows(PLACED):
        share = next((share for part, share in pages.items() if part in name), None)
        norm = plan_of(name).recipe.norm
        if share is None or name in done or int(accumulation) == 1 or not isinstance(norm, BatchNorm):
            continue
        done.add(name)  # the first placement of several is the configuration that gave the page its numbers
        assert norm.momentum == pytest.approx(1 - (1 - share) ** int(accumulation), rel=1e-3), page
    assert len(done) == 7


@pytest.mark.parametrize(
    ("name", "word", "value"),
    [
        ("nvcnn/resnet50", "version", "v1"), ("nvcnn/resnet101", "version", "v1"), ("nvcnn/resnet152", "version", "v1"),
        ("nvcnn/resnext50", "version", "v1"), ("nvcnn/resnext101", "version", "v1"),
        ("nvcnn/resnext152", "version", "v1"), ("nvcnn/alexnet", "dropout", 0.5), ("nvcnn/vgg16", "dropout", 0),
        ("nvcnn/googlenet", "dropout", 0), ("nvcnn/inception-v3", "dropout", 0), ("nvcnn/inception-v4", "dropout", 0.2),
        ("nvcnn/inception-resnet-v2", "dropout", 0.2),
    ],
)  # fmt: skip
def test_nvcnn_networks_stride_and_drop_as_published(name: str, word: str, value: object) -> None:
    assert getattr(plan_of(name).recipe.model, word) == value


@pytest.mark.parametrize("cells", [cells for cells in rows(PLACED) if "b4" in cells[1]])
def test_four_images_are_mixed_where_the_micro_batch_has_as_many(cells: list[str]) -> None:
    mix, micro_batch = plan_of(cells[1]).recipe.mix, int(cells[2])
    if mix.cutmix:  # partners there are neighbors in the whole micro-batch
        assert mix.block == micro_batch


def test_of_graphcore_s_tensorflow_efficientnets_the_one_with_batch_norm_divides_by_the_deviation() -> None:
    pages = [name for name in named("efficientnet-b4") if "pytorch" not in name and "nvidia" not in name]
    ways = {name: data.normalize for name in pages if isinstance(data := plan_of(name).data, Files)}
    whole = {"graphcore/efficientnet-b4-lars-6144": "mean-std", "graphcore/efficientnet-b4-g16-bench": "mean-std"}
    assert ways == {name: whole.get(name, "mean") for name in pages}


def test_graphcore_pytorch_mixed_its_smallest_efficientnet_from_a_later_release_on() -> None:
    first, later = (plan_of(f"graphcore/efficientnet-b0-g16-{batch}").recipe for batch in (768, 800))
    assert (first.mix.active, later.mix.active) == (False, True)
    assert first.norm == GroupNorm(name="group", groups=4, epsilon=1e-5)
    assert later.norm == GroupNorm(name="group", groups=4, epsilon=1e-3)


@pytest.mark.parametrize(
    ("page", "weights", "by_chance", "cuts"),
    [
        ("graphcore/resnet50-4ipu-mk2", "fp16", True, []),
        ("graphcore/resnet50-16ipu-mk2-bench", "fp16", True, []),
        ("graphcore/efficientnet-b4-g16-4ipu-mk2", "fp32", True, ["stage2/unit2", "stage3/unit4", "stage6/unit1"]),
        ("graphcore/efficientnet-b4-g16-gn-pod16", "fp16", True, ["stage4/unit1"]),
        ("graphcore/efficientnet-b4-g16-gn-pod64", "fp16", True, ["stage4/unit1"]),
        ("graphcore/efficientnet-b4-g1-gn-pod16", "fp16", True, ["stage2/unit2", "stage4/unit1", "stage5/unit6"]),
        ("graphcore/efficientnet-b0-g16-gn", "fp32", True, ["stage3/unit2"]),
        ("graphcore/mobilenet-v3-small", "fp16", True, ["all"]),
        ("graphcore/mobilenet-v3-small-pod4", "fp16", False, ["all"]),
        ("graphcore/mobilenet-v3-large", "fp16", True, []),
        ("graphcore/mobilenet-v3-large-pod16", "fp16", False, []),
    ],
)
def test_graphcore_pytorch_placements_round_and_cut_as_published(
    page: str, weights: str, by_chance: bool, cuts: list[str]
) -> None:
    """Where weights have 32 bits, chance rounds none of them, whatever the page says."""
    placement, _ = read_placement(page, [])
    assert placement.precision == "fp16"
    assert (placement.weights.replace("auto", "fp32"), placement.stochastic_rounding) == (weights, by_chance)
    assert list(placement.splits or placement.recompute) == cuts


PIPELINES = """
resnet50           4 stage2/unit1 stage3/unit1 stage4/unit1  mk1-resnet50-16ipus
resnet50           4 stage2/unit1 stage3/unit1 stage3/unit5  mk2-resnet50-bn-16ipus
resnet50           4 stage1/unit3 stage2/unit4 stage3/unit5  resnet50-16ipu-mk1 resnet50-mk2-pipelined
resnext101         2 stage3/unit5                            mk2-resnext101-16ipus
efficientnet-b4    4 stage2/unit2 stage4/unit2 stage6/unit3  mk2-efficientnet-b4-g1-16ipus
efficientnet-b4    4 stage2/unit3 stage4/unit3 stage6/unit1  mk2-efficientnet-b4-g16-16ipus
efficientnet-b4    4 stage2/unit2 stage3/unit4 stage6/unit1  efficientnet-b4-g16-16ipu-mk2
efficientnet-b4    4 stage2/unit2 stage4/unit1 stage5/unit6  efficientnet-b4-g16-gn efficientnet-b4-g1-gn-pod16
efficientnet-b4    2 stage4/unit1                            efficientnet-b4-g16-16ipus efficientnet-b4-g16-gn-pod64
efficientnet-b0    2 stage4/unit1                            efficientnet-b0-g16-gn-pod16
efficientnet-b0    2 stage3/unit2                            efficientnet-b0-g16-gn
efficientnet-b0    4                                         efficientnet-b0-16ipu-mk1 efficientnet-b0-16ipu-mk2
mobilenet-v3-large 4                                         mobilenet-v3-large mobilenet-v3-large-pod16
"""
"""By b1/2 b2/3 b3/5, b1/2 b2/3 b3/3, layer1/2 layer2/3 layer3/4, block2b block4b block6c, and so on;
where a line names no block, nothing says where the network was cut."""


@pytest.mark.parametrize("line", PIPELINES.strip().splitlines())
def test_pipelines_are_cut_as_they_were(line: str) -> None:
    network, stages, *rest = line.split()
    for page in (f"graphcore/{word}" for word in rest if "/" not in word):
        plan = plan_of(next(each.recipe for each in configurations() if each.placement == page), page)
        assert (plan.recipe.model.name, plan.stages) == (network, int(stages))
        assert plan.splits == [word for word in rest if "/" in word]


def test_each_stage_is_a_device_of_the_configuration_that_it_was_published_with() -> None:
    for each in configurations():
        placement, _ = read_placement(each.placement, [])
        if placement.replicas != "auto":
            assert placement.replicas * placement.stages == each.devices, each


@pytest.mark.parametrize("name", [*named("nvidia/"), *named("ffcv/")])
def test_norms_of_projections_decay_where_they_did(name: str) -> None:
    skip = plan_of(name).recipe.weight_decay.skip_names
    plain = ["stem.norm.weight", "stage1/unit1.norm1.weight", "stage4/unit3.norm3.bias"]
    assert all(any(word in parameter for word in skip) for parameter in plain)
    assert any(word in "stage1/unit1.projection_norm.weight" for word in skip) == ("efficientnet" in name)
    assert not any(word in "head.dense.bias" for word in skip)


@pytest.mark.parametrize("made", ["synthetic", "generated"])
@pytest.mark.parametrize("name", shipped.names("recipes"))
def test_every_recipe_takes_the_same_steps_on_made_up_images(name: str, made: str) -> None:
    own, _ = read_recipe(name, [])
    plan = make_job(name, [f"data={made}", "init.from=null"], None, None, None, None).plan
    assert plan.data.name == made
    known = own.data.known if isinstance(own.data, Files) else own.data.facts if own.data else plan.facts
    assert (plan.facts.side, plan.facts.evaluation_side or plan.facts.side) == (
        known.side,
        known.evaluation_side or known.side,
    )
    assert own.data is None or plan.data.normalize == own.data.normalize
    if known.images:
        facts = plan.facts
        counts = (facts.images, facts.validation_images, facts.classes)
        assert counts == (known.images, known.validation_images, known.classes)
        assert plan.steps == plan_of(name).steps


def test_a_fraction_of_the_data_shortens_a_plan_made_without_files() -> None:
    plan = make_job("nvidia/resnet50", ["data.fraction=10%"], None, None, None, None, look=False).plan
    assert (plan.facts.images, plan.steps) == (128_117, 90 * (128_117 // 2048))


def test_of_made_up_images_what_is_written_stays() -> None:
    plan = make_job("ffcv/resnet50-16", ["data=synthetic", "data.classes=7"], None, None, None, None).plan
    assert (plan.facts.classes, plan.facts.side, plan.facts.evaluation_side) == (7, 192, 256)


def test_the_recipe_of_the_mlperf_write_up() -> None:
    plan = plan_of("graphcore/resnet50-lars-3200", "graphcore/mk2-resnet50-mlperf-pod16-lars")
    assert (plan.norm_replicas, plan.norm_total, plan.warm_steps) == (2, 80, 800)
    assert schedule.lr(plan, 800) == 10.72
    assert plan.recomputed[:2] == ["stage1/unit2", "stage2/unit1"]
    assert (plan.placement.precision, plan.placement.weights) == ("fp16", "fp16")
    assert plan.placement.stochastic_rounding


def test_timm_a3_is_lamb_on_binary_losses_at_160_pixels() -> None:
    recipe = plan_of("timm/resnet50-a3").recipe
    assert (recipe.loss.kind, recipe.loss.threshold) == ("binary", 0.2)
    assert (recipe.mix.mixup, recipe.mix.switch_probability, recipe.mix.mixup_larger) == (0.1, 0.5, False)
    assert recipe.weight_decay.skip_dimensions == (1,)
    assert recipe.clip.norm == 1
    assert isinstance(recipe.schedule, Cosine)
    plan = plan_of("timm/resnet50-a3")
    rates = [schedule.lr(plan, epoch * (IMAGES // 2048)) for epoch in (0, 5, 99)]
    assert rates == pytest.approx(
        [1e-4, *(1e-6 + (8e-3 - 1e-6) * (1 + math.cos(math.pi * epoch / 100)) / 2 for epoch in (5, 99))], rel=1e-12
    )
    assert isinstance(recipe.optimizer, Lamb)
    assert recipe.optimizer.scales == "decayed"
    assert isinstance(recipe.augment.policy, RandAugment)
    assert (recipe.augment.policy.form, recipe.augment.policy.magnitude_std) == ("timm", 0.5)


@pytest.mark.parametrize("epochs", [16, 24, 32, 40, 56, 88])
def test_ffcv_blurs_and_judges_mirror_images_too(epochs: int) -> None:
    recipe = plan_of(f"ffcv/resnet50-{epochs}").recipe
    assert isinstance(recipe.model, ResNet)
    assert recipe.model.blur
    assert recipe.evaluate.flip


@pytest.mark.parametrize("name", ["nvidia/efficientnet-b0", "nvidia/efficientnet-b4"])
def test_nvidia_s_efficientnets_have_the_pairs_that_came_with_the_network(name: str) -> None:
    policy = plan_of(name).recipe.augment.policy
    assert isinstance(policy, AutoAugment)
    assert (policy.table, policy.form) == ("efficientnet", "tensorflow")
