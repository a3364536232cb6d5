"""Trained networks in files that other programs read, each run and compared before it is handed over."""
