"""Retention policies: what they keep, what is rejected, and how they are written."""

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given, settings
from hypothesis import strategies as st

import storesvc_client as store
from storesvc.errors import InvalidPolicyError, PolicyKeepsNothingError
from storesvc.retention.policy import (
    MAX_DEPTH,
    MAX_RULES,
    Candidate,
    check,
    decide,
    list_metrics,
)
from storesvc_client._values.arguments import (
    MAX_DURATION,
    duration_message,
    parse_duration,
)
from storesvc_client._values.policies import (
    KeepAll,
    KeepAny,
    parse_message,
    policy_message,
)
from storesvc_client._views.texts import duration_text
from storesvc_proto.v1 import retention_pb2 as pb
from tests.support.examples import examples

NOW = datetime(2026, 1, 1, tzinfo=UTC)
DAY = timedelta(days=1)

# --- what is generated: small runs of few values, so that all of them collide ------

METRICS = st.sampled_from(["loss", "acc"])
VALUES = st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 0.0, 1.0, 1.5])
TIMES = st.integers(-50, 10).map(lambda hours: NOW + timedelta(hours=hours))
CANDIDATES = st.builds(
    Candidate,
    step=st.integers(0, 30),
    commit_time=TIMES,  # in any order relative to the steps, equal, and still to come
    metrics=st.dictionaries(METRICS, VALUES),
    pinned=st.booleans(),
    tags=st.sampled_from([(), (), (), ("best",), ("best", "prod")]),
)
RUNS = st.lists(CANDIDATES, max_size=12, unique_by=lambda c: c.step)
PLAIN_RUNS = st.lists(
    st.builds(
        Candidate,
        step=st.integers(0, 30),
        commit_time=TIMES,
        metrics=st.fixed_dictionaries({}, optional={"loss": VALUES, "acc": VALUES}),
    ),
    min_size=3,
    max_size=12,
    unique_by=lambda c: c.step,
)

LENGTHS = st.sampled_from([timedelta(hours=hours) for hours in (1, 5, 24, 36)])
ONE_AT_A_TIME: st.SearchStrategy[store.RetentionPolicy] = st.one_of(
    st.integers(1, 12).map(lambda steps: store.KeepEvery(steps=steps)),
    LENGTHS.map(store.KeepNewerThan),
    st.lists(st.integers(0, 30), min_size=1, max_size=4).map(
        lambda steps: store.KeepSteps(*steps)
    ),
    st.just(store.KeepTagged()),
    st.just(store.KeepPinned()),
)
CHOICES: st.SearchStrategy[store.RetentionPolicy] = st.one_of(
    st.integers(1, 5).map(store.KeepLatest),
    LENGTHS.map(lambda length: store.KeepEvery(duration=length)),
    st.builds(
        store.KeepBest,
        st.integers(1, 4),
        metric=METRICS,
        mode=st.sampled_from(["min", "max"]),
        without_metric=st.sampled_from(["drop", "keep"]),
    ),
)


def combined(
    parts: st.SearchStrategy[store.RetentionPolicy],
) -> st.SearchStrategy[store.RetentionPolicy]:
    """Policies of one more level."""
    pairs = st.tuples(parts, parts)
    return pairs.map(lambda p: p[0] | p[1]) | pairs.map(lambda p: p[0] & p[1])


NEGATABLE = st.recursive(
    ONE_AT_A_TIME, lambda parts: combined(parts) | parts.map(lambda p: ~p), max_leaves=4
)
POLICIES = st.recursive(
    ONE_AT_A_TIME | CHOICES | NEGATABLE.map(lambda p: ~p), combined, max_leaves=5
)


def kept(
    policy: store.RetentionPolicy, run: list[Candidate], now: datetime = NOW
) -> set[int]:
    """The steps that stay."""
    decisions = decide(policy_message(policy), run, now)
    return {decision.step for decision in decisions if decision.kept}


def protected(run: list[Candidate]) -> set[int]:
    """The steps that stay whatever the policy says."""
    newest = {max(c.step for c in run)} if run else set()
    return newest | {c.step for c in run if c.pinned or c.tags}


# --- a second opinion: each rule from its definition, one checkpoint at a time -----


def says(policy: Any, one: Candidate, run: list[Candidate]) -> bool:
    """Returns whether a policy keeps one checkpoint, by counting those before it."""
    match policy:
        case store.KeepLatest(count):
            return sum(c.step > one.step for c in run) < count
        case store.KeepEvery(interval=int(steps)):
            return one.step in range(0, 31, steps)
        case store.KeepEvery(interval=timedelta() as length):
            start = NOW - (NOW - datetime(1970, 1, 1, tzinfo=UTC)) % length
            while not start <= one.commit_time < start + length:
                start += length if one.commit_time >= start else -length
            among = [c for c in run if start <= c.commit_time < start + length]
            return one is min(among, key=lambda c: (c.commit_time, c.step))
        case store.KeepNewerThan(length):
            return one.commit_time >= NOW - length
        case store.KeepBest():
            if policy.metric not in one.metrics:
                return policy.without_metric == "keep"
            others = [c for c in run if policy.metric in c.metrics and c is not one]
            return sum(beats(policy, c, one) for c in others) < policy.count
        case store.KeepSteps(steps):
            return any(one.step == step for step in steps)
        case store.KeepTagged():
            return one.tags != ()
        case store.KeepPinned():
            return one.pinned
        case KeepAny(policies):
            return any(says(p, one, run) for p in policies)
        case KeepAll(policies):
            return all(says(p, one, run) for p in policies)
    return not says(policy.policy, one, run)


def beats(best: store.KeepBest, one: Candidate, other: Candidate) -> bool:
    mine, its = one.metrics[best.metric], other.metrics[best.metric]
    if math.isnan(mine) and not math.isnan(its):
        return False
    if mine == its or (math.isnan(mine) and math.isnan(its)):
        return one.step > other.step
    return math.isnan(its) or (mine < its if best.mode == "min" else mine > its)


@given(POLICIES, RUNS)
def test_what_stays_is_what_each_rule_says_and_what_is_protected(
    policy: store.RetentionPolicy, run: list[Candidate]
) -> None:
    expected = {c.step for c in run if says(policy, c, run)} | protected(run)

    assert expected == kept(policy, run)


@given(CHOICES, PLAIN_RUNS)
@settings(max_examples=examples(1000))
def test_what_is_chosen_is_what_the_rule_says(
    policy: store.RetentionPolicy, run: list[Candidate]
) -> None:
    expected = {c.step for c in run if says(policy, c, run)} | protected(run)

    assert expected == kept(policy, run)


def run_of(*values: float) -> list[Candidate]:
    """Checkpoints at the steps 1, 2, ... with these losses, and one newest without."""
    bare = Candidate(step=100, commit_time=NOW)
    return [
        Candidate(step=step, commit_time=NOW, metrics={"loss": value})
        for step, value in enumerate(values, 1)
    ] + [bare]


@pytest.mark.parametrize(
    ("values", "mode", "best"),
    [
        ((math.nan, 5.0, math.inf), "min", {2, 3}),
        ((math.nan, -5.0, -math.inf), "max", {2, 3}),
        ((math.nan, 5.0), "min", {1, 2}),
        ((math.nan, math.nan, math.nan), "max", {2, 3}),
        ((1.0, 1.0, 1.0), "min", {2, 3}),
        ((1.0, 1.0, 1.0), "max", {2, 3}),
        ((0.0, -0.0, 0.0), "min", {2, 3}),
        ((3.0, 1.0, 2.0), "min", {2, 3}),
        ((3.0, 1.0, 2.0), "max", {1, 3}),
    ],
    ids=str,
)
def test_the_best_two_are_the_best_numbers_then_the_higher_steps(
    values: tuple[float, ...], mode: Any, best: set[int]
) -> None:
    policy = store.KeepBest(2, metric="loss", mode=mode)

    assert best | {100} == kept(policy, run_of(*values))


def test_the_first_of_a_span_is_the_first_to_be_committed_then_the_lower_step() -> None:
    hours = {1: 5, 2: 3, 3: 3, 4: 9, 9: 23}  # of one day, by step
    run = [
        Candidate(step=step, commit_time=NOW + timedelta(hours=hour))
        for step, hour in hours.items()
    ]

    assert {2, 9} == kept(store.KeepEvery(duration=DAY), run)


@given(POLICIES, RUNS)
def test_applied_to_what_is_left_it_deletes_nothing_more(
    policy: store.RetentionPolicy, run: list[Candidate]
) -> None:
    once = kept(policy, run)

    assert once == kept(policy, [c for c in run if c.step in once])


@given(POLICIES, RUNS, st.data())
def test_what_stays_among_many_stays_among_fewer(
    policy: store.RetentionPolicy, run: list[Candidate], data: st.DataObject
) -> None:
    fewer = [one for one in run if data.draw(st.booleans())]

    assert kept(policy, run) & {c.step for c in fewer} <= kept(policy, fewer)


@given(POLICIES, POLICIES, RUNS)
def test_one_more_policy_keeps_no_less(
    policy: store.RetentionPolicy, other: store.RetentionPolicy, run: list[Candidate]
) -> None:
    assert kept(policy, run) | kept(other, run) == kept(policy | other, run)
    assert kept(policy & other, run) <= kept(policy, run) | protected(run)


@given(POLICIES, RUNS)
def test_the_newest_the_pinned_and_the_tagged_stay(
    policy: store.RetentionPolicy, run: list[Candidate]
) -> None:
    assert protected(run) <= kept(policy, run)


@given(POLICIES, RUNS, st.randoms(use_true_random=False))
def test_the_order_of_a_run_does_not_matter(
    policy: store.RetentionPolicy, run: list[Candidate], random: Any
) -> None:
    shuffled = list(run)
    random.shuffle(shuffled)
    message = policy_message(policy)

    decisions = decide(message, run, NOW)
    assert decisions == decide(message, shuffled, NOW)
    assert sorted((c.step for c in run), reverse=True) == [d.step for d in decisions]


@given(POLICIES, RUNS)
def test_only_metrics_that_a_policy_looks_at_matter(
    policy: store.RetentionPolicy, run: list[Candidate]
) -> None:
    names = list_metrics(policy_message(policy))
    bare = [
        Candidate(
            step=c.step,
            commit_time=c.commit_time,
            metrics={n: v for n, v in c.metrics.items() if n in names},
            pinned=c.pinned,
            tags=c.tags,
        )
        for c in run
    ]

    assert kept(policy, bare) == kept(policy, run)


@given(RUNS)
def test_without_a_policy_all_stay(run: list[Candidate]) -> None:
    assert all(d.kept for d in decide(None, run, NOW))


def test_spans_of_any_length_are_counted_exactly() -> None:
    late = datetime(9999, 1, 1, tzinfo=UTC)
    run = [
        Candidate(step=step, commit_time=late + timedelta(microseconds=step))
        for step in range(4)
    ]
    every = pb.KeepEveryDuration(duration=Duration(nanos=1))
    hours = pb.KeepEveryDuration(duration=Duration(seconds=3600))

    finest = decide(pb.RetentionPolicy(every_duration=every), run, NOW)
    coarse = decide(pb.RetentionPolicy(every_duration=hours), run, NOW)
    assert [3, 2, 1, 0] == [d.step for d in finest if d.kept]
    assert [3, 0] == [d.step for d in coarse if d.kept]


def test_decisions_tell_people_why() -> None:
    policy = store.parse_policy(
        "latest(1) | every(1 step) | every(1 day) | newer-than(90m) | steps(5)"
        " | best(2, loss, min) & ~pinned | tagged | every(1.5s)"
    )
    tagged = Candidate(
        step=5, commit_time=NOW, metrics={"loss": 1.0}, pinned=False, tags=("b", "a")
    )

    (decision,) = decide(policy_message(policy), [tagged], NOW)
    assert (
        "newest",
        "tagged a, b",
        "latest 1",
        "every 1 step",
        "every 1 day",
        "newer than 90 minutes",
        "step 5",
        "(best 2 by loss (min) and not pinned)",
    ) == decision.reasons


# --- what is rejected -------------------------------------------------------------


@given(POLICIES, RUNS)
def test_a_policy_that_is_rejected_as_keeping_nothing_keeps_nothing(
    policy: store.RetentionPolicy, run: list[Candidate]
) -> None:
    try:
        check(policy_message(policy))
    except PolicyKeepsNothingError:
        assert protected(run) == kept(policy, run)
    except InvalidPolicyError as e:  # one part of several keeps nothing
        assert "could keep a checkpoint" in str(e)


@pytest.mark.parametrize(
    "text",
    [
        "latest(0)",
        "best(0, loss, min)",
        "steps()",
        "latest(0) | steps()",
        "latest(3) & steps()",
        "steps(1, 2) & steps(3)",
        "steps(1, 2) & every(10 steps)",
        "tagged & latest(3) & ~tagged",
        "~every(1 step)",
        "~(every(1 step) | pinned)",
        "~(tagged | ~tagged)",
        "~~steps()",
        "steps(5) & (steps(6) | steps(7) & tagged)",
    ],
)
def test_a_policy_that_keeps_nothing_is_rejected(text: str) -> None:
    policy = policy_message(store.parse_policy(text))

    with pytest.raises(PolicyKeepsNothingError, match="clear the policy"):
        check(policy)


def test_any_of_none_keeps_nothing() -> None:
    with pytest.raises(PolicyKeepsNothingError):
        check(pb.RetentionPolicy(any=pb.RetentionPolicies()))


LATEST = pb.RetentionPolicy(latest=pb.KeepLatest(count=1))


def best(**fields: Any) -> pb.RetentionPolicy:
    given: dict[str, Any] = {"count": 1, "metric": "loss", "mode": pb.KeepBest.MODE_MIN}
    return pb.RetentionPolicy(best=pb.KeepBest(**given | fields))


def any_of(*policies: pb.RetentionPolicy) -> pb.RetentionPolicy:
    return pb.RetentionPolicy(any=pb.RetentionPolicies(policies=policies))


def nested(levels: int) -> pb.RetentionPolicy:
    policy = LATEST
    for _ in range(levels - 1):
        policy = any_of(policy)
    return policy


def newer(**fields: int) -> pb.RetentionPolicy:
    return pb.RetentionPolicy(newer_than=pb.KeepNewerThan(duration=Duration(**fields)))


BROKEN: dict[str, tuple[pb.RetentionPolicy, str]] = {
    "no rule": (pb.RetentionPolicy(), ""),
    "no rule within": (any_of(LATEST, pb.RetentionPolicy()), "any[1]"),
    "few": (pb.RetentionPolicy(latest=pb.KeepLatest(count=-1)), "latest.count"),
    "steps": (pb.RetentionPolicy(every_steps=pb.KeepEverySteps()), "every_steps.steps"),
    "no time": (newer(), "newer_than.duration"),
    "past": (newer(seconds=-1), "newer_than.duration"),
    "mixed signs": (newer(seconds=1, nanos=-1), "newer_than.duration"),
    "many nanos": (newer(nanos=10**9), "newer_than.duration"),
    "eternity": (newer(seconds=2**62), "newer_than.duration"),
    "no span": (
        pb.RetentionPolicy(every_duration=pb.KeepEveryDuration()),
        "every_duration.duration",
    ),
    "no mode": (any_of(LATEST, best(mode=0)), "any[1].best.mode"),
    "new mode": (best(mode=9), "best.mode"),
    "no metric": (best(metric=""), "best.metric"),
    "long metric": (best(metric="é" * 129), "best.metric"),
    "few best": (best(count=-1), "best.count"),
    "none best": (best(count=0, keep_without_metric=True), "best.count"),
    "no step": (
        pb.RetentionPolicy(steps=pb.KeepSteps(steps=[1, -1])),
        "steps.steps[1]",
    ),
    "many steps": (
        pb.RetentionPolicy(steps=pb.KeepSteps(steps=range(10_001))),
        "steps.steps",
    ),
    "all of none": (pb.RetentionPolicy(all=pb.RetentionPolicies()), "all"),
    "wide": (any_of(*[LATEST] * 65), "any"),
    "many": (any_of(*[any_of(*[LATEST] * 64)] * 4), ""),
    "deep": (nested(MAX_DEPTH + 1), ".".join(["any[0]"] * MAX_DEPTH)),
    "large": (best(metric="x" * 200_000), ""),
}


@pytest.mark.parametrize(("policy", "place"), BROKEN.values(), ids=BROKEN)
def test_a_policy_that_breaks_a_bound_is_rejected_with_the_place(
    policy: pb.RetentionPolicy, place: str
) -> None:
    with pytest.raises(InvalidPolicyError, match=r"expected .*, got .*; ") as caught:
        check(policy)
    assert place == caught.value.metadata["place"]


@pytest.mark.parametrize("text", ["latest(-1)", "best(-1, loss, min)"])
def test_what_a_count_must_be_is_what_would_keep_something(text: str) -> None:
    with pytest.raises(InvalidPolicyError, match="expected at least 1, got -1; give"):
        check(policy_message(store.parse_policy(text)))


def test_steps_that_keep_nothing_together_are_named() -> None:
    policy = store.parse_policy("steps(1) & steps(2, 3, 4, 5, 6, 7, 8)")

    with pytest.raises(PolicyKeepsNothingError) as caught:
        check(policy_message(policy))
    assert "got (step 1 and steps 2, 3, 4, 5, 6 and 2 more)" in str(caught.value)


@pytest.mark.parametrize("text", [None, 3, b"latest(3)", store.KeepLatest(3)], ids=repr)
def test_only_a_text_is_parsed(text: Any) -> None:
    with pytest.raises(store.InvalidRequestError, match=r"such as 'latest\(3\)'"):
        store.parse_policy(text)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("~latest(3)", "not"),
        ("tagged | ~(pinned & best(1, loss, min))", "any[1].not.all[1]"),
        ("~every(1 day)", "not"),
        ("latest(3) | latest(0)", "any[1]"),
        ("latest(3) | every(10 steps) & ~every(1 step)", "any[1].all[1]"),
    ],
)
def test_a_part_that_cannot_be_meant_is_rejected_with_its_place(
    text: str, place: str
) -> None:
    with pytest.raises(InvalidPolicyError) as caught:
        check(policy_message(store.parse_policy(text)))
    assert place == caught.value.metadata["place"]


@pytest.mark.parametrize(
    "policy",
    [
        nested(MAX_DEPTH),
        any_of(*[any_of(*[LATEST] * 62)] * 4),
        best(metric="é" * 128),
        newer(nanos=1),
        pb.RetentionPolicy(steps=pb.KeepSteps(steps=range(10_000))),
    ],
    ids=["deep", "many", "metric", "nanosecond", "steps"],
)
def test_a_policy_at_its_bounds_is_admitted(policy: pb.RetentionPolicy) -> None:
    check(policy)


@pytest.mark.slow
def test_the_most_rules_over_many_checkpoints_end_soon() -> None:
    rules = any_of(*[any_of(*[best()] * ((MAX_RULES - 5) // 4))] * 4)
    run = [
        Candidate(step=step, commit_time=NOW, metrics={"loss": step % 97})
        for step in range(10_000)
    ]
    check(rules)

    assert 2 == sum(d.kept for d in decide(rules, run, NOW))


# --- how they are written ---------------------------------------------------------

LENGTHS_AT_ALL = st.timedeltas(timedelta(days=-3_652_500), timedelta(days=3_652_500))
WRITABLE: st.SearchStrategy[store.RetentionPolicy] = st.recursive(
    st.one_of(
        ONE_AT_A_TIME,
        CHOICES,
        st.integers(-(2**63) + 1, 2**63 - 1).map(store.KeepLatest),
        LENGTHS_AT_ALL.map(store.KeepNewerThan),
        LENGTHS_AT_ALL.map(lambda length: store.KeepEvery(duration=length)),
        st.text().map(lambda name: store.KeepBest(1, metric=name, mode="min")),
    ),
    lambda parts: combined(parts) | parts.map(lambda p: ~p),
    max_leaves=8,
)


@given(WRITABLE)
def test_a_policy_is_read_as_it_was_written(policy: store.RetentionPolicy) -> None:
    text = store.format_policy(policy)

    assert policy == store.parse_policy(text)
    assert text.isprintable()


@given(WRITABLE)
def test_a_policy_is_what_its_message_says(policy: store.RetentionPolicy) -> None:
    assert policy == parse_message(policy_message(policy))


@given(WRITABLE)
def test_a_policy_shows_how_to_make_it(policy: store.RetentionPolicy) -> None:
    from datetime import timedelta as length

    names = {name: getattr(store, name) for name in dir(store) if "Keep" in name}
    shown = repr(policy).replace("datetime.timedelta", "length")
    if "KeepAny" in shown or "KeepAll" in shown or "KeepNot" in shown:
        return  # made by |, & and ~
    assert policy == eval(shown, names | {"length": length})


@given(st.text(alphabet='latesgdpin ()|&~,"\\0123_-.xmo', max_size=30))
def test_any_text_is_a_policy_or_rejected(text: str) -> None:
    try:
        policy = store.parse_policy(text)
    except store.InvalidRequestError as e:
        assert "expected" in str(e)
        return
    assert policy == store.parse_policy(store.format_policy(policy))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", r"expected one of latest\(N\).* at character 1, got the end"),
        ("latest(x)", "expected a whole number at character 8, got 'x'"),
        ("latest 3", r"expected \( at character 8, got '3'"),
        ("latest(3", r"expected \) at character 9, got the end"),
        ("latest(3) every(1d)", r"expected \|, & or the end at character 11"),
        ("latest(3) |", "at character 12, got the end"),
        ("every(3 weeks)", "expected a time.* at character 7, got '3'"),
        ("newer-than()", r"expected a time.* at character 12, got '\)'"),
        ("best(2)", r"expected , at character 7"),
        ("best(2, loss)", "expected , at character 13"),
        ("best(2, loss, least)", "expected min or max at character 15, got 'least'"),
        ('best(2, "lo, min)', "expected a metric as a JSON string at character 9"),
        ("steps(1,)", r"expected a whole number at character 9, got '\)'"),
        ("steps(9223372036854775808)", "expected a whole number at character 7"),
        ("keep(3)", r"expected one of .* at character 1, got 'keep'"),
        ("~" * 33 + "tagged", "at most 32 within each other at character 33"),
        ("(" * 5000, "at most 32 within each other at character 33"),
    ],
)
def test_a_text_that_is_no_policy_is_rejected_with_the_place(
    text: str, complaint: str
) -> None:
    with pytest.raises(store.InvalidRequestError, match=complaint):
        store.parse_policy(text)


LONG = 200_000


@pytest.mark.parametrize(
    "text",
    ["(" * LONG, "~" * LONG, '"' * LONG, 'best(1, "' + r"\"" * LONG, " " * LONG],
    ids=["parentheses", "negations", "strings", "open string", "blanks"],
)
def test_a_long_text_that_is_no_policy_is_rejected_in_linear_time(text: str) -> None:
    with pytest.raises(store.InvalidRequestError, match="expected") as rejected:
        store.parse_policy(text)

    assert len(str(rejected.value)) < 1000


@pytest.mark.slow
@pytest.mark.parametrize("operator", [" | ", " & "])
def test_a_megabyte_of_rules_is_read_in_linear_time(operator: str) -> None:
    text = operator.join(["tagged"] * 120_000)

    assert text == store.format_policy(store.parse_policy(text))


def test_operators_bind_as_they_do_in_python() -> None:
    a, b, c = store.KeepLatest(1), store.KeepTagged(), store.KeepPinned()

    assert "latest(1) | tagged & ~pinned" == store.format_policy(a | b & ~c)
    assert "(latest(1) | tagged) & pinned" == store.format_policy((a | b) & c)
    assert "~(tagged | pinned)" == store.format_policy(~(b | c))
    assert (a | b) | c == a | (b | c)
    assert b == ~~b
    assert a | b == store.parse_policy(" latest( 1 )|tagged ")
    assert store.KeepEvery(steps=10_000) == store.parse_policy("every(10_000 steps)")


untyped: Any = store  # a caller without a type checker
WRONG: dict[str, Callable[[], object]] = {
    "text": lambda: untyped.KeepLatest("3"),
    "bool": lambda: untyped.KeepLatest(True),
    "large": lambda: untyped.KeepLatest(2**63),
    "no interval": untyped.KeepEvery,
    "two intervals": lambda: untyped.KeepEvery(steps=1, duration=DAY),
    "text for a duration": lambda: untyped.KeepEvery(duration="3"),
    "bool for a duration": lambda: untyped.KeepNewerThan(True),
    "long": lambda: untyped.KeepNewerThan(timedelta.max),
    "number for a metric": lambda: untyped.KeepBest(1, metric=3, mode="min"),
    "surrogate": lambda: untyped.KeepBest(1, metric="\ud800", mode="min"),
    "mode": lambda: untyped.KeepBest(1, metric="loss", mode="least"),
    "without": lambda: untyped.KeepBest(1, metric="x", mode="min", without_metric=True),
    "float": lambda: untyped.KeepSteps(1.5),
    "no policy": lambda: untyped.KeepLatest(3) | "tagged",
}


@pytest.mark.parametrize("make", WRONG.values(), ids=WRONG)
def test_a_rule_of_wrong_types_is_rejected(make: Callable[[], object]) -> None:
    with pytest.raises(store.InvalidRequestError, match="expected"):
        make()


def test_a_rule_that_this_release_does_not_know_is_rejected() -> None:
    with pytest.raises(store.InvalidRequestError, match="use a newer release"):
        parse_message(any_of(LATEST, pb.RetentionPolicy()))
    with pytest.raises(store.InvalidRequestError, match="use a newer release"):
        parse_message(any_of())
    with pytest.raises(store.InvalidRequestError, match="use a newer release"):
        parse_message(best(mode=9))


@given(LENGTHS_AT_ALL)
def test_a_duration_is_read_as_it_was_written(length: timedelta) -> None:
    assert length == parse_duration(duration_text(length))


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("3d", 3 * DAY),
        ("1 day", DAY),
        ("36 hours", 1.5 * DAY),
        ("1.5 days", 1.5 * DAY),
        ("90m", timedelta(minutes=90)),
        ("0.000001s", timedelta(microseconds=1)),
        ("0 days", timedelta()),
    ],
)
def test_durations_are_read_in_several_ways(text: str, length: timedelta) -> None:
    assert length == parse_duration(text)


@pytest.mark.parametrize(
    "text", ["", "3", "d", "3 weeks", "1e3 s", "0.0000001s", "9" * 15 + "d", "٣d"]
)
def test_a_text_that_is_no_duration_is_rejected(text: str) -> None:
    with pytest.raises(store.InvalidRequestError, match="such as 3d"):
        parse_duration(text)


@pytest.mark.parametrize(
    "length", ["3d", None, True, timedelta.max, timedelta.min, 1e12, math.nan]
)
def test_only_a_length_of_time_that_the_contract_can_say_is_sent(length: Any) -> None:
    with pytest.raises(
        store.InvalidRequestError, match=r"^grace=: expected a timedelta or seconds of"
    ):
        duration_message(length, "grace=")


def test_durations_may_be_seconds() -> None:
    half, day = timedelta(seconds=0.5), 86_400

    assert store.KeepNewerThan(half) == store.KeepNewerThan(0.5)
    assert store.KeepEvery(duration=DAY) == store.KeepEvery(duration=day)
    assert DAY == untyped.KeepEvery(duration=np.int64(day)).interval
    assert half == duration_message(0.5, "grace=").ToTimedelta()


def test_a_length_of_time_is_sent_to_the_microsecond() -> None:
    for length in (timedelta(0), timedelta(microseconds=-1), MAX_DURATION):
        assert length == duration_message(length, "grace=").ToTimedelta()
