"""Every setting of a recipe and a placement: its meaning, how it is read, and what is said of a wrong one."""
