"""lm-evaluation-harness on tiny offline tasks: scores do not depend on the drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

lm_eval = pytest.importorskip("lm_eval", reason="the extra `lm-eval` is not installed")

from experiments.lm_evaluation import JspecLM  # noqa: E402
from jspec.errors import InputError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # the harness's own


def model(path: Path, **settings: Any) -> JspecLM:
    return JspecLM(str(path), batch_size=4, max_gen_toks=12, **settings)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {"question": f"{a} plus {b} is", "answer": str(a + b), "choices": ["one", str(a + b)]}
        for a, b in [(1, 2), (3, 4), (2, 2), (5, 1), (4, 4)]
    ]
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "num_fewshot": 0,
        "metadata": {"version": 1},
    }
    return [
        shared
        | {
            "task": "tiny_generation",
            "output_type": "generate_until",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["\n", "  "], "do_sample": False, "max_gen_toks": 9},
            "metric_list": [
                {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
            ],
        },
        shared
        | {
            "task": "tiny_choice",
            "output_type": "multiple_choice",
            "doc_to_target": 1,
            "doc_to_choice": "{{choices}}",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        },
        shared
        | {
            "task": "tiny_perplexity",
            "output_type": "loglikelihood_rolling",
            "doc_to_target": "{{question}} {{answer}}",
            "metric_list": [
                {
                    "metric": "word_perplexity",
                    "aggregation": "weighted_perplexity",
                    "higher_is_better": False,
                }
            ],
        },
    ]


def evaluate(lm: JspecLM, tasks: list[dict[str, Any]]) -> dict[str, Any]:
    found = lm_eval.simple_evaluate(model=lm, tasks=tasks, log_samples=True, bootstrap_iters=0)
    assert found is not None
    return dict(found)


def test_scores_and_texts_do_not_depend_on_the_drafter(
    tiny_model: Path, tasks: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    plain, drafted = (
        evaluate(model(tiny_model, drafter=drafter), tasks) for drafter in ("none", "ngram")
    )
    assert set(plain["results"]) == {"tiny_generation", "tiny_choice", "tiny_perplexity"}
    for task, scores in plain["results"].items():
        for name, value in scores.items():
            other = drafted["results"][task][name]
            if isinstance(value, float):
                assert other == pytest.approx(value, rel=1e-5), (task, name)
            else:
                assert other == value
    texts = [
        [sample["resps"] for sample in run["samples"]["tiny_generation"]]
        for run in (plain, drafted)
    ]
    assert texts[0] == texts[1]
    assert any(text for response in texts[0] for (text,) in response)


def test_log_likelihoods_are_the_models(tiny_model: Path) -> None:
    lm = model(tiny_model)
    context, continuation = lm.tok_encode("one two"), lm.tok_encode(" three four")
    ((value, greedy),) = lm._loglikelihood_tokens([(("", ""), context, continuation)], True)
    # Outside the code under test: the logits of one forward pass, summed in float64.
    import jax
    import jax.numpy as jnp

    from jspec import trees

    target = lm.decoder.target
    ids = [*context, *continuation[:-1]]

    @jax.jit
    def run(params: Any, tokens: jax.Array) -> jax.Array:
        cache = target.functions.init_cache(1, 128, jnp.float32)
        chain = trees.chain(len(ids) - 1)
        hidden, _, _ = target.functions.forward(params, tokens, cache, chain)
        return target.functions.logits(params, hidden)

    rows = np.asarray(run(target.params, jnp.asarray([ids], jnp.int32)), np.float64)
    total, best = 0.0, True
    for logits, token in zip(rows[len(context) - 1 :], continuation, strict=True):
        total += logits[token] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        best &= int(logits.argmax()) == token
    assert value == pytest.approx(total, abs=1e-3)
    assert greedy == best


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"drafter": "magic"}, "drafter"),
        ({"drafter": "draft-model"}, "draft_model"),
        ({"drafter": "early-exit"}, "exit_layers"),
    ],
)
def test_bad_settings_are_refused(tiny_model: Path, settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        model(tiny_model, **settings)
    assert caught.value.field == field


def test_a_message_to_be_continued_is_left_open(tiny_model: Path) -> None:
    lm = model(tiny_model)
    chat = [{"role": "user", "content": "Write"}, {"role": "assistant", "content": "Here is: "}]
    assert lm.apply_chat_template(chat, add_generation_prompt=False).endswith("Here is: ")
    assert lm.apply_chat_template(chat[:1]).endswith("assistant: ")


def request(context: str, **given: Any) -> Any:
    from lm_eval.api.instance import Instance

    return Instance("generate_until", {}, (context, {"until": []} | given), 0)


def test_prompts_are_cut_loudly_and_never_to_nothing(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lm = model(tiny_model)
    assert lm.generate_until([], disable_tqdm=True) == []
    with pytest.raises(InputError, match="max_gen_toks=32768 leaves no room"):
        lm.generate_until([request("abc", max_gen_toks=32768)], disable_tqdm=True)
    with caplog.at_level("WARNING"):
        lm.generate_until([request("abc" * 400, max_gen_toks=4)], disable_tqdm=True)
    assert "1 prompts were cut" in caplog.text
    assert len(lm.generate_until([request("", max_gen_toks=4)], disable_tqdm=True)) == 1


def test_a_task_that_samples_is_sampled(tiny_model: Path) -> None:
    lm = model(tiny_model)
    assert lm._params({"until": [], "do_sample": True, "num_beams": 1}, 3).temperature == 1.0
    assert lm._params({"until": ["a", ""], "do_sample": False}, 3).temperature == 0.0
    assert lm._params({"until": ["a", ""]}, 3).stop == ("a",)
    with pytest.raises(InputError, match="beam search"):
        lm._params({"until": [], "num_beams": 4}, 3)
