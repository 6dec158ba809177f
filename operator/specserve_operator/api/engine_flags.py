"""Engine flags that the operator sets itself, and therefore refuses in `engine.args` and a pool's `args`.

Ports and addresses, model and draft, speculation, KV transfer, the classes our hooks replace, TLS and keys follow from
the spec's own fields. A flag given a second time would win over ours in the engine and break what the operator reports
about the pod. The worker refuses them once more, abbreviations included, since only it has the engine's parser.
"""

import re
from typing import Annotated, Final

from pydantic import AfterValidator, Field

from specserve_operator.api.cel import Rule

OWNED_FLAGS: Final = (
    "--model",
    "--revision",
    "--served-model-name",
    "--host",
    "--port",
    "--uds",
    "--grpc",
    "--grpc-port",
    "--root-path",
    "--headless",
    "--api-server-count",
    "-asc",
    "--config",  # a file of flags, which nobody could check
    "--speculative-config",
    "-sc",
    "--spec-method",
    "--spec-model",
    "--spec-tokens",
    "--kv-transfer-config",
    "--worker-cls",
    "--worker-extension-cls",
    "--scheduler-cls",
    "--middleware",
    "--async-scheduling",
    "--no-async-scheduling",
    "--shutdown-timeout",
    "--api-key",
    "--ssl-keyfile",
    "--ssl-certfile",
    "--ssl-ca-certs",
    "--ssl-cert-reqs",
    "--ssl-ciphers",
    "--enable-ssl-refresh",
    "--no-enable-ssl-refresh",
)

# The engine takes `--flag value`, `--flag=value`, `--flag.key value` and `--flag+ value`, and reads `_` in the name of
# a flag as `-`. The pattern finds the name, in Python's syntax and in that of CEL.
_NAME_PATTERN: Final = "^-[^=.+]*"
_NAME: Final = re.compile(_NAME_PATTERN)
_MESSAGE: Final = "a flag is set by the operator and must not be given in args"


def refuse_owned_flag(arg: str) -> str:
    """`arg` itself. Raises ValueError, naming the flag but not its value, if the operator owns it."""
    match = _NAME.match(arg)
    if match and match[0].replace("_", "-") in OWNED_FLAGS:
        raise ValueError(f"{_MESSAGE}: {match[0]}")
    return arg


# A list to look names up in is far cheaper to the API server than one pattern of all names, which it refuses.
OWNED_FLAG_RULE: Final = Rule(
    f"!(self.find('{_NAME_PATTERN}').replace('_', '-') in [{', '.join(map(repr, OWNED_FLAGS))}])",
    _MESSAGE,
    message_expression=f"'{_MESSAGE}: ' + self.find('{_NAME_PATTERN}')",
)

EngineArg = Annotated[
    str,
    Field(max_length=4096, json_schema_extra={"x-kubernetes-validations": [OWNED_FLAG_RULE.to_schema()]}),
    AfterValidator(refuse_owned_flag),
]
