"""`localkv show`: the content of a model file, and the size of its KV cache.

It loads no tensor, except with `--kv`, which shows K and V of the model as they are measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localkv.cache.recurrent_state import state_bytes
from localkv.commands.kv_view import KVView, Shift, kv_facts, kv_lines, of_profile, require_rows
from localkv.commands.loading_options import loading_options, override_options, unoffered_values
from localkv.commands.model_file import model_file
from localkv.commands.options import (
    DEFAULT_BATCH,
    OUTPUT,
    Panel,
    escape_option,
    file_argument,
    json_option,
    model_options,
    raw_option,
    refuse,
)
from localkv.commands.output import ProgressLine, TextOutput, note, one_line, table, warn
from localkv.commands.parsing import Command, Option, Whole
from localkv.commands.pictures import check_plot
from localkv.commands.texts import read_file, unescape, without_final_newline
from localkv.config import Overrides
from localkv.errors import ModelFileError, UsageError, byte_size, counted, printable

if TYPE_CHECKING:
    from localkv.arch.spec import LayerSpec, ModelSpec, RopeSpec
    from localkv.llm import LLM
    from localkv.loader.gguf_file import GGUFFile
    from localkv.loader.metadata import Metadata


_K_AND_V = Panel("K and V")


_SPECIAL = ("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask")
_TEMPLATE = "tokenizer.chat_template"


def _run(
    *, file: str | None, template: bool, raw: bool, kv: bool, as_json: bool, **values: Any
) -> None:
    if kv:
        if template:
            raise UsageError("--kv and --template show different things, use one")
        show_kv(file=file, as_json=as_json, **values)
        return
    check_alone()
    from localkv.loader.gguf_file import open_gguf
    from localkv.loader.model_header import with_overrides

    path = model_file(values, argument=file)
    gguf = open_gguf(path)
    if gguf.metadata.string("general.type", "") == "adapter":
        _show_adapter(path, template=template, as_json=as_json)
        return
    gguf = with_overrides(gguf, Overrides.of(values))
    if template:
        _show_template(gguf.metadata, str(path), raw)
        return
    if as_json:
        click.echo(json.dumps(describe(gguf), ensure_ascii=False))
    else:
        click.echo("\n".join(lines(gguf)))


def _show_adapter(path: Path, *, template: bool, as_json: bool) -> None:
    """What an adapter's file changes.

    Raises:
        ModelFileError: it is malformed, or no LoRA adapter.
    """
    from localkv.loader.adapter_file import adapter_bytes, open_adapter
    from localkv.memory.plan import weights_by_type

    file = open_adapter(path)
    gguf, n_bytes = file.gguf, adapter_bytes(file)
    if template:
        raise file.error("an adapter has no chat template")
    facts = {
        "path": str(path),
        "file_bytes": gguf.file_bytes,
        "architecture": file.architecture,
        "name": gguf.metadata.string("general.name", default=None),
        "adapter": {
            "type": "lora",
            "alpha": file.alpha,
            "ranks": list(file.ranks),
            "tensors": sorted(file.pairs),
            "norms": list(file.norms),
            "activation_tokens": list(file.activation),
            "bytes": n_bytes,
        },
    }
    if as_json:
        click.echo(json.dumps(facts, ensure_ascii=False))
        return
    kinds = sorted({name.split(".", 2)[-1].removesuffix(".weight") for name in file.pairs})
    shares = weights_by_type(gguf.tensors.values())
    rows: list[tuple[str, object]] = [
        ("file", path),
        ("size", byte_size(gguf.file_bytes)),
        ("name", facts["name"] or "not given"),
        ("adapter", f"LoRA of a model of {file.architecture}: --lora {path}"),
        ("rank", f"{', '.join(map(str, file.ranks))}, alpha {file.alpha:g}"),
        ("changes", f"{counted(len(file.pairs), 'tensor')}: {', '.join(kinds)}"),
        ("values", ", ".join(f"{_count(one.n_values)} in {one.name}" for one in shares)),
        ("in memory", byte_size(n_bytes)),
    ]
    rows += [("warning", line) for line in file.warnings]
    click.echo("\n".join(f"{label:<16}{one_line(str(value))}" for label, value in rows))


def _show_template(metadata: Metadata, path: str, raw: bool) -> None:
    text = metadata.string(_TEMPLATE, default=None)
    if text is None:
        raise ModelFileError(f"{path}: there is no chat template")
    with TextOutput(None, raw=raw) as out:
        out.write(text)


def describe(gguf: GGUFFile) -> dict[str, Any]:
    """Everything that `show` shows; parts that the file does not have are None.

    Raises:
        ModelFileError: a key is of the wrong type.
    """
    config, problem = _spec(gguf)
    return {
        "path": str(gguf.path),
        "file_bytes": gguf.file_bytes,
        "n_parts": len(gguf.parts),
        "gguf_version": gguf.version,
        "architecture": gguf.metadata.string("general.architecture", default=None),
        "name": gguf.metadata.string("general.name", default=None),
        "n_parameters": sum(math.prod(tensor.shape) for tensor in gguf.tensors.values()),
        "weights": _weights(gguf),
        "model": model_facts(config) if config else None,
        "model_problem": problem,
        "tokenizer": _tokenizer(gguf.metadata),
        "chat_templates": _templates(gguf.metadata),
        "kv_cache": _kv_cache(config) if config and config.groups else None,
    }


def _spec(gguf: GGUFFile) -> tuple[ModelSpec | None, str | None]:
    """The model's, or why it can't be run."""
    from localkv.loader.weights import checked_spec

    try:
        return checked_spec(gguf), None
    except ModelFileError as error:
        return None, str(error)


def _weights(gguf: GGUFFile) -> list[dict[str, Any]]:
    from localkv.memory.plan import weights_by_type

    return [asdict(share) for share in weights_by_type(gguf.tensors.values())]


def _kv_cache(config: ModelSpec) -> list[dict[str, Any]]:
    """A row for each type.

    It has bytes per token of K and of V once packed, of what is also kept as f16, and of all for
    the full context.
    """
    from localkv.cache.layout import (
        context_bytes,
        exact_context_bytes,
        fits_head,
        kv_side_bytes_per_token,
    )
    from localkv.config import CacheConfig
    from localkv.quant_formats import KV_FORMATS

    rows = []
    for name, fmt in KV_FORMATS.items():
        fits = fits_head(name, config)
        k = kv_side_bytes_per_token("k", name, config) if fits else None
        v = kv_side_bytes_per_token("v", name, config) if fits else None
        both = None if k is None or v is None else k + v
        cache = CacheConfig(name, name, n_ctx=config.n_ctx_train)
        full = (cache, config, DEFAULT_BATCH)
        rows.append(
            {
                "type": name,
                "bits_per_value": fmt.bits_per_value(config.groups[0].key_dim),
                "bytes_per_token_k": k,
                "bytes_per_token_v": v,
                "bytes_per_token": both,
                "bytes_as_f16": exact_context_bytes(*full) if fits else None,
                "bytes_full_context": context_bytes(*full) if fits else None,
            }
        )
    return rows


def _tokenizer(metadata: Metadata) -> dict[str, Any] | None:
    from localkv.loader.vocabulary import NoTokenizerError, read_vocabulary

    vocabulary, problem = None, None
    try:
        vocabulary = read_vocabulary(metadata)
    except NoTokenizerError:
        return None
    except ModelFileError as error:
        problem = str(error)
    tokens = metadata.strings("tokenizer.ggml.tokens", default=[])

    def named(token: int) -> dict[str, Any]:
        return {"id": token, "text": tokens[token] if 0 <= token < len(tokens) else None}

    special = {}
    for name in _SPECIAL:
        token = metadata.integer(f"tokenizer.ggml.{name}_token_id", default=None)
        if token is not None:
            special[name] = named(token)
    return {
        "kind": metadata.string("tokenizer.ggml.model"),
        "pre": metadata.string("tokenizer.ggml.pre", default=None),
        "problem": problem,
        "warnings": list(vocabulary.warnings) if vocabulary else [],
        "n_tokens": len(tokens),
        "special_tokens": special,
        "end_tokens": [named(token) for token in sorted(vocabulary.eog_ids)] if vocabulary else [],
        "add_bos": vocabulary.add_bos if vocabulary else None,
        "add_eos": vocabulary.add_eos if vocabulary else None,
    }


def _templates(metadata: Metadata) -> list[str]:
    """Names of the chat templates; the unnamed one is "default"."""
    from localkv.loader.chat_template import chat_template_names

    return [*(["default"] if _TEMPLATE in metadata else []), *chat_template_names(metadata)]


def lines(gguf: GGUFFile) -> list[str]:
    """The content of a model file as text.

    Raises:
        ModelFileError: a key is of the wrong type.
    """
    facts, config = describe(gguf), _spec(gguf)[0]
    rows = [*_file_rows(facts), *_model_rows(facts, config), *_tokenizer_rows(facts)]
    found = [f"{label:<16}{one_line(str(value))}" for label, value in rows]
    if facts["weights"]:
        found += ["", *_weights_table(facts["weights"])]
    if facts["kv_cache"]:
        found += ["", *_kv_table(facts["kv_cache"], facts["model"]), *_window_notes(config)]
    return found


def _file_rows(facts: dict[str, Any]) -> list[tuple[str, object]]:
    parts = f" in {facts['n_parts']} parts" if facts["n_parts"] > 1 else ""
    return [
        ("file", facts["path"]),
        ("size", f"{byte_size(facts['file_bytes'])}{parts}, GGUF version {facts['gguf_version']}"),
        ("name", facts["name"] or "not given"),
        ("architecture", facts["architecture"] or "not given"),
        ("parameters", _count(facts["n_parameters"]) if facts["weights"] else "none"),
    ]


def _model_rows(facts: dict[str, Any], config: ModelSpec | None) -> list[tuple[str, object]]:
    if config is not None:
        return model_rows(config)
    if not facts["weights"]:
        return [("model", "none: the file holds a vocabulary only")]
    return [("model", f"can't be run: {facts['model_problem']}")]


def _tokenizer_rows(facts: dict[str, Any]) -> list[tuple[str, object]]:
    tokenizer = facts["tokenizer"]
    if tokenizer is None:
        return [("tokenizer", "none: the model runs on token ids only")]
    pre = f", pre-tokenizer {tokenizer['pre']}" if tokenizer["pre"] else ""
    rows: list[tuple[str, object]] = [
        ("tokenizer", f"{tokenizer['kind']}{pre}, {tokenizer['n_tokens']} tokens")
    ]
    if tokenizer["problem"] is not None:
        rows.append(("", f"can't be used: {tokenizer['problem']}"))
    rows += [("", f"warning: {line}") for line in tokenizer["warnings"]]
    special = [f"{name} {_token(token)}" for name, token in tokenizer["special_tokens"].items()]
    rows.append(("special tokens", ", ".join(special) or "none named"))
    if tokenizer["problem"] is None:
        added = [name for name in ("bos", "eos") if tokenizer[f"add_{name}"]]
        rows.append(("end a text", ", ".join(map(_token, tokenizer["end_tokens"])) or "none"))
        rows.append(("added to texts", ", ".join(added) or "none"))
    rows.append(("chat template", ", ".join(facts["chat_templates"]) or "none"))
    return rows


def _token(token: dict[str, Any]) -> str:
    return f"{token['id']} {token['text']}"


def _weights_table(shares: list[dict[str, Any]]) -> list[str]:
    rows = [("weights", "tensors", "values", "bytes", "bits/value")]
    for share in shares:
        rows.append(
            (
                share["name"],
                str(share["n_tensors"]),
                _count(share["n_values"]),
                byte_size(share["n_bytes"]),
                f"{8 * share['n_bytes'] / share['n_values']:.4g}",
            )
        )
    total = sum(share["n_bytes"] for share in shares)
    rows.append(("all", str(sum(s["n_tensors"] for s in shares)), "", byte_size(total), ""))
    return table(rows)


def _kv_table(rows: list[dict[str, Any]], model: dict[str, Any]) -> list[str]:
    context = f"{model['n_ctx_train']} tokens"
    titles = "bits/value", "K or V per token", "both per token", "tail and sink", context
    lines = [("KV cache", *titles)]
    for row in rows:
        k, v = row["bytes_per_token_k"], row["bytes_per_token_v"]
        sizes = ("does not fit", "", "", "")
        if k is not None:
            side = f"{k}" if k == v else f"{k}, {v}"
            sizes = (
                f"{side} B",
                f"{row['bytes_per_token']} B",
                byte_size(row["bytes_as_f16"]) if row["bytes_as_f16"] else "",
                byte_size(row["bytes_full_context"]),
            )
        lines.append((row["type"], f"{row['bits_per_value']:g}", *sizes))
    notes = [_ROWS_ONLY] if any(row["bytes_as_f16"] for row in rows) else []
    return [*table(lines), *notes]


_ROWS_ONLY = "Tails and sinks are kept in pages that have room for a batch, too: plan counts those."


def _window_notes(config: ModelSpec | None) -> list[str]:
    """How the table counts layers with a window, and latents."""
    from localkv.cache.cache_checks import keeps_latents
    from localkv.cache.layout import GroupLayout
    from localkv.config import CacheConfig

    if config is None:
        return []
    notes = [
        f"{len(group.layers)} of {config.n_layers} layers see {group.reach} tokens, and keep "
        f"{GroupLayout(group, ()).n_rows(config.n_ctx_train, DEFAULT_BATCH)} of the context."
        for group in config.groups
        if group.reach
    ]
    if keeps_latents(config.groups):
        rotated = CacheConfig.type_k_rope
        notes.append(
            "Types are the types of the latents, which are K and V; bytes after the comma are for "
            f"the rotated parts of keys in {rotated} (-ctk-rope)."
        )
    grows = any(not group.reach for group in config.groups)
    windows = any(group.reach for group in config.groups)
    return [*notes, "Bytes per token are for the other layers."] if windows and grows else notes


def _count(n: int) -> str:
    for unit, factor in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if n >= factor:
            return f"{n / factor:.2f} {unit}"
    return str(n)


def _template_flag() -> Option:
    """`--template`; the `--chat-template` of other commands, and its variable, take a name."""
    names = "template --template --chat-template"
    made = OUTPUT.flag(names, help="Print the chat template as it is, nothing else.")
    made.envvar = ["LOCALKV_TEMPLATE"]
    return made


def model_facts(config: ModelSpec) -> dict[str, Any]:
    """Sizes of a model; each kind of layer once, with the indices of its layers."""
    facts = asdict(config)
    del facts["layers"]
    kinds = (
        {"layers": [i for i, layer in enumerate(config.layers) if layer == kind], **asdict(kind)}
        for kind in config.kinds
    )
    groups = [asdict(group) for group in config.groups]
    return {**facts, "n_layers": config.n_layers, "kinds": list(kinds), "groups": groups}


def model_rows(config: ModelSpec) -> list[tuple[str, object]]:
    """Labels and texts; where layers differ, a row for each kind, with the number of its layers."""
    rows: list[tuple[str, object]] = [("layers", config.n_layers), ("embedding", config.n_embd)]
    rows += _by_kind(config, "heads", _heads)
    rows += _by_kind(config, "feed-forward", _feed_forward)
    rows.append(("context", f"{config.n_ctx_train} tokens"))
    rows.append(("vocabulary", f"{config.n_vocab} tokens"))
    rows += _by_kind(config, "rope", _rope)
    if any(_window(layer) != "none" for layer in config.kinds):
        rows += _by_kind(config, "window", _window)
    if config.states:
        text = f"{byte_size(state_bytes(config.states))} for each sequence, float32"
        rows.append(("states", text))
    if config.has_experts:
        rows += _by_kind(config, "experts", _experts)
    return rows + _stream_rows(config)


def _stream_rows(config: ModelSpec) -> list[tuple[str, object]]:
    """What layers do with the residual stream beyond attention and feed-forward."""
    rows: list[tuple[str, object]] = []
    if (per_layer := config.per_layer_input) is not None:
        rows.append(("embeddings", f"of each layer, {per_layer.width} values, read by row"))
    if (altup := config.altup) is not None:
        rows.append(("streams", f"{altup.n_streams} (AltUp)"))
    if (laurel := config.layers[0].laurel) is not None:
        rows.append(("beside heads", f"a residual of rank {laurel.rank} (Laurel)"))
    return rows


def _by_kind(
    config: ModelSpec, label: str, words: Callable[[LayerSpec], str]
) -> list[tuple[str, object]]:
    """What the layers have, and how many have it unless all do."""
    counts = dict[str, int]()
    for layer in config.layers:
        counts[words(layer)] = counts.get(words(layer), 0) + 1
    if len(counts) == 1:
        return [(label, text) for text in counts]
    texts = [f"{text} ({counted(n, 'layer')})" for text, n in counts.items()]
    return [(label if i == 0 else "", text) for i, text in enumerate(texts)]


def _heads(layer: LayerSpec) -> str:
    """The heads of the layer's mixer, whatever it is, and of one beside it."""
    if layer.beside is not None:
        first, second = replace(layer, beside=None), replace(layer, mixer=layer.beside, beside=None)
        return f"{_heads(first)}; {_heads(second)}"
    from localkv.arch.spec import (
        AttentionSpec,
        DeltaNetSpec,
        EncoderAttentionSpec,
        LatentAttentionSpec,
        Mamba2Spec,
        ShortConvSpec,
    )

    match layer.mixer:
        case EncoderAttentionSpec(attention=spec):
            return f"{_heads(replace(layer, mixer=spec))}; tokens see those after them, too"
        case AttentionSpec() as spec:
            dims = f"{spec.key_dim}"
            if spec.value_dim != spec.key_dim:
                dims += f" (V: {spec.value_dim})"
            if spec.kv_from is not None:
                return f"{spec.n_heads} of {dims}, with K and V of layer {spec.kv_from}"
            values = "K, from which V is" if spec.value_from_key else "K and V"
            return f"{spec.n_heads}, {spec.n_kv_heads} for {values}, of {dims}"
        case LatentAttentionSpec() as spec:
            parts = f"{spec.latent_dim} and {spec.rope_dim} rotated channels"
            return f"{spec.n_heads}, one latent for K and V, of {parts}"
        case DeltaNetSpec() as spec:
            heads = f"{spec.n_value_heads}, {spec.n_key_heads} for q and k"
            return f"{heads}, of {spec.head_dim}, in a gated delta net"
        case ShortConvSpec() as spec:
            return f"none, a convolution over {spec.kernel} tokens"
        case Mamba2Spec() as spec:
            return f"{spec.n_heads} of {spec.head_dim} in a Mamba-2 mixer, state {spec.state_dim}"
    return "none"


def _feed_forward(layer: LayerSpec) -> str:
    if layer.mlp is None:
        return "experts only" if layer.moe else "none"
    return str(layer.mlp.n_ff) + (", sparse" if layer.mlp.sparsity else "")


def _experts(layer: LayerSpec) -> str:
    moe = layer.moe
    if moe is None:
        return "none"
    shared = f", a shared one of {moe.n_ff_shared}" if moe.n_ff_shared else ""
    return f"{moe.n_experts_used} of {moe.n_experts}, each of {moe.n_ff}{shared}"


def _window(layer: LayerSpec) -> str:
    mixer = layer.mixer
    params = getattr(getattr(mixer, "attention", mixer), "params", None)
    if params is None or not (params.window or params.chunk):
        return "none"
    return f"{params.window} tokens" if params.window else f"chunks of {params.chunk} tokens"


def _rope(layer: LayerSpec) -> str:
    rope: RopeSpec | None = getattr(layer.mixer, "rope", None)
    if rope is None:
        return "none"
    text = f"{rope.n_dims} channels, base {rope.theta:g}"
    if rope.scaling != "none":
        text += f", {rope.scaling} x{rope.factor:g} of {rope.original_context_length}"
    if rope.long_divisors:
        text += f", LongRoPE: other factors with -c above {rope.original_context_length}"
    elif rope.divisors:
        text += ", factors of the file"
    return text


DEFAULT_TOKENS = 1024
BUILT_IN = "the built-in text"

_USED = (
    *("cache_type_k", "cache_type_v", "preset", "cache_type_k_swa", "cache_type_v_swa"),
    *("cache_type_k_rope", "kv_tail", "kv_sink", "kv_rotation", "kv_scales", "kv_profile"),
    *("kv_bits", "batch_size", "ubatch_size", "threads", "threads_batch", "device", "fit"),
    *("mlock", "use_mmap"),
)
"""Options as other commands have them, without the ones that name a model."""
_OF_RUNS = (*_USED, "file_of_text", "prompt", "escape", "tokens")
_MODEL_OPTIONS = ("model", "hf_repo", "hf_file", "offline")


def kv_options() -> list[click.Parameter]:
    """The options that only `--kv` has."""
    return [
        _K_AND_V.flag(
            "--kv",
            help="Run a text, and show the magnitudes of K and V by layer, and outlier channels. "
            "With types of a cache (-ctk, -ctv, --kv-profile) also how far attention moves from "
            "that with f16. FILE may be a KV profile, which is shown without a model.",
        ),
        _K_AND_V.option(
            "file_of_text -f --file",
            metavar="FILE",
            help="The text, UTF-8; - is stdin. [default: one that comes with localkv]",
        ),
        _K_AND_V.option("-p --prompt", metavar="TEXT", help="The text itself."),
        escape_option(_K_AND_V, "-p"),
        _K_AND_V.option(
            "--tokens", type=Whole(1), default=DEFAULT_TOKENS, help="Most tokens of the text."
        ),
        _K_AND_V.option(
            "plot_file --plot", metavar="FILE", help="Draw it as a picture (.png, .svg, .pdf)."
        ),
        *(param for param in loading_options() if param.name in _USED),
    ]


def check_alone() -> None:
    """Refuse options that have no meaning without `--kv`.

    Raises:
        UsageError: names the first one.
    """
    refuse((*_OF_RUNS, "plot_file"), "without --kv nothing is run", "add --kv")


def show_kv(
    *,
    file: str | None,
    file_of_text: str | None,
    prompt: str | None,
    escape: bool,
    tokens: int,
    plot_file: str | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Run the command.

    Raises:
        UsageError: options contradict each other, or the model keeps no K and V.
        ModelFileError: the file is damaged.
    """
    if plot_file is not None:
        check_plot(plot_file)
    path = model_file(values, argument=file)
    if _is_json(path):
        refuse(
            _OF_RUNS, f"{printable(path)} is shown without a model", "name the model, not a profile"
        )
        view = profile_view(path)
    else:
        text, what = _text(file_of_text, prompt, escape)
        values = {**values, "model": str(path), "hf_repo": None, "hf_file": None}
        view = _measured(values, text, what, tokens)
    with TextOutput(None) as out:
        if as_json:
            out.write(json.dumps({"path": str(path), **kv_facts(view)}, ensure_ascii=False))
        else:
            out.write("\n".join(kv_lines(view)))
    if plot_file is not None:
        from localkv.commands.kv_plot import draw

        draw(view, plot_file)


def profile_view(path: Path) -> KVView:
    """What a file of `localkv calibrate` knows.

    Raises:
        UsageError: it is none.
    """
    from localkv.cache.profile import read_profile

    profile = read_profile(path)
    require_rows(profile.layers)
    return of_profile(profile)


def _is_json(path: Path) -> bool:
    """Whether a file is a profile rather than a model; what can't be read is a model's matter."""
    try:
        with path.open("rb") as file:
            return file.read(64).lstrip().startswith(b"{")
    except OSError:
        return False


def _text(file: str | None, prompt: str | None, escape: bool) -> tuple[str, str]:
    """The text, and what it is."""
    if file is not None and prompt is not None:
        raise UsageError("-p and -f both give the text, use one")
    if prompt is not None:
        return unescape(prompt) if escape else prompt, "the prompt"
    if file is not None:
        name = "stdin" if file == "-" else printable(Path(file).name)
        return without_final_newline(read_file(file, "the text")), name
    from localkv.quality.scores import calibration_text

    return calibration_text(), BUILT_IN


def _measured(values: Mapping[str, Any], text: str, what: str, n_tokens: int) -> KVView:
    from localkv.commands.model import all_warnings, load_llm

    llm = load_llm({**unoffered_values((*_USED, *_MODEL_OPTIONS)), **values})
    for line in all_warnings(llm):
        warn(line)
    from localkv.config import CacheConfig
    from localkv.loader.chosen_cache import AUTO, model_profile
    from localkv.loader.smoothing import NO_SMOOTHING
    from localkv.quality.kv_profile import layer_facts
    from localkv.quality.ranges import channel_ranges

    if not llm.config.groups:
        require_rows(())
    ids = llm.tokenize(text)
    if not ids:
        raise UsageError("the text has no tokens")
    n = min(n_tokens, llm.config.n_ctx_train)
    if len(ids) > n and what != BUILT_IN:
        note(f"the first {n} of {len(ids)} tokens are read (--tokens)")
    ids = ids[:n]
    model, n_batch = llm.engine.model, llm.engine.n_batch
    llm.check_further_cache(CacheConfig("f32", "f32", n_ctx=len(ids)))
    with ProgressLine() as progress:
        progress.show(f"K and V of {counted(len(ids), 'token')}")
        ranges = channel_ranges(model, [ids], n_ctx=len(ids), n_batch=n_batch)
        shift = _shift(llm, ids, progress)
    profile = None
    if name := values["kv_profile"] or (llm.kv_types and AUTO):  # a preset takes one that it finds
        profile = model_profile(llm.gguf, name)
    costs = {
        (i, side, name): kld
        for i, layer in enumerate(profile.layers if profile else ())
        if layer is not None
        for side, facts in enumerate((layer.k, layer.v))
        for name, kld in facts.kld.items()
    }
    latent = all(group.is_latent for group in llm.config.groups)
    return KVView(
        llm.config.name,
        what,
        len(ids),
        profile.smoothing if profile else 0.0,
        tuple(layer_facts(i, found, costs, NO_SMOOTHING, ()) for i, found in enumerate(ranges)),
        sides=("latents", "rotated keys") if latent else ("K", "V"),
        chosen=llm.kv_types,
        shift=shift,
    )


def _shift(llm: LLM, ids: list[int], progress: ProgressLine) -> Shift | None:
    """The shift of attention by the cache that is asked for, unless it is f16."""
    from dataclasses import replace

    from localkv.quality.attention_shift import attention_shift

    if set(llm.cache.types) == {"f16"}:
        return None
    types = "/".join(llm.cache.shown_types)
    if llm.kv_types is not None:
        types = f"types by layer of {llm.kv_types.bits:.3g} bits"
    for name in ("tail", "sink"):
        if n := getattr(llm.cache, f"kv_{name}"):
            types += f", {name} {n}"
    progress.show(f"attention with f16 and with {types}")
    cache = replace(llm.cache, n_ctx=len(ids))
    moved = attention_shift(llm.engine.model, ids, cache, n_batch=llm.engine.n_batch)
    return Shift(types, tuple(moved))


show = Command(
    "show",
    examples=[
        ("What is in a file", "localkv show model.gguf"),
        ("Its chat template", "localkv show model.gguf --chat-template"),
        ("Which channels of K and V are large", "localkv show model.gguf --kv --plot kv.png"),
        (
            "How far q4_0 moves attention",
            "localkv show model.gguf --kv -f text.txt -ctk q4_0 -ctv q4_0",
        ),
    ],
    essentials="-m -hf --template --kv -f -p -ctk -ctv --kv-profile --plot --json",
    params=[
        file_argument(),
        *model_options(),
        *override_options(),
        _template_flag(),
        raw_option(),
        *kv_options(),
        json_option(),
    ],
    callback=_run,
    help="Show what is in a model file: sizes, tokenizer, and the KV cache for every type.\n\n"
    "With --kv it runs a text instead, and shows the K and V that come of it.",
)
