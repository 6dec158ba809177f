"""What the workers import from vLLM, torch and their kind, in the least form that they can run with.

`install` puts these modules in place of the real ones, installed or not. A worker that imports more than is listed here
fails with the name that is missing: then it belongs here.
"""

import argparse
import asyncio
import enum
import json
import logging
import logging.config
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import prometheus_client

from tests.fakes.engine import memory
from tests.fakes.engine.behaviour import LiveBehaviour
from tests.fakes.engine.blocks import KvBlocks

DEFAULT_BLOCK_SIZE_TOKENS: Final = 16
_LOGGING: Final = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(levelname)s %(asctime)s [%(name)s] %(message)s"}},
    "handlers": {"vllm": {"class": "logging.StreamHandler", "formatter": "line", "stream": "ext://sys.stdout"}},
    "loggers": {"vllm": {"handlers": ["vllm"], "level": "INFO", "propagate": False}},
}


def install(behaviour: LiveBehaviour) -> None:
    """Replaces the engine's modules in this process. To be called before any module of the workers is imported."""
    for name, content in _modules(behaviour).items():
        module = sys.modules[name] = ModuleType(name)
        # A package without a place: what is not listed is not found.
        module.__path__ = []
        vars(module).update(content)


def _modules(behaviour: LiveBehaviour) -> dict[str, dict[str, Any]]:
    # Of the fake itself, and made of the workers' modules: only after what those import is in place.
    def make_app(*_: object) -> object:
        from tests.fakes.engine.openai_app import OpenAiApp

        return OpenAiApp(behaviour, prometheus_registry())

    return _plain_modules() | {
        "uvloop": {"run": lambda main: run_loop(main, behaviour)},
        "vllm.entrypoints.launchers.app": {"build_app": make_app},
        "vllm.entrypoints.launchers.launcher": {
            "NoSignalServer": lambda config: _make_server(config, behaviour),
            "watchdog_loop": watchdog_loop,
        },
        "vllm.v1.engine.async_llm": {"AsyncLLM": _AsyncLLM(behaviour)},
    }


def _plain_modules() -> dict[str, dict[str, Any]]:
    """Those that know nothing of the fake."""
    return {
        "pydantic": {"ValidationError": type("ValidationError", (ValueError,), {})},
        "specserve_workers.kv.blocks": {"KvBlocks": KvBlocks},
        "torch": {"Tensor": type("Tensor", (), {})},
        # uvicorn's command line, which the package imports: it takes as long as the server.
        "uvicorn.main": {"__getattr__": _uvicorn_main},
        "vllm": {"envs": SimpleNamespace(VLLM_HTTP_TIMEOUT_KEEP_ALIVE=5)},
        "vllm.config.logging": {"LoggingConfig": SimpleNamespace},
        "vllm.logger": {"DEFAULT_LOGGING_CONFIG": _LOGGING, "configure_logging": _configure_logging},
        "vllm.distributed.kv_transfer.kv_connector.v1.base": {
            "KVConnectorMetadata": type("KVConnectorMetadata", (), {}),
            "KVConnectorWorkerMetadata": type("KVConnectorWorkerMetadata", (), {}),
            "KVConnectorTransferResults": TransferResults,
        },
        "vllm.engine.arg_utils": {"AsyncEngineArgs": EngineArgs},
        "vllm.entrypoints.launchers.api_server.app_state": {"init_app_state": _init_app_state},
        "vllm.entrypoints.launchers.api_server.entry": {"setup_server": setup_server},
        "vllm.entrypoints.launchers.cli_args": {
            "make_arg_parser": make_arg_parser,
            "validate_parsed_serve_args": lambda args: None,
        },
        "vllm.entrypoints.serve.utils.api_utils": {"cli_env_setup": lambda: None},
        "vllm.usage.usage_lib": {"UsageContext": SimpleNamespace(OPENAI_API_SERVER=None)},
        "vllm.utils.argparse_utils": {"FlexibleArgumentParser": ArgumentParser},
        "vllm.v1.core.sched.output": {"SchedulerOutput": SimpleNamespace},
        "vllm.v1.metrics.loggers": {"StatLoggerBase": type("StatLoggerBase", (), {})},
        "vllm.v1.metrics.prometheus": {"get_prometheus_registry": prometheus_registry},
        "vllm.v1.metrics.stats": {"IterationStats": IterationStats},
        "vllm.v1.outputs": {"KVConnectorOutput": ConnectorOutput},
        "vllm.v1.request": {"Request": SimpleNamespace, "RequestStatus": RequestStatus},
    }


class RequestStatus(enum.Enum):
    """As far as the KV connector asks for it."""

    RUNNING = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()


@dataclass(slots=True)
class TransferResults:
    """What one rank's half of the connector reports of a step."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


@dataclass(slots=True)
class ConnectorOutput(TransferResults):
    """What all ranks report of a step."""

    kv_connector_worker_meta: Any = None


@dataclass(slots=True)
class FinishedRequest:
    num_generation_tokens: int
    mean_time_per_output_token: float


@dataclass(slots=True)
class IterationStats:
    """What one step of the engine counts."""

    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    finished_requests: list[FinishedRequest] = field(default_factory=list)


class ArgumentParser(argparse.ArgumentParser):
    """Takes any argument: of the engine's many, the fake knows few."""

    def __init__(self, *, add_json_tip: bool = True) -> None:
        super().__init__(prog="vllm", add_help=False, allow_abbrev=False)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        return self.parse_known_args(args, namespace)[0]


def make_arg_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    add = parser.add_argument
    for name in ("--model", "--served-model-name", "--host", "--revision", "--worker-cls"):
        add(name)
    add("--port", type=int)
    add("--block-size", type=int, default=DEFAULT_BLOCK_SIZE_TOKENS)
    add("--max-model-len", type=int, default=32_768)
    add("--max-num-seqs", type=int, default=256)
    add("--tensor-parallel-size", "-tp", type=int, default=1)
    add("--kv-transfer-config", type=json.loads)
    add("--speculative-config", type=json.loads)
    add("--uvicorn-log-level", default="info")
    return parser


@dataclass(slots=True)
class EngineArgs:
    """The parsed command line, which serves as the engine's configuration too."""

    args: argparse.Namespace
    enable_log_requests: bool = False
    aggregate_engine_logging: bool = False
    disable_log_stats: bool = False

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "EngineArgs":
        return cls(args)

    def create_engine_config(self, **_: object) -> argparse.Namespace:
        return self.args


@dataclass(frozen=True, slots=True)
class _AsyncLLM:
    """The engine's class, as far as it is made."""

    behaviour: LiveBehaviour

    def from_vllm_config(self, *, vllm_config: argparse.Namespace, stat_loggers: list[Any], **_: object) -> object:
        from tests.fakes.engine.engine import FakeEngine

        return FakeEngine(vllm_config, self.behaviour, stat_loggers=[make(vllm_config, 0) for make in stat_loggers])


_registry: Final = prometheus_client.CollectorRegistry()


def prometheus_registry() -> prometheus_client.CollectorRegistry:
    return _registry


def _configure_logging(_: object) -> None:
    with open(os.environ["VLLM_LOGGING_CONFIG_PATH"], encoding="utf-8") as file:
        logging.config.dictConfig(json.load(file))


def setup_server(args: argparse.Namespace, **_: object) -> tuple[str, socket.socket]:
    """Binds the HTTP port, without listening yet."""
    sock = socket.socket(socket.AF_INET6 if ":" in args.host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((args.host, args.port))
    except OSError:
        sock.close()
        raise
    return f"{args.host}:{args.port}", sock


def _uvicorn_main(name: str) -> Any:
    if name != "Server":
        return None
    from uvicorn.server import Server

    return Server


async def _init_app_state(engine: object, state: Any, *_: object) -> None:
    state.engine = engine


def _make_server(config: Any, behaviour: LiveBehaviour) -> object:
    from tests.fakes.engine.front import QuietServer, SteeredApp

    config.app = SteeredApp(config.app, behaviour)
    config.ws = "none"
    return QuietServer(config)


async def watchdog_loop(server: Any, engine: Any) -> None:
    """Stops the server once the engine is dead."""
    memory.give_back()
    while not engine.errored:  # noqa: ASYNC110 - as the engine's own does
        await asyncio.sleep(0.2)
    server.should_exit = True


def run_loop(main: Coroutine[Any, Any, None], behaviour: LiveBehaviour) -> None:
    """Runs an event loop in which a signal to stop does nothing while the behaviour says so."""

    class Loop(asyncio.SelectorEventLoop):
        def add_signal_handler(self, sig: int, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
            def handle() -> None:
                if sig == signal.SIGTERM and behaviour.now.ignore_sigterm:
                    logging.getLogger("vllm.fake").warning("SIGTERM is ignored")
                else:
                    callback(*args)

            super().add_signal_handler(sig, handle)

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(main)
