"""Pods are replaced for a reason only, in any sequence of things that happen."""

from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from specserve_operator.api.v1alpha1 import SpeculativeService
from specserve_operator.core.names import ANNOTATION_UPGRADE, Pool
from specserve_operator.core.plan import Plan
from tests.unit.core.builders import (
    CONFIG,
    DRAFT_MODEL,
    FakeCluster,
    disaggregated,
    operator,
)
from tests.unit.core.pinned import (
    delete_records,
    settle,
    templates,
)


@dataclass(frozen=True)
class Spec:
    """What the user has given, as few things as matter. `shared` concerns both serving pools, and not their target."""

    model: str = "a"
    shared: int = 30
    prefill_args: int = 0
    decode_args: int = 0
    gateway: str = ""
    replicas: int = 2
    draft_max: int = 8

    def to_service(self, upgrade: str | None) -> SpeculativeService:
        def pool(args: int, replicas: int) -> dict[str, Any]:
            return {"replicas": replicas, "args": ["--max-num-seqs", str(args)] if args else []}

        template = {"template": {"spec": {"nodeSelector": {"node": self.gateway}}}} if self.gateway else {}
        return disaggregated(
            model={"uri": f"file:///models/{self.model}"},
            kvTransfer={"leaseSeconds": self.shared},
            prefill=pool(self.prefill_args, 1),
            decode=pool(self.decode_args, self.replicas),
            gateway=template,
            speculation={"draft": DRAFT_MODEL, "length": {"max": self.draft_max}},
            annotations={} if upgrade is None else {ANNOTATION_UPGRADE: upgrade},
        )

    def inputs(self, pool: Pool) -> tuple[Any, ...]:
        match pool:
            case Pool.PREFILL:
                return (self.model, self.shared, self.prefill_args)
            case Pool.DECODE:
                return (self.model, self.shared, self.decode_args)
        return (self.gateway,)


@dataclass
class History:
    """A service through the years."""

    spec: Spec = field(default_factory=Spec)
    version: int = 1
    upgrade: str | None = None
    cluster: FakeCluster = field(default_factory=FakeCluster)

    def happen(self, event: tuple[str, Any]) -> None:
        match event:
            case "spec", (name, value):
                self.spec = replace(self.spec, **{name: value})
            case "operator", version:
                self.version = version
            case "image", tag:
                self.cluster.config = replace(CONFIG, default_engine_image=f"engine:{tag}", gateway_image=f"gw:{tag}")
            case "delete records", count:
                delete_records(self.cluster, newest=count)
            case "upgrade", value:
                self.upgrade = value

    def step(self) -> Plan:
        with operator(self.version):
            return self.cluster.step(self.spec.to_service(self.upgrade))


events = st.one_of(
    st.tuples(
        st.just("spec"),
        st.one_of(
            st.tuples(st.just("model"), st.sampled_from("ab")),
            st.tuples(st.just("shared"), st.sampled_from([30, 7])),
            st.tuples(st.sampled_from(["prefill_args", "decode_args"]), st.integers(0, 2)),
            st.tuples(st.just("gateway"), st.sampled_from(["", "x"])),
            st.tuples(st.just("replicas"), st.integers(1, 3)),
            st.tuples(st.just("draft_max"), st.sampled_from([4, 8, 16])),
        ),
    ),
    st.tuples(st.just("operator"), st.integers(1, 3)),
    st.tuples(st.just("image"), st.integers(1, 3)),
    st.tuples(st.just("delete records"), st.sampled_from([1, 100])),
    st.tuples(st.just("upgrade"), st.sampled_from([None, "1", "2"])),
)


@settings(max_examples=80)
@given(st.lists(st.tuples(events, st.integers(1, 3)), max_size=8))
def test_pods_are_replaced_only_when_their_inputs_change_or_an_upgrade_is_asked_for(
    history: list[tuple[tuple[str, Any], int]],
) -> None:
    world = History()
    before, taken = world.step(), None
    for event, steps in history:
        old_spec, templates_before = world.spec, templates(world.cluster)
        world.happen(event)
        for _ in range(steps):
            plan_ = world.step()
            for pool in Pool:
                old, new = before.pool(pool), plan_.pool(pool)
                assert old is not None
                assert new is not None
                may_change = (
                    old_spec.inputs(pool) != world.spec.inputs(pool)
                    or (pool is Pool.DECODE and old_spec.draft_max != world.spec.draft_max)
                    or (world.upgrade is not None and world.upgrade != taken)
                )
                assert may_change or old.current.revision == new.current.revision, (pool, event)
            assert len({p.current.target_revision for p in plan_.pools} - {None}) == 1
            for name, template in templates(world.cluster).items():
                assert templates_before.get(name, template) == template, "a template changed under its name"
            before, old_spec, taken = plan_, world.spec, world.upgrade or taken
    settle(world.cluster, world.spec.to_service(world.upgrade), version=world.version)
    assert len(world.cluster.pods("decode")) == world.spec.replicas
