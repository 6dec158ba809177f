"""Metadata that every object of a service has: labels, its owner, and the hash of its content."""

from dataclasses import dataclass
from typing import Any

from specserve_operator.api.v1alpha1 import SpeculativeService
from specserve_operator.constants import ANNOTATION_SPEC_HASH
from specserve_operator.core.names import Labels
from specserve_operator.core.objects import Manifest
from specserve_operator.core.revision import digest


@dataclass(frozen=True, slots=True)
class Owner:
    """The service that objects belong to; they are deleted with it by the cluster, whether or not we run then."""

    name: str
    namespace: str
    uid: str
    api_version: str
    kind: str

    @classmethod
    def of(cls, service: SpeculativeService) -> "Owner":
        meta = service.metadata
        return cls(meta.name, meta.namespace, meta.uid, service.api_version, service.kind)

    def metadata(self, name: str, *, labels: Labels, annotations: Labels | None = None) -> dict[str, Any]:
        """`metadata` of an object called `name`."""
        reference = {
            "apiVersion": self.api_version,
            "kind": self.kind,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }
        metadata: dict[str, Any] = {"name": name, "namespace": self.namespace, "labels": labels}
        if annotations:
            metadata["annotations"] = annotations
        return metadata | {"ownerReferences": [reference]}


def stamp(obj: Manifest) -> Manifest:
    """`obj` with the hash of everything else in it."""
    metadata = obj["metadata"]
    annotations = {k: v for k, v in metadata.get("annotations", {}).items() if k != ANNOTATION_SPEC_HASH}
    content = digest({**obj, "metadata": {**metadata, "annotations": annotations}})
    return {**obj, "metadata": {**metadata, "annotations": {**annotations, ANNOTATION_SPEC_HASH: content}}}
