"""`localkv complete`: what it reads, what it writes where, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localkv.commands.texts import unescape
from localkv.errors import ContextOverflowError, UsageError
from localkv.loader.named_templates import NAMED_TEMPLATES
from support import tiny_model as tiny

MEMORY = (
    "memory: weights 1.00 MiB (1.00 MiB mapped), K f16 512.00 KiB, V f16 512.00 KiB, "
    "scratch 3.00 MiB (context 64)\n"
)


# -- the prompt


TEXT = "Ünï \\n text\n".encode()


@pytest.mark.parametrize(
    ("argv", "prompt"),
    [
        (["-p", r"{stdin}\n\nSummarise."], "Ünï \\n text\n\nSummarise."),
        (["-p", "<{stdin}|{stdin}>"], "<Ünï \\n text|Ünï \\n text>"),
        (["-f", "-"], "Ünï \\n text"),
        (["-f", "-", "-p", "Summarise."], "Ünï \\n text\n\nSummarise."),
        ([], "Ünï \\n text"),
    ],
)
def test_stdin_that_is_asked_for(program, llm, model, argv, prompt) -> None:
    """Its text loses one final line break, and has no escapes."""
    program("complete", "-m", model, *argv, stdin=TEXT)
    assert llm.asked["prompt"] == prompt


def test_an_empty_stdin_that_is_asked_for(program, llm, model) -> None:
    program("complete", "-m", model, "-p", "<{stdin}>", stdin=b"")
    assert llm.asked["prompt"] == "<>"
    program("complete", "-m", model, "-f", "-", "-p", "Summarise.", stdin=b"\n")
    assert llm.asked["prompt"] == "Summarise."


@pytest.mark.parametrize(
    ("argv", "prompt"),
    [(["-p", "hello"], "hello"), (["-p", r"\x7bstdin}"], "{stdin}"), (["-f", "FILE"], "{stdin}")],
)
def test_stdin_that_is_not_asked_for(
    program, llm, model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv, prompt
) -> None:
    def read_stdin() -> str:
        raise AssertionError("somebody else's stdin was read")

    path = tmp_path / "prompt.txt"
    path.write_text("{stdin}")
    monkeypatch.setattr("localkv.commands.texts.read_stdin", read_stdin)
    monkeypatch.setattr("localkv.commands.complete.read_stdin", read_stdin)
    argv = [path if word == "FILE" else word for word in argv]
    assert program("complete", "-m", model, *argv, stdin=TEXT).code == 0
    assert llm.asked["prompt"] == prompt


@pytest.mark.parametrize(
    ("argv", "what"),
    [(["-p", "{stdin}"], "the text for {stdin} in -p"), (["-f", "-"], "the prompt")],
)
def test_a_terminal_is_not_read(program, model, argv, what) -> None:
    result = program("complete", "-m", model, *argv, stdin=None)
    assert result.code == 2
    assert result.err == f"error: {what} is to be read from stdin, which is a terminal or closed\n"


def test_stdin_can_be_asked_for_once(program, model) -> None:
    result = program("complete", "-m", model, "-f", "-", "-p", "{stdin}", stdin=TEXT)
    assert result.code == 2
    assert result.err == "error: -f - and {stdin} in -p both read stdin, use one\n"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--kv-budget", "0"], "--kv-budget 0 has no room for anything"),
        (["--kv-budget", "some"], "--kv-budget: 'some' is not a size"),
        (["--kv-budget", "9" * 400], "--kv-budget: the size is too large a number"),
        (["--kv-ladder", "f16,q8_0"], "--kv-ladder says what pages change to within --kv-budget"),
        (["--kv-budget", "1MiB", "-ctk", "q8_0"], "types of --kv-ladder, and -ctk names others"),
        (["--kv-budget", "1MiB", "--kv-ladder", "q8_0,f16"], "q8_0/q8_0 to f16/f16 makes K and V"),
    ],
)
def test_wrong_budgets_and_ladders(program, model, argv, says) -> None:
    result = program("complete", "-m", model, "-p", "x", *argv)
    assert result.code == 2
    assert result.err.startswith("error: ")
    assert says in result.err.splitlines()[0]


def test_a_file_loses_one_final_line_break(program, llm, model, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"\xef\xbb\xbfline\\t\r\n\n\n")
    program("complete", "-m", model, "-f", path)
    assert llm.asked["prompt"] == "line\\t\r\n\n"


def test_escapes(program, llm, model) -> None:
    program("complete", "-m", model, "-p", r"a\nb\\n\x41\q")
    assert llm.asked["prompt"] == "a\nb\\nA\\q"
    program("complete", "-m", model, "-p", r"a\nb", "--no-escape")
    assert llm.asked["prompt"] == r"a\nb"
    program("complete", "-m", model, "-p", r"a\nb", "-e")
    assert llm.asked["prompt"] == "a\nb"


def test_unescape() -> None:
    assert unescape(r"\n\r\t\'\"\\") == "\n\r\t'\"\\"
    assert unescape(r"\x4") == r"\x4"
    assert unescape(r"\xe2\x82\xac") == "€"
    assert unescape("\\") == "\\"
    assert unescape(r"\\n") == r"\n"
    with pytest.raises(UsageError):
        unescape(r"\xff")


@pytest.mark.parametrize("stdin", [None, b"", b"\n"])
def test_no_prompt_is_exit_2(program, model, stdin) -> None:
    result = program("complete", "-m", model, stdin=stdin)
    assert (result.code, result.out) == (2, "")
    assert result.err == "error: there is no prompt: give -p TEXT, -f FILE, or text on stdin\n"


def test_two_prompts(program, llm, model, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("from the file")
    result = program("complete", "-m", model, "-p", "a", "-f", path)
    assert result.code == 2
    assert result.err == "error: -p and -f both give the prompt, use one\n"
    program.setenv(LOCALKV_PROMPT="from the variable")
    program("complete", "-m", model)
    assert llm.asked["prompt"] == "from the variable"
    program("complete", "-m", model, "-f", path)
    assert llm.asked["prompt"] == "from the file"


@pytest.mark.parametrize(
    ("argv", "stdin", "code", "message"),
    [
        (["-p", "\udcff"], b"", 2, "-p/--prompt: not valid UTF-8"),
        ([], b"a\xe9", 1, "the text on stdin is not valid UTF-8: byte 0xe9 at offset 1"),
        (["-f", "none.txt"], b"", 2, "the prompt none.txt: No such file or directory"),
        (["-p", "a", "--chat-template-file", "none"], b"", 2, "the chat template none: No such"),
    ],
)
def test_a_prompt_that_can_not_be_read(program, model, argv, stdin, code, message) -> None:
    result = program("complete", "-m", model, *argv, stdin=stdin)
    assert (result.code, result.out) == (code, "")
    assert result.err.startswith(f"error: {message}")
    assert len(result.err_lines) == 1


def test_a_prompt_file_that_is_not_utf8(program, model, tmp_path: Path) -> None:
    path = tmp_path / "latin1.txt"
    path.write_bytes("Grüße".encode("latin-1"))
    result = program("complete", "-m", model, "-f", path)
    assert result.code == 1
    assert result.err == f"error: the prompt {path} is not valid UTF-8: byte 0xfc at offset 2\n"


# -- chat


def test_chat(program, llm, model) -> None:
    program("complete", "-m", model, "--chat", "-p", "Hi", "-n", "4")
    assert llm.asked["messages"] == [{"role": "user", "content": "Hi"}]
    assert "template" not in llm.asked
    assert llm.asked["max_tokens"] == 4


def test_a_system_prompt_or_a_template_implies_chat(program, llm, model, tmp_path: Path) -> None:
    program("complete", "-m", model, "-sys", r"Be\nbrief.", "-p", "Hi")
    assert llm.asked["messages"] == [
        {"role": "system", "content": "Be\nbrief."},
        {"role": "user", "content": "Hi"},
    ]
    path = tmp_path / "template.jinja"
    path.write_text("{{ bos_token }}{{ eos_token }}{{ messages[0].content }}\n")
    program("complete", "-m", model, "--chat-template-file", path, "-p", "Hi")
    assert llm.asked["template"] == f"template {path.read_text()}"


def test_a_template_by_name(program, llm, model, tmp_path: Path) -> None:
    program("complete", "-m", model, "--chat-template", "ChatML", "-p", "Hi")
    assert llm.asked["template"] == f"template {NAMED_TEMPLATES['chatml']}"
    program("complete", "-m", model, "--chat-template", "{{ messages[0].content }}", "-p", "Hi")
    assert llm.asked["template"] == "template {{ messages[0].content }}"
    path = tmp_path / "own.jinja"
    path.touch()
    refused = program("complete", "-m", model, "--chat-template", path, "-p", "Hi")
    assert refused.code == 2
    assert f"--chat-template-file {path} takes a file" in refused.err_lines[1]
    both = ("--chat-template", "chatml", "--chat-template-file", path)
    refused = program("complete", "-m", model, *both, "-p", "Hi")
    assert "--chat-template and --chat-template-file exclude each other" in refused.err
    program.setenv(LLAMA_ARG_CHAT_TEMPLATE="gemma")
    assert program("complete", "-m", model, *both[2:], "-p", "Hi").code == 0
    assert llm.asked["template"] == "template "


def test_a_system_prompt_from_a_file(program, llm, model, tmp_path: Path) -> None:
    path = tmp_path / "system.txt"
    path.write_text("Be\\nbrief.\n")
    program("complete", "-m", model, "-sysf", path, "-p", "Hi")
    assert llm.asked["messages"][0] == {"role": "system", "content": "Be\\nbrief."}
    refused = program("complete", "-m", model, "-sysf", path, "-sys", "No.", "-p", "Hi")
    assert "--system-prompt and --system-prompt-file exclude each other" in refused.err


NOTE = "note: the model went on with the text; --chat asks it through its chat template\n"


@pytest.mark.parametrize(
    ("pieces", "options", "said"),
    [
        ([], ["-q"], NOTE),
        (["\n"], ["-q"], NOTE),
        (["Four."], ["-q"], ""),
        ([], ["-q", "--chat"], ""),
        ([], ["-q", "--parse-special"], ""),
    ],
)
def test_an_empty_text_of_a_chat_model(program, llm, model, pieces, options, said) -> None:
    llm.pieces = pieces
    llm.has_chat_template = True
    assert program("complete", "-m", model, *options, "-p", "2 + 2?").err == said
    llm.has_chat_template = False
    assert program("complete", "-m", model, *options, "-p", "2 + 2?").err == ""


def test_a_chat_model_at_a_terminal(program, llm, model, monkeypatch) -> None:
    llm.has_chat_template = True
    monkeypatch.setattr("localkv.commands.complete.is_terminal", lambda stream: True)
    assert NOTE in program("complete", "-m", model, "-p", "2 + 2?").err
    assert NOTE not in program("complete", "-m", model, "-p", "2 + 2?", "-q").err


def test_control_tokens_can_not_be_written_in_a_chat(program, llm, model) -> None:
    result = program("complete", "-m", model, "--chat", "--parse-special", "-p", "Hi")
    assert (result.code, llm.asked) == (2, {})
    assert result.err_lines[0] == "error: --parse-special is for plain prompts"


# -- the text


@pytest.mark.parametrize(
    ("pieces", "out"),
    [
        (["one", " two"], "one two\n"),
        (["one\n"], "one\n"),
        (["one\n", "\n"], "one\n\n"),
        ([], "\n"),
        (["  ünï 🦊 "], "  ünï 🦊 \n"),
    ],
)
@pytest.mark.parametrize("how", [[], ["--no-stream"]])
def test_stdout_is_the_text_and_a_line_break_if_it_has_none(
    program, llm, model, tmp_path: Path, pieces: list[str], out: str, how: list[str]
) -> None:
    llm.pieces = pieces
    result = program("complete", "-m", model, "-p", "x", *how)
    assert (result.code, result.out, result.err) == (0, out, MEMORY)
    path = tmp_path / "out.txt"
    path.write_text("before")
    result = program("complete", "-m", model, "-p", "x", "-o", path, "-q", *how)
    assert (result.code, result.out, result.err) == (0, "", "")
    assert path.read_bytes() == out.encode()


@pytest.mark.parametrize("path", ["no/such/folder/out.txt", "."])
def test_an_output_that_can_not_be_written_is_found_out_first(program, llm, model, path) -> None:
    result = program("complete", "-m", model, "-p", "x", "-o", path)
    assert (result.code, result.out) == (2, "")
    assert len(result.err_lines) == 1
    assert llm.loaded == {}


def test_a_run_that_fails_leaves_the_output_alone(program, llm, model, tmp_path: Path) -> None:
    def stream(self, prompt, **options):
        raise ContextOverflowError("the prompt has 70 tokens, but the context holds 64", "use -c")

    llm.stream = stream
    path = tmp_path / "out.txt"
    path.write_text("before")
    result = program("complete", "-m", model, "-p", "x", "-o", path, "-q")
    assert result.code == 1
    assert result.err_lines[0] == "error: the prompt has 70 tokens, but the context holds 64"
    assert result.err_lines[1] == "hint: use -c"
    assert path.read_text() == "before"


def test_an_error_half_way_keeps_the_text_and_ends_its_line(program, llm, model) -> None:
    def stream(self, prompt, **options):
        def pieces():
            yield "half"
            raise RuntimeError("a bug\nof two lines")

        return pieces()

    llm.stream = stream
    result = program("complete", "-m", model, "-p", "x", "-q")
    assert (result.code, result.out) == (1, "half\n")
    assert result.err_lines[0] == "error: RuntimeError: a bug of two lines"
    assert "LOCALKV_DEBUG=1" in result.err_lines[1]
    assert len(result.err_lines) == 2
    program.setenv(LOCALKV_DEBUG="1")
    assert "Traceback (most recent call last)" in program("complete", "-m", model, "-p", "x").err


def test_cancelled_is_exit_130_and_keeps_the_text(program, llm, model) -> None:
    llm.finish_reason = "cancelled"
    result = program("complete", "-m", model, "-p", "x")
    assert (result.code, result.out, result.err) == (130, "one two\n", MEMORY)
    result = program("complete", "-m", model, "-p", "x", "--json")
    assert result.code == 130
    assert json.loads(result.out)["finish_reason"] == "cancelled"


def test_a_full_context_is_a_note(program, llm, model) -> None:
    llm.finish_reason, llm.context_full = "length", True
    result = program("complete", "-m", model, "-p", "x")
    assert (result.code, result.out) == (0, "one two\n")
    assert result.err == (
        f"{MEMORY}note: the context of 64 tokens is full; a larger one (-c) makes more room\n"
    )


def test_warnings_are_lines_on_stderr(program, llm, model) -> None:
    llm.warnings = ["first", "second\nthing"]
    result = program("complete", "-m", model, "-p", "x")
    assert result.out == "one two\n"
    assert result.err == f"{MEMORY}warning: first\nwarning: second thing\n"


@pytest.fixture
def ages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is 0.375 seconds old when the model is ready, and a second with its text."""
    ages = iter((0.375, 1.0))
    monkeypatch.setattr("localkv.commands.complete.process_age", lambda: next(ages))


@pytest.mark.usefixtures("ages")
def test_json(program, llm, model) -> None:
    llm.warnings = ["first"]
    llm.pieces = ["a\n", "ü"]
    result = program("complete", "-m", model, "-p", "x", "--json", "-ctk", "f32")
    assert result.out.endswith("}\n")
    assert json.loads(result.out) == {
        "text": "a\nü",
        "finish_reason": "stop",
        "context_full": False,
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "cached_tokens": 0,
            "lost_tokens": 0,
            "drafted_tokens": 0,
            "accepted_tokens": 0,
            "verified_batches": 0,
            "requantised_pages": 0,
            "reasoning_tokens": 0,
        },
        "timings": {
            "start_seconds": 0.25,
            "load_seconds": 0.125,
            "first_token_seconds": 0.625,
            "prompt_seconds": 0.5,
            "prompt_per_second": 6.0,
            "decode_seconds": 0.25,
            "decode_per_second": 4.0,
            "requantise_seconds": 0.0,
        },
        "seed": 42,
        "model": {"path": str(model), "name": "fake", "architecture": "llama"},
        "cache": {"type_k": "f32", "type_v": "f16", "n_ctx": 64, "bytes": 1 << 20, "groups": []},
        "memory": {
            "weights_mapped": 1 << 20,
            "weights_allocated": 1 << 10,
            "cache_k": 1 << 19,
            "cache_v": 1 << 19,
            "scratch": 3 << 20,
            "weights_by_row": 0,
            "weights_decoded": 0,
            "adapters": 0,
            "states": 0,
            "checkpoints": 0,
            "total": (1 << 20) + (1 << 10) + (1 << 20) + (3 << 20),
        },
        "backend": "cpu",
        "warnings": ["first"],
    }


def test_logprobs(program, tiny_model: Path) -> None:
    run = ("complete", "-m", tiny_model, "-p", "The fox", "-n", "3", "--temp", "0", "--json")
    plain = json.loads(program(*run).out)
    facts = json.loads(program(*run, "--logprobs", "2").out)
    content = facts["logprobs"]["content"]
    assert "logprobs" not in plain
    assert facts["text"] == plain["text"]
    assert len(content) == 3
    assert b"".join(bytes(one["bytes"]) for one in content).decode(errors="replace")
    for one in content:
        assert [*one] == ["id", "token", "bytes", "logprob", "top_logprobs"]
        best, second = one["top_logprobs"]
        assert {**best, "top_logprobs": one["top_logprobs"]} == one  # it is greedy
        assert best["logprob"] >= second["logprob"]


def test_logprobs_that_nobody_would_see(program, llm, model) -> None:
    result = program("complete", "-m", model, "-p", "x", "--logprobs", "1")
    assert (result.code, llm.loaded) == (2, {})
    assert result.err_lines == [
        "error: --logprobs has no place in plain text",
        "hint: --json prints them",
    ]


@pytest.mark.usefixtures("ages")
def test_stats_and_summary_are_on_stderr(program, llm, model) -> None:
    result = program("complete", "-m", model, "-p", "x", "--stats", "-v", "-ctv", "bf16")
    assert result.out == "one two\n"
    assert result.err_lines == [
        "memory: weights 1.00 MiB (1.00 MiB mapped), K f16 512.00 KiB, V bf16 512.00 KiB, "
        "scratch 3.00 MiB (context 64)",
        "fake: llama, K rotated by 64, on cpu, 2 threads, 3 for prompts",
        "attention: fake",
        "products: q4_0: panels; f32: rows",
        "start:        0.25 s",
        "load:         0.12 s",
        "first token:  0.62 s",
        "vocabulary:   0.25 s",
        "prompt eval:  3 tokens in 0.50 s, 6.00 tokens/s",
        "eval:         2 tokens in 0.25 s, 4.00 tokens/s",
        "cache:        K f16, V bf16, 5 of 64 tokens, 1.00 MiB",
        "memory:       weights 1049600 (1048576 mapped), K 524288, V 524288, scratch 3145728 bytes",
        "attention:    fake",
        "products:     q4_0: panels; f32: rows",
        "finished:     stop, seed 42",
    ]


def test_the_summary_tells_where_codebooks_come_from(program, llm, model) -> None:
    result = program("complete", "-m", model, "-p", "x", "-v", "-ctv", "nuq4")
    assert "codebooks: V nuq4: of normal numbers, without a profile's" in result.err_lines


def test_a_model_that_is_not_there(program, tmp_path: Path) -> None:
    result = program("complete", "-m", tmp_path / "none.gguf", "-p", "x")
    assert (result.code, result.out) == (1, "")
    assert result.err == f"error: {tmp_path / 'none.gguf'}: no such file\n"


# -- with a real model


def test_greedy_text_is_the_api_s(program, tiny_model: Path) -> None:
    from localkv import LLM

    expected = LLM(tiny_model).complete("The fox", max_tokens=12, temperature=0).text
    run = ("complete", "-m", tiny_model, "-p", "The fox", "-n", "12", "--temp", "0")
    result = program(*run)
    assert (result.code, len(result.err_lines)) == (0, 1)
    assert result.out == expected + "\n"
    assert program(*run, "-ub", "2").out == expected + "\n"
    assert program(*run, "--device", "reference").out == expected + "\n"
    facts = json.loads(program(*run, "--json").out)
    assert facts["text"] == expected
    assert facts["finish_reason"] == "length"
    assert facts["usage"]["completion_tokens"] == 12
    stop = expected[3:6]
    assert program(*run, "-r", stop).out == expected[: expected.index(stop)] + "\n"


def test_a_seed_repeats_the_text(program, tiny_model: Path) -> None:
    run = ("complete", "-m", tiny_model, "-p", "The fox", "-n", "8")
    first = json.loads(program(*run, "--json").out)
    again = program(*run, "-s", first["seed"])
    assert again.out.rstrip("\n") == first["text"].rstrip("\n")
    assert program(*run, "-s", "1").out != program(*run, "-s", "2").out


def test_every_cache_type_completes(program, tiny_model: Path, tmp_path: Path) -> None:
    from localkv.cache.profile import write_kv_scales
    from localkv.loader.gguf_file import open_gguf
    from localkv.loader.model_header import model_spec
    from localkv.quant_formats import KV_FORMATS
    from support.cache_types import scales_of

    scales = tmp_path / "scales.json"
    write_kv_scales(scales, scales_of(model_spec(open_gguf(tiny_model)), 20.0, 20.0))
    for name, fmt in KV_FORMATS.items():
        run = ("complete", "-m", tiny_model, "-p", "The fox", "-n", "2", "--json")
        if fmt.scales_by_head:
            run += ("--kv-scales", scales)
        facts = json.loads(program(*run, "-ctk", name, "-ctv", "f16").out)
        assert (facts["cache"]["type_k"], facts["cache"]["type_v"]) == (name, "f16")


def test_a_cache_type_that_does_not_divide_the_head(program, conformance: Path) -> None:
    from localkv.quant_formats import KV_FORMATS

    refused = [name for name, fmt in KV_FORMATS.items() if 80 % fmt.block_size]
    path = conformance / "archs" / "llama-hd80.gguf"
    for name in refused:
        result = program("complete", "-m", path, "-p", "x", "-ctk", name)
        assert result.code == 2
        assert "head_dim 80" in result.err


def test_the_end_of_the_context(program, tiny_model: Path) -> None:
    run = ("complete", "-m", tiny_model, "-c", "16", "-p", "The fox said hello", "--ignore-eos")
    result = program(*run, "--json")
    facts = json.loads(result.out)
    assert (result.code, facts["finish_reason"], facts["context_full"]) == (0, "length", True)
    assert facts["usage"]["total_tokens"] == 16
    assert result.err_lines[1].startswith("note: the context of 16 tokens is full")


def test_a_prompt_longer_than_the_context(program, tiny_model: Path) -> None:
    result = program(
        "complete", "-m", tiny_model, "-q", "-c", "4", "-p", "The fox said hello to the owl"
    )
    assert (result.code, result.out) == (1, "")
    assert "the context holds 4" in result.err_lines[0]
    assert result.err_lines[1].startswith("hint: ")


def test_a_context_longer_than_trained_is_warned_of(program, tiny_model: Path) -> None:
    result = program("complete", "-m", tiny_model, "-c", "300", "-p", "x", "-n", "1")
    assert result.code == 0
    assert result.err_lines[1].startswith("warning: the context of 300 tokens is longer than the")


def test_an_empty_prompt_starts_from_bos(program, tiny_model: Path) -> None:
    facts = json.loads(program("complete", "-m", tiny_model, "-p", "", "-n", "2", "--json").out)
    assert facts["usage"]["prompt_tokens"] == 1


def test_nothing_to_generate(program, tiny_model: Path) -> None:
    result = program("complete", "-q", "-m", tiny_model, "-p", "x", "-n", "0")
    assert (result.code, result.out, result.err) == (0, "\n", "")


def test_control_tokens_count_on_request_only(program, tiny_model: Path) -> None:
    def prompt_tokens(*flags: str) -> int:
        run = ("complete", "-m", tiny_model, "-p", "<|user|>fox", "-n", "1", "--json")
        return json.loads(program(*run, *flags).out)["usage"]["prompt_tokens"]

    assert prompt_tokens("--parse-special") == 3
    assert prompt_tokens() > 3


def test_chat_renders_the_template(program, tiny_model: Path, tmp_path: Path) -> None:
    from localkv.loader.tokenizer import load_tokenizer

    text = "<s><|system|>be kind<|user|>fox<|assistant|>"
    tokenizer = load_tokenizer(tiny_model)
    ids = tokenizer.encode(text, add_special=False, parse_special=True)
    run = ("complete", "-m", tiny_model, "--chat", "-sys", "be kind", "-p", "fox", "-n", "1")
    assert json.loads(program(*run, "--json").out)["usage"]["prompt_tokens"] == len(ids)
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages[0].content }}|{{ messages[-1].content }}")
    facts = json.loads(program(*run, "--json", "--chat-template-file", template).out)
    assert facts["usage"]["prompt_tokens"] == len(tokenizer.encode("be kind|fox"))


def test_chat_without_a_template(program, tmp_path: Path) -> None:
    path = tiny.write_tiny_model(tmp_path / "m.gguf", template=False)
    result = program("complete", "-q", "-m", path, "--chat", "-p", "x")
    assert result.code == 2
    assert result.err_lines[0] == "error: the model has no chat template"


def test_text_needs_a_tokenizer(program, tmp_path: Path) -> None:
    path = tiny.write_tiny_model(tmp_path / "m.gguf", tokenizer=False)
    result = program("complete", "-m", path, "-p", "x")
    assert (result.code, result.out) == (1, "")
    assert result.err_lines[1:] == ["error: this file holds no tokenizer"]


def test_a_vocabulary_can_not_complete(program, tmp_path: Path) -> None:
    result = program("complete", "-m", tiny.write_vocabulary(tmp_path / "v.gguf"), "-p", "x")
    assert (result.code, result.out) == (1, "")
    assert len(result.err_lines) == 1


def test_a_logit_bias_beyond_the_vocabulary(program, tiny_model: Path) -> None:
    result = program("complete", "-m", tiny_model, "-p", "x", "-l", "99999+1")
    assert (result.code, result.out) == (2, "")
    assert "99999" in result.err
