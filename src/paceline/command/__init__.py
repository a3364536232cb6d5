"""The verbs of the command line, one file each; torch is loaded only once a plan stands."""
