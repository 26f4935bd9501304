"""Text from a model: the tokens of transformers' `generate`, on a static cache and with a compiled step.

transformers prepares everything (generation config, logits processors, stopping criteria), and hands over to the loop
below where it would begin its own. Beams, assistants, outputs beyond the tokens, caches of the caller's, models whose
layers keep more than keys and values, and devices other than the CPU: transformers' own loop, unchanged.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

from tapernorm._callable import call_module
from tapernorm.decode_step import (
    Compiled,
    NotCompiled,
    Places,
    Step,
    agrees,
    cache_name,
    cache_root,
    compile_step,
    has_plain_cache,
    refuse_compiling,
    step_folder,
    step_key,
)
from tapernorm.modules import evaluation

Compile = bool | Literal["auto"]

_SECONDS = 60.0  # what a compilation costs, on two cores
_SAVED = 0.6  # the share of a step's time that compiling takes off; 0.8 for a million parameters
_TRIAL = 8  # steps to time before `"auto"` decides
# Arguments of transformers' generate that change more than which tokens come next.
_THEIRS = (
    "assistant_model", "assistant_tokenizer", "cache", "cache_implementation", "cache_params", "custom_generate",
    "inputs_embeds", "negative_prompt_ids", "past_key_values", "prompt_lookup_num_tokens", "return_dict_in_generate",
    "stop_strings", "synced_gpus", "token_healing",
)  # fmt: skip
_LOOP_KNOWS = ("attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache", "past_key_values")
# model -> (key of the step) -> a loaded library, or why there is none
_LOADED: weakref.WeakKeyDictionary[Any, dict[str, Compiled | str]] = weakref.WeakKeyDictionary()


@dataclasses.dataclass
class Generated:
    """What `decode` made. sequences: [B, T + new], the prompt included; compiled: whether the last step came from a
    compiled library; seconds, steps: of the loop after the prompt's forward and its first token."""

    sequences: Tensor
    compiled: bool = False
    seconds: float = 0.0
    steps: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Of all rows together; 0 where one token or none was made."""
        return len(self.sequences) * self.steps / self.seconds if self.seconds > 0 else 0.0


def generate(
    model: Any,
    prompt: Tensor | str | Sequence[str],
    tokenizer: Any = None,
    *,
    streamer: Any = None,
    callback: Callable[[Tensor], None] | None = None,
    compile: Compile = "auto",
    **options: Any,
) -> Any:
    """Continue a prompt: the tokens of `model.generate(...)`, sooner.

    Args:
        model: a causal language model of transformers; stock, tapered or folded.
        prompt: ids [B, T], padded on the left with an `attention_mask` among the options; or a text, or several.
        tokenizer: for texts.
        streamer: of transformers, such as `TextStreamer(tokenizer)`: gets the prompt, then each token.
        callback: called with the new tokens [B] of each step.
        compile: `"auto"`: a compiled step where one is in the cache on disk already, or where the text is so long that
            compiling pays. True: compile if need be, once for all lengths and all models of one shape, some tens of
            seconds. False: never. On the CPU; elsewhere True asks transformers for its static cache, which it compiles.
        options: of transformers' `generate`: `max_new_tokens`, `do_sample`, `temperature`, `top_p`, `eos_token_id`,
            `generation_config`, …

    Returns:
        For ids [B, T + new] as transformers returns them; for a text the new text, for several a list.

    Raises:
        ValueError: a text without a tokenizer, a prompt without tokens, an unknown `compile`.
    """
    if isinstance(prompt, Tensor):
        return decode(model, prompt, streamer=streamer, callback=callback, compile=compile, **options).sequences
    if tokenizer is None:
        raise ValueError("the prompt is text; pass the model's tokenizer with it")
    texts = [prompt] if isinstance(prompt, str) else list(prompt)
    ids, mask = encode(tokenizer, texts)
    options = {"attention_mask": mask.to(model.device), "pad_token_id": _pad(model, tokenizer)} | options
    if "stop_strings" in options:
        options["tokenizer"] = tokenizer
    made = decode(model, ids.to(model.device), streamer=streamer, callback=callback, compile=compile, **options)
    sequences = made.sequences if isinstance(made.sequences, Tensor) else made.sequences["sequences"]
    told = tokenizer.batch_decode(sequences[:, ids.shape[1] :], skip_special_tokens=True)
    return told[0] if isinstance(prompt, str) else told


def _pad(model: Any, tokenizer: Any) -> int | None:
    ends = model.generation_config.eos_token_id
    first = ends[0] if isinstance(ends, list) else ends
    return next((t for t in (tokenizer.pad_token_id, tokenizer.eos_token_id, first) if t is not None), None)


def encode(tokenizer: Any, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Ids and mask of texts, the shorter ones padded on the left. [B, T] twice

    Raises:
        ValueError: no text, or one without tokens.
    """
    rows = [tokenizer(text, add_special_tokens=True)["input_ids"] for text in texts]
    if not rows or not all(rows):
        raise ValueError("the prompt has no tokens; give it some text")
    longest = max(map(len, rows))
    blank = next((t for t in (tokenizer.pad_token_id, tokenizer.eos_token_id) if t is not None), 0)
    ids = torch.tensor([[blank] * (longest - len(row)) + row for row in rows])
    return ids, torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])


def decode(
    model: Any,
    input_ids: Tensor,
    streamer: Any = None,
    callback: Callable[[Tensor], None] | None = None,
    compile: Compile = "auto",
    **options: Any,
) -> Generated:
    """`generate` for ids, with what it took. input_ids: [B, T]; options: of transformers' `generate`.

    Raises:
        ValueError: no tokens, an unknown `compile`.
    """
    if compile not in (True, False, "auto"):
        raise ValueError(f'compile={compile!r} must be True, False or "auto"')
    if input_ids.dim() != 2 or not input_ids.numel():
        raise ValueError(f"the prompt must be ids [B, T] with at least one token, and has the shape {input_ids.shape}")
    if callback is not None:
        streamer = _Both(streamer, callback)
    made = Generated(input_ids)
    loop = _Loop(made, streamer, compile)
    with evaluation(model):
        if ours := model.device.type == "cpu" and _is_plain(model, options):
            options["custom_generate"] = loop.run
        elif compile is True and model.device.type != "cpu":
            options.setdefault("cache_implementation", "static")
        begin = time.perf_counter()
        made.sequences = model.generate(input_ids, streamer=streamer, **options)
    if not (ours and loop.ran):
        made.seconds = time.perf_counter() - begin
        made.steps = made.sequences.shape[1] - input_ids.shape[1] if isinstance(made.sequences, Tensor) else 0
    return made


def _is_plain(model: Any, options: dict[str, Any]) -> bool:
    """Whether greedy decoding or sampling, and nothing more, is asked for."""
    config = copy.deepcopy(options.get("generation_config") or model.generation_config)
    config.update(**{k: v for k, v in options.items() if k != "generation_config"})
    theirs = any(options.get(name) or getattr(config, name, None) for name in _THEIRS)
    mode = config.get_generation_mode(options.get("assistant_model"))
    return (
        mode in ("greedy_search", "sample")
        and not theirs
        and config.use_cache is not False
        and not model.config.is_encoder_decoder
    )


class _Both(BaseStreamer):
    """A streamer, if there is one, and a callback, which does not get the prompt."""

    def __init__(self, streamer: Any, callback: Callable[[Tensor], None]) -> None:
        self._streamer, self._callback, self._prompt = streamer, callback, True

    def put(self, value: Tensor) -> None:
        if self._streamer is not None:
            self._streamer.put(value)
        if not self._prompt:
            self._callback(value)
        self._prompt = False

    def end(self) -> None:
        if self._streamer is not None:
            self._streamer.end()


class _Loop:
    """The loop that transformers' generate hands over to."""

    def __init__(self, made: Generated, streamer: Any, compile: Compile) -> None:
        self.made, self.streamer, self.compile, self.ran = made, streamer, compile, False

    def run(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        **model_kwargs: Any,
    ) -> Tensor:
        """The signature of `GenerationMixin._sample`. Returns [B, T + new]"""
        pads = _left_pads(input_ids, model_kwargs)
        cache = DynamicCache(config=model.config)
        takes = {k: v for k, v in model_kwargs.items() if k in ("attention_mask", "position_ids", "logits_to_keep")}
        known = all(name in _LOOP_KNOWS or value is None for name, value in model_kwargs.items())
        out = None
        if pads is not None and known and stopping_criteria.max_length is not None and has_plain_cache(cache):
            out = model(input_ids=input_ids, use_cache=True, **takes, **{cache_name(model): cache})
        step = Step(model, padded=bool(pads is not None and pads.any()))
        filled = all(layer.keys is not None and layer.keys.dim() == 4 for layer in cache.layers)  # type: ignore[union-attr]
        if out is None or not filled or (step.padded and not step.takes_positions):
            theirs = {"synced_gpus": synced_gpus, "streamer": self.streamer}
            given = (input_ids, logits_processor, stopping_criteria, generation_config)
            return type(model)._sample(model, *given, **theirs, **model_kwargs)
        self.ran = True
        stepper = _Stepper(step, Places(cache, pads, input_ids.shape[1]), self.compile)  # type: ignore[arg-type]
        logits = out.logits[:, -1].to(copy=True, dtype=torch.float32)
        del out, cache
        return self._tokens(stepper, logits, input_ids, logits_processor, stopping_criteria, generation_config)

    def _tokens(
        self, stepper: _Stepper, logits: Tensor, input_ids: Tensor, processors: Any, criteria: Any, config: Any
    ) -> Tensor:
        rows, n = input_ids.shape
        longest = criteria.max_length
        plain = not len(processors) and not config.do_sample
        ends = [c.eos_token_id for c in criteria if hasattr(c, "eos_token_id")]
        # One row needs no list of rows that have ended, and the two usual criteria no tensors.
        alone = rows == 1 and all(type(c) in (MaxLengthCriteria, EosTokenCriteria) for c in criteria)
        last = {int(token) for found in ends for token in found.flatten()}
        unfinished = torch.ones(rows, dtype=torch.long)
        ids = input_ids.new_empty(rows, max(longest, n + 1))
        ids[:, :n] = input_ids
        token = logits.argmax(-1, keepdim=True)
        begin = time.perf_counter()
        while True:
            if not plain:
                scores = processors(ids[:, :n], logits)
                token = _choose(scores, config.do_sample)
            if ends and not alone:
                token = token * unfinished[:, None] + config._pad_token_tensor * (1 - unfinished[:, None])
            ids[:, n : n + 1] = token
            n += 1
            if self.streamer is not None:
                self.streamer.put(token[:, 0])
            if alone:
                over = n >= longest or int(token) in last
            else:
                unfinished = unfinished & ~criteria(ids[:, :n], None)
                over = not unfinished.any()
            if over:
                break
            if self.made.steps == 0:
                begin = time.perf_counter()
            logits, token = stepper(token, longest - n)
            self.made.steps += 1
        self.made.seconds = time.perf_counter() - begin - stepper.waited if self.made.steps else 0.0
        self.made.compiled = stepper.compiled is not None
        if self.streamer is not None:
            self.streamer.end()
        return ids[:, :n].clone()


def _choose(scores: Tensor, sample: bool) -> Tensor:
    """[B, V] -> [B, 1], with transformers' use of the random numbers."""
    if sample:
        return torch.multinomial(F.softmax(scores, dim=-1), num_samples=1)
    return scores.argmax(-1, keepdim=True)


def _left_pads(input_ids: Tensor, model_kwargs: dict[str, Any]) -> Tensor | None:
    """How many places at the left of each row are padding, [B]; None where mask or positions are of another form."""
    mask, places = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    pads = torch.zeros(len(input_ids), dtype=torch.long)
    if mask is not None:
        pads = (mask == 0).sum(-1)
        if (
            not torch.equal(mask != 0, torch.arange(mask.shape[1]) >= pads.unsqueeze(1))
            or mask.shape != input_ids.shape
        ):
            return None
    if places is not None:
        usual = (torch.arange(input_ids.shape[1]) - pads.unsqueeze(1)).clamp_min(0)
        if not torch.equal(places.expand_as(usual), usual):
            return None
    return pads


class _Stepper:
    """The step over one text: as it is, or compiled from the moment on that there is a library."""

    def __init__(self, step: Step, places: Places, compile: Compile) -> None:
        self.step, self.places, self.compile = step, places, compile
        self.compiled: Compiled | None = None
        self.waited = 0.0  # seconds of compiling and loading
        self._times: list[float] = []
        self._first = True

    def __call__(self, token: Tensor, left: int) -> Any:
        """token: [B, 1]; left: tokens still to make. Returns logits [B, V] and the largest one's index [B, 1]."""
        places = self.places
        places.room()
        if self._first or (self.compiled is None and len(self._times) == _TRIAL):
            begin = time.perf_counter()
            self._decide(token, left)
            self.waited += time.perf_counter() - begin
            self._first = False
        if self.compiled is not None:
            return self.compiled(token, places.start, places.pads, places.keys, places.values)
        begin = time.perf_counter()
        made = self.step(token, places.start, places.pads, places.keys, places.values)
        self._times.append(time.perf_counter() - begin)
        return made

    def _decide(self, token: Tensor, left: int) -> None:
        """At the first step, and again where some are timed."""
        if self.compile is False:
            return
        wanted = self.compile is True
        if not self._first:
            usual = sorted(self._times)[len(self._times) // 2]
            wanted = self.compile == "auto" and left * usual * _SAVED > _SECONDS
            if not wanted:
                return
        elif not wanted and cache_root() is None:
            return
        try:
            self.compiled = self._find(token, wanted)
        except NotCompiled as error:
            _LOADED.setdefault(self.step.model, {})[step_key(self.step, len(token))] = str(error)
            _say(f"decoding without a compiled step: {error}")

    def _find(self, token: Tensor, make: bool) -> Compiled | None:
        """The library loaded before, on disk, or made now; None where there is none and `make` is False."""
        step, loaded = self.step, _LOADED.setdefault(self.step.model, {})
        key = step_key(step, len(token))
        known = loaded.get(key)
        if isinstance(known, Compiled):
            known.lend(step)
            return known
        if known is not None:
            return None  # said so before
        with step_folder(step, len(token)) as folder:
            if not (folder / "step.pt2").is_file():
                if not make:
                    return None
                refuse_compiling()
                if sys.stderr.isatty():
                    _say("compiling the decoding step, once for all texts; about a minute")
                compile_step(step, token, self.places, folder)
            compiled = Compiled(step, folder)
        # A library is trusted after one step beside the model, on copies of the cache.
        if not agrees(step, compiled, token, self.places):
            raise NotCompiled("the compiled step does not make the logits of the model")
        loaded[key] = compiled
        return compiled


def _say(text: str) -> None:
    print(f"tapernorm: {text}", file=sys.stderr)


call_module(__name__, generate)
