"""What can be known to be wrong before any process is started: model folders, draft, ports.

On Kubernetes a pod would find these out and say so in a condition. On one machine the folders and ports are
right here, so the user hears of it at once and nothing half-started stays. Only JSON files are read: no
weights, no engine.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from specserve_operator.api.v1alpha1 import DraftMethod, SpeculativeService
from specserve_operator.cluster.local import ports
from specserve_operator.core.config import OperatorConfig
from specserve_operator.core.objects import ServiceKey
from specserve_operator.core.problems import find_problems
from specserve_operator.core.weights import locate_weights

GATEWAY_HOST = "127.0.0.1"


class PreflightError(Exception):
    """The service cannot run on this machine; the message names the field or file and what to do."""


PortTest = Callable[[int], str | None]


def check_services(
    services: Iterable[SpeculativeService],
    *,
    config: OperatorConfig,
    existing: Iterable[SpeculativeService] = (),
    port_problem: PortTest | None = None,
) -> None:
    """Raises `PreflightError` for the first thing that would keep `services` from running here.

    They are checked against this machine, the services that exist already, and each other.
    """
    taken = {_key(service): service.spec.gateway.port for service in existing}
    for service in services:
        if problems := find_problems(service, config):
            raise PreflightError("\n".join(f"{service.metadata.name}: {problem}" for problem in problems))
        _check_models(service)
        _check_port(service, taken, port_problem=port_problem or find_port_problem)
        taken[_key(service)] = service.spec.gateway.port


def _key(service: SpeculativeService) -> ServiceKey:
    return ServiceKey(service.metadata.namespace, service.metadata.name)


def _check_port(service: SpeculativeService, taken: Mapping[ServiceKey, int], *, port_problem: PortTest) -> None:
    """`taken` are the ports of all services there are, also of the one that is checked: its own is free for it."""
    key, port = _key(service), service.spec.gateway.port
    if taken.get(key) == port:
        return
    field = f"{key.name}: spec.gateway.port"
    for other, other_port in taken.items():
        if other_port == port and other != key:
            raise PreflightError(f"{field}: port {port} is the gateway of service {other}; choose another port")
    if problem := port_problem(port):
        raise PreflightError(f"{field}: {problem}")


def find_port_problem(port: int) -> str | None:
    """Why a gateway cannot listen on `port` of this machine; None if it can."""
    conflict = ports.find_conflict(GATEWAY_HOST, port)
    return None if conflict is None else f"{conflict}; choose another port"


def _check_models(service: SpeculativeService) -> None:
    name, speculation = service.metadata.name, service.spec.speculation
    target = _model_folder(service.spec.model.uri, field=f"{name}: spec.model.uri")
    if speculation is None or speculation.draft.uri is None:
        return
    field = f"{name}: spec.speculation.draft.uri"
    draft = _model_folder(speculation.draft.uri, field=field)
    # What comes from a hub is compared by the decode pods, when they have it.
    if speculation.draft.method is DraftMethod.DRAFT_MODEL and target is not None and draft is not None:
        _check_same_tokens(target, draft, field=field)


def _model_folder(uri: str, *, field: str) -> Path | None:
    """The folder of this machine that `uri` names, checked; None where the weights come from a hub."""
    folder = Path(locate_weights(uri).path_or_id)
    if not folder.is_absolute():
        return None
    if not folder.is_dir():
        raise PreflightError(f"{field}: there is no folder {folder}")
    if not (folder / "config.json").is_file():
        raise PreflightError(f"{field}: {folder} has no config.json, so it is no model folder")
    return folder


def _check_same_tokens(target: Path, draft: Path, *, field: str) -> None:
    sizes = _vocab_size(target), _vocab_size(draft)
    if sizes[0] != sizes[1]:
        raise PreflightError(
            f"{field}: the draft's vocabulary has {sizes[1]} tokens ({draft / 'config.json'}), the target's "
            f"{sizes[0]} ({target / 'config.json'}); a draft model needs the target's vocabulary"
        )
    if not _have_same_tokenizer(target / "tokenizer.json", draft / "tokenizer.json"):
        raise PreflightError(
            f"{field}: {draft / 'tokenizer.json'} is another tokenizer than {target / 'tokenizer.json'}; "
            "a draft model needs the target's tokenizer"
        )


def _vocab_size(folder: Path) -> int:
    config = _read_json(folder / "config.json")
    # Models that take more than text keep their language model's numbers one level down.
    text_config = config.get("text_config")
    size = config.get("vocab_size", text_config.get("vocab_size") if isinstance(text_config, dict) else None)
    if not isinstance(size, int):
        raise PreflightError(f"{folder / 'config.json'}: vocab_size is missing or no number")
    return size


def _have_same_tokenizer(target: Path, draft: Path) -> bool:
    """Compares bytes first; files that differ may still mean the same tokens (another writer)."""
    if not (target.is_file() and draft.is_file()):
        return True  # a draft without tokenizer files is run with the target's
    if hashlib.sha256(target.read_bytes()).digest() == hashlib.sha256(draft.read_bytes()).digest():
        return True
    return _token_ids(_read_json(target)) == _token_ids(_read_json(draft))


def _token_ids(tokenizer: Mapping[str, Any]) -> tuple[Any, ...]:
    """What decides which text becomes which ids: vocabulary, merges and added tokens."""
    model = tokenizer.get("model") or {}
    # Merges are written as "a b" or as ["a", "b"], by version.
    merges = [pair.split(" ") if isinstance(pair, str) else list(pair) for pair in model.get("merges") or ()]
    added = {token.get("content"): token.get("id") for token in tokenizer.get("added_tokens") or ()}
    vocabulary = model.get("vocab", {})
    return model.get("type"), vocabulary, merges, added


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PreflightError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(data, dict):
        raise PreflightError(f"{path}: must hold a JSON object")
    return data
