"""Tests of the manifests for Kubernetes: they are valid, and their variables lead the workers to their group."""

import pathlib
from typing import Any

import pytest

from telegrad._core.stores.launchers import detect_launcher
from telegrad.directories import etcd_messages
from telegrad.launch import worker_command

FOLDER = pathlib.Path(__file__).parent.parent.parent / "examples" / "clusters"
VERSIONS = ("1.30", "1.31")
# The fields of a JobSet beside the Jobs in it, whose schema is Kubernetes' own; jobset.x-k8s.io/v1alpha2 itself
# cannot be installed from anywhere.
OF_A_JOBSET = {
    *("replicatedJobs", "network", "successPolicy", "failurePolicy", "startupPolicy"),
    *("suspend", "coordinator", "managedBy", "ttlSecondsAfterFinished"),
}
OF_A_REPLICATED_JOB = {"name", "groupName", "template", "replicas", "dependsOn"}

pytestmark = pytest.mark.nightly

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install --group launchers")
validator = pytest.importorskip("kubernetes_validate", reason="pip install --group launchers")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def job_of(replicated: dict[str, Any], jobset: str) -> dict[str, Any]:
    """Return the Job that the controller of JobSets makes."""
    name = f"{jobset}-{replicated['name']}-0"
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, **replicated["template"]}


def environment(job: dict[str, Any], index: int) -> dict[str, str]:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return {"JOB_COMPLETION_INDEX": str(index), **{each["name"]: each["value"] for each in container["env"]}}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_job_is_valid(version: str) -> None:
    for document in documents("job.yaml"):
        validator.validate(document, version, strict=True)


def test_the_pods_of_the_job_find_their_group() -> None:
    service, job = documents("job.yaml")
    name, spec = job["metadata"]["name"], job["spec"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"]
    for index in range(spec["completions"]):
        found = detect_launcher(environment(job, index))
        assert found is not None
        assert (found.launcher, found.rank, found.size) == ("Kubernetes", index, spec["parallelism"])
        assert found.init_method == f"tcp://{name}-0.{service['metadata']['name']}:29500"


@pytest.mark.parametrize("version", VERSIONS)
def test_the_deployment_is_valid(version: str) -> None:
    for document in documents("deployment.yaml"):
        validator.validate(document, version, strict=True)


def test_the_pods_of_the_deployment_find_their_directory() -> None:
    (deployment,) = documents("deployment.yaml")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    given = worker_command._parser().parse_args(container["command"][container["command"].index("worker") + 1 :])
    assert etcd_messages.parse_url(given.init_method).prefix == "runs/7/"
    assert deployment["spec"]["selector"]["matchLabels"] == deployment["spec"]["template"]["metadata"]["labels"]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_jobset_is_valid(version: str) -> None:
    (jobset,) = documents("jobset.yaml")
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert jobset["spec"].keys() <= OF_A_JOBSET
    names = [replicated["name"] for replicated in jobset["spec"]["replicatedJobs"]]
    for replicated in jobset["spec"]["replicatedJobs"]:
        assert replicated.keys() <= OF_A_REPLICATED_JOB
        validator.validate(job_of(replicated, jobset["metadata"]["name"]), version, strict=True)
    policy = jobset["spec"]["successPolicy"]
    assert policy["operator"] in ("All", "Any")
    assert set(policy["targetReplicatedJobs"]) <= set(names)


def test_the_pods_of_the_jobset_make_a_dynamic_group_at_the_learner() -> None:
    (jobset,) = documents("jobset.yaml")
    name = jobset["metadata"]["name"]
    for replicated in jobset["spec"]["replicatedJobs"]:
        variables = environment(job_of(replicated, name), 0)
        assert detect_launcher(variables) is None
        assert variables["MASTER_ADDR"] == f"{name}-learner-0-0.{name}"


def test_the_validation_finds_an_invalid_job() -> None:
    _, job = documents("job.yaml")
    job["spec"]["completion"] = 4
    with pytest.raises(validator.ValidationError):
        validator.validate(job, VERSIONS[0], strict=True)
