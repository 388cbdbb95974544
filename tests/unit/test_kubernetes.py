"""The example for Kubernetes: valid by its schemas, and true to what the program needs."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from gemm_tuner.trust.attestation import MeasuringKeys
from gemm_tuner.trust.keys import KeyPair

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
VERSIONS = ("1.29", "1.37")  # the oldest that it is meant for, and the newest that is known here
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())


def _objects() -> Iterator[dict[str, Any]]:
    for name in KUSTOMIZATION["resources"]:
        yield from yaml.safe_load_all((FOLDER / name).read_text())


OBJECTS = {f"{one['kind']} {one['metadata']['name']}": one for one in _objects()}
PODS = {
    name: one["spec"]["template"]["spec"]
    for name, one in OBJECTS.items()
    if one["kind"] in {"Deployment", "DaemonSet"}
}
CONTAINERS = [
    (pod, container)
    for pod in PODS.values()
    for container in (*pod["initContainers"], *pod["containers"])
]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_is_valid(name: str, version: str) -> None:
    kubernetes_validate.validate(OBJECTS[name], version, strict=True)


def test_the_validator_finds_a_mistyped_field() -> None:
    wrong = {**OBJECTS["Deployment gemm-tuner"], "specc": {}}

    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_every_file_is_of_the_kustomization() -> None:
    files = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    images = {image["name"] for image in KUSTOMIZATION["images"]}

    assert files == set(KUSTOMIZATION["resources"])
    assert {container["image"] for _pod, container in CONTAINERS} == images


def test_no_container_has_a_right_that_it_can_do_without() -> None:
    for pod, container in CONTAINERS:
        context, of_pod = container["securityContext"], pod["securityContext"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert of_pod["runAsNonRoot"] is True
        assert of_pod["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        # GEMM_TUNER_PORT would be tcp://10.0.0.1:443.
        assert pod["enableServiceLinks"] is False


def test_a_worker_has_whole_cores_of_its_own() -> None:
    """The static CPU manager asks for this: the class Guaranteed, with a whole number of cores."""
    pod = PODS["DaemonSet gemm-tuner-worker-zen4"]

    for container in (*pod["initContainers"], *pod["containers"]):
        resources = container["resources"]
        assert resources["requests"] == resources["limits"]
        assert resources["limits"]["cpu"].isdecimal()
        assert set(resources["limits"]) == {"cpu", "memory"}


def test_what_is_mounted_and_selected_is_there() -> None:
    for pod, container in CONTAINERS:
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    labels = [
        one["spec"]["template"]["metadata"]["labels"]
        for one in OBJECTS.values()
        if one["kind"] in {"Deployment", "DaemonSet"}
    ]
    for one in OBJECTS.values():
        selector = one.get("spec", {}).get("selector") or one.get("spec", {}).get("podSelector")
        wanted = (selector or {}).get("matchLabels", selector) or {}
        assert any(wanted.items() <= found.items() for found in labels), one


def test_probes_ask_for_routes_and_settings_are_settings() -> None:
    probes = [
        container[kind]["httpGet"]["path"]
        for _pod, container in CONTAINERS
        for kind in ("startupProbe", "livenessProbe", "readinessProbe")
        if kind in container
    ]
    routes = yaml.safe_load((ROOT / "docs" / "openapi.json").read_text())["paths"]
    manual = (ROOT / "docs" / "service.md").read_text() + (
        ROOT / "docs" / "security.md"
    ).read_text()
    named = {
        variable["name"] for _pod, container in CONTAINERS for variable in container.get("env", ())
    }

    assert set(probes) == {"/healthz", "/readyz"} <= set(routes)
    assert named
    assert named <= set(re.findall(r"GEMM_TUNER_[A-Z_]+", manual))


def test_secrets_are_those_that_the_page_makes() -> None:
    made = set(re.findall(r"k (?:generic|tls) (\S+)", (FOLDER / "README.md").read_text()))
    named = {
        volume["secret"]["secretName"]
        for pod in PODS.values()
        for volume in pod["volumes"]
        if "secret" in volume
    }
    named |= {
        variable["valueFrom"]["secretKeyRef"]["name"]
        for _pod, container in CONTAINERS
        for variable in container.get("env", ())
        if "valueFrom" in variable
    }

    assert named == made


def test_keys_that_the_page_makes_are_keys(tmp_path: Path) -> None:
    """As `openssl genpkey` writes them; the list of keys is one in hex on each line."""
    pair = KeyPair.load_or_create(tmp_path / "measuring-key.pem")
    (tmp_path / "measuring-keys.txt").write_text(f"{pair.public_key.hex()}\n")
    (tmp_path / "measuring-keys.txt").chmod(0o600)

    assert MeasuringKeys(tmp_path).accepted() == {pair.public_key.hex()}
