"""The console changes a store: it asks once, names the command, passes on etags."""

import re
import shlex
from collections.abc import Callable
from contextlib import suppress
from html import unescape
from pathlib import Path

import httpx
import numpy as np
import pytest

import storesvc_client as store
from storesvc.auth.policy import Authentication, Principal
from storesvc.rpc.calls import Security
from tests.console.served import ServedConsole
from tests.support.command_line import printed
from tests.support.faulty_server import serving
from tests.support.policies import Policies

TREE = {"w": np.ones(4, np.float32)}


@pytest.fixture
def run(run: store.Run) -> store.Run:
    """A run with three checkpoints."""
    for step in (1, 2, 3):
        run.save(step, TREE, metrics={"loss": 1 / step}, labels={"a": "b"}).result()
    return run


def asked(console: ServedConsole, path: str) -> tuple[str, dict[str, str], str]:
    """Returns the form of a question: its address, its fields, and the command."""
    html = console.text(path)
    (action,) = re.findall(r'<form method="post" action="([^"]+)"', html)
    form = html.partition('<form method="post"')[2]
    fields = re.findall(r'type="hidden" name="([^"]+)" value="([^"]*)"', form)
    (command,) = re.findall(r'class="cmd".*?<code>(.*?)</code>', html)
    return action, {n: unescape(v) for n, v in fields}, unescape(command)


def agreed(console: ServedConsole, path: str) -> httpx.Response:
    """Makes the change that a question asks about."""
    action, fields, _ = asked(console, path)
    return console.http.post(action, data=fields)


def change(action: str, run: store.Run, **values: object) -> str:
    query = "&".join(f"{name}={value}" for name, value in values.items())
    return f"/change/{action}?run={run.name}&{query}"


def links_to(html: str, action: str) -> list[str]:
    return [
        unescape(found) for found in re.findall(rf'"(/change/{action}\?[^"]*)"', html)
    ]


@pytest.mark.slow
def test_a_tag_is_set(own: ServedConsole, run: store.Run) -> None:
    response = agreed(own, change("tag", run, step=2, tag="best"))

    assert 303 == response.status_code
    assert f"/r/{run.name}@2" == response.headers["location"]
    assert ["best"] == [tag.name for tag in run.tags.list()]
    assert "best" in own.text(response.headers["location"])


def test_a_tag_is_moved_only_from_where_the_user_saw_it(
    own: ServedConsole, run: store.Run
) -> None:
    run.tags.set("best", 1)
    action, fields, _ = asked(own, change("tag", run, step=2, tag="best"))
    run.tags.set("best", 3)  # another user

    response = own.http.post(action, data=fields)

    assert 409 == response.status_code
    assert [3] == [tag.step for tag in run.tags.list()]


def test_a_tag_is_deleted_by_the_button_of_its_checkpoint(
    own: ServedConsole, run: store.Run
) -> None:
    run.tags.set("best", 1)
    (link,) = links_to(own.text(f"/r/{run.name}@1"), "untag")

    assert 303 == agreed(own, link).status_code
    assert [] == [*run.tags.list()]


def test_a_checkpoint_is_pinned_and_unpinned(
    own: ServedConsole, run: store.Run
) -> None:
    for action, pinned in (("pin", True), ("unpin", False)):
        (link,) = links_to(own.text(f"/r/{run.name}@1"), action)
        assert 303 == agreed(own, link).status_code

        assert pinned is run.checkpoint(1).pinned


def test_a_button_of_an_old_page_is_rejected(
    own: ServedConsole, run: store.Run
) -> None:
    (link,) = links_to(own.text(f"/r/{run.name}@1"), "delete")
    run.update(1, labels={"keep": "this"})  # another user

    response = agreed(own, link)

    assert 409 == response.status_code
    assert 1 in run.steps()


@pytest.mark.slow
def test_a_hold_is_ended_by_the_button_of_its_checkpoint(
    own: ServedConsole, run: store.Run
) -> None:
    hold = run.holds.create(1, owner="<b>eval</b>")
    (link,) = links_to(own.text(f"/r/{run.name}@1"), "end-hold")

    assert 303 == agreed(own, link).status_code
    assert [] == [*run.holds.list()]
    with suppress(store.StoreError):  # its renewal may have failed in the meantime
        hold.close()


def test_a_label_is_set_and_removed_and_the_others_stay(
    own: ServedConsole, run: store.Run
) -> None:
    agreed(own, change("label", run, step=1, label="stage", text="final%20%26%20done"))
    assert {"a": "b", "stage": "final & done"} == run.checkpoint(1).labels

    agreed(own, change("label", run, step=1, label="a", text=""))
    assert {"stage": "final & done"} == run.checkpoint(1).labels


@pytest.mark.slow
def test_a_checkpoint_is_deleted_and_undeleted(
    own: ServedConsole, run: store.Run
) -> None:
    (link,) = links_to(own.text(f"/r/{run.name}@2"), "delete")
    assert 303 == agreed(own, link).status_code
    assert [1, 3] == run.steps()

    (link,) = set(links_to(own.text(f"/r/{run.name}@2"), "undelete"))
    assert 303 == agreed(own, link).status_code
    assert [1, 2, 3] == run.steps()


def test_a_pinned_checkpoint_is_not_deleted(own: ServedConsole, run: store.Run) -> None:
    action, fields, _ = asked(own, change("delete", run, step=2))
    run.update(2, pinned=True)
    run.tags.set("best", 2)

    question = own.get(change("delete", run, step=2))
    response = own.http.post(action, data=fields | {"etag": ""})

    assert (409, 409) == (question.status_code, response.status_code)
    assert "kept by a pin and the tag best" in question.text
    assert "kept by a pin" in response.text
    assert 2 in run.steps()


@pytest.mark.parametrize(
    ("action", "values", "status", "words"),
    [
        ("tag", {"step": 1, "tag": "My Tag"}, 400, "such as &#39;My-Tag&#39;"),
        ("tag", {"step": 1, "tag": "latest"}, 400, "expected a letter first, and not"),
        ("tag", {"step": 9, "tag": "best"}, 404, "the nearest steps"),
        ("untag", {"tag": "absent"}, 404, "has no tag absent"),
        ("end-hold", {"hold": "x"}, 400, "hold &#39;x&#39;"),
        ("label", {"step": 1, "label": "absent"}, 400, "no label &#39;absent&#39;"),
        ("policy", {"policy": "best(1,los,min)"}, 400, "expected a metric of the"),
    ],
)
def test_what_the_store_would_reject_is_not_asked(
    own: ServedConsole,
    run: store.Run,
    action: str,
    values: dict[str, object],
    status: int,
    words: str,
) -> None:
    response = own.get(change(action, run, **values))

    assert status == response.status_code
    assert words in response.text
    assert "<form method=" not in response.text


def test_the_move_of_a_tag_says_which_step_loses_its_protection(
    own: ServedConsole, run: store.Run
) -> None:
    def effect(step: int) -> str:
        question = own.document(change("tag", run, step=step, tag="best"))
        return str(question["effect"])

    assert effect(3).endswith("dropped by a retention policy.")
    run.tags.set("best", 1)
    assert effect(3).endswith("step 1 loses its protection.")
    assert effect(1).endswith("The tag names this checkpoint now.")
    run.update(1, pinned=True)
    run.tags.set("prod", 1)
    assert effect(3).endswith("step 1 stays protected by a pin and the tag prod.")
    untag = own.document(change("untag", run, tag="best"))["effect"]
    assert untag.endswith("Step 1 stays, protected by a pin and the tag prod.")


def test_a_question_has_its_verb_and_repeats_the_number_to_delete(
    own: ServedConsole, run: store.Run
) -> None:
    html = own.text(change("policy", run, policy="latest(1)"))

    assert '<button class="go">Set policy</button>' in html
    assert ">Cancel</a>" in html
    assert "Now that is 2 of 3 checkpoints, with " in html
    assert f'<a href="/r/{run.name}">' in html.partition("<h1>")[0]
    pin = own.text(change("pin", run, step=2))
    assert f'<a href="/r/{run.name}@2">@2</a>' in pin.partition("<h1>")[0]


@pytest.mark.slow
def test_a_policy_is_set_applied_and_removed(
    own: ServedConsole, run: store.Run
) -> None:
    (link,) = links_to(own.text(f"/r/{run.name}?policy=latest(1)"), "policy")
    assert 303 == agreed(own, link).status_code
    assert store.KeepLatest(1) == run.retention.get()
    assert [1, 2, 3] == run.steps()

    (link,) = links_to(own.text(f"/r/{run.name}"), "apply")
    assert 303 == agreed(own, link).status_code
    assert [3] == run.steps()

    (link,) = links_to(own.text(f"/r/{run.name}"), "policy")
    assert 303 == agreed(own, link).status_code
    assert run.retention.get() is None


@pytest.mark.slow
def test_a_policy_is_not_set_over_that_of_another_user(
    own: ServedConsole, run: store.Run
) -> None:
    (link,) = links_to(own.text(f"/r/{run.name}?policy=latest(1)"), "policy")
    run.retention.set(store.KeepLatest(2))

    assert 409 == agreed(own, link).status_code
    assert store.KeepLatest(2) == run.retention.get()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "values", "seen"),
    [
        (
            "tag",
            {"step": 2, "tag": "best"},
            lambda run: [tag.step for tag in run.tags.list()],
        ),
        ("pin", {"step": 2}, lambda run: run.checkpoint(2).pinned),
        (
            "label",
            {"step": 2, "label": "x", "text": "two words"},
            lambda run: dict(run.checkpoint(2).labels),
        ),
        (
            "label",
            {"step": 2, "label": "a", "text": ""},
            lambda run: dict(run.checkpoint(2).labels),
        ),
        ("delete", {"step": 2}, lambda run: run.steps()),
        ("policy", {"policy": "latest(2)"}, lambda run: run.retention.get()),
    ],
)
def test_the_command_of_a_change_does_the_same(
    own: ServedConsole,
    client: store.Client,
    server_address: str,
    run: store.Run,
    action: str,
    values: dict[str, object],
    seen: Callable[[store.Run], object],
) -> None:
    twin = client.run(f"{run.name}-twin")
    for step in (1, 2, 3):
        twin.save(step, TREE, labels={"a": "b"}).result()
    _, _, command = asked(own, change(action, twin, **values))

    assert 303 == agreed(own, change(action, run, **values)).status_code
    printed(server_address, *shlex.split(command)[1:])

    assert seen(twin) == seen(run)


@pytest.mark.slow
def test_the_server_decides_what_a_user_sees_and_changes(tmp_path: Path) -> None:
    policies = Policies()

    async def authenticate(_context: object) -> Principal:
        return Principal(name="user:ana", authentication=Authentication.TOKEN)

    security = Security(
        authenticate=authenticate, policy=lambda: policies.policy, observers=()
    )
    policies.bind(("admin", "prod/*", "user:ana"))
    with (
        serving(tmp_path / "store", security=security) as address,
        store.connect(address) as client,
        ServedConsole(client) as served,
    ):
        for name in ("prod/open", "prod/secret"):
            client.run(name).save(1, TREE).result()
            client.run(name).retention.set(store.KeepLatest(1))
        policies.bind(("reader", "prod/open", "user:ana"))

        runs = served.text("/")
        run = served.text("/r/prod/open")
        checkpoint = served.text("/r/prod/open@1")
        denied = agreed(served, "/change/delete?run=prod/open&step=1")
        hidden = served.get("/r/prod/secret")
        me = served.text("/me?in=prod/open")

        assert [1] == client.run("prod/open").steps()

    assert "prod/open" in runs
    assert "secret" not in runs
    assert "latest(1)" in run
    for html in (run, checkpoint):  # no button of what the server would deny
        assert {"/change/end-hold"} >= {*re.findall(r"/change/[a-z-]+", html)}
    assert (403, 404) == (denied.status_code, hidden.status_code)
    assert "checkpoints.delete" in denied.text
    assert "checkpoints.read" in me
    assert "checkpoints.delete" not in me


def test_a_tag_that_another_user_has_set_since_is_not_moved(
    own: ServedConsole, run: store.Run
) -> None:
    action, fields, _ = asked(own, change("tag", run, step=2, tag="best"))
    run.tags.set("best", 3)

    response = own.http.post(action, data=fields)

    assert response.status_code == 409
    assert "another user has set it since" in unescape(response.text)
    assert [(tag.name, tag.step) for tag in run.tags.list()] == [("best", 3)]


@pytest.mark.slow
def test_a_policy_that_another_user_has_changed_since_is_not_applied(
    own: ServedConsole, run: store.Run
) -> None:
    # Neither deletes any of the three steps when the store itself applies it.
    run.retention.set(store.KeepLatest(3))
    action, fields, _ = asked(own, change("apply", run))
    run.retention.set(store.KeepLatest(4))

    response = own.http.post(action, data=fields)

    assert response.status_code == 409
    assert "another user has changed the run since" in " ".join(
        unescape(response.text).split()
    )
