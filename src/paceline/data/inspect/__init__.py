"""Checking, describing and measuring a data set."""
