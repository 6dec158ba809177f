"""A serving pod without an engine, for tests with many pods and with faults.

It is the real worker of this repository, `specserve_workers`, over stand-ins for the engine's modules
(`stand_ins`): flags, start, front end, control service, KV transfer and metrics are the real ones, and only what vLLM
would compute is made up (`engine`). It needs neither vLLM nor torch nor numpy, starts in about a second and takes about
60 MB.

`python -m specserve_workers.decode FLAGS` runs it wherever `MODULE_PATH` is the PYTHONPATH, and in the image that
`python -m tests.fakes.engine.image FOLDER` lays out. How it behaves (`behaviour.Behaviour`) is said at start and
changed at run time:

- `SPECSERVE_FAKE_FILE` names a JSON file, `SPECSERVE_FAKE` holds JSON, and the engine argument `--fake JSON` too; the
  later of them wins. Fields for one pool only stand in an object `prefill` or `decode`.
- `POST /fake` with some fields changes them, `GET /fake` tells all, `DELETE /fake` brings those of the start back.

`python -m tests.fakes.engine.fleet --pods FILE` serves the control ports of thousands of pods in one process.
"""

import os
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[3]
# PYTHONPATH with which `python -m specserve_workers.decode` is the fake.
MODULE_PATH: Final = os.pathsep.join(
    str(folder) for folder in (Path(__file__).resolve().parent / "path", ROOT / "workers", ROOT / "protos", ROOT)
)
