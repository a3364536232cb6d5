"""Lets `python -m paceline` be the command line; replicas are started that way."""

from paceline.cli import main

main()
