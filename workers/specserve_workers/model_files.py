"""What can be known about a model and its draft from their files, before an engine takes a minute to find out."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from specserve_workers.startup import StartupError

# Formats of tokenizers that are compared as bytes where there is no `tokenizer.json`.
_OPAQUE_TOKENIZERS: Final = ("tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json")


class ModelNotFoundError(StartupError):
    """A model's folder or one of its files is not there."""


class TokenizerMismatchError(StartupError):
    """Draft and target do not read the same tokens."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """One model as a flag names it: a local folder, or a hub id with its commit."""

    flag: str
    path_or_id: str
    revision: str | None = None

    @property
    def is_local(self) -> bool:
        return self.path_or_id.startswith(("/", "./", "../", "~")) or Path(self.path_or_id).exists()

    def read(self, name: str) -> bytes | None:
        """Content of a file of the model; None if the model has no such file.

        Raises:
            ModelNotFoundError: the model itself is not there.
        """
        if self.is_local:
            folder = Path(self.path_or_id).expanduser()
            if not folder.is_dir():
                raise ModelNotFoundError(f"{self.flag}: there is no folder {self.path_or_id}")
            file = folder / name
            return file.read_bytes() if file.is_file() else None
        return self._read_from_hub(name)

    def _read_from_hub(self, name: str) -> bytes | None:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, HFValidationError, RepositoryNotFoundError

        try:
            return Path(hf_hub_download(self.path_or_id, name, revision=self.revision)).read_bytes()
        except RepositoryNotFoundError as error:
            raise ModelNotFoundError(f"{self.flag}: the hub knows no model {self.path_or_id}") from error
        except HFValidationError as error:
            raise ModelNotFoundError(
                f"{self.flag}: {self.path_or_id!r} is neither a folder nor an id of the hub"
            ) from error
        except EntryNotFoundError:
            return None
        except OSError as error:
            raise ModelNotFoundError(f"{self.flag}: {self.path_or_id} cannot be fetched: {error}") from error


def read_config(model: ModelFiles) -> dict[str, Any]:
    """The model's `config.json`. Raises ModelNotFoundError if there is none or it is no JSON object."""
    raw = model.read("config.json")
    if raw is None:
        raise ModelNotFoundError(f"{model.flag}: {model.path_or_id} has no config.json")
    try:
        config = json.loads(raw)
    except ValueError as error:
        raise ModelNotFoundError(f"{model.flag}: {model.path_or_id}/config.json is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelNotFoundError(f"{model.flag}: {model.path_or_id}/config.json is not a JSON object")
    return config


def check_draft_fits(target: ModelFiles, draft: ModelFiles) -> None:
    """Draft tokens are compared by id, so both models must give every id the same meaning.

    Raises:
        TokenizerMismatchError: the vocabulary sizes or the tokens differ.
        ModelNotFoundError: one of the models is not there.
    """
    sizes = [_vocabulary_size(read_config(model)) for model in (target, draft)]
    if sizes[0] != sizes[1]:
        raise TokenizerMismatchError(
            f"{draft.flag}: TokenizerMismatch: vocab_size is {sizes[1]}, that of the target ({target.flag}) {sizes[0]}"
        )
    digests = [_tokenizer_digests(model) for model in (target, draft)]
    for name in digests[0].keys() & digests[1].keys():
        if digests[0][name] != digests[1][name]:
            raise TokenizerMismatchError(
                f"{draft.flag}: TokenizerMismatch: {name} holds other tokens than that of the target ({target.flag})"
            )


def _vocabulary_size(config: dict[str, Any]) -> int | None:
    size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    return size if isinstance(size, int) else None


def _tokenizer_digests(model: ModelFiles) -> dict[str, str]:
    raw = model.read("tokenizer.json")
    if raw is not None:
        return {"tokenizer.json": tokens_digest(raw)}
    found = {name: model.read(name) for name in _OPAQUE_TOKENIZERS}
    return {name: hashlib.sha256(content).hexdigest() for name, content in found.items() if content is not None}


def tokens_digest(tokenizer_json: bytes) -> str:
    """SHA-256 over all (id, token) pairs: equal for tokenizers that differ only in layout or in pre-processing."""
    document = json.loads(tokenizer_json)
    vocabulary = document.get("model", {}).get("vocab", {})
    pairs = (
        {index: token for token, index in vocabulary.items()}
        if isinstance(vocabulary, dict)
        else {index: entry[0] for index, entry in enumerate(vocabulary)}
    )
    pairs |= {added["id"]: added["content"] for added in document.get("added_tokens", ())}
    return hashlib.sha256(json.dumps(sorted(pairs.items())).encode()).hexdigest()
