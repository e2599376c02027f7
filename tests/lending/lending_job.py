"""Function for the processes of a job that save and restore with lent credentials."""

import storesvc_client as store
from tests.support import job_parts


def saves_and_restores(target: str, root: str) -> list[str]:
    """Saves a state, and restores it with the others and alone; returns the leaves that
    differ."""
    state = job_parts.state_on(job_parts.mesh(2, 1))
    with store.connect(target, direct=root, lend_credentials=True) as client:
        run = client.run(job_parts.RUN)
        run.save(1, state).result()
        together = run.restore(1, like=state, distributed=job_parts.SPREAD)
        apart = run.restore(1, like=state)
    wrong = job_parts.differing(state, together)
    return wrong + job_parts.differing(state, apart)
