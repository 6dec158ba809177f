"""A pod's flags as the engine's own command line."""

import json
from argparse import Namespace
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, cast

from specserve_workers.flags import FlagError, ServingFlags
from specserve_workers.frontend.middleware import Pool
from specserve_workers.kv.config import kv_transfer_config
from specserve_workers.vllm.launch import speculation_engine_args


def parse_engine_args(flags: ServingFlags) -> Namespace:
    """Arguments of vLLM's API server for this pod, validated as its own command would.

    Raises:
        FlagError: the engine knows no such argument, or refuses its value.
    """
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise FlagError(f"engine arguments: {message}")

    def parse(argv: Sequence[str]) -> Any:
        return make_arg_parser(Parser(add_json_tip=False)).parse_args(list(argv))

    try:
        # The tensor-parallel size is the user's; the draft must have the same.
        tensor_parallel_size = parse(flags.engine_args).tensor_parallel_size
        args = parse(engine_argv(flags, tensor_parallel_size=tensor_parallel_size))
        validate_parsed_serve_args(args)
    except (TypeError, ValueError, KeyError) as error:
        if isinstance(error, FlagError):
            raise
        raise FlagError(f"engine arguments: {error}") from error
    return cast(Namespace, args)


def engine_argv(flags: ServingFlags, *, tensor_parallel_size: int) -> list[str]:
    """The user's arguments, and after them what they may not change."""
    draft = flags.draft
    argv = [
        *flags.engine_args,
        *("--model", flags.model),
        *("--served-model-name", flags.served_model_name),
        *("--host", flags.host),
        *("--port", str(flags.http_port)),
        *speculation_engine_args(
            draft.method if draft else None,
            draft.model if draft else None,
            max_draft_tokens=draft.max_tokens if draft else 0,
            draft_model_revision=draft.model_revision if draft else None,
            tensor_parallel_size=tensor_parallel_size,
        ),
    ]
    if flags.model_revision:
        argv += ["--revision", flags.model_revision]
    if flags.has_kv_transfer:
        argv += ["--kv-transfer-config", json.dumps(_kv_transfer(flags))]
    return argv


def _kv_transfer(flags: ServingFlags) -> dict[str, Any]:
    return kv_transfer_config(
        "prefill" if flags.pool is Pool.PREFILL else "decode",
        host=flags.host,
        port=flags.kv.port,
        lease_seconds=flags.kv.lease_seconds,
        connect_timeout_ms=flags.kv.connect_timeout_ms,
        stall_timeout_ms=flags.kv.stall_timeout_ms,
        target_revision=flags.target_revision,
        on_failure=cast(Literal["Recompute", "Fail"], flags.kv.on_failure),
        identity_directory=str(flags.identity.directory) if flags.identity else "",
        namespace=flags.pod_namespace,
        service=flags.service,
    )
