"""A fake pod's process: the real entry point with the engine's modules replaced."""

import os
import sys
from functools import partial
from typing import Final

from tests.fakes.engine import memory, stand_ins
from tests.fakes.engine.behaviour import BehaviourError, LiveBehaviour, start_behaviour

_VOCABULARY: Final = b'{"vocab_size": 32000}'


def main(pool: str) -> int:
    """Runs a pod of this pool to its end; the exit code."""
    try:
        behaviour = LiveBehaviour(start_behaviour(pool, sys.argv[1:], environ=os.environ))
    except BehaviourError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    memory.save()
    stand_ins.install(behaviour)
    # Only now: they import what has just been replaced.
    from specserve_workers.frontend.middleware import Pool
    from specserve_workers.startup import run_pod
    from specserve_workers.vllm import server

    _steer(behaviour)
    return run_pod(Pool(pool), server.serve)


def _steer(behaviour: LiveBehaviour) -> None:
    """Puts the faults into the workers' modules, by the names under which these look them up."""
    from specserve_workers.model_files import ModelFiles
    from specserve_workers.startup import StartupError
    from specserve_workers.vllm import connector_worker, server
    from tests.fakes.engine import control_faults, kv_faults

    real_read = ModelFiles.read

    def read(model: ModelFiles, name: str) -> bytes | None:
        """Files of models that are there; of others, a configuration that fits every other."""
        if behaviour.now.startup_error:
            raise StartupError(behaviour.now.startup_error)
        content = real_read(model, name) if os.path.isdir(model.path_or_id) else None
        return _VOCABULARY if content is None and name == "config.json" else content

    setattr(ModelFiles, "read", read)  # noqa: B010 - as an assignment mypy refuses it
    setattr(server, "ControlService", partial(control_faults.SteeredControlService, behaviour=behaviour))  # noqa: B010
    setattr(connector_worker, "KvTransferServicer", partial(kv_faults.SteeredKvServicer, behaviour=behaviour))  # noqa: B010
