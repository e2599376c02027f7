"""Boundaries of lent credentials: exact, short, and closed to hostile names."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storesvc.errors import LendingUnsupportedError
from storesvc.format.names import InvalidNameError, RunName, UploadName
from storesvc.lending.boundary import (
    MAX_POLICY_CHARACTERS,
    Boundary,
    bound_pool,
    bound_upload,
    gcs_options,
    s3_policy,
)
from storesvc.lending.lender import session_name
from storesvc.storage.location import storage_at
from tests.fake_gcs.tokens import CREATE, DELETE, GET, LIST, grants_of

RUN = RunName("prod", "llama-8b")
UPLOAD = UploadName(RUN, "0123456789abcdef" * 2)
ROLE = "arn:aws:iam::123456789012:role/lending"
POOL = "store/data/prod/llama-8b/pool/"
OWN = f"{POOL}{UPLOAD.upload}/"


def gcs_rule(prefix: str, *roles: str) -> dict[str, Any]:
    objects = f"projects/_/buckets/ckpts/objects/{prefix}"
    return {
        "availableResource": "//storage.googleapis.com/projects/_/buckets/ckpts",
        "availablePermissions": [f"inRole:roles/storage.{role}" for role in roles],
        "availabilityCondition": {
            "expression": f"resource.name.startsWith('{objects}')"
        },
    }


def test_a_credential_to_read_permits_the_pool_of_the_run_on_gcs() -> None:
    limits = bound_pool(storage_at("gs://ckpts/store"), RUN)

    rule = gcs_rule(POOL, "objectViewer")
    assert {"accessBoundary": {"accessBoundaryRules": [rule]}} == gcs_options(limits)
    assert f"gs://ckpts/{POOL}" == limits.uri


def test_a_credential_to_write_permits_to_create_files_of_the_upload_on_gcs() -> None:
    limits = bound_upload(storage_at("gs://ckpts/store"), UPLOAD)

    rule = gcs_rule(OWN, "objectCreator", "objectViewer")
    assert {"accessBoundary": {"accessBoundaryRules": [rule]}} == gcs_options(limits)
    assert f"gs://ckpts/{OWN}" == limits.uri


def test_a_credential_to_read_permits_the_pool_of_the_run_on_s3() -> None:
    limits = bound_pool(storage_at("s3://ckpts/store"), RUN)

    assert {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Effect": "Allow",
                "Action": "s3:GetObject",
                "Resource": f"arn:aws:s3:::ckpts/{POOL}*",
            }
        ],
    } == json.loads(s3_policy(limits, role_arn=ROLE))


def test_a_credential_to_write_only_creates_on_s3() -> None:
    limits = bound_upload(storage_at("s3://ckpts/store"), UPLOAD)

    reads, writes = json.loads(s3_policy(limits, role_arn=ROLE))["Statement"]
    assert ("s3:GetObject", f"arn:aws:s3:::ckpts/{OWN}*") == (
        reads["Action"],
        reads["Resource"],
    )
    assert {
        "Effect": "Allow",
        "Action": "s3:PutObject",
        "Resource": f"arn:aws:s3:::ckpts/{OWN}*",
        "Condition": {"Null": {"s3:if-none-match": "false"}},
    } == writes


def test_the_resource_is_in_the_partition_of_the_role() -> None:
    limits = bound_pool(storage_at("s3://ckpts/store"), RUN)
    role = "arn:aws-cn:iam::123456789012:role/lending"

    (statement,) = json.loads(s3_policy(limits, role_arn=role))["Statement"]

    assert f"arn:aws-cn:s3:::ckpts/{POOL}*" == statement["Resource"]


def test_a_store_at_the_root_of_a_bucket_has_boundaries_too() -> None:
    assert (
        "data/prod/llama-8b/pool/" == bound_pool(storage_at("gs://ckpts"), RUN).prefix
    )


@pytest.mark.parametrize("root", ["file:///srv/ckpts", "memory://"])
def test_other_storages_have_no_credentials_to_lend(root: str) -> None:
    with pytest.raises(LendingUnsupportedError, match="expected a bucket"):
        bound_pool(storage_at(root), RUN)


@pytest.mark.parametrize(
    "name",
    ["it's", "a*", "a%3Fb", "$%7Baws:username%7D", "a\\b", "a%22b", "ü", "a%0Ab"],
)
def test_a_root_that_a_boundary_cannot_express_lends_nothing(name: str) -> None:
    for scheme in ("gs", "s3"):
        with pytest.raises(LendingUnsupportedError, match="cannot express exactly"):
            bound_upload(storage_at(f"{scheme}://ckpts/{name}"), UPLOAD)


def test_a_root_too_long_for_a_session_policy_lends_nothing() -> None:
    storage = storage_at(f"s3://ckpts/{'long/' * 190}")

    with pytest.raises(LendingUnsupportedError, match="use a shorter root"):
        s3_policy(bound_upload(storage, UPLOAD), role_arn=ROLE)


def test_the_longest_names_fit_into_a_session_policy() -> None:
    run = RunName("n" * 63, "r" * 63)
    limits = bound_upload(
        storage_at("s3://ckpts/store"), UploadName(run, UPLOAD.upload)
    )

    assert len(s3_policy(limits, role_arn=ROLE)) < MAX_POLICY_CHARACTERS / 2


HOSTILE = st.text(st.sampled_from("abz09-_./*?'\"\\${}|)( \n%"), max_size=20)


@given(HOSTILE, HOSTILE, HOSTILE)
def test_no_name_leaves_the_prefix_of_its_run(
    namespace: str, run: str, upload: str
) -> None:
    try:
        name = UploadName(RunName(namespace, run), upload or UPLOAD.upload)
    except InvalidNameError:
        return
    limits = bound_upload(storage_at("gs://ckpts/store"), name)

    (grant,) = grants_of(gcs_options(limits))
    own = f"store/data/{namespace}/{run}/pool/{name.upload}/"
    assert ("ckpts", own) == (grant.bucket, grant.prefix)
    assert frozenset({CREATE, GET, LIST}) == grant.verbs
    assert not grant.permits(DELETE, "ckpts", f"{own}x")
    assert not grant.permits(LIST, "ckpts", own)


def test_a_boundary_of_one_run_excludes_runs_that_begin_alike() -> None:
    limits = bound_pool(storage_at("gs://ckpts/store"), RunName("prod", "llama"))

    (grant,) = grants_of(gcs_options(limits))

    assert not grant.permits(GET, "ckpts", f"{POOL}d")
    assert grant.permits(GET, "ckpts", "store/data/prod/llama/pool/d")


def test_the_session_of_a_principal_has_a_name_that_sts_accepts() -> None:
    name = session_name("spiffe://td/ns/train/sa/" + "job" * 30)

    assert "storesvc-spiffe---td-ns-train-sa-job" == name[:36]
    assert 64 == len(name)


def test_the_text_of_a_boundary_is_exact() -> None:
    limits = bound_pool(storage_at("gs://ckpts/a b/c~d@e+f=g,h:i"), RUN)

    assert isinstance(limits, Boundary)
    assert limits.prefix.startswith("a b/c~d@e+f=g,h:i/data/")
