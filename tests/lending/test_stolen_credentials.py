"""A stolen credential permits nothing beyond its boundary."""

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import obstore
import pytest
from obstore.exceptions import (
    BaseError,
    GenericError,
    PermissionDeniedError,
    UnauthenticatedError,
)

from storesvc_proto.v1 import access_service_pb2 as api
from storesvc_proto.v1 import checkpoint_service_pb2 as checkpoint_api
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from tests.lending.lending import Cloud
from tests.support.contract import Writer

pytestmark = pytest.mark.emulated

FORBIDDEN = (PermissionDeniedError,)
HOLD_ID = "0" * 8 + "-0000-4000-8000-" + "0" * 12


@pytest.fixture
def saved(cloud: Cloud) -> Cloud:
    """The cloud with two runs, prod/a and prod/b, of a step each."""
    with cloud.client() as client:
        for n, name in enumerate(("prod/a", "prod/b")):
            x = np.random.default_rng(n).random(100_000)
            client.run(name).save(1, {"x": x}).result()
    return cloud


@pytest.fixture
def writer(saved: Cloud) -> Writer:
    """A writer of an open upload to prod/a."""
    opened = Writer(saved.address, "prod/a", 2, writers=2)
    opened.begin()
    return opened


@pytest.fixture
def to_write(saved: Cloud, writer: Writer) -> api.LendCredentialsResponse:
    return saved.lent(upload=writer.ref())


@pytest.fixture
def held(saved: Cloud) -> Iterator[str]:
    """Name of a hold on the step of prod/a."""
    with grpc.insecure_channel(saved.address) as channel:
        request = checkpoint_api.CreateHoldRequest(
            parent="namespaces/prod/runs/a/checkpoints/1",
            request_id=HOLD_ID,
            owner="tests",
        )
        hold = CheckpointServiceStub(channel).CreateHold(request, timeout=30).hold
        yield hold.name


@pytest.fixture
def to_read(saved: Cloud, held: str) -> api.LendCredentialsResponse:
    return saved.lent(hold=held)


def data_file(cloud: Cloud, run: str) -> str:
    """Returns the name of a data file of a run."""
    return next(n for n in cloud.names() if f"/data/{run}/pool/" in n)


def prefix_of(lent: api.LendCredentialsResponse) -> str:
    """Returns the prefix of a credential, as the beginning of names."""
    return lent.prefix.split("/", 3)[3]


def put(objects: Any, name: str, **options: Any) -> None:
    obstore.put(objects, name, b"x", use_multipart=False, **options)


def get(objects: Any, name: str) -> bytes:
    return bytes(obstore.get(objects, name).bytes())


OTHERS: dict[str, Callable[[Cloud], str]] = {
    "another run": lambda cloud: data_file(cloud, "prod/b"),
    "the record of the store": lambda cloud: f"{cloud.prefix}store.binpb",
    "the slot of its run": lambda cloud: next(
        n for n in cloud.names() if "/prod/a/checkpoints/" in n
    ),
    "the manifest of its run": lambda cloud: next(
        n for n in cloud.names() if "/prod/a/manifests/" in n
    ),
}


@pytest.mark.parametrize("which", OTHERS.values(), ids=list(OTHERS))
def test_a_write_credential_reads_nothing_else(
    saved: Cloud, to_write: api.LendCredentialsResponse, which: Callable[[Cloud], str]
) -> None:
    name = which(saved)
    assert get(saved.objects(own=True), name)

    with pytest.raises(FORBIDDEN):
        get(saved.objects(to_write), name)


def test_a_write_credential_does_not_read_committed_files_of_its_run(
    saved: Cloud, to_write: api.LendCredentialsResponse
) -> None:
    with pytest.raises(FORBIDDEN):
        get(saved.objects(to_write), data_file(saved, "prod/a"))


def test_a_write_credential_creates_files_of_its_upload_only(
    saved: Cloud, writer: Writer, to_write: api.LendCredentialsResponse
) -> None:
    thief, own = saved.objects(to_write), saved.objects(own=True)
    inside = prefix_of(to_write)
    assert inside.endswith(f"/prod/a/pool/{writer.name.rpartition('/')[2]}/")

    put(thief, f"{inside}new", mode="create")

    assert b"x" == get(own, f"{inside}new")
    for name in (
        f"{inside.removesuffix('/')}x/new",
        f"{inside.rpartition('/pool/')[0]}/checkpoints/{9:020}.binpb",
        f"{saved.prefix}data/prod/b/pool/{'0' * 32}/new",
        f"{saved.prefix}store.binpb",
    ):
        with pytest.raises(FORBIDDEN):
            put(thief, name, mode="create")


@pytest.mark.parametrize("mode", ["create", "overwrite"])
def test_a_write_credential_neither_replaces_nor_deletes_a_committed_file(
    saved: Cloud, to_write: api.LendCredentialsResponse, mode: Any
) -> None:
    thief, name = saved.objects(to_write), data_file(saved, "prod/a")
    before = get(saved.objects(own=True), name)

    with pytest.raises(FORBIDDEN):
        put(thief, name, mode=mode)
    with pytest.raises((*FORBIDDEN, GenericError)):
        obstore.delete(thief, name)

    assert before == get(saved.objects(own=True), name)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["create", "overwrite"])
def test_after_the_commit_a_write_credential_changes_no_file_of_its_upload(
    saved: Cloud, mode: Any
) -> None:
    with saved.client() as client:
        client.run("prod/c").save(1, {"x": np.arange(200_000)}).result()
    name = data_file(saved, "prod/c")
    before = get(saved.objects(own=True), name)
    thief = saved.objects(last_lent(saved))

    with pytest.raises(BaseError) as e:
        put(thief, name, mode=mode)
    assert not isinstance(e.value, GenericError)
    with pytest.raises((*FORBIDDEN, GenericError)):
        obstore.delete(thief, name)

    assert before == get(saved.objects(own=True), name)


def last_lent(cloud: Cloud) -> api.LendCredentialsResponse:
    """Returns the last credential that was lent, as its thief has it."""
    name = cloud.secrets[-1]
    if cloud.root.startswith("gs:"):
        return api.LendCredentialsResponse(gcs_token=name)
    session = cloud.rights.sessions[name]  # type: ignore[union-attr]
    return api.LendCredentialsResponse(
        s3=api.S3Credential(
            access_key_id=name,
            secret_access_key=session.secret,
            session_token=session.token,
        )
    )


def test_a_read_credential_reads_the_files_of_its_run_only(
    saved: Cloud, to_read: api.LendCredentialsResponse
) -> None:
    name = data_file(saved, "prod/a")
    thief = saved.objects(to_read)

    assert get(saved.objects(own=True), name) == get(thief, name)

    for which in OTHERS.values():
        with pytest.raises(FORBIDDEN):
            get(thief, which(saved))


@pytest.mark.parametrize("mode", ["create", "overwrite"])
def test_a_read_credential_writes_and_deletes_nothing(
    saved: Cloud, to_read: api.LendCredentialsResponse, mode: Any
) -> None:
    thief, name = saved.objects(to_read), data_file(saved, "prod/a")

    with pytest.raises(FORBIDDEN):
        put(thief, name, mode=mode)
    with pytest.raises(FORBIDDEN):
        put(thief, f"{prefix_of(to_read)}{'0' * 32}/new", mode=mode)
    with pytest.raises((*FORBIDDEN, GenericError)):
        obstore.delete(thief, name)

    assert get(saved.objects(own=True), name)


def test_no_lent_credential_lists(
    saved: Cloud,
    to_read: api.LendCredentialsResponse,
    to_write: api.LendCredentialsResponse,
) -> None:
    for lent in (to_read, to_write):
        for prefix in ("", saved.prefix, prefix_of(lent)):
            assert 200 == saved.list_status(None, prefix)
            assert 403 == saved.list_status(lent, prefix)


def test_a_credential_ends(saved: Cloud, held: str) -> None:
    saved.lend_for(0.0)
    lent, name = saved.lent(hold=held), data_file(saved, "prod/a")

    with pytest.raises((UnauthenticatedError, GenericError), match=r"401|ExpiredToken"):
        get(saved.objects(lent), name)


def test_a_credential_for_s3_needs_its_session_token(saved: Cloud, held: str) -> None:
    lent = saved.lent(hold=held)
    if lent.WhichOneof("credential") != "s3":
        return
    lent.s3.session_token = "another"

    with pytest.raises(FORBIDDEN):
        get(saved.objects(lent), data_file(saved, "prod/a"))


def refused(cloud: Cloud, **purpose: Any) -> grpc.RpcError:
    """Returns the error of a call that lends nothing."""
    with pytest.raises(grpc.RpcError) as e:
        cloud.lent(**purpose)
    return e.value


def test_nothing_is_lent_for_an_upload_that_has_ended(
    saved: Cloud, writer: Writer
) -> None:
    ref = writer.ref()
    writer.abort()

    assert grpc.StatusCode.NOT_FOUND == refused(saved, upload=ref).code()


@pytest.mark.slow
def test_nothing_is_lent_for_a_committed_upload(saved: Cloud) -> None:
    writer = Writer(saved.address, "prod/d", 1)
    writer.save(range(3))

    assert grpc.StatusCode.ALREADY_EXISTS == refused(saved, upload=writer.ref()).code()


def test_nothing_is_lent_for_an_upload_of_another_epoch(
    saved: Cloud, writer: Writer
) -> None:
    ref = writer.ref()
    ref.epoch += 1

    assert grpc.StatusCode.ABORTED == refused(saved, upload=ref).code()


def test_nothing_is_lent_to_a_writer_that_the_upload_does_not_have(
    saved: Cloud, writer: Writer
) -> None:
    assert saved.lent(upload=writer.ref(1)).prefix

    error = refused(saved, upload=writer.ref(2))

    assert grpc.StatusCode.INVALID_ARGUMENT == error.code()
    assert "upload.writer: expected 0 to 1, got 2" == error.details()


def test_nothing_is_lent_for_a_hold_that_does_not_exist(saved: Cloud) -> None:
    name = f"namespaces/prod/runs/a/holds/{'0' * 32}"

    assert grpc.StatusCode.NOT_FOUND == refused(saved, hold=name).code()


@pytest.mark.parametrize(
    "name",
    [
        "namespaces/prod/runs/../holds/" + "0" * 32,
        "namespaces/prod/runs/a/holds/../../b",
        "namespaces/*/runs/a/holds/" + "0" * 32,
        "",
    ],
)
def test_a_hostile_name_of_a_hold_is_rejected(saved: Cloud, name: str) -> None:
    error = refused(saved, hold=name)

    assert grpc.StatusCode.INVALID_ARGUMENT == error.code()


def test_a_request_without_a_purpose_is_rejected(saved: Cloud) -> None:
    assert grpc.StatusCode.INVALID_ARGUMENT == refused(saved).code()
