"""`TextModel`: a model that continues texts and answers conversations."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from threading import Event, Lock
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast, overload

from localkv.config import CacheConfig
from localkv.engine.api.loaded_model import LoadedModel
from localkv.engine.api.options import ChatOptions, StreamOptions
from localkv.engine.api.prompts import Prompt, Prompts, are_many, listed
from localkv.engine.engine import Engine
from localkv.engine.speculation.config import Speculation
from localkv.engine.text.new_stream import Answer, TextOptions, new_stream
from localkv.engine.text.reasoning_budget import ReasoningBudget
from localkv.engine.text.stream import Completion, TextStream
from localkv.errors import UsageError
from localkv.loader.chat_messages import checked_tools
from localkv.loader.chat_prompt import ChatPrompt
from localkv.loader.chat_template import ChatTemplate
from localkv.option_names import check_options, keywords
from localkv.option_types import check_types
from localkv.sampling.params import SamplingOptions, SamplingParams

if TYPE_CHECKING:
    from localkv.engine.audit.audit import Audit
    from localkv.engine.audit.predictions import Predictions
    from localkv.engine.requests.batch_engine import BatchEngine
    from localkv.engine.text.async_stream import AsyncTextStream
    from localkv.structured.constraint import Constraint
    from localkv.structured.grammar import Grammar, Schema


_MAKING = Lock()
"""Of what is made when it is first wanted."""


class TextModel(LoadedModel):
    """Texts in, texts out: what an `LLM` does above all.

    Attributes:
        check_further_cache: refuses another cache for which there is no room now that the model is
            loaded; raises DoesNotFitError, which names settings that would fit.
    """

    check_further_cache: Callable[[CacheConfig], None]
    speculation: Speculation = Speculation()
    _step_ms: float | None = None

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        parse_special: bool = False,
        logprobs: int | None = None,
        audit: bool | Literal["exact"] = False,
        schema: Schema | None = None,
        grammar: Grammar | str | None = None,
        spec: str | None = None,
        cancel: Event | None = None,
        params: SamplingParams | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> TextStream:
        """Continue a prompt, piece by piece.

        Args:
            prompt: text, token ids that are taken as they are, or a conversation (`chat_prompt`).
            max_tokens: most tokens to generate; None goes on to the end of the context.
            stop: strings that end the text; they are not part of it.
            ignore_eos: never draw an end-of-generation token.
            parse_special: control tokens written in the prompt count as such.
            logprobs: note how probable each token was, and so many of the most probable ones at
                its place (0 for none), before samplers. Tokens are then drawn on the host, where a
                seed may give others than on a GPU.
            audit: find out what the packed cache changed, once the text is complete: the `audit` of
                its `completion`. "exact" knows the whole distributions, and takes twice as long.
                Tokens are drawn on the host, as with `logprobs`, unless it is "exact".
            schema: the text is JSON that this JSON schema describes; a mapping, or JSON text. With
                "length" as its finish reason it broke off.
            grammar: the text is one of this grammar: GBNF, as llama.cpp has it, llguidance's Lark,
                or a `Grammar`. In an answer either of the two holds after its reasoning.
            spec: how tokens are guessed for this text, "none", "ngram" or, if a model that drafts
                is loaded, "draft", and not as the LLM was told to. The text is the same.
            cancel: set it, from any thread, to end after the next token, or while other threads
                have their turn.
            params: how tokens are drawn.
            sampling: fields of `SamplingParams`, instead of or on top of `params`.

        Raises:
            ContextOverflowError: the prompt is longer than the context.
            LocalKVError: by the stream: the model yields NaN; or see the class.
        """
        options = {
            "max_tokens": max_tokens,
            "stop": stop,
            "ignore_eos": ignore_eos,
            "parse_special": parse_special,
            "logprobs": logprobs,
            "audit": audit,
            "schema": schema,
            "grammar": grammar,
            "spec": spec,
            "cancel": cancel,
            "params": params,
        }
        engine = self.batch if self.engine.cache.n_sequences > 1 else self.engine
        return self._stream(engine, prompt, {**options, **sampling})

    def batch_stream(self, prompt: Prompt, **options: Unpack[StreamOptions]) -> TextStream:
        """As `stream`, for one who runs the steps of `batch`, whatever `n_parallel` is.

        Args:
            prompt, options: as for `stream`.

        Raises:
            LocalKVError: as `stream`.
        """
        return self._stream(self.batch, prompt, options)

    def astream(self, prompt: Prompt, **options: Unpack[StreamOptions]) -> AsyncTextStream:
        """As `stream`, for `async for`; the event loop goes on while a piece is made.

        With `n_parallel` above 1 several of them share the steps of the model. A task that is
        cancelled ends its generation.

        Args:
            prompt, options: as for `stream`.

        Raises:
            LocalKVError: as `stream`.
        """
        from localkv.engine.text.async_stream import AsyncTextStream  # imports asyncio

        cancel = options.get("cancel") or Event()
        options["cancel"] = cancel
        return AsyncTextStream(self.stream(prompt, **options), cancel)

    def _stream(
        self, engine: Engine | BatchEngine, prompt: Prompt, given: Mapping[str, object]
    ) -> TextStream:
        options = self._text_options(prompt, given)
        predictions = self._predictions(options.audit)
        constraint, answer, grammar = None, None, None
        if options.schema is not None or options.grammar is not None:
            from localkv.structured.grammar import grammar_of

            grammar = grammar_of(options.schema, options.grammar)
        if grammar is not None:
            constraint = partial(self._constraint, grammar, prompt)
        ids = self._ids(prompt, options.parse_special)
        if isinstance(prompt, ChatPrompt):
            budget = ReasoningBudget(
                prompt.reasoning_budget,
                prompt,
                self.tokenizer,
                calls=grammar is not None and grammar.is_all,
                must_follow=grammar is not None and not grammar.after,
            )
            answer = Answer(prompt.opening, self._kept_ids, budget)
        stream = new_stream(
            engine,
            self.tokenizer,
            ids,
            options,
            answer=answer,
            constraint=constraint,
            predictions=predictions,
            speculation=self._speculation(options.spec),
        )
        if options.audit:
            stream.audited = partial(self.audit, stream)
        return stream

    def _text_options(self, prompt: Prompt, given: Mapping[str, object]) -> TextOptions:
        """The options of `stream`, checked."""
        others = {"chat": CHAT_OPTIONS, "LLM(...)": keywords(type(self).__init__)}
        check_options(given, STREAM_OPTIONS, others)
        check_types(TextModel.stream, {"prompt": prompt, **given})
        of_stream, sampling = dict[str, Any](), dict[str, Any]()
        for name, value in given.items():
            (sampling if name in SamplingOptions.__annotations__ else of_stream)[name] = value
        params = of_stream.pop("params", None) or SamplingParams()
        return TextOptions(params=replace(params, **sampling), **of_stream)

    def _predictions(self, audit: bool | Literal["exact"]) -> Predictions | None:
        """What keeps what an audit needs of each token, if it needs more than the text."""
        if audit not in (True, False, "exact"):
            raise UsageError(f"audit is {audit!r}", hint='use True, False or "exact"')
        if not audit:
            return None
        from localkv.engine.audit.predictions import Predictions
        from localkv.engine.audit.second_reading import check_kept

        check_kept(self.cache, audit is True)
        return Predictions() if audit is True else None

    def _constraint(self, grammar: Grammar, prompt: Prompt, params: SamplingParams) -> Constraint:
        """What a text keeps to whose tokens are drawn so."""
        from localkv.engine.text.answer_scope import answer_scope
        from localkv.structured.constraint import Constraint
        from localkv.structured.scope import EVERYWHERE

        scope = EVERYWHERE
        if isinstance(prompt, ChatPrompt):
            scope = answer_scope(grammar, prompt, self.tokenizer)
        return Constraint(
            self.grammar_tokens,
            grammar,
            n_logits=self.engine.model.config.n_vocab,
            scope=scope,
            banned=[token for token, bias in params.logit_bias.items() if bias == float("-inf")],
        )

    def audit(
        self, stream: TextStream, *, n_batch: int | None = None, cancel: Event | None = None
    ) -> Audit | None:
        """What the packed cache changed in a text that was generated.

        The text is evaluated once more, teacher-forced, through an f16 cache of its own; without
        memory for one of the whole text, in windows. If the stream did not keep what it needs
        (`audit`), the packed cache is evaluated again, too.

        Args:
            stream: one of this model's; of its text, what was read so far.
            n_batch: most tokens evaluated at a time; None for as many as in prompts, or some more
                if the model is very small.
            cancel: set it, from any thread, to end it after the batch at hand.

        Returns:
            None if there is no token, or it was cancelled.

        Raises:
            DoesNotFitError: there is no memory for an f16 cache.
            UsageError: the cache has a budget, and the stream kept nothing.
        """
        from localkv.engine.audit.audit import audit_of
        from localkv.engine.audit.second_reading import (
            CancelledReadingError,
            SecondReading,
            long_batch,
        )

        generation, started = stream.generation, time.perf_counter()
        stats = generation.stats
        if not stats.n_generated:
            return None
        most, n_embd = self.engine.n_batch, self.engine.model.config.n_embd
        reading = SecondReading(
            self.engine.model,
            self.cache,
            n_batch=min(n_batch, most) if n_batch else long_batch(most, n_embd),
            check_room=self.check_further_cache,
            is_cancelled=lambda: cancel is not None and cancel.is_set(),
        )
        predictions = generation.predictions
        try:
            found = reading.compare(generation.ids, stats.n_prompt, predictions)
        except CancelledReadingError:
            return None
        return audit_of(
            found,
            types=self.cache.types_text,
            is_exact=predictions is None or found.window is not None,
            seconds=time.perf_counter() - started,
            places=stream.places(),
            token_text=self._token_text,
        )

    def _speculation(self, spec: str | None) -> Speculation:
        return self.speculation if spec is None else replace(self.speculation, drafter=spec)

    @overload
    def complete(self, prompt: Prompt, **options: Unpack[StreamOptions]) -> Completion: ...

    @overload
    def complete(self, prompt: Prompts, **options: Unpack[StreamOptions]) -> list[Completion]: ...

    def complete(
        self, prompt: Prompt | Prompts, **options: Unpack[StreamOptions]
    ) -> Completion | list[Completion]:
        """Continue a prompt to the end, or several, one after the other.

        Args:
            prompt: as for `stream`; or a list of such, all of which are checked first.
            options: the other arguments of `stream`.

        Raises:
            LocalKVError: as `stream`.
        """
        if not are_many(prompt):
            return self.stream(cast("Prompt", prompt), **options).completion
        self._many_ids(prompt, options.get("parse_special", False), "prompt")
        prompts: list[Prompt] = [*prompt]
        return [self.stream(one, **options).completion for one in prompts]

    @cached_property
    def batch(self) -> BatchEngine:
        """Serves several requests at the same time, as many as `n_parallel`."""
        from localkv.engine.requests.batch_engine import BatchEngine  # one alone does without

        with _MAKING:  # threads may ask at the same time, and there is one cache
            made = self.__dict__.get("batch")
            if made is None:
                made = self.__dict__["batch"] = BatchEngine(self.engine, step_ms=self._step_ms)
            return cast("BatchEngine", made)

    def complete_many(self, prompts: Prompts, **options: Unpack[StreamOptions]) -> list[Completion]:
        """Continue several prompts at the same time, `n_parallel` of them.

        On a CPU each gets the text that it would get alone. Prompts that begin alike are evaluated
        once where they do, and share this part of the cache.

        Args:
            prompts: all of which are checked first.
            options: the other arguments of `stream`, for each.

        Raises:
            UsageError: it is one prompt, and not a list of them.
            LocalKVError: as `stream`; by any of them, and then none is completed.
        """
        from localkv.engine.text.many_streams import completions

        every = listed(prompts)
        self._many_ids(every, options.get("parse_special", False), "prompt")
        streams = list[TextStream]()
        try:
            for prompt in every:
                streams.append(self._stream(self.batch, prompt, options))
            return completions(self.batch, streams)
        except BaseException:
            for stream in streams:
                stream.close()
            raise

    def chat(
        self,
        messages: str | Sequence[Mapping[str, object]],
        *,
        template: ChatTemplate | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        tool_choice: str | Mapping[str, object] = "auto",
        parallel_tool_calls: bool = True,
        template_kwargs: Mapping[str, object] | None = None,
        enable_thinking: bool | None = None,
        reasoning_budget: int | None = None,
        reasoning_effort: str | None = None,
        prefill: str = "",
        continue_final_message: bool | str = False,
        add_generation_prompt: bool | None = None,
        **options: Unpack[ChatOptions],
    ) -> TextStream:
        """Answer a conversation, piece by piece.

        Nothing in the arguments becomes a control token: the template alone writes those. An
        argument that has no effect with this template is warned of (`UserWarning`).

        Reasoning comes first, between the model's tags for it, and the answer after them. For
        gpt-oss's channels the tags are `<think>` and `</think>`.

        Args:
            messages: a user's text, or {"role": "system" | "developer" | "user" | "assistant" |
                "tool", "content": text or a list of {"type": "text", "text": text}}, in order, with
                `tool_calls` and any other fields that the template reads.
            template: instead of the file's own; of these, the one for tools (`tool_use`) if there
                are tools.
            tools: descriptions of tools, as OpenAI's API and transformers take them. The calls in
                an answer are the `tool_calls` of its completion, and `content` the rest.
            tool_choice: "auto" leaves it to the model; "required", or the name of a tool, has the
                answer be a call, by a grammar; "none" leaves the tools out of the prompt. OpenAI's
                objects do, too.
            parallel_tool_calls: a required call may be several.
            template_kwargs: more variables for the template.
            enable_thinking: the variable of that name: whether the model reasons before it answers.
                None leaves it to the template.
            reasoning_budget: most tokens of reasoning at the start of the answer; then the tag that
                ends it is put there, and the answer goes on. 0 also sets `enable_thinking` to
                False where the template reads it; None and -1 set no limit.
            reasoning_effort: the variable of that name: "minimal", "low", "medium", "high", "xhigh"
                or "max". "none" switches reasoning off, by whatever switch the template has.
            prefill: the answer begins with this text, and so does the stream's (as it does with the
                tag of a reasoning that the template opens).
            continue_final_message: the last message is the beginning of the answer, as in
                transformers, or its field of this name is. The stream has what is new.
            add_generation_prompt: whether to end with the text that opens the model's turn; None
                does so unless the last message is continued.
            options: the arguments of `stream` but `parse_special`.

        Raises:
            UsageError: the file has no chat template and none was given; a message is not one, or
                has a part that is not text; arguments contradict each other.
            ChatTemplateError: the template fails on this conversation, or refuses it.
        """
        others = {"stream": STREAM_OPTIONS, "LLM(...)": keywords(type(self).__init__)}
        check_options(options, CHAT_OPTIONS, others)
        check_types(TextModel.chat, locals())
        template = template or (self.tool_template if tools else self.chat_template)
        calls = None
        if template is not None and (tools or tool_choice != "auto"):
            from localkv.engine.text.answer_calls import AnswerCalls

            described = checked_tools(tools) or ()
            calls = AnswerCalls(template, described, tool_choice, parallel=parallel_tool_calls)
            tools = None if calls.tools.choice == "none" else tools
        prompt = self.chat_prompt(
            messages,
            template=template,
            tools=tools,
            template_kwargs=template_kwargs,
            enable_thinking=enable_thinking,
            reasoning_budget=reasoning_budget,
            reasoning_effort=reasoning_effort,
            prefill=prefill,
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt,
        )
        for line in prompt.warnings:
            warnings.warn(line, stacklevel=2)
        if calls is None or not calls.tools:
            return self.stream(prompt, **options)
        if (grammar := calls.grammar(self.tokenizer, options)) is not None:
            options["grammar"] = grammar
            options.pop("schema", None)
        for line in calls.tools.warnings:
            warnings.warn(line, stacklevel=2)
        stream = self.stream(prompt, **options)
        stream.calls = calls.in_answer(prompt)
        return stream


STREAM_OPTIONS = (*keywords(TextModel.stream), *SamplingOptions.__annotations__)
"""What `stream` and `complete` take."""

CHAT_OPTIONS = (*keywords(TextModel.chat), *ChatOptions.__annotations__)
"""What `chat` takes."""
