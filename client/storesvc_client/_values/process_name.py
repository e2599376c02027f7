"""The name of this process for people: who saves, who holds."""

import os
from platform import node
from typing import Final

_JOBS: Final = ("STORESVC_JOB", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
"""Environment variables that name the job of a process; the first one set counts."""

_MAX_BYTES: Final = 256


def owner() -> str:
    """Returns the host, the process and, where it is known, the job of this process."""
    job = next(filter(None, map(os.environ.get, _JOBS)), None)
    text = f"host {node()}, process {os.getpid()}" + (f", job {job}" if job else "")
    one_line = " ".join(text.split())
    return one_line.encode()[:_MAX_BYTES].decode(errors="ignore")
