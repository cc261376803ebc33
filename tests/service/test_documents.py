"""README and `docs/`, page after page as a reader would: files are written, commands are run.

The reader sits in one folder with the data that the front page describes. A block that cannot run
here gives a reason, and its commands are still held against what they call.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
import typer
import yaml

from dataservice.cli.main import app
from dataservice.jobs.cost_file import read_cost_file
from dataservice.jobs.job_file import JobFile, read_job
from dataservice.jobs.layout_files import read_cluster, read_model
from dataservice.operate.config import read_config
from tests.documents import PAGES, ROOT, Block, blocks
from tests.service.support import ServiceProcess

FRONT_PAGE = PAGES[0]
# Trainers first: other pages drain the front page's job.
OTHER_PAGES = sorted(PAGES[1:], key=lambda page: (page.name != "trainers.md", page))
ADDRESS = "127.0.0.1:50051"  # in the documents; tests serve at a port that is free
SECRETS = "/etc/dataservice"  # in the documents; here a folder of the reader
LIMIT_S = 300
JOB = "vlm-sft.yaml"
SHORT = 3000  # characters of a record

pytestmark = pytest.mark.long


@dataclass
class Reader:
    """Whoever follows the documents in the folder `home`."""

    home: Path
    service: ServiceProcess

    def follow(self, page: Path) -> None:
        """Do what a page says, block by block."""
        for block in blocks(page):
            try:
                self._do(block)
            except subprocess.CalledProcessError as error:
                pytest.fail(f"{block}: {error.cmd}\n{error.stdout}")

    def _do(self, block: Block) -> None:
        text = block.text.replace(ADDRESS, self.address).replace(SECRETS, str(self.home / "etc"))
        if block.file_name:
            (self.home / block.file_name).write_text(text)
        if block.language == "yaml":
            self._check_yaml(text, block.file_name)
        elif block.language == "python":
            compile(text, str(block), "exec")
            if not block.file_name and block.not_run is None:
                self._run([sys.executable, "-c", text])
        elif block.language == "sh":
            for command in commands_of(block):
                check_command(command)
                if block.not_run is None:
                    self._command(command)

    def _command(self, command: str) -> None:
        if not command.startswith("dataservice serve "):
            self._run(["bash", "-euo", "pipefail", "-c", command])
            return
        if self.service.process is not None:
            self.service.stop()
        flags = shlex.split(command.rstrip("& "))[2:]
        self.service.flags = (*flags, "--metrics-listen", "127.0.0.1:0")
        self.service.start()

    def _run(self, words: list[str]) -> None:
        subprocess.run(
            words,
            cwd=self.home,
            env={
                **os.environ,
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "protos", self.home))),
                "DATASERVICE_ADDRESS": self.address,
                "PET_STANDALONE": "1",  # torchrun: ranks meet at a port that is free
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=True,
        )

    def _check_yaml(self, text: str, file_name: str) -> None:
        """Parts of a job file are read within the front page's, all else by what it holds."""
        plain = yaml.safe_load(text)
        path = self.home / (file_name or "part.yaml")
        path.write_text(text)
        if plain.keys() <= JobFile.model_fields.keys():
            whole = {**yaml.safe_load((self.home / JOB).read_text()), **plain}
            read_job(yaml.safe_dump(whole), self.home)
        elif plain.keys() == {"cost"}:
            read_cost_file(path)
        elif plain.keys() & {"decoder", "frozen"}:
            read_model(path)
        elif "groups" in plain:
            read_cluster(path)
        else:
            read_config(path, {})

    @property
    def address(self) -> str:
        return self.service.address or ADDRESS


def commands_of(block: Block) -> list[str]:
    """The commands of a block, without comments."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [line for each in lines if (line := each.partition(" #")[0].strip())]


def check_command(command: str) -> None:
    """Hold a command against what it calls: it exists, and takes these arguments."""
    program, *words = shlex.split(command.rstrip("& "))
    if program == "dataservice":
        called = typer.main.get_command(app)
        while hasattr(called, "commands"):
            called = called.commands[words.pop(0)]
        called.make_context(command, words)
    elif program == "make":
        targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[0] in targets, command
    elif program == "pip":
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert set(re.findall(r"\[(\w+)\]", command)) <= set(known["optional-dependencies"]), (
            command
        )
        assert "." in [word.partition("[")[0] for word in words], f"{command}: not on the index"
    elif program == "kubectl":
        assert words[:2] == ["apply", "-k"], f"{command}: deploy/README.md has the others"
        assert (ROOT / words[2] / "kustomization.yaml").exists(), command
    elif program == "torchrun":
        assert "-m" not in words or find_module(words[words.index("-m") + 1]).exists(), command
    else:
        assert shutil.which(program), command


def find_module(name: str) -> Path:
    return ROOT.joinpath(*name.split(".")).with_suffix(".py")


def tiny_model(folder: Path) -> None:
    """A Qwen2.5-VL of random weights, for the reader's own."""
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2VLImageProcessorPil,
    )

    size = {"hidden_size": 32, "intermediate_size": 64}
    mrope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": mrope}
    config = Qwen2_5_VLConfig(
        text_config={**size, **heads, "vocab_size": 4096, "num_hidden_layers": 2},
        vision_config={**size, "depth": 1, "num_heads": 2, "out_hidden_size": 32},
    )
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    Qwen2VLImageProcessorPil().save_pretrained(folder)


@pytest.fixture(scope="module")
def reader(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """A reader who has followed the front page, with the data that its job file names."""
    home = tmp_path_factory.mktemp("reader")
    raw, data = corpus / "corpus", home / "data"
    shutil.copytree(raw / "parquet", data / "ocr")
    shutil.copytree(corpus / "tokenizer", home / "tokenizer")
    for number, tar in enumerate(sorted((raw / "images").glob("*.tar"))):
        shutil.copy(tar, data / f"captions-{number:03d}.tar")
    # Attention over the few texts of thousands of tokens would be most of what ranks compute here.
    texts = [path.read_text().splitlines(True) for path in sorted((raw / "text").glob("*.jsonl"))]
    short = [line for lines in texts for line in lines if len(line) < SHORT]
    (data / "chat.jsonl").write_text("".join(short))
    tiny_model(home / "model")
    (home / "etc").mkdir()
    (home / "etc" / "token").write_text("the-token-of-a-team")
    trustme.CA().cert_pem.write_to_path(home / "etc" / "ca.crt")
    service = ServiceProcess(home=home)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        try:
            reader = Reader(home=home, service=service)
            reader.follow(FRONT_PAGE)
            yield reader
        finally:
            if service.process is not None:
                service.end()


def test_the_front_page_trains_to_the_end_of_the_data(reader):
    assert (reader.home / "checkpoint.pt").exists()
    shown = reader.service.cli("job", "list", "--json").stdout
    assert '"committed_step": 0' in shown  # two epochs of this little data are one batch of 256


def test_its_job_file_shows_every_format(reader):
    spec = read_job((reader.home / JOB).read_text(), reader.home)
    assert [source.format for source in spec.sources] == ["webdataset", "parquet", "jsonl"]


@pytest.mark.parametrize("page", OTHER_PAGES, ids=lambda page: page.name)
def test_a_page_can_be_followed(reader, page):
    reader.follow(page)
