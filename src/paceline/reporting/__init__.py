"""The report of runs: one page of HTML with curves, mistakes and what repeats them, from run folders alone."""
