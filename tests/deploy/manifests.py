"""Manifests: the output of ``kubectl kustomize`` for an overlay."""

import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES_VERSION = "1.37"
"""The version of Kubernetes whose schemas are used."""

Object: TypeAlias = dict[str, Any]


def rendered(overlay: str) -> list[Object]:
    """Returns the objects of an overlay."""
    shown = subprocess.run(
        ["kubectl", "kustomize", DEPLOY / "kubernetes" / "overlays" / overlay],
        capture_output=True,
        text=True,
        check=True,
    )
    return list(yaml.safe_load_all(shown.stdout))


def read(path: Path) -> list[Object]:
    """Returns the objects of a file."""
    return list(yaml.safe_load_all(path.read_text()))


def name_of(found: Mapping[str, Any]) -> str:
    """Returns what an object is called, as kubectl writes it."""
    return f"{found['kind'].lower()}/{found['metadata']['name']}"


def jobs_of(jobset: Object) -> list[Object]:
    """Returns the Jobs that a JobSet makes: no schema of it comes with Kubernetes."""
    return [
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": f"{jobset['metadata']['name']}-{job['name']}"},
            **job["template"],
        }
        for job in jobset["spec"]["replicatedJobs"]
    ]


def pods_of(found: Object) -> Iterator[Object]:
    """Yields the specs of the pods that an object makes."""
    match found["kind"]:
        case "Deployment" | "Job":
            yield found["spec"]["template"]["spec"]
        case "JobSet":
            for job in jobs_of(found):
                yield from pods_of(job)


def options_of(objects: list[Object]) -> dict[str, str]:
    """Returns the options of the servers of an overlay."""
    return _data_of(objects, "storesvc-options")


def policy_of(objects: list[Object]) -> str:
    """Returns the policy of the servers of an overlay."""
    return _data_of(objects, "storesvc-policy")["policy.toml"]


def _data_of(objects: list[Object], name: str) -> dict[str, str]:
    """Returns what a generated ConfigMap has; its name has a suffix."""
    (found,) = (
        o
        for o in objects
        if o["kind"] == "ConfigMap" and o["metadata"]["name"].startswith(name)
    )
    data: dict[str, str] = found["data"]
    return data


def server_of(objects: list[Object]) -> Object:
    """Returns the Deployment of the servers."""
    (found,) = (o for o in objects if name_of(o) == "deployment/storesvc")
    return found


def arguments_of(objects: list[Object]) -> list[str]:
    """Returns what the container of a server is run with."""
    (container,) = server_of(objects)["spec"]["template"]["spec"]["containers"]
    return filled(container["args"], objects)


def filled(arguments: list[str], objects: list[Object]) -> list[str]:
    """Returns arguments with the options of an overlay."""
    for name, value in options_of(objects).items():
        arguments = [a.replace(f"$({name})", value) for a in arguments]
    return arguments
