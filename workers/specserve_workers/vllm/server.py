"""Runs vLLM's OpenAI server in this process, with the front end before it and the control service beside it."""

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
import threading
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from specserve_workers.control.drain import DrainState
from specserve_workers.control.drain_socket import drain_on_request
from specserve_workers.control.engine import EngineNumbers
from specserve_workers.control.metrics import WorkerCollector
from specserve_workers.control.resolver import PeerResolver, dns_lookup, hosts_dir_lookup
from specserve_workers.control.runtime_state import SpeculationControl, StateFile
from specserve_workers.control.service import ControlPortError, ControlServer, ControlService, PodIdentity
from specserve_workers.control.stats import ServingStats
from specserve_workers.drain import socket_path
from specserve_workers.flags import FlagError, ServingFlags
from specserve_workers.frontend.lease_release import LeaseReleaser
from specserve_workers.frontend.middleware import Disaggregation, Frontend, FrontendSettings, Pool
from specserve_workers.frontend.plain_port import refuse_over_plaintext
from specserve_workers.frontend.prefill_client import PrefillClient
from specserve_workers.identity.names import PodId
from specserve_workers.identity.pod import PodTls
from specserve_workers.model_files import ModelFiles, check_draft_fits, read_config
from specserve_workers.speculation.settings import BatchCap, PolicyName, SpeculationSettings
from specserve_workers.startup import EXIT_TERMINATED, EXIT_USAGE, StartupError, port_message, report_failure
from specserve_workers.vllm.launch import detect_platform, prepare_environment

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

HOSTS_DIR_VARIABLE: Final = "SPECSERVE_HOSTS_DIR"
# For the clean-up of a start that was interrupted.
ABANDON_SECONDS: Final = 15
# How long a pod whose engine is up waits for its first certificate before it serves without one.
CERTIFICATE_SECONDS: Final = 5.0


class EngineDiedError(StartupError):
    """The engine ended while it should serve."""


def serve(flags: ServingFlags) -> int:
    """Serves until told to stop; the exit code of the process.

    Raises:
        StartupError: the pod cannot start, or its engine died.
    """
    target = ModelFiles("--model", flags.model, flags.model_revision)
    read_config(target)
    if flags.draft is not None:
        check_draft_fits(target, ModelFiles("--draft-model", flags.draft.model, flags.draft.model_revision))
    prepare_environment(detect_platform(), flags.engine_args)
    _silence_resource_tracker()
    # The engine is imported only now: it reads its environment when it is.
    import uvloop
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

    from specserve_workers.vllm.engine_args import parse_engine_args
    from specserve_workers.vllm.engine_logs import describe_error, engine_logs

    cli_env_setup()
    with engine_logs() as failure:
        try:
            args = parse_engine_args(flags)
        except FlagError as error:
            return report_failure(str(error), code=EXIT_USAGE)
        try:
            uvloop.run(_Pod(flags, args, on_started=failure.clear).run())
        except EngineDiedError as error:
            raise EngineDiedError(f"{error}: {failure.read() or 'see its log above'}") from error
        except StartupError:
            raise
        except Exception as error:
            logger.exception("the pod could not start")
            reason = failure.read() or describe_error(error)
            raise StartupError(f"the engine did not start: {reason}") from error
    return 0


def _silence_resource_tracker() -> None:
    """Keeps Python's helper process from writing below our last line what it cleaned up after a dead engine."""
    filters = [os.environ.get("PYTHONWARNINGS", ""), "ignore:resource_tracker:UserWarning"]
    os.environ["PYTHONWARNINGS"] = ",".join(entry for entry in filters if entry)


class _Pod:
    """One serving pod from the first socket to the last answer."""

    def __init__(self, flags: ServingFlags, args: Namespace, *, on_started: Callable[[], None]) -> None:
        self._flags = flags
        self._args = args
        self._on_started = on_started
        self._is_ready = False
        self._stats = ServingStats()
        self._drain = DrainState(
            is_held=lambda: self._numbers is not None and self._numbers.open_leases > 0, refresh=self._refresh_numbers
        )
        self._numbers: EngineNumbers | None = None
        self._tls = _pod_tls(flags)

    async def run(self) -> None:
        from specserve_workers.vllm.engine_client import run_engine

        with _interruptible() as interrupted, self._listening_sockets() as sockets:
            self._check_ports()
            async with AsyncExitStack() as stack:
                if self._tls is not None:
                    self._tls.keeper.start()
                    stack.callback(self._tls.keeper.stop)
                engine = await stack.enter_async_context(run_engine(self._args, stats=self._stats))
                disaggregation = await self._disaggregate(stack)
                stop = _stop_event()
                if interrupted.is_set():
                    raise KeyboardInterrupt
                await self._serve(engine, sockets, disaggregation=disaggregation, stop=stop)

    async def _serve(
        self,
        engine: "AsyncLLM",
        sockets: list[socket.socket],
        *,
        disaggregation: Disaggregation | None,
        stop: asyncio.Event,
    ) -> None:
        from vllm.entrypoints.launchers.launcher import watchdog_loop

        from specserve_workers.vllm.http_servers import CLOSE_SECONDS

        servers = await self._http_servers(engine, disaggregation)
        async with AsyncExitStack() as stack:
            serving = set()
            for server, sock in zip(servers, sockets, strict=True):
                task = await stack.enter_async_context(_background(server.serve(sockets=[sock])))
                await self._listening(server, task)
                serving.add(task)
            timeout_seconds = self._flags.drain_timeout_seconds
            hook = drain_on_request(socket_path(), self._drain, timeout_seconds=timeout_seconds)
            await stack.enter_async_context(hook)
            # Stops the server when the engine is dead, also if no request finds out.
            async with self._control(engine), _background(watchdog_loop(servers[0], engine)):
                await self._wait_for_certificate()
                self._is_ready = True
                self._on_started()
                logger.info("%s pod ready on %s:%d", self._flags.pool, self._flags.host, self._flags.http_port)
                stopping = asyncio.create_task(self._stop_orderly(stop))
                await asyncio.wait({*serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
                stopped_by_itself = not stopping.done()
                stopping.cancel()
            if stopped_by_itself:
                raise EngineDiedError("the engine died")
            for server in servers:
                server.should_exit = True
            await asyncio.wait(serving, timeout=CLOSE_SECONDS)

    async def _wait_for_certificate(self) -> None:
        """Serving without one is slower, so a moment is worth waiting; and no more, since the operator may be away."""
        if self._tls is None:
            return
        if not await asyncio.to_thread(self._tls.keeper.wait_for_certificate, CERTIFICATE_SECONDS):
            logger.warning("this pod has no certificate yet: until it has one, no prompt is prefilled remotely")

    async def _listening(self, server: Any, serving: asyncio.Task[Any]) -> None:
        """Waits until connections are accepted. Another process may have taken the port since it was bound."""
        while not server.started:
            if serving.done():
                error = serving.exception()
                if isinstance(error, OSError):
                    text = port_message("--http-port", self._flags.host, self._flags.http_port, error=error)
                    raise StartupError(text) from error
                raise StartupError(f"the HTTP server did not start: {error}") from error
            await asyncio.sleep(0.05)

    async def _stop_orderly(self, stop: asyncio.Event) -> None:
        await stop.wait()
        logger.info("draining: %d requests running", self._drain.running)
        if not await self._drain.wait(self._flags.drain_timeout_seconds):
            logger.warning("%d requests were cut at the end of the drain time", await self._drain.cut())

    async def _http_servers(self, engine: "AsyncLLM", disaggregation: Disaggregation | None) -> list[Any]:
        """One for every socket: the plaintext one first."""
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app

        from specserve_workers.vllm.http_servers import certified_server, plain_server

        tasks = await engine.get_supported_tasks()
        app = build_app(self._args, tasks, engine.model_config)
        await init_app_state(engine, app.state, self._args, tasks)
        frontend = Frontend(
            app,
            FrontendSettings(
                pool=self._flags.pool,
                block_size_tokens=engine.vllm_config.cache_config.block_size,
            ),
            stats=self._stats,
            drain=self._drain,
            is_ready=lambda: self._is_ready and not engine.errored,
            disaggregation=disaggregation,
        )
        if self._tls is None or self._https_port is None:
            servers = [plain_server(frontend, self._args)]
        else:
            gate = refuse_over_plaintext(frontend, https_port=self._https_port)
            servers = [
                plain_server(gate, self._args),
                certified_server(frontend, self._args, self._tls.prefill_server),
            ]
        # By this the engine's error handlers stop the server when a request finds the engine dead.
        app.state.server = servers[0]
        return servers

    @property
    def _https_port(self) -> int | None:
        """Where requests come in over TLS. Decode pods get theirs from the gateway, which has no certificate."""
        identity = self._flags.identity
        return identity.https_port if identity is not None and self._flags.pool is Pool.PREFILL else None

    @asynccontextmanager
    async def _control(self, engine: "AsyncLLM") -> AsyncIterator[None]:
        """The control service, and what keeps settings and numbers fresh."""
        from vllm.v1.metrics.prometheus import get_prometheus_registry

        from specserve_workers.vllm.engine_client import EngineCalls

        flags = self._flags
        calls = EngineCalls(engine, has_kv_transfer=flags.has_kv_transfer)
        self._numbers = numbers = EngineNumbers(calls, activity=lambda: self._stats.activity)
        max_tokens = flags.draft.max_tokens if flags.draft else 0
        speculation = SpeculationControl(
            SpeculationSettings(policy=PolicyName.DSDE, cap=BatchCap.MEAN, max_tokens=max_tokens),
            started_max_tokens=max_tokens,
            apply=calls.set_speculation,
            warns_without_drafter=flags.pool is Pool.DECODE,
        )
        # Answers only if the worker class, and with it every hook, is ours.
        await speculation.install()
        state_file = StateFile(flags.runtime_state, offer=speculation.offer)
        await state_file.poll()
        await numbers.refresh()
        get_prometheus_registry().register(
            WorkerCollector(
                pool=flags.pool,
                stats=self._stats,
                numbers=numbers,
                drain=self._drain,
                identity=self._tls.keeper.status if self._tls else None,
            )
        )
        identity = PodIdentity(name=flags.pod_name, uid=flags.pod_uid, pool=flags.pool, revision=flags.revision)
        server = ControlServer(
            ControlService(identity, stats=self._stats, numbers=numbers, speculation=speculation, drain=self._drain),
            tls=self._tls.control_server if self._tls else None,
        )
        try:
            await server.start(flags.host, flags.control_port)
        except ControlPortError as error:
            raise StartupError(str(error)) from error
        try:
            fresh = numbers.keep_fresh(is_busy=lambda: self._stats.running > 0)
            async with _background(fresh), _background(state_file.watch()):
                yield
        finally:
            await server.stop(1)

    async def _refresh_numbers(self) -> None:
        if self._numbers is not None:
            await self._numbers.try_refresh()

    async def _disaggregate(self, stack: AsyncExitStack) -> Disaggregation | None:
        flags = self._flags
        if flags.pool is not Pool.DECODE or flags.prefill_peers is None:
            return None
        hosts_dir = os.environ.get(HOSTS_DIR_VARIABLE)
        lookup = hosts_dir_lookup(Path(hosts_dir)) if hosts_dir else dns_lookup
        resolver = PeerResolver(flags.prefill_peers, lookup=lookup)
        client = PrefillClient(
            resolver.addresses,
            target_revision=flags.target_revision,
            connect_timeout_seconds=flags.kv.connect_timeout_ms / 1000,
            tls=self._tls.prefill_client if self._tls else None,
        )
        releaser = LeaseReleaser(tls=self._tls.prefill_channels if self._tls else None)
        await client.start()
        stack.push_async_callback(resolver.aclose)
        stack.push_async_callback(client.aclose)
        stack.push_async_callback(releaser.aclose)
        return Disaggregation(client, releaser)

    @contextmanager
    def _listening_sockets(self) -> Iterator[list[socket.socket]]:
        """The plaintext one, and behind it that for TLS if there is one."""
        from vllm.entrypoints.launchers.api_server.entry import setup_server

        from specserve_workers.vllm.http_servers import listening

        flags = self._flags
        with ExitStack() as stack:
            try:
                _, sock = setup_server(self._args, reuse_port=False)
            except OSError as error:
                text = port_message("--http-port", flags.host, flags.http_port, error=error)
                raise StartupError(text) from error
            stack.callback(sock.close)
            sockets = [sock]
            if self._https_port is not None:
                sockets.append(stack.enter_context(listening(flags.host, self._https_port, flag="--https-port")))
            yield sockets

    def _check_ports(self) -> None:
        """Finds ports in use before the engine takes its time to start."""
        flags = self._flags
        ports = [("--control-port", flags.control_port)]
        if flags.pool is Pool.PREFILL:
            ports += [("--kv-port", flags.kv.port + rank) for rank in range(self._args.tensor_parallel_size)]
        for flag, port in ports:
            family = socket.AF_INET6 if ":" in flags.host else socket.AF_INET
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((flags.host, port))
                except OSError as error:
                    raise StartupError(port_message(flag, flags.host, port, error=error)) from error


def _pod_tls(flags: ServingFlags) -> PodTls | None:
    identity = flags.identity
    if identity is None:
        return None
    pod = PodId(namespace=flags.pod_namespace, service=flags.service, pool=flags.pool, uid=flags.pod_uid)
    return PodTls.of(
        pod,
        server=identity.server,
        token=identity.token,
        trust_bundle=identity.trust_bundle,
        directory=identity.directory,
    )


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Until the event loop handles signals, a termination ends the start like an interrupt from the keyboard.

    The event says so as well, and a timer sees to the end: the exception may meet the engine's start at a place that
    swallows it, or leave its clean-up waiting for ever.
    """
    interrupted = threading.Event()

    def interrupt(*_: object) -> None:
        if interrupted.is_set():
            return
        interrupted.set()
        timer = threading.Timer(ABANDON_SECONDS, _abandon)
        timer.daemon = True
        timer.start()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield interrupted
    finally:
        with suppress(ValueError):
            signal.signal(signal.SIGTERM, before)


def _abandon() -> None:
    """Ends this process and the engine's without any clean-up."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(EXIT_TERMINATED)


def _stop_event() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


@asynccontextmanager
async def _background(work: Coroutine[Any, Any, Any]) -> AsyncIterator[asyncio.Task[Any]]:
    """Runs `work` beside the body and ends it with the body."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})
