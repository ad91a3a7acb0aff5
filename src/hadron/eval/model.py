"""Hadron as a model of lm-eval: its three kinds of request, each as one list through the engine.

Imported only where lm-eval is installed. Importing it registers the name `hadron`, so that lm-eval's own
functions know it too: `lm_eval.simple_evaluate("hadron", model_args={"pretrained": "path"})`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from hadron.errors import UsageError
from hadron.eval.texts import Texts
from hadron.eval.windows import rolling_windows
from hadron.llm import LLM, Prompt
from hadron.sampling_params import SamplingParams
from hadron.tokenizer.markup import Mark, Markup

#: Called with what is being done, how many of how many.
Progress = Callable[[str, int, int], None]

#: Tokens of an answer where a task does not say; lm-eval's own figure.
DEFAULT_TOKENS = 256
_MOST_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
#: What tasks set for other engines: ways to say "greedily", and the repetition of a default.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {"num_beams": (1,), "early_stopping": (False,), "use_cache": (True,)}


def _silent(what: str, done: int, total: int) -> None:
    del what, done, total


@register_model("hadron")
class HadronLM(LM):  # type: ignore[misc]
    """A loaded `LLM` for lm-eval. switches: of the chat template. seed: of sampled answers, the i-th takes seed + i.

    shortened: how many requests had to lose the beginning of their context to fit.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        progress: Progress = _silent,
        switches: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._llm = llm
        self._texts = Texts(llm)
        self._markup = Markup(llm.tokenizer)
        self._progress = progress
        self._switches = dict(switches or {})
        self._seed = seed
        self.shortened = 0

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> HadronLM:
        """For lm-eval's own functions: `pretrained`, and the keywords of `LLM`; no batch size, no device."""
        del additional_config
        options = dict(arg_dict)
        model = options.pop("pretrained", None)
        return cls(LLM(model, **options))

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> HadronLM:
        """The same from `pretrained=path,kernels=cpu`."""
        from lm_eval.utils import simple_parse_args_string

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def max_length(self) -> int:
        """Most tokens that the model reads at once."""
        return self._llm.max_model_len

    @property
    def tokenizer_name(self) -> str:
        """What the tokenizer is called where lm-eval keeps requests."""
        return self._llm.plan.model.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Where the template is, for lm-eval's records."""
        return self._llm.chat_template.where if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt for a conversation."""
        template = self._llm.chat_template
        return template.render(chat_history, add_generation_prompt=add_generation_prompt, **self._switches)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """For each context and continuation: the continuation's log-probability, and whether it is the greedy one."""
        del disable_tqdm
        pairs = [self._fitting(*self._texts.pair(*request.args)) for request in requests]
        scored = iter(self._score("log-likelihoods", [pair for pair in pairs if pair[1]]))
        # a continuation may add no token of its own: then nothing is to be predicted
        results = [(s.logprob, s.is_greedy) if pair[1] and (s := next(scored)) else (0.0, True) for pair in pairs]
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, result)
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """For each text: its log-probability, in windows of `max_length` that predict every token once."""
        del disable_tqdm
        counts, windows = [], []
        for request in requests:
            own = list(rolling_windows(self._texts.plain(request.args[0]), self._texts.opening, *[self.max_length] * 2))
            counts.append(len(own))
            windows += own
        scored = iter(self._score("log-likelihoods", windows))
        results = [sum(s.logprob for s in itertools.islice(scored, count)) for count in counts]
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, result)
        return results

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """For each context: what the model says until one of the texts `until`, markup of tool calls included.

        Where the context leaves a thought open, the thought is no part of the answer, and `until` does not end it.
        """
        del disable_tqdm
        prompts: list[Prompt] = []
        params, stops = [], []
        for index, request in enumerate(requests):
            context, settings = request.args
            ids = self._texts.encode(context)
            thinks = self._markup.open_thought(ids)
            until = _until(settings)
            wanted = _params(settings, () if thinks else until, self._seed + index)
            assert wanted.max_tokens is not None
            room = max(1, self.max_length + 1 - wanted.max_tokens)
            self.shortened += len(ids) > room
            prompts.append({"prompt_token_ids": ids[-room:]})
            params.append(wanted)
            stops.append(until if thinks else None)
        done = itertools.count(1)

        def on_token(_: int, event: Any) -> None:
            if event.finish_reason is not None:
                self._progress("answers", next(done), len(requests))

        outputs = self._llm.generate(prompts, params, on_token=on_token)
        results = []
        for request, output, until_there in zip(requests, outputs, stops, strict=True):
            said = output.outputs[0]
            text = said.text or ""
            if until_there is not None:
                text = _after_thought(text, until_there, complete=said.finish_reason == "stop")
            results.append(text)
            self.cache_hook.add_partial("generate_until", request.args, text)
        return results

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes beside the results."""
        config = self._llm.config
        kept = ("kernels", "dtype", "kv_cache_dtype", "device", "activation_quantization", "mla_prefill")
        return {
            "model": self._llm.plan.model,
            "max_length": self.max_length,
            "chat_template_kwargs": self._switches,
            **{name: getattr(config, name) for name in kept},
        }

    def _score(self, what: str, pairs: Sequence[tuple[list[int], list[int]]]) -> Any:
        return self._llm.score(pairs, on_done=lambda done: self._progress(what, done, len(pairs)))

    def _fitting(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """The pair without as much of the beginning of the context as does not fit; one token of it stays."""
        room = max(1, self.max_length + 1 - len(continuation))
        self.shortened += len(context) > room
        return context[-room:], continuation


def _until(settings: Mapping[str, Any]) -> tuple[str, ...]:
    until = settings.get("until") or ()
    several: Iterable[Any] = (until,) if isinstance(until, str) else until
    return tuple(text for text in several if text)


def _params(settings: Mapping[str, Any], stop: tuple[str, ...], seed: int) -> SamplingParams:
    """A task's `generation_kwargs`; greedy unless it asks for sampling. `UsageError` for what is not known."""
    values = {name: value for name, value in settings.items() if value is not None and name != "until"}
    sample = values.pop("do_sample", None)
    tokens = [values.pop(name) for name in _MOST_TOKENS if name in values]
    asked = {name: values.pop(name) for name in _SAMPLING if name in values}
    unknown = {k: v for k, v in values.items() if v not in _WITHOUT_EFFECT.get(k, ()) and k != "seed"}
    if unknown:
        raise UsageError(
            "an evaluation asks for a way to generate that is not known",
            where="generation_kwargs",
            found=", ".join(f"{name}={value!r}" for name, value in unknown.items())[:200],
            accepted=", ".join(("until", "do_sample", "max_gen_toks", "seed", *_SAMPLING)),
            hint="set it with --gen-kwargs, or in the task file",
        )
    if sample is False or "temperature" not in asked:
        asked["temperature"] = 1.0 if sample else 0.0
    # a checkpoint's own defaults would change greedy answers too
    defaults: dict[str, Any] = {"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
    return SamplingParams(
        **(defaults | asked),
        max_tokens=int(tokens[0]) if tokens else DEFAULT_TOKENS,
        stop=stop,
        seed=values.get("seed", seed),
        skip_special_tokens=False,
    )


def _after_thought(text: str, until: Sequence[str], *, complete: bool) -> str:
    """The answer after the thought; a thought that was cut has none, one that ended unclosed was the answer."""
    _, mark, answer = text.rpartition(Mark.THINK_END)
    if not mark and not complete:
        return ""
    answer = answer.lstrip()
    for stop in until:
        answer = answer.split(stop, 1)[0]
    return answer
