"""What the API server itself refuses, with the CRDs as they are, and what it takes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from hack.kube.control_plane import ControlPlane
from hack.kube.waiting import wait_until
from specserve_operator.api import pools
from specserve_operator.api import v1alpha1 as api
from specserve_operator.api.cel import Rule
from specserve_operator.api.engine_flags import OWNED_FLAGS
from specserve_operator.api.rules import RULES
from specserve_operator.api.validation import resolve_relative_uris
from tests.cluster.api import Api, BackgroundLoop, Object, RefusedError, path_of
from tests.cluster.apiserver.specs import WHOLE, Break, bounds, breaks, plural_of, resource
from tests.cluster.operator_process import ROOT
from tests.golden.cases import FOLDER as GOLDEN
from tests.unit.api.test_rules import CASES, MODEL, STORAGE, Case

pytestmark = pytest.mark.cluster

NAMESPACE = "default"
SERVICES = "speculativeservices"
_REFUSALS = (400, 422)
EXAMPLES = sorted([*(ROOT / "examples").glob("*.yaml"), *(ROOT / "charts").glob("*/files/example*.yaml")])
DRAFT = {"method": "DraftModel", "uri": "hf://org/draft"}


@pytest.fixture(scope="module")
def server(control_plane: ControlPlane) -> Iterator[Api]:
    """The shared API server. Nothing is stored: all requests are dry runs."""
    with BackgroundLoop() as background:
        opened = Api(control_plane, background)
        yield opened
        opened.close()


def refusal(server: Api, manifest: Object) -> str:
    """The message with which a new object is refused; empty if it is taken."""
    try:
        server.create(plural_of(manifest["kind"]), NAMESPACE, manifest, dry_run=True)
    except RefusedError as error:
        if error.status not in _REFUSALS:
            raise
        return str(error)
    return ""


def in_a_service(case: Case, example: Object) -> Object:
    """A whole service that has the example where the rule's model belongs."""
    wraps: dict[type[BaseModel], Object] = {
        pools.ServingPool: {"decode": example},
        pools.Scaling: {"decode": {"scaling": example}},
        pools.Rollout: {"rollout": example},
        pools.TrainingScaling: {"speculation": {"draft": DRAFT}, "training": {**STORAGE, "scaling": example}},
        api.Draft: {"speculation": {"draft": example}},
        api.Length: {"speculation": {"draft": DRAFT, "length": example}},
    }
    if case.model is api.SpeculativeService:
        return resource("SpeculativeService", example["spec"], name=example["metadata"]["name"])
    spec = example if case.model is api.SpeculativeServiceSpec else {"model": MODEL, **wraps[case.model]}
    return resource("SpeculativeService", spec)


def case_id(value: Any) -> str:
    return f"{value.model.__name__}: {value.message}" if isinstance(value, Case) else ""


@pytest.mark.parametrize(("case", "example"), [(c, e) for c in CASES for e in c.refused], ids=case_id)
def test_what_breaks_a_rule_is_refused_with_its_words(server: Api, case: Case, example: Object) -> None:
    message = refusal(server, in_a_service(case, example))
    (rule,) = [rule for rule in RULES[case.model] if rule.message.startswith(case.message)]
    # A name that no object may have is refused by Kubernetes before any rule is looked at.
    assert rule.message in message or "lowercase RFC 1123" in message


@pytest.mark.parametrize(("case", "example"), [(c, e) for c in CASES for e in c.accepted], ids=case_id)
def test_what_keeps_the_rules_is_taken(server: Api, case: Case, example: Object) -> None:
    message = refusal(server, in_a_service(case, example))
    others = [rule.message for rules in RULES.values() for rule in rules if not rule.message.startswith(case.message)]
    # Alone, an example may break the rule of another part: a pool of zero pods beside one of one.
    assert message == "" or any(other in message for other in others)


@pytest.mark.parametrize("flag", OWNED_FLAGS)
def test_flag_that_the_operator_owns_is_refused_by_name(server: Api, flag: str) -> None:
    message = refusal(server, resource("SpeculativeService", {"model": MODEL, "engine": {"args": [flag]}}))
    assert f"set by the operator and must not be given in args: {flag}" in message


def test_spec_with_every_field_is_taken(server: Api) -> None:
    for kind, spec in WHOLE.items():
        assert refusal(server, resource(kind, spec)) == "", kind


@pytest.mark.parametrize("broken", list(breaks()), ids=str)
def test_value_out_of_bounds_is_refused_by_the_name_of_its_field(server: Api, broken: Break) -> None:
    assert broken.field in refusal(server, broken.manifest())


@pytest.mark.parametrize("bound", list(bounds()), ids=str)
def test_value_at_its_bound_is_within_it(server: Api, bound: Break) -> None:
    message = refusal(server, bound.manifest())
    rules = [rule.message for rules in RULES.values() for rule in rules]
    assert message == "" or any(rule in message for rule in rules)
    assert "should be" not in message


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_example_is_taken(server: Api, path: Path) -> None:
    for manifest in yaml.safe_load_all(path.read_text()):
        if manifest and manifest["kind"] == "SpeculativeService":
            assert refusal(server, resolve_relative_uris(manifest, path.parent)) == ""


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.yaml")), ids=lambda path: path.stem)
def test_rendered_objects_are_taken(server: Api, path: Path) -> None:
    for obj in yaml.safe_load_all(path.read_text()):
        if obj["kind"] in ("PodMonitor", "PoolScaler"):
            continue  # the one is not part of Kubernetes, the other applied only where it has been seeded
        plural = f"{obj['kind'].lower()}s".replace("policys", "policies")
        query = {"fieldManager": "specserve", "force": "true", "fieldValidation": "Strict", "dryRun": "All"}
        target = path_of(plural, NAMESPACE, obj["metadata"]["name"])
        obj["metadata"]["namespace"] = NAMESPACE
        server.request("PATCH", target, body=obj, content_type="application/apply-patch+yaml", query=query)


def test_draft_revision_cannot_be_changed(server: Api) -> None:
    server.create("draftrevisions", NAMESPACE, resource("DraftRevision", WHOLE["DraftRevision"], name="fixed"))
    try:
        with pytest.raises(RefusedError, match="a draft revision is immutable"):
            server.patch("draftrevisions", NAMESPACE, "fixed", {"spec": {"hiddenSize": 65}})
        server.patch("draftrevisions", NAMESPACE, "fixed", {"metadata": {"labels": {"a": "b"}}})
    finally:
        server.delete("draftrevisions", NAMESPACE, "fixed")


class TestNewRules:
    """Rules that are added to a CRD when there are objects already."""

    CRD = "speculativeservices.specserve.dev"
    RULE = Rule("self.decode.drainTimeoutSeconds <= 60", "drain within a minute", ratcheting=True)

    @pytest.fixture
    def old(self, own_control_plane: ControlPlane) -> Iterator[Api]:
        """A server that has two services, and has since got a rule that one of them breaks."""
        with BackgroundLoop() as background:
            opened = Api(own_control_plane, background)
            for name, seconds in (("good", 60), ("bad", 600)):
                spec = {"model": MODEL, "decode": {"drainTimeoutSeconds": seconds}}
                opened.create(SERVICES, NAMESPACE, resource("SpeculativeService", spec, name=name))
            path = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/x-kubernetes-validations/-"
            operation = {"op": "add", "path": path, "value": self.RULE.to_schema()}
            opened.json_patch("customresourcedefinitions", None, self.CRD, operation)
            yield opened
            opened.close()

    def test_old_object_that_breaks_a_new_rule_stays_editable(self, old: Api) -> None:
        wait_refused(old, self.RULE.message)
        old.patch(SERVICES, NAMESPACE, "bad", {"metadata": {"labels": {"a": "b"}}})
        old.patch(SERVICES, NAMESPACE, "bad", {"spec": {"gateway": {"port": 81}}})
        old.patch(SERVICES, NAMESPACE, "bad", {"spec": {"decode": {"drainTimeoutSeconds": 500}}})
        old.patch(SERVICES, NAMESPACE, "bad", {"status": {"observedGeneration": 1}}, subresource="status")

        old.patch(SERVICES, NAMESPACE, "good", {"spec": {"gateway": {"port": 81}}})
        with pytest.raises(RefusedError, match=self.RULE.message):
            old.patch(SERVICES, NAMESPACE, "good", {"spec": {"decode": {"drainTimeoutSeconds": 61}}})


def wait_refused(server: Api, message: str) -> None:
    """Returns when the API server knows a new rule: it takes a moment to take in a changed CRD."""
    spec = {"model": MODEL, "decode": {"drainTimeoutSeconds": 600}}
    manifest = resource("SpeculativeService", spec, name="new")
    wait_until(lambda: message in refusal(server, manifest), 30, what="the new rule is in force")
