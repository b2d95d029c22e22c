"""What may come in: names, origins, keys, bodies; by requests to the application itself."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from localkv.errors import UsageError
from localkv.server import access
from localkv.server.access import ApiKeys, checked_origins, given_key, read_keys
from localkv.server.app import application
from localkv.server.http_server import check_exposure
from support.front import models_of

KEY = {"authorization": "Bearer sesame"}


def _client(host: str = "127.0.0.1:8080", **settings: object) -> TestClient:
    return TestClient(
        application(models_of(**settings)), base_url=f"http://{host}", raise_server_exceptions=False
    )


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8080", 200),
        ("127.0.0.1", 200),
        ("[::1]:8080", 200),
        ("box.example:8080", 200),
        ("192.168.1.5:8080", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
    ],
)
def test_a_host_that_is_rebound_is_refused(host: str, status: int):
    client = _client(allowed_hosts=("box.example",))
    assert client.get("/v1/models", headers={"host": host}).status_code == status


def test_with_keys_any_name_will_do():
    client = _client("proxy.example", api_keys=frozenset({"sesame"}))
    assert client.get("/v1/models", headers=KEY).status_code == 200


def test_pages_of_strangers_may_not_call():
    client = _client()
    assert client.get("/v1/models", headers={"origin": "http://127.0.0.1:8080"}).status_code == 200
    for origin in ("https://evil.example", "null", "http://127.0.0.1:81"):
        answer = client.get("/v1/models", headers={"origin": origin})
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers


def test_pages_that_are_named_may_call_and_see_errors():
    client = _client(cors=("https://chat.example",), api_keys=frozenset({"sesame"}))
    origin = {"origin": "https://chat.example"}
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "x-api-key"}
    preflight = client.options("/v1/chat/completions", headers={**origin, **asked})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
    refused = client.get("/v1/models", headers=origin)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://chat.example"
    assert "access-control-allow-credentials" not in refused.headers
    other = client.get("/v1/models", headers={"origin": "https://evil.example", **KEY})
    assert other.status_code == 403


def test_pages_of_this_machine_may_call_if_they_are_named():
    client = _client(cors=("localhost",))
    asked = {"access-control-request-method": "POST"}
    for origin in (
        "http://localhost",
        "https://localhost:81",
        "http://127.0.0.1:9",
        "http://[::1]",
    ):
        preflight = client.options("/v1/models", headers={"origin": origin, **asked})
        assert preflight.headers["access-control-allow-origin"] == origin
        answer = client.get("/v1/models", headers={"origin": origin})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)
    for origin in ("https://evil.example", "http://localhost.evil.example", "http://localhost:a"):
        answer = client.get("/v1/models", headers={"origin": origin})
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers


def test_origins_are_as_browsers_write_them():
    given = ("https://Chat.example", "http://[::1]:80", "app://obsidian.md", "*", "localhost")
    assert checked_origins(given) == (given[0].lower(), *given[1:])
    for origin in (
        "chat.example",
        "https://chat.example/",
        "http://",
        "http://a b",
        "//a",
        "https:",
    ):
        with pytest.raises(UsageError, match="is no origin"):
            checked_origins([origin])


def test_paths_say_what_they_take():
    client = _client()
    answer = client.get("/v1/chat/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert "this path takes POST" in answer.json()["error"]["message"]
    answer = client.post("/v1/chat/completions")
    assert (answer.status_code, "body is empty" in answer.text) == (400, True)
    assert client.post("/v1/nothing").status_code == 404


def test_a_model_by_its_name():
    client = _client(aliases=("org/two",))
    (listed,) = client.get("/v1/models").json()["data"]
    for name in ("tales", "org/two"):
        assert client.get(f"/v1/models/{name}").json() == listed
    assert client.get("/v1/models/three").status_code == 404


def test_keys():
    client = _client(api_keys=frozenset({"sesame", "other"}))
    for headers in (KEY, {"x-api-key": "other"}, {"authorization": "bearer  sesame "}):
        assert client.get("/v1/models", headers=headers).status_code == 200
    for headers in ({}, {"x-api-key": "sesam"}, {"authorization": "Basic sesame"}):
        answer = client.get("/v1/models", headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "authentication_error"
        assert "sesam" not in answer.text
    assert client.get("/health").status_code == 503  # no engine, and no key needed


def test_a_key_has_a_number_and_leaves_no_trace():
    keys = ApiKeys(["b", "a"])
    assert [keys.number(key) for key in ("a", "b", "c", "")] == [1, 2, None, None]
    assert not any(key in repr(vars(keys)) for key in ("'a'", "'b'"))
    assert given_key({"authorization": "Bearer a b"}) == "a b"


def test_keys_in_files(tmp_path):
    path = tmp_path / "keys"
    path.write_text("one\n\n two \r\n")
    assert read_keys("three, four,", path) == {"one", "two", "three", "four"}
    path.write_text("\n")
    with pytest.raises(UsageError, match="has no key"):
        read_keys(None, path)
    with pytest.raises(UsageError, match="has no key"):
        read_keys("", None)
    with pytest.raises(UsageError, match="No such file"):
        read_keys(None, tmp_path / "none")


def test_everybody_is_let_in_only_if_somebody_says_so():
    models = models_of(hosts=("0.0.0.0",))
    with pytest.raises(UsageError, match="without a key"):
        check_exposure(models.settings, "0.0.0.0", "0.0.0.0")
    assert check_exposure(models_of(hosts=("::1",)).settings, "::1", "::1") == []
    open_to_all = models_of(hosts=("0.0.0.0",), is_insecure=True).settings
    assert check_exposure(open_to_all, "0.0.0.0", "0.0.0.0")
    with_key = models_of(api_keys=frozenset({"a"})).settings
    assert check_exposure(with_key, "ten.example", "10.0.0.1")


def test_bodies_are_counted_while_they_come(monkeypatch):
    monkeypatch.setattr(access, "MOST_BODY", 1000)
    client = _client()
    chunks = (b" " * 100 for _ in range(100))
    answer = client.post("/v1/chat/completions", content=chunks)
    assert answer.status_code == 413
    assert "larger than 1000 B" in answer.text
    assert client.post("/v1/chat/completions", content=b" " * 1001).status_code == 413
    assert client.post("/v1/chat/completions", content=b" " * 999).status_code == 400


def test_a_query_is_short():
    assert _client().get("/slots?" + "a&" * 2048).status_code != 414
    assert _client().get("/slots?" + "a&" * 2049).status_code == 414


def test_while_it_drains_only_metrics_answer():
    models = models_of()
    client = TestClient(application(models), base_url="http://localhost")
    models.is_draining = True
    answer = client.get("/v1/models")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "5"


def test_a_bug_is_told_without_the_words_of_its_error(monkeypatch, capsys):
    client = _client()

    monkeypatch.setattr(access._Body, "receive", lambda body: {}["words of a prompt"])
    answer = client.post("/v1/chat/completions", json={})
    assert answer.status_code == 500
    logged = capsys.readouterr().err
    assert "KeyError" in logged
    assert "in received" in logged
    assert "of a prompt'" not in logged.replace('["words of a prompt"]', "") + answer.text
