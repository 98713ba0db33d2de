from __future__ import annotations

from pathlib import Path

import pytest

from experiments import compile_facts, compilers
from experiments.kernel_cases import Attention, Cache, Case, Rejection, case, op_of
from pallas_kernels import shapes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"
SMALL = case("llama-3.1-8b", 2, 5, 2048)


def facts(chip: str, *wanted: Case) -> str:
    return compile_facts.facts(wanted, (), [chip], lambda text: None)


def test_a_tpu_s_facts() -> None:
    try:
        compilers.tpu("v5e")
    except compilers.UnavailableError as error:
        pytest.skip(str(error))
    text = facts("v5e", Cache(SMALL, "cache_write"))
    assert "never run" in text.partition(".")[0]
    row = text.splitlines()[-1].strip("| ").split(" | ")
    # The whole cache is donated: 2 rows, 8 heads of 2048 slots and 128 lanes in two bytes.
    assert row[:2] == ["cache_write", "llama-3.1-8b-B2-T5-S2048"]
    assert row[4] == f"{2 * 8 * 2048 * 128 * 2 / 2**20:.2f}"


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_an_h100_s_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = compilers.Resources(registers=77, spilled=3, shared_memory=999)
    monkeypatch.setattr(compilers, "compile_for_h100", lambda kernel, folder: taken)
    rows = facts("h100", Cache(SMALL, "cache_commit"), Rejection(512, 3, 2, "all")).splitlines()
    assert rows[-2].endswith("| cache_commit | 1 | 77 | 3 | 999 |")
    assert rows[-1].endswith("| rejection_sampling | 16 | 77 | 3 | 999 |")


def test_a_missing_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise compilers.UnavailableError(f"no compiler for {name}")

    monkeypatch.setattr(compilers, "tpu", missing)
    assert "Not compiled: no compiler for v6e." in facts("v6e", Attention(SMALL))


def test_what_does_not_compile_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    too_wide = Attention(shapes.Case(shapes.AttentionShape("odd", 2, 1, 80, 1), 1, 1, 128))
    assert "does not compile: " in facts("h100", too_wide)


def test_the_generated_part_alone_is_replaced() -> None:
    page = f"before\n{compile_facts.BEGIN}\nold\n{compile_facts.END}\nafter\n"
    assert compile_facts.replaced(page, "new") == page.replace("old", "new")
    with pytest.raises(ValueError, match="has no"):
        compile_facts.replaced("before", "new")


def test_a_page_without_marks_is_refused_before_anything_is_compiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing")
    assert compile_facts.main([f"--output={page}"]) == 2
    assert str(page) in capsys.readouterr().err


def test_the_page_has_every_op_and_chip() -> None:
    text = PAGE.read_text(encoding="utf-8")
    _, _, generated = text.partition(compile_facts.BEGIN)
    assert "never run" in generated.partition(".")[0]
    for title in ("TPU v5e", "TPU v6e", "TPU v5p", "H100"):
        assert f"### {title}\n\n| op |" in generated
    for of in compile_facts.cases():
        assert f"| {op_of(of)} | {of.name} |" in generated
