"""The training loop, evaluation, and what a run carries from step to step; read `loop.py` first."""
