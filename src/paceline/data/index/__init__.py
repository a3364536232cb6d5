"""The index of a data set: which images there are, where their bytes stand, and their labels."""
