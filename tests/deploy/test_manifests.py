"""The manifests: valid for Kubernetes, with the properties that operators rely on."""

import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from storesvc.auth.policy import ANONYMOUS, LOCAL, Authentication, Permission, Principal
from storesvc.auth.policy_file import parse
from storesvc.auth.tokens import make_principal
from storesvc.format.names import RunName
from storesvc.restore.sender import READ_BUFFER_BYTES
from storesvc.save.batches import BATCH_BYTES
from storesvc.save.receiver import MAX_BATCHES
from storesvc.server.app import DRAIN_SECONDS, NOTICE_SECONDS
from storesvc.server.process import LOOP_SECONDS
from storesvc.storage.location import storage_at
from tests.deploy.manifests import (
    DEPLOY,
    KUBERNETES_VERSION,
    Object,
    arguments_of,
    filled,
    jobs_of,
    name_of,
    options_of,
    pods_of,
    policy_of,
    read,
    rendered,
    server_of,
)
from tests.repo.test_deploy_guide import GUIDE, ROOT, step_with, steps
from tests.support.storectl_lines import check_line

OVERLAYS = sorted(path.name for path in (DEPLOY / "kubernetes" / "overlays").iterdir())
EXAMPLES = sorted((DEPLOY / "examples").glob("*.yaml"))
GIB = 1 << 30

each_overlay = pytest.mark.parametrize("overlay", OVERLAYS, indirect=True)


@pytest.fixture(scope="module")
def overlay(request: pytest.FixtureRequest) -> list[Object]:
    """The objects of an overlay."""
    return rendered(request.param)


@pytest.fixture(scope="module")
def examples() -> list[Object]:
    """The objects of the examples."""
    return [found for path in EXAMPLES for found in read(path)]


def refusals(found: Object) -> list[str]:
    """Returns the errors of Kubernetes for an object."""
    # no schemas come with Kubernetes
    if found["apiVersion"].startswith(("cert-manager.io/", "monitoring.")):
        return []
    if found["kind"] == "JobSet":
        return [text for job in jobs_of(found) for text in refusals(job)]
    try:
        kubernetes_validate.validate(found, KUBERNETES_VERSION, strict=True)
    except kubernetes_validate.ValidationError as e:
        return [f"{name_of(found)}: {e.message}"]
    return []


def container_of(overlay: list[Object]) -> Any:
    """The container of a server."""
    (container,) = server_of(overlay)["spec"]["template"]["spec"]["containers"]
    return container


@each_overlay
def test_kubernetes_takes_every_object_of_an_overlay(overlay: list[Object]) -> None:
    assert len(overlay) > 5
    assert [] == [text for found in overlay for text in refusals(found)]


def test_kubernetes_takes_every_object_of_the_examples(examples: list[Object]) -> None:
    assert {"Job", "JobSet", "Service"} <= {found["kind"] for found in examples}
    assert [] == [text for found in examples for text in refusals(found)]


def test_a_mistake_in_a_manifest_is_found(examples: list[Object]) -> None:
    (jobset,) = (found for found in examples if found["kind"] == "JobSet")
    template = jobset["spec"]["replicatedJobs"][0]["template"]
    wrong = {**template, "spec": {**template["spec"], "paralelism": 4}}

    found = {**jobset["spec"], "replicatedJobs": [{"name": "x", "template": wrong}]}

    (text,) = refusals({**jobset, "spec": found})
    assert "paralelism" in text


@each_overlay
def test_pods_can_neither_write_nor_become_more_than_they_are(
    overlay: list[Object], examples: list[Object]
) -> None:
    pods = [pod for found in (*overlay, *examples) for pod in pods_of(found)]

    assert len(pods) >= 3
    for pod in pods:
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 10_000
        assert {"type": "RuntimeDefault"} == pod["securityContext"]["seccompProfile"]
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            expected = {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert expected == container["securityContext"]
            assert "memory" in container["resources"]["limits"]


@each_overlay
def test_images_are_pinned_and_come_from_the_registry_by_digest(
    overlay: list[Object], examples: list[Object]
) -> None:
    (namespace,) = (o["metadata"]["name"] for o in overlay if o["kind"] == "Namespace")
    pods = [pod for found in (*overlay, *examples) for pod in pods_of(found)]
    images = {
        container["image"]
        for pod in pods
        for container in (*pod.get("initContainers", ()), *pod["containers"])
    }
    server = {
        container["image"]
        for pod in pods_of(server_of(overlay))
        for container in (*pod["initContainers"], *pod["containers"])
    }

    is_trial = namespace == "storesvc-dev"
    digest = "registry.example/storesvc@sha256:DIGEST"
    assert {"storesvc:0.2.0" if is_trial else digest} == server
    # kubelets pull an image without either again and again
    assert [] == [image for image in images if not re.search("[:@]", image)]


def test_the_guide_shows_which_fields_are_left_to_edit() -> None:
    step = step_with("kubectl kustomize")
    table = re.findall(r"^\| `(\w+)`.* \|$", GUIDE.read_text(), re.MULTILINE)

    (line,) = step.lines
    shown = subprocess.run(
        line, shell=True, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )

    assert sorted(step.output.splitlines()) == sorted(shown.stdout.splitlines())
    for field in ("BUCKET", "DIGEST", "PROJECT", "issuer"):
        assert field in step.output
        assert field in table


def applied(line: str) -> set[str]:
    """Returns what kubectl says to have applied, for a line of the guide."""
    _, option, place = re.split(r" (-[fk]) ", line)
    objects = rendered(Path(place).name) if option == "-k" else read(ROOT / place)
    names = set()
    for found in objects:
        group = found["apiVersion"].rpartition("/")[0]
        kind = found["kind"].lower() + (f".{group}" if group else "")
        names.add(f"{kind}/{found['metadata']['name']}")
    return {without_hash(name) for name in names}


def without_hash(name: str) -> str:
    """Returns a name without the suffix of a generated ConfigMap."""
    return re.sub(r"(?<=options|.policy)-[a-z0-9]{10}$", "", name)


def test_the_guide_shows_every_object_that_is_applied() -> None:
    pattern = re.compile(r"^(\S+/\S+) (?:created|unchanged)$", re.MULTILINE)
    for step in steps():
        lines = [
            line
            for line in step.lines
            if re.search("kubectl .*apply -", line) and "|" not in line
        ]
        named = {
            f"{found[1]}/{found[2]}"
            for line in step.lines
            if (
                found := re.search(
                    r"create (secret|configmap)(?: generic)? (\S+)", line
                )
            )
        }
        if lines:
            expected = named.union(*map(applied, lines))
            shown = {without_hash(name) for name in pattern.findall(step.output)}
            assert expected == shown


@each_overlay
def test_storectl_takes_what_pods_run_it_with(overlay: list[Object]) -> None:
    check_line(["serve", *arguments_of(overlay)])


@each_overlay
def test_one_collector_works_for_servers_that_do_not_collect(
    overlay: list[Object],
) -> None:
    (found,) = (o for o in overlay if name_of(o) == "deployment/storesvc-collector")
    (container,) = found["spec"]["template"]["spec"]["containers"]
    arguments = filled(container["args"], overlay)
    labels = found["spec"]["template"]["metadata"]["labels"]

    check_line(["serve", *arguments])
    assert "--collect-only" in arguments
    assert "--gc-interval=0s" in arguments_of(overlay)
    assert "--gc-interval=0s" not in arguments
    assert 1 == found["spec"]["replicas"]
    # Callers of the service must not reach it.
    (service,) = (o for o in overlay if name_of(o) == "service/storesvc")
    assert not service["spec"]["selector"].items() <= labels.items()


@each_overlay
def test_each_policy_of_the_network_is_for_the_collector_too(
    overlay: list[Object],
) -> None:
    policies = [o for o in overlay if o["kind"] == "NetworkPolicy"]
    ours = [o for o in policies if o["metadata"]["name"].startswith("storesvc")]

    assert ours
    for found in ours:
        (chosen,) = found["spec"]["podSelector"]["matchExpressions"]
        assert ["storesvc", "storesvc-collector"] == chosen["values"]


@each_overlay
def test_probes_ask_the_server_and_start_no_program(overlay: list[Object]) -> None:
    container = container_of(overlay)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}

    paths = {
        name: container[name]["httpGet"]["path"]
        for name in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    asked = {container[name]["httpGet"]["port"] for name in paths}

    assert {"metrics"} == asked
    assert f"--metrics-port={ports['metrics']}" in arguments_of(overlay)
    assert ["/readyz", "/readyz", "/healthz"] == [*paths.values()]
    # longer than the server waits for its loop
    assert all(container[name]["timeoutSeconds"] > LOOP_SECONDS for name in paths)


@each_overlay
def test_a_rollout_does_not_spread_around_the_pods_that_it_replaces(
    overlay: list[Object],
) -> None:
    spread = server_of(overlay)["spec"]["template"]["spec"]["topologySpreadConstraints"]

    assert [["pod-template-hash"]] * 2 == [each["matchLabelKeys"] for each in spread]


def test_the_autoscaler_by_queues_has_the_metrics_of_the_adapter() -> None:
    (scaler,) = read(DEPLOY / "examples" / "autoscaler.yaml")
    (base,) = read(DEPLOY / "kubernetes" / "base" / "autoscaler.yaml")
    (adapter,) = read(DEPLOY / "prometheus" / "adapter.yaml")
    rules = adapter["rules"]["custom"]
    wanted = {
        each["pods"]["metric"]["name"]
        for each in scaler["spec"]["metrics"]
        if each["type"] == "Pods"
    }
    known = (ROOT / "docs" / "metrics.md").read_text()

    assert base["spec"]["scaleTargetRef"] == scaler["spec"]["scaleTargetRef"]
    assert wanted == {rule["name"]["as"] for rule in rules}
    for rule in rules:
        name = re.match(r"\w+", rule["seriesQuery"])
        assert name
        assert name[0] in rule["metricsQuery"]
        assert f"`{name[0].removesuffix('_sum')}`" in known


@each_overlay
def test_a_server_that_others_reach_has_a_certificate_and_a_policy(
    overlay: list[Object],
) -> None:
    arguments = dict(a.split("=", 1) for a in arguments_of(overlay))

    assert "0.0.0.0" == arguments["--host"]
    assert {"--tls-cert", "--tls-key", "--policy"} <= arguments.keys()


@each_overlay
def test_each_server_has_an_audit_log_that_leaves_its_pod(
    overlay: list[Object],
) -> None:
    spec = server_of(overlay)["spec"]["template"]["spec"]
    log = dict(a.split("=", 1) for a in arguments_of(overlay))["--audit-log"]
    user = spec["securityContext"]
    (copying,) = spec["initContainers"]
    (mount,) = copying["volumeMounts"]
    own = {each["name"]: each for each in container_of(overlay)["volumeMounts"]}

    assert log in copying["command"][-1].split()
    assert Path(log).is_relative_to(mount["mountPath"])
    assert mount["mountPath"] == own[mount["name"]]["mountPath"]
    assert (True, False) == (mount["readOnly"], "readOnly" in own[mount["name"]])
    assert container_of(overlay)["image"] == copying["image"]
    (volume,) = (v for v in spec["volumes"] if v["name"] == mount["name"])
    assert {"sizeLimit": "2Gi"} == volume["emptyDir"]
    assert user["runAsGroup"] == user["fsGroup"]  # both containers may read it


@each_overlay
def test_the_policy_permits_pods_of_training_jobs_to_save(
    overlay: list[Object],
) -> None:
    found = parse(policy_of(overlay), has_local=False)
    (issuer,) = found.issuers
    claims = {
        "iss": issuer.issuer,
        "aud": ["storesvc"],
        "sub": "system:serviceaccount:training:training",
        "iat": 1,
        "exp": 3601,
        "kubernetes.io": {
            "namespace": "training",
            "serviceaccount": {"name": "training"},
        },
    }

    pod = make_principal(issuer, claims, now=datetime.fromtimestamp(2, UTC))

    run = RunName("any", "run")
    assert pod.name == "k8s:training/training"
    assert found.policy.permits(pod, Permission.UPLOADS_COMMIT, run)
    assert not found.policy.permits(pod, Permission.CHECKPOINTS_PURGE, run)
    assert not found.policy.permits(ANONYMOUS, Permission.RUNS_LIST, run)


@each_overlay
def test_the_policy_gives_rights_to_nobody_without_a_token(
    overlay: list[Object],
) -> None:
    policy, namespace = parse(policy_of(overlay), has_local=False).policy, ""
    for found in overlay:
        if name_of(found) == "serviceaccount/operator":
            namespace = found["metadata"]["namespace"]
    operator = Principal(
        name=f"k8s:{namespace}/operator", authentication=Authentication.TOKEN
    )
    run = RunName("any", "run")

    for caller in (ANONYMOUS, LOCAL):
        assert not any(policy.permits(caller, each, run) for each in Permission)
    assert policy.permits(operator, Permission.CHECKPOINTS_PURGE, run)


@each_overlay
def test_objects_that_a_server_refers_to_exist(overlay: list[Object]) -> None:
    spec = server_of(overlay)["spec"]["template"]["spec"]
    names = {name_of(found) for found in overlay}
    container = container_of(overlay)

    assert f"serviceaccount/{spec['serviceAccountName']}" in names
    (source,) = container["envFrom"]
    assert f"configmap/{source['configMapRef']['name']}" in names
    assert {m["name"] for m in container["volumeMounts"]} == {
        volume["name"] for volume in spec["volumes"]
    }
    assert storage_at(options_of(overlay)["ROOT"]).is_remote
    assert "$(" not in "".join(arguments_of(overlay))


@each_overlay
def test_all_objects_of_an_overlay_are_in_its_namespace(overlay: list[Object]) -> None:
    (namespace,) = (o["metadata"]["name"] for o in overlay if o["kind"] == "Namespace")
    others = [found for found in overlay if found["kind"] != "Namespace"]

    assert {namespace} == {found["metadata"]["namespace"] for found in others}


@each_overlay
def test_a_pod_is_killed_only_after_it_could_drain(overlay: list[Object]) -> None:
    sleep = container_of(overlay)["lifecycle"]["preStop"]["sleep"]["seconds"]
    spec = server_of(overlay)["spec"]["template"]["spec"]

    needed = sleep + NOTICE_SECONDS + DRAIN_SECONDS

    assert spec["terminationGracePeriodSeconds"] >= needed + 5


@each_overlay
def test_the_limit_of_memory_is_above_what_a_server_may_take(
    overlay: list[Object],
) -> None:
    limit = container_of(overlay)["resources"]["limits"]["memory"]
    # as python -m benchmarks.memory --bucket counts; a quarter is for all else
    bound = READ_BUFFER_BYTES + 3 * MAX_BATCHES * BATCH_BYTES

    assert int(limit.removesuffix("Gi")) * GIB * 0.75 >= bound
