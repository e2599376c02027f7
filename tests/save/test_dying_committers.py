"""A committer that dies between any two of its writes: two others that step in at once
get one checkpoint, and a collection finds it whole and nothing left of the others."""

import asyncio
from itertools import count

from storesvc.format.names import UploadName
from tests.support.collecting_process import Process, started
from tests.support.faulty_bucket import DiedError, dies_before

CONTENT = (1, 2, 0)


async def begin_save() -> tuple[Process, list[Process], UploadName]:
    """Returns three processes of which each may commit step 2."""
    first = await started()
    await first.save(1)
    name = await first.begin(2, base=1)
    await first.send(name, {0: 1, 1: 2})
    await first.finish(name, CONTENT)
    return first, [await first.beside() for _ in range(2)], name


async def dies_in_commit(process: Process, name: UploadName, number: int) -> bool:
    """Commits in a process that dies before a write by number; returns whether it
    died."""
    process.bucket.calls.follow(dies_before(number))
    try:
        await process.commit(name, CONTENT)
    except DiedError:
        return True
    return False


async def test_two_that_step_in_for_a_dead_committer_commit_one_checkpoint() -> None:
    for number in count():
        first, others, name = await begin_save()
        has_died = await dies_in_commit(first, name, number)

        await asyncio.gather(*(each.commit(name, CONTENT) for each in others))

        last = await others[0].beside()
        assert [2, 1] == await last.steps()
        await last.check()
        await last.collect()
        await last.check()
        assert 0 == (await last.collect()).garbage_objects
        if not has_died:
            break
    assert number > 4


async def test_one_that_steps_in_dies_too_and_the_next_commits() -> None:
    for number in count():
        first, (second, third), name = await begin_save()
        await dies_in_commit(first, name, number)
        has_died = await dies_in_commit(second, name, number)

        await third.commit(name, CONTENT)

        await third.check()
        await third.collect()
        await third.check()
        if not has_died:
            break
    assert number > 2
