r"""jspec as a model of EleutherAI's lm-evaluation-harness (the extra `lm-eval`).

    python -m experiments.lm_evaluation --model=jspec --tasks=gsm8k \
        --model_args=model=smollm2,drafter=ngram,gamma=7

is the harness's own command line with the model `jspec` known to it; a run with drafter=none is the
baseline. In Python, importing this module makes the name known to `lm_eval.simple_evaluate`.
Generation speculates; log likelihoods are the target's, which no drafter can change.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

import jspec
from experiments import results
from jspec import generation, metrics, sampling_params
from jspec.errors import InputError, require
from jspec.requests import Completion, Request

_LOG = logging.getLogger(__name__)
_DRAFTERS = ("none", "ngram", "trained", "draft-model", "early-exit")

Scored = tuple[tuple[str, str], list[int], list[int]]


@register_model("jspec")
class JspecLM(TemplateLM):  # type: ignore[misc]
    """A target and a drafter behind the harness's interface.

    Args:
        model: as for `jspec.load`.
        drafter: none, ngram, trained, draft-model or early-exit.
        trained: for drafter=trained, as for `jspec.load_drafter`.
        draft_model: for drafter=draft-model, as for `jspec.load`.
        exit_layers: for drafter=early-exit.
        gamma: drafts a round.
        verification: token or block; or typical, which is lossy, so that what is evaluated is no
            longer the target alone; a warning says so, and the harness's results have the argument.
        dtype: of weights and cache.
        weights: same or int8.
        batch_size: most rows decoded together.
        max_gen_toks: most tokens to generate where a task does not say.
        seed: of samples; request i takes seed + i.
        device: whatever the harness passes; JAX's own default device is used.
        max_batch_size: as `device`, without effect.

    Raises:
        InputError: a setting is not valid.
    """

    def __init__(
        self,
        model: str = "smollm2",
        drafter: str = "ngram",
        trained: str | None = None,
        draft_model: str | None = None,
        exit_layers: int | None = None,
        gamma: int | None = None,
        verification: str = "token",
        dtype: str = "float32",
        weights: str = "same",
        batch_size: int | str = 8,
        max_gen_toks: int = 256,
        seed: int = 0,
        device: str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        require(
            str(batch_size).isdecimal(),
            "batch_size",
            batch_size,
            "is not a number",
            "give the most rows to decode together",
        )
        target = jspec.load(model, dtype, weights)  # type: ignore[arg-type]
        if target.tokenizer is None:
            raise InputError("model", model, "has no tokenizer", "give a model with one")
        bound = _drafter(target, drafter, trained, draft_model, exit_layers, dtype)
        default = generation.default_speculation(bound).gamma
        most = (gamma if gamma is not None else default) if bound else 0
        speculation = jspec.SpeculationConfig(int(most), verification)  # type: ignore[arg-type]
        if not speculation.lossless:
            _LOG.warning(results.LOSSY)
        self.decoder = jspec.Decoder(target, bound, speculation, batch_size=int(batch_size))
        self.completions: list[Completion] = []
        self._encode = target.tokenizer
        self._max_gen_toks = int(max_gen_toks)
        self._seed = int(seed)
        self._name = model

    @property
    def eot_token_id(self) -> int:
        """The model's first end-of-sequence id, or 0."""
        return next(iter(self.decoder.target.eos_token_ids), 0)

    @property
    def prefix_token_id(self) -> int:
        """Stands before a text without context: beginning of sequence, else end of sequence."""
        begin = self._encode.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def max_length(self) -> int:
        """The longest sequence, in tokens."""
        return self.decoder.target.config.max_context

    @property
    def tokenizer_name(self) -> str:
        """Names the chat template in the harness's cache."""
        return self._name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return "": the template is applied here."""
        return ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the conversation as the model's own template renders it.

        Without a generation prompt the last message is one that the model is to continue, so the
        text ends with its content.

        Raises:
            InputError: the template changes the last message, so it cannot be continued.
        """
        text = self._encode.apply_chat_template(
            chat_history, add_generation_prompt=add_generation_prompt
        )
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"]
        for part in (last, last.strip()):  # templates strip
            if part and part in text:
                return text[: text.rfind(part) + len(part)]
        raise InputError(
            "messages",
            last,
            "is changed by the chat template, so it cannot be continued",
            "evaluate without --apply_chat_template",
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return token ids, by default with what the tokenizer itself puts before a text.

        A text that begins with it already, as templates write it, gets no second one.
        """
        plain = self._encode.encode(string)
        if add_special_tokens is None:
            begin = self._encode.bos_token_id
            add_special_tokens = begin is None or plain[:1] != [begin]
        return self._encode.encode(string, add_special_tokens=True) if add_special_tokens else plain

    def _loglikelihood_tokens(
        self, requests: Sequence[Scored], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return log p(continuation | context) and whether greedy decoding would give it."""
        asked, wanted = [], []
        params = jspec.SamplingParams(prompt_logprobs=1, max_new_tokens=1, seed=0)
        for _, context, continuation in requests:
            ids = (context + continuation)[-(self.max_length - 1) :]
            asked.append(Request(tuple(ids), params))
            wanted.append(min(len(continuation), len(ids) - 1))
        results = []
        for done, count in zip(self._run(asked, "Scoring", disable_tqdm), wanted, strict=True):
            assert done.prompt_logprobs is not None  # asked for
            known = [entry for entry in done.prompt_logprobs if entry is not None]
            scored = known[len(known) - count :]
            greedy = all(entry.top_raw[0][0] == entry.token_id for entry in scored)
            results.append((sum(entry.raw for entry in scored), greedy))
        return results

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return log p of whole texts, in windows of the model's context."""
        windows: list[Scored] = []
        owners = []
        for index, request in enumerate(requests):
            (text,) = request.args
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 2,
                context_len=1,
            ):
                context, continuation = make_disjoint_window(window)
                windows.append((("", ""), context, continuation))
                owners.append(index)
        totals = [0.0] * len(requests)
        found = self._loglikelihood_tokens(windows, disable_tqdm)
        for index, (value, _) in zip(owners, found, strict=True):
            totals[index] += value
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return generated texts, cut before a task's stop texts."""
        if not requests:
            return []
        asked, cut = [], 0
        for index, request in enumerate(requests):
            context, given = request.args
            params = self._params(given, index)
            ids = self.tok_encode(context) or [self.prefix_token_id]
            room = self.max_length - params.max_new_tokens
            require(
                room > 0,
                "max_gen_toks",
                params.max_new_tokens,
                f"leaves no room for a prompt in the model's context of {self.max_length}",
                "give a smaller one by --gen_kwargs=max_gen_toks=N",
            )
            cut += len(ids) > room
            asked.append(Request(tuple(ids[-room:]), params))
        if cut:
            _LOG.warning("jspec: %d prompts were cut at their start to fit the context", cut)
        done = self._run(asked, "Generating", disable_tqdm)
        self.completions += done
        counts = metrics.total([completion.counts for completion in done])
        _LOG.info(
            "jspec: %d tokens in %d rounds, block efficiency %.2f",
            counts.emitted,
            counts.rounds,
            metrics.block_efficiency(counts) or 0.0,
        )
        failed = [completion.error for completion in done if completion.error]
        if failed:
            _LOG.warning("jspec: %d requests failed, the first one: %s", len(failed), failed[0])
        return [completion.text for completion in done]

    def _params(self, given: dict[str, Any], index: int) -> jspec.SamplingParams:
        kwargs = dict(normalize_gen_kwargs(given, self._max_gen_toks))
        # It has set the temperature to 0 unless a task samples; whose default is transformers'.
        if kwargs.pop("do_sample", False):
            kwargs.setdefault("temperature", 1.0)
        stop = [text for text in kwargs.pop("until", []) if text]
        most = kwargs.pop("max_gen_toks")
        own = {"max_new_tokens": most, "stop": stop, "seed": self._seed + index}
        return sampling_params.from_mapping(kwargs | own)

    def _run(self, requests: Sequence[Request], what: str, disable_tqdm: bool) -> list[Completion]:
        with tqdm(total=len(requests), desc=what, disable=disable_tqdm) as bar:
            return self.decoder.generate(requests, lambda count: bar.update(count - bar.n))


def _drafter(
    target: jspec.Model,
    kind: str,
    trained: str | None,
    draft_model: str | None,
    layers: int | None,
    dtype: str,
) -> jspec.BoundDrafter | None:
    require(
        kind in _DRAFTERS, "drafter", kind, "is not a choice", f"give one of {', '.join(_DRAFTERS)}"
    )
    if kind == "ngram":
        return jspec.ngram()
    if kind == "trained":
        if trained is None:
            raise InputError("trained", trained, "is not given", "name a trained drafter")
        return jspec.load_drafter(target, trained)
    if kind == "draft-model":
        if draft_model is None:
            raise InputError(
                "draft_model", draft_model, "is not given", "name a model of the target's family"
            )
        return jspec.draft_model(target, jspec.load(draft_model, dtype))
    if kind == "early-exit":
        if layers is None:
            raise InputError("exit_layers", layers, "is not given", "say how many layers draft")
        return jspec.early_exit(target, int(layers))
    return None


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
