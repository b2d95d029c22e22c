"""The options of `localkv serve` that are not about the model."""

from __future__ import annotations

import click

from localkv.cli.options import flag, option, quiet_option
from localkv.cli.options.chat import template_options
from localkv.cli.parsing.option_types import Choice, Whole, byte_size_of
from localkv.loader.reasoning_tags import EFFORTS
from localkv.server.client_config import CLIENTS
from localkv.server.settings import REASONING, REASONING_FORMATS

PANEL, ACCESS = "Server", "Access"
PARALLEL = 16

SERVER_OPTIONS: list[click.Parameter] = [
    option(
        "--print-config",
        panel=PANEL,
        type=Choice(CLIENTS),
        metavar="CLIENT",
        help="Print what to paste into the settings of a client, and serve nothing: "
        f"{', '.join(CLIENTS)}.",
    ),
    option(
        "--host",
        panel=PANEL,
        llama_env="HOST",
        metavar="ADDRESS",
        default="127.0.0.1",
        show_default=True,
        help="The address to listen on, or several with commas between them.",
    ),
    option(
        "--port",
        panel=PANEL,
        llama_env="PORT",
        type=Whole(0, 65535),
        metavar="N",
        default=8080,
        show_default=True,
        help="The port to listen on; 0 takes a free one.",
    ),
    option(
        "-a",
        "--alias",
        panel=PANEL,
        llama_env="ALIAS",
        metavar="NAMES",
        help="What clients call the model, names with commas between them. [default: the file's "
        "name]",
    ),
    option(
        "--tags",
        panel=PANEL,
        llama_env="TAGS",
        metavar="NAMES",
        help="What /v1/models says of the model besides, words with commas between them.",
    ),
    option(
        "-np",
        "--parallel",
        panel=PANEL,
        llama_env="N_PARALLEL",
        type=Whole(1),
        metavar="N",
        default=PARALLEL,
        show_default=True,
        help="Requests that run at the same time.",
    ),
    option(
        "--cache-tokens",
        panel=PANEL,
        type=Whole(1),
        metavar="N",
        help="Tokens that the cache holds of all requests together. [default: four contexts, or "
        "what free memory has room for]",
    ),
    option(
        "--cache-size",
        panel=PANEL,
        callback=byte_size_of,
        metavar="SIZE",
        help="The same in bytes, such as 4GiB: as many tokens as fit into them.",
    ),
    option(
        "-n",
        "--predict",
        "n_predict",
        panel=PANEL,
        type=int,
        metavar="N",
        default=-1,
        show_default=True,
        help="Most tokens of an answer where a request says nothing; -1 sets no limit.",
    ),
    option(
        "--queue",
        panel=PANEL,
        type=Whole(0),
        metavar="N",
        default=256,
        show_default=True,
        help="Requests that wait at most; others get status 429.",
    ),
    option(
        "--timeout",
        "-to",
        panel=PANEL,
        llama_env="TIMEOUT",
        type=Whole(1),
        metavar="SECONDS",
        default=600,
        show_default=True,
        help="The longest that a request may take, waiting included.",
    ),
    option(
        "--drain",
        panel=PANEL,
        type=Whole(0),
        metavar="SECONDS",
        default=30,
        show_default=True,
        help="How long running requests may go on after SIGTERM or Ctrl-C; a second one waits for "
        "nobody.",
    ),
    option(
        "--api-key",
        panel=ACCESS,
        metavar="KEYS",
        help="Let in only who has one of these keys, with commas between them. Others on this "
        "machine can see command lines: --api-key-file and LOCALKV_API_KEY hide it.",
    ),
    option(
        "--api-key-file",
        panel=ACCESS,
        metavar="FILE",
        help="A file with such keys, one a line.",
    ),
    option(
        "--ssl-cert-file",
        panel=ACCESS,
        llama_env="SSL_CERT_FILE",
        metavar="FILE",
        help="The certificate for https, in PEM.",
    ),
    option(
        "--ssl-key-file",
        panel=ACCESS,
        llama_env="SSL_KEY_FILE",
        metavar="FILE",
        help="Its private key, in PEM.",
    ),
    flag(
        "--insecure",
        panel=ACCESS,
        help="Let everybody in who reaches --host, without a key.",
    ),
    option(
        "--allowed-hosts",
        panel=ACCESS,
        metavar="NAMES",
        help="Names by which clients call this server, with commas between them. It always goes by "
        "its address, --host, localhost and this machine's name; others are refused unless there "
        "are keys.",
    ),
    option(
        "--cors",
        panel=ACCESS,
        metavar="ORIGINS",
        help="Origins whose pages may call this server, such as https://chat.example, with commas "
        "between them; localhost for those of this machine at any port, * for all. "
        "[default: none]",
    ),
    option(
        "any_model",
        "--any-model/--check-model",
        panel=PANEL,
        type=bool,
        default=True,
        help="Take requests for any model as meant for this one, or refuse those that name "
        "another. [default: any]",
    ),
    option(
        "ui",
        "--ui/--no-ui",
        "--webui/--no-webui",
        panel=PANEL,
        llama_env="UI",
        type=bool,
        default=True,
        help="Serve a page for chats at /, or not. [default: ui]",
    ),
    option(
        "--step-ms",
        panel=PANEL,
        type=click.FloatRange(min=1),
        metavar="MS",
        help="Milliseconds that a step of all requests should take: prompts get what is left of "
        "it. [default: 100 on a CPU, 30 on a GPU]",
    ),
    *template_options(PANEL),
    option(
        "-rea",
        "--reasoning",
        panel=PANEL,
        llama_env="REASONING",
        type=Choice(REASONING),
        default="auto",
        show_default=True,
        help="Whether the model reasons before it answers, where a request does not say so. auto: "
        "if its template has llama-server's variable for it, enable_thinking.",
    ),
    option(
        "--reasoning-format",
        panel=PANEL,
        llama_env="THINK",
        type=Choice(REASONING_FORMATS),
        default="auto",
        show_default=True,
        help="Where the reasoning is, if a request does not say so: none leaves it in the text, "
        "deepseek and auto put it into reasoning_content.",
    ),
    option(
        "--reasoning-budget",
        panel=PANEL,
        llama_env="THINK_BUDGET",
        type=Whole(-1),
        metavar="N",
        default=-1,
        show_default=True,
        help="Most tokens of reasoning, where a request does not say so; -1 sets no limit.",
    ),
    option(
        "--reasoning-effort",
        panel=PANEL,
        type=Choice(EFFORTS),
        help="How much the model reasons, where a request does not say so: none switches it off, "
        "the others are for templates that read reasoning_effort, as gpt-oss's.",
    ),
    option(
        "--prefill-assistant/--no-prefill-assistant",
        "prefill_assistant",
        panel=PANEL,
        llama_env="PREFILL_ASSISTANT",
        type=bool,
        default=True,
        help="Go on with an assistant's message that is the last one, or answer it. [default: go "
        "on]",
    ),
    option(
        "--metrics/--no-metrics",
        "has_metrics",
        panel=PANEL,
        type=bool,
        default=True,
        help="Whether /metrics tells Prometheus what the server does. [default: metrics]",
    ),
    option(
        "--slots/--no-slots",
        "has_slots",
        panel=PANEL,
        type=bool,
        default=True,
        help="Whether /slots tells what runs.  [default: slots]",
    ),
    option(
        "--log-file",
        panel=PANEL,
        llama_env="LOG_FILE",
        metavar="FILE",
        help="A file for a line of JSON about each request, - for stderr: path, status, "
        "milliseconds, tokens; never texts or keys. [default: none]",
    ),
    option(
        "--state-dir",
        "--slot-save-path",
        panel=PANEL,
        metavar="FOLDER",
        help="Where /slots/ID?action=save and restore keep their files. [default: none]",
    ),
    quiet_option("Say nothing on stderr but warnings and errors."),
    flag(
        "--cache-per-key",
        panel=ACCESS,
        help="Requests share evaluated tokens only with those of the same key: nobody learns "
        "by the time of an answer what others asked.",
    ),
]
