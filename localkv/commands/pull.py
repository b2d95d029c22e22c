"""`localkv pull`: fetch a model from Hugging Face. stdout gets the path of the file."""

from __future__ import annotations

from localkv.commands.model_file import fetched
from localkv.commands.options import hf_file_option, reference_argument
from localkv.commands.output import TextOutput, note
from localkv.commands.parsing import Command


def _run(*, reference: str, hf_file: str | None) -> None:
    from localkv.loader.hub.download import Download
    from localkv.loader.hub.find import find
    from localkv.loader.hub.reference import parse_reference

    found = find(parse_reference(reference, hf_file), update=True)
    is_new = isinstance(found, Download) and found.missing
    model = fetched(found)
    if not is_new:
        note(f"{model.name} is up to date")
    with TextOutput(None) as out:
        out.write(str(model.path))


pull = Command(
    "pull",
    examples=[
        ("The usual file of a repository", "localkv pull ORG/REPO"),
        ("One of a certain type of weights", "localkv pull ORG/REPO:Q8_0"),
        ("And talk with it", "localkv chat -m ORG/REPO:Q8_0"),
    ],
    params=[
        reference_argument("Or ORG/REPO/FILE.gguf, or an address on huggingface.co."),
        hf_file_option(),
    ],
    callback=_run,
    help="Fetch a model from Hugging Face, or bring it up to date.\n\n"
    "QUANT is a type of weights such as Q8_0, in any case; without it Q4_K_M is fetched, else "
    "Q8_0, else the only model there is. Split files are fetched whole. An interrupted "
    "download continues where it stopped, and every file's checksum is verified.",
    epilog="HF_HOME (the cache), HF_TOKEN (for private and gated models), HF_ENDPOINT and "
    "HF_HUB_OFFLINE mean the same as to Hugging Face's own tools.",
)
