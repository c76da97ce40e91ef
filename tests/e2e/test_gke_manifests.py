"""What `gemtune gke plan` renders: every profile with every capacity, checked by schemas and by KubeRay's own rules."""

import copy
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import yaml

SOURCE = pathlib.Path(os.environ["GEMTUNE_SOURCE_DIR"])
BUILD = pathlib.Path(os.environ["GEMTUNE_BUILD_DIR"])
sys.path.insert(0, str(SOURCE / "tests" / "cluster"))
from kuberay_rules import faults

ASSETS = os.environ.get("GEMTUNE_TEST_ASSETS", "")
CRDS = pathlib.Path(ASSETS) / "kuberay-crds"
VARIABLES = ("PROJECT_ID", "REGION", "CLUSTER_NAME", "GCS_BUCKET", "RESERVATION", "RAY_SA", "HF_TOKEN")
CLUSTER = ["--project=my-project", "--region=us-west4", "--cluster=gemma", "--bucket=my-results"]
CAPACITY = {
    "own reservation": ["--reservation=b200s"],
    "shared reservation": ["--reservation=projects/owner-project/reservations/b200s"],
    "flex-start": ["--capacity=flex-start"],
    "spot": ["--capacity=spot"],
    "on-demand": [],
}


def plan(*words, code=0, env=None):
    environment = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    environment |= env or {}
    done = subprocess.run([str(BUILD / "gemtune-gke"), "gke", "plan", *words], capture_output=True, text=True, env=environment)
    assert done.returncode == code, done.stderr
    return done


def manifests(*words, **kwargs):
    return list(yaml.safe_load_all(plan(*CLUSTER, *words, **kwargs).stdout))


def matrix():
    """(name, flags) of everything that may be asked for."""
    for profile, (capacity, flags) in itertools.product(["a4", "a3u", "a3m", "g2-l4", "cpu"], CAPACITY.items()):
        if profile == "cpu" and "reservation" in capacity:
            continue
        for rdma in [True, False] if profile in ("a4", "a3u") else [True]:
            for extra in [[], ["--queue=team", "--namespace=vision", "--zone=us-west4-a"], ["--attach=gemma3-tuning"]]:
                words = [f"--profile={profile}", *flags, *extra, *([] if rdma else ["--allow-tcp"])]
                yield " ".join(words), words


@pytest.fixture(scope="module")
def rendered():
    return {name: manifests(*words, env={"HF_TOKEN": "hf_verysecret"}) for name, words in matrix()}


def test_the_whole_matrix_keeps_the_rules_of_kuberay(rendered):
    found = {name: sum(map(faults, documents), []) for name, documents in rendered.items()}
    assert not {name: list_ for name, list_ in found.items() if list_}
    assert len(rendered) > 80


@pytest.mark.skipif(not CRDS.is_dir(), reason="GEMTUNE_TEST_ASSETS/kuberay-crds is not here: KubeRay's schemas are unchecked")
def test_the_whole_matrix_fits_the_strict_schemas(rendered):
    documents = sum(rendered.values(), [])
    assert schema_faults(documents) == []


@pytest.mark.skipif(not CRDS.is_dir(), reason="GEMTUNE_TEST_ASSETS/kuberay-crds is not here: KubeRay's schemas are unchecked")
def test_the_schemas_refuse_what_is_wrong():
    documents = manifests()
    job = next(d for d in documents if d["kind"] == "RayJob")
    for change, expected in [
        (lambda d: d["spec"].update(backofLimit=1), "backofLimit"),
        (lambda d: d["spec"].update(backoffLimit="1"), "backoffLimit"),
        (lambda d: d["spec"]["rayClusterSpec"]["headGroupSpec"]["template"].update(metadata=None), "metadata"),
        (lambda d: d["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"].update(containrs=[]), "containrs"),
    ]:
        wrong = copy.deepcopy(job)
        change(wrong)
        found = schema_faults([wrong])
        assert found and expected in found[0]


def schema_faults(documents):
    python = os.environ["GEMTUNE_CLUSTER_PYTHON"]
    command = [python, str(SOURCE / "tests" / "cluster" / "validate.py"), str(CRDS)]
    done = subprocess.run(command, input=json.dumps(documents), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def rejects():
    def spec(**values):
        return lambda job: job["spec"].update(values)

    def group(**values):
        return lambda job: job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0].update(values)

    def pod(change):
        return lambda job: change(job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"])

    yield spec(clusterSelector={"ray.io/cluster": "x"}), "exactly one of rayClusterSpec and clusterSelector must be given"
    yield spec(rayClusterSpec=None), "exactly one of rayClusterSpec and clusterSelector must be given"
    yield spec(shutdownAfterJobFinishes=False), "ttlSecondsAfterFinished needs shutdownAfterJobFinishes"
    yield spec(suspend=True, shutdownAfterJobFinishes=False), "suspend needs shutdownAfterJobFinishes"
    yield spec(deletionStrategy={"deletionRules": []} | {"x": 1}), "deletionStrategy excludes shutdownAfterJobFinishes"
    yield spec(submissionMode="InteractiveMode"), "InteractiveMode allows no retries"
    yield spec(activeDeadlineSeconds=0), "activeDeadlineSeconds must be above 0"
    yield spec(entrypoint="python $HOME"), "the entrypoint stands unquoted"
    yield group(minReplicas=3), "does not hold"
    yield group(maxReplicas=None), "minReplicas and maxReplicas are mandatory"
    yield group(rayStartParams={"num-gpus": 8}), "must be text"
    yield pod(lambda t: t["spec"]["nodeSelector"].update({"cloud.google.com/reservation-name": "projects/p/reservations/r"})), "is no label"
    yield pod(lambda t: t["spec"]["nodeSelector"].pop("cloud.google.com/gke-accelerator-count")), "GPUs asked"
    yield pod(lambda t: t["spec"]["volumes"].pop(0)), "which is no volume"
    yield pod(lambda t: t["spec"]["containers"][0].update(env=[])), "fall back to TCP"
    yield pod(lambda t: t["spec"]["containers"][0]["resources"]["limits"].update(memory="lots")), "is no quantity"
    yield pod(lambda t: t["spec"]["containers"].reverse() or t["spec"]["containers"][0].update(name="sidecar")), "must be Ray's"
    yield lambda job: job["metadata"].update(name="x" * 48), "at most 47"
    yield lambda job: job["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"].pop("num-cpus"), "the head takes training workers"
    yield lambda job: job["spec"]["rayClusterSpec"].update(rayVersion="2.48.0"), "needs Ray 2.52"


def test_the_linter_refuses_what_kuberay_refuses():
    job = next(d for d in manifests() if d["kind"] == "RayJob")
    assert faults(job) == []
    for change, expected in rejects():
        wrong = copy.deepcopy(job)
        change(wrong)
        assert any(expected in fault for fault in faults(wrong)), (expected, faults(wrong))


def without_recipe(text):
    """The recipe and the names made from its hash change with every new key."""
    text = re.sub(r"(?<=  mugs.yaml: \|\n)(    .*\n)+", "    (the recipe)\n", text)
    text = re.sub(r"mugs-[0-9a-f]{10}\b", "mugs-RECIPEHASH", text)
    return re.sub(r"mugs-[0-9a-f]{6}\b", "mugs-JOB", text)


@pytest.mark.parametrize(
    "name, words",
    [
        ("a4-shared-reservation", ["--reservation=projects/owner-project/reservations/b200s", "--name=mugs"]),
        ("cpu-namespace-queue", ["--profile=cpu", "--namespace=vision", "--queue=team", "--name=mugs", "--deadline=2h"]),
    ],
)
def test_the_manifests_are_the_golden_ones(name, words, tmp_path):
    (tmp_path / "recipe.yaml").write_text("model:\n  path: google/gemma-3-4b-it\ndata:\n  train: me/mugs\n")
    text = without_recipe(plan(*CLUSTER, *words, str(tmp_path / "recipe.yaml")).stdout)
    golden = SOURCE / "tests" / "cluster" / "golden" / f"{name}.yaml"
    if os.environ.get("GEMTUNE_UPDATE"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text(), "GEMTUNE_UPDATE=1 writes it"


def test_no_manifest_and_no_message_holds_the_hub_token(rendered):
    text = json.dumps(list(rendered.values()))
    assert "gemtune-hub" in text and "hf_verysecret" not in text
    assert "aGZfdmVyeXNlY3JldA" not in text  # in base64


def test_plan_needs_no_torch_and_starts_at_once():
    linked = subprocess.run(["ldd", str(BUILD / "gemtune-gke")], capture_output=True, text=True).stdout
    assert "libstdc++" in linked and "torch" not in linked


def test_the_main_program_runs_the_same_command():
    words = ["gke", "plan", *CLUSTER, "--profile=cpu"]
    main = subprocess.run([str(BUILD / "gemtune"), *words], capture_output=True, text=True)
    assert main.returncode == 0 and main.stdout == plan(*words[2:]).stdout


def test_a_wrong_flag_is_exit_2_with_its_remedy():
    assert "the tutorial's placeholder" in plan("--project=YOUR_PROJECT_ID", *CLUSTER[1:], code=2).stderr
    assert "--project is missing; give it, or set PROJECT_ID" in plan(*CLUSTER[1:], code=2).stderr
