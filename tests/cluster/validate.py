"""Checks manifests against strict schemas: KubeRay's own definitions, and Kubernetes' for core objects and pod templates.

Reads a JSON list of manifests on stdin, writes a JSON list of faults ("NAME: path: what"). Run by the `cluster` environment.
Usage: validate.py FOLDER_OF_CRDS
"""

import json
import pathlib
import sys

import jsonschema
import kubernetes_validate
import yaml

KUBERNETES = "1.37"


def strict(schema):
    """An OpenAPI v3 schema of a CRD as a JSON Schema that knows no other keys."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    out = {key: strict(value) for key, value in schema.items() if key not in ("properties", "description", "default")}
    if "properties" in schema:
        out["properties"] = {key: strict(value) for key, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields") and "additionalProperties" not in schema:
            out["additionalProperties"] = False
    return out


def load(folder, kind):
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    path = pathlib.Path(folder) / f"ray.io_{kind.lower()}s.yaml"
    crd = yaml.load(path.read_text(), loader)
    versions = {version["name"]: version["schema"]["openAPIV3Schema"] for version in crd["spec"]["versions"]}
    schema = strict(versions["v1"])
    # The API server checks metadata by itself; here: names, labels and annotations are all we write.
    text = {"type": "object", "additionalProperties": {"type": "string"}}
    schema["properties"]["metadata"] = {
        "type": "object",
        "required": ["name"],
        "additionalProperties": False,
        "properties": {"name": {"type": "string"}, "namespace": {"type": "string"}, "labels": text, "annotations": text},
    }
    return jsonschema.Draft202012Validator(schema)


def core_faults(manifest):
    try:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message[:300]}"]
    return []


def pod_templates(manifest):
    spec = manifest.get("spec") or {}
    cluster = spec.get("rayClusterSpec") if manifest["kind"] == "RayJob" else spec
    if not cluster:
        return
    yield "head", cluster["headGroupSpec"]["template"]
    for group in cluster.get("workerGroupSpecs", []):
        yield group["groupName"], group["template"]


def faults_of(manifest, ray):
    kind = manifest["kind"]
    if manifest["apiVersion"] == "ray.io/v1":
        out = [f"{'.'.join(map(str, e.absolute_path))}: {e.message[:300]}" for e in ray[kind].iter_errors(manifest)]
        for name, template in pod_templates(manifest):
            metadata = {"name": name, **(template.get("metadata") or {})}
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
            out += [f"pod {name}: {fault}" for fault in core_faults(pod)]
        return out
    if manifest["apiVersion"] == "networking.gke.io/v1":
        return []  # Google's own kinds; no public schema
    return core_faults(manifest)


def main():
    manifests = json.load(sys.stdin)
    kinds = {m["kind"] for m in manifests if m["apiVersion"] == "ray.io/v1"}
    ray = {kind: load(sys.argv[1], kind) for kind in kinds}
    faults = []
    for manifest in manifests:
        faults += [f"{manifest['kind']} {manifest['metadata'].get('name')}: {fault}" for fault in faults_of(manifest, ray)]
    json.dump(faults, sys.stdout)


main()
