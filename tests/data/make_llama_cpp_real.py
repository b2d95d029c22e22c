"""Write llama_cpp_real.json: what llama.cpp makes of two published models, for tests/real.

Run it with the folder of the models (`.ci/real_models FOLDER`) and the folder of llama.cpp's
programs (llama-perplexity, llama-tokenize and llama-completion, built with their own defaults):

    python tests/data/make_llama_cpp_real.py FOLDER LLAMA_BIN

The perplexity is `llama-perplexity -c 512` of handbook.txt, divergences are
`-c 2048 --chunks 2 --kl-divergence` with flash attention, answers are greedy.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
MODELS = ("SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m-q4_k_m.gguf")
PAIRS = (("q8_0", "q8_0"), ("q8_0", "q4_0"), ("q4_0", "q4_0"))
PROMPTS = (
    "The capital of France is",
    "Water boils at",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
)
N_PREDICT = 32
SCRIPTS = {
    "Latin": "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich; señor, ça va?",
    "Cyrillic": "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "Greek": "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "Arabic": "نص حكيم له سر قاطع وذو شأن عظيم.",
    "Hebrew": "דג סקרן שט בים מאוכזב ולפתע מצא חברה.",
    "Devanagari": "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश।",
    "Han": "天地玄黃,宇宙洪荒。日月盈昃,辰宿列張。",
    "Kana": "いろはにほへと ちりぬるを。アイウエオ。",
    "Hangul": "키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다.",
    "Thai": "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์เดรัจฉาน",
}


def main() -> None:
    folder, programs = Path(sys.argv[1]), Path(sys.argv[2])
    version = run(programs / "llama-completion", "--version")
    found = {"llama.cpp": re.search(r"version: .*", version).group(), "models": {}}
    for name in MODELS:
        found["models"][name] = of_model(folder / name, programs)
        print(json.dumps(found["models"][name], ensure_ascii=False)[:400])
    text = json.dumps(found, ensure_ascii=False, indent=1)
    (HERE / "llama_cpp_real.json").write_text(text + "\n")


def of_model(model: Path, programs: Path) -> dict:
    perplexity = (programs / "llama-perplexity", "-m", model, "-f", HERE / "handbook.txt")
    out = run(*perplexity, "-c", 512)
    found = {
        "perplexity": float(re.search(r"Final estimate: PPL = ([\d.]+)", out).group(1)),
        "divergence": {},
        "tokens": {},
        "answers": {},
    }
    with tempfile.TemporaryDirectory() as scratch:
        base = (*perplexity, "-c", 2048, "--kl-divergence-base", Path(scratch) / "base")
        run(*base, "--chunks", 2, "-fa", "on")
        for pair in PAIRS:
            types = ("-ctk", pair[0], "-ctv", pair[1], "-fa", "on")
            out = run(*base, "--chunks", 2, "--kl-divergence", *types)
            kld = re.search(r"Mean\s+KLD:\s+([\d.]+)", out).group(1)
            found["divergence"]["/".join(pair)] = float(kld)
    for script, text in SCRIPTS.items():
        ids = run(programs / "llama-tokenize", "-m", model, "-p", text, "--ids", "--log-disable")
        found["tokens"][script] = [text, json.loads(ids.strip().splitlines()[-1])]
    for prompt in PROMPTS:
        answer = ("-p", prompt, "-n", N_PREDICT, "--temp", 0, "-no-cnv", "--no-display-prompt")
        completion = (programs / "llama-completion", "-m", model, *answer, "--no-warmup")
        found["answers"][prompt] = run(*completion, errors=False).rstrip("\n")
    return found


def run(*arguments: object, errors: bool = True) -> str:
    done = subprocess.run(
        [str(argument) for argument in arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if errors else subprocess.DEVNULL,
        text=True,
        check=True,
    )
    return done.stdout


if __name__ == "__main__":
    main()
