"""The pages that start a run: Kubernetes manifests by the fields of their kinds, commands by their options."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from arachnec.backends.torch_distributed.worker import command
from arachnec.cluster.file import parse_cluster
from tests.distributed.executor_cases import RUNS, Work, clip, executable
from tests.ports import free_port
from tests.warm_python import warm_python

yaml: Any = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "examples" / "launch"
BLOCK = re.compile(r"```\w*\n(.*?)```", re.DOTALL)
WORKER = "arachnec.backends.torch_distributed.worker"

# Fields of a kind, as its schema has them: `!` marks those that are required, [x] a list of x, a set what is allowed.
CONTAINER = {
    "name!": str, "image!": str, "command": [str], "args": [str], "env": [{"name!": str, "value": str}],
    "resources": {"limits": dict, "requests": dict}, "volumeMounts": [{"name!": str, "mountPath!": str}],
}  # fmt: skip
VOLUME = {"name!": str, "persistentVolumeClaim": {"claimName!": str}, "emptyDir": {"medium": str}}
POD = {"restartPolicy": {"Never", "OnFailure"}, "containers!": [CONTAINER], "volumes": [VOLUME]}
JOB = {"parallelism": int, "completions": int, "backoffLimit": int, "template!": {"spec!": POD}}
REPLICA = {"replicas": int, "restartPolicy": {"Never", "OnFailure", "Always", "ExitCode"}, "template!": {"spec!": POD}}
METADATA = {"name!": str, "namespace": str, "labels": dict}
KINDS = {
    "JobSet": {
        "apiVersion!": {"jobset.x-k8s.io/v1alpha2"}, "kind!": {"JobSet"}, "metadata!": METADATA,
        "spec!": {
            "failurePolicy": {"maxRestarts": int},
            "replicatedJobs!": [{"name!": str, "replicas": int, "template!": {"spec!": JOB}}],
        },
    },
    "PyTorchJob": {
        "apiVersion!": {"kubeflow.org/v1"}, "kind!": {"PyTorchJob"}, "metadata!": METADATA,
        "spec!": {
            "nprocPerNode": str, "runPolicy": {"backoffLimit": int, "cleanPodPolicy": str},
            "pytorchReplicaSpecs!": {"Master!": REPLICA, "Worker": REPLICA},
        },
    },
}  # fmt: skip


def problems(value: Any, schema: Any, place: str = "") -> Iterator[str]:
    """What of a value is not as its schema says."""
    if isinstance(schema, set):
        if value not in schema:
            yield f"{place} is {value!r}"
    elif isinstance(schema, list):
        if not isinstance(value, list) or not value:
            yield f"{place} is no list"
        else:
            for number, item in enumerate(value):
                yield from problems(item, schema[0], f"{place}[{number}]")
    elif isinstance(schema, Mapping):
        if not isinstance(value, Mapping):
            yield f"{place} is no mapping"
            return
        fields = {name.rstrip("!"): inner for name, inner in schema.items()}
        yield from (f"{place}.{name} is unknown" for name in value if name not in fields)
        yield from (f"{place}.{n[:-1]} is missing" for n in schema if n.endswith("!") and n[:-1] not in value)
        for name in value.keys() & fields.keys():
            yield from problems(value[name], fields[name], f"{place}.{name}")
    elif not isinstance(value, schema):
        yield f"{place} is {value!r}"


def read(name: str) -> Any:
    return yaml.safe_load((LAUNCH / name).read_text())


def pods(manifest: Any) -> list[Any]:
    if manifest["kind"] == "JobSet":
        return [job["template"]["spec"]["template"]["spec"] for job in manifest["spec"]["replicatedJobs"]]
    return [replica["template"]["spec"] for replica in manifest["spec"]["pytorchReplicaSpecs"].values()]


def demand_options(words: list[str]) -> Any:
    """Hold a torchrun command to torchrun's options and the worker's; the former."""
    assert words[0] == "torchrun"
    given = get_args_parser().parse_args(words[1:])
    assert given.training_script == WORKER
    command.make_context("worker", given.training_script_args)
    return given


@pytest.mark.parametrize("name", ["jobset.yaml", "pytorchjob.yaml"])
def test_a_manifest_has_the_fields_of_its_kind(name: str) -> None:
    manifest = read(name)
    assert not list(problems(manifest, KINDS[manifest["kind"]]))
    for pod in pods(manifest):
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
            assert container["resources"]["limits"]["nvidia.com/gpu"] == 8


@pytest.mark.parametrize(
    ("name", "path", "told"),
    [
        ("jobset.yaml", ("spec", "replicatedJobs"), ".spec.replicatedJobs is missing"),
        ("jobset.yaml", ("metadata", "name"), ".metadata.name is missing"),
        ("pytorchjob.yaml", ("spec", "pytorchReplicaSpecs", "Master"), ".spec.pytorchReplicaSpecs.Master is missing"),
    ],
)
def test_the_check_finds_what_is_missing_and_what_is_unknown(name: str, path: tuple[str, ...], told: str) -> None:
    manifest = deepcopy(read(name))
    table = manifest
    for key in path[:-1]:
        table = table[key]
    del table[path[-1]]
    table["other"] = 1
    errors = list(problems(manifest, KINDS[manifest["kind"]]))
    assert told in errors
    assert any(problem.endswith(".other is unknown") for problem in errors)


def test_the_jobset_says_one_number_of_hosts_and_reaches_its_first_pod() -> None:
    manifest = read("jobset.yaml")
    (job,) = manifest["spec"]["replicatedJobs"]
    (container,) = pods(manifest)[0]["containers"]
    words = shlex.split(container["args"][0].replace("$JOB_COMPLETION_INDEX", "1"))
    given = demand_options(words[words.index("torchrun") :])
    assert given.nnodes == str(job["template"]["spec"]["completions"]) == str(job["template"]["spec"]["parallelism"])
    assert given.nproc_per_node == str(container["resources"]["limits"]["nvidia.com/gpu"])
    set_name = manifest["metadata"]["name"]
    assert given.master_addr == f"{set_name}-{job['name']}-0-0.{set_name}"  # <set>-<job>-<index>-<pod>.<subdomain>


def test_the_pytorchjob_runs_torchrun_in_containers_that_its_operator_knows() -> None:
    manifest = read("pytorchjob.yaml")
    for pod in pods(manifest):
        (container,) = pod["containers"]
        assert container["name"] == "pytorch"
        demand_options([*container["command"], *container["args"]])
        assert manifest["spec"]["nprocPerNode"] == str(container["resources"]["limits"]["nvidia.com/gpu"])


PAGE = ROOT / "docs" / "launch_kubernetes.md"


def lines_of(page: Path) -> list[list[str]]:
    """The commands of a page's blocks, in words."""
    text = "\n".join(BLOCK.findall(page.read_text(encoding="utf-8"))).replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in text.splitlines() if line.strip()]


def test_every_line_of_the_kubernetes_page_is_of_its_manifests_and_options() -> None:
    manifest, lines = read("jobset.yaml"), lines_of(PAGE)
    assert {words[0] for words in lines} == {"kubectl", "torchrun"}  # another command is to be held to something here
    apply, logs, torchrun = lines
    assert apply == ["kubectl", "apply", "-f", "examples/launch/jobset.yaml"] and (ROOT / apply[-1]).is_file()
    assert logs == ["kubectl", "logs", "-f", "-l", f"jobset.sigs.k8s.io/jobset-name={manifest['metadata']['name']}"]
    plain, (job,) = demand_options(torchrun), manifest["spec"]["replicatedJobs"]
    (container,) = pods(manifest)[0]["containers"]
    typed = shlex.split(container["args"][0].replace("$JOB_COMPLETION_INDEX", "0"))
    held = demand_options(typed[typed.index("torchrun") :])
    assert plain.training_script_args == held.training_script_args
    assert (plain.nnodes, plain.nproc_per_node) == (held.nnodes, held.nproc_per_node)
    (planned,) = re.findall(r"`--cluster ([^`]+)` at compile", PAGE.read_text(encoding="utf-8"))
    assert parse_cluster(planned).world == int(plain.nnodes) * int(plain.nproc_per_node)
    assert job["template"]["spec"]["completions"] == int(plain.nnodes)


def started(name: str, here: Path, port: int) -> Iterator[tuple[list[str], dict[str, str]]]:
    """What the pods of a manifest start, and with which variables: here, with one rank a pod and two steps."""
    manifest = read(name)
    for index, pod in enumerate(pods(manifest)):
        (container,) = pod["containers"]
        text = json.dumps([*container["command"], *container["args"]]).replace("/data/", f"{here}/")
        text = (
            text.replace("--steps 1000", "--steps 2")
            .replace('"1000"', '"2"')
            .replace("nproc-per-node=8", "nproc-per-node=1")
        )
        text = re.sub(r"--master-addr=\S+ --master-port=\d+", f"--master-addr=127.0.0.1 --master-port={port}", text)
        operator = {"NNODES": "2", "NPROC_PER_NODE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        of_operator = {f"PET_{name}": value for name, value in (operator | {"NODE_RANK": str(index)}).items()}
        if manifest["kind"] == "JobSet":
            for completion in range(2):
                yield json.loads(text), {"JOB_COMPLETION_INDEX": str(completion)}
        else:
            yield json.loads(text), of_operator


@pytest.mark.parametrize("name", ["jobset.yaml", "pytorchjob.yaml"])
def test_what_the_pods_start_trains_and_leaves_a_checkpoint(name: str, tmp_path: Path) -> None:
    executable(tmp_path / "build", [(clip("a", 3), clip("b", 5))], [Work((0,), (0,), 0.0), Work((1,), (1,), 0.0)], 2)
    (tmp_path / "bin").mkdir()
    torchrun = tmp_path / "bin" / "torchrun"
    torchrun.write_text(f'#!/bin/sh\nexec {warm_python(RUNS)} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    path = {"PATH": f"{torchrun.parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    running = [
        subprocess.Popen(words, env={**os.environ, **path, **variables}, stderr=subprocess.PIPE, text=True)
        for words, variables in started(name, tmp_path, free_port())
    ]
    try:
        told = [process.communicate(timeout=200)[1] for process in running]
    finally:
        for process in running:
            with process:  # which waits, and closes its pipe
                process.kill()
    assert [process.returncode for process in running] == [0, 0], told
    assert any((tmp_path / "ckpt").iterdir())
    assert len(json.loads((tmp_path / "build" / "run.json").read_text())["steps"]) == 2


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TYPED = re.compile(r"torchrun((?:[^\n\\]|\\\n)*?-m " + re.escape(WORKER) + r"(?:[^\n\\#']|\\\n)*)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_that_starts_a_run_says_how_torchrun_does(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    starts = any(re.search(r"^arachnec run ", block, re.MULTILINE) for block in BLOCK.findall(text))
    assert not starts or f"-m {WORKER}" in text
    for typed in TYPED.findall(text):
        plain = re.sub(r"\$\{?\w+\}?|\"\$\w+\"", "1", typed.replace("\\\n", " ").replace("'\"$head\"'", "host"))
        demand_options(["torchrun", *shlex.split(plain)])
