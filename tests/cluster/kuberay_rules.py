"""KubeRay's own rules about RayJobs and RayClusters, which its schemas do not say (operator v1.7, validation and CEL rules),
and Kubernetes' about names and label values. Each function yields faults as text."""

import json
import re

LABEL_VALUE = re.compile(r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$")
LABEL_KEY = re.compile(r"^([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")
NAME = re.compile(r"^[a-z]([-a-z0-9]*[a-z0-9])?$")
QUANTITY = re.compile(r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")


def label_faults(where, labels):
    for key, value in (labels or {}).items():
        if not LABEL_KEY.match(key) or not isinstance(value, str) or not LABEL_VALUE.match(value):
            yield f"{where}: {key}: {value!r} is no label"


def pod_faults(where, template):
    metadata = template.get("metadata", {})
    if metadata is None:
        yield f"{where}: metadata is null"
        metadata = {}
    spec = template["spec"]
    yield from label_faults(f"{where} labels", metadata.get("labels"))
    yield from label_faults(f"{where} nodeSelector", spec.get("nodeSelector"))
    for key, value in (metadata.get("annotations") or {}).items():
        if not isinstance(value, str):
            yield f"{where}: annotation {key} is no text"
    volumes = {volume["name"] for volume in spec.get("volumes", [])}
    containers = spec["containers"] + spec.get("initContainers", [])
    if spec["containers"][0]["name"] not in ("ray-head", "ray-worker"):
        yield f"{where}: the first container must be Ray's"
    for container in containers:
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in volumes:
                yield f"{where}: {container['name']} mounts {mount['name']}, which is no volume"
        resources = container.get("resources", {})
        if not resources:
            yield f"{where}: {container['name']} asks for no resources"
        for kind in ("requests", "limits"):
            for name, amount in resources.get(kind, {}).items():
                if not QUANTITY.match(str(amount)):
                    yield f"{where}: {container['name']}: {name}: {amount!r} is no quantity"
        # Autopilot sets limits to requests; where they differ the manifest says something else than what runs.
        if resources.get("requests") != resources.get("limits"):
            yield f"{where}: {container['name']}: requests and limits differ"
    gpus = spec["containers"][0].get("resources", {}).get("limits", {}).get("nvidia.com/gpu")
    selector = spec.get("nodeSelector", {})
    if gpus and selector.get("cloud.google.com/gke-accelerator-count") != gpus:
        yield f"{where}: {gpus} GPUs asked, the node's count is {selector.get('cloud.google.com/gke-accelerator-count')}"
    networks = (metadata.get("annotations") or {}).get("networking.gke.io/interfaces")
    if networks:
        interfaces = json.loads(networks)
        if [i["interfaceName"] for i in interfaces] != [f"eth{i}" for i in range(len(interfaces))]:
            yield f"{where}: interfaces are not eth0, eth1, …"
        environment = {e["name"]: e.get("value") for e in spec["containers"][0].get("env", [])}
        if environment.get("NCCL_NET") != "gIB":
            yield f"{where}: RDMA interfaces without NCCL_NET=gIB: a missing fabric would fall back to TCP"


def cluster_faults(spec):
    if spec.get("headGroupSpec") is None:
        yield "headGroupSpec is missing"
        return
    if str(spec["headGroupSpec"]["rayStartParams"].get("num-cpus")) != "0":
        yield "the head takes training workers: rayStartParams.num-cpus must be \"0\""
    yield from pod_faults("head", spec["headGroupSpec"]["template"])
    names = [group["groupName"] for group in spec.get("workerGroupSpecs", [])]
    if len(names) != len(set(names)):
        yield "two worker groups have one name"
    for group in spec.get("workerGroupSpecs", []):
        where = f"group {group['groupName']}"
        low, high, count = group.get("minReplicas"), group.get("maxReplicas"), group.get("replicas")
        if low is None or high is None:
            yield f"{where}: minReplicas and maxReplicas are mandatory"
        elif not 0 <= low <= high or not low <= (count if count is not None else low) <= high:
            yield f"{where}: replicas {low} ≤ {count} ≤ {high} does not hold"
        if group.get("suspend") and spec.get("enableInTreeAutoscaling"):
            yield f"{where}: suspend and the autoscaler exclude each other"
        if group.get("idleTimeoutSeconds") and not spec.get("enableInTreeAutoscaling"):
            yield f"{where}: idleTimeoutSeconds needs the autoscaler"
        for key, value in group["rayStartParams"].items():
            if not isinstance(value, str):
                yield f"{where}: rayStartParams.{key} must be text"
        yield from pod_faults(where, group["template"])
    if spec.get("gcsFaultToleranceOptions") is not None:
        yield "GCS fault tolerance does not save a training run"
    if (spec.get("authOptions") or {}).get("mode") == "token":
        version = tuple(map(int, spec.get("rayVersion", "0").split(".")[:2]))
        if version < (2, 52):
            yield "token authentication needs Ray 2.52"


def job_faults(job):
    spec, name = job["spec"], job["metadata"]["name"]
    if len(name) > 47 or not NAME.match(name):
        yield f"the name {name!r} must be a DNS label of at most 47"
    yield from label_faults("job labels", job["metadata"].get("labels"))
    own, selector = spec.get("rayClusterSpec"), spec.get("clusterSelector")
    shutdown = spec.get("shutdownAfterJobFinishes", False)
    if (own is None) == (not selector):
        yield "exactly one of rayClusterSpec and clusterSelector must be given"
    if selector and not selector.get("ray.io/cluster"):
        yield "clusterSelector needs the label ray.io/cluster"
    if selector and spec.get("backoffLimit", 0) > 0:
        yield "backoffLimit needs a cluster of the job's own"
    if selector and spec.get("suspend"):
        yield "suspend needs a cluster of the job's own"
    if selector and shutdown:
        yield "shutdownAfterJobFinishes would delete a cluster that is not the job's own"
    if selector and spec.get("submissionMode") == "SidecarMode":
        yield "SidecarMode needs a cluster of the job's own"
    if spec.get("suspend") and not shutdown:
        yield "suspend needs shutdownAfterJobFinishes"
    if spec.get("ttlSecondsAfterFinished", 0) < 0:
        yield "ttlSecondsAfterFinished is negative"
    if spec.get("ttlSecondsAfterFinished", 0) > 0 and not shutdown:
        yield "ttlSecondsAfterFinished needs shutdownAfterJobFinishes"
    if spec.get("deletionStrategy") and (shutdown or spec.get("ttlSecondsAfterFinished", 0) > 0):
        yield "deletionStrategy excludes shutdownAfterJobFinishes and ttlSecondsAfterFinished"
    if spec.get("submissionMode") == "InteractiveMode" and spec.get("backoffLimit", 0) > 0:
        yield "InteractiveMode allows no retries"
    for key in ("activeDeadlineSeconds", "preRunningDeadlineSeconds"):
        if spec.get(key) is not None and spec[key] <= 0:
            yield f"{key} must be above 0"
    if spec.get("activeDeadlineSeconds") is None:
        yield "no activeDeadlineSeconds: a forgotten job would cost for ever"
    if own is not None and not (shutdown or spec.get("deletionStrategy")):
        yield "the job's cluster is never deleted"
    queue = (job["metadata"].get("labels") or {}).get("kueue.x-k8s.io/queue-name")
    if queue and (selector or not shutdown):
        yield "Kueue needs a cluster of the job's own and shutdownAfterJobFinishes"
    if "$" in spec["entrypoint"] or "\n" in spec["entrypoint"] or "`" in spec["entrypoint"]:
        yield "the entrypoint stands unquoted in a shell line: no $, ` or newline"
    if own is not None:
        yield from cluster_faults(own)


def faults(manifest):
    if manifest["kind"] == "RayJob":
        return list(job_faults(manifest))
    if manifest["kind"] == "RayCluster":
        name = manifest["metadata"]["name"]
        own = [] if len(name) <= 50 and NAME.match(name) else [f"the name {name!r} must be a DNS label of at most 50"]
        return own + list(cluster_faults(manifest["spec"]))
    return list(label_faults("labels", manifest["metadata"].get("labels")))
