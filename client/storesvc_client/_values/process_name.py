"""Names this process for people, as the owner of an upload or a hold."""

import os
from platform import node
from typing import Final

_JOBS: Final = ("STORESVC_JOB", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
"""Environment variables with the name of the job; the first one that is set is used."""

_MAX_BYTES: Final = 256


def owner() -> str:
    """Returns host, process id and, if known, job of this process."""
    job = next(filter(None, map(os.environ.get, _JOBS)), None)
    text = f"host {node()}, process {os.getpid()}" + (f", job {job}" if job else "")
    one_line = " ".join(text.split())
    return one_line.encode()[:_MAX_BYTES].decode(errors="ignore")
