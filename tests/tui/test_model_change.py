"""Going over to another model: what is checked first, and what becomes of a message meanwhile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from textual.widgets import Input, OptionList

from localkv.chat.model_choice import Models
from localkv.errors import DoesNotFitError, ModelFileError
from localkv.tui.dialogs import ModelScreen
from localkv.tui.widgets.engine_view import LoadStrip
from support.chat_pilot import FakeModels, user
from support.fake_engine import FakeEngine, Wait

pytestmark = pytest.mark.slow


async def test_a_model_that_can_not_be_loaded_leaves_the_engine_alone() -> None:
    large = DoesNotFitError("K and V take 9 GiB, but 2 GiB is available")
    first = FakeEngine(["Still here."])
    async with user(first, models=FakeModels(errors={"large.gguf": large})) as me:
        await me.send("/model large.gguf")
        await me.until(lambda: "take 9 GiB" in me.notes)
        assert "tiny-tales stays loaded" in me.notes
        assert me.engines == [first]
        assert not first.closed
        await me.ask("Hi")
        assert me.texts == ["Hi", "Still here."]


async def test_a_load_that_fails_returns_to_the_last_model() -> None:
    broken = FakeEngine(loading=[ModelFileError("b.gguf: tensors are missing")])
    async with user(FakeEngine(), broken, FakeEngine(["Back."])) as me:
        await me.send("/model b.gguf")
        await me.until(lambda: len(me.engines) == 3)
        await me.ready()
        assert [wanted.model for wanted in me.asked_for] == ["tiny.gguf", "b.gguf", "tiny.gguf"]
        assert "tensors are missing; back to tiny-tales" in me.notes
        await me.ask("Hi")
        assert me.texts == ["Hi", "Back."]


async def test_if_the_last_model_is_gone_too_that_is_said() -> None:
    broken = [FakeEngine(loading=[ModelFileError(f"gone {n}")]) for n in (1, 2)]
    async with user(FakeEngine(), *broken) as me:
        await me.send("/model b.gguf")
        await me.until(lambda: me.chat.query_one(LoadStrip).has_class("-error"))
        assert "gone 2" in me.rendered("#load-strip")
        assert len(me.engines) == 3


async def test_a_message_waits_for_an_engine() -> None:
    broken = FakeEngine(loading=[ModelFileError("tiny.gguf: the file is empty")])
    async with user(broken, FakeEngine(["At last."]), wait=False) as me:
        await me.until(lambda: "the file is empty" in me.rendered("#load-strip"))
        await me.send("Are you there?")
        await me.until(lambda: "this is answered then" in me.notes)
        await me.send("/model other.gguf")
        await me.until(lambda: me.texts == ["Are you there?", "At last."])
        await me.ready()


async def test_a_message_that_waits_is_answered_after_a_failed_change() -> None:
    loading = Wait()
    broken = FakeEngine(loading=[loading, ModelFileError("b.gguf: tensors are missing")])
    async with user(FakeEngine(), broken, FakeEngine(["Here."])) as me:
        await me.send("/model b.gguf")
        await me.until(loading.reached.is_set)
        await me.send("Hello?")
        loading.over.set()
        await me.until(lambda: me.texts == ["Hello?", "Here."])


async def test_models_are_chosen_from_a_list() -> None:
    models = FakeModels("models/tiny.gguf", "org/repo:Q8_0", "org/other:Q4_0")
    async with user(FakeEngine(), FakeEngine(), models=models) as me:
        await me.send("/model")
        await me.until(lambda: isinstance(me.app.screen, ModelScreen))
        options = me.app.screen.query_one(OptionList)
        await me.until(lambda: options.option_count == 3)
        await me.press(*"repo")
        assert options.option_count == 1
        await me.press("enter")
        await me.until(lambda: len(me.engines) == 2)
        assert me.asked_for[1].model == "org/repo:Q8_0"


async def test_models_in_the_folder_of_the_open_one_are_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.gguf", "b.gguf", "b-mmproj.gguf", "notes.txt"):
        (tmp_path / name).write_bytes(b"GGUF")
    monkeypatch.setattr("localkv.loader.local_models.own_shelves", list)
    monkeypatch.setattr("localkv.loader.hub.cache.cached_models", list)
    monkeypatch.chdir(tmp_path)
    models = Models()
    monkeypatch.setattr(models, "check", lambda *_, **__: None)
    async with user(FakeEngine(), FakeEngine(), FakeEngine(), models=models) as me:
        me.chat.options = replace(me.chat.options, model=str(tmp_path / "a.gguf"))
        await me.send("/model")
        await me.until(lambda: isinstance(me.app.screen, ModelScreen))
        options = me.app.screen.query_one(OptionList)
        await me.until(lambda: options.option_count == 2)
        shown = [str(options.get_option_at_index(at).prompt) for at in range(2)]
        assert ["a.gguf" in shown[0], "loaded" in shown[0]] == [True, True]
        await me.press("down", "enter")
        await me.until(lambda: len(me.engines) == 2)
        assert me.asked_for[1].model == str(tmp_path / "b.gguf")
        await me.ready()
        await me.send("/model a")  # the name is enough
        await me.until(lambda: len(me.engines) == 3)
        assert me.asked_for[2].model == str(tmp_path / "a.gguf")


async def test_a_path_can_be_typed_into_the_list() -> None:
    async with user(FakeEngine(), FakeEngine()) as me:
        await me.send("/model")
        await me.until(lambda: isinstance(me.app.screen, ModelScreen))
        me.app.screen.query_one(Input).value = "elsewhere.gguf"
        await me.pilot.pause()
        await me.press("enter")
        await me.until(lambda: len(me.engines) == 2)
        assert me.asked_for[1].model == "elsewhere.gguf"


async def test_names_of_models_are_hinted_at_and_completed() -> None:
    models = FakeModels("models/tales-4M-F16.gguf", "models/tales-4M-Q8_0.gguf", "org/repo:Q8_0")
    async with user(FakeEngine(), FakeEngine(), models=models) as me:
        await me.write("/model mo")
        await me.until(lambda: "models/tales-4M-F16.gguf" in me.rendered("#hints"))
        assert "org/repo" not in me.rendered("#hints")
        await me.press("tab")
        await me.until(lambda: me.prompt.text == "/model models/tales-4M-")
        await me.write("Q")
        await me.press("tab")
        await me.until(lambda: me.prompt.text == "/model models/tales-4M-Q8_0.gguf")
        await me.press("enter")
        await me.until(lambda: len(me.engines) == 2)


async def test_no_model_is_changed_while_an_answer_is_written() -> None:
    pause = Wait()
    async with user(FakeEngine(["One", pause])) as me:
        await me.send("Count")
        await me.until(pause.reached.is_set)
        await me.send("/model other.gguf")
        await me.until(lambda: "First Esc" in me.notes)
        pause.over.set()
        await me.ready()
        assert len(me.engines) == 1
