"""A policy denies by default; bindings only add permissions."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storesvc.auth.policy import (
    ROLES,
    AllRuns,
    Authentication,
    Binding,
    Namespace,
    Permission,
    Policy,
    Principal,
    Resource,
)
from storesvc.format.names import RunName

NAMES = st.sampled_from(["user:a", "user:b", "k8s:train/trainer", "local", ""])
GROUPS = st.frozensets(st.sampled_from(["ml", "ops"]))
RUNS: "st.SearchStrategy[Resource]" = st.one_of(
    st.builds(RunName, st.sampled_from(["prod", "lab"]), st.sampled_from(["a", "ab"])),
    st.builds(Namespace, st.sampled_from(["prod", "lab"])),
    st.just(AllRuns()),
)
PATTERNS = st.sampled_from(["**", "prod/*", "prod/a", "prod/a*", "*/a", "lab/?", "*/*"])
WHO = st.sampled_from(
    ["user:*", "user:a", "group:ml", "group:*", "k8s:*", "*", "local"]
)
BINDINGS = st.builds(
    Binding,
    role=st.sampled_from([*ROLES]),
    runs=st.tuples(PATTERNS),
    who=st.tuples(WHO),
)
PRINCIPALS = st.builds(
    Principal, name=NAMES, groups=GROUPS, authentication=st.just(Authentication.TOKEN)
)


def trainer(*groups: str) -> Principal:
    """Returns a principal."""
    return Principal(
        name="k8s:train/trainer",
        groups=frozenset(groups),
        authentication=Authentication.TOKEN,
    )


@given(PRINCIPALS, st.sampled_from([*Permission]), RUNS)
def test_no_binding_permits_nothing(
    principal: Principal, permission: Permission, resource: Resource
) -> None:
    assert not Policy().permits(principal, permission, resource)


@given(st.lists(BINDINGS), BINDINGS, PRINCIPALS, st.sampled_from([*Permission]), RUNS)
def test_a_binding_never_removes_a_permission(
    bindings: list[Binding],
    added: Binding,
    principal: Principal,
    permission: Permission,
    resource: Resource,
) -> None:
    before = Policy(bindings=tuple(bindings))
    after = Policy(bindings=(*bindings, added))

    assert before.permits(principal, permission, resource) <= after.permits(
        principal, permission, resource
    )


@given(st.lists(BINDINGS), PRINCIPALS, st.sampled_from([*Permission]), RUNS)
def test_what_is_permitted_on_a_namespace_is_permitted_on_each_run_of_it(
    bindings: list[Binding],
    principal: Principal,
    permission: Permission,
    resource: Resource,
) -> None:
    policy = Policy(bindings=tuple(bindings))
    if not policy.permits(principal, permission, resource):
        return
    inner: list[Resource] = []
    if isinstance(resource, AllRuns):
        inner = [Namespace("any"), RunName("other", "run")]
    elif isinstance(resource, Namespace):
        inner = [RunName(resource.name, "run")]
    assert all(policy.permits(principal, permission, each) for each in inner)


def test_each_role_has_the_permissions_of_the_roles_before_it() -> None:
    roles = [*ROLES.values()]

    assert all(less < more for less, more in pairwise(roles))
    assert roles[-1] == frozenset(Permission)


@pytest.mark.parametrize(
    ("pattern", "resource", "expected"),
    [
        ("**", RunName("prod", "a"), True),
        ("**", AllRuns(), True),
        ("prod/*", RunName("prod", "a"), True),
        ("prod/*", RunName("prod2", "a"), False),
        ("prod/*", Namespace("prod"), True),
        ("prod/a*", Namespace("prod"), False),
        ("prod/a*", RunName("prod", "abc"), True),
        ("*/a", RunName("lab", "a"), True),
        ("*/a", Namespace("lab"), False),
        ("*/*", AllRuns(), True),
        ("prod/*", AllRuns(), False),
        ("prod", RunName("prod", "a"), False),
    ],
    ids=str,
)
def test_patterns_match_whole_parts(
    pattern: str, resource: Resource, *, expected: bool
) -> None:
    binding = Binding(role="reader", runs=(pattern,), who=("*",))

    assert binding.covers(resource) is expected


@pytest.mark.parametrize(
    ("who", "expected"),
    [
        ("k8s:train/trainer", True),
        ("k8s:train/*", True),
        ("k8s:*", True),
        ("*", True),
        ("K8S:train/trainer", False),
        ("k8s:train", False),
        ("group:ml", True),
        ("group:*", True),
        ("ml", False),
        ("group:ops", False),
    ],
)
def test_names_and_groups_are_matched_apart(who: str, *, expected: bool) -> None:
    binding = Binding(role="reader", runs=("**",), who=(who,))

    assert binding.names(trainer().name, ["ml"]) is expected


def test_an_anonymous_caller_matches_no_binding() -> None:
    binding = Binding(role="admin", runs=("**",), who=("*",))

    assert not binding.names("", [])


def test_the_role_of_anonymous_callers_is_everyones() -> None:
    policy = Policy(anonymous="reader")

    run = RunName("prod", "a")
    assert policy.permits(trainer(), Permission.CHECKPOINTS_READ, run)
    assert not policy.permits(trainer(), Permission.UPLOADS_BEGIN, run)
