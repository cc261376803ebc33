"""The command line: it explains itself, and a mistake gets a sentence, never a traceback."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
import typer
import yaml

from dataservice.cli.main import app
from dataservice.cli.records import DIFFERS
from dataservice.cli.status import STALLED
from tests.cli.support import CommandLine, says
from tests.service.small import IMAGES, SAMPLES, indexed_job, make_corpus, write_job, write_jsonl
from tests.service.support import Ranks, ServiceProcess, serving, wait_for

# Tiles of one fixed size; made in a module that only the service's operator can name.
PROCESSOR = """
from dataservice.decode.processors.base import View, VisionPlan

class Fixed:
    def __init__(self, side=56):
        self.side = side

    def plan_image(self, *, width, height):
        view = View.whole(self.side, self.side)
        return VisionPlan(encoder_tokens=16, llm_tokens=4, views=(view,))

    def plan_video(self, header):
        view = View.whole(self.side, self.side)
        return VisionPlan(encoder_tokens=16, llm_tokens=4, views=(view,), frame_indices=(0,))

def not_a_class():
    pass
"""


# A process that gets ^C while it loads the command's modules.
INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)

class WhileLoading:
    @staticmethod
    def find_spec(name, *_):
        if name == "dataservice.cli.show":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, WhileLoading)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, cli: CommandLine) -> Path:
    """A corpus with its index."""
    made = make_corpus(tmp_path_factory.mktemp("cli") / "corpus")
    cli.ok("index", write_job(made), "--processes", "1")
    (made / "mine").mkdir()
    (made / "mine" / "fixed_tiles.py").write_text(PROCESSOR)
    (made / "mine" / "broken_tiles.py").write_text("class Fixed(\n")
    return made


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with serving(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture
def talking(cli: CommandLine, service: ServiceProcess) -> Iterator[CommandLine]:
    """The command with the shared service as its default."""
    before, cli.service = cli.service, service.address
    yield cli
    cli.service = before


def commands(group: click.Command, *before: str) -> Iterator[tuple[str, ...]]:
    """Every command, as its words."""
    for name, command in getattr(group, "commands", {}).items():
        yield (*before, name)
        yield from commands(command, *before, name)


def written(path: Path, plain: Any) -> Path:
    path.write_text(plain if isinstance(plain, str) else yaml.safe_dump(plain))
    return path


# ---- help and usage -----------------------------------------------------------------------

COMMANDS = list(commands(typer.main.get_command(app)))
GROUPS = {words[:-1] for words in COMMANDS}


def test_help_lists_every_command(cli):
    said = cli.ok("--help").said
    says(said, *(words[0] for words in COMMANDS))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_explains_itself_with_an_example(cli, words):
    said = cli.ok(*words, "--help").said
    says(said, "Example:", f"dataservice {' '.join(words)}")
    if words != ("serve",) and words not in GROUPS:
        says(said, "--json")


def test_the_shell_completes_commands_options_and_jobs(talking, home, monkeypatch):
    monkeypatch.setenv("_DATASERVICE_COMPLETE", "complete_bash")
    talking.ok("job", "submit", write_job(home, job="one-of-mine"))
    known, nobody = f"--service {talking.service}", "--service 127.0.0.1:1"

    def completed(typed: str) -> list[str]:
        words = f"dataservice {typed}"
        environment = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        done = subprocess.run(
            [Path(sys.executable).with_name("dataservice")],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    for typed, offered in (("jo", "job"), ("job sk", "skip"), ("status --wa", "--watch")):
        assert completed(typed) == [offered]
    for typed in (f"explain {known} one", f"job show {known} one"):
        # A service that takes longer than a user waits gives no names; it is asked again.
        assert wait_for(partial(completed, typed)) == ["one-of-mine"]
    assert completed(f"job show {nobody} one") == []
    talking.ok("job", "delete", "one-of-mine")


def test_the_command_s_help_tells_its_exit_statuses(cli):
    said = " ".join(cli.ok("--help").said.split())
    says(
        said,
        f"{DIFFERS} a plan made again, or what is delivered again, is not",
        f"{STALLED} a job is stalled",
    )


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (("statsu",), "Did you mean 'status'"),
        (("status", "--jsno"), "--json"),
        (("index",), "Missing argument"),
        (("explain", "job"), "give one of '--step' and '--sample'"),
        (("explain", "job", "--step", "1", "--sample", "1"), "give one of '--step' and '--sample'"),
        (("explain", "job", "--sample", "-1"), "greater than or equal to 0"),
        (("explain", "job", "--step", "-1"), "greater than or equal to 0"),
        (("explain", "job", "--step", "three"), "valid integer"),
        (("job", "skip", "job"), "Missing argument"),
        (("job", "replay", "job"), "Missing option '--steps'"),
        (("index", "job.yaml", "--processes", "0"), "greater than or equal to 1"),
    ],
)
def test_a_usage_mistake_exits_2_and_says_how(cli, arguments, remedy):
    says(cli.refused(*arguments, code=2), remedy, "--help")


# ---- job files ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "job: [open\nseed: 1\n",
            ["not YAML: line 2, column 5", "Close the bracket", "begins in line 1"],
        ),
        ("job: x\n\tseed: 1\n", ["not YAML: line 2, column 1", "'\\t'"]),
        ("- job\n", ["holds a list", "mapping of keys to values"]),
        ("", ["job: required, and missing", "plan: required, and missing", "reference.md"]),
    ],
    ids=["unclosed", "tab", "list", "empty"],
)
def test_a_job_file_that_is_no_mapping_is_refused_with_the_place(cli, tmp_path, text, parts):
    says(cli.refused("index", written(tmp_path / "job.yaml", text)), *parts)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"epoch": 3}, ["epoch: there is no such key here; did you mean epochs?"]),
        (
            {"plan": {"memory_tokens": 9, "memory_token": 3}},
            ["plan.memory_token: ", "did you mean memory_tokens?"],
        ),
        ({"epochs": "many"}, ["line 3, epochs: it is 'many'; give a whole number of at"]),
        ({"epochs": 0}, ["epochs: it is 0; give a whole number of at least 1"]),
        ({"plan": {"memory_tokens": 0}}, ["memory_tokens is 0; it must be at least 1"]),
        ({"batch": {"samples": 3, "tokens": 4}}, ["samples=3, tokens=4; give exactly one"]),
        ({"job": "a/b"}, ["job: ", "'a/b'"]),
        (
            {"error_budget": {"rate": 2}},
            ["error_budget", "rate is 2.0; it must be from 0 to 1"],
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_wrong_key_or_value_is_named_with_its_place(cli, home, changes, parts):
    path = write_job(home, job="wrong")
    written(path, {**yaml.safe_load(path.read_text()), **changes})
    says(cli.refused("index", path), "1 mistake", *parts)


def test_a_file_that_is_missing_or_no_text_is_named(cli, home, tmp_path):
    says(cli.refused("index", tmp_path / "no.yaml"), "no.yaml cannot be read", "Check the path")
    says(cli.refused("job", "submit", tmp_path), "Is a directory", "Check the path")
    (tmp_path / "tar.yaml").write_bytes(b"\xff\xfe\x00")
    says(cli.refused("job", "submit", tmp_path / "tar.yaml"), "not text in UTF-8", "Give a YAML")
    path = write_job(home, job="wrong", pipeline={"tokenizer": "nowhere"})
    says(cli.refused("index", path), "nowhere' cannot be read", "Give the path of a tokenizer.json")


def test_two_mistakes_are_told_at_once(cli, home):
    says(cli.refused("index", write_job(home, job="wrong", seed="x", epochs=0)), "2 mistakes")


# ---- serve --------------------------------------------------------------------------------


def test_a_wrong_service_config_is_refused_before_anything_starts(cli, tmp_path):
    config = tmp_path / "config.yaml"
    for plain, parts in [
        ({"worker": 3}, ["worker: there is no such key here; did you mean workers?"]),
        ({"workers": 0}, ["line 1, workers: it is 0; give a whole number from 1"]),
        ({"pool": "threads"}, ["pool: it is 'threads'; choose one of ray or local"]),
        ({"listen": "50051"}, ["listen: ", "host:port", "'50051'"]),
        ({"health_listen": "::1:50052"}, ["health_listen: ", "Write [::1]:50052"]),
        ({"workers": 2, "min_workers": 3}, ["min_workers is 3, and there are 2 workers"]),
        (
            {"workers": 3, "worker_metrics_ports": "20200-20201"},
            ["20200-20201 has 2 ports, and this machine has 3 workers", "a range of 6 ports"],
        ),
        (
            {"pool": "local", "ray_runtime_env": {"py_modules": ["code"]}},
            ["there is a ray_runtime_env, and the pool is local", "set PYTHONPATH"],
        ),
        ({"worker_host": "10.0.0.5:1"}, ["worker_host: ", "a host without a port"]),
    ]:
        says(cli.refused("serve", "--config", written(config, plain)), "service config", *parts)
    says(cli.refused("serve", "--config", tmp_path / "no.yaml"), "no.yaml cannot be read")
    assert list(tmp_path.iterdir()) == [config]


def serve(cli: CommandLine, state: Path, *arguments: str | Path) -> str:
    """Start a service that must fail; what it said."""
    listen = () if "--listen" in arguments else ("--listen", "127.0.0.1:0")
    return cli.refused("serve", "--pool", "local", "--state-dir", state, *listen, *arguments)


@pytest.mark.parametrize("key", ["listen", "health_listen", "metrics_listen"])
def test_a_port_in_use_is_named(cli, tmp_path, key):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = written(tmp_path / "config.yaml", {"listen": "127.0.0.1:0", key: address})
        said = cli.refused(
            *("serve", "--pool", "local", "--state-dir", tmp_path / "state", "--config", config)
        )
    says(said, f"cannot listen on {address}", "Stop what uses the port, or choose another")
    assert "starting" not in said  # it is told before workers start and the planner is compiled


def test_an_audit_log_may_lie_in_the_folder_that_a_first_start_makes(cli, tmp_path):
    audit_log = tmp_path / "state" / "audit.jsonl"
    config = written(tmp_path / "config.yaml", {"audit_log": str(audit_log)})
    with socket.socket() as taken:  # by which the start ends early
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        said = serve(cli, tmp_path / "state", "--listen", listen, "--config", config)
    says(said, f"cannot listen on {listen}")
    assert audit_log.exists()


def test_a_state_directory_that_another_service_holds_is_refused(cli, service):
    said = serve(cli, service.home / "state")
    says(
        said,
        str(service.home / "state"),
        "held by another service",
        f"process {service.process.pid}",
    )
    assert "starting" not in said  # no worker of the first is taken over


def test_a_state_directory_that_cannot_be_written_is_refused(cli, tmp_path):
    (tmp_path / "file").touch()
    for state in (tmp_path / "file", tmp_path / "file" / "state", Path("/proc/state")):
        says(serve(cli, state), f"{state} cannot be written", "choose another with --state-dir")


def test_a_damaged_state_file_is_refused_and_left_as_it_is(cli, tmp_path):
    damaged = b"not a database" * 100
    (tmp_path / "state.db").write_bytes(damaged)
    says(serve(cli, tmp_path), "state.db", "The file is damaged", "left as it is", "start anew")
    assert (tmp_path / "state.db").read_bytes() == damaged


# ---- custom processors --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("no.such.module:Fixed", ["cannot be imported", "No module named 'no'"]),
        ("fixed_tiles:Fixt", ["cannot be imported", "no attribute 'Fixt'"]),
        ("fixed_tiles", ["cannot be imported", "`package.module:Class`"]),
        ("broken_tiles:Fixed", ["cannot be imported", "SyntaxError"]),
        ("fixed_tiles:not_a_class", ["no class with plan_image and plan_video"]),
    ],
)
def test_a_custom_processor_that_cannot_be_loaded_is_named(cli, home, tmp_path, path, parts):
    config = written(tmp_path / "config.yaml", {"custom_processors": {"tiles": path}})
    said = cli.refused("serve", "--config", config, path=home / "mine")
    says(said, f"custom processor 'tiles' is '{path}'", *parts)


@pytest.mark.long
def test_a_custom_processor_of_the_config_trains_and_no_path_that_its_operator_does_not_take(
    cli, home, tmp_path, monkeypatch
):
    named = {"custom_processors": {"tiles": "fixed_tiles:Fixed"}, "code_packages": ["others"]}
    config = written(tmp_path / "config.yaml", named)
    corpus = shutil.copytree(home, tmp_path / "corpus")
    monkeypatch.setenv("PYTHONPATH", str(home / "mine"))  # of the service's process

    def job(name: str, **options: int) -> Path:
        vision = {"kind": "custom", "name": name, "options": options}
        return write_job(corpus, pipeline={"tokenizer": "tokenizer", "vision": vision})

    def index(path: Path) -> tuple[str | Path, ...]:
        return ("index", path, "--processes", "1", "--config", config)

    with serving(tmp_path, "local", "--config", str(config)) as own:
        submit = ("job", "submit", "--service", own.address)
        refusal = ["vision processor 'fixed_tiles' is not in the service's config", "has: tiles"]
        says(cli.refused(*index(job("fixed_tiles")), path=corpus / "mine"), *refusal)
        says(cli.refused(*submit, job("fixed_tiles")), *refusal)
        says(
            cli.refused(*submit, job("fixed_tiles:Fixed")),
            "names the code 'fixed_tiles:Fixed' by its import path; this service takes such names "
            "from the packages others",
        )
        path = job("tiles", sides=3)
        says(cli.refused(*index(path), path=corpus / "mine"), "cannot be made with options")
        path = job("tiles", side=28)
        cli.ok(*index(path), path=corpus / "mine")
        cli.ok(*submit, path)
        ranks = Ranks(own.address, 2).start().join()
    assert ranks.visits == dict.fromkeys(range(SAMPLES), 1)
    shapes = [
        tuple(item.shape)
        for shards in ranks.shards.values()
        for shard in shards
        for microbatch in shard.microbatches
        if microbatch.vision is not None
        for item in microbatch.vision.items
    ]
    assert shapes.count((1, 28, 28, 3)) == len(shapes) > IMAGES


def test_a_custom_processor_that_the_service_lacks_is_refused_with_those_it_has(talking, home):
    vision = {"kind": "custom", "name": "tiles"}
    path = write_job(home, job="lacks", pipeline={"tokenizer": "tokenizer", "vision": vision})
    said = talking.refused("job", "submit", path)
    says(said, "vision processor 'tiles' is not in the service's config, which has: none", "Ask")


# ---- jobs and answers ---------------------------------------------------------------------


def test_a_job_without_an_index_is_refused_with_the_command_that_makes_it(talking, home):
    said = talking.refused("job", "submit", write_job(home, job="early", index="not-yet"))
    says(said, "no complete index", "not-yet/images", "dataservice index")
    assert "early" not in talking.ok("job", "list").out


def test_whoever_submits_is_told_what_the_models_own_processor_does_otherwise(talking, tmp_path):
    made = make_corpus(tmp_path)
    saved = {"image_processor_type": "Qwen2VLImageProcessor", "max_pixels": 50176}
    written(made / "tokenizer" / "preprocessor_config.json", json.dumps(saved))
    path = indexed_job(made, job="noted")
    for words in (("submit", path), ("show", "noted")):
        says(talking.ok("job", *words).said, "max_pixels: 50176", "in the job file")
    (status,) = json.loads(talking.ok("job", "show", "noted", "--json").out)
    (note,) = status["notes"]
    assert "max_pixels: 50176" in note
    (status,) = json.loads(talking.ok("job", "submit", path, "--json").out)
    assert status["notes"] == [note]
    talking.ok("job", "delete", "noted")


def test_every_answer_is_also_json(talking, home):
    path = write_job(home)
    (status,) = json.loads(talking.ok("job", "submit", path, "--json").out)
    assert (status["job"], status["samples"], status["state"]) == ("job", SAMPLES, "active")
    Ranks(talking.service, 2).start().join()
    for words in (("job", "list"), ("job", "show", "job")):
        (status, *_) = json.loads(talking.ok(*words, "--json").out)
        assert status["attempt"] == 1
    (status,) = json.loads(talking.ok("status", "job", "--json").out)["jobs"]
    assert (status["attempt"], status["findings"][0]["severity"]) == (1, "info")
    assert json.loads(talking.ok("explain", "job", "--step", "0", "--json").out)["step"] == 0
    assert [each["source"] for each in json.loads(talking.ok("index", path, "--json").out)] == [
        "images",
        "clips",
        "texts",
    ]
    (status,) = json.loads(talking.ok("job", "drain", "job", "--json").out)
    assert status["state"] == "draining"
    (status,) = json.loads(talking.ok("job", "submit", path, "--json").out)
    assert (status["state"], status["notes"][0][:20]) == ("active", "the job was draining")
    talking.ok("job", "delete", "job")
    assert json.loads(talking.ok("job", "list", "--json").out) == []


def test_indexing_into_a_file_draws_no_bars(cli, tmp_path):
    made = make_corpus(tmp_path)
    for words in (("--dry-run",), ()):
        done = cli.ok("index", write_job(made), "--processes", "1", *words)
        assert done.err == ""
        assert "images" in done.out


def test_a_command_that_is_interrupted_while_it_loads_ends_without_a_traceback(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED)
    done = subprocess.run(
        [sys.executable, "-m", "dataservice.cli.main", "index", "job.yaml"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_watching_writes_each_view_into_a_file_as_it_comes(talking, tmp_path):
    command = [sys.executable, "-m", "dataservice.cli.main", "status", "--watch", "--every", "0.2"]
    with (tmp_path / "views").open("wb") as views:
        watching = subprocess.Popen([*command, "--service", talking.service], stdout=views)
    try:
        wait_for(lambda: (tmp_path / "views").read_text().count("2 of 2 workers") >= 3)
    finally:
        watching.kill()
        watching.wait()


def test_what_does_not_exist_is_named_with_the_next_step(talking, home):
    talking.ok("job", "submit", write_job(home, job="known"))
    for words in (("job", "show"), ("job", "drain"), ("job", "delete"), ("status",)):
        says(talking.refused(*words, "nobody"), "no job 'nobody'; registered: known", "job submit")
    said = talking.refused("explain", "known", "--step", "3")
    says(said, "step 3 of job 'known' has not been planned", "dataservice job show known")
    said = talking.refused("job", "submit", write_job(home, job="known", seed=9))
    says(said, "not that of job 'known'", "seed: 0 → 9", "submit the file under another name")
    talking.ok("job", "delete", "known")


@pytest.mark.long
def test_a_job_can_be_submitted_while_its_service_is_starting(cli, service, home):
    service.stop()
    file, command = write_job(home, job="early"), [sys.executable, "-m", "dataservice.cli.main"]
    submitting = subprocess.Popen(
        [*command, "job", "submit", str(file), "--wait-s", "60"],
        env={**os.environ, "DATASERVICE_ADDRESS": service.address},
        stdout=subprocess.DEVNULL,
    )
    with pytest.raises(subprocess.TimeoutExpired):
        submitting.wait(2)
    service.start()
    assert submitting.wait(60) == 0
    cli.ok("job", "delete", "early", "--service", service.address)
    said = cli.refused("job", "submit", file, "--wait-s", "0.2", "--service", "127.0.0.1:9")
    says(said, "no service answers at 127.0.0.1:9", "Check that `dataservice serve` runs there")


def test_a_service_that_does_not_answer_is_named(cli):
    said = cli.refused("status", "--service", "127.0.0.1:9")
    says(said, "no service answers at 127.0.0.1:9", "Check that `dataservice serve` runs there")


def test_commands_that_only_ask_the_service_load_neither_planner_nor_codecs_nor_storage_nor_ray():
    heavy = (
        "numba",
        "scipy",
        "ray",
        "pyarrow",
        "av",
        "torch",
        "fsspec",
        "tenacity",
        "cryptography",
    )
    code = f"import sys, dataservice.cli.main; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.long
@pytest.mark.parametrize(("presses", "under_way_is_kept"), [(1, True), (2, False)])
def test_ctrl_c_keeps_what_an_index_has_under_way_and_a_second_one_gives_it_up(
    home, tmp_path, presses, under_way_is_kept
):
    (tmp_path / "talks").mkdir()
    for k in range(8):
        write_jsonl(tmp_path / "talks" / f"{k}.jsonl", [{"text": "why so " * 90}] * 8000)
    sources = [{"name": "talks", "format": "jsonl", "url": str(tmp_path / "talks" / "*.jsonl")}]
    job = write_job(home, job="talks", sources=sources, index=str(tmp_path / "index"))
    command = [sys.executable, "-m", "dataservice.cli.main", "index", str(job), "--processes", "2"]

    def parts() -> int:
        return len(list((tmp_path / "index" / "talks").glob("part-*.parquet")))

    running = subprocess.Popen(
        command,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(parts, 120)
    before = parts()
    for _ in range(presses):  # a terminal interrupts every process of the command
        os.killpg(running.pid, signal.SIGINT)
        time.sleep(0.2)
    _, said = running.communicate(timeout=120)
    assert running.returncode == 130
    says(said, "under way are finished first", "Interrupt again to give them up")
    assert "leaked" not in said or presses == 2, "of processes that were killed"
    assert before + under_way_is_kept <= parts() < 8
    wait_for(lambda: not group_lives(running.pid))


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
