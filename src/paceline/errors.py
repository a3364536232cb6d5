"""Faults that a person can mend: each is one sentence saying where, what, and what to write instead."""

from __future__ import annotations


class UserError(Exception):
    """A fault to show as one line, without a traceback; `status` is what the process then exits with."""

    status = 2


class SpecError(UserError):
    """A setting is unknown, of the wrong type, or impossible."""


class PlanError(UserError):
    """This recipe cannot run on this placement; the message names one that fits."""


class DataError(UserError):
    """The data set is missing, damaged or not what the recipe expects."""


class RunError(UserError):
    """The run folder cannot be used as asked."""


class Damaged(RunError):
    """A file of a run was read, and is not what was written."""


class Broken(UserError):
    """Something outside the settings failed while the run was going: a disk, a replica, the network."""

    status = 1


class StoppedEarly(Broken):
    """A signal of a scheduler came to replicas before they trained."""


class RanOut(Broken):
    """A micro-batch took more memory than there is; the run folder remembers it, and the next start takes a smaller
    one."""


class NotSaved(UserError):
    """The end of a run, or of this start, could not be saved: it goes on from what was saved before."""


INTERRUPTED = 75
"""Exit status of a run that was asked to stop and saved itself: run the same command again to go on."""


class ReadFailed(UserError):
    """Images could not be read, again and again; the run ends saved, to go on when the disk does."""

    status = INTERRUPTED
