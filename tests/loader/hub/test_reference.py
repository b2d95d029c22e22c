"""Names of models on Hugging Face, and which file of a repository they mean."""

from __future__ import annotations

import pytest

from localkv.errors import HubError, UsageError
from localkv.loader.hub.reference import (
    HubReference,
    RepoFile,
    choose,
    matching,
    model_names,
    names_the_hub,
    parse_reference,
    repo_models,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/repo", HubReference("org/repo")),
        ("org/repo:Q4_0", HubReference("org/repo", "Q4_0")),
        ("org/repo:UD-Q4_K_XL", HubReference("org/repo", "UD-Q4_K_XL")),
        ("org/repo-1.5B_x:iq4_nl", HubReference("org/repo-1.5B_x", "iq4_nl")),
        ("org/repo/a/b.gguf", HubReference("org/repo", file="a/b.gguf")),
        ("hf.co/org/repo", HubReference("org/repo")),
        ("HF.co/org/repo:q8_0", HubReference("org/repo", "q8_0")),
        ("huggingface.co/org/repo/x.gguf", HubReference("org/repo", file="x.gguf")),
        ("https://huggingface.co/org/repo", HubReference("org/repo")),
        ("https://huggingface.co/org/repo/", HubReference("org/repo")),
        ("https://hf.co/org/repo:Q6_K", HubReference("org/repo", "Q6_K")),
        ("hf://org/repo:F16", HubReference("org/repo", "F16")),
        ("https://huggingface.co/org/repo/tree/v1", HubReference("org/repo", revision="v1")),
        (
            "https://huggingface.co/org/repo/blob/main/d/x%20y.gguf",
            HubReference("org/repo", file="d/x y.gguf"),
        ),
        (
            "https://huggingface.co/org/repo/resolve/refs%2Fpr%2F1/x.gguf?download=true",
            HubReference("org/repo", file="x.gguf", revision="refs/pr/1"),
        ),
    ],
)
def test_names(text: str, expected: HubReference) -> None:
    assert parse_reference(text) == expected
    assert parse_reference(str(expected)) == HubReference(
        expected.repo, expected.quant, expected.file
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "repo",
        "/abs/path",
        "./org/repo",
        "../repo",
        "org/",
        "org/repo:",
        "org/repo:Q4 0",
        "org/repo:Q4/0",
        "a/b/c",
        "a/b/c.bin",
        "a--b/c",
        "a/..",
        "a\\b/c",
        "org/repo:Q4_0/x.gguf",
        "hf.co/repo",
        "https://huggingface.co/",
        "https://huggingface.co/org/repo/blob/main/README.md",
        "ä/b",
        "org/repo/../x.gguf",
        "org/repo/a//x.gguf",
        "org/repo/.gguf",
        "https://huggingface.co/org/repo/blob/main/a%1b%5bx.gguf",
    ],
)
def test_what_is_no_name(text: str) -> None:
    with pytest.raises(UsageError, match="does not name a model on Hugging Face"):
        parse_reference(text)


def test_a_url_elsewhere_is_refused() -> None:
    with pytest.raises(UsageError, match="is not on Hugging Face"):
        parse_reference("https://example.com/org/repo")


def test_a_file_given_apart() -> None:
    assert parse_reference("org/repo", "x.gguf") == HubReference("org/repo", file="x.gguf")
    assert parse_reference("org/repo/x.gguf", "x.gguf").file == "x.gguf"
    for text in ("org/repo:Q4_0", "org/repo/y.gguf"):
        with pytest.raises(UsageError, match="name two files"):
            parse_reference(text, "x.gguf")


@pytest.mark.parametrize(
    "file", ["", "x", "../x.gguf", "a\nx.gguf", "/x.gguf", "x" * 300 + ".gguf"]
)
def test_a_file_that_no_repository_has(file: str) -> None:
    with pytest.raises(UsageError, match="is not the path of a GGUF file"):
        parse_reference("org/repo", file)


def test_what_can_only_be_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    assert names_the_hub("hf.co/org/repo")
    assert names_the_hub("https://example.com/x.gguf")
    assert not names_the_hub("org/repo")
    assert not names_the_hub("hf.cologne/model.gguf")
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example:8443")
    assert parse_reference("https://mirror.example:8443/org/repo").repo == "org/repo"


def models(*paths: str) -> list:
    return repo_models(RepoFile(path, 1000 + i, "0" * 64) for i, path in enumerate(paths))


def chosen(reference: str, *paths: str, file: str | None = None) -> str:
    return choose(models(*paths), parse_reference(reference, file), "there").path


def test_the_default_is_q4_k_m_then_q8_0_then_the_only_one() -> None:
    assert chosen("o/r", "x-Q8_0.gguf", "x-q4_k_m.gguf", "x-F16.gguf") == "x-q4_k_m.gguf"
    assert chosen("o/r", "x-Q4_0.gguf", "x-Q8_0.gguf", "x-F16.gguf") == "x-Q8_0.gguf"
    assert chosen("o/r", "x-Q2_K.gguf", "mmproj-Q8_0.gguf", "README.md") == "x-Q2_K.gguf"
    with pytest.raises(HubError, match="o/r can mean 2 models in there") as caught:
        chosen("o/r", "x-Q2_K.gguf", "x-Q6_K.gguf")
    assert caught.value.hint == "there is o/r:Q2_K (1000 B), o/r:Q6_K (1001 B)"


@pytest.mark.parametrize(
    ("quant", "path"),
    [
        ("q4_k_m", "m.Q4_K_M.gguf"),
        ("Q4_K_S", "m-Q4_K_S-00001-of-00002.gguf"),
        ("F16", "m-f16.gguf"),
        ("bf16", "BF16/m.gguf"),
        ("Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
        ("Q8_0", "m-Q8_0.gguf"),
        ("UD-Q8_0", "m-UD-Q8_0.gguf"),
        ("nl", None),
        ("Q4_K", None),
        ("Q4", None),
    ],
)
def test_a_type_in_any_case_and_whole(quant: str, path: str | None) -> None:
    there = [
        "BF16/m.gguf",
        "m-IQ4_NL.gguf",
        "m-Q4_K_S-00001-of-00002.gguf",
        "m-Q4_K_S-00002-of-00002.gguf",
        "m-Q8_0.gguf",
        "m-UD-Q4_K_XL.gguf",
        "m-UD-Q8_0.gguf",
        "m-f16.gguf",
        "m.Q4_K_M.gguf",
    ]
    if path is not None:
        assert chosen(f"o/r:{quant}", *there) == path
        return
    with pytest.raises(HubError) as caught:
        chosen(f"o/r:{quant}", *there)
    assert "o/r:UD-Q4_K_XL (1005 B)" in str(caught.value.hint)


def test_split_models_are_whole_or_not_there() -> None:
    found = models(
        "a-00002-of-00002.gguf",
        "a-00001-of-00002.gguf",
        "b-00001-of-00003.gguf",
        "b-00003-of-00003.gguf",
        "c-00001-of-00001.gguf",
    )
    assert [[file.path for file in model.files] for model in found] == [
        ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"],
        ["c-00001-of-00001.gguf"],
    ]
    assert found[0].n_bytes == 2001


def test_a_file_by_name() -> None:
    there = ("x-Q4_K_M.gguf", "mmproj-x.gguf", "d/y-00001-of-00002.gguf", "d/y-00002-of-00002.gguf")
    assert chosen("o/r", *there, file="MMPROJ-x.gguf") == "mmproj-x.gguf"
    assert chosen("o/r/d/y-00002-of-00002.gguf", *there) == "d/y-00001-of-00002.gguf"
    with pytest.raises(HubError, match=r"o/r has no file z\.gguf in there") as caught:
        chosen("o/r", *there, file="z.gguf")
    assert "o/r:Q4_K_M" in str(caught.value.hint)


def test_a_repository_without_models() -> None:
    with pytest.raises(HubError, match="o/r has no GGUF file in there"):
        chosen("o/r", "model.safetensors")


def test_every_model_has_a_name_that_means_it() -> None:
    there = models(
        "a-Q4_0.gguf",
        "b-Q4_0.gguf",
        "a-Q8_0.gguf",
        "plain.gguf",
        "mmproj-F16.gguf",
        "a-IQ4_NL.gguf",
    )
    names = model_names("o/r", there)
    assert sorted(names) == [
        "o/r/a-Q4_0.gguf",
        "o/r/b-Q4_0.gguf",
        "o/r/mmproj-F16.gguf",
        "o/r/plain.gguf",
        "o/r:IQ4_NL",
        "o/r:Q8_0",
    ]
    for name, model in zip(names, there, strict=True):
        assert matching(there, parse_reference(name)) == [model]
