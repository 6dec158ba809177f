"""Faults of the control service: the real one, led astray where the behaviour says so."""

import asyncio
from typing import Any, Final

import grpc
from google.protobuf import json_format

from specserve_protos.v1alpha1 import control_pb2
from specserve_workers.control.service import ControlService
from tests.fakes.engine.behaviour import Behaviour, LiveBehaviour

_BY_ORDER: Final = "by order"
_HANG_POLL_SECONDS: Final = 0.05


class SteeredControlService(ControlService):
    """`ControlService` with its faults."""

    def __init__(self, *args: Any, behaviour: LiveBehaviour, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._behaviour = behaviour

    async def GetStats(self, request: Any, context: Any) -> control_pb2.GetStatsResponse:
        await _hang(self._behaviour)
        now = self._behaviour.now
        if now.stats_error:
            await context.abort(grpc.StatusCode[now.stats_error], _BY_ORDER)
        return told(await super().GetStats(request, context), now)

    async def SetSpeculation(self, request: Any, context: Any) -> control_pb2.SetSpeculationResponse:
        await _hang(self._behaviour)
        return await super().SetSpeculation(request, context)

    async def Drain(self, request: Any, context: Any) -> control_pb2.DrainResponse:
        await _hang(self._behaviour)
        return await super().Drain(request, context)


def told(truth: control_pb2.GetStatsResponse, behaviour: Behaviour) -> control_pb2.GetStatsResponse:
    """The statistics with the fields of `stats` in place of the true ones."""
    if behaviour.stats:
        json_format.ParseDict(dict(behaviour.stats), truth)
    return truth


async def _hang(behaviour: LiveBehaviour) -> None:
    while behaviour.now.hang_control:  # noqa: ASYNC110 - no one to set an event
        await asyncio.sleep(_HANG_POLL_SECONDS)
