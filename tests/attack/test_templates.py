"""Whatever a chat template asks for, it gets so much time and memory and no more; Ctrl-C works."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from localkv.errors import LocalKVError, UsageError
from localkv.loader import template_process
from localkv.loader.chat_template import ChatTemplate, ChatTemplateError
from localkv.loader.template_program import MAX_MEMORY
from localkv.system.limited_child import ALARM_SECONDS
from localkv.system.limited_process import MOST_IDLE
from support.attack.hostile_templates import CASES, MEMORY, TIME, damaged, random_template
from support.waiting import runs, wait_for

FAST_SECONDS, FAST_SEEDS, FAST_STEP = 0.2, 60, 2
LONG_SECONDS, LONG_SEEDS, LONG_STEP = 1.0, 3000, 1

GROWTH = 300 << 20
"""What this process may take in addition, in bytes; a template is refused a gigabyte."""

CONVERSATION = [{"role": "user", "content": "hello"}]
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
UNENDING = "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4


def render(source: str) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(CONVERSATION)


@pytest.fixture
def memory_of_this_process() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < GROWTH


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "RENDER_SECONDS", FAST_SECONDS)


def outcome(source: str) -> str:
    """What is said of a template, empty if it is rendered; in time, in one line, with a hint."""
    started = time.monotonic()
    said, hint = "", None
    try:
        render(source)
    except ChatTemplateError as error:
        said, hint = error.message, error.hint
    assert "\n" not in said
    assert len(said) < 500
    limits = "takes more than|at most|ended the process"
    assert (hint is not None) == bool(re.search(limits, said)), said
    assert time.monotonic() - started < template_process.RENDER_SECONDS + 5
    return said


def check_cases(step: int) -> set[str]:
    """Render each `step`th; returns those that took too much time."""
    late = set()
    for name, (source, expected) in list(CASES.items())[::step]:
        said = outcome(source)
        assert re.search(f"{expected}|{TIME}", said), (name, said)
        if re.search(TIME, said):
            late.add(name)
    assert "hello" in render(CHATML)
    return late


@pytest.mark.slow
@pytest.mark.usefixtures("memory_of_this_process", "fast")
def test_no_template_takes_all_time_or_memory() -> None:
    check_cases(FAST_STEP)


@pytest.mark.attack
@pytest.mark.usefixtures("memory_of_this_process")
def test_what_each_template_is_refused() -> None:
    late = check_cases(LONG_STEP)
    assert late >= {name for name, (_, expected) in CASES.items() if expected == TIME}


def check_seeds(n_seeds: int) -> None:
    n_rendered = 0
    for seed in range(n_seeds):
        source = random_template(seed)
        if seed % 4 == 3:
            source = damaged(source, seed)
        n_rendered += not outcome(source)
    assert 0.05 < n_rendered / n_seeds < 0.95  # neither all refused nor all harmless
    assert "hello" in render(CHATML)


@pytest.mark.slow
@pytest.mark.usefixtures("memory_of_this_process", "fast")
def test_random_templates() -> None:
    check_seeds(FAST_SEEDS)


@pytest.mark.attack
@pytest.mark.usefixtures("memory_of_this_process")
def test_many_random_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "RENDER_SECONDS", LONG_SECONDS)
    check_seeds(LONG_SEEDS)


@pytest.mark.usefixtures("memory_of_this_process")
def test_memory() -> None:
    with pytest.raises(ChatTemplateError, match=MEMORY) as raised:
        render("{{ 'a' * 10**10 }}")
    assert raised.value.hint == "use another template (--chat-template-file)"
    template_process.start_ahead()
    render(CHATML)
    limits = Path(f"/proc/{idle_pid()}/limits").read_text()
    assert re.search(rf"Max address space +{MAX_MEMORY} +{MAX_MEMORY} ", limits)


@pytest.mark.usefixtures("fast")
def test_time() -> None:
    with pytest.raises(ChatTemplateError, match=r"takes more than 0\.2 s") as raised:
        render(UNENDING)
    assert raised.value.hint == "use another template (--chat-template-file)"
    assert "hello" in render(CHATML)


def test_a_prompt_may_be_longer_for_a_longer_conversation() -> None:
    repeated = ChatTemplate("{{ messages[0].content * 6 }}", bos_token="", eos_token="")
    assert len(repeated.render([{"content": "a" * 10**6}])) == 6 * 10**6
    with pytest.raises(ChatTemplateError, match=r"makes more than .* characters of this conv"):
        render("{{ 'a' * 6 * 10**6 }}")


def test_a_conversation_that_is_nested_too_deeply() -> None:
    messages: list[object] = []
    for _ in range(10_000):
        messages = [messages]
    with pytest.raises(UsageError, match="nested too deeply"):
        ChatTemplate(CHATML, bos_token="", eos_token="").render(messages)


# --- the process


def idle_pid() -> int:
    return template_process.processes.idle[-1].pid


def test_one_process_renders_all_templates() -> None:
    render(CHATML)
    first = idle_pid()
    for source in (CHATML, "{{ messages[0].content }}", "{{ 1 / 0 }}"):
        outcome(source)
    assert idle_pid() == first


def test_a_process_that_was_killed_is_replaced() -> None:
    render(CHATML)
    killed = idle_pid()
    os.kill(killed, signal.SIGKILL)
    while template_process.processes.idle[-1].is_alive:
        time.sleep(0.01)
    assert "hello" in render(CHATML)
    assert idle_pid() != killed


def test_many_threads_render_at_once() -> None:
    wrong: list[object] = []

    def work(number: int) -> None:
        for i in range(20):
            text = f"{number} {i}"
            chat = ChatTemplate("{{ messages[0].content }}", bos_token="", eos_token="")
            try:
                if (found := chat.render([{"content": text}])) != text:
                    wrong.append((found, text))
            except LocalKVError as error:
                wrong.append(error)

    threads = [Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert 1 <= len(template_process.processes.idle) <= MOST_IDLE


def run(program: str, **options: object) -> subprocess.Popen[str]:
    setting = "from localkv.loader.chat_template import ChatTemplate\nimport os, sys\n"
    setting += "def render(source):\n"
    setting += "    chat = ChatTemplate(source, bos_token='', eos_token='')\n"
    setting += "    return chat.render([{'role': 'user', 'content': 'hello'}])\n"
    return subprocess.Popen(
        [sys.executable, "-c", setting + program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[call-overload]
    )


SAY_CHILD = """
from localkv.loader import template_process
render('a')
print(template_process.processes.idle[0].pid, flush=True)
"""


def test_ctrl_c_ends_a_template() -> None:
    process = run(f"{SAY_CHILD}\nrender({UNENDING!r})")
    assert process.stdout is not None
    child = int(process.stdout.readline())
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=3)
    assert "KeyboardInterrupt" in errors
    wait_for(lambda: not runs(child), seconds=1)


def test_no_process_is_left_behind() -> None:
    process = run(SAY_CHILD)
    output, errors = process.communicate(timeout=30)
    assert not errors
    wait_for(lambda: not runs(int(output)), seconds=1)


@pytest.mark.parametrize(
    ("then", "seconds"),
    [
        ("input()", 2.0),
        pytest.param(f"render({UNENDING!r})", ALARM_SECONDS + 2.0, marks=pytest.mark.attack),
    ],
)
def test_no_process_outlives_one_that_is_killed(then: str, seconds: float) -> None:
    process = run(f"{SAY_CHILD}\n{then}", stdin=subprocess.PIPE)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    time.sleep(0.3)
    process.kill()
    wait_for(lambda: not runs(child), seconds=seconds)
    process.communicate()


def test_a_process_and_its_fork_render_both() -> None:
    program = f"""{SAY_CHILD}
pid = os.fork()
for i in range(50):
    assert render('{{{{ messages[0].content }}}}' + str(os.getpid())) == 'hello' + str(os.getpid())
if pid:
    assert os.waitpid(pid, 0)[1] == 0
    print('done')
"""
    output, errors = run(program).communicate(timeout=60)
    assert (output.split()[1:], errors) == (["done"], "")


def test_no_room_for_a_process() -> None:
    program = "sys.executable = '/nowhere/python'\nrender('a')"
    _, errors = run(program).communicate(timeout=30)
    last = errors.splitlines()[-1]
    assert "the process that renders chat templates can't be started: No such file" in last
