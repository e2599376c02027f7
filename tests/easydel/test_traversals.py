"""EasyDeL's traversals and this client's agree, or differ for a known reason."""

import pytest
from easydel.utils import traversals as theirs

from storesvc_client.trees import traversals as ours
from tests.support.golden_traversals import RECORDED, Case, cases, outcome

each_case = pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)


@each_case
def test_ours_answer_as_easydels_do_but_where_a_deviation_is_listed(case: Case) -> None:
    expected, actual = outcome(case.run, theirs), outcome(case.run, ours)

    assert (case.deviation is None) == (expected == actual)


@each_case
def test_the_record_is_what_easydel_answers(case: Case) -> None:
    assert RECORDED[case.name] == outcome(case.run, theirs)
