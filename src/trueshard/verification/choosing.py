"""Which kind of subject a job's source is."""

from __future__ import annotations

from trueshard.verification.factory import FactorySubject
from trueshard.verification.job import Job
from trueshard.verification.subject import Subject


def subject_of(job: Job) -> Subject:
    """What the job's source describes.

    Raises:
        ValueError: it cannot be built; one line that says why.
    """
    if callable(job.source) or isinstance(job.source, str):
        return FactorySubject(job)
    from trueshard.verification.configured import ConfiguredSubject  # which needs the trainer's libraries

    return ConfiguredSubject(job)
