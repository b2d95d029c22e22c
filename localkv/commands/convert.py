"""`localkv convert`: a Hugging Face checkpoint to a GGUF file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from localkv.commands.options import OUTPUT, Panel, quiet_option
from localkv.commands.output import ProgressLine, TextOutput, note, say
from localkv.commands.parsing import TEXT, Argument, Choice, Command
from localkv.errors import UsageError, byte_size, counted, printable

if TYPE_CHECKING:
    from localkv.conversion.convert import Plan
    from localkv.loader.gguf_writer import NewTensor

CONVERT = Panel("Conversion")


def _convert(*, folder: str, outfile: str | None, outtype: str, dry_run: bool, quiet: bool) -> None:
    from localkv.conversion.convert import plan_conversion
    from localkv.loader.gguf_writer import check_room

    plan = plan_conversion(Path(folder), outtype)
    for line in plan.notes:
        note(line)
    path = Path(outfile) if outfile is not None else Path(folder) / plan.file_name
    if path.is_dir():
        path /= plan.file_name
    if dry_run:
        with TextOutput(None) as out:
            out.write("\n".join(_lines(plan)))
        return
    if path.suffix != ".gguf":
        raise UsageError(
            f"{printable(path)} is not the name of a GGUF file",
            hint=f"{printable(path.with_name(path.name + '.gguf'))}",
        )
    check_room(path, plan.tensors)
    started = time.monotonic()
    with _Progress(plan) as progress:
        plan.write(path, progress.step)
    if not quiet:
        seconds = time.monotonic() - started
        say(
            f"{counted(len(plan.tensors), 'tensor')}, {byte_size(plan.n_bytes)}, in {seconds:.1f} s"
        )
    with TextOutput(None) as out:
        out.write(printable(path))


def _lines(plan: Plan) -> list[str]:
    """Names, types and shapes of tensors, and the file's size."""
    width = max(len(tensor.name) for tensor in plan.tensors)
    lines = [
        f"{tensor.name:<{width}}  {tensor.format.name:<5} {'x'.join(map(str, tensor.shape))}"
        for tensor in plan.tensors
    ]
    return [*lines, f"{plan.file_name}: {byte_size(plan.n_bytes)}"]


class _Progress(ProgressLine):
    """Shows which tensor is written, and how much of the file is."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._n_bytes, self._done = max(1, plan.n_bytes), 0
        self._tensor: NewTensor | None = None
        self._shown = 0.0

    def step(self, tensor: NewTensor, n_bytes: int) -> None:
        if self._tensor is not None and self._tensor is not tensor:
            self._done += self._tensor.n_bytes
        self._tensor, now = tensor, time.monotonic()
        if now - self._shown > 0.1:
            self._shown = now
            share = (self._done + n_bytes) / self._n_bytes
            self.show(f"writing {tensor.name} ({share:.0%} of {byte_size(self._n_bytes)})")


convert = Command(
    "convert",
    examples=[
        ("A model as it is, with weights of 16 bits", "localkv convert ./Qwen3-0.6B"),
        (
            "In 8 bits, under a name",
            "localkv convert ./Qwen3-0.6B --outtype q8_0 --outfile qwen3.gguf",
        ),
        ("What the file would hold", "localkv convert ./Qwen3-0.6B --dry-run"),
    ],
    params=[
        Argument(
            ["folder"],
            required=True,
            type=TEXT,
            metavar="FOLDER",
            help="A checkpoint: config.json, safetensors files, and the tokenizer's files.",
        ),
        OUTPUT.option(
            "-o --outfile",
            metavar="FILE",
            help="The file to write, or a folder for it; by default a name of the model's in "
            "FOLDER.",
        ),
        CONVERT.option(
            "--outtype",
            type=Choice(["auto", "f32", "f16", "bf16", "q8_0"]),
            default="auto",
            help="Type of the matrices; auto takes the checkpoint's.",
        ),
        CONVERT.flag("--dry-run", help="List tensors and sizes, and write nothing."),
        quiet_option("Print the file's name only."),
    ],
    callback=_convert,
    help="Make a GGUF file of a Hugging Face checkpoint.\n\n"
    "The tokenizer, the chat template and recommended sampling come along. Weights are read from "
    "safetensors files, one tensor after the other.",
    epilog="An interrupted conversion leaves nothing.",
)
