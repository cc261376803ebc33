"""Tokens from the command line, and the config that keeps a service to whom it is for."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dataservice import app
from dataservice.cli.connection import token_giver
from dataservice.core.errors import SpecError
from dataservice.core.tokens import identify
from dataservice.jobs.job_file import read_job
from dataservice.operate.config import read_config
from dataservice.operate.tokens_file import read_tokens
from tests.cli.support import CommandLine

DEMO_JOB = Path(__file__).resolve().parents[2] / "demo" / "job.yaml"


def test_a_token_is_printed_once_with_the_entry_that_lets_it_in(
    cli: CommandLine, tmp_path: Path
) -> None:
    made = cli.ok("token", "new", "--team", "vision", "--role", "reader", "--expires", "2999-01-01")
    token, _, entry = made.out.partition("\n")
    assert token.startswith("dst_")
    assert token not in entry + made.err
    (tmp_path / "tokens.yaml").write_text(entry)
    who = identify(read_tokens(tmp_path / "tokens.yaml"), token, 0.0)
    assert (who.team, who.role) == ("vision", "reader")
    again = json.loads(cli.ok("token", "new", "--role", "admin", "--name", "ops", "--json").out)
    assert again["entry"]["name"] == "ops"
    assert again["token"] != token


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--role", "team"), "role team needs a team"),
        (("--team", "a/b"), "team: "),
        (("--team", "a", "--role", "boss"), "role: "),
        (("--team", "a", "--expires", "soon"), "cannot expire at 'soon'"),
        (("--team", "a", "--expires", "2020-01-01"), "in the past"),
    ],
)
def test_a_token_that_cannot_be_is_not_made(
    cli: CommandLine, arguments: tuple[str, ...], told: str
) -> None:
    assert told in cli.refused("token", "new", *arguments)


def test_files_of_a_connection_that_cannot_be_used_are_named(
    cli: CommandLine, tmp_path: Path
) -> None:
    absent = tmp_path / "absent"
    assert "absent cannot be read" in cli.refused("status", "--ca-file", absent)
    assert "absent cannot be read" in cli.refused("status", "--token-file", absent)
    (tmp_path / "two").write_text("one token\nand another")
    assert "one token and nothing else" in cli.refused("status", "--token-file", tmp_path / "two")
    assert "Give both for mutual TLS" in cli.refused("status", "--key-file", tmp_path / "two")


@pytest.mark.parametrize("token", ["two words", "tök", "two\nlines"])
def test_a_variable_that_holds_no_token_is_named(
    monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    give = token_giver(None)
    monkeypatch.setenv("DATASERVICE_TOKEN", token)
    with pytest.raises(SpecError, match="DATASERVICE_TOKEN must hold one token and nothing else"):
        give()
    monkeypatch.setenv("DATASERVICE_TOKEN", " dst_a\n")
    assert give() == "dst_a"
    monkeypatch.setenv("DATASERVICE_TOKEN", "")
    assert give() is None


@pytest.mark.parametrize("flag", ["--from-step", "--step", "--sample", "--attempt"])
def test_a_number_that_no_request_can_carry_is_a_mistake_in_the_command(
    cli: CommandLine, flag: str
) -> None:
    beyond = str(2**63)
    commands = {
        "--from-step": ("job", "mixture", "a", "--weight", "b=1"),
        "--step": ("explain", "a"),
        "--sample": ("explain", "a"),
        "--attempt": ("explain", "a", "--step", "1"),
    }
    assert flag in cli.refused(*commands[flag], flag, beyond, code=2)


def test_steps_that_no_request_can_carry_are_refused(cli: CommandLine) -> None:
    beyond = str(2**63)
    assert "beyond the greatest step" in cli.refused("job", "skip", "a", beyond)
    assert "beyond the greatest step" in cli.refused("job", "replay", "a", "--steps", f"0-{beyond}")


@pytest.mark.parametrize(
    ("plain", "missing"),
    [
        ({"listen": "0.0.0.0:50051"}, "without tokens_file and tls"),
        ({"listen": "127.0.0.1:0", "worker_host": "10.0.0.7"}, "at 10.0.0.7 without"),
        ({"listen": "[::]:1", "tokens_file": "t", "allowed_roots": "any"}, "without tls"),
    ],
)
def test_a_service_for_other_hosts_wants_tokens_and_tls_or_a_word_that_it_needs_none(
    plain: dict[str, Any], missing: str
) -> None:
    with pytest.raises(SpecError, match=f"{missing}.*insecure: true"):
        read_config(None, plain)
    assert read_config(None, {**plain, "insecure": True}).insecure
    secured = {
        "tokens_file": "t",
        "tls": {"certificate_file": "c", "key_file": "k"},
        "allowed_roots": ["/data"],
    }
    assert not read_config(None, {**plain, **secured}).insecure


def test_a_service_of_several_teams_says_what_their_jobs_may_name() -> None:
    with pytest.raises(SpecError, match=r"allowed_roots.*\[/data/\{team\}\].*the word any"):
        read_config(None, {"tokens_file": "t"})
    with pytest.raises(SpecError, match="allowed_roots"):
        read_config(None, {"tokens_file": "t", "allowed_roots": "all"})
    assert read_config(None, {"tokens_file": "t", "allowed_roots": "any"}).roots is None
    given = read_config(None, {"tokens_file": "t", "allowed_roots": ["/data"]})
    assert given.roots == ["/data"]
    assert read_config(None, {}).roots is None


@pytest.mark.parametrize(
    ("plain", "packages"),
    [
        ({}, None),
        ({"insecure": True}, []),
        ({"tokens_file": "t", "allowed_roots": "any"}, []),
        ({"tokens_file": "t", "allowed_roots": "any", "code_packages": "any"}, None),
        ({"insecure": True, "code_packages": ["ours"]}, ["ours"]),
    ],
)
def test_only_on_ones_own_machine_may_jobs_name_any_code_unless_the_operator_says_so(
    plain: dict[str, Any], packages: list[str] | None
) -> None:
    assert read_config(None, plain).packages == packages


def test_a_laptop_needs_nothing_of_it() -> None:
    config = read_config(None, {})
    assert (config.tokens_file, config.tls, config.insecure) == (None, None, False)


def test_teams_have_names_and_shares_that_make_sense() -> None:
    assert read_config(None, {"teams": {"vision": {"weight": 2}}}).teams["vision"].weight == 2
    for teams, told in [
        ({"a/b": {}}, "teams"),
        ({"a": {"weight": 0}}, "weight is 0"),
        ({"a": {"wait": 1}}, "did you mean weight"),
    ]:
        with pytest.raises(SpecError, match=told):
            read_config(None, {"teams": teams})


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]\n" for n in range(1, 12)
)


MERGED = "a0: &a0 {x: 1}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12)
)
LARGE = "a: b\nc: [1, {}]\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (MERGED, "values once its aliases are written out; at most 100,000"),
        (
            LARGE.format("9" * 5000),
            "line 2, column 8: a whole number of 5,000 char.* above 64 bits",
        ),
        (LARGE.format("0x" + "f" * 60_000), "line 2, column 8: a whole number of 60,002"),
        (LARGE.format("1:" * 60_000 + "1"), "line 2, column 8: a whole number of 120,001"),
        (LARGE.format(2**64), "line 2, column 8: a whole number of 20 characters, above 64 bits"),
        (LARGE.format("!!bool 3"), "line 2, column 8: '3' is no bool; quote it if it is a text"),
        (BOMB, "values once its aliases are written out; at most 100,000"),
        ("a: &a [*a]\n", "nested too deeply"),
        ("[" * 5000, "nested too deeply"),
        ("when: 2026-99-99\n", "line 1, column 7: '2026-99-99' is no timestamp"),
    ],
    ids=[
        "merges",
        "digits",
        "hex",
        "base 60",
        "2^64",
        "bool",
        *("aliases", "itself", "deep", "date"),
    ],
)
def test_a_job_file_that_would_fill_the_memory_is_refused(text: str, told: str) -> None:
    with pytest.raises(SpecError, match=told):
        read_job(text, Path("/"))


def test_a_secret_that_whoever_is_on_the_machine_may_read_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(32))
    config = read_config(None, {"secret_file": str(secret)})
    for mode in (0o644, 0o602):
        secret.chmod(mode)
        with pytest.raises(SpecError, match=r"whoever is on this machine.*chmod 600"):
            app.shared_secret(config)
    for mode in (0o600, 0o440):
        secret.chmod(mode)
        assert app.shared_secret(config) == bytes(32)


def test_a_source_s_name_can_be_shown() -> None:
    plain = yaml.safe_load(DEMO_JOB.read_text())
    for name in ("a\x1b[2J", "\u202ea", "x" * 101):
        plain["sources"][0]["name"] = name
        with pytest.raises(SpecError, match="must be 1 to 100 characters that can be printed"):
            read_job(yaml.safe_dump(plain, allow_unicode=True), Path("/"))


@pytest.mark.parametrize("collector", ["otel:4318", "grpc://otel:4317", "http://"])
def test_a_collector_to_which_no_span_could_be_sent_is_refused(collector: str) -> None:
    with pytest.raises(SpecError, match=r"traces.*must be a URL of http or https"):
        read_config(None, {"traces": collector})
    assert read_config(None, {"traces": "https://otel:4318"}).traces == "https://otel:4318"
