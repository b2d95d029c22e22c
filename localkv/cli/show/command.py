"""`localkv show`: the content of a model file, and the size of its KV cache. Loads no tensor, but
with `--kv` (`kv.py`)."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from localkv.cli.model.file import model_file
from localkv.cli.options import (
    DEFAULT_BATCH,
    file_argument,
    flag,
    json_option,
    model_options,
    raw_option,
)
from localkv.cli.output.messages import one_line
from localkv.cli.output.table import table
from localkv.cli.output.text_output import TextOutput
from localkv.cli.parsing.command import Command
from localkv.cli.parsing.parameters import Option
from localkv.cli.show.facts import model_facts, model_rows
from localkv.cli.show.kv import check_alone, kv_options, show_kv
from localkv.errors import ModelFileError, UsageError, byte_size

if TYPE_CHECKING:
    from localkv.arch.spec import ModelSpec
    from localkv.loader.gguf_file import GGUFFile
    from localkv.loader.metadata import Metadata

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

    path = model_file(values, argument=file)
    gguf = open_gguf(path)
    if template:
        _show_template(gguf.metadata, str(path), raw)
        return
    if as_json:
        click.echo(json.dumps(describe(gguf), ensure_ascii=False))
    else:
        click.echo("\n".join(lines(gguf)))


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
        "kv_cache": _kv_cache(config) if config else None,
    }


def _spec(gguf: GGUFFile) -> tuple[ModelSpec | None, str | None]:
    """The model's, or why it can't be run."""
    from localkv.loader.listed_tensors import checked_spec

    try:
        return checked_spec(gguf), None
    except ModelFileError as error:
        return None, str(error)


def _weights(gguf: GGUFFile) -> list[dict[str, Any]]:
    from localkv.memory.weight_bytes import weights_by_type

    return [asdict(share) for share in weights_by_type(gguf.tensors.values())]


def _kv_cache(config: ModelSpec) -> list[dict[str, Any]]:
    """A row for each type: bytes per token of K and of V once it is packed; of what is kept as f16
    besides, and of all for the full context."""
    from localkv.config import CacheConfig
    from localkv.formats import KV_FORMATS
    from localkv.memory.kv_bytes import (
        context_bytes,
        exact_context_bytes,
        fits_head,
        kv_side_bytes_per_token,
    )

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
    """The same as text.

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
            "Types are those of the latents, which are K and V; bytes after the comma are those of "
            f"the rotated parts of keys in {rotated} (-ctk-rope)."
        )
    grows = any(not group.reach for group in config.groups)
    windows = any(group.reach for group in config.groups)
    return [*notes, "Bytes per token are those of the others."] if windows and grows else notes


def _count(n: int) -> str:
    for unit, factor in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if n >= factor:
            return f"{n / factor:.2f} {unit}"
    return str(n)


def _template_flag() -> Option:
    """`--template`; the `--chat-template` of other commands, and its variable, take a name."""
    names = "--template", "--chat-template"
    help_text = "Print the chat template as it is, nothing else."
    made = flag("template", *names, panel="Output", help=help_text)
    made.envvar = ["LOCALKV_TEMPLATE"]
    return made


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
        _template_flag(),
        raw_option(),
        *kv_options(),
        json_option(),
    ],
    callback=_run,
    help="Show what is in a model file: sizes, tokenizer, and the KV cache for every type.\n\n"
    "With --kv it runs a text instead, and shows the K and V that come of it.",
)
