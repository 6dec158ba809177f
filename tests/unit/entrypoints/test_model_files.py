import json
from pathlib import Path
from typing import Any

import pytest

from specserve_workers.model_files import (
    ModelFiles,
    ModelNotFoundError,
    TokenizerMismatchError,
    check_draft_fits,
    read_config,
    tokens_digest,
)

VOCABULARY = {"a": 0, "b": 1, "ab": 2}


def tokenizer(vocabulary: Any = None, **fields: Any) -> str:
    return json.dumps({"model": {"vocab": vocabulary or VOCABULARY}, **fields})


def model(folder: Path, flag: str = "--model", *, config: Any = None, **files: str) -> ModelFiles:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 3} if config is None else config))
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)
    return ModelFiles(flag, str(folder))


def test_a_missing_folder_is_named_with_its_flag(tmp_path: Path):
    with pytest.raises(ModelNotFoundError, match=f"--model: there is no folder {tmp_path}/nothing"):
        read_config(ModelFiles("--model", str(tmp_path / "nothing")))


def test_a_folder_without_a_config_is_no_model(tmp_path: Path):
    with pytest.raises(ModelNotFoundError, match=r"--draft-model: .* has no config.json"):
        read_config(ModelFiles("--draft-model", str(tmp_path)))


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_broken_config_is_no_model(tmp_path: Path, content: str):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelNotFoundError, match=r"config.json is not"):
        read_config(ModelFiles("--model", str(tmp_path)))


def test_the_same_tokens_in_another_layout_fit(tmp_path: Path):
    added = [{"id": 3, "content": "<eos>"}]
    target = model(tmp_path / "t", tokenizer__json=tokenizer(added_tokens=added))
    inline = {"<eos>": 3, "b": 1, "ab": 2, "a": 0}
    draft = model(tmp_path / "d", "--draft-model", tokenizer__json=tokenizer(inline, normalizer=None))
    check_draft_fits(target, draft)


def test_another_vocabulary_size_is_refused(tmp_path: Path):
    target = model(tmp_path / "t", tokenizer__json=tokenizer())
    draft = model(tmp_path / "d", "--draft-model", config={"vocab_size": 4}, tokenizer__json=tokenizer())
    with pytest.raises(TokenizerMismatchError, match=r"--draft-model: TokenizerMismatch: vocab_size is 4.* 3"):
        check_draft_fits(target, draft)


def test_the_same_size_with_other_tokens_is_refused(tmp_path: Path):
    target = model(tmp_path / "t", tokenizer__json=tokenizer())
    draft = model(tmp_path / "d", "--draft-model", tokenizer__json=tokenizer({"a": 0, "ab": 1, "b": 2}))
    with pytest.raises(TokenizerMismatchError, match=r"tokenizer.json"):
        check_draft_fits(target, draft)


def test_tokenizers_of_other_formats_are_compared_as_bytes(tmp_path: Path):
    target = model(tmp_path / "t", tokenizer__model="x")
    check_draft_fits(target, model(tmp_path / "d", tokenizer__model="x"))
    with pytest.raises(TokenizerMismatchError, match=r"tokenizer.model"):
        check_draft_fits(target, model(tmp_path / "e", tokenizer__model="y"))


def test_the_size_of_a_model_with_an_inner_text_model_is_found(tmp_path: Path):
    target = model(tmp_path / "t", config={"text_config": {"vocab_size": 3}}, tokenizer__json=tokenizer())
    check_draft_fits(target, model(tmp_path / "d", tokenizer__json=tokenizer()))


def test_vocabularies_given_as_lists_are_read():
    listed = json.dumps({"model": {"vocab": [["a", -1.0], ["b", -2.0], ["ab", -3.0]]}})
    assert tokens_digest(listed.encode()) == tokens_digest(tokenizer().encode())
