"""`shoal serve` and `shoal chat`: use a model, checkpoint, adapter or run, over HTTP or in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from shoal.cli.output import notices, say_at_once
from shoal.config.infer import InferConfig
from shoal.config.load import ConfigDraft, load_section
from shoal.config.model_names import model_problem
from shoal.config.rules import check_section
from shoal.core.errors import ConfigError
from shoal.core.types import Message, Request, SamplingParams
from shoal.runs.weight_files import ADAPTER_FILE, Weights, find_weights, template_of

if TYPE_CHECKING:
    from shoal.split.inference_process import Inference


def serve(
    model: str,
    *overrides: Annotated[str, Parameter(negative=())],
    adapter: str | None = None,
    checkpoint: str | None = None,
) -> None:
    """Serve a model over HTTP (OpenAI-compatible), without a configuration file.

    Parameters
    ----------
    model
        Folder, hub id, GGUF file, adapter, checkpoint or run directory. Requests use it as the name of the model.
    overrides
        Keys of the infer section, such as infer.port=8001.
    adapter
        Folder of a LoRA adapter to apply to the model.
    checkpoint
        Which one of a run directory: a step, best, newest or final.
    """
    from shoal.build.signals import end_by, exit_on_first_signal
    from shoal.split.inference_process import serve as serve_model

    with exit_on_first_signal(), _loaded(model, overrides, adapter, checkpoint) as (weights, config):
        ended_by = serve_model(config, say_at_once, adapter=_adapter(weights), name=model)
    end_by(ended_by)


def chat(
    model: str,
    question: str | None = None,
    *overrides: Annotated[str, Parameter(negative=())],
    adapter: str | None = None,
    checkpoint: str | None = None,
    system: str | None = None,
    temperature: float = 0.7,
    max_tokens: int = 512,
    seed: int = 0,
) -> None:
    """Talk to a model in the terminal. Ctrl-C stops an answer, /new starts again, Ctrl-D ends.

    Parameters
    ----------
    model
        Folder, hub id, GGUF file, adapter, checkpoint or run directory.
    question
        Answer this only, and end.
    overrides
        Keys of the infer section, such as infer.max_model_len=4096.
    adapter
        Folder of a LoRA adapter to apply to the model.
    checkpoint
        Which one of a run directory: a step, best, newest or final.
    system
        System prompt.
    temperature
        0 is greedy.
    max_tokens
        Maximum tokens of an answer.
    seed
        Seed of sampling.
    """
    if question is not None and _is_override(question):
        question, overrides = None, (question, *overrides)
    if temperature < 0 or max_tokens < 1:
        raise ConfigError("command line: --temperature must be at least 0, and --max-tokens at least 1")
    from shoal.build.signals import exit_on_first_signal
    from shoal.split.inference_process import make_inference

    with _loaded(model, ("infer.max_num_seqs=8", *overrides), adapter, checkpoint) as (weights, config):
        if question is None:
            notices([f"loading {model}"])
        with exit_on_first_signal():
            inference = make_inference(config)
        sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
        with asyncio.Runner() as runner:
            try:
                runner.run(inference.start(_adapter(weights)))
                _converse(runner, Conversation(inference, sampling, system), question)
            finally:
                runner.run(inference.close())


def _is_override(word: str) -> bool:
    return word.startswith("infer.") and "=" in word


class Conversation:
    """The exact token ids so far, and the messages for the chat template."""

    def __init__(self, inference: Inference, sampling: SamplingParams, system: str | None) -> None:
        self._inference = inference
        self._sampling = sampling
        self._system: list[Message] = [{"role": "system", "content": system}] if system is not None else []
        self.begin()

    def begin(self) -> None:
        self._messages, self._ids, self._turns = list(self._system), [], 0

    async def answer(self, text: str) -> None:
        """Print the answer while it is sampled. A turn that is interrupted is forgotten."""
        from shoal.server.streaming import TextSoFar

        chat, engine = self._inference.model.chat, self._inference.engine
        said: list[Message] = [{"role": "user", "content": text}]
        asked = [*self._messages, *said]
        ids = chat.next_prompt_ids(self._ids, self._messages, said) if self._ids else chat.prompt_ids(asked)
        limit = self._inference.facts["max_model_len"]
        if len(ids) >= limit:
            raise ConfigError(f"the conversation has {len(ids)} tokens, of {limit}; /new starts again, or set "
                              "infer.max_model_len")  # fmt: skip
        shown = TextSoFar(chat.text, ())
        request = Request(f"chat/{self._turns}", ids, self._sampling)
        completion = await engine.generate(request, lambda new, _: _print(shown.add(new)))
        _print(shown.finish(completion.text) + "\n")
        self._messages = [*asked, {"role": "assistant", "content": completion.text}]
        self._ids, self._turns = [*ids, *completion.token_ids], self._turns + 1


def _converse(runner: asyncio.Runner, conversation: Conversation, question: str | None) -> None:
    if question is not None:
        runner.run(conversation.answer(question))
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing)
    with contextlib.suppress(EOFError):
        while True:
            text = input("> ").strip()
            if text == "/new":
                conversation.begin()
            elif text:
                try:
                    runner.run(conversation.answer(text))
                except KeyboardInterrupt:
                    _print("\n")
                    notices(["stopped; this turn is forgotten"])
                except ConfigError as error:
                    notices([str(error)])


def _print(text: str) -> None:
    from shoal.watch.text import sanitise

    sys.stdout.write("\n".join(map(sanitise, text.split("\n"))))
    sys.stdout.flush()


@contextlib.contextmanager
def _loaded(
    model: str, overrides: tuple[str, ...], adapter: str | None, checkpoint: str | None
) -> Iterator[tuple[Weights, InferConfig]]:
    """The weights, and the checked infer section for them. Token and log are in a folder that is removed afterwards."""
    from shoal.models.tokenizer import check_found

    weights = find_weights(model, adapter=adapter, checkpoint=checkpoint)
    if problem := model_problem(weights.model):
        raise ConfigError(f"command line: model: {problem[0]}; {problem[1]}")
    check_found("command line: model", weights.model)
    with tempfile.TemporaryDirectory(prefix="shoal-serve-") as folder:
        draft: ConfigDraft[InferConfig] = load_section("infer", None, (f"infer.output_dir={folder}", *overrides))
        if draft.config.model is not None or draft.config.engine != "embedded":
            raise ConfigError(
                "infer.model and infer.engine have no effect here; use `shoal grpo-infer` for other engines"
            )
        given = {"model": weights.model}
        if (found := _adapter(weights)) is not None:
            given |= {"enable_lora": True, "max_lora_rank": _rank(found)}
            if draft.config.chat_template is None and (template := template_of(found)) is not None:
                given["chat_template"] = template
        config = draft.config.model_copy(update=given)
        findings = check_section(config)
        findings.raise_errors(draft.origins)
        notices(findings.notice_lines())
        yield weights, config


def _adapter(weights: Weights) -> Path | None:
    return Path(weights.adapter).expanduser() if weights.adapter is not None else None


def _rank(adapter: Path) -> int:
    try:
        return int(json.loads((adapter / ADAPTER_FILE).read_text("utf-8"))["r"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"command line: {adapter / ADAPTER_FILE}: has no rank r: {error}") from error
