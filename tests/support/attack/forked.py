"""Forks of a process with a model, to be run as a program. Arguments: a model file."""

from __future__ import annotations

import atexit
import faulthandler
import json
import multiprocessing
import os
import sys

from localkv import LLM, LocalKVError

PROMPT = "Once upon a time there was a fox"
OPTIONS = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}


def text_of(path: str) -> str:
    return LLM(path, n_ctx=64, n_threads=2).complete(PROMPT, **OPTIONS).text


def complaint(llm: LLM | str) -> str:
    """What a fork hears that uses the model, or loads one by its path."""
    try:
        if isinstance(llm, str):
            text_of(llm)
        else:
            llm.complete(PROMPT, **OPTIONS)
    except LocalKVError as error:
        return str(error)
    return "nothing"


def in_fork(call: object, argument: object) -> str:
    """By `multiprocessing`, which is what users have."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply_async(call, (argument,)).get(60)  # type: ignore[arg-type]


def bare_fork(llm: LLM) -> int:
    """Exit code of a fork that uses the model and runs all that is to be run at exit."""
    process = os.fork()
    if process == 0:
        code = 7 if complaint(llm).startswith("this process is a fork of one") else 1
        atexit._run_exitfuncs()
        os._exit(code)  # faulthandler's end would wait for its thread, which is not here
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


_LLM: LLM | None = None


def use_global(_: object) -> str:
    assert _LLM is not None
    return complaint(_LLM)


def main(path: str) -> None:
    global _LLM
    faulthandler.dump_traceback_later(150, exit=True)
    before = in_fork(text_of, path)  # the parent has loaded none yet
    _LLM = LLM(path, n_ctx=64, n_threads=2)
    text = _LLM.complete(PROMPT, **OPTIONS).text
    assert before == text
    said = [in_fork(use_global, None), in_fork(complaint, path)]
    for line in said:
        assert line.startswith(f"this process is a fork of one ({os.getpid()})"), line
        assert "spawn" in line
    assert bare_fork(_LLM) == 7
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(text_of, (path,)) == text
    assert _LLM.complete(PROMPT, **OPTIONS).text == text
    print(json.dumps({"refused": 3, "worked": 3}))


if __name__ == "__main__":
    main(*sys.argv[1:])
